"""Record what real clients send: ``make recordings``, or ``python -m tests.agents.record [CLIENT …]``.

The clients are installed with npm and pip, in the versions of ``versions.toml``, into ~/.cache/radixkv-agents (or
``--folder``). Each one runs against a server of this process on the loopback, which answers as the provider would. Its
environment has no variable of ours, a proxy that is no proxy for every other address, and a home of its own. What it
has sent is minimised (``minimise.py``) and written to ``recordings/``. Nothing is written by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.agents.answers import WRITERS, Answer, Call, Ids
from tests.agents.clients import APART, CLIENTS, NOTES, Client, Folders
from tests.agents.minimise import Places, minimised
from tests.agents.recordings import MODEL, api_of, is_structured, num_spoken, save
from tests.waiting import eventually

HERE = Path(__file__).parent
VERSIONS: Mapping[str, Mapping[str, str]] = tomllib.loads((HERE / "versions.toml").read_text("utf-8"))
RUN_S = 180
"""Seconds that one process of a client may take."""
INSTALL_S = 1800
NO_THREADS = {
    "type": "error",
    "error": {
        "type": "invalid_request_error",
        "message": "thread: conversations are not stored here",
        "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    },
}
"""The answer of a server that stores no conversations to a request that continues one: Anthropic's SDK then sends the
whole conversation instead."""


# --- the server


class Recorder:
    """A server that records requests, and answers as the provider would.

    It stores no conversations, as radixkv doesn't: which answer is next follows from how often the model has spoken in
    the conversation so far.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.requests: list[dict[str, Any]] = []
        self._answers = answers
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"]
        app = Starlette(routes=[Route("/{path:path}", self._take, methods=methods)])
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, name="recorder", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        eventually(lambda: self._server.started, "the recorder's start")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    @property
    def url(self) -> str:
        """Its base URL."""
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    async def _take(self, request: Request) -> Response:
        content = await request.body()
        body = json.loads(content) if content else None
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        has_state = isinstance(body, dict) and bool(body.get("thread"))
        answer = None if has_state else self._answer(path, body, content.decode())
        self.requests.append(
            {
                "method": request.method,
                "path": path,
                "headers": dict(request.headers),
                "body": body,
                "answer": None if answer is None else answer.document(),
                "status": 400 if has_state else 200,
            }
        )
        if has_state:
            return JSONResponse(NO_THREADS, 400)
        if answer is None:
            return _other(request.method, path, is_google="x-goog-api-key" in request.headers)
        ids, api = Ids(len(self.requests)), api_of(path)
        more = {"is_stream": ":stream" in path} if api == "contents" else {}
        kind, text = WRITERS[api](answer, body, ids, **more)
        return Response(text, media_type=kind)

    def _answer(self, path: str, body: Any, content: str) -> Answer | None:
        """Return what the model says, or None if the request doesn't ask the model."""
        api = api_of(path)
        if api == "other":
            return None
        schema, forced = _schema(body), _forced(body)
        if schema is not None or is_structured(body):
            return Answer(json.dumps(_instance(schema or {"properties": {"page": {"type": "integer"}}})))
        if forced is not None:
            return Answer("", (forced,))
        if not body.get("tools"):
            return Answer("Pins and forks")
        if APART in content:
            return Answer("It has two lines.")
        number = num_spoken(api, body)
        return self._answers[number] if number < len(self._answers) else Answer("That is all.")


def _schema(body: Mapping[str, Any]) -> Any:
    """Return the JSON schema that the answer must have; None if there is none."""
    config = body.get("generationConfig") or {}
    formats = (
        (body.get("response_format") or {}).get("json_schema"),
        (body.get("text") or {}).get("format"),
        (body.get("output_config") or {}).get("format"),
        body.get("output_format"),
    )
    schemas = [each.get("schema") for each in formats if each]
    schemas += [config.get(name) for name in ("responseJsonSchema", "responseSchema", "response_schema")]
    return next((each for each in schemas if each), None)


def _forced(body: Mapping[str, Any]) -> Call | None:
    """Return a call of the tool that the answer must call; None if it may be text. Of several tools, the first."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    config = (body.get("toolConfig") or {}).get("functionCallingConfig") or {}
    if kind not in ("required", "any", "function", "tool") and config.get("mode") != "ANY":
        return None
    functions = [each for tool in body["tools"] for each in _functions(tool)]
    names = (
        [choice.get("name"), (choice.get("function") or {}).get("name")] if isinstance(choice, dict) else []
    )
    names += config.get("allowedFunctionNames") or []
    name, schema = next((each for each in functions if each[0] in names), functions[0])
    return Call(name, _instance(schema))


def _functions(tool: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the functions of a tool, in the form of any API: their names, and the schemas of their arguments."""
    if "functionDeclarations" in tool:
        found = tool["functionDeclarations"]
        return [
            (each["name"], each.get("parametersJsonSchema") or each.get("parameters") or {}) for each in found
        ]
    function = tool.get("function", tool)
    return [(function["name"], function.get("parameters") or function.get("input_schema") or {})]


def _instance(schema: Mapping[str, Any]) -> Any:
    """Return the simplest value of a schema."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = str(schema.get("type", "object")).lower()
    if kind == "object":
        return {name: _instance(each) for name, each in schema.get("properties", {}).items()}
    return {"array": [], "string": "pins", "boolean": True, "null": None}.get(kind, 12)


def _other(method: str, path: str, *, is_google: bool) -> Response:
    """Return the answer to a request that doesn't ask the model."""
    plain = path.partition("?")[0]
    if plain.endswith(("/count_tokens", "/input_tokens")):
        return JSONResponse({"input_tokens": 120, "object": "response.input_tokens"})
    if plain.endswith(":countTokens"):
        return JSONResponse({"totalTokens": 120})
    if method == "GET" and "/models" in plain and is_google:
        limits = {"inputTokenLimit": 1_048_576, "outputTokenLimit": 65_536}
        model = {"name": f"models/{MODEL}", "supportedGenerationMethods": ["generateContent"], **limits}
        return JSONResponse({"models": [model]} if plain.endswith("/models") else model)
    if method == "GET" and plain == "/v1/models":
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "radixkv"}
        named = {**model, "type": "model", "display_name": MODEL, "created_at": "2026-01-01T00:00:00Z"}
        data = {"object": "list", "data": [named], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        return JSONResponse(data)
    return JSONResponse({"error": {"message": f"no {plain}", "type": "not_found_error"}}, 404)


# --- the clients


def install(folder: Path) -> None:
    """Install all clients. Takes minutes, and about 2 GB."""
    wanted = json.dumps(VERSIONS)
    done = folder / "installed.json"
    if done.exists() and done.read_text("utf-8") == wanted:
        return
    for name, versions in VERSIONS.items():
        place = folder / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        print(f"installing {', '.join(versions)} into {place} ...", flush=True)
        if name == "npm":
            package = {"private": True, "dependencies": versions}
            (place / "package.json").write_text(json.dumps(package), "utf-8")
            _ran(["npm", "install", "--no-audit", "--no-fund"], place, os.environ, INSTALL_S)
            continue
        _ran([sys.executable, "-m", "venv", str(place)], folder, os.environ, INSTALL_S)
        pinned = [f"{package}=={version}" for package, version in versions.items()]
        pip = [str(place / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _ran([*pip, *pinned], folder, os.environ, INSTALL_S)
    done.write_text(wanted, "utf-8")


def record(name: str, folder: Path) -> dict[str, Any]:
    """Run a client, and return its recording, minimised."""
    client, root = CLIENTS[name], folder / "runs" / name
    shutil.rmtree(root, ignore_errors=True)
    folders = Folders(root / "home", root / "project", folder)
    folders.home.mkdir(parents=True)
    folders.work.mkdir()
    (folders.work / "notes.txt").write_text(NOTES, "utf-8")
    for script in (HERE / "node").glob("*.mjs"):
        shutil.copy(script, folder / "npm")
    with Recorder(_placed(client, folders.work)) as recorder:
        url = recorder.url
        for number, process in enumerate(client.processes(url, folders)):
            environment = {**_environment(folders), **process.environment}
            output = _ran(process.arguments, folders.work, environment, RUN_S)
            (root / f"output-{number}.txt").write_text(output, "utf-8")
        requests = list(recorder.requests)
    (root / "requests.json").write_text(json.dumps(requests, indent=1), "utf-8")
    version = next(each[client.package] for each in VERSIONS.values() if client.package in each)
    places = Places(str(folders.home), str(folders.work), str(folder), url, client.model)
    return {
        "client": client.shown,
        "version": f"{client.package} {version}",
        "requests": minimised(requests, places),
    }


def _placed(client: Client, work: Path) -> list[Answer]:
    """Return a client's answers with the path of the folder in which it works."""
    return [
        Answer(answer.text, tuple(Call(call.name, _with_path(call.arguments, work)) for call in answer.calls))
        for answer in client.answers()
    ]


def _with_path(arguments: Mapping[str, Any], work: Path) -> dict[str, Any]:
    return {
        name: value.replace("WORK", str(work)) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


def _environment(folders: Folders) -> dict[str, str]:
    """Return what a client finds in its environment. Nothing of ours is in it; only the loopback can be reached."""
    nowhere = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), nowhere)
    local = "127.0.0.1,localhost"
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folders.home),
        "XDG_CONFIG_HOME": str(folders.home / ".config"),
        "XDG_CACHE_HOME": str(folders.home / ".cache"),
        "XDG_DATA_HOME": str(folders.home / ".local/share"),
        "XDG_STATE_HOME": str(folders.home / ".local/state"),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TZ": "UTC",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": local,
        "no_proxy": local,
        **proxies,
    }


def _ran(arguments: Sequence[str], work: Path, environment: Mapping[str, str], limit_s: float) -> str:
    """Run a process to its end, and return what it printed. Raises RuntimeError if it fails or takes too long."""
    process = subprocess.Popen(
        list(arguments), cwd=work, env=dict(environment), stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise RuntimeError(f"{arguments[0]} took more than {limit_s} s:\n{output[-4000:]}") from None
    if process.returncode:
        raise RuntimeError(f"{arguments[0]} failed with {process.returncode}:\n{output[-4000:]}")
    return output


def main() -> None:
    """Record all clients, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"one of {', '.join(CLIENTS)}")
    parser.add_argument(
        "--folder", type=Path, default=cache / "radixkv-agents", help="where clients are installed"
    )
    given = parser.parse_args()
    if unknown := [name for name in given.clients if name not in CLIENTS]:
        parser.error(f"no such client: {', '.join(unknown)}")
    install(given.folder)
    for name in given.clients or CLIENTS:
        document = record(name, given.folder)
        num_turns = sum(each["answer"] is not None for each in document["requests"])
        size = save(name, document)
        print(f"{name}: {len(document['requests'])} requests, {num_turns} of the model, {size} bytes")


if __name__ == "__main__":
    main()
