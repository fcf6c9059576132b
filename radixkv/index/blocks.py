"""BlockPool: which block ids are free, which are lent to the engine, and which copies wait for the engine.

Free ids are a stack of packed int32. Taking or giving back n ids is one slice, whatever n is. The owners of blocks are
recorded where they are used (a tree's nodes, a sequence's runs). An array of owners would cost more than the rest of a
request. The conservation law is

    free + owned by trees + owned by sequences + held + lent == num_blocks

with every id in exactly one place. The audit checks it.

A waiting copy may read a block that is then freed. This block is *held* until the engine fetches the plan (``settle``).
Otherwise another owner could overwrite it before the copy reads it. Held blocks count for no tenant: the moment when a
plan is fetched depends on the requests of all tenants, and one tenant's usage must not. A copy into a freed block is
cancelled.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

import numpy as np

from radixkv.errors import ArgumentError
from radixkv.index.scrubbing import Scrubber
from radixkv.index.tokens import ID_BYTES
from radixkv.storage.plan import BlockIds


def unpack(block_ids: bytes | bytearray | memoryview) -> BlockIds:
    """Return packed ids as int32 ``[n]``, read-only: a view of bytes, a copy of a mutable buffer."""
    return np.frombuffer(bytes(block_ids), np.int32)


class WaitingCopies:
    """The copies decided since the last plan was fetched. None of them depends on another.

    ``readers``: how many copies read each source.
    """

    __slots__ = ("_copies", "readers")

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, int]] = {}  # target -> source, rows
        self.readers: dict[int, int] = {}

    def add(self, source: int, target: int, num_rows: int) -> None:
        """Add a copy. If ``source`` is itself a waiting target, the copy reads that target's source instead. O(1)."""
        first = self._copies.get(source)
        if first is not None:
            source, num_rows = first[0], min(first[1], num_rows)
        self._copies[target] = (source, num_rows)
        self.readers[source] = self.readers.get(source, 0) + 1

    def cancel(self, target: int) -> int | None:
        """Cancel the copy into ``target``, if one waits. Returns its source if no other copy reads that. O(1)."""
        copy = self._copies.pop(target, None)
        if copy is None:
            return None
        source = copy[0]
        left = self.readers[source] - 1
        if left:
            self.readers[source] = left
            return None
        del self.readers[source]
        return source

    def without(self, targets: Container[int]) -> WaitingCopies:
        """Return a new object without the copies into these targets. O(copies)."""
        left = WaitingCopies()
        for source, target, num_rows in self.triples():
            if target not in targets:
                left.add(source, target, num_rows)
        return left

    @property
    def targets(self) -> Collection[int]:
        """The blocks that the copies write."""
        return self._copies.keys()

    def named_among(self, block_ids: set[int]) -> set[int]:
        """Return those of the blocks that a copy reads or writes. O(copies)."""
        return block_ids.intersection(self._copies) | block_ids.intersection(self.readers)

    def triples(self) -> list[tuple[int, int, int]]:
        """Return all copies as (source, target, rows). O(copies)."""
        return [(source, target, num_rows) for target, (source, num_rows) in self._copies.items()]

    def __len__(self) -> int:
        return len(self._copies)


class BlockPool:
    """The free list of ``num_blocks`` blocks, and the blocks lent to the engine or to the device.

    - ``copies``: decided and not executed yet.
    - ``is_deferred``: the engine executes copies later. Otherwise none is left when a call ends.
    - ``exposed``: blocks that such a copy names and that a tree has, so that eviction may free them.
    """

    __slots__ = ("_free", "copies", "exposed", "held", "is_deferred", "lent", "num_blocks", "scrubber")

    def __init__(
        self, num_blocks: int, scrubber: Scrubber | None = None, *, is_deferred: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.scrubber = scrubber
        self.is_deferred = is_deferred
        self._free = bytearray(np.arange(num_blocks, dtype=np.int32).tobytes())
        self.lent: set[int] = set()
        self.copies = WaitingCopies()
        self.exposed: set[int] = set()
        self.held = bytearray()  # packed

    @property
    def num_free(self) -> int:
        """Blocks that can be taken immediately."""
        return len(self._free) // ID_BYTES

    def take(self, size: int, table: bytearray) -> int:
        """Move up to ``size`` bytes of packed ids from the free stack to ``table``. Returns how many. O(size) copy."""
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
        """Put packed ids on the free stack, or hold those that a waiting copy reads. O(n) copy."""
        if self.is_deferred and len(self.copies):
            block_ids = self._hold(bytes(block_ids))
        if self.scrubber is not None:
            self.scrubber.free(block_ids)
        self._free += block_ids

    def reuse(self, table: bytearray, start: int) -> None:
        """Pass ``table[start:]`` from victims to their next owner without the free stack.

        Zeroes what must be zeroed.
        """
        if self.scrubber is not None:
            self.scrubber.free(table[start:])

    def hand_out(self, table: bytearray, start: int, label: int) -> None:
        """Zero those of ``table[start:]`` that the owner with this label may not read."""
        if self.scrubber is not None:
            self.scrubber.hand_out(table[start:], label)

    def _hold(self, freed: bytes) -> bytes:
        """Hold those packed ids that waiting copies read, and cancel copies into any of them. Returns the free ones.

        O(ids) at C speed, plus O(copies) in Python if a copy names one of them.
        """
        copies, ids = self.copies, set(unpack(freed).tolist())
        if not copies.named_among(ids):
            return freed
        held = set(unpack(self.held).tolist())
        for target in ids.intersection(copies.targets):
            source = copies.cancel(target)
            if source is not None and source in held:
                held.remove(source)
                ids.add(source)
        kept = ids.intersection(copies.readers)
        held |= kept
        self.held = bytearray(np.array(list(held), np.int32).tobytes())
        self.exposed = copies.named_among(self.exposed - ids)
        return np.array(list(ids - kept), np.int32).tobytes()

    def expose(self, block_ids: bytes | bytearray) -> None:
        """Note those of the packed ids that a waiting copy names, because a tree has them now. O(ids)."""
        self.exposed |= self.copies.named_among(set(unpack(block_ids).tolist()))

    @property
    def is_loose(self) -> bool:
        """Whether a waiting copy names blocks that no sequence keeps: held blocks, or a tree's."""
        return len(self.held) > 0 or len(self.exposed) > 0

    def settle(self) -> None:
        """Free all held blocks, because the plan was fetched and no copy waits.

        They are zeroed later, when they are handed out. Zeroing them now would be too early, because the engine still
        has to execute the plan.
        """
        self.copies = WaitingCopies()
        self.exposed.clear()
        self._free += self.held
        self.held = bytearray()

    def free_ids(self) -> BlockIds:
        """Return the free ids, int32, a copy. O(free)."""
        return unpack(self._free)

    def lend(self, block_ids: bytearray) -> BlockIds:
        """Record that the engine owns these packed ids, which were taken, until ``give_back`` or ``claim``."""
        taken = unpack(block_ids)
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
        """Take ids that passed ``check_claim`` from the lent and free ones, for the owner with this label. O(free)."""
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
