"""Learned: the worst leaf is evicted, classes that return are learned and kept, and the state is bounded."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.clock import ManualClock
from radixkv_policies import Learned, RequestHints
from radixkv_policies.hazard import (
    EDGES_S,
    MAX_ROWS,
    NUM_BINS,
    NUM_FEATURES,
    Floats,
    HazardModel,
    Standing,
    _Rows,
    _solved,
)
from radixkv_policies.learned import LEARNED_GHOSTS, MAX_SESSIONS, Leaves
from radixkv_policies.policy import Handle


class PlainLeaves:
    """``Leaves`` in plain form: the worth of each leaf at its arrival or at the last full ranking, and the smallest
    worth.
    """

    def __init__(self, rank: Floats) -> None:
        self.rank = rank
        self.leaves: dict[Handle, tuple[float, float, int]] = {}
        self.classes: dict[Handle, int] = {}
        self.serial = 0

    def add(self, node: Handle, group: int, ended_s: float, now_s: float) -> None:
        """The leaf has its class's worth from the bin of its age on."""
        age = max(i for i, edge in enumerate(EDGES_S) if edge <= now_s - ended_s)
        self.serial += 1
        self.leaves[node] = float(self.rank[group, age]), ended_s, self.serial
        self.classes[node] = group

    def rank_anew(self, now_s: float, rank: Floats) -> None:
        """Each leaf has its class's worth at its age, interpolated between two bins."""
        self.rank = rank
        for node, (_, ended_s, serial) in self.leaves.items():
            row = np.interp(now_s - ended_s, EDGES_S, rank[self.classes[node]])
            self.leaves[node] = float(row), ended_s, serial

    def first(self) -> Handle | None:
        """The leaf with the smallest worth. Among equals the oldest."""
        return min(self.leaves, key=self.leaves.__getitem__, default=None)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 3)), max_size=150))
def test_the_leaf_with_the_smallest_worth_is_evicted_first(ops: list[tuple[int, int, int]]) -> None:
    """This holds for any additions, removals and rankings, also if leaves come during a ranking."""
    ranks = np.random.default_rng(3).integers(0, 6, (4, 4, NUM_BINS + 1)).astype(np.float64)
    leaves, plain = Leaves(ranks[0]), PlainLeaves(ranks[0])
    now_s = 10.0
    for kind, node, group in ops:
        now_s += kind / 3
        if node in plain.leaves:
            leaves.discard(node)
            del plain.leaves[node]
        elif kind == 9:
            leaves.rank_anew(now_s, ranks[group])
            plain.rank_anew(now_s, ranks[group])
        else:
            leaves.add(node, group, now_s - kind % 4, now_s)
            plain.add(node, group, now_s - kind % 4, now_s)
        assert len(leaves) == len(plain.leaves)
        found, expected = leaves.first(), plain.first()
        assert (found is None) == (expected is None)
        if found is not None:
            worth, ended_s, _ = plain.leaves[found]
            least = plain.leaves[expected]
            assert worth == pytest.approx(least[0]) and (worth != least[0] or ended_s == least[1])


def test_a_new_leaf_while_all_leaves_are_ranked() -> None:
    """A ranking by another thread is merged with leaves that came meanwhile, and without leaves that left."""
    rank = np.zeros((3, NUM_BINS + 1))
    rank[:, :] = [[3.0], [2.0], [1.0]]
    leaves = Leaves(rank)
    for node, group in ((0, 0), (1, 1), (2, 0)):
        leaves.add(node, group, 0.0, 0.0)
    leaves.rank_anew(1.0, rank)
    leaves.discard(1)
    leaves.add(3, 2, 1.0, 1.0)
    order = []
    while (node := leaves.first()) is not None:
        order.append(node)
        leaves.discard(node)
    assert order == [3, 0, 2]


def test_ranks_survive_a_rebuild_of_the_heap() -> None:
    """Leaves come and go until the heap is full of removed leaves. The leaf that stays keeps its last rank."""
    rank = np.zeros((2, NUM_BINS + 1))
    rank[:, :] = [[1.0], [2.0]]
    leaves = Leaves(rank)
    leaves.add("stays", 0, 0.0, 0.0)
    leaves.rank_anew(1.0, rank[::-1] * 2)  # worth 4 from now on
    assert leaves.first() == "stays"
    for node in range(200):
        leaves.add(node, 0, 1.0, 1.0)  # also worth 4, and younger
        leaves.discard(node)
    leaves.add("comes", 1, 1.0, 1.0)  # worth 2
    assert leaves.first() == "comes"


def test_hits_and_survivors_are_counted_together() -> None:
    """Ten uses, four of which return after 3 s. A bin counts nothing before it has passed; then it counts all ten."""
    model = HazardModel()
    group = model.add_class()
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


def test_a_use_that_changes_class_counts_for_the_new_class() -> None:
    """Ten uses change their class after 3 s. Bins that had passed stay counted for the old class."""
    model = HazardModel()
    before, after = model.add_class(), model.add_class()
    for number in range(10):
        model.log.append((number, 0.0, before, 1.0))
    passed = int(np.searchsorted(EDGES_S, 3.0, "right")) - 1
    model.update(3.0, fit=False)
    for number in range(10):
        model.log.append((number, 3.0, after, 0.0))
    model.log.append((0, 4.0, -1, 1.0))
    model.log.append((99, 4.0, before, 0.0))  # an unknown use
    model.update(100.0, fit=False)
    assert model.at_risk[before, :passed].tolist() == [10.0] * passed
    assert model.at_risk[before, passed:].sum() == model.at_risk[after, :passed].sum() == 0
    assert model.at_risk[after, passed] == 10 and model.returned[after].sum() == 1


def test_a_returning_class_outranks_one_that_does_not_return() -> None:
    """The difference appears after enough uses."""
    model = HazardModel()
    good, bad = model.add_class(), model.add_class()
    model.describe(good, [1.0] + [0.0] * (NUM_FEATURES - 1))
    model.describe(bad, [-1.0] + [0.0] * (NUM_FEATURES - 1))
    for number in range(4_000):
        model.log.append((number, float(number), (good, bad)[number % 2], 1.0))
        if number % 2 == 0:
            model.log.append((number, number + 0.9, -1, 1.0))
    model.update(6_000.0, fit=True)
    assert model.rank[good, 0] > 2 * model.rank[bad, 0]


def test_a_new_class_is_ranked_before_the_next_fit() -> None:
    """At first it has the common rank. From the next update on its features decide. Other classes keep their ranks."""
    model = HazardModel()
    good, bad = model.add_class(), model.add_class()
    like_good = [1.0] + [0.0] * (NUM_FEATURES - 1)
    model.describe(good, like_good)
    model.describe(bad, [-1.0] + [0.0] * (NUM_FEATURES - 1))
    for number in range(4_000):
        model.log.append((number, float(number), (good, bad)[number % 2], 1.0))
        if number % 2 == 0:
            model.log.append((number, number + 0.9, -1, 1.0))
    for _ in range(20):
        model.update(6_000.0, fit=True)
    fresh, before = model.add_class(), model.rank
    assert 1.1 * before[bad, 0] < before[fresh, 0] < before[good, 0] / 1.1
    model.describe(fresh, like_good)
    model.update(6_001.0, fit=False)
    assert model.rank[fresh, 0] > 1.1 * before[fresh, 0]
    np.testing.assert_array_equal(model.rank[[good, bad]], before[[good, bad]])


def test_the_model_converges_from_far_away() -> None:
    """Much evidence for classes that almost never or almost always return: the model converges to the counts."""
    rng = np.random.default_rng(1)
    model = HazardModel()
    groups = [model.add_class() for _ in range(20)]
    for group in groups:
        model.describe(group, rng.uniform(-1, 1, NUM_FEATURES).round().tolist())
    model.at_risk[groups] = rng.uniform(0, 1e4, (20, NUM_BINS))
    model.returned[groups] = model.at_risk[groups] * rng.choice([0.001, 0.9], 20)[:, None]
    for _ in range(40):
        model.update(0.0, fit=True)
    misplaced = np.abs(model.at_risk * model._modelled(model._features) - model.returned).sum()
    assert misplaced < 0.01 * model.at_risk.sum()


def test_an_unreached_age_is_judged_by_earlier_ages() -> None:
    """Nothing returns within a minute.

    Leaves older than any returned one then have a small part of their first worth.
    """
    model = HazardModel()
    group = model.add_class()
    model.describe(group, [0.0] * NUM_FEATURES)
    minute = int(np.searchsorted(EDGES_S, 60.0))
    model.at_risk[group, :minute] = 20_000.0
    for _ in range(20):
        model.update(0.0, fit=True)
    ranks, at_first = model.rank[group, minute:-1], HazardModel().rank[0, minute:-1]
    assert (ranks < 0.1 * at_first).all()


def test_the_solver_matches_lapack() -> None:
    """The result equals LAPACK's. LAPACK would use all cores for it."""
    rng = np.random.default_rng(2)
    for size in (1, 2, 115):
        some = rng.normal(size=(size, 2 * size))
        curve, slope = some @ some.T + np.eye(size), rng.normal(size=size)
        np.testing.assert_allclose(
            _solved(curve, slope), np.linalg.solve(curve, slope), rtol=1e-9, atol=1e-12
        )


def test_the_prior_order_is_lru() -> None:
    """The prior rank falls with age."""
    assert (np.diff(HazardModel().rank[0]) <= 0).all() and NUM_BINS == 25


def _ahead(rows: _Rows, number: int, at_s: float, weight: float) -> float:
    """A use returns. The result is how much more of it the learned shadow held than the LRU shadow."""
    before = rows._standing._ahead
    rows.take((number, at_s, -1, weight))
    return rows._standing._ahead - before


@given(st.lists(st.integers(0, 9), max_size=300), st.integers(1, 8))
def test_the_shadow_of_lru_holds_what_an_lru_would(asks: list[int], room: int) -> None:
    """Random requests for ten things of one segment each. The other shadow drops nothing."""
    rows = _Rows(Standing())
    rows.room = room
    uses: dict[int, int] = {}
    lru: OrderedDict[int, None] = OrderedDict()
    for number, ask in enumerate(asks):
        if ask in uses:
            assert _ahead(rows, uses[ask], number, 1.0) == float(ask not in lru)
        lru[ask] = None
        lru.move_to_end(ask)
        if len(lru) > room:
            lru.popitem(last=False)
        uses[ask] = number
        rows.take((number, float(number), 0, 1.0))


def test_the_shadow_of_lru_drops_part_of_its_oldest_use() -> None:
    """Ten segments ended together, and five of them still fit. Exactly those five return as hits."""
    rows = _Rows(Standing())
    rows.room = 10.0
    rows.take((0, 0.0, 0, 10.0))
    rows.take((1, 1.0, 0, 5.0))
    assert [_ahead(rows, 0, 2.0, weight) for weight in (3.0, 7.0)] == [0.0, 5.0]
    rows.take((2, 2.0, 0, 10.0))
    assert [_ahead(rows, number, 3.0, 10.0) for number in (1, 2)] == [5.0, 0.0]


def test_a_request_larger_than_the_shadow_of_lru() -> None:
    """It ends in three parts. The shadow holds no part twice, and its size stays right."""
    rows = _Rows(Standing())
    rows.room = 10.0
    for _ in range(3):
        rows.take((0, 0.0, 0, 8.0))
    assert rows._held == 10.0 and _ahead(rows, 0, 1.0, 24.0) == 14.0
    assert rows._held == 0.0


def test_the_learned_shadow_keeps_the_highest_ranks() -> None:
    """This is independent of the time of the last use. Among equals the last one stays."""
    rows = _Rows(Standing())
    for number in range(6):
        rows.take((number, float(number), number % 2, 1.0))
    rank = np.zeros((2, NUM_BINS + 1))
    rank[1] = 1.0
    rows.room = 2.0
    rows.drop(6.0, rank)
    assert [_ahead(rows, number, 7.0, 1.0) for number in range(6)] == [-1.0, -1.0, -1.0, 0.0, -1.0, 0.0]


def test_uses_dropped_by_the_ring_are_in_no_shadow() -> None:
    """There are more uses than the ring can hold."""
    rows = _Rows(Standing())
    for number in range(MAX_ROWS + 100):
        rows.take((number, float(number), 0, 1.0))
    assert rows._held == rows._num_rows == MAX_ROWS
    rows._kept[:] = False
    assert [_ahead(rows, number, 1e6, 1.0) for number in (99, 100)] == [0.0, -1.0]


def _standing(nets: list[float], between_s: float = 1.0) -> Standing:
    standing = Standing()
    for number, net in enumerate(nets):
        standing.used(1_000.0)
        standing.returned(between_s * number, max(net, 0.0), max(-net, 0.0))
        standing.decide(between_s * number)
    return standing


def test_lru_leads_once_it_hits_more() -> None:
    """LRU takes the lead after a clear loss, and loses it after clear gains of the learned order."""
    assert _standing([]).leads and _standing([-1.0] * 10).leads, "within the allowance"
    assert _standing([-200.0]).leads, "one request, of any length, is no evidence"
    assert _standing([-200.0, -150.0]).leads is False
    assert _standing([-200.0, -150.0, 500.0]).leads is False, "one request, of any length, is no evidence"
    assert _standing([-200.0, -150.0, *[50.0] * 12]).leads is False, "not enough evidence"
    assert _standing([-200.0, -150.0, *[50.0] * 18]).leads
    assert _standing([50.0] * 12 + [-20.0] * 60).leads is False


def test_hits_at_one_time_count_as_one_chance() -> None:
    """Parts of one request count once. As many separate requests count each."""
    for between_s, leads in ((0.0, False), (1e-3, True)):
        standing = Standing()
        standing.leads = False
        for number in range(9):
            standing.returned(1.0 + between_s * number, 0.0, 1.0)
        for number in range(18):
            standing.returned(2.0 + between_s * number, 1.0, 0.0)
        standing.decide(2.0)
        assert standing.leads is leads


def test_ranks_equal_lru_while_lru_leads() -> None:
    """After that it uses its own ranks again. Within ``auto``, which makes its own decision, it always does."""
    clock = ManualClock()
    policy = Learned(1_000, clock, 0)
    for node in ("a", "b", "c"):
        _asked(policy, clock, node, 5, {"type": node})
    policy.maintain()
    rank = np.ones_like(policy.rank)
    rank[policy.pieces("b")[-1].group] = 0.0
    policy._model.rank = rank
    for leads, yields, goes in ((False, True, "a"), (True, True, "b"), (False, False, "b")):
        policy.yields, policy._model.standing.leads = yields, leads
        clock.advance(1.0)
        policy.maintain()
        assert policy.victim() == goes


def _asked(
    policy: Learned, clock: ManualClock, node: str, depth: int, labels: dict[str, str | int | bool]
) -> None:
    """A request of ``depth`` blocks that matches nothing."""
    clock.advance(10.0)
    hints = policy.opened([], depth, RequestHints(labels=labels))
    policy.inserted(node, depth, depth, hints, range(100 * len(policy), 100 * len(policy) + depth))
    policy.unleased(node)


def test_a_session_that_continues_elsewhere_supersedes_its_last_request() -> None:
    """The last request gets another class. The last requests of other sessions keep theirs."""
    clock = ManualClock()
    policy = Learned(1_000, clock, 0)
    for node, session in (("a1", "a"), ("b1", "b")):
        _asked(policy, clock, node, 5, {"session": session})
    before = {node: policy.pieces(node)[-1].group for node in ("a1", "b1")}
    _asked(policy, clock, "a2", 5, {"session": "a"})
    assert policy.pieces("a1")[-1].group != before["a1"]
    assert policy.pieces("b1")[-1].group == before["b1"] == policy.pieces("a2")[-1].group
    assert [piece.facts.superseded for node in ("a1", "b1", "a2") for piece in policy.pieces(node)] == [
        True,
        False,
        False,
    ]


@pytest.mark.slow
def test_superseded_requests_are_learned_to_rank_low() -> None:
    """Sessions always continue from their first block. The blocks that they leave behind get the lowest rank."""
    clock = ManualClock()
    policy = Learned(100_000, clock, 0)
    for number in range(600):
        _asked(policy, clock, f"{number}", 8, {"session": f"s{number % 7}"})
        policy.maintain()
    live, dead = (policy.pieces(f"{number}")[-1] for number in (599, 500))
    assert dead.facts.superseded and not live.facts.superseded
    assert policy.rank[dead.group, 15] < 0.8 * policy.rank[live.group, 15]


def test_a_leaf_is_forgotten_with_its_eviction() -> None:
    """Ghosts keep facts about requests, and no nodes."""
    clock = ManualClock()
    policy = Learned(100, clock, 0)
    _asked(policy, clock, "a1", 5, {"session": "a"})
    facts = policy.pieces("a1")[-1].facts
    assert policy._leaf_of[facts] == "a1"
    policy.trimmed("a1", 5)
    policy.removed("a1")
    assert facts not in policy._leaf_of and policy.num_ghosts == 5
    _asked(policy, clock, "a2", 5, {"session": "a"})
    assert facts.superseded and policy.victim() == "a2"


def test_state_is_bounded() -> None:
    """This holds for any length of history."""
    clock = ManualClock()
    policy = Learned(8, clock, 0)
    for node in range(LEARNED_GHOSTS + 500):
        clock.advance(0.01)
        hints = policy.opened([], 2, RequestHints(labels={"session": f"{node}"}))
        policy.inserted(node, 2, 2, hints, [2 * node, 2 * node + 1])
        policy.unleased(node)
        policy.trimmed(node, 2)
        policy.removed(node)
    assert policy.num_ghosts == LEARNED_GHOSTS and len(policy) == 0
    assert len(policy._sessions) == MAX_SESSIONS
    policy.maintain()
    assert MAX_ROWS == 32_768
