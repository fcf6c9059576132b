"""Search for request bodies that stall the service's event loop, and so delay all other callers.

  python fuzz/stalls.py --seconds 600 --seed 7

The generator takes each endpoint that reads a body, and each place in its schema. It fills that place up to a size:
lists of many kinds of items, maps, long strings, long numbers, deep nesting. It sends the body as a tenant, as the
operator, and without a key. The demo service has an event loop that ticks every 2 ms.

The stall of a body is the most CPU time that the loop's thread spends between two ticks: a busy machine delays ticks
too. A body is sent several times, and its least stall counts. Prints the worst bodies. The exit code is 1 if a body
stalled the loop for more than LIMIT_S, or was answered by a status that says that the service failed.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import quote

from radixkv import __version__
from radixkv.service.app import ENDPOINTS
from radixkv.service.auth import DEMO_KEYS, DEMO_OPERATOR_KEY
from radixkv.service.endpoint import Endpoint
from radixkv.service.limits import Limits
from radixkv.service.options import ServeSettings
from radixkv.service.server import Server, bind, registered

LIMIT_S = 0.05
SENDS = 3
SHOWN = 20
_TICK_S = 0.002
_TIMEOUT_S = 600.0
_HOLE = "@@"
MODEL = "radixkv-demo"
KEYS: Mapping[str, str | None] = {
    "tenant": DEMO_KEYS["acme"],
    "operator": DEMO_OPERATOR_KEY,
    "anonymous": None,
}


def _repeated(item: str, opening: str, closing: str) -> Callable[[int], str]:
    def fill(size: int) -> str:
        count = max((size - 2) // (len(item) + 1), 1)
        return opening + ",".join(itertools.repeat(item, count)) + closing

    return fill


def _numbered(item: str, opening: str, closing: str) -> Callable[[int], str]:
    def fill(size: int) -> str:
        count = max((size - 2) // (len(item) + 6), 1)
        return opening + ",".join(item.replace("#", str(at)) for at in range(count)) + closing

    return fill


def _text(piece: str) -> Callable[[int], str]:
    return lambda size: '"' + piece * max((size - 2) // len(piece.encode()), 1) + '"'


def _nested(opening: str, closing: str, innermost: str) -> Callable[[int], str]:
    def fill(size: int) -> str:
        depth = max((size - len(innermost)) // len(opening + closing), 1)
        return opening * depth + innermost + closing * depth

    return fill


FILLERS: Mapping[str, Callable[[int], str]] = {
    "list of 1": _repeated("1", "[", "]"),
    "list of ids": _numbered("#", "[", "]"),
    "list of -1": _repeated("-1", "[", "]"),
    "list of 4294967295": _repeated("4294967295", "[", "]"),
    "list of 1e400": _repeated("1e400", "[", "]"),
    "list of 0.1": _repeated("0.1", "[", "]"),
    "list of null": _repeated("null", "[", "]"),
    "list of true": _repeated("true", "[", "]"),
    "list of empty strings": _repeated('""', "[", "]"),
    "list of strings": _numbered('"t#"', "[", "]"),
    "list of lists": _repeated("[]", "[", "]"),
    "list of lists of an id": _repeated("[1]", "[", "]"),
    "list of long lists": _repeated("[" + "1," * 999 + "1]", "[", "]"),
    "list of maps": _repeated("{}", "[", "]"),
    "list of empty messages": _repeated('{"role":"u","content":""}', "[", "]"),
    "list of messages": _repeated('{"role":"user","content":"Rule 7: answer. \\n"}', "[", "]"),
    "list of messages of newlines": _repeated('{"role":"user","content":"\\n\\n \\n"}', "[", "]"),
    "list of unknown roles": _numbered('{"role":"r#","content":"x"}', "[", "]"),
    "map of 1": _numbered('"k#":1', "{", "}"),
    "map of lists": _numbered('"k#":[]', "{", "}"),
    "map of ids": _numbered('"#":1', "{", "}"),
    "map of null": _numbered('"k#":null', "{", "}"),
    "map of strings": _numbered('"k#":"v#"', "{", "}"),
    "map of one name": _repeated('"k":1', "{", "}"),
    "map of a long name": lambda size: '{"' + "k" * (size - 6) + '":1}',
    "text a": _text("a"),
    "text of words": _text("Rule 7: answer politely. "),
    "text of spaces": _text(" "),
    "text of newlines": _text("\\n"),
    "text of escaped letters": _text("\\u0061"),
    "text of NUL": _text("\\u0000"),
    "text of emoji": _text("🙂"),
    "text of escaped emoji": _text("\\ud83d\\ude42"),
    "text of lone surrogates": _text("\\ud83d"),
    "text of accents": _text("é\u0301"),
    "text of quotes": _text('\\"'),
    "text of control symbols": _text("<s></s>"),
    "text of digits": _text("1234567890"),
    "long integer": lambda size: "9" * size,
    "long fraction": lambda size: "0." + "9" * (size - 2),
    "long exponent": lambda size: "1e" + "9" * (size - 2),
    "nested lists": _nested("[", "]", "1"),
    "nested maps": _nested('{"a":', "}", "1"),
    "open lists": lambda size: "[" * size,
    "open maps": lambda size: '{"a":' * (size // 5),
    "white space": lambda size: " " * size + "1",
    "commas": lambda size: "," * size,
}


class Recipe(NamedTuple):
    """One request: ``filler`` of about ``size`` bytes at ``place`` of the body for an endpoint."""

    who: str
    method: str
    path: str
    place: tuple[str, ...]
    filler: str
    size: int

    def body(self) -> bytes:
        """Return the body. It is valid except for the filler, if the endpoint's example has other fields."""
        document = dict(_EXAMPLES.get(self.path, {}))
        if self.place:
            if self.place[0] in _PROMPTS:
                for name in _PROMPTS:
                    document.pop(name, None)
            filled: Any = _HOLE
            for name in reversed(self.place[1:]):
                filled = [filled] if name == "[]" else {name: filled}
            given = document.get(self.place[0])
            if isinstance(given, dict) and isinstance(filled, dict):
                filled = {**given, **filled}
            document[self.place[0]] = filled
            text = json.dumps(document)
        else:
            text = json.dumps(_HOLE)
        room = self.size - len(text)
        return text.replace(json.dumps(_HOLE), FILLERS[self.filler](max(room, 1))).encode("utf-8", "replace")


_PROMPTS = ("prompt", "messages", "token_ids")
_LOADED = (501, 503, 529)
"""What an overloaded service answers, or one without fleet."""
_CHAT: Mapping[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
_CONTENTS: Mapping[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}
_EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, **_CHAT},
    "/v1/responses": {"model": MODEL, "input": "x", "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, **_CHAT},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": _CHAT["messages"]},
    "/v1beta/cachedContents": {"model": MODEL, "ttl": "1s", **_CONTENTS},
    "/v1beta/cachedContents/{content}": {"ttl": "1s"},
    "/v1beta/models/{model}:generateContent": {**_CONTENTS, "generationConfig": {"maxOutputTokens": 1}},
    "/v1beta/models/{model}:streamGenerateContent": {**_CONTENTS, "generationConfig": {"maxOutputTokens": 1}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/lookup": {"prompt": "x"},
    "/v1/warm": {"prompt": "x", "wait": False},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/pins": {"prompt": "x", "ttl_s": 1},
    "/v1/route": {"prompt": "x"},
    "/v1/bases": {"prompt": "x", "id": "base", "readers": ["acme"]},
    "/v1/bases/{base}/readers": {"readers": ["acme"]},
    "/internal/warm": {"job": "0" * 32, "token_ids": [1]},
    "/internal/pins": {"pin": "0" * 32, "token_ids": [1]},
}


def places(endpoint: Endpoint) -> list[tuple[str, ...]]:
    """Return the places for a filler: the whole body, an unknown field, and each field of the schema, also nested."""
    assert endpoint.body is not None
    schema = endpoint.body.model_json_schema()
    found = dict.fromkeys([(), ("unknown",), *_below(schema, schema, ())])
    return list(found)


def _below(
    schema: Mapping[str, Any], root: Mapping[str, Any], at: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    if len(at) > 4:
        return
    if "$ref" in schema:
        yield from _below(root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _below(each, root, at)
    for name, inner in schema.get("properties", {}).items():
        yield (*at, name)
        yield from _below(inner, root, (*at, name))
    if isinstance(inner := schema.get("items"), dict):
        yield (*at, "[]")
        yield from _below(inner, root, (*at, "[]"))
    if isinstance(inner := schema.get("additionalProperties"), dict):
        yield (*at, "name")
        yield from _below(inner, root, (*at, "name"))


def recipes(chance: random.Random, limit: int = Limits().max_body_bytes, only: str = "") -> Iterator[Recipe]:
    """Yield requests without end, to paths that contain ``only``.

    Half have the greatest size, the others any from 1 KB, on a logarithmic scale.
    """
    chosen = [each for each in ENDPOINTS if each.body is not None and only in each.path]
    targets = [(each, place) for each in chosen for place in places(each)]
    while True:
        endpoint, place = chance.choice(targets)
        size = limit if chance.random() < 0.5 else int(1_000 * (limit / 1_000) ** chance.random())
        who = chance.choice(["tenant", "tenant", "operator", "anonymous"])
        if endpoint.who == "operator" and chance.random() < 0.7:
            who = "operator"
        yield Recipe(who, endpoint.method, endpoint.path, place, chance.choice(list(FILLERS)), size)


class Loop:
    """A service with a watch on its event loop.

    ``longest`` is the longest stall since it was last reset, in seconds.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.longest, self.num_ticks = 0.0, 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def watch(self) -> None:
        """Tick until cancelled."""
        self._loop = asyncio.get_running_loop()
        before = time.thread_time()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.thread_time()
            self.longest, before = max(self.longest, now - before), now
            self.num_ticks += 1

    def block(self, seconds: float) -> None:
        """Spend CPU time on the loop, to test the watch itself."""
        loop = self._loop
        assert loop is not None
        self.longest = 0.0
        done = threading.Event()

        def spend() -> None:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
            done.set()

        loop.call_soon_threadsafe(spend)
        done.wait()
        self._settle()

    def _settle(self) -> None:
        """Wait until the loop has ticked twice, and so has counted what it did before."""
        seen = self.num_ticks
        while self.num_ticks < seen + 2:
            time.sleep(_TICK_S)

    def stall_s(self, recipe: Recipe) -> tuple[float, int]:
        """Send a request once. Return the stall in seconds, and the status of the answer (0: no answer)."""
        body = recipe.body()
        headers = {"Content-Type": "application/json"}
        if KEYS[recipe.who] is not None:
            headers["Authorization"] = f"Bearer {KEYS[recipe.who]}"
        path = (
            recipe.path.replace("{tenant}", quote("acme")).replace("{base}", "base").replace("{model}", MODEL)
        )
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)
        self._settle()
        self.longest, status = 0.0, 0
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(recipe.method, path, body, headers)
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        self._settle()
        connection.close()
        return self.longest, status


@contextmanager
def watched_service() -> Iterator[Loop]:
    """Run a demo service in a thread of this process for the ``with`` block."""
    settings = ServeSettings.parse({"port": "0", "num-blocks": "512", "threads": "1"})
    with bind(settings.host, settings.port) as listener:
        ready = threading.Event()
        server = Server(registered(settings, listener), __version__, ready.set)
        found = Loop(*listener.getsockname()[:2])

        async def serve() -> None:
            watching = asyncio.create_task(found.watch())
            await server.serve([listener])
            watching.cancel()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="radixkv-service", daemon=True)
        thread.start()
        ready.wait()
        try:
            yield found
        finally:
            server.should_exit = True
            thread.join()


def least_stall_s(service: Loop, recipe: Recipe) -> tuple[float, int]:
    """Return the least stall of up to SENDS sends of a request, and the status of the last answer."""
    least, status = service.stall_s(recipe)
    for _ in range(SENDS - 1):
        if least <= LIMIT_S / 2:
            break
        again, status = service.stall_s(recipe)
        least = min(least, again)
    return least, status


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default 60)")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default="", help="only paths that contain this")
    chosen = options.parse_args()
    found: list[tuple[float, int, Recipe]] = []
    until = time.monotonic() + chosen.seconds
    with watched_service() as service:
        for recipe in recipes(random.Random(chosen.seed), only=chosen.only):
            found.append((*least_stall_s(service, recipe), recipe))
            if time.monotonic() > until:
                break
    found.sort(reverse=True)
    for stall_s, status, recipe in found[:SHOWN]:
        print(f"{stall_s * 1e3:7.1f} ms  {status:3d}  {tuple(recipe)}")
    failed = [each for each in found if each[1] >= 500 and each[1] not in _LOADED]
    for _, status, recipe in failed[:SHOWN]:
        print(f"  failed   {status:3d}  {tuple(recipe)}")
    over = sum(stall_s > LIMIT_S for stall_s, _, _ in found)
    verdict = f"{over} stalled the loop for more than {LIMIT_S} s" if over else "nothing stalled"
    print(f"{len(found)} bodies: {verdict}, {len(failed)} were answered by a failure")
    return 1 if over or failed else 0


if __name__ == "__main__":
    sys.exit(main())
