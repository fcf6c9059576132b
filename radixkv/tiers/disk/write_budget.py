"""How much a disk may be written: a bucket of bytes, of which each tenant that writes has an equal part.

What isn't used is saved up for ``BURST_S`` seconds at most. A write begins while there are any left, and may overdraw
them, so its size need not fit. Within its part a tenant is served first come, first served. What others leave, beyond
half a burst, anybody may have. So a tenant that writes alone has all, and one that floods takes nothing from another.
``DiskDemotions`` asks and charges it. Not thread-safe.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 60.0
"""Seconds of the rate that may be saved up. A tenant that hasn't asked for so long has no part."""


class WriteBudget:
    """``bytes_per_s``: the most on average. It begins with a second's, so that restarts don't write much more.

    Times are seconds on any clock that doesn't go back.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._left = bytes_per_s
        self._filled_at: float | None = None
        self._parts: dict[str, tuple[float, float]] = {}
        """What each tenant has left of its part, and when it asked last; the longest ago first."""

    def left_bytes(self, now: float) -> float:
        """Return the bytes that may be written now; negative if the last write overdrew it. O(1)."""
        since = now if self._filled_at is None else self._filled_at
        self._filled_at = now
        self._left = min(self._left + (now - since) * self.bytes_per_s, self.bytes_per_s * BURST_S)
        return self._left

    def may_spend(self, tenant: str, now: float) -> bool:
        """Whether a write of a tenant may begin now. O(1), amortised."""
        left, part = self.left_bytes(now), self._part(tenant, now)
        return left > 0 and (part > 0 or left > self.bytes_per_s * BURST_S / 2)

    def spend(self, tenant: str, num_bytes: int, now: float) -> bool:
        """Take the bytes of a write, if it may begin now. O(1), amortised."""
        if not self.may_spend(tenant, now):
            return False
        self._left -= num_bytes
        part, asked_at = self._parts[tenant]
        if part > 0:
            self._parts[tenant] = part - num_bytes, asked_at
        return True

    def _part(self, tenant: str, now: float) -> float:
        """Return what a tenant has left of its part, which counts as asking."""
        while self._parts and now - self._parts[first := next(iter(self._parts))][1] > BURST_S:
            del self._parts[first]
        before = self._parts.pop(tenant, None)
        num = len(self._parts) + 1
        if before is None:
            part = self._left / num
        else:
            rate = self.bytes_per_s / num
            part = min(before[0] + (now - before[1]) * rate, rate * BURST_S)
        self._parts[tenant] = part, now
        return part
