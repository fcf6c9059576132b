"""``folder``: private folders, torn and damaged lines, duplicates, sums that stand for records, earlier versions."""

from __future__ import annotations

import json
import stat
from contextlib import closing
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.metering.folder import MOST_PROBLEMS, UsageFolder, day_of
from radixkv.metering.sums import total
from tests.metering.support import (
    HOUR,
    appending,
    chained,
    found,
    numbers,
    record,
    record_files,
    summed,
    sums_of,
    written,
)

DAY = 86_400.0


def read_with_problems(path: Path) -> tuple[list[int], UsageFolder]:
    with closing(UsageFolder(path)) as folder:
        return [each.counts.read for each in folder.records()], folder


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    written(tmp_path / "usage", [1])
    assert stat.S_IMODE((tmp_path / "usage").stat().st_mode) == 0o700
    names = sorted(path.name for path in (tmp_path / "usage").iterdir())
    assert [name[:17] + name[33:] for name in names] == [
        "usage-2026-01-31--0001.jsonl",
        "usage-2026-01-31--0001.sums",
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "usage").iterdir()} == {0o600}


def test_a_folder_that_others_can_enter_or_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    (tmp_path / "file").touch()
    for name, problem in (
        ("open", "0700"),
        ("link", "symbolic link"),
        ("link/", "symbolic link"),
        ("file", "folder"),
    ):
        with pytest.raises(ConfigError, match=problem):
            UsageFolder(f"{tmp_path}/{name}", writes=True)
    for name in ("link", "file", "nothing"):
        with (
            pytest.raises(ConfigError, match="folder of usage records"),
            closing(UsageFolder(tmp_path / name)),
        ):
            pass


def test_two_processes_can_write_at_a_time(tmp_path: Path) -> None:
    """One that ends its last requests, and the one that follows it."""
    with appending(tmp_path / "usage") as one, appending(tmp_path / "usage") as other:
        for number in range(10):
            (one, other)[number % 2].append([record(number)], HOUR)
    assert sorted(numbers(tmp_path / "usage")) == [*range(10)] and len(record_files(tmp_path / "usage")) == 2


@pytest.mark.parametrize("cut", [1, 20, 150, None])
def test_the_torn_end_of_a_file_is_left_out_and_counted(tmp_path: Path, cut: int | None) -> None:
    path = tmp_path / "usage"
    written(path, [1, 2])
    (file,) = record_files(path)
    file.with_suffix(".sums").unlink()
    line = record(3).line()
    with file.open("ab") as content:
        content.write(bytes(500) if cut is None else line[:cut])
    assert [each.row.tenant for each in summed(path)] == ["acme"]
    read, folder = read_with_problems(path)
    assert read == [1, 2] and folder.num_skipped == 1 and file.name in folder.problems[0]
    if cut:  # the process that wrote it lives, and goes on
        with file.open("ab") as content:
            content.write(line[cut:])
        assert numbers(path) == [1, 2, 3]
        assert total(summed(path)).read == 6, "the sums before it didn't take its first half for a whole line"


def test_a_line_that_is_being_written_is_read_later(tmp_path: Path) -> None:
    """Another process writes the rest of it, and the next line, while this one has read the first half."""
    path = tmp_path / "usage"
    written(path, [1])
    (file,) = record_files(path)
    file.with_suffix(".sums").unlink()
    whole = file.read_bytes() + record(2).line() + record(3).line()
    file.write_bytes(whole[:-300])

    class Racing(UsageFolder):
        def _skip(self, problem: str) -> None:
            file.write_bytes(whole)
            super()._skip(problem)

    with closing(Racing(path, writes=True)) as folder:
        assert [each.counts.read for each in folder.sums(0)] == [1]
    assert total(summed(path)).read == 6


def test_damaged_lines_are_left_out_and_the_first_of_them_told(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    written(path, [1, 2, 3])
    (file,) = record_files(path)
    file.with_suffix(".sums").unlink()
    first, second, third = file.read_bytes().splitlines(keepends=True)
    bad = [b"{}}\n", b"x" * 40_000 + b"\n", second.replace(b'"read":2', b'"read":-2'), *[b"\n"] * 50]
    file.write_bytes(b"".join([first, *bad, third]))
    read, folder = read_with_problems(path)
    assert read == [1, 3] and folder.num_skipped >= len(bad) and len(folder.problems) == MOST_PROBLEMS
    assert total(summed(path)).read == 4 == total(summed(path)).read


def test_a_record_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    written(path, [1, 2])
    with appending(path) as appender:
        appender.append([record(2), record(3), record(3)], HOUR)
    for file in path.glob("*.sums"):
        file.unlink()
    assert sorted(numbers(path)) == [1, 2, 3]
    assert total(summed(path)).read == 6


def test_sums_of_a_file_stand_for_its_records(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    with appending(path, max_bytes=2_000) as appender:
        for number in range(60):
            tenant = ("acme", "two\nlines")[number % 2]
            appender.append(
                [record(number, tenant, kind=("warm", "completion")[number % 3 > 0])], HOUR + number
            )
    expected = sums_of(found(path))
    assert len(record_files(path)) > 5 and summed(path) == expected
    for file in record_files(path)[:-1]:  # a pipeline has taken them
        file.unlink()
    assert summed(path) == expected
    assert len(numbers(path)) < 60


@pytest.mark.parametrize(
    "change", ["missing", "cut", "flip", "another file's", "no JSON", "no object", "empty"]
)
def test_sums_that_are_not_whole_are_made_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "usage"
    with appending(path, max_bytes=1) as appender:
        appender.append([record(1), record(2, "globex"), record(3)], HOUR)
        appender.append([record(4)], HOUR)
    expected = sums_of(found(path))
    file = sorted(path.glob("*.sums"))[0]
    content = file.read_bytes()
    changed = {
        "cut": content[:-30],
        "flip": content.replace(b'"read"', b'"re\xffd"'),
        "another file's": content.splitlines(keepends=True)[0],
        "no JSON": b"x\n" + content,
        "no object": b"[]\n",
        "empty": b"",
    }
    file.unlink() if change == "missing" else file.write_bytes(changed[change])
    assert summed(path) == expected and summed(path) == expected
    assert file.read_bytes() == content


def test_a_start_reads_only_what_has_no_sums(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    with closing(UsageFolder(path, writes=True)) as folder, appending(path) as appender:
        for number in range(3):
            appender.append([record(number)], HOUR)
            assert [each.id != "" for each in folder.sums(0)] == [False] * bool(number) + [True]
        assert [each.id for each in folder.sums(0)] == [""], "one row"


def test_records_of_days_that_ended_before_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    with appending(path) as appender:
        for day in range(5):
            appender.append([record(day, time_s=HOUR + day * DAY)], HOUR + day * DAY)
    junk = path / f"{record_files(path)[0].stem}.sums.01234567.new"
    junk.touch()
    with closing(UsageFolder(path)) as folder:
        assert [each.counts.read for each in folder.records(HOUR + 3 * DAY)] == [3, 4]
    assert total(summed(path, HOUR + 3 * DAY)).read == 7
    assert not junk.exists() and len(record_files(path)) == 5, "radixkv removes no records"
    kept = [each.name[6:16] for each in sorted(path.glob("*.sums"))]
    assert kept == [day_of(HOUR + day * DAY) for day in (3, 4)]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    written(path, [1])
    for name in ("position.db", "usage-2026-01-31.jsonl", "usage-x.jsonl"):
        (path / name).write_text("mine\n")
    assert numbers(path) == [1] and total(summed(path)).read == 1
    assert (path / "usage-x.jsonl").read_text() == "mine\n"


def test_a_folder_of_an_earlier_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    files = chained(tmp_path / "old", [record(1), record(2)])
    before = [(each.name, each.read_bytes(), each.stat().st_mtime_ns) for each in files]
    with pytest.raises(ConfigError, match=r"earlier version.*radixkv usage export .*old NEW_FOLDER"):
        UsageFolder(tmp_path / "old", writes=True)
    with closing(UsageFolder(tmp_path / "old")) as folder:
        assert list(folder.chained_records()) == [record(1), record(2)] and not folder.num_skipped
        assert list(folder.records()) == []
    after = sorted((tmp_path / "old").iterdir())
    assert [(each.name, each.read_bytes(), each.stat().st_mtime_ns) for each in after] == before


def test_a_line_tells_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    written(path, [1])
    (file,) = record_files(path)
    size = file.stat().st_size
    with file.open("ab") as content:
        content.write(json.dumps({"kind": "gift"}).encode() + b"\n")
    _, folder = read_with_problems(path)
    assert folder.problems == [f"{file.name}, bytes {size} to {size + 17}: an unknown kind"]
