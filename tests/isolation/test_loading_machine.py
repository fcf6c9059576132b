"""Random lives of a cache with host memory below it: what comes back was committed there, and reads right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from radixkv import PrefixCache
from radixkv.audit import properties
from radixkv.audit.properties.material import Mirror
from radixkv.config import Namespace
from radixkv.index.cache import PrefixCache as Index
from radixkv.tiers.host.index import HostIndex
from radixkv.tiers.host.memory import HostBlocks, StepWork
from radixkv.tiers.host.steps import HostSteps
from radixkv.tiers.host.tier import HostTier
from radixkv.tiers.ladder import Ladder
from radixkv.tiers.pending import Pending
from tests.isolation.lives import EXAMPLES, SEED, finds
from tests.tiers.test_tiered_cache import (
    a_failed_load_counted_as_loaded,
    a_load_that_survives_a_cut,
    a_purge_that_skips_the_tier,
)

LIVES = max(EXAMPLES // 10, 24)


class Counted(properties.LoadingMachine):
    """Counts what comes back in all lives. Host memory works."""

    loaded: ClassVar[int] = 0

    def laws(self) -> None:
        super().laws()
        below = self.cache._below
        assert isinstance(below, Ladder)
        counts = below.counts()["host"]
        assert counts["open"] and not counts["errors"], "host memory failed"

    def _came(self, run: Mirror) -> None:
        before = run.num_committed
        super()._came(run)
        Counted.loaded += run.num_committed - before


def report(examples: int, seed: int) -> properties.PropertyReport:
    return properties.run(PrefixCache, examples, 50, seed, machine=Counted, with_storage=[True], shrink=False)


@pytest.mark.slow
def test_random_lives_find_nothing() -> None:
    Counted.loaded = 0
    found = report(LIVES, SEED)
    assert found.ok, found.failure
    assert Counted.loaded > LIVES // 2, "host memory brought something back"


# --- planted bugs


def a_salt_lost_below(patch: pytest.MonkeyPatch) -> None:
    _blended(patch, lambda namespace: namespace._replace(salt=""))


def a_tenant_lost_below(patch: pytest.MonkeyPatch) -> None:
    _blended(patch, lambda namespace: namespace._replace(tenant="everybody"))


def _blended(patch: pytest.MonkeyPatch, place: Callable[[Namespace], Namespace]) -> None:
    """Host memory is searched, and filled, at another place."""
    save, demote = HostSteps.save_key, HostSteps.demote
    patch.setattr(HostSteps, "save_key", lambda self, at, *more: save(self, place(at), *more))
    patch.setattr(HostSteps, "demote", lambda self, at, *more: demote(self, place(at), *more))

    class Blended(Index):
        """The index of host memory."""

        def match(self, namespace: Namespace, *more: Any, **named: Any) -> Any:
            return super().match(place(namespace), *more, **named)

        def match_and_lease(self, namespace: Namespace, *more: Any, **named: Any) -> Any:
            return super().match_and_lease(place(namespace), *more, **named)

    patch.setattr("radixkv.tiers.host.index.PrefixCache", Blended)


def blocks_kept_in_another_order(patch: pytest.MonkeyPatch) -> None:
    save = HostSteps.save_key
    patch.setattr(
        HostSteps,
        "save_key",
        lambda self, at, generation, key, blocks, holds: save(
            self, at, generation, key, lambda: blocks()[::-1], holds
        ),
    )


def blocks_that_leave_in_another_order(patch: pytest.MonkeyPatch) -> None:
    demote = HostSteps.demote
    patch.setattr(
        HostSteps,
        "demote",
        lambda self, at, key, start, blocks: demote(self, at, key, start, blocks[::-1]),
    )


def a_clear_that_skips_the_tier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "forget", lambda self, scope: Pending())


def a_store_visible_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    """A slot counts as written before its bytes are there."""

    def early(self: HostBlocks, save: Any) -> None:
        self._stamps[save.slots] = save.step

    patch.setattr(HostBlocks, "_write", early)


def slots_that_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A load takes what another slot holds."""
    original = HostBlocks.stage
    patch.setattr(HostBlocks, "stage", lambda self, slots: original(self, np.roll(slots, 1)))


def a_dropped_entry_that_keeps_its_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostIndex, "_dropped", lambda self, entries: None)


def a_slot_that_is_found_before_it_is_filled(patch: pytest.MonkeyPatch) -> None:
    """Of every second save nothing is copied."""
    save, turns = HostBlocks.save, itertools.cycle((True, False))

    def lazy(self: HostBlocks, work: StepWork) -> None:
        if len(work.save_slots) and next(turns):
            self._stamps[work.save_slots] = work.step
            self._end_if_all(work.step)
        else:
            save(self, work)

    patch.setattr(HostBlocks, "save", lazy)


def a_load_that_counts_as_missed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("radixkv.index.load_target.count_loaded", lambda state, before: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        blocks_that_leave_in_another_order,
        a_dropped_entry_that_keeps_its_slot,
        a_slot_that_is_found_before_it_is_filled,
        a_salt_lost_below,
        a_tenant_lost_below,
        a_purge_that_skips_the_tier,
        a_clear_that_skips_the_tier,
        a_store_visible_before_it_is_copied,
        slots_that_are_not_compared,
        blocks_kept_in_another_order,
        a_failed_load_counted_as_loaded,
        a_load_that_survives_a_cut,
        a_load_that_counts_as_missed,
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert finds(report)
