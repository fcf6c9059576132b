"""What the disk has of announced prompts comes into host memory before anybody waits for it, and costs nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from radixkv import Namespace, Tenant
from radixkv.clock import ManualClock
from radixkv.tiers import ladder, prefetch
from tests.tiers.support import FaultyFiles, clock, patience
from tests.tiers.test_loading import DiskOwner, Reads, Sleeper, folder, held_reads, on_disk
from tests.tiers.test_tiered_cache import NS, OTHER, PROMPT, loading_of
from tests.waiting import eventually

pytestmark = pytest.mark.slow

__all__ = ["clock", "folder", "patience"]  # fixtures


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's thread does nothing: the test calls ``ticks``."""
    for name in ("_TICK_S", "_BUSY_TICK_S"):
        monkeypatch.setattr(ladder, name, 3_600.0)


def ticks(owner: DiskOwner, until: Callable[[], bool]) -> bool:
    """Tick until this is so."""

    def tick() -> bool:
        with owner.below.gate:  # type: ignore[attr-defined]
            owner.below.tick()
        return until()

    return eventually(tick)


def in_host(owner: DiskOwner, namespace: Namespace = NS) -> int:
    """Tokens of the prompt in host memory."""
    return int(owner.below.host.cache.match(namespace, PROMPT).num_tokens)


def test_an_announced_prompt_waits_in_host_memory(folder: Path) -> None:
    with held_reads(folder) as (owner, reads):
        reads.allow(100)
        announcement = owner.cache.announce(NS, PROMPT)
        assert eventually(lambda: in_host(owner) == 40), "in parts, if it must be"
        with owner.cache.open(NS, PROMPT, announcement=announcement) as sequence:
            loading = loading_of(sequence)
            assert (loading.num_tokens, loading.num_host_tokens) == (40, 40)
            assert loading.wait() and owner.is_right(sequence)
        assert reads.num == 10, "each record was read once"
        assert in_host(owner, OTHER) == 0


def test_a_prompt_that_is_not_there_ends_at_once(folder: Path) -> None:
    with on_disk(folder) as owner:
        owner.known()
        for first in range(100, 140):
            owner.cache.announce(NS, [first, *PROMPT])
        assert eventually(owner.is_quiet)


@pytest.mark.parametrize("change", ["withdraw", "purge", "clear", "open"])
def test_what_ends_the_announcement_ends_the_way(folder: Path, change: str) -> None:
    with held_reads(folder) as (owner, reads):
        announcement = owner.cache.announce(NS, PROMPT)
        assert eventually(lambda: owner.disk.num_running == 1)
        if change == "withdraw":
            announcement.withdraw()
        elif change == "open":
            with owner.cache.open(NS, PROMPT, announcement=announcement) as sequence:
                owner.compute(sequence, 41)
        else:
            owner.cache.purge("a") if change == "purge" else owner.cache.clear(NS)
        reads.open()
        assert eventually(lambda: owner.is_quiet() and owner.is_idle())
        if change in ("purge", "clear"):
            assert in_host(owner) == 0, "nothing comes back"


def test_a_request_goes_first(folder: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that a request waits for are read before those of announced prompts, into rows of their own."""
    reads = Reads()
    with on_disk(folder, files=FaultyFiles(reads)) as owner:
        owner.known()
        num_rows = owner.disk.rows.num_free
        reads.is_armed = True
        owner.cache.announce(OTHER, PROMPT)
        assert ticks(owner, lambda: owner.disk.num_running == 1)
        assert owner.disk.rows.num_free == num_rows
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert loading.num_tokens == 40
            reads.allow(10 + owner.disk.records.settings.num_threads)  # those that had begun
            assert loading.wait() and owner.is_right(sequence)
        reads.open()
        assert ticks(owner, lambda: in_host(owner, OTHER) == 40)


def test_tenants_take_turns(folder: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with many long prompts doesn't keep another's from coming."""
    monkeypatch.setattr(ladder, "AHEAD_ROWS", 2)
    with on_disk(folder) as owner:
        owner.known()
        for length in range(41, 9, -1):
            owner.cache.announce(NS, PROMPT[:length])
        owner.cache.announce(OTHER, PROMPT)
        assert ticks(owner, lambda: in_host(owner, OTHER) >= 8)
        assert in_host(owner) <= 16
        assert ticks(owner, lambda: in_host(owner) == in_host(owner, OTHER) == 40)


@pytest.mark.parametrize("call", ["announce", "prefetch"])
def test_what_gives_way_begins_no_reads_in_vain(
    folder: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Also if rows are free when a part has come, because host memory has what lies between two parts."""
    with on_disk(folder) as owner:
        owner.known()
        tier, began = owner.disk.records, list[tuple[str, int]]()
        load, locate = tier.load, tier.locate

        def counted(namespace: Namespace, key: bytes, block: int, *others: Any, **named: Any) -> Any:
            began.append((namespace.tenant, block))
            return load(namespace, key, block, *others, **named)

        monkeypatch.setattr(tier, "load", counted)
        monkeypatch.setattr(tier, "locate", lambda *given, **named: min(locate(*given, **named), 4))
        for namespace in (NS, OTHER):
            getattr(owner.cache, call)(namespace, PROMPT)
        assert ticks(owner, owner.is_quiet)
        assert in_host(owner) == in_host(owner, OTHER) == 40
        assert sorted(began) == [(tenant, block) for tenant in "ab" for block in range(10)], "each once"
        turns = [tenant for at, (tenant, _) in enumerate(began) if not at or began[at - 1][0] != tenant]
        assert turns == ["a", "b"] * 3, "after each part it is the other one's turn"


def test_a_prompt_that_has_come_whole_is_not_looked_for_again(
    folder: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_disk(folder) as owner:
        owner.known()
        told = list[str]()
        stores = owner.disk.demotions
        original = stores.offer_again

        def offer_again(namespace: Namespace, *others: Any) -> None:
            told.append(namespace.tenant)
            original(namespace, *others)

        monkeypatch.setattr(stores, "offer_again", offer_again)
        owner.cache.announce(NS, PROMPT)
        owner.cache.announce(OTHER, PROMPT)
        assert ticks(owner, owner.is_quiet)
        assert in_host(owner) == in_host(owner, OTHER) == 40 and told == ["a", "b"]


def test_a_flood_is_bounded(folder: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MAX_PROMPTS", 5)
    monkeypatch.setattr(prefetch, "MAX_TENANTS", 3)
    with on_disk(folder) as owner:
        held = owner.below._prefetch
        assert held is not None
        for _ in range(2):
            for at in range(200):
                owner.cache.announce(Namespace(f"tenant {at % 10}", "m"), PROMPT)
            assert [len(each) for each in held._arrived.values()] == [5, 5, 5]
            with monkeypatch.context() as patch:
                patch.setattr(prefetch, "_AT_ONCE", 0)
                ticks(owner, lambda: True)
            assert [len(each) for each in held._waiting.values()] == [5, 5, 5]
            assert not held._arrived


class Announced:
    """One that is never open."""

    key, is_open, resident_tokens = b"", False, 0

    def __init__(self, tenant: str) -> None:
        self.namespace = Namespace(tenant, "m")


def arrived(*tenants: str) -> dict[str, int]:
    """How many announced prompts of each tenant wait, if these come between two ticks."""
    never: Any = lambda *arguments: pytest.fail("nothing is brought")  # noqa: E731
    held = prefetch.Prefetch(cast("Any", None), never, never, never, never, lambda: None)
    for each in tenants:
        held.add(Announced(each))
    held._take_new()
    return {tenant: len(line) for tenant, line in held._waiting.items()}


def test_a_burst_drops_no_other_tenants_prompts() -> None:
    """Nor if all together are too many: then those of the tenants with most."""
    assert arrived("a", *20_000 * ["b"], "c") == {"a": 1, "b": prefetch.MAX_PROMPTS, "c": 1}
    flood = [f"tenant {at % 20}" for at in range(20 * prefetch.MAX_PROMPTS)]
    found = arrived("a", *flood, "c", "c")
    assert (found.pop("a"), found.pop("c")) == (1, 2)
    assert sum(found.values()) == prefetch.MAX_ARRIVED - 3
    assert max(found.values()) - min(found.values()) <= 2


def test_while_the_tiers_are_off_nothing_is_busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error that could not be undone, the disk's thread only repeats what is owed, and keeps no prompts."""
    with held_reads(folder) as (owner, reads):
        owner.cache.announce(NS, PROMPT)
        held = owner.below._prefetch
        assert held is not None and eventually(lambda: held._running is not None)
        sleeper, ticked, tick = Sleeper(owner, monkeypatch), list[None](), owner.below.tick
        monkeypatch.setattr(owner.below, "tick", lambda: (ticked.append(None), tick()))
        owner.below._is_off = True
        assert sleeper.sleeps(), "though a prompt is on its way"
        for call in (owner.cache.announce, owner.cache.prefetch):
            call(OTHER, PROMPT)
        assert not held._arrived and not held._asked and not held._waiting
        ticked.clear()
        owner.below._has_work.set()
        assert eventually(lambda: len(ticked) == 1) and sleeper.sleeps()
        owner.below._is_off = False
        owner.below._has_work.set()
        reads.open()
        assert eventually(owner.is_quiet)


def test_what_must_leave_nothing_is_left_alone(folder: Path) -> None:
    with held_reads(folder) as (owner, reads):
        owner.cache.announce(Namespace("b", "m", salt="uncached-1"), PROMPT)
        assert eventually(owner.is_quiet)
        assert reads.num == 0 and in_host(owner) == 0


@pytest.mark.parametrize("call", ["announce", "prefetch"])
def test_nothing_comes_for_a_strict_tenant(folder: Path, call: str) -> None:
    """Neither after it became strict, nor of what was on its way then."""
    with held_reads(folder) as (owner, reads):
        getattr(owner.cache, call)(NS, PROMPT)
        assert eventually(lambda: reads.num_held > 0)
        owner.cache.add_tenant(Tenant("a", guaranteed_blocks=20, max_blocks=20, mode="strict"))
        assert eventually(lambda: not owner.cache.pending()), "its keys are destroyed"
        num_before = reads.num + reads.num_held
        getattr(owner.cache, call)(NS, PROMPT)
        reads.open()
        assert eventually(lambda: owner.is_quiet() and owner.is_idle())
        assert reads.num == num_before and in_host(owner) == 0


def test_a_slow_disk_is_not_blamed(folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waited: requests may still ask the disk."""
    monkeypatch.setattr("radixkv.tiers.disk.promotions.AHEAD_S", 2.0)
    with held_reads(folder) as (owner, _):
        owner.cache.announce(NS, PROMPT)
        assert eventually(lambda: owner.disk.num_running == 1)
        clock.advance(2.0)
        assert eventually(owner.is_quiet)
        assert owner.disk.promotions.place_of(NS) is not None


def a_promotion_that_a_purge_does_not_stop(patch: pytest.MonkeyPatch) -> None:
    """The generation is that of the moment, and the announcement counts as open."""
    patch.setattr(prefetch.Prefetch, "_is_coming", _regardless(prefetch.Prefetch._is_coming))


def _regardless(original: Callable[..., bool]) -> Callable[..., bool]:
    class Open:
        is_open, resident_tokens = True, 0

        def __init__(self, namespace: Namespace, key: bytes) -> None:
            self.namespace, self.key = namespace, key

    keys: dict[str, bytes] = {}

    def is_coming(self: Any, prompt: Any) -> bool:
        key = keys.setdefault(prompt.request_id, prompt.expected.key)
        return original(self, prompt._replace(expected=Open(prompt.expected.namespace, key)))

    return is_coming


def test_a_purge_reaches_it_even_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the announcement stayed open, the promotion itself belongs to a generation."""
    a_promotion_that_a_purge_does_not_stop(monkeypatch)
    test_what_ends_the_announcement_ends_the_way(folder, "purge")
