"""The contract on the memory store, in virtual time, and what only a lonely replica does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from radixkv.clock import ManualClock
from radixkv.coordination import Settings, connect
from radixkv.coordination.base import BaseCoordinator
from radixkv.coordination.memory import MemoryCoordinator, MemoryStore
from radixkv.errors import ConfigError, StaleEpoch, StoreUnavailable
from tests.coordination.contract import ACME, SECRET, CoordinatorContract, Fleet, hinted, names, prompt, store


class MemoryFleet(Fleet):
    """Nothing runs by itself: a round lets the living beat and publish, then moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1000.0)
        self.store = MemoryStore(self.clock)
        self.dead: set[int] = set()

    def make(self, settings: dict[str, Any]) -> BaseCoordinator:
        return MemoryCoordinator(Settings(**settings, background=False), self.store)

    def eventually(self, holds: Callable[[], object]) -> None:
        for _ in range(100):
            self.settle()
            if holds():
                return
            self.clock.advance(self.lease_s / 10)
        pytest.fail("it never came to hold")

    def settle(self) -> None:
        for member in self.members:
            if id(member) not in self.dead and member.health().state in ("ok", "unavailable"):
                with suppress(StoreUnavailable, StaleEpoch):
                    member.beat()
                with suppress(StoreUnavailable, StaleEpoch):
                    member.publish()

    def kill(self, coordinator: BaseCoordinator) -> None:
        self.dead.add(id(coordinator))

    def forge(self, victim: str, name: str, address: str) -> None:
        record = self.store.records[victim]
        registration = replace(record.registration, replica_id=name, address=address)
        until = self.clock() + 60
        self.store.records[name] = replace(
            record, registration=registration, live_until=until, listed_until=until
        )

    def go_down(self) -> None:
        self.store.is_reachable = False

    def come_back(self) -> None:
        self.store.is_reachable = True

    def lose(self) -> None:
        self.clock.advance(0.01)
        self.store.lose()


@pytest.fixture
def fleet() -> Iterator[MemoryFleet]:
    fleet = MemoryFleet()
    yield fleet
    fleet.close()


class TestMemoryCoordinator(CoordinatorContract):
    """The reference semantics."""


def alone(**overrides: Any) -> Any:
    settings = {"replica_id": "only", "fleet_secret": SECRET, "fingerprint": "fp:model", "block_size": 16}
    return connect(None, **(settings | overrides))


def test_alone_there_is_no_journal_no_thread_and_no_lease() -> None:
    before = threading.active_count()
    coordinator = alone(block_size=24)
    assert coordinator.journal is None
    info = coordinator.register()
    assert info.live and info.epoch > 0 and coordinator.health().is_ok
    assert threading.active_count() == before
    assert names(coordinator.replicas()) == ["only"] and coordinator.peers() == []
    assert coordinator.hints(ACME, prompt(512)) == []
    job = coordinator.create_job(ACME, 512, ["only"])
    coordinator.report_job(job.id, "running", 1)
    seen = coordinator.job(job.id, "acme")
    assert seen is not None and seen.parts[0].state == "running"
    coordinator.close()
    assert coordinator.health().state == "left"


def test_replicas_of_one_process_share_a_store_with_threads_of_their_own() -> None:
    shared = MemoryStore()
    a = alone(replica_id="a", store=shared, lease_s=5.0, address="http://127.0.0.1:1")
    b = alone(replica_id="b", store=shared, lease_s=5.0)
    a.register()
    b.register()
    ids = prompt(512)
    store(a, ACME, ids)
    arrived = threading.Event()
    for _ in range(2000):
        if hinted(b, ACME, ids) == {"a": 512}:
            break
        arrived.wait(0.005)
    assert hinted(b, ACME, ids) == {"a": 512}
    a.close()
    b.close()


def test_a_job_is_forgotten_after_an_hour(fleet: MemoryFleet) -> None:
    a = fleet.join("a")
    job = a.create_job(ACME, 512, ["a"])
    fleet.clock.advance(3601)
    assert a.job(job.id, "acme") is None and not a.report_job(job.id, "done")


def test_a_lease_runs_out_to_the_moment(fleet: MemoryFleet) -> None:
    fleet.join("a")
    b = fleet.join("b")
    fleet.clock.advance(fleet.lease_s - 0.001)
    assert names(b.peers()) == ["a"]
    fleet.clock.advance(0.001)
    assert b.peers() == []


def test_a_thread_that_dies_of_a_bug_shows_in_the_health() -> None:
    class Broken:
        def snapshot(self) -> Any:
            raise RuntimeError("a bug")

        def namespaces(self) -> Any:
            return []

    heard: list[Any] = []
    hook, threading.excepthook = threading.excepthook, heard.append
    try:
        a = alone(replica_id="a", store=MemoryStore(), lease_s=1.0)
        a.attach(Broken())
        a.journal.suspend()
        a.register()
        for _ in range(2000):
            if a.health().state == "failed":
                break
            threading.Event().wait(0.005)
        assert a.health().state == "failed" and "a bug" in a.health().reason
        a.close()
    finally:
        threading.excepthook = hook
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ({"replica_id": ""}, "replica"),
        ({"replica_id": "a}b"}, "replica"),
        ({"replica_id": "a" * 65}, "replica"),
        ({"fleet_secret": b"short"}, "fleet_secret"),
        ({"fleet_secret": "a text of some length"}, "fleet_secret"),
        ({"fingerprint": ""}, "fingerprint"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 24, "store": MemoryStore()}, "block_size"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"address": "127.0.0.1:8400"}, "address"),
        ({"address": "http://user:password@host"}, "address"),
        ({"address": "http://host/?query"}, "address"),
        ({"address": "ftp://host"}, "address"),
        ({"address": "http://ho st"}, "address"),
        ({"address": "http://[::1"}, "address"),
        ({"address": "http://host:99999"}, "address"),
    ],
)
def test_settings_that_cannot_work_are_named(overrides: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        alone(**overrides)
    assert refusal.value.setting == setting
    assert "text of some length" not in str(refusal.value) and "password" not in str(refusal.value)
