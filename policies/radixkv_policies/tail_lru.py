"""Tail-optimised LRU: first evicts blocks whose loss doesn't affect the tail of the time to first token.

After "Tail-optimized caching for LLM inference" (2510.15152, 2025). The time to first token meets its objective if at
most ``OBJECTIVE_TOKENS`` have to be computed. A conversation is expected to return with the average number of new
tokens of requests. It can lose the rest of that budget from its tail at no cost to the tail latency. Such blocks are
evicted first, beginning with the least recently used conversation. If there are none, the order is LRU.

Differences from the paper: a leaf represents a conversation. Its length is that of the last request that ended in or
below it. The new tokens of a turn are a running mean over requests, not known in advance.

State a node: two numbers a piece, an entry of a queue. Cost: O(log n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import LeafPolicy, LeafQueue, Piece
from radixkv_policies.policy import Handle

OBJECTIVE_TOKENS: Final = 4_096
"""Tokens that may be computed within the objective."""

MEAN_STEP: Final = 0.02
"""Step of the running mean of new blocks."""


@mypyc_attr(acyclic=True)
class Reaching(Piece):
    """``reach``: blocks of the longest request that ended in or below it since its last use.

    ``stamp``: order of the end of that use.
    """

    __slots__ = ("in_budget", "reach", "stamp")

    def __init__(self) -> None:
        self.in_budget, self.reach, self.stamp = False, 0, 0

    def twin(self) -> Reaching:
        twin = Reaching()
        twin.in_budget, twin.reach, twin.stamp = self.in_budget, self.reach, self.stamp
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class TailLRU(LeafPolicy[Reaching]):
    """LRU that first uses up the budget of the time-to-first-token objective."""

    ranks_by_depth: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._spare, self._others = LeafQueue(), LeafQueue()
        self._objective = round(OBJECTIVE_TOKENS / self._block_tokens)  # blocks
        self._new_blocks = 0.0

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        known = self._states[nodes[-1]].depth if nodes else 0
        self._new_blocks += MEAN_STEP * (min(num_blocks - known, self._objective) - self._new_blocks)
        return hints

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Reaching:
        return Reaching()

    def ended(self, piece: Reaching) -> None:
        piece.reach, piece.stamp = 0, self.next_stamp()

    def entered(self, node: Handle, piece: Reaching, depth: int) -> None:
        piece.reach = max(piece.reach, depth)
        piece.in_budget = self._spare_blocks(piece, depth) > 0
        (self._spare if piece.in_budget else self._others).add(node, piece.stamp)

    def left(self, node: Handle, piece: Reaching) -> None:
        (self._spare if piece.in_budget else self._others).discard(node)

    def uncovered(self, parent: Reaching, child: Reaching) -> None:
        parent.reach = max(parent.reach, child.reach)

    def victim(self) -> Handle | None:
        node = self._spare.first()
        return self._others.first() if node is None else node

    def most(self, node: Handle) -> int:
        state = self._states[node]
        piece = state.pieces[-1]
        if not piece.in_budget:
            return piece.num_blocks
        return min(piece.num_blocks, max(self._spare_blocks(piece, state.depth), 1))

    def _spare_blocks(self, piece: Reaching, depth: int) -> int:
        """Blocks that the leaf can lose within the budget."""
        return self._objective - round(self._new_blocks) - (piece.reach - depth)
