"""LFU with dynamic aging (LFU-DA): evicts the node with the lowest count of uses plus cache age.

At the end of a use, a node's priority is set to its count of uses plus the age of the cache. The lowest is evicted
first; of equals, the one whose use ended longest ago. The age is the priority of the last victim. So later nodes
overtake an unused node, however often it was used before. Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating
content management techniques for web proxy caches" (1999).

Differences from the paper: the unit is a node of a radix tree, and the priority is set at the end of a use, after
every node of the path is counted. A use of a node is a use of its parent, so a parent's count and age are never below
its child's. So the lowest priority is always a leaf's.

State a node: a count, a priority, an entry in the bucket of its priority. Cost: O(1). A new bucket costs O(log p),
where p is the number of different priorities.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.policy import GhostKeys, Handle, Policy


@mypyc_attr(allow_interpreted_subclasses=True)
class LFU(Policy):
    """Least frequently used, with dynamic aging."""

    def begin(self) -> None:
        super().begin()
        self._age = 0
        self._counts: dict[Handle, int] = {}
        self._priorities: dict[Handle, int] = {}  # of the evictable nodes
        self._buckets: dict[int, OrderedDict[Handle, None]] = {}
        self._lowest: list[int] = []  # heap of the buckets' priorities

    def inserted(
        self,
        node: Handle,
        num_blocks: int,
        depth: int,
        hints: object = None,
        ghost_keys: GhostKeys = (),
        parent: Handle | None = None,
    ) -> None:
        self._counts[node] = 1

    def touched(self, nodes: Sequence[Handle]) -> None:
        counts = self._counts
        for node in nodes:
            counts[node] += 1

    def split(self, upper: Handle, lower: Handle, num_blocks: int) -> None:
        self._counts[upper] = self._counts[lower]
        priority = self._priorities.get(lower)
        if priority is not None:
            self._enter(upper, priority)

    def leased(self, node: Handle) -> None:
        self._leave(node)

    def unleased(self, node: Handle) -> None:
        self._enter(node, self._age + self._counts[node])

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        self._age = max(self._age, self._priorities[node])

    def removed(self, node: Handle) -> None:
        self._leave(node)
        del self._counts[node]

    def victim(self) -> Handle | None:
        while self._lowest:
            bucket = self._buckets.get(self._lowest[0])
            if bucket is not None:
                return next(iter(bucket))
            heappop(self._lowest)
        return None

    def __len__(self) -> int:
        return len(self._priorities)

    def _enter(self, node: Handle, priority: int) -> None:
        bucket = self._buckets.get(priority)
        if bucket is None:
            bucket = self._buckets[priority] = OrderedDict()
            self._open(priority)
        bucket[node] = None
        self._priorities[node] = priority

    def _leave(self, node: Handle) -> None:
        priority = self._priorities.pop(node)
        bucket = self._buckets[priority]
        del bucket[node]
        if not bucket:
            del self._buckets[priority]  # its entry in the heap is skipped, or removed by _open

    def _open(self, priority: int) -> None:
        if len(self._lowest) > 2 * len(self._buckets) + 64:
            self._lowest = list(self._buckets)
            heapify(self._lowest)
        else:
            heappush(self._lowest, priority)
