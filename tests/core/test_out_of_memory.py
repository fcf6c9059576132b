"""MemoryErrors at any allocation, one or many, also while the cache is repaired: no call is done on a broken cache.

``_testcapi.set_nomemory`` lets the k-th allocation from now on fail, and those after it for a while. A life is a few
random calls, then one in which memory runs out, then the audit and further calls. ``OOM_LIVES`` sets how many.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from radixkv import (
    CacheConfig,
    CapacityError,
    IntegrityError,
    LeaseError,
    Namespace,
    PrefixCache,
    Sequence,
    Tenant,
    audit,
    recovery,
)
from radixkv.clock import ManualClock
from radixkv.recovery import MAX_FAILED_REPAIRS

_testcapi = pytest.importorskip("_testcapi")

LIVES = int(os.environ.get("OOM_LIVES", "60"))
"""Of each kind."""

WINDOWS = (1, 2, 5, 20, 100, 1_000)
"""Allocations in a row that fail."""

NAMESPACES = [Namespace(tenant, "m") for tenant in "ab"]


class Life:
    """One cache, and what is open in it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        policy = rng.choice(["lru", "lfu"])
        config = CacheConfig(48, 2, policy=policy, default_tenant=Tenant("d", max_pinned_blocks=8))
        self.cache = PrefixCache(
            config, clock=ManualClock()
        )  # without upkeep: a thread can't start without memory
        self.open: list[Sequence] = []

    def step(self) -> None:
        """Any call."""
        calls: list[Callable[[], Any]] = [self._open, self._open, self._lease, self._forget]
        if self.open:
            one = self.rng.choice(self.open)
            batch = self.open[:4]
            calls += [
                lambda: one.commit(one.num_tokens),
                lambda: one.extend([self.rng.randrange(2) for _ in range(3)]),
                lambda: self.open.extend(one.fork(2)),
                lambda: self._end(one),
                lambda: self.cache.append(batch, [1] * len(batch)),
                lambda: self._reorder(batch),
            ]
        try:
            self.rng.choice(calls)()
        except CapacityError:
            if self.open:
                self._end(self.open[0])

    def _open(self) -> None:
        ids = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 14))]
        self.open.append(self.cache.open(self.rng.choice(NAMESPACES), ids))

    def _lease(self) -> None:
        with self.cache.lease(self.cache.match(NAMESPACES[0], [1, 0, 1, 0])):
            self.cache.evict(2)

    def _forget(self) -> None:
        if self.rng.randrange(8) == 0:
            self.cache.clear(self.rng.choice(NAMESPACES))
        elif self.rng.randrange(8) == 0:
            self.cache.pin(NAMESPACES[0], [1, 0], 5.0)

    def _end(self, sequence: Sequence) -> None:
        self.open.remove(sequence)
        sequence.release()

    def _reorder(self, batch: list[Sequence]) -> None:
        self.open = self.cache.reorder(batch, [0] * len(batch)) + self.open[len(batch) :]

    def only_open(self) -> None:
        """Forget what was closed."""
        self.open = [sequence for sequence in self.open if sequence.is_open]


def _without_memory(life: Life, start: int, window: int) -> bool:
    """Whether memory ran out in a call."""
    gc.disable()  # a collection allocates when it wants to
    _testcapi.set_nomemory(start, start + window)
    try:
        life.step()
    except MemoryError:
        return True
    except LeaseError:
        return False
    finally:
        _testcapi.remove_mem_hooks()
        gc.enable()
    return False


def lived(seed: int, window: int) -> str:
    """What became of a cache: "none" if memory sufficed, "alive" or "dead"."""
    life = Life(random.Random(seed))
    for _ in range(life.rng.randrange(5, 25)):
        with contextlib.suppress(LeaseError):
            life.step()
    life.only_open()
    if not _without_memory(life, life.rng.randrange(40), window):
        return "none"
    life.only_open()
    try:
        audit.check(life.cache)
    except IntegrityError:
        assert life.cache.is_broken, "the laws are broken, and calls are done"
        return "dead"
    for _ in range(12):
        life.only_open()
        with contextlib.suppress(LeaseError):
            life.step()
    audit.check(life.cache)
    return "alive"


@pytest.mark.pure
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", WINDOWS)
def test_memory_that_runs_out(window: int) -> None:
    """At most one in twenty ends in a dead cache; here none does."""
    found = Counter(lived(seed, window) for seed in range(LIVES))
    print(f"{window} allocations failed: {dict(found)}")
    assert found["alive"] > LIVES // 4
    assert found["dead"] <= (found["alive"] + found["dead"]) // 20, found


class Fails:
    """Stands for ``recovery._mend`` and fails so many times."""

    def __init__(self, times: int) -> None:
        self.left, self.original = times, recovery._mend

    def __call__(self, cache: PrefixCache) -> None:
        if self.left:
            self.left -= 1
            raise MemoryError
        self.original(cache)


def _interrupted(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> tuple[PrefixCache, Sequence, Sequence, Fails]:
    """A cache, a sequence whose commit was interrupted, a bystander; mending fails so many times."""
    fails = Fails(0)

    class Journal:
        grain_tokens = 4
        stored = removed = cleared = lambda *_: None

    journal = Journal()
    cache = PrefixCache(CacheConfig(16, 4), journal=journal)
    one, other = cache.open(NAMESPACES[0], range(8)), cache.open(NAMESPACES[1], range(8))
    monkeypatch.setattr(recovery, "_mend", fails)
    fails.left = times

    def stored(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(journal, "stored", stored, raising=False)
    with pytest.raises(MemoryError):
        one.commit(8)
    monkeypatch.undo()
    monkeypatch.setattr(recovery, "_mend", fails)
    return cache, one, other, fails


def test_mending_that_fails_is_made_good_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it does anything."""
    cache, one, other, fails = _interrupted(monkeypatch, recovery.ATTEMPTS + 1)
    assert cache.is_broken and not cache.is_dead
    assert cache.stats().num_sequences == 1 and not cache.is_broken and not fails.left
    assert not one.is_open
    other.commit(8)
    other.release()
    audit.check(cache)


def test_a_dead_cache_refuses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call raises IntegrityError, and says what to do; leaving a ``with`` does not hide another error."""
    cache, one, other, _ = _interrupted(monkeypatch, 1_000_000)
    calls: list[Callable[[], object]] = [
        cache.stats,
        cache.snapshot,
        cache.flush,
        cache.tenants,
        lambda: cache.match(NAMESPACES[0], [1]),
        lambda: cache.open(NAMESPACES[0], [1]),
        lambda: other.commit(4),
        lambda: other.append(1),
        lambda: other.fork(1),
        lambda: other.block_table,
        lambda: other.token_ids,
        other.release,
        one.release,
        lambda: cache.evict(1),
        lambda: cache.clear(NAMESPACES[0]),
        lambda: cache.purge("a"),
        lambda: audit.check(cache),
        cache.maintain,
    ]
    for call in calls:
        with pytest.raises(IntegrityError, match=r"dead.*replace the cache"):
            call()
    assert len(calls) > MAX_FAILED_REPAIRS and cache.is_dead
    with pytest.raises(ZeroDivisionError), other:
        _ = 1 / 0
    with other:
        pass
