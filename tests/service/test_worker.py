"""The thread of the model: turns between tenants, bounds, cancelling and closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from radixkv.errors import CapacityError, QuotaExceeded
from radixkv.service.worker import Busy, Cancelled, Closed, ModelWorker, Stalled, Work
from tests.tiers.support import PATIENT_S
from tests.waiting import LIMIT_S, eventually


@pytest.fixture
def worker() -> Iterator[ModelWorker]:
    worker = ModelWorker(max_queued=3)
    yield worker
    worker.close()
    assert worker.num_unfinished == 0


def hold(worker: ModelWorker, tenant: str = "z") -> threading.Event:
    """Keep the thread busy until the event is set or the work is cancelled."""
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
        work.future.result(LIMIT_S)
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_a_full_lane_does_not_block_other_lanes(worker: ModelWorker) -> None:
    release = hold(worker)
    queued = [worker.submit("a", lambda _: None) for _ in range(3)]
    with pytest.raises(Busy):
        worker.submit("a", lambda _: None)
    other = worker.submit("b", lambda _: "b's")
    queued[1].cancel()
    worker.submit("a", lambda _: None)  # a cancelled work item does not count
    release.set()
    assert other.future.result(LIMIT_S) == "b's"


def test_waiting_work_never_starts_once_cancelled(worker: ModelWorker) -> None:
    release, ran = hold(worker), list[int]()
    work = worker.submit("a", lambda _: ran.append(1))
    last = worker.submit("a", lambda _: None)
    work.cancel()
    release.set()
    last.future.result(LIMIT_S)
    assert not ran and work.future.cancelled()


def test_running_work_is_asked_to_stop(worker: ModelWorker) -> None:
    started = threading.Event()

    def run(work: Work[None]) -> None:
        started.set()
        while True:
            work.check()

    work = worker.submit("a", run)
    started.wait()
    work.cancel()
    assert isinstance(work.future.exception(LIMIT_S), Cancelled)


def test_an_error_reaches_the_caller_and_the_thread_continues(worker: ModelWorker) -> None:
    def fail(_: Work[None]) -> None:
        raise ZeroDivisionError

    assert isinstance(worker.submit("a", fail).future.exception(LIMIT_S), ZeroDivisionError)
    assert worker.submit("a", lambda _: 5).future.result(LIMIT_S) == 5


def test_closing_cancels_everything() -> None:
    worker = ModelWorker()
    hold(worker)
    waiting = worker.submit("a", lambda _: None)
    worker.close()
    assert waiting.future.cancelled() and worker.num_unfinished == 0
    with pytest.raises(Closed):
        worker.submit("a", lambda _: None)
    worker.close()


def steps(worker: ModelWorker, tenant: str, order: list[str], num: int) -> Work[None]:
    """Submit work with ``num`` steps. Each step appends the tenant to ``order``."""

    def run(work: Work[None]) -> None:
        for _ in range(num):
            work.turn()
            work.check()
            order.append(tenant)

    return worker.submit(tenant, run)


def test_running_work_yields_to_other_tenants_at_each_step(worker: ModelWorker) -> None:
    release, order = hold(worker), list[str]()
    endless = steps(worker, "a", order, 10**9)
    works = [steps(worker, tenant, order, 3) for tenant in ("b", "c", "b")]
    release.set()
    for work in works:
        work.future.result(LIMIT_S)
    endless.cancel()
    with pytest.raises(Cancelled):
        endless.future.result(LIMIT_S)
    done = order[: len(order) - order[::-1].index("b")]
    assert done.count("b") == 6 and done.count("c") == 3
    assert done.count("a") <= 10, "one step of a for each step of b"


def test_work_of_one_tenant_runs_in_sequence(worker: ModelWorker) -> None:
    order: list[str] = []
    release = hold(worker)
    works = [
        worker.submit("a", lambda work, n=n: [order.append(n) or work.turn() for _ in range(3)])  # type: ignore[func-returns-value]
        for n in ("1", "2")
    ]
    steps(worker, "b", order, 6)
    release.set()
    for work in works:
        work.future.result(LIMIT_S)
    assert [each for each in order if each != "b"] == ["1"] * 3 + ["2"] * 3


def test_only_one_piece_of_work_computes_at_a_time(worker: ModelWorker) -> None:
    inside = threading.Lock()

    def run(work: Work[None]) -> None:
        for _ in range(200):
            assert inside.acquire(blocking=False)
            inside.release()
            work.turn()

    for work in [worker.submit(tenant, run) for tenant in "abcdefgh"]:
        work.future.result(LIMIT_S)


def ahead(worker: ModelWorker, tenant: str = "a") -> tuple[Work[str], threading.Event]:
    """Work that is suspended until the event is set and it is resumed."""
    taken = threading.Event()

    def run(work: Work[str]) -> str:
        while not taken.is_set():
            work.turn(lambda: not taken.is_set())
            work.check()
        return "read"

    return worker.submit(tenant, run), taken


def test_work_that_is_ahead_of_its_reader_is_suspended(worker: ModelWorker) -> None:
    work, taken = ahead(worker)
    eventually(lambda: worker.num_suspended == 1)
    assert worker.submit("a", lambda _: "next").future.result(LIMIT_S) == "next"
    assert worker.submit("b", lambda _: "other").future.result(LIMIT_S) == "other"
    work.resume()
    eventually(lambda: worker.num_suspended == 1)
    taken.set()
    work.resume()
    assert work.future.result(LIMIT_S) == "read" and worker.num_suspended == 0


def test_suspended_work_can_be_cancelled(worker: ModelWorker) -> None:
    work, _ = ahead(worker)
    eventually(lambda: worker.num_suspended == 1)
    work.cancel()
    assert type(work.future.exception(LIMIT_S)) is Cancelled


@pytest.mark.parametrize("bound", ["MAX_OPEN_EACH", "MAX_OPEN"])
def test_the_longest_suspended_work_ends_when_its_place_is_needed(
    worker: ModelWorker, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr("radixkv.service.worker.STALLED_AFTER_S", 0.2)
    monkeypatch.setattr(f"radixkv.service.worker.{bound}", 2)
    first, _ = ahead(worker)
    eventually(lambda: worker.num_suspended == 1)
    second, taken = ahead(worker)
    eventually(lambda: worker.num_suspended == 2)
    tenant = "a" if bound == "MAX_OPEN_EACH" else "b"
    assert worker.submit(tenant, lambda _: 5).future.result(LIMIT_S) == 5
    assert isinstance(first.future.exception(LIMIT_S), Stalled)
    taken.set()
    second.resume()
    assert second.future.result(LIMIT_S) == "read"


def lacking(worker: ModelWorker, tenant: str, error: CapacityError, has_room: threading.Event) -> Work[str]:
    """Work that lacks blocks until the event is set."""

    def run(work: Work[str]) -> str:
        while not has_room.is_set():
            if not work.wait_for_room(error):
                work.check()
                return "refused"
        return "found"

    return worker.submit(tenant, run)


def test_work_without_free_blocks_waits_for_other_work(worker: ModelWorker) -> None:
    room = threading.Event()
    other = hold(worker)
    work = lacking(worker, "a", CapacityError(), room)
    last = worker.submit("z", lambda each: [each.turn() for _ in range(5)] and room.set())
    other.set()
    assert work.future.result(LIMIT_S) == "found" and last.future.done()


def test_work_does_not_wait_for_blocks_that_cannot_become_free(worker: ModelWorker) -> None:
    never = threading.Event()
    assert lacking(worker, "a", CapacityError(), never).future.result(LIMIT_S) == "refused"
    release = hold(worker)
    both = [lacking(worker, tenant, CapacityError(), never) for tenant in "ab"]
    release.set()
    assert [work.future.result(LIMIT_S) for work in both] == ["refused", "refused"]
    suspended, _ = ahead(worker)
    eventually(lambda: worker.num_suspended == 1)
    own = QuotaExceeded(2, 1, 1, 0)
    assert lacking(worker, "b", own, never).future.result(LIMIT_S) == "refused"
    suspended.cancel()


def test_a_suspended_stream_ends_to_free_its_blocks(
    worker: ModelWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.service.worker.STALLED_AFTER_S", 0.2)
    suspended, _ = ahead(worker)
    eventually(lambda: worker.num_suspended == 1)
    work = lacking(worker, "b", CapacityError(), threading.Event())
    assert isinstance(suspended.future.exception(LIMIT_S), Stalled)
    assert work.future.result(LIMIT_S) == "refused", (
        "all other work has ended, and there is still no free block"
    )


def test_closing_ends_suspended_work() -> None:
    worker = ModelWorker()
    work, _ = ahead(worker)
    eventually(lambda: worker.num_suspended == 1)
    worker.close()
    assert isinstance(work.future.exception(0), Cancelled) and worker.num_unfinished == 0


def test_threads_are_reused(worker: ModelWorker) -> None:
    def name(_: Work[int]) -> int:
        return threading.get_ident()

    assert len({worker.submit(tenant, name).future.result(LIMIT_S) for tenant in "abcabc"}) <= 2


def test_an_engine_that_batches_gets_all_of_a_tenants_work_up_to_its_bound() -> None:
    """Each piece needs the others to run beside it: one after another, the barrier would never open."""
    worker = ModelWorker(max_queued=40, num_together=16)
    open_now, most, lock = 0, 0, threading.Lock()

    def run(work: Work[int]) -> int:
        nonlocal open_now, most
        with lock:
            open_now += 1
            most = max(most, open_now)
        for _ in range(50):
            work.turn()
        with lock:
            open_now -= 1
        return 1

    try:
        works = [worker.submit("a", run) for _ in range(40)]
        other = worker.submit("b", run)
        assert sum(each.future.result(LIMIT_S) for each in (*works, other)) == 41
        assert most in (16, 17)
    finally:
        worker.close()


def test_a_batching_engine_serves_a_small_tenant_beside_a_flood() -> None:
    worker, order = ModelWorker(max_queued=40, num_together=16), list[str]()

    def run(work: Work[None]) -> None:
        for _ in range(20):
            order.append(work.tenant)
            work.turn()

    try:
        works = [worker.submit("flood", run) for _ in range(32)] + [worker.submit("calm", run)]
        for each in works:
            each.future.result(LIMIT_S)
    finally:
        worker.close()
    calm = [at for at, tenant in enumerate(order) if tenant == "calm"]
    assert calm[-1] - calm[0] < 20 * 3, "every other turn is its own"


def test_patient_work_lets_its_tenants_other_work_go_first_for_its_time() -> None:
    worker, order, held = ModelWorker(max_queued=40, num_together=16), list[str](), threading.Event()

    def run(work: Work[None], name: str) -> None:
        order.append(name)
        while not held.is_set():
            work.turn()
            work.check()

    try:
        open_work = worker.submit("a", lambda work: run(work, "open"))
        patient = worker.submit("a", lambda work: run(work, "patient"), patience_s=PATIENT_S)
        short = worker.submit("a", lambda work: run(work, "short"), patience_s=0.2)
        later = worker.submit("a", lambda work: run(work, "later"))
        other = worker.submit("b", lambda work: run(work, "other"), patience_s=PATIENT_S)
        eventually(lambda: len(order) == 4)
        assert set(order) == {"open", "later", "other", "short"} and not patient.future.running()
        held.set()
        for work in (open_work, patient, short, later, other):
            work.future.result(LIMIT_S)
        assert order[-1] == "patient", "it begins when the tenant's other work is over"
    finally:
        worker.close()


def test_work_that_is_to_hurry_begins_at_once() -> None:
    worker = ModelWorker(num_together=16)
    release = hold(worker, "a")
    try:
        patient = worker.submit("a", lambda _: 5, patience_s=PATIENT_S)
        turning = worker.submit("a", lambda work: [work.turn() for _ in range(3)])
        patient.hurry()
        release.set()
        assert patient.future.result(LIMIT_S) == 5 and turning.future.result(LIMIT_S)
    finally:
        worker.close()
