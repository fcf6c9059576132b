"""A folder that belongs to one process: private, locked, with small files that are replaced atomically.

All files are opened relative to the folder's descriptor, and never through a symbolic link. A folder that isn't ours is
refused and left alone: one with files, and without ``lock``, which is made first. ``Contents`` says which files are
ours. A foreign name inside a disk tier's ``keys`` or ``generations`` is refused too. The folder ``lost+found`` of a new
ext4 file system is nobody's: it is left alone. Files of a disk tier that others could access get mode 0600 again, when
its folder is opened.
"""

from __future__ import annotations

import errno
import fcntl
import logging
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
from radixkv.files.system import Files, read_exactly, write_exactly
from radixkv.uncopied import refuse_copies

LOCK: Final = "lock"
MASTER: Final = "master"
SLAB: Final = "slab"
STORE: Final = "store"
GENERATIONS: Final = "generations"
KEYS: Final = "keys"
OURS: Final = {LOCK, MASTER, SLAB, STORE, GENERATIONS, KEYS}
LOST_FOUND: Final = "lost+found"
"""A folder at the root of ext4 file systems."""
NEW: Final = ".new"
GONE: Final = ".gone"
"""Behind the name of a key that a purge destroys."""
ID_BYTES: Final = 16
_NO_FILE: Final = (errno.ELOOP, errno.ENXIO)
"""Errors of opening what is no regular file: a symbolic link, a FIFO, a socket, a device."""
_FAULTS: Final = (
    errno.EROFS, errno.EIO, errno.ENODEV, errno.ESTALE, errno.EUCLEAN, errno.ENOTCONN, errno.ETIMEDOUT
)  # fmt: skip
"""Errors of a disk, not of the settings that name a folder on it."""
MAX_SMALL_BYTES: Final = 4096
"""The most bytes of a small file."""

log = logging.getLogger("radixkv.tiers")


def is_tag(name: str) -> bool:
    """Whether a name is one of a tenant or a key: 32 hex digits."""
    return len(name) == 2 * ID_BYTES and all(each in "0123456789abcdef" for each in name)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a folder holds, for messages, and whether a name is that of one of its files."""

    owner: str
    is_ours: Callable[[str], bool]


DISK_TIER: Final = Contents("a disk tier", OURS.__contains__)
OLD_DISKS: Final = Contents("several disk tiers", {LOCK, *LOSSY_DTYPES}.__contains__)
"""A folder of an earlier version, with the folder of a disk tier for each lossy dtype. It can be emptied."""


def private_folder(path: str, files: Files) -> tuple[int, bool]:
    """Open a folder of this user alone, made if it is missing. Returns its descriptor, and whether it was made.

    Raises ConfigError for a folder that others can enter or that is a symbolic link, and OSError if the disk fails.
    """
    is_made = False
    try:
        with suppress(FileExistsError):
            files.make_folder(path, None)
            is_made = True
        descriptor = files.open(path, os.O_RDONLY | os.O_DIRECTORY, None)
    except OSError as error:
        if error.errno in _FAULTS:
            raise
        allowed = f"a folder that can be made or opened, and is no symbolic link ({error.strerror})"
        raise ConfigError("folder", path, allowed) from None
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return descriptor, is_made
    files.close(descriptor)
    if status.st_uid != os.geteuid():
        allowed = f"a folder of this user ({os.geteuid()}), not {status.st_uid}'s"
    else:
        allowed = "a folder of mode 0700, which no other user can enter"
    raise ConfigError("folder", path, allowed)


class PrivateFolder:
    """An opened and locked folder. ``close`` gives it back.

    ``signs``: False to call ``sign`` later. Until then nothing in the folder changes, except that a new one gets its
    ``lock``.

    Raises ConfigError for a folder that isn't ours, isn't private, or is in use, and OSError if the disk fails.
    """

    def __init__(
        self,
        path: Path | str,
        files: Files | None = None,
        contents: Contents = DISK_TIER,
        *,
        signs: bool = True,
    ) -> None:
        self.path = str(path).rstrip("/") or str(path)[:1]  # a slash at the end would follow a link
        self.files, self._contents = files or Files(), contents
        self._descriptors: list[int] = []
        self.opening, self._is_made, self._is_fresh = b"", False, False
        try:
            self.folder = self._open_folder()
            self._lock_descriptor = self._locked()
            has_lock_alone = set(self.names()) == {LOCK}
            self._is_fresh = has_lock_alone and not os.fstat(self._lock_descriptor).st_size
            if signs:
                self.sign()
        except BaseException:
            self.close()
            raise

    def sign(self) -> None:
        """Write a random id, by which this process notices another one that opened the folder after it."""
        self.opening = secrets.token_bytes(ID_BYTES)
        write_exactly(self.files, self._lock_descriptor, memoryview(self.opening), 0)

    def close(self, *, is_refused: bool = False) -> None:
        """Give the folder back. Idempotent. ``is_refused``: if it was empty or missing before, make it so again."""
        if is_refused and self._is_fresh and self._descriptors:
            with suppress(OSError):
                self._unmake()
        while self._descriptors:
            self.files.close(self._descriptors.pop())

    def _unmake(self) -> None:
        """Remove what is ours, and the folder if it was made here; nothing if another process has signed."""
        if os.fstat(self._lock_descriptor).st_size != len(self.opening) or not self.is_ours():
            return
        self._remove_ours(self.folder)
        if self._is_made:
            self.files.remove_folder(self.path, None)

    def _remove_ours(self, folder: int) -> None:
        """Remove what is ours in a folder, also in its folders, as far as the disk lets us. The lock comes last."""
        for name in sorted(self.files.names(folder), key=LOCK.__eq__):
            if name.removesuffix(NEW) not in OURS:
                continue
            with suppress(OSError):
                if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    self.files.remove(name, folder)
                    continue
                inner = self.files.open(name, os.O_RDONLY | os.O_DIRECTORY, folder)
                try:
                    self._remove_ours(inner)
                finally:
                    self.files.close(inner)
                self.files.remove_folder(name, folder)

    def names(self) -> list[str]:
        """Return the names in the folder, but for the folder ``lost+found``. Raises OSError."""
        return self._names_in(self.folder)

    def _names_in(self, folder: int) -> list[str]:
        names = self.files.names(folder)
        if LOST_FOUND in names and stat.S_ISDIR(
            os.stat(LOST_FOUND, dir_fd=folder, follow_symlinks=False).st_mode
        ):
            names.remove(LOST_FOUND)
        return names

    def require_tags(self, name: str) -> None:
        """Raise ConfigError if a folder in this one has other names than those of tags. OSError if it is none."""
        try:
            descriptor = self.files.open(name, os.O_RDONLY | os.O_DIRECTORY, self.folder)
        except FileNotFoundError:
            return
        try:
            names = self.files.names(descriptor)
        finally:
            self.files.close(descriptor)
        if others := sorted(each for each in names if not is_tag(each.removesuffix(NEW).removesuffix(GONE))):
            allowed = f"a folder with {self._contents.owner}'s files alone; it has {f'{name}/{others[0]}'!r}"
            raise ConfigError("folder", self.path, allowed)

    def make_private(self, folder: int, inside: str = "") -> None:
        """Take others' rights to the files in a folder away. Warns once, with their number. O(files). Raises OSError.

        ``inside``: the folder's path in this one, for the warning.
        """
        changed: list[tuple[str, int]] = []
        for name in self._names_in(folder):
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            is_folder = stat.S_ISDIR(mode)
            if not mode & 0o077 or not (is_folder or stat.S_ISREG(mode)):
                continue
            descriptor = self.files.open(name, os.O_RDONLY, folder)
            try:
                self.files.set_mode(descriptor, 0o700 if is_folder else 0o600)
            finally:
                self.files.close(descriptor)
            changed.append((name, stat.S_IMODE(mode)))
        if changed:
            text = "%s/%s%s (mode %04o) and %d more had rights for others; they were taken away"
            log.warning(text, self.path, inside, *changed[0], len(changed) - 1)

    def is_ours(self) -> bool:
        """Whether no other process opened the folder since, as one may where flock does nothing. Raises OSError."""
        content = memoryview(bytearray(len(self.opening)))
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

    def rewrite_secret(self, folder: int, name: str, content: bytes) -> None:
        """Replace a small file so, and overwrite the bytes that it had. Raises OSError; then one of them is there."""
        descriptor = self.files.open(name, os.O_WRONLY, folder)
        try:
            self.write_small(folder, name, content)
            self._overwrite(descriptor)
        finally:
            self.files.close(descriptor)

    def _overwrite(self, descriptor: int) -> None:
        """Overwrite a small file in its size, and wait for the medium."""
        size = min(os.fstat(descriptor).st_size, MAX_SMALL_BYTES)
        write_exactly(self.files, descriptor, memoryview(bytes(size)), 0)
        self.files.sync(descriptor)

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
            self._overwrite(descriptor)
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
        descriptor, self._is_made = private_folder(self.path, self.files)
        self._descriptors.append(descriptor)
        names = set(self._names_in(descriptor))
        if names and LOCK not in names:
            allowed = f"an empty folder, or one of {self._contents.owner}; it has {sorted(names)[0]!r}"
            raise ConfigError("folder", self.path, allowed)
        if self._contents is DISK_TIER and LOCK in names and not names.isdisjoint(LOSSY_DTYPES):
            allowed = (
                f"the folder of one disk tier. It has those of an earlier version, for lossy KV: "
                f"`radixkv disk reset {self.path}` deletes them"
            )
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
            if error.errno in _FAULTS:
                raise
            allowed = f"a folder whose file {LOCK!r} can be written ({error.strerror})"
            raise ConfigError("folder", self.path, allowed) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise
            raise ConfigError("folder", self.path, "a folder that no other process uses") from None
        if not os.fstat(descriptor).st_nlink:  # another process, which was refused, has just removed it
            raise ConfigError("folder", self.path, "a folder that no other process uses")
        return descriptor


refuse_copies(PrivateFolder, "it holds the lock of its folder. Pass it on")
