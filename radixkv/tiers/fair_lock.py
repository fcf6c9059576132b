"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import ParamSpec, TypeVar

from radixkv.forks import OwnLock

P = ParamSpec("P")
R = TypeVar("R")


class FairLock:
    """Lets one thread through at a time, first come, first served. Use it in a ``with``. It isn't re-entrant."""

    def __init__(self) -> None:
        self._lock = OwnLock()
        self._waiting: deque[Lock] = deque()
        self._is_held = False
        self._owner: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is in it."""
        return self._owner == get_ident()

    def enter_if_free(self) -> bool:
        """Enter if nobody is in it, and return whether it did. Never waits. Leave with ``leave``."""
        with self._lock:
            if self._is_held:
                return False
            self._is_held, self._owner = True, get_ident()
            return True

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_held:
                self._is_held, self._owner = True, get_ident()
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
                self.leave()
            raise
        self._owner = get_ident()

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Let the next thread through."""
        with self._lock:
            self._owner = None
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let others through within the context, which lies in a ``with`` of the gate."""
        self.leave()
        try:
            yield
        finally:
            try:
                self.__enter__()
            except BaseException:  # the caller leaves the gate, so it must be in it
                self.__enter__()
                raise

    def opened(self, call: Callable[P, R]) -> Callable[P, R]:
        """Return ``call`` as a function that runs outside the gate."""

        def outside(*args: P.args, **named: P.kwargs) -> R:
            with self.outside():
                return call(*args, **named)

        return outside
