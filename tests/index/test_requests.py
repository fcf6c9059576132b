"""The life of a request: match, open, commit, grow, roll back, release, and the refusals of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixkv import (
    ArgumentError,
    CacheConfig,
    CapacityError,
    ConfigError,
    LeaseError,
    Namespace,
    NamespaceError,
    OutOfBlocks,
    PrefixCache,
    audit,
)
from tests.index.support import NS, compute, make_cache, same


def test_match_is_pure() -> None:
    """Matches of every kind, inside nodes and beyond them, change nothing. They do not reach the policy."""
    cache = make_cache(8)
    compute(cache, range(16))
    compute(cache, [*range(8), 99, 98, 97, 96])
    before = cache.snapshot()
    for ids in ([], [0], range(4), range(6), range(8), range(12), [*range(8), 99], [7], [*range(16), 1, 2]):
        cache.match(NS, ids)
    assert same(before, cache)
    assert cache.stats().requests == 2
    # The oldest block is the one that was used first, however often it was looked up since.
    for _ in range(10):
        cache.match(NS, range(16))
    cache.evict(1)
    assert cache.match(NS, range(16)).num_tokens == 12
    audit.check(cache)


@pytest.mark.parametrize(
    "num_ids, matched", [(0, 0), (3, 0), (4, 4), (5, 4), (11, 8), (12, 12), (13, 12), (40, 12)]
)
def test_match_returns_every_whole_block(num_ids: int, matched: int) -> None:
    """A match returns all whole resident blocks, in order, as read-only int32."""
    cache = make_cache()
    with cache.open(NS, range(14)) as sequence:
        sequence.commit(14)
        table = sequence.block_table
    match = cache.match(NS, range(num_ids))
    assert (match.num_tokens, match.num_blocks) == (matched, matched // 4)
    assert match.block_ids.dtype == np.int32 and np.array_equal(match.block_ids, table[: matched // 4])
    with pytest.raises(ValueError, match="read-only"):
        match.block_ids[...] = 0


@pytest.mark.parametrize(
    "num_ids, cached", [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (30, 12)]
)
def test_open_leaves_one_token(num_ids: int, cached: int) -> None:
    """At most ``(n − 1) // block_size`` blocks are cached, and there is a block for every token."""
    cache = make_cache()
    compute(cache, range(14))
    with cache.open(NS, range(num_ids)) as sequence:
        assert sequence.num_cached_tokens == sequence.num_committed_tokens == cached
        assert sequence.num_tokens == num_ids and sequence.num_blocks == -(-num_ids // 4)
        assert sequence.block_table.dtype == np.int32 and len(sequence.block_table) == sequence.num_blocks
        assert sequence.namespace == NS and sequence.token_ids.tolist() == list(range(num_ids))
        audit.check(cache)
    stats = cache.stats()
    assert (stats.requests, stats.hit_tokens, stats.missed_tokens) == (2, cached, 14 + num_ids - cached)
    audit.check(cache)


def test_only_committed_blocks_match() -> None:
    """The prompt is committed chunk by chunk. A request cancelled half way leaves the committed blocks."""
    cache = make_cache()
    sequence = cache.open(NS, range(14))
    for stop in range(15):
        sequence.commit(stop)
        assert cache.match(NS, range(14)).num_tokens == stop // 4 * 4
        assert sequence.num_committed_tokens == stop
        audit.check(cache)
    sequence.release()
    cancelled = cache.open(NS, [9] * 12)
    cancelled.commit(7)
    cancelled.release()
    assert cache.match(NS, [9] * 12).num_tokens == 4
    assert cache.stats().sequence_blocks == 0
    audit.check(cache)


def test_the_last_whole_block_of_a_prompt_is_kept() -> None:
    """If the prompt length is a multiple of the block size, all blocks are resident afterwards and match.

    The next request uses all but one.
    """
    cache = make_cache()
    assert [compute(cache, range(8)) for _ in range(3)] == [0, 4, 4]
    assert cache.match(NS, range(8)).num_tokens == 8
    assert cache.stats().resident_blocks == 2
    audit.check(cache)


def test_a_commit_never_changes_a_block_table() -> None:
    """A block that was computed twice stays private until release.

    The block of the first commit is the one that matches.
    """
    cache = make_cache()
    first, second = cache.open(NS, range(9)), cache.open(NS, range(9))
    tables = first.block_table, second.block_table
    second.commit(9)
    first.commit(9)
    assert np.array_equal(first.block_table, tables[0]) and np.array_equal(second.block_table, tables[1])
    assert np.array_equal(cache.match(NS, range(9)).block_ids, tables[1][:2])
    assert cache.stats().resident_blocks == 2 and cache.stats().sequence_blocks == 4
    audit.check(cache)
    first.extend([1, 2, 3, 4])
    first.commit(13)
    assert cache.match(NS, [*range(9), 1, 2, 3, 4]).num_tokens == 12
    assert cache.match(NS, [*range(9), 1, 2, 3]).block_ids[-1] == first.block_table[2]
    first.release()
    audit.check(cache)
    second.release()
    stats = cache.stats()
    assert (stats.resident_blocks, stats.sequence_blocks, stats.free_blocks) == (3, 0, 13)
    audit.check(cache)


def test_growing_and_rolling_back() -> None:
    """``append`` and ``extend`` take blocks. ``truncate`` gives uncommitted blocks back."""
    cache = make_cache(8, 4)
    sequence = cache.open(NS, range(6))
    sequence.commit(5)
    sequence.append(6)
    sequence.extend([7, 8, 9, 10, 11, 12])
    assert sequence.num_tokens == 13 and sequence.num_blocks == 4
    assert sequence.token_ids.tolist() == list(range(13))
    for wrong in (4, 14, -1, 5.0, True):
        with pytest.raises(ArgumentError):
            sequence.truncate(wrong)
    sequence.truncate(5)
    assert sequence.num_blocks == 2 and cache.stats().free_blocks == 6
    sequence.extend([50, 60, 70])
    sequence.commit(8)
    assert cache.match(NS, [0, 1, 2, 3, 4, 50, 60, 70]).num_tokens == 8
    assert cache.match(NS, range(8)).num_tokens == 4
    sequence.extend([])
    sequence.truncate(8)
    audit.check(cache)
    sequence.release()
    audit.check(cache)


def test_a_snapshot_of_a_block_table() -> None:
    """A returned table is read-only, and later calls do not change it."""
    cache = make_cache(8, 2)
    sequence = cache.open(NS, range(5))
    table = sequence.block_table
    copy = table.copy()
    sequence.extend(range(5))
    sequence.truncate(2)
    assert np.array_equal(table, copy)
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1
    sequence.release()


def test_a_sequence_is_released_once() -> None:
    """A second release is an error, but leaving ``with`` after a release is not. Every other call is refused too."""
    cache = make_cache()
    with cache.open(NS, range(9)) as sequence:
        sequence.commit(9)
        sequence.release()
        assert not sequence.is_open
        before = cache.snapshot()
        calls: list[Callable[[], Any]] = [
            sequence.release,
            lambda: sequence.commit(9),
            lambda: sequence.append(1),
            lambda: sequence.extend([1]),
            lambda: sequence.truncate(9),
            lambda: sequence.fork(1),
            lambda: cache.append([sequence], [1]),
            lambda: cache.reorder([sequence], [0]),
        ]
        for call in calls:
            with pytest.raises(LeaseError):
                call()
        assert same(before, cache)
    audit.check(cache)


def test_an_exception_releases_the_sequence() -> None:
    """``with`` releases everything when its body fails."""
    cache = make_cache()
    with pytest.raises(ZeroDivisionError), cache.open(NS, range(9)) as sequence:
        sequence.commit(4)
        raise ZeroDivisionError
    assert not sequence.is_open and cache.stats().free_blocks == 15
    audit.check(cache)


def test_out_of_blocks_reports_the_tenants_own_numbers() -> None:
    """``OutOfBlocks`` reports the needed blocks, the rest of the tenant's limit, and its evictable blocks.

    Blocks on the request's own path do not count as evictable. The error has no number about the pool, of which another
    tenant holds a part. Nothing changes.
    """
    cache = make_cache(6, 4)
    compute(cache, range(12))
    running = cache.open(Namespace("b", "m"), [7] * 8)
    before = cache.snapshot()
    with pytest.raises(OutOfBlocks) as error:
        cache.open(NS, [*range(8), *range(100, 113)])
    assert (error.value.needed, error.value.free, error.value.evictable) == (4, 3, 1)
    assert isinstance(error.value, CapacityError) and same(before, cache)
    with cache.open(
        NS, [*range(8), *range(100, 108)]
    ) as sequence:  # evicts the third block, not its own path
        assert sequence.num_cached_tokens == 8 and cache.stats().free_blocks == 0
        audit.check(cache)
    running.release()
    assert cache.namespaces("nobody") == []
    audit.check(cache)


def test_a_refused_request_leaves_no_namespace() -> None:
    """A refused open leaves no tree, tenant or count behind."""
    cache = make_cache(2, 4)
    with pytest.raises(OutOfBlocks):
        cache.open(NS, range(9))
    stats = cache.stats()
    assert (stats.requests, stats.num_namespaces, stats.num_tenants, cache.namespaces()) == (0, 0, 0, [])
    audit.check(cache)


def test_clear_under_running_sequences() -> None:
    """Matches fail at once.

    Running sequences continue. Blocks that they hold or commit later never match, and are freed at the end.
    """
    cache = make_cache(16, 4)
    compute(cache, [5] * 12)
    running = cache.open(NS, range(13))
    running.commit(8)
    fork = running.fork(1)[0]
    assert cache.clear(NS) == 5
    assert cache.clear(NS) == 0
    assert cache.match(NS, range(13)).num_tokens == 0 == cache.match(NS, [5] * 12).num_tokens
    audit.check(cache)
    table = running.block_table
    running.append(13)
    running.commit(14)
    assert np.array_equal(running.block_table[:3], table[:3])
    assert cache.match(NS, range(14)).num_tokens == 0
    assert cache.stats().quarantined_blocks == 3 and cache.stats().resident_blocks == 0
    with cache.open(NS, range(13)) as fresh:
        assert fresh.num_cached_tokens == 0
        fresh.commit(13)
    assert cache.match(NS, range(13)).num_tokens == 12
    audit.check(cache)
    fork.append(1)
    fork.commit(14)
    running.release()
    fork.release()
    cache.flush()  # waiting copies hold their blocks until then
    stats = cache.stats()
    assert (stats.quarantined_blocks, stats.resident_blocks, stats.free_blocks) == (0, 3, 13)
    audit.check(cache)


def test_namespaces_come_and_go() -> None:
    """A namespace is listed while it holds blocks or runs sequences."""
    cache = make_cache()
    other = Namespace("b", "m", "lora", "x")
    with cache.open(NS, [1]), cache.open(other, range(5)) as sequence:
        sequence.commit(5)
        assert sorted(cache.namespaces(), key=str) == sorted([NS, other], key=str)
        assert cache.namespaces("b") == [other]
    assert cache.namespaces() == [other]
    assert cache.evict(100) == 1
    assert cache.namespaces() == []
    audit.check(cache)


@pytest.mark.parametrize(
    "fields",
    [
        ("", "m"),
        ("a", ""),
        ("a", "m", ""),
        (1, "m"),
        ("a", None),
        ("a", "m", 1),
        ("a", "m", None, None),
        (b"a", "m"),
        ("a", "x" * 2000),
        ("\ud800", "m"),
    ],
)
def test_an_invalid_namespace_is_refused(fields: tuple[Any, ...]) -> None:
    """Wrong types, empty or overlong strings, and strings that cannot be encoded."""
    with pytest.raises(NamespaceError):
        Namespace(*fields)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 1.0}, "num_blocks"),
        ({"num_blocks": True}, "num_blocks"),
        ({"num_blocks": 2**31}, "num_blocks"),
        ({"num_blocks": 4, "block_size": 0}, "block_size"),
        ({"num_blocks": 4, "policy": "random"}, "policy"),
        ({"num_blocks": 4, "layout": "big"}, "layout"),
        ({"num_blocks": 4, "seed": -1}, "seed"),
    ],
)
def test_settings_are_validated_when_made(settings: dict[str, Any], named: str) -> None:
    """A ConfigError names the setting, its value and the allowed values."""
    with pytest.raises(ConfigError) as error:
        CacheConfig(**settings)
    assert error.value.setting == named and error.value.value == settings[named] and error.value.allowed


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_a_long_prompt(block_size: int) -> None:
    """100,000 tokens are committed in chunks, matched whole and with one wrong id, and evicted in pieces."""
    num_tokens = 100_000
    ids = np.random.default_rng(0).integers(0, 2**31, num_tokens)
    cache = make_cache(3 * num_tokens // block_size, block_size)
    with cache.open(NS, ids) as sequence:
        for stop in [*range(7_777, num_tokens, 7_777), num_tokens]:
            sequence.commit(stop)
        table = sequence.block_table
    whole = num_tokens // block_size
    match = cache.match(NS, ids)
    assert match.num_blocks == whole and np.array_equal(match.block_ids, table[:whole])
    for at in (0, 1, 63, 64, 50_001, num_tokens - 1):
        other = ids.copy()
        other[at] += 1
        assert cache.match(NS, other).num_tokens == min(at, whole * block_size) // block_size * block_size
    with cache.open(NS, np.concatenate([ids, ids])) as sequence:
        assert sequence.num_cached_tokens == whole * block_size
    assert cache.evict(whole // 3) == whole // 3
    assert cache.match(NS, ids).num_blocks == whole - whole // 3
    audit.check(cache)


def test_many_children_of_one_node() -> None:
    """A thousand prompts diverge after one block, and after the first id."""
    cache = make_cache(4_000, 2)
    for at in range(1_000):
        compute(cache, [1, 1, at, at])
        compute(cache, [at, 1_000 + at])
    assert all(cache.match(NS, [1, 1, at, at]).num_tokens == 4 for at in range(1_000))
    audit.check(cache)
    assert cache.evict(10_000) == cache.stats().evicted_blocks
    assert cache.stats().free_blocks == 4_000
    audit.check(cache)


def test_prompts_of_growing_and_shrinking_lengths() -> None:
    """Each prompt is one block longer, then one block shorter, then each has another end."""
    cache = make_cache(400, 2)
    for size in [*range(2, 62, 2), *range(62, 0, -2)]:
        compute(cache, range(size))
    assert cache.stats().resident_blocks == 31
    for size in range(2, 62, 2):
        compute(cache, [*range(size), 1_000, size])
    assert cache.match(NS, range(62)).num_tokens == 62
    audit.check(cache)


def test_a_cache_of_one_block() -> None:
    """The smallest possible pool."""
    cache = PrefixCache(CacheConfig(num_blocks=1, block_size=1))
    for token_id in (1, 2, 1, 2):
        assert compute(cache, [token_id]) == 0
        assert cache.match(NS, [token_id]).num_tokens == 1
    with cache.open(NS, [3]) as sequence, pytest.raises(OutOfBlocks):
        sequence.append(4)
    audit.check(cache)
