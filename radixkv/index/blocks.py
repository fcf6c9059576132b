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
from itertools import zip_longest

import numpy as np

from radixkv.errors import ArgumentError
from radixkv.index.scrubbing import ENGINE, Scrubber
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


class LentBlocks:
    """The blocks that the engine has, one mark for each block of the pool. ``len`` is how many they are, O(1)."""

    __slots__ = ("_marks", "_num")

    def __init__(self, num_blocks: int, has_all: bool) -> None:
        self._marks = bytearray(b"\1" * num_blocks if has_all else num_blocks)
        self._num = num_blocks if has_all else 0

    def __len__(self) -> int:
        return self._num

    def ids(self) -> BlockIds:
        """Return the ids, int32, ascending. O(blocks of the pool)."""
        return np.flatnonzero(np.frombuffer(bytes(self._marks), np.uint8)).astype(np.int32)

    def missing(self, ids: list[int]) -> list[int]:
        """Return those of these ids, all in range, that aren't lent. O(ids)."""
        marks = self._marks
        return [block_id for block_id in ids if not marks[block_id]]

    def add(self, ids: list[int]) -> None:
        """Mark distinct ids that aren't lent. O(ids)."""
        marks = self._marks
        for block_id in ids:
            marks[block_id] = 1
        self._num += len(ids)

    def remove(self, ids: list[int]) -> None:
        """Unmark distinct ids that are lent. O(ids)."""
        marks = self._marks
        for block_id in ids:
            marks[block_id] = 0
        self._num -= len(ids)

    def keep_only(self, ids: BlockIds) -> None:
        """Unmark all others. Corrects the number too, after an interruption. O(blocks of the pool)."""
        kept = np.zeros(len(self._marks), np.uint8)
        kept[ids] = np.frombuffer(bytes(self._marks), np.uint8)[ids]
        self._marks = bytearray(kept.tobytes())
        self._num = int(kept.sum())


class BlockPool:
    """The free list of ``num_blocks`` blocks, and the blocks lent to the engine.

    With ``is_engines`` all blocks are lent at first, and the free list has only blocks that a call freed and that the
    engine hasn't reclaimed yet.

    - ``copies``: decided and not executed yet.
    - ``is_deferred``: the engine executes copies later. Otherwise none is left when a call ends.
    - ``exposed``: blocks that such a copy names and that a tree has, so that eviction may free them.
    """

    __slots__ = (
        "_free",
        "copies",
        "exposed",
        "held",
        "is_deferred",
        "is_engines",
        "lent",
        "num_blocks",
        "scrubber",
    )

    def __init__(
        self,
        num_blocks: int,
        scrubber: Scrubber | None = None,
        *,
        is_deferred: bool = False,
        is_engines: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.scrubber = scrubber
        self.is_deferred = is_deferred
        self.is_engines = is_engines
        self._free = bytearray() if is_engines else bytearray(np.arange(num_blocks, dtype=np.int32).tobytes())
        self.lent = LentBlocks(num_blocks, is_engines)
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

    def lend(self, block_ids: bytes | bytearray) -> BlockIds:
        """Record that the engine owns these packed ids, which were taken, until ``give_back`` or ``claim``."""
        taken = unpack(block_ids)
        self.lent.add(taken.tolist())
        return taken

    def lend_freed(self, start: int, table: bytearray) -> None:
        """Lend what was freed since the free list had ``start`` bytes. Adds the packed ids to ``table``. O(blocks)."""
        freed = self._free[start:]
        if freed:
            table += freed  # first: the caller knows what to take back if this is interrupted
            self.hand_out(freed, 0, ENGINE)
            self.lend(freed)
            del self._free[start:]

    @property
    def num_free_bytes(self) -> int:
        """Length of the free list, packed."""
        return len(self._free)

    def give_back(self, block_ids: BlockIds) -> None:
        """Return lent ids to the free stack. Raises ArgumentError, and changes nothing, if one isn't lent."""
        ids: list[int] = block_ids.tolist()
        self._require_distinct(ids)
        missing = self.lent.missing(ids)
        if missing:
            raise ArgumentError("block_ids", missing[0], "blocks that are lent (PrefixCache.allocate)")
        self.lent.remove(ids)
        self.give(block_ids.tobytes())

    def check_claim(self, ids: list[int]) -> int:
        """Raise ArgumentError unless these ids are in range, distinct, and the engine's: lent, or free.

        Free ones aren't allowed if the engine owns the pool. Returns how many are lent. O(ids), and O(free) if one
        isn't lent.
        """
        self._require_distinct(ids)
        missing = self.lent.missing(ids)
        if missing:
            free = [] if self.is_engines else np.isin(missing, self.free_ids()).tolist()
            for block_id, is_free in zip_longest(missing, free, fillvalue=False):
                if not is_free:
                    allowed = "blocks that are lent or free; this one is owned already"
                    raise ArgumentError("block_ids", block_id, allowed)
        return len(ids) - len(missing)

    def claim(self, ids: list[int], label: int) -> None:
        """Take ids that passed ``check_claim``, for the owner with this label. O(ids), and O(free) like that."""
        if self.scrubber is not None:
            self.scrubber.filled(np.array(ids, np.int32), label)
        missing = self.lent.missing(ids)
        if missing:
            free, without = self.free_ids(), set(missing)
            self._free = bytearray(free[np.isin(free, missing, invert=True)].tobytes())
            ids = [block_id for block_id in ids if block_id not in without]
        self.lent.remove(ids)

    def _require_distinct(self, ids: list[int]) -> None:
        num_blocks = self.num_blocks
        for block_id in ids:
            if not 0 <= block_id < num_blocks:
                raise ArgumentError("block_ids", block_id, f"0 ≤ block id < {num_blocks}")
        if len(set(ids)) != len(ids):
            raise ArgumentError("block_ids", _first_repeated(ids), "each block once")


def _first_repeated(ids: Iterable[int]) -> int:
    seen: set[int] = set()
    for block_id in ids:
        if block_id in seen:
            return block_id
        seen.add(block_id)
    raise AssertionError("no id is repeated")
