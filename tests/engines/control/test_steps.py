"""Changes between two steps: at the same step on all ranks, which decide alike or stop."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, Tenant
from radixkv.clock import ManualClock, monotonic
from radixkv.engines.control.steps import EngineSteps, StepClock, SteppedCache, SteppedSalts
from radixkv.errors import ArgumentError, ControlError, IntegrityError, NotResident
from radixkv.signing import KeySet
from tests.waiting import LIMIT_S, ended, eventually

NS = Namespace("acme", "m")


class Rank:
    def __init__(self, clock: ManualClock) -> None:
        self.clock = StepClock()
        self.steps = EngineSteps(self.clock, clock)
        self.cache = SteppedCache(CacheConfig(8, 2, blocks="engine"), steps=self.steps, clock=self.clock)
        self.cache.insert(NS, [1, 2, 3, 4], [1, 2])


def asked(waits: EngineSteps, command: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a command in another thread, and return once it waits for a step."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(command())
        except Exception as error:  # noqa: BLE001 the test looks at it
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: waits._waiting, "a command waits for a step")
    return thread, answers


@pytest.fixture
def ranks() -> tuple[ManualClock, Rank, Rank]:
    clock = ManualClock()
    return clock, Rank(clock), Rank(ManualClock())


def stepped(first: Rank, second: Rank) -> None:
    step = first.steps.begin()
    first.steps.apply(step)
    second.steps.apply(pickle.loads(pickle.dumps(step)))


def test_a_purge_waits_for_the_next_step_of_all_ranks(ranks: tuple[ManualClock, Rank, Rank]) -> None:
    _, first, second = ranks
    thread, answers = asked(first.steps, lambda: first.cache.purge("acme"))
    assert answers == [] and first.cache.resident_blocks == second.cache.resident_blocks == 2
    stepped(first, second)
    ended(thread)
    assert answers == [2] and first.cache.resident_blocks == second.cache.resident_blocks == 0


def test_pins_end_at_the_same_step_by_rank_0s_clock(ranks: tuple[ManualClock, Rank, Rank]) -> None:
    clock, first, second = ranks
    thread, answers = asked(first.steps, lambda: first.cache.pin(NS, [1, 2], 5.0))
    stepped(first, second)
    ended(thread)
    assert answers[0].num_blocks == 1 and second.cache.pins() == first.cache.pins() != []
    clock.advance(6)
    assert len(first.cache.pins()) == 1, "no step told the time"
    stepped(first, second)
    assert first.cache.pins() == second.cache.pins() == []


def test_an_error_goes_to_who_asked(ranks: tuple[ManualClock, Rank, Rank]) -> None:
    _, first, second = ranks
    thread, answers = asked(first.steps, lambda: first.cache.pin(NS, [9, 9], 5.0))
    stepped(first, second)
    ended(thread)
    assert isinstance(answers[0], NotResident)


def test_the_engines_own_thread_does_not_wait(ranks: tuple[ManualClock, Rank, Rank]) -> None:
    _, first, _ = ranks
    assert first.cache.touch(NS, [1, 2, 3, 4]) == 4 and first.cache.clear(NS) == 2


def test_without_a_step_a_change_is_given_up(
    ranks: tuple[ManualClock, Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.engines.control.steps.WAIT_S", 0.01)
    _, first, second = ranks
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(first.cache.purge, "acme").exception(LIMIT_S)
    assert isinstance(error, ControlError)
    stepped(first, second)
    assert first.cache.resident_blocks == 2, "given up means: not made later"


def test_salts_change_at_a_step_too() -> None:
    steps = EngineSteps()
    salts = SteppedSalts(KeySet.derive([b"a secret of the fleet"]), steps)
    (name,) = salts.tenant_ids("acme")
    thread, answers = asked(steps, lambda: salts.raise_generation(name, 3))
    assert salts.generation(name) == 0
    steps.apply(steps.begin())
    ended(thread)
    assert answers == [3] and salts.generation(name) == 3


def test_no_tenant_is_guaranteed_pages() -> None:
    cache = SteppedCache(CacheConfig(8, 2, blocks="engine"), steps=EngineSteps(), clock=monotonic)
    with pytest.raises(ArgumentError, match="guaranteed_blocks"):
        cache.add_tenant(Tenant("acme", guaranteed_blocks=2))
    cache.add_tenant(Tenant("acme", max_blocks=2))


def test_a_rank_that_decided_otherwise_stops(ranks: tuple[ManualClock, Rank, Rank]) -> None:
    _, first, second = ranks
    second.steps.decisions = lambda: 7
    with pytest.raises(IntegrityError, match="decided otherwise than rank 0"):
        stepped(first, second)


def two_ranks(seed: int, how: str) -> list[dict[str, Any]]:
    """Return what the two processes say at their end. If the second one stops early, the first one may say nothing."""
    script, ends = Path(__file__).with_name("two_ranks.py"), os.pipe()
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(end), str(seed), how],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1)},
            pass_fds=[end],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if how == "differ" else None,
            text=True,
        )
        for rank, end in zip(range(2), reversed(ends), strict=True)
    ]
    for end in ends:
        os.close(end)
    told = [each.communicate(timeout=LIMIT_S)[0] for each in running]
    return [json.loads(each) for each in told if each]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.release)])
def test_two_processes_decide_alike_through_purges_pins_and_learning(seed: int) -> None:
    first, second = two_ranks(seed, "agree")
    assert {**first, "counts": None} == {**second, "counts": None}
    assert first["evicted"] > 500 and first["ended"] > 5 and first["resident"] > 0
    assert min(first["counts"][each] for each in ("pins", "purges", "limits")) > 5


@pytest.mark.slow
def test_a_process_that_decides_otherwise_stops_at_the_next_step() -> None:
    *_, found = two_ranks(3, "differ")
    assert "decided otherwise than rank 0" in found["error"] and found["number"] == 251
