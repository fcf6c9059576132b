"""Queue: leaves that end the resident prefix of waiting requests, in the order in which they are evicted.

A request is *cold* if more than MAX_MISSING of it isn't resident: others will run before it, so its blocks are evicted
before idle ones. Blocks of other requests are evicted last. In both groups, the newest request loses first. A leaf
that several requests need counts as one of the oldest of them, and it is cold only if all are.

The rule comes from a study of agent sessions: the best label of a block is that a waiting request needs it.

State: three entries a request. Cost: O(log n) an event, amortised.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from radixkv_policies.heaps import LeafHeap
from radixkv_policies.policy import Handle

MAX_MISSING: Final = 0.5


class Request:
    """A waiting request, as it is told once. ``node``: None after the next time."""

    __slots__ = ("is_cold", "node", "num_blocks", "number")

    def __init__(self, number: int, node: Handle | None, num_blocks: int, is_cold: bool) -> None:
        self.number, self.node, self.num_blocks, self.is_cold = number, node, num_blocks, is_cold


_Entry = tuple[int, int, Request]


class _End:
    """The requests that end in one node."""

    __slots__ = ("by_cover", "cold", "num", "whole")

    def __init__(self) -> None:
        self.cold: list[_Entry] = []  # by number
        self.whole: list[_Entry] = []
        self.by_cover: list[_Entry] = []  # by blocks, the most first
        self.num = 0

    def add(self, told: Request, serial: int) -> None:
        """Add a request."""
        self.num += 1
        if len(self.by_cover) > 2 * self.num + 16:
            self.sweep()
        heappush(self.cold if told.is_cold else self.whole, (told.number, serial, told))
        heappush(self.by_cover, (-told.num_blocks, serial, told))

    def sweep(self) -> None:
        """Drop the requests that ended or moved."""
        for heap in (self.cold, self.whole, self.by_cover):
            heap[:] = [entry for entry in heap if entry[2].node is not None]
            heapify(heap)


def _first(heap: list[_Entry]) -> int | None:
    """The smallest key of a request that is still there."""
    while heap:
        if heap[0][2].node is not None:
            return heap[0][0]
        heappop(heap)
    return None


class Queue:
    """The waiting requests of a tenant, and the evictable leaves that they need."""

    __slots__ = ("_cold", "_ends", "_numbers", "_requests", "_serial", "_whole")

    def __init__(self) -> None:
        self._requests: dict[Handle, Request] = {}
        self._ends: dict[Handle, _End] = {}
        self._cold, self._whole = LeafHeap(), LeafHeap()
        self._serial = self._numbers = 0

    def announced(
        self, request: Handle, node: Handle | None, num_blocks: int, missing: float
    ) -> Handle | None:
        """A request ends here now. Returns the node where it ended before, or None."""
        before = self._requests.get(request)
        number, was = self._numbers, None
        if before is None:
            self._numbers += 1
        else:
            number, was = before.number, self._move(before)
        told = self._requests[request] = Request(number, node, num_blocks, missing > MAX_MISSING)
        if node is not None:
            end = self._ends.get(node)
            if end is None:
                end = self._ends[node] = _End()
            self._serial += 1
            end.add(told, self._serial)
        return was

    def withdrawn(self, request: Handle) -> Handle | None:
        """A request waits no longer. Returns the node where it ended, or None."""
        told = self._requests.pop(request, None)
        return None if told is None else self._move(told)

    def _move(self, told: Request) -> Handle | None:
        node, told.node = told.node, None
        if node is not None:
            end = self._ends[node]
            end.num -= 1
            if not end.num:
                del self._ends[node]
        return node

    def covered(self, node: Handle) -> int:
        """How many of a node's first blocks the requests that end in it need."""
        end = self._ends.get(node)
        first = None if end is None else _first(end.by_cover)
        return 0 if first is None else -first

    def enter(self, node: Handle) -> None:
        """A leaf that requests need is evictable."""
        end = self._ends[node]
        first = _first(end.whole)
        if first is not None:
            self._whole.add(node, -first)
        else:
            oldest = _first(end.cold)
            self._cold.add(node, 0 if oldest is None else -oldest)

    def leave(self, node: Handle) -> bool:
        """Remove a leaf. Returns whether it was there."""
        for leaves in (self._cold, self._whole):
            if node in leaves:
                leaves.discard(node)
                return True
        return False

    def first(self) -> Handle | None:
        """The leaf to evict before idle ones, or None."""
        return self._cold.first()

    def last(self) -> Handle | None:
        """The leaf to evict after idle ones, or None."""
        return self._whole.first()
