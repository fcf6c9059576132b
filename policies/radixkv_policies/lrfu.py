"""LRFU: decayed frequency. Each use counts 1 when it ends and half as much after a half-life. Evicts the lowest sum.

Lee, Choi, Kim, Noh, Min, Cho and Kim, "LRFU: a spectrum of policies that subsumes the least recently used and least
frequently used policies" (IEEE Transactions on Computers, 2001). Three differences from the paper:

- A sum survives eviction. It stays with the ghost of the segment, and continues when the segment is computed again.
  Otherwise a new turn of a busy conversation would start at zero.
- The half-life is learned: ``HALF_LIFE_PER_GAP`` times the ``GAP_QUANTILE`` of the gaps after which blocks were used
  again, ghosts included. Stochastic steps on its logarithm follow the quantile.
- Time is counted in half-lives as they pass (``half_lives``). When the half-life changes, sums decay at another rate
  from then on and stay comparable, so no leaf is ranked again.

With ``C`` the sum at virtual time ``t``, ``log2(C) + t`` doesn't change until the next use. It is the key of the
order.

State a node: three numbers a piece, an entry of a heap. Cost: O(log n); ghosts as in ``leaves``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log
from typing import ClassVar, Final

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import LeafPolicy, LeafQueue, Piece
from radixkv_policies.policy import Handle

FIRST_GAP_S: Final = 120.0
"""The gap that is assumed before the first one."""

GAP_QUANTILE: Final = 0.75

HALF_LIFE_PER_GAP: Final = 1.6

MAX_WEIGHT: Final = 4.0
"""Maximum weight of a gap, relative to a gap of average size."""


MIN_SPEED: Final = 0.003
"""Minimum length of a step of average weight."""

LN_2: Final = log(2.0)


class HalfLife:
    """The half-life, from the gaps after which blocks return: a stochastic quantile of their logarithm."""

    __slots__ = ("_gap_s", "_log_gap", "_num_blocks", "_num_gaps", "seconds")

    def __init__(self) -> None:
        self._gap_s, self._log_gap = FIRST_GAP_S, log(FIRST_GAP_S)
        self._num_gaps, self._num_blocks = 0, 0
        self.seconds = HALF_LIFE_PER_GAP * FIRST_GAP_S

    def saw(self, gap_s: float, num_blocks: int) -> None:
        """Record ``num_blocks`` that were used ``gap_s`` after their last use. A gap weighs by its blocks."""
        self._num_gaps += 1
        self._num_blocks += num_blocks
        weight, speed = num_blocks * self._num_gaps / self._num_blocks, 0.1 / (1 + self._num_gaps / 128)
        step = (weight if weight < MAX_WEIGHT else MAX_WEIGHT) * (speed if speed > MIN_SPEED else MIN_SPEED)
        self._log_gap += step * (GAP_QUANTILE if gap_s + 1e-3 > self._gap_s else GAP_QUANTILE - 1)
        self._gap_s = exp(self._log_gap)
        self.seconds = HALF_LIFE_PER_GAP * self._gap_s


@mypyc_attr(acyclic=True)
class Decayed(Piece):
    """``score``: log2 of the decayed sum plus the virtual time. ``num_uses``: current uses, not counted yet."""

    __slots__ = ("ended_s", "num_uses", "score", "stamp")

    def __init__(self, score: float, ended_s: float) -> None:
        self.score, self.ended_s = score, ended_s
        self.num_uses, self.stamp = 1, 0

    def twin(self) -> Decayed:
        twin = Decayed(self.score, self.ended_s)
        twin.num_uses, twin.stamp = self.num_uses, self.stamp
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class LRFU(LeafPolicy[Decayed]):
    """Least recently and frequently used, with a learned half-life and ghosts."""

    uses_ghost_keys: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._leaves = LeafQueue()
        self._half_life = HalfLife()
        self._virtual, self._virtual_at = 0.0, self._clock()

    def half_lives(self) -> float:
        """The virtual time in half-lives. Each interval counts with the half-life of its time."""
        now_s = self._clock()
        if now_s != self._virtual_at:
            self._virtual += (now_s - self._virtual_at) / self._half_life.seconds
            self._virtual_at = now_s
        return self._virtual

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Decayed:
        if not isinstance(memory, tuple):
            return Decayed(-inf, 0.0)
        self.half_lives()
        self._saw(memory[1], num_blocks)
        return Decayed(*memory)

    def touched(self, nodes: Sequence[Handle]) -> None:
        self.half_lives()  # read the clock once for all nodes
        super().touched(nodes)

    def unleased(self, node: Handle) -> None:
        self.half_lives()
        super().unleased(node)

    def used(self, piece: Decayed) -> None:
        if not piece.num_uses:
            self._saw(piece.ended_s, piece.num_blocks)
        piece.num_uses += 1

    def ended(self, piece: Decayed) -> None:
        now = self._virtual
        if piece.num_uses == 1 and piece.score == -inf:  # most pieces are new, and their sum is 1
            piece.score = now
        else:
            # Compiled, exp and log are C functions, while ``2.0 **`` and ``log2`` call Python's.
            before = exp((piece.score - now) * LN_2)
            piece.score = now + log(piece.num_uses + before) / LN_2
        piece.num_uses, piece.ended_s, piece.stamp = 0, self._virtual_at, self.next_stamp()

    def memory(self, piece: Decayed) -> object:
        return piece.score, piece.ended_s

    def entered(self, node: Handle, piece: Decayed, depth: int) -> None:
        self._leaves.add(node, piece.score, piece.stamp, self._virtual)

    def left(self, node: Handle, piece: Decayed) -> None:
        self._leaves.discard(node)

    def announced(
        self, request: Handle, node: Handle | None, num_blocks: int, missing: float, hints: object
    ) -> None:
        self.wait(request, node, num_blocks, missing)

    def withdrawn(self, request: Handle) -> None:
        self.wait_no_longer(request)

    def victim(self) -> Handle | None:
        return self.pick(self._leaves.first())

    def _saw(self, ended_s: float, num_blocks: int) -> None:
        """Record a use at the time read last."""
        self._half_life.saw(self._virtual_at - ended_s, num_blocks)
