"""Checks the laws of a live cache repeatedly in the background, within a budget.

    with Watch(cache, budget=0.01) as watch:
        ...                              # serve
        watch.report                     # of the last round; None before the first one's end

One thread takes a snapshot and checks it, both in slices. Between slices it sleeps long enough to keep its share of
one core's time within ``budget``. A round costs time linear in the resident nodes, and the next one begins at least
``every_s`` after it. Requests wait for at most one slice of the snapshot (``radixkv.index.snapshot``).

A broken law ends the watch: ``on_broken`` is called once with the report, and ``check()`` raises it from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from radixkv.audit.invariants import Audited, BrokenLaws, Report, inspect
from radixkv.errors import ArgumentError
from radixkv.uncopied import refuse_copies


class Watch:
    """A background audit of one cache. Call ``start`` and ``stop``, or use it in a ``with``.

    - ``budget``: share of one core, above 0 and at most 1.
    - ``every_s``: seconds between rounds, ≥ 0.
    - ``on_broken``: called in the watch's thread.

    Raises ArgumentError. A broken law or a failed round ends the watch; ``check`` then raises.
    """

    def __init__(
        self,
        cache: Audited,
        *,
        budget: float = 0.01,
        every_s: float = 10.0,
        on_broken: Callable[[Report], None] = lambda report: None,
    ) -> None:
        if not isinstance(budget, (int, float)) or not 0 < budget <= 1:
            raise ArgumentError("budget", budget, "a share of one core, above 0 and at most 1")
        if not isinstance(every_s, (int, float)) or not 0 <= every_s <= threading.TIMEOUT_MAX:
            raise ArgumentError("every_s", every_s, f"seconds ≥ 0, at most {threading.TIMEOUT_MAX:.0f}")
        self.num_rounds, self.busy_s, self.asleep_s = 0, 0.0, 0.0
        self.report: Report | None = None
        self.failure: BaseException | None = None
        self._cache, self._budget, self._every_s, self._on_broken = cache, budget, every_s, on_broken
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="radixkv-audit", daemon=True)
        self._since = 0.0

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop at the next slice, and wait until the thread has ended."""
        self._stopping.set()
        self._thread.join()

    def check(self) -> None:
        """Raise IntegrityError, with ``report``, if a round found a broken law. Raise a failed round's own error."""
        if self.failure is not None:
            raise self.failure
        if self.report is not None and not self.report.ok:
            raise BrokenLaws(self.report)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._since = time.perf_counter()
            try:
                self.report = inspect(self._cache, self._pause)
                self.num_rounds += 1
                if not self.report.ok:
                    self._on_broken(self.report)
                    return
            except _Stopped:
                return
            except BaseException as error:
                self.failure = error  # a watch that has ended must not look like one that finds nothing
                raise
            self._rest(self._every_s)

    def _pause(self) -> None:
        """Sleep long enough to make up for the last slice."""
        self._rest(0.0)
        if self._stopping.is_set():
            raise _Stopped

    def _rest(self, at_least_s: float) -> None:
        spent = time.perf_counter() - self._since
        self.busy_s += spent
        rested_from = time.perf_counter()
        rest_s = max(spent * (1 / self._budget - 1), at_least_s)
        self._stopping.wait(min(rest_s, threading.TIMEOUT_MAX))
        self._since = time.perf_counter()
        self.asleep_s += self._since - rested_from


refuse_copies(Watch, "it holds a thread. Make another")


class _Stopped(Exception):
    """``stop`` was called during a round."""
