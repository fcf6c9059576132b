"""The system calls of the disk tier, in one class that tests replace to inject faults.

Every name is opened relative to a descriptor of its folder, and a symbolic link is refused. New files have mode 0600.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from typing import Final

PAGE_BYTES: Final = 4096
"""Alignment of O_DIRECT: of addresses, offsets and sizes."""


class Files:
    """System calls. Each raises OSError as the call does; a read or write may be short."""

    def open(self, name: str, flags: int, folder: int | None) -> int:
        """Open ``name`` in ``folder`` (None: a path) and return its descriptor. Never waits for a FIFO's other end.

        Raises OSError, ENXIO for what is neither a regular file nor a folder.
        """
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            os.close(descriptor)
            raise OSError(errno.ENXIO, "not a regular file", name)
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Read into memory; returns the number of bytes."""
        return os.preadv(descriptor, [into], offset)

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        """Write; returns the number of bytes."""
        return os.pwritev(descriptor, [content], offset)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Give a file its blocks, so that later writes find the space."""
        os.posix_fallocate(descriptor, 0, num_bytes)

    def free_bytes(self, folder: int) -> int:
        """Return the bytes that the folder's file system has left for this user."""
        found = os.fstatvfs(folder)
        return found.f_bavail * found.f_frsize

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Cut a file to this size."""
        os.ftruncate(descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        """Wait until the file's content is on the medium."""
        os.fdatasync(descriptor)

    def sync_folder(self, folder: int) -> None:
        """Wait until the folder's names are on the medium."""
        os.fsync(folder)

    def make_folder(self, name: str, folder: int | None) -> None:
        """Make a folder of mode 0700."""
        os.mkdir(name, 0o700, dir_fd=folder)

    def remove_folder(self, name: str, folder: int | None) -> None:
        """Remove an empty folder."""
        os.rmdir(name, dir_fd=folder)

    def set_mode(self, descriptor: int, mode: int) -> None:
        """Set who may access a file or a folder."""
        os.fchmod(descriptor, mode)

    def rename(self, old: str, new: str, folder: int) -> None:
        """Replace ``new`` by ``old``, atomically."""
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str, folder: int) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=folder)

    def names(self, folder: int) -> list[str]:
        """Return the names in a folder."""
        return os.listdir(folder)


def read_exactly(files: Files, descriptor: int, into: memoryview, offset: int) -> None:
    """Fill ``into``. Raises OSError, EIO if the file ends before."""
    done = 0
    while done < len(into):
        count = files.read(descriptor, into[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, f"short read: {done} of {len(into)} bytes")
        done += count


def write_exactly(files: Files, descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of ``content``. Raises OSError, EIO if the system writes no more of it."""
    done = 0
    while done < len(content):
        count = files.write(descriptor, content[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, f"short write: {done} of {len(content)} bytes")
        done += count


def aligned(num_bytes: int) -> memoryview:
    """Return zeroed memory for O_DIRECT, whole pages."""
    return memoryview(mmap.mmap(-1, round_up(num_bytes)))


def round_up(num_bytes: int) -> int:
    """Return a size in whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
