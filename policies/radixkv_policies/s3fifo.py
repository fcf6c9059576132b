"""S3-FIFO: a small queue for new blocks, a main queue for blocks that were used again, and ghosts of evicted ones.

Yang, Zhang, Qiu, Yue and Vigfusson, "FIFO queues are all you need for cache eviction" (SOSP 2023). New blocks enter
the small queue, ``SMALL_SHARE`` of the capacity; blocks that a ghost remembers enter the main one. When the small
queue is full, its oldest leaf is evicted, or moves to the main queue if it was used more than once since. Otherwise the
oldest leaf of the main queue is evicted, or moves to its young end with one use less.

Differences from the paper: the unit is a run of blocks of a tree, and only leaves are evicted. Others keep their place
in the queue until they are leaves, so a queue is ordered by stamps. Sizes are in blocks, leased ones included. If moves
to the main queue leave the small one below its share, the next victim is the main queue's: the paper may evict one of
each then, though one block is enough. A block has its place when it is computed, after the eviction that made room.

State a node: three numbers a piece, an entry of a queue. Cost: O(log n), ``victim`` amortised: each move to the young
end consumes a use. Ghosts as in ``leaves``, as many segments as the main queue's share of the capacity has.
"""

from __future__ import annotations

from typing import ClassVar, Final

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import Ghosts, LeafPolicy, LeafQueue, Piece
from radixkv_policies.policy import Handle

SMALL_SHARE: Final = 0.1
"""Share of the capacity for new blocks."""

MAX_USES: Final = 3
"""The maximum of a use counter."""


@mypyc_attr(acyclic=True)
class Queued(Piece):
    """``is_main``: in the main queue. ``stamp``: its place in the queue. ``num_uses``: since it entered, at most 3."""

    __slots__ = ("is_main", "num_uses", "stamp")

    def __init__(self, is_main: bool, stamp: int) -> None:
        self.is_main, self.stamp, self.num_uses = is_main, stamp, 0

    def twin(self) -> Queued:
        twin = Queued(self.is_main, self.stamp)
        twin.num_uses = self.num_uses
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class S3FIFO(LeafPolicy[Queued]):
    """Simple, scalable: three FIFO queues."""

    uses_ghost_keys: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._small, self._main = LeafQueue(), LeafQueue()
        self._num_small = 0  # blocks in the small queue
        self._max_small = max(SMALL_SHARE * self._capacity, 1)

    def make_ghosts(self, max_ghosts: int) -> Ghosts:
        return Ghosts(max(int((1 - SMALL_SHARE) * self._capacity) // self._segment_blocks, 1))

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Queued:
        if memory is None:
            self._num_small += num_blocks
        return Queued(memory is not None, self.next_stamp())

    def used(self, piece: Queued) -> None:
        piece.num_uses = min(piece.num_uses + 1, MAX_USES)

    def memory(self, piece: Queued) -> object:
        return None if piece.is_main else True

    def lost(self, piece: Queued, num_blocks: int) -> None:
        if not piece.is_main:
            self._num_small -= num_blocks

    def entered(self, node: Handle, piece: Queued, depth: int) -> None:
        (self._main if piece.is_main else self._small).add(node, piece.stamp)

    def left(self, node: Handle, piece: Queued) -> None:
        (self._main if piece.is_main else self._small).discard(node)

    def victim(self) -> Handle | None:
        while True:
            main = self._main.first()
            if main is None or self._num_small >= self._max_small:
                node = self._small.first()
                if node is None and main is None:
                    return None
                if node is None:
                    node = main
            else:
                node = main
            assert node is not None
            piece = self._states[node].pieces[-1]
            if not self._moved(node, piece):
                return node

    def _moved(self, node: Handle, piece: Queued) -> bool:
        """Move the leaf to the young end of the main queue if it was used enough. Returns whether it moved."""
        if piece.num_uses <= (0 if piece.is_main else 1):
            return False
        self.left(node, piece)
        if piece.is_main:
            piece.num_uses -= 1
        else:
            self._num_small -= piece.num_blocks
            piece.is_main, piece.num_uses = True, 0
        piece.stamp = self.next_stamp()
        self._main.add(node, piece.stamp)
        return True
