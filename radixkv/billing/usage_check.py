"""The check of a usage log, and the sums of its records. Both work while a process writes to the log.

The verdict is the first of these that holds:

| verdict | what was found |
|---|---|
| tampered | a line that the key's owner didn't write there, or a file that is missing between others |
| truncated | fewer lines than the log has had: ``head`` or a later header knows of more, or ``head`` is gone |
| unproven | lines that only the key in the folder proves, though a secret was given; the caller may trust that key |
| torn | a part of a line at the end of a file: the process or the machine crashed there |
| intact | nothing of this |

Who can write to the folder and brings back an older state of *all* files, ``head`` too, isn't found: copy ``head``
elsewhere to compare. Who has the key can write any log: the key in the folder is anybody's who can write there. So it
proves ``head`` only if it proves the last line too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from radixkv.billing.mac_chain import MAC_BYTES, MAX_LINE_BYTES, Line, Link, parsed
from radixkv.billing.usage_folder import Head, LogFile, LogReader, begun_after, reading
from radixkv.billing.usage_record import Counts, Row, UsageRecord, record_of
from radixkv.errors import ConfigError
from radixkv.signing import key_id

Verdict = Literal["intact", "torn", "unproven", "truncated", "tampered"]
MOST_PROBLEMS: Final = 20


@dataclass(slots=True)
class UsageCheck:
    """What a check found.

    - ``is_ended``: whether the last file was ended, so no process writes to it.
    - ``num_by_folder_key``: lines that only the key in the folder proves, if other keys were given.
    """

    num_files: int = 0
    num_records: int = 0
    is_ended: bool = True
    num_tampered: int = 0
    num_missing: int = 0
    num_torn: int = 0
    num_by_folder_key: int = 0
    trusts_folder_key: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """See the module's docstring."""
        if self.num_tampered:
            return "tampered"
        if self.num_missing:
            return "truncated"
        if self.num_by_folder_key and not self.trusts_folder_key:
            return "unproven"
        return "torn" if self.num_torn else "intact"

    def tell(self, problem: str) -> None:
        """Keep the first MOST_PROBLEMS problems."""
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


def verify(path: Path | str, keys: Sequence[bytes], *, trusts_folder_key: bool = False) -> UsageCheck:
    """Check every line of a log. O(bytes), 20 µs a record.

    ``keys``: the chain's keys; without one, the key in the folder counts. ``trusts_folder_key``: it counts besides.
    Raises ConfigError for no folder or no key, OSError.
    """
    with reading(path) as reader:
        try:
            own = reader.key()
        except ConfigError:
            if not keys:
                raise
            own = None  # the others prove the log without it
        known = [*([] if own is None else [own]), *keys]
        if not known:
            raise ConfigError("--fleet-secret", None, "the secret of the log, because the folder has no key")
        is_apart = bool(keys) and own not in keys
        checking = _Checking(
            {key_id(key).hex(): key for key in known},
            reader.head(),
            own if is_apart else None,
            UsageCheck(trusts_folder_key=trusts_folder_key),
        )
        for file in reader.log_files():
            checking.read(reader, file)
        return checking.end()


def records(path: Path | str, since_s: float, tell: Callable[[str], object]) -> Iterator[UsageRecord]:
    """Yield the records of files from some time on, unverified. ``tell`` gets what is malformed.

    Raises ConfigError, OSError.
    """
    with reading(path) as reader:
        for file in reader.log_files():
            if begun_after(file, since_s):
                yield from _records_in(file, reader.lines(file), tell)


def sums(path: Path | str, since_s: float, tell: Callable[[str], object]) -> Iterator[UsageRecord]:
    """Yield what ``records`` does, but of ended files only the sums of each row. O(files), if all were ended."""
    with reading(path) as reader:
        for file in reader.log_files():
            if begun_after(file, since_s):
                start = reader.sums_at(file)
                yield from _records_in(
                    file, reader.lines(file, start or 0), tell, is_summed=start is not None
                )


def _records_in(
    file: LogFile, lines: Iterable[bytes], tell: Callable[[str], object], *, is_summed: bool = False
) -> Iterator[UsageRecord]:
    for number, each in enumerate(lines, 1):
        try:
            fields = parsed(each).fields
            found = record_of(fields["sum"] if is_summed and "sum" in fields else fields)
        except (ValueError, AttributeError, TypeError) as error:
            if each.endswith(b"\n"):
                tell(f"{file.name}:{number}: {error}")
            continue
        if found is not None:
            yield found


class _Checking:
    """Follows the chain from file to file. ``own``: the key in the folder, if others were given."""

    def __init__(
        self, keys: Mapping[str, bytes], head: Head | None, own: bytes | None, found: UsageCheck
    ) -> None:
        self.found = found
        self._keys, self._head, self._own = keys, head, own
        self._link: Link | None = None
        self._key: bytes | None = None
        self._number: int | None = None
        self._place = ""
        self._met_head = False
        self._left: dict[Row, Counts] = {}
        """Counts of a file's records that no sum has told yet."""
        self._has_wrong_sum, self._num_before = False, 0

    def read(self, reader: LogReader, file: LogFile) -> None:
        """Check a file."""
        self.found.num_files += 1
        self._follow_number(file)
        self._left, self._has_wrong_sum, self._num_before = {}, False, self.found.num_tampered
        is_begun = False
        for at, content in enumerate(reader.lines(file), 1):
            self._place = f"{file.name}:{at}"
            try:
                line = parsed(content)
            except ValueError:
                self._unreadable(content)
                continue
            if not is_begun:
                self._begin(line, file)
            self._check(line, is_header=not is_begun)
            is_begun = True

    def end(self) -> UsageCheck:
        """Compare the end with ``head``, and return what was found."""
        head, found = self._head, self.found
        key = None if head is None else self._keys.get(head.key_name)
        if head is None or key is None or not head.is_proven(key):
            if found.num_files:
                found.num_missing += 1
                found.tell("head: it is missing, damaged or of an unknown key, so the end may be cut off")
            return found
        if key == self._own != self._key:
            found.num_missing += 1
            found.tell(
                "head: only the folder's key proves it, and a secret the last line, so the end may be cut off"
            )
            return found
        last = 0 if self._link is None else self._link.n
        if not head.link.n:
            return found
        if head.link.n > last:
            found.num_missing += head.link.n - last
            found.tell(f"head: the log had {head.link.n} lines, and has {last}")
        elif not self._met_head:
            self._tampered("head: the log has another line in its place")
        return found

    def _follow_number(self, file: LogFile) -> None:
        if self._number is not None and file.number != self._number + 1:
            self._tampered(f"{file.name}: file {self._number + 1} is missing before it")
        self._number = file.number

    def _begin(self, line: Line, file: LogFile) -> None:
        """Take the key and the link of a header."""
        fields, key_before = line.fields, self._key
        self._key = self._keys.get(str(fields.get("key")))
        if self._key is not None and self._key == self._own and key_before not in (None, self._own):
            self.found.num_missing += self.found.trusts_folder_key  # else the log is unproven anyway
            self.found.tell(
                f"{self._place}: only the folder's key proves it, and a secret the line before it, so lines between "
                "them may be cut off"
            )
        before = _hex(fields.get("previous"))
        if fields.get("file") != file.number or before is None:
            self._tampered(f"{self._place}: it is not the header of this file")
            before = before or bytes(MAC_BYTES)
        elif self._link is not None and (before, line.n) != (self._link.mac, self._link.n + 1):
            self._broken(line)
        self._link = Link(line.n - 1, before)
        missing = fields.get("missing", 0)
        if isinstance(missing, int) and missing > 0:
            self.found.num_missing += missing
            self.found.tell(f"{self._place}: {missing} lines were missing before it when it was begun")

    def _broken(self, line: Line) -> None:
        """Tell that a header doesn't follow the file before it."""
        assert self._link is not None
        num_missing = line.n - 1 - self._link.n
        if num_missing > 0:
            self.found.num_missing += num_missing
            self.found.tell(f"{self._place}: {num_missing} lines are missing before it")
        else:
            self._tampered(f"{self._place}: it doesn't follow the file before it")

    def _check(self, line: Line, *, is_header: bool) -> None:
        assert self._link is not None
        if self._key is None:
            self._tampered(f"{self._place}: it is of a key that isn't known")
        elif line.n != self._link.n + 1 or not line.follows(self._link.mac, self._key):
            self._tampered(f"{self._place}: its MAC or its number is wrong")
        else:
            self.found.num_by_folder_key += self._key == self._own
            if not is_header:
                self._count(line)
        self._link = Link(line.n, line.mac)
        self._met_head |= self._head is not None and self._head.link == self._link
        self.found.is_ended = "end" in line.fields

    def _count(self, line: Line) -> None:
        """Count a record, and compare the sums of a file with its records."""
        if "end" in line.fields:
            is_sound = self.found.num_tampered == self._num_before and "sums_at" in line.fields
            if is_sound and (self._left or self._has_wrong_sum):
                self._tampered(f"{self._place}: the sums before it aren't those of the records")
            return
        is_sum = "sum" in line.fields
        try:
            found = record_of(line.fields["sum"] if is_sum else line.fields)
        except (ValueError, AttributeError, TypeError):
            found = None
        if found is None:
            self._tampered(f"{self._place}: it is no record")
        elif is_sum:
            self._has_wrong_sum |= self._left.pop(found.row, None) != found.counts
        else:
            self.found.num_records += 1
            self._left[found.row] = self._left.get(found.row, Counts()) + found.counts

    def _unreadable(self, content: bytes) -> None:
        if content.endswith(b"\n") or len(content) >= MAX_LINE_BYTES:
            self._tampered(f"{self._place}: it is no line of a usage log")
            return
        self.found.num_torn += 1
        self.found.is_ended = False
        self.found.tell(f"{self._place}: a part of a line, as a crash leaves it")

    def _tampered(self, problem: str) -> None:
        self.found.num_tampered += 1
        self.found.tell(problem)


def _hex(value: Any) -> bytes | None:
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return None
    return found if len(found) == MAC_BYTES else None
