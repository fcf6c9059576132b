"""Auto: runs ``lru``, ``lrfu`` and ``learned`` side by side, and evicts by the one whose shadow cache hits most.

No policy is the best for all traffic, so each tenant's traffic selects one. All candidates receive all events and keep
their orders. The selected one names the victims, so switching is free. There are only three candidates, because each
one adds a cost to every request; policies/README.md compares the other policies.

A *shadow* of each candidate holds the sampled segments that a cache under that candidate would hold. The ghost key
decides whether a segment is sampled, so all shadows sample the same segments, at each return. The capacity of a shadow
is the same share of the tenant's blocks. When a use ends, a candidate's score of a segment is read from its live piece,
because scores survive eviction. Shadows ignore that only leaves can be evicted.

The best candidate takes over if it leads among the samples that only one of the two hit, decayed with
``HALF_LIFE_S``. The lead must exceed ``MARGIN`` standard deviations, and ``MIN_GAIN`` of all hits, or of all misses if
those are fewer. Segments of a request return together or not at all, so consecutive hits of a request count as one
event. To replace a policy that LRU also beats, the candidate must beat LRU by ``MIN_GAIN`` too.

An adversary can feed one policy and then starve it. A *debt* bounds the cost: the number of hits by which the ``lru``
shadow leads the shadows of the selected policies, over the whole run. When the debt exceeds ``MAX_LOSS`` of all uses
(and ``FREE_LOSS`` hits), ``lru`` takes over until the debt is below ``RELEASE`` of that and another policy wins again.
So the loss against LRU, in shadow hits, is at most this limit plus the cost of one interval between two decisions.
The bound holds for shadows only: they ignore that only leaves can be evicted, and that a cache first has to fill after
a switch.

State: that of the three candidates, and ``MAX_SHADOW`` segments a shadow. Cost: that of the three, and a log entry for
each sampled segment. ``maintain`` updates the shadows.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from math import sqrt
from typing import ClassVar, Final, TypeVar

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.learned import Learned, Leaves
from radixkv_policies.leaves import LeafHeap
from radixkv_policies.lrfu import LRFU
from radixkv_policies.lru import LRU
from radixkv_policies.policy import GhostKeys, Handle, Policy, Shape

MAX_SHADOW: Final = 1_024
"""Segments that a shadow holds."""

HALF_LIFE_S: Final = 600.0
MARGIN: Final = 1.5
MIN_GAIN: Final = 0.01

MAX_LOSS: Final = 0.002
"""The shadows may lose at most this share of all uses against the ``lru`` shadow, over the whole run."""

FREE_LOSS: Final = 16
"""Sampled hits that may be lost in addition."""

RELEASE: Final = 0.9
"""Share of the allowed debt below which another policy may take over from ``lru``.

While ``lru`` is selected, the debt stays constant and only the limit grows with time. With 0.5 a tenant that lost
hits in its first minutes waited most of an hour.
"""

DECIDE_EVERY_S: Final = 5.0
RANK_EVERY_S: Final = 2.0
"""Interval at which the shadow of ``learned`` ranks again."""

_SAMPLE_BITS: Final = 20

_P = TypeVar("_P", bound=Policy)

_LRU: Final = 2
"""Index among the candidates."""

_Sample = tuple[int, float | None, int, float]
"""A segment at the end of a use: key, score of ``lrfu``, class of ``learned``, time. Without a score: the segment
moves to this class.
"""


@mypyc_attr(allow_interpreted_subclasses=True)
class Auto(Policy):
    """Evicts by the best of three policies, judged by shadow caches."""

    uses_ghost_keys: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._learned, self._lrfu, self._lru = self._made(Learned), self._made(LRFU), self._made(LRU)
        self._learned.yields = False  # Auto itself compares it with LRU
        self._candidates: tuple[Policy, ...] = (self._learned, self._lrfu, self._lru)
        self._in_charge = _LRU  # until another candidate leads
        segments = max(self._capacity // self._segment_blocks, 1)
        self._rate = min(1.0, MAX_SHADOW / segments)
        self._below = int(self._rate * 2**_SAMPLE_BITS)
        self._num_blocks = 0
        self._held = self._capacity  # blocks held at the last eviction
        self._log: deque[_Sample] = deque(maxlen=65_536)
        self.shadows = _Shadows(self._learned)
        self._decided_s = self._clock()

    def _made(self, candidate: type[_P]) -> _P:
        return candidate(
            self._capacity,
            self._clock,
            self._seed,
            block_size=self._block_size,
            segment_blocks=self._segment_blocks,
        )

    @property
    def in_charge(self) -> str:
        """The name of the candidate that evicts."""
        return type(self._candidates[self._in_charge]).__name__.lower()

    # --- a request

    def touched(self, nodes: Sequence[Handle]) -> None:
        self._lrfu.touched(nodes)
        self._learned.touched(nodes)

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        opened = self._learned.opened(nodes, num_blocks, hints)
        self._log_moved()
        return opened

    def noted(self, request: object, hints: object, node: Handle | None = None) -> None:
        self._learned.noted(request, hints, node)
        self._log_moved()

    def _log_moved(self) -> None:
        """Let the shadow of ``learned`` follow pieces that have another class now."""
        for piece in self._learned.moved:
            for key in piece.keys:
                if key % 2**_SAMPLE_BITS < self._below:
                    self._log.append((key, None, piece.group, piece.ended_s))

    def inserted(
        self,
        node: Handle,
        num_blocks: int,
        depth: int,
        hints: object = None,
        ghost_keys: GhostKeys = (),
        parent: Handle | None = None,
    ) -> None:
        self._num_blocks += num_blocks
        self._lrfu.inserted(node, num_blocks, depth, hints, ghost_keys, parent)
        self._learned.inserted(node, num_blocks, depth, hints, ghost_keys, parent)

    def extended(
        self, node: Handle, num_blocks: int, hints: object = None, ghost_keys: GhostKeys = ()
    ) -> None:
        self._num_blocks += num_blocks
        self._lrfu.extended(node, num_blocks, hints, ghost_keys)
        self._learned.extended(node, num_blocks, hints, ghost_keys)

    # --- changes of a node

    def split(self, upper: Handle, lower: Handle, num_blocks: int) -> None:
        for policy in self._candidates:
            policy.split(upper, lower, num_blocks)

    def leased(self, node: Handle) -> None:
        for policy in self._candidates:
            policy.leased(node)

    def unleased(self, node: Handle) -> None:
        for policy in self._candidates:
            policy.unleased(node)
        self._sample(node)

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        self._held = self._num_blocks
        self._num_blocks -= num_blocks
        self._lrfu.trimmed(node, num_blocks)
        self._learned.trimmed(node, num_blocks)

    def removed(self, node: Handle) -> None:
        self._num_blocks -= self._lrfu.num_blocks(node)
        for policy in self._candidates:
            policy.removed(node)

    # --- waiting requests

    def expect_requests(self, shape: Shape) -> None:
        self._lru.expect_requests(shape)

    def announced(
        self, request: Handle, node: Handle | None, num_blocks: int, missing: float, hints: object
    ) -> None:
        self._learned.announced(request, node, num_blocks, missing, hints)
        self._lrfu.announced(request, node, num_blocks, missing, hints)
        self._lru.announced(request, node, num_blocks, missing, hints)

    def withdrawn(self, request: Handle) -> None:
        for policy in self._candidates:
            policy.withdrawn(request)

    # --- the order

    def victim(self) -> Handle | None:
        return self._candidates[self._in_charge].victim()

    def most(self, node: Handle) -> int:
        return (self._lrfu if self._in_charge == 1 else self._learned).most(node)

    def __len__(self) -> int:
        return len(self._lru)

    # --- the choice

    def _sample(self, node: Handle) -> None:
        """Log the sampled segments of a node when its use ends."""
        below, log = self._below, self._log
        learned, lrfu = self._learned.pieces(node), self._lrfu.pieces(node)
        at = iter(lrfu)
        keys_left, score = 0, 0.0
        for piece in learned:
            for key in piece.keys:
                while not keys_left:
                    other = next(at)
                    keys_left, score = len(other.keys), other.score
                keys_left -= 1
                if key % 2**_SAMPLE_BITS < below:
                    log.append((key, score, piece.group, piece.ended_s))

    def maintain(self) -> None:
        self._learned.maintain()
        now_s = self._clock()
        if now_s - self._decided_s < DECIDE_EVERY_S:
            return
        kept = 0.5 ** ((now_s - self._decided_s) / HALF_LIFE_S)
        self._decided_s = now_s
        self.shadows.replay(self._log, max(round(self._held / self._segment_blocks * self._rate), 1))
        self._in_charge = self.shadows.decide(self._in_charge, kept)


class _Shadows:
    """The sampled segments that each candidate's cache would hold, and the hits that only one candidate had."""

    def __init__(self, learned: Learned) -> None:
        self._learned = learned
        self._by_rank, self._by_score = Leaves(learned.rank), LeafHeap()
        self._ranked_s = 0.0
        self._by_age: OrderedDict[Handle, None] = OrderedDict()
        self._num_hits, self._num_lately = [0.0, 0.0, 0.0], 0.0
        self._only = [[0.0] * 3 for _ in range(3)]  # [one][other]: hits of one that the other missed
        self._spread = [[0.0] * 3 for _ in range(3)]  # their variance; a request's hits are one event
        self._run: tuple[float, tuple[bool, ...], int] = (0.0, (), 0)  # time, shadows that hit, hits
        self._lately = [0, 0, 0]  # hits since the last decision
        self.num_uses, self.debt = 0, 0

    def replay(self, log: deque[_Sample], capacity: int) -> None:
        """Apply the log in order."""
        for _ in range(len(log)):
            key, score, group, ended_s = log.popleft()
            if score is None:
                if key in self._by_rank:
                    self._by_rank.discard(key)
                    self._by_rank.add(key, group, ended_s, max(ended_s, self._ranked_s))
                continue
            if ended_s - self._ranked_s >= RANK_EVERY_S:
                self._by_rank.rank_anew(ended_s, self._learned.rank)
                self._ranked_s = ended_s
            hits = (key in self._by_rank, key in self._by_score, key in self._by_age)
            self.num_uses += 1
            self._num_lately += 1
            if any(hits):
                self._count(ended_s, hits)
            self._enter(key, score, group, ended_s, hits)
            while len(self._by_rank) > capacity:
                self._by_rank.discard(self._by_rank.first())
            while len(self._by_score) > capacity:
                self._by_score.discard(self._by_score.first())
            while len(self._by_age) > capacity:
                self._by_age.popitem(last=False)

    def _enter(self, key: int, score: float, group: int, ended_s: float, hits: tuple[bool, ...]) -> None:
        if hits[0]:
            self._by_rank.discard(key)
        if hits[1]:
            self._by_score.discard(key)
        self._by_rank.add(key, group, ended_s, ended_s)
        self._by_score.add(key, score)
        self._by_age[key] = None
        self._by_age.move_to_end(key)

    def _count(self, ended_s: float, hits: tuple[bool, ...]) -> None:
        last_s, last, num = self._run
        num = num + 1 if (last_s, last) == (ended_s, hits) else 1
        self._run = ended_s, hits, num
        for one in range(3):
            if hits[one]:
                self._num_hits[one] += 1
                self._lately[one] += 1
                for other in range(3):
                    if not hits[other]:
                        self._only[one][other] += 1
                        self._spread[one][other] += 2 * num - 1  # adds up to num² over the run

    def _best(self, current: int) -> int:
        """The candidate with the most recent hits. A new candidate must also lead ``lru`` by MIN_GAIN."""
        safe = self._num_hits[_LRU]
        ahead = MIN_GAIN * min(safe, self._num_lately - safe)
        worth = [hits - ahead * (one not in (_LRU, current)) for one, hits in enumerate(self._num_hits)]
        return max(range(3), key=lambda one: (worth[one], one == current, one == _LRU))

    @property
    def allowed(self) -> float:
        """The debt above which ``lru`` takes over."""
        return MAX_LOSS * self.num_uses + FREE_LOSS

    def decide(self, current: int, kept: float) -> int:
        """Return the index of the candidate that should evict."""
        self.debt += self._lately[_LRU] - self._lately[current]
        best = self._best(current)
        ahead, behind = self._only[best][current], self._only[current][best]
        fewer = min(self._num_hits[current], self._num_lately - self._num_hits[current])
        spread = sqrt(self._spread[best][current] + self._spread[current][best])
        wins = ahead - behind > MARGIN * spread and ahead - behind > MIN_GAIN * fewer
        self._num_hits = [hits * kept for hits in self._num_hits]
        self._num_lately *= kept
        self._only = [[hits * kept for hits in row] for row in self._only]
        self._spread = [[each * kept for each in row] for row in self._spread]
        self._lately = [0, 0, 0]
        if self.debt > self.allowed * (RELEASE if current == _LRU else 1.0):
            return _LRU
        return best if wins else current
