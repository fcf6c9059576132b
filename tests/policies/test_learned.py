"""Learned: the worst leaf goes, what returns is learned and kept, and what is kept of it is bounded."""

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


class Waiting:
    """``Leaves``, said plainly: what each leaf was worth when it came or all were ranked, and who is worth least."""

    def __init__(self, rank: Floats) -> None:
        self.rank = rank
        self.leaves: dict[Handle, tuple[float, float, int]] = {}
        self.classes: dict[Handle, int] = {}
        self.serial = 0

    def add(self, node: Handle, group: int, ended_s: float, now_s: float) -> None:
        """Worth what its class is worth from the bin of its age on."""
        age = max(i for i, edge in enumerate(EDGES_S) if edge <= now_s - ended_s)
        self.serial += 1
        self.leaves[node] = float(self.rank[group, age]), ended_s, self.serial
        self.classes[node] = group

    def rank_anew(self, now_s: float, rank: Floats) -> None:
        """Worth what its class is worth at its age, between two bins in proportion."""
        self.rank = rank
        for node, (_, ended_s, serial) in self.leaves.items():
            row = np.interp(now_s - ended_s, EDGES_S, rank[self.classes[node]])
            self.leaves[node] = float(row), ended_s, serial

    def first(self) -> Handle | None:
        """Who is worth least; among equals the oldest."""
        return min(self.leaves, key=self.leaves.__getitem__, default=None)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 3)), max_size=150))
def test_the_leaf_that_is_worth_least_goes_first(ops: list[tuple[int, int, int]]) -> None:
    """Whatever came, went and was ranked, also while others came."""
    ranks = np.random.default_rng(3).integers(0, 6, (4, 4, NUM_BINS + 1)).astype(np.float64)
    leaves, plain = Leaves(ranks[0]), Waiting(ranks[0])
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


def test_a_leaf_that_comes_while_all_are_ranked() -> None:
    """What another thread ranked is taken up with who came meanwhile, and without who left."""
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


def test_ranks_outlive_a_heap_that_is_built_anew() -> None:
    """Leaves come and go until the heap is full of who left: who stayed has the rank that it was last given."""
    rank = np.zeros((2, NUM_BINS + 1))
    rank[:, :] = [[1.0], [2.0]]
    leaves = Leaves(rank)
    leaves.add("stays", 0, 0.0, 0.0)
    leaves.rank_anew(1.0, rank[::-1] * 2)  # worth 4 from now on
    assert leaves.first() == "stays"
    for node in range(200):
        leaves.add(node, 0, 1.0, 1.0)  # worth 4 too, and younger
        leaves.discard(node)
    leaves.add("comes", 1, 1.0, 1.0)  # worth 2
    assert leaves.first() == "comes"


def test_hits_and_survivors_are_counted_together() -> None:
    """Ten uses, four of which return after 3 s: no bin counts before it has passed, then all ten are in it."""
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


def test_what_is_of_another_class_counts_there_from_then_on() -> None:
    """Ten uses of one class that are of another after 3 s: bins that had passed stay where they were counted."""
    model = HazardModel()
    before, after = model.add_class(), model.add_class()
    for number in range(10):
        model.log.append((number, 0.0, before, 1.0))
    passed = int(np.searchsorted(EDGES_S, 3.0, "right")) - 1
    model.update(3.0, fit=False)
    for number in range(10):
        model.log.append((number, 3.0, after, 0.0))
    model.log.append((0, 4.0, -1, 1.0))
    model.log.append((99, 4.0, before, 0.0))  # nobody knows that use any more
    model.update(100.0, fit=False)
    assert model.at_risk[before, :passed].tolist() == [10.0] * passed
    assert model.at_risk[before, passed:].sum() == model.at_risk[after, :passed].sum() == 0
    assert model.at_risk[after, passed] == 10 and model.returned[after].sum() == 1


def test_a_class_that_returns_outranks_one_that_does_not() -> None:
    """After a while."""
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
    """As all together at first, from the next update on by its features; the others stay as they are."""
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


def test_the_model_settles_however_far_it_has_to_go() -> None:
    """Much evidence, of classes that nearly never or nearly always return: it comes to what was counted."""
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


def test_an_age_that_nothing_has_reached_is_judged_by_those_before_it() -> None:
    """Nothing returns within a minute: what waits longer than any did is worth a small part of what it was at first."""
    model = HazardModel()
    group = model.add_class()
    model.describe(group, [0.0] * NUM_FEATURES)
    minute = int(np.searchsorted(EDGES_S, 60.0))
    model.at_risk[group, :minute] = 20_000.0
    for _ in range(20):
        model.update(0.0, fit=True)
    ranks, at_first = model.rank[group, minute:-1], HazardModel().rank[0, minute:-1]
    assert (ranks < 0.1 * at_first).all()


def test_a_step_solves_its_equations() -> None:
    """As LAPACK does, which would take all cores for it."""
    rng = np.random.default_rng(2)
    for size in (1, 2, 115):
        some = rng.normal(size=(size, 2 * size))
        curve, slope = some @ some.T + np.eye(size), rng.normal(size=size)
        np.testing.assert_allclose(
            _solved(curve, slope), np.linalg.solve(curve, slope), rtol=1e-9, atol=1e-12
        )


def test_nothing_learned_is_lru() -> None:
    """The prior rank falls with age."""
    assert (np.diff(HazardModel().rank[0]) <= 0).all() and NUM_BINS == 25


def _ahead(rows: _Rows, number: int, at_s: float, weight: float) -> float:
    """A use returns: what the shadow of what was learned held of it more than that of LRU."""
    before = rows._standing._ahead
    rows.take((number, at_s, -1, weight))
    return rows._standing._ahead - before


@given(st.lists(st.integers(0, 9), max_size=300), st.integers(1, 8))
def test_the_shadow_of_lru_holds_what_an_lru_would(asks: list[int], room: int) -> None:
    """Asked for some of ten things, each one segment; the other shadow drops nothing."""
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


def test_the_shadow_of_lru_gives_up_a_part_of_what_it_held_longest() -> None:
    """Ten segments ended together, five of which still fit: those come back as hits, and no more."""
    rows = _Rows(Standing())
    rows.room = 10.0
    rows.take((0, 0.0, 0, 10.0))
    rows.take((1, 1.0, 0, 5.0))
    assert [_ahead(rows, 0, 2.0, weight) for weight in (3.0, 7.0)] == [0.0, 5.0]
    rows.take((2, 2.0, 0, 10.0))
    assert [_ahead(rows, number, 3.0, 10.0) for number in (1, 2)] == [5.0, 0.0]


def test_a_request_larger_than_the_shadow_of_lru() -> None:
    """It ended in three parts, and the shadow holds none of it twice, nor forgets how much it holds."""
    rows = _Rows(Standing())
    rows.room = 10.0
    for _ in range(3):
        rows.take((0, 0.0, 0, 8.0))
    assert rows._held == 10.0 and _ahead(rows, 0, 1.0, 24.0) == 14.0
    assert rows._held == 0.0


def test_the_other_shadow_keeps_what_ranks_highest() -> None:
    """However long ago it was used; among equals the last."""
    rows = _Rows(Standing())
    for number in range(6):
        rows.take((number, float(number), number % 2, 1.0))
    rank = np.zeros((2, NUM_BINS + 1))
    rank[1] = 1.0
    rows.room = 2.0
    rows.drop(6.0, rank)
    assert [_ahead(rows, number, 7.0, 1.0) for number in range(6)] == [-1.0, -1.0, -1.0, 0.0, -1.0, 0.0]


def test_uses_that_the_ring_forgot_are_in_no_shadow() -> None:
    """More uses than it has room for."""
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
    """By more than chance and a small share of all uses, until what was learned hits more again."""
    assert _standing([]).leads and _standing([-1.0] * 10).leads, "within the allowance"
    assert _standing([-200.0]).leads, "one request, however long"
    assert _standing([-200.0, -150.0]).leads is False
    assert _standing([-200.0, -150.0, 500.0]).leads is False, "one request again"
    assert _standing([-200.0, -150.0, *[50.0] * 12]).leads is False, "not enough"
    assert _standing([-200.0, -150.0, *[50.0] * 18]).leads
    assert _standing([50.0] * 12 + [-20.0] * 60).leads is False


def test_what_was_hit_at_one_time_is_one_chance() -> None:
    """Parts of a request, beside as many requests."""
    for between_s, leads in ((0.0, False), (1e-3, True)):
        standing = Standing()
        standing.leads = False
        for number in range(9):
            standing.returned(1.0 + between_s * number, 0.0, 1.0)
        for number in range(18):
            standing.returned(2.0 + between_s * number, 1.0, 0.0)
        standing.decide(2.0)
        assert standing.leads is leads


def test_ranks_are_those_of_lru_while_that_leads() -> None:
    """And again its own as soon as it leads; within ``auto``, which judges itself, its own always."""
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
    """A request of ``depth`` blocks that begins with nothing known."""
    clock.advance(10.0)
    hints = policy.opened([], depth, RequestHints(labels=labels))
    policy.inserted(node, depth, depth, hints, range(100 * len(policy), 100 * len(policy) + depth))
    policy.unleased(node)


def test_a_session_that_goes_on_elsewhere_leaves_its_last_request_behind() -> None:
    """It is of another class, and so is not the last request of any other session."""
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


def test_sessions_that_end_elsewhere_are_learned_to_be_dead() -> None:
    """Sessions come back from their beginning, again and again: what they leave behind ranks lowest."""
    clock = ManualClock()
    policy = Learned(100_000, clock, 0)
    for number in range(1_500):
        _asked(policy, clock, f"{number}", 8, {"session": f"s{number % 7}"})
        policy.maintain()
    live, dead = (policy.pieces(f"{number}")[-1] for number in (1_499, 1_400))
    assert dead.facts.superseded and not live.facts.superseded
    assert policy.rank[dead.group, 15] < 0.8 * policy.rank[live.group, 15]


def test_a_leaf_is_forgotten_with_its_eviction() -> None:
    """Ghosts keep facts of requests, and no nodes."""
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
    """However long the history."""
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
