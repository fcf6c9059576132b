"""What the disk has of a prompt comes into host memory shortly before the expected end of a pause."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import pytest

from radixkv import Namespace, RequestHints
from radixkv.clock import ManualClock
from radixkv.errors import ArgumentError
from radixkv.index.tokens import encode
from radixkv.tiers import ladder, prefetch
from radixkv.tiers.prefetch import MAX_AT_ONCE, MAX_LATER, MAX_PAUSE_S, PROMPT_BYTES, Asked, LaterPrompts
from radixkv_policies.hints import Label
from tests.engines.hf.test_asked_prompts import ELSE, held_by, is_idle
from tests.tiers.support import clock, patience
from tests.tiers.test_loading import DiskOwner, folder, on_disk
from tests.tiers.test_prefetch import by_hand, in_host, ticks
from tests.tiers.test_tiered_cache import NS, OTHER, PROMPT

__all__ = ["by_hand", "clock", "folder", "patience"]  # fixtures

GAP_S = 40.0
HINTS = RequestHints({"expected_gap_s": GAP_S})


def by_note(owner: DiskOwner) -> None:
    owner.cache.note(NS, PROMPT, HINTS)


def by_session(owner: DiskOwner) -> None:
    session = owner.cache.session(NS)
    with session.open(PROMPT):
        pass
    session.pause(GAP_S)


def by_hint(owner: DiskOwner) -> None:
    owner.cache.prefetch(NS, PROMPT, in_s=GAP_S)


@pytest.mark.parametrize("pause", [by_note, by_session, by_hint])
def test_it_comes_before_its_time(
    folder: Path, by_hand: None, clock: ManualClock, pause: Callable[[DiskOwner], None]
) -> None:
    with on_disk(folder) as owner:
        owner.known()
        pause(owner)
        clock.advance(0.74 * GAP_S)
        assert ticks(owner, lambda: is_idle(owner)) and in_host(owner) == 0
        clock.advance(0.02 * GAP_S)
        assert ticks(owner, lambda: in_host(owner) == 40)
        assert in_host(owner, OTHER) == 0 and len(owner.below._later) == 0
        assert ticks(owner, lambda: is_idle(owner))


def test_it_takes_the_time_that_is_left(
    folder: Path, by_hand: None, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come until the pause is over, and some seconds longer."""
    monkeypatch.setattr(ladder, "ASKED_S", 5.0)
    for late_s, tokens in ((GAP_S + 6.0, 0), (GAP_S + 4.0, 40)):
        with on_disk(folder) as owner:
            owner.known()
            by_note(owner)
            clock.advance(late_s)
            with owner.below.gate:
                owner.below.tick()
            assert ticks(owner, lambda: is_idle(owner)) and in_host(owner) == tokens


@pytest.mark.parametrize("change", ["purge", "clear", "close"])
def test_what_ends_it_drops_its_ids_at_once(
    folder: Path, by_hand: None, clock: ManualClock, change: str
) -> None:
    with on_disk(folder) as owner:
        owner.known()
        by_note(owner)
        owner.cache.note(OTHER, PROMPT, HINTS)
        assert len(owner.below._later) == 2
        if change == "close":
            owner.cache.close()
            assert owner.below._later.num_bytes == 0
            return
        owner.cache.purge("a") if change == "purge" else owner.cache.clear(NS)
        assert owner.below._later.num_bytes == len(encode(PROMPT)) + PROMPT_BYTES
        clock.advance(GAP_S)
        assert ticks(owner, lambda: in_host(owner, OTHER) == 40) and in_host(owner) == 0


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"tool_pending": True},
        *({"expected_gap_s": each} for each in (0, -1.0, True, "40", inf, -inf, nan, 1e300, 10**400)),
        {"expected_gap_s": MAX_PAUSE_S + 1},
        {"expected_gap_s": GAP_S, "session_over": True},
    ],
)
def test_other_labels_bring_nothing(folder: Path, by_hand: None, labels: dict[str, Label]) -> None:
    """A client writes them. None is an error."""
    with on_disk(folder) as owner:
        owner.cache.note(NS, PROMPT, RequestHints(labels))
        assert len(owner.below._later) == 0 and not held_by(owner).is_busy


def test_wrong_times_are_refused(folder: Path) -> None:
    with on_disk(folder) as owner:
        for wrong in (-1, nan, True, "4", None):
            with pytest.raises(ArgumentError, match="in_s"):
                owner.cache.prefetch(NS, PROMPT, in_s=wrong)  # type: ignore[arg-type]


def test_what_is_there_is_not_read(folder: Path, by_hand: None, clock: ManualClock) -> None:
    """The session has continued in the meantime, or its KV never left."""
    with on_disk(folder) as owner:
        owner.known()
        owner.cache.prefetch(NS, PROMPT)
        assert ticks(owner, lambda: in_host(owner) == 40 and is_idle(owner))
        read = owner.cache.tier_counts()["disk"]["read_bytes"]
        by_note(owner)
        clock.advance(GAP_S)
        assert ticks(owner, lambda: len(owner.below._later) == 0 and is_idle(owner))
        assert owner.cache.tier_counts()["disk"]["read_bytes"] == read


def asked(tenant: str, num_bytes: int, is_open: bool = True) -> Asked:
    return Asked(Namespace(tenant, "m"), bytes(num_bytes), lambda: is_open, lambda: 0)


def test_a_flood_replaces_its_own() -> None:
    later = LaterPrompts()
    later.add(9.0, asked("quiet", 4))
    flood = [asked("loud", 4) for _ in range(20_000)]
    for at, each in enumerate(flood):
        later.add(1e9 - at, each)
        assert len(later._due) <= 3 * MAX_LATER + 4
    assert len(later) == MAX_LATER + 1 and later.num_bytes == (4 + PROMPT_BYTES) * len(later)
    assert [each.namespace.tenant for each in later.take_due(9.0)] == ["quiet"]
    assert set(later.take_due(1e9)) == set(flood[-MAX_LATER:]), "the newest stay"
    assert len(later) == later.num_bytes == 0


def test_many_bytes_replace_those_of_the_tenant_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "PROMPT_BYTES", 0)
    monkeypatch.setattr(prefetch, "MAX_LATER_BYTES", 1_000)
    later = LaterPrompts()
    later.add(1.0, asked("a", 100))
    later.add(1.0, asked("b", 400))
    later.add(1.0, asked("b", 400))
    later.add(1.0, asked("c", 200))
    later.add(1.0, asked("d", 1_001))
    assert later.num_bytes == 700
    found = later.take_due(1.0)
    assert [(each.namespace.tenant, len(each.key)) for each in found] == [("a", 100), ("b", 400), ("c", 200)]


def test_a_flood_of_short_prompts_by_many_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken in slices, so that a tick stays short."""
    monkeypatch.setattr(prefetch, "MAX_LATER_BYTES", 8 << 20)
    later, num = LaterPrompts(), prefetch.MAX_LATER_BYTES // PROMPT_BYTES
    for at in range(num + 5_000):
        later.add(1.0, asked(f"tenant {at % 400}", 4))
    assert 0.99 * num < len(later) < num and later.num_bytes <= prefetch.MAX_LATER_BYTES
    assert len(later.take_due(1.0)) == MAX_AT_ONCE < len(later)


def test_a_purge_beside_it_leaves_nothing() -> None:
    """What has ended before it is added isn't kept: its tenant may have been dropped already."""
    later = LaterPrompts()
    later.add(1.0, asked("a", 4, is_open=False))
    assert len(later) == 0
    later.add(1.0, asked("a", 4))
    later.forget("a")
    later.forget("b")
    assert len(later) == later.num_bytes == 0 and later.take_due(2.0) == []


def test_the_order_is_that_of_time() -> None:
    later = LaterPrompts()
    prompts = {due_at: asked("a", 4) for due_at in (3.0, 1.0, 2.0)}
    for due_at, each in prompts.items():
        later.add(due_at, each)
    assert later.take_due(0.9) == []
    assert later.take_due(2.0) == [prompts[1.0], prompts[2.0]]
    assert later.take_due(9.0) == [prompts[3.0]]


def test_another_prompt_of_the_tenant_is_left_alone(folder: Path, by_hand: None, clock: ManualClock) -> None:
    with on_disk(folder) as owner:
        owner.known()
        owner.cache.note(NS, ELSE, HINTS)
        clock.advance(GAP_S)
        assert ticks(owner, lambda: is_idle(owner)) and in_host(owner) == 0
