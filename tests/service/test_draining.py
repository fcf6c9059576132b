"""A replica that drains stays a member of its fleet until its last request has ended. Only prompts no longer go there.

Two services over a real Redis: ``a``, and ``b``, which drains with an answer that lasts as long as a test wants.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from radixkv.coordination import Settings
from radixkv.service.fleet.peers import PIN_PATH, WARM_PATH
from tests.cli.test_serve import RunningCompletion, ending
from tests.redis_server import RedisServer
from tests.service.running import Running, answered, client, service_in_thread
from tests.service.test_fleet import SECRET, forged, quota, reachable, view
from tests.tcp_proxy import TcpProxy
from tests.tiers.support import PATIENT_S
from tests.waiting import LIMIT_S, eventually

pytestmark = [pytest.mark.slow]
IDS = list(range(5, 5 + 16 * 16))
TENANTS = {
    "acme": {"keys": ["demo-acme"], "max_pinned_blocks": 64},
    "globex": {"keys": ["demo-globex"], "on_unconfirmed_generation": "refuse", "fleet_blocks": 200},
}


class Pair:
    """Replicas ``a`` and ``b``. ``stream`` is an answer of b's: it goes on after its first step once it is released."""

    stream: RunningCompletion

    def __init__(self, a: Running, b: Running, life: ExitStack) -> None:
        self.a, self.b, self._life, self._released = a, b, life, threading.Event()

    @contextmanager
    def draining(self, tenant: str = "acme") -> Iterator[None]:
        """Let b drain, with a stream of the tenant, while the ``with`` block runs, and then leave."""
        engine: Any = self.b.service.engine
        generate = engine.generating

        def held(*args: Any, on_step: Callable[[Sequence[Sequence[int]]], None], **fields: Any) -> Any:
            num_steps = count()

            def step(new_ids: Sequence[Sequence[int]]) -> None:
                """Hold the model at the second step, so that the event loop hears of the first."""
                assert next(num_steps) == 0 or self._released.wait(LIMIT_S)
                on_step(new_ids)

            return generate(*args, on_step=step, **fields)

        engine.generating = held
        # The echo makes a line, also if the first token is a part of a character.
        fields = {"stream": True, "echo": True, "max_tokens": 20}
        self.stream = RunningCompletion(self.b.url, f"demo-{tenant}", **fields)
        eventually(lambda: self.stream.lines, "the first step")
        with ending(self.b, self._life):
            try:
                eventually(lambda: view(self.a)["b"]["draining"], "a knows that b drains")
                yield
            finally:
                self.release()
        eventually(lambda: "b" not in view(self.a, "demo-operator"), "b has left")

    def release(self) -> None:
        self._released.set()

    def purge(self, tenant: str) -> dict[str, Any]:
        return dict(answered(lambda: self.a.operator.post(f"/v1/tenants/{tenant}/purge")).json())

    def progress(self, tenant: str) -> dict[str, Any]:
        return dict(answered(lambda: self.a.operator.get(f"/v1/tenants/{tenant}/purge")).json())


Start = Callable[..., AbstractContextManager[Pair]]


@pytest.fixture
def start(redis_server: RedisServer, tmp_path: Path) -> Start:
    """Start a pair, with settings of b."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "keys.json").write_text(json.dumps({"operator": "demo-operator", "tenants": TENANTS}))
    shared = {"keys": str(tmp_path / "keys.json"), "fleet-secret": str(tmp_path / "secret")}

    @contextmanager
    def begin(**settings: str) -> Iterator[Pair]:
        common = {"redis": redis_server.url, **shared}
        with service_in_thread(**{**common, "replica": "a"}) as a, ExitStack() as life:
            mine = {**common, "replica": "b", "drain-s": "3600", **settings}
            b = life.enter_context(service_in_thread(**mine))
            eventually(lambda: reachable(a, "a", "b") and reachable(b, "a", "b"))
            yield Pair(a, b, life)

    return begin


def test_a_purge_ends_the_requests_of_a_replica_that_drains(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "beat_s", PATIENT_S)  # so b learns of the purge from a's request alone
    with start() as pair, pair.draining():
        purged = pair.purge("acme")
        assert (purged["complete"], purged["confirmed"], purged["pending"]) == (True, ["a", "b"], [])
        assert pair.stream.is_alive()
        pair.release()
        assert (pair.stream.error(), pair.stream.status) == ("conflict", 200)


def test_a_purge_waits_for_a_replica_that_drains(start: Start, redis_server: RedisServer) -> None:
    """It is told of the purge, but can't confirm it."""
    with closing(TcpProxy(redis_server.host, redis_server.port)) as proxy:
        redis = f"redis://127.0.0.1:{proxy.port}/0"
        with start(redis=redis) as pair, pair.draining("globex"):
            proxy.refuse = True
            eventually(lambda: pair.b.service.fleet.coordinator.health().state == "unavailable")
            purged = pair.purge("globex")
            assert (purged["complete"], purged["confirmed"], purged["pending"]) == (False, ["a"], ["b"])
            proxy.refuse = False
            eventually(lambda: pair.progress("globex")["complete"], "b has confirmed")
            assert pair.progress("globex")["confirmed"] == ["a", "b"]
            pair.release()
            assert pair.stream.error() == "conflict"


def test_the_removal_of_a_tenant_ends_its_requests_on_a_replica_that_drains(start: Start) -> None:
    with start() as pair, pair.draining():
        assert pair.a.operator.delete("/v1/tenants/acme").status_code == 204
        eventually(lambda: "acme" not in pair.b.service.keyring.tenants, "b reads the keys file")
        eventually(lambda: not pair.b.service.tenant_sync.unpurged, "b has purged acme")
        pair.release()
        assert pair.stream.error() == "conflict"


def test_no_prompt_goes_to_a_replica_that_drains(start: Start) -> None:
    """A pin of which only b has the prompt gets another holder. The share of a quota stays with b."""
    with start() as pair:
        a, b = pair.a, pair.b
        eventually(lambda: quota(a, "globex") == quota(b, "globex") == (200, 100))
        body = {"token_ids": IDS, "salt": "b's"}
        b.acme.post("/v1/warm", json=body)
        pinned = b.acme.post("/v1/pins", json={**body, "ttl_s": 600, "replicas": 1}).json()
        assert [(each["replica"], each["state"]) for each in pinned["replicas"]] == [("b", "done")]
        with pair.draining(), client(b.url, "demo-acme") as acme:
            ranked = a.acme.post("/v1/route", json={"token_ids": IDS, "predict": False}).json()["candidates"]
            assert [each["replica"] for each in ranked] == ["a"]
            assert reachable(a, "a") and view(a)["b"]["live"]
            for path, body in (
                ("/v1/warm", {"token_ids": IDS}),
                ("/v1/pins", {"token_ids": IDS, "ttl_s": 600}),
            ):
                made = a.acme.post(path, json={**body, "replicas": "all"}).json()
                assert [each["replica"] for each in made["replicas"]] == ["a"], path
                named = a.acme.post(path, json={**body, "replicas": ["b"]})
                assert (named.status_code, named.json()["error"]["value"]) == (422, "b"), path
            assert acme.get("/readyz").json()["reasons"] == ["stopping"]
            for path in (WARM_PATH, PIN_PATH):
                order = {"content-type": "application/json", **forged(b, path=path, body=b"{}")}
                refused = acme.post(path, content=b"{}", headers=order)
                assert (refused.status_code, refused.json()["error"]["type"]) == (503, "shutting_down")
            a.service.quotas.step()
            assert quota(a, "globex") == (200, 100)
            eventually(
                lambda: a.service.cache.tenant_stats("acme").pinned_blocks == 32, "a has the pin of b too"
            )
        assert pair.stream.lines[-1] == "data: [DONE]", "b has finished its answer"
        pins = {each["id"]: each["replicas"] for each in a.acme.get("/v1/pins").json()["pins"]}
        assert ("a", "done") in [(each["replica"], each["state"]) for each in pins[pinned["id"]]]
