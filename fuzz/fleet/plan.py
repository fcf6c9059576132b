"""The schedule of faults for a fleet. It depends on the seed only, and is printed line by line."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from fuzz.fleet.worker import LEASE_S, NUM_PROMPTS, TENANTS

NAMES: Final = ("a", "b", "c", "d")
STORES: Final = ("single", "cluster", "sentinel")

_TO_REPLICAS: Final = {"kill": 1.0, "pause": 2.5 * LEASE_S, "claim": 0.0, "turn": 0.0}
_THROUGH_PROXIES: Final = {"partition": 2.5 * LEASE_S, "reset": 0.5, "delay": 1.0, "lose an answer": 0.0}
_TO_SERVERS: Final = {
    "single": {
        **{"restart empty": 1.0, "restart with data": 1.0, "save": 0.0, "restart as saved": 1.0},
        **{
            "pause server": 2.0 * LEASE_S,
            "trim": 0.0,
            "lose scripts": 0.0,
            "drop connections": 0.0,
            "skew": 0.0,
        },
    },
    "cluster": {
        **{"restart node": 1.0, "pause server": 2.0 * LEASE_S, "trim": 0.0, "drop connections": 0.0},
        **{"fail over": 0.0, "fail over with a lagging replica": 0.0},
    },
    "sentinel": {
        "fail over": 0.0,
        "fail over with a lagging replica": 0.0,
        "drop connections": 0.0,
        "trim": 0.0,
    },
}
_WORK: Final = ("purge", "job", "reserve", "job", "reserve")


class Step(NamedTuple):
    """A fault or some work that begins at ``at_s``.

    A fault that lasts ends by itself. ``chance`` decides the details.
    """

    at_s: float
    what: str
    target: str
    lasts_s: float
    chance: int

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.at_s:6.2f} s  {self.what} {self.target}{lasts} (chance {self.chance})"


def draw(seed: int, store: str, seconds: float) -> list[Step]:
    """Return the faults and the work of one round, in order."""
    chance = random.Random(f"{seed} {store}")
    faults = dict(_TO_REPLICAS) | _TO_SERVERS[store]
    if store == "single":
        faults |= _THROUGH_PROXIES
    steps = [*_drawn(chance, faults, seconds, 0.25, 1.2), *_work(chance, seconds)]
    return sorted(steps)


def _drawn(
    chance: random.Random, faults: dict[str, float], seconds: float, least_s: float, most_s: float
) -> list[Step]:
    steps, at_s, kinds = [], 1.0, sorted(faults)
    while at_s < seconds:
        what = chance.choice(kinds)
        names = (*NAMES, "router") if what in _THROUGH_PROXIES else NAMES
        of_a_server = what not in _TO_REPLICAS and what not in _THROUGH_PROXIES
        lasts_s = round(faults[what] * chance.uniform(0.2, 1.0), 2)
        target = "" if of_a_server else chance.choice(names)
        steps.append(Step(round(at_s, 2), what, target, lasts_s, chance.randrange(1 << 30)))
        at_s += chance.uniform(least_s, most_s)
    return steps


def _work(chance: random.Random, seconds: float) -> list[Step]:
    steps, at_s = [], 0.5
    while at_s < seconds:
        steps.append(
            Step(round(at_s, 2), chance.choice(_WORK), chance.choice(NAMES), 0.0, chance.randrange(1 << 30))
        )
        at_s += chance.uniform(0.2, 1.0)
    return steps


def tenant_of(step: Step) -> str:
    """Return the tenant that the work of a step is for."""
    return TENANTS[step.chance % len(TENANTS)]


def prompt_of(step: Step) -> int:
    """Return the number of the prompt that the work of a step is for."""
    return step.chance // 2 % NUM_PROMPTS
