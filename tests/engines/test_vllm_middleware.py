"""What vLLM's own HTTP server answers to requests without a valid salt, where salts are required."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.engines.salt import make_salt
from radixkv.engines.vllm_middleware import RequireSalt
from radixkv.signing import KeySet

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
