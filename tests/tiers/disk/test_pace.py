"""A pace lets its rate of bytes through, overdraws by one operation at most, and saves up little."""

from __future__ import annotations

import threading

import pytest

from radixkv.clock import ManualClock
from radixkv.tiers.disk.io_threads import IOThreads, Job
from radixkv.tiers.disk.pace import BURST_S, Pace
from tests.waiting import LIMIT_S


def begun(pace: Pace, clock: ManualClock, num_bytes: int, seconds: float) -> int:
    """How many operations begin within a time, one as soon as it may."""
    num, ends_at = 0, clock() + seconds
    while clock() < ends_at:
        pause_s = pace.pause_s()
        if pause_s:
            clock.advance(pause_s)
        else:
            pace.spend(num_bytes)
            num += 1
    return num


@pytest.mark.parametrize("num_bytes", [100, 1_000, 100_000])
def test_a_pace_keeps_its_rate(num_bytes: int) -> None:
    clock = ManualClock()
    pace = Pace(1e5, clock)
    clock.advance(1_000.0)  # what was not used is gone
    num = begun(pace, clock, num_bytes, 50.0)
    assert 5e6 * 0.99 - num_bytes <= num * num_bytes <= 5e6 + 1e5 * BURST_S + num_bytes


def test_no_bound_and_a_new_one() -> None:
    clock = ManualClock()
    pace = Pace(None, clock)
    pace.spend(10**12)
    assert pace.pause_s() == 0.0
    pace.bytes_per_s = 100.0
    clock.advance(1.0)
    assert pace.pause_s() == 0.0
    pace.spend(1_000)
    assert pace.pause_s() == pytest.approx((1_000 - 100 * BURST_S + 1) / 100.0)
    pace.bytes_per_s = None
    assert pace.pause_s() == 0.0


def test_threads_begin_no_more_bytes_than_their_rate() -> None:
    """At a still clock only the first operation begins; closing does the rest."""
    clock = ManualClock()
    threads = IOThreads(2, 4096, clock=clock)
    threads.set_rate(1_000.0)
    clock.advance(1.0)
    jobs = [threads.submit(lambda job, memory: True, is_load=True, num_bytes=1_000) for _ in range(3)]
    assert jobs[0] is not None and jobs[0].wait(LIMIT_S)
    assert not any(job.poll(0.05) for job in jobs[1:] if job is not None)
    threads.set_rate(None)
    assert all(job is not None and job.wait(LIMIT_S) for job in jobs)
    assert threads.close()


def test_a_lane_keeps_a_thread_for_loads() -> None:
    """The planted bug is in the same test: with as many stores as threads, no load runs."""
    for most_stores, is_done in ((1, True), (2, False)):
        threads, gate = IOThreads(2, 4096, most_stores=most_stores), Job(lambda job, memory: True)
        running = threading.Semaphore(0)

        def hang(
            job: Job, memory: memoryview, gate: Job = gate, running: threading.Semaphore = running
        ) -> bool:
            running.release()
            return gate.wait(LIMIT_S)

        stores = [threads.submit(hang, is_load=False) for _ in range(3)]
        assert all(running.acquire(timeout=LIMIT_S) for _ in range(most_stores))
        load = threads.submit(lambda job, memory: True, is_load=True)
        assert load is not None and load.poll(LIMIT_S if is_done else 0.1) == is_done
        gate.end(True)
        assert all(job is not None and job.wait(LIMIT_S) for job in [*stores, load])
        assert threads.close()


def test_a_debt_ends_with_its_bound() -> None:
    clock = ManualClock()
    pace = Pace(100.0, clock)
    pace.spend(10_000)
    pace.bytes_per_s = None
    clock.advance(1.0)
    pace.bytes_per_s = 100.0
    assert pace.pause_s() <= 0.02
