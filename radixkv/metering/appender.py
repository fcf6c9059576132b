"""Appends records to the files of a folder: a new file each day (UTC), and when one is full.

``append`` writes, and doesn't wait for the medium. What a failed write left is written over by the next call: with the
same bytes in the same place, so that whoever follows the file sees nothing change. ``sync`` waits for the medium
(fdatasync). If that fails, nobody knows what the medium has of the records since the last one. So they are cut off, and
written again to a new file, with the same ids. If they couldn't be cut off either, both files may have them: a reader
counts each id once.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from radixkv.files.system import write_exactly
from radixkv.metering.folder import RECORDS, UsageFolder, day_of
from radixkv.metering.records import Counts, Row, UsageRecord
from radixkv.uncopied import refuse_copies

FILE_BYTES: Final = 2**24
"""Bytes after which a file is full, where nobody says another number."""
MOST_AT_ONCE: Final = 1_000
"""Records of one write, so that a file is only a little longer than its limit."""


class UsageAppender:
    """Appends to files of a folder, which stays the caller's. For one thread. ``close`` it.

    - ``num_synced``: records that the medium has. ``num_unsynced``: those that are in a file besides.
    """

    def __init__(self, folder: UsageFolder, max_bytes: int) -> None:
        self.num_synced = 0
        self._folder, self._files, self._max_bytes = folder, folder.files, max_bytes
        self._process, self._number = secrets.token_hex(8), 0
        self._descriptor: int | None = None
        self._stem = self._day = ""
        self._size = self._synced_size = 0
        self._sums: dict[Row, Counts] = {}
        self._unsynced: list[UsageRecord] = []
        self._again: list[UsageRecord] = []

    @property
    def num_unsynced(self) -> int:
        """Number of records that are in a file, and perhaps not on the medium."""
        return len(self._unsynced)

    @property
    def is_behind(self) -> bool:
        """Whether records wait to be written again: the next ``append`` does it first, even if it gets no others."""
        return bool(self._again)

    def append(self, records: Sequence[UsageRecord], time_s: float) -> None:
        """Append some records. Raises OSError; then they are kept, and the next call writes them first."""
        self._again += records
        if self._descriptor is not None and (self._size >= self._max_bytes or day_of(time_s) != self._day):
            self.end()
        if self._descriptor is None:
            self._begin(time_s)
        assert self._descriptor is not None
        content = memoryview(b"".join(record.line() for record in self._again))
        write_exactly(self._files, self._descriptor, content, self._size)
        self._size += len(content)
        self._unsynced += self._again
        self._again = []

    def sync(self) -> None:
        """Wait until the medium has all that was appended. Raises OSError; then ``is_behind`` says so."""
        if self._descriptor is None or not self._unsynced:
            return
        try:
            self._files.sync(self._descriptor)
            if not self._synced_size:
                self._files.sync_folder(self._folder.descriptor)
            if not os.fstat(self._descriptor).st_nlink:
                raise OSError(errno.ENOENT, "the file was removed while it was written")
        except OSError:
            self._give_up(self._descriptor)
            raise
        for record in self._unsynced:
            self._sums[record.row] = self._sums.get(record.row, Counts()) + record.counts
        self.num_synced += len(self._unsynced)
        self._unsynced, self._synced_size = [], self._size

    def end(self) -> None:
        """Sync the file, write its sums and close it. Raises OSError, if the records aren't on the medium."""
        self.sync()
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self._files.close(descriptor)
            with suppress(OSError):  # then the next start reads the records
                self._folder.write_sums(self._stem, self._synced_size, self._sums)

    def close(self) -> None:
        """Close the file as it is, if ``end`` failed or wasn't called. Idempotent."""
        if self._descriptor is not None:
            self._files.close(self._descriptor)
            self._descriptor = None

    def _begin(self, time_s: float) -> None:
        self._number += 1
        self._day = day_of(time_s)
        self._stem = f"usage-{self._day}-{self._process}-{self._number:04}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptor = self._files.open(self._stem + RECORDS, flags, self._folder.descriptor)
        self._size = self._synced_size = 0
        self._sums = {}

    def _give_up(self, descriptor: int) -> None:
        """Cut off what isn't surely on the medium, and close the file. It is written again to another."""
        self._again, self._unsynced, self._descriptor = [*self._unsynced, *self._again], [], None
        with suppress(OSError):
            if self._synced_size:
                self._files.truncate(descriptor, self._synced_size)
            else:
                self._files.remove(self._stem + RECORDS, self._folder.descriptor)
        self._files.close(descriptor)


refuse_copies(UsageAppender, "two would write to one file. Pass it on, or make another")
