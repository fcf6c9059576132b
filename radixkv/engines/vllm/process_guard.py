"""Runs a command, keeps the end of its output, and ends it with everything that it started as soon as stdin ends.

    python -P process_guard.py GRACE_S FOLDER LOG COMMAND…

Its parent keeps the other end of stdin. However the parent ends, the pipe closes, and the command's process group gets
SIGTERM, and SIGKILL after the grace. It exits with the command's code. If this process is killed itself, the kernel
kills the command (Linux).

LOG gets the command's output. A file of LOG_BYTES is renamed to LOG.1, in the place of an older one, and a new one
begins.

FOLDER has the command's keys. Whoever owns it holds a lock on it (``owned_folder``). Without an owner it is removed: by
this process at its end, or by the next ``remove_abandoned``, if this process was killed too.

Needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOG_BYTES = 16 << 20
"""Bytes of output in a file of the log. There are at most two files."""
_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.1
_CHUNK_BYTES = 65_536


def main(grace_s: float, folder: Path, log: Path, command: list[str]) -> int:
    """Run the command to its end, or to the end of stdin. Returns its exit code."""
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    output, theirs = os.pipe()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        process_group=0,
        preexec_fn=die_with_parent,
    )
    os.close(theirs)
    kept, until, read = _Log(log), float("inf"), [0, output]
    while child.poll() is None and time.monotonic() < until:
        for each in select.select(read, [], [], _LOOK_EVERY_S)[0]:
            content = os.read(each, _CHUNK_BYTES)
            if not content:
                read.remove(each)
            if each == output:
                kept.write(content)
            elif not content:
                until = time.monotonic() + grace_s
                _end(child, signal.SIGTERM)
    _end(child, signal.SIGKILL)  # also what it left behind
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):
        while content := os.read(output, _CHUNK_BYTES):
            kept.write(content)
    remove_if_abandoned(folder)
    return child.wait()


class _Log:
    """A log of at most two files. What can't be written is dropped: the command must never wait for it."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, content: bytes) -> None:
        with contextlib.suppress(OSError):
            status = os.fstat(self._file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size + len(content) > LOG_BYTES:
                self._path.rename(f"{self._path}.1")
                full, self._file = self._file, self._path.open("xb", buffering=0)
                full.close()
            self._file.write(content)


def owned_folder(prefix: str) -> tuple[Path, int]:
    """Make a folder for this user alone, in the system's folder for such. Returns it with its lock, a descriptor.

    It is owned until the descriptor is closed, also by the end of this process.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        lock = _locked(folder)
        if lock is not None:
            return folder, lock


def remove_abandoned(prefix: str) -> None:
    """Remove this user's folders of ``owned_folder`` that nobody owns any more."""
    for each in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        remove_if_abandoned(each)


def remove_if_abandoned(folder: Path) -> None:
    """Remove a folder of this user that nobody owns."""
    lock = _locked(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder of this user. Returns the descriptor; None if it is another's, is locked or is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        status = os.fstat(lock)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(status, folder.lstat()):
                return lock
    os.close(lock)
    return None


def _end(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]) & 0xFF)
