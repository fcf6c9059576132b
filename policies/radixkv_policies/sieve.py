"""SIEVE: a hand moves from the oldest to the youngest leaf, and spares leaves used since its last visit, once.

Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is simpler than LRU" (NSDI 2024). Blocks never move. The hand stops at
the first leaf that was not used since its last visit. It clears the marks of the leaves that it passes, and starts
over at the oldest.

Differences from the paper: the unit is a run of blocks of a tree, and the hand sees leaves only. Its position is a
stamp: leaves from it on are *ahead*, those before it *behind*. They are two heaps by stamp that swap when the hand
starts over.

State a node: a stamp and a mark a piece, an entry of a queue. Cost: O(log n), ``victim`` amortised: each passed leaf
loses its mark.
"""

from __future__ import annotations

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import LeafPolicy, LeafQueue, Piece
from radixkv_policies.policy import Handle


@mypyc_attr(acyclic=True)
class Marked(Piece):
    """``stamp``: order of insertion. ``is_used``: since the hand's last visit."""

    __slots__ = ("is_used", "stamp")

    def __init__(self, stamp: int) -> None:
        self.stamp, self.is_used = stamp, False

    def twin(self) -> Marked:
        twin = Marked(self.stamp)
        twin.is_used = self.is_used
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class SIEVE(LeafPolicy[Marked]):
    """One order of insertion, a hand and a mark for each piece."""

    def begin(self) -> None:
        super().begin()
        self._ahead, self._behind = LeafQueue(), LeafQueue()
        self._hand = 0

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Marked:
        return Marked(self.next_stamp())

    def used(self, piece: Marked) -> None:
        piece.is_used = True

    def entered(self, node: Handle, piece: Marked, depth: int) -> None:
        self._side(piece).add(node, piece.stamp)

    def left(self, node: Handle, piece: Marked) -> None:
        self._side(piece).discard(node)

    def victim(self) -> Handle | None:
        while self._ahead or self._behind:
            node = self._ahead.first()
            if node is None:
                self._ahead, self._behind, self._hand = self._behind, self._ahead, 0
                continue
            piece = self._states[node].pieces[-1]
            if not piece.is_used:
                self._pass(piece.stamp)
                return node
            self.left(node, piece)
            piece.is_used = False
            self._pass(piece.stamp + 1)
            self._behind.add(node, piece.stamp)
        return None

    def _pass(self, stamp: int) -> None:
        """Move the hand to ``stamp``. Every leaf ahead has this stamp or a later one."""
        self._hand = stamp

    def _side(self, piece: Marked) -> LeafQueue:
        return self._ahead if piece.stamp >= self._hand else self._behind
