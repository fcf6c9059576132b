"""CacheLock: the one lock of a cache. It detects when the thread that holds it calls the cache again.

It contains an RLock, which knows its owner at no cost. If the owner enters again, the call comes from a callback or a
finaliser. It gets ReentrantCall at once. With a plain lock it would wait for ever.

Every entry looks at two fields, and calls ``locking.take_care`` if one is set:

    broken      an exception left the cache in the middle of a change, and repairing it has not succeeded yet
    forgotten   handles that finalisers gave up: the next call releases them; in a forked child it says so

This class is for the compiled build. The pure build uses ``locking.SourceLock`` with the same interface.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from radixkv.index.locking import Held, Owner, SourceLock, is_forked, reentered, take_care

if TYPE_CHECKING:
    from types import TracebackType


class CacheLock:
    """The lock, held with ``with``.

    - ``death``: why the cache can no longer be used; None while it can.
    - ``forgotten``: pairs of a cache and a state that a finaliser gave up. ``given_up`` has only the states.
    """

    __slots__ = ("_acquire", "_is_inside", "_release", "broken", "death", "forgotten", "given_up")

    def __init__(self) -> None:
        inner = SourceLock()  # it hears of forks
        self._acquire: Any = inner.acquire
        self._release: Any = inner.release
        self._is_inside = False
        self.broken: Owner | None = None
        self.death: str | None = None
        self.forgotten: deque[tuple[Owner, Held]] = inner.forgotten
        self.given_up: set[Held] = set()

    def __enter__(self) -> None:
        self._acquire()
        if self._is_inside:
            self._release()
            raise reentered(self)
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
    def is_over(self) -> bool:
        """Whether no call works any more: the cache is dead, or this process is a forked child."""
        return self.death is not None or is_forked(self.forgotten)

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
