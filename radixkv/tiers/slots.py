"""Which slot of a tier holds which record: the table in memory, without I/O.

    free ──take──▶ filling ──seal──▶ sealed ──drop──▶ free
                      └────give_up────▶ free             (a leased slot is free when its last lease ends)

Only sealed slots are found. A table belongs to one tier, whose lock guards it. Each slot belongs to an *owner*, a
tenant. Records are evicted in the order of their last use. An owner with a *partition* has slots of its own that no
other owner takes, and takes none of the others', so neither sees the other's load.

A law holds between calls: each slot is in exactly one state, and an owner's counts sum up to its slots (``check``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple

from radixkv.errors import ArgumentError, IntegrityError

FREE: Final = 0
FILLING: Final = 1
SEALED: Final = 2
LEAVING: Final = 3
"""Dropped while it was filled or leased: not found, and free as soon as nobody uses it."""

_MOST_SKIPPED: Final = 64
"""Leased slots that an eviction passes before it gives up."""


class Entry(NamedTuple):
    """The record of a slot."""

    locator: bytes
    owner: bytes


class _Pool:
    """The slots that some owners share: at most ``capacity``, sealed ones in the order of their last use."""

    __slots__ = ("capacity", "order", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.order: OrderedDict[bytes, int] = OrderedDict()


class SlotTable:
    """The states of ``num_slots`` slots. ``partitions``: slots of their own, by owner. Not thread-safe.

    Raises ArgumentError for partitions that don't fit.
    """

    def __init__(self, num_slots: int, partitions: Mapping[bytes, int] | None = None) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._states = bytearray(num_slots)
        self._entries: dict[int, Entry] = {}
        self._leases: dict[int, int] = {}
        self._slots: dict[bytes, int] = {}
        self._filling: dict[bytes, int] = {}
        self._by_owner: dict[bytes, set[int]] = {}
        self._own: dict[bytes, _Pool] = {}
        self._shared = _Pool(num_slots)
        for owner, size in (partitions or {}).items():
            self.set_partition(owner, size)

    def __len__(self) -> int:
        """Number of sealed slots."""
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def num_of(self, owner: bytes) -> int:
        """Number of slots of an owner, in any state but free."""
        return len(self._by_owner.get(owner, ()))

    def set_partition(self, owner: bytes, size: int) -> None:
        """Give an owner that holds nothing ``size`` slots of its own, 0 for none. Raises ArgumentError."""
        before = self._own[owner].capacity if owner in self._own else 0
        most = self._shared.capacity + before - self._shared.used
        if self.num_of(owner) or not 0 <= size <= most:
            raise ArgumentError("size", size, f"0 to {most}, for an owner without records")
        self._shared.capacity += before - size
        if size:
            self._own[owner] = _Pool(size)
        else:
            self._own.pop(owner, None)

    def find(self, locator: bytes) -> int | None:
        """Return the sealed slot of a record, or None. O(1)."""
        return self._slots.get(locator)

    def entry(self, slot: int) -> Entry:
        """Return the record of a slot that isn't free."""
        return self._entries[slot]

    def touch(self, slot: int) -> None:
        """Count a sealed record as just used. O(1)."""
        entry = self._entries[slot]
        if self._states[slot] == SEALED:
            self._pool(entry.owner).order.move_to_end(entry.locator)

    def victim(self, owner: bytes) -> int | None:
        """Return the sealed slot that the owner's next ``take`` evicts; None if it needs none, or finds none. O(1)."""
        pool = self._pool(owner)
        if pool.used < pool.capacity:
            return None
        unleased = (slot for slot in islice(pool.order.values(), _MOST_SKIPPED) if slot not in self._leases)
        return next(unleased, None)

    def take(self, locator: bytes, owner: bytes) -> int | None:
        """Return a slot to fill with a record, evicting the least recently used one if none is free.

        None if the record is there or being filled, or if every slot that it may take is in use. O(1).
        """
        pool = self._pool(owner)
        if locator in self._slots or locator in self._filling:
            return None
        if pool.used >= pool.capacity:
            victim = self.victim(owner)
            if victim is None:
                return None
            self.drop(victim)
        slot = self._free.pop()
        self._states[slot] = FILLING
        self._entries[slot] = Entry(locator, owner)
        self._filling[locator] = slot
        self._by_owner.setdefault(owner, set()).add(slot)
        pool.used += 1
        return slot

    def restore(self, records: Iterable[tuple[int, bytes, bytes]]) -> list[int]:
        """Seal slots of a new table with the records from before a restart: slot, locator and owner, the newest first.

        Leaves out what is there already, and what an owner has no more room for. Returns the slots that it sealed.
        O(slots), about 2 µs each.
        """
        orders: dict[_Pool, list[tuple[bytes, int]]] = {}
        for slot, locator, owner in records:
            pool = self._pool(owner)
            if locator not in self._slots and pool.used < pool.capacity:
                pool.used += 1
                self._states[slot] = SEALED
                self._entries[slot] = Entry(locator, owner)
                self._slots[locator] = slot
                self._by_owner.setdefault(owner, set()).add(slot)
                orders.setdefault(pool, []).append((locator, slot))
        for pool, order in orders.items():
            pool.order.update(reversed(order))
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if self._states[slot] == FREE]
        return list(self._entries)

    def seal(self, slot: int) -> bool:
        """Make a filled slot findable. False if it was dropped meanwhile; then it is free."""
        entry = self._entries[slot]
        if self._states[slot] == LEAVING:
            self._free_up(slot)
            return False
        del self._filling[entry.locator]
        self._states[slot] = SEALED
        self._slots[entry.locator] = slot
        self._pool(entry.owner).order[entry.locator] = slot
        return True

    def give_up(self, slot: int) -> None:
        """Free a slot that could not be filled."""
        if self._states[slot] == FILLING:
            del self._filling[self._entries[slot].locator]
        self._free_up(slot)

    def lease(self, slot: int) -> None:
        """Forbid that a sealed slot is reused until ``release``."""
        self._leases[slot] = self._leases.get(slot, 0) + 1

    def release(self, slot: int) -> None:
        """End a lease. A dropped slot is free with its last one."""
        left = self._leases[slot] - 1
        if left:
            self._leases[slot] = left
            return
        del self._leases[slot]
        if self._states[slot] == LEAVING:
            self._free_up(slot)

    def drop(self, slot: int) -> None:
        """Forget a record: it is not found any more. O(1)."""
        state = self._states[slot]
        if state == SEALED:
            entry = self._entries[slot]
            del self._slots[entry.locator]
            del self._pool(entry.owner).order[entry.locator]
            self._states[slot] = LEAVING
            if slot not in self._leases:
                self._free_up(slot)
        elif state == FILLING:
            del self._filling[self._entries[slot].locator]
            self._states[slot] = LEAVING

    def drop_owner(self, owner: bytes) -> list[int]:
        """Forget all records of an owner. Returns their slots. O(its slots)."""
        slots = sorted(self._by_owner.get(owner, ()))
        for slot in slots:
            self.drop(slot)
        return slots

    def owners(self) -> dict[bytes, int]:
        """Return the number of slots of each owner."""
        return {owner: len(slots) for owner, slots in self._by_owner.items()}

    def check(self) -> None:
        """Check the law. O(slots). Raises IntegrityError."""
        by_state = [self._states.count(state) for state in (FREE, FILLING, SEALED, LEAVING)]
        held = sum(map(len, self._by_owner.values()))
        pools = [self._shared, *self._own.values()]
        is_right = (
            by_state[FREE] == len(self._free) == len(set(self._free))
            and by_state[FILLING] == len(self._filling)
            and by_state[SEALED] == len(self._slots) == sum(len(pool.order) for pool in pools)
            and held == len(self._entries) == self.num_slots - by_state[FREE] == sum(p.used for p in pools)
            and all(self._states[slot] in (SEALED, LEAVING) for slot in self._leases)
            and sum(pool.capacity for pool in pools) == self.num_slots
            and all(pool.used <= pool.capacity for pool in pools)
        )
        if not is_right:
            raise IntegrityError(f"slots: {by_state} by state, {len(self._entries)} entries, {held} by owner")

    def _pool(self, owner: bytes) -> _Pool:
        return self._own.get(owner, self._shared)

    def _free_up(self, slot: int) -> None:
        entry = self._entries.pop(slot)
        self._pool(entry.owner).used -= 1
        slots = self._by_owner[entry.owner]
        slots.discard(slot)
        if not slots:
            del self._by_owner[entry.owner]
        self._states[slot] = FREE
        self._free.append(slot)
