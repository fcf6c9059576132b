"""Threads for I/O that may be slow, fail, or never return.

A job works for a caller that may stop waiting. It touches the caller's memory only between ``claim`` and ``unclaim``,
and makes no system call there. So after ``wait`` has returned, the memory is the caller's again, whatever the disk
does.

An operation that never returns costs its thread. If all threads hang, new jobs are refused at once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from radixkv.clock import Clock, monotonic
from radixkv.files.system import aligned
from radixkv.uncopied import refuse_copies

Work: TypeAlias = "Callable[[Job, memoryview], bool]"
"""Does a job, with the thread's own memory for I/O. Returns whether it succeeded."""

MOST_LOADS: Final = 16
START_AGAIN_S: Final = 5.0
"""Seconds until a thread is started again, after the system refused one."""

log = logging.getLogger("radixkv.tiers")


class Job:
    """One operation. ``wait`` returns its result."""

    __slots__ = (
        "_changed", "_has_memory_back", "_is_abandoned", "_is_claimed", "_result", "_unwanted", "_work",
    )  # fmt: skip

    def __init__(self, work: Work, unwanted: Callable[[], object] | None = None) -> None:
        self._work, self._unwanted = work, unwanted
        self._changed = threading.Condition(threading.Lock())
        self._is_abandoned = self._is_claimed = self._has_memory_back = False
        self._result: bool | None = None

    @classmethod
    def ended(cls, result: bool) -> Job:
        """Return a job that has ended."""
        job = cls(lambda job, memory: result)
        job.end(result)
        return job

    def claim(self) -> bool:
        """Begin to use the caller's memory. False if the caller no longer waits: then don't touch it."""
        with self._changed:
            self._is_claimed = not self._is_abandoned
            return self._is_claimed

    def unclaim(self) -> None:
        """End the use of the caller's memory."""
        with self._changed:
            self._is_claimed, self._has_memory_back = False, True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether the operation succeeded. After ``timeout_s`` it counts as failed, and is abandoned.

        The memory is not touched after this returns. It may return later than ``timeout_s`` by a decryption.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_done, timeout_s):
                self._is_abandoned = True
                self._changed.wait_for(lambda: self._is_done() or not self._is_claimed)
                return False
            return bool(self._result)

    def wait_for_memory(self, timeout_s: float | None = None) -> bool:
        """Wait until the operation no longer needs the caller's memory. After ``timeout_s`` it is abandoned: False."""
        with self._changed:
            if self._changed.wait_for(lambda: self._is_done() or self._has_memory_back, timeout_s):
                return True
        return self.wait(0)

    @property
    def needs_memory(self) -> bool:
        """Whether the operation may still touch the caller's memory."""
        with self._changed:
            is_given_up = self._is_abandoned and not self._is_claimed
            return not (self._is_done() or self._has_memory_back or is_given_up)

    def poll(self, timeout_s: float) -> bool:
        """Return whether it has ended, after at most ``timeout_s``. It goes on otherwise."""
        with self._changed:
            return self._changed.wait_for(self._is_done, timeout_s)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        with self._changed:
            return self._is_done()

    def cancel(self) -> None:
        """Stop waiting for it. It may go on, without touching the memory."""
        self.wait(0)

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._is_abandoned

    def run(self, memory: memoryview) -> None:
        """Do the work; drop it if it was abandoned before."""
        if self.is_abandoned:
            self.drop()
            return
        result = False
        try:
            result = self._work(self, memory)
        except Exception:
            log.exception("an operation of a tier failed")
        finally:
            self.end(result)

    def drop(self) -> None:
        """End it, which hasn't begun, without its work: call ``unwanted``."""
        try:
            if self._unwanted is not None:
                self._unwanted()
        except Exception:
            log.exception("an operation of a tier that wasn't begun can't be counted")
        finally:
            self.end(False)

    def end(self, result: bool) -> None:
        """Set the result."""
        with self._changed:
            self._is_claimed, self._result = False, result
            self._changed.notify_all()

    def _is_done(self) -> bool:
        return self._result is not None


class IOThreads:
    """``num_threads`` daemon threads with ``buffer_bytes`` of aligned memory each. Loads go before stores.

    After ``MOST_LOADS`` loads in a row a store that waits has its turn.

    ``max_queued``: loads that may wait, and stores. ``hang_s``: an operation that takes longer counts as hanging.
    """

    def __init__(
        self,
        num_threads: int,
        buffer_bytes: int,
        *,
        max_queued: int = 256,
        hang_s: float = 5.0,
        clock: Clock = monotonic,
    ) -> None:
        self._num_threads, self._buffer_bytes = num_threads, buffer_bytes
        self._max_queued, self._hang_s, self._clock = max_queued, hang_s, clock
        self._changed = threading.Condition(threading.Lock())
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._began: dict[int, float] = {}
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self._starts_at = clock()
        """When a thread may be started: some time after the system refused one."""
        self._loads_in_a_row = 0

    @property
    def num_hung(self) -> int:
        """Threads whose operation takes longer than ``hang_s``."""
        with self._changed:
            return self._num_hung()

    @property
    def is_stuck(self) -> bool:
        """Whether every thread hangs."""
        return self.num_hung >= self._num_threads

    def submit(
        self,
        work: Work,
        *,
        is_load: bool,
        unwanted: Callable[[], object] | None = None,
        begun: list[Job] | None = None,
    ) -> Job | None:
        """Queue a job. None if the queue is full, all threads hang, or this is closed. O(threads).

        ``unwanted``: called in place of the work if the job never begins: abandoned before, closed, or no memory.
        ``begun``: gets the job before it can begin. So a caller knows it also after an error or an interruption, and
        can stop it before its memory is used for something else.
        """
        with self._changed:
            queue, num_queued = self._loads if is_load else self._stores, len(self._loads) + len(self._stores)
            if self._is_closing or len(queue) >= self._max_queued or self._num_hung() >= self._num_threads:
                return None
            idle = len(self._threads) - len(self._began)
            is_wanted = len(self._threads) < self._num_threads and idle <= num_queued
            if is_wanted and self._clock() >= self._starts_at:
                self._start()
            if not self._threads:
                return None
            job = Job(work, unwanted)
            try:
                if begun is not None:
                    begun.append(job)
                queue.append(job)
            except BaseException:
                if job not in queue:
                    job.end(False)
                raise
            self._changed.notify()
            return job

    @property
    def is_alive(self) -> bool:
        """Whether a thread hasn't ended."""
        return any(thread.is_alive() for thread in self._threads)

    def begin_to_close(self) -> None:
        """Take nothing more, and end when all that is queued is done. Never waits."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Do what is queued, then end. Returns whether all threads ended within the time; others still use files."""
        self.begin_to_close()
        ends_at = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(ends_at - self._clock(), 0.0))
        with self._changed:
            left = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
        for job in left:
            job.drop()
        return not self.is_alive

    def _num_hung(self) -> int:
        now = self._clock()
        return sum(now - began > self._hang_s for began in self._began.values())

    def _start(self) -> None:
        """Start a thread, if the system lets us. With the lock."""
        name = f"radixkv-tier-{len(self._threads)}"
        thread = threading.Thread(target=self._run, args=(len(self._threads),), name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self._starts_at = self._clock() + START_AGAIN_S
            log.error("a tier has %d threads of %d: %s", len(self._threads), self._num_threads, error)
            return
        self._threads.append(thread)

    def _run(self, number: int) -> None:
        memory = None
        while (job := self._next(number)) is not None:
            try:
                memory = aligned(self._buffer_bytes) if memory is None else memory
            except (OSError, MemoryError) as error:
                log.error("a thread of a tier gets no memory for I/O: %s", error)
                job.drop()
                continue
            job.run(memory)
            del job

    def _next(self, number: int) -> Job | None:
        with self._changed:
            self._began.pop(number, None)
            while not self._loads and not self._stores:
                if self._is_closing:
                    return None
                self._changed.wait()
            is_load = bool(self._loads) and (not self._stores or self._loads_in_a_row < MOST_LOADS)
            self._loads_in_a_row = self._loads_in_a_row + 1 if is_load else 0
            self._began[number] = self._clock()
            return (self._loads if is_load else self._stores).popleft()


refuse_copies(IOThreads, "it holds threads. Make another")
