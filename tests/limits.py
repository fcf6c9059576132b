"""Limits of every test, as a pytest plugin: what hangs is named, shown and ended, and costs only itself.

A test may use 120 s of this process' CPU time and 900 s of time, with its fixtures, finalisers and the collection of
its garbage. CPU time is what finds an endless loop; time only finds what waits for ever, and is so long that no busy
machine needs it. ``--cpu-limit-s`` and ``--wall-limit-s`` set other limits, and a test its own:
``@pytest.mark.limit(cpu_s=…, wall_s=…)``.

1. A signal looks every 5 s, and at a limit raises ``LimitReached`` in the main thread, again every 30 s if that was
   swallowed. It is a BaseException: neither the test's code nor Hypothesis takes it for a failing example. The stacks
   of all threads go to stderr, and the next test runs.
2. A process that can't even be interrupted (a lock of C code, a compiled loop) prints its stacks and exits 120 s after
   the limit. pytest-xdist then names the test and starts another worker.
3. When the last test is over, threads are waited for that would keep the process alive. One that doesn't end fails
   the run, with its name and the test that started it. If the process still doesn't end, case 2 applies.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Generator
from concurrent.futures import thread as _pools
from math import inf
from types import FrameType
from typing import TextIO

import pytest

CPU_LIMIT_S = 120.0
WALL_LIMIT_S = 900.0
GRACE_S = 120.0
"""How long a process lives on that doesn't react to its limit, or doesn't end after its last test."""
_AGAIN_S = 30.0
_LOOK_S = 5.0


class LimitReached(BaseException):
    """A test has used up its CPU time or its time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("limits")
    group.addoption("--cpu-limit-s", type=float, default=CPU_LIMIT_S, help="CPU seconds of a test")
    group.addoption("--wall-limit-s", type=float, default=WALL_LIMIT_S, help="seconds of a test")
    group.addoption(
        "--grace-s", type=float, default=GRACE_S, help="seconds from a limit to the end of the process"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(cpu_s, wall_s): other limits than those of every test")
    config.pluginmanager.register(Limits(config), "limits")


class Limits:
    """The limits of one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self._cpu_s: float = config.option.cpu_limit_s
        self._wall_s: float = config.option.wall_limit_s
        self._grace_s: float = config.option.grace_s
        self._stderr: TextIO = os.fdopen(os.dup(2), "w")  # pytest captures descriptor 2 while a test runs
        self._test = "the start of the run"
        self._reached: str | None = None
        self._may_interrupt = False
        self._cpu_until = self._until = inf
        self._exits_at: float | None = None
        self._started_by: dict[threading.Thread, str] = {}
        self._exit_unless_over_in(self._wall_s + self._grace_s)
        # Whoever ends a run from outside, because it takes too long, sees where it is.
        faulthandler.register(signal.SIGTERM, file=self._stderr, chain=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """The start is over. A controller of pytest-xdist now waits for its workers, which have these limits."""
        self._never_exit()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        mark = item.get_closest_marker("limit")
        given = mark.kwargs if mark else {}
        cpu_s, wall_s = given.get("cpu_s", self._cpu_s), given.get("wall_s", self._wall_s)
        self._test, self._reached = item.nodeid, None
        self._cpu_until, self._until = time.process_time() + cpu_s, time.monotonic() + wall_s
        signal.signal(signal.SIGALRM, self._look)
        self._exit_unless_over_in(wall_s + self._grace_s)
        # A timer of CPU time would make `time.process_time` as coarse as the kernel's ticks.
        interval_s = min(_LOOK_S, cpu_s, wall_s)
        signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
        try:
            return (yield)
        finally:
            self._stop_looking()
            self._never_exit()  # a worker of pytest-xdist may wait for its next test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Also collect the garbage of a module before the next one, in which an unreleased sequence may be an error.

        What is left stays: later collections skip it. Otherwise each would take half a second.
        """
        try:
            return (yield from self._phase())
        finally:
            self._note_threads()
            if nextitem is None or nextitem.path != item.path:
                self._collect_garbage()
            if nextitem is None:
                self._wait_for_threads()

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        """pytest has just called off the exit of a process that hangs."""
        if self._exits_at is not None:
            self._exit_unless_over_in(self._exits_at - time.monotonic())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._exit_unless_over_in(self._grace_s)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if hasattr(config, "workerinput"):
            self._never_exit()  # pytest-xdist ends its workers when the last one is ready
        else:
            self._exit_unless_over_in(self._grace_s)

    def _phase(self) -> Generator[None, object, object]:
        self._may_interrupt = True
        try:
            done = yield
        except LimitReached:
            self._reached = None  # this phase reports it
            raise
        finally:
            self._may_interrupt = False
        self._raise_if_reached()
        return done

    def _collect_garbage(self) -> None:
        self._may_interrupt = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
        finally:
            self._may_interrupt = False
        gc.freeze()
        self._raise_if_reached()

    def _look(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the test if it has reached a limit."""
        if time.process_time() >= self._cpu_until:
            used = "CPU time"
        elif time.monotonic() >= self._until:
            used = "time"
        else:
            return
        if self._reached is None:
            self._reached = f"{self._test} used up its {used}"
            print(f"\n{self._reached}. The stacks of all threads:", file=self._stderr, flush=True)
            faulthandler.dump_traceback(self._stderr)
            self._exit_unless_over_in(self._grace_s)
        self._cpu_until, self._until = inf, time.monotonic() + _AGAIN_S  # fixtures can be torn down meanwhile
        if self._may_interrupt:  # otherwise pytest itself runs: the next phase raises
            raise LimitReached(self._reached)

    def _stop_looking(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _raise_if_reached(self) -> None:
        """Fail a test that swallowed its interruption, as a finaliser does."""
        if (reached := self._reached) is not None:
            self._reached = None
            raise LimitReached(reached)

    def _note_threads(self) -> None:
        alive = {each for each in threading.enumerate() if _keeps_alive(each)}
        self._started_by = {each: self._started_by.get(each, self._test) for each in alive}

    def _wait_for_threads(self) -> None:
        self._stop_looking()
        self._exit_unless_over_in(2 * self._grace_s)
        until = time.monotonic() + self._grace_s
        for thread in self._started_by:
            thread.join(max(0.0, until - time.monotonic()))
        left = {each: test for each, test in self._started_by.items() if each.is_alive()}
        if left:
            faulthandler.dump_traceback(self._stderr)
            told = "; ".join(f"{thread.name}, started during {test}" for thread, test in left.items())
            pytest.fail(f"threads that never end, and so the process: {told}", pytrace=False)

    def _exit_unless_over_in(self, seconds: float) -> None:
        """Let a thread that needs no lock of Python's print the stacks and exit with 1, unless this is called again."""
        self._exits_at = time.monotonic() + seconds
        faulthandler.dump_traceback_later(max(0.1, seconds), exit=True, file=self._stderr)

    def _never_exit(self) -> None:
        self._exits_at = None
        faulthandler.cancel_dump_traceback_later()


def _keeps_alive(thread: threading.Thread) -> bool:
    """Whether the interpreter waits for a thread when it ends. Idle threads of pools are told to end then."""
    return (
        not thread.daemon and thread is not threading.main_thread() and thread not in _pools._threads_queues
    )
