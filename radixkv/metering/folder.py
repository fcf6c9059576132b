"""The folder of usage records.

    usage-2026-01-31-5f0c9e1d2a3b4c5d-0001.jsonl   records, one a line: the day (UTC) when the file was begun, the
                                                   process that writes it, and the number of the file in that process
    usage-2026-01-31-5f0c9e1d2a3b4c5d-0001.sums    sums by row of the beginning of that file, so that a start needn't
                                                   read all records of the last weeks

Only one process writes to a file, and a new process begins a new one. So several processes may use a folder at a time:
one that ends and the one that follows it. What a crash left of a line is at the end of a file. A reader leaves it out.

A ``.sums`` file is a copy of what the records say: it may be removed at any time. It begins with the number of bytes
that it sums and of its rows. If it isn't whole, the records are read instead.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from radixkv.errors import ConfigError
from radixkv.files.private_folder import private_folder
from radixkv.files.system import Files, write_exactly
from radixkv.metering.records import MAX_LINE_BYTES, Counts, Row, UsageRecord, record_of, summed
from radixkv.uncopied import refuse_copies

DAY_S: Final = 86_400
MOST_PROBLEMS: Final = 20
RECORDS: Final = ".jsonl"
SUMS: Final = ".sums"
NEW: Final = ".new"
_FILE = re.compile(
    r"(usage-([0-9]{4}-[0-9]{2}-[0-9]{2})-[0-9a-f]{16}-[0-9]{4,})\.(jsonl|sums|sums\.[0-9a-f]{8}\.new)"
)
_CHAINED = re.compile(r"usage-[0-9]{8}-[0-9]{10}\.jsonl")
"""Files of earlier commits: a line has also a number and a MAC, and some lines are no records."""


def day_of(time_s: float) -> str:
    """Return the day of a time, UTC, as in names of files."""
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()


class UsageFolder:
    """An opened folder. ``close`` it.

    ``writes``: make it if it is missing, with mode 0700, and refuse one that others can enter, or that has records of
    an earlier version. Without it, nothing in the folder changes.

    - ``num_skipped``: lines that were no records. ``problems`` names the first of them.

    Raises ConfigError, and OSError if the disk fails.
    """

    def __init__(self, path: Path | str, files: Files | None = None, *, writes: bool = False) -> None:
        self.path, self.files = str(Path(path)), files or Files()
        self.num_skipped, self.problems = 0, list[str]()
        self.descriptor = private_folder(self.path, self.files)[0] if writes else self._opened()
        if writes and any(map(_CHAINED.fullmatch, self.files.names(self.descriptor))):
            self.close()
            allowed = (
                "another folder: this one has usage records of an earlier version, which stay as they are. "
                f"`radixkv usage export {self.path} NEW_FOLDER` copies them to a new one"
            )
            raise ConfigError("folder", self.path, allowed)

    def close(self) -> None:
        """Give the folder back."""
        self.files.close(self.descriptor)

    def records(self, since_s: float = 0.0) -> Iterator[UsageRecord]:
        """Yield the records of days that end after ``since_s``, each id once. O(bytes), and a set of all ids."""
        return self._all_in(stem + RECORDS for stem in self._stems(since_s))

    def chained_records(self) -> Iterator[UsageRecord]:
        """Yield the records of files of an earlier version, each id once."""
        return self._all_in(sorted(filter(_CHAINED.fullmatch, self.files.names(self.descriptor))))

    def sums(self, since_s: float) -> Iterator[UsageRecord]:
        """Yield sums and single records that add up to the records of days that end after ``since_s``.

        O(rows), and O(bytes) of what no ``.sums`` file has yet: that is written, and sums of earlier days are removed.
        """
        ids = set[str]()
        self._remove_old_sums(since_s)
        for stem in self._stems(since_s):
            done, sums = self._read_sums(stem)
            yield from (summed(*each) for each in sums.items())
            num_bytes = done
            for record, end in self._records_in(stem + RECORDS, done, ids):
                sums[record.row] = sums.get(record.row, Counts()) + record.counts
                num_bytes = end
                yield record
            if num_bytes > done:
                with suppress(OSError):  # then the next start reads the records again
                    self.write_sums(stem, num_bytes, sums)

    def write_sums(self, stem: str, num_bytes: int, sums: Mapping[Row, Counts]) -> None:
        """Write the sums of the first bytes of a file of records. Raises OSError; then nothing has changed."""
        head = json.dumps({"bytes": num_bytes, "rows": len(sums)}).encode() + b"\n"
        content = b"".join([head, *(summed(*each).line() for each in sums.items())])
        new = f"{stem}{SUMS}.{secrets.token_hex(4)}{NEW}"
        descriptor = self.files.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.descriptor)
        try:
            try:
                write_exactly(self.files, descriptor, memoryview(content), 0)
            finally:
                self.files.close(descriptor)
            self.files.rename(new, stem + SUMS, self.descriptor)
        except OSError:
            with suppress(OSError):  # the next start removes it
                self.files.remove(new, self.descriptor)
            raise

    # --- reading

    def _opened(self) -> int:
        try:
            return self.files.open(self.path, os.O_RDONLY | os.O_DIRECTORY, None)
        except OSError as error:
            allowed = f"a folder of usage records, and no symbolic link ({error.strerror})"
            raise ConfigError("folder", self.path, allowed) from None

    def _named(self) -> Iterator[re.Match[str]]:
        return filter(None, map(_FILE.fullmatch, sorted(self.files.names(self.descriptor))))

    def _stems(self, since_s: float) -> list[str]:
        """Return the names, without their ends, of files from some day on. A file has no record of later days."""
        first = day_of(since_s)
        return sorted(
            {found[1] for found in self._named() if found[2] >= first and found[3] in ("jsonl", "sums")}
        )

    def _remove_old_sums(self, since_s: float) -> None:
        for found in self._named():
            if found[3].endswith(NEW) or (found[3] == "sums" and found[2] < day_of(since_s)):
                with suppress(FileNotFoundError):  # another process that starts has removed it
                    self.files.remove(found[0], self.descriptor)

    def _read_sums(self, stem: str) -> tuple[int, dict[Row, Counts]]:
        """Return how many bytes of a file have sums, and these; none if the file of sums is missing or not whole."""
        lines, found = self._lines(stem + SUMS, 0), dict[Row, Counts]()
        try:
            head = json.loads(next(lines, b"null"))
            for line in lines:
                record = record_of(line)
                if record is not None:
                    found[record.row] = record.counts
            if head["rows"] == len(found) and head["bytes"] >= 0:
                return int(head["bytes"]), found
        except (KeyError, TypeError, ValueError):
            pass
        return 0, {}

    def _all_in(self, names: Iterable[str]) -> Iterator[UsageRecord]:
        ids = set[str]()
        for name in names:
            yield from (record for record, _ in self._records_in(name, 0, ids))

    def _records_in(self, name: str, start: int, ids: set[str]) -> Iterator[tuple[UsageRecord, int]]:
        """Yield records of a file from an offset on that aren't among ``ids``, and the offset behind each."""
        end = start
        for line in self._lines(name, start):
            end += len(line)
            try:
                record = record_of(line)
            except ValueError as error:
                self._skip(f"{name}, bytes {end - len(line)} to {end}: {error}")
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    return  # torn by a crash, or another process is just writing it
                continue
            if record is not None and record.id not in ids:
                ids.add(record.id)
                yield record, end

    def _skip(self, problem: str) -> None:
        self.num_skipped += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)

    def _lines(self, name: str, start: int) -> Iterator[bytes]:
        """Yield the lines of a file from an offset on; none if it is missing. A line that is too long is in pieces."""
        try:
            descriptor = self.files.open(name, os.O_RDONLY, self.descriptor)
        except FileNotFoundError:
            return
        with os.fdopen(descriptor, "rb") as content:
            content.seek(start)
            while line := content.readline(MAX_LINE_BYTES):
                yield line


refuse_copies(UsageFolder, "it holds an open file. Make another")
