"""The service over an engine whose cache is in another process: no call of the cache is made on the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from radixkv.engines import EngineSettings
from radixkv.errors import ControlError
from radixkv.index.changes import Journal
from tests.service.running import Running, service_in_thread
from tests.service.toy_engine import ToyEngine, ToyModel
from tests.waiting import eventually

ENTRY = "[radixkv.engines]\nwaiting = tests.service.test_waiting_cache:load_engine\n"
IDS = list(range(64))


class WaitingCache:
    """A cache whose calls would wait. Those that were made on an event loop are noted."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.called: list[str] = []
        self.on_loop: list[str] = []
        self.is_gone = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        if not callable(found):
            return found

        def called(*args: Any, **named: Any) -> Any:
            self.called.append(name)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                pass
            else:
                self.on_loop.append(name)
            if self.is_gone:
                raise ControlError("the engine is gone")
            return found(*args, **named)

        return called


class WaitingModel(ToyModel):
    def start(self, journal: Journal | None) -> ToyEngine:
        """Make an engine with pins."""
        engine = super().start(journal)
        engine.abilities = frozenset(("prefill", "pins"))
        engine.limits = replace(engine.limits, cache_waits=True)
        engine.cache = WaitingCache(engine.cache)  # type: ignore[assignment]
        return engine


def load_engine(settings: EngineSettings) -> WaitingModel:
    return WaitingModel(settings)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("site")
    info = folder / "waiting_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: waiting-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    sys.path.insert(0, str(folder))
    try:
        with service_in_thread(engine="waiting") as running:
            yield running
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def cache(live: Running) -> Iterator[Any]:
    """Whatever a test asks for, nothing of it waits on the event loop."""
    found: Any = live.service.cache
    yield found
    assert found.on_loop == []


def test_prefixes(live: Running, cache: Any) -> None:
    body = {"token_ids": IDS}
    assert live.acme.post("/v1/warm", json=body).json()["computed"] == 64
    assert live.acme.post("/v1/lookup", json=body).json()["matched_tokens"] == 64
    assert live.globex.post("/v1/lookup", json=body).json()["matched_tokens"] == 0
    routed = live.acme.post("/v1/route", json=body).json()["candidates"]
    assert [each["matched_tokens"] for each in routed] == [{"device": 64, "host": 0, "disk": 0}]
    completed = live.acme.post("/v1/completions", json={"prompt": IDS, "max_tokens": 2, "temperature": 0})
    assert completed.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert live.acme.delete("/v1/cache").json()["blocks"] >= 4


def test_pins_of_this_replica_and_of_the_fleet(live: Running, cache: Any) -> None:
    ids = IDS[::-1]
    body = {"token_ids": ids, "ttl_s": 60}
    assert live.acme.post("/v1/warm", json={"token_ids": ids}).status_code == 200
    own = live.acme.post("/v1/pins", json=body)
    fleet = live.acme.post("/v1/pins", json={**body, "token_ids": IDS, "replicas": "all"})
    assert (own.status_code, fleet.status_code) == (201, 201), fleet.text
    assert fleet.json()["replicas"][0]["state"] == "done"
    listed = [each["id"] for each in live.acme.get("/v1/pins").json()["pins"]]
    assert listed == [own.json()["id"], fleet.json()["id"]]
    assert live.acme.get("/v1/stats").json()["num_pins"] == 2
    for each in listed:
        assert live.acme.delete(f"/v1/pins/{each}").status_code == 204
    assert live.acme.get("/v1/stats").json()["num_pins"] == 0
    one = live.acme.post("/v1/pins", json={**body, "replicas": 1})
    assert one.status_code == 201 and live.operator.post("/v1/tenants/acme/purge").json()["complete"]
    assert live.acme.get("/v1/pins").json()["pins"] == []


def test_counts(live: Running, cache: Any) -> None:
    assert live.operator.get("/v1/stats").status_code == 200
    assert "radixkv_tenant_used_blocks" in live.operator.get("/metrics").text
    cache.is_gone = True
    try:
        told = live.operator.get("/metrics")
        assert told.status_code == 200 and "radixkv_http_requests" in told.text
        assert "radixkv_cache_" not in told.text and "radixkv_tenant_" not in told.text
        assert live.acme.post("/v1/lookup", json={"token_ids": IDS}).status_code == 503
    finally:
        cache.is_gone = False


@pytest.mark.slow
def test_upkeep(live: Running, cache: Any) -> None:
    cache.called.clear()
    eventually(lambda: cache.called.count("stats") > 1, "two steps of upkeep")
