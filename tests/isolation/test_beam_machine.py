"""The state machine that lends beams to the device finds nothing, and its lives reach all interesting states."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest

from radixkv import PrefixCache
from radixkv.audit import properties
from radixkv.index import recovery
from tests.isolation.lives import EXAMPLES, SEED, reach_all


class Reached(properties.BeamMachine):
    """The machine, which also counts the states that its lives reached."""

    seen: ClassVar[Counter[str]] = Counter()

    def laws(self) -> None:
        """Check the laws, and count the states."""
        super().laws()
        for lent in self.lendings:
            books = lent.beams._device.books.read()
            lent.beams._device.books.check()
            held = {block for table in books.tables for block in table}
            besides = set(np.frombuffer(bytes(lent.beams.block_ids), np.int32).tolist())
            private = {block for run in self.runs for block in run.sequence.block_table.tolist()}
            self.seen.update(
                {
                    "steps": books.num_steps > 3,
                    "copies": books.num_copied > 3,
                    "out of blocks": not books.free,
                    "blocks that sequences had are free": bool(set(books.free) - besides),
                    "shared with who stays": bool(held & private),
                    "several tenants": len(self.counts) > 1 and bool(self.runs),
                    "two lendings": len(self.lendings) > 1,
                    "cleared": any(run.forgotten for run in lent.now),
                    "held": bool(lent.beams._device.books.held),
                }
            )


@pytest.mark.slow
def test_random_lives_with_beams_find_nothing() -> None:
    """Every law, every beam's KV and the host's view hold, in lives that reach all these states."""
    reach_all(Reached, (3,), with_storage=[True])


class Mended(PrefixCache):
    """A cache that is repaired before each snapshot, although nothing is broken."""

    def snapshot(self) -> Any:
        """Repair, then take the snapshot."""
        with self._lock:
            recovery.mend(self, KeyboardInterrupt())
        return super().snapshot()

    def snapshot_in_slices(self, pause: Any = None) -> Any:
        """Repair, then take the snapshot in slices."""
        self.snapshot()
        return super().snapshot_in_slices(pause)


@pytest.mark.slow
def test_repairs_while_beams_are_lent_find_nothing() -> None:
    """The cache is repaired again and again, and lent beams notice nothing."""
    lives = max(EXAMPLES // 4, 5)
    report = properties.run(Mended, lives, 40, SEED, machine=properties.BeamMachine, with_storage=[True])
    assert report.ok, report.failure
