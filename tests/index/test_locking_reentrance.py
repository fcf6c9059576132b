"""Calls from callbacks raise a named error. Releases by finalisers are done by the next call. Nothing hangs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, ReentrantCall, Sequence, Tenant, audit
from radixkv.clock import ManualClock
from tests.index.support import collect_leftovers
from tests.waiting import ended, is_set

NS = Namespace("a", "m")


class Journal:
    """Calls back whenever a range becomes resident, or leaves."""

    grain_tokens = 4

    def __init__(self) -> None:
        self.action: Callable[[], object] = lambda: None

    def stored(self, *_: object) -> None:
        self.action()

    def removed(self, *_: object) -> None:
        self.action()

    def cleared(self, *_: object) -> None:
        self.action()


def make() -> tuple[PrefixCache, Journal]:
    journal = Journal()
    return PrefixCache(CacheConfig(32, 4), journal=journal, clock=ManualClock()), journal


def calls(cache: PrefixCache, sequence: Sequence) -> dict[str, Callable[[], object]]:
    """Every kind of public call."""
    lease = cache.lease(cache.match(NS, range(8)))
    return {
        "match": lambda: cache.match(NS, [1]),
        "lease": lambda: cache.lease(cache.match(NS, range(8))),
        "lease.release": lease.release,
        "leave the lease": lambda: lease.__exit__(None, None, None),
        "match_and_lease": lambda: cache.match_and_lease(NS, range(8)),
        "touch": lambda: cache.touch(NS, range(8)),
        "open": lambda: cache.open(NS, [1, 2]),
        "open without a lookup": lambda: cache.open(NS, [1, 2], lookup=False),
        "commit": lambda: sequence.commit(4),
        "append": lambda: sequence.append(1),
        "extend": lambda: sequence.extend([1]),
        "reserve": lambda: sequence.reserve(1),
        "fill": lambda: sequence.fill([]),
        "drop": sequence.drop,
        "truncate": lambda: sequence.truncate(5),
        "fork": lambda: sequence.fork(1),
        "reorder": lambda: cache.reorder([sequence], [0]),
        "token_ids": lambda: sequence.token_ids,
        "release": sequence.release,
        "leave the sequence": lambda: sequence.__exit__(None, None, None),
        "flush": cache.flush,
        "evict": lambda: cache.evict(1),
        "allocate": lambda: cache.allocate(1),
        "free": lambda: cache.free([]),
        "insert": lambda: cache.insert(NS, range(4), [3]),
        "insert with a lease": lambda: cache.insert(NS, range(8), [3], start=4, lease=True),
        "pin": lambda: cache.pin(NS, range(4), 1.0),
        "pins": cache.pins,
        "add_tenant": lambda: cache.add_tenant(Tenant("b")),
        "tenant": lambda: cache.tenant("a"),
        "namespaces": cache.namespaces,
        "clear": lambda: cache.clear(NS),
        "purge": lambda: cache.purge("a"),
        "generation": lambda: cache.generation("a"),
        "publish": lambda: cache.publish("base", NS, range(4), ["b"]),
        "unpublish": lambda: cache.unpublish("base"),
        "bases": cache.bases,
        "stats": cache.stats,
        "tenant_stats": lambda: cache.tenant_stats("a"),
        "tenants": cache.tenants,
        "snapshot": cache.snapshot,
        "snapshot_in_slices": cache.snapshot_in_slices,
        "maintain": cache.maintain,
        "audit": lambda: audit.check(cache),
    }


def _prepared() -> tuple[PrefixCache, Journal, Sequence]:
    cache, journal = make()
    with cache.open(NS, range(8)) as first:
        first.commit(8)
    return cache, journal, cache.open(NS, [7, *range(8)])


@pytest.mark.parametrize("name", list(calls(_prepared()[0], _prepared()[2])))
def test_a_callback_that_calls_the_cache_gets_a_named_error(name: str) -> None:
    """The error comes at once, for every call. If the callback handles it, the interrupted call continues."""
    cache, journal, sequence = _prepared()
    call = calls(cache, sequence)[name]
    errors: list[Exception] = []

    def action() -> None:
        try:
            call()
        except ReentrantCall as error:
            errors.append(error)

    journal.action = action
    with cache.open(NS, range(20, 28)) as running:
        running.commit(8)
    journal.action = lambda: None
    assert errors and "return from the callback first" in str(errors[0])
    assert sequence.is_open and cache.match(NS, range(20, 28)).num_tokens == 8
    sequence.release()
    audit.check(cache)


@pytest.mark.parametrize("name", ["insert", "reclaim"])
def test_a_callback_of_a_cache_whose_blocks_the_engine_owns(name: str) -> None:
    """The engine's calls are refused in a callback, and the call that it came from completes."""
    journal = Journal()
    cache = PrefixCache(CacheConfig(8, 4, blocks="engine"), journal=journal, clock=ManualClock())
    cache.insert(NS, range(8), [0, 1])
    call = {"insert": lambda: cache.insert(NS, range(4), [5]), "reclaim": lambda: cache.reclaim(1)}[name]
    errors: list[Exception] = []

    def action() -> None:
        try:
            call()
        except ReentrantCall as error:
            errors.append(error)

    journal.action = action
    cache.insert(NS, range(20, 28), [2, 3])
    assert len(errors) == 1
    assert sorted(cache.reclaim(8).tolist()) == [0, 1, 2, 3] and len(errors) > 1
    journal.action = lambda: None
    audit.check(cache)


def test_a_callback_that_does_not_handle_the_error() -> None:
    """The error ends the call, like any error of a callback. The cache stays intact."""
    cache, journal, bystander = _prepared()
    journal.action = cache.stats
    running = cache.open(NS, range(20, 28))
    with pytest.raises(ReentrantCall):
        running.commit(8)
    journal.action = lambda: None
    assert not running.is_open and bystander.is_open
    audit.check(cache)


@pytest.mark.parametrize("which", ["clock", "scrub_blocks"])
def test_a_clock_or_scrub_callback_gets_the_named_error(which: str) -> None:
    """A clock or ``scrub_blocks`` that calls the cache."""
    errors: list[Exception] = []
    caches: list[PrefixCache] = []

    def calls_back(*_: object) -> float:
        try:
            for cache in caches:
                cache.stats()
        except ReentrantCall as error:
            errors.append(error)
        return 0.0

    clock: Any = calls_back if which == "clock" else ManualClock()
    cache = PrefixCache(CacheConfig(32, 4), clock=clock, scrub_blocks=calls_back)
    with cache.open(NS, range(8)) as sequence:
        sequence.commit(8)
    caches.append(cache)
    cache.pin(NS, range(4), 5.0)
    cache.purge("a")
    with cache.open(Namespace("b", "m"), range(100)):
        pass
    assert errors
    caches.clear()
    audit.check(cache)


class Owner:
    """Releases its object when it is collected."""

    def __init__(self, held: Any) -> None:
        self.held, self.me = held, self

    def __del__(self) -> None:
        self.held.release()


def generator(held: Any) -> Iterator[None]:
    """Releases its object when it is closed."""
    with held:
        yield


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Garbage is collected only where a test does it."""
    collect_leftovers()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", ["sequence", "lease"])
@pytest.mark.parametrize("how", ["__del__", "generator", "finalize"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_release_by_a_finaliser(kind: str, how: str, inside: bool) -> None:
    """During a call, the next call does the release.

    Between calls it happens at once. There is never an error or a warning.
    """
    cache, journal, first = _prepared()
    held: Any = first if kind == "sequence" else cache.lease(cache.match(NS, range(8)))
    if how == "__del__":
        Owner(held)
    elif how == "generator":
        cycle: list[Any] = [generator(held)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
    else:
        weakref.finalize(gone := Gone(), held.release)
        gone.me = gone
        del gone
    state = held._state
    if kind == "sequence":
        del first
    del held
    journal.action = gc.collect
    if inside:
        with cache.open(NS, range(20, 28)) as running:
            running.commit(8)
            assert state._is_open, "the object was released in the middle of a call"
    else:
        gc.collect()
    journal.action = lambda: None
    cache.stats()
    assert not state._is_open
    if kind == "lease":
        first.release()
    audit.check(cache)


class Gone:
    """An object that is collected."""

    me: Gone


def test_a_finaliser_in_another_thread_waits() -> None:
    """The finaliser releases as soon as the call that holds the lock has ended."""
    cache, journal, sequence = _prepared()
    began = threading.Event()
    done: list[str] = []

    def release() -> None:
        began.set()
        sequence.release()
        done.append("release")

    thread = threading.Thread(target=release)

    def action() -> None:
        thread.start()
        is_set(began, "the start of the thread")
        time.sleep(0.05)  # a release that doesn't wait would be done by now, most of the time
        done.append("callback")

    journal.action = action
    with cache.open(NS, range(20, 28)) as running:
        running.commit(8)
        journal.action = lambda: None
    ended(thread)
    assert done == ["callback", "release"] and not sequence.is_open
    audit.check(cache)
