"""The writer of usage records: takes records without waiting, and writes them in a thread of its own.

    any thread ──record──▶ queue, bounded ──▶ writer: append at once, sync about once a second
                             ▲ what failed is repeated every RETRY_S

``record`` doesn't wait. An answer waits for its record before its last byte (``on_appended``), for WAIT_S at most, and
not at all while the disk fails. So how a process ends decides what is lost:

- **Stopped** (``close``): nothing, if the disk takes what waits within seconds.
- **Killed**: nothing of a request whose answer had ended, unless the disk hung or failed then.
- **Machine crashed**: what wasn't synced: up to SYNC_EVERY_S. What ``num_durable`` counted stays.

While the disk is full, fails or hangs, up to MOST_WAITING records wait. More are lost, and counted: ``num_lost``, a
metric, and the log. The sums in memory have them until the process ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from radixkv.clock import Clock, monotonic
from radixkv.metering.appender import MOST_AT_ONCE, UsageAppender
from radixkv.metering.folder import UsageFolder
from radixkv.metering.records import UsageRecord
from radixkv.uncopied import refuse_copies

MOST_WAITING: Final = 32_768
"""Records that may wait for the disk: about 30 MB."""
RETRY_S: Final = 1.0
SYNC_EVERY_S: Final = 1.0
WAIT_S: Final = 1.0
"""The longest that an answer waits for its record, where the disk hangs."""
_CLOSE_S: Final = 5.0

log = logging.getLogger("radixkv.metering")


@dataclass(frozen=True, slots=True)
class WriterState:
    """The state of the records' folder.

    - ``num_written``: records in files since the start. ``num_durable``: those of them that were synced.
    - ``num_waiting``: records that wait to be written.
    - ``num_lost``: records that were never written, because too many waited.
    - ``num_errors``: writes and syncs that failed.
    - ``num_skipped``: lines of earlier processes that were no records, such as the torn end of a crash.
    - ``problem``: the last error, while writes fail; else empty.
    """

    num_written: int
    num_durable: int
    num_waiting: int
    num_lost: int
    num_errors: int
    num_skipped: int
    problem: str


class UsageWriter:
    """Writes records to a folder, which it closes. Thread-safe. ``close`` it. ``max_bytes``: of a file."""

    def __init__(
        self,
        folder: UsageFolder,
        max_bytes: int,
        *,
        wall: Callable[[], float] = time.time,
        clock: Clock = monotonic,
    ) -> None:
        self._folder, self._appender = folder, UsageAppender(folder, max_bytes)
        self._wall, self._clock = wall, clock
        self._changed = threading.Condition()
        self._queue = deque[UsageRecord]()
        self._num_taken = self._num_written = self._num_lost = self._num_errors = 0
        self._problem, self._is_full, self._is_closed = "", False, False
        self._waiting: list[tuple[int, float, Callable[[], object]]] = []  # number, since when, what to call
        self._thread = threading.Thread(target=self._write_all, name="radixkv-usage", daemon=True)
        self._thread.start()

    def record(self, record: UsageRecord) -> int:
        """Take a record to write. O(1), never waits for the disk. Returns its number; 0 if it is lost."""
        with self._changed:
            is_full = self._num_unsafe >= MOST_WAITING
            if is_full and not self._is_full:
                log.error("usage records are lost: the disk doesn't take them, and %d wait", MOST_WAITING)
            self._is_full |= is_full
            if is_full or self._is_closed:
                self._num_lost += 1
                return 0
            self._num_taken += 1
            self._queue.append(record)
            self._changed.notify()
            return self._num_taken

    def on_appended(self, number: int, call: Callable[[], object]) -> None:
        """Call ``call`` once a record is in its file, or as soon as writing fails: then the record waits in memory.

        In the calling thread if that is so now, or if another call has waited WAIT_S already because the disk hangs.
        Otherwise in the writer's thread. It must not wait or raise.
        """
        with self._changed:
            now_s = self._clock()
            is_late = bool(self._waiting) and now_s - self._waiting[0][1] >= WAIT_S
            is_awaited = number > self._num_written and not (self._problem or self._is_closed or is_late)
            if is_awaited:
                self._waiting.append((number, now_s, call))
        if not is_awaited:
            call()

    def state(self) -> WriterState:
        """Return counts, and the last error while writes fail."""
        with self._changed:
            return WriterState(
                self._num_written,
                self._appender.num_synced,
                self._num_taken - self._num_written,
                self._num_lost,
                self._num_errors,
                self._folder.num_skipped,
                self._problem,
            )

    def close(self) -> None:
        """Write and sync what waits, if the disk lets it within seconds, and end the file."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if self._num_unsafe:
            log.error("%d usage records may be lost: the disk didn't take them in time", self._num_unsafe)

    @property
    def _num_unsafe(self) -> int:
        """Number of records that were taken, and not synced yet. They are kept in memory."""
        return self._num_taken - self._appender.num_synced

    # --- in the writer's thread

    def _write_all(self) -> None:
        """Write until the end. The appender keeps what it couldn't write, and gets nothing more meanwhile."""
        sync_at: float | None = None
        is_last = False
        while not is_last:
            batch: list[UsageRecord] = []
            if not self._appender.is_behind:
                batch, is_last = self._next(sync_at)
            try:
                try:
                    if batch or self._appender.is_behind:
                        sync_at = sync_at or self._clock() + SYNC_EVERY_S
                        self._appender.append(batch, self._wall())
                finally:  # a full disk takes no record, and can sync what it has
                    if is_last:
                        self._appender.end()
                    elif sync_at is not None and self._clock() >= sync_at:
                        self._appender.sync()
                        sync_at = None
            except OSError as error:
                if not self._failed(error):
                    break
            else:
                self._succeeded()
        self._appender.close()
        self._folder.close()

    def _next(self, sync_at: float | None) -> tuple[list[UsageRecord], bool]:
        """Wait for records, the end, or the time of a sync. Returns records, and whether they are the last."""
        timeout_s = None if sync_at is None else max(sync_at - self._clock(), 0)
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed, timeout_s)
            batch = [self._queue.popleft() for _ in range(min(MOST_AT_ONCE, len(self._queue)))]
            return batch, self._is_closed and not self._queue

    def _failed(self, error: OSError) -> bool:
        """Tell of an error, and wait a moment. Returns whether to go on: after ``close`` it is tried once more."""
        with self._changed:
            was_closed = self._is_closed
            if not self._problem:
                log.error("usage records can't be written: %s", error.strerror)
            self._num_errors += 1
            self._problem = str(error.strerror)
            self._count()
            self._tell()
            self._changed.wait_for(lambda: self._is_closed, RETRY_S)
            return not was_closed

    def _succeeded(self) -> None:
        with self._changed:
            self._count()
            is_behind = self._is_full and self._num_unsafe > MOST_WAITING // 2
            if self._problem or self._is_full > is_behind:
                log.warning("usage records are written again; %d were lost so far", self._num_lost)
            self._problem, self._is_full = "", is_behind
            self._tell()

    def _tell(self) -> None:
        """Tell those whose records are in a file, and all while writing fails."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if each[0] <= self._num_written or self._problem:
                each[2]()
            else:
                self._waiting.append(each)

    def _count(self) -> None:
        self._num_written = self._appender.num_synced + self._appender.num_unsynced


refuse_copies(UsageWriter, "its records would be written twice. Pass it on, or make another")
