"""MemoryErrors at any allocation, one or many, also while the cache is repaired: no call is done on a broken cache.

The lives are in ``lives_without_memory``. ``OOM_LIVES`` sets how many.
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
"""Of each kind."""

WINDOWS = (1, 2, 5, 20, 100, 1_000)
"""Allocations in a row that fail."""

NAMESPACES = [Namespace(tenant, "m") for tenant in "ab"]


@pytest.mark.pure
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", WINDOWS)
def test_memory_that_runs_out(window: int) -> None:
    """At most one in twenty ends in a dead cache; here none does."""
    command = [sys.executable, "-m", "tests.index.lives_without_memory", str(window), str(LIVES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    found = {"alive": 0, "dead": 0, **json.loads(done.stdout)}
    print(f"{window} allocations failed: {found}")
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


@pytest.mark.slow
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
