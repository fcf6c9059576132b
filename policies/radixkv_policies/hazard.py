"""HazardModel: learns online, by class, when blocks return. It computes the rank of a class at an age.

Time since the end of a use is cut into ``NUM_BINS`` log-spaced bins: ``[0, 0.5 s)``, then ``0.5 × 1.45^i``. The
*hazard* of a bin is the probability that blocks return in it if they have not returned before. Blocks with equal
features are a class.

    counts[class, bin]    at risk, returned       decayed with HALF_LIFE_S
    logit hazard          a[bin] + Σ_k ψ_k(bin) · (w_k · f)       ψ = 1, z, z² − 1 of the log age, up to 315 s
    hazard[class, bin]    (returned + κ × modelled) ÷ (at risk + κ)

The model connects the classes, so a rare class uses the evidence of similar ones. Where a class has many counts, they
correct the model. Outcomes are counted bin by bin: when a bin has passed for a use, its returns and its survivors are
counted together. Counting returns at once and survivors later would overrate young blocks.

``rank[class, bin]`` is a Gittins index: expected hits per block-second from that age on, for the best time to wait,
``max over H of P(return in [age, H)) ÷ E[time until the return or H]``. Before there is evidence, the hazard falls
with age, so the order is that of LRU.

A learned model can be worse than none, for example after a change of mix, or at ages without evidence. So the same log
also simulates a cache that ranks by the model, and an LRU. ``Standing`` compares their hits.

The owner's thread only appends to ``log``. ``update`` does the rest and may run in another thread: it replaces
``rank`` as a whole. State: ``MAX_ROWS`` uses that wait for their bins, and 2 × MAX_CLASSES × NUM_BINS counts: a few MB.
Cost of ``update``: O(rows); with ``fit`` also a Newton step, O(bins × classes × features²), about 20 ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import sqrt
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

NUM_BINS: Final = 25
MAX_ROWS: Final = 32_768
MAX_CLASSES: Final = 4_096
NUM_FEATURES: Final = 30
"""Features of a class, about −1 … 1."""

HALF_LIFE_S: Final = 3_600.0

EDGES_S: Final[Floats] = np.concatenate(([0.0], 0.5 * 1.45 ** np.arange(NUM_BINS)))
"""Bin b is ``[EDGES_S[b], EDGES_S[b + 1])``."""

CLASS_WEIGHT: Final = 3_000.0
"""κ: uses at risk for which a class's own counts weigh as much as the model."""

RIDGE: Final = 400.0
"""How strongly weights are held to 0, in uses: many, for the blocks of a request return together or not at all, so they
tell less than so many that are independent.
"""

LEVEL_RIDGE: Final = 0.1
"""How strongly the level of a bin is held to the prior's."""

LEVEL_TIE: Final = 10.0
"""How strongly it is held as far from the prior's as the levels of the bins beside it: an age that nothing has reached
yet is judged by those before it. When each bin was held to the prior alone, what had waited long ranked above what
comes, where little returned: a cache that was full for the first time gave up what was new.
"""

OLDEST_Z: Final = 0.9
"""From this log age on, 315 s, features tell the same of each bin: of older ages there is too little evidence for more,
and extrapolated from younger ones they ranked below LRU where a large cache had just begun to evict.
"""

LATELY_S: Final = 600.0
"""Half-life of what is known of who hits more."""

BEHIND: Final = 1.0
MAX_LOSS: Final = 0.002
"""What was learned no longer leads once it lies so many standard deviations and that share of all uses behind LRU."""

AHEAD: Final = 1.5
"""It leads again once it lies more than so many ahead. One request, however long, is no more than one deviation."""

MAX_STEP: Final = 2.0
"""How far a level or weight goes in a fit, in logits. A step that is longer is shortened as a whole: cut one by one,
levels and weights would go another way, and not come back after a sudden change.
"""

Entry = tuple[int, float, int, float]
"""A use ended: (its number, when, class ≥ 0, weight > 0). It returned: (its number, when, −1, weight). It is of another
class from now on: (its number, when, class, 0).
"""


class HazardModel:
    """See the module. ``rank``: float64 ``[MAX_CLASSES, NUM_BINS + 1]``, the last for older ages; ``by_age``: the same
    before anything is learned. ``at_risk``, ``returned``: the counts, float64 ``[MAX_CLASSES, NUM_BINS]``.
    """

    def __init__(self) -> None:
        self.log: deque[Entry] = deque(maxlen=4 * MAX_ROWS)
        self._features = np.zeros((MAX_CLASSES, NUM_FEATURES))
        self.num_classes = 0
        self._num_described = self._num_ranked = 0
        self.at_risk = np.zeros((MAX_CLASSES, NUM_BINS))
        self.returned = np.zeros((MAX_CLASSES, NUM_BINS))
        self.standing = Standing()
        self._rows = _Rows(self.standing)
        self._counted_s = 0.0
        self._basis = _basis()
        self._prior, self._ties = _prior_logits(), _ties()
        self._level, self._weights = self._prior.copy(), np.zeros((NUM_FEATURES, 3))
        self.rank = self.by_age = np.tile(_rank(_sigmoid(_prior_logits())[None]), (MAX_CLASSES, 1))

    def add_class(self) -> int:
        """A new class; ``num_classes < MAX_CLASSES``. It ranks as all do together until the next ``update``."""
        self.num_classes += 1
        return self.num_classes - 1

    def describe(self, group: int, features: Sequence[float]) -> None:
        """The features of a class, told in the order of their numbers. In the thread of ``update``, and before it."""
        self._features[group] = features
        self._num_described = group + 1

    def update(self, now_s: float, *, fit: bool, room: float = np.inf) -> None:
        """Count what is known by now; with ``fit``, learn from the counts and rank anew, otherwise rank new classes.

        room: how much, in the unit of weights, the cache holds now of what waits.
        """
        self._rows.room = room
        for _ in range(len(self.log)):
            self._rows.take(self.log.popleft())
        self._rows.drop(now_s, self.rank)
        self.standing.decide(now_s)
        self._rows.count(now_s, self.at_risk, self.returned)
        if fit:
            kept = 0.5 ** ((now_s - self._counted_s) / HALF_LIFE_S)
            self._counted_s = now_s
            self.at_risk *= kept
            self.returned *= kept
            num = self._num_described
            self._step(self._features[:num], self.at_risk[:num], self.returned[:num])
        if fit or self._num_described > self._num_ranked:
            self._rank_classes(0 if fit else self._num_ranked)

    def _rank_classes(self, start: int) -> None:
        """Rank the classes from ``start`` on by their own evidence, and later classes by that of all classes."""
        these, rank = slice(start, self._num_described), self.rank.copy()
        modelled = self._modelled(self._features[these])
        rank[these] = _rank(_corrected(modelled, self.at_risk[these], self.returned[these]))
        of_all = self.at_risk.sum(axis=0, keepdims=True), self.returned.sum(axis=0, keepdims=True)
        rank[self._num_described :] = _rank(_corrected(_sigmoid(self._prior), *of_all))
        self.rank, self._num_ranked = rank, self._num_described

    def _modelled(self, features: Floats) -> Floats:
        """The hazard by the model alone, ``[classes, NUM_BINS]``."""
        return _sigmoid(self._level + features @ self._weights @ self._basis.T)

    def _step(self, features: Floats, at_risk: Floats, returned: Floats) -> None:
        """Levels and weights, a step closer to the likeliest. The curvature is summed up bin by bin."""
        basis, flat = self._basis, 3 * NUM_FEATURES
        hazard = self._modelled(features)
        excess, weight = returned - at_risk * hazard, at_risk * hazard * (1 - hazard)
        curve = np.zeros((NUM_BINS + flat, NUM_BINS + flat))
        for b in range(NUM_BINS):
            tied = np.outer(basis[b], basis[b])
            spread = _product(features, features * weight[:, b, None])
            curve[NUM_BINS:, NUM_BINS:] += np.kron(spread, tied)
        curve[NUM_BINS:, :NUM_BINS] = (_product(features, weight)[:, None, :] * basis.T).reshape(
            flat, NUM_BINS
        )
        curve[:NUM_BINS, NUM_BINS:] = curve[NUM_BINS:, :NUM_BINS].T
        curve[np.diag_indices(NUM_BINS + flat)] += np.append(weight.sum(axis=0), np.full(flat, RIDGE))
        curve[:NUM_BINS, :NUM_BINS] += self._ties
        slope = np.append(
            excess.sum(axis=0) - (self._ties * (self._level - self._prior)).sum(axis=1),
            _product(features, excess) @ basis - RIDGE * self._weights,
        )
        step = _solved(curve, slope)
        step *= MAX_STEP / max(float(np.abs(step).max()), MAX_STEP)
        self._level = self._level + step[:NUM_BINS]
        self._weights = self._weights + step[NUM_BINS:].reshape(NUM_FEATURES, 3)


class Standing:
    """Compares the recent hits of the model and of an LRU. ``leads``: the model leads.

    Blocks that returned at the same time count as one event.
    """

    def __init__(self) -> None:
        self.leads = True
        self._ahead = self._variance = self._num_uses = 0.0
        self._at_s = self._net = self._decided_s = 0.0

    def used(self, weight: float) -> None:
        """A use ended."""
        self._num_uses += weight

    def returned(self, at_s: float, ours: float, lrus: float) -> None:
        """What of it the two would have held."""
        if ours == lrus:
            return
        before = self._net if at_s == self._at_s else 0.0
        self._at_s, self._net = at_s, before + ours - lrus
        self._ahead += ours - lrus
        self._variance += self._net**2 - before**2

    def decide(self, now_s: float) -> None:
        """Who leads from now on."""
        kept = 0.5 ** ((now_s - self._decided_s) / LATELY_S)
        self._decided_s = now_s
        self._ahead *= kept
        self._variance *= kept
        self._num_uses *= kept
        spread = sqrt(max(self._variance, 0.0))
        if self._ahead > AHEAD * spread:
            self.leads = True
        elif self._ahead < -BEHIND * spread - MAX_LOSS * self._num_uses:
            self.leads = False


class _Rows:
    """Ended uses that wait for their bins to pass. It is a ring: new rows overwrite the oldest.

    A row: ``weight`` of it is at risk until bin ``hit`` (NUM_BINS: never returned). Bins before ``next`` are counted.
    Uses as old as an overwritten one are not counted any more: the ring may hold their returns without their
    survivors.

    Two simulated caches of the same size hold some of the waiting uses. The model's cache drops whole rows once a
    second (``kept``). The LRU holds the uses that ended last: the last rows, and a part of the row before them.
    """

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self.room = np.inf
        self._kept = np.zeros(MAX_ROWS, np.bool_)
        self._added = 0.0  # since rows were dropped
        self._num_rows = 0  # the last ones, which the LRU holds
        self._held = self._cut = 0.0  # by the LRU; what it no longer has of the oldest of them
        self._is_full = False  # the LRU has given something up
        self._number = np.full(MAX_ROWS, -1, np.int64)
        self._ended_s = np.zeros(MAX_ROWS)
        self._class = np.zeros(MAX_ROWS, np.int64)
        self._weight = np.zeros(MAX_ROWS)
        self._hit = np.full(MAX_ROWS, NUM_BINS, np.int64)
        self._next = np.full(MAX_ROWS, NUM_BINS, np.int64)
        self._place_of: dict[int, int] = {}
        self._at = 0
        self._last_hit = (-1, 0.0, 0)
        self._lost_s = -np.inf

    def take(self, entry: Entry) -> None:
        """An entry of the log."""
        number, at_s, group, weight = entry
        place = self._place_of.get(number)
        if group < 0:
            if place is not None:
                weight = min(weight, float(self._weight[place]))
                ours = weight if self._kept[place] else 0.0
                self._standing.returned(at_s, ours, self._left_lru(place, weight))
                self._split(place, number, at_s, weight)
        elif weight == 0:
            if place is not None:
                self._class[place] = group
        else:
            if place is None:
                place = self._place_of[number] = self._put(number, at_s, group, 0.0, NUM_BINS, 0)
            before = self._lrus(place)
            self._weight[place] += weight
            self._held += self._lrus(place) - before
            self._trim_lru()
            self._added += weight
            self._standing.used(weight)

    def _lrus(self, place: int) -> float:
        """What the LRU holds of a row."""
        rows_since = (self._at - 1 - place) % MAX_ROWS
        if self._number[place] < 0 or rows_since >= self._num_rows:
            return 0.0
        held = float(self._weight[place])
        return max(held - self._cut, 0.0) if rows_since == self._num_rows - 1 else held

    def _left_lru(self, place: int, weight: float) -> float:
        """``weight`` of a row is used again: what of that the LRU held."""
        held = min(weight, self._lrus(place))
        self._held -= held
        return held

    def _trim_lru(self) -> None:
        """Drop the uses that ended longest ago from the LRU, until the rest fits. Amortised O(1) a row."""
        while (excess := self._held - self.room) > 0 and self._num_rows:
            self._is_full = True
            if self._lrus((self._at - self._num_rows) % MAX_ROWS) > excess:
                self._held, self._cut = self.room, self._cut + excess
            else:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """The LRU gives up its oldest row."""
        self._held -= self._lrus((self._at - self._num_rows) % MAX_ROWS)
        self._num_rows, self._cut = self._num_rows - 1, 0.0

    def drop(self, now_s: float, rank: Floats) -> None:
        """Drop the lowest-ranked rows until the others fit.

        The size is an average over the time since the last call, because new rows were admitted at once.
        """
        kept = np.flatnonzero(self._kept)
        excess = float(self._weight[kept].sum()) - self.room + (self._added / 2 if self._is_full else 0.0)
        self._added = 0.0
        if excess > 0:
            ended_s = self._ended_s[kept]
            order = kept[np.lexsort((ended_s, ranks_at(rank, self._class[kept], now_s - ended_s)))]
            self._kept[order[np.cumsum(self._weight[order]) <= excess]] = False

    def _split(self, place: int, number: int, at_s: float, weight: float) -> None:
        """``weight`` of a row returned."""
        if weight <= 0:
            return
        self._weight[place] -= weight
        last_number, last_at_s, last = self._last_hit
        if last_number == number and last_at_s == at_s and self._place_of.get(number) == place:
            self._weight[last] += weight
            return
        ended_s = float(self._ended_s[place])
        hit = min(int(np.searchsorted(EDGES_S, at_s - ended_s, "right")) - 1, NUM_BINS)
        put = self._put(-1, ended_s, int(self._class[place]), weight, hit, int(self._next[place]))
        self._last_hit = (number, at_s, put)

    def _put(self, number: int, ended_s: float, group: int, weight: float, hit: int, start: int) -> int:
        place = self._at
        if self._num_rows == MAX_ROWS:
            self._drop_oldest()
        self._at, self._num_rows = (place + 1) % MAX_ROWS, self._num_rows + 1
        if self._number[place] >= 0:
            del self._place_of[int(self._number[place])]
            self._lost_s = float(self._ended_s[place])
        self._number[place], self._ended_s[place], self._class[place] = number, ended_s, group
        self._weight[place], self._hit[place], self._next[place] = weight, hit, start
        self._kept[place] = number >= 0
        return place

    def count(self, now_s: float, at_risk: Floats, returned: Floats) -> None:
        """Add the bins that have passed since the last time."""
        passed = np.searchsorted(EDGES_S, now_s - self._ended_s, "right") - 1
        stop = np.minimum(np.minimum(passed, self._hit + 1), NUM_BINS)
        due = np.flatnonzero((self._next < stop) & (self._ended_s > self._lost_s))
        first, stop = self._next[due], stop[due]
        group, weight, hit = self._class[due], self._weight[due], self._hit[due]
        for b in range(int(first.min(initial=NUM_BINS)), int(stop.max(initial=0))):
            now = (first <= b) & (b < stop)
            np.add.at(at_risk[:, b], group[now], weight[now])
            now &= hit == b
            np.add.at(returned[:, b], group[now], weight[now])
        self._next[due] = stop


def ranks_at(rank: Floats, groups: NDArray[np.int64], ages_s: Floats) -> Floats:
    """The ranks of leaves with these classes and ages, interpolated between the starts of bins."""
    bins = np.searchsorted(EDGES_S, ages_s, "right") - 1
    after = np.minimum(bins + 1, NUM_BINS)
    share = np.clip((ages_s - EDGES_S[bins]) / np.maximum(EDGES_S[after] - EDGES_S[bins], 1e-9), 0.0, 1.0)
    return np.asarray(rank[groups, bins] * (1 - share) + rank[groups, after] * share)


def _rank(hazard: Floats) -> Floats:
    """Hits per block-second from the start of each bin on: ``[n, NUM_BINS + 1]`` of ``[n, NUM_BINS]``."""
    hazard = np.clip(hazard, 1e-9, 0.999)
    spent, rank = (1 - hazard / 2) * np.diff(EDGES_S), np.zeros((len(hazard), NUM_BINS + 1))
    for b in range(NUM_BINS):
        alive = np.cumprod(1 - hazard[:, b:], axis=1)
        before = np.concatenate((np.ones((len(hazard), 1)), alive[:, :-1]), axis=1)
        rank[:, b] = ((1 - alive) / np.cumsum(before * spent[:, b:], axis=1)).max(axis=1)
    return rank


def _corrected(hazard: Floats, at_risk: Floats, returned: Floats) -> Floats:
    """A hazard, corrected by counts."""
    return np.asarray((returned + CLASS_WEIGHT * hazard) / (at_risk + CLASS_WEIGHT))


def _product(one: Floats, other: Floats) -> Floats:
    """``oneᵀ other``, without BLAS, which would take all cores for it."""
    return np.asarray(np.einsum("ck,cl->kl", one, other))


def _solved(curve: Floats, slope: Floats) -> Floats:
    """``x`` of ``curve @ x = slope``, symmetric and positive definite, by elimination: without BLAS too."""
    size = len(slope)
    rows = np.column_stack((curve, slope))
    for at in range(size):
        rows[at] /= rows[at, at]
        rows[at + 1 :, at:] -= rows[at + 1 :, at, None] * rows[at, at:]
    found = rows[:, size]
    for at in range(size - 1, 0, -1):
        found[:at] -= rows[:at, at] * found[at]
    return np.asarray(found)


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -30, 30))))


def _basis() -> Floats:
    """ψ of each bin, ``[NUM_BINS, 3]``; of older ones than ``OLDEST_Z`` the same."""
    z = np.minimum(np.linspace(-1.7, 1.7, NUM_BINS), OLDEST_Z)
    return np.stack((np.ones(NUM_BINS), z, z * z - 1), axis=1)


def _ties() -> Floats:
    """The curvature by which levels are held to the prior's, and to each other: ``[NUM_BINS, NUM_BINS]``."""
    apart = np.diff(np.eye(NUM_BINS), axis=0)
    return LEVEL_RIDGE * np.eye(NUM_BINS) + LEVEL_TIE * _product(apart, apart)


def _prior_logits() -> Floats:
    """A hazard that falls as 0.12 ÷ (age + 20 s)."""
    hazard = 1 - ((EDGES_S[:-1] + 20) / (EDGES_S[1:] + 20)) ** 0.12
    return np.log(hazard / (1 - hazard))
