"""The threads that run the model, one at a time, and the queue before them.

    submit ──▶ lane of its tenant ──(turn by turn, a step each)──▶ a thread with the turn ──▶ Work.future

The queue has one lane a tenant. Tenants take turns, one step each: between two steps a piece of work calls
``Work.turn``, which lets the other tenants' work run first. So a tenant with much or endless work slows another down
only by its share of the steps. Each lane is bounded: beyond that the tenant's next request is Busy, whatever others do.

Work that has begun is *open*. It keeps its thread and its place in the cache until it ends. It computes only while it
has the turn, so one thread at a time uses the model. Open work without the turn is

- ready: it waits for its next turn;
- suspended: its reader must first take the available output (``Work.turn(is_ahead)``); it gets no turn until then;
- short of blocks: other open work has to end first (``Work.wait_for_room``).

A lane begins its next piece of work when none of its open work is ready, and at once if the engine batches. Then work
with ``patience_s`` still waits for the lane's ready work, for that time, and other work of the lane goes first. At most
MAX_OPEN_EACH pieces of a lane and MAX_OPEN in all are open; more if the engine batches more. That bound, or the cache's
capacity, may keep other work waiting. Then the piece that has been suspended longest is ended, if that is longer than
STALLED_AFTER_S: it raises Stalled.

Work is cancelled by its ``Work`` handle: waiting work never starts, open work ends itself at its next step.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from radixkv.clock import monotonic
from radixkv.errors import CapacityError, QuotaExceeded

T = TypeVar("T")

MAX_OPEN_EACH = 4
"""Most pieces of a tenant's work that are open at once; all but one of them are suspended or short of blocks."""
MAX_OPEN = 64
"""Most pieces of work that are open at once: each has a thread."""
STALLED_AFTER_S = 1.0
"""Work that has been suspended for this long may be ended when its place is needed."""


class Busy(Exception):
    """The tenant's lane is full."""


class Closed(Exception):
    """The worker takes no more work."""


class Cancelled(Exception):
    """Raised inside open work that must stop."""


class Stalled(Cancelled):
    """The work waited for its reader, and its place was needed."""


class Work(Generic[T]):
    """One piece of work: its future, whether it has to stop, and its prompt tokens still to compute."""

    def __init__(
        self,
        worker: ModelWorker,
        tenant: str,
        run: Callable[[Work[T]], T],
        num_prefill_tokens: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        self.future: Future[T] = Future()
        self.tenant = tenant
        self.num_prefill_tokens = num_prefill_tokens
        self.has_turn = threading.Semaphore(0)
        self._worker, self._run = worker, run
        self._stopping = threading.Event()
        self._is_stalled = False
        self._patient_until = monotonic() + patience_s if patience_s else 0.0

    @property
    def is_patient(self) -> bool:
        """Whether it still waits for open work of its tenant, though the engine batches."""
        return self._patient_until > 0.0 and monotonic() < self._patient_until

    def hurry(self) -> None:
        """End its patience."""
        self._patient_until = 0.0

    @property
    def stopping(self) -> bool:
        """Whether the work was cancelled; the work checks it between its steps."""
        return self._stopping.is_set()

    def check(self) -> None:
        """Raise Cancelled if the work was cancelled, Stalled if the reason was an unread answer."""
        if self._stopping.is_set():
            raise Stalled if self._is_stalled else Cancelled

    def turn(self, is_ahead: Callable[[], bool] | None = None) -> None:
        """Let the other tenants' work make a step, and wait while ``is_ahead()`` is true.

        Called from the work's own thread.

        ``is_ahead`` is called once and has to be quick. ``resume`` ends the wait, and so does ``cancel``.
        """
        self._worker.give_way(self, is_ahead)

    def wait_for_room(self, error: CapacityError) -> bool:
        """Wait until other open work has ended; False if there is none, so that waiting won't help.

        Called from the work's own thread, when the cache has no blocks for its next step.
        """
        return self._worker.wait_for_room(self, error)

    def resume(self) -> None:
        """Continue, because the reader took the output. From any thread."""
        self._worker.wake(self)

    def cancel(self) -> None:
        """Never start, or stop at the next step. From any thread; may be repeated."""
        self._stopping.set()
        self.future.cancel()
        self._worker.wake(self)

    def stall(self) -> None:
        """Stop with Stalled."""
        self._is_stalled = True
        self._stopping.set()

    def execute(self, on_error: Callable[[Exception], object]) -> None:
        """Run in the calling thread and settle the future; errors go to ``on_error`` too."""
        if self.future.set_running_or_notify_cancel():
            try:
                result = self._run(self)
            except BaseException as error:  # noqa: BLE001 the waiting caller gets any error
                if isinstance(error, Exception):
                    on_error(error)
                self.future.set_exception(error)
            else:
                self.future.set_result(result)


class _Lane:
    """A tenant's work that hasn't begun, its work that is ready for a turn, and its number of open pieces."""

    __slots__ = ("num_open", "ready", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Work[Any]] = deque()
        self.ready: deque[Work[Any]] = deque()
        self.num_open = 0

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.ready or self.num_open)


class _Thread(threading.Thread):
    """Runs a piece of work, and then the next one that it gets; None ends it."""

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(name="radixkv-model", daemon=True)
        self.given: SimpleQueue[Work[Any] | None] = SimpleQueue()
        self._worker = worker

    def run(self) -> None:
        while (work := self.given.get()) is not None:
            self._worker.run(work, self)


class ModelWorker:
    """Fair, bounded lanes of work on one model. Thread-safe. ``close`` it when done."""

    def __init__(
        self,
        max_queued: int = 32,
        on_error: Callable[[Exception], object] = lambda _: None,
        num_together: int = 1,
    ) -> None:
        """``num_together``: pieces of a tenant's work that the engine batches; 1: it doesn't."""
        self.max_queued, self._on_error = max_queued, on_error
        self._num_together = num_together
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()
        self._unfinished: dict[Work[Any], None] = {}
        self._open: set[Work[Any]] = set()
        self._suspended: dict[Work[Any], float] = {}  # when it was suspended
        self._short: dict[Work[Any], bool] = {}  # whether its tenant's quota is the reason
        self._running: Work[Any] | None = None
        self._idle: list[_Thread] = []
        self._lock = threading.Condition()
        self._timer: threading.Timer | None = None
        self._closed = False

    @property
    def _most_open_each(self) -> int:
        return max(self._num_together, MAX_OPEN_EACH)

    @property
    def _most_open(self) -> int:
        """As many tenants as without batches can have all their pieces open."""
        return max(self._num_together * (MAX_OPEN // MAX_OPEN_EACH), MAX_OPEN)

    @property
    def num_unfinished(self) -> int:
        """Number of pieces of work that wait or are open."""
        with self._lock:
            return len(self._unfinished)

    @property
    def num_suspended(self) -> int:
        """Number of pieces of work that wait for their reader."""
        with self._lock:
            return len(self._suspended)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens still to compute in all work, as far as its ``submit`` said. O(unfinished)."""
        with self._lock:
            return sum(work.num_prefill_tokens for work in self._unfinished if not work.stopping)

    @property
    def num_unbegun_tokens(self) -> int:
        """The same of the work that hasn't begun. O(unfinished)."""
        with self._lock:
            unbegun = [work for work in self._unfinished if work not in self._open and not work.stopping]
            return sum(work.num_prefill_tokens for work in unbegun)

    def submit(
        self,
        tenant: str,
        run: Callable[[Work[T]], T],
        num_prefill_tokens: int = 0,
        *,
        patience_s: float = 0.0,
    ) -> Work[T]:
        """Queue ``run`` in the tenant's lane. O(tenants with work). Raises Busy or Closed.

        ``patience_s``: how long it lets the tenant's other work go first, if the engine batches.
        """
        with self._lock:
            if self._closed:
                raise Closed
            lane = self._lanes.setdefault(tenant, _Lane())
            if len(lane.waiting) >= self.max_queued:
                self._drop_cancelled(lane)
            if len(lane.waiting) >= self.max_queued:
                raise Busy
            work = Work(self, tenant, run, num_prefill_tokens, patience_s)
            lane.waiting.append(work)
            self._unfinished[work] = None
            self._dispatch()
            return work

    def close(self) -> None:
        """Cancel everything, wait for running work to stop, end the threads."""
        with self._lock:
            self._closed = True
            unfinished = list(self._unfinished)
        for work in unfinished:
            work.cancel()
        with self._lock:
            self._dispatch()
            self._lock.wait_for(lambda: not self._open)
            for lane in self._lanes.values():
                self._drop_cancelled(lane)
            threads, self._idle = self._idle, []
            if self._timer is not None:
                self._timer.cancel()
        for thread in threads:
            thread.given.put(None)
            thread.join()

    # ---- called from the threads that run work

    def run(self, work: Work[Any], thread: _Thread) -> None:
        """Run a piece of work that has the turn, to its end."""
        work.execute(self._on_error)
        with self._lock:
            self._open.discard(work)
            self._unfinished.pop(work, None)
            lane = self._lanes[work.tenant]
            lane.num_open -= 1
            if lane.is_empty:
                del self._lanes[work.tenant]
            for each in [*self._short]:
                self._make_ready(each)
            self._running = None
            self._idle.append(thread)
            self._dispatch()
            self._lock.notify_all()

    def give_way(self, work: Work[Any], is_ahead: Callable[[], bool] | None) -> None:
        """Let others have the turn, if there are any, and wait for the next one: see ``Work.turn``."""
        with self._lock:
            if work.stopping:
                return
            if is_ahead is not None and is_ahead():
                self._suspended[work] = monotonic()
                self._relieve()
            elif self._is_awaited(work.tenant):
                self._lanes[work.tenant].ready.append(work)
            else:
                return
            self._running = None
            self._dispatch()
        work.has_turn.acquire()

    def wait_for_room(self, work: Work[Any], error: CapacityError) -> bool:
        """Wait for the end of other work; of the same tenant if its own quota is exceeded."""
        with self._lock:
            is_own = isinstance(error, QuotaExceeded)
            others = [
                each
                for each in self._open
                if each is not work and each not in self._short and (each.tenant == work.tenant or not is_own)
            ]
            if work.stopping or not others:
                return False
            self._short[work] = is_own
            self._relieve()
            self._running = None
            self._dispatch()
        work.has_turn.acquire()
        return not work.stopping

    def wake(self, work: Work[Any]) -> None:
        """Make suspended work, or work that is short of blocks, ready for a turn."""
        with self._lock:
            if work in self._suspended or work in self._short:
                self._make_ready(work)
                self._dispatch()

    # ---- with the lock held

    def _make_ready(self, work: Work[Any]) -> None:
        self._suspended.pop(work, None)
        self._short.pop(work, None)
        self._lanes[work.tenant].ready.append(work)

    def _is_awaited(self, tenant: str) -> bool:
        """Whether any work other than this tenant's one open piece could have the turn."""
        return any(
            lane.ready or (lane.waiting and (name != tenant or self._begins_beside(lane) is not None))
            for name, lane in self._lanes.items()
        )

    def _begins_beside(self, lane: _Lane) -> Work[Any] | None:
        """Return which piece of work a lane begins next beside its open ones that are ready, if any."""
        has_place = lane.num_open < self._most_open_each and len(self._open) < self._most_open
        if self._num_together == 1 or not has_place:
            return None
        return next(
            (work for work in lane.waiting if not work.is_patient and not work.future.cancelled()), None
        )

    def _dispatch(self) -> None:
        """Give the turn to the next piece of work, if it is free."""
        if self._running is not None or (work := self._next()) is None:
            return
        self._running = work
        if work in self._open:
            work.has_turn.release()
            return
        self._open.add(work)
        self._lanes[work.tenant].num_open += 1
        if self._idle:
            thread = self._idle.pop()
        else:
            thread = _Thread(self)
            thread.start()
        thread.given.put(work)

    def _next(self) -> Work[Any] | None:
        for tenant, lane in list(self._lanes.items()):
            work = self._next_of(lane)
            if work is not None:
                self._lanes.move_to_end(tenant)
                return work
            if lane.is_empty:
                del self._lanes[tenant]
        return None

    def _next_of(self, lane: _Lane) -> Work[Any] | None:
        beside = self._begins_beside(lane) if lane.ready else None
        if lane.ready and beside is None:
            return lane.ready.popleft()
        while lane.waiting and lane.waiting[0].future.cancelled():
            del self._unfinished[lane.waiting.popleft()]
        if not lane.waiting:
            return lane.ready.popleft() if lane.ready else None
        is_full = lane.num_open >= self._most_open_each
        if not is_full and len(self._open) < self._most_open:
            work = lane.waiting[0] if beside is None else beside
            lane.waiting.remove(work)
            return work
        found = self._stalled(lane.waiting[0].tenant if is_full else None)
        if found is not None:
            self._stall(found)
        return found

    def _relieve(self) -> None:
        """End stalled work for each piece that is short of blocks."""
        for work, is_own in list(self._short.items()):
            found = self._stalled(work.tenant if is_own else None)
            if found is not None:
                self._stall(found)
                self._lanes[found.tenant].ready.append(found)

    def _stalled(self, tenant: str | None) -> Work[Any] | None:
        """Return the work, of a tenant or of any, that was suspended longest, if long enough; otherwise check again
        in time."""
        for work, since in self._suspended.items():
            if tenant in (None, work.tenant):
                wait_s = since + STALLED_AFTER_S - monotonic()
                if wait_s <= 0:
                    return work
                self._look_again(wait_s)
                break
        return None

    def _look_again(self, wait_s: float) -> None:
        if self._timer is None and not self._closed:
            self._timer = threading.Timer(wait_s, self._on_time)
            self._timer.daemon = True
            self._timer.start()

    def _on_time(self) -> None:
        with self._lock:
            self._timer = None
            self._relieve()
            self._dispatch()

    def _stall(self, work: Work[Any]) -> None:
        del self._suspended[work]
        work.stall()

    def _drop_cancelled(self, lane: _Lane) -> None:
        """Forget cancelled work that never started. O(lane), and only when the lane is full or the worker is closed."""
        kept = [work for work in lane.waiting if not work.future.cancelled()]
        for work in lane.waiting:
            if work.future.cancelled():
                del self._unfinished[work]
        lane.waiting.clear()
        lane.waiting.extend(kept)


async def finished(work: Work[T]) -> T:
    """Return the work's result. Cancelling the wait leaves the work alone; a cancelled work raises Cancelled."""
    waiting = asyncio.wrap_future(work.future)
    try:
        await asyncio.wait([waiting])
        if waiting.cancelled():
            raise Cancelled
        return waiting.result()
    finally:
        _detach(waiting)  # the wait may be cancelled just when the work ends


def _detach(waiting: asyncio.Future[Any]) -> None:
    """Ignore the outcome of a future that nothing waits for."""
    waiting.add_done_callback(lambda done: None if done.cancelled() else done.exception())
