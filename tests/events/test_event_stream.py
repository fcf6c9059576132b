"""From the journal to numbered batches, over a transport in memory that loses some of them."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from radixkv.errors import IntegrityError
from radixkv.events.event_messages import BlockDigests
from radixkv.events.event_subscriber import Follower
from radixkv.events.replay_buffer import ReplayBuffer
from radixkv.index.snapshot import Snapshot
from radixkv.index.tokens import encode
from tests.events.support import (
    BLOCK,
    KEYS,
    NAMESPACES,
    Held,
    Life,
    Reader,
    VBatch,
    VCleared,
    VRemoved,
    VStored,
    vllm_decoder,
)


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
    resident = set(life.parents())
    for reader in readers:
        assert reader.follower.is_current
        assert reader.held.digests == resident, (seed, reader.num_lost)
    assert life.stream.num_blocks == len(resident)
    assert life.stream.queued_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [0, 1, 2, *(pytest.param(part, marks=pytest.mark.release) for part in range(3, 10))]
)
def test_a_reader_that_lost_batches_knows_what_is_resident(part: int) -> None:
    """100 lives: with few and many losses, a long and a short memory for replays, a large and a tiny queue."""
    for seed in range(100 * part, 100 * part + 100):
        run(
            seed,
            loss=(0.05, 0.3, 0.8)[seed % 3],
            kept=(1_000, 4, 1)[seed // 3 % 3],
            queue_records=10_000 if seed % 2 else 3,
        )


def commit(life: Life, ids: list[int]) -> None:
    with life.cache.open(NAMESPACES[0], ids) as sequence:
        sequence.commit(len(ids))


def settle(life: Life) -> list[VBatch]:
    return [vllm_decoder.decode(batch.payload) for batch in life.batches()]


def test_a_full_queue_leaves_a_gap_and_starts_over() -> None:
    """At once a number is missing and everything is cleared. The statement comes after ``restate_s``."""
    life = Life(0, queue_records=3, restate_s=10.0)
    (first,) = life.batches()
    assert first.is_base and first.number == int((1e9 + 1000.0) * 1e6)
    for number in range(6):
        commit(life, [number] * 8)
    assert life.stream.num_overflows == 1
    (lost,) = life.batches()
    assert lost.is_base and lost.number == first.number + 2
    commit(life, [9] * 8)
    assert life.batches() == [] and life.stream.num_blocks == 0 and life.stream.is_idle
    life.now += 10.0
    (stated,) = life.batches()
    events = vllm_decoder.decode(stated.payload).events
    assert stated.number == lost.number + 1 and isinstance(events[0], VCleared) and len(events) == 8
    assert life.stream.num_blocks == 14 and life.stream.queued_bytes == 0
    commit(life, [10] * 8)
    (batch,) = settle(life)
    assert [type(event) for event in batch.events] == [VStored] and life.stream.num_overflows == 1


def test_a_queue_that_holds_too_many_bytes_starts_over() -> None:
    life = Life(0, num_blocks=500, queue_bytes=4_000)
    for number in range(6):
        commit(life, [number] * 200)
    assert life.stream.num_overflows == 1
    settle(life)
    assert life.stream.num_blocks == 300 and life.stream.queued_bytes == 0


def test_a_long_prompt_is_published_in_pieces_that_continue_each_other() -> None:
    life = Life(0, num_blocks=4_000)
    ids = [number % 7 for number in range(10_003)]
    settle(life)
    commit(life, ids)
    digests = BlockDigests(KEYS, BLOCK).of(NAMESPACES[0], encode(ids))
    batches = settle(life)
    assert len(batches) == 2
    stored = [event for batch in batches for event in batch.events]
    assert [len(event.block_hashes) for event in stored] == [1_024, 1_024, 452]
    assert [digest for event in stored for digest in event.block_hashes] == digests
    assert [event.parent_block_hash for event in stored] == [None, digests[1_023], digests[2_047]]
    life.cache.clear(NAMESPACES[0])
    removed = [event for batch in settle(life) for event in batch.events]
    assert sum([event.block_hashes for event in removed], []) and life.stream.num_blocks == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_block_follows_a_block_that_is_there(seed: int) -> None:
    """At its store, a block's parent is the block before it in its prompt, and is published. Also in statements."""
    life = Life(seed)
    seen: set[object] = set()
    for step in range(60):
        life.act()
        if step % 20 == 19:
            life.stream.restate()
        for batch in settle(life):
            for event in batch.events:
                if isinstance(event, VCleared):
                    seen = set()
                elif isinstance(event, VRemoved):
                    seen -= set(event.block_hashes)
                else:
                    assert event.parent_block_hash is None or event.parent_block_hash in seen
                    assert event.token_ids == [] and event.extra_keys is None and event.lora_name is None
                    seen |= set(event.block_hashes)
    life.end()
    settle(life)
    parents = life.parents()
    life.stream.restate()
    for batch in settle(life):
        for event in batch.events:
            if isinstance(event, VStored):
                chain = [event.parent_block_hash, *event.block_hashes]
                assert all(parents[digest] == before for before, digest in pairwise(chain))


def test_a_cache_that_cannot_be_read_is_cleared_and_tried_again() -> None:
    life = Life(0, restate_s=5.0)
    commit(life, [1] * 8)
    assert len(settle(life)) == 1

    class Dead:
        def snapshot(self) -> Snapshot:
            raise IntegrityError("dead")

    life.stream.attach(Dead())
    life.stream.restate()
    life.now += 5.0
    (batch,) = settle(life)
    assert batch.events == [VCleared()] and life.stream.num_failed == 1 and life.stream.num_blocks == 0
    life.stream.attach(life.cache)
    life.now += 5.0
    settle(life)
    assert life.stream.num_blocks == 2


def test_a_closed_stream_holds_nothing() -> None:
    life = Life(0)
    commit(life, [1] * 8)
    life.stream.close()
    commit(life, [2] * 8)
    assert not life.stream._queue


def test_a_replay_buffer_is_bounded_and_knows_its_bases() -> None:
    kept: ReplayBuffer[str] = ReplayBuffer(3, 100)
    assert not kept.covers(0) and kept.since(0, 9) == []
    for number in range(10, 14):
        kept.add(number, str(number), 10, number == 10)
    assert [number for number, _ in kept.since(0, 9)] == [11, 12, 13] == [n for n, _ in kept.since(11, 9)]
    assert kept.since(12, 1) == [(12, "12")] and kept.since(14, 9) == []
    assert kept.covers(11) and kept.covers(14) and not kept.covers(10)
    kept.add(14, "14", 1_000, True)
    assert len(kept) == 1 and kept.num_bytes == 1_000 and kept.covers(0)


def test_a_follower_takes_each_batch_once_and_in_order() -> None:
    def batch(*events: object) -> bytes:
        return msgspec.msgpack.encode([0.0, list(events)])

    def stored(number: int) -> dict[str, object]:
        return {"type": "BlockStored", "block_hashes": [bytes([number]) * 16]}

    base = {"type": "AllBlocksCleared"}
    held = Held()
    follower = Follower(held)
    assert not follower.live(4, batch(stored(4))) and follower.wanted == 0 and not follower.is_current
    assert follower.live(5, batch(base, stored(5))) and follower.wanted == 6
    assert not follower.live(8, batch(stored(8))) and follower.wanted == 6 and len(held.digests) == 1
    for number in (6, 7, 8):
        assert follower.take(number, batch(stored(number)))
    assert follower.take(8, batch(stored(8)))
    assert follower.live(9, batch()) and follower.live(9, batch(base)), "a batch that comes twice counts once"
    assert len(held.digests) == 4 and follower.wanted == 10
    assert not follower.live(10, b"\xc1") and follower.num_malformed == 1 and follower.wanted == 10
    follower.miss()
    assert held.digests == set() and follower.num_gaps == 1 and not follower.is_current
    assert follower.live(11, batch(base, stored(1))) and follower.live(12, batch())
    assert follower.live(3, batch(base, stored(2))) and follower.wanted == 4, "another process"
    assert held.digests == {bytes([2]) * 16}


def test_a_follower_that_only_replayed_notices_another_process() -> None:
    held = Held()
    follower = Follower(held)
    assert follower.take(100, msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}]]))
    assert follower.take(101, msgspec.msgpack.encode([0.0, []]))
    assert not follower.live(7, msgspec.msgpack.encode([0.0, []])) and not follower.is_current
