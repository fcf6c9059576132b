"""A prompt of which somebody asked where to send it comes from the disk into host memory, at nobody else's cost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, Tenant
from radixkv.audit.properties.material import LAYOUT
from radixkv.clock import ManualClock
from radixkv.errors import ArgumentError, TokenError
from radixkv.index.tokens import encode
from radixkv.tiers import ladder, prefetch
from radixkv.tiers.tiered_cache import TieredCache
from tests.tiers.support import FaultyFiles, clock, patience
from tests.tiers.test_loading import DiskOwner, Reads, Sleeper, folder, held_reads, on_disk
from tests.tiers.test_prefetch import by_hand, in_host, ticks
from tests.tiers.test_tiered_cache import NS, OTHER, PROMPT, SIZE, loading_of
from tests.waiting import ended, eventually

__all__ = ["by_hand", "clock", "folder", "patience"]  # fixtures

ELSE = list(range(300, 341))
"""Another prompt, as long, which is not on the disk."""


def held_by(owner: DiskOwner) -> prefetch.Prefetch:
    assert owner.below._prefetch is not None
    return owner.below._prefetch


def is_idle(owner: DiskOwner) -> bool:
    """Whether nothing comes any more; never in the middle of a step."""
    return owner.is_quiet()


def looked_at(owner: DiskOwner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that gets the need and the tokens of each prompt that the disk is asked for."""
    found: list[tuple[str, int]] = []
    original = owner.disk.promotions.is_waiting

    def is_waiting(
        request_id: str, namespace: Namespace, generation: int, key: bytes, *args: Any, **named: Any
    ) -> bool:
        found.append((named["need"], len(key) // 4))
        return original(request_id, namespace, generation, key, *args, **named)

    monkeypatch.setattr(owner.disk.promotions, "is_waiting", is_waiting)
    return found


def test_an_asked_prompt_waits_in_host_memory(folder: Path) -> None:
    with on_disk(folder) as owner:
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: in_host(owner) == 40)
        assert in_host(owner, OTHER) == 0, "another tenant's copy stays where it is"
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert (loading.num_tokens, loading.num_host_tokens) == (40, 40)
            assert loading.wait() and owner.is_right(sequence)
        assert eventually(lambda: is_idle(owner))


def test_a_question_is_no_request(folder: Path) -> None:
    """Nothing is announced or counted, and nothing in the cache is protected or ordered by it."""
    with on_disk(folder) as owner:
        owner.ask(ELSE)
        before = owner.cache.stats(), owner.cache.tenant_stats("a")
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: in_host(owner) == 40)
        assert (owner.cache.stats(), owner.cache.tenant_stats("a")) == before
        assert owner.cache.snapshot().announcements == ()


def test_it_begins_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's thread is woken: otherwise it would look only once in an hour."""
    with on_disk(folder) as owner:
        sleeper = Sleeper(owner, monkeypatch)
        assert sleeper.sleeps()
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: in_host(owner) == 40 and is_idle(owner))
        assert sleeper.sleeps()
        owner.cache.announce(OTHER, PROMPT)
        assert eventually(lambda: in_host(owner, OTHER) == 40)


def test_asking_waits_for_nothing(folder: Path) -> None:
    """Neither for the disk, which hangs, nor for a step of the engine."""
    with held_reads(folder) as (owner, reads):
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: owner.disk.num_running == 1)
        with owner.below.gate:  # type: ignore[attr-defined]
            asking = threading.Thread(target=lambda: owner.cache.prefetch(OTHER, PROMPT))
            asking.start()
            ended(asking)
        reads.open()
        assert eventually(lambda: in_host(owner, OTHER) == 40)


@pytest.mark.parametrize("change", ["purge", "clear", "time"])
def test_what_ends_it(folder: Path, change: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "ASKED_S", 5.0)
    with held_reads(folder) as (owner, reads):
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: owner.disk.num_running == 1)
        if change == "time":
            clock.advance(5.0)
        else:
            owner.cache.purge("a") if change == "purge" else owner.cache.clear(NS)
        assert eventually(lambda: is_idle(owner))
        reads.open()
        assert eventually(owner.is_idle)
        assert in_host(owner) == 0, "nothing comes back"


@pytest.mark.parametrize("change", ["purge", "clear", "time"])
def test_what_was_asked_before_its_end_is_not_looked_for(
    folder: Path, change: str, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "time":
        monkeypatch.setattr(ladder, "ASKED_S", 0.0)
    with on_disk(folder) as owner:
        owner.known()
        found = looked_at(owner, monkeypatch)
        owner.cache.prefetch(NS, PROMPT)
        if change != "time":
            owner.cache.purge("a") if change == "purge" else owner.cache.clear(NS)
        assert ticks(owner, lambda: is_idle(owner))
        assert found == []


def test_a_flood_delays_no_other_tenant(folder: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a tenant asks: it keeps a few prompts, and the others have their turn after each part of them."""
    monkeypatch.setattr(ladder, "AHEAD_ROWS", 2)
    with on_disk(folder) as owner:
        owner.known()
        held = held_by(owner)
        for at in range(8_000):
            owner.cache.prefetch(NS, PROMPT[: 41 - at % 4])
            if at == 9:
                owner.cache.prefetch(OTHER, PROMPT)
        assert {name: len(line) for name, line in held._asked.items()} == {"a": prefetch.MAX_ASKED, "b": 1}

        def has_come() -> bool:
            owner.cache.prefetch(NS, PROMPT)
            assert all(len(line) <= prefetch.MAX_ASKED for line in held._waiting.values())
            return in_host(owner, OTHER) >= 8

        assert ticks(owner, has_come)
        assert in_host(owner) <= 16
        assert ticks(owner, lambda: in_host(owner) == in_host(owner, OTHER) == 40)


def test_a_flood_does_not_delay_announced_prompts(
    folder: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_disk(folder) as owner:
        owner.known()
        found = looked_at(owner, monkeypatch)
        for at in range(100):
            owner.cache.prefetch(NS, ELSE[: 21 + at % 20])
        owner.cache.announce(OTHER, PROMPT)
        owner.cache.announce(NS, PROMPT)
        assert ticks(owner, lambda: in_host(owner, OTHER) == 40)
        assert [need for need, _ in found].index("announced") == 0, "a tenant's own requests go first"
        before = [need for need, _ in found[: found.index(("announced", 41), 1)]]
        assert before.count("asked") <= prefetch.MAX_ASKED


def test_the_number_of_tenants_is_bounded(
    folder: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MAX_TENANTS", 3)
    with on_disk(folder) as owner:
        for at in range(200):
            owner.cache.prefetch(Namespace(f"tenant {at % 10}", "m"), PROMPT)
        held = held_by(owner)
        assert [len(each) for each in held._asked.values()] == 3 * [prefetch.MAX_ASKED]
        monkeypatch.setattr(prefetch, "_AT_ONCE", 0)
        assert ticks(owner, lambda: True)
        for at in range(200):
            owner.cache.prefetch(Namespace(f"another {at % 10}", "m"), PROMPT)
        assert ticks(owner, lambda: True)
        assert [len(each) for each in held._waiting.values()] == 3 * [prefetch.MAX_ASKED]


def test_the_newest_goes_first(folder: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of an older one has probably come. One that takes several parts gives way after each."""
    monkeypatch.setattr(ladder, "AHEAD_ROWS", 2)
    with on_disk(folder) as owner:
        owner.known()
        found = looked_at(owner, monkeypatch)
        for length in (9, 13, 17, 21, 25):
            owner.cache.prefetch(NS, ELSE[:length])
        assert ticks(owner, lambda: is_idle(owner))
        assert found == [("asked", length) for length in (25, 21, 17, 13)]
        found.clear()
        owner.cache.prefetch(NS, PROMPT)
        assert ticks(owner, lambda: in_host(owner) >= 8)
        owner.cache.prefetch(NS, ELSE[:9])
        assert ticks(owner, lambda: in_host(owner) == 40)
        assert ("asked", 41) in found[found.index(("asked", 9)) :]


def test_it_takes_free_memory_and_none_of_others(folder: Path) -> None:
    """A client that only asks can't drive out what another tenant has, and the prompt counts as its tenant's."""
    with on_disk(folder, host_blocks=12) as owner:
        owner.ask(ELSE, OTHER)
        owner.evict()
        host = owner.below.host.cache
        assert host.tenant_stats("b").resident_blocks == 10 and owner.below.host.index.num_used == 10
        for _ in range(20):
            owner.cache.prefetch(NS, PROMPT)
            assert eventually(lambda: is_idle(owner))
        assert in_host(owner) == 8 and host.tenant_stats("a").resident_blocks == 2
        assert host.match(OTHER, ELSE).num_tokens == 40


def test_it_takes_back_what_its_guarantee_has_lent(folder: Path) -> None:
    with on_disk(folder, host_blocks=12) as owner:
        owner.ask(ELSE, OTHER)
        owner.ask(ELSE[::-1][:9], OTHER)
        owner.evict()
        assert eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] == 32)
        host = owner.below.host.cache
        assert eventually(lambda: host.evictable_blocks == 12 and not owner.below.host.index._uses.any())
        assert owner.below.host.index.num_used == 12
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: is_idle(owner)) and in_host(owner) == 0
        owner.cache.add_tenant(Tenant("a", guaranteed_blocks=20))
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: is_idle(owner))
        assert in_host(owner) == 10 * SIZE, "20 of 40 blocks: 26 of both, and the cache has none of its"
        assert host.tenant_stats("b").resident_blocks == 2


def test_it_replaces_what_its_own_tenant_has(folder: Path) -> None:
    with on_disk(folder, host_blocks=20) as owner:
        owner.ask(ELSE, OTHER)
        owner.ask(ELSE)
        owner.evict()
        assert eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] == 40)
        host = owner.below.host.cache
        assert eventually(lambda: host.evictable_blocks == 20 and not owner.below.host.index._uses.any())
        assert owner.below.host.index.num_used == 20
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: in_host(owner) == 40)
        assert host.match(NS, ELSE).num_tokens == 0
        assert host.match(OTHER, ELSE).num_tokens == 40


def test_a_limit_holds(folder: Path) -> None:
    with on_disk(folder) as owner:
        owner.cache.add_tenant(Tenant("a", max_blocks=3))
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: is_idle(owner) and owner.disk.purges.is_known("a"))
        owner.cache.prefetch(NS, PROMPT)
        assert eventually(lambda: is_idle(owner))
        assert owner.below.host.cache.tenant_stats("a").resident_blocks <= 7, (
            "3 of 40 blocks: 7 of 104 of both"
        )


def test_what_must_leave_nothing_is_left_alone(folder: Path) -> None:
    with held_reads(folder) as (owner, reads):
        owner.cache.prefetch(Namespace("b", "m", salt="uncached-1"), PROMPT)
        assert eventually(lambda: is_idle(owner))
        assert reads.num == 0 and in_host(owner) == 0


def test_a_long_request_does_not_wait_for_what_comes_ahead(folder: Path, by_hand: None) -> None:
    """It needs more rows than there are, and all are free: waiting wouldn't help."""
    reads = Reads()
    with on_disk(folder, files=FaultyFiles(reads), host_blocks=24) as owner:
        owner.known()
        reads.is_armed = True
        owner.cache.prefetch(NS, PROMPT)
        assert ticks(owner, lambda: owner.disk.num_running == 1)
        assert owner.disk.rows.num_free == 6
        with owner.cache.open(OTHER, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert owner.disk.rows.num_free == 1, "it has begun, with all rows but those of a newcomer"
            loading.cancel()
        reads.open()
        assert ticks(owner, lambda: in_host(owner) == 40)


@pytest.mark.parametrize("call", ["announce", "prefetch"])
def test_a_request_takes_over_what_comes_ahead(folder: Path, call: str, by_hand: None) -> None:
    """It doesn't wait for reads that others' go before: it uses what is there, and reads the rest itself."""
    with held_reads(folder) as (owner, reads):
        getattr(owner.cache, call)(NS, PROMPT)
        assert ticks(owner, lambda: owner.disk.num_running == 1)
        (ahead,) = owner.disk.promotions._promotions.values()
        reads.allow(4)
        assert eventually(lambda: sum(job.is_done for job in ahead.jobs) == 4)
        num_good = [*(job.is_done for job in ahead.jobs), False].index(False)
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert not owner.disk.promotions.num_running
            assert loading.num_host_tokens == in_host(owner) == num_good * SIZE
            reads.open()
            assert ticks(owner, loading.poll) and owner.is_right(sequence)
            assert sequence.num_committed_tokens == 40
        assert ticks(owner, lambda: is_idle(owner))


def test_what_a_request_brings_is_not_brought_ahead(folder: Path, by_hand: None) -> None:
    with held_reads(folder) as (owner, reads), owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        owner.cache.prefetch(NS, PROMPT)
        with owner.below.gate:  # type: ignore[attr-defined]
            owner.below.tick()
        assert is_idle(owner) and not owner.disk.num_running
        reads.open()
        assert loading.wait() and loading.num_loaded_tokens == 40


def test_no_freed_slot_is_filled(folder: Path, by_hand: None) -> None:
    """If two promotions bring the same blocks, the second finds them there, and its own slots are free again."""
    with on_disk(folder) as owner:
        owner.known()
        key, filled = encode(PROMPT), list[int]()
        with owner.below.gate:  # type: ignore[attr-defined]
            assert owner.disk.promotions.is_waiting("request", NS, 0, key, 0)
            assert owner.disk.promotions.is_waiting("ahead", NS, 0, key, 0, need="announced")
            jobs = [job for each in owner.disk.promotions._promotions.values() for job in each.jobs]
            assert len(jobs) == 20 and eventually(lambda: all(job.is_done for job in jobs))
            assert not owner.disk.promotions.is_waiting("ahead", NS, 0, key, 0, need="announced")
            with owner.below.host.cache.match_and_lease(NS, key):
                assert not owner.disk.promotions.is_waiting("request", NS, 0, key, 0)
            filled += owner.below.host._work.fill_slots.tolist()
            owner.below.tick()
        index = owner.below.host.index
        table = index.slots_of(index.cache.match(NS, PROMPT).block_ids).tolist()
        assert sorted(filled) == sorted(table) and len(table) == 10
        for each in ("request", "ahead"):
            owner.disk.promotions.forget(each)
        assert owner.ask(PROMPT) == (40, 1)


@pytest.mark.parametrize("call", ["announce", "prefetch"])
def test_a_folder_that_learns_slowly_is_not_blamed(
    folder: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waited for it: requests may still ask the disk."""
    monkeypatch.setattr("radixkv.tiers.pending.LEARNING_S", -1.0)
    with on_disk(folder) as owner:
        getattr(owner.cache, call)(NS, PROMPT)
        assert eventually(lambda: is_idle(owner))
        assert owner.disk.promotions.place_of(NS) is not None and owner.disk.patience._num_timeouts == 0


def test_what_is_refused_changes_nothing(folder: Path, by_hand: None) -> None:
    with on_disk(folder) as owner:
        for wrong in ([-1], [2**32], [1.5], "text"):
            with pytest.raises(TokenError):
                owner.cache.prefetch(NS, wrong)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="namespace"):
            owner.cache.prefetch("a", PROMPT)  # type: ignore[arg-type]
        assert is_idle(owner)


@pytest.mark.parametrize("host_blocks", [0, 16])
def test_without_a_disk_it_does_nothing(host_blocks: int) -> None:
    cache = TieredCache(CacheConfig(16, SIZE, LAYOUT, host_blocks=host_blocks))
    cache.prefetch(NS, PROMPT)
    assert cache.stats().resident_blocks == 0
    cache.close()
