"""Entries whose slots are spare, in the order in which they became so. All calls cost a few array operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64] | NDArray[np.int32]


class SpareSlots:
    """Some of ``num_entries`` entries."""

    def __init__(self, num_entries: int) -> None:
        self._turn_of = np.zeros(num_entries, np.int64)
        """When an entry was added; 0 for one that isn't here."""
        self._turn, self._num = 0, 0
        self._added: deque[tuple[int, NDArray[np.int64]]] = deque()
        """What was added by turns, the oldest first, and maybe isn't here any more."""
        self._num_added = 0

    def __len__(self) -> int:
        return self._num

    def entries(self) -> NDArray[np.int64]:
        """Return the entries that are here. O(all entries)."""
        return np.flatnonzero(self._turn_of)

    def add(self, entries: Ids) -> None:
        """Add entries, all different. Those that are here keep their place."""
        new = entries[self._turn_of[entries] == 0].astype(np.int64)
        if not len(new):
            return
        self._turn += 1
        self._turn_of[new] = self._turn
        self._added.append((self._turn, new))
        self._num += len(new)
        self._num_added += len(new)
        if self._num_added > 2 * len(self._turn_of):
            self._forget_dropped()

    def drop(self, entries: Ids) -> None:
        """Drop those of the entries that are here; all are different."""
        if self._num:
            self._num -= int(np.count_nonzero(self._turn_of[entries]))
            self._turn_of[entries] = 0

    def oldest(
        self, most: int, is_free: Callable[[NDArray[np.int64]], NDArray[np.bool_]]
    ) -> NDArray[np.int64]:
        """Return up to ``most`` of the oldest that are free. They stay. O(entries up to the last of them)."""
        found: list[NDArray[np.int64]] = []
        self._forget_dropped_in_front()
        for turn, added in self._added:
            if most <= 0:
                break
            here = added[self._turn_of[added] == turn]
            free = here[is_free(here)][:most]
            found.append(free)
            most -= len(free)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _forget_dropped_in_front(self) -> None:
        while self._added:
            turn, added = self._added[0]
            here = added[self._turn_of[added] == turn]
            self._num_added -= len(added) - len(here)
            if len(here):
                self._added[0] = turn, here
                return
            self._added.popleft()

    def _forget_dropped(self) -> None:
        kept = [(turn, added[self._turn_of[added] == turn]) for turn, added in self._added]
        self._added = deque(each for each in kept if len(each[1]))
        self._num_added = self._num
