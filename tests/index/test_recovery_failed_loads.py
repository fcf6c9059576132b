"""An exception between any two steps of ``PrefixCache.forget``. See ``test_recovery``."""

from __future__ import annotations

import pytest

from tests.index.test_recovery import BASIC, ZEROS, A, Call, Plan, Run, Scenario, World, _holds, _steps

IDS = (2, *ZEROS[:7])
"""Four whole blocks that no bystander of the world has."""


def _wrong(world: World) -> Run:
    """A sequence that committed ids, of which some KV are wrong, and what was computed behind them."""
    run = world.open(A, IDS)
    world.commit(run, len(IDS))
    world.serve(A, (*IDS, 1, 1, 1))
    world.serve(A, (*IDS[:4], 1, 1))
    return run


def _forget(world: World, run: Run, from_token: int) -> Call:
    def keep(_: object) -> None:
        run.sequence.commit(len(run.ids))
        run.sequence.release()

    return Call(lambda: world.cache.forget(run.sequence, from_token), [run], keep)


def _alone(world: World) -> Call:
    return _forget(world, _wrong(world), 3)


def _everything(world: World) -> Call:
    return _forget(world, _wrong(world), 0)


def _shared(world: World) -> Call:
    """Others hold the blocks too: a request, a fork, a lease. They notice nothing."""
    run = _wrong(world)
    world.open(A, (*IDS, 2, 2))
    (child,) = run.sequence.fork(1)
    world.add(child, run.ids)
    lease = world.cache.lease(world.cache.match(A, IDS))
    call = _forget(world, run, 5)
    call.after = lease.release
    return call


def _pinned(world: World) -> Call:
    run = _wrong(world)
    world.cache.pin(A, IDS, 60.0)
    return _forget(world, run, 2)


def _the_second(world: World) -> Call:
    """Another sequence forgot before, and less."""
    first = _wrong(world)
    second = world.open(A, (*IDS, 2, 2))
    world.open(A, (*IDS, 1, 2))
    world.cache.forget(first.sequence, 5)
    first.sequence.release()
    world.runs.remove(first)
    return _forget(world, second, 3)


CALLS: dict[str, Scenario] = {
    "forget alone": _alone,
    "forget everything": _everything,
    "forget what others hold": _shared,
    "forget what is pinned": _pinned,
    "forget after another": _the_second,
}


PLAN = Plan(CALLS, after=BASIC)


@pytest.mark.pure
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_between_any_two_steps(name: str) -> None:
    for at, (world, _, stepper) in enumerate(_steps(PLAN, name, "lru")):
        _holds(world, stepper, goes_on=at % 8 == 0 or stepper.where == "")
    assert stepper.where == "" and stepper.num_steps > 20
