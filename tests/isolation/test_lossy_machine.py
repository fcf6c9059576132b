"""Random lives of a cache with a lossy tenant and an exact one: whose KV may have errors, and how large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest

from radixkv import PrefixCache
from radixkv.audit import invariants, properties
from radixkv.audit.properties.lossy_machine import LOSSY
from radixkv.audit.properties.material import Mirror
from radixkv.storage.lossy_codec import LossyCodec
from radixkv.tiers.tiers_by_dtype import TiersByDtype
from tests.isolation.lives import EXAMPLES, SEED, finds
from tests.tiers.test_tier_dtype import (
    a_change_that_leaves_what_is_resident,
    a_purge_that_skips_lossy_tiers,
    lossy_served_to_an_exact_tenant,
)

LIVES = max(EXAMPLES // 10, 20)


class CountedLossy(properties.LossyMachine):
    """Counts what comes back in all lives, by dtype. All memory works, and each index keeps the laws."""

    loaded: ClassVar[Counter[str]] = Counter()

    def laws(self) -> None:
        super().laws()
        below = self.cache._below
        assert isinstance(below, TiersByDtype)
        for counts in below.counts().values():
            assert counts["open"] and not counts["errors"], "host memory failed"
        for tiers in below.tiers.values():
            invariants.check(tiers.level.cache)

    def _came(self, run: Mirror) -> None:
        before = run.num_committed
        super()._came(run)
        dtype = self.dtype if run.namespace.tenant == LOSSY else "exact"
        CountedLossy.loaded[dtype] += run.num_committed - before


def report(examples: int, seed: int) -> properties.PropertyReport:
    return properties.run(
        PrefixCache, examples, 50, seed, machine=CountedLossy, with_storage=[True], shrink=False
    )


@pytest.mark.slow
def test_random_lives_find_nothing() -> None:
    CountedLossy.loaded = Counter()
    found = report(LIVES, SEED)
    assert found.ok, found.failure
    assert min(CountedLossy.loaded[dtype] for dtype in ("exact", "fp8", "int8")) > LIVES // 10


# --- planted bugs


def scales_of_another_vector(patch: pytest.MonkeyPatch) -> None:
    original = LossyCodec._scales
    patch.setattr(LossyCodec, "_scales", lambda self, values: original(self, values).roll(1, -1))


def a_change_that_only_the_cache_hears_of(patch: pytest.MonkeyPatch) -> None:
    """What lies below of an exact tenant is what it was before: lossy."""
    patch.setattr(TiersByDtype, "add_tenant", lambda self, tenant: self._dtypes.setdefault(tenant.id, "int8"))


LOSSY_BUGS = [
    lossy_served_to_an_exact_tenant,
    pytest.param(a_change_that_leaves_what_is_resident, marks=pytest.mark.pure),
    a_purge_that_skips_lossy_tiers,
    scales_of_another_vector,
    a_change_that_only_the_cache_hears_of,
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", LOSSY_BUGS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert finds(report)
