"""A thread evicts ahead, so that requests find free blocks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from radixkv import CacheConfig, Namespace, Tenant, audit
from radixkv.audit.properties.material import LAYOUT
from radixkv.tiers.host.cleaner import AHEAD_PART, Cleaner
from radixkv.tiers.ladder import Ladder
from radixkv.tiers.tiered_cache import TieredCache
from tests.tiers.test_tiered_cache import NS, OTHER, SIZE
from tests.waiting import eventually

pytestmark = pytest.mark.slow

NUM_BLOCKS = 4 * AHEAD_PART
MOST = NUM_BLOCKS // AHEAD_PART


class Work(threading.Event):
    """Work for the thread of the tiers. Tells whether that waits for more."""

    is_awaited = False

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited = True
        try:
            return super().wait(timeout)
        finally:
            self.is_awaited = False

    def is_done(self) -> bool:
        """Whether the thread has done all that there was."""
        return self.is_awaited and not self.is_set()


@contextmanager
def cleaned() -> Iterator[tuple[TieredCache, Ladder, Work]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixkv.tiers.ladder.threading.Event", Work)
        cache = TieredCache(CacheConfig(NUM_BLOCKS, SIZE, LAYOUT, host_blocks=2 * NUM_BLOCKS))
    below = cache.lower
    assert isinstance(below, Ladder) and isinstance(below._has_work, Work)
    try:
        yield cache, below, below._has_work
    finally:
        cache.close()
    assert below._thread is not None and not below._thread.is_alive()


def ask(cache: TieredCache, number: int, namespace: Namespace = NS, blocks: int = 2) -> None:
    with cache.open(namespace, range(1_000 * number, 1_000 * number + blocks * SIZE)) as sequence:
        sequence.commit(blocks * SIZE)


def test_requests_find_free_blocks_once_the_cache_is_full() -> None:
    with cleaned() as (cache, below, work):
        for number in range(NUM_BLOCKS // 2):
            ask(cache, number)
        assert cache.stats().free_blocks == 0 and below._cleaner.num_blocks == 0, "there was room"
        for number in range(NUM_BLOCKS // 2, NUM_BLOCKS):
            ask(cache, number)
            assert eventually(work.is_done) and 0 < cache.stats().free_blocks <= MOST
        assert below._cleaner.num_blocks > NUM_BLOCKS * 3 // 4, "requests evict seldom"
        with cache.open(NS, range(2 * SIZE)) as sequence:
            assert sequence.loading is not None and sequence.loading.num_tokens == 2 * SIZE - SIZE
        assert audit.check(cache).ok
        below.host.index.check()


def test_what_a_tenant_is_guaranteed_is_not_evicted_ahead() -> None:
    with cleaned() as (cache, below, work):
        cache.add_tenant(Tenant("a", guaranteed_blocks=NUM_BLOCKS // 2))
        for number in range(NUM_BLOCKS // 4):
            ask(cache, number)
        for number in range(NUM_BLOCKS):
            ask(cache, number, OTHER)
        assert eventually(work.is_done)
        below._cleaner._most = below._cleaner._wanted = NUM_BLOCKS
        ask(cache, 0)
        assert eventually(work.is_done) and cache.stats().free_blocks == NUM_BLOCKS // 2
        assert cache.match(NS, range(2 * SIZE)).num_tokens == 2 * SIZE


def test_it_wants_less_when_no_request_evicts() -> None:
    wanted: list[int] = []
    cleaner = Cleaner(64 * AHEAD_PART, lambda: None)
    cleaner.free_ahead = wanted.append
    cleaner.used()
    cleaner.run()
    assert not wanted, "nothing was evicted yet"
    cleaner.evicted(40)
    cleaner.evicted(1_000)
    for _ in range(100):
        cleaner.used()
        cleaner.run()
    cleaner.run()
    assert wanted[0] == 64 and wanted[-1] == 1 and len(wanted) < 100


@pytest.mark.parametrize("num_blocks", [AHEAD_PART, 16 * AHEAD_PART, 64 * AHEAD_PART])
def test_it_wants_nothing_after_a_quiet_time(num_blocks: int) -> None:
    """Also in a small cache. While requests evict, it wants as much again."""
    wanted: list[int] = []
    cleaner = Cleaner(num_blocks, lambda: None)
    cleaner.free_ahead = wanted.append
    for _ in range(3):
        cleaner.evicted(num_blocks)
        cleaner.used()
        cleaner.run()
        assert wanted[-1] == num_blocks // AHEAD_PART
    for _ in range(100):
        cleaner.used()
        cleaner.run()
    assert wanted == sorted(wanted, reverse=True) and wanted[-1] == 1
    assert len(wanted) < 100, "it wants nothing any more"


def test_its_thread_keeps_no_tiers_that_nobody_has() -> None:
    """Host memory alone needs no ``close``."""
    cache = TieredCache(CacheConfig(NUM_BLOCKS, SIZE, LAYOUT, host_blocks=2 * NUM_BLOCKS))
    assert isinstance(cache.lower, Ladder)
    thread, tiers = cache.lower._thread, weakref.ref(cache.lower)
    for number in range(NUM_BLOCKS):
        ask(cache, number)
    del cache
    assert thread is not None and eventually(lambda: (gc.collect(), not thread.is_alive())[1])
    assert tiers() is None


def test_what_one_cleaner_evicts_is_no_need_of_another() -> None:
    """Each dtype's tiers have one, and each hears of all evictions."""
    cleaners = [Cleaner(64 * AHEAD_PART, lambda: None) for _ in range(2)]
    asked: list[int] = []

    def free_ahead(num_blocks: int) -> None:
        asked.append(num_blocks)
        for each in cleaners:
            each.evicted(num_blocks)

    for each in cleaners:
        each.free_ahead = free_ahead
        each.evicted(40)
    for _ in range(100):
        for each in cleaners:
            each.used()
            each.run()
    assert asked[:2] == [40, 40] and asked[-2:] == [1, 1]
    assert cleaners[0].num_blocks == sum(asked[::2]) and cleaners[1].num_blocks == sum(asked[1::2])


def test_an_error_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with cleaned() as (cache, below, _):
        failed = threading.Event()
        free_ahead = below._cleaner.free_ahead

        def fail(num_blocks: int) -> None:
            if not failed.is_set():
                failed.set()
                raise MemoryError("planted")
            free_ahead(num_blocks)

        below._cleaner.free_ahead = fail
        for number in range(NUM_BLOCKS):
            ask(cache, number)
        assert eventually(failed.is_set)

        def is_freed() -> bool:
            ask(cache, 0)
            return 0 < cache.stats().free_blocks <= MOST

        assert eventually(is_freed)
