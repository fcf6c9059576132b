"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Gate:
    """Lets one thread through at a time, first come, first served. Use it in a ``with``. It isn't re-entrant."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: deque[Lock] = deque()
        self._is_held = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_held:
                self._is_held = True
                return
            turn = Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:
            with self._lock:
                is_late = turn not in self._waiting
                if not is_late:
                    self._waiting.remove(turn)
            if is_late:  # it was let through at this moment
                self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let others through within the context, which lies in a ``with`` of the gate."""
        self._leave()
        try:
            yield
        finally:
            self.__enter__()

    def opened(self, call: Callable[P, R]) -> Callable[P, R]:
        """Return ``call`` as a function that runs outside the gate."""

        def outside(*args: P.args, **named: P.kwargs) -> R:
            with self.outside():
                return call(*args, **named)

        return outside
