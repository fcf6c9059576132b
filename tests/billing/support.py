"""Usage records and logs for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radixkv.billing.usage_appender import UsageAppender
from radixkv.billing.usage_check import UsageCheck, records, verify
from radixkv.billing.usage_record import Counts, UsageRecord
from radixkv.files.system import Files

KEY = b"a key of the usage log, of 32 B."
HOUR = 1_769_850_000.0
"""The beginning of an hour."""


def record(number: int = 0, tenant: str = "acme", **others: Any) -> UsageRecord:
    """A record of one request that read as many tokens as its number says."""
    given: dict[str, Any] = {
        "time_s": HOUR + number,
        "tenant": tenant,
        "kind": "completion",
        "model": "m",
        "key": "0123456789abcdef",
        "counts": Counts(requests=1, read=number, written={300: 16}, uncached=2, generated=1),
        "id": f"{number:024x}",
    }
    return UsageRecord(**{**given, **others})


@contextmanager
def appending(
    folder: Path,
    key: bytes | None = KEY,
    *,
    max_bytes: int = 2**20,
    files: Files | None = None,
    previous: Sequence[bytes] = (),
) -> Iterator[UsageAppender]:
    """An appender, closed afterwards."""
    appender = UsageAppender(folder, key, max_bytes, files, previous=previous)
    try:
        yield appender
    finally:
        appender.close()


def written(folder: Path, numbers: Sequence[int], **others: Any) -> None:
    """A log with these records, one write each, ended."""
    with appending(folder, **others) as appender:
        for number in numbers:
            appender.append([record(number)], HOUR + number)
            appender.synced(appender.positions())


def found(folder: Path) -> list[UsageRecord]:
    """All records of a log. Nothing is malformed."""
    problems: list[str] = []
    read = list(records(folder, 0, problems.append))
    assert problems == []
    return read


def checked(folder: Path, *keys: bytes) -> UsageCheck:
    """The check of a log, with KEY if no other is given."""
    return verify(folder, keys or [KEY])


def log_files(folder: Path) -> list[Path]:
    """The files of records, in order."""
    return sorted(folder.glob("usage-*.jsonl"))
