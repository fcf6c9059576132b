"""The recordings, and what their requests use: read by the tests, and by the page of the documentation about clients.

A recording is one client's conversation: the requests that it really sent, and what the recorder answered. It is
gzipped JSON in ``recordings/``. Everything here reads plain JSON, so it needs no library.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.agents.answers import Answer

FOLDER = Path(__file__).parent / "recordings"
REFUSED = Path(__file__).parent / "refused.json"
MODEL = "radixkv-demo"
KEY = "KEY"
"""Stands in a recording for the key of the API."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """One request of a client.

    - ``path``: with its query.
    - ``headers``: as the client sent them, with KEY for its key, and without those of the connection.
    - ``body``: None for a request without one.
    - ``answer``: what the recorder answered, if the model was asked; None for lists, counts and refusals.
    - ``status``: 200, or 400 for what a server that stores no conversations can't do.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    answer: Answer | None
    status: int = 200

    @property
    def api(self) -> str:
        """Which API it speaks: ``chat``, ``responses``, ``messages``, ``contents``, or ``other``."""
        return api_of(self.path)

    @property
    def is_stream(self) -> bool:
        """Whether the answer is to be a stream."""
        return ":streamGenerateContent" in self.path or bool((self.body or {}).get("stream"))


@dataclass(frozen=True)
class Recording:
    """One client's conversation. ``name``: of its file; ``client``, ``version``: what was run."""

    name: str
    client: str
    version: str
    requests: tuple[Request, ...]

    @property
    def turns(self) -> tuple[int, ...]:
        """The numbers of the requests that go on with the conversation: the model is shown tools, and may answer."""
        return tuple(
            index
            for index, each in enumerate(self.requests)
            if each.answer is not None and has_tools(each) and not forces(each.body)
        )


def api_of(path: str) -> str:
    """Return the API of a path."""
    plain = path.partition("?")[0]
    if plain.endswith("/chat/completions"):
        return "chat"
    if plain.endswith("/responses"):
        return "responses"
    if plain.endswith("/messages"):
        return "messages"
    return "contents" if plain.endswith((":generateContent", ":streamGenerateContent")) else "other"


def names() -> list[str]:
    """Return the names of all recordings."""
    return sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))


@cache
def load(name: str) -> Recording:
    """Return a recording."""
    document = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    requests = tuple(
        Request(
            each["method"],
            each["path"],
            each["headers"],
            each["body"],
            None if each["answer"] is None else Answer.of(each["answer"]),
            each["status"],
        )
        for each in document["requests"]
    )
    return Recording(name, document["client"], document["version"], requests)


def save(name: str, document: Json) -> int:
    """Write a recording, the same bytes for the same document. Returns how many bytes it has."""
    text = json.dumps(document, ensure_ascii=False, indent=1, sort_keys=False)
    packed = gzip.compress(text.encode(), mtime=0)
    (FOLDER / f"{name}.json.gz").write_bytes(packed)
    return len(packed)


def refused() -> dict[str, list[dict[str, Any]]]:
    """Return what the service refuses today, by the name of the recording: see the README."""
    found: dict[str, list[dict[str, Any]]] = json.loads(REFUSED.read_text("utf-8"))
    return found


# --- what requests use


def has_tools(request: Request) -> bool:
    """Whether the model is shown tools."""
    return bool((request.body or {}).get("tools"))


def num_spoken(api: str, body: Json) -> int:
    """Return how often the model has spoken in a conversation: its messages and calls in a row are one answer."""
    name = {"chat": "messages", "messages": "messages", "responses": "input", "contents": "contents"}[api]
    turns = body[name] if isinstance(body[name], list) else []
    called = ("function_call", "item_reference")
    spoke = [each.get("role") in ("assistant", "model") or each.get("type") in called for each in turns]
    return sum(now and not before for before, now in zip([False, *spoke], spoke, strict=False))


def objects(value: Any) -> Iterator[Json]:
    """Yield every JSON object in a value, outer ones first."""
    if isinstance(value, Mapping):
        yield value
        value = value.values()
    elif not isinstance(value, list):
        return
    for each in value:
        yield from objects(each)


def _has(body: Any, *keys: str) -> bool:
    return any(each.get(key) is not None for each in objects(body) for key in keys)


def is_structured(body: Json) -> bool:
    """Whether an answer must be JSON."""
    config = body.get("generationConfig") or {}
    is_json = "application/json" in (config.get("responseMimeType"), config.get("response_mime_type"))
    formats = (
        body.get("response_format"),
        (body.get("text") or {}).get("format"),
        (body.get("output_config") or {}).get("format"),
        body.get("output_format"),
    )
    return is_json or any(str((each or {}).get("type", "text")) != "text" for each in formats)


def _has_system(request: Request) -> bool:
    body = request.body or {}
    turns = body.get("messages") or (body.get("input") if isinstance(body.get("input"), list) else []) or []
    roles = {each.get("role") for each in turns if isinstance(each, Mapping)}
    named = ("system", "instructions", "systemInstruction", "system_instruction")
    return bool(roles & {"system", "developer"}) or any(body.get(name) for name in named)


def _asks_usage(request: Request) -> bool:
    if request.answer is None:
        return False
    options = (request.body or {}).get("stream_options") or {}
    return request.api != "chat" or not request.is_stream or bool(options.get("include_usage"))


_CACHING = (
    "cache_control",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_breakpoint",
    "cachedContent",
)


def features(request: Request) -> set[str]:
    """Return the features that a request uses, by the names in FEATURES."""
    body = request.body or {}
    plain = request.path.partition("?")[0]
    found = {
        "streaming": request.answer is not None and request.is_stream,
        "tools": has_tools(request),
        "parallel calls": request.answer is not None and len(request.answer.calls) > 1,
        "forced calls": forces(body),
        "system prompt": _has_system(request),
        "prompt caching fields": _has(body, *_CACHING) or "cachedContents" in plain,
        "structured output": is_structured(body),
        "usage with cached tokens": _asks_usage(request),
        "counting tokens": plain.endswith(("/count_tokens", ":countTokens", "/input_tokens")),
        "models": request.method == "GET" and "/models" in plain,
    }
    return {name for name, is_used in found.items() if is_used}


def forces(body: Json) -> bool:
    """Whether the answer must be a call."""
    choice = body.get("tool_choice")
    config = ((body.get("toolConfig") or {}).get("functionCallingConfig") or {}).get("mode")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    return kind in ("required", "any", "function", "tool") or config == "ANY"


FEATURES = (
    "streaming",
    "tools",
    "parallel calls",
    "forced calls",
    "system prompt",
    "prompt caching fields",
    "structured output",
    "usage with cached tokens",
    "counting tokens",
    "models",
)
"""The columns of the table of clients."""
