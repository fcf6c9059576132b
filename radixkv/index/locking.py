"""Parts of the cache's lock for both builds: the lock of the pure build, and work that waits for the next call."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from radixkv.errors import ClosedByFork, IntegrityError, ReentrantCall
from radixkv.forks import OwnLock


class Held(Protocol):
    """The state of a sequence, a lease or lent beams."""

    @property
    def is_held(self) -> bool:
        """Whether it has something to release."""

    @property
    def description(self) -> str:
        """A description with its tenant, without token ids."""


class Owner(Protocol):
    """The cache that a lock guards, with the methods that the lock and maintenance call."""

    @property
    def _lock(self) -> Lock:
        """Its lock."""

    def _repair(self) -> None:
        """Repair the state before a call. Raises IntegrityError."""

    def _give_up(self, held: Held) -> None:
        """Release what a finaliser gave up, unless it is released already."""

    def _end_due(self) -> None:
        """End expired pins and announcements."""


class Lock(Protocol):
    """The interface of the locks of both builds. See ``cachelock.CacheLock``."""

    broken: Owner | None
    death: str | None
    forgotten: deque[tuple[Owner, Held]]
    given_up: set[Held]

    @property
    def is_over(self) -> bool:
        """Whether no call works any more."""

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""


FORKED: Final[Any] = ("the process", "was forked")
"""Comes first in ``forgotten`` once this process is a forked child. So entering asks for nothing more than before."""


def is_forked(forgotten: deque[tuple[Owner, Held]]) -> bool:
    """Whether this process is a fork of the one that made the lock with these ``forgotten``."""
    return bool(forgotten) and forgotten[0] is FORKED


class SourceLock(OwnLock):
    """The lock of the pure build: see ``cachelock.CacheLock``.

    Its ``__exit__`` is RLock's own, in C. A signal could interrupt a Python function before it releases. If there is no
    memory at all, the interpreter can't call ``__exit__``, and the lock stays held after the call. The next call of the
    same thread notices that and continues.
    """

    def __init__(self) -> None:
        super().__init__()
        self.broken: Owner | None = None
        self.death: str | None = None
        self.forgotten: deque[tuple[Owner, Held]] = deque()
        self.given_up: set[Held] = set()

    def __enter__(self) -> None:
        is_left_over = self._is_owned()
        if is_left_over and _is_in_a_call():
            raise reentered(self)
        try:
            if not is_left_over:
                self.acquire()
            if self.broken is not None or self.forgotten:
                take_care(self)
        except BaseException:
            if self._is_owned():
                self.release()
            raise

    def forked(self) -> None:
        """See OwnLock. If this thread forked in a callback, it still releases the lock at the end of that call."""
        if not self._is_owned():
            self._at_fork_reinit()
        self.forgotten.appendleft(FORKED)

    @property
    def is_over(self) -> bool:
        """See CacheLock."""
        return self.death is not None or is_forked(self.forgotten)

    @property
    def is_mine(self) -> bool:
        """See CacheLock."""
        return self._is_owned()

    def locked(self) -> bool:
        """See CacheLock."""
        if self._is_owned():
            return True
        if self.acquire(blocking=False):
            self.release()
            return False
        return True


_FOLDER = f"{Path(__file__).parent}/"
_UNDER_THE_LOCK = frozenset(
    f"{name}.py"
    for name in (
        "bases",
        "blocks",
        "eviction",
        "pins",
        "recovery",
        "registry",
        "requests",
        "residency",
        "runs",
        "scrubbing",
        "tenants",
    )
)
"""Modules that run only under the lock."""


def _is_in_a_call() -> bool:
    """Whether the call that asks is nested in another call of a cache, in this thread. O(frames)."""
    frame: FrameType | None = sys._getframe(2)
    has_left = False  # the frames of the call that asks
    while frame is not None:
        folder, _, name = frame.f_code.co_filename.rpartition("/")
        if f"{folder}/" != _FOLDER:
            has_left = True
        elif has_left or name in _UNDER_THE_LOCK or frame.f_code.co_name == "begin":
            return True
        frame = frame.f_back
    return False


def take_care(lock: Lock) -> None:
    """Do the waiting work before a call: repair the cache, release what finalisers gave up.

    Runs under the lock. Raises IntegrityError if the cache is dead, or dies because it can't be repaired, and
    ClosedByFork in a forked child.
    """
    if is_forked(lock.forgotten):
        raise ClosedByFork
    if lock.death is not None:
        raise IntegrityError(lock.death)
    if lock.broken is not None:
        lock.broken._repair()
    while lock.forgotten:
        cache, given_up = lock.forgotten[0]  # stays there if this is interrupted before it is released
        lock.given_up.discard(given_up)
        cache._give_up(given_up)
        lock.forgotten.popleft()


def reentered(lock: Lock) -> ClosedByFork | ReentrantCall:
    """Return the error of a call that finds a call inside: the thread's own, or one of the parent process."""
    return ClosedByFork() if is_forked(lock.forgotten) else ReentrantCall()


def is_finalising(error: ReentrantCall) -> bool:
    """Whether the call that raised ``error`` came from a finaliser.

    That is ``__del__``, ``weakref.finalize``, or a generator or coroutine that is being closed. O(frames).
    """
    context = error.__context__
    while context is not None:
        if isinstance(context, GeneratorExit):
            return True
        context = context.__context__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code is weakref.finalize.__call__.__code__:
            return True
        frame = frame.f_back
    return False


class Guard:
    """Reports a handle that was garbage-collected before its release. Its finaliser runs when the handle is freed.

    The handle's own finaliser makes the guard. It can't report itself, because it runs too early: in a cycle the
    collector runs all finalisers before it frees anything, and another finaliser may release the handle. The guard
    never takes the lock: the collector may have started it while this thread holds any lock.
    """

    __slots__ = ("_cache", "_held")

    def __init__(self, cache: Owner, held: Held) -> None:
        self._cache, self._held = cache, held

    def __del__(self) -> None:
        cache, held = getattr(self, "_cache", None), getattr(self, "_held", None)
        if cache is None or held is None:  # __init__ was interrupted
            return
        lock = cache._lock
        if sys.is_finalizing() or lock.is_over or not held.is_held or held in lock.given_up:
            return
        later(cache, held)
        message = (
            f"{held.description} was collected before it was released; the next call of the cache releases it: "
            "call release, or use it in a with block"
        )
        warnings.warn(message, ResourceWarning, 2, source=held)


def later(cache: Owner, held: Held) -> None:
    """Let the next call release it. Needs no lock."""
    cache._lock.given_up.add(held)
    cache._lock.forgotten.append((cache, held))


def defer(cache: Owner, held: Held, error: ReentrantCall) -> None:
    """Handle a release that raised ``error``. A finaliser's release is left to the next call. A callback gets
    ``error``.
    """
    if not cache._lock.is_mine or not is_finalising(error):
        raise error
    later(cache, held)
