"""``usage_writer``: nothing that was said to be written is lost by a kill, and a bad disk delays no request."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from radixkv.billing import pending, usage_writer
from radixkv.billing.pending import MOST_EACH, Pending
from radixkv.billing.usage_record import Counts
from radixkv.billing.usage_sums import UsageSums, total
from radixkv.billing.usage_writer import UsageWriter
from tests.billing.support import HOUR, KEY, checked, found, record
from tests.tiers.support import FaultyFiles, failing
from tests.waiting import LIMIT_S, eventually, finished, is_set

KILLS = int(os.environ.get("RADIXKV_KILLS", "40"))


@pytest.fixture(autouse=True)
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What must not wait hangs if it does, and what has to wait does so however slow the machine is."""
    for name in ("PATIENCE_S", "_CLOSE_S"):
        monkeypatch.setattr(usage_writer, name, 10 * LIMIT_S)
    monkeypatch.setattr(usage_writer, "RETRY_S", 0.01)


@contextmanager
def writing(folder: Path, files: FaultyFiles | None = None, **others: Any) -> Iterator[UsageWriter]:
    """A writer, closed afterwards."""
    writer = UsageWriter(folder, KEY, 2**20, files=files or FaultyFiles(), wall=lambda: HOUR, **others)
    try:
        yield writer
    finally:
        writer.close()


@pytest.mark.slow
def test_sigkill_at_any_time_loses_nothing_that_was_said_to_be_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.billing.kill_driver", str(tmp_path), str(KILLS), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["lost"] == result["twice"] == result["bad"] == 0, result
    assert result["kills"] == KILLS and result["written"] > KILLS
    assert result["verdicts"].keys() <= {"intact", "torn"}


def test_what_is_recorded_is_written_in_order_and_the_end_is_proven(tmp_path: Path) -> None:
    with writing(tmp_path / "log") as writer:
        for number in range(MOST_EACH):  # more could be merged while they wait
            future = writer.record(record(number))
        assert future is not None
        future.result(LIMIT_S)
        eventually(lambda: writer.state().num_written == MOST_EACH)
    assert [each.counts.read for each in found(tmp_path / "log")] == list(range(MOST_EACH))
    check = checked(tmp_path / "log")
    assert check.verdict == "intact" and check.is_ended


def test_a_full_disk_is_told_and_what_waits_is_written_later(tmp_path: Path) -> None:
    files = FaultyFiles()
    with writing(tmp_path / "log", files) as writer:
        files.before = failing("write", errno.ENOSPC)
        first = writer.record(record(0))
        eventually(lambda: writer.state().num_errors > 0)
        state = writer.state()
        assert state.problem == os.strerror(errno.ENOSPC) and state.num_waiting == 1 and state.num_lost == 0
        assert first is not None and not first.done()
        for number in range(1, 200):  # no request waits for a disk that is known to be full
            asyncio.run(finished(writer.written(writer.record(record(number)))))
        files.before = lambda call: None
        eventually(lambda: writer.state().num_waiting == 0)
        assert writer.state().problem == ""
    assert [each.counts.read for each in found(tmp_path / "log")] == list(range(200))
    assert checked(tmp_path / "log").verdict == "intact"


def test_a_disk_that_hangs_delays_only_the_first_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, files = threading.Event(), FaultyFiles()

    def hang(call: str) -> None:
        if call == "write":
            is_set(release, "the release of the disk")

    with writing(tmp_path / "log", files) as writer:

        def answer() -> None:
            asyncio.run(finished(writer.written(writer.record(record()))))

        files.before = hang
        with monkeypatch.context() as patch:
            patch.setattr(usage_writer, "PATIENCE_S", 0.05)
            answer()
        answer()  # with endless patience: it doesn't wait
        assert writer.state().num_written == 0
        release.set()
        eventually(lambda: writer.state().num_waiting == 0)
        answer()
        assert writer.state().num_written == 3, "it has waited again"
    assert len(found(tmp_path / "log")) == 3


def test_records_that_do_not_fit_are_merged_then_counted_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MOST_EACH", 10)
    monkeypatch.setattr(pending, "MOST_ROWS", 2)
    waiting, sums, kept = Pending(), UsageSums(10**10), UsageSums(10**10)
    for number in range(100):
        waiting.add(record(number, key=f"{number % 2}"))
        sums.add(record(number, key=f"{number % 2}"))
    assert len(waiting) == 12 and waiting.num_lost == 0
    waiting.add(record(0, key="third"))
    assert waiting.num_lost == 1
    assert waiting.add(record(0, "globex")) is not None, "another tenant's records have their own place"
    taken = waiting.take(5) + waiting.take(100)
    assert len(taken) == 13 and not waiting
    for each in taken:
        kept.add(each.record)
    assert kept.of("acme", 0, 10**12) == sums.of("acme", 0, 10**12), (
        "sums are exact although records were merged"
    )
    assert total(kept.of("acme", 0, 10**12)) == Counts(100, sum(range(100)), {300: 1_600}, 200, 100)


def test_a_closed_log_counts_what_comes_later_as_lost(tmp_path: Path) -> None:
    with writing(tmp_path / "log") as writer:
        writer.record(record(1))
    assert writer.record(record(2)) is None and writer.state().num_lost == 1
    assert len(found(tmp_path / "log")) == 1


def test_a_full_disk_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    files = FaultyFiles()
    with writing(tmp_path / "log", files) as writer:  # ``close`` would wait for ever
        files.before = failing("write", errno.ENOSPC)
        writer.record(record(1))
    assert writer.state().num_waiting == 1
