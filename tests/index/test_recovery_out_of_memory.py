"""MemoryErrors at any allocation, one or many, also during a repair. No call is done on a broken cache.

The lives are in ``lives_without_memory``. ``OOM_LIVES`` sets their number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from radixkv import CacheConfig, IntegrityError, Namespace, PrefixCache, Sequence, audit
from radixkv.index import recovery
from radixkv.index.recovery import MAX_FAILED_REPAIRS

pytest.importorskip("_testcapi")

LIVES = int(os.environ.get("OOM_LIVES", "60"))
"""The number of lives of each kind."""

WINDOWS = (1, 2, 5, 20, 100, 1_000)
"""The numbers of consecutive allocations that fail."""

NAMESPACES = [Namespace(tenant, "m") for tenant in "ab"]


@pytest.mark.pure
@pytest.mark.parametrize("window", WINDOWS)
def test_a_cache_survives_out_of_memory(window: int) -> None:
    """At most one life in twenty may end in a dead cache. In practice none does."""
    command = [sys.executable, "-m", "tests.index.lives_without_memory", str(window), str(LIVES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    found = {"alive": 0, "dead": 0, **json.loads(done.stdout)}
    print(f"{window} allocations failed: {found}")
    assert found["alive"] > LIVES // 4
    assert found["dead"] <= (found["alive"] + found["dead"]) // 20, found


class Fails:
    """Replaces ``recovery._mend`` and fails the first ``times`` times."""

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
    """A cache, a sequence with an interrupted commit, and a bystander. The repair fails ``times`` times."""
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


def test_the_next_call_repairs_a_cache_after_a_failed_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call repairs the cache before it does anything else."""
    cache, one, other, fails = _interrupted(monkeypatch, recovery.ATTEMPTS + 1)
    assert cache.is_broken and not cache.is_dead
    assert cache.stats().num_sequences == 1 and not cache.is_broken and not fails.left
    assert not one.is_open
    other.commit(8)
    other.release()
    audit.check(cache)


def test_what_a_failed_repair_says_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache isn't dead before no call tries again, and the message doesn't say so."""
    cache, *_ = _interrupted(monkeypatch, 1_000_000)
    for left in range(MAX_FAILED_REPAIRS - 1, 0, -1):
        with pytest.raises(IntegrityError, match=rf"the next call tries again. After {left} more"):
            cache.stats()
        assert cache.is_broken and not cache.is_dead
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"the cache is dead: .* every call fails"):
            cache.stats()
        assert cache.is_dead


@pytest.mark.slow
def test_a_dead_cache_refuses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call raises IntegrityError and says what to do. Leaving a ``with`` block does not hide another error."""
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
