"""Owners of a tier's slots: what each may have, what it has, and which of them loses a record next.

    used < guaranteed     nothing of it is evicted for others
    used > guaranteed     the one with the greatest *overuse*, (used − guaranteed) ÷ weight, loses its oldest record
    used ≥ most           its next record takes the place of its own oldest one

So the order is that of the tenants in the cache (``radixkv.index.ranking``). On ties the requester loses a record.
``used`` counts slots that are filled or sealed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from radixkv.config import MAX_WEIGHT, MIN_WEIGHT
from radixkv.errors import ArgumentError

_MOST_SKIPPED: Final = 64
"""Leased records of an owner that an eviction passes. A tier has at most as many threads, each with one lease."""
_UNRANKED: Final = -1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True)
class Quota:
    """The slots that an owner is guaranteed, the most that it may have, None for all, and its weight above that.

    Raises ArgumentError.
    """

    guaranteed: int = 0
    most: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not _is_count(self.guaranteed):
            raise ArgumentError("guaranteed", self.guaranteed, "an integer ≥ 0")
        if self.most is not None and not (_is_count(self.most) and self.most >= self.guaranteed):
            raise ArgumentError("most", self.most, f"an integer ≥ {self.guaranteed}, the guarantee, or None")
        weight: object = self.weight
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ArgumentError("weight", weight, f"a number from {MIN_WEIGHT} to {MAX_WEIGHT}")


NO_QUOTA: Final = Quota()


class Owner:
    """An owner: its slots in any state but free, and its sealed records, the least recently used first."""

    __slots__ = ("entry", "name", "order", "quota", "ranked", "slots", "used")

    def __init__(self, name: bytes) -> None:
        self.name, self.quota = name, NO_QUOTA
        self.slots: set[int] = set()
        self.used = 0
        self.order: OrderedDict[bytes, int] = OrderedDict()
        self.ranked = self.entry = _UNRANKED

    @property
    def overuse(self) -> float:
        """How far it is above its guarantee, by its weight."""
        return (self.used - self.quota.guaranteed) / self.quota.weight

    @property
    def is_full(self) -> bool:
        """Whether it has all that it may have."""
        return self.quota.most is not None and self.used >= self.quota.most

    @property
    def is_above(self) -> bool:
        """Whether it has more than it may have."""
        return self.quota.most is not None and self.used > self.quota.most

    def oldest(self, leased: Container[int]) -> int | None:
        """Return the slot of its least recently used record that isn't leased. O(leases)."""
        slots = islice(self.order.values(), _MOST_SKIPPED)
        return next((slot for slot in slots if slot not in leased), None)


class Overuse:
    """The owners that share slots, by their overuse.

    The heap holds each owner's overuse from when it was last ranked, never less than now. ``grew`` ranks an owner anew
    that has outgrown that; one that shrank is ranked anew at the top. So a turn costs O(log owners). Nothing is ranked
    until something is evicted.
    """

    __slots__ = ("_heap", "_most_entries", "_num_ranked")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Owner]] | None = None
        self._num_ranked, self._most_entries = 0, 64

    def grew(self, owner: Owner) -> None:
        """Take that an owner has another slot or record. O(1), or O(log owners)."""
        if owner.used > owner.ranked:
            self.rank(owner)

    def rank(self, owner: Owner) -> None:
        """Take an owner's use, or its new quota. O(log owners), amortised."""
        heap = self._heap
        if heap is None:
            return
        if len(heap) > self._most_entries:  # mostly outdated
            heap[:] = [each for each in heap if _is_ranked(*each)]
            heapify(heap)
            self._most_entries = 2 * len(heap) + 64
        self._num_ranked += 1
        owner.ranked, owner.entry = owner.used, self._num_ranked
        heappush(heap, (-owner.overuse, owner.entry, owner))

    def victim(self, requester: Owner, owners: Iterable[Owner], leased: Container[int]) -> int | None:
        """Return the slot of the record to evict for a requester; None if there is none that may be.

        ``owners``: all that share the slots.
        """
        if self._heap is None:
            self._heap = []
            for each in owners:
                self.rank(each)
        first, slot = self._top(self._heap, leased)
        if first is None or requester.overuse >= first.overuse:
            own = requester.oldest(leased)
            return slot if own is None else own
        return slot

    def _top(
        self, heap: list[tuple[float, int, Owner]], leased: Container[int]
    ) -> tuple[Owner | None, int | None]:
        """Return the owner with the greatest overuse among those that may lose a record, and the record's slot."""
        leased_wholly = []
        first, slot = None, None
        while heap and slot is None:
            overuse, entry, owner = heap[0]
            if not _is_ranked(overuse, entry, owner):
                heappop(heap)
            elif -overuse != owner.overuse:
                heappop(heap)
                self.rank(owner)
            elif owner.used <= owner.quota.guaranteed:
                break
            else:
                first, slot = owner, owner.oldest(leased)
                if slot is None:
                    leased_wholly.append(heappop(heap))
        for each in leased_wholly:
            heappush(heap, each)
        return (None, None) if slot is None else (first, slot)

    def is_right(self, owners: Iterable[Owner]) -> bool:
        """Whether each owner with records stands in the heap, and not below its overuse. O(owners)."""
        if self._heap is None:
            return True
        ranks = {
            owner.name: -rank for rank, entry, owner in self._heap if entry == owner.entry and owner.order
        }
        return all(not each.order or ranks.get(each.name, -1e300) >= each.overuse for each in owners)


def _is_ranked(_: float, entry: int, owner: Owner) -> bool:
    """Whether this is the rank of an owner that has records. One without records has no rank afterwards."""
    if entry == owner.entry and not owner.order:
        owner.ranked = owner.entry = _UNRANKED
    return entry == owner.entry
