"""Reads files of secrets, locks them, and warns of those that other users of the machine can read or change."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from radixkv.signing import open_private, read_secret

log = logging.getLogger("radixkv.configuration")


def warn_unless_private(path: Path, what: str) -> None:
    """Log a warning if the file's group or others have any access to it. Says nothing of its content."""
    if os.name != "posix":
        return
    with suppress(OSError):  # reading the file reports its own error
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            log.warning("%s %s: other users can access it (mode %04o); run chmod 600 on it", what, path, mode)


def read_secrets(files: Iterable[tuple[str, str]]) -> list[bytes]:
    """Return the secrets in files, which come with the option that named them. Warns of files that others can access.

    Raises ConfigError.
    """
    found = []
    for option, path in files:
        found.append(read_secret(option, path))
        warn_unless_private(Path(path), option)
    return found


class LockHeld(Exception):
    """Another process holds a lock."""


@contextmanager
def private_lock(path: Path, may_wait: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock that is a file at ``path``, which is made if it is missing (mode 0600) and stays.

    Only this user can hold it: the file must be a regular one of this user (or root), with no access for others, and
    no symbolic link. ``may_wait()``: called while another process has the lock; it waits a little, or returns False to
    give up. Raises LockHeld then, and OSError if there can be no such file.
    """
    while True:
        descriptor = open_private(str(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            if _is_locked(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)
        if not may_wait():
            raise LockHeld


def _is_locked(descriptor: int, path: Path) -> bool:
    """Lock a file, if no other process has it; whether that succeeded, and ``path`` is still this file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False
