"""An exception between any two steps of the calls of ``tails``. See ``test_recovery``."""

from __future__ import annotations

import pytest

from radixkv.index import tails
from radixkv.index.tokens import encode
from tests.index.test_recovery import BASIC, ZEROS, A, Call, Plan, Run, Scenario, World, _holds, _steps

IDS = (2, *ZEROS[:6])
"""Three whole blocks that no bystander of the world has, and a tail."""


def _computed(world: World) -> Run:
    run = world.open(A, IDS)
    world.commit(run, len(IDS))
    return run


def _keep(world: World) -> Call:
    """A request ends, and leaves its tail."""
    run = _computed(world)
    return Call(lambda: tails.keep(world.cache, run.sequence), [run], lambda _: run.sequence.release())


def _keep_beside_one(world: World) -> Call:
    """The same tail is there already."""
    first = _computed(world)
    assert tails.keep(world.cache, first.sequence)
    first.sequence.release()
    world.runs.remove(first)
    return _keep(world)


def _drop(world: World) -> Call:
    run = _computed(world)
    assert tails.keep(world.cache, run.sequence)
    run.sequence.release()
    world.runs.remove(run)
    found = tails.find(world.cache, A, encode([*IDS, 1]), with_rows=True)
    assert (found.num_tokens, found.num_rows) == (6, 1)
    key = encode(IDS[:6]) + found.tail_key

    def dropped(was_freed: object) -> None:
        assert was_freed is True
        assert tails.find(world.cache, A, encode([*IDS, 1]), with_rows=True).num_rows == 0

    return Call(lambda: tails.drop(world.cache, A, key), keep=dropped)


CALLS: dict[str, Scenario] = {
    "keep a tail": _keep,
    "keep a tail that is there": _keep_beside_one,
    "drop a tail": _drop,
}


PLAN = Plan(CALLS, after=BASIC)


@pytest.mark.pure
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_between_any_two_steps(name: str) -> None:
    for at, (world, _, stepper) in enumerate(_steps(PLAN, name, "lru")):
        _holds(world, stepper, goes_on=at % 8 == 0 or stepper.where == "")
    assert stepper.where == "" and stepper.num_steps > 20


def test_a_tail_is_found_only_where_its_ids_continue() -> None:
    world = World("lru")
    run = _computed(world)
    assert tails.keep(world.cache, run.sequence)
    run.sequence.release()
    world.runs.remove(run)
    world.check()
    assert world.cache.match(A, IDS).num_tokens == 6, "a match has whole blocks only"
    for ids, rows in (([*IDS, 1], 1), ([*IDS[:6], 5, 1], 0), ([*IDS], 0), ([*IDS[:6]], 1)):
        found = tails.find(world.cache, A, encode(ids), with_rows=True)
        assert found.num_rows == rows and found.num_tokens + rows < len(ids), ids
    world.go_on()
