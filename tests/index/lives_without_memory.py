"""Random lives of a cache in which memory runs out. This is a separate program, as the whole process loses its memory.

``_testcapi.set_nomemory`` makes the k-th allocation from now on fail, and a number of allocations after it. A life is a
few random calls, then one call in which memory runs out, then the audit and more calls.

  python -m tests.index.lives_without_memory WINDOW LIVES    WINDOW allocations fail; prints the outcomes as JSON
"""

from __future__ import annotations

import _testcapi
import contextlib
import gc
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

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
)
from radixkv.clock import ManualClock

NAMESPACES = [Namespace(tenant, "m") for tenant in "ab"]


class Life:
    """One cache, and the sequences that are open in it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        policy = rng.choice(["lru", "lfu"])
        config = CacheConfig(48, 2, policy=policy, default_tenant=Tenant("d", max_pinned_blocks=8))
        self.cache = PrefixCache(
            config, clock=ManualClock()
        )  # without maintenance: a thread cannot start without memory
        self.open: list[Sequence] = []

    def step(self) -> None:
        """Make one random call."""
        calls: list[Callable[[], Any]] = [self._open, self._open, self._lease, self._forget, self._insert]
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
                lambda: self._reserve(one),
            ]
        try:
            self.rng.choice(calls)()
        except CapacityError:
            if self.open:
                self._end(self.open[0])

    def _open(self) -> None:
        ids = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 14))]
        lookup = self.rng.randrange(4) > 0
        self.open.append(self.cache.open(self.rng.choice(NAMESPACES), ids, lookup=lookup))

    def _lease(self) -> None:
        with self.cache.lease(self.cache.match(NAMESPACES[0], [1, 0, 1, 0])):
            self.cache.evict(2)
        with self.cache.match_and_lease(NAMESPACES[0], [0, 1, 0, 1]):
            self.cache.touch(NAMESPACES[0], [0, 1])

    def _insert(self) -> None:
        """Insert blocks; those that are resident already are left over."""
        ids = [self.rng.randrange(2) for _ in range(self.rng.randrange(2, 9) // 2 * 2)]
        done = self.cache.insert(
            NAMESPACES[0], ids, self.cache.allocate(len(ids) // 2), lease=self.rng.randrange(2) > 0
        )
        self.cache.free(done.surplus)
        if done.lease is not None:
            done.lease.release()

    def _reserve(self, sequence: Sequence) -> None:
        """Make room, use some of it, and drop the rest."""
        sequence.reserve(self.rng.randrange(6))
        sequence.fill([1] * (sequence.num_reserved_tokens // 2))
        if self.rng.randrange(2):
            sequence.drop()

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

    def close(self) -> None:
        """Nothing is left to check at the end."""

    def only_open(self) -> None:
        """Drop the sequences that are closed."""
        self.open = [sequence for sequence in self.open if sequence.is_open]


class EngineLife(Life):
    """A cache whose blocks the engine owns."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        config = CacheConfig(24, 2, policy=rng.choice(["lru", "lfu"]), blocks="engine")
        self.cache = PrefixCache(config, clock=ManualClock())
        self.open: list[Sequence] = []

    def step(self) -> None:
        """Make one random call."""
        calls: list[Callable[[], Any]] = [self._insert, self._insert, self._reclaim, self._use, self._forget]
        self.rng.choice(calls)()

    def _insert(self) -> None:
        """Insert blocks that the engine has. After an interruption, the cache says which these are."""
        mine = self.cache._pool.lent.ids().tolist()
        ids = [self.rng.randrange(2) for _ in range(self.rng.randrange(2, 9) // 2 * 2)]
        if len(mine) >= len(ids) // 2:
            leases = self.rng.randrange(2) > 0
            done = self.cache.insert(self.rng.choice(NAMESPACES), ids, mine[: len(ids) // 2], lease=leases)
            if done.lease is not None:
                done.lease.release()

    def _reclaim(self) -> None:
        self.cache.reclaim(self.rng.randrange(8), self.rng.choice([None, "a", "new"]))

    def _use(self) -> None:
        with self.cache.match_and_lease(NAMESPACES[0], [1, 0, 1, 0]):
            self.cache.touch(NAMESPACES[1], [0, 1, 1, 0])

    def close(self) -> None:
        """The engine gets every block back: none was lost."""
        for pin in self.cache.pins():
            self.cache.unpin(pin)
        gc.collect()
        self.cache.reclaim(24)
        assert self.cache.stats().lent_blocks == 24, self.cache.stats()


def _without_memory(life: Life, start: int, window: int) -> bool:
    """Make one call while memory runs out. Return whether it raised MemoryError."""
    gc.disable()  # a collection may allocate at any time
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
    """The outcome of one life: "none" if memory sufficed, otherwise "alive" or "dead"."""
    life = (EngineLife if seed % 4 == 3 else Life)(random.Random(seed))
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
        assert life.cache.is_broken, "a law is broken, but the cache still accepts calls"
        return "dead"
    for _ in range(12):
        life.only_open()
        with contextlib.suppress(LeaseError):
            life.step()
    audit.check(life.cache)
    life.close()
    return "alive"


def main(window: int, num_lives: int) -> None:
    """Run ``num_lives`` lives and print how often each outcome occurred."""
    warnings.simplefilter("ignore", ResourceWarning)  # sequences that a failed call left to their finaliser
    sys.unraisablehook = lambda _: None  # the finaliser may fail for lack of memory too
    print(json.dumps(Counter(lived(seed, window) for seed in range(num_lives))))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
