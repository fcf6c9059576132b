"""HazardModel: when blocks return, learned online by class; and the rank of a class at an age.

Time since the end of a use is cut into ``NUM_BINS`` bins, log-spaced: ``[0, 0.5 s)``, then ``0.5 × 1.45^i``. The
*hazard* of a bin is the chance to return in it for what has not returned before. Blocks with equal features are a
class.

    counts[class, bin]    at risk, returned       decayed with HALF_LIFE_S
    logit hazard          a[bin] + Σ_k ψ_k(bin) · (w_k · f)       ψ = 1, z, z² − 1 of the log age
    hazard[class, bin]    (returned + κ × modelled) ÷ (at risk + κ)

The model ties classes together, so that a rare one borrows from its neighbours; the counts correct it where there are
many. An outcome is counted bin by bin: when a bin has passed for a use, what returned in it and what survived it are
counted together. To count returns at once and survivors later would make everything young look good.

``rank[class, bin]`` is a Gittins index: hits per block-second from that age on, with the best horizon to wait for
them, ``max over H of P(return in [age, H)) ÷ E[time until the return or H]``. Before anything is learned the hazard
falls with age, so the order is that of LRU.

The owner's thread only appends to ``log``; ``update`` does the rest and may run in another thread: it replaces
``rank`` whole. State: ``MAX_ROWS`` uses that wait for their bins, 2 × MAX_CLASSES × NUM_BINS counts: a few MB.
Cost of ``update``: O(rows); with ``fit`` a Newton step over classes × bins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_BINS: Final = 25
MAX_ROWS: Final = 32_768
MAX_CLASSES: Final = 2_048
NUM_FEATURES: Final = 14
"""Features of a class, about −1 … 1; the model adds the squares of the first four."""

HALF_LIFE_S: Final = 3_600.0

EDGES_S: Final[Floats] = np.concatenate(([0.0], 0.5 * 1.45 ** np.arange(NUM_BINS)))
"""Bin b is ``[EDGES_S[b], EDGES_S[b + 1])``."""

CLASS_WEIGHT: Final = 3_000.0
"""κ: uses at risk for which a class's own counts weigh as much as the model."""

RIDGE: Final = 10.0
"""How strongly weights are held to 0, in uses."""

Entry = tuple[int, float, int, float]
"""A use ended: (its number, when, class ≥ 0, weight). It returned: (its number, when, −1, weight)."""


class HazardModel:
    """See the module. ``rank``: float64 ``[MAX_CLASSES, NUM_BINS + 1]``, the last for older ages. ``at_risk``,
    ``returned``: the counts, float64 ``[MAX_CLASSES, NUM_BINS]``.
    """

    def __init__(self) -> None:
        self.log: deque[Entry] = deque(maxlen=4 * MAX_ROWS)
        self._features = np.zeros((MAX_CLASSES, NUM_FEATURES))
        self.num_classes = 0
        self.at_risk = np.zeros((MAX_CLASSES, NUM_BINS))
        self.returned = np.zeros((MAX_CLASSES, NUM_BINS))
        self._rows = _Rows()
        self._counted_s = 0.0
        self._basis = _basis()
        self._prior = np.concatenate((_prior_logits(), np.zeros(3 * (NUM_FEATURES + 4))))
        self._weights = self._prior.copy()
        self.rank = np.tile(_rank(_sigmoid(_prior_logits())[None]), (MAX_CLASSES, 1))

    def add_class(self, features: Sequence[float]) -> int:
        """A new class; ``num_classes < MAX_CLASSES``. It ranks by the prior until the next ``update``."""
        number = self.num_classes
        self._features[number] = features
        self.num_classes = number + 1
        return number

    def update(self, now_s: float, *, fit: bool) -> None:
        """Count what is known by now; with ``fit``, learn from the counts and rank anew."""
        for _ in range(len(self.log)):
            self._rows.take(self.log.popleft())
        self._rows.count(now_s, self.at_risk, self.returned)
        if fit:
            kept = 0.5 ** ((now_s - self._counted_s) / HALF_LIFE_S)
            self._counted_s = now_s
            self.at_risk *= kept
            self.returned *= kept
            self._fit()

    def _fit(self) -> None:
        """Two Newton steps on the counts of the classes, then their ranks."""
        num = max(self.num_classes, 1)
        design = self._design(num)
        at_risk, returned = self.at_risk[:num].ravel(), self.returned[:num].ravel()
        seen = np.flatnonzero(at_risk > 1e-3)
        ridge = np.concatenate((np.full(NUM_BINS, 2.0), np.full(self._prior.size - NUM_BINS, RIDGE)))
        rows, n, r = design[seen], at_risk[seen], returned[seen]
        for _ in range(1):
            hazard = _sigmoid(rows @ self._weights)
            slope = rows.T @ (r - n * hazard) - ridge * (self._weights - self._prior)
            curve = (rows * (n * hazard * (1 - hazard))[:, None]).T @ rows + np.diag(ridge)
            self._weights = self._weights + np.clip(np.linalg.solve(curve, slope), -2.0, 2.0)
        modelled = _sigmoid(design @ self._weights).reshape(num, NUM_BINS)
        hazard = (self.returned[:num] + CLASS_WEIGHT * modelled) / (self.at_risk[:num] + CLASS_WEIGHT)
        rank = self.rank.copy()
        rank[:num] = _rank(hazard)
        self.rank = rank

    def _design(self, num: int) -> Floats:
        """One row a class and bin: a column for each bin, then each feature times each ψ."""
        features = self._features[:num]
        features = np.concatenate((features, features[:, :4] ** 2), axis=1)
        tied = features[:, None, :, None] * self._basis[None, :, None, :]
        bins = np.broadcast_to(np.eye(NUM_BINS), (num, NUM_BINS, NUM_BINS))
        return np.concatenate((bins, tied.reshape(num, NUM_BINS, -1)), axis=2).reshape(num * NUM_BINS, -1)


class _Rows:
    """Uses that ended and wait for their bins to pass: a ring, the oldest is overwritten.

    A row: ``weight`` of it is at risk until bin ``hit`` (NUM_BINS: never returned), bins before ``next`` are
    counted. Of uses as old as one that was overwritten nothing more is counted: the ring may have kept what
    returned of them, not what didn't.
    """

    def __init__(self) -> None:
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
                self._split(place, number, at_s, min(weight, float(self._weight[place])))
        elif place is None:
            self._place_of[number] = self._put(number, at_s, group, weight, NUM_BINS, 0)
        else:
            self._weight[place] += weight

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
        self._at = (place + 1) % MAX_ROWS
        if self._number[place] >= 0:
            del self._place_of[int(self._number[place])]
            self._lost_s = float(self._ended_s[place])
        self._number[place], self._ended_s[place], self._class[place] = number, ended_s, group
        self._weight[place], self._hit[place], self._next[place] = weight, hit, start
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


def _rank(hazard: Floats) -> Floats:
    """Hits per block-second from the start of each bin on: ``[n, NUM_BINS + 1]`` of ``[n, NUM_BINS]``."""
    hazard = np.clip(hazard, 1e-9, 0.999)
    spent, rank = (1 - hazard / 2) * np.diff(EDGES_S), np.zeros((len(hazard), NUM_BINS + 1))
    for b in range(NUM_BINS):
        alive = np.cumprod(1 - hazard[:, b:], axis=1)
        before = np.concatenate((np.ones((len(hazard), 1)), alive[:, :-1]), axis=1)
        rank[:, b] = ((1 - alive) / np.cumsum(before * spent[:, b:], axis=1)).max(axis=1)
    return rank


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -30, 30))))


def _basis() -> Floats:
    """ψ of each bin, ``[NUM_BINS, 3]``."""
    z = np.linspace(-1.7, 1.7, NUM_BINS)
    return np.stack((np.ones(NUM_BINS), z, z * z - 1), axis=1)


def _prior_logits() -> Floats:
    """A hazard that falls as 0.12 ÷ (age + 20 s)."""
    hazard = 1 - ((EDGES_S[:-1] + 20) / (EDGES_S[1:] + 20)) ** 0.12
    return np.log(hazard / (1 - hazard))
