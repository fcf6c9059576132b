"""What is lost of the blocks that wait for a disk with room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.index.tokens import encode
from radixkv.tiers.tier import Offer
from tests.engines.vllm.test_steps import SIZE, Engine, ids_of
from tests.tiers.disk.test_tier import DiskEngine
from tests.tiers.support import patience as patience

PROMPTS = [ids_of(10 * SIZE, seed) for seed in range(2)]


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[DiskEngine]:
    """Ten blocks are on the disk, and ten others wait for it."""
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", PROMPTS[0])
    for _ in range(2):
        engine.disk.patience.rest()
    engine.add("b", PROMPTS[1])
    Engine.run(engine, 60_000)
    assert len(engine.disk.records) == 10 and engine.disk.demotions.num_waiting
    yield engine
    engine.stop()


def stored(engine: DiskEngine) -> int:
    """Let the disk go on. Returns how many blocks were lost."""
    engine.disk.patience._rests_until = engine.disk._clock()
    engine.run()
    return engine.disk.take_counts()["disk_unstored_blocks"]


@pytest.mark.parametrize("num_evicted", [0, 1, 4, 7, 10])
def test_what_is_evicted_while_it_waits_is_counted_once(waiting: DiskEngine, num_evicted: int) -> None:
    waiting.level.cache.evict(10 + num_evicted)  # the prompt that is on the disk is the oldest
    assert stored(waiting) == num_evicted and len(waiting.disk.records) == 20 - num_evicted
    waiting.run()
    assert waiting.disk.take_counts()["disk_unstored_blocks"] == 0


def test_what_leaves_for_a_disk_that_is_full_by_then_is_counted_once(
    waiting: DiskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(waiting.disk.demotions), "_stores_later", property(lambda self: True))
    waiting.level.cache.evict(10 + 4)
    assert waiting.disk.take_counts()["disk_unstored_blocks"] == 10 + 4
    assert stored(waiting) == 0 and len(waiting.disk.records) == 16


@pytest.mark.parametrize(("dropped", "lost"), [([], 0), ([0], 1), ([3, 9], 2)])
def test_what_is_evicted_and_on_the_disk_is_not_lost(
    waiting: DiskEngine, dropped: list[int], lost: int
) -> None:
    stores, tier, key = waiting.disk.demotions, waiting.disk.records, encode(PROMPTS[0])
    namespace = waiting.level.cache.namespaces()[0]
    on_disk = waiting.disk.purges.on_disk(namespace)
    tags = tier.folder.keys(on_disk.tenant)
    assert tags is not None
    for at in dropped:
        found = tier._table.find(tier._locator(tags, on_disk, memoryview(key)[: 4 * SIZE * (at + 1)]))
        assert found is not None
        with tier._lock:
            tier._table.drop(found)
    stores.offer(Offer(namespace, 0, key, 0, 10))
    waiting.level.cache.evict(10)
    assert stored(waiting) == lost and len(tier) == 20 - len(dropped)
