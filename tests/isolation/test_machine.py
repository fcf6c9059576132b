"""The state machine over the whole library: 2,000 lives of up to 50 calls, and nothing is found.

``RADIXKV_EXAMPLES`` changes the number of examples, ``RADIXKV_SEED`` the seed of them all.
"""

from __future__ import annotations

import os

import pytest

from radixkv import PrefixCache
from radixkv.audit import properties

EXAMPLES = int(os.environ.get("RADIXKV_EXAMPLES", "2000"))
SEED = int(os.environ.get("RADIXKV_SEED", "0"))
PARTS = 8


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_found(part: int) -> None:
    """Both policies, with storage and without, in parts that end well within a timeout."""
    policy, stored = ("lru", "lfu")[part % 2], bool(part // 2 % 2)
    report = properties.run(
        PrefixCache,
        max_examples=-(-EXAMPLES // PARTS),
        steps=50,
        seed=SEED * PARTS + part,
        policies=[policy],
        with_storage=[stored],
    )
    assert report.ok, report.failure
    assert report.examples >= EXAMPLES // PARTS


def test_same_arguments_do_the_same() -> None:
    """A seed names a run."""
    first, second = (properties.run(PrefixCache, 20, 20, seed=7) for _ in range(2))
    assert (first.examples, first.steps, first.failure) == (second.examples, second.steps, None)


def test_progress_is_told() -> None:
    """Once for each example, counting up."""
    told: list[int] = []
    report = properties.run(PrefixCache, 10, 5, with_storage=[False], progress=told.append)
    assert told == list(range(1, report.examples + 1)) and len(told) >= 10
