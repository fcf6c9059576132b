"""Who computes a prefix, and who waits for it: ``on_pending``."""

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
    """Opens with ``on_pending="wait"`` in a thread of its own; ``result`` is the sequence or the error."""

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
        """Whether it is still waiting after a moment."""
        time.sleep(0.05)
        return self.is_alive()


def test_compute_never_waits() -> None:
    """The default: two compute the same, each in blocks of its own."""
    cache = make_cache()
    one, two = cache.open(NS, range(9)), cache.open(NS, range(9))
    assert two.num_cached_tokens == 0 and not set(one.block_table) & set(two.block_table)
    audit.check(cache)


def test_raise_if_somebody_computes_the_next_block() -> None:
    """Only if it is the same block, in the same namespace, and not committed yet."""
    cache = make_cache(32)
    running = cache.open(NS, range(13))
    before = cache.snapshot()
    with pytest.raises(PendingError):
        cache.open(NS, range(9), on_pending="raise")
    assert same(before, cache) and cache.stats().requests == 1
    cache.open(NS, range(4), on_pending="raise").release()  # nothing of it could be used
    cache.open(NS, [*range(3), 99, 5], on_pending="raise").release()  # another first block
    cache.open(Namespace("b", "m"), range(9), on_pending="raise").release()
    cache.open(NS._replace(salt="x"), range(9), on_pending="raise").release()
    running.commit(4)
    cache.open(NS, range(5), on_pending="raise").release()  # that block is there
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


def test_what_was_appended_is_not_pending() -> None:
    """Only prompts are: another request can't want what a model is yet to say."""
    cache = make_cache()
    running = cache.open(NS, range(5))
    running.commit(5)
    running.extend([5, 6, 7])
    cache.open(NS, range(9), on_pending="raise").release()
    running.release()
    audit.check(cache)


def test_a_wait_ends_with_the_commit() -> None:
    """The waiter gets what it waited for, as cached tokens."""
    cache = make_cache()
    running = cache.open(NS, range(9))
    waiter = Waiter(cache, range(9))
    assert waiter.waits()
    running.commit(8)
    assert waiter.opened().num_cached_tokens == 8
    audit.check(cache)


def test_a_wait_goes_on_over_partial_commits() -> None:
    """Chunk by chunk, until nobody computes the next block that the waiter could use."""
    cache = make_cache()
    running = cache.open(NS, range(13))
    waiter = Waiter(cache, range(13))
    for stop in (2, 4, 8, 10):
        running.commit(stop)
        assert waiter.waits()
    running.commit(12)
    assert waiter.opened().num_cached_tokens == 12


@pytest.mark.parametrize("end", ["release", "with", "reorder away", "truncate", "clear"])
def test_the_death_of_who_computes_wakes(end: str) -> None:
    """Released, failed, dropped by a beam step, rolled back, forgotten: the waiter computes the rest itself."""
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


def test_the_second_one_who_computes() -> None:
    """Two compute, one dies: the prefix is still pending, for the other goes on."""
    cache = make_cache()
    first, second = cache.open(NS, range(9)), cache.open(NS, range(9))
    first.release()
    with pytest.raises(PendingError):
        cache.open(NS, range(9), on_pending="raise")
    second.commit(9)
    assert cache.open(NS, range(9), on_pending="raise").num_cached_tokens == 8


def test_many_wait_and_take_turns_after_a_death() -> None:
    """The one who computes dies: all wait on, one computes, all others find what it committed."""
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
    """PendingError, and nothing changed; a timeout of nothing doesn't wait."""
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


def test_a_waiter_holds_up_nobody() -> None:
    """While one waits others match, open, commit and release."""
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


def test_a_mode_that_is_none() -> None:
    """An ArgumentError that says what is allowed."""
    with pytest.raises(ArgumentError, match="compute"):
        make_cache().open(NS, [1], on_pending="later")  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e10, 10**400, 366 * 86_400.0])
def test_a_wait_may_be_as_long_as_anybody_likes(timeout_s: float) -> None:
    cache = make_cache()
    running = cache.open(NS, range(9))
    waiter = Waiter(cache, range(9), timeout_s=timeout_s)
    assert waiter.waits()
    running.commit(9)
    assert waiter.opened().num_cached_tokens == 8
