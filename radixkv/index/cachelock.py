"""CacheLock: the one lock of a cache. It knows when the thread that holds it calls the cache again.

The lock is an RLock inside, whose owner is known at no cost. A second entry by the owner is a call from a callback or
from a finaliser: it raises ReentrantCall at once, where a plain lock would wait for ever.

Every entry looks at two fields, and calls ``locking.take_care`` if one is set:

    broken      an exception left the cache in the middle of a change, and repairing it has not succeeded yet
    forgotten   what finalisers gave up: it is released by the next call

This class is for the compiled build. The pure build uses ``locking.SourceLock``, whose interface is the same.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from radixkv.errors import ReentrantCall
from radixkv.index.locking import Held, Owner, take_care

if TYPE_CHECKING:
    from types import TracebackType


class CacheLock:
    """Held with ``with``.

    ``death``: why the cache can't be used any more, None while it can. ``forgotten``: pairs of a cache and what a
    finaliser gave up; ``given_up`` has the latter. ``progress``: a condition on this lock; wait for it with ``wait``.
    """

    __slots__ = ("_acquire", "_is_inside", "_release", "broken", "death", "forgotten", "given_up", "progress")

    def __init__(self) -> None:
        inner = threading.RLock()
        self._acquire: Any = inner.acquire
        self._release: Any = inner.release
        self._is_inside = False
        self.broken: Owner | None = None
        self.death: str | None = None
        self.forgotten: deque[tuple[Owner, Held]] = deque()
        self.given_up: set[Held] = set()
        self.progress = threading.Condition(inner)

    def __enter__(self) -> None:
        self._acquire()
        if self._is_inside:
            self._release()
            raise ReentrantCall
        self._is_inside = True
        if self.broken is not None or self.forgotten:
            try:
                take_care(self)
            except BaseException:
                self._is_inside = False
                self._release()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_inside = False
        self._release()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""
        if not self._acquire(False):
            return False
        is_inside = self._is_inside
        self._release()
        return is_inside

    def locked(self) -> bool:
        """Whether a thread holds it."""
        return self._is_inside

    def wait(self, timeout_s: float) -> None:
        """Give it up until ``progress`` is notified, or for so many seconds; then do what the next call would."""
        self._is_inside = False
        try:
            self.progress.wait(timeout_s)
        finally:
            self._is_inside = True
        if self.broken is not None or self.forgotten:
            take_care(self)
