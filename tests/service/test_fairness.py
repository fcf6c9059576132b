"""A tenant's long, endless or unread answers cost another tenant only its fair share of the model's steps."""

from __future__ import annotations

import json
import re
import socket
import threading
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
    loop = roomy.service.engine_loop
    with asked(roomy, "globex", {**LONG, "stream": True}) as unread:
        eventually(lambda: loop.num_suspended == 1, "it is suspended")
        own = roomy.globex.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
        assert own.status_code == 200, "other requests of the same tenant continue"
        eventually(lambda: loop.num_unfinished == loop.num_suspended == 1)
        events = read(unread)
    eventually(lambda: loop.num_unfinished == 0)
    pieces = [choice for each in events for choice in each["choices"]]
    expected = roomy.globex.post("/v1/completions", json=LONG).json()["choices"]
    for choice in expected:
        assert "".join(each["text"] for each in pieces if each["index"] == choice["index"]) == choice["text"]


@pytest.mark.slow
def test_another_tenant_does_not_wait_for_unread_or_endless_streams(roomy: Running) -> None:
    loop = roomy.service.engine_loop
    streams = [asked(roomy, "globex", {**ENDLESS, "stream": stream}) for stream in (True, True, True, False)]
    try:
        eventually(lambda: loop.num_unfinished == 4)
        for _ in range(3):
            answer = roomy.acme.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
            assert answer.status_code == 200
        warmed = roomy.acme.post("/v1/warm", json={"prompt": PROMPT * 20})
        assert warmed.status_code == 200
        eventually(lambda: loop.num_unfinished == 4)
        assert all(not each.future.done() for each in [*loop._unfinished]), "no stream had to end first"
    finally:
        for each in streams:
            each.close()
    eventually(lambda: loop.num_unfinished == 0, "a client that hangs up ends its stream")
    eventually(lambda: roomy.service.cache.stats().num_sequences == 0)


@pytest.mark.slow
def test_requests_hold_no_thread(roomy: Running) -> None:
    """Neither those that wait nor those that run: one thread has them all."""
    loop, before = roomy.service.engine_loop, {*threading.enumerate()}
    streams = [asked(roomy, "globex", {**ENDLESS, "n": 1, "stream": True}) for _ in range(40)]
    try:
        eventually(lambda: loop.num_unfinished == 40)
        eventually(lambda: sum(each.is_waiting for each in [*loop._unfinished]) == 8, "32 have started")
        names = [thread.name for thread in {*threading.enumerate()} - before]
        assert names.count("radixkv-model") <= 1 and "radixkv-call" not in names
    finally:
        for each in streams:
            each.close()
    eventually(lambda: loop.num_unfinished == 0, "a client that hangs up ends its stream")


@pytest.mark.slow
def test_an_unread_stream_ends_at_its_timeout(monkeypatch: pytest.MonkeyPatch, roomy: Running) -> None:
    monkeypatch.setattr("radixkv.service.endpoints.completions._READING_S", 0.1)
    loop, was_suspended, timeout_s = roomy.service.engine_loop, False, 2.0
    while not was_suspended:  # a busy machine may not get so far in the time
        monkeypatch.setattr(roomy.service, "limits", roomy.service.limits.__class__(timeout_s=timeout_s))
        with asked(roomy, "globex", {**ENDLESS, "stream": True}):
            eventually(lambda: loop.num_unfinished, "it begins")
            eventually(lambda: loop.num_suspended or not loop.num_unfinished)
            was_suspended = loop.num_suspended == 1
            eventually(lambda: loop.num_unfinished == 0, "it is cancelled")
        timeout_s *= 2
    eventually(lambda: roomy.service.cache.stats().num_sequences == 0)


MOST_ROWS = 64
"""Rows of other tenants in a step, while a strict tenant waits: as many as one request may have."""
MOST_STEPS_MORE = 3


@pytest.mark.slow
def test_rows_of_others_dont_make_a_strict_tenants_steps_longer(
    monkeypatch: pytest.MonkeyPatch, roomy: Running
) -> None:
    """Steps and tokens are counted from the request's place in the model's queue to its end."""
    loop, tokens_of_steps = roomy.service.engine_loop, list[int]()
    model: Any = roomy.service.engine.model
    submit, spans = loop.submit, list[tuple[int, int]]()

    def counted(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens_of_steps.append((named["input_ids"] if "input_ids" in named else args[0]).numel())

    def submitted(tenant: str, *args: Any, **named: Any) -> Any:
        began = len(tokens_of_steps)
        work = submit(tenant, *args, **named)
        if tenant == "acme":
            work.future.add_done_callback(lambda _: spans.append((began, len(tokens_of_steps))))
        return work

    def asked_by_acme() -> list[int]:
        """The tokens of each step, from the request's submission to its end."""
        spans.clear()
        answer = roomy.acme.post(
            "/v1/completions", json={"prompt": "Hello", "max_tokens": 2, "salt": f"{len(tokens_of_steps)}"}
        )
        assert answer.status_code == 200
        eventually(lambda: spans, "the end of the work")
        return tokens_of_steps[slice(*spans[0])]

    monkeypatch.setattr(loop, "submit", submitted)
    hook = model.register_forward_pre_hook(counted, with_kwargs=True)
    assert roomy.operator.put("/v1/tenants/acme", json={"mode": "strict", "guaranteed_blocks": 64}).is_success
    alone = asked_by_acme()
    others = [asked(roomy, "globex", {**LONG, "n": 32, "max_tokens": 200}) for _ in range(4)]
    try:
        eventually(lambda: loop.num_unfinished == 4, "all are open")
        steps = len(tokens_of_steps)
        eventually(lambda: len(tokens_of_steps) > steps + 8, "they step")
        beside = asked_by_acme()
        eventually(lambda: loop.num_unfinished == 4, "its work is over, and the others still run")
    finally:
        hook.remove()
        for each in others:
            each.close()
        eventually(lambda: loop.num_unfinished == 0, "a client that hangs up ends its work")
        usual = {"mode": "burst", "guaranteed_blocks": 0}
        assert roomy.operator.put("/v1/tenants/acme", json=usual).is_success
    assert len(beside) <= len(alone) + MOST_STEPS_MORE, f"alone {alone}, beside others {beside}"
    assert max(beside) - max(alone) <= MOST_ROWS, f"alone {alone}, beside others {beside}"
