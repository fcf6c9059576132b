"""A tenant's long, endless or unread answers cost another tenant only its fair share of the model's steps."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.service.running import KEYS, Running, service_in_thread
from tests.waiting import LIMIT_S, eventually

PROMPT = "The answer to this is long, and nobody reads it. "
LONG = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "n": 16, "seed": 1}
ENDLESS = {**LONG, "max_tokens": 1000}


@pytest.fixture(scope="module")
def roomy() -> Iterator[Running]:
    """A service that buffers only one kilobyte of unread output for a client, so that a few steps fill the buffer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixkv.service.connection.UNREAD_BYTES", 1024)
        with service_in_thread(**{"num-blocks": "2048"}) as live:
            yield live


def asked(live: Running, who: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion was requested.

    Nothing reads the answer, and the client's socket buffer is small.
    """
    place, content = urlsplit(live.url), json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1", "host: x", f"authorization: Bearer {KEYS[who]}",
        "content-type: application/json", f"content-length: {len(content)}", "connection: close", "", "",
    )  # fmt: skip
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(LIMIT_S)
    connection.connect((place.hostname, place.port))
    connection.sendall("\r\n".join(head).encode() + content)
    return connection


def read(connection: socket.socket) -> list[dict[str, Any]]:
    """Read a stream to its end and return its events."""
    received = b""
    while part := connection.recv(65_536):
        received += part
    text = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", received.partition(b"\r\n\r\n")[2])
    return [json.loads(each) for each in re.findall(rb"data: (\{.*\})", text)]


@pytest.mark.slow
def test_an_unread_stream_is_suspended_until_it_is_read(roomy: Running) -> None:
    worker = roomy.service.worker
    with asked(roomy, "globex", {**LONG, "stream": True}) as unread:
        eventually(lambda: worker.num_suspended == 1, "it is suspended")
        own = roomy.globex.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
        assert own.status_code == 200, "other requests of the same tenant continue"
        eventually(lambda: worker.num_unfinished == worker.num_suspended == 1)
        events = read(unread)
    eventually(lambda: worker.num_unfinished == 0)
    pieces = [choice for each in events for choice in each["choices"]]
    expected = roomy.globex.post("/v1/completions", json=LONG).json()["choices"]
    for choice in expected:
        assert "".join(each["text"] for each in pieces if each["index"] == choice["index"]) == choice["text"]


@pytest.mark.slow
def test_another_tenant_does_not_wait_for_unread_or_endless_streams(roomy: Running) -> None:
    worker = roomy.service.worker
    streams = [asked(roomy, "globex", {**ENDLESS, "stream": stream}) for stream in (True, True, True, False)]
    try:
        eventually(lambda: worker.num_unfinished == 4)
        for _ in range(3):
            answer = roomy.acme.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
            assert answer.status_code == 200
        warmed = roomy.acme.post("/v1/warm", json={"prompt": PROMPT * 20})
        assert warmed.status_code == 200
        eventually(lambda: worker.num_unfinished == 4)
        assert all(not each.future.done() for each in [*worker._unfinished]), "no stream had to end first"
    finally:
        for each in streams:
            each.close()
    eventually(lambda: worker.num_unfinished == 0, "a client that hangs up ends its stream")
    eventually(lambda: roomy.service.cache.stats().num_sequences == 0)


@pytest.mark.slow
def test_an_unread_stream_ends_at_its_timeout(monkeypatch: pytest.MonkeyPatch, roomy: Running) -> None:
    monkeypatch.setattr("radixkv.service.endpoints.completions._READING_S", 0.1)
    worker, was_suspended, timeout_s = roomy.service.worker, False, 2.0
    while not was_suspended:  # a busy machine may not get so far in the time
        monkeypatch.setattr(roomy.service, "limits", roomy.service.limits.__class__(timeout_s=timeout_s))
        with asked(roomy, "globex", {**ENDLESS, "stream": True}):
            eventually(lambda: worker.num_unfinished, "it begins")
            eventually(lambda: worker.num_suspended or not worker.num_unfinished)
            was_suspended = worker.num_suspended == 1
            eventually(lambda: worker.num_unfinished == 0, "it is cancelled")
        timeout_s *= 2
    eventually(lambda: roomy.service.cache.stats().num_sequences == 0)
