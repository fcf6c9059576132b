"""The machine of one cache, which also counts the interesting states that its lives reach."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from radixkv.audit import properties


class Reached(properties.CacheMachine):
    """The machine, which also counts the states that its lives reached."""

    seen: ClassVar[Counter[str]] = Counter()

    def laws(self) -> None:
        """Check the laws, and count the states."""
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
                "reserved room": any(run.num_reserved for run in self.runs),
                "reserved blocks": any(
                    run.sequence.num_blocks > self._blocks(run.num_tokens) for run in self.runs
                ),
                "computing ahead": any(run.ahead and not run.leaned_end for run in self.runs),
                "leaning": any(run.num_ahead for run in self.runs),
                "leaning on a step that will fail": any(
                    each.is_leaned and self.steps.get(each.step) for run in self.runs for each in run.ahead
                ),
                "leaning and computing": any(
                    run.num_ahead and not run.ahead[-1].is_leaned for run in self.runs
                ),
                "done before an earlier step": any(each.is_done for run in self.runs for each in run.ahead),
                "behind a fence": len(self.fenced) > 0,
                "copies that wait": self.engine.is_behind,
                "waiting plans hold blocks": len(snapshot.held_ids) > 0,
                "committed and private": any(
                    run.num_committed >= self.block_size and not run.forgotten and self._is_private(run)
                    for run in self.runs
                ),
            }
        )

    def _is_private(self, run: properties.Mirror) -> bool:
        """Whether the first block was computed twice, so that the tree has another one."""
        first = self.cache.match(run.namespace, run.ids[: self.block_size]).block_ids
        return len(first) > 0 and first[0] != run.sequence.block_table[0]
