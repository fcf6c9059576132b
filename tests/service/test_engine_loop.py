"""The loop of the model: turns between tenants, bounds, cancelling and closing, with and without an engine's steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from radixkv.engines.calls import is_stepping
from radixkv.engines.steps import Pause, Steps, in_thread
from radixkv.errors import CapacityError, QuotaExceeded
from radixkv.service.engine_loop import Busy, Cancelled, Closed, EngineLoop, Stalled, Work
from tests.tiers.support import PATIENT_S
from tests.waiting import LIMIT_S, eventually, is_set


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop(max_queued=3)
    yield loop
    loop.close()
    assert loop.num_unfinished == 0


def hold(loop: EngineLoop, tenant: str = "z") -> threading.Event:
    """Keep the thread busy until the event is set or the work is cancelled."""
    release, started = threading.Event(), threading.Event()

    def run(work: Work[None]) -> None:
        started.set()
        while not release.wait(0.01):
            work.check()

    loop.call(tenant, run)
    is_set(started)
    return release


def test_tenants_take_turns(loop: EngineLoop) -> None:
    release, order = hold(loop), list[str]()
    works = [
        loop.call(tenant, lambda _, tenant=tenant: order.append(tenant))  # type: ignore[misc]
        for tenant in ("a", "a", "a", "b", "c", "b")
    ]
    release.set()
    for work in works:
        work.future.result(LIMIT_S)
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_a_tenant_whose_requests_wait_does_not_block_others(loop: EngineLoop) -> None:
    release = hold(loop)
    queued = [loop.call("a", lambda _: None) for _ in range(3)]
    with pytest.raises(Busy):
        loop.call("a", lambda _: None)
    other = loop.call("b", lambda _: "b's")
    queued[1].cancel()
    queued[1].cancel()
    loop.call("a", lambda _: None)  # a cancelled work item does not count
    with pytest.raises(Busy):
        loop.call("a", lambda _: None)
    release.set()
    assert other.future.result(LIMIT_S) == "b's"


def test_waiting_work_never_starts_once_cancelled(loop: EngineLoop) -> None:
    release, ran = hold(loop), list[int]()
    work = loop.call("a", lambda _: ran.append(1))
    last = loop.call("a", lambda _: None)
    work.cancel()
    release.set()
    last.future.result(LIMIT_S)
    assert not ran and work.future.cancelled()


def test_an_error_reaches_the_caller_and_the_thread_continues(loop: EngineLoop) -> None:
    def fail(_: Work[None]) -> None:
        raise ZeroDivisionError

    assert isinstance(loop.call("a", fail).future.exception(LIMIT_S), ZeroDivisionError)
    assert loop.call("a", lambda _: 5).future.result(LIMIT_S) == 5


def test_closing_cancels_everything() -> None:
    loop = EngineLoop()
    hold(loop)
    waiting = loop.call("a", lambda _: None)
    loop.close()
    assert waiting.future.cancelled() and loop.num_unfinished == 0
    with pytest.raises(Closed):
        loop.call("a", lambda _: None)
    loop.close()


def steps(loop: EngineLoop, tenant: str, order: list[str], num: int, name: str = "") -> Work[None]:
    """Submit work with ``num`` steps. Each step appends a name, or the tenant's, to ``order``."""

    def run(work: Work[None]) -> Steps[None]:
        for _ in range(num):
            yield None
            work.check()
            order.append(name or tenant)

    return loop.submit(tenant, run)


def test_running_work_yields_to_other_tenants_at_each_step(loop: EngineLoop) -> None:
    release, order = hold(loop), list[str]()
    endless = steps(loop, "a", order, 10**9)
    works = [steps(loop, tenant, order, 3) for tenant in ("b", "c", "b")]
    release.set()
    for work in works:
        work.future.result(LIMIT_S)
    endless.cancel()
    with pytest.raises(Cancelled):
        endless.future.result(LIMIT_S)
    done = order[: len(order) - order[::-1].index("b")]
    assert done.count("b") == 6 and done.count("c") == 3
    assert done.count("a") <= 10, "one step of a for each step of b"


def test_work_of_one_tenant_runs_in_sequence(loop: EngineLoop) -> None:
    order: list[str] = []
    release = hold(loop)
    works = [steps(loop, "a", order, 3, name) for name in ("1", "2")]
    steps(loop, "b", order, 6)
    release.set()
    for work in works:
        work.future.result(LIMIT_S)
    assert [each for each in order if each != "b"] == ["1"] * 3 + ["2"] * 3


def test_calls_with_threads_compute_one_at_a_time(loop: EngineLoop) -> None:
    inside = threading.Lock()

    def call(pause: Pause) -> int:
        for _ in range(100):
            assert inside.acquire(blocking=False)
            inside.release()
            pause()
        return threading.get_ident()

    works = [loop.submit(tenant, lambda _: in_thread(call)) for tenant in "abcdefgh"]
    assert len({work.future.result(LIMIT_S) for work in works}) == 8


def test_a_call_whose_steps_are_closed_ends() -> None:
    ended: list[str] = []

    def call(pause: Pause) -> None:
        try:
            while True:
                pause()
        finally:
            ended.append(threading.current_thread().name)

    made = in_thread(call)
    assert next(made) is None and next(made) is None
    made.close()
    assert ended == ["radixkv-call"]
    in_thread(call).close()
    assert len(ended) == 1, "it never began"


def ahead(loop: EngineLoop, tenant: str = "a") -> tuple[Work[str], threading.Event]:
    """Work that waits for its reader until the event is set and it is resumed."""
    taken = threading.Event()

    def run(work: Work[str]) -> Steps[str]:
        work.is_ahead = lambda: not taken.is_set()
        yield None
        work.check()
        return "read"

    return loop.submit(tenant, run), taken


def test_work_that_is_ahead_of_its_reader_is_suspended(loop: EngineLoop) -> None:
    work, taken = ahead(loop)
    eventually(lambda: loop.num_suspended == 1)
    assert loop.call("a", lambda _: "next").future.result(LIMIT_S) == "next"
    assert loop.call("b", lambda _: "other").future.result(LIMIT_S) == "other"
    work.resume()
    assert loop.num_suspended == 1
    taken.set()
    work.resume()
    assert work.future.result(LIMIT_S) == "read"
    eventually(lambda: loop.num_suspended == 0)


def test_suspended_work_can_be_cancelled(loop: EngineLoop) -> None:
    work, _ = ahead(loop)
    eventually(lambda: loop.num_suspended == 1)
    work.cancel()
    assert type(work.future.exception(LIMIT_S)) is Cancelled


@pytest.mark.parametrize("bound", ["MAX_OPEN_EACH", "MAX_OPEN"])
def test_the_longest_suspended_work_ends_when_its_place_is_needed(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr("radixkv.service.engine_loop.STALLED_AFTER_S", 0.2)
    monkeypatch.setattr(f"radixkv.service.engine_loop.{bound}", 2)
    first, _ = ahead(loop)
    eventually(lambda: loop.num_suspended == 1)
    second, taken = ahead(loop)
    eventually(lambda: loop.num_suspended == 2)
    tenant = "a" if bound == "MAX_OPEN_EACH" else "b"
    assert loop.call(tenant, lambda _: 5).future.result(LIMIT_S) == 5
    assert isinstance(first.future.exception(LIMIT_S), Stalled)
    taken.set()
    second.resume()
    assert second.future.result(LIMIT_S) == "read"


def lacking(loop: EngineLoop, tenant: str, error: CapacityError, has_room: threading.Event) -> Work[str]:
    """Work that lacks blocks until the event is set."""

    def run(work: Work[str]) -> Steps[str]:
        wait_for_room = work.admission(lambda: None).on_no_room
        assert wait_for_room is not None
        while not has_room.is_set():
            if not (yield from wait_for_room(error)):
                work.check()
                return "refused"
        return "found"

    return loop.submit(tenant, run)


def test_work_without_free_blocks_waits_for_other_work(loop: EngineLoop) -> None:
    room = threading.Event()
    held, order = threading.Event(), list[str]()

    def run(work: Work[None]) -> Steps[None]:
        while not held.is_set():
            yield None
        order.append("last")
        room.set()

    other = loop.submit("z", run)
    work = lacking(loop, "a", CapacityError(), room)
    held.set()
    assert work.future.result(LIMIT_S) == "found" and other.future.done() and order


def test_work_does_not_wait_for_blocks_that_cannot_become_free(loop: EngineLoop) -> None:
    never = threading.Event()
    assert lacking(loop, "a", CapacityError(), never).future.result(LIMIT_S) == "refused"
    release = hold(loop)
    both = [lacking(loop, tenant, CapacityError(), never) for tenant in "ab"]
    release.set()
    assert [work.future.result(LIMIT_S) for work in both] == ["refused", "refused"]
    suspended, _ = ahead(loop)
    eventually(lambda: loop.num_suspended == 1)
    own = QuotaExceeded(2, 1, 1, 0)
    assert lacking(loop, "b", own, never).future.result(LIMIT_S) == "refused"
    suspended.cancel()


def test_a_suspended_stream_ends_to_free_its_blocks(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.service.engine_loop.STALLED_AFTER_S", 0.2)
    suspended, _ = ahead(loop)
    eventually(lambda: loop.num_suspended == 1)
    work = lacking(loop, "b", CapacityError(), threading.Event())
    assert isinstance(suspended.future.exception(LIMIT_S), Stalled)
    assert work.future.result(LIMIT_S) == "refused", (
        "all other work has ended, and there is still no free block"
    )


def test_closing_ends_suspended_work() -> None:
    loop = EngineLoop()
    work, _ = ahead(loop)
    eventually(lambda: loop.num_suspended == 1)
    loop.close()
    assert isinstance(work.future.exception(0), Cancelled) and loop.num_unfinished == 0


def test_an_engine_that_batches_gets_all_of_a_tenants_work_up_to_its_bound() -> None:
    loop, open_now, most = EngineLoop(max_queued=40, num_together=16), 0, 0

    def run(work: Work[int]) -> Steps[int]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        for _ in range(20):
            yield None
        open_now -= 1
        return 1

    try:
        release = hold(loop)
        works = [loop.submit("a", run) for _ in range(40)]
        release.set()
        other = loop.submit("b", run)
        assert sum(each.future.result(LIMIT_S) for each in (*works, other)) == 41
        assert most in (16, 17)
    finally:
        loop.close()


def test_a_batching_engine_serves_a_small_tenant_beside_a_flood() -> None:
    loop, order = EngineLoop(max_queued=40, num_together=16), list[str]()
    try:
        release = hold(loop)
        works = [steps(loop, "flood", order, 20) for _ in range(32)] + [steps(loop, "calm", order, 20)]
        release.set()
        for each in works:
            each.future.result(LIMIT_S)
    finally:
        loop.close()
    calm = [at for at, tenant in enumerate(order) if tenant == "calm"]
    assert calm[-1] - calm[0] < 20 * 3, "every other turn is its own"


def test_patient_work_lets_its_tenants_other_work_go_first_for_its_time() -> None:
    loop, order, held = EngineLoop(max_queued=40, num_together=16), list[str](), threading.Event()

    def running(name: str) -> Callable[[Work[None]], Steps[None]]:
        def run(work: Work[None]) -> Steps[None]:
            order.append(name)
            while not held.is_set():
                yield None
                work.check()

        return run

    try:
        open_work = loop.submit("a", running("open"))
        patient = loop.submit("a", running("patient"), patience_s=PATIENT_S)
        short = loop.submit("a", running("short"), patience_s=0.2)
        later = loop.submit("a", running("later"))
        other = loop.submit("b", running("other"), patience_s=PATIENT_S)
        eventually(lambda: len(order) == 4)
        assert set(order) == {"open", "later", "other", "short"} and not patient.future.running()
        held.set()
        for work in (open_work, patient, short, later, other):
            work.future.result(LIMIT_S)
        assert order[-1] == "patient", "it begins when the tenant's other work is over"
    finally:
        loop.close()


def test_work_that_is_to_hurry_begins_at_once() -> None:
    loop = EngineLoop(num_together=16)
    release, order = hold(loop, "a"), list[str]()
    try:
        turning = steps(loop, "a", order, 10**9)
        patient = loop.submit("a", lambda _: iter_of(5), patience_s=PATIENT_S)
        patient.hurry()
        release.set()
        assert patient.future.result(LIMIT_S) == 5 and not turning.future.done()
    finally:
        loop.close()


def iter_of(value: int) -> Steps[int]:
    yield from ()
    return value


class Stepper:
    """An engine that makes steps: its requests wait for the next one. All have places, up to ``num_places``."""

    makes_steps = True

    def __init__(self, num_places: int) -> None:
        self.num_places, self.num_steps, self.threads = num_places, 0, set[int]()
        self.waiting: dict[object, bool] = {}
        self.fails = False

    def generating(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("tests use asked")

    prefilling = publishing = generating

    def asked(self, work: Work[int], num: int) -> Steps[int]:
        """A request of some steps."""
        me, admission = object(), work.admission(lambda: None)
        self.waiting[me] = False
        try:
            for _ in range(num):
                while not self.waiting[me]:
                    yield lambda: self.waiting[me]
                    work.check()
                admission.may_start()
                self.waiting[me] = False
            return self.num_steps
        finally:
            del self.waiting[me]

    def make_step(self) -> float | None:
        self.threads.add(threading.get_ident())
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        some = list(self.waiting)[: self.num_places]
        self.num_steps += bool(some)
        for each in some:
            self.waiting[each] = True
        return 0.0 if some else None


def stepping(num_places: int = 2) -> tuple[EngineLoop, Any]:
    engine: Any = Stepper(num_places)
    assert is_stepping(engine)
    return EngineLoop(max_queued=4, num_together=2, engine=engine), engine


def test_one_thread_steps_for_all_and_what_waits_counts_against_its_tenant() -> None:
    loop, engine = stepping()
    try:
        release = hold(loop)
        works = [loop.submit("a", lambda work: engine.asked(work, 5)) for _ in range(4)]
        with pytest.raises(Busy):
            loop.submit("a", lambda work: engine.asked(work, 5))
        release.set()
        assert [work.future.result(LIMIT_S) for work in works] == [5, 5, 10, 10], "two at a time"
        assert len(engine.threads) == 1
        again = [loop.submit("a", lambda work: engine.asked(work, 10**9)) for _ in range(2)]
        eventually(lambda: not any(each.is_waiting for each in again))
        for _ in range(4):
            loop.submit("a", lambda work: engine.asked(work, 1))
        with pytest.raises(Busy):
            loop.submit("a", lambda work: engine.asked(work, 1))
    finally:
        loop.close()
    assert not engine.waiting and loop.num_unfinished == 0


def test_begun_work_is_cancelled_whether_or_not_it_has_started() -> None:
    loop, engine = stepping(1)
    try:
        first, second = [loop.submit("a", lambda work: engine.asked(work, 10**9)) for _ in range(2)]
        eventually(lambda: not first.is_waiting and second.is_begun)
        second.cancel()
        assert type(second.future.exception(LIMIT_S)) is Cancelled
        first.cancel()
        assert type(first.future.exception(LIMIT_S)) is Cancelled
    finally:
        loop.close()


def test_an_error_of_a_step_ends_what_has_begun() -> None:
    loop, engine = stepping()
    try:
        works = [loop.submit("a", lambda work: engine.asked(work, 10**9)) for _ in range(2)]
        eventually(lambda: engine.num_steps > 3)
        engine.fails = True
        assert {type(work.future.exception(LIMIT_S)) for work in works} == {ZeroDivisionError}
        assert loop.submit("a", lambda work: engine.asked(work, 1)).future.result(LIMIT_S)
    finally:
        loop.close()
