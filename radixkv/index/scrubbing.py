"""Scrubber: records the owner of the bytes in each block, and zeroes blocks before another tenant can read them.

    hand_out    zeroes what the block's new owner may not read, then records the new owner
    free        zeroes at once the blocks of strict tenants, and all blocks under ``scrub="always"``

Every block has a *label*, an int32: 0 is clean, otherwise it names the last owner. The label changes only where blocks
are handed out. So it is correct however blocks come back, and after any interruption: a block is zeroed first and
labelled afterwards. Labels are odd for owners whose blocks are zeroed when freed. A tenant gets a new label when it is
purged or its mode changes. Blocks from before are then no longer its own.

A call of the cache makes at most one call of ``zero`` for all its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from radixkv.storage.plan import BlockIds

ScrubBlocks: TypeAlias = Callable[[BlockIds], Any] | None
"""A function that zeroes blocks, given distinct int32 ids. None if no blocks need zeroing."""

_CLEAN = 0
ENGINE = 2
"""The label of blocks that are lent to the engine. The engine may fill them for any tenant."""


class Scrubber:
    """Labels of ``num_blocks`` blocks, all clean at first. Used under the cache's lock.

    ``zero``: zeroes blocks, given as distinct int32 ids. Its errors propagate, and the blocks then stay unclean.
    """

    __slots__ = ("_has_eager", "_is_always", "_labels", "_last", "_zero", "num_scrubbed")

    def __init__(self, num_blocks: int, zero: Callable[[BlockIds], Any], scrub: str = "cross-tenant") -> None:
        self._labels = np.zeros(num_blocks, np.int32)
        self._is_always = self._has_eager = scrub == "always"
        self._last = ENGINE
        self._zero = zero
        self.num_scrubbed = 0

    def new_owner_tag(self, *, is_strict: bool) -> int:
        """Return a label that no owner has."""
        self._last += 2
        is_eager = is_strict or self._is_always
        self._has_eager |= is_eager
        return self._last + is_eager

    def hand_out(self, block_ids: bytes | bytearray, label: int) -> None:
        """Give these packed ids to an owner or to the engine. Zeroes those that hold bytes of others. O(blocks)."""
        ids = np.frombuffer(block_ids, np.int32)
        labels = self._labels[ids]
        is_foreign = labels != label
        if self._is_always or label == ENGINE:
            self._scrub(ids[labels != _CLEAN])
        elif is_foreign.any():
            self._scrub(ids[is_foreign & (labels != _CLEAN)])
        else:
            return
        self._labels[ids] = label

    def filled(self, block_ids: BlockIds, label: int) -> None:
        """Record that the engine has filled these blocks for an owner."""
        self._labels[block_ids] = label

    def free(self, block_ids: bytes | bytearray | memoryview) -> None:
        """Record that these packed ids have no owner. Zeroes those whose last owner requires it. O(blocks)."""
        if not self._has_eager:
            return
        ids = np.frombuffer(block_ids, np.int32)
        is_eager = (self._labels[ids] & 1).astype(np.bool_)
        if is_eager.any():
            freed = ids[is_eager]
            self._scrub(freed)
            self._labels[freed] = _CLEAN

    def _scrub(self, ids: BlockIds) -> None:
        if len(ids):
            self._zero(ids)
            self.num_scrubbed += len(ids)
