"""Scrubber: whose bytes a block still holds, and which blocks are zeroed before somebody else can read them.

    hand_out    zeroes what the block's new owner may not read, then notes the new owner
    free        zeroes at once what its last owner wants zeroed: strict tenants, and everybody under ``scrub="always"``

Every block has a *label*, an int32: 0 is clean, otherwise who it was last handed out to. It changes where blocks
are handed out and nowhere else, so it is right however they come back, and after any interruption: a block is
zeroed first and labelled afterwards. Labels are odd for owners that have their blocks zeroed as they are freed. A
tenant gets another label when it is purged or its mode changes: what it had before is no longer its own.

One call of ``zero`` for all blocks of a call that need it; none if none do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from radixkv.storage.plan import BlockIds

ScrubBlocks: TypeAlias = Callable[[BlockIds], Any] | None
"""Zeroes blocks, distinct int32 ids. None where no blocks need zeroing."""

_CLEAN = 0
ENGINE = 2
"""The label of blocks that are lent to the engine, which may fill them for anybody."""


class Scrubber:
    """Labels of ``num_blocks`` blocks, all clean at first. Under the cache's lock.

    zero: zeroes blocks, given as distinct int32 ids; what it raises goes on, and the blocks stay unclean.
    """

    __slots__ = ("_has_eager", "_is_always", "_labels", "_last", "_zero", "num_scrubbed")

    def __init__(self, num_blocks: int, zero: Callable[[BlockIds], Any], scrub: str = "cross-tenant") -> None:
        self._labels = np.zeros(num_blocks, np.int32)
        self._is_always = self._has_eager = scrub == "always"
        self._last = ENGINE
        self._zero = zero
        self.num_scrubbed = 0

    def new_owner_tag(self, *, is_strict: bool) -> int:
        """A label that nobody has."""
        self._last += 2
        is_eager = is_strict or self._is_always
        self._has_eager |= is_eager
        return self._last + is_eager

    def hand_out(self, block_ids: bytes | bytearray, label: int) -> None:
        """These packed ids are somebody's from now on, or the engine's; zeroes those that held others' bytes.

        O(blocks).
        """
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
        """The engine has filled these blocks for somebody."""
        self._labels[block_ids] = label

    def free(self, block_ids: bytes | bytearray | memoryview) -> None:
        """These packed ids are nobody's now; zeroes those whose last owner wants that. O(blocks)."""
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
