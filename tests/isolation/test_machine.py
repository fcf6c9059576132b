"""The state machine over the whole library: 400 lives of up to 50 calls, and nothing is found.

``RADIXKV_EXAMPLES`` changes the number of examples (``make lives`` has 2,000), ``RADIXKV_SEED`` the seed of them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from radixkv import PrefixCache
from radixkv.audit import properties
from radixkv.index import holders, purge, requests, tree
from radixkv_policies import POLICIES

EXAMPLES = int(os.environ.get("RADIXKV_EXAMPLES", "400"))
SEED = int(os.environ.get("RADIXKV_SEED", "0"))
PARTS = 8


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_found(part: int) -> None:
    """Every policy, with storage and without, in parts that end well within a timeout."""
    policies, stored = tuple(POLICIES)[part % 4 :: 4], bool(part // 4)
    report = properties.run(
        PrefixCache,
        max_examples=-(-EXAMPLES // PARTS),
        steps=50,
        seed=SEED * PARTS + part,
        policies=policies,
        with_storage=[stored],
    )
    assert report.ok, report.failure
    assert report.examples >= EXAMPLES // PARTS


@pytest.mark.slow
@pytest.mark.pure
@pytest.mark.timeout(600)
@pytest.mark.parametrize("label_bytes, grown_bytes", [(16, 24), (8, 0)])
def test_nothing_is_found_at_the_limits(
    label_bytes: int, grown_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits so small that tiny caches meet them: labels of several nodes, slices of one, folded tails."""
    monkeypatch.setattr(tree, "MAX_LABEL_BYTES", label_bytes)
    monkeypatch.setattr(tree, "MAX_GROWN_LABEL_BYTES", grown_bytes)
    monkeypatch.setattr(holders, "MAX_COPIED_TAIL_BYTES", 8)
    monkeypatch.setattr(purge, "SLICE_NODES", 1)
    monkeypatch.setattr(requests, "SLICE_BLOCKS", 1)
    report = properties.run(PrefixCache, 200, 50, seed=SEED)
    assert report.ok, report.failure


@pytest.mark.slow
def test_same_arguments_do_the_same() -> None:
    """A seed names a run."""
    first, second = (properties.run(PrefixCache, 20, 20, seed=7) for _ in range(2))
    assert (first.examples, first.steps, first.failure) == (second.examples, second.steps, None)


def test_progress_is_told() -> None:
    """Once for each example, counting up."""
    told: list[int] = []
    report = properties.run(PrefixCache, 10, 5, with_storage=[False], progress=told.append)
    assert told == list(range(1, report.examples + 1)) and len(told) >= 10


@pytest.mark.slow
def test_lives_come_to_something() -> None:
    """Within 400 lives everything that can go wrong had its chance, ten times.

    In a process of its own: Hypothesis also draws the constants of the modules that are loaded.
    """
    command = [sys.executable, "-m", "tests.isolation.reached"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    seen = json.loads(done.stdout)
    assert len(seen) == 14 and not {what: count for what, count in seen.items() if count < 10}, seen
