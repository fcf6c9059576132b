"""A folder that belongs to one process: private, locked, with small files that are replaced atomically.

All files are opened relative to the folder's descriptor, and never through a symbolic link. A folder that isn't ours is
refused and left alone: one with files, and without ``lock``, which is made first. ``Contents`` says which files are
ours: those of a disk tier, of a usage log, or the folders of lossy disks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from radixkv.config import LOSSY_DTYPES
from radixkv.errors import ConfigError
from radixkv.tiers.files import Files, read_exactly, write_exactly

LOCK: Final = "lock"
MASTER: Final = "master"
SLAB: Final = "slab"
STORE: Final = "store"
GENERATIONS: Final = "generations"
KEYS: Final = "keys"
OURS: Final = {LOCK, MASTER, SLAB, STORE, GENERATIONS, KEYS}
NEW: Final = ".new"


ID_BYTES: Final = 16
_NO_FILE: Final = (errno.ELOOP, errno.ENXIO)
"""Errors of opening what is no regular file: a symbolic link, a FIFO, a socket, a device."""
MAX_SMALL_BYTES: Final = 4096
"""The most bytes of a small file."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a folder holds, for messages, and whether a name is that of one of its files."""

    owner: str
    is_ours: Callable[[str], bool]


DISK_TIER: Final = Contents("a disk tier", OURS.__contains__)
LOSSY_DISKS: Final = Contents("a lossy disk", {LOCK, *LOSSY_DTYPES}.__contains__)
"""A folder with the folder of a disk tier for each lossy dtype."""


class PrivateFolder:
    """An opened and locked folder. ``close`` gives it back.

    Raises ConfigError for a folder that isn't ours, isn't private, or is in use, and OSError if the disk fails.
    """

    def __init__(self, path: Path | str, files: Files | None = None, contents: Contents = DISK_TIER) -> None:
        self.path = str(path).rstrip("/") or str(path)[:1]  # a slash at the end would follow a link
        self.files, self._contents = files or Files(), contents
        self._descriptors: list[int] = []
        try:
            self.folder = self._open_folder()
            self._lock_descriptor = self._locked()
            self.opening = self._sign_opening()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the folder back. Idempotent."""
        while self._descriptors:
            self.files.close(self._descriptors.pop())

    def is_ours(self) -> bool:
        """Whether no other process opened the folder since, as one may where flock does nothing. Raises OSError."""
        content = memoryview(bytearray(ID_BYTES))
        read_exactly(self.files, self._lock_descriptor, content, 0)
        return bytes(content) == self.opening

    def open_file(self, name: str, flags: int) -> int:
        """Open a file of the folder; ``close`` closes it. Raises OSError."""
        descriptor = self.files.open(name, flags, self.folder)
        self._descriptors.append(descriptor)
        return descriptor

    def subfolder(self, name: str) -> int:
        """Open a folder in this one, made if it is missing. Raises OSError."""
        with suppress(FileExistsError):
            self.files.make_folder(name, self.folder)
        return self.open_file(name, os.O_RDONLY | os.O_DIRECTORY)

    def read_small(self, folder: int, name: str) -> bytes | None:
        """Return a small file's bytes; None if it is absent. Empty if it is too large, or no regular file.

        Raises OSError.
        """
        try:
            descriptor = self.files.open(name, os.O_RDONLY, folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return b""
        try:
            size = os.fstat(descriptor).st_size
            if not 0 < size <= MAX_SMALL_BYTES or not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b""
            content = memoryview(bytearray(size))
            read_exactly(self.files, descriptor, content, 0)
            return bytes(content)
        finally:
            self.files.close(descriptor)

    def write_small(self, folder: int, name: str, content: bytes) -> None:
        """Replace a small file, atomically and durably. Raises OSError; then the old one is there."""
        new = name + NEW
        with self.new_file(folder, new) as descriptor:
            write_exactly(self.files, descriptor, memoryview(content), 0)
            self.files.sync(descriptor)
        self.files.rename(new, name, folder)
        self.files.sync_folder(folder)

    @contextmanager
    def new_file(self, folder: int, name: str) -> Iterator[int]:
        """Make a file, to be written in the ``with``. An error there removes it. Raises OSError."""
        with suppress(FileNotFoundError):
            self.files.remove(name, folder)
        descriptor = self.files.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder)
        try:
            yield descriptor
        except Exception:
            with suppress(OSError):  # the error that is raised counts; the next try removes the file too
                self.files.remove(name, folder)
            raise
        finally:
            self.files.close(descriptor)

    def destroy(self, folder: int, name: str) -> None:
        """Overwrite a small file, wait for the medium, and remove it. Nothing happens if it is absent.

        It is overwritten in its size, so a full disk doesn't keep it. What is no regular file, as a symbolic link, is
        removed alone. Raises OSError, also for a folder; then repeat it.
        """
        try:
            descriptor = self.files.open(name, os.O_WRONLY, folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            self.files.remove(name, folder)
            return
        try:
            size = min(os.fstat(descriptor).st_size, MAX_SMALL_BYTES)
            write_exactly(self.files, descriptor, memoryview(bytes(size)), 0)
            self.files.sync(descriptor)
        finally:
            self.files.close(descriptor)
        self.files.remove(name, folder)
        self.files.sync_folder(folder)

    def destroy_all(self, folder: int, names: Iterable[str]) -> list[OSError]:
        """Destroy small files, all that can be. Returns the errors of the others."""
        failed = []
        for name in names:
            try:
                self.destroy(folder, name)
            except OSError as error:
                failed.append(error)
        return failed

    # --- opening

    def _open_folder(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            with suppress(FileExistsError):
                self.files.make_folder(self.path, None)
            descriptor = self.files.open(self.path, flags, None)
        except OSError as error:
            allowed = f"a folder that can be made or opened, and is no symbolic link ({error.strerror})"
            raise ConfigError("folder", self.path, allowed) from None
        self._descriptors.append(descriptor)
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise ConfigError(
                "folder", self.path, f"a folder of this user ({os.geteuid()}), not {status.st_uid}'s"
            )
        if status.st_mode & 0o077:
            raise ConfigError("folder", self.path, "a folder of mode 0700, which no other user can enter")
        names = set(self.files.names(descriptor))
        if names and LOCK not in names:
            allowed = f"an empty folder, or one of {self._contents.owner}; it has {sorted(names)[0]!r}"
            raise ConfigError("folder", self.path, allowed)
        is_ours = self._contents.is_ours
        if others := sorted(name for name in names if not is_ours(name.removesuffix(NEW))):
            allowed = f"a folder with {self._contents.owner}'s files alone; it has {others[0]!r}"
            raise ConfigError("folder", self.path, allowed)
        return descriptor

    def _locked(self) -> int:
        try:
            descriptor = self.open_file(LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            allowed = f"a folder whose file {LOCK!r} can be written ({error.strerror})"
            raise ConfigError("folder", self.path, allowed) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise
            raise ConfigError("folder", self.path, "a folder that no other process uses") from None
        return descriptor

    def _sign_opening(self) -> bytes:
        """Write a random id, by which this process notices another one that opened the folder after it."""
        opening = secrets.token_bytes(ID_BYTES)
        write_exactly(self.files, self._lock_descriptor, memoryview(opening), 0)
        return opening
