"""Doorkeeper: LRU that admits only as many new blocks as the cache can keep until they may return.

It is for caches that are too small for their traffic: loops, and prompts that mostly never return.

Under LRU, prompts that never return evict blocks that would return. If blocks are evicted before they return, LRU has
no hits at all. The typical case is a loop slightly longer than the cache. So this policy rejects a part of the new
blocks when their use ends. The rest stay long enough to be useful.

- **How many.** At each eviction the age of the victim is compared with PATIENCE half-lives, learned from the gaps of
  reuse (``lrfu.HalfLife``). If the victim is younger, fewer new blocks are admitted. If it is older, more are. The
  share changes by a factor of e^SPEED for each cache capacity of evicted blocks. It settles where kept blocks live
  just long enough. A cache that is large enough for its traffic rejects nothing, and is LRU.
- **Whether at all.** LRU evicts a block after as many new blocks as the cache holds. So the policy can count its wins
  (hits on blocks that LRU would have evicted) and losses (rejected blocks that LRU would have hit). While the losses
  are clearly greater, it admits everything.
- **Which.** Blocks are admitted if they were used before, if a ghost remembers them, or if they are too short for a
  ghost. Of the others every n-th is. Blocks that begin a conversation are rejected first. When only 1 in 50 of them
  is admitted, blocks that continue one (they begin after more than SHARED_TOKENS) are rejected too.

Our own policy. The name is from TinyLFU (ACM ToS 2017), which rejects every new block, at any size. Random admission,
so that the admitted blocks live long enough, is the idea of BIP (ISCA 2007), where the chance is fixed.

State a node: that of every ``LeafPolicy``, three values a piece and an entry of a queue. Cost: O(log n).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, inf, log
from typing import ClassVar, Final

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.leaves import LeafPolicy, LeafQueue, Piece
from radixkv_policies.lrfu import HalfLife
from radixkv_policies.policy import Handle

PATIENCE: Final = 0.5
"""Half-lives that a victim should have lived."""

SPEED: Final = 2.0

TOLERANCE: Final = 0.03
"""Losses may exceed wins by this share of the cache. Above it everything is admitted."""

FADES: Final = 4.0
"""Wins and losses decay by a factor of e with this many cache capacities of new blocks."""

SHARED_TOKENS: Final = 1_024

FEWEST: Final = log(50)
"""Logarithm of the lowest admission rate, 1 in 50, for each kind of new blocks."""


@mypyc_attr(acyclic=True)
class Known(Piece):
    """``is_known``: used again, or known to a ghost. ``ended_s``: end of its last use, None during the first use."""

    __slots__ = ("ended_s", "is_known", "stamp")

    def __init__(self, is_known: bool) -> None:
        self.is_known, self.stamp = is_known, 0
        self.ended_s: float | None = None

    def twin(self) -> Known:
        twin = Known(self.is_known)
        twin.ended_s, twin.stamp = self.ended_s, self.stamp
        return twin


class Record:
    """Wins and losses of admission against LRU. O(1), amortised; at most 65 numbers.

    ``won``: hit blocks that LRU would have evicted, minus rejected blocks that LRU would have hit.
    """

    __slots__ = ("_capacity", "_forgotten_s", "_made_at", "_num_made", "won")

    def __init__(self, capacity: int) -> None:
        self._capacity, self.won = capacity, 0.0
        self._num_made, self._forgotten_s = 0, -inf
        self._made_at: deque[tuple[int, float]] = deque()

    def made(self, num_blocks: int, now_s: float) -> None:
        """Count computed blocks."""
        self._num_made += num_blocks
        self.won *= 1.0 - min(num_blocks / (FADES * self._capacity), 1.0)
        made_at = self._made_at
        if not made_at or self._num_made - made_at[-1][0] > self._capacity / 64:
            made_at.append((self._num_made, now_s))
        while made_at and made_at[0][0] <= self._num_made - self._capacity:
            self._forgotten_s = made_at.popleft()[1]

    def is_forgotten(self, ended_s: float) -> bool:
        """Whether LRU would have evicted a block with this last use: a cache's capacity of new blocks came since."""
        return ended_s < self._forgotten_s

    @property
    def is_good(self) -> bool:
        """Whether the losses don't clearly exceed the wins."""
        return self.won >= -TOLERANCE * self._capacity


@mypyc_attr(allow_interpreted_subclasses=True)
class Doorkeeper(LeafPolicy[Known]):
    """LRU with admission."""

    uses_ghost_keys: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._leaves = LeafQueue()
        self._half_life = HalfLife()
        self._shared_blocks = SHARED_TOKENS / self._block_tokens
        self._strictness = 0.0  # up to FEWEST it rejects beginnings, up to 2 × FEWEST others too
        self._due = [0.0, 0.0]  # pieces to admit, not yet admitted: beginnings, others
        self._is_declining = False
        self._now_s = self._clock()  # read once for all pieces of a call
        self.record = Record(self._capacity)

    # --- admission

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
        """The share of new blocks that is admitted: of those that continue a conversation, or of the others."""
        return exp(min(FEWEST - self._strictness, 0.0) if continues else -min(self._strictness, FEWEST))

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        ended_s = self._states[node].pieces[-1].ended_s
        if not self._is_declining and ended_s is not None:
            is_young = self._clock() - ended_s < PATIENCE * self._half_life.seconds
            step = SPEED * num_blocks / self._capacity * (1.0 if is_young and self.record.is_good else -1.0)
            self._strictness = min(max(self._strictness + step, 0.0), 2 * FEWEST)
        super().trimmed(node, num_blocks)

    def removed(self, node: Handle) -> None:
        super().removed(node)
        self._is_declining = False

    # --- pieces

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Known:
        now_s = self._clock()
        if isinstance(memory, tuple):
            ended_s, was_declined = memory
            self._half_life.saw(now_s - ended_s, num_blocks)
            if was_declined and not self.record.is_forgotten(ended_s):
                self.record.won -= num_blocks
        self.record.made(num_blocks, now_s)
        return Known(memory is not None)

    def touched(self, nodes: Sequence[Handle]) -> None:
        self._now_s = self._clock()
        super().touched(nodes)

    def unleased(self, node: Handle) -> None:
        self._now_s = self._clock()
        super().unleased(node)

    def used(self, piece: Known) -> None:
        piece.is_known = True
        if piece.ended_s is not None:
            self._half_life.saw(self._now_s - piece.ended_s, piece.num_blocks)
            if self.record.is_forgotten(piece.ended_s):
                self.record.won += piece.num_blocks

    def ended(self, piece: Known) -> None:
        piece.ended_s, piece.stamp = self._now_s, self.next_stamp()

    def memory(self, piece: Known) -> object:
        return piece.ended_s, self._is_declining

    # --- the order

    def entered(self, node: Handle, piece: Known, depth: int) -> None:
        self._leaves.add(node, piece.stamp)

    def left(self, node: Handle, piece: Known) -> None:
        self._leaves.discard(node)

    def victim(self) -> Handle | None:
        return self._leaves.first()
