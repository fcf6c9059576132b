"""Segmented LRU (SLRU): a small protected segment for blocks that were used again, and probation for all others.

Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (IEEE Computer 27(3), 1994). A new
block enters the probation segment. A second use promotes it to the protected segment, which holds at most
``PROTECTED_SHARE`` of the capacity. When there are more, the least recently used protected blocks move to the most
recently used end of probation. So they get one more chance. Victims are the least recently used leaves of probation.
Only if there are none is a protected leaf evicted.

Use it if many prompts never return, and some return often: a burst of new prompts can't evict those. It needs no ghosts
and no hints. Its bound is fixed; ``arc`` adapts its own.

Differences from the paper: the unit is a run of blocks of a tree, and only leaves are evicted. Sizes are in blocks,
leased ones included. Leased blocks don't move to probation, so the protected segment may exceed its bound until their
use ends. SGLang's ``slru`` has no bound: a node that was used often stays protected.

A use of a node is a use of its parent. So all blocks above a protected block are protected, and the deepest ones move
to probation first. A node has at most one protected piece, its first. A use makes the node one piece again.

State a node: two values a piece, an entry of the queue of protected nodes, and of a leaf on probation one of the other
queue. Cost: O(log n), amortised: a call splits at most one piece, and moves whole pieces of nodes that entered before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import LeafPolicy, LeafQueue, Piece
from radixkv_policies.policy import Handle

PROTECTED_SHARE: Final = 0.2
"""Share of the capacity that the protected segment may hold, at least one block.

W-TinyLFU protects 0.8. In a prefix cache each later turn of a conversation uses its blocks again. So a large segment
fills with conversations that are over, and new ones are evicted before their second turn. See
``docs/measurements/policies.md``.
"""


@mypyc_attr(acyclic=True)
class Segmented(Piece):
    """``is_protected``: in the protected segment.

    ``stamp``: order of the end of its last use, or of its later move to probation.
    """

    __slots__ = ("is_protected", "stamp")

    def __init__(self) -> None:
        self.is_protected, self.stamp = False, 0

    def twin(self) -> Segmented:
        twin = Segmented()
        twin.is_protected, twin.stamp = self.is_protected, self.stamp
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class SLRU(LeafPolicy[Segmented]):
    """Two LRU segments."""

    def begin(self) -> None:
        super().begin()
        self._probation = LeafQueue()  # evictable leaves that end on probation
        self._protected = LeafQueue()  # evictable nodes with protected blocks, leaves or not
        self._num_protected = 0  # protected blocks, leased ones included
        self._max_protected = max(int(PROTECTED_SHARE * self._capacity), 1)

    # --- segments

    def touched(self, nodes: Sequence[Handle]) -> None:
        states = self._states
        for node in nodes:
            pieces = states[node].pieces
            piece = pieces[0]
            if piece.is_protected:
                self._num_protected -= piece.num_blocks
            if len(pieces) > 1:
                self._join(pieces)
            piece.is_protected, piece.is_new = True, False
            self._num_protected += piece.num_blocks
        self._keep_bound()

    def _join(self, pieces: list[Segmented]) -> None:
        """Make one piece of them. Amortised O(1): each was made by a growth, a split or a move."""
        first = pieces[0]
        for piece in pieces[1:]:
            first.num_blocks += piece.num_blocks
            first.keys += piece.keys
        del pieces[1:]

    def _keep_bound(self) -> None:
        """Move the least recently used protected blocks to probation while there are too many."""
        while (excess := self._num_protected - self._max_protected) > 0:
            node = self._protected.first()
            if node is None:
                return  # all protected blocks are in use
            self._demote(node, excess)

    def _demote(self, node: Handle, num_blocks: int) -> None:
        """Move the last protected blocks of a node to probation, at most ``num_blocks``."""
        state = self._states[node]
        piece = state.pieces[0]
        kept = piece.num_blocks - num_blocks
        is_end = len(state.pieces) == 1
        if kept > 0:
            start = self._states[state.parent].depth if state.parent is not None else 0
            state.pieces.insert(0, self._halve(piece, kept, start + kept))
        else:
            self._protected.discard(node)
        piece.is_protected, piece.stamp = False, self.next_stamp()
        self._num_protected -= piece.num_blocks
        if is_end and not state.num_children:
            self.entered(node, piece, state.depth)

    # --- pieces

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Segmented:
        return Segmented()

    def ended(self, piece: Segmented) -> None:
        piece.stamp = self.next_stamp()

    def lost(self, piece: Segmented, num_blocks: int) -> None:
        if piece.is_protected:
            self._num_protected -= num_blocks

    # --- the order

    def leased(self, node: Handle) -> None:
        super().leased(node)
        if self._states[node].pieces[0].is_protected:
            self._protected.discard(node)

    def unleased(self, node: Handle) -> None:
        super().unleased(node)
        self._enter_protected(node)
        self._keep_bound()

    def _enter_protected(self, node: Handle) -> None:
        """Add an evictable node to the protected queue if it has protected blocks. Of equals, the deepest is first."""
        state = self._states[node]
        piece = state.pieces[0]
        if piece.is_protected:
            self._protected.add(node, piece.stamp, -state.depth)

    def split(self, upper: Handle, lower: Handle, num_blocks: int) -> None:
        super().split(upper, lower, num_blocks)
        if lower in self._protected:
            self._enter_protected(upper)
            if not self._states[lower].pieces[0].is_protected:
                self._protected.discard(lower)

    def removed(self, node: Handle) -> None:
        if node in self._protected:
            self._protected.discard(node)
        super().removed(node)

    def entered(self, node: Handle, piece: Segmented, depth: int) -> None:
        if not piece.is_protected:
            self._probation.add(node, piece.stamp)

    def left(self, node: Handle, piece: Segmented) -> None:
        if not piece.is_protected:
            self._probation.discard(node)

    def victim(self) -> Handle | None:
        node = self._probation.first()
        return self._protected.first() if node is None else node
