"""``writer``: nothing that was said to be written is lost by a kill, and a bad disk delays nobody."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from radixkv.clock import ManualClock
from radixkv.metering import writer as writer_module
from radixkv.metering.folder import UsageFolder
from radixkv.metering.sums import UsageSums
from radixkv.metering.writer import UsageWriter
from tests.metering.support import EVER, HOUR, found, numbers, record, record_files, summed, sums_of
from tests.tiers.support import FaultyFiles, failing
from tests.waiting import LIMIT_S, ended, eventually, is_set

KILLS = int(os.environ.get("RADIXKV_KILLS", "40"))


@pytest.fixture(autouse=True)
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has to wait does so however slow the machine is, and what is repeated is repeated soon."""
    monkeypatch.setattr(writer_module, "_CLOSE_S", LIMIT_S)
    monkeypatch.setattr(writer_module, "RETRY_S", 0.01)
    monkeypatch.setattr(writer_module, "SYNC_EVERY_S", 0.02)


@contextmanager
def writing(path: Path, files: FaultyFiles | None = None, max_bytes: int = 2**20) -> Iterator[UsageWriter]:
    """A writer, closed afterwards."""
    folder = UsageFolder(path, files or FaultyFiles(), writes=True)
    writer = UsageWriter(folder, max_bytes, wall=lambda: HOUR)
    try:
        yield writer
    finally:
        writer.close()


@pytest.mark.slow
def test_sigkill_at_any_time_loses_nothing_that_was_said_to_be_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.metering.kill_driver", str(tmp_path), str(KILLS), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["lost"] == result["twice"] == result["wrong"] == 0, result
    assert result["kills"] == KILLS and result["written"] > KILLS and result["torn"] > 0


def test_what_is_recorded_is_written_in_order_then_synced(tmp_path: Path) -> None:
    with writing(tmp_path / "usage") as writer:
        for number in range(3_000):
            writer.record(record(number))
        eventually(lambda: writer.state().num_written == 3_000)
        eventually(lambda: writer.state().num_durable == 3_000)
        writer.record(record(3_000))
    state = writer.state()
    assert (state.num_written, state.num_durable, state.num_waiting, state.num_lost) == (3_001, 3_001, 0, 0)
    assert numbers(tmp_path / "usage") == [*range(3_001)]


def test_threads_that_end_requests_at_a_time_lose_nothing_and_sums_equal_a_replay(tmp_path: Path) -> None:
    sums, path = UsageSums(EVER), tmp_path / "usage"

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for number in range(400):
            made = record(
                number,
                chance.choice(["acme", "globex", "two\nlines"]),
                id=f"{seed}-{number}",
                key=chance.choice("kl"),
                time_s=HOUR + chance.randrange(3) * 3_600,
            )
            sums.add(made)
            writer.record(made)

    files = FaultyFiles(most=1_000)
    with writing(path, files, max_bytes=20_000) as writer:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for calls in ("write", "sync", "open", "truncate write", "rename"):
            files.before = failing(calls, errno.ENOSPC, times=3)
            eventually(lambda: writer.state().num_waiting == 0 or writer.state().problem)
        for thread in threads:
            ended(thread)
        files.before = lambda call: None
    assert writer.state().num_lost == 0
    assert len(found(path)) == 2_400 == len({each.id for each in found(path)})
    assert sums.all(None, 0, EVER) == sums_of(found(path)) == summed(path)


def test_a_full_disk_is_told_and_what_waits_is_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    with writing(tmp_path / "usage", files) as writer, caplog.at_level(logging.WARNING, "radixkv.metering"):
        files.before = failing("write", errno.ENOSPC)
        for number in range(200):
            writer.record(record(number))
        eventually(lambda: writer.state().num_errors > 2)
        state = writer.state()
        assert state.problem == os.strerror(errno.ENOSPC) and (state.num_waiting, state.num_lost) == (200, 0)
        files.before = lambda call: None
        eventually(lambda: writer.state().num_waiting == 0)
        assert writer.state().problem == ""
    assert numbers(tmp_path / "usage") == [*range(200)]
    told = [each.message for each in caplog.records]
    assert told == [
        "usage records can't be written: No space left on device",
        "usage records are written again; 0 were lost so far",
    ]


def test_a_full_disk_still_syncs_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SYNC_EVERY_S", 0.2)
    files = FaultyFiles()
    with writing(tmp_path / "usage", files) as writer:
        writer.record(record(0))
        eventually(lambda: writer.state().num_written == 1)
        files.before = failing("write", errno.ENOSPC)
        writer.record(record(1))
        eventually(lambda: writer.state().num_durable == 1 and writer.state().num_errors > 1)
        files.before = lambda call: None
    assert numbers(tmp_path / "usage") == [0, 1]


def test_what_was_synced_stays_synced_and_the_rest_is_written_again_while_syncs_fail(tmp_path: Path) -> None:
    files = FaultyFiles()
    with writing(tmp_path / "usage", files) as writer:
        writer.record(record(0))
        eventually(lambda: writer.state().num_durable == 1)
        files.before = failing("sync", errno.EIO)
        for number in range(1, 100):
            writer.record(record(number))
        eventually(lambda: writer.state().num_errors > 3)
        assert writer.state().num_durable == 1
        files.before = lambda call: None
        eventually(lambda: writer.state().num_durable == 100)
    assert numbers(tmp_path / "usage") == [*range(100)]
    assert len(record_files(tmp_path / "usage")) == 2


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_disk_that_hangs_delays_nobody_and_a_full_queue_loses_what_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    monkeypatch.setattr(writer_module, "MOST_WAITING", 50)
    release, hangs, files = threading.Event(), threading.Event(), FaultyFiles()

    def hang(name: str) -> None:
        if name == call:
            hangs.set()
            is_set(release, "the release of the disk")

    with writing(tmp_path / "usage", files) as writer:
        files.before = hang
        writer.record(record(0))
        is_set(hangs, "a call of the disk")
        for number in range(1, 80):
            writer.record(record(number))  # returns while the disk hangs
        state = writer.state()
        assert state.num_lost == 30 and state.num_durable == 0 and not state.problem
        release.set()
        eventually(lambda: writer.state().num_durable == 50)
        writer.record(record(80))
    assert numbers(tmp_path / "usage") == [*range(50), 80]
    told = [each.message for each in caplog.records if each.name == "radixkv.metering"]
    assert told[0].startswith("usage records are lost: the disk doesn't take them, and 50 wait")
    assert told[1:] == ["usage records are written again; 30 were lost so far"]


def test_what_waits_for_a_record_is_told_once_the_file_has_it(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    with writing(path) as writer:
        for number in range(100):
            told = threading.Event()
            writer.on_appended(writer.record(record(number)), told.set)
            is_set(told, "the record is appended")
            assert numbers(path) == [*range(number + 1)]
        writer.on_appended(100, told.clear)
        assert not told.is_set(), "what is in the file is told at once"


def test_nobody_waits_for_a_disk_that_fails_and_only_once_for_one_that_hangs(tmp_path: Path) -> None:
    release, hangs, files, clock = threading.Event(), threading.Event(), FaultyFiles(), ManualClock()
    told = [threading.Event() for _ in range(4)]

    def hang(name: str) -> None:
        if name == "write":
            hangs.set()
            is_set(release, "the release of the disk")

    folder = UsageFolder(tmp_path / "usage", files, writes=True)
    with closing(UsageWriter(folder, 2**20, wall=lambda: HOUR, clock=clock)) as writer:
        files.before = hang
        writer.on_appended(writer.record(record(0)), told[0].set)
        is_set(hangs, "a call of the disk")
        assert not told[0].is_set()
        clock.advance(writer_module.WAIT_S)
        writer.on_appended(writer.record(record(1)), told[1].set)
        assert told[1].is_set() and not told[0].is_set()
        release.set()
        is_set(told[0], "the first record is appended")
        files.before = failing("write", errno.ENOSPC)
        writer.on_appended(writer.record(record(2)), told[2].set)
        is_set(told[2], "writing has failed")
        writer.on_appended(writer.record(record(3)), told[3].set)
        eventually(lambda: told[3].is_set())
        files.before = lambda call: None
    assert numbers(tmp_path / "usage") == [0, 1, 2, 3]


def test_a_closed_writer_counts_what_comes_later_as_lost(tmp_path: Path) -> None:
    with writing(tmp_path / "usage") as writer:
        writer.record(record(1))
    writer.record(record(2))
    assert writer.state().num_lost == 1 and numbers(tmp_path / "usage") == [1]


def test_a_close_writes_what_waits_once_the_disk_works_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    with writing(tmp_path / "usage", files) as writer:
        files.before = failing("write", errno.ENOSPC)
        writer.record(record(1))
        eventually(lambda: writer.state().problem)
        files.before = lambda call: None
    assert numbers(tmp_path / "usage") == [1] and writer.state().num_durable == 1


def test_a_full_disk_does_not_keep_the_process_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    with writing(tmp_path / "usage", files) as writer:  # ``close`` would wait for ever
        files.before = failing("write", errno.ENOSPC)
        writer.record(record(1))
    assert writer.state().num_waiting == 1
    assert "1 usage records may be lost" in caplog.text


def test_a_full_disk_at_the_end_leaves_no_open_file(tmp_path: Path) -> None:
    files = FaultyFiles()
    before = len([*Path("/proc/self/fd").iterdir()])
    with writing(tmp_path / "usage", files) as writer:
        writer.record(record(1))
        eventually(lambda: writer.state().num_durable == 1)
        files.before = failing("write sync", errno.ENOSPC)
        writer.record(record(2))
    assert len([*Path("/proc/self/fd").iterdir()]) == before
