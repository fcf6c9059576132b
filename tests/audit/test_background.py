"""The audit in the background: its rounds, its budget, its findings and its end."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from radixkv import ArgumentError, CacheConfig, IntegrityError, Namespace, PrefixCache, audit
from radixkv.audit import Report, Watch, invariants
from tests.waiting import eventually

NS = Namespace("a", "m")


def filled(num_nodes: int) -> PrefixCache:
    cache = PrefixCache(CacheConfig(num_blocks=num_nodes + 8, block_size=1))
    for at in range(num_nodes):
        with cache.open(NS, [at, 7]) as sequence:
            sequence.commit(1)
    return cache


def test_a_watch_audits_a_live_cache_repeatedly() -> None:
    cache = filled(50)
    with Watch(cache, budget=1.0, every_s=0.0) as watch:
        for at in range(300):
            with cache.open(NS, [1000 + at, 7]) as sequence:
                sequence.commit(1)
        eventually(lambda: watch.num_rounds >= 3)
        watch.check()
    assert watch.report is not None and watch.report.ok and watch.report.counts["nodes"] > 0


class Rests(threading.Event):
    """The event that ends a watch. It records the timeouts of its waits."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.asked_s.append(timeout)
        return super().wait(timeout)


def test_a_watch_rests_between_slices_to_keep_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are many slices, and after each one the watch rests (1 / budget − 1) times the slice's duration.

    This holds at any speed of the machine. Only the last rest may be cut short by the end of the watch.
    """
    monkeypatch.setattr(invariants, "SLICE", 10)
    slices: list[None] = []
    cache = filled(200)
    assert audit.inspect(cache, lambda: slices.append(None)).ok
    assert len(slices) >= 4 * 200 // 10
    watch = Watch(cache, budget=0.4, every_s=0.0)
    watch._stopping = rests = Rests()
    with watch:
        eventually(lambda: watch.num_rounds >= 2)
    assert sum(rests.asked_s) == pytest.approx(1.5 * watch.busy_s) and watch.busy_s > 0
    assert watch.asleep_s >= 0.99 * sum(rests.asked_s[:-1])


def test_the_work_is_linear_in_the_nodes() -> None:
    """The work is counted in slices, not in seconds."""

    def slices(num_nodes: int) -> int:
        found: list[None] = []
        audit.inspect(filled(num_nodes), lambda: found.append(None))
        return len(found)

    small, large = slices(1024), slices(4096)
    assert small > 0 and 3 * small < large <= 4 * small


class Broken:
    """A cache that seems to have lost one of its blocks."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    def snapshot(self) -> Any:
        found = self.cache.snapshot()
        return replace(found, free_ids=found.free_ids[1:])


def test_a_broken_law_is_reported_once_and_raised() -> None:
    told: list[Report] = []
    with Watch(Broken(filled(10)), every_s=0.0, on_broken=told.append) as watch:
        eventually(lambda: told)
    assert len(told) == 1 and told[0].violations[0].law == "conservation"
    with pytest.raises(IntegrityError, match="conservation"):
        watch.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["snapshot", "on_broken"])
def test_a_failed_round_is_reported_as_failed(where: str) -> None:
    """``check`` raises the error, and Python reports the end of the thread too."""

    class Failing(Broken):
        def snapshot(self) -> Any:
            if where == "snapshot":
                raise MemoryError(where)
            return super().snapshot()

    def fail(report: Report) -> None:
        raise MemoryError(where)

    with Watch(Failing(filled(10)), every_s=0.0, on_broken=fail) as watch:
        eventually(lambda: watch.failure)
    with pytest.raises(MemoryError, match=where):
        watch.check()


def test_a_tiny_budget_is_kept() -> None:
    with Watch(filled(2000), budget=5e-324) as watch:
        eventually(lambda: watch.busy_s)
    watch.check()


def test_a_watch_can_stop_in_the_middle_of_a_round() -> None:
    watch = Watch(filled(2000), budget=1e-6, every_s=1000.0)
    others = set(threading.enumerate())
    watch.start()
    (its,) = [each for each in set(threading.enumerate()) - others if each.name == "radixkv-audit"]
    watch.stop()
    assert not its.is_alive()
    watch.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": 0},
        {"budget": 1.5},
        {"budget": "half"},
        {"every_s": -1},
        {"every_s": float("nan")},
        {"every_s": float("inf")},
        {"every_s": "often"},
    ],
)
def test_invalid_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError):
        Watch(filled(1), **wrong)
