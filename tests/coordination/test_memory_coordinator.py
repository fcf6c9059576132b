"""The contract on the memory store in virtual time, and the behaviour of a replica that is alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.clock import ManualClock
from radixkv.coordination import Settings, connect, quotas
from radixkv.coordination.coordinator import Coordinator
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.memory_coordinator import MemoryCoordinator
from radixkv.coordination.purges import Purge
from radixkv.coordination.quotas import Limits
from radixkv.coordination.routing.replica_sources import Generations
from radixkv.coordination.store.memory import MemoryStore
from radixkv.coordination.store.protocol import Durable, Share
from radixkv.coordination.store.wire import Confirmed, Limit, Raised, Registration
from radixkv.coordination.values import WIRE_VERSION, FleetPin, Load, Writer
from radixkv.coordination.view.reader import Reader
from radixkv.errors import ArgumentError, ConfigError, StaleEpoch, StoreUnavailable, UnreadableRecord
from tests.coordination import signed
from tests.coordination.contract import (
    ACME,
    SECRET,
    CoordinatorContract,
    Fleet,
    Purged,
    hinted,
    names,
    prompt,
    store,
)
from tests.waiting import LIMIT_S, eventually


class MemoryFleet(Fleet):
    """Nothing runs by itself. A round lets the living replicas beat and publish, then advances the clock."""

    lease_s = brief_s = 60.0

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1000.0)
        self.store = MemoryStore(self.clock)
        self.dead: set[int] = set()

    def make(self, settings: dict[str, Any]) -> Coordinator:
        return MemoryCoordinator(Settings(**settings | {"background": False}), self.store)

    def eventually(self, holds: Callable[[], object]) -> None:
        for _ in range(100):
            self.settle()
            if holds():
                return
            self.clock.advance(self.lease_s / 10)
        pytest.fail("the condition never became true")

    def settle(self) -> None:
        for member in self.members:
            if id(member) not in self.dead and member.health().state in ("ok", "unavailable"):
                with suppress(StoreUnavailable, StaleEpoch):
                    member.beat()
                with suppress(StoreUnavailable, StaleEpoch):
                    member.publish()
            elif id(member) not in self.dead and member.health().state == "fenced":
                member._step()

    def kill(self, coordinator: Coordinator) -> None:
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

    def forget(self, name: str) -> None:
        self.store.records.pop(name, None)

    def remember(self, digest: bytes) -> Callable[[], None]:
        account, announced = deepcopy(self.store.accounts.get(digest)), deepcopy(self.store.announced)

        def go_back() -> None:
            self.store.announced = announced
            self.store.accounts.pop(digest, None)
            if account is not None:
                self.store.accounts[digest] = account

        return go_back


@pytest.fixture
def fleet() -> Iterator[MemoryFleet]:
    fleet = MemoryFleet()
    yield fleet
    fleet.close()


class TestMemoryCoordinator(CoordinatorContract):
    """The memory store is the reference for the other stores."""


def test_two_operators_set_a_limit_at_once(fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica that writes second reads the limit again and overwrites it with a later stamp."""
    a, b = fleet.join("a"), fleet.join("b")
    set_limit, changes = fleet.store.set_limit, [5, None, 7]

    def set_after_b(tenant: bytes, limit: Limit, stamp: int) -> Any:
        if limit.blocks == 9 and changes:
            b.set_limit("acme", changes.pop())
        return set_limit(tenant, limit, stamp)

    monkeypatch.setattr(fleet.store, "set_limit", set_after_b)
    a.set_limit("acme", 9)
    assert not changes and fleet.store.tenant(a.keys.tenant("acme")).limit == 9
    fleet.eventually(lambda: a.limits() == b.limits() == {"acme": 9})


def test_a_limit_that_others_always_change_first_is_refused(
    fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = fleet.join("a")
    a.set_limit("acme", 4)
    monkeypatch.setattr(fleet.store, "set_limit", lambda *_: Durable(0, None))
    with pytest.raises(StoreUnavailable, match="keep changing"):
        a.set_limit("acme", 9)
    assert a.limits() == {"acme": 4}


def test_stamps_grow_with_any_clock() -> None:
    wall, keys, store = ManualClock(2_000.0), FleetKeys(SECRET), MemoryStore()
    here, there = Limits(keys, store, wall), Limits(keys, store, lambda: 5.0)
    for each, blocks in ((here, 3), (there, 4), (there, None), (here, 4)):
        each.state(b"t" * 32, blocks)
    assert here.of(b"t" * 32) == store.look_at([b"t" * 32])[0].limit  # type: ignore[union-attr]
    assert (here.of(b"t" * 32).blocks, here.of(b"t" * 32).stamp) == (4, 2_000_003)
    here.state(b"t" * 32, 4)
    assert here.of(b"t" * 32).stamp == 2_000_003, "an equal limit keeps its stamp"


def test_limits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_MAX_LIMITS", 3)
    known = Limits(FleetKeys(SECRET), MemoryStore())
    for index in range(9):
        known.state(bytes([index]) * 32, index)
    assert len(known) == 3 and [each.blocks for each in known.known().values()] == [6, 7, 8]


@pytest.mark.parametrize("by", ["beat", "reserve", "thread"])
def test_a_share_of_a_younger_process_does_not_fence_a_registered_one(fleet: MemoryFleet, by: str) -> None:
    """A share is not signed, so any writer may have made it.

    Nothing is granted while it lasts, so the shares still add up.
    """
    older = fleet.join("a")
    older.set_limit("acme", 100)
    older.reserve("acme", 10)
    registration = copy(fleet.store.records["a"])
    younger = fleet.join("a")
    younger.reserve("acme", 20)
    fleet.store.records["a"] = registration  # like a failover that loses the younger process
    if by == "thread":
        fleet.clock.advance(older.settings.beat_s)
        older._step()
    elif by == "beat":
        older.beat()
    else:
        older.reserve("acme", 10)
    grant = older.quotas.granted("acme")
    assert grant is not None and grant.blocks == 0 and older.health().is_ok
    younger.beat()
    assert younger.health().is_ok and younger.info().live
    with pytest.raises(StaleEpoch, match=r"a younger process|is fenced"):
        older.reserve("acme", 10)
    assert older.health().state == "fenced" and not older.info().live
    with pytest.raises(StaleEpoch):
        older.publish()


def test_a_share_without_an_end_is_dropped(fleet: MemoryFleet) -> None:
    a, digest = fleet.join("a"), FleetKeys(SECRET).tenant("acme")
    a.set_limit("acme", 10)
    shares = fleet.store.accounts[digest].shares
    shares["evil"] = 10.0**12, Share("evil", 1, "nonce", "fp:model", 10)
    shares["a"] = 10.0**12, Share("a", 10**14, "nonce", "fp:model", 10)
    assert a.reserve("acme", 10).blocks == 10


def test_a_raised_generation_that_was_never_announced_is_applied(fleet: MemoryFleet) -> None:
    """The raising replica died before the announcement, or the announcement's position was reused after a loss."""
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    b.replica.purges.meet(["acme", *(f"another {number}" for number in range(1_000))])
    digest = a.replica.keys.tenant("acme")
    signed.raise_generation(fleet.store, a.replica.keys, digest, 2)
    del fleet.store.announced[digest]
    fleet.eventually(lambda: b.replica.purges.generation("acme") == 3)
    assert b.purged == [("acme", 3)]
    assert a.purged == [] and a.replica.purges.generation("acme") == 0, (
        "a never met the tenant, so it has nothing to purge"
    )
    assert "b" in b.replica.purge_report("acme").confirmed
    b.replica.purge("acme")
    fleet.eventually(lambda: b.replica.purge_report("acme").is_complete)
    assert b.purged == [("acme", 3), ("acme", 4)] and a.replica.purges.generation("acme") == 4


def test_a_purge_waits_for_its_own_replica_after_the_store_ended_its_lease(fleet: MemoryFleet) -> None:
    """The store's clock has jumped ahead.

    By its own clock the replica still serves, and it has not seen the purge yet.
    """
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    a.warm(ACME, prompt(512))
    fleet.settle()
    b.replica.purge("acme")
    fleet.store.records["a"].live_until = 0.0
    assert a.replica.knows_generations and a.replica.purge_report("acme").pending == ("a",)
    fleet.clock.advance(fleet.lease_s)
    assert not a.replica.knows_generations and a.replica.purge_report("acme").unconfirmed[0] == "a"


def test_a_purge_that_failed_is_not_confirmed(fleet: MemoryFleet) -> None:
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    b.warm(ACME, prompt(512))
    b.replica.publish()
    a.replica.purge("acme")
    fleet.store.announced[a.replica.keys.tenant("acme")] = 0  # a position that no replica reads
    failures = [RuntimeError("a purge that fails")]

    def fail_once(tenant: str, raised: Raised) -> None:
        if failures:
            raise failures.pop()
        b.purge(tenant, raised)

    b.replica.attach(b.cache, fail_once)
    with pytest.raises(RuntimeError, match="a purge that fails"):
        b.replica.beat()
    assert a.replica.purge_report("acme").pending == ("b",)
    b.replica.beat()
    assert b.purged == [("acme", 1)] and a.replica.purge_report("acme").is_complete


def test_an_unsigned_generation_is_ignored(fleet: MemoryFleet) -> None:
    """Wire version 4 wrote such generations.

    A replica that knows a signed purge writes it again, and none applies the other.
    """
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    digest = a.replica.keys.tenant("acme")
    a.replica.purge("acme")
    fleet.eventually(lambda: a.replica.purge_report("acme").is_complete)
    for each in (a, b):
        each.warm(ACME, prompt(512))
    fleet.store.accounts[digest].raised = Raised(7, "ab" * 16)
    fleet.store.accounts[digest].confirmed = {"a": Confirmed("1000001"), "b": Confirmed("1000002")}
    with pytest.raises(UnreadableRecord, match=digest.hex()):
        b.replica.purge_report("acme")
    fleet.eventually(lambda: a.replica.purge_report("acme").confirmed == ("a", "b"))
    assert fleet.store.tenant(digest).generation == 1 and a.purged == [("acme", 1)] and b.purged == []
    assert all(each.cache.match(ACME, prompt(512)).num_tokens == 512 for each in (a, b))


@pytest.mark.parametrize("end", ["killed", "left", "lost"])
def test_a_fenced_replica_returns_only_if_no_process_held_its_lease(fleet: MemoryFleet, end: str) -> None:
    older, younger = fleet.join("a"), fleet.join("a")
    with pytest.raises(StaleEpoch):
        older.beat()
    if end == "left":
        younger.leave()
    fleet.kill(younger)
    if end == "lost":
        fleet.lose()
    for _ in range(100):
        fleet.clock.advance(older.settings.beat_s)
        older._step()
    assert older.health().state == ("ok" if end == "lost" else "fenced")
    assert older.info().live == (end == "lost")


def test_a_fenced_replica_gives_way_to_a_process_that_registers_meanwhile(fleet: MemoryFleet) -> None:
    older = fleet.join("a")
    registration = older._registration(older.info().epoch)
    for attempt in range(20):  # attempts of a process whose answers are lost
        fleet.store.boot(replace(registration, nonce=f"attempt {attempt}"))
        for _ in range(5):
            fleet.clock.advance(older.settings.beat_s)
            older._step()
        assert older.health().state == "fenced"
    younger = fleet.join("a")
    fleet.clock.advance(older.settings.beat_s)
    older._step()
    younger.beat()
    assert older.health().state == "fenced" and younger.health().is_ok and younger.info().live


def alone(**overrides: Any) -> Any:
    settings = {"replica_id": "only", "fleet_secret": SECRET, "fingerprint": "fp:model", "block_size": 16}
    return connect(None, **(settings | overrides))


def test_a_lone_replica_has_no_journal_no_thread_and_no_lease() -> None:
    before = set(threading.enumerate())  # threads of other tests may end meanwhile
    coordinator = alone(block_size=24)
    assert coordinator.journal is None
    info = coordinator.register()
    assert info.live and info.epoch > 0 and coordinator.health().is_ok
    started = set(threading.enumerate()) - before
    assert not [thread.name for thread in started if thread.name.startswith("radixkv-")]
    assert names(coordinator.replicas()) == ["only"] and coordinator.peers() == []
    assert coordinator.hints(ACME, prompt(512)) == []
    job = coordinator.create_job(ACME, 512, ["only"])
    coordinator.report_job(job.id, "running", 1)
    seen = coordinator.job(job.id, "acme")
    assert seen is not None and seen.parts[0].state == "running"
    coordinator.attach(PrefixCache(CacheConfig(num_blocks=4, block_size=24)), lambda tenant, raised: None)
    assert coordinator.knows_generations and coordinator.purge("acme").is_complete
    coordinator.close()
    assert coordinator.health().state == "left"


@pytest.mark.parametrize("hours", [1.01, 24, 24 * 365])
def test_a_lone_replica_stays_as_it_is_though_nothing_beats(hours: float) -> None:
    """Only its pins and jobs end: when their own time is over."""
    clock = ManualClock(1000.0)
    settings = Settings("only", SECRET, "fp:model", 16, address="http://127.0.0.1:1")
    with closing(MemoryCoordinator(settings, clock=clock)) as only:
        purged: list[int] = []
        only.attach(
            PrefixCache(CacheConfig(num_blocks=4, block_size=16)),
            lambda tenant, raised: purged.append(raised.generation),
        )
        registered = only.register()
        only.purges.meet(["acme"])
        only.set_limit("acme", 7)
        assert only.purge("acme").confirmed == ("only",) and only.reserve("acme", 9).blocks == 7
        pin = FleetPin("1" * 32, only.pin_digest(ACME), 512, "all")
        assert only.keep_pin("acme", pin, hours * 3600 + 60) and only.state_pin("acme", pin.id, "done", 512)
        clock.advance(hours * 3600)
        job = only.create_job(ACME, 512, ["only"])
        clock.advance(59)

        (info,) = only.replicas()
        assert info == registered and info.live and info.lease_remaining_s == settings.lease_s
        assert only.knows_generations and only.health().is_ok and only.unavailable is None
        assert only.purge_report("acme") == Purge(1, ("only",), pending=(), unconfirmed=())
        assert only.limits() == {"acme": 7}
        (share,) = only.store.tenant(only.keys.tenant("acme")).shares
        assert share.blocks == 7 and only.reserve("acme", 9).blocks == 7
        assert only.report_job(job.id, "running", 1)
        taken = only.take_job(job.id, "acme")
        assert taken is not None and [part.state for part in taken.parts] == ["running"]
        ((part,),) = (each.parts for each in only.fleet_pins("acme"))
        assert part.state == "done"
        assert only.purge("acme") == Purge(2, ("only",), pending=(), unconfirmed=())
        assert purged == [1, 2]
        clock.advance(1.5)
        assert only.fleet_pins("acme") == []


def test_replicas_of_one_process_share_a_store_with_threads_of_their_own() -> None:
    shared = MemoryStore()
    a = alone(replica_id="a", store=shared, lease_s=LIMIT_S, address="http://127.0.0.1:1")
    b = alone(replica_id="b", store=shared, lease_s=LIMIT_S)
    a.register()
    b.register()
    ids = prompt(512)
    store(a, ACME, ids)
    eventually(lambda: hinted(b, ACME, ids) == {"a": 512})
    a.close()
    b.close()


def test_a_job_is_forgotten_after_an_hour(fleet: MemoryFleet) -> None:
    a = fleet.join("a")
    job = a.create_job(ACME, 512, ["a"])
    fleet.clock.advance(3601)
    assert a.job(job.id, "acme") is None and not a.report_job(job.id, "done")


def test_the_owner_of_a_job_can_hand_it_on_end_it_and_give_parts_up(fleet: MemoryFleet) -> None:
    a, b, c = (fleet.join(name) for name in "abc")
    job = a.create_job(ACME, 1000, ["a"], num_wanted=2, num_left_out=7, request="ab" * 32)
    assert (job.num_left_out, job.request, job.num_missing) == (7, "ab" * 32, 1)
    assert b.create_job(ACME, 9, ["b"], job_id=job.id, request="cd" * 32).request == "ab" * 32
    assert not b.hand_job(job.id, c.info()) and not b.end_job(job.id), "b does not own the job"
    assert a.hand_job(job.id, b.info()) and not a.end_job(job.id)
    assert b.extend_job(job.id, "c")
    given = b.job(job.id, "acme")
    assert given is not None and b.give_up(job.id, given.parts[1], "unreachable")
    assert a.report_job(job.id, "done", 1000, num_tokens_cached=16, ms=20)
    seen = c.job(job.id, "acme")
    assert seen is not None and seen.is_over and not seen.is_ended, "b may ask another replica"
    assert [(part.state, part.error, part.num_tokens_cached, part.ms) for part in seen.parts] == [
        ("done", "", 16, 20),
        ("failed", "unreachable", 0, 0),
    ]
    assert b.end_job(job.id) and b.take_job(job.id, "acme") is None
    ended = c.job(job.id, "acme")
    assert ended is not None and ended.is_ended and ended.num_missing == 1
    c.forget_job(job.id)
    assert c.job(job.id, "acme") is None
    for bad in ({"num_left_out": -1}, {"request": "no digest"}):
        with pytest.raises(ArgumentError):
            a.create_job(ACME, 1, ["a"], **bad)  # type: ignore[arg-type]


def test_a_job_ends_when_no_living_replica_knows_its_prompt(fleet: MemoryFleet) -> None:
    a, b, c = (fleet.join(name) for name in "abc")
    job = a.create_job(ACME, 1000, ["b"], num_wanted=1)
    fleet.kill(b)
    fleet.eventually(lambda: b.info().lease_remaining_s == 0)
    waiting = c.job(job.id, "acme")
    assert waiting is not None and waiting.parts[0].state == "lost" and not waiting.is_ended
    fleet.kill(a)
    fleet.eventually(lambda: a.info().lease_remaining_s == 0)
    orphan = c.job(job.id, "acme")
    assert orphan is not None and orphan.is_ended and c.take_job(job.id, "acme") is None


def test_replicas_write_generations_again_to_a_store_that_lost_all(fleet: MemoryFleet) -> None:
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    a.warm(ACME, prompt(512))
    b.warm(ACME, prompt(512))
    fleet.settle()
    assert a.replica.purge("acme").generation == 1
    fleet.eventually(lambda: a.replica.purge_report("acme").is_complete)
    assert a.purged == b.purged == [("acme", 1)]
    cut_off = Purged(fleet, "cut-off")
    cut_off.warm(ACME, prompt(512))
    fleet.kill(cut_off.replica)
    assert a.replica.purge("acme").generation == 2
    fleet.lose()
    fleet.eventually(lambda: a.replica.purge_report("acme").generation == 2)
    for each in (a, b):  # a replica that sees the purge again applies it again
        assert list(dict.fromkeys(each.purged)) == [("acme", 1), ("acme", 2)]
    cut_off.replica.register()
    fleet.dead.clear()
    fleet.eventually(lambda: cut_off.purged[-1:] == [("acme", 2)])
    assert not cut_off.cache.namespaces("acme")


def test_a_purge_after_a_loss_is_applied_although_its_number_repeats(fleet: MemoryFleet) -> None:
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    assert a.replica.purge("acme").generation == 1
    fleet.eventually(lambda: b.replica.purge_report("acme").is_complete)
    fleet.lose()
    b.warm(ACME, prompt(512))
    stranger = Purged(fleet, "stranger")
    assert stranger.replica.purge("acme").generation == 1
    fleet.eventually(lambda: not b.cache.namespaces("acme"))
    assert b.purged == [("acme", 1)], "the same number, but another purge"


def test_a_purge_waits_for_a_replica_that_the_store_forgot(fleet: MemoryFleet) -> None:
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    a.replica.purge("acme")
    fleet.store.records.pop("b")
    assert a.replica.purges.report("acme").pending == ("b",)
    report = a.replica.purges.report("acme", living=["a", "b"])
    assert report.pending == ("b",) and report.confirmed == ("a",) and b.purged == []


def test_generations_count_as_known_once_they_were_read(fleet: MemoryFleet) -> None:
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    fleet.settle()
    purges = fleet.store.purges

    def away(after: int) -> list[tuple[bytes, int]]:
        raise StoreUnavailable("a moment after the beat")

    fleet.store.purges = away  # type: ignore[method-assign]
    fleet.clock.advance(fleet.lease_s * 0.9)
    with pytest.raises(StoreUnavailable):
        b.replica.beat()
    fleet.clock.advance(fleet.lease_s * 0.2)
    assert b.replica.info().live and not b.replica.knows_generations
    fleet.store.purges = purges  # type: ignore[method-assign]
    b.replica.apply_purges()
    assert not b.replica.knows_generations, "only the next beat renews the knowledge"
    b.replica.beat()
    assert b.replica.knows_generations and a.replica.info().epoch


def test_a_replica_applies_a_purge_at_once(fleet: MemoryFleet) -> None:
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    b.warm(ACME, prompt(512))
    assert a.replica.purge("acme").pending == ("b",)
    b.replica.apply_purges()
    assert a.replica.purge_report("acme").is_complete and not b.cache.namespaces("acme")


def test_a_lease_expires_exactly_on_time(fleet: MemoryFleet) -> None:
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

        def tenants(self) -> Any:
            return []

    heard: list[str | None] = []
    hook = threading.excepthook
    threading.excepthook = lambda failure: heard.append(failure.thread and failure.thread.name)
    try:
        a = alone(replica_id="a", store=MemoryStore(), lease_s=60.0)
        a.attach(Broken())
        a.journal.suspend()
        a.register()
        eventually(lambda: a.health().state == "failed" and "a bug" in a.health().reason)
        a.close()
    finally:
        threading.excepthook = hook
    assert heard.count("radixkv-publisher-a") == 1


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
        ({"background": "no"}, "background"),
        ({"address": "127.0.0.1:8400"}, "address"),
        ({"address": "http://user:password@host"}, "address"),
        ({"address": "http://host/?query"}, "address"),
        ({"address": "ftp://host"}, "address"),
        ({"address": "http://ho st"}, "address"),
        ({"address": "http://[::1"}, "address"),
        ({"address": "http://host:99999"}, "address"),
    ],
)
def test_invalid_settings_are_named(overrides: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        alone(**overrides)
    assert refusal.value.setting == setting
    assert "text of some length" not in str(refusal.value) and "password" not in str(refusal.value)


def test_memory_for_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound, purges of tenants with resident blocks are still applied, as the cache lists them."""
    monkeypatch.setattr("radixkv.coordination.purges._MAX_NAMES", 5)
    monkeypatch.setattr("radixkv.coordination.purges.MAX_PURGES", 7)
    a = alone(replica_id="a", store=MemoryStore())
    cache = PrefixCache(CacheConfig(num_blocks=64, block_size=16), journal=a.journal)
    purged: list[str] = []
    a.attach(cache, lambda tenant, raised: (purged.append(tenant), cache.purge(tenant))[0])
    a.register()
    for number in range(20):
        with cache.open(Namespace(f"tenant-{number}", "fp:model"), list(range(32))) as sequence:
            sequence.commit(32)
    a.publish()
    most = 0
    for number in range(20):
        a.purges.meet([f"other-{number}"])
        assert a.purge(f"tenant-{number}").is_complete
        most = max(most, a.purges.num_bytes + a.quotas.num_bytes)
    assert set(purged) == {f"tenant-{number}" for number in range(20)} and not cache.stats().resident_blocks
    assert most == (5 + 7) * 200 == a.health().tenant_bytes
    a.close()


def test_a_store_clock_that_jumps_ahead_ends_no_lease_for_a_purge() -> None:
    """The reader had not seen a beat before the jump, so it came after the last fetch.

    Its lease may still run on its replica's clock.
    """
    wall, clock = ManualClock(1000.0), ManualClock(5.0)
    store, keys = MemoryStore(wall), FleetKeys(SECRET)
    registration = Registration("b", 0, "nonce", "", "fp:model", 16, WIRE_VERSION, keys.canary)
    writer = Writer("b", store.boot(registration).value, "nonce")
    reader = Reader(Settings("a", SECRET, "fp:model", 16), keys, store, clock)

    def remaining_s() -> float:
        return reader.remaining_s(store.fetch(["b"]).seen[0])

    signed.beat(store, keys, writer, 1)
    reader.refresh()
    signed.beat(store, keys, writer, 2)
    wall.advance(3600.0)
    assert remaining_s() == 10.0 and reader.known()[0].info.live, "as of the last fetch"
    reader.refresh()
    assert not reader.known()[0].info.live, "no request goes to the replica"
    clock.advance(9.0)
    assert remaining_s() == pytest.approx(1.0)
    clock.advance(1.5)
    reader.refresh()
    assert remaining_s() == 0.0
    late = Reader(Settings("c", SECRET, "fp:model", 16), keys, store, clock)
    late.refresh()
    assert late.remaining_s(store.fetch(["b"]).seen[0]) == 0.0, "a new reader cannot know of the lost beat"


def test_a_reader_survives_a_clock_turned_back_before_the_first_read() -> None:
    now, store, keys = [10_000.0], MemoryStore(ManualClock(5.0)), FleetKeys(SECRET)
    registration = Registration("b", 0, "nonce", "", "fp:model", 16, WIRE_VERSION, keys.canary)
    signed.beat(store, keys, Writer("b", store.boot(registration).value, "nonce"), 1)
    reader = Reader(Settings("a", SECRET, "fp:model", 16), keys, store, lambda: now[0])
    store.is_reachable = False
    with pytest.raises(StoreUnavailable):
        reader.poll()
    store.is_reachable = True
    now[0] -= 3600.0
    reader.poll()
    assert [known.info.id for known in reader.known()] == ["b"]


def test_the_next_snapshot_repairs_a_hole_in_a_log(fleet: MemoryFleet) -> None:
    a, b = fleet.join("a", lease_s=60.0, snapshot_entries=8), fleet.join("b", lease_s=60.0)
    prompts = [prompt(512, seed) for seed in range(10)]
    store(a, ACME, prompts[0])
    a.publish()
    assert hinted(b, ACME, prompts[0]) == {"a": 512}
    store(a, ACME, prompts[1])
    a.publish()
    del fleet.store.records["a"].log[a.info().last_seq]
    store(a, ACME, prompts[2])
    a.publish()
    assert [hinted(b, ACME, ids) for ids in prompts[:3]] == [{}, {}, {"a": 512}]
    for ids in prompts[3:]:  # without a beat, which would notice the gap
        store(a, ACME, ids)
        a.publish()
    assert a.health().num_snapshots == 1
    assert all(hinted(b, ACME, ids) == {"a": 512} for ids in prompts)


def test_a_log_that_could_not_be_read_once_is_read_later(
    fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard or a master that is being replaced may return the registration but not the log."""
    a, b = fleet.join("a", lease_s=60.0), fleet.join("b", lease_s=60.0)
    store(a, ACME, prompt(512))
    a.publish()
    with monkeypatch.context() as patch:
        patch.setattr(fleet.store, "read", lambda cursors, block_s=0.0: {})
        assert hinted(b, ACME, prompt(512)) == {}
    assert hinted(b, ACME, prompt(512)) == {"a": 512}


@pytest.mark.parametrize("what", ["append", "snapshot"])
def test_sequence_numbers_that_a_store_may_have_lost_are_not_reused(
    fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A failover loses a write that readers have seen. The writer never got an answer."""
    a, b = fleet.join("a", lease_s=60.0), fleet.join("b", lease_s=60.0)
    before, write = deepcopy(fleet.store.records["a"]), getattr(fleet.store, what)

    def lose(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        b.reader.refresh()
        fleet.store.records["a"] = before
        raise StoreUnavailable("the master is gone")

    if what == "snapshot":
        fleet.store.records["a"].log.clear()
        before.log.clear()
    for seed in range(5):
        store(a, ACME, prompt(512, seed))
    with monkeypatch.context() as patch:
        patch.setattr(fleet.store, what, lose)
        with pytest.raises(StoreUnavailable):
            a.beat()
            a.publish()
    fleet.clock.advance(1.0)
    store(a, ACME, prompt(512, 5))
    a.publish()
    assert all(hinted(b, ACME, prompt(512, seed)) == {"a": 512} for seed in range(6))


def test_a_lost_position_is_never_reused_for_another_purge() -> None:
    clock = ManualClock(1000.0)
    store = MemoryStore(clock)
    signed.raise_generation(store, FleetKeys(SECRET), b"t" * 32)
    (_, read_up_to), *_ = store.purges(0)
    store.lose()
    clock.advance(0.5)
    signed.raise_generation(store, FleetKeys(SECRET), b"u" * 32)
    assert [tenant for tenant, _ in store.purges(read_up_to)] == [b"u" * 32]


def test_beats_after_a_loss_differ_from_those_before(fleet: MemoryFleet) -> None:
    """A store goes back to an earlier state.

    As many beats later it must not look unchanged to a reader that saw the lost ones.
    """
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    b.warm(ACME, prompt(512))
    saved = deepcopy(fleet.store.records)
    for _ in range(2):
        b.replica.beat()
    a.replica.reader.refresh()
    fleet.clock.advance(0.8 * fleet.lease_s)
    fleet.store.records = saved
    for _ in range(2):
        b.replica.beat()
    fleet.clock.advance(0.5 * fleet.lease_s)
    assert b.replica.knows_generations and b.cache.match(ACME, prompt(512)).num_tokens == 512
    a.replica.beat()
    assert a.replica.purge("acme").pending == ("b",)


def test_a_purge_allows_for_a_lost_beat_that_extended_a_lease(fleet: MemoryFleet) -> None:
    a, b = (Purged(fleet, name).replica for name in "ab")
    saved = deepcopy(fleet.store.records)
    a.reader.refresh()
    fleet.clock.advance(0.5 * fleet.lease_s)
    b.beat()
    fleet.go_down()
    with pytest.raises(StoreUnavailable):
        a.reader.refresh()
    fleet.store.records = saved
    fleet.come_back()
    fleet.clock.advance(0.7 * fleet.lease_s)
    a.beat()
    assert b.knows_generations and a.purge("acme").pending == ("b",)
    fleet.clock.advance(0.5 * fleet.lease_s)
    assert not b.knows_generations and a.purge_report("acme").unconfirmed == ("b",)


@pytest.mark.parametrize("lost", ["all of it", "that it was announced", "the number"])
def test_a_purge_that_a_store_lost_is_written_again(fleet: MemoryFleet, lost: str) -> None:
    """The store goes back to an earlier state, or loses a shard. Every registration is still there."""
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    router = Generations(a.replica.keys, fleet.store)
    b.warm(ACME, prompt(512))
    fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {"b": 512})
    assert a.replica.purge("acme").pending == ("b",)
    router.follow(a.replica.reader.registrations())
    assert router("acme") == 0
    router.follow(a.replica.reader.registrations())
    assert router("acme") == 1
    if lost != "that it was announced":
        fleet.store.accounts.clear()
    if lost != "the number":
        fleet.store.announced.clear()
    report = a.replica.purge_report("acme")
    assert (report.generation, report.pending) == (
        1,
        ("b",) if lost == "that it was announced" else ("a", "b"),
    )
    fleet.clock.advance(0.01)
    router.follow(a.replica.reader.registrations())
    fleet.eventually(lambda: b.purged and a.replica.purge_report("acme").is_complete)
    assert hinted(a.replica, ACME, prompt(512)) == {} and b.cache.match(ACME, prompt(512)).num_tokens == 0
    b.warm(ACME, prompt(512))
    fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {"b": 512})
    for _ in range(2):
        router.follow(a.replica.reader.registrations())
    generations = {each.replica.purges.generation("acme") for each in (a, b)}
    assert generations == {router("acme")} == {fleet.store.tenant(a.replica.keys.tenant("acme")).generation}


def test_a_purge_is_announced_again_if_only_its_announcement_was_lost(fleet: MemoryFleet) -> None:
    """A failover between the two writes: the new number arrived, but the tenant keeps its old position among the
    announcements.
    """
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    a.replica.purge("acme")
    fleet.eventually(lambda: a.replica.purge_report("acme").is_complete)
    before = deepcopy(fleet.store.announced)
    fleet.clock.advance(0.01)
    assert a.replica.purge("acme").pending == ("b",)
    fleet.store.announced = before
    fleet.clock.advance(0.01)
    fleet.eventually(lambda: a.replica.purge_report("acme").is_complete)
    assert b.replica.purges.generation("acme") == 2
    num_purged = len(b.purged)
    for _ in range(3):
        fleet.clock.advance(0.01)
        fleet.settle()
    assert len(b.purged) == num_purged, "the purge is announced once"


class Taken:
    """An id that a second process takes from a first one, and a reader with its own clock."""

    def __init__(self) -> None:
        self.wall, self.now = ManualClock(1000.0), [10_000.0]
        self.store, self.keys = MemoryStore(self.wall), FleetKeys(SECRET)
        self.reader = self.another()
        self.num_beats = 0

    def another(self) -> Reader:
        return Reader(Settings("a", SECRET, "fp:model", 16), self.keys, self.store, lambda: self.now[0])

    def boot(self, nonce: str) -> Writer:
        registration = Registration("b", 0, nonce, "", "fp:model", 16, WIRE_VERSION, self.keys.canary)
        return Writer("b", self.store.boot(registration).value, nonce)

    def beat(self, writer: Writer) -> None:
        self.num_beats += 1
        assert signed.beat(self.store, self.keys, writer, self.num_beats).verdict == "OK"

    def replaced(self, reader: Reader | None = None) -> set[str]:
        return (reader or self.reader).replaced(self.store.fetch(["b"]).seen)


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_reader_clock_that_jumps_ends_no_lease_of_a_replaced_process(seconds: float) -> None:
    """The reader's clock jumps. The wait starts anew, once, with the time that was left when the id was taken."""
    taken = Taken()
    taken.beat(taken.boot("first"))
    taken.beat(taken.boot("second"))
    assert taken.replaced() == {"b"}
    taken.reader.refresh()
    taken.now[0] += 4.0
    assert taken.replaced() == {"b"}
    taken.now[0] += seconds
    assert taken.replaced() == {"b"}
    taken.reader.refresh()
    taken.now[0] += 9.0
    taken.reader.refresh()
    assert taken.replaced() == {"b"}
    taken.now[0] += 2.0
    taken.reader.refresh()
    assert taken.replaced() == set()
    taken.now[0] += seconds
    assert taken.replaced() == set(), "the wait was over before"
    taken.reader.refresh()
    assert taken.replaced() == set()


def test_a_store_clock_that_jumps_ahead_ends_no_lease_of_a_replaced_process() -> None:
    """The store's clock jumps before the id is taken, so that the store knows of no lease, or after it.

    The reader has seen the beat.
    """
    taken = Taken()
    taken.beat(taken.boot("first"))
    taken.reader.refresh()
    taken.wall.advance(3600.0)
    second = taken.boot("second")
    taken.beat(second)
    assert taken.replaced() == {"b"}
    taken.reader.refresh()
    taken.now[0] += 9.0
    assert taken.replaced() == {"b"}
    third = taken.boot("third")
    taken.beat(third)
    taken.reader.refresh()
    taken.now[0] += 9.0
    taken.wall.advance(3600.0)
    taken.beat(third)
    assert taken.replaced() == {"b"}, "the last of several leases counts"
    taken.now[0] += 2.0
    assert taken.replaced() == set() == taken.replaced(taken.another())


def test_the_rest_of_a_replaced_lease_is_waited_for_once() -> None:
    """The process that took the id sends no more beats, so the store keeps its last statement."""
    taken = Taken()
    taken.beat(taken.boot("first"))
    second = taken.boot("second")
    taken.wall.advance(4.0)
    taken.beat(second)
    taken.reader.refresh()
    taken.now[0] += 5.0
    taken.reader.refresh()
    assert taken.replaced() == {"b"}
    taken.now[0] += 2.0
    taken.reader.refresh()
    assert taken.replaced() == set()
    taken.store.clock = ManualClock(500.0)
    taken.beat(second)
    assert taken.store.records["b"].registration.replaced_ms == 6000, (
        "a clock that goes back makes it no more"
    )


def test_the_process_seen_first_is_replaced_if_two_have_one_epoch() -> None:
    taken = Taken()
    first = taken.boot("first")
    for _ in range(3):
        taken.beat(first)
    taken.reader.refresh()
    taken.store.lose()
    taken.num_beats = 0
    second = taken.boot("second")
    assert second.epoch == first.epoch
    taken.beat(second)
    taken.wall.advance(3600.0)
    (seen,) = taken.store.fetch(["b"]).seen
    assert seen.remaining_s == 0.0 and taken.reader.remaining_s(seen) == 10.0
    before = taken.reader.registrations()
    taken.reader.refresh()
    assert taken.reader.registrations() - before == {second} and taken.replaced() == {"b"}
    taken.now[0] += 11.0
    assert taken.replaced() == set()


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_reader_clock_that_jumps_ends_no_lease_for_a_purge(seconds: float) -> None:
    """The reader's clock jumps. Its information about the others then has no known age, for as long as their leases."""
    now, store, keys = [10_000.0], MemoryStore(ManualClock(5.0)), FleetKeys(SECRET)
    registration = Registration("b", 0, "nonce", "", "fp:model", 16, WIRE_VERSION, keys.canary)
    writer = Writer("b", store.boot(registration).value, "nonce")
    reader = Reader(Settings("a", SECRET, "fp:model", 16), keys, store, lambda: now[0])

    def remaining_s() -> float:
        return reader.remaining_s(store.fetch(["b"]).seen[0])

    signed.beat(store, keys, writer, 1)
    reader.refresh()
    now[0] += 4.0
    assert remaining_s() == 6.0
    now[0] += seconds
    assert remaining_s() == 10.0 and reader.forgotten({}) == {"b"}
    reader.refresh()
    now[0] += 9.0
    reader.refresh()
    assert remaining_s() == 1.0 and reader.known()[0].info.lease_remaining_s == 1.0
    now[0] += 2.0
    reader.refresh()
    assert remaining_s() == 0.0 and not reader.known()[0].info.live
    store.is_reachable = False
    now[0] += seconds
    with pytest.raises(StoreUnavailable):
        reader.refresh()
    assert reader.known()[0].info.lease_remaining_s <= 10.0


def test_a_clock_turned_back_does_not_extend_a_cut_off_replicas_knowledge(
    fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = fleet.join("a")
    fleet.clock.advance(0.1)
    assert a.knows_generations
    fleet.go_down()
    fleet.clock.now -= 3600.0
    assert not a.knows_generations, "at once, without waiting for the thread that beats"
    fleet.come_back()
    with monkeypatch.context() as patch:
        patch.setattr(fleet.store, "purges", away)
        with pytest.raises(StoreUnavailable):
            a.beat()
        assert a.info().live and not a.knows_generations, (
            "it has a lease again, but has not read the generations yet"
        )
    a.beat()
    assert a.knows_generations


def away(after: int) -> list[tuple[bytes, int]]:
    """A store that answers the beat and fails a moment later."""
    raise StoreUnavailable("a moment after the beat")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replica_id", None), ("fingerprint", 5), ("block_size", "16"), ("block_size", 16.0), ("lease_s", "9"),
        ("lease_s", float("nan")), ("address", 5), ("fleet_secret", "a text of sixteen characters"),
        ("block_size", True), ("lease_s", True), ("lease_s", 10**400),
    ],
)  # fmt: skip
def test_settings_of_a_wrong_type_are_named(fleet: MemoryFleet, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.removesuffix("_id")):
        fleet.replica("a", **{name: value})


def test_arguments_of_a_wrong_type_are_named(fleet: MemoryFleet) -> None:
    a: Any = fleet.join("a")
    job: dict[str, Any] = {"namespace": ACME, "num_tokens": 256, "replica_ids": ["a"]}
    calls: list[tuple[str, Callable[[], object]]] = [
        ("tenant", lambda: a.purge(5)), ("tenant", lambda: a.purge("")), ("tenant", lambda: a.reserve(None, 1)),
        ("blocks", lambda: a.reserve("acme", 1.5)), ("blocks", lambda: a.set_limit("acme", "9")),
        ("queued_prefill_tokens", lambda: Load(1.5)), ("decode_blocks", lambda: Load(0, "9")),  # type: ignore[arg-type]
        ("queued_prefill_tokens", lambda: Load(10**15)), ("resident_blocks", lambda: Load(0, 0, True)),
        ("load", lambda: a.report_load(None)), ("load", lambda: a.report_load(5)),
        ("blocks", lambda: a.reserve("acme", True)),
        *((name, lambda name=name, wrong=wrong: a.create_job(**{**job, name: wrong})) for name, wrong in (
            ("num_tokens", None), ("num_tokens", 1.5), ("num_tokens", True), ("num_tokens", -1), ("num_left_out", "5"),
            ("namespace", "acme"), ("replica_ids", "a"), ("replica_ids", None), ("job_id", 5), ("request", None),
        )),
        ("job_id", lambda: a.job(None, "acme")), ("job_id", lambda: a.report_job(5, "running")),
        *(("num_tokens_done", lambda wrong=wrong: a.report_job("0" * 32, "running", wrong))
          for wrong in (None, 1.5, True)),
    ]  # fmt: skip
    for name, call in calls:
        with pytest.raises(ArgumentError, match=name):
            call()
    assert not fleet.store.accounts and not fleet.store.announced and not fleet.store.jobs


def test_an_invalid_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="store=5 is not allowed; allowed: a MemoryStore, or None"):
        alone(store=5)
    with pytest.raises(ConfigError, match="None where there is a URL"):
        connect("redis://127.0.0.1:1", replica_id="a", fleet_secret=SECRET, fingerprint="fp", block_size=16,
                store=MemoryStore())  # fmt: skip


def test_calls_before_the_registration_do_not_blame_the_store(fleet: MemoryFleet) -> None:
    a = fleet.replica("a")
    for _ in range(3):
        for call in (
            a.beat,
            a.publish,
            a.apply_purges,
            lambda: a.purge("acme"),
            lambda: a.reserve("acme", 1),
        ):
            with pytest.raises(StoreUnavailable, match=r"replica a is not registered: new$"):
                call()
    assert a.health().state == "new" and not a.health().reason


def test_a_refused_replica_stays_refused_for_every_call(fleet: MemoryFleet) -> None:
    """This holds also for a former member after the store lost everything, if another fleet registered first."""
    a = fleet.join("a")
    fleet.lose()
    stranger = fleet.join("stranger", fleet_secret=b"another secret of some length")
    with pytest.raises(ConfigError, match="stranger"):
        a.beat()
    for call in (a.beat, a.publish, a.apply_purges, lambda: a.purge("acme"), lambda: a.reserve("acme", 1)):
        with pytest.raises(StoreUnavailable, match="stranger"):
            call()
        assert a.health().state == "refused" and "stranger" in a.health().reason
    assert not fleet.store.accounts and "a" not in fleet.store.records, "nothing was written"
    stranger.leave()
    a.register()
    assert a.health().is_ok
