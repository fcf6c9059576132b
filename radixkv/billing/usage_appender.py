"""The files of a usage log: chained lines, appended; a new file in each hour with records, and when one is full.

    header ─ record ─ … ─ record ─ sum ─ … ─ end   an ended file; the next header names the MAC of this end
    header ─ record ─ … ─ rec                      after a crash; the next header names the last whole line's

The sums of a file's records, by row, are what the next process needs of it; ``end`` has their place.

A process begins with a new file and never writes to an earlier one. If ``head`` knows of more lines than there are, is
gone, or no known key proves it, the header says how many are ``missing``, at least one. So an end that was cut off
stays known after ``head`` is written again. A failed write is taken back and repeated in the same place.

Anybody who can write to the folder may put a key there. So for a process with a secret, the folder's key proves
``head`` only if the last line is under that key too; the check tells such lines apart.

``append`` costs one ``pwrite``, and never waits for the medium. ``positions`` says what another thread should wait for,
with ``synced``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from radixkv.billing.mac_chain import START, Link, parsed, sealed
from radixkv.billing.usage_folder import CONTENTS, HEAD, LogReader, file_name, head_of, key_in, reading
from radixkv.billing.usage_record import HOUR_S, Counts, Row, UsageRecord, summed
from radixkv.errors import ConfigError
from radixkv.files.private_folder import PrivateFolder
from radixkv.files.system import Files, write_exactly
from radixkv.signing import key_id
from radixkv.uncopied import refuse_copies

MOST_AT_ONCE: Final = 1_000
"""Records of one write, so that a file is only a little longer than its limit."""


class Position(NamedTuple):
    """A place in the log: a descriptor of its file, which ``synced`` closes, and the chain's end there."""

    descriptor: int
    link: Link


class UsageAppender:
    """Appends to the log in a folder. For one thread, except ``synced``. ``close`` it.

    ``key``: None for the one in the folder. ``previous``: keys under which its end may be proven too, besides the one
    in the folder, if the last line is under that.
    Raises ConfigError for a folder that isn't ours, isn't private or is in use, and OSError.
    """

    def __init__(
        self,
        path: Path | str,
        key: bytes | None,
        max_bytes: int,
        files: Files | None = None,
        *,
        previous: Sequence[bytes] = (),
    ) -> None:
        self._folder = PrivateFolder(path, files, CONTENTS)
        self._files, self._max_bytes = self._folder.files, max_bytes
        self._descriptor: int | None = None
        self._name: str | None = None
        self._hour = self._size = 0
        self._sums: dict[Row, Counts] = {}
        self._ended: list[Position] = []
        try:
            self._key = key_in(self._folder) if key is None else key
            self._key_name = key_id(self._key).hex()
            self._number, self._link, self._missing = self._found([self._key, *previous])
            self._waited_for = self._link
        except BaseException:
            self._folder.close()
            raise

    def append(self, records: Sequence[UsageRecord], time_s: float) -> None:
        """Append at most MOST_AT_ONCE records. Raises OSError; then none of them is written, and it can be repeated."""
        is_full = self._size >= self._max_bytes or int(time_s // HOUR_S) != self._hour
        if self._descriptor is not None and is_full:
            self._end("rotated")
        if self._descriptor is None:
            self._begin(time_s)
        self._write([record.fields() for record in records])
        for record in records:
            self._sums[record.row] = self._sums.get(record.row, Counts()) + record.counts

    def positions(self) -> list[Position]:
        """Return the places up to which nothing has waited for the medium; ``synced`` takes each. Raises OSError."""
        found, self._ended = self._ended, []
        if self._descriptor is not None and self._link != self._waited_for:
            found.append(Position(os.dup(self._descriptor), self._link))
        self._waited_for = self._link
        return found

    def synced(self, positions: Iterable[Position]) -> None:
        """Wait until the lines up to some places are on the medium, then write ``head``. From any one thread.

        Raises OSError.
        """
        last: Link | None = None
        try:
            for position in positions:
                self._files.sync(position.descriptor)
                last = position.link
        finally:
            for position in positions:
                self._files.close(position.descriptor)
        if last is not None:
            self._files.sync_folder(self._folder.folder)
            self._state(last)

    def close(self) -> None:
        """End the file, if there is one, wait for the medium, and give the folder back. Raises OSError."""
        try:
            if self._descriptor is not None:
                self._end("closed")
            self.synced(self.positions())
        finally:
            if self._descriptor is not None:
                self._files.close(self._descriptor)
                self._descriptor = None
            self._folder.close()

    # --- one file after the other

    def _begin(self, time_s: float) -> None:
        """Open a new file and write its header. After an error the next call opens the same file again."""
        self._name = self._name or file_name(self._number, time_s)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = self._files.open(self._name, flags, self._folder.folder)
        self._descriptor, self._size, self._hour = descriptor, 0, int(time_s // HOUR_S)
        header: dict[str, Any] = {
            "file": self._number,
            "previous": self._link.mac.hex(),
            "key": self._key_name,
        }
        if self._missing:
            header["missing"] = self._missing
        try:
            self._write([header])
        except OSError:
            self._descriptor = None
            self._files.close(descriptor)
            raise
        self._name, self._missing, self._sums = None, 0, {}

    def _end(self, how: str) -> None:
        """Write the sums and the last line. Raises OSError; then the file is still open."""
        assert self._descriptor is not None
        sums = [{"sum": summed(*each).fields()} for each in self._sums.items()]
        self._write([*sums, {"end": how, "sums_at": self._size}])
        self._ended.append(Position(self._descriptor, self._link))
        self._descriptor, self._number = None, self._number + 1

    def _write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        assert self._descriptor is not None
        content, link = bytearray(), self._link
        for fields in lines:
            line, link = sealed(self._key, link, fields)
            content += line
        try:
            write_exactly(self._files, self._descriptor, memoryview(content), self._size)
        except OSError:
            with suppress(OSError):  # a part that stays is written over, or is the torn end of a crash
                self._files.truncate(self._descriptor, self._size)
            raise
        self._link, self._size = link, self._size + len(content)

    # --- continuing what is there

    def _found(self, keys: Iterable[bytes]) -> tuple[int, Link, int]:
        """Return the number of the next file, the end of the chain, and how many of its lines are missing."""
        with reading(self._folder.path) as reader:
            found, head = reader.log_files(), reader.head()
            own = _own_key(reader)
            ends = (_end_of(reader.lines(file)) for file in reversed(found))
            link, name = next((end for end in ends if end is not None), (START, ""))
        if not found:
            self._state(START)
            return 1, START, 0
        number = found[-1].number + 1
        if head is None:
            return number, link, 1
        is_proven = any(map(head.is_proven, keys))
        if not is_proven and own is not None and head.is_proven(own) and name == key_id(own).hex():
            is_proven = True
            if head.link.n >= link.n:  # an earlier one would prove that later lines aren't missing
                self._state(head.link)  # under the new key, before the first line is
        return number, link, max(head.link.n - link.n, 0 if is_proven else 1)

    def _state(self, link: Link) -> None:
        """Write ``head``. A log has one from its beginning. Raises OSError."""
        self._folder.write_small(self._folder.folder, HEAD, head_of(self._key, self._key_name, link))


refuse_copies(UsageAppender, "its lines are numbered once. Pass it on, or make another")


def _own_key(reader: LogReader) -> bytes | None:
    """Return the key in a folder, if it has one that can be read."""
    with suppress(ConfigError, OSError):  # the log needs it no more, and its end is unproven without it
        return reader.key()
    return None


def _end_of(lines: Iterable[bytes]) -> tuple[Link, str] | None:
    """Return the end of the whole lines of a file, and the name of their key; None if there is none."""
    end: tuple[Link, str] | None = None
    for each in lines:
        try:
            line = parsed(each)
        except ValueError:
            break
        end = Link(line.n, line.mac), str(line.fields.get("key")) if end is None else end[1]
    return end
