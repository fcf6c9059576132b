"""Rates, sizes and times: each tenant has its own limits, and a refusal says when to try again."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from radixkv import audit
from radixkv.service import api_client as service_client
from radixkv.service import connection as connections
from radixkv.service.engine_loop import Busy
from radixkv.service.limits import Gate, Limits, TokenBucket, TooFast
from tests.service.running import Running, client, model_held, service_in_thread
from tests.service.test_refusals import refusal
from tests.waiting import LIMIT_S, ended, eventually

pytestmark = pytest.mark.slow

LOOKUP = {"token_ids": [5] * 16}


@pytest.mark.parametrize(
    ("said", "pause_s"),
    [("3", 3.0), ("0", 0.0), ("600", 10.0), (None, 1.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0), ("-1", 1.0)],
)
def test_a_client_waits_as_long_as_a_busy_service_says_in_seconds(
    said: str | None, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy in front of the service may send a date instead of seconds."""
    answers = [
        httpx.Response(503, headers=[] if said is None else [("Retry-After", said)]),
        httpx.Response(204),
    ]
    slept: list[float] = []
    monkeypatch.setattr(service_client, "time", SimpleNamespace(sleep=slept.append))
    with service_client.Client("http://127.0.0.1:9", "a-key") as caller:
        monkeypatch.setattr(caller, "_send", lambda *_: answers.pop(0))
        assert caller.call("GET", "/v1/stats") == {}
    assert slept == [pause_s]


def test_a_bucket_is_full_at_first_and_fills_again() -> None:
    bucket = TokenBucket(3, 0.0)
    assert [bucket.take(0.0, 2.0, 3) for _ in range(3)] == [0.0] * 3
    assert bucket.take(0.0, 2.0, 3) == 0.5
    assert bucket.take(0.4, 2.0, 3) == pytest.approx(0.1)
    assert bucket.take(0.5, 2.0, 3) == 0.0
    assert [bucket.take(100.0, 2.0, 3) > 0 for _ in range(4)] == [False, False, False, True]


def test_each_tenant_has_its_own_gate() -> None:
    gate = Gate(max_concurrent=2, clock=lambda: 0.0)
    with gate.admit("a", 1.0, 9), gate.admit("a", 1.0, 9):
        with pytest.raises(Busy), gate.admit("a", 1.0, 9):
            pass
        with gate.admit("b", 1.0, 1):
            pass
    with gate.admit("a", 1.0, 9):
        pass
    with pytest.raises(TooFast), gate.admit("b", 1.0, 1):
        pass


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with slow limits: acme may send two requests at once and then one in a thousand seconds. initech may
    send bodies of 100 bytes. globex has the defaults.
    """
    keys = tmp_path_factory.mktemp("limits") / "keys.json"
    acme = {"keys": ["demo-acme"], "requests_per_s": 0.001, "burst": 2}
    small = {"keys": ["of-initech"], "max_body_bytes": 100}
    tenants = {"acme": acme, "globex": "demo-globex", "initech": small}
    keys.write_text(json.dumps({"operator": "demo-operator", "tenants": tenants}))
    with service_in_thread(keys=str(keys), **{"num-blocks": "64"}) as running:
        yield running


def test_a_tenant_above_its_rate_is_told_when_to_retry(slow: Running) -> None:
    answers = [slow.acme.post("/v1/lookup", json=LOOKUP) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    error = refusal(answers[2])
    assert error["type"] == "rate_limited" and error["allowed"] == "0.001 requests a second, 2 at once"
    assert 900 < int(answers[2].headers["Retry-After"]) <= 1000
    assert [slow.globex.post("/v1/lookup", json=LOOKUP).status_code for _ in range(4)] == [200] * 4
    assert slow.operator.get("/v1/stats").status_code == 200
    for method, path in (("GET", "/v1/stats"), ("GET", "/v1/warm/x"), ("DELETE", "/v1/cache")):
        assert slow.acme.request(method, path).status_code == 429
    assert slow.nobody.get("/healthz").status_code == 200


def test_the_operator_can_change_a_rate_while_it_is_in_force(slow: Running) -> None:
    assert (
        slow.operator.put("/v1/tenants/globex", json={"burst": 1, "requests_per_s": 0.001}).status_code == 200
    )
    assert [slow.globex.get("/v1/stats").status_code for _ in range(2)] == [200, 429]
    slow.operator.put("/v1/tenants/globex", json={"requests_per_s": 1e6})
    assert eventually(lambda: slow.globex.get("/v1/stats").status_code == 200)


def test_each_tenant_has_its_own_body_size_limit(slow: Running) -> None:
    with client(slow.url, "of-initech") as initech:
        assert initech.post("/v1/lookup", json={"token_ids": [5] * 10}).status_code == 200
        answer = initech.post("/v1/lookup", json={"token_ids": [5] * 100})
        assert answer.status_code == 413 and "100 bytes" in refusal(answer)["allowed"]


def test_requests_under_way_are_bounded() -> None:
    with (
        service_in_thread(Limits(max_concurrent=2), **{"num-blocks": "64"}) as live,
        model_held(live.service, "globex"),
    ):
        body = {"token_ids": [5] * 64}
        waiting = [threading.Thread(target=warm, args=(live.url, body)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        eventually(lambda: sum(each.num_shares for each in live.service.warmer.under_way()) == 2)
        busy = live.acme.get("/v1/stats")
        assert busy.status_code == 429
        assert refusal(busy)["type"] == "busy" and int(busy.headers["Retry-After"]) >= 1
        assert live.globex.get("/v1/stats").status_code == 200
    for thread in waiting:
        ended(thread)


def warm(url: str, body: dict[str, Any]) -> None:
    with client(url, "demo-acme") as http:
        http.post("/v1/warm", json=body)


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    with service_in_thread(Limits(timeout_s=1.5), **{"num-blocks": "512"}) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_504(hasty: Running, stream: bool) -> None:
    with model_held(hasty.service, "globex"):
        body = {"prompt": "x", "max_tokens": 2, "stream": stream}
        answer = hasty.acme.post("/v1/completions", json=body)
        warmed = hasty.acme.post("/v1/warm", json={"token_ids": [5] * 32})
    for each in (answer, warmed):
        assert each.status_code == 504 and each.json()["error"]["docs_url"].endswith("#timeout")
    eventually(lambda: hasty.service.engine_loop.num_unfinished == 0)
    assert hasty.service.warmer.num_under_way == 0
    audit.check(hasty.service.cache)


def test_a_stream_that_takes_too_long_ends_with_an_error(hasty: Running) -> None:
    body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}

    def begun() -> httpx.Response | None:
        """A stream, unless the request timed out before it started."""
        answer = hasty.acme.post("/v1/completions", json=body)
        assert answer.status_code in (200, 504)
        return answer if answer.status_code == 200 else None

    answer = eventually(begun, "a stream that begins in time")
    *_, last = answer.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    eventually(lambda: hasty.service.cache.stats().num_sequences == 0)


def connection(live: Running) -> socket.socket:
    place = urlsplit(live.url)
    return socket.create_connection((place.hostname, place.port), timeout=LIMIT_S)


def test_a_body_that_does_not_arrive_is_408() -> None:
    head = b"POST /v1/lookup HTTP/1.1\r\nhost: x\r\nauthorization: Bearer demo-acme\r\n"
    limits = Limits(body_timeout_s=0.3)
    with service_in_thread(limits, **{"num-blocks": "64"}) as live, connection(live) as raw:
        raw.sendall(head + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        answer = httpx.Response(int(raw.recv(65536).split(b" ", 2)[1]))
    assert answer.status_code == 408


@pytest.mark.parametrize("sent", [b"", b"GET /heal"])
def test_a_head_that_does_not_arrive_closes_the_connection(
    live: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.1)
    with connection(live) as raw, suppress(ConnectionError):
        raw.sendall(sent)
        assert raw.recv(65536) == b""


def test_a_second_head_that_does_not_arrive_closes_the_connection_too(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connection(live) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in raw.recv(65536)
        monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.1)
        raw.sendall(b"GET /")
        answer = b""
        while part := raw.recv(65536):
            answer += part
        assert b"HTTP/1.1" not in answer


def test_settings_define_the_limits(tmp_path: Path) -> None:
    settings = {"requests-per-s": "0.001", "burst": "1", "max-body-bytes": "50", "num-blocks": "64"}
    with service_in_thread(**settings) as live:
        assert live.acme.post("/v1/lookup", json={"token_ids": [5] * 100}).status_code == 413
        assert live.acme.post("/v1/lookup", json=LOOKUP).status_code == 429
