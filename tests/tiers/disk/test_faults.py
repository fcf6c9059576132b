"""Faults of the disk: each is a counted miss, or a record that wasn't stored. None is wrong KV, none is waited for."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.clock import ManualClock
from radixkv.errors import ConfigError
from radixkv.tiers.disk.io_threads import IOThreads, Job
from radixkv.tiers.disk.records import MISSED, MOST_ERRORS, UNSTORED, DiskRecords
from tests.tiers.support import (
    ACME,
    GLOBEX,
    NUM_SLOTS,
    SECRET,
    WAIT_S,
    FaultyFiles,
    counted,
    failing,
    kv,
    load,
    prompt,
    right_or_missing,
    settings,
    store,
    tier_in,
)
from tests.waiting import ended, eventually, is_set


def test_one_error_costs_one_record(tmp_path: Path) -> None:
    files = FaultyFiles()
    with tier_in(tmp_path / "t", files=files) as tier:
        assert store(tier, ACME, prompt(1))
        files.before = failing("read", times=1)
        assert load(tier, ACME, prompt(1)) is None and right_or_missing(tier, ACME, prompt(1))
        for after in range(2):  # the payload, then the header
            files.before = failing("write", times=1, after=after)
            assert not store(tier, ACME, prompt(2)) and tier.locate(ACME, prompt(2), 0) == 0
        assert store(tier, ACME, prompt(2)) and right_or_missing(tier, ACME, prompt(2))
        assert counted(tier, {"read_errors": 1, "write_errors": 2, "sealed": 2, "free": NUM_SLOTS - 2})
        tier._table.check()


def test_a_slot_whose_new_record_failed_gives_nothing_after_a_restart(tmp_path: Path) -> None:
    one_slot = {"disk_bytes": 2 * 4096 + 4096 + 128}
    files = FaultyFiles()
    with tier_in(tmp_path / "t", files=files, **one_slot) as tier:
        assert store(tier, ACME, prompt(1))
        files.before = failing(
            "write", after=2
        )  # the old header is cleared, the payload written, and no header
        assert not store(tier, ACME, prompt(2))
        files.before = lambda call: None
    with tier_in(tmp_path / "t", **one_slot) as tier:
        assert load(tier, ACME, prompt(1)) is None and load(tier, ACME, prompt(2)) is None


def test_errors_for_ever_close_the_tier_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tier = DiskRecords(settings(tmp_path / "t"), [SECRET], files=files, clock=clock)
    assert store(tier, ACME, prompt(1))
    files.before = failing("read write")
    with caplog.at_level(logging.ERROR):
        for number in range(MOST_ERRORS + 5):
            assert load(tier, ACME, prompt(1)) is None and not store(tier, GLOBEX, prompt(number))
    assert (
        tier.state == "degraded" and tier.locate(ACME, prompt(1), 0) == 0 and "closed for 30 s" in caplog.text
    )
    reads = files.calls.count("read")
    assert load(tier, ACME, prompt(1)) is None and files.calls.count("read") == reads
    clock.advance(31)
    files.before = lambda call: None
    assert tier.state == "open" and right_or_missing(tier, ACME, prompt(1))
    assert counted(tier, {"closed": tier.counts()["closed"], "sealed": 1}) and tier.counts()["closed"] > 5
    tier.close()


@pytest.mark.parametrize("most", [1, 7, 100])
def test_short_reads_and_writes_are_continued(tmp_path: Path, most: int) -> None:
    with tier_in(tmp_path / "t", files=FaultyFiles(most=most), direct=False, disk_bytes=24_000) as tier:
        assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))
    with tier_in(tmp_path / "t", files=FaultyFiles(most=most), direct=False, disk_bytes=24_000) as tier:
        assert right_or_missing(tier, ACME, prompt(1))


def test_a_file_that_ends_early_or_takes_nothing_is_an_error(tmp_path: Path) -> None:
    files = FaultyFiles()
    with tier_in(tmp_path / "t", files=files, direct=False) as tier:
        assert store(tier, ACME, prompt(1))
        files.most = 0
        assert load(tier, ACME, prompt(1)) is None and not store(tier, ACME, prompt(2))
        assert counted(tier, {"read_errors": 1, "write_errors": 1})
        files.most = None
        assert right_or_missing(tier, ACME, prompt(1))


def test_a_file_system_without_direct_io_uses_the_page_cache(tmp_path: Path) -> None:
    def no_direct(name: str, flags: int, folder: int | None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(name, flags, folder)

    files = FaultyFiles()
    original = files.open
    files.open = no_direct  # type: ignore[method-assign]
    with tier_in(tmp_path / "t", files=files) as tier:
        assert not tier._slab.is_direct
        assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))
    files = FaultyFiles()
    with tier_in(tmp_path / "t", files=files) as tier:  # it opens, and then refuses
        was_direct = tier._slab.is_direct
        files.before = failing("read", errno.EINVAL, times=1)
        assert right_or_missing(tier, ACME, prompt(1)) == was_direct and not (
            was_direct and tier._slab.is_direct
        )
        assert right_or_missing(tier, ACME, prompt(1)) and store(tier, ACME, prompt(2))


def test_a_failed_sync_is_told_and_nothing_is_lost_in_memory(tmp_path: Path) -> None:
    files = FaultyFiles()
    with tier_in(tmp_path / "t", files=files) as tier:
        assert store(tier, ACME, prompt(1))
        files.before = failing("sync", times=1)
        with pytest.raises(OSError, match="Input/output error"):
            tier.sync()
        assert right_or_missing(tier, ACME, prompt(1)) and counted(tier, {"sync_errors": 1})
        tier.sync()


def test_maintenance_syncs_what_was_sealed(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tier = DiskRecords(settings(tmp_path / "t"), [SECRET], files=files, clock=clock)
    assert store(tier, ACME, prompt(1))
    files.calls.clear()
    tier.maintain()
    clock.advance(5)
    tier.maintain()
    assert tier._sync_job is not None and tier._sync_job.wait(WAIT_S) and files.calls.count("sync") == 1
    clock.advance(5)
    tier.maintain()
    tier.close()
    assert files.calls.count("sync") == 1, "nothing was sealed since"


def test_exhausted_descriptors_harm_no_open_tier(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            assert right_or_missing(tier, ACME, prompt(1)) and store(tier, ACME, prompt(2))
            assert not store(tier, GLOBEX, prompt(1)), "a new tenant's key needs a file"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert store(tier, GLOBEX, prompt(1)) and counted(tier, {"write_errors": 1})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    """A real one: a tmpfs of 1 MB."""
    (tmp_path / "small").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", str(tmp_path / "small")]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    try:
        with (
            pytest.raises(ConfigError, match=r"a size for which .* has space"),
            tier_in(tmp_path / "small" / "t", disk_bytes=2 << 20),
        ):
            pass
        with tier_in(tmp_path / "small" / "t", disk_bytes=1 << 19) as tier:
            assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


# --- a disk that never answers


class Hang:
    """Blocks the threads of a tier in these calls until ``end``."""

    def __init__(self, calls: str) -> None:
        self.calls, self.is_armed, self.is_over = calls.split(), False, threading.Event()
        self.num_reached = threading.Semaphore(0)

    def __call__(self, call: str) -> None:
        is_in_thread = threading.current_thread().name.startswith("radixkv-tier")
        if self.is_armed and is_in_thread and call in self.calls:
            self.num_reached.release()
            is_set(self.is_over)

    def reached(self, num: int) -> None:
        """Wait until so many calls hang."""
        for _ in range(num):
            assert self.num_reached.acquire(timeout=WAIT_S)

    def end(self) -> None:
        self.is_armed = False
        self.is_over.set()


def test_an_io_that_never_returns_costs_its_threads_and_nothing_else(tmp_path: Path) -> None:
    """While two reads hang, every call returns: otherwise this test would hang too."""
    hang, clock = Hang("read"), ManualClock()
    tier = DiskRecords(settings(tmp_path / "t", hang_s=5.0), [SECRET], files=FaultyFiles(hang), clock=clock)
    assert store(tier, ACME, prompt(1)) and store(tier, ACME, prompt(2))
    hang.is_armed = True
    into = bytearray(b"mine" * 150)
    jobs = [tier.load(ACME, prompt(1), 0, memoryview(into)) for _ in range(2)]
    hang.reached(len(jobs))
    assert not any(job is None or job.wait(0.01) for job in jobs)
    assert tier.locate(ACME, prompt(2), 0) == 1 and len(tier) == 2, "the lock is free"
    waiting = tier.load(ACME, prompt(2), 0, memoryview(bytearray(600)))
    assert waiting is not None and not waiting.wait(0.01)
    clock.advance(6)
    assert tier.state == "degraded" and tier.counts()["hung_threads"] == 2
    assert tier.load(ACME, prompt(2), 0, memoryview(bytearray(600))) is None, "no more is queued"
    hang.end()
    assert eventually(lambda: tier.state == "open") and right_or_missing(tier, ACME, prompt(2))
    assert into == b"mine" * 150, "an abandoned load never touches its caller's memory"
    assert eventually(lambda: tier.missed()["abandoned"] == 3), (
        "also the load that was abandoned in the queue"
    )
    assert tier.missed()["too_busy"] == 0 and tier.missed()["closed"] == 1
    tier._table.check()
    tier.close()


def test_misses_and_stores_that_failed_are_counted_by_reason(tmp_path: Path) -> None:
    """A reason that both have counts for the one that it was."""
    files = FaultyFiles()
    with tier_in(tmp_path / "t", files=files) as tier:
        assert store(tier, ACME, prompt(1)) and load(tier, ACME, prompt(2)) is None
        files.before = failing("read", times=1)
        assert load(tier, ACME, prompt(1)) is None
        files.before = failing("write", times=1)
        assert not store(tier, ACME, prompt(2))
        assert tier.store(ACME, prompt(3), 0, memoryview(b"kv"), since=7) is not None
        assert eventually(lambda: tier.unstored()["stale"] == 1)
        assert right_or_missing(tier, ACME, prompt(1))
    assert load(tier, ACME, prompt(1)) is None and not store(tier, ACME, prompt(1))
    assert not store(tier, ACME, prompt(1)), "closed"
    none = dict.fromkeys(MISSED, 0)
    assert tier.missed() == {**none, "absent": 1, "read_errors": 1, "closed": 1}
    assert tier.unstored() == {**dict.fromkeys(UNSTORED, 0), "write_errors": 1, "stale": 1, "closed": 2}
    assert counted(tier, {"absent": 1, "read_errors": 1, "write_errors": 1, "stale": 1, "closed": 3})


def test_a_record_that_is_being_stored_already_is_not_lost(tmp_path: Path) -> None:
    hang = Hang("write")
    with tier_in(tmp_path / "t", files=FaultyFiles(hang)) as tier:
        assert store(tier, ACME, prompt(1))
        hang.is_armed = True
        first = tier.store(ACME, prompt(2), 0, memoryview(kv(ACME, prompt(2))))
        assert first is not None and first.wait_for_memory(WAIT_S)  # it has its slot
        assert store(tier, ACME, prompt(2)) and not first.is_done
        hang.end()
        assert first.wait(WAIT_S) and right_or_missing(tier, ACME, prompt(2))
        assert tier.unstored() == dict.fromkeys(UNSTORED, 0) and counted(tier, {"stored": 2})


def test_operations_of_the_disk_are_timed(tmp_path: Path) -> None:
    """One that fails too. What makes no system call isn't one."""
    clock, slow = ManualClock(), {"read": 0.02, "write": 2.0, "sync": 0.3}
    files = FaultyFiles(lambda call: clock.advance(slow.get(call, 0.0)))
    tier = DiskRecords(settings(tmp_path / "t"), [SECRET], files=files, clock=clock)
    before = {name: each.count for name, each in tier.durations.items()}
    assert before == {"read": 0, "write": 0, "sync": 0}
    assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))
    assert load(tier, ACME, prompt(2)) is None and store(tier, ACME, prompt(1)), "already there"
    tier.sync()
    found = {name: (each.count, round(each.seconds, 6)) for name, each in tier.durations.items()}
    assert found == {"read": (1, 0.02), "write": (1, 4.0), "sync": (1, 0.32)}, (
        "a payload and its header; a lock"
    )
    assert next(bound for bound, count in tier.durations["read"].buckets() if count) == 0.025

    def broken(call: str) -> None:
        clock.advance(slow.get(call, 0.0))
        if call == "read":
            raise OSError(errno.EIO, "broken")

    files.before = broken
    assert load(tier, ACME, prompt(1)) is None
    assert tier.durations["read"].count == 2 and tier.missed()["read_errors"] == 1
    tier.close()


def test_a_hanging_write_gives_the_payload_back(tmp_path: Path) -> None:
    hang = Hang("write")
    with tier_in(tmp_path / "t", files=FaultyFiles(hang)) as tier:
        assert store(tier, ACME, prompt(1))
        hang.is_armed = True
        payload = bytearray(kv(ACME, prompt(2)))
        job = tier.store(ACME, prompt(2), 0, memoryview(payload))
        assert job is not None and job.wait_for_memory(WAIT_S)  # it is encrypted, and not written
        payload[:] = bytes(len(payload))
        assert tier.locate(ACME, prompt(2), 0) == 0 and not job.is_done, "not found before it is sealed"
        hang.end()
        assert job.wait(WAIT_S) and right_or_missing(tier, ACME, prompt(2))


def test_closing_while_io_hangs_leaves_the_files_to_it(tmp_path: Path) -> None:
    hang = Hang("write")
    tier = DiskRecords(settings(tmp_path / "t"), [SECRET], files=FaultyFiles(hang))
    assert store(tier, ACME, prompt(1))
    hang.is_armed = True
    job = tier.store(ACME, prompt(2), 0, memoryview(kv(ACME, prompt(2))))
    assert job is not None
    hang.reached(1)
    tier.close(timeout_s=0.05)
    assert tier.state == "closed" and tier.folder._descriptors, "its descriptor can't become another file's"
    hang.end()
    assert job.wait(WAIT_S) and tier._syncs.close()
    tier.folder.close()
    with tier_in(tmp_path / "t") as tier:
        assert right_or_missing(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(2))


# --- the threads alone


def test_loads_go_before_stores_and_a_full_queue_refuses() -> None:
    threads, names = IOThreads(1, 4096, max_queued=2), ("store", "load", "store", "load")
    begun, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def first(_job: Job, _memory: memoryview) -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    def named(name: str) -> Callable[[Job, memoryview], bool]:
        return lambda _job, _memory: order.append(name) is None

    jobs = [threads.submit(first, is_load=True)]
    assert begun.wait(WAIT_S)
    jobs += [threads.submit(named(name), is_load=name == "load") for name in names]
    assert (
        threads.submit(named("load"), is_load=True) is threads.submit(named("store"), is_load=False) is None
    )
    go_on.set()
    assert all(job is not None and job.wait(WAIT_S) for job in jobs)
    assert order == ["load", "load", "store", "store"]
    assert threads.close() and threads.submit(first, is_load=True) is None


@pytest.mark.parametrize("is_load", [True, False])
def test_a_caller_knows_a_job_before_it_begins_or_there_is_none(is_load: bool) -> None:
    class Full(list[Job]):
        def append(self, job: Job) -> None:
            super().append(job)
            raise MemoryError

    threads, ran, begun = IOThreads(1, 4096), list[Job](), list[Job]()
    first = threads.submit(
        lambda job, _memory: ran.append(job) is None and begun == [job], is_load=is_load, begun=begun
    )
    assert first is not None and first.wait(WAIT_S)
    full = Full()
    with pytest.raises(MemoryError):
        threads.submit(lambda job, _memory: ran.append(job) is None, is_load=is_load, begun=full)
    assert full[0].is_done and not full[0].wait(WAIT_S)
    assert threads.close() and ran == [first]


def test_an_error_of_ours_is_a_miss_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    threads = IOThreads(1, 4096)

    def broken(_job: Job, _memory: memoryview) -> bool:
        raise ZeroDivisionError("ours")

    for _ in range(3):
        job = threads.submit(broken, is_load=True)
        assert job is not None and not job.wait(WAIT_S)
    assert caplog.text.count("ZeroDivisionError: ours") == 3 and threads.close()


def test_an_abandoned_job_is_not_begun() -> None:
    threads = IOThreads(1, 4096)
    go_on = threading.Event()
    ran: list[int] = []
    unwanted: list[int] = []
    blocking = threads.submit(lambda _job, _memory: go_on.wait(WAIT_S), is_load=True)
    waiting = threads.submit(
        lambda _job, _memory: ran.append(1) is None, is_load=True, unwanted=lambda: unwanted.append(1)
    )
    assert blocking is not None and waiting is not None and not waiting.wait(0)
    go_on.set()
    assert blocking.wait(WAIT_S) and threads.close() and not ran and unwanted == [1]


class HeldWrites(FaultyFiles):
    """Files of which a thread's write of records is held, once it is armed."""

    def __init__(self) -> None:
        super().__init__(self._hold)
        self.is_armed = False
        self.reached, self.gate = threading.Event(), threading.Event()

    def _hold(self, call: str) -> None:
        if call == "write" and self.is_armed:
            self.reached.set()
            is_set(self.gate)


def test_a_record_that_is_sealed_during_a_sync_is_synced_by_the_next(tmp_path: Path) -> None:
    files, clock = HeldWrites(), ManualClock()
    tier = DiskRecords(settings(tmp_path / "t", direct=False), [SECRET], files=files, clock=clock)
    assert store(tier, ACME, prompt(1))
    files.is_armed = True
    job = tier.store(ACME, prompt(2), 0, memoryview(kv(ACME, prompt(2))))
    assert job is not None
    is_set(files.reached)
    tier.sync()
    files.gate.set()
    assert job.wait(WAIT_S)
    num_syncs = files.calls.count("sync")
    clock.advance(10.0)
    for _ in range(2):  # the second finds nothing to do
        tier.maintain()
        assert tier._sync_job is not None and tier._sync_job.poll(WAIT_S)
    assert files.calls.count("sync") == num_syncs + 1
    tier.close()
    assert files.calls.count("sync") == num_syncs + 1, "all is durable"


def test_the_last_sync_comes_after_the_last_write(tmp_path: Path) -> None:
    """Also of a store that hadn't begun."""
    files = HeldWrites()
    tier = DiskRecords(settings(tmp_path / "t", direct=False, num_threads=1), [SECRET], files=files)
    assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
    tier.sync()
    files.is_armed = True
    jobs = [tier.store(ACME, prompt(number), 0, memoryview(kv(ACME, prompt(number)))) for number in (2, 3)]
    is_set(files.reached)

    def let_go() -> None:
        eventually(lambda: tier.state == "closed", "the beginning of the close")
        files.gate.set()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    tier.close()
    ended(letting_go)
    assert all(job is not None and job.wait(0) for job in jobs)
    last = {call: at for at, call in enumerate(files.calls)}
    assert last["sync"] > last["write"]


def test_a_disk_that_cannot_sync_is_asked_again_from_time_to_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads and writes go on."""
    files, clock = FaultyFiles(failing("sync")), ManualClock()
    files.before = lambda call: None
    tier = DiskRecords(settings(tmp_path / "t", direct=False), [SECRET], files=files, clock=clock)
    assert store(tier, ACME, prompt(1))
    num_syncs, files.before = files.calls.count("sync"), failing("sync")
    for _ in range(200):  # 100 s
        clock.advance(0.5)
        tier.maintain()
        assert tier._sync_job is None or tier._sync_job.poll(WAIT_S)
    assert files.calls.count("sync") - num_syncs == 4 and caplog.text.count("could not sync") == 4
    assert tier.state == "open" and right_or_missing(tier, ACME, prompt(1)) and store(tier, ACME, prompt(2))
    files.before = lambda call: None
    clock.advance(30.0)
    tier.maintain()
    assert tier._sync_job is not None and tier._sync_job.wait(WAIT_S)
    tier.close()


def test_a_rest_that_ends_between_two_looks(tmp_path: Path) -> None:
    """Another thread asks at the moment at which the rest ends."""
    files, clock, asked = FaultyFiles(), ManualClock(), [True]

    def now() -> float:
        if not asked:
            asked.append(False)
            asked[0] = tier.state == "degraded"
        return clock()

    with DiskRecords(settings(tmp_path / "t", direct=False), [SECRET], files=files, clock=now) as tier:
        assert store(tier, ACME, prompt(1))
        files.before = failing("read")
        for _ in range(MOST_ERRORS):
            assert load(tier, ACME, prompt(1)) is None
        files.before = lambda call: None
        assert tier.state == "degraded"
        clock.advance(31.0)
        asked.clear()
        assert tier.state == "open" and asked == [False]
