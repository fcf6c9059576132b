"""Learned: the worst leaf goes, what returns is learned and kept, and what is kept of it is bounded."""

from __future__ import annotations

import numpy as np

from radixkv.clock import ManualClock
from radixkv_policies import Learned
from radixkv_policies.hazard import EDGES_S, MAX_ROWS, NUM_BINS, NUM_FEATURES, HazardModel
from radixkv_policies.leaves import MIN_GHOSTS
from tests.policies.contract import HINTS


def test_the_lowest_rank_goes_first() -> None:
    """Few leaves are all looked at."""
    clock = ManualClock()
    policy = Learned(64, clock, 0)
    for node in range(40):
        clock.advance(0.7)
        hints = policy.opened([], node, HINTS[node % len(HINTS)])
        policy.inserted(node, 1 + node % 5 * 30, 1 + node % 5 * 30, hints, [node])
        policy.unleased(node)
    rank = policy.rank[:] = np.random.default_rng(3).random(policy.rank.shape)
    clock.advance(3.0)

    def worth(node: int) -> float:
        piece = policy.pieces(node)[-1]
        age = int(np.searchsorted(EDGES_S, clock.now - piece.ended_s, "right")) - 1
        return float(rank[piece.group, age])

    assert policy.victim() == min(range(40), key=worth)


def test_hits_and_survivors_are_counted_together() -> None:
    """Ten uses, four of which return after 3 s: no bin counts before it has passed, then all ten are in it."""
    model = HazardModel()
    group = model.add_class([0.0] * NUM_FEATURES)
    for number in range(10):
        model.log.append((number, 0.0, group, 1.0))
    for number in range(4):
        model.log.append((number, 3.0, -1, 1.0))
    hit = int(np.searchsorted(EDGES_S, 3.0, "right")) - 1
    model.update(3.0, fit=False)
    assert model.at_risk[group, hit] == 0 and model.at_risk[group, :hit].tolist() == [10.0] * hit
    model.update(100.0, fit=False)
    assert model.at_risk[group, hit] == 10 and model.returned[group, hit] == 4
    assert model.at_risk[group, hit + 1] == 6 and model.returned.sum() == 4


def test_a_class_that_returns_outranks_one_that_does_not() -> None:
    """After a while."""
    model = HazardModel()
    good = model.add_class([1.0] + [0.0] * (NUM_FEATURES - 1))
    bad = model.add_class([-1.0] + [0.0] * (NUM_FEATURES - 1))
    for number in range(4_000):
        model.log.append((number, float(number), (good, bad)[number % 2], 1.0))
        if number % 2 == 0:
            model.log.append((number, number + 0.9, -1, 1.0))
    model.update(6_000.0, fit=True)
    assert model.rank[good, 0] > 2 * model.rank[bad, 0]


def test_nothing_learned_is_lru() -> None:
    """The prior rank falls with age."""
    assert (np.diff(HazardModel().rank[0]) <= 0).all() and NUM_BINS == 25


def test_state_is_bounded() -> None:
    """However long the history."""
    clock = ManualClock()
    policy = Learned(8, clock, 0)
    for node in range(MIN_GHOSTS + 500):
        clock.advance(0.01)
        policy.inserted(node, 2, 2, None, [2 * node, 2 * node + 1])
        policy.unleased(node)
        policy.trimmed(node, 2)
        policy.removed(node)
    assert policy.num_ghosts == MIN_GHOSTS and len(policy) == 0
    policy.maintain()
    assert MAX_ROWS == 32_768
