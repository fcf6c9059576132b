"""LFU with dynamic aging (LFU-DA): evicts the blocks with the lowest count of uses plus cache age.

At the end of a use, the priority of the blocks is set to their count of uses plus the age of the cache. The lowest is
evicted first; of equals, those whose use ended longest ago. The age is the priority of the last victim. So later blocks
overtake unused ones, however often these were used before. Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating
content management techniques for web proxy caches" (1999).

Differences from the paper: the unit is a run of blocks of a tree with one history, and only leaves are evicted. The
priority is set at the end of a use, not at its start. Blocks that extend a leaf begin with one use, whatever the leaf
had. A use of a block is a use of all blocks before it, so their count and age are never below its own.

State a node: three numbers a piece, an entry of a heap. Cost: O(log n).
"""

from __future__ import annotations

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import LeafHeap, LeafPolicy, Piece
from radixkv_policies.policy import Handle


@mypyc_attr(acyclic=True)
class Counted(Piece):
    """``num_uses``: since it was computed. ``priority`` and ``stamp``: of the end of its last use."""

    __slots__ = ("num_uses", "priority", "stamp")

    def __init__(self) -> None:
        self.num_uses, self.priority, self.stamp = 1, 0, 0

    def twin(self) -> Counted:
        twin = Counted()
        twin.num_uses, twin.priority, twin.stamp = self.num_uses, self.priority, self.stamp
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class LFU(LeafPolicy[Counted]):
    """Least frequently used, with dynamic aging."""

    def begin(self) -> None:
        super().begin()
        self._leaves = LeafHeap()
        self._age = 0

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Counted:
        return Counted()

    def used(self, piece: Counted) -> None:
        piece.num_uses += 1

    def ended(self, piece: Counted) -> None:
        piece.priority, piece.stamp = self._age + piece.num_uses, self.next_stamp()

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        self._age = max(self._age, self._states[node].pieces[-1].priority)
        super().trimmed(node, num_blocks)

    def entered(self, node: Handle, piece: Counted, depth: int) -> None:
        self._leaves.add(node, piece.priority, piece.stamp)

    def left(self, node: Handle, piece: Counted) -> None:
        self._leaves.discard(node)

    def victim(self) -> Handle | None:
        return self._leaves.first()
