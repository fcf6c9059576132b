"""How long operations of a tier took, counted in buckets, as a histogram of Prometheus shows it. Needs no extra."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from math import inf
from typing import Final

BOUNDS_S: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""The longest duration of each bucket, in seconds. The last bucket has no bound."""


class Durations:
    """Durations of one kind of operation. One thread adds at a time, any may read.

    ``seconds``: their sum. A reader may miss the last one in it.
    """

    __slots__ = ("_counts", "seconds")

    def __init__(self) -> None:
        self._counts, self.seconds = [0] * (len(BOUNDS_S) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count an operation that took so long. O(log buckets), no allocation that lasts."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds

    @property
    def count(self) -> int:
        """Return the number of operations."""
        return sum(self._counts)

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Return each bound, the last one infinite, and how many operations took no longer."""
        return zip((*BOUNDS_S, inf), accumulate(tuple(self._counts)), strict=True)
