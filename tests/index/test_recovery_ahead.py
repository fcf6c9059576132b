"""An exception between any two steps of a call that computes ahead, or waits for a fence. See ``test_recovery``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv import Fence, Sequence
from tests.index.test_recovery import (
    BASIC,
    BLOCK_SIZE,
    ZEROS,
    A,
    Call,
    Plan,
    Run,
    Scenario,
    World,
    _holds,
    _steps,
)

IDS = (2, *ZEROS[:6], 1)
"""Four whole blocks that are not resident."""


class AheadWorld(World):
    """The world, whose steps end well before its sequences go on. Their KV were written when they began."""

    def go_on(self) -> None:
        """End the steps first."""
        for step in (1, 2):
            self.cache.step_done(step)
        super().go_on()


def _burst(world: World) -> tuple[Run, list[Run]]:
    """A sequence that a step computes, and two that lean on it; one of them computes too."""
    owner = world.open(A, IDS)
    owner.sequence.computing(len(IDS), step=1)
    leaning = [_lean(world) for _ in range(2)]
    leaning[0].sequence.computing(len(IDS), step=2)
    world.oracle.commit(A, IDS, len(IDS))
    return owner, leaning


def _lean(world: World) -> Run:
    run = world.add(world.cache.open(A, IDS, ahead=True), list(IDS))
    assert run.sequence.num_ahead_tokens == len(IDS) - BLOCK_SIZE
    world.write(run, run.sequence.num_ahead_tokens)
    return run


def _release(*runs: Run) -> None:
    for run in runs:
        run.sequence.release()


def _open_ahead(world: World) -> Call:
    owner = world.open(A, IDS)
    owner.sequence.computing(len(IDS), step=1)
    return Call(
        lambda: world.cache.open(A, (*IDS, 2, 2), ahead=True), keep=lambda sequence: sequence.release()
    )


def _computing(world: World) -> Call:
    owner = world.open(A, IDS)
    owner.sequence.computing(5, step=1)
    return Call(lambda: owner.sequence.computing(8, step=2), [owner], keep=lambda _: owner.sequence.release())


def _step_done(world: World) -> Call:
    owner, leaning = _burst(world)
    return Call(lambda: world.cache.step_done(1), [owner, *leaning], keep=lambda _: _release(owner, *leaning))


def _step_failed(world: World) -> Call:
    owner, leaning = _burst(world)
    return Call(
        lambda: world.cache.step_failed(1), [owner, *leaning], keep=lambda _: _release(owner, *leaning)
    )


def _on_the_owner(call: Callable[[Sequence], Callable[[], Any]]) -> Scenario:
    """A call on the sequence that others lean on. They notice nothing."""

    def scenario(world: World) -> Call:
        owner, _ = _burst(world)

        def keep(result: Any) -> None:
            for sequence in result or ():
                sequence.release()
            if owner.sequence.is_open:
                owner.sequence.release()

        return Call(call(owner.sequence), [owner], keep)

    return scenario


def _release_after(world: World) -> Call:
    """The fence is lifted whether the call was interrupted or not: no block is lost."""
    run, fence = world.open(A, (2, 2, *ZEROS[:5])), Fence()
    return Call(lambda: run.sequence.release(after=fence), [run], after=fence.lift)


def _lift(world: World) -> Call:
    """What an interrupted lift leaves is released by the next call, or by the next lift."""
    fence = Fence()
    for ids in ((2, 2, *ZEROS[:5]), IDS):
        run = world.open(A, ids)
        run.sequence.release(after=fence)
        world.runs.remove(run)
    return Call(fence.lift, after=fence.lift)


CALLS: dict[str, Scenario] = {
    "open ahead": _open_ahead,
    "computing": _computing,
    "step done": _step_done,
    "step failed": _step_failed,
    "release whom others lean on": _on_the_owner(lambda sequence: sequence.release),
    "truncate whom others lean on": _on_the_owner(lambda sequence: lambda: sequence.truncate(5)),
    "extend whom others lean on": _on_the_owner(lambda sequence: lambda: sequence.extend([1, 2, 2])),
    "fork what a step computes": _on_the_owner(lambda sequence: lambda: sequence.fork(2)),
    "release after a fence": _release_after,
    "lift a fence": _lift,
}


PLAN = Plan(CALLS, make=AheadWorld, after=BASIC)


@pytest.mark.pure
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_between_any_two_steps(name: str) -> None:
    for at, (world, _, stepper) in enumerate(_steps(PLAN, name, "lru")):
        _holds(world, stepper, goes_on=at % 8 == 0 or stepper.where == "")
    assert stepper.where == "" and stepper.num_steps > 5
