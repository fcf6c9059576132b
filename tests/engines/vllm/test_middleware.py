"""What vLLM's own HTTP server answers to requests without a valid salt, where salts are required."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv.engines.vllm.middleware import RequireSalt
from radixkv.signing import KeySet
from radixkv.tenancy.salt import make_salt

KEYS = KeySet.derive([b"the fleet's own secret"])
FORGED = make_salt(KeySet.derive([b"another fleet's secret"]), "acme")


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def answer(
    app: RequireSalt, *pieces: bytes, path: str = "/v1/completions", kind: str = "http"
) -> tuple[int, bytes]:
    """What the middleware, or the application behind it, answers to a request that comes in pieces."""
    sent: list[Any] = []
    coming = [
        {"type": "http.request", "body": each, "more_body": at + 1 < len(pieces)}
        for at, each in enumerate(pieces)
    ]

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": kind, "method": "POST", "path": path}, receive, send))
    return sent[0]["status"], sent[1]["body"]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RequireSalt:
    KEYS.write(tmp_path / "engine.keys")
    monkeypatch.setenv("RADIXKV_KEYS", str(tmp_path / "engine.keys"))
    monkeypatch.setenv("RADIXKV_ANONYMOUS", "0")
    return RequireSalt(_echo)


@pytest.mark.parametrize(
    ("salt", "reason"),
    [
        ({}, "serves no request without a cache_salt"),
        ({"cache_salt": None}, "serves no request without a cache_salt"),
        ({"cache_salt": "any text"}, "serves no request without a cache_salt"),
        ({"cache_salt": FORGED}, "not made with a key of this fleet"),
        ({"cache_salt": 7}, "is not a text"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_a_refusal_says_what_to_do(app: RequireSalt, salt: dict[str, Any], reason: str, path: str) -> None:
    status, body = answer(app, json.dumps({"prompt": [1, 2], **salt}).encode(), path=path)
    error = json.loads(body)["error"]
    assert (status, error["param"], error["code"]) == (400, "cache_salt", 400)
    assert reason in error["message"] and "through the gateway that makes the salts" in error["message"]


def test_others_go_on_unchanged(app: RequireSalt) -> None:
    body = json.dumps({"prompt": [1, 2], "cache_salt": make_salt(KEYS, "acme")}).encode()
    assert answer(app, body[:7], body[7:50], body[50:]) == (200, body)
    for other in (b"", b"no JSON", b"[1]", b"[" * 100_000):
        assert answer(app, other) == (200, other)
    assert answer(app, b"{}", path="/tokenize") == (200, b"{}")
    assert answer(app, b"{}", kind="websocket") == (200, b"{}")


def test_an_older_generation_is_refused_once_a_newer_one_is_known(app: RequireSalt) -> None:
    def status(generation: int) -> int:
        return answer(app, json.dumps({"cache_salt": make_salt(KEYS, "acme", generation)}).encode())[0]

    assert [status(each) for each in (0, 1, 0, 1)] == [200, 200, 400, 200]


@pytest.mark.parametrize(("name", "value"), [("RADIXKV_ANONYMOUS", "1"), ("RADIXKV_OFF", "1")])
def test_where_salts_are_not_required_nothing_is_refused(
    app: RequireSalt, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert answer(RequireSalt(_echo), b"{}") == (200, b"{}")


def test_a_body_is_bounded_before_it_is_read_whole(app: RequireSalt) -> None:
    status, body = answer(app, *[b" " * 2**20] * 66, b"never asked for")
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (413, 413, None)
    assert "more than 67108864 bytes" in error["message"]
    assert answer(app, b" " * 2**20, b"{}")[0] == 400, "a body within the bound is read"


def test_long_bodies_keep_the_event_loop_for_a_short_time(app: RequireSalt) -> None:
    """One of 500,000 ids holds the loop for a part of what parsing it takes."""
    ids = list(range(10_000, 12_000)) * 250
    body = json.dumps({"prompt": ids, "cache_salt": make_salt(KEYS, "acme")}).encode()

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
        return min(times)

    assert answer(app, body)[0] == 200
    assert seconds(lambda: answer(app, body)) < 0.7 * seconds(lambda: json.loads(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' * 50_000,
        b'{"cache_salt": {"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}}",
        b'{"\xff": 1}',
        b'{"cache_salt": 1e999}',
    ],
)
def test_hostile_bodies_go_on_or_are_refused(app: RequireSalt, body: bytes) -> None:
    status, answered = answer(app, body)
    assert (status, answered) == (200, body) or (status == 400 and b"cache_salt" in answered)
