"""The cleaner: a thread evicts ahead, so that requests find free blocks and don't wait for copies of what leaves.

It keeps as many blocks free as requests lately had to evict themselves, at most one of ``AHEAD_PART`` of the cache. So
a cache with room, or one that nobody uses, loses nothing. What it evicts goes to the tiers below like everything else.
Requests that need more evict the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import ceil
from typing import Final

AHEAD_PART: Final = 64
_KEPT_PART: Final = 15 / 16
_LEAST_WANTED: Final = 0.5
_cleaning: Final = threading.local()
"""Which cleaner runs in a thread. A cache whose tenants have several dtypes has one for each, and all hear of it."""


class Cleaner:
    """For a cache of ``num_blocks`` blocks. ``wake``: wakes the thread that calls ``run``. O(1) but for ``run``."""

    def __init__(self, num_blocks: int, wake: Callable[[], None]) -> None:
        self._most, self._wake = num_blocks // AHEAD_PART, wake
        self._wanted, self._is_due = 0.0, False
        self.num_blocks = 0
        """Blocks that were evicted ahead."""
        self.free_ahead: Callable[[int], None] = lambda num_blocks: None
        """Evicts until so many blocks are free."""

    @property
    def is_needed(self) -> bool:
        """Whether the cache is large enough."""
        return self._most > 0

    def evicted(self, num_blocks: int) -> None:
        """Take that so many blocks are being evicted. Under the cache's lock, by any thread."""
        cleaner = getattr(_cleaning, "cleaner", None)
        if cleaner is self:
            self.num_blocks += num_blocks
        elif cleaner is None:
            self._wanted = min(self._wanted + num_blocks, self._most)

    def used(self) -> None:
        """Take that a request has taken blocks."""
        if self._wanted:
            self._is_due = True
            self._wake()

    def run(self) -> None:
        """Evict ahead, if that is due. It wants a 16th less each time, at last nothing, until requests evict again."""
        if self._is_due:
            self._is_due, _cleaning.cleaner = False, self
            wanted = ceil(self._wanted)
            self._wanted *= _KEPT_PART
            if self._wanted < _LEAST_WANTED:
                self._wanted = 0.0
            try:
                self.free_ahead(wanted)
            finally:
                _cleaning.cleaner = None
