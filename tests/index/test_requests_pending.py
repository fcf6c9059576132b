"""``on_pending``: which request computes a prefix, and which ones wait for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from radixkv import ArgumentError, Namespace, PendingError, PrefixCache, Sequence, audit
from tests.index.support import NS, make_cache, same


class Waiter(threading.Thread):
    """Opens with ``on_pending="wait"`` in its own thread. ``result`` is the sequence or the error."""

    def __init__(self, cache: PrefixCache, ids: Any, timeout_s: float | None = 60.0) -> None:
        super().__init__(daemon=True)
        self.cache, self.ids, self.timeout_s = cache, ids, timeout_s
        self.result: Sequence | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.cache.open(NS, self.ids, on_pending="wait", timeout_s=self.timeout_s)
        except PendingError as error:
            self.result = error

    def opened(self) -> Sequence:
        """The sequence, once the wait is over."""
        self.join(60)
        assert isinstance(self.result, Sequence), self.result
        return self.result

    def waits(self) -> bool:
        """Whether the thread still waits after a moment."""
        time.sleep(0.05)
        return self.is_alive()


def test_compute_never_waits() -> None:
    """By default two requests compute the same prefix, each in its own blocks."""
    cache = make_cache()
    one, two = cache.open(NS, range(9)), cache.open(NS, range(9))
    assert two.num_cached_tokens == 0 and not set(one.block_table) & set(two.block_table)
    audit.check(cache)


def test_raise_if_another_request_computes_the_next_block() -> None:
    """PendingError is raised only for the same uncommitted block in the same namespace."""
    cache = make_cache(32)
    running = cache.open(NS, range(13))
    before = cache.snapshot()
    with pytest.raises(PendingError):
        cache.open(NS, range(9), on_pending="raise")
    assert same(before, cache) and cache.stats().requests == 1
    cache.open(NS, range(4), on_pending="raise").release()  # the request could use none of it
    cache.open(NS, [*range(3), 99, 5], on_pending="raise").release()  # another first block
    cache.open(Namespace("b", "m"), range(9), on_pending="raise").release()
    cache.open(NS._replace(salt="x"), range(9), on_pending="raise").release()
    running.commit(4)
    cache.open(NS, range(5), on_pending="raise").release()  # this block is committed
    with pytest.raises(PendingError):
        cache.open(NS, range(9), on_pending="raise")
    cache.open(NS, [*range(4), 9, 9, 9, 9, 9], on_pending="raise").release()
    running.commit(8)
    with cache.open(NS, range(9), on_pending="raise") as sequence:
        assert sequence.num_cached_tokens == 8
    running.release()
    with cache.open(NS, range(13), on_pending="raise") as sequence:
        assert sequence.num_cached_tokens == 8
    audit.check(cache)


def test_appended_tokens_are_not_pending() -> None:
    """Only prompts are pending: no other request can depend on tokens that the model has yet to produce."""
    cache = make_cache()
    running = cache.open(NS, range(5))
    running.commit(5)
    running.extend([5, 6, 7])
    cache.open(NS, range(9), on_pending="raise").release()
    running.release()
    audit.check(cache)


def test_a_wait_ends_with_the_commit() -> None:
    """The waiter gets the committed tokens as cached tokens."""
    cache = make_cache()
    running = cache.open(NS, range(9))
    waiter = Waiter(cache, range(9))
    assert waiter.waits()
    running.commit(8)
    assert waiter.opened().num_cached_tokens == 8
    audit.check(cache)


def test_a_wait_continues_over_partial_commits() -> None:
    """The wait continues over partial commits, until no request computes the next block that the waiter could use."""
    cache = make_cache()
    running = cache.open(NS, range(13))
    waiter = Waiter(cache, range(13))
    for stop in (2, 4, 8, 10):
        running.commit(stop)
        assert waiter.waits()
    running.commit(12)
    assert waiter.opened().num_cached_tokens == 12


@pytest.mark.parametrize("end", ["release", "with", "reorder away", "truncate", "clear"])
def test_the_end_of_the_computing_request_wakes_waiters(end: str) -> None:
    """The computing request is released, fails, is dropped by a beam step, is rolled back or forgotten.

    The waiter then computes the rest.
    """
    cache = make_cache()
    running = cache.open(NS, range(13))
    running.commit(4)
    waiter = Waiter(cache, range(13))
    assert waiter.waits()
    ends: dict[str, Callable[[], Any]] = {
        "release": running.release,
        "with": lambda: _fail_in(running),
        "reorder away": lambda: cache.reorder([running], []),
        "truncate": lambda: running.truncate(5),
        "clear": lambda: cache.clear(NS),
    }
    ends[end]()
    assert waiter.opened().num_cached_tokens == (0 if end == "clear" else 4)
    audit.check(cache)


def _fail_in(sequence: Sequence) -> None:
    with pytest.raises(ZeroDivisionError), sequence:
        raise ZeroDivisionError


def test_a_prefix_stays_pending_while_a_second_request_computes_it() -> None:
    """Two requests compute and one ends. The prefix stays pending, as the other continues."""
    cache = make_cache()
    first, second = cache.open(NS, range(9)), cache.open(NS, range(9))
    first.release()
    with pytest.raises(PendingError):
        cache.open(NS, range(9), on_pending="raise")
    second.commit(9)
    assert cache.open(NS, range(9), on_pending="raise").num_cached_tokens == 8


def test_waiters_take_turns_after_the_computing_request_ends() -> None:
    """The computing request ends.

    All waiters stay waiting, one of them computes, and the others find the blocks that it committed.
    """
    cache = make_cache(64)
    running = cache.open(NS, range(9))
    done: queue.Queue[int] = queue.Queue()

    def ask() -> None:
        with cache.open(NS, range(9), on_pending="wait", timeout_s=60) as sequence:
            done.put(sequence.num_cached_tokens)
            sequence.commit(9)

    waiters = [threading.Thread(target=ask, daemon=True) for _ in range(5)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.05)
    assert done.empty()
    running.release()
    cached = [done.get(timeout=60) for _ in waiters]
    for waiter in waiters:
        waiter.join(60)
    assert sorted(cached) == [0, 8, 8, 8, 8]
    audit.check(cache)


def test_a_wait_times_out() -> None:
    """The wait ends with PendingError and changes nothing. A timeout of zero does not wait."""
    cache = make_cache()
    running = cache.open(NS, range(9))
    before = cache.snapshot()
    for timeout_s in (0, 0.0, 0.01):
        with pytest.raises(PendingError):
            cache.open(NS, range(9), on_pending="wait", timeout_s=timeout_s)
    assert same(before, cache)
    waiter = Waiter(cache, range(9), timeout_s=0.1)
    waiter.join(60)
    assert isinstance(waiter.result, PendingError)
    running.commit(9)
    cache.open(NS, range(9), on_pending="wait", timeout_s=0).release()
    audit.check(cache)


def test_a_waiter_delays_no_other_request() -> None:
    """While one request waits, others match, open, commit and release."""
    cache = make_cache(64)
    running = cache.open(NS, range(9))
    waiter = Waiter(cache, range(9))
    assert waiter.waits()
    with cache.open(NS, [7] * 9, on_pending="wait", timeout_s=0) as sequence:
        sequence.commit(9)
    assert cache.match(NS, [7] * 9).num_tokens == 8
    assert waiter.waits()
    running.release()
    waiter.opened().release()
    audit.check(cache)


def test_an_invalid_on_pending_is_refused() -> None:
    """An ArgumentError names the allowed values."""
    with pytest.raises(ArgumentError, match="compute"):
        make_cache().open(NS, [1], on_pending="later")  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e10, 10**400, 366 * 86_400.0])
def test_a_timeout_may_be_arbitrarily_long(timeout_s: float) -> None:
    cache = make_cache()
    running = cache.open(NS, range(9))
    waiter = Waiter(cache, range(9), timeout_s=timeout_s)
    assert waiter.waits()
    running.commit(9)
    assert waiter.opened().num_cached_tokens == 8
