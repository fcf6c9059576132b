"""Priorities from 0 to 100: evicts the lowest first; of equals, the least recently used.

After the retention of TensorRT-LLM. A request's hints give a priority to all of its blocks or to ranges of tokens,
for ever or for a number of seconds after their last use. Afterwards, and without hints, the priority is
``DEFAULT_PRIORITY``. A later request with its own priority sets the blocks that it matches again. A block has the
priority of its first token.

``opened`` sets the priorities of the matched blocks, ``inserted`` and ``extended`` those of new blocks. No other hook
needs the hints. So these two calls are enough for blocks that a caller computed itself and inserts.

Difference from TensorRT-LLM: only leaves are evicted. So a block of low priority stays as long as a block of high
priority below it in the tree.

State a node: four numbers a piece, an entry of a queue, another if its priority ends. Cost: O(log n).
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.hints import DEFAULT_PRIORITY, RequestHints
from radixkv_policies.leaves import Keys, LeafHeap, LeafPolicy, LeafQueue, Piece, State
from radixkv_policies.policy import Handle


@mypyc_attr(acyclic=True)
class Prioritised(Piece):
    """``priority`` until ``ends_s``, None for ever. ``stamp``: order of the end of its last use."""

    __slots__ = ("duration_s", "ends_s", "priority", "rank", "stamp")

    def __init__(self, priority: int, duration_s: float | None) -> None:
        self.priority, self.duration_s = priority, duration_s
        self.ends_s: float | None = None
        self.stamp = self.rank = 0

    def twin(self) -> Prioritised:
        twin = Prioritised(self.priority, self.duration_s)
        twin.ends_s, twin.rank, twin.stamp = self.ends_s, self.rank, self.stamp
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class Priority(LeafPolicy[Prioritised]):
    """The given priority, then recency."""

    def begin(self) -> None:
        super().begin()
        self._ranks = [LeafQueue() for _ in range(101)]
        self._lowest = 0  # no leaf has a rank below it
        self._ends = LeafHeap()  # leaves with a limited priority, by its end

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        if isinstance(hints, RequestHints) and (hints.priority is not None or hints.ranges):
            for node in nodes:
                self._give(self._states[node], hints)
        return hints

    def _give(self, state: State[Prioritised], hints: RequestHints) -> None:
        """Set the priorities of a node's pieces, split at the borders of ranges."""
        start = state.depth - sum(piece.num_blocks for piece in state.pieces)
        old, state.pieces = state.pieces, []
        for piece in old:
            for cut in self._cuts(start, start + piece.num_blocks, hints):
                state.pieces.append(self._halve(piece, cut - start, cut))
                start = cut
            state.pieces.append(piece)
            start += piece.num_blocks
        start = state.depth - sum(piece.num_blocks for piece in state.pieces)
        for piece in state.pieces:
            piece.priority, piece.duration_s = self._given(start, hints)
            start += piece.num_blocks

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Prioritised:
        return Prioritised(*self._given(start, hints))

    def alike(self, last: Prioritised, piece: Prioritised) -> bool:
        return last.priority == piece.priority and last.duration_s == piece.duration_s

    def ended(self, piece: Prioritised) -> None:
        piece.stamp = self.next_stamp()
        piece.ends_s = None if piece.duration_s is None else self._clock() + piece.duration_s

    def entered(self, node: Handle, piece: Prioritised, depth: int) -> None:
        is_over = piece.ends_s is not None and piece.ends_s <= self._clock()
        piece.rank = DEFAULT_PRIORITY if is_over else piece.priority
        self._ranks[piece.rank].add(node, piece.stamp)
        self._lowest = min(self._lowest, piece.rank)
        if piece.ends_s is not None and not is_over:
            self._ends.add(node, piece.ends_s, piece.stamp)

    def left(self, node: Handle, piece: Prioritised) -> None:
        self._ranks[piece.rank].discard(node)
        if node in self._ends:
            self._ends.discard(node)

    def victim(self) -> Handle | None:
        if self._ends:
            self._end()
        while (node := self._ranks[self._lowest].first()) is None and self._lowest < 100:
            self._lowest += 1
        return node

    def _end(self) -> None:
        """Rank leaves again whose priority has ended."""
        now_s = self._clock()
        while (first := self._ends.first_key()) is not None and first[0] <= now_s:
            node = self._ends.first()
            assert node is not None
            state = self._states[node]
            self.left(node, state.pieces[-1])
            self.entered(node, state.pieces[-1], state.depth)

    def _given(self, start: int, hints: object) -> tuple[int, float | None]:
        """Priority and duration of the block that begins after ``start`` blocks."""
        if hints is None or not isinstance(hints, RequestHints):
            return DEFAULT_PRIORITY, None
        token = start * self._block_size
        for given in reversed(hints.ranges):
            if given.start <= token and (given.stop is None or token < given.stop):
                return given.priority, given.duration_s
        if hints.priority is None:
            return DEFAULT_PRIORITY, None
        return hints.priority, hints.duration_s

    def _pieces(self, num_blocks: int, depth: int, hints: object, keys: Keys) -> list[Prioritised]:
        at = depth - num_blocks
        if hints is None:
            return [self._new(at, num_blocks, hints, (), None)]
        pieces = []
        for stop in [*self._cuts(at, depth, hints), depth]:
            pieces.append(self._new(at, stop - at, hints, (), None))
            at = stop
        return pieces

    def _cuts(self, start: int, depth: int, hints: object) -> list[int]:
        """Block numbers within ``(start, depth)`` at which another range may begin."""
        if not isinstance(hints, RequestHints) or not hints.ranges:
            return []
        tokens = {edge for given in hints.ranges for edge in (given.start, given.stop) if edge is not None}
        blocks = {-(-token // self._block_size) for token in tokens}
        return sorted(block for block in blocks if start < block < depth)
