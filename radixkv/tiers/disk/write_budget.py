"""How much a disk may be written: a bucket of bytes, first come, first served.

What isn't used is saved up for ``BURST_S`` seconds at most. A write begins while there are any left, and may overdraw
them, so its size need not fit. Not thread-safe.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 60.0
"""Seconds of the rate that may be saved up."""


class WriteBudget:
    """``bytes_per_s``: the most on average. It begins with a second's, so that restarts don't write much more.

    Times are seconds on any clock that doesn't go back.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._left = bytes_per_s
        self._filled_at: float | None = None

    def left_bytes(self, now: float) -> float:
        """Return the bytes that may be written now; negative if the last write overdrew it. O(1)."""
        since = now if self._filled_at is None else self._filled_at
        self._filled_at = now
        self._left = min(self._left + (now - since) * self.bytes_per_s, self.bytes_per_s * BURST_S)
        return self._left

    def spend(self, num_bytes: int, now: float) -> bool:
        """Take the bytes of a write, if it may begin now. O(1)."""
        may_begin = self.left_bytes(now) > 0
        if may_begin:
            self._left -= num_bytes
        return may_begin
