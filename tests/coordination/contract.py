"""The contract of every coordinator with every store: one suite that each implementation inherits.

A ``Fleet`` is the harness for one store. It creates replicas, stops them without a farewell, lets time pass until a
condition holds, and simulates failures of the store.
"""

from __future__ import annotations

import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.coordination import Coordinator, Load
from radixkv.coordination.keys import SEGMENT_TOKENS
from radixkv.coordination.purges import Purges
from radixkv.coordination.store.wire import NEVER, Limit, Raised
from radixkv.coordination.values import MAX_AMOUNT, WIRE_VERSION, FleetPin, Writer
from radixkv.errors import ArgumentError, ConfigError, CoordinationError, StaleEpoch, StoreUnavailable
from tests.coordination import signed

SECRET = b"the secret of the fleet under test"
ACME = Namespace("acme", "fp:model")
OTHER = Namespace("other", "fp:model")


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids; different seeds share no prefix."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, 32_000, num_tokens)]


class Fleet(ABC):
    """Replicas on one store. ``settings`` of a replica can be overridden one by one.

    ``lease_s`` is the lease of the replicas in seconds, unless overridden. ``brief_s`` is a short lease for tests that
    wait until it expires. A slow machine may end such a lease early, so only replicas that no test needs alive have it.
    """

    lease_s = brief_s = 0.6

    def __init__(self) -> None:
        self.members: list[Coordinator] = []

    def settings(self, name: str, overrides: dict[str, Any]) -> dict[str, Any]:
        defaults = {
            "replica_id": name,
            "fleet_secret": SECRET,
            "fingerprint": "fp:model",
            "block_size": 16,
            "address": f"http://127.0.0.1:1/{name}",
            "lease_s": self.lease_s,
        }
        return defaults | overrides

    def replica(self, name: str, **overrides: Any) -> Coordinator:
        """A coordinator that is not registered yet."""
        coordinator = self.make(self.settings(name, overrides))
        self.members.append(coordinator)
        return coordinator

    def join(self, name: str, **overrides: Any) -> Coordinator:
        """A registered coordinator."""
        coordinator = self.replica(name, **overrides)
        coordinator.register()
        return coordinator

    def close(self) -> None:
        for member in self.members:
            member.close()

    @abstractmethod
    def make(self, settings: dict[str, Any]) -> Coordinator: ...

    @abstractmethod
    def eventually(self, holds: Callable[[], object]) -> None:
        """Let time pass and the living replicas work until ``holds()`` is true. Fail if it never is."""

    @abstractmethod
    def settle(self) -> None:
        """Let all queued entries reach the store."""

    @abstractmethod
    def kill(self, coordinator: Coordinator) -> None:
        """End a replica's beats without a farewell. Its lease lasts for at most about another second."""

    @abstractmethod
    def forge(self, victim: str, name: str, address: str) -> None:
        """Do what any writer to the store can do: add a live registration ``name`` with the victim's fields."""

    @abstractmethod
    def go_down(self) -> None: ...

    @abstractmethod
    def come_back(self) -> None:
        """Make the store reachable again, with its content."""

    @abstractmethod
    def lose(self) -> None:
        """Restart the store empty."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """Delete everything that the store has of a replica."""

    @abstractmethod
    def remember(self, digest: bytes) -> Callable[[], None]:
        """Return a function that restores the store's present record of a tenant's generation, like a failover that
        loses writes.
        """


def store(coordinator: Coordinator, namespace: Namespace, ids: list[int], start: int = 0) -> None:
    """Report a stored range as a cache would."""
    assert coordinator.journal is not None
    coordinator.journal.stored(namespace, np.asarray(ids, "<u4").tobytes(), start, len(ids))


def remove(coordinator: Coordinator, namespace: Namespace, ids: list[int], start: int) -> None:
    assert coordinator.journal is not None
    coordinator.journal.removed(namespace, np.asarray(ids, "<u4").tobytes(), start, len(ids))


def hinted(coordinator: Coordinator, namespace: Namespace, ids: list[int]) -> dict[str, int]:
    return {hint.replica.id: hint.num_tokens for hint in coordinator.hints(namespace, ids)}


def names(infos: list[Any]) -> list[str]:
    return [info.id for info in infos]


def agrees(
    coordinator: Coordinator, prompts: list[list[int]], held: dict[tuple[Namespace, int], int]
) -> bool:
    """Whether the hints about ``a`` match ``held``: tokens by namespace and index of the prompt."""
    return all(
        hinted(coordinator, namespace, ids).get("a", 0) == held.get((namespace, index), 0)
        for namespace in (ACME, OTHER)
        for index, ids in enumerate(prompts)
    )


def random_step(
    coordinator: Coordinator,
    chance: random.Random,
    prompts: list[list[int]],
    held: dict[tuple[Namespace, int], int],
) -> None:
    namespace, index = chance.choice((ACME, OTHER)), chance.randrange(len(prompts))
    ids, now = prompts[index], held.get((namespace, index), 0)
    if chance.random() < 0.05:
        assert coordinator.journal is not None
        coordinator.journal.cleared(namespace)
        for key in [key for key in held if key[0] == namespace]:
            del held[key]
    elif now < len(ids) and chance.random() < 0.6:
        then = chance.randrange(now, len(ids), SEGMENT_TOKENS) + SEGMENT_TOKENS
        store(coordinator, namespace, ids[:then], now)
        held[namespace, index] = then
    elif now:
        then = chance.randrange(0, now, SEGMENT_TOKENS)
        remove(coordinator, namespace, ids[:now], then)
        held[namespace, index] = then


class CoordinatorEssentials:
    """The tests of the contract that use every kind of key of a store. A subclass provides the fixture ``fleet``."""

    def test_a_stored_prefix_is_hinted_to_other_replicas(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        ids = prompt(1000)
        store(a, ACME, ids)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 768})
        assert hinted(a, ACME, ids) == {}, "a replica does not hint at itself"

    def test_replicas_recover_from_an_outage_of_the_store(self, fleet: Fleet) -> None:
        a, b = (fleet.join(name, lease_s=fleet.brief_s) for name in "ab")
        kept, gone, new = prompt(512), prompt(512, seed=1), prompt(512, seed=2)
        store(a, ACME, kept)
        store(a, ACME, gone)
        fleet.eventually(lambda: hinted(b, ACME, kept) and hinted(b, ACME, gone))
        epoch = a.info().epoch
        fleet.go_down()
        with pytest.raises(StoreUnavailable):
            a.beat()
        with pytest.raises(StoreUnavailable):
            a.create_job(ACME, 512, ["a"])
        with pytest.raises(StoreUnavailable):
            a.create_job(ACME, 512, ["nobody"])
        assert a.health().state == "unavailable" and a.health().reason
        fleet.eventually(lambda: b.peers() == [])
        assert hinted(b, ACME, kept) == {} and names(b.replicas())[0] == "b"
        remove(a, ACME, gone, 0)
        store(a, ACME, new)
        fleet.come_back()
        fleet.eventually(lambda: a.health().is_ok and b.health().is_ok)
        fleet.eventually(lambda: hinted(b, ACME, new) and hinted(b, ACME, kept))
        assert hinted(b, ACME, gone) == {}
        assert a.info().epoch == epoch and a.health().num_outages >= 1

    def test_a_store_that_lost_everything_is_filled_again(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        ids = prompt(1024)
        store(a, ACME, ids)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 1024})
        before = a.info().epoch
        fleet.lose()
        fleet.eventually(lambda: a.info().epoch > before and hinted(b, ACME, ids) == {"a": 1024})
        remove(a, ACME, ids, 256)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 256})

    def test_a_job_and_its_parts(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        fleet.eventually(lambda: names(a.peers()) == ["b"])
        job = a.create_job(ACME, 1000, ["b", "a", "b"])
        assert [(part.replica_id, part.state) for part in job.parts] == [("a", "queued"), ("b", "queued")]
        assert b.job(job.id, "acme") == job and not job.is_over
        assert b.report_job(job.id, "running", 512)
        assert a.report_job(job.id, "done", 1000)
        seen = a.job(job.id, "acme")
        assert seen is not None and seen.num_tokens == 1000
        assert [(p.replica_id, p.state, p.num_tokens_done) for p in seen.parts] == [
            ("a", "done", 1000),
            ("b", "running", 512),
        ]
        assert b.report_job(job.id, "failed", 600, error="out_of_blocks")
        seen = a.job(job.id, "acme")
        assert seen is not None and seen.is_over and seen.parts[1].error == "out_of_blocks"

    def test_shares_of_a_quota_add_up_to_its_limit(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        alien = fleet.join("alien", fingerprint="fp:other")
        assert a.reserve("acme", 6).blocks == 6, "without a limit everything is granted"
        assert a.set_limit("acme", 10).replicated is not False
        granted = b.reserve("acme", 7)
        assert (granted.blocks, granted.others, granted.limit) == (4, 6, 10)
        assert alien.reserve("acme", 10).blocks == 10, "blocks of another model don't count"
        assert b.reserve("other", 7).blocks == 7
        assert a.reserve("acme", 1).blocks == 1
        fleet.eventually(lambda: blocks(b, "acme") == 7)
        a.reserve("acme", 0)
        a.set_limit("acme", 5)
        fleet.eventually(lambda: blocks(b, "acme") == 5)
        assert a.quotas.granted("acme") is None
        a.set_limit("acme", None)
        fleet.eventually(lambda: blocks(b, "acme") == 7)
        for bad in (-1, 10**15):
            with pytest.raises(ArgumentError):
                a.reserve("acme", bad)
            with pytest.raises(ArgumentError):
                a.set_limit("acme", bad)

    def test_a_purge_is_complete_when_all_have_confirmed(self, fleet: Fleet) -> None:
        a, b, c = (Purged(fleet, name) for name in "abc")
        ids = prompt(512)
        for each in (a, b):
            each.warm(ACME, ids)
            each.warm(OTHER, ids)
        fleet.eventually(lambda: hinted(c.replica, ACME, ids) == {"a": 512, "b": 512})
        purge = a.replica.purge("acme")
        assert purge.generation == 1 and "a" in purge.confirmed and not purge.unconfirmed
        assert a.purged == [("acme", 1)]
        fleet.eventually(lambda: hinted(a.replica, OTHER, ids) == {"b": 512})
        fleet.eventually(lambda: c.replica.purge_report("acme").is_complete)
        assert c.replica.purge_report("acme").confirmed == ("a", "b", "c")
        assert b.purged == [("acme", 1)] and c.purged == [], "c had nothing of the tenant"
        fleet.eventually(lambda: hinted(c.replica, ACME, ids) == {})
        assert hinted(c.replica, OTHER, ids) == {"a": 512, "b": 512}
        b.warm(ACME, ids)
        fleet.eventually(lambda: hinted(c.replica, ACME, ids) == hinted(a.replica, ACME, ids) == {"b": 512})
        late = Purged(fleet, "late")
        late.warm(ACME, ids)
        fleet.eventually(lambda: hinted(c.replica, ACME, ids) == {"b": 512, "late": 512})
        assert late.purged == [] and "late" in c.replica.purge_report("acme").confirmed
        assert c.replica.purge("acme").generation == 2
        fleet.eventually(lambda: a.replica.purge_report("acme").is_complete)
        fleet.eventually(lambda: late.purged == [("acme", 2)] and hinted(a.replica, ACME, ids) == {})


class CoordinatorContract(CoordinatorEssentials):
    """Tests of the contract of ``Coordinator``. A subclass provides the fixture ``fleet``."""

    def test_a_range_covers_the_segments_that_end_in_it(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        ids = prompt(2048)
        store(a, ACME, ids[:300], 0)
        store(a, ACME, ids[:1024], 300)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 1024})
        remove(a, ACME, ids[:1024], 520)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})
        remove(a, ACME, ids[:520], 500)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 256})

    def test_hints_count_leading_tokens_of_that_namespace_only(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        ids = prompt(1024)
        store(a, ACME, ids)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 1024})
        assert hinted(b, ACME, ids + prompt(512, seed=1)) == {"a": 1024}
        assert hinted(b, ACME, ids[:700]) == {"a": 512}
        assert hinted(b, ACME, [*ids[:512], 31_999, *ids[513:]]) == {"a": 512}
        assert hinted(b, ACME, [31_999, *ids[1:]]) == {}
        assert hinted(b, ACME, ids[:255]) == {}
        assert hinted(b, OTHER, ids) == {}
        assert hinted(b, ACME._replace(salt="other"), ids) == {}
        assert hinted(b, ACME._replace(adapter="other"), ids) == {}

    def test_hints_are_about_one_version_of_the_weights(self, fleet: Fleet) -> None:
        """A replica that still has the old weights doesn't hold a prefix of the new ones, and the other way round."""
        a, b, c = (fleet.join(name) for name in "abc")
        old, new, ids = ACME, ACME._replace(weights=1), prompt(1024)
        store(a, old, ids)
        store(b, new, ids[:512])
        fleet.eventually(lambda: (hinted(c, old, ids), hinted(c, new, ids)) == ({"a": 1024}, {"b": 512}))
        assert hinted(c, ACME._replace(weights=2), ids) == {}
        assert a.journal is not None
        a.journal.cleared(old)
        store(a, new, ids)
        fleet.eventually(lambda: hinted(c, new, ids) == {"a": 1024, "b": 512})
        assert hinted(c, old, ids) == {}

    def test_records_of_jobs_and_pins_name_the_version_of_the_weights(self, fleet: Fleet) -> None:
        a = fleet.join("a")
        versions = [ACME._replace(weights=version) for version in (0, 1, 10)]
        jobs = [a.create_job(each, 16, ["a"]) for each in versions]
        assert (
            len({job.namespace_digest for job in jobs}) == len({a.pin_digest(each) for each in versions}) == 3
        )
        assert len({job.tenant_digest for job in jobs}) == 1

    def test_a_replica_states_the_version_of_its_weights(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")

        def seen() -> list[int]:
            return [info.weights for info in b.replicas() if info.id == "a" and info.reachable]

        fleet.eventually(lambda: seen() == [0])
        for version in (1, 2**53 - 1):
            a.report_weights(version)
            assert a.info().weights == version
            fleet.eventually(lambda version=version: seen() == [version])
        for wrong in (True, -1, 2**53, "1", 1.0, None):
            with pytest.raises(ArgumentError, match="version"):
                a.report_weights(wrong)  # type: ignore[arg-type]
        assert a.info().weights == 2**53 - 1 and b.info().weights == 0

    def test_hints_stop_at_a_hole(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        ids = prompt(1024)
        store(a, ACME, ids)
        remove(a, ACME, ids[:512], 256)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 256})

    def test_holders_come_longest_first_then_by_id(self, fleet: Fleet) -> None:
        members = {name: fleet.join(name) for name in "dcba"}
        ids = prompt(1024)
        for name, size in (("d", 512), ("c", 1024), ("b", 512)):
            store(members[name], ACME, ids[:size])
        fleet.eventually(lambda: len(members["a"].hints(ACME, ids)) == 3)
        found = [(hint.replica.id, hint.num_tokens) for hint in members["a"].hints(ACME, ids)]
        assert found == [("c", 1024), ("b", 512), ("d", 512)]

    def test_a_clear_forgets_one_namespace(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        ids = prompt(512)
        store(a, ACME, ids)
        store(a, OTHER, ids)
        fleet.eventually(lambda: hinted(b, ACME, ids) and hinted(b, OTHER, ids))
        assert a.journal is not None
        a.journal.cleared(ACME)
        fleet.eventually(lambda: not hinted(b, ACME, ids))
        assert hinted(b, OTHER, ids) == {"a": 512}

    def test_a_cache_reports_commits_evictions_and_clears(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        cache = PrefixCache(CacheConfig(num_blocks=128, block_size=16), journal=a.journal)
        first, second = prompt(1024), prompt(1024, seed=1)
        with cache.open(ACME, first) as sequence:
            sequence.commit(600)
            fleet.eventually(lambda: hinted(b, ACME, first) == {"a": 512})
            sequence.commit(1024)
        fleet.eventually(lambda: hinted(b, ACME, first) == {"a": 1024})
        with cache.open(OTHER, second) as sequence:
            sequence.commit(1024)
        fleet.eventually(lambda: hinted(b, OTHER, second) == {"a": 1024})
        cache.evict(24)
        held = cache.match(ACME, first).num_tokens + cache.match(OTHER, second).num_tokens
        assert held == 2048 - 24 * 16
        fleet.eventually(
            lambda: (
                hinted(b, ACME, first).get("a", 0) == cache.match(ACME, first).num_tokens // 256 * 256
                and hinted(b, OTHER, second).get("a", 0) == cache.match(OTHER, second).num_tokens // 256 * 256
            )
        )
        cache.clear(OTHER)
        fleet.eventually(lambda: not hinted(b, OTHER, second))

    def test_a_long_random_history_gives_the_right_view(self, fleet: Fleet) -> None:
        """Random stores, removes and clears, with frequent compaction of the log. The view must equal a model."""
        a, b = fleet.join("a", snapshot_entries=20), fleet.join("b")
        chance = random.Random(7)
        prompts = [prompt(256 * chance.randint(1, 90), seed=100 + i) for i in range(6)]
        held: dict[tuple[Namespace, int], int] = {}
        for _ in range(40):
            random_step(a, chance, prompts, held)
            if chance.random() < 0.1:
                fleet.settle()
        fleet.eventually(lambda: agrees(b, prompts, held))

    def test_a_late_replica_learns_everything(self, fleet: Fleet) -> None:
        a = fleet.join("a")
        ids = prompt(1024)
        store(a, ACME, ids)
        fleet.settle()
        late = fleet.join("late")
        fleet.eventually(lambda: hinted(late, ACME, ids) == {"a": 1024})

    def test_prefixes_stored_before_the_registration_count(self, fleet: Fleet) -> None:
        a, b = fleet.replica("a"), fleet.join("b")
        ids = prompt(512)
        store(a, ACME, ids)
        a.register()
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})

    def test_the_list_of_replicas_is_complete(self, fleet: Fleet) -> None:
        b, a = fleet.join("b"), fleet.join("a", fingerprint="fp:elsewhere", block_size=16)
        fleet.eventually(lambda: names(b.peers()) == ["a"])
        mine, theirs = b.replicas()
        assert mine.is_self and mine.id == "b" and mine.live and mine.reachable
        assert (theirs.id, theirs.epoch) == ("a", a.info().epoch)
        assert theirs.address == "http://127.0.0.1:1/a" and theirs.fingerprint == "fp:elsewhere"
        assert theirs.live and theirs.proven and theirs.incompatible is None and theirs.reachable
        assert 0 < theirs.lease_remaining_s <= fleet.lease_s + 1e-6
        assert (
            theirs.audience == f"a@{theirs.epoch}.{theirs.nonce}"
            and len(theirs.nonce) == 32
            and not theirs.is_self
        )

    def test_a_replica_without_an_address_is_not_reachable(self, fleet: Fleet) -> None:
        a, b = fleet.join("a", address=None), fleet.join("b")
        fleet.eventually(lambda: names(b.replicas()) == ["b", "a"])
        assert b.replicas()[1].proven and b.peers() == []
        assert a.register(address="http://127.0.0.1:2").address == "http://127.0.0.1:2"
        fleet.eventually(lambda: [info.address for info in b.peers()] == ["http://127.0.0.1:2"])

    def test_load_travels_with_the_beat(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        load = Load(queued_prefill_tokens=7, decode_blocks=8, resident_blocks=9, queued_cold_tokens=6)
        a.report_load(load)
        fleet.eventually(lambda: b.replicas()[1:] and b.replicas()[1].load == load)
        with pytest.raises(ArgumentError, match="queued_cold_tokens"):
            Load(queued_prefill_tokens=7, queued_cold_tokens=8)
        with pytest.raises(ArgumentError):
            Load(decode_blocks=-1)

    def test_dead_replicas_leave_every_view(self, fleet: Fleet) -> None:
        a, b, c = fleet.join("a"), fleet.join("b"), fleet.join("c")
        ids = prompt(512)
        store(a, ACME, ids)
        fleet.eventually(lambda: hinted(b, ACME, ids) and hinted(c, ACME, ids))
        fleet.kill(a)
        fleet.eventually(lambda: names(b.peers()) == ["c"] and names(c.peers()) == ["b"])
        assert hinted(b, ACME, ids) == hinted(c, ACME, ids) == {}
        fleet.eventually(lambda: not a.info().live)  # its own lease expires too

    def test_a_replica_that_leaves_is_gone_at_once(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        fleet.eventually(lambda: names(b.peers()) == ["a"])
        a.leave()
        fleet.eventually(lambda: b.peers() == [])
        assert a.health().state == "left" and not a.info().live
        with pytest.raises(CoordinationError):
            a.publish()
        a.register()
        fleet.eventually(lambda: names(b.peers()) == ["a"])

    def test_a_replica_that_drains_gets_no_prompts_and_stays_a_member(self, fleet: Fleet) -> None:
        first, second = Purged(fleet, "a"), Purged(fleet, "b")
        a, b, ids = first.replica, second.replica, prompt(512)
        first.warm(ACME, ids)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})
        a.drain()
        fleet.eventually(lambda: b.peers() == [] and hinted(b, ACME, ids) == {})
        (theirs,) = b.peers(draining=True)
        assert theirs.live and theirs.draining and theirs.answers and not theirs.reachable
        assert a.info().draining and not b.info().draining
        with pytest.raises(ArgumentError, match="live replicas: b"):
            b.create_job(ACME, 512, ["a"])
        purge = b.purge("acme")
        assert {*purge.confirmed, *purge.pending} == {"a", "b"}
        fleet.eventually(lambda: b.purge_report("acme").confirmed == ("a", "b"))
        assert first.purged == [("acme", 1)]
        a.leave()
        fleet.eventually(lambda: b.peers(draining=True) == [])
        a.register()
        fleet.eventually(lambda: names(b.peers()) == ["a"])
        assert not a.info().draining

    def test_a_restart_forgets_what_its_predecessor_held(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        old, new = prompt(512), prompt(512, seed=1)
        store(a, ACME, old)
        fleet.eventually(lambda: hinted(b, ACME, old) == {"a": 512})
        fleet.kill(a)
        again = fleet.join("a")
        assert again.info().epoch > a.info().epoch
        store(again, ACME, new)
        fleet.eventually(lambda: hinted(b, ACME, new) == {"a": 512})
        assert hinted(b, ACME, old) == {}

    def test_the_older_of_two_replicas_with_one_id_is_fenced(self, fleet: Fleet) -> None:
        older, b = fleet.join("a"), fleet.join("b")
        younger = fleet.join("a")
        ids = prompt(512)
        with pytest.raises(StaleEpoch):
            older.beat()
        assert older.health().state == "fenced" and not older.info().live
        store(older, ACME, ids)
        with pytest.raises(StaleEpoch):
            older.publish()
        store(younger, OTHER, ids)
        fleet.eventually(lambda: hinted(b, OTHER, ids) == {"a": 512})
        assert hinted(b, ACME, ids) == {}
        older.leave()
        younger.beat()
        assert younger.health().is_ok and names(b.peers()) == ["a"]

    def test_a_fenced_replica_may_take_its_id_back(self, fleet: Fleet) -> None:
        first, b = fleet.join("a"), fleet.join("b")
        cache = PrefixCache(CacheConfig(num_blocks=64, block_size=16), journal=first.journal)
        first.attach(cache)
        second = fleet.join("a")
        with pytest.raises(StaleEpoch):
            first.beat()
        ids = prompt(512)
        with cache.open(ACME, ids) as sequence:
            sequence.commit(512)
        first.register()
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})
        with pytest.raises(StaleEpoch):
            second.beat()

    def test_a_late_registration_takes_an_id_only_for_a_short_time(self, fleet: Fleet) -> None:
        """Nothing waits for the answer of such a registration: the process has died, or has registered again since."""
        a, b, ids = fleet.join("a"), fleet.join("b"), prompt(512)
        cache = PrefixCache(CacheConfig(num_blocks=64, block_size=16), journal=a.journal)
        a.attach(cache)
        with cache.open(ACME, ids) as sequence:
            sequence.commit(512)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})
        late = a.store.boot(replace(a._registration(a.info().epoch), nonce="late")).value
        fleet.eventually(lambda: a.info().epoch > late and a.info().live and a.health().is_ok)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})

    @pytest.mark.parametrize(
        ("overrides", "setting"),
        [
            ({"fleet_secret": b"another secret of some length"}, "fleet_secret"),
            ({"block_size": 32}, "block_size"),
        ],
    )
    def test_a_replica_with_other_settings_is_refused(
        self, fleet: Fleet, overrides: dict[str, Any], setting: str
    ) -> None:
        a = fleet.join("a")
        stranger = fleet.replica("b", **overrides)
        with pytest.raises(ConfigError, match="live replica a") as refusal:
            stranger.register()
        assert refusal.value.setting == setting
        assert stranger.health().state == "refused" and stranger.health().reason
        assert not stranger.info().live and names(a.replicas()) == ["a"]
        with pytest.raises(ConfigError):
            fleet.replica("a", **overrides).register()
        a.beat()
        a.leave()
        assert stranger.register().live, "no live replica has other settings"

    def test_another_wire_version_is_refused(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        fleet.join("a")
        newer = fleet.replica("b")
        ours = newer._registration
        monkeypatch.setattr(  # of this replica alone: "a" goes on to send beats
            newer, "_registration", lambda *given: replace(ours(*given), wire_version=WIRE_VERSION + 1)
        )
        with pytest.raises(ConfigError, match="wire_version"):
            newer.register()

    def test_an_address_without_its_proof_is_ignored(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        fleet.eventually(lambda: names(b.peers()) == ["a"])
        fleet.forge("a", "evil", "http://evil.example")
        fleet.eventually(lambda: "evil" in names(b.replicas()))
        forged = next(info for info in b.replicas() if info.id == "evil")
        assert forged.live and not forged.proven and not forged.reachable
        assert names(b.peers()) == ["a"]
        ids = prompt(512)
        store(a, ACME, ids)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})
        assert hinted(a, ACME, ids) == {}

    def test_a_registration_with_a_changed_address_is_ignored(self, fleet: Fleet) -> None:
        """The replica is unreachable until its next beat, which states the right address again."""
        a, b = by_hand(fleet, "a").replica, by_hand(fleet, "b").replica
        b.reader.refresh()
        address = a.info().address
        assert [info.address for info in b.peers()] == [address]
        fleet.forge("a", "a", "http://evil.example")
        b.reader.refresh()
        assert b.peers() == []
        a.beat()
        b.reader.refresh()
        assert [info.address for info in b.peers()] == [address]

    def test_a_replica_starts_while_the_store_is_down(self, fleet: Fleet) -> None:
        fleet.go_down()
        a = fleet.join("a")
        assert a.health().state == "unavailable" and a.info().epoch == 0 and not a.info().live
        for act in (a.beat, a.publish):
            with pytest.raises(StoreUnavailable):
                act()
        ids = prompt(512)
        store(a, ACME, ids)
        fleet.come_back()
        a.register()
        b = fleet.join("b")
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})

    def test_an_overflowed_journal_is_rebuilt_from_the_cache(self, fleet: Fleet) -> None:
        a, b = fleet.replica("a", queue_records=8), fleet.join("b")
        cache = PrefixCache(CacheConfig(num_blocks=256, block_size=16), journal=a.journal)
        a.attach(cache)
        a.register()
        prompts = [prompt(512, seed) for seed in range(12)]
        for ids in prompts:
            with cache.open(ACME, ids) as sequence:
                sequence.commit(512)
        cache.clear(OTHER)
        fleet.eventually(lambda: a.health().num_queued == 0)
        fleet.eventually(
            lambda: all(
                hinted(b, ACME, ids).get("a", 0) == cache.match(ACME, ids).num_tokens // 256 * 256
                for ids in prompts
            )
        )

    def test_an_overflow_leaves_no_false_hint(self, fleet: Fleet) -> None:
        """A lost removal must not leave a hint behind, even without a cache to rebuild the journal from."""
        a, b = fleet.replica("a", queue_records=4), fleet.join("b")
        ids = prompt(512)
        store(a, ACME, ids)
        a.register()
        fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})
        for seed in range(1, 5):
            store(a, ACME, prompt(512, seed))
        remove(a, ACME, ids, 0)
        fleet.eventually(lambda: hinted(b, ACME, ids) == {})
        store(a, OTHER, ids)
        fleet.eventually(lambda: hinted(b, OTHER, ids) == {"a": 512})

    def test_jobs_are_bounded_and_the_oldest_go(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        for store in ("memory", "redis"):
            monkeypatch.setattr(f"radixkv.coordination.store.{store}.MAX_JOBS", 5)
        a = fleet.join("a")
        jobs = []
        for _ in range(8):
            jobs.append(a.create_job(ACME, 512, ["a"]))
            time.sleep(0.002)  # jobs of one millisecond have no fixed order
        assert [a.job(job.id, "acme") is not None for job in jobs] == [False] * 3 + [True] * 5
        assert a.health().num_jobs == 5
        a.create_job(ACME, 512, ["a"], job_id=jobs[-1].id)
        assert a.health().num_jobs == 5 and a.job(jobs[3].id, "acme") is not None, "the job existed already"

    def test_confirmations_of_a_purge_are_bounded(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Names of replicas that never return must not fill a tenant's record.

        Confirmations of listed replicas are kept.
        """
        for store in ("memory", "redis"):
            monkeypatch.setattr(f"radixkv.coordination.store.{store}.MAX_CONFIRMED", 8)
        a, b = Purged(fleet, "a"), Purged(fleet, "b")
        a.replica.purge("acme")
        fleet.eventually(lambda: a.replica.purge_report("acme").confirmed == ("a", "b"))
        tenant, store_of_a = a.replica.keys.tenant("acme"), a.replica.store
        raised = store_of_a.tenant(tenant).raised
        for number in range(40):
            assert signed.confirm(
                store_of_a, a.replica.keys, tenant, Writer(f"gone-{number}", 1, "nonce"), raised
            )
            confirmed = store_of_a.tenant(tenant).confirmed
            assert len(confirmed) <= 8 and {"a", "b"} <= set(confirmed)
        for other in (
            raised._replace(generation=raised.generation + 1),
            raised._replace(token="0" * 32),
            NEVER,
        ):
            assert not signed.confirm(store_of_a, a.replica.keys, tenant, Writer("gone-0", 1, "nonce"), other)
        assert b.replica.purge_report("acme").confirmed == ("a", "b")

    def test_a_purge_drops_earlier_jobs(self, fleet: Fleet) -> None:
        """The same request never makes that id again: the purge changes the tenant's value in job ids everywhere."""
        a, b = fleet.join("a"), fleet.join("b")
        before = a.job_owner("acme")
        job, other = a.create_job(ACME, 1000, ["a"]), a.create_job(OTHER, 1000, ["a"])
        assert b.job(job.id, "acme") is not None and b.job_owner("acme") == before
        a.purge("acme")
        b.apply_purges()
        for each in (a, b):
            assert each.job(job.id, "acme") is None and each.job(other.id, "other") is not None
            assert each.job_owner("acme") == a.job_owner("acme") != before
        assert a.take_job(job.id, "acme") is None
        again = a.create_job(ACME, 1000, ["a"])
        assert b.job(again.id, "acme") is not None

    def test_another_tenants_job_cannot_be_seen(self, fleet: Fleet) -> None:
        a = fleet.join("a")
        job = a.create_job(ACME, 1000, ["a"])
        assert a.job(job.id, "other") is None and a.job("0" * 32, "acme") is None
        assert a.job("no such id } \r\n", "acme") is None
        assert not a.report_job("0" * 32, "done") and not a.report_job("nonsense", "done")
        only_b = fleet.join("b")
        assert not only_b.report_job(job.id, "done"), "b has no part in the job"

    def test_invalid_arguments_of_jobs_are_refused(self, fleet: Fleet) -> None:
        a = fleet.join("a")
        job = a.create_job(ACME, 1, ["a"])
        for act in (
            lambda: a.create_job(ACME, -1, ["a"]),
            lambda: a.create_job(ACME, 1, ["nobody"]),
            lambda: a.report_job(job.id, "lost"),
            lambda: a.report_job(job.id, "done", -1),
            lambda: a.report_job(job.id, "failed", error="Tenant acme is out of blocks"),
        ):
            with pytest.raises(ArgumentError):
                act()

    def test_the_part_of_a_dead_replica_is_lost(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        fleet.eventually(lambda: names(a.peers()) == ["b"])
        job = a.create_job(ACME, 1000, ["a", "b"])
        b.report_job(job.id, "running", 256)
        fleet.kill(b)
        states: Callable[[], list[str]] = lambda: [part.state for part in a.job(job.id, "acme").parts]  # type: ignore[union-attr]  # noqa: E731
        fleet.eventually(lambda: states() == ["queued", "lost"])
        again = fleet.join("b")
        again.beat()
        assert states() == ["queued", "lost"], "a restarted replica does not know the job"

    def test_a_closed_replica_leaves(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        fleet.eventually(lambda: names(b.peers()) == ["a"])
        a.close()
        a.close()
        fleet.eventually(lambda: b.peers() == [])
        store(a, ACME, prompt(512))
        with pytest.raises(CoordinationError):
            a.register()
        with pytest.raises(CoordinationError):
            a.beat()

    def test_a_job_belongs_to_the_tenant_and_is_created_once(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        fleet.eventually(lambda: names(a.peers()) == ["b"])
        job = a.create_job(ACME, 1000, ["a", "b"], job_id="1f" * 16, num_wanted=1)
        assert job.owner == a.info().writer and job.num_wanted == 1 and job.num_missing == 0
        a.report_job(job.id, "running", 7)
        again = b.create_job(ACME, 5, ["b"], job_id="1f" * 16)
        assert again.num_tokens == 1000 and again.owner == job.owner and len(again.parts) == 2
        with pytest.raises(ArgumentError, match="job_id"):
            b.create_job(OTHER, 1000, ["b"], job_id="1f" * 16)
        with pytest.raises(ArgumentError, match="job_id"):
            b.create_job(ACME, 1000, ["b"], job_id="my job")

    def test_another_replica_takes_a_job_when_its_owner_is_gone(self, fleet: Fleet) -> None:
        a, b, c = fleet.join("a"), fleet.join("b", lease_s=30.0), fleet.join("c", lease_s=30.0)
        fleet.eventually(lambda: names(a.peers()) == ["b", "c"] and names(b.peers()) == ["a", "c"])
        job = a.create_job(ACME, 1000, ["a", "b"])
        assert b.take_job(job.id, "acme") is None and not b.extend_job(job.id, "c"), "the owner is alive"
        assert a.take_job(job.id, "acme") == job and a.take_job(job.id, "other") is None
        fleet.kill(a)
        fleet.eventually(lambda: names(b.peers()) == ["c"] and names(c.peers()) == ["b"])
        # the lease ends a little earlier in the views than in the store
        fleet.eventually(lambda: b.take_job(job.id, "acme"))
        taken = [each.take_job(job.id, "acme") for each in (b, c)]
        assert taken[0] is not None and taken[0].owner == b.info().writer and taken[1] is None
        assert taken[0].num_missing == 1, "the part of the dead replica is lost"
        assert b.extend_job(job.id, "c") and not b.extend_job(job.id, "c")
        assert c.report_job(job.id, "done", 1000) and b.report_job(job.id, "done", 1000)
        seen = c.job(job.id, "acme")
        assert seen is not None and seen.is_over and seen.num_missing == 0
        assert [(p.replica_id, p.state) for p in seen.parts] == [("a", "lost"), ("b", "done"), ("c", "done")]
        again = fleet.join("a")
        fleet.eventually(lambda: "a" in names(b.peers()))
        assert again.take_job(job.id, "acme") is None and b.extend_job(job.id, "a"), (
            "the returned replica may be asked again"
        )
        assert again.report_job(job.id, "done", 1000)
        with pytest.raises(ArgumentError):
            b.extend_job(job.id, "nobody")

    def test_the_largest_numbers_are_stored_exactly(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        load = Load(MAX_AMOUNT, MAX_AMOUNT, MAX_AMOUNT, MAX_AMOUNT)
        a.report_load(load)
        fleet.eventually(lambda: [info.load for info in b.peers()] == [load])
        job = a.create_job(ACME, MAX_AMOUNT, ["a"], num_left_out=MAX_AMOUNT, num_wanted=MAX_AMOUNT)
        assert a.report_job(job.id, "done", MAX_AMOUNT, num_tokens_cached=MAX_AMOUNT, ms=MAX_AMOUNT)
        found = b.job(job.id, "acme")
        assert found is not None and found.parts[0].ms == found.num_wanted == MAX_AMOUNT

    def test_a_limit_binds_all_replicas_that_know_the_tenant(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        b.purges.meet(["acme"])
        a.set_limit("acme", 10)
        assert a.limits() == {"acme": 10}
        fleet.eventually(lambda: b.limits() == {"acme": 10})
        b.set_limit("acme", 5)
        fleet.eventually(lambda: a.limits() == {"acme": 5})
        late = fleet.replica("c")
        late.purges.meet(["acme", "other"])
        late.register()
        assert late.limits() == {"acme": 5}, "late learned it with its first beat"
        late.set_limit("acme", None)
        fleet.eventually(lambda: a.limits() == b.limits() == late.limits() == {})
        a.set_limit("acme", 7)
        fleet.eventually(lambda: b.limits() == late.limits() == {"acme": 7})

    def test_a_limit_survives_a_store_that_lost_it(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        b.purges.meet(["acme"])
        digest = a.keys.tenant("acme")
        a.set_limit("acme", 10)
        fleet.eventually(lambda: b.limits() == {"acme": 10})
        go_back = fleet.remember(digest)
        a.set_limit("acme", 5)
        fleet.eventually(lambda: b.limits() == {"acme": 5})
        go_back()
        fleet.eventually(lambda: a.store.tenant(digest).limit == 5)
        assert a.limits() == b.limits() == {"acme": 5}, "the later stamp wins"
        fleet.kill(a)
        fleet.lose()
        fleet.eventually(lambda: b.health().is_ok and b.store.tenant(digest).limit == 5)
        b.set_limit("acme", None)
        go_back()
        fleet.eventually(lambda: b.store.tenant(digest).limit is None)
        assert b.limits() == {}, "removing a limit has a stamp too"

    def test_an_unsigned_limit_is_ignored(self, fleet: Fleet) -> None:
        """A writer to the store without the fleet's secret can neither limit a tenant nor remove its limit."""
        a, b = fleet.join("a"), fleet.join("b")
        b.purges.meet(["acme", "other"])
        digest, other = a.keys.tenant("acme"), a.keys.tenant("other")
        a.set_limit("acme", 10)
        fleet.eventually(lambda: b.limits() == {"acme": 10})
        (looked,) = a.store.look_at([digest])
        assert looked is not None and looked.limit.blocks == 10
        signed = looked.limit
        for forged in (
            Limit(1, signed.stamp + 1, signed.proof), Limit(1, signed.stamp, signed.proof),
            Limit(None, 10**15 - 1, "f" * 64), Limit(1, signed.stamp, ""), Limit(1),
        ):  # fmt: skip
            (stands,) = a.store.look_at([digest])
            assert stands is not None and a.store.set_limit(digest, forged, stands.limit.stamp).value
            fleet.eventually(lambda: a.store.look_at([digest])[0] == looked)
            assert a.limits() == b.limits() == {"acme": 10}
        a.store.set_limit(other, signed, 0)
        beats = [each._num_beats for each in (a, b)]
        fleet.eventually(lambda: all(each._num_beats > n + 2 for each, n in zip((a, b), beats, strict=True)))
        assert a.limits() == b.limits() == {"acme": 10}, "the limit of another tenant does not bind acme"
        b.set_limit("other", 3)
        assert a.store.tenant(other).limit == 3

    def test_the_share_of_a_dead_replica_is_free_after_its_lease(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        a.set_limit("acme", 10)
        a.reserve("acme", 8)
        assert b.reserve("acme", 8).blocks == 2
        fleet.kill(a)
        fleet.eventually(lambda: blocks(b, "acme") == 8)
        with pytest.raises(StaleEpoch):
            fleet.join("b").reserve("acme", 1)
            b.reserve("acme", 1)

    def test_a_grant_holds_while_the_store_is_away(self, fleet: Fleet) -> None:
        a = fleet.join("a", lease_s=fleet.brief_s)
        fleet.eventually(lambda: a.set_limit("acme", 10))
        fleet.eventually(lambda: a.reserve("acme", 8).blocks == 8)
        fleet.go_down()
        for act in (lambda: a.reserve("acme", 9), lambda: a.set_limit("acme", 1), lambda: a.purge("acme")):
            with pytest.raises(StoreUnavailable):
                act()
        assert blocks(a, "acme") == 8
        fleet.come_back()
        fleet.eventually(lambda: a.health().is_ok)
        fleet.eventually(lambda: a.reserve("acme", 9).blocks == 9)

    def test_shares_are_written_again_to_a_store_that_lost_them(self, fleet: Fleet) -> None:
        a, b = fleet.join("a"), fleet.join("b")
        a.set_limit("acme", 10)
        a.reserve("acme", 8)
        fleet.lose()
        digest = a.keys.tenant("acme")
        fleet.eventually(lambda: a.health().is_ok and b.health().is_ok)
        fleet.eventually(lambda: [share.blocks for share in a.store.tenant(digest).shares] == [8])
        b.set_limit("acme", 10)
        assert b.reserve("acme", 10).blocks == 2

    @pytest.mark.parametrize("is_named", [True, False])
    def test_a_purge_of_which_something_is_left_is_not_confirmed(
        self, fleet: Fleet, is_named: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``is_named``: whether the replica still knows the names of tenants."""
        a, b = Purged(fleet, "a"), Purged(fleet, "b")
        for each in (a, b):
            each.warm(ACME, prompt(512))
            each.owed |= {"acme", "another"}
        fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {"b": 512})
        if not is_named:
            monkeypatch.setattr(Purges, "name", lambda self, digest: None)
        assert "a" in a.replica.purge("acme").pending
        fleet.eventually(lambda: b.purged == [("acme", 1)])
        num_beats = b.replica._num_beats
        fleet.eventually(lambda: b.replica._num_beats > num_beats + 1)
        assert a.replica.purge_report("acme").pending == ("a", "b"), "later beats don't confirm it either"
        assert a.purged == b.purged == [("acme", 1)], "what was computed since is not forgotten again"
        a.owed.discard("acme")
        assert a.replica.purge_report("acme").confirmed == ("a",), "confirmed when it is asked"
        b.owed.discard("acme")
        fleet.eventually(lambda: a.replica.purge_report("acme").confirmed == ("a", "b"))

    def test_a_purge_of_a_tenant_that_was_not_met_waits_for_what_is_owed_of_removed_ones(
        self, fleet: Fleet
    ) -> None:
        a, b = Purged(fleet, "a"), Purged(fleet, "b")
        b.owes_removed = True
        assert "b" in a.replica.purge("acme").pending
        num_beats = b.replica._num_beats
        fleet.eventually(lambda: b.replica._num_beats > num_beats + 1)
        assert a.replica.purge_report("acme").pending == ("b",)
        b.replica.purges.meet(["acme"])
        fleet.settle()
        assert a.replica.purge_report("acme").pending == ("b",), "also if it comes back"
        b.owes_removed = False
        fleet.eventually(lambda: a.replica.purge_report("acme").confirmed == ("a", "b"))

    def test_a_store_that_lost_everything_has_another_id(self, fleet: Fleet) -> None:
        a, b = fleet.replica("a"), fleet.replica("b")
        assert a.store_id == ""
        a.register(), b.register()
        fleet.eventually(lambda: re.fullmatch("[0-9a-f]{32}", a.store_id) and a.store_id == b.store_id)
        before = a.store_id
        fleet.settle()
        assert a.store_id == b.store_id == before
        fleet.lose()
        fleet.eventually(lambda: a.store_id == b.store_id != before)

    def test_a_purge_lists_the_replicas_that_were_cut_off(self, fleet: Fleet) -> None:
        a, b = Purged(fleet, "a"), Purged(fleet, "b")
        b.warm(ACME, prompt(512))
        fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {"b": 512})
        fleet.kill(b.replica)
        purge = a.replica.purge("acme")
        assert purge.pending == ("b",) or not b.replica.knows_generations, (
            "or the lease of b has expired by now"
        )
        fleet.eventually(lambda: a.replica.purge_report("acme").is_complete)
        report = a.replica.purge_report("acme")
        assert report.unconfirmed == ("b",) and report.confirmed == ("a",)
        assert not b.replica.knows_generations, "b noticed the end of its lease by its own clock"
        assert hinted(a.replica, ACME, prompt(512)) == {} and b.purged == []
        b.replica.register()
        fleet.eventually(lambda: a.replica.purge_report("acme").unconfirmed == ())
        fleet.eventually(lambda: b.purged == [("acme", 1)])

    def test_a_returning_replica_knows_no_generations_before_it_has_purged(self, fleet: Fleet) -> None:
        a, b = Purged(fleet, "a"), Purged(fleet, "b")
        b.warm(ACME, prompt(512))
        fleet.kill(b.replica)
        a.replica.purge("acme")
        fleet.eventually(lambda: a.replica.purge_report("acme").unconfirmed == ("b",))
        b.replica.register()
        fleet.eventually(lambda: b.purged == [("acme", 1)] and b.replica.knows_generations)
        assert not any(b.knew), "b did not know the generations when it purged"

    def test_a_purge_waits_for_replicas_that_the_store_has_lost(self, fleet: Fleet) -> None:
        """A replica that is cut off from a store that restarted empty still believes for one lease that it knows every
        purge.
        """
        a, left = Purged(fleet, "a"), Purged(fleet, "left")
        b = Purged(fleet, "b", lease_s=fleet.brief_s)
        fleet.eventually(lambda: names(a.replica.peers()) == ["b", "left"])
        left.replica.leave()
        fleet.eventually(lambda: names(a.replica.peers()) == ["b"])
        fleet.kill(b.replica)
        fleet.lose()
        fleet.eventually(lambda: works(lambda: a.replica.purge("acme")))
        report = a.replica.purge_report("acme")
        others = set(report.pending) - {"a"}  # "a" itself may have lost its registration a moment ago
        assert others == {"b"} or (not others and not b.replica.knows_generations)
        fleet.eventually(lambda: a.replica.purge_report("acme").is_complete)
        assert not b.replica.knows_generations

    def test_a_store_that_lost_its_generations_gets_them_back(self, fleet: Fleet) -> None:
        """A purge after the loss is a new purge, whichever replica starts it."""
        a, b = Purged(fleet, "a"), Purged(fleet, "b")
        digest = a.replica.keys.tenant("acme")
        b.warm(ACME, prompt(512))
        fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {"b": 512})
        for generation in (1, 2):
            assert a.replica.purge("acme").generation == generation
        fleet.eventually(lambda: b.purged[-1:] == [("acme", 2)])
        fleet.lose()
        fleet.eventually(lambda: a.replica.health().is_ok and b.replica.health().is_ok)
        fleet.eventually(lambda: a.replica.store.tenant(digest).generation == 2)
        b.warm(ACME, prompt(512))
        fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {"b": 512})
        fleet.eventually(lambda: a.replica.purge_report("acme").is_complete)
        assert b.purged.count(("acme", 2)) == 1, "the same purge, applied once"
        c = Purged(fleet, "c")
        assert c.replica.purge("acme").generation == 3
        fleet.eventually(lambda: c.replica.purge_report("acme").is_complete)
        assert b.purged[-1] == ("acme", 3) and b.cache.match(ACME, prompt(512)).num_tokens == 0
        fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {})

    def test_a_generation_that_restarts_at_one_is_applied(self, fleet: Fleet) -> None:
        """A store lost a generation. No replica that knows it is registered when another purge is requested."""
        a = Purged(fleet, "a")
        a.replica.purge("acme")
        a.warm(ACME, prompt(512))
        fleet.kill(a.replica)
        fleet.lose()
        b = Purged(fleet, "b")
        fleet.eventually(lambda: b.replica.health().is_ok)
        assert b.replica.purge("acme").generation == 1
        a.replica.register()
        fleet.eventually(lambda: b.replica.purge_report("acme").confirmed == ("a", "b"))
        assert a.purged[:2] == [("acme", 1), ("acme", 1)] and a.cache.match(ACME, prompt(512)).num_tokens == 0

    def test_a_late_confirmation_does_not_count_for_another_purge(self, fleet: Fleet) -> None:
        """A replica stalls after it has applied a purge.

        Meanwhile the store loses the purge and gives its number to another one.
        """
        a, b = by_hand(fleet, "a"), by_hand(fleet, "b")
        b.warm(ACME, prompt(512))
        lose_it, rivals = fleet.remember(a.replica.keys.tenant("acme")), list[Purged]()
        a.replica.purge("acme")

        def stand_still(tenant: str, raised: Raised) -> None:
            b.purge(tenant, raised)
            if not rivals:
                b.warm(ACME, prompt(512))
                lose_it()
                rivals.append(by_hand(fleet, "rival"))
                assert rivals[0].replica.purge("acme").generation == raised.generation == 1

        b.replica.attach(b.cache, stand_still)
        b.replica.apply_purges()
        rival, *_ = rivals
        assert rival.replica.purge_report("acme").pending == ("a", "b")
        assert b.cache.match(ACME, prompt(512)).num_tokens == 512
        for each in (a, b):
            each.replica.beat()
        assert rival.replica.purge_report("acme").confirmed == ("a", "b", "rival")
        assert b.cache.match(ACME, prompt(512)).num_tokens == 0
        assert b.purged == [("acme", 1)] * 2

    def test_a_purge_has_a_number_of_its_own_once_it_is_applied(self, fleet: Fleet) -> None:
        """Also if the store loses it and gives its generation to another one."""
        a, seen = by_hand(fleet, "a"), list[tuple[int, int | None]]()

        def look(tenant: str, raised: Raised) -> None:
            seen.append((raised.number, a.replica.purges.applied(tenant)))

        a.replica.attach(a.cache, look)
        assert a.replica.purges.applied("acme") == 0
        lose_it, numbers = fleet.remember(a.replica.keys.tenant("acme")), list[int | None]()
        for _ in range(3):
            a.replica.purge("acme")
            numbers.append(a.replica.purges.applied("acme"))
        assert (
            seen == [(number, None) for number in numbers]
            and 0 < seen[0][0] < seen[1][0] < seen[2][0] < 2**64
        )
        lose_it()
        b = by_hand(fleet, "b")
        assert b.replica.purge("acme").generation == 1
        assert b.replica.purges.applied("acme") not in (*numbers, None, 0)

    def test_data_that_arrives_during_a_purge_is_not_confirmed_for_the_next_one(self, fleet: Fleet) -> None:
        """A replica without data of the tenant stalls while it applies a purge.

        Then it gets data, and there is another purge.
        """
        a, b = by_hand(fleet, "a"), by_hand(fleet, "b")
        a.replica.purge("acme")

        class Resident:
            snapshot = b.cache.snapshot

            def tenants(self) -> list[str]:
                found = list(b.cache.tenants())
                b.replica.attach(b.cache, b.purge)
                b.warm(ACME, prompt(512))
                assert a.replica.purge("acme").pending == ("b",)
                return found

        b.replica.attach(Resident(), b.purge)
        b.replica.apply_purges()
        assert a.replica.purge_report("acme").pending == ("b",) and b.purged == []
        b.replica.beat()
        assert a.replica.purge_report("acme").is_complete and not b.cache.namespaces("acme")

    def test_a_purge_that_is_lost_at_once_is_not_complete(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The store loses a raise before its own replica has applied it.

        Confirmations of the previous purge say nothing about it.
        """
        a, b = by_hand(fleet, "a"), by_hand(fleet, "b")
        a.replica.purge("acme")
        b.replica.beat()
        assert a.replica.purge_report("acme").is_complete
        b.warm(ACME, prompt(512))
        lose_it, write = fleet.remember(a.replica.keys.tenant("acme")), a.replica.store.raise_generation

        def lost_at_once(*raised: Any) -> Any:
            written = write(*raised)
            assert written.value
            lose_it()
            return written

        with monkeypatch.context() as patched, pytest.raises(StoreUnavailable):
            patched.setattr(a.replica.store, "raise_generation", lost_at_once)
            a.replica.purge("acme")
        assert a.replica.purge("acme").pending == ("b",)
        b.replica.beat()
        assert a.replica.purge_report("acme").is_complete and not b.cache.namespaces("acme")

    def test_a_lost_confirmation_is_written_again(self, fleet: Fleet) -> None:
        a, b = by_hand(fleet, "a"), by_hand(fleet, "b")
        b.warm(ACME, prompt(512))
        a.replica.purge("acme")
        lose_it = fleet.remember(a.replica.keys.tenant("acme"))
        b.replica.beat()
        assert a.replica.purge_report("acme").is_complete
        lose_it()
        assert a.replica.purge_report("acme").pending == ("b",)
        b.replica.beat()
        assert a.replica.purge_report("acme").is_complete and b.purged == [("acme", 1)], (
            "b has applied it before"
        )

    def test_a_confirmation_counts_only_for_the_process_that_made_it(self, fleet: Fleet) -> None:
        """One shard may lose the process with the greater epoch while another shard still has what that process
        confirmed.
        """
        a, b = by_hand(fleet, "a"), by_hand(fleet, "b")
        a.replica.purge("acme")
        digest = a.replica.keys.tenant("acme")
        other = Writer("b", b.replica.info().epoch + 1, "ab" * 16)
        raised = a.replica.store.tenant(digest).raised
        assert signed.confirm(a.replica.store, a.replica.keys, digest, other, raised)
        assert a.replica.purge_report("acme").pending == ("b",)
        b.replica.beat()
        assert a.replica.purge_report("acme").confirmed == ("a", "b")

    def test_a_purge_waits_for_a_process_that_was_replaced(self, fleet: Fleet) -> None:
        """The old process learns that it was replaced with its next beat.

        Until its lease ends it believes that it knows every purge.
        """
        a, old = by_hand(fleet, "a"), by_hand(fleet, "b")
        old.warm(ACME, prompt(512))
        young, late = by_hand(fleet, "b"), by_hand(fleet, "late")
        a.replica.purge("acme")
        for each in (young, late):
            each.replica.apply_purges()
        assert old.replica.knows_generations and old.purged == []
        for each in (a, young, late):
            report = each.replica.purge_report("acme")
            assert (report.confirmed, report.pending) == (("a", "late"), ("b",))
        young.replica.leave()
        for each in (a, late, by_hand(fleet, "later")):
            assert each.replica.purge_report("acme").pending == ("b",), (
                "the new process has left, the old one has not"
            )

    def test_a_purge_is_complete_when_the_lease_of_a_replaced_process_is_over(self, fleet: Fleet) -> None:
        a, old = Purged(fleet, "a"), Purged(fleet, "b", background=False)
        fleet.kill(old.replica)
        young = Purged(fleet, "b")
        a.replica.purge("acme")
        young.replica.apply_purges()
        report = a.replica.purge_report("acme")
        assert report.pending == ("b",) or not old.replica.knows_generations, (
            "or the lease of the old process has expired by now"
        )
        fleet.eventually(lambda: a.replica.purge_report("acme").confirmed == ("a", "b"))
        assert not old.replica.knows_generations and old.purged == []
        late = Purged(fleet, "late")
        fleet.eventually(lambda: late.replica.purge_report("acme").confirmed == ("a", "b", "late"))

    def test_the_last_lease_of_several_replaced_processes_counts(self, fleet: Fleet) -> None:
        a, first = by_hand(fleet, "a"), by_hand(fleet, "b")
        second = by_hand(fleet, "b", lease_s=60.0)
        second.replica.leave()
        third = by_hand(fleet, "b")
        a.replica.purge("acme")
        third.replica.apply_purges()
        assert first.replica.knows_generations and not second.replica.knows_generations
        for each in (a, third, by_hand(fleet, "late")):
            assert "b" in each.replica.purge_report("acme").pending
        third.replica.register()
        assert "b" in a.replica.purge_report("acme").pending, "a new registration keeps the statement"

    def test_a_purge_does_not_wait_for_a_process_that_left_or_registered_again(self, fleet: Fleet) -> None:
        a, old = by_hand(fleet, "a"), by_hand(fleet, "b")
        old.replica.leave()
        young = by_hand(fleet, "b")
        a.replica.purge("acme")
        young.replica.apply_purges()
        assert a.replica.purge_report("acme").confirmed == ("a", "b")
        young.replica.register()
        assert a.replica.purge_report("acme").confirmed == ("a", "b"), (
            "the same process, which has applied it"
        )

    def test_a_purge_waits_for_a_process_replaced_after_a_loss_of_the_store(self, fleet: Fleet) -> None:
        """The store restarted empty, so a new registration shows no earlier process.

        The replica that purges still knows of it.
        """
        a, old = Purged(fleet, "a"), Purged(fleet, "b", lease_s=fleet.brief_s)
        fleet.eventually(lambda: names(a.replica.peers()) == ["b"])
        fleet.kill(old.replica)
        fleet.lose()
        young = Purged(fleet, "b")
        fleet.eventually(lambda: young.replica.health().is_ok and works(lambda: a.replica.purge("acme")))
        fleet.eventually(lambda: a.replica.purge_report("acme").is_complete)
        assert not old.replica.knows_generations and young.replica.info().live

    def test_two_purges_with_one_number_give_different_pin_digests(self, fleet: Fleet) -> None:
        a, tenant = by_hand(fleet, "a"), "acme"
        never, lose_it = a.replica.pin_digest(ACME), fleet.remember(a.replica.keys.tenant(tenant))
        a.replica.purge(tenant)
        first = a.replica.pin_digest(ACME)
        lose_it()
        rival = by_hand(fleet, "rival")
        assert rival.replica.pin_digest(ACME) == never
        assert rival.replica.purge(tenant).generation == a.replica.purges.generation(tenant) == 1
        a.replica.beat()
        second = a.replica.pin_digest(ACME)
        assert a.replica.purges.generation(tenant) == 1 and second == rival.replica.pin_digest(ACME)
        assert len({never, first, second}) == 3
        assert a.replica.pin_digest(OTHER) not in (never, first, second)

    def test_pins_survive_a_store_that_gets_a_generation_back(self, fleet: Fleet) -> None:
        """The replica that writes the purge to the store again names the same purge, so no replica applies it twice."""
        a, b = by_hand(fleet, "a"), by_hand(fleet, "b")
        b.warm(ACME, prompt(512))
        lose_it = fleet.remember(a.replica.keys.tenant("acme"))
        a.replica.purge("acme")
        b.replica.beat()
        pinned = b.replica.pin_digest(ACME)
        lose_it()
        for each in (a, b, a):
            each.replica.beat()
        assert a.replica.pin_digest(ACME) == b.replica.pin_digest(ACME) == pinned
        assert b.purged == [("acme", 1)] and a.replica.purge_report("acme").is_complete

    def test_jobs_of_two_processes_with_one_epoch_are_kept_apart(self, fleet: Fleet) -> None:
        lost, kept = twins(fleet)
        a = by_hand(fleet, "a").replica
        job = kept.create_job(ACME, 1000, ["b"], num_wanted=1)
        assert lost.take_job(job.id, "acme") is None and not lost.end_job(job.id), "the owner is alive"
        assert not lost.extend_job(job.id, "b") and kept.take_job(job.id, "acme") == job
        assert lost.report_job(job.id, "running", 512)
        for each in (a, kept):
            seen = each.job(job.id, "acme")
            assert seen is not None and [part.state for part in seen.parts] == ["lost"]
        assert kept.extend_job(job.id, "b") and not kept.extend_job(job.id, "b"), (
            "the replica is asked again, once"
        )
        assert kept.report_job(job.id, "done", 1000)
        seen = a.job(job.id, "acme")
        assert seen is not None and seen.parts[0].writer == kept.info().writer

    def test_pins_of_two_processes_with_one_epoch_are_kept_apart(self, fleet: Fleet) -> None:
        lost, kept = twins(fleet)
        a = by_hand(fleet, "a").replica
        pin = FleetPin("1f" * 16, a.pin_digest(ACME), 512, "all")
        assert a.keep_pin("acme", pin, 600.0)
        for each, state in ((lost, "lost"), (kept, "done")):
            assert each.state_pin("acme", pin.id, "done", 512)
            (seen,) = a.fleet_pins("acme")
            assert [(part.writer, part.state) for part in seen.parts] == [(each.info().writer, state)]

    def test_shares_of_two_processes_with_one_epoch_add_up(self, fleet: Fleet) -> None:
        """It is unknown which of the two processes is fenced.

        The second process gets nothing until the first one's share expires.
        """
        lost, kept = twins(fleet)
        a = by_hand(fleet, "a").replica
        a.set_limit("acme", 10)
        assert lost.reserve("acme", 6).blocks == 6
        for _ in range(2):
            second = kept.reserve("acme", 6)
            assert (second.verdict, second.blocks, second.others, second.limit) == ("OK", 0, 6, 10)
        assert a.reserve("acme", 9).blocks == 4 and lost.reserve("acme", 5).blocks == 5
        lost.reserve("acme", 0)
        assert kept.reserve("acme", 6).blocks == 6
        waiting = lost.reserve("acme", 6)
        assert (waiting.verdict, waiting.blocks, waiting.others) == ("OK", 0, 10)
        with pytest.raises(StaleEpoch):
            lost.beat()

    def test_a_signed_request_is_for_one_process_even_with_equal_epochs(self, fleet: Fleet) -> None:
        lost, kept = twins(fleet)
        assert lost.info().audience != kept.info().audience
        a = by_hand(fleet, "a").replica
        assert [info.audience for info in a.replicas()[1:]] == [kept.info().audience]

    def test_a_replica_that_cannot_purge_does_not_confirm(self, fleet: Fleet) -> None:
        a, b = Purged(fleet, "a"), fleet.join("b")
        store(b, ACME, prompt(512))
        fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {"b": 512})
        a.replica.purge("acme")
        fleet.settle()
        assert a.replica.purge_report("acme").pending == ("b",)
        fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {})


def works(act: Callable[[], object]) -> bool:
    """Whether the store answers."""
    with suppress(StoreUnavailable):
        act()
        return True
    return False


def blocks(coordinator: Coordinator, tenant: str) -> int:
    """The number of blocks that were granted last."""
    grant = coordinator.quotas.granted(tenant)
    return 0 if grant is None else grant.blocks


def by_hand(fleet: Fleet, name: str, lease_s: float = 600.0) -> Purged:
    """A replica without threads. Its lease outlasts the test."""
    return Purged(fleet, name, background=False, lease_s=lease_s)


def twins(fleet: Fleet) -> tuple[Coordinator, Coordinator]:
    """Two processes of ``b`` with one epoch: the store has lost the first one, and its clock went back."""
    found, ahead = [], int(time.time() * 1000) + 10**9
    for _ in range(2):
        fleet.forget("b")
        found.append(fleet.replica("b", background=False, lease_s=600.0))
        found[-1]._writer = found[-1]._writer._replace(epoch=ahead)
        found[-1].register()
    lost, kept = found
    assert lost.info().epoch == kept.info().epoch and lost.info().nonce != kept.info().nonce
    return lost, kept


class Purged:
    """A replica with a cache. It clears a tenant's namespaces when the fleet purges the tenant."""

    def __init__(self, fleet: Fleet, name: str, **overrides: Any) -> None:
        self.purged: list[tuple[str, int]] = []
        self.knew: list[bool] = []
        self.owed: set[str] = set()
        self.owes_removed = False
        self.replica = fleet.replica(name, **overrides)
        self.cache = PrefixCache(CacheConfig(num_blocks=256, block_size=16), journal=self.replica.journal)
        self.replica.attach(self.cache, self.purge, lambda: self.owed, lambda: self.owes_removed)
        self.replica.register()

    def purge(self, tenant: str, raised: Raised) -> None:
        self.purged.append((tenant, raised.generation))
        self.knew.append(self.replica.knows_generations)
        for namespace in self.cache.namespaces(tenant):
            self.cache.clear(namespace)

    def warm(self, namespace: Namespace, ids: list[int]) -> None:
        with self.cache.open(namespace, ids) as sequence:
            sequence.commit(len(ids))
