"""The loop that runs the model: one thread, with an inbox, for all requests of a service.

    submit ──▶ inbox ──▶ begin ──▶ resume ──▶ step of the engine ──▶ resume ──▶ ... ──▶ Work.future
                           a round of the loop: whoever can go on does, then the engine makes one step

A piece of work is a generator (``engines.steps``). It yields whenever it has to wait, so it holds no thread. In a round
each piece goes on that has news of the engine's step, and of each tenant one piece that only let others go first. So a
tenant with much or endless work slows another down only by its share.

**Order.** An engine that makes steps (``Stepping``) gets each piece at once. It alone decides who starts, who takes
part in a step and who gives its room up. The calls of other engines have a thread each, which runs only while the loop
resumes it. So for them the loop decides who begins: tenants in turn, and a tenant's next piece when none of its begun
ones can go on, or at once if the engine batches. Work with ``patience_s`` then waits for them all the same. At most
MAX_OPEN_EACH pieces of a tenant and MAX_OPEN in all have begun; more if the engine batches more.

**Bounds.** A tenant's waiting requests are bounded: beyond that its next one is Busy, whatever others do.

**Readers.** Work whose reader is behind (``Work.is_ahead``) isn't resumed. If other work lacks room or a place that an
engine can't take from it, the piece that has waited longest for its reader is ended, if that is longer than
STALLED_AFTER_S: it raises Stalled.

Work is cancelled by its handle: waiting work never starts, other work ends itself when it is resumed, which is at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from radixkv.clock import monotonic
from radixkv.engines.protocol import Admission, Stepping
from radixkv.engines.steps import Steps, Wait
from radixkv.errors import CapacityError, QuotaExceeded

T = TypeVar("T")

MAX_OPEN_EACH = 4
"""Most pieces of a tenant's work that have begun, each with a thread; all but one wait for readers or room."""
MAX_OPEN = 64
"""Most pieces of work that have begun, each with a thread."""
STALLED_AFTER_S = 1.0
"""Work that has waited for its reader for this long may be ended when its place is needed."""


class Busy(Exception):
    """Too many requests of the tenant wait."""


class Closed(Exception):
    """The loop takes no more work."""


class Cancelled(Exception):
    """Raised inside work that must stop."""


class Stalled(Cancelled):
    """The work waited for its reader, and its place was needed."""


class Work(Generic[T]):
    """One piece of work: its future, whether it has to stop, and its prompt tokens still to compute.

    - ``is_ahead``: whether its reader must take output before it goes on. Set by who reads it; called often.
    - ``stopping``: whether it was cancelled; it checks this whenever it goes on.
    - ``is_waiting``: whether it counts as a request that hasn't started.
    """

    def __init__(
        self,
        loop: EngineLoop,
        tenant: str,
        run: Callable[[Work[T]], Steps[T]],
        num_prefill_tokens: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        self.future: Future[T] = Future()
        self.tenant = tenant
        self.num_prefill_tokens = num_prefill_tokens
        self.is_ahead: Callable[[], bool] = bool
        self.stopping = False
        # what follows is the loop's
        self.is_begun, self.is_waiting = False, True
        self.ahead_since: float | None = None
        self.wait: Wait | None = None
        self.error: Exception | None = None  # of the engine's step
        self.steps = run(self)
        self._loop = loop
        self._is_stalled = False
        self._patient_until = monotonic() + patience_s if patience_s else 0.0

    @property
    def is_patient(self) -> bool:
        """Whether it still waits for running work of its tenant, though the engine batches."""
        return self._patient_until > 0.0 and monotonic() < self._patient_until

    def hurry(self) -> None:
        """End its patience."""
        self._patient_until = 0.0

    @property
    def can_go_on(self) -> bool:
        """Whether it can be resumed."""
        if self.stopping or self.error is not None:
            return True
        return not self.is_ahead() and (self.wait is None or self.wait())

    def check(self) -> None:
        """Raise Cancelled if the work was cancelled, Stalled if the reason was an unread answer."""
        if self.stopping:
            raise Stalled if self._is_stalled else Cancelled

    def admission(self, may_start: Callable[[], object]) -> Admission:
        """Return how its call of the engine waits."""
        return Admission(may_start, self._wait_for_room, lambda: self.is_patient)

    def note_reader(self) -> None:
        """Note since when it waits for its reader."""
        if self.stopping or not self.is_ahead():
            self.ahead_since = None
        elif self.ahead_since is None:
            self.ahead_since = monotonic()

    def resume(self) -> None:
        """Go on, because the reader took the output. From any thread."""
        self._loop.wake()

    def cancel(self) -> None:
        """Never start, or stop at the next step. From any thread; may be repeated."""
        self.stopping = True
        self.future.cancel()
        self._loop.wake(self)

    def stall(self) -> None:
        """Stop with Stalled."""
        self._is_stalled = self.stopping = True

    def _wait_for_room(self, error: CapacityError) -> Steps[bool]:
        return self._loop.wait_for_room(self, error)


class EngineLoop:
    """Runs all work on one engine. Safe to use from several threads. ``close`` it when done.

    - ``max_queued``: requests of a tenant that wait.
    - ``on_error``: gets the errors of all work.
    - ``num_together``: calls of a tenant that the engine batches; 1: it doesn't.
    - ``engine``: makes steps; None: its calls are synchronous.
    """

    def __init__(
        self,
        max_queued: int = 32,
        on_error: Callable[[Exception], object] = lambda _: None,
        num_together: int = 1,
        engine: Stepping | None = None,
    ) -> None:
        self.max_queued, self._on_error = max_queued, on_error
        self._num_together, self._engine = num_together, engine
        self._changed = threading.Condition()
        self._inbox: list[Work[Any]] = []
        self._unfinished: dict[Work[Any], None] = {}
        self._num_waiting = Counter[str]()
        self._is_woken = self._is_closed = False
        self._thread: threading.Thread | None = None
        # what follows is the thread's own
        self._waiting: dict[str, deque[Work[Any]]] = {}
        """Work that hasn't begun, by tenant."""
        self._open: dict[Work[Any], None] = {}
        """Work that has begun. Of a tenant's pieces that let others go first, the next is before the others."""
        self._short: dict[Work[Any], bool] = {}
        """Work that lacks room; whether its tenant's quota is the reason."""
        self._num_ended = 0
        self._news: dict[asyncio.AbstractEventLoop, list[Callable[[], object]]] = {}
        self._look_again_at: float | None = None

    @property
    def num_unfinished(self) -> int:
        """Number of pieces of work that wait or run."""
        return len(self._unfinished)

    @property
    def num_suspended(self) -> int:
        """Number of pieces of work that wait for their reader. O(unfinished)."""
        return sum(work.is_ahead() for work in self._all())

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens still to compute in all work, as far as its ``submit`` said. O(unfinished)."""
        return sum(work.num_prefill_tokens for work in self._all() if not work.stopping)

    @property
    def num_unbegun_tokens(self) -> int:
        """The same of the work that the engine doesn't know yet. O(unfinished)."""
        waiting = [work for work in self._all() if not work.is_begun and not work.stopping]
        return sum(work.num_prefill_tokens for work in waiting)

    def _all(self) -> list[Work[Any]]:
        with self._changed:
            return list(self._unfinished)

    def submit(
        self,
        tenant: str,
        run: Callable[[Work[T]], Steps[T]],
        num_prefill_tokens: int = 0,
        *,
        patience_s: float = 0.0,
    ) -> Work[T]:
        """Let the steps of ``run`` be made. Raises Busy or Closed.

        ``patience_s``: how long it lets the tenant's other work go first, if the engine batches.
        """
        with self._changed:
            if self._is_closed:
                raise Closed
            if self._num_waiting[tenant] >= self.max_queued:
                raise Busy
            work = Work(self, tenant, run, num_prefill_tokens, patience_s)
            self._num_waiting[tenant] += 1
            self._inbox.append(work)
            self._unfinished[work] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="radixkv-model", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return work

    def call(self, tenant: str, run: Callable[[Work[T]], T]) -> Work[T]:
        """Call a function in the model's thread, between two steps of the engine. Raises Busy or Closed."""

        def called(work: Work[T]) -> Steps[T]:
            yield from ()
            return run(work)

        return self.submit(tenant, called)

    def wake(self, cancelled: Work[Any] | None = None) -> None:
        """Look again at who can go on. From any thread."""
        with self._changed:
            if cancelled is not None:
                self._waits_no_more(cancelled)
            self._is_woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel everything, wait for running work to stop, end the thread."""
        with self._changed:
            self._is_closed = True
        for work in self._all():
            work.cancel()
        self.wake()
        if self._thread is not None:
            self._thread.join()

    def tell(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        """Call something on an event loop, once all work of this round has gone on. From within work."""
        self._news.setdefault(loop, []).append(call)

    def wait_for_room(self, work: Work[Any], error: CapacityError) -> Steps[bool]:
        """Wait for the end of other work; of the same tenant if its own quota is exceeded. False if there is none."""
        is_own = isinstance(error, QuotaExceeded)
        others = [each for each in self._open if each is not work and not each.is_waiting]
        others = [each for each in others if each not in self._short]
        if work.stopping or not any(each.tenant == work.tenant or not is_own for each in others):
            return False
        self._short[work], ended = is_own, self._num_ended
        try:
            yield lambda: self._num_ended != ended
        finally:
            del self._short[work]
        return not work.stopping

    # ---- the thread

    def _run(self) -> None:
        while self._take_inbox():
            self._look_again_at = None
            has_gone_on = self._go_on()
            has_begun = self._begin()
            for work, is_own in list(self._short.items()):
                self._stall(work.tenant if is_own else None)
            self._tell()
            pause_s = self._step()
            if not has_gone_on and not has_begun and pause_s != 0.0:
                self._sleep(pause_s)

    def _take_inbox(self) -> bool:
        """Take new work. False when the loop is closed and all work has ended."""
        with self._changed:
            self._is_woken = False
            for work in self._inbox:
                self._waiting.setdefault(work.tenant, deque()).append(work)
            self._inbox.clear()
            return not self._is_over

    def _go_on(self) -> bool:
        """Resume work that can go on. Returns whether there was any."""
        had_turn: set[str] = set()
        has_gone_on = False
        for work in list(self._open):
            work.note_reader()
            if not work.can_go_on:
                continue
            if work.wait is None and not work.stopping:
                if work.tenant in had_turn:
                    continue
                had_turn.add(work.tenant)
                self._open[work] = self._open.pop(work)
            has_gone_on = True
            self._resume(work)
        return has_gone_on

    def _begin(self) -> bool:
        """Begin work. Returns whether there was any."""
        has_begun = False
        for tenant, line in list(self._waiting.items()):
            while (work := self._next_of(line)) is not None:
                has_begun = True
                self._open[work], work.is_begun = None, True
                self._resume(work, is_first=self._engine is not None)
                if self._engine is None:
                    break
            if not line:
                del self._waiting[tenant]
        return has_begun

    def _next_of(self, line: deque[Work[Any]]) -> Work[Any] | None:
        """Return the work of a tenant that begins next, if it can begin now."""
        while line and line[0].future.cancelled():
            self._forget(line.popleft())
        if not line:
            return None
        work: Work[Any] | None = line[0]
        if self._engine is None:
            work = self._beside(line, [each for each in self._open if each.tenant == line[0].tenant])
        if work is not None:
            line.remove(work)
            if not work.future.set_running_or_notify_cancel():
                self._forget(work)
                return self._next_of(line)
        return work

    def _beside(self, line: deque[Work[Any]], own: list[Work[Any]]) -> Work[Any] | None:
        """Return which synchronous call of a tenant may begin beside its own that have begun."""
        is_full = len(own) >= max(self._num_together, MAX_OPEN_EACH)
        most = max(self._num_together * (MAX_OPEN // MAX_OPEN_EACH), MAX_OPEN)
        goes_on = any(each.can_go_on for each in own)
        if is_full or len(self._open) >= most:
            if not goes_on:
                self._stall(line[0].tenant if is_full else None)
            return None
        if goes_on:
            return next((each for each in line if self._num_together > 1 and not each.is_patient), None)
        return line[0]

    def _resume(self, work: Work[Any], *, is_first: bool = False) -> None:
        """Let work go on. ``is_first``: until it waits for its start."""
        error, work.error = work.error, None
        if not is_first and work.is_waiting:
            with self._changed:
                self._waits_no_more(work)
        try:
            work.wait = next(work.steps) if error is None else work.steps.throw(error)
            return
        except StopIteration as end:
            work.future.set_result(end.value)
        except BaseException as raised:  # noqa: BLE001 the waiting caller gets any error
            if isinstance(raised, Exception):
                self._on_error(raised)
            work.future.set_exception(raised)
        del self._open[work]
        self._num_ended += 1
        self._forget(work)

    def _step(self) -> float | None:
        """Make a step of the engine. What it raises ends all work that has begun."""
        if self._engine is None or not self._open:
            return None
        try:
            return self._engine.make_step()
        except Exception as error:  # noqa: BLE001 each piece of work raises it
            for work in self._open:
                work.error = error
            return 0.0

    def _sleep(self, pause_s: float | None) -> None:
        """Wait for a change, or for a time."""
        if any(work.can_go_on for work in self._open):
            return
        if self._look_again_at is not None:
            rest_s = max(self._look_again_at - monotonic(), 0.0)
            pause_s = rest_s if pause_s is None else min(pause_s, rest_s)
        with self._changed:
            if not (self._inbox or self._is_woken or self._is_over):
                self._changed.wait(pause_s)

    @property
    def _is_over(self) -> bool:
        return self._is_closed and not self._unfinished

    def _tell(self) -> None:
        news, self._news = self._news, {}
        for loop, calls in news.items():
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(_call_all, calls)

    def _stall(self, tenant: str | None) -> None:
        """End the work, of a tenant or of any, that has waited longest for its reader, if long enough."""
        ahead = [(work.ahead_since, work) for work in self._open if tenant in (None, work.tenant)]
        found = [(since, work) for since, work in ahead if since is not None and not work.stopping]
        since, work = min(found, key=lambda each: each[0], default=(0.0, None))
        if work is not None and monotonic() >= since + STALLED_AFTER_S:
            work.stall()
        elif work is not None:
            at = since + STALLED_AFTER_S
            self._look_again_at = at if self._look_again_at is None else min(at, self._look_again_at)

    def _forget(self, work: Work[Any]) -> None:
        with self._changed:
            self._waits_no_more(work)
            self._unfinished.pop(work, None)

    def _waits_no_more(self, work: Work[Any]) -> None:
        """Count a request of its tenant less, with the lock held."""
        if work.is_waiting:
            work.is_waiting = False
            self._num_waiting[work.tenant] -= 1
            if not self._num_waiting[work.tenant]:
                del self._num_waiting[work.tenant]


def _call_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


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
