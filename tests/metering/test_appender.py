"""``appender``: rotation by day and size, writes that fail half-way, syncs that fail, and power failures."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from contextlib import closing
from pathlib import Path

import pytest

from radixkv.metering.appender import UsageAppender
from radixkv.metering.folder import UsageFolder
from tests.metering.support import (
    HOUR,
    appending,
    found,
    numbers,
    record,
    record_files,
    summed,
    sums_of,
)
from tests.tiers.support import FaultyFiles, failing

DAY = 86_400.0


def test_a_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with appending(tmp_path / "usage") as appender:
        name = f"usage-2026-01-31-{appender._process}-0001.jsonl"
        (tmp_path / "usage" / name).symlink_to(victim)
        with pytest.raises(FileExistsError):
            appender.append([record(1)], HOUR)
        appender.append([record(2)], HOUR)
    assert victim.read_text() == "precious"
    (tmp_path / "usage" / name).unlink()
    assert numbers(tmp_path / "usage") == [1, 2]


def test_whoever_follows_a_file_sees_nothing_change_while_the_disk_is_full(tmp_path: Path) -> None:
    path, files, seen = tmp_path / "usage", FaultyFiles(most=100), b""
    with appending(path, files=files) as appender:
        for number in range(1, 30):
            files.before = failing("write", errno.ENOSPC, after=number % 4)
            with contextlib.suppress(OSError):
                appender.append([record(number)], HOUR)
            (content,) = (file.read_bytes() for file in record_files(path))
            assert content.startswith(seen)
            seen = content
        files.before = lambda call: None
        appender.append([], HOUR)
    assert record_files(path)[0].read_bytes().startswith(seen) and numbers(path) == [*range(1, 30)]


def test_a_new_day_and_a_full_file_begin_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    with appending(path, max_bytes=500) as appender:
        for number, time_s in enumerate([HOUR, HOUR + 1, HOUR + 2, HOUR + 3_600, HOUR + DAY, HOUR + 7 * DAY]):
            appender.append([record(number)], time_s)
    names = [file.name for file in record_files(path)]
    assert [name[6:16] for name in names] == ["2026-01-31", "2026-01-31", "2026-02-01", "2026-02-07"]
    assert [name[34:38] for name in names] == ["0001", "0002", "0003", "0004"]
    assert numbers(path) == [0, 1, 2, 3, 4, 5]
    assert {file.stem for file in path.glob("*.sums")} == {file.stem for file in record_files(path)}


@pytest.mark.parametrize("most", [1, 7, 100])
@pytest.mark.parametrize(
    "calls", ["write", "open", "write open truncate", "sync", "write sync remove rename"]
)
@pytest.mark.parametrize("after", range(6))
def test_a_call_that_fails_at_any_place_loses_and_doubles_nothing(
    tmp_path: Path, calls: str, after: int, most: int
) -> None:
    path, files, refused = tmp_path / "usage", FaultyFiles(most=most), 0
    with appending(path, max_bytes=600, files=files) as appender:
        for number in range(6):
            place = after * 40 // most if most > 1 and "write" in calls else after % 3
            files.before = failing(calls, errno.ENOSPC, times=2, after=place)
            batch = [record(number)]
            for _ in range(5):
                try:
                    now, batch = batch, []
                    appender.append(now, HOUR + number * DAY / 2)
                    appender.sync()
                    assert not appender.is_behind
                    break
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    refused += 1
            files.before = lambda call: None
    assert sorted(numbers(path)) == [*range(6)]
    lines = sum(file.read_bytes().count(b"\n") for file in record_files(path))
    assert lines == 6 and summed(path) == sums_of(found(path))


def test_what_a_failed_sync_left_unsure_is_written_again_to_a_new_file(tmp_path: Path) -> None:
    """Linux forgets what it couldn't write: a second sync of the same file would succeed, and say nothing."""
    path, files = tmp_path / "usage", FaultyFiles()
    with appending(path, files=files) as appender:
        appender.append([record(1)], HOUR)
        appender.sync()
        appender.append([record(2)], HOUR)
        appender.append([record(3)], HOUR)
        files.before = failing("sync", errno.EIO, times=1)
        with pytest.raises(OSError):
            appender.sync()
        assert appender.is_behind and (appender.num_synced, appender.num_unsynced) == (1, 0)
        appender.append([record(4)], HOUR)
        assert not appender.is_behind and appender.num_unsynced == 3
    first, second = record_files(path)
    assert first.read_bytes() == record(1).line()
    assert second.read_bytes() == b"".join(record(number).line() for number in (2, 3, 4))
    assert appender.num_synced == 4 and summed(path) == sums_of(found(path))


def test_a_sync_that_fails_while_the_disk_is_full_loses_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    with appending(tmp_path / "usage", files=files) as appender:
        appender.append([record(1)], HOUR)
        files.before = failing("write sync")
        with pytest.raises(OSError):
            appender.append([record(2)], HOUR)
        with pytest.raises(OSError):
            appender.sync()
        files.before = lambda call: None
        appender.append([record(3)], HOUR)
    assert numbers(tmp_path / "usage") == [1, 2, 3]


def test_records_that_could_not_be_cut_off_are_there_twice_with_one_id(tmp_path: Path) -> None:
    path, files = tmp_path / "usage", NoTruncate()
    with appending(path, files=files) as appender:
        appender.append([record(1)], HOUR)
        appender.sync()
        appender.append([record(2)], HOUR)
        files.before = failing("sync", errno.EIO, times=1)
        with pytest.raises(OSError):
            appender.sync()
        appender.append([record(3)], HOUR)
    lines = b"".join(file.read_bytes() for file in record_files(path))
    assert lines.count(f"{2:024x}".encode()) == 2
    assert numbers(path) == [1, 2, 3]


class NoTruncate(FaultyFiles):
    """Files of a disk that cuts nothing off."""

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_never_syncs_leaves_no_heap_of_files(tmp_path: Path) -> None:
    path, files = tmp_path / "usage", FaultyFiles()
    with appending(path, files=files) as appender:
        files.before = failing("sync")
        for number in range(20):
            appender.append([record(number)], HOUR)
            with pytest.raises(OSError):
                appender.sync()
        assert record_files(path) == []
        files.before = lambda call: None
        appender.append([], HOUR)
    assert numbers(path) == [*range(20)] and len(record_files(path)) == 1


def test_a_file_that_somebody_removed_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    with appending(path) as appender:
        appender.append([record(1)], HOUR)
        appender.sync()
        appender.append([record(2)], HOUR)
        for file in record_files(path):
            file.unlink()
        with pytest.raises(FileNotFoundError):
            appender.sync()
        appender.append([record(3)], HOUR)
    assert numbers(path) == [2, 3], "the first was synced, and taken away with its file"


class PowerFailure(FaultyFiles):
    """Files that know how much of each was synced, and cut the rest off at random when the power fails."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        super().__init__()
        self._path, self._chance = path, chance
        self._synced = {each.stat().st_ino: each.stat().st_size for each in path.glob("*")}

    def sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._synced[status.st_ino] = status.st_size

    def fail(self) -> None:
        for file in self._path.iterdir():
            status = file.stat()
            synced = self._synced.get(status.st_ino, 0)
            if not synced and self._chance.random() < 0.5:
                file.unlink()
                continue
            left = self._chance.randint(synced, max(status.st_size, synced))
            zeros = min(status.st_size - left, self._chance.choice([0, 0, 50, 4_096]))
            os.truncate(file, left)
            os.truncate(file, left + zeros)


@pytest.mark.parametrize("seed", range(10))
def test_a_power_failure_loses_nothing_that_was_synced(tmp_path: Path, seed: int) -> None:
    chance, path = random.Random(seed), tmp_path / "usage"
    synced = 0
    for _ in range(4):
        files = PowerFailure(path, chance)
        folder = UsageFolder(path, files, writes=True)
        with closing(folder), closing(UsageAppender(folder, chance.choice([500, 3_000]))) as appender:
            for _ in range(chance.randrange(40)):
                batch = [record(1, id=f"{seed}-{chance.random()}") for _ in range(chance.randrange(4))]
                appender.append(batch, HOUR + chance.randrange(3) * DAY)
                if chance.random() < 0.3:
                    appender.sync()
            synced += appender.num_synced
            files.fail()
        with closing(UsageFolder(path)) as read:
            records = list(read.records())
        assert len(records) >= synced, read.problems
        synced = len(records)  # what is there survived, and later failures cut nothing off it
        assert summed(path) == sums_of(records)
