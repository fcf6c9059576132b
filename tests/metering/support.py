"""Usage records and folders of them for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from radixkv.files.system import Files
from radixkv.metering.appender import UsageAppender
from radixkv.metering.folder import UsageFolder
from radixkv.metering.records import Counts, UsageRecord
from radixkv.metering.sums import Sum, UsageSums

HOUR = 1_769_850_000.0
"""The beginning of an hour: 2026-01-31, 09:00 UTC."""
EVER = 10.0**12


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
def appending(path: Path, *, max_bytes: int = 2**20, files: Files | None = None) -> Iterator[UsageAppender]:
    """An appender, ended and closed afterwards."""
    folder = UsageFolder(path, files, writes=True)
    with closing(folder), closing(UsageAppender(folder, max_bytes)) as appender:
        yield appender
        appender.end()


def written(path: Path, numbers: Sequence[int], **others: Any) -> None:
    """A folder with these records, one write each, ended."""
    with appending(path, **others) as appender:
        for number in numbers:
            appender.append([record(number)], HOUR + number)


def found(path: Path) -> list[UsageRecord]:
    """All records of a folder, whose lines are all records."""
    with closing(UsageFolder(path)) as folder:
        read = list(folder.records())
    assert folder.problems == []
    return read


def numbers(path: Path) -> list[int]:
    """The numbers of all records of a folder."""
    return [each.counts.read for each in found(path)]


def summed(path: Path, since_s: float = 0.0) -> list[Sum]:
    """The sums that a process gets when it starts with a folder."""
    with closing(UsageFolder(path, writes=True)) as folder:
        return sums_of(folder.sums(since_s))


def sums_of(records: Iterator[UsageRecord] | Sequence[UsageRecord]) -> list[Sum]:
    """The sums of records."""
    sums = UsageSums(EVER)
    for each in records:
        sums.add(each)
    return sums.all(None, 0, EVER)


def record_files(path: Path) -> list[Path]:
    """The files of records, in order."""
    return sorted(path.glob("usage-*.jsonl"))


def chained(path: Path, records: Sequence[UsageRecord]) -> list[Path]:
    """A folder as earlier commits wrote it: a header, records with numbers and MACs, sums and an end."""
    path.mkdir(mode=0o700)
    lines: list[dict[str, Any]] = [{"file": 1, "previous": "0" * 64, "key": "0" * 32}]
    lines += [json.loads(each.line()) for each in records]
    lines += [{"sum": {**json.loads(each.line()), "id": ""}} for each in records[:1]]
    lines.append({"end": "closed", "sums_at": 1})
    numbered = [{"n": number, **line, "mac": "f" * 64} for number, line in enumerate(lines, 1)]
    content = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in numbered)
    for name, text in (
        ("usage-00000001-2026013109.jsonl", content),
        ("head", "{}"),
        ("key", "k"),
        ("lock", ""),
    ):
        (path / name).write_text(text)
    return sorted(path.iterdir())
