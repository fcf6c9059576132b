"""The state machine over the whole library: random lives of up to 50 calls find nothing."""

from __future__ import annotations

import pytest

from radixkv import PrefixCache
from radixkv.audit import properties
from radixkv.index import holders, purge, requests, tree
from radixkv_policies import POLICIES
from tests.index.support import Declining
from tests.isolation.lives import EXAMPLES, SEED, reach_all
from tests.isolation.reached import Reached

PARTS = 10


class EngineMachine(properties.EngineMachine):
    """Also with a policy that gives up blocks."""

    declining = Declining


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_lives_find_nothing(part: int) -> None:
    """Every policy, with storage and without, in parts that several workers share.

    In the last two parts the engine owns the blocks.
    """
    policies, stored = tuple(POLICIES)[part % 4 :: 4], part // 4 == 1
    machine = properties.CacheMachine if part < 8 else EngineMachine
    if part >= 8:
        policies = tuple(POLICIES)[part % 2 :: 2]
    report = properties.run(
        PrefixCache,
        max_examples=-(-EXAMPLES // PARTS),
        steps=50,
        seed=SEED * PARTS + part,
        policies=policies,
        with_storage=[stored],
        machine=machine,
    )
    assert report.ok, report.failure
    assert report.examples >= EXAMPLES // PARTS


@pytest.mark.slow
@pytest.mark.pure
@pytest.mark.parametrize("label_bytes, grown_bytes", [(16, 24), (8, 0)])
def test_random_lives_at_the_limits_find_nothing(
    label_bytes: int, grown_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are so small that tiny caches reach them: labels of several nodes, slices of one, folded tails."""
    monkeypatch.setattr(tree, "MAX_LABEL_BYTES", label_bytes)
    monkeypatch.setattr(tree, "MAX_GROWN_LABEL_BYTES", grown_bytes)
    monkeypatch.setattr(holders, "MAX_COPIED_TAIL_BYTES", 8)
    monkeypatch.setattr(purge, "SLICE_NODES", 1)
    monkeypatch.setattr(requests, "SLICE_BLOCKS", 1)
    for machine, num_lives in ((properties.CacheMachine, 180), (EngineMachine, 40)):
        report = properties.run(PrefixCache, num_lives, 50, seed=SEED, machine=machine)
        assert report.ok, report.failure


@pytest.mark.slow
def test_equal_arguments_give_equal_runs() -> None:
    """A seed determines a run."""
    first, second = (properties.run(PrefixCache, 8, 20, seed=7) for _ in range(2))
    assert (first.examples, first.steps, first.failure) == (second.examples, second.steps, None)


def test_progress_is_reported() -> None:
    """The callback is called once for each example, with an increasing count."""
    told: list[int] = []
    report = properties.run(PrefixCache, 10, 5, with_storage=[False], progress=told.append)
    assert told == list(range(1, report.examples + 1)) and len(told) >= 10


@pytest.mark.slow
def test_lives_reach_all_states() -> None:
    """Each state in which an error could show occurs."""
    reach_all(Reached, (2, 9))
    assert len(Reached.seen) == 22
