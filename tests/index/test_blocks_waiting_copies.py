"""Copies that wait for ``flush``. All copies of one plan run in one launch, so they must not depend on each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from radixkv import (
    CacheConfig,
    FlushRequired,
    KernelError,
    KVLayout,
    LeaseError,
    Namespace,
    PrefixCache,
    QuotaExceeded,
    Sequence,
    StepPlan,
    Tenant,
    audit,
)
from radixkv.audit import invariants

NS = Namespace("a", "m")


def _execute_at_once(rows: np.ndarray, plan: StepPlan) -> None:
    """Execute one launch: each copy reads the rows as they were before all writes."""
    old = rows.copy()
    for source, target, num_rows in plan:
        rows[target, :num_rows] = old[source, :num_rows]


def _flush_in_one_launch(cache: PrefixCache, rows: np.ndarray) -> None:
    """Check that the waiting copies are independent of each other, and execute them."""
    plan = cache.flush()
    targets = plan.targets.tolist()
    assert len(set(targets)) == len(targets) and not set(targets) & set(plan.sources.tolist()), plan
    _execute_at_once(rows, plan)


def test_a_copy_of_a_copy_that_waits() -> None:
    """Fork, write, fork again, write. The second copy must not read a row that the first has yet to write."""
    cache = PrefixCache(CacheConfig(num_blocks=10, block_size=4))
    rows = np.zeros((10, 4), dtype=np.int64)
    parent = cache.open(NS, [1, 2, 3, 4, 5])
    rows[parent.block_table[1], 0] = 5
    child = parent.fork(1)[0]
    child.append(7)
    grandchild = child.fork(1)[0]
    grandchild.append(8)
    _flush_in_one_launch(cache, rows)
    assert [rows[s.block_table[1], 0] for s in (parent, child, grandchild)] == [5, 5, 5]
    audit.check(cache)


def test_a_source_that_is_freed_while_its_copy_waits() -> None:
    """A block is freed while it is the source of a waiting copy.

    It must not become the target of another copy in that plan.
    """
    cache = PrefixCache(CacheConfig(num_blocks=4, block_size=2))
    rows = np.zeros((4, 2), dtype=np.int64)
    second, first = cache.open(NS, [2]), cache.open(NS, [1])
    rows[second.block_table[0], 0], rows[first.block_table[0], 0] = 2, 1
    of_first = first.fork(1)[0]
    of_first.append(5)
    first.release()
    of_second = second.fork(1)[0]
    of_second.append(6)
    _flush_in_one_launch(cache, rows)
    assert [rows[s.block_table[0], 0] for s in (second, of_first, of_second)] == [2, 1, 2]
    audit.check(cache)


def test_a_target_that_is_freed_while_its_copy_waits() -> None:
    """A block is freed while it is the target of a waiting copy, and becomes the target of another one."""
    cache = PrefixCache(CacheConfig(num_blocks=4, block_size=2))
    rows = np.zeros((4, 2), dtype=np.int64)
    first, second = cache.open(NS, [1]), cache.open(NS, [2])
    rows[first.block_table[0], 0], rows[second.block_table[0], 0] = 1, 2
    of_first = first.fork(1)[0]
    of_first.append(5)
    of_first.release()
    of_second = second.fork(1)[0]
    of_second.append(6)
    _flush_in_one_launch(cache, rows)
    assert [rows[s.block_table[0], 0] for s in (first, second, of_second)] == [1, 2, 2]
    audit.check(cache)


def test_a_source_in_a_cleared_tree_is_held_until_its_copy() -> None:
    """One write both adds the copy and ends the block's last lease.

    The block must not be reused before the copy is done.
    """
    cache = PrefixCache(CacheConfig(num_blocks=4, block_size=4))
    rows = np.zeros((4, 4), dtype=np.int64)
    first, other = cache.open(NS, range(4)), cache.open(Namespace("b", "m"), [7])
    rows[first.block_table[0]], rows[other.block_table[0], 0] = range(4), 7
    (sharer,) = first.fork(1)
    sharer.commit(4)
    cache.clear(NS)
    sharer.release()
    first.truncate(1)
    first.append(9)
    (child,) = other.fork(1)
    child.append(8)
    _flush_in_one_launch(cache, rows)
    assert [rows[s.block_table[0], 0] for s in (first, other, child)] == [0, 7, 7]
    for sequence in (first, other, child):
        sequence.release()
    assert cache.evict(4) == 0 and cache.stats().free_blocks == 4
    audit.check(cache)


@pytest.mark.parametrize("block_size", [2, 4])
def test_no_copy_waits_with_storage(block_size: int) -> None:
    """With storage, a plan is executed as soon as it is made."""
    from radixkv import KVLayout

    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=block_size, layout=layout))
    sequence = cache.open(NS, [1])
    children = sequence.fork(2)
    cache.append([sequence, *children], [1, 2, 3])
    assert cache.storage is not None
    assert (cache.storage.num_launches, cache.storage.num_copied_blocks) == (1, 2)
    assert not cache.flush()
    assert cache.stats().copied_blocks == 2
    audit.check(cache)


def test_failed_copies_close_the_sequences_that_needed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tails of the affected sequences hold no KV, so these sequences are closed.

    The others and the pool are intact.
    """
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=4, layout=layout))
    parent = cache.open(NS, [1, 2])
    children = parent.fork(2)
    alone = cache.open(NS, [5])

    def failing(plan: StepPlan) -> None:
        raise KernelError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(cache.storage, "execute", failing)
        with pytest.raises(KernelError, match="no launch"):
            cache.append([*children, alone], [3, 3, 3])
    assert [sequence.is_open for sequence in (parent, *children, alone)] == [True, False, False, True]
    audit.check(cache)
    with pytest.raises(LeaseError):
        children[0].commit(3)
    cache.append([parent, alone], [3, 4])
    assert parent.num_tokens == 3 and alone.num_tokens == 3
    parent.release()
    alone.release()
    assert cache.stats().free_blocks == 8
    audit.check(cache)


def test_a_source_that_was_committed_and_evicted_while_its_copy_waits() -> None:
    """The copy needs fewer rows than the block has.

    A commit gives the whole block to the tree, where it could be evicted.
    """
    rows = np.zeros((4, 4), dtype=np.int64)

    def zero(block_ids: np.ndarray) -> None:
        rows[block_ids] = 0

    cache = PrefixCache(CacheConfig(num_blocks=4, block_size=4), scrub_blocks=zero)
    parent = cache.open(NS, [1, 2, 3, 4])
    rows[parent.block_table] = [1, 2, 3, 4]
    child = parent.fork(1)[0]
    child.truncate(2)
    child.append(9)
    parent.commit(4)
    parent.release()
    audit.check(cache)
    assert cache.tenant_stats("a").evictable_blocks == 1
    with cache.open(Namespace("b", "m"), range(8)):
        with pytest.raises(FlushRequired, match="call flush"):
            cache.open(Namespace("b", "m"), range(50, 54))
        audit.check(cache)
        _execute_at_once(rows, cache.flush())
        with cache.open(Namespace("b", "m"), range(50, 54)) as sequence:
            assert not rows[sequence.block_table].any()
    audit.check(cache)
    assert rows[child.block_table[0], :2].tolist() == [1, 2]
    child.release()
    assert cache.stats().free_blocks == 4


def test_a_copy_for_a_released_sequence_is_not_made() -> None:
    """A child may write and end many times before the plan is fetched. Its copies hold no block and are not made."""
    cache = PrefixCache(CacheConfig(num_blocks=2, block_size=2))
    parent = cache.open(NS, [1])
    for _ in range(5):
        (child,) = parent.fork(1)
        child.append(2)
        child.release()
        assert cache.tenant_stats("a").used_blocks == 1 and cache.stats().free_blocks == 1
        audit.check(cache)
    (child,) = parent.fork(1)
    child.append(2)
    parent.release()
    assert cache.stats().quarantined_blocks == 1 and cache.stats().free_blocks == 0
    child.release()
    assert cache.stats().free_blocks == 2 and not cache.flush()
    audit.check(cache)


def test_a_source_is_held_until_its_last_copy() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=4, block_size=2))
    parent = cache.open(NS, [1])
    one, two = parent.fork(2)
    cache.append([one, two], [2, 3])
    source = int(parent.block_table[0])
    parent.release()
    one.release()
    assert cache.stats().quarantined_blocks == 1
    assert list(cache.flush()) == [(source, int(two.block_table[0]), 1)]
    assert cache.stats().quarantined_blocks == 0 and cache.stats().free_blocks == 3
    audit.check(cache)


CALLS: dict[str, Callable[[PrefixCache, Sequence, Sequence], object]] = {
    "open": lambda cache, child, beside: cache.open(NS, [7]),
    "append": lambda cache, child, beside: child.append(3),
    "append to several": lambda cache, child, beside: cache.append([beside, child], [3, 4]),
    "extend": lambda cache, child, beside: child.extend([3]),
    "allocate": lambda cache, child, beside: cache.allocate(1),
    "publish": lambda cache, child, beside: cache.publish("base", Namespace("c", "m"), [1, 2], ["a"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_needs_a_held_block_asks_for_a_flush_and_changes_nothing(name: str) -> None:
    cache = PrefixCache(CacheConfig(num_blocks=3, block_size=2))
    parent = cache.open(NS, [1])
    (child,) = parent.fork(1)
    child.append(2)
    beside = cache.open(Namespace("b", "m"), [5])
    parent.release()
    before = cache.snapshot()
    assert cache.stats().free_blocks == 0 and cache.stats().quarantined_blocks == 1
    with pytest.raises(FlushRequired) as refused:
        CALLS[name](cache, child, beside)
    told = refused.value
    assert (told.needed, told.free) == (1, 0) and "call flush, execute its plan, and try again" in str(told)
    assert not invariants.differences(before, cache.snapshot())
    audit.check(cache)
    assert cache.flush().num_copies == 1
    CALLS[name](cache, child, beside)
    audit.check(cache)


def test_waiting_copies_count_against_no_tenant() -> None:
    """A strict tenant at its limit releases the source of a waiting copy.

    It can use that block's quota again before the flush too.
    """
    for fetches in (False, True):
        cache = PrefixCache(CacheConfig(num_blocks=8, block_size=2), scrub_blocks=lambda ids: None)
        cache.add_tenant(Tenant("a", guaranteed_blocks=2, mode="strict"))
        parent = cache.open(NS, [1])
        (child,) = parent.fork(1)
        child.append(2)
        with pytest.raises(QuotaExceeded) as refused:
            cache.open(NS, [5])
        assert (refused.value.used, refused.value.limit) == (2, 2)
        parent.release()
        if fetches:
            cache.flush()
        assert cache.tenant_stats("a").used_blocks == 1
        with cache.open(NS, [5]):
            assert cache.tenant_stats("a").used_blocks == 2
        audit.check(cache)


def test_a_target_that_was_committed_before_it_was_copied_is_not_handed_out() -> None:
    """An engine that commits before it fetches its plan breaks only its own KV."""
    cache = PrefixCache(CacheConfig(num_blocks=2, block_size=2))
    parent = cache.open(NS, [1])
    (child,) = parent.fork(1)
    child.append(2)
    child.commit(2)
    child.release()
    with pytest.raises(FlushRequired):
        cache.open(Namespace("b", "m"), [7])
    assert cache.evict(1) == 1 and not cache.flush()
    with cache.open(Namespace("b", "m"), [7]):
        audit.check(cache)


def test_a_copy_ends_with_the_requests_of_a_purged_tenant() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=6, block_size=2))
    parent = cache.open(NS, [1, 2, 3])
    (child,) = parent.fork(1)
    child.append(4)
    cache.purge("a")
    child.release()
    parent.release()
    audit.check(cache)
    assert cache.stats().quarantined_blocks == 0 == cache.tenant_stats("a").used_blocks
    assert cache.stats().free_blocks == 6 and not cache.flush()
    audit.check(cache)
