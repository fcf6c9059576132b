"""HazardModel: learns online, by class, when blocks return. It computes the rank of a class at an age.

Time since the end of a use is divided into ``NUM_BINS`` log-spaced bins: ``[0, 0.5 s)``, then ``0.5 × 1.45^i``. The
*hazard* of a bin is the probability that blocks return in it if they have not returned before. Blocks with equal
features are a class.

    counts[class, bin]    at risk, returned       decayed with HALF_LIFE_S
    logit hazard          a[bin] + Σ_k ψ_k(bin) · (w_k · f)       ψ = 1, z, z² − 1 of the log age, up to 315 s
    hazard[class, bin]    (returned + κ × modelled) ÷ (at risk + κ)

The model connects the classes, so a rare class uses the evidence of similar ones. If a class has many counts, they
correct the model. Outcomes are counted bin by bin. When a bin has passed for a use, its returns and its survivors are
counted together. If returns were counted at once and survivors later, young blocks would rank too high.

``rank[class, bin]`` is a Gittins index: expected hits per block-second from that age on, for the best time to wait,
``max over H of P(return in [age, H)) ÷ E[time until the return or H]``. Before there is evidence, the hazard falls
with age, so the order is that of LRU.

A learned model can be worse than none, for example after a change of the traffic, or at ages without evidence. So the
same log also drives two simulated caches: one ranks by the model, the other is an LRU. ``Standing`` compares their
hits.

The owner's thread only appends to ``log``. ``update`` does the rest and may run in another thread, because it
replaces ``rank`` as a whole. State: ``MAX_ROWS`` uses that wait for their bins, and 2 × MAX_CLASSES × NUM_BINS
counts: a few MB. Cost of ``update``: O(rows). With ``fit`` also a Newton step, O(bins × classes × features²), about
20 ms.
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
NUM_FEATURES: Final = 31
"""Features of a class, about −1 … 1."""

HALF_LIFE_S: Final = 3_600.0

EDGES_S: Final[Floats] = np.concatenate(([0.0], 0.5 * 1.45 ** np.arange(NUM_BINS)))
"""Bin b is ``[EDGES_S[b], EDGES_S[b + 1])``."""

CLASS_WEIGHT: Final = 3_000.0
"""κ: with this many uses at risk, a class's own counts weigh as much as the model."""

RIDGE: Final = 400.0
"""Strength of the pull of weights to 0, in uses. It is high, because the blocks of a request return together or
not at all, so they carry less evidence than independent uses.
"""

LEVEL_RIDGE: Final = 0.1
"""Strength of the pull of a bin's level to the prior's."""

LEVEL_TIE: Final = 10.0
"""Strength of the pull between neighbouring bins, on their differences from the prior.

So an age without evidence follows the ages before it. With a pull to the prior alone, old blocks ranked above new
ones where few blocks returned: a cache that became full for the first time evicted its new blocks.
"""

OLDEST_Z: Final = 0.9
"""From this log age on, 315 s, features have the same effect on every bin. Older ages have too little evidence.
Extrapolated from younger ages, they ranked worse than LRU when a large cache had just begun to evict.
"""

LATELY_S: Final = 600.0
"""Half-life of the comparison with LRU."""

BEHIND: Final = 1.0
MAX_LOSS: Final = 0.002
"""The model stops leading when it is BEHIND standard deviations plus MAX_LOSS of all uses behind LRU."""

AHEAD: Final = 1.5
"""The model leads again when it is this many standard deviations ahead. One request counts at most one deviation."""

MAX_STEP: Final = 2.0
"""Maximum change of a level or weight in a fit, in logits. A longer step is scaled as a whole. Clipping each value
would change the direction, and after a sudden change the fit would not recover.
"""

Entry = tuple[int, float, int, float]
"""One of three events, as (number of the use, time, class, weight):

- A use ended: class ≥ 0, weight > 0.
- Blocks of it returned: class −1.
- It moved to another class: weight 0.
"""


class HazardModel:
    """The model of the module's docstring.

    ``rank``: float64 ``[MAX_CLASSES, NUM_BINS + 1]``, the last column for older ages. ``by_age``: the same before
    anything is learned. ``at_risk``, ``returned``: the counts, float64 ``[MAX_CLASSES, NUM_BINS]``.
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
        self._tied = (self._basis[:, :, None] * self._basis[:, None, :]).reshape(NUM_BINS, -1)
        self._prior, self._ties = _prior_logits(), _ties()
        self._level, self._weights = self._prior.copy(), np.zeros((NUM_FEATURES, 3))
        self.rank = self.by_age = np.tile(_rank(_sigmoid(_prior_logits())[None]), (MAX_CLASSES, 1))

    def add_class(self) -> int:
        """Add a class. Requires ``num_classes < MAX_CLASSES``.

        Until the next ``update`` it has the rank of all classes together.
        """
        self.num_classes += 1
        return self.num_classes - 1

    def describe(self, group: int, features: Sequence[float]) -> None:
        """Set the features of a class, in the order of class numbers. Call it before ``update``, in its thread."""
        self._features[group] = features
        self._num_described = group + 1

    def update(self, now_s: float, *, fit: bool, room: float = np.inf) -> None:
        """Count the known outcomes, and rank new classes. With ``fit``, learn from the counts and rank all again.

        room: the part of the waiting uses that the cache holds now, in the unit of weights.
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
        """Rank the described classes from ``start`` on by their own evidence, and later ones by that of all classes."""
        these, rank = slice(start, self._num_described), self.rank.copy()
        modelled = self._modelled(self._features[these])
        of_all = self.at_risk.sum(axis=0, keepdims=True), self.returned.sum(axis=0, keepdims=True)
        own = _corrected(modelled, self.at_risk[these], self.returned[these])
        found = _rank(np.concatenate((own, _corrected(_sigmoid(self._prior), *of_all))))
        rank[these], rank[self._num_described :] = found[:-1], found[-1]
        self.rank, self._num_ranked = rank, self._num_described

    def _modelled(self, features: Floats) -> Floats:
        """The hazard by the model alone, ``[classes, NUM_BINS]``."""
        return _sigmoid(self._level + features @ self._weights @ self._basis.T)

    def _step(self, features: Floats, at_risk: Floats, returned: Floats) -> None:
        """Do a Newton step of levels and weights.

        Products of two features are made once for all bins, each pair once.
        """
        basis, flat = self._basis, 3 * NUM_FEATURES
        hazard = self._modelled(features)
        excess, weight = returned - at_risk * hazard, at_risk * hazard * (1 - hazard)
        curve = np.zeros((NUM_BINS + flat, NUM_BINS + flat))
        one, other = np.triu_indices(NUM_FEATURES)
        spread = np.zeros((NUM_BINS, NUM_FEATURES, NUM_FEATURES))
        rows = np.ascontiguousarray(features.T)
        spread[:, one, other] = np.einsum(
            "bc,mc->bm", np.ascontiguousarray(weight.T), rows[one] * rows[other]
        )
        spread[:, other, one] = spread[:, one, other]
        blocks = _product(spread.reshape(NUM_BINS, -1), self._tied)
        pairs = blocks.reshape(NUM_FEATURES, NUM_FEATURES, 3, 3)
        curve[NUM_BINS:, NUM_BINS:] = pairs.transpose(0, 2, 1, 3).reshape(flat, flat)
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
        """Count an ended use."""
        self._num_uses += weight

    def returned(self, at_s: float, ours: float, lrus: float) -> None:
        """Count returned blocks: how many the model's cache and the LRU would have held."""
        if ours == lrus:
            return
        before = self._net if at_s == self._at_s else 0.0
        self._at_s, self._net = at_s, before + ours - lrus
        self._ahead += ours - lrus
        self._variance += self._net**2 - before**2

    def decide(self, now_s: float) -> None:
        """Update ``leads``."""
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
    Uses as old as an overwritten one are no longer counted, because the ring may hold their returns without their
    survivors.

    Two simulated caches of the same size hold some of the waiting uses. The model's cache drops whole rows once a
    second (``kept``). The LRU holds the uses that ended last: the last rows, and a part of the row before them.
    """

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self.room = np.inf
        self._kept = np.zeros(MAX_ROWS, np.bool_)
        self._added = 0.0  # weight since the last drop
        self._num_rows = 0  # number of the last rows, which the LRU holds
        self._held = self._cut = 0.0  # weight in the LRU; weight that the LRU dropped of its oldest row
        self._is_full = False  # the LRU has dropped something
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
        """Apply an entry of the log."""
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
        """The weight of a row that the LRU holds."""
        rows_since = (self._at - 1 - place) % MAX_ROWS
        if self._number[place] < 0 or rows_since >= self._num_rows:
            return 0.0
        held = float(self._weight[place])
        return max(held - self._cut, 0.0) if rows_since == self._num_rows - 1 else held

    def _left_lru(self, place: int, weight: float) -> float:
        """Remove ``weight`` of a row from the LRU because it is used again. Returns how much of it the LRU held."""
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
        """Drop the oldest row from the LRU."""
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
        """Mark ``weight`` of a row as returned."""
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
        """Count the bins that have passed since the last call."""
        last = np.minimum(self._hit + 1, NUM_BINS)
        open_rows = np.flatnonzero((self._next < last) & (self._ended_s > self._lost_s))
        passed = np.searchsorted(EDGES_S, now_s - self._ended_s[open_rows], "right") - 1
        stop = np.minimum(passed, last[open_rows])
        is_due = self._next[open_rows] < stop
        due, stop = open_rows[is_due], stop[is_due]
        first = self._next[due]
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
    by_bin, spent = np.ascontiguousarray(hazard.T), np.ascontiguousarray(spent.T)
    hits, waits = np.zeros((2, NUM_BINS, len(hazard)))  # by the last bin for which a block is kept
    for b in range(NUM_BINS - 1, -1, -1):
        left = 1 - by_bin[b]
        hits[b:] *= left
        hits[b:] += by_bin[b]
        waits[b:] *= left
        waits[b:] += spent[b]
        rank[:, b] = (hits[b:] / waits[b:]).max(axis=0)
    return rank


def _corrected(hazard: Floats, at_risk: Floats, returned: Floats) -> Floats:
    """The model's hazard, corrected by counts."""
    return np.asarray((returned + CLASS_WEIGHT * hazard) / (at_risk + CLASS_WEIGHT))


def _product(one: Floats, other: Floats) -> Floats:
    """``oneᵀ other``, without BLAS, which would use all cores."""
    return np.asarray(np.einsum("ck,cl->kl", one, other))


def _solved(curve: Floats, slope: Floats) -> Floats:
    """Solve ``curve @ x = slope``, symmetric and positive definite, by elimination, without BLAS."""
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
    """ψ of each bin, ``[NUM_BINS, 3]``, constant from ``OLDEST_Z`` on."""
    z = np.minimum(np.linspace(-1.7, 1.7, NUM_BINS), OLDEST_Z)
    return np.stack((np.ones(NUM_BINS), z, z * z - 1), axis=1)


def _ties() -> Floats:
    """The curvature of the pulls of levels to the prior and to each other: ``[NUM_BINS, NUM_BINS]``."""
    apart = np.diff(np.eye(NUM_BINS), axis=0)
    return LEVEL_RIDGE * np.eye(NUM_BINS) + LEVEL_TIE * _product(apart, apart)


def _prior_logits() -> Floats:
    """A hazard that falls as 0.12 ÷ (age + 20 s)."""
    hazard = 1 - ((EDGES_S[:-1] + 20) / (EDGES_S[1:] + 20)) ** 0.12
    return np.log(hazard / (1 - hazard))
