"""The one thread that runs the model, and the queue before it.

The queue has one lane a tenant, served in turn, so that a tenant with much waiting delays another by one
piece of work at most, and each lane is bounded: beyond that the tenant is told Busy, whatever others do.
Work is cancelled by its ``Work`` handle: what waits never starts, what runs is told through ``Work.stopping``
and ends itself at its next step.

    submit ──▶ lane of its tenant ──(turn by turn)──▶ thread ──▶ Work.future
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Busy(Exception):
    """The tenant's lane is full."""


class Closed(Exception):
    """The worker takes no more work."""


class Cancelled(Exception):
    """Raised inside running work that was told to stop."""


class Work(Generic[T]):
    """One piece of work: its future, whether it has to stop, and how many prompt tokens it has still to compute."""

    def __init__(self, run: Callable[[Work[T]], T], num_prefill_tokens: int = 0) -> None:
        self.future: Future[T] = Future()
        self.num_prefill_tokens = num_prefill_tokens
        self._run = run
        self._stopping = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether the work was cancelled; asked by what runs, between its steps."""
        return self._stopping.is_set()

    def check(self) -> None:
        """Raise Cancelled if the work was cancelled."""
        if self._stopping.is_set():
            raise Cancelled

    def cancel(self) -> None:
        """Never start, or stop at the next step. From any thread, as often as you like."""
        self._stopping.set()
        self.future.cancel()

    def execute(self, on_error: Callable[[Exception], object]) -> None:
        """Run, in the calling thread, and settle the future; ``on_error`` hears of errors that nobody waits for too."""
        if self.future.set_running_or_notify_cancel():
            try:
                result = self._run(self)
            except BaseException as error:  # noqa: BLE001 whoever waits gets it, whatever it is
                if isinstance(error, Exception):
                    on_error(error)
                self.future.set_exception(error)
            else:
                self.future.set_result(result)


class ModelWorker:
    """A thread with fair, bounded lanes. ``close`` it when done."""

    def __init__(
        self, max_queued: int = 32, on_error: Callable[[Exception], object] = lambda _: None
    ) -> None:
        self.max_queued, self._on_error = max_queued, on_error
        self._lanes: OrderedDict[str, deque[Work[Any]]] = OrderedDict()
        self._unfinished: dict[Work[Any], str] = {}
        self._wakeup = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="radixkv-model", daemon=True)
        self._thread.start()

    @property
    def num_unfinished(self) -> int:
        """Pieces of work that wait or run."""
        with self._wakeup:
            return len(self._unfinished)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that all of it has still to compute, as far as who submitted it says. O(unfinished)."""
        with self._wakeup:
            return sum(work.num_prefill_tokens for work in self._unfinished if not work.future.cancelled())

    def submit(self, tenant: str, run: Callable[[Work[T]], T], num_prefill_tokens: int = 0) -> Work[T]:
        """Queue ``run`` in the tenant's lane. O(1). Raises Busy or Closed."""
        with self._wakeup:
            if self._closed:
                raise Closed
            lane = self._lanes.setdefault(tenant, deque())
            if len(lane) >= self.max_queued:
                self._drop_cancelled(lane)
            if len(lane) >= self.max_queued:
                raise Busy
            work = Work(run, num_prefill_tokens)
            lane.append(work)
            self._unfinished[work] = tenant
            self._wakeup.notify()
            return work

    def close(self) -> None:
        """Cancel everything, wait for what runs to stop, end the thread."""
        with self._wakeup:
            self._closed = True
            for work in self._unfinished:
                work.cancel()
            self._wakeup.notify()
        self._thread.join()

    def _drop_cancelled(self, lane: deque[Work[Any]]) -> None:
        """Let go of what would never start. O(lane), and only when the lane is full."""
        kept = [work for work in lane if not work.future.cancelled()]
        for work in lane:
            if work.future.cancelled():
                del self._unfinished[work]
        lane.clear()
        lane.extend(kept)

    def _forget(self, work: Work[Any]) -> None:
        with self._wakeup:
            self._unfinished.pop(work, None)

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            work.execute(self._on_error)
            self._forget(work)

    def _next(self) -> Work[Any] | None:
        with self._wakeup:
            while not self._lanes:
                if self._closed:
                    return None
                self._wakeup.wait()
            tenant, lane = next(iter(self._lanes.items()))
            work = lane.popleft()
            if lane:
                self._lanes.move_to_end(tenant)
            else:
                del self._lanes[tenant]
            return work


async def finished(work: Work[T]) -> T:
    """The work's result. Cancelling the wait leaves the work alone; a cancelled work raises Cancelled."""
    waiting = asyncio.wrap_future(work.future)
    try:
        await asyncio.wait([waiting])
        if waiting.cancelled():
            raise Cancelled
        return waiting.result()
    finally:
        if not waiting.done():
            _detach(waiting)


def _detach(waiting: asyncio.Future[Any]) -> None:
    """Let nobody be told about the outcome of a future that nobody waits for any more."""
    waiting.add_done_callback(lambda done: None if done.cancelled() else done.exception())
