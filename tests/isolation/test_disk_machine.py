"""Random lives of a cache with a disk below its host memory: what comes back was committed there, and reads right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from radixkv.audit import properties
from radixkv.audit.properties.material import MAX_OPEN, NAMESPACES, prompts, small, where_to
from radixkv.config import CacheConfig, Namespace
from radixkv.tiers.disk.records import DiskRecords
from radixkv.tiers.disk.slots import SlotTable
from radixkv.tiers.host.tier import HostTier
from radixkv.tiers.settings import DiskOptions
from radixkv.tiers.tiered_cache import TieredCache
from tests.isolation.lives import EXAMPLES, SEED, finds
from tests.tiers.support import FaultyFiles
from tests.tiers.support import patience as patience
from tests.waiting import eventually

LIVES = max(EXAMPLES // 10, 10)
HOST = 2
"""Slots of host memory, fewer than most prompts have blocks: the rest of what comes back was on the disk."""


class DiskMachine(properties.LoadingMachine):
    """A cache under attack, with little host memory and a disk below it."""

    numbers: ClassVar[Iterator[int]] = count()
    num_hits: ClassVar[int] = 0

    def _serve_and_evict(self, where: int, prompt: tuple[int, ...]) -> None:
        """What is evicted is on the disk afterwards, but for what host memory keeps."""
        super()._serve_and_evict(where, prompt)
        eventually(self._is_idle, "the end of all writes")

    def _is_idle(self) -> bool:
        tiers = self.cache.lower
        with tiers.gate:
            tiers.tick()
            return not tiers.disk.num_running

    @precondition(lambda self: len(self.runs) < MAX_OPEN and not self.away)
    @rule(
        where=where_to,
        prompt=prompts,
        how=st.sampled_from(("claim", "poll")),
        by=st.integers(1, 12),
        between=st.sampled_from(("", "", "", "clear", "purge")),
    )
    def come_back_from_disk(
        self, where: int, prompt: tuple[int, ...], how: str, by: int, between: str
    ) -> None:
        """A long prompt is served and evicted, another one takes its host memory, and it comes again."""
        prompt = (prompt * 17)[: self.block_size * self.cache.config.num_blocks // 2]
        self._serve_and_evict(where, prompt)
        self._serve_and_evict(where, tuple(2 - each for each in prompt))
        if between == "clear":
            self.clear(where)
        elif between == "purge":
            self.purge(NAMESPACES[where % len(NAMESPACES)].tenant)
        if self._open(where, prompt) is not None:
            self.load(len(self.runs) - 1, how, by)

    @precondition(lambda self: self.runs)
    @rule(which=small, how=st.sampled_from(("claim", "poll", "claim", "cancel")), by=st.integers(1, 12))
    def load(self, which: int, how: str, by: int) -> None:
        """Go on with what comes back to a request, after it has come."""
        loading = self._run(which).sequence.loading
        if loading is not None and how != "cancel":
            loading.wait()
            self._came(self._run(which))
        super().load(which, how, by)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "cache"):
                counts = self.cache.tier_counts()
                DiskMachine.num_hits += int(counts["disk"]["hit_blocks"])
                self.cache.close()


def report(folder: Path, examples: int, seed: int) -> properties.PropertyReport:
    def made(config: CacheConfig, **parts: Any) -> TieredCache:
        own = folder / str(next(DiskMachine.numbers))
        disk = DiskOptions(own, 1 << 20, b"a secret of the fleet", files=FaultyFiles())
        return TieredCache(replace(config, host_blocks=HOST), disk=disk, fingerprint="toy", **parts)

    return properties.run(made, examples, 50, seed, machine=DiskMachine, with_storage=[True], shrink=False)


@pytest.mark.slow
def test_random_lives_find_nothing(tmp_path: Path) -> None:
    DiskMachine.num_hits = 0
    found = report(tmp_path, LIVES, SEED)
    assert found.ok, found.failure
    assert DiskMachine.num_hits > LIVES // 2, "the disk brought something back"


# --- planted bugs


def a_salt_lost_on_disk(patch: pytest.MonkeyPatch) -> None:
    _blended(patch, lambda namespace: namespace._replace(salt=""))


def a_tenant_lost_on_disk(patch: pytest.MonkeyPatch) -> None:
    _blended(patch, lambda namespace: namespace._replace(tenant="everybody"))


def _blended(patch: pytest.MonkeyPatch, place: Callable[[Namespace], Namespace]) -> None:
    """Records are stored, and found, at another place."""
    for name in ("store", "load", "_are_here"):
        original = getattr(DiskRecords, name)

        def moved(
            self: Any, namespace: Namespace, *more: Any, _original: Any = original, **named: Any
        ) -> Any:
            return _original(self, place(namespace), *more, **named)

        patch.setattr(DiskRecords, name, moved)


def a_purge_that_skips_the_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskRecords, "_forget_tag", lambda self, *_, **__: 0)


def a_record_that_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "row_copy", lambda self, row: lambda block_ids: None)


def a_slot_that_is_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """The oracle can't see it, the audit does."""
    original = SlotTable.seal

    def seal(self: SlotTable, slot: int) -> bool:
        self._owners[self._entries[slot].owner].used += 1
        return original(self, slot)

    patch.setattr(SlotTable, "seal", seal)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        a_salt_lost_on_disk,
        a_tenant_lost_on_disk,
        a_purge_that_skips_the_disk,
        a_record_that_is_not_copied,
        a_slot_that_is_counted_twice,
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch)
    assert finds(partial(report, tmp_path))
