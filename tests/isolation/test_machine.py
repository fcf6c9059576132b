"""The state machine over the whole library: 400 lives of up to 50 calls, and nothing is found.

``RADIXKV_EXAMPLES`` changes the number of examples (``make lives`` has 2,000), ``RADIXKV_SEED`` the seed of them all.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import ClassVar

import pytest

from radixkv import PrefixCache
from radixkv.audit import properties
from radixkv.index import cache, purge, sequence, tree
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
    monkeypatch.setattr(sequence, "MAX_COPIED_TAIL_BYTES", 8)
    monkeypatch.setattr(purge, "SLICE_NODES", 1)
    monkeypatch.setattr(cache, "SLICE_BLOCKS", 1)
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


class Reached(properties.CacheMachine):
    """The machine, counting what its lives came to."""

    seen: ClassVar[Counter[str]] = Counter()

    def laws(self) -> None:
        """The laws, and what there is to see."""
        super().laws()
        stats, snapshot = self.cache.stats(), self.cache.snapshot()
        self.seen.update(
            {
                "several tenants": stats.num_tenants > 1 and stats.resident_blocks > 1,
                "hits": stats.hit_tokens > 0,
                "evictions": stats.evicted_blocks > 0,
                "copies": stats.copied_blocks > 1,
                "full": stats.free_blocks == 0,
                "quarantine": stats.quarantined_blocks > 0,
                "lent": stats.lent_blocks > 0,
                "leases": len(snapshot.leases) > 0,
                "shared runs": any(run.owners > 1 for run in snapshot.runs),
                "runs that the tree took": any(run.node is not None for run in snapshot.runs),
                "branches": any(
                    count > 1
                    for tree in snapshot.trees
                    for count in Counter(
                        node.parent for node in tree.nodes if node.parent is not None
                    ).values()
                ),
                "copies that wait": self.engine.is_behind,
                "waiting plans hold blocks": len(snapshot.held_ids) > 0,
                "committed and private": any(
                    run.num_committed >= self.block_size and not run.forgotten and self._is_private(run)
                    for run in self.runs
                ),
            }
        )

    def _is_private(self, run: properties.Mirror) -> bool:
        """Whether its first block was computed twice: the tree's is another one."""
        first = self.cache.match(run.namespace, run.ids[: self.block_size]).block_ids
        return len(first) > 0 and first[0] != run.sequence.block_table[0]


@pytest.mark.slow
def test_lives_come_to_something() -> None:
    """Within 400 lives everything that can go wrong had its chance, ten times."""
    Reached.seen = Counter()
    report = properties.run(PrefixCache, 400, 50, seed=SEED, machine=Reached)
    assert report.ok, report.failure
    rare = {what: count for what, count in Reached.seen.items() if count < 10}
    assert not rare, Reached.seen
