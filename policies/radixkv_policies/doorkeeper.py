"""Doorkeeper: LRU that admits only as many newcomers as the cache can keep until they may return.

Most prompts never come back, and LRU lets each of them push out what would have: a cache that forgets sooner than its
blocks return finds nothing, however large it is (a loop a little longer than the cache is the classic case). So a part
of the newcomers is turned away as their use ends, and the rest stays long enough to be worth it.

- **How many.** At each eviction the age of the victim is compared with PATIENCE half-lives, which are learned from the
  gaps of reuse (``lrfu.HalfLife``). Younger: fewer newcomers are admitted; older: more. Their share moves by a
  factor of e^SPEED each time that as many blocks as the cache has were evicted, so it settles where what is kept lives
  just long enough. A cache that is large enough for its traffic turns nobody away, and is LRU.
- **Who.** Whatever was used before, or is remembered by a ghost, is admitted, and what is too short for a ghost. Of the
  others every n-th. First those that begin a conversation are turned away; only when 1 in 50 of them is let in, those
  that continue one too: they begin further down than SHARED_TOKENS.

Ours; the name is TinyLFU's (ACM ToS 2017), whose door turns away everything that is new, at any size; thinning them at
random until the rest lives long enough is BIP's idea (ISCA 2007), there with a fixed chance.

State a node: as all ``LeafPolicy``, three values a piece and an entry of a heap. Cost: O(log n).
"""

from __future__ import annotations

from itertools import count
from math import exp, log
from typing import Final

from radixkv_policies.leaves import LeafHeap, LeafPolicy, Piece
from radixkv_policies.lrfu import HalfLife
from radixkv_policies.policy import Clock, Handle

PATIENCE: Final = 0.5
"""Half-lives that a victim ought to have lived."""

SPEED: Final = 2.0

SHARED_TOKENS: Final = 1_024

FEWEST: Final = log(50)
"""As few newcomers of a kind are admitted at least, in terms of e."""


class Known(Piece):
    """``is_known``: used again, or remembered. ``ended_s``: when its last use ended, None in its first."""

    __slots__ = ("ended_s", "is_known", "stamp")

    def __init__(self, is_known: bool) -> None:
        self.is_known, self.stamp = is_known, 0
        self.ended_s: float | None = None


class Doorkeeper(LeafPolicy[Known]):
    """LRU with a door."""

    uses_ghost_keys = True

    def __init__(
        self, capacity: int, clock: Clock, seed: int, *, block_size: int = 16, segment_blocks: int = 1
    ) -> None:
        super().__init__(capacity, clock, seed, block_size=block_size, segment_blocks=segment_blocks)
        self._leaves = LeafHeap()
        self._stamps = count()
        self._half_life = HalfLife()
        self._shared_blocks = SHARED_TOKENS / self._block_tokens
        self._strictness = (
            0.0  # 0: all are admitted; up to FEWEST: fewer beginnings; up to twice that: all fewer
        )
        self._due = [0.0, 0.0]  # what is to be admitted by now, and wasn't: of beginnings, of others
        self._is_declining = False

    # --- the door

    def admit(self, node: Handle) -> bool:
        state = self._states[node]
        piece = state.pieces[-1]
        if piece.is_known or not piece.keys:
            return True
        continues = state.depth - piece.num_blocks > self._shared_blocks
        self._due[continues] += self.share(continues=continues)
        self._is_declining = self._due[continues] < 1.0
        if not self._is_declining:
            self._due[continues] -= 1.0
        return not self._is_declining

    def share(self, *, continues: bool) -> float:
        """The share of newcomers that is admitted, of those that continue a conversation or of the others."""
        return exp(min(FEWEST - self._strictness, 0.0) if continues else -min(self._strictness, FEWEST))

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        ended_s = self._states[node].pieces[-1].ended_s
        if not self._is_declining and ended_s is not None:
            is_young = self._clock() - ended_s < PATIENCE * self._half_life.seconds
            step = SPEED * num_blocks / self._capacity * (1.0 if is_young else -1.0)
            self._strictness = min(max(self._strictness + step, 0.0), 2 * FEWEST)
        super().trimmed(node, num_blocks)

    def removed(self, node: Handle) -> None:
        super().removed(node)
        self._is_declining = False

    # --- pieces

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Known:
        if isinstance(memory, float):
            self._half_life.saw(self._clock() - memory, num_blocks)
        return Known(memory is not None)

    def used(self, piece: Known) -> None:
        piece.is_known = True
        if piece.ended_s is not None:
            self._half_life.saw(self._clock() - piece.ended_s, piece.num_blocks)

    def ended(self, piece: Known) -> None:
        piece.ended_s, piece.stamp = self._clock(), next(self._stamps)

    def memory(self, piece: Known) -> object:
        return piece.ended_s

    # --- the order

    def entered(self, node: Handle, piece: Known, depth: int) -> None:
        self._leaves.add(node, piece.stamp)

    def left(self, node: Handle, piece: Known) -> None:
        self._leaves.discard(node)

    def victim(self) -> Handle | None:
        return self._leaves.first()
