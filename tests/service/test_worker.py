"""The model's thread: turns, bounds, cancelling, closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from radixkv.service.worker import Busy, Cancelled, Closed, ModelWorker, Work
from tests.service.running import DEADLINE_S


@pytest.fixture
def worker() -> Iterator[ModelWorker]:
    worker = ModelWorker(max_queued=3)
    yield worker
    worker.close()
    assert worker.num_unfinished == 0


def hold(worker: ModelWorker, tenant: str = "z") -> threading.Event:
    """Keep the thread busy until the event is set (or the work cancelled)."""
    release, started = threading.Event(), threading.Event()

    def run(work: Work[None]) -> None:
        started.set()
        while not release.wait(0.01):
            work.check()

    worker.submit(tenant, run)
    started.wait()
    return release


def test_tenants_take_turns(worker: ModelWorker) -> None:
    release, order = hold(worker), list[str]()
    works = [
        worker.submit(tenant, lambda _, tenant=tenant: order.append(tenant))
        for tenant in ("a", "a", "a", "b", "c", "b")
    ]
    release.set()
    for work in works:
        work.future.result(DEADLINE_S)
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_a_lane_is_bounded_and_the_others_dont_mind(worker: ModelWorker) -> None:
    release = hold(worker)
    queued = [worker.submit("a", lambda _: None) for _ in range(3)]
    with pytest.raises(Busy):
        worker.submit("a", lambda _: None)
    other = worker.submit("b", lambda _: "b's")
    queued[1].cancel()
    worker.submit("a", lambda _: None)  # what was cancelled takes no room
    release.set()
    assert other.future.result(DEADLINE_S) == "b's"


def test_what_waits_never_starts_once_cancelled(worker: ModelWorker) -> None:
    release, ran = hold(worker), list[int]()
    work = worker.submit("a", lambda _: ran.append(1))
    last = worker.submit("a", lambda _: None)
    work.cancel()
    release.set()
    last.future.result(DEADLINE_S)
    assert not ran and work.future.cancelled()


def test_what_runs_is_told_to_stop(worker: ModelWorker) -> None:
    started = threading.Event()

    def run(work: Work[None]) -> None:
        started.set()
        while True:
            work.check()

    work = worker.submit("a", run)
    started.wait()
    work.cancel()
    assert isinstance(work.future.exception(DEADLINE_S), Cancelled)


def test_an_error_reaches_who_waits_and_the_thread_goes_on(worker: ModelWorker) -> None:
    def fail(_: Work[None]) -> None:
        raise ZeroDivisionError

    assert isinstance(worker.submit("a", fail).future.exception(DEADLINE_S), ZeroDivisionError)
    assert worker.submit("a", lambda _: 5).future.result(DEADLINE_S) == 5


def test_closing_cancels_everything() -> None:
    worker = ModelWorker()
    hold(worker)
    waiting = worker.submit("a", lambda _: None)
    worker.close()
    assert waiting.future.cancelled() and worker.num_unfinished == 0
    with pytest.raises(Closed):
        worker.submit("a", lambda _: None)
    worker.close()
