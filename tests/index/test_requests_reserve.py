"""Room for tokens whose ids come later: reserve, fill, drop."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from radixkv import ArgumentError, LeaseError, OutOfBlocks, QuotaExceeded, Tenant, TokenError, audit
from radixkv.index import requests
from tests.index.support import NS, compute, make_cache, same


def test_reserved_room_keeps_its_blocks_until_it_is_filled() -> None:
    """The ids of the blocks are known at once, and stay while the tokens' ids come."""
    cache = make_cache()
    with cache.open(NS, range(6)) as sequence:
        sequence.reserve(7)  # 13 places: 4 blocks
        table = sequence.block_table.tolist()
        assert len(table) == sequence.num_blocks == 4
        assert (sequence.num_tokens, sequence.num_reserved_tokens) == (6, 7)
        audit.check(cache)
        sequence.fill([50, 51, 52])
        assert (sequence.num_tokens, sequence.num_reserved_tokens) == (9, 4)
        assert sequence.token_ids.tolist() == [*range(6), 50, 51, 52]
        sequence.commit(9)
        assert sequence.block_table.tolist() == table
        audit.check(cache)
        sequence.fill([53, 54, 55, 56])
        assert (sequence.num_reserved_tokens, sequence.block_table.tolist()) == (0, table)
        audit.check(cache)
    assert cache.match(NS, [*range(6), 50, 51, 52]).num_tokens == 8


def test_drop_gives_room_back() -> None:
    """Whole blocks become free at once, the last ones first; tokens stay."""
    cache = make_cache(8)
    with cache.open(NS, range(6)) as sequence:
        sequence.reserve(10)
        table = sequence.block_table.tolist()
        assert cache.free_blocks == 4
        sequence.drop(5)
        assert (sequence.num_reserved_tokens, sequence.block_table.tolist()) == (5, table[:3])
        sequence.drop()
        assert (sequence.num_reserved_tokens, sequence.block_table.tolist()) == (0, table[:2])
        assert sequence.num_tokens == 6 and cache.free_blocks == 6
        sequence.drop()
        audit.check(cache)
    assert cache.free_blocks == 8


def test_room_is_used_before_more_is_taken() -> None:
    """``append`` and ``extend`` use what is reserved; the rest of the room stays reserved."""
    cache = make_cache(8)
    with cache.open(NS, range(4)) as sequence:
        sequence.reserve(6)
        table = sequence.block_table.tolist()
        sequence.append(9)
        sequence.extend([9, 9])
        assert (sequence.num_tokens, sequence.num_reserved_tokens) == (7, 3)
        assert sequence.block_table.tolist() == table
        sequence.extend([9] * 5)
        assert (sequence.num_tokens, sequence.num_reserved_tokens) == (12, 0)
        assert sequence.block_table.tolist() == table
        sequence.append(9)
        assert sequence.num_blocks == 4
        audit.check(cache)


def test_two_reservations_add_up() -> None:
    cache = make_cache(8)
    with cache.open(NS, range(3)) as sequence:
        for _ in range(3):
            sequence.reserve(2)
        sequence.reserve(0)
        assert (sequence.num_reserved_tokens, sequence.num_blocks) == (6, 3)
        audit.check(cache)


def test_a_shared_tail_is_copied_when_room_is_reserved() -> None:
    """The block that the tokens go to is the sequence's own from then on. The other sequence keeps the old one."""
    cache = make_cache()
    with cache.open(NS, range(6)) as parent:
        (child,) = parent.fork(1)
        child.reserve(1)
        cache.flush()
        own = child.block_table.tolist()
        assert own[0] == parent.block_table[0] and own[1] != parent.block_table[1]
        parent.append(7)
        child.fill([8])
        assert child.block_table.tolist() == own
        audit.check(cache)
        child.release()
    assert cache.free_blocks == 16


def test_room_is_never_committed_or_matched() -> None:
    cache = make_cache()
    with cache.open(NS, range(6)) as sequence:
        sequence.reserve(2)
        with pytest.raises(ArgumentError, match="num_tokens=7"):
            sequence.commit(7)
        sequence.commit(6)
        assert cache.match(NS, [*range(6), 0, 0]).num_tokens == 4
        audit.check(cache)


def test_sequences_with_room_are_not_shared() -> None:
    """Two sequences couldn't both write into it: a fork, a reorder and a lending are refused until it is gone."""
    cache = make_cache()
    sequence = cache.open(NS, range(6))
    sequence.reserve(3)
    before = cache.snapshot()
    for call in (lambda: sequence.fork(1), lambda: cache.reorder([sequence], [0, 0])):
        with pytest.raises(LeaseError, match="room reserved for 3 tokens"):
            call()
    with pytest.raises(ArgumentError, match="twice"):
        cache.reorder([sequence, sequence], [0])
    assert same(before, cache)
    sequence.drop()
    cache.reorder([sequence], [0])[0].release()
    audit.check(cache)


def test_a_truncation_drops_room() -> None:
    cache = make_cache(8)
    with cache.open(NS, range(6)) as sequence:
        sequence.reserve(8)
        sequence.truncate(5)
        assert (sequence.num_tokens, sequence.num_reserved_tokens, sequence.num_blocks) == (5, 0, 2)
        audit.check(cache)


@pytest.mark.parametrize("end", ["release", "purge", "clear"])
def test_room_ends_with_its_sequence(end: str) -> None:
    cache = make_cache(8)
    sequence = cache.open(NS, range(6))
    sequence.reserve(8)
    if end != "release":
        getattr(cache, end)("a" if end == "purge" else NS)
        audit.check(cache)
    sequence.release()
    assert cache.free_blocks == 8
    audit.check(cache)


def test_refusals_change_nothing() -> None:
    cache = make_cache(8)
    cache.add_tenant(Tenant("a", max_blocks=4))
    sequence = cache.open(NS, range(6))
    sequence.reserve(2)
    before = cache.snapshot()
    wrong: list[tuple[Any, type[Exception]]] = [
        (lambda: sequence.reserve(-1), ArgumentError),
        (lambda: sequence.reserve(10**9), ArgumentError),
        (lambda: sequence.reserve(True), ArgumentError),
        (lambda: sequence.reserve(9), QuotaExceeded),
        (lambda: sequence.fill([1, 2, 3]), ArgumentError),
        (lambda: sequence.fill([-1]), TokenError),
        (lambda: sequence.drop(3), ArgumentError),
        (lambda: sequence.drop(-1), ArgumentError),
    ]
    for call, error in wrong:
        with pytest.raises(error):
            call()
        assert same(before, cache)
    sequence.release()
    for call in (lambda: sequence.reserve(1), lambda: sequence.fill([1]), sequence.drop):
        with pytest.raises(LeaseError):
            call()


def test_room_evicts_like_any_block() -> None:
    """And is refused, before anything changes, if nothing can be evicted."""
    cache = make_cache(4)
    compute(cache, range(50, 58))
    with cache.open(NS, range(4)) as sequence:
        sequence.reserve(10)
        assert cache.match(NS, range(50, 58)).num_tokens == 0 and sequence.num_blocks == 4
        before = cache.snapshot()
        with pytest.raises(OutOfBlocks):
            sequence.reserve(3)
        assert same(before, cache)


def test_room_that_cannot_be_had_is_refused_before_memory_is_used() -> None:
    """A reserve of four million tokens would need a key of 16 MB."""
    cache = make_cache(2**18, 16)
    peaks = []
    with cache.open(NS, [1]), cache.open(NS, [2]) as sequence:
        for _ in range(5):
            tracemalloc.start()
            try:
                with pytest.raises(OutOfBlocks):
                    sequence.reserve(2**22)
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
        assert min(peaks) < 100_000, "other threads may allocate meanwhile"
        assert sequence.num_reserved_tokens == 0
        audit.check(cache)


@pytest.mark.pure
def test_a_long_extend_uses_reserved_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no more blocks than it lacks, and evicts nothing that it doesn't need."""
    monkeypatch.setattr(requests, "MAX_VICTIMS_AT_ONCE", 0)
    monkeypatch.setattr(requests, "MAX_BLOCKS_AT_ONCE", 2)
    cache = make_cache(16)
    for at in range(3):
        compute(cache, [100 + at] * 4)
    with cache.open(NS, range(4)) as sequence:
        sequence.reserve(44)  # 11 blocks; one is free, three are resident
        table = sequence.block_table.tolist()
        sequence.extend(range(48))
        assert (sequence.num_tokens, sequence.num_reserved_tokens) == (52, 0)
        assert sequence.block_table.tolist()[:12] == table and len(table) == 12
        assert cache.stats().evicted_blocks == 0 and cache.resident_blocks == 3
        audit.check(cache)
