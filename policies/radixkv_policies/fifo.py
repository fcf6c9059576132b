"""First in, first out: evicts the leaf that was inserted longest ago, regardless of later uses.

Difference from a plain queue: only leaves are evicted. A parent was inserted no later than its children, and waits for
them. Blocks that a request adds to its own leaf count as inserted with the leaf.

State a node: a stamp and an entry of a queue. Cost: O(log n).
"""

from __future__ import annotations

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import LeafPolicy, LeafQueue, Piece
from radixkv_policies.policy import Handle


@mypyc_attr(acyclic=True)
class Inserted(Piece):
    """``stamp``: order of insertion."""

    __slots__ = ("stamp",)

    def __init__(self, stamp: int) -> None:
        self.stamp = stamp

    def twin(self) -> Inserted:
        return Inserted(self.stamp)


@mypyc_attr(allow_interpreted_subclasses=True)
class FIFO(LeafPolicy[Inserted]):
    """First in, first out."""

    def begin(self) -> None:
        super().begin()
        self._leaves = LeafQueue()

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Inserted:
        return Inserted(self.next_stamp())

    def entered(self, node: Handle, piece: Inserted, depth: int) -> None:
        self._leaves.add(node, piece.stamp)

    def left(self, node: Handle, piece: Inserted) -> None:
        self._leaves.discard(node)

    def victim(self) -> Handle | None:
        return self._leaves.first()
