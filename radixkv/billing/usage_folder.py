"""The folder of a usage log: names of its files, the key of its chain, and reading it while it is written.

    usage-00000007-2026013109.jsonl   file 7, begun in this hour (UTC): a header, records, and an end if it was ended
    head                              number and MAC of the last line that is surely on the disk: tells a cut-off end
    key                               the key of the chain, if no secret was given
    lock                              held by the process that writes

Files are only appended to. Old ones may be removed, the oldest first; the check then begins with the first that is
there.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from radixkv.billing.mac_chain import MAX_LINE_BYTES, Line, Link, parsed, sealed
from radixkv.errors import ConfigError
from radixkv.files.private_folder import LOCK, Contents, PrivateFolder
from radixkv.files.system import Files
from radixkv.signing import KEY_BYTES, derived
from radixkv.uncopied import refuse_copies

HEAD: Final = "head"
KEY: Final = "key"
_FILE = re.compile(r"usage-([0-9]{8})-([0-9]{10})\.jsonl")
_MAX_SMALL = 4_096
_HEAD_LABEL: Final = "usage head"


def _is_ours(name: str) -> bool:
    return name in (HEAD, KEY, LOCK) or _FILE.fullmatch(name) is not None


CONTENTS: Final = Contents("a usage log", _is_ours)


class LogFile(NamedTuple):
    """A file of records: its number, which is in its name and its header, and its name."""

    number: int
    name: str


def file_name(number: int, time_s: float) -> str:
    """Return the name of a file that is begun now."""
    return f"usage-{number:08d}-{datetime.fromtimestamp(time_s, UTC):%Y%m%d%H}.jsonl"


def begun_after(file: LogFile, time_s: float) -> bool:
    """Whether a file was begun in an hour that ends after ``time_s``: only such files have records from then on."""
    found = _FILE.fullmatch(file.name)
    assert found is not None
    return found[2] >= f"{datetime.fromtimestamp(time_s, UTC):%Y%m%d%H}"


def key_from(secret: bytes) -> bytes:
    """Return the chain's key of a fleet's secret."""
    return derived(secret, "usage")


def key_in(folder: PrivateFolder) -> bytes:
    """Return the key in a folder, which is made if it is missing. Raises ConfigError for a damaged one, OSError."""
    found = folder.read_small(folder.folder, KEY)
    if found is None:
        found = secrets.token_hex(KEY_BYTES).encode() + b"\n"
        folder.write_small(folder.folder, KEY, found)
    return _key(found, folder.path)


def _key(content: bytes, path: str) -> bytes:
    try:
        key = bytes.fromhex(content.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError("key", f"{path}/{KEY}", f"a file of {2 * KEY_BYTES} hex digits")
    return key


def head_of(key: bytes, key_name: str, link: Link) -> bytes:
    """Return the content of ``head``: the chain has had this line."""
    return sealed(key, link, {"key": key_name, "previous": link.mac.hex()}, _HEAD_LABEL)[0]


class Head(NamedTuple):
    """The end that the chain has had, and the name of the key that proves it."""

    link: Link
    key_name: str
    line: Line

    def is_proven(self, key: bytes) -> bool:
        """Whether the owner of the key wrote it."""
        return self.line.follows(self.link.mac, key, _HEAD_LABEL)


def read_head(content: bytes) -> Head | None:
    """Return what ``head`` says; None if it says nothing."""
    try:
        line = parsed(content)
        link = Link(line.n - 1, bytes.fromhex(str(line.fields.get("previous"))))
    except ValueError:
        return None
    return Head(link, str(line.fields.get("key")), line)


class LogReader:
    """Reads a folder, also while another process writes to it. Changes nothing. ``close`` it."""

    def __init__(self, path: Path | str, files: Files | None = None) -> None:
        """Raise ConfigError if it can't be opened, or is a symbolic link."""
        self.path, self._files = str(path), files or Files()
        try:
            self._folder = self._files.open(self.path, os.O_RDONLY | os.O_DIRECTORY, None)
        except OSError as error:
            allowed = f"the folder of a usage log, and no symbolic link ({error.strerror})"
            raise ConfigError("folder", self.path, allowed) from None

    def close(self) -> None:
        """Close the folder."""
        self._files.close(self._folder)

    def key(self) -> bytes | None:
        """Return the key in the folder; None if there is none. Raises ConfigError, OSError."""
        found = self._small(KEY)
        return None if found is None else _key(found, self.path)

    def head(self) -> Head | None:
        """Return what ``head`` says, if anything. Raises OSError."""
        return read_head(self._small(HEAD) or b"")

    def log_files(self) -> list[LogFile]:
        """Return the files of records, by number. Raises OSError."""
        found = [_FILE.fullmatch(name) for name in self._files.names(self._folder)]
        return sorted(LogFile(int(each[1]), each[0]) for each in found if each is not None)

    def lines(self, file: LogFile, start: int = 0) -> Iterator[bytes]:
        """Yield the lines of a file, of at most MAX_LINE_BYTES each: a longer one comes in pieces. Raises OSError.

        ``start``: the offset of the first line.
        """
        with self._opened(file.name) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as content:
            content.seek(start)
            while line := content.readline(MAX_LINE_BYTES):
                yield line

    def sums_at(self, file: LogFile) -> int | None:
        """Return the offset of an ended file's sums; None if it has no end. O(1). Raises OSError."""
        with self._opened(file.name) as descriptor:
            size = os.fstat(descriptor).st_size
            tail = os.pread(descriptor, MAX_LINE_BYTES, max(size - MAX_LINE_BYTES, 0))
        try:
            found = parsed(tail.splitlines(keepends=True)[-1]).fields.get("sums_at")
        except (ValueError, IndexError):
            return None
        return found if isinstance(found, int) and 0 <= found < size else None

    def _small(self, name: str) -> bytes | None:
        try:
            with self._opened(name) as descriptor:
                return os.pread(descriptor, _MAX_SMALL, 0)
        except FileNotFoundError:
            return None

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Open a regular file of the folder. A pipe or a device can't block it."""
        descriptor = self._files.open(name, os.O_RDONLY | os.O_NONBLOCK, self._folder)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(0, f"{name} is not a regular file")
            yield descriptor
        finally:
            self._files.close(descriptor)


refuse_copies(LogReader, "it holds an open file. Make another")


@contextmanager
def reading(path: Path | str) -> Iterator[LogReader]:
    """Read a folder while the ``with`` block runs. Raises ConfigError."""
    with closing(LogReader(path)) as reader:
        yield reader
