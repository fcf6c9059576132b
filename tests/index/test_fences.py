"""Fences: released sequences keep their blocks until the work of a device has passed."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from radixkv import ArgumentError, Fence, LeaseError, OutOfBlocks, PrefixCache, ReentrantCall, audit
from radixkv.config import CacheConfig
from tests.index.support import NS, compute, make_cache
from tests.waiting import ended


def test_blocks_stay_until_the_fence_is_lifted() -> None:
    """The sequence is over at once. Neither its private nor its committed blocks are handed out before."""
    cache, fence = make_cache(8), Fence()
    sequence = cache.open(NS, range(14))
    sequence.commit(8)
    sequence.release(after=fence)
    assert not sequence.is_open and repr(fence) == "<Fence, 1 sequences wait>"
    for call in (sequence.release, lambda: sequence.append(1), lambda: sequence.release(after=fence)):
        with pytest.raises(LeaseError):
            call()
    audit.check(cache)
    assert cache.free_blocks == 4 and cache.evict(8) == 0
    with pytest.raises(OutOfBlocks):
        cache.allocate(5)
    fence.lift()
    assert cache.free_blocks == 6 and fence.is_lifted and repr(fence) == "<Fence, lifted>"
    assert cache.match(NS, range(14)).num_tokens == 8 and cache.evict(8) == 2
    fence.lift()
    audit.check(cache)


def test_a_fence_for_many_sequences_and_caches() -> None:
    caches, fence = [make_cache(8), make_cache(8)], Fence()
    for cache in caches:
        parent = cache.open(NS, range(6))
        for each in (*parent.fork(2), parent):
            each.release(after=fence)
        assert cache.free_blocks == 6
    fence.lift()
    for cache in caches:
        assert cache.free_blocks == 8
        audit.check(cache)


def test_a_lifted_fence_holds_nothing() -> None:
    cache, fence = make_cache(8), Fence()
    fence.lift()
    cache.open(NS, range(6)).release(after=fence)
    assert cache.free_blocks == 8


@pytest.mark.parametrize("end", ["clear", "purge"])
def test_a_clear_or_a_purge_does_not_pass_a_fence(end: str) -> None:
    """Before and after it. The blocks of a stale sequence may wait too."""
    cache, fence = make_cache(16), Fence()
    early, late = cache.open(NS, range(8)), cache.open(NS, range(50, 58))
    early.commit(8)
    early.release(after=fence)
    getattr(cache, end)(NS if end == "clear" else "a")
    late.release(after=fence)
    assert cache.free_blocks == 12 and cache.match(NS, range(8)).num_tokens == 0
    audit.check(cache)
    fence.lift()
    assert cache.free_blocks == 16
    audit.check(cache)


def test_nobody_leans_on_a_sequence_behind_a_fence() -> None:
    """Its step may still end, but the sequence commits nothing any more."""
    cache, fence = make_cache(), Fence()
    sequence = cache.open(NS, range(8))
    sequence.computing(8, step=0)
    sequence.release(after=fence)
    with cache.open(NS, range(9), ahead=True) as other:
        assert other.num_ahead_tokens == 0
    fence.lift()
    audit.check(cache)


def test_a_fence_lifted_by_another_thread() -> None:
    cache, fence = make_cache(8), Fence()
    cache.open(NS, range(8)).release(after=fence)
    thread = threading.Thread(target=fence.lift)
    thread.start()
    ended(thread)
    assert cache.free_blocks == 8


def test_a_fence_lifted_in_a_callback_is_passed_by_the_next_call() -> None:
    """The cache's clock runs under its lock."""
    calls: list[Any] = []

    def clock() -> float:
        for call in calls:
            call()
        return 0.0

    cache, fence = PrefixCache(CacheConfig(8, 4), clock=clock), Fence()
    compute(cache, range(20, 28))
    cache.open(NS, range(8)).release(after=fence)
    other = cache.open(NS, range(40, 48))

    def refused() -> None:
        with pytest.raises(ReentrantCall):
            other.release(after=Fence())

    calls += [fence.lift, refused]
    cache.pin(NS, range(20, 28), 1.0)
    calls.clear()
    assert fence.is_lifted and cache.free_blocks == 2
    cache.stats()
    assert cache.free_blocks == 4
    other.release()
    audit.check(cache)


def test_a_forgotten_fence_is_lifted_with_a_warning() -> None:
    cache, fence = make_cache(8), Fence()
    cache.open(NS, range(8)).release(after=fence)
    with pytest.warns(ResourceWarning, match="1 sequences waited"):
        del fence
        gc.collect()
    cache.stats()
    assert cache.free_blocks == 8


def test_only_a_fence_is_a_fence() -> None:
    cache = make_cache(8)
    sequence = cache.open(NS, range(8))
    with pytest.raises(ArgumentError, match="after=3"):
        sequence.release(after=3)  # type: ignore[arg-type]
    assert sequence.is_open
    sequence.release()
