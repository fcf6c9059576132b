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


def reach_all(machine: Any, first: tuple[int, ...], **chosen: Any) -> None:
    """Play runs of lives until ``machine.seen`` has counted each state often enough. They must find nothing.

    ``first``: seeds of runs that together reach all states in `make test`. Up to eight other runs follow.
    """
    machine.seen = Counter()
    for seed in (*first, *range(MOST_RUNS)):
        lives = max(EXAMPLES // 10, 40)
        report = properties.run(PrefixCache, lives, 50, seed=100 * SEED + seed, machine=machine, **chosen)
        assert report.ok, report.failure
        rare = {what: count for what, count in machine.seen.items() if count < ENOUGH}
        if machine.seen and not rare:
            return
    raise AssertionError(f"rare: {rare}")


def finds(report: Callable[[int, int], properties.PropertyReport]) -> bool:
    """Whether ``report(lives, seed)`` finds a planted bug: eight runs of 20 lives, of which the first mostly does.

    A bug that shows only after many lives from one seed shows soon from another. The first lives of a long run are
    short ones.
    """
    return any(not report(20, seed).ok for seed in range(1, 1 + MOST_RUNS))
