"""How many random lives the tests play: a few dozen in `make test`, thousands in `make lives`, from another seed.

``RADIXKV_EXAMPLES`` sets their number, and ``RADIXKV_SEED`` the first seed. The same number and seed give the same
lives in every process.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from radixkv import PrefixCache
from radixkv.audit import properties

EXAMPLES = int(os.environ.get("RADIXKV_EXAMPLES", "40"))
SEED = int(os.environ.get("RADIXKV_SEED", "0"))
ENOUGH = 10
"""How often each state has to be seen."""
MOST_RUNS = 8


def reach_all(machine: Any, seed: int, **chosen: Any) -> None:
    """Play runs of lives until ``machine.seen`` has counted each state often enough, at most eight runs.

    They must find nothing. The machine also counts a state that it doesn't reach: with 0. In `make test`, ``seed`` is
    one whose first run reaches all states.
    """
    machine.seen = Counter()
    for at in range(seed, seed + MOST_RUNS):
        report = properties.run(PrefixCache, max(EXAMPLES // 10, 40), 50, seed=at, machine=machine, **chosen)
        assert report.ok, report.failure
        assert machine.seen
        rare = {what: count for what, count in machine.seen.items() if count < ENOUGH}
        if not rare:
            return
    raise AssertionError(f"rare: {rare}")


def finds(report: Callable[[int, int], properties.PropertyReport]) -> bool:
    """Whether ``report(lives, seed)`` finds a planted bug: eight runs of 20 lives, of which the first mostly does.

    A bug that shows only after many lives from one seed shows soon from another. The first lives of a long run are
    short ones.
    """
    return any(not report(20, seed).ok for seed in range(1, 1 + MOST_RUNS))
