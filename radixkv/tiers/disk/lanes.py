"""Lanes of a tier: threads with a queue of their own, so what one lane does and suffers holds up no other one's loads.

All tenants share a lane, except that each tenant with a partition has one. Errors count by lane: they close it for a
while, and it alone. A device can't be divided from here. So with a ``bandwidth`` each lane begins operations of its
part of the bytes a second, reads and writes together, and all lanes use ``USED_PART`` of the device. Without one a lane
bounds only how many operations run: as many as it has threads. The headers of all records are one table in one file,
which one thread writes at a time. So a write to it that hangs holds up the stores of all lanes, and no load.
"""

from __future__ import annotations

import logging
from typing import Final, Literal

from radixkv.clock import Clock
from radixkv.tiers.disk.io_threads import IOThreads

MOST_ERRORS: Final = 8
LANE_THREADS: Final = 2
"""Threads of a tenant's own lane. Only one of them stores, so a store that hangs delays no load."""
USED_PART: Final = 0.8
"""Part of the bandwidth that all lanes together use while there are partitions: a busier device is slower for all."""

LaneState = Literal["open", "degraded"]

log = logging.getLogger("radixkv.tiers")


class TierLane:
    """A lane with these threads, closed for ``retry_s`` seconds after ``MOST_ERRORS`` errors in a row. Any thread.

    ``whose``: names its tenants in the log.
    """

    def __init__(self, io: IOThreads, retry_s: float, clock: Clock, whose: str) -> None:
        self.io, self._retry_s, self._clock, self._whose = io, retry_s, clock, whose
        self._errors_in_a_row = 0
        self._opens_at: float | None = None

    @property
    def is_resting(self) -> bool:
        """Whether it is closed for a while after errors."""
        opens_at = self._opens_at  # once: other threads change it
        return opens_at is not None and self._clock() < opens_at

    @property
    def state(self) -> LaneState:
        """Whether it does something."""
        return "degraded" if self.is_resting or self.io.is_stuck else "open"

    def failed(self, error: OSError) -> None:
        """Count an error of the disk."""
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= MOST_ERRORS:
            self._opens_at = self._clock() + self._retry_s
            self._errors_in_a_row = 0
            log.error(
                "the disk tier is closed for %g s to %s after %d errors, then tried again; the last: %s",
                self._retry_s,
                self._whose,
                MOST_ERRORS,
                error,
            )

    def worked(self) -> None:
        """Take that an operation succeeded."""
        self._errors_in_a_row = 0
