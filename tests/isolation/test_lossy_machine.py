"""Random lives of a cache with lossy tiers: what comes back is its own, but for small errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import ClassVar

import pytest

from radixkv import PrefixCache
from radixkv.audit import invariants, properties
from radixkv.audit.properties.material import Mirror
from radixkv.config import LOSSY_DTYPES
from radixkv.storage.lossy_codec import LossyCodec
from radixkv.tiers.ladder import Ladder
from tests.isolation.lives import EXAMPLES, SEED, finds

LIVES = max(EXAMPLES // 10, 20)


class CountedLossy(properties.LossyMachine):
    """Counts what comes back in all lives, by dtype. All memory works, and each index keeps the laws."""

    loaded: ClassVar[Counter[str]] = Counter()

    def laws(self) -> None:
        super().laws()
        below = self.cache._below
        assert isinstance(below, Ladder)
        for counts in below.counts().values():
            assert counts["open"] and not counts["errors"], "host memory failed"
        invariants.check(below.host.cache)

    def _came(self, run: Mirror) -> None:
        before = run.num_committed
        super()._came(run)
        CountedLossy.loaded[self.cache.config.tier_dtype] += run.num_committed - before


def report(examples: int, seed: int) -> properties.PropertyReport:
    return properties.run(
        PrefixCache, examples, 50, seed, machine=CountedLossy, with_storage=[True], shrink=False
    )


@pytest.mark.slow
def test_random_lives_find_nothing() -> None:
    CountedLossy.loaded = Counter()
    found = report(LIVES, SEED)
    assert found.ok, found.failure
    assert min(CountedLossy.loaded[dtype] for dtype in LOSSY_DTYPES) > LIVES // 10


# --- planted bugs


def scales_of_another_vector(patch: pytest.MonkeyPatch) -> None:
    original = LossyCodec._scales
    patch.setattr(LossyCodec, "_scales", lambda self, values: original(self, values).roll(1, -1))


def records_of_the_block_beside(patch: pytest.MonkeyPatch) -> None:
    original = LossyCodec.decode
    patch.setattr(
        LossyCodec, "decode", lambda self, records: [each.roll(1, 0) for each in original(self, records)]
    )


def a_purge_that_skips_the_tiers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ladder, "forgetting", lambda self, scope: nullcontext())


LOSSY_BUGS = [scales_of_another_vector, records_of_the_block_beside, a_purge_that_skips_the_tiers]


@pytest.mark.slow
@pytest.mark.parametrize("plant", LOSSY_BUGS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert finds(report)
