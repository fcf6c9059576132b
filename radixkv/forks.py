"""Forks of a process that has threads: what is the process' own is closed in the child.

The child has the parent's locks and memory, but only the thread that forked. A lock that another thread held would
never be released, and what that thread was changing stays half changed. So what must not be used there says so at
once, from every call: caches, and the tiers below them. Their files, their device and their threads are the parent's.

``os.fork`` and ``multiprocessing`` call this, ``subprocess`` doesn't: it runs another program at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from weakref import WeakSet

from radixkv.errors import ClosedByFork

if TYPE_CHECKING:

    class RLock:
        """The type of a ``threading.RLock``."""

        def acquire(self, blocking: bool = True) -> bool: ...
        def release(self) -> None: ...
        def __enter__(self) -> object: ...
        def __exit__(self, *error: object) -> None: ...
        def _is_owned(self) -> bool: ...
        def _at_fork_reinit(self) -> None: ...
else:
    from _thread import RLock


class OwnLock(RLock):
    """A lock for a ``with``, of one process: in a forked child this raises ClosedByFork. It is re-entrant.

    In its own process it costs what a ``threading.RLock`` costs: a fork gives it another class.
    """

    def __init__(self) -> None:
        _locks.add(self)

    def forked(self) -> None:
        """The process is a forked child."""
        self.__class__ = _ClosedLock


class _ClosedLock(OwnLock):
    """The lock of a parent process."""

    def __enter__(self) -> None:
        raise ClosedByFork


_locks: WeakSet[OwnLock] = WeakSet()


def _close_all() -> None:
    for lock in list(_locks):
        lock.forked()


os.register_at_fork(after_in_child=_close_all)
