"""Random lives of two systems with host memory below a small cache: every byte that comes back is its owner's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from radixkv.audit import properties
from radixkv.audit.oracle import Engine
from radixkv.audit.properties.adapter import CacheAdapter
from radixkv.audit.properties.material import LAYOUT, Mirror
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.index.tokens import encode
from radixkv.tiers.host.memory import HostBlocks
from radixkv.tiers.lower_tiers import LowerTiers, RowBelow
from radixkv.tiers.second_level import SecondLevel
from radixkv.tiers.settings import TierSettings
from radixkv.tiers.tiered_cache import TieredCache
from tests.isolation.lives import EXAMPLES, SEED, finds

LIVES = max(EXAMPLES // 10, 10)
BLOCKS, SIZE, HOST = 24, 2, 64 * 48


class TieredAdapter(CacheAdapter):
    """A cache with host memory below it, driven as the embedded engine drives it."""

    cache: TieredCache

    def __init__(self) -> None:
        super().__init__(*self._made(), self._made)
        self._rows: dict[Any, RowBelow] = {}
        self.num_loaded = 0

    @staticmethod
    def _made() -> tuple[TieredCache, Engine]:
        config = CacheConfig(BLOCKS, SIZE, LAYOUT, policy="lru", default_tenant=Tenant("default"))
        cache = TieredCache(config)
        cache.lower = LowerTiers(cache.storage, TierSettings(HOST), "fp", policy="lru")  # type: ignore[arg-type]
        return cache, Engine(cache)

    @property
    def lower(self) -> LowerTiers:
        assert self.cache.lower is not None
        return self.cache.lower

    def _opened(
        self, namespace: Namespace, ids: Sequence[int], call: Callable[[], Any]
    ) -> tuple[Mirror, int]:
        below = self.lower.row(namespace)
        assert below is not None
        request, cached = super()._opened(namespace, ids, call)
        try:
            found = below.load(request.sequence, encode(list(ids)))
        except BaseException:
            request.sequence.release()
            raise
        self.num_loaded += found - cached
        request.num_computed = request.num_committed = found
        self._rows[request.sequence] = below
        return request, found

    def commit(self, request: Mirror, num_tokens: int) -> None:
        super().commit(request, num_tokens)
        self._save(request)

    def fork(self, request: Mirror) -> Mirror:
        heir = super().fork(request)
        if (below := self._rows.get(request.sequence)) is not None:
            self._rows[heir.sequence] = below.fork()
        return heir

    def release(self, request: Mirror) -> None:
        if request.sequence.is_open:
            self._save(request)
        self._rows.pop(request.sequence, None)
        super().release(request)

    def _save(self, request: Mirror) -> None:
        if (below := self._rows.get(request.sequence)) is not None:
            below.save(request.sequence, encode(request.ids))

    def _restart(self) -> None:
        super()._restart()
        self._rows = {}

    def check(self) -> None:
        super().check()
        counts = self.lower.counts()["host"]
        assert counts["errors"] == 0 and counts["open"] == 1


class Counted(TieredAdapter):
    """Counts what comes back in all lives."""

    loaded = 0

    def check(self) -> None:
        super().check()
        Counted.loaded, self.num_loaded = Counted.loaded + self.num_loaded, 0


def report(examples: int, seed: int) -> properties.PropertyReport:
    return properties.run_adapter(Counted, examples, 50, seed, contents_only=True, shrink=False)


@pytest.mark.slow
def test_random_lives_find_nothing() -> None:
    Counted.loaded = 0
    found = report(LIVES, SEED)
    assert found.ok, found.failure
    assert Counted.loaded > 2 * LIVES, "host memory brought something back"


# --- planted bugs


def a_salt_lost_below(patch: pytest.MonkeyPatch) -> None:
    """Host memory is searched, and filled, without the salt."""
    _blended(patch, lambda namespace: namespace._replace(salt=""))


def a_tenant_lost_below(patch: pytest.MonkeyPatch) -> None:
    _blended(patch, lambda namespace: namespace._replace(tenant="everybody"))


def _blended(patch: pytest.MonkeyPatch, place: Callable[[Namespace], Namespace]) -> None:
    for name, at in (("found_key", 1), ("load_key", 1), ("save_key", 0)):
        original = getattr(SecondLevel, name)

        def moved(self: Any, *arguments: Any, _original: Any = original, _at: int = at) -> Any:
            namespace = place(arguments[_at])
            return _original(self, *arguments[:_at], namespace, *arguments[_at + 1 :])

        patch.setattr(SecondLevel, name, moved)


def a_failed_load_counted_as_loaded(patch: pytest.MonkeyPatch) -> None:
    """Blocks that can't be loaded are reported as loaded."""
    original = HostBlocks._copy_in

    def none(self: HostBlocks, slots: Any, blocks: Any) -> None:
        original(self, slots[:-1], blocks[:-1])

    patch.setattr(HostBlocks, "_copy_in", none)


def a_purge_that_skips_the_tier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LowerTiers, "purge", lambda self, tenant: 0)


def a_clear_that_skips_the_tier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LowerTiers, "clear", lambda self, namespace: 0)


def a_store_visible_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    """A slot counts as written before its bytes are there."""

    def early(self: HostBlocks, save: Any) -> None:
        self._stamps[save.slots] = save.step

    patch.setattr(HostBlocks, "_write", early)


def slots_that_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A load takes what another slot holds."""
    original = HostBlocks._copy_in

    def shifted(self: HostBlocks, slots: Any, blocks: Any) -> None:
        original(self, np.roll(slots, 1), blocks)

    patch.setattr(HostBlocks, "_copy_in", shifted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        a_salt_lost_below,
        a_tenant_lost_below,
        a_failed_load_counted_as_loaded,
        a_purge_that_skips_the_tier,
        a_clear_that_skips_the_tier,
        a_store_visible_before_it_is_copied,
        slots_that_are_not_compared,
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert finds(report)
