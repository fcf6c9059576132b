"""From the journal to numbered batches, over a transport in memory that loses some of them."""

from __future__ import annotations

import pytest

from radixkv.events.replay_buffer import ReplayBuffer
from tests.events.support import Life, Reader


def run(seed: int, *, loss: float, kept: int = 1_000, queue_records: int = 10_000, steps: int = 40) -> None:
    life, is_over = Life(seed, queue_records=queue_records), False
    buffer: ReplayBuffer[bytes] = ReplayBuffer(kept, 1 << 30)
    readers = [
        Reader(buffer, life.stream, lambda: False),
        Reader(buffer, life.stream, lambda: not is_over and life.random.random() < loss),
    ]

    def pump() -> None:
        for batch in life.batches():
            buffer.add(batch.number, batch.payload, len(batch.payload), batch.is_base)
            for reader in readers:
                reader.take(batch)

    for step in range(steps):
        life.act()
        if step % life.random.randrange(1, 5) == 0:
            pump()
    life.end()
    pump()
    is_over = True
    for _ in range(3):  # what a silent publisher is asked for; a statement may follow
        for reader in readers:
            reader.replay()
        life.now += 10
        pump()
    resident = life.resident()
    for reader in readers:
        assert reader.follower.is_current
        assert reader.held.digests == resident, (seed, reader.num_lost)
    assert life.stream.num_blocks == len(resident)
    assert life.stream.queued_bytes == 0


@pytest.mark.parametrize("part", range(10))
def test_a_reader_that_lost_batches_knows_what_is_resident(part: int) -> None:
    """1,000 lives: with few and many losses, a long and a short memory for replays, a large and a tiny queue."""
    for seed in range(100 * part, 100 * part + 100):
        run(
            seed,
            loss=(0.05, 0.3, 0.8)[seed % 3],
            kept=(1_000, 4, 1)[seed // 3 % 3],
            queue_records=10_000 if seed % 2 else 3,
        )
