"""Two worlds with two replicas each: the metadata store fails and returns, and A notices nothing of B.

Each world is a cache with a coordinator and its own store, and a second replica that reports its view of A's prompts.
The store is switched off, loses everything and returns, in both worlds at once. Requests of other tenants, which flood
the queue to the store, are in one world only.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from radixkv import CacheConfig, PrefixCache, Tenant
from radixkv.audit import properties
from radixkv.audit.oracle import Engine, cache_with_engine
from radixkv.audit.properties import NAMESPACES, CacheAdapter, strict_halves
from radixkv.audit.properties.adapter import OPERATOR
from radixkv.clock import ManualClock
from radixkv.coordination import Settings
from radixkv.coordination.memory_coordinator import MemoryCoordinator
from radixkv.coordination.store.memory import MemoryStore
from radixkv.errors import StaleEpoch, StoreUnavailable
from tests.isolation.lives import EXAMPLES, SEED

LIVES = max(EXAMPLES // 40, 5)
SECRET = b"the secret of the fleet under test"
MINE = [namespace for namespace in NAMESPACES if namespace.tenant == "a"]


class Replica(CacheAdapter):
    """A cache, its coordinator, and another replica that follows it. Nothing runs by itself."""

    def __init__(self, config: CacheConfig, clock: ManualClock, tenants: tuple[Tenant, ...]) -> None:
        self.config, self.clock, self.tenants = config, clock, tenants
        self.store = MemoryStore(clock)
        self.one, self.two = self._coordinator("one"), self._coordinator("two")
        super().__init__(*self._cache(), self._cache)

    def _coordinator(self, name: str) -> MemoryCoordinator:
        settings = Settings(
            name, SECRET, "m", self.config.block_size, f"http://{name}", 3600.0, False, queue_records=2
        )
        found = MemoryCoordinator(settings, self.store)
        found.register()
        return found

    def _cache(self) -> tuple[PrefixCache, Engine]:
        factory = partial(PrefixCache, journal=self.one.journal)
        cache, engine = cache_with_engine(factory, self.config, clock=self.clock)
        for tenant in self.tenants:
            cache.add_tenant(tenant)
        self.one.attach(
            cache, lambda tenant, raised: None
        )  # the cache is purged before the fleet hears of the purge
        return cache, engine

    def _restart(self) -> None:
        """The process dies, and a new coordinator takes the id."""
        self.one = self._coordinator("one")
        super()._restart()

    def _purge(self, tenant: str) -> int:
        """Purge this cache at once, and the fleet if the store is reachable."""
        forgotten = super()._purge(tenant)
        with suppress(StoreUnavailable):
            self.one.purge(tenant)
        return forgotten

    def settle(self) -> None:
        for each in (self.one, self.two):
            with suppress(StoreUnavailable, StaleEpoch):
                each.beat()
            with suppress(StoreUnavailable, StaleEpoch):
                each.publish()

    def stats(self, tenant: str) -> object:
        """This includes the other replica's view of the tenant's longest prompts, after it has read the store."""
        self.settle()
        ids = [0] * (4 * self.block_size)
        known = [[hint.num_tokens for hint in self.two.hints(each, ids)] for each in MINE]
        Outages.seen.update(hinted=any(known), overflows=self.one.health().num_overflows > 0)
        return super().stats(tenant), known if self.store.is_reachable else None


class Outages(properties.TwoRuns):
    """The two-run machine over such replicas, with strict tenants or with blocks for all."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(policy=st.integers(0, 63), is_alone=st.booleans(), mode=st.integers(0, 1), big=st.booleans())
    def make(self, policy: int, is_alone: bool, mode: int, big: bool) -> None:
        """Blocks have 64 or 128 tokens, as a store learns of segments of 256 tokens."""
        cls = type(self)
        size = 128 if big else 64
        self.is_strict = bool(mode)
        room = 16 + OPERATOR.guaranteed_blocks if mode else 512
        config = CacheConfig(room, size, policy=cls.policies[policy % len(cls.policies)])
        self.clock = ManualClock(1000.0)
        tenants = (*strict_halves(16), OPERATOR) if mode else ()
        systems = [Replica(config, self.clock, tenants) for _ in range(2)]
        self.start(systems, is_alone=is_alone, compares_all=True)
        self.may_insert = not self.is_strict

    @rule(kind=st.integers(0, 3))
    def store(self, kind: int) -> None:
        """The store goes away, returns, or returns empty."""
        for system in self.systems:
            store = system.store  # type: ignore[attr-defined]
            store.is_reachable = kind > 1
            if kind == 3:
                store.lose()
        self.seen.update(["down" if kind < 2 else "up"])


@pytest.mark.slow
def test_observations_of_a_do_not_depend_on_b_while_the_store_fails_and_returns() -> None:
    Outages.seen = Counter()
    report = properties.run(PrefixCache, LIVES, 40, seed=SEED, machine=Outages, policies=["lru", "s3fifo"])
    assert report.ok, report.failure
    assert min(Outages.seen[each] for each in ("down", "up", "hinted", "overflows")) > 0, Outages.seen
