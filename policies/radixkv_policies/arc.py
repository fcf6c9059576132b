"""ARC: two LRU lists, for blocks used once and for blocks used again. Early evictions adapt the sizes of the lists.

Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). ``T1`` holds blocks that were used
once, ``T2`` the rest. A ghost remembers the list from which a segment was evicted. When a ghost of T1 returns, T1's
target size grows by ``max(1, |B2| / |B1|)`` a block; when one of T2 returns, it shrinks by ``max(1, |B1| / |B2|)``. The
victim is the least recently used leaf of T1 if T1 exceeds its target, else of T2. If that list has no evictable leaf,
the victim is from the other one. T1 and its ghosts are at most the capacity, both lists and all ghosts at most twice.

Differences from the paper: the unit is a run of blocks of a tree. Only leaves are evicted. Sizes are in blocks, leased
ones included; a ghost is a segment, and counts as its blocks. A cache makes room before it tells what comes, so the
target adapts after that eviction, not before it. So there is no special case for a T1 that has just its target when a
ghost of T2 returns. Blocks of one request have the step of the first of them.

State a node: two numbers a piece, an entry of a queue. Cost: O(log n); ghosts as in ``leaves``.
"""

from __future__ import annotations

from typing import ClassVar

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import GhostLine, Ghosts, LeafPolicy, LeafQueue, Piece
from radixkv_policies.policy import GhostKeys, Handle


@mypyc_attr(acyclic=True)
class Aged(Piece):
    """``is_frequent``: used again (T2). ``stamp``: order of the end of its last use."""

    __slots__ = ("is_frequent", "stamp")

    def __init__(self, is_frequent: bool) -> None:
        self.is_frequent, self.stamp = is_frequent, 0

    def twin(self) -> Aged:
        twin = Aged(self.is_frequent)
        twin.stamp = self.stamp
        return twin


class TwoGhosts(Ghosts):
    """Ghosts of T1 (memory False) and of T2 (memory True)."""

    __slots__ = ("frequent",)

    def __init__(self, max_ghosts: int) -> None:
        super().__init__(max_ghosts)
        self.frequent = GhostLine(max_ghosts)

    def __len__(self) -> int:
        return self.line.num + self.frequent.num

    def line_of(self, memory: object) -> GhostLine:
        return self.frequent if memory else self.line

    def shrink(self, once: int, both: int) -> None:
        """Forget the oldest: at most ``once`` ghosts of T1 stay, and at most ``both`` in all."""
        self.line.shrink(self._runs, max(once, 0))
        self.frequent.shrink(self._runs, max(both - self.line.num, 0))


@mypyc_attr(allow_interpreted_subclasses=True)
class ARC(LeafPolicy[Aged]):
    """Adaptive replacement."""

    uses_ghost_keys: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._recent, self._frequent = LeafQueue(), LeafQueue()
        self._num_recent = self._num_blocks = 0  # blocks of T1, and of both lists
        self._target = 0.0

    def make_ghosts(self, max_ghosts: int) -> Ghosts:
        self._both = TwoGhosts(max(2 * self._capacity // self._segment_blocks, 1))
        return self._both

    def inserted(
        self,
        node: Handle,
        num_blocks: int,
        depth: int,
        hints: object = None,
        ghost_keys: GhostKeys = (),
        parent: Handle | None = None,
    ) -> None:
        super().inserted(node, num_blocks, depth, hints, ghost_keys, parent)
        self._keep_bounds()

    def extended(
        self, node: Handle, num_blocks: int, hints: object = None, ghost_keys: GhostKeys = ()
    ) -> None:
        super().extended(node, num_blocks, hints, ghost_keys)
        self._keep_bounds()

    def _keep_bounds(self) -> None:
        """Forget ghosts, now that there are more blocks."""
        size, capacity = self._segment_blocks, self._capacity
        self._both.shrink((capacity - self._num_recent) // size, (2 * capacity - self._num_blocks) // size)

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Aged:
        self._num_blocks += num_blocks
        if memory is None:
            self._num_recent += num_blocks
            return Aged(False)
        recent, frequent = self._both.line.num, self._both.frequent.num  # without the one that returned
        if memory:
            self._target -= num_blocks * max(1.0, recent / (frequent + 1))
        else:
            self._target += num_blocks * max(1.0, frequent / (recent + 1))
        self._target = min(max(self._target, 0.0), float(self._capacity))
        return Aged(True)

    def used(self, piece: Aged) -> None:
        if not piece.is_frequent:
            piece.is_frequent = True
            self._num_recent -= piece.num_blocks

    def ended(self, piece: Aged) -> None:
        piece.stamp = self.next_stamp()

    def memory(self, piece: Aged) -> object:
        return piece.is_frequent

    def lost(self, piece: Aged, num_blocks: int) -> None:
        self._num_blocks -= num_blocks
        if not piece.is_frequent:
            self._num_recent -= num_blocks

    def entered(self, node: Handle, piece: Aged, depth: int) -> None:
        (self._frequent if piece.is_frequent else self._recent).add(node, piece.stamp)

    def left(self, node: Handle, piece: Aged) -> None:
        (self._frequent if piece.is_frequent else self._recent).discard(node)

    def victim(self) -> Handle | None:
        first, second = self._recent, self._frequent
        if self._num_recent <= self._target:
            first, second = second, first
        node = first.first()
        return second.first() if node is None else node
