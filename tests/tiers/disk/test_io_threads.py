"""Threads for I/O: a job that can't begin leaves its caller's memory alone, and is counted."""

from __future__ import annotations

import threading

import pytest

from radixkv.clock import ManualClock
from radixkv.tiers.disk.io_threads import START_AGAIN_S, IOThreads, Job
from tests.tiers.support import WAIT_S
from tests.waiting import is_set


def held(threads: IOThreads, gate: threading.Event) -> Job:
    """A job that has begun, and ends when the gate opens."""
    begun = threading.Event()

    def work(job: Job, memory: memoryview) -> bool:
        begun.set()
        return gate.wait(WAIT_S)

    job = threads.submit(work, is_load=True)
    assert job is not None
    is_set(begun)
    return job


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("num_running", [0, 1])
def test_a_system_without_more_threads(
    num_running: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The threads that there are do the work. Without any, a job is refused, not queued for a thread that may come."""
    clock = ManualClock()
    threads, gate, done = IOThreads(2, 4096, clock=clock), threading.Event(), list[str]()
    running = [held(threads, gate) for _ in range(num_running)]

    def work(job: Job, memory: memoryview) -> bool:
        done.append("work")
        return True

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        job = threads.submit(work, is_load=True)
        assert num_running or all(threads.submit(work, is_load=True) is None for _ in range(20))
    assert (job is not None) == bool(num_running)
    assert caplog.text.count("can't start new thread") == 1, "not at each job"
    clock.advance(START_AGAIN_S)
    gate.set()
    if job is not None:
        assert job.wait(WAIT_S) and all(each.wait(WAIT_S) for each in running)
    later = threads.submit(work, is_load=True)
    assert later is not None and later.wait(WAIT_S)
    assert done == ["work"] * (1 + num_running)
    assert threads.close(WAIT_S) and not threads.is_alive


@pytest.mark.parametrize("ends_by", ["abandoned", "close"])
def test_a_job_that_never_begins_is_counted_once(ends_by: str) -> None:
    threads, gate, counted = IOThreads(1, 4096), threading.Event(), list[str]()
    running = held(threads, gate)
    job = threads.submit(lambda job, memory: True, is_load=True, unwanted=lambda: counted.append("unwanted"))
    assert job is not None
    if ends_by == "abandoned":
        job.cancel()
    else:
        assert not threads.close(0.0), "one of its threads is busy"
        assert job.is_done and counted == ["unwanted"]
    gate.set()
    assert running.wait(WAIT_S) and threads.close(WAIT_S)
    assert counted == ["unwanted"] and not job.wait(WAIT_S)


def test_stores_that_fill_their_queue_leave_that_of_loads_alone() -> None:
    threads, gate = IOThreads(1, 4096, max_queued=8), threading.Event()
    running = held(threads, gate)
    stores = [threads.submit(lambda job, memory: True, is_load=False) for _ in range(20)]
    load = threads.submit(lambda job, memory: True, is_load=True)
    assert load is not None and stores.count(None) == 12
    gate.set()
    assert running.wait(WAIT_S) and load.wait(WAIT_S)
    assert threads.close(WAIT_S) and all(each.wait(0) for each in stores if each is not None)
