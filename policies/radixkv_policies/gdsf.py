"""GDSF: ranks a block by uses × saved prefill seconds, plus an inflation that ages unused blocks.

Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching policy" (1998); for prefix
caches, Jin et al., "RAGCache" (2024). The rank of a leaf is ``inflation + uses × cost``. The inflation is the rank of
the last victim. The cost is that of the leaf's last block, because blocks have equal size: a deep block takes longer to
compute, since its tokens attend to all tokens before them.

Differences from the papers: uses survive eviction, with the ghost of the segment, and are counted when a use ends.

State a node: four numbers a piece, an entry of a heap. Cost: O(log n); ghosts as in ``leaves``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import LeafHeap, LeafPolicy, Piece
from radixkv_policies.policy import Handle


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """A model's prefill time: ``seconds = per_token + per_token_and_position × position`` for each token."""

    per_token_s: float
    per_token_and_position_s: float

    def __reduce__(self) -> tuple[type[PrefillProfile], tuple[float, float]]:
        return PrefillProfile, (self.per_token_s, self.per_token_and_position_s)


LLAMA_8B: Final = PrefillProfile(per_token_s=16.06e9 / 4e14, per_token_and_position_s=4 * 32 * 4_096 / 4e14)
"""A dense model of 8 billion parameters, with 32 layers of width 4,096, at 400 TFLOP/s. A token takes 2 FLOP a
parameter, and 4 × layers × width for each position that it attends to. Only the ratio affects the order.
"""


@mypyc_attr(acyclic=True)
class Costed(Piece):
    """``num_uses``: total. ``inflation``: at the end of its last use. ``rank``: of the leaf that ends with it."""

    __slots__ = ("inflation", "num_uses", "rank", "stamp")

    def __init__(self, num_uses: int) -> None:
        self.num_uses, self.inflation, self.rank, self.stamp = num_uses, 0.0, 0.0, 0

    def twin(self) -> Costed:
        twin = Costed(self.num_uses)
        twin.inflation, twin.rank, twin.stamp = self.inflation, self.rank, self.stamp
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class GDSF(LeafPolicy[Costed]):
    """Greedy dual size frequency, with prefill seconds as the cost. A subclass may set another ``profile``."""

    profile: ClassVar[PrefillProfile] = LLAMA_8B
    uses_ghost_keys: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._leaves = LeafHeap()
        self._inflation = 0.0
        profile = type(self).profile
        self._per_block = self._block_tokens * profile.per_token_and_position_s / profile.per_token_s

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Costed:
        return Costed(memory + 1 if isinstance(memory, int) else 1)

    def used(self, piece: Costed) -> None:
        piece.num_uses += 1

    def ended(self, piece: Costed) -> None:
        piece.inflation, piece.stamp = self._inflation, self.next_stamp()

    def memory(self, piece: Costed) -> object:
        return piece.num_uses

    def entered(self, node: Handle, piece: Costed, depth: int) -> None:
        self._leaves.add(node, self._ranked(piece, depth), piece.stamp)

    def left(self, node: Handle, piece: Costed) -> None:
        self._leaves.discard(node)

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        state = self._states[node]
        piece = state.pieces[-1]
        if piece.rank > self._inflation:
            self._inflation = piece.rank
        super().trimmed(node, num_blocks)
        if num_blocks and state.pieces[-1] is piece and piece.num_blocks:
            self._leaves.lower(node, self._ranked(piece, state.depth))

    def _ranked(self, piece: Costed, depth: int) -> float:
        piece.rank = rank = piece.inflation + piece.num_uses * (1 + self._per_block * depth)
        return rank

    def victim(self) -> Handle | None:
        return self._leaves.first()
