"""A rate of bytes for operations that take turns, by a bucket of tokens.

    pause_s    how long the next operation must wait
    spend      it begins

An operation begins while there are tokens, and may overdraw them, so its size need not fit. What isn't used is saved up
for ``BURST_S`` at most. Not thread-safe.
"""

from __future__ import annotations

from typing import Final

from radixkv.clock import Clock

BURST_S: Final = 0.05


class Pace:
    """``bytes_per_s``: the most on average; None for no bound."""

    def __init__(self, bytes_per_s: float | None, clock: Clock) -> None:
        self._clock, self._filled_at = clock, clock()
        self._bytes_per_s = bytes_per_s
        self._tokens = self._most

    @property
    def _most(self) -> float:
        return 0.0 if self._bytes_per_s is None else self._bytes_per_s * BURST_S

    @property
    def bytes_per_s(self) -> float | None:
        """The most on average; None for no bound."""
        return self._bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, value: float | None) -> None:
        self._fill()
        self._bytes_per_s = value
        self._tokens = 0.0 if value is None else min(self._tokens, self._most)

    def pause_s(self) -> float:
        """Return for how many seconds no operation may begin; 0.0 if one may."""
        self._fill()
        if self._bytes_per_s is None or self._tokens > 0:
            return 0.0
        return (1.0 - self._tokens) / self._bytes_per_s

    def spend(self, num_bytes: int) -> None:
        """Take the tokens of an operation that begins."""
        if self._bytes_per_s is not None:
            self._fill()
            self._tokens -= num_bytes

    def _fill(self) -> None:
        now = self._clock()
        if self._bytes_per_s is not None:
            self._tokens = min(self._tokens + (now - self._filled_at) * self._bytes_per_s, self._most)
        self._filled_at = now
