"""The writer of a usage log: takes records without waiting, and writes them in a thread.

    any thread ──record──▶ pending ──▶ writer: append ──▶ syncer: wait for the medium, about once a second
                              ▲ a failed write is repeated every RETRY_S, in the same place

What is in its file survives the end of the process, however it ends. What the syncer has waited for survives the end of
the machine. ``written`` waits a moment for the first, so that a client that has its answer is billed. Only PATIENCE_S,
and not at all while the disk fails or hangs: a record then waits in memory, see ``pending``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from radixkv.billing.pending import Pending, Waiting, Written
from radixkv.billing.usage_appender import MOST_AT_ONCE, Position, UsageAppender
from radixkv.billing.usage_record import UsageRecord
from radixkv.clock import Clock, monotonic
from radixkv.files.system import Files
from radixkv.uncopied import refuse_copies

PATIENCE_S: Final = 0.05
RETRY_S: Final = 1.0
SYNC_EVERY_S: Final = 1.0
_CLOSE_S: Final = 5.0
_LOOK_S: Final = 0.05

log = logging.getLogger("radixkv.billing")


@dataclass(frozen=True, slots=True)
class WriterState:
    """The state of a usage log.

    - ``num_written``: records in files since the start.
    - ``num_waiting``: records that wait to be written.
    - ``num_lost``: requests that no record will tell of.
    - ``num_errors``: writes, or waits for the medium, that failed.
    - ``problem``: the last error, while writes fail; else empty.
    """

    num_written: int
    num_waiting: int
    num_lost: int
    num_errors: int
    problem: str


class UsageWriter:
    """Writes records to a folder. Thread-safe. ``close`` it. Raises ConfigError and OSError when it is made.

    ``key``: of the chain; None for the one in the folder. ``previous``: see UsageAppender. ``max_bytes``: of a file.
    """

    def __init__(
        self,
        path: Path | str,
        key: bytes | None,
        max_bytes: int,
        *,
        previous: Sequence[bytes] = (),
        files: Files | None = None,
        wall: Callable[[], float] = time.time,
        clock: Clock = monotonic,
    ) -> None:
        self._appender = UsageAppender(path, key, max_bytes, files, previous=previous)
        self._wall, self._clock = wall, clock
        self._changed = threading.Condition()
        self._pending, self._problem, self._is_behind = Pending(), "", False
        self._num_written = self._num_errors = self._num_taken = 0
        self._is_closed = False
        self._to_sync: SimpleQueue[list[Position] | None] = SimpleQueue()
        self._is_syncing, self._sync_at = False, 0.0
        self._threads = [
            threading.Thread(target=target, name=f"radixkv-usage-{name}", daemon=True)
            for name, target in (("writer", self._write_all), ("syncer", self._sync_all))
        ]
        for thread in self._threads:
            thread.start()

    def record(self, record: UsageRecord) -> Written | None:
        """Take a record to write. O(1), never waits for the disk. Returns what ``written`` waits for."""
        with self._changed:
            if self._is_closed:
                self._pending.num_lost += max(record.counts.requests, 1)
                return None
            future = self._pending.add(record)
            self._changed.notify()
            return None if self._problem or self._is_behind else future

    async def written(self, future: Written | None) -> None:
        """Wait until a record is in its file, at most PATIENCE_S."""
        if future is None or future.done() or self._is_behind:
            return
        done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=PATIENCE_S)
        if not done:
            self._is_behind = True  # until the writer has written again, nothing waits

    def state(self) -> WriterState:
        """Return counts, and the last error while writes fail."""
        with self._changed:
            waiting = len(self._pending) + self._num_taken
            return WriterState(
                self._num_written, waiting, self._pending.num_lost, self._num_errors, self._problem
            )

    def close(self) -> None:
        """Write what waits, if the disk lets it within seconds, and end the file."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        until = self._clock() + _CLOSE_S
        self._threads[0].join(max(until - self._clock(), 0))
        self._to_sync.put(None)
        self._threads[1].join(max(until - self._clock(), 0))
        if any(thread.is_alive() for thread in self._threads):
            log.error("the usage log's disk hangs; %d records are lost", self.state().num_waiting)
            return
        try:
            self._appender.close()
        except OSError as error:
            log.error("the usage log couldn't be ended: %s", error.strerror)

    # --- in the writer's thread

    def _write_all(self) -> None:
        while batch := self._next():
            while not self._appended(batch):
                if self._is_closed:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, RETRY_S)
            self._settle(batch)

    def _next(self) -> list[Waiting]:
        """Wait for records, and return them; none once the log is closed. Meanwhile, hand over what to sync."""
        while True:
            with self._changed:
                is_due = self._changed.wait_for(lambda: self._pending or self._is_closed, self._hand_over())
                if is_due:
                    batch = self._pending.take(MOST_AT_ONCE)
                    self._num_taken = len(batch)
                    return batch

    def _appended(self, batch: list[Waiting]) -> bool:
        try:
            self._appender.append([waiting.record for waiting in batch], self._wall())
        except OSError as error:
            self._failed(error)
            return False
        return True

    def _settle(self, batch: list[Waiting]) -> None:
        with self._changed:
            if self._problem:
                log.warning("the usage log is written again")
            self._num_written, self._num_taken = self._num_written + len(batch), 0
            self._problem, self._is_behind = "", False
        for waiting in batch:
            if waiting.written is not None:
                waiting.written.set_result(None)

    def _failed(self, error: OSError) -> None:
        with self._changed:
            if not self._problem:
                log.error("the usage log can't be written: %s", error.strerror)
            self._num_errors += 1
            self._problem = str(error.strerror)

    def _hand_over(self) -> float | None:
        """Give the syncer what it should wait for, if it is time. Returns the seconds until then; None: nothing."""
        left_s = self._sync_at - self._clock()
        if left_s > 0 or self._is_syncing:
            return max(left_s, _LOOK_S)
        positions = self._appender.positions()
        if positions:
            self._is_syncing, self._sync_at = True, self._clock() + SYNC_EVERY_S
            self._to_sync.put(positions)
        return None

    # --- in the syncer's thread

    def _sync_all(self) -> None:
        while (positions := self._to_sync.get()) is not None:
            try:
                self._appender.synced(positions)
            except OSError as error:
                self._failed_sync(error)
            self._is_syncing = False

    def _failed_sync(self, error: OSError) -> None:
        with self._changed:
            self._num_errors += 1
        log.error("the usage log can't be waited for: %s", error.strerror)


refuse_copies(UsageWriter, "its lines are numbered once. Pass it on, or make another")
