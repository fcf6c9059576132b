"""BlockPool: which block ids are free, and which are lent to the engine.

Free ids are a stack of packed int32: taking and giving back n ids are one slice each, whatever n is. Owners
are kept where the owning happens (a tree's nodes, a sequence's runs), because an array of owners would cost
more than the rest of a request; the conservation law is that

    free + owned by trees + owned by sequences + held + lent == num_blocks

with every id in exactly one place. The audit counts it. A private block that a waiting copy names is, once freed,
held for its tenant until ``settle``: otherwise it could be handed out, and overwritten, before the copy has read it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixkv.errors import ArgumentError
from radixkv.scrubbing import Scrubber
from radixkv.types import ID_BYTES, BlockIds


def unpack(block_ids: bytes) -> BlockIds:
    """Packed ids as int32 ``[n]``, a read-only view. O(1)."""
    return np.frombuffer(block_ids, np.int32)


class BlockPool:
    """The free list of ``num_blocks`` blocks, and the blocks lent to the engine or to the device."""

    __slots__ = ("_free", "held", "lent", "named", "num_blocks", "scrubber")

    def __init__(self, num_blocks: int, scrubber: Scrubber | None = None) -> None:
        self.num_blocks = num_blocks
        self.scrubber = scrubber
        self._free = bytearray(np.arange(num_blocks, dtype=np.int32).tobytes())
        self.lent: set[int] = set()
        self.named: set[int] = set()  # by a plan that waits
        self.held = bytearray()  # freed meanwhile, packed

    @property
    def num_free(self) -> int:
        """Blocks that can be taken at once."""
        return len(self._free) // ID_BYTES

    def take(self, size: int, table: bytearray) -> int:
        """Move up to ``size`` bytes of packed ids from the free stack to ``table``; returns how many. O(size) copy."""
        free = self._free
        at = len(free) - size
        if at > 0:
            table += free[at:]
            del free[at:]
            return size
        table += free
        self._free = bytearray()
        return at + size

    def give(self, block_ids: bytes | bytearray | memoryview) -> None:
        """Put packed ids on the free stack. O(n) copy."""
        if self.scrubber is not None:
            self.scrubber.free(block_ids)
        self._free += block_ids

    def hold_named(self, block_ids: bytes | bytearray | memoryview) -> tuple[bytes, bytes]:
        """Keep those of the ids that a waiting plan names until ``settle``. Returns those kept, and the others."""
        ids = unpack(bytes(block_ids))
        is_named = np.isin(ids, list(self.named))
        kept = ids[is_named].tobytes()
        self.held += kept
        return kept, ids[~is_named].tobytes()

    def names_one_of(self, block_ids: bytes | bytearray) -> bool:
        """Whether a waiting plan reads or writes one of these packed ids. O(ids)."""
        return not self.named.isdisjoint(unpack(bytes(block_ids)).tolist())

    def settle(self) -> None:
        """No plan waits any more: what was freed meanwhile is free.

        Not zeroed now, whoever had it: the engine has yet to execute the plan. It is when it is handed out.
        """
        self.named.clear()
        self._free += self.held
        self.held = bytearray()

    def free_ids(self) -> BlockIds:
        """The free ids, int32, a copy. O(free)."""
        return unpack(bytes(self._free))

    def lend(self, block_ids: bytearray) -> BlockIds:
        """Note that the engine owns these packed ids, which were taken, until ``give_back`` or ``claim``."""
        taken = unpack(bytes(block_ids))
        self.lent.update(taken.tolist())
        return taken

    def give_back(self, block_ids: BlockIds) -> None:
        """Return lent ids to the free stack. Raises ArgumentError, and changes nothing, if one isn't lent."""
        ids = self._distinct(block_ids)
        for block_id in ids:
            if block_id not in self.lent:
                raise ArgumentError("block_ids", block_id, "blocks that are lent (PrefixCache.allocate)")
        self.lent.difference_update(ids)
        self.give(block_ids.tobytes())

    def check_claim(self, block_ids: BlockIds) -> None:
        """Raise ArgumentError unless every id is in range, distinct, and either lent or free. O(free)."""
        ids = self._distinct(block_ids)
        taken = np.isin(block_ids, self.free_ids(), invert=True).tolist()
        for block_id, is_taken in zip(ids, taken, strict=True):
            if is_taken and block_id not in self.lent:
                raise ArgumentError(
                    "block_ids", block_id, "blocks that are lent or free; this one is owned already"
                )

    def claim(self, block_ids: BlockIds, label: int) -> None:
        """Take ids that passed ``check_claim`` out of the lent and the free ones, for the owner of a label. O(free)."""
        if self.scrubber is not None:
            self.scrubber.filled(block_ids, label)
        self.lent.difference_update(block_ids.tolist())
        free = self.free_ids()
        self._free = bytearray(free[np.isin(free, block_ids, invert=True)].tobytes())

    def _distinct(self, block_ids: BlockIds) -> list[int]:
        ids: list[int] = block_ids.tolist()
        for block_id in ids:
            if not 0 <= block_id < self.num_blocks:
                raise ArgumentError("block_ids", block_id, f"0 ≤ block id < {self.num_blocks}")
        if len(set(ids)) != len(ids):
            raise ArgumentError("block_ids", _first_repeated(ids), "each block once")
        return ids


def _first_repeated(ids: Iterable[int]) -> int:
    seen: set[int] = set()
    for block_id in ids:
        if block_id in seen:
            return block_id
        seen.add(block_id)
    raise AssertionError("no id is repeated")
