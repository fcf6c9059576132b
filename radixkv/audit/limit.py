"""How an audit ends before it is done: a signal, or the end of its time.

Each check runs under the same ``Limit``. Its requests ask it first, so that a check ends with ``Stopped`` where it
is. The check then reports what it found until there, and those after it are *not checked*. What a check made on the
server is removed in ``cleaning``, which has a little more time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CLEANING_S = 5.0
"""How much longer a check may take to remove what it made."""


class Stopped(BaseException):
    """The check ends here; the text says why. It isn't an Exception, so that nothing takes it for a failed request."""


class Limit:
    """The time that an audit may take, in seconds, and whether somebody stopped it. None: no limit.

    Only ``stop`` may be called from a signal handler.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.clock = seconds, clock
        self.stopped: str | None = None
        """Who stopped the audit; None if nobody did."""
        self._until = float("inf") if seconds is None else clock() + seconds
        self._is_waiting = False

    @property
    def left_s(self) -> float:
        """Seconds until the end, below 0 after it; infinite without a limit."""
        return self._until - self.clock()

    def stop(self, by: str) -> None:
        """End the audit. Raises Stopped if the caller interrupted a wait; otherwise the next ``check`` does."""
        self.stopped = f"stopped by {by}"
        if self._is_waiting:
            raise Stopped(self.stopped)

    def check(self) -> None:
        """Raise Stopped if the audit was stopped, or if the time is up."""
        if self.stopped is not None:
            raise Stopped(self.stopped)
        if self.left_s <= 0:
            raise Stopped(self._time_is_up())

    def _time_is_up(self) -> str:
        return f"its share of the audit's {self.seconds or 0:g} s was up (--thorough has no limit)"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it, ``stop`` interrupts at once. Raises Stopped, also on entry."""
        self.check()
        was, self._is_waiting = self._is_waiting, True
        try:
            yield
        finally:
            self._is_waiting = was

    @contextmanager
    def part(self, share: float, at_least_s: float = 0.0) -> Iterator[None]:
        """Within it, only this share of the time that is left may be used, or so many seconds of it.

        To go on after it, call ``check``: it raises if the whole audit ended, and not only this part.
        """
        until = self._until
        self._until = min(until, self.clock() + max(share * self.left_s, at_least_s))
        try:
            yield
        finally:
            self._until = until

    @contextmanager
    def cleaning(self) -> Iterator[None]:
        """Within it, requests are sent although the audit was stopped, for CLEANING_S at most."""
        until, stopped, was = self._until, self.stopped, self._is_waiting
        self.stopped, self._until = None, max(until, self.clock() + CLEANING_S)
        try:
            yield
        except Stopped:
            pass
        finally:
            self._until, self._is_waiting = until, was
            self.stopped = stopped or self.stopped
