"""Blocks by hand: leases on matches, allocate and free, insert, evict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv import ArgumentError, LeaseError, Namespace, OutOfBlocks, TokenError, audit
from radixkv.audit.oracle import Engine, chain
from tests.index.support import NS, compute, make_cache, same


def test_a_lease_prevents_eviction() -> None:
    """Neither a leased block nor its ancestors are evicted. Blocks beyond the lease are."""
    cache = make_cache(8)
    compute(cache, range(24))
    match = cache.match(NS, range(12))
    with cache.lease(match) as lease:
        assert lease.num_tokens == 12 and np.array_equal(lease.block_ids, match.block_ids)
        audit.check(cache)
        assert cache.stats().evictable_blocks == 3
        assert cache.evict(100) == 3
        assert np.array_equal(cache.match(NS, range(24)).block_ids, match.block_ids)
        audit.check(cache)
    assert cache.evict(100) == 3
    assert cache.match(NS, range(24)).num_tokens == 0
    audit.check(cache)


def test_a_stale_match_cannot_be_leased() -> None:
    """A match that was evicted, cleared, or computed again in other blocks is refused. Nothing changes."""
    cache = make_cache(8)
    compute(cache, range(12))
    match = cache.match(NS, range(12))
    cache.evict(1)
    _refused(cache, match)
    taken = cache.allocate(1)
    compute(cache, range(12))
    assert cache.match(NS, range(12)).num_tokens == 12
    _refused(cache, match)  # as long as before, but in another block
    cache.free(taken)
    match = cache.match(NS, range(12))
    cache.clear(NS)
    _refused(cache, match)
    audit.check(cache)


def _refused(cache: Any, match: Any) -> None:
    before = cache.snapshot()
    with pytest.raises(LeaseError):
        cache.lease(match)
    assert same(before, cache)


def test_a_match_that_grew_is_not_stale() -> None:
    """Splits and longer prompts after the match do not change it."""
    cache = make_cache(32)
    compute(cache, range(12))
    match = cache.match(NS, range(12))
    compute(cache, [*range(6), 9, 9, 9, 9])
    compute(cache, range(20))
    lease = cache.lease(match)
    assert np.array_equal(lease.block_ids, match.block_ids)
    audit.check(cache)
    lease.release()
    with pytest.raises(LeaseError):
        lease.release()
    with lease:
        pass
    audit.check(cache)


def test_a_lease_on_a_miss() -> None:
    """The lease is empty, and can be released once like any other."""
    cache = make_cache()
    lease = cache.lease(cache.match(NS, [1, 2]))
    assert lease.num_tokens == 0 and len(lease.block_ids) == 0
    lease.release()
    with pytest.raises(LeaseError):
        lease.release()
    audit.check(cache)


def test_a_lease_outlives_a_clear() -> None:
    """The blocks stay until the lease is released, and no longer match."""
    cache = make_cache(8)
    compute(cache, range(12))
    lease = cache.lease(cache.match(NS, range(8)))
    assert cache.clear(NS) == 3
    assert cache.match(NS, range(12)).num_tokens == 0
    assert cache.stats().free_blocks == 6 and cache.stats().quarantined_blocks == 2
    audit.check(cache)
    lease.release()
    assert cache.stats().free_blocks == 8
    audit.check(cache)


def test_two_leases_on_one_node() -> None:
    """The node can be evicted once the last lease is released."""
    cache = make_cache(8)
    compute(cache, range(8))
    leases = [cache.lease(cache.match(NS, range(8))) for _ in range(2)]
    leases[0].release()
    assert cache.evict(8) == 0
    leases[1].release()
    assert cache.evict(8) == 2
    audit.check(cache)


def test_allocate_and_free() -> None:
    """Lent blocks belong to the engine alone and can be freed once. Eviction frees blocks for them."""
    cache = make_cache(8)
    compute(cache, range(24))
    lent = cache.allocate(5)
    assert lent.dtype == np.int32 and len(set(lent.tolist())) == 5
    assert not set(lent.tolist()) & set(cache.match(NS, range(24)).block_ids.tolist())
    assert cache.stats().lent_blocks == 5 and cache.match(NS, range(24)).num_tokens == 12
    audit.check(cache)
    before = cache.snapshot()
    with pytest.raises(OutOfBlocks) as error:
        cache.allocate(4)
    assert (error.value.needed, error.value.free, error.value.evictable) == (4, 0, 3) and same(before, cache)
    cache.free(lent[:2])
    before = cache.snapshot()
    for wrong in (lent, lent[:1], [int(lent[3])] * 2, [8], [-1], [2**31], [0.5], [[1]], None, "1", [True]):
        with pytest.raises(ArgumentError):
            cache.free(wrong)
        assert same(before, cache), wrong
    cache.free(lent[2:].tolist())
    cache.free([])
    assert len(cache.allocate(0)) == 0
    assert cache.stats().lent_blocks == 0
    audit.check(cache)


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1", None])
def test_counts_of_blocks_are_validated(wrong: Any) -> None:
    """``evict`` and ``allocate`` accept integers from 0."""
    cache = make_cache()
    for call in (cache.evict, cache.allocate):
        with pytest.raises(ArgumentError):
            call(wrong)


def test_insert_into_an_empty_cache() -> None:
    """Blocks that an engine filled match, bit for bit."""
    cache = make_cache()
    engine = Engine(cache)
    blocks = cache.allocate(3)
    engine.write(blocks, 0, chain(NS, range(12)))
    assert cache.insert(NS, range(13), blocks).num_resident_tokens == 0  # the 13th token is in no whole block
    match = cache.match(NS, range(13))
    assert np.array_equal(match.block_ids, blocks) and engine.holds(match.block_ids, chain(NS, range(12)))
    assert cache.stats().lent_blocks == 0
    with pytest.raises(ArgumentError):
        cache.free(blocks)
    audit.check(cache)


def test_insert_a_partly_resident_prefix() -> None:
    """The resident prefix keeps its blocks, and the blocks given for it stay lent. The tree takes the rest."""
    cache = make_cache(32)
    compute(cache, range(10))
    resident = cache.match(NS, range(10)).block_ids.tolist()
    blocks = cache.allocate(5)
    ids = [*range(8), *range(50, 62)]
    assert cache.insert(NS, ids, blocks).num_resident_tokens == 8
    assert cache.match(NS, ids).block_ids.tolist() == resident + blocks[2:].tolist()
    assert sorted(cache.snapshot().lent_ids) == sorted(blocks[:2].tolist())
    assert cache.insert(NS, ids[:8], blocks[:2]).num_resident_tokens == 8
    cache.free(blocks[:2])
    audit.check(cache)


def test_insert_splits_a_node() -> None:
    """The inserted prefix ends inside a node, which may be leased."""
    cache = make_cache(32)
    compute(cache, range(16))
    with cache.open(NS, range(17)):
        blocks = cache.allocate(3)
        assert cache.insert(NS, [*range(4), *range(70, 78)], blocks).num_resident_tokens == 4
        cache.free(blocks[:1])
        audit.check(cache)
    assert cache.match(NS, range(17)).num_tokens == 16
    audit.check(cache)


def test_insert_refuses_invalid_blocks() -> None:
    """Owned blocks, one block twice, too few or too many blocks, and missing ids are refused.

    Nothing changes and no namespace appears.
    """
    cache = make_cache(16)
    compute(cache, range(8))
    running = cache.open(NS, range(100, 109))
    lent = cache.allocate(2).tolist()
    owned = [*cache.match(NS, range(8)).block_ids.tolist(), *running.block_table.tolist()]
    before = cache.snapshot()
    elsewhere = Namespace("b", "m")
    for blocks in (
        [owned[0], lent[0]],
        [lent[0], owned[-1]],
        [lent[0]] * 2,
        lent[:1],
        [*lent, 15],
        [lent[0], 16],
        [lent[0], -1],
        None,
    ):
        with pytest.raises(ArgumentError):
            cache.insert(elsewhere, range(8), blocks)
    with pytest.raises(TokenError):
        cache.insert(elsewhere, [1, 2, 3, -4, 5, 6, 7, 8], lent)
    with pytest.raises(ArgumentError):
        cache.insert("b", range(8), lent)  # type: ignore[arg-type]
    assert same(before, cache) and cache.namespaces("b") == []
    assert cache.insert(elsewhere, range(3), []).num_resident_tokens == 0
    assert same(before, cache)
    audit.check(cache)


def test_inserted_blocks_are_evicted_like_others() -> None:
    """Children go before parents, and exactly as many blocks as requested."""
    cache = make_cache(16, 2)
    for at in range(4):
        blocks = cache.allocate(4)
        resident = cache.insert(NS, [0, 0, 0, at, 1, 1, 2, 2], blocks).num_resident_tokens
        cache.free(blocks[: resident // 2])
    assert cache.stats().resident_blocks == 13
    for left in range(12, -1, -1):
        assert cache.evict(1) == 1 and cache.stats().resident_blocks == left
        audit.check(cache)


def test_evict_frees_exactly_what_is_requested() -> None:
    """Eviction frees exactly the requested number, from the tails of leaves, until only leased blocks remain."""
    cache = make_cache(32)
    compute(cache, range(40))
    with cache.open(NS, [*range(8), 9, 9, 9]) as sequence:
        assert cache.evict(0) == 0
        for asked, freed, left in ((3, 3, 7), (1, 1, 6), (2, 2, 4), (5, 2, 2), (1, 0, 2)):
            assert cache.evict(asked) == freed
            assert cache.match(NS, range(40)).num_blocks == left
            audit.check(cache)
        assert sequence.num_cached_tokens == 8
    assert cache.stats().evicted_blocks == 8
    assert cache.evict(1_000_000) == 2
    audit.check(cache)


def test_insert_of_free_blocks() -> None:
    """An engine that owns the memory may insert free blocks that were not lent to it.

    Other blocks cannot become resident this way.
    """
    cache = make_cache(6)
    compute(cache, range(4))
    free = cache.snapshot().free_ids[:2]
    assert cache.insert(NS, range(8), free).num_resident_tokens == 4
    assert cache.match(NS, range(8)).block_ids[1] == free[1]
    assert cache.stats().free_blocks == 4 and free[0] in cache.snapshot().free_ids
    audit.check(cache)
