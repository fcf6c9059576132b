"""What sending a prompt to a replica would cost, as far as a router knows: the lowest wins.

All are arrays over the candidates. ``credit`` counts the tokens of the prompt that a replica holds, each by
the weight of its tier; ``load`` is what a replica has to do already, ``queued + decode``, for all but the baselines
without what it computes of this very prompt, as far as that is predicted.

    linear        max(queued + prompt − credit, 0) + decode
    lmetric       max(queued + prompt − credit, 0) × (decode + 1)
    threshold     the longest match among those that are not overloaded, if it exceeds 0.3 of the prompt;
                  otherwise the least loaded. Overloaded: load > least + 64 or load > 1.5 × max(least, 64): a
                  factor of next to nothing would say that everybody is overloaded who isn't idle himself
    stddev        the longest match among those whose load is at most the mean + one standard deviation
    least_loaded, round_robin, random     the baselines, which ask nobody what he holds
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
"""At which all are as likely as each other."""


class Facts(NamedTuple):
    """What is known of the candidates; float64 ``[n]``, tokens and blocks. ``turn`` counts the questions."""

    prompt: int
    credit: Floats
    queued: Floats
    decode: Floats
    turn: int = 0

    @property
    def load(self) -> Floats:
        """What each has to do already."""
        return self.queued + self.decode

    @property
    def prefill(self) -> Floats:
        """Tokens that each would have to compute, waiting ones included."""
        return np.maximum(self.queued + self.prompt - self.credit, 0)


Cost = Callable[[Facts], Floats]
CostName = Literal["linear", "lmetric", "threshold", "stddev", "least_loaded", "round_robin", "random"]


def linear(facts: Facts) -> Floats:
    """Work before the first token, and work beside it."""
    return facts.prefill + facts.decode


def lmetric(facts: Facts) -> Floats:
    """Work before the first token, for everybody who waits."""
    return facts.prefill * (facts.decode + 1)


def threshold(facts: Facts) -> Floats:
    """The longest match where it is long enough and the load allows, otherwise the load."""
    load = facts.load
    least = load.min()
    bearable = (load <= least + LOAD_ABOVE) & (load <= LOAD_TIMES * max(least, LOAD_ABOVE))
    return _match_or_load(facts, bearable & (facts.credit > MATCH_SHARE * facts.prompt))


def stddev(facts: Facts) -> Floats:
    """The longest match among those of ordinary load."""
    load = facts.load
    return _match_or_load(facts, load <= load.mean() + load.std())


def least_loaded(facts: Facts) -> Floats:
    """The load alone."""
    return facts.load


def round_robin(facts: Facts) -> Floats:
    """Each in turn."""
    return np.roll(np.arange(len(facts.load), dtype=np.float64), facts.turn)


def random(facts: Facts) -> Floats:
    """All the same, so that chance decides."""
    return np.zeros(len(facts.load))


def _match_or_load(facts: Facts, eligible: NDArray[np.bool_]) -> Floats:
    """Tokens left to compute for the eligible; all others behind them, by load."""
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
"""Those that ask nobody what he holds."""
