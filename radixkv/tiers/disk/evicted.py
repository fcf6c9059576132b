"""Which records were evicted not long ago, so that a request for one shows that the disk is too small.

As many evicted records are remembered as the disk has slots. So a disk of twice the size would still have had them. On
large disks only those with certain locators are remembered, and each counts for all. About 100 bytes each.
"""

from __future__ import annotations

from typing import Final

MAX_REMEMBERED: Final = 16_384


class Evicted:
    """The records that a disk of ``num_slots`` slots evicted last. ``asked`` from any thread, ``add`` under a lock."""

    def __init__(self, num_slots: int) -> None:
        self._every = -(-num_slots // MAX_REMEMBERED)
        self._most = -(-num_slots // self._every)
        self._locators: dict[bytes, None] = {}
        self.num_asked = 0
        """How many records were asked for after they had been evicted; an estimate on large disks."""

    def add(self, locator: bytes) -> None:
        """Remember a record that is evicted. O(1)."""
        if int.from_bytes(locator[:4]) % self._every:
            return
        self._locators.pop(locator, None)
        self._locators[locator] = None
        if len(self._locators) > self._most:
            del self._locators[next(iter(self._locators))]

    def asked(self, locator: bytes) -> None:
        """Take that a request needs a record that isn't there. It counts once. O(1)."""
        if self._locators.pop(locator, self) is None:
            self.num_asked += self._every
