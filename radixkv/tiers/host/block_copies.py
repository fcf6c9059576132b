"""Which entry of an index has the copy of which block above, one to one. All calls cost a few array operations."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64] | NDArray[np.int32]
NONE: Final = -1


class BlockCopies:
    """For ``num_blocks`` blocks above, and ``num_entries`` entries.

    A block and an entry are joined while both have the same content. ``cut`` is called by any thread, for entries that
    nobody holds. All else is for one thread.
    """

    def __init__(self, num_blocks: int, num_entries: int) -> None:
        self._entry_of = np.full(num_blocks + 1, NONE, np.int64)
        self._block_of = np.full(num_entries + 1, NONE, np.int64)
        # the last of each stands for NONE, as an index

    def join(self, blocks: Ids, entries: Ids) -> None:
        """Take that these blocks have the content of these entries. What they were joined to before isn't any more."""
        self._entry_of[self._block_of[entries]] = NONE
        self._block_of[self._entry_of[blocks]] = NONE
        self._entry_of[blocks], self._block_of[entries] = entries, blocks

    def cut(self, entries: Ids) -> None:
        """Take that these entries have no content any more."""
        self._entry_of[self._block_of[entries]] = NONE
        self._block_of[entries] = NONE

    def take(self, blocks: Ids) -> NDArray[np.int64]:
        """Return the entry of each block, NONE without one, and cut them: the blocks are to hold something else."""
        entries: NDArray[np.int64] = self._entry_of[blocks]
        self._entry_of[blocks] = self._block_of[entries] = NONE
        return entries

    def wrong_blocks(self) -> NDArray[np.int64]:
        """Return the blocks that aren't joined one to one. O(blocks + entries)."""
        blocks = np.flatnonzero(self._entry_of != NONE)
        entries = np.flatnonzero(self._block_of != NONE)
        one_way = blocks[self._block_of[self._entry_of[blocks]] != blocks]
        other_way = self._block_of[entries[self._entry_of[self._block_of[entries]] != entries]]
        return np.union1d(one_way, other_way)
