"""Estimated cost of sending a prompt to a replica: the lowest cost wins.

All costs are arrays over the candidates. ``credit`` counts the tokens of the prompt that a replica holds, each
weighted by its tier. ``load`` is the replica's present work, ``queued + decode``. Except for the baselines, it
excludes work that the replica is predicted to do for this same prompt.

    linear        max(queued + prompt − credit, 0) + decode
    lmetric       max(queued + prompt − credit, 0) × (decode + 1)
    threshold     the longest match among replicas that are not overloaded, if it exceeds 0.3 of the prompt;
                  otherwise the least loaded. Overloaded: load > least + 64 or load > 1.5 × max(least, 64). Without
                  the 64, every busy replica would count as overloaded if the least load is near 0
    stddev        the longest match among replicas whose load is at most the mean + one standard deviation
    least_loaded, round_robin, random     the baselines, which ignore what replicas hold
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MATCH_SHARE = 0.3
LOAD_ABOVE = 64
LOAD_TIMES = 1.5
MAX_TEMPERATURE = 1e6
"""At this temperature all candidates are equally likely."""


class Facts(NamedTuple):
    """Facts about the candidates; float64 ``[n]``, tokens and blocks. ``turn`` counts the rankings."""

    prompt: int
    credit: Floats
    queued: Floats
    decode: Floats
    turn: int = 0

    @property
    def load(self) -> Floats:
        """Return the present work of each."""
        return self.queued + self.decode

    @property
    def prefill(self) -> Floats:
        """Return the tokens that each would have to compute, queued ones included."""
        return np.maximum(self.queued + self.prompt - self.credit, 0)


Cost = Callable[[Facts], Floats]
CostName = Literal["linear", "lmetric", "threshold", "stddev", "least_loaded", "round_robin", "random"]


def linear(facts: Facts) -> Floats:
    """Work before the first token, plus the decode work that runs at the same time."""
    return facts.prefill + facts.decode


def lmetric(facts: Facts) -> Floats:
    """Work before the first token, weighted by the number of decoding blocks that wait for it."""
    return facts.prefill * (facts.decode + 1)


def threshold(facts: Facts) -> Floats:
    """The longest match if it is long enough and the load allows it, otherwise the load."""
    load = facts.load
    least = load.min()
    bearable = (load <= least + LOAD_ABOVE) & (load <= LOAD_TIMES * max(least, LOAD_ABOVE))
    return _match_or_load(facts, bearable & (facts.credit > MATCH_SHARE * facts.prompt))


def stddev(facts: Facts) -> Floats:
    """The longest match among replicas of ordinary load."""
    load = facts.load
    return _match_or_load(facts, load <= load.mean() + load.std())


def least_loaded(facts: Facts) -> Floats:
    """The load alone."""
    return facts.load


def round_robin(facts: Facts) -> Floats:
    """Each replica in turn."""
    return np.roll(np.arange(len(facts.load), dtype=np.float64), facts.turn)


def random(facts: Facts) -> Floats:
    """Equal costs, so that chance decides."""
    return np.zeros(len(facts.load))


def _match_or_load(facts: Facts, eligible: NDArray[np.bool_]) -> Floats:
    """Return the tokens left to compute for eligible replicas; all others rank behind them, by load."""
    left = np.maximum(facts.prompt - facts.credit, 0)
    return np.where(eligible, left, facts.prompt + 1 + facts.load)


COSTS: Mapping[CostName, Cost] = {
    "linear": linear,
    "lmetric": lmetric,
    "threshold": threshold,
    "stddev": stddev,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "random": random,
}

BASELINES: frozenset[CostName] = frozenset({"least_loaded", "round_robin", "random"})
"""Costs that ignore what replicas hold."""
