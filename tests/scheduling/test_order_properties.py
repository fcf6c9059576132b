"""Properties of the order for any calls: a slow reference, the bound on waiting, fair shares, and isolation."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduling import WHOLE_MISSING, RequestQueue, WaitingRequest

MISSING = st.sampled_from([0.0, 0.3, 0.6, 0.7, 1.0])
Call = tuple[Any, ...]

CALLS: st.SearchStrategy[Call] = st.one_of(
    st.tuples(
        st.just("add"), MISSING, st.sampled_from([0, 0, 0, 7]), st.sampled_from([None, None, 2.0, 5.0])
    ),
    st.tuples(st.just("update"), st.integers(0, 30), MISSING),
    st.tuples(st.just("remove"), st.integers(0, 30)),
    st.tuples(st.just("start")),
    st.tuples(st.just("start")),
    st.tuples(st.just("requeue"), st.integers(0, 30), MISSING),
    st.tuples(st.just("give back")),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0])),
)


@dataclass
class Reference:
    """The rule by its words: lists, sorted anew at each decision. One tenant."""

    kappa: int
    now: float = 0.0
    arrived: int = 0
    credit: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    waiting: dict[int, dict[str, Any]] = field(default_factory=dict)
    running: dict[int, dict[str, Any]] = field(default_factory=dict)
    last: tuple[int, dict[int, int]] | None = None

    def add(self, missing: float, priority: int, start_by: float | None) -> int:
        if not self._line(priority):
            self.credit[priority] = 0
        row = {"missing": missing, "priority": priority, "start_by": start_by, "again": False}
        self.waiting[self.arrived] = row
        self.arrived += 1
        self.last = None
        return self.arrived - 1

    def _line(self, priority: int) -> list[int]:
        return sorted(at for at, row in self.waiting.items() if row["priority"] == priority)

    def next(self) -> int | None:
        if not self.waiting:
            return None
        priority = max(row["priority"] for row in self.waiting.values())
        line = self._line(priority)
        again = [at for at in line if self.waiting[at]["again"]]
        due = [
            (row["start_by"], at)
            for at, row in self.waiting.items()
            if at in line and row["start_by"] is not None
        ]
        if again:
            return again[0]
        if due and min(due)[0] <= self.now:
            return min(due)[1]
        whole = [(self.waiting[at]["missing"], at) for at in line if self.waiting[at]["missing"] <= 0.6]
        return line[0] if self.credit[priority] >= self.kappa or not whole else min(whole)[1]

    def start(self) -> int | None:
        at = self.next()
        if at is None:
            return None
        row = self.waiting[at]
        self.last = at, dict(self.credit)
        priority = row["priority"]
        fresh = [each for each in self._line(priority) if not self.waiting[each]["again"]]
        if not row["again"] and at == fresh[0]:
            self.credit[priority] = max(self.credit[priority] - self.kappa, 0)
        elif not row["again"] and row["missing"] <= 0.6:
            self.credit[priority] = min(self.credit[priority] + 1, 2 * self.kappa)
        self.running[at] = self.waiting.pop(at)
        return at


@given(st.lists(CALLS, max_size=80), st.sampled_from([0, 1, 2, 8]))
def test_the_order_is_that_of_the_rule(calls: list[Call], kappa: int) -> None:
    queue, reference, handles = RequestQueue(kappa=kappa), Reference(kappa), dict[int, WaitingRequest]()
    for name, *given_ in calls:
        if name == "add":
            missing, priority, start_by = given_
            at = reference.add(missing, priority, start_by)
            handles[at] = queue.add(
                "acme", tokens=100, missing=missing, priority=priority, start_by=start_by, item=at
            )
        elif name == "update" and given_[0] in reference.waiting:
            reference.waiting[given_[0]]["missing"] = given_[1]
            queue.update(handles[given_[0]], given_[1])
            reference.last = None
        elif name == "remove" and given_[0] in reference.waiting:
            del reference.waiting[given_[0]]
            queue.remove(handles[given_[0]])
            reference.last = None
        elif name == "start":
            at_next = reference.start()
            request = queue.peek(reference.now)
            assert (None if request is None else request.item) == at_next
            if request is not None:
                queue.start(request)
        elif name == "requeue" and given_[0] in reference.running:
            row = reference.running.pop(given_[0])
            reference.waiting[given_[0]] = {**row, "missing": given_[1], "again": True}
            queue.requeue(handles[given_[0]], given_[1])
            reference.last = None
        elif name == "give back" and reference.last is not None and reference.last[0] in reference.running:
            at, credit = reference.last
            reference.waiting[at] = reference.running.pop(at)
            reference.credit.update(credit)
            reference.last = None
            queue.give_back(handles[at])
        elif name == "wait":
            reference.now += given_[0]
        assert len(queue) == len(reference.waiting)
        assert queue.tokens_ahead() == sum(each.missing_tokens for each in queue)
        early = [
            each for each in queue if each.missing <= WHOLE_MISSING or reference.waiting[each.item]["again"]
        ]
        expected_ahead = sum(each.missing_tokens for each in (early if kappa else queue))
        assert queue.tokens_ahead(WHOLE_MISSING) == queue.tokens_ahead(0.0) == expected_ahead
        assert [each.item for each in queue] == sorted(reference.waiting)
        expected = reference.next()
        found = queue.peek(reference.now)
        assert (None if found is None else found.item) == expected


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), MISSING),
            st.tuples(st.just("start")),
            st.tuples(st.just("update"), st.integers(0, 1_000), MISSING),
            st.tuples(st.just("remove"), st.integers(0, 1_000)),
        ),
        max_size=200,
    ),
    st.sampled_from([0, 1, 2, 3, 8]),
)
def test_no_request_is_passed_by_more_later_ones_than_promised(calls: list[Call], kappa: int) -> None:
    """At most κ·(e + 1) later requests start first, whatever else happens; e waited as it arrived."""
    queue = RequestQueue(kappa=kappa)
    waiting: list[WaitingRequest] = []
    earlier, passed = dict[int, int](), Counter[int]()
    for name, *given_ in calls:
        if name == "add":
            request = queue.add("acme", tokens=100, missing=given_[0])
            earlier[request.arrival] = len(waiting)
            waiting.append(request)
        elif name == "start" and waiting:
            found = queue.peek(0.0)
            assert found is not None
            queue.start(found)
            waiting.remove(found)
            passed.update(each.arrival for each in waiting if each.arrival < found.arrival)
        elif name == "update" and waiting:
            queue.update(waiting[given_[0] % len(waiting)], given_[1])
        elif name == "remove" and waiting:
            queue.remove(waiting.pop(given_[0] % len(waiting)))
        for at, count in passed.items():
            assert count <= kappa * (earlier[at] + 1)


def test_the_bound_is_reached_and_held_by_a_flood() -> None:
    """One cold request, and whole ones that never end: it starts after κ of them."""
    queue = RequestQueue(kappa=8)
    cold = queue.add("acme", tokens=100, missing=1.0)
    later = 0
    while cold.state == "waiting":
        queue.add("acme", tokens=100, missing=0.0)
        request = queue.peek(0.0)
        assert request is not None
        queue.start(request)
        later += request is not cold
    assert later == 8


def test_an_adversary_who_evicts_and_restores_starves_nobody() -> None:
    """A request is whole whenever a cold one may start, and cold otherwise. It waits no longer than promised."""
    queue = RequestQueue(kappa=4)
    victim = queue.add("acme", tokens=100, missing=1.0)
    later = 0
    while victim.state == "waiting":
        queue.add("acme", tokens=100, missing=0.0)
        queue.add("acme", tokens=100, missing=1.0)
        queue.update(victim, 0.0)
        if queue.peek(0.0) is victim:
            queue.update(victim, 1.0)
        request = queue.peek(0.0)
        assert request is not None
        queue.start(request)
        later += request is not victim
        assert later <= 4


TENANTS = ("acme", "bank", "city")


@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0, 100.0]), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5_000), MISSING), max_size=80),
    st.integers(0, 60),
)
def test_tokens_of_waiting_tenants_are_within_one_request_of_their_weights(
    weights: list[float], requests: list[tuple[int, int, float]], before: int
) -> None:
    """From any start on, while two tenants wait, their tokens by weight differ by a request of each."""
    queue, most, used = RequestQueue(), Counter[str](), Counter[str]()
    for tenant, weight in zip(TENANTS, weights, strict=True):
        queue.set_weight(tenant, weight)
    weight_of = dict(zip(TENANTS, map(Fraction, weights), strict=True))
    for at, tokens, missing in requests:
        request = queue.add(TENANTS[at], tokens=tokens, missing=missing)
        most[request.tenant] = max(most[request.tenant], request.missing_tokens)
    backlogged = {tenant for tenant in TENANTS if queue.num_waiting(tenant)}
    for number in range(len(requests)):
        found = queue.peek(0.0)
        assert found is not None
        queue.start(found)
        if number < before:
            backlogged = {tenant for tenant in TENANTS if queue.num_waiting(tenant)}
            continue
        used[found.tenant] += found.missing_tokens
        for one in backlogged:
            for other in backlogged:
                shares = used[one] / weight_of[one], used[other] / weight_of[other]
                allowed = most[one] / weight_of[one] + most[other] / weight_of[other]
                assert abs(shares[0] - shares[1]) <= allowed
        backlogged = {tenant for tenant in backlogged if queue.num_waiting(tenant)}


@given(st.lists(CALLS, max_size=60), st.lists(CALLS, max_size=60), st.randoms(use_true_random=False))
def test_nothing_of_others_changes_the_order_within_a_tenant(
    own: list[Call], others: list[Call], dice: Any
) -> None:
    """With any calls of others between its own, a tenant's own requests start in the same order."""
    alone = _own_order(own, [], dice)
    assert _own_order(own, others, dice) == alone


def _own_order(own: list[Call], others: list[Call], dice: Any) -> list[int | None]:
    queue, lines = RequestQueue(kappa=2), [(iter(own), "acme"), (iter(others), "bank")]
    made: dict[str, list[WaitingRequest]] = {"acme": [], "bank": []}
    last: dict[str, WaitingRequest | None] = {"acme": None, "bank": None}
    order: list[int | None] = []
    left = [0] * len(own) + [1] * len(others)
    dice.shuffle(left)
    for at in left:
        calls, tenant = lines[at]
        name, *given_ = next(calls)
        mine = made[tenant]
        known = mine[given_[0]] if name in ("update", "remove", "requeue") and given_[0] < len(mine) else None
        if name == "add":
            item = len(mine)
            mine.append(queue.add(tenant, tokens=50, missing=given_[0], priority=given_[1], item=item))
            last[tenant] = None
        elif name == "start":
            request = queue.peek(0.0, tenant=tenant)
            if request is not None:
                queue.start(request)
                last[tenant] = request
            if tenant == "acme":
                order.append(None if request is None else request.item)
        elif name == "update" and known is not None and known.state == "waiting":
            queue.update(known, given_[1])
        elif name == "remove" and known is not None and known.state == "waiting":
            queue.remove(known)
        elif name == "requeue" and known is not None and known.state == "started":
            queue.requeue(known, given_[1])
            last[tenant] = None
        elif name == "give back":
            back = last[tenant]
            if back is not None and back.state == "started":
                queue.give_back(back)
            last[tenant] = None
    return order


@given(st.lists(st.tuples(CALLS, st.integers(0, 2)), max_size=120))
def test_every_request_starts_once_and_the_same_calls_give_the_same_order(
    calls: list[tuple[Call, int]],
) -> None:
    assert _drained(calls) == _drained(calls)


def _drained(calls: list[tuple[Call, int]]) -> list[int]:
    """Make the calls, then start all that waits. Returns the starts."""
    queue, made, starts = RequestQueue(), list[WaitingRequest](), list[int]()
    back = Counter[int]()
    for (name, *given_), tenant in calls:
        known = made[given_[0]] if name in ("update", "remove", "requeue") and given_[0] < len(made) else None
        if name == "add":
            missing, priority, start_by = given_
            made.append(
                queue.add(TENANTS[tenant], tokens=9, missing=missing, priority=priority, start_by=start_by)
            )
        elif name == "start" and (request := queue.peek(0.0)) is not None:
            queue.start(request)
            starts.append(request.arrival)
        elif name == "update" and known is not None and known.state == "waiting":
            queue.update(known, given_[1])
        elif name == "remove" and known is not None and known.state == "waiting":
            queue.remove(known)
        elif name == "requeue" and known is not None and known.state == "started":
            queue.requeue(known, given_[1])
            back[known.arrival] += 1
    while (request := queue.peek(1e9)) is not None:
        queue.start(request)
        starts.append(request.arrival)
    assert len(queue) == 0 and [each.arrival for each in queue] == []
    expected = Counter(each.arrival for each in made if each.state == "started") + back
    expected -= Counter(
        {each.arrival: 1 for each in made if each.state == "removed" and not back[each.arrival]}
    )
    removed_again = {each.arrival for each in made if each.state == "removed" and back[each.arrival]}
    counted = Counter(starts)
    assert {at: count for at, count in counted.items() if at not in removed_again} == {
        at: count for at, count in expected.items() if at not in removed_again
    }
    return starts


@pytest.mark.parametrize("kappa", [1, 8])
def test_a_queue_that_only_grows_starts_every_request(kappa: int) -> None:
    """Two arrivals for each start, whole and cold: the first hundred start within the bound."""
    queue = RequestQueue(kappa=kappa)
    first = [queue.add("acme", tokens=10, missing=at % 2) for at in range(100)]
    for _ in range(100 * (kappa + 1)):
        queue.add("acme", tokens=10, missing=0.0)
        queue.add("acme", tokens=10, missing=1.0)
        request = queue.peek(0.0)
        assert request is not None
        queue.start(request)
    assert all(each.state == "started" for each in first)
