"""How much of host memory waits for a full disk: as much as what leaves at once needs, no more than a part of it.

A full disk stores a block when it leaves host memory. Until then its slot stays in use: it is *leaving*. So that the
next prompt need not wait for the disk, some slots are kept free for it, as a reserve:

    reserve    slots that are free or leaving: as many as were leaving or wanted at once, at most, since host memory
               was given anew once or twice; at least one of ``LEAST_PART``, at most one of ``MOST_PART``
    room       what more may leave: the reserve without what is leaving; the rest is lost

So the first long prompt makes it grow. Those that follow lose nothing if the disk has stored what left for the one
before. With short prompts it is small again after host memory was given anew twice. A disk that is too slow, or hangs,
has one of ``MOST_PART``.
"""

from __future__ import annotations

from typing import Final

from radixkv.forks import OwnLock

LEAST_PART: Final = 64
MOST_PART: Final = 8


class LeavingSlots:
    """The leaving slots of a pool of ``num_slots`` slots. All calls are O(1); ``add`` and ``room`` by any thread."""

    def __init__(self, num_slots: int) -> None:
        self.num = 0
        """Slots that are leaving."""
        self._num_slots, self._num_given = num_slots, 0
        self._most_now = self._most_before = 0
        self._adding = OwnLock()

    def given(self, num_blocks: int, num_slots: int) -> None:
        """Take that so many blocks want slots, of a pool that has ``num_slots`` now."""
        if self._num_given >= num_slots:
            self._most_before, self._most_now, self._num_given = self._most_now, 0, 0
        self._num_slots, self._num_given = num_slots, self._num_given + num_blocks
        self._most_now = max(self._most_now, self.num + num_blocks)

    @property
    def reserve(self) -> int:
        """How many slots should be free or leaving."""
        wanted = max(self._most_now, self._most_before, self._num_slots // LEAST_PART)
        return min(wanted, self._num_slots // MOST_PART)

    @property
    def room(self) -> int:
        """How many more slots may leave; of a small pool one at a time."""
        return max(self.reserve - self.num, 1 - self.num, 0)

    def add(self, num_slots: int) -> None:
        """Take that so many more slots are leaving; fewer if it is negative."""
        with self._adding:
            self.num += num_slots
