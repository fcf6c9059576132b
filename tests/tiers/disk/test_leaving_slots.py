"""What leaves host memory goes to a full disk, also of long prompts, and costs no more host memory than it needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixkv.config import Namespace
from radixkv.index.tokens import encode
from radixkv.tiers.disk.demotions import LEAST_PART, MOST_PART, LeavingSlots
from tests.engines.vllm.test_steps import SIZE, Engine, ids_of
from tests.tiers.disk.test_tier import DiskEngine
from tests.tiers.support import FaultyFiles
from tests.tiers.support import patience as patience
from tests.waiting import is_set

pytestmark = pytest.mark.slow

NUM_SLOTS, DISK_SLOTS = 320, 192
LONG, SHORT = NUM_SLOTS // 10, 2
"""Blocks of a prompt."""


def prompt(number: int, num_blocks: int) -> list[int]:
    return ids_of(num_blocks * SIZE, number)


class FullDisk(DiskEngine):
    """Host memory and disk are full of short prompts. Each prompt is saved in one step."""

    def __init__(self, folder: Path, files: FaultyFiles | None = None) -> None:
        super().__init__(folder, NUM_SLOTS, files=files, disk_slots=DISK_SLOTS)
        self.index, self.leaving = self.level.index, self.disk.demotions._leaving_slots
        number = 1_000
        while not (self.disk.records.is_full and self.index.num_used >= NUM_SLOTS - NUM_SLOTS // LEAST_PART):
            self.serve(number, SHORT)
            self.run()
            number += 1
        self.disk.take_counts()

    def serve(self, number: int, num_blocks: int) -> None:
        """Compute a prompt in one step; the disk may go on storing what left for it."""
        self.add(f"{number}", prompt(number, num_blocks))
        self.step(num_blocks * SIZE)
        Engine.run(self, 60_000)

    def run(self, max_steps: int = 60_000) -> None:
        super().run(max_steps)
        while self.leaving.num:
            self.step(0)
            super().run(max_steps)

    def lost(self) -> int:
        return self.disk.take_counts()["disk_unstored_blocks"]

    @property
    def namespace(self) -> Namespace:
        return self.level.cache.namespaces()[0]

    def kept(self, number: int, num_blocks: int) -> int:
        """Return how many blocks of a prompt host memory has, or else the disk."""
        key = encode(prompt(number, num_blocks))
        on_disk = self.disk.purges.on_disk(self.namespace)
        here = self.index.reach(self.namespace, key, 0)
        return here + self.disk.records.locate(on_disk, key, here)


@contextmanager
def full_disk(folder: Path, files: FaultyFiles | None = None) -> Iterator[FullDisk]:
    engine = FullDisk(folder, files)
    yield engine
    engine.run()
    assert engine.leaving.num == 0 and not engine.index._uses.any()
    engine.index.check()
    engine.stop()


def test_after_the_first_long_prompt_all_that_leaves_is_stored(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk") as engine:
        numbers = range(14)
        for number in numbers:
            engine.serve(number, LONG)
            engine.run()
            assert engine.lost() == 0 or number == 0
        assert NUM_SLOTS - NUM_SLOTS // MOST_PART <= engine.index.num_used <= NUM_SLOTS - LONG
        assert [engine.kept(number, LONG) for number in numbers] == [LONG] * 14


def test_a_long_prompt_now_and_then_loses_nothing(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk") as engine:
        engine.serve(0, LONG)
        engine.run()
        engine.lost()
        for number in range(1, 4):
            for at in range(80):
                engine.serve(100 * number + at, SHORT)
                engine.run()
            engine.serve(number, LONG)
            engine.run()
            assert engine.lost() == 0


def test_short_prompts_give_host_memory_back(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk") as engine:
        engine.serve(0, LONG)
        engine.run()
        engine.lost()
        assert engine.index.num_used <= NUM_SLOTS - LONG
        for number in range(2 * NUM_SLOTS // SHORT + 1):
            engine.serve(number, SHORT)
            engine.run()
        assert engine.lost() == 0
        assert engine.index.num_used == NUM_SLOTS - NUM_SLOTS // LEAST_PART


def test_a_hung_disk_takes_at_most_its_part_and_holds_nobody_up(tmp_path: Path) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def before(call: str) -> None:
        if call == "write" and hangs.is_set():
            is_set(goes_on)

    with full_disk(tmp_path / "disk", FaultyFiles(before)) as engine:
        hangs.set()
        most = 0
        for number in range(20):
            engine.serve(number, LONG)
            in_use = int((engine.index._uses > 0).sum())
            most = max(most, in_use, engine.leaving.num)
            entries = NUM_SLOTS - engine.index._num_free - in_use
            assert entries >= NUM_SLOTS - NUM_SLOTS // MOST_PART, "the rest has what was computed"
            computed = engine.num_computed
            engine.serve(number, LONG)
            assert engine.num_computed == computed + SIZE, "its last block alone"
        assert 0 < most <= NUM_SLOTS // MOST_PART and engine.lost() > 0
        hangs.clear()
        goes_on.set()


def test_a_disk_that_takes_nothing_has_no_reserve(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk") as engine:
        engine.serve(0, LONG)
        engine.run()
        for _ in range(2):
            engine.disk.patience.rest()
        for number in range(1, 4):
            engine.serve(number, LONG)
        assert engine.index.num_used == NUM_SLOTS and engine.lost() >= 2 * LONG
        engine.disk.patience.was_fast()
        engine.disk.patience._rests_until = engine.disk._clock()


# --- the rule


def test_what_is_wanted_in_slices_is_wanted_at_once() -> None:
    slots = LeavingSlots(800)
    for _ in range(10):
        slots.given(6, 800)
        assert slots.room >= 6
        slots.add(6)
    assert slots.reserve == 60 and slots.room == 0
    slots.add(-60)
    assert slots.room == 60


def test_the_reserve_has_bounds_of_its_pool() -> None:
    slots = LeavingSlots(800)
    assert slots.reserve == 800 // LEAST_PART
    slots.given(10_000, 800)
    assert slots.reserve == 800 // MOST_PART
    slots.given(1, 160)
    assert slots.reserve == 160 // MOST_PART, "others have the rest of the pool for themselves now"
    slots.given(1, 4)
    assert slots.reserve == 0 and slots.room == 1


def test_the_largest_is_forgotten_after_two_fillings() -> None:
    slots, reserves = LeavingSlots(800), set[int]()
    slots.given(80, 800)
    for _ in range(800 // 4):
        slots.given(4, 800)
        reserves.add(slots.reserve)
    assert reserves == {80}
    for _ in range(2 * 800 // 4):
        slots.given(4, 800)
    assert slots.reserve == 800 // LEAST_PART
