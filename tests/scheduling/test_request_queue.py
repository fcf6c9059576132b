"""The queue of waiting requests: what starts next, in plain examples, and what is refused."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import scheduling as measured
from radixkv.errors import ArgumentError
from radixkv.scheduling import KAPPA, RequestQueue, WaitingRequest, request_queue


def started(queue: RequestQueue, count: int | None = None, now: float = 0.0) -> list[Any]:
    """Start what is next, again and again. Returns the items."""
    found: list[Any] = []
    while len(queue) and (count is None or len(found) < count):
        request = queue.peek(now)
        assert request is not None
        queue.start(request)
        found.append(request.item)
    return found


def test_whole_requests_go_first_the_longest_cached_share_first() -> None:
    queue = RequestQueue()
    for item, missing in enumerate([1.0, 0.6, 0.61, 0.0, 0.3, 0.0]):
        queue.add("acme", tokens=100, missing=missing, item=item)
    assert started(queue) == [3, 5, 4, 1, 0, 2]


def test_whole_requests_pass_the_oldest_no_longer_than_promised() -> None:
    """After κ starts the oldest has its turn, whole or not, and the next κ begin."""
    queue = RequestQueue(kappa=2)
    for item, missing in enumerate([0.5, 0.4, 0.3, 0.2, 0.1, 0.0]):
        queue.add("acme", tokens=100, missing=missing, item=item)
    assert started(queue) == [5, 4, 0, 3, 2, 1]


def test_after_kappa_whole_requests_the_oldest_starts() -> None:
    queue = RequestQueue(kappa=2)
    queue.add("acme", tokens=100, missing=1.0, item="cold")
    for item in range(5):
        queue.add("acme", tokens=100, missing=0.0, item=item)
    assert started(queue) == [0, 1, "cold", 2, 3, 4]


def test_without_credits_the_order_is_that_of_arrival() -> None:
    queue = RequestQueue(kappa=0)
    for item in range(20):
        queue.add("acme", tokens=100, missing=item % 3 / 2, item=item)
    assert started(queue) == list(range(20))


def test_a_request_changes_its_class_as_blocks_come_and_go() -> None:
    queue = RequestQueue()
    first, second = (queue.add("acme", tokens=100, missing=0.1, item=item) for item in "ab")
    queue.update(first, 0.9)
    assert queue.peek(0.0) is second
    queue.update(first, 0.5)
    assert queue.peek(0.0) is second
    queue.update(first, 0.05)
    assert queue.peek(0.0) is first
    queue.update(second, 0.7)
    queue.update(first, 1.0)
    assert started(queue) == ["a", "b"]


def test_peek_changes_nothing() -> None:
    queue = RequestQueue()
    request = queue.add("acme", tokens=10)
    assert [queue.peek(0.0) for _ in range(3)] == [request] * 3
    assert len(queue) == queue.num_waiting("acme") == 1 and request.state == "waiting"
    assert RequestQueue().peek(0.0) is None and queue.peek(0.0, tenant="other") is None


def test_tokens_are_shared_by_weight() -> None:
    queue = RequestQueue()
    queue.set_weight("acme", 3)
    for tenant in ("acme", "bank"):
        for _ in range(60):
            queue.add(tenant, tokens=100, item=tenant)
    first = started(queue, 80)
    assert (first.count("acme"), first.count("bank")) == (60, 20)


def test_only_missing_tokens_are_charged() -> None:
    queue = RequestQueue()
    for _ in range(60):
        queue.add("acme", tokens=100, missing=0.5, item="acme")
        queue.add("bank", tokens=100, missing=1.0, item="bank")
    first = started(queue, 60)
    assert (first.count("acme"), first.count("bank")) == (40, 20)


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    queue = RequestQueue()
    for _ in range(100):
        queue.add("acme", tokens=100, item="acme")
    started(queue, 50)
    for _ in range(50):
        queue.add("bank", tokens=100, item="bank")
    first = started(queue, 20)
    assert first.count("bank") == 10


def test_a_forgotten_weight_is_1_again() -> None:
    queue = RequestQueue()
    queue.set_weight("acme", 3)
    queue.add("acme", tokens=100)
    queue.forget_weight("acme")
    queue.forget_weight("nobody")
    for _ in range(20):
        queue.add("acme", tokens=100, item="acme")
        queue.add("bank", tokens=100, item="bank")
    assert started(queue, 20).count("bank") in (9, 10, 11)


def test_priorities_count_within_a_tenant_only() -> None:
    queue = RequestQueue()
    for at, priority in enumerate([0, 100, 50, 100]):
        queue.add("acme", tokens=100, priority=priority, item=("acme", at))
        queue.add("bank", tokens=100, item=("bank", at))
    assert started(queue) == [
        *[("acme", 1), ("bank", 0), ("acme", 3), ("bank", 1)],
        *[("acme", 2), ("bank", 2), ("acme", 0), ("bank", 3)],
    ]


def test_a_request_whose_time_has_come_goes_first() -> None:
    queue = RequestQueue()
    for item, start_by in enumerate([None, 9.0, 5.0, None]):
        queue.add("acme", tokens=100, missing=1.0, start_by=start_by, item=item)
    queue.add("acme", tokens=100, missing=0.0, item="whole")
    first = [queue.peek(now) for now in (0.0, 4.9, 5.0, 100.0)]
    assert [each.item for each in first if each] == ["whole", "whole", 2, 2]
    assert started(queue, now=9.0) == [2, 1, "whole", 0, 3]


def test_a_preempted_request_goes_before_all_that_never_started() -> None:
    queue = RequestQueue()
    requests = [queue.add("acme", tokens=100, missing=0.0, item=item) for item in range(4)]
    assert started(queue, 2) == [0, 1]
    queue.requeue(requests[1], missing=1.0)
    queue.requeue(requests[0])
    assert started(queue) == [0, 1, 2, 3]


def test_a_start_that_is_given_back_leaves_no_trace() -> None:
    queue, other = RequestQueue(kappa=1), RequestQueue(kappa=1)
    for each in (queue, other):
        for item in range(12):
            each.add("acme", tokens=100, missing=item % 2, item=item)
    for _ in range(12):
        request = queue.peek(0.0)
        assert request is not None
        queue.start(request)
        queue.give_back(request)
        assert started(queue, 1) == started(other, 1)


def test_a_tenant_that_is_passed_over_saves_nothing_up() -> None:
    queue = RequestQueue()
    for _ in range(200):
        queue.add("acme", tokens=100, item="acme")
        queue.add("bank", tokens=100, item="bank")
    for _ in range(50):  # bank can't start: it is at a limit of its own
        passed = queue.peek(0.0)
        assert passed is not None
        queue.start(passed)
        if passed.tenant == "bank":
            started(queue, 1)
            queue.give_back(passed)
    first = started(queue, 20)
    assert 9 <= first.count("bank") <= 12


def test_a_cancelled_request_never_starts() -> None:
    queue = RequestQueue()
    requests = [queue.add("acme", tokens=100, item=item) for item in range(5)]
    queue.remove(requests[0])
    queue.remove(requests[3])
    assert [each.item for each in queue] == [1, 2, 4]
    assert started(queue) == [1, 2, 4]
    assert requests[0].state == "removed" and requests[1].state == "started"


def test_a_queue_shows_its_requests_in_order_of_arrival() -> None:
    queue = RequestQueue()
    requests = [queue.add(f"t{at % 3}", tokens=100, missing=at % 2, priority=at % 5) for at in range(30)]
    for request in requests[:10]:
        queue.update(request, 1.0 - request.missing)
    started_one = queue.peek(0.0)
    assert started_one is not None
    queue.start(started_one)
    assert list(queue) == [each for each in requests if each is not started_one]
    queue.requeue(started_one)
    assert list(queue) == requests


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": 7},
        {"tokens": 0},
        {"tokens": 2**40 + 1},
        {"tokens": True},
        {"tokens": 1.5},
        {"missing": -0.1},
        {"missing": 1.1},
        {"missing": float("nan")},
        {"missing": "1"},
        {"missing": True},
        {"priority": -1},
        {"priority": 101},
        {"priority": 1.0},
        {"start_by": float("inf")},
        {"start_by": float("nan")},
        {"start_by": "soon"},
        {"start_by": 10**400},
    ],
)
def test_a_request_with_an_invalid_argument_is_refused(wrong: dict[str, Any]) -> None:
    queue = RequestQueue()
    given: dict[str, Any] = {"tenant": "acme", "tokens": 10, **wrong}
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        queue.add(given.pop("tenant"), **given)
    assert len(queue) == 0 and queue.peek(0.0) is None


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e101, "2", True, None])
def test_an_invalid_weight_is_refused(weight: Any) -> None:
    with pytest.raises(ArgumentError, match="weight"):
        RequestQueue().set_weight("acme", weight)


@pytest.mark.parametrize("wrong", [{"kappa": -1}, {"kappa": 1.5}, {"whole_missing": 2}, {"kappa": None}])
def test_an_invalid_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        RequestQueue(**wrong)


def test_a_call_for_a_request_in_another_state_is_refused() -> None:
    queue = RequestQueue()
    request = queue.add("acme", tokens=10)
    for call in (queue.give_back, queue.requeue):
        with pytest.raises(ArgumentError, match="a request that is started"):
            call(request)
    queue.start(request)
    for waits in (queue.start, queue.remove, lambda each: queue.update(each, 0.5)):
        with pytest.raises(ArgumentError, match="a request that is waiting"):
            waits(request)
    for invalid in (None, "acme", 3):
        with pytest.raises(ArgumentError, match="a handle that add of this queue returned"):
            queue.start(invalid)  # type: ignore[arg-type]
    for now in (None, "now", float("nan")):
        with pytest.raises(ArgumentError, match="now"):
            queue.peek(now)  # type: ignore[arg-type]
    assert len(queue) == 0


def test_a_request_of_another_queue_is_refused() -> None:
    queue, other = RequestQueue(), RequestQueue()
    request = other.add("acme", tokens=10)
    queue.add("acme", tokens=10)
    with pytest.raises(ArgumentError, match="request"):
        queue.start(request)
    with pytest.raises(ArgumentError, match="request"):
        queue.remove(request)
    assert len(queue) == len(other) == 1


def test_weights_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "MAX_TENANTS", 10)
    queue = RequestQueue()
    for tenant in range(10):
        queue.set_weight(str(tenant), 1.0)
    queue.set_weight("7", 2.0)
    with pytest.raises(ArgumentError, match="at most 10 tenants"):
        queue.set_weight("one more", 2.0)


def test_tenants_without_requests_are_forgotten() -> None:
    """Names that come once leave nothing, also while another tenant always waits."""
    queue = RequestQueue()
    for at in range(5_000):
        queue.add("always", tokens=100)
        queue.add(f"once {at}", tokens=1 + at % 1_000, missing=at % 2)
        started(queue, 2)
    assert len(queue._tenants) < 50


def test_requests_that_left_are_not_kept() -> None:
    """A request that changes its class, starts and comes back, or is cancelled, leaves no entry for long."""
    queue = RequestQueue()
    oldest = queue.add("comes and goes", tokens=100, missing=0.0)
    for at in range(3_000):
        request = queue.add("comes and goes", tokens=100, start_by=1e9, priority=at % 2)
        for missing in (0.0, 1.0, 0.0):
            queue.update(request, missing)
        queue.start(request)
        queue.requeue(request)
        queue.remove(request)
    assert oldest.state == "waiting"
    gc.collect()
    requests = [each for each in gc.get_objects() if type(each) is WaitingRequest]  # no code of others runs
    kept = sum(each.tenant == oldest.tenant for each in requests)
    assert kept < 1_000


def test_every_step_of_a_weight_is_exact_after_years() -> None:
    """Tags never lose precision: the thousandth million million token counts as the first."""
    queue = RequestQueue()
    for tenant in ("acme", "bank"):
        queue.add(tenant, tokens=2**40)
    started(queue)
    queue.set_weight("acme", 1e-6)
    for tenant in ("acme", "bank"):
        for _ in range(100):
            queue.add(tenant, tokens=2**40)
    started(queue)
    queue.set_weight("acme", 1.0)
    for tenant in itertools.islice(itertools.cycle(("acme", "bank")), 100):
        queue.add(tenant, tokens=1, item=tenant)
    first = started(queue, 50)
    assert 24 <= first.count("acme") <= 26


def test_the_package_needs_nothing_of_the_cache() -> None:
    code = "import sys, radixkv.scheduling as s; q = s.RequestQueue(); q.add('a', tokens=1); print(q.peek(0.0).tokens)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "1"
    assert KAPPA == 8


@pytest.mark.slow
def test_a_longer_queue_costs_a_decision_little_more() -> None:
    short, long = (
        min(measured.run(requests=size, decisions=500)["median_us"] for _ in range(3))
        for size in (100, 20_000)
    )
    assert long < 10 * short
