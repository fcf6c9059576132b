"""Quotas of the fleet, tested replica by replica with a store and a clock in memory: which limit binds each replica."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.clock import ManualClock
from radixkv.config import Tenant
from radixkv.coordination import Settings
from radixkv.coordination.memory_coordinator import MemoryCoordinator
from radixkv.coordination.store.memory import MemoryStore
from radixkv.errors import StoreUnavailable
from radixkv.service.auth import Keyring
from radixkv.service.fleet.quotas import Quotas
from radixkv.service.key_store import KeyStore
from radixkv.service.schemas.tenants import TenantSettings
from radixkv.service.tenant_sync import TenantSync

NUM_BLOCKS = 64


class Replica:
    """The parts of a service that handle quotas, without a model. It acts only when a test calls it."""

    def __init__(self, name: str, store: MemoryStore, **tenants: dict[str, Any]) -> None:
        settings = Settings(name, b"the secret of the fleet", "fp", 16, f"http://{name}", background=False)
        self.coordinator = MemoryCoordinator(settings, store)
        self.cache = PrefixCache(CacheConfig(num_blocks=NUM_BLOCKS, block_size=16, default_tenant=None))
        tenant_sync = TenantSync(self.cache, self.coordinator)
        self.keys = KeyStore(Keyring([], {name: TenantSettings(**each) for name, each in tenants.items()}))
        self.keys.on_change = tenant_sync.take
        tenant_sync.take(self.keys.ring)
        self.quotas = Quotas(
            self.cache.config.num_blocks, self.coordinator, lambda: self.keys.ring, tenant_sync
        )
        self.coordinator.register()

    def put(self, tenant: str, **settings: Any) -> None:
        self.keys.put_tenant(tenant, TenantSettings(**settings))
        self.quotas.say(tenant)

    def beat(self) -> None:
        self.coordinator.beat()
        self.quotas.step()

    @property
    def standing(self) -> tuple[int | None, int | None, int]:
        """The limit and the share of acme, and how many blocks the cache really grants."""
        ids, space = list(range(NUM_BLOCKS * 16)), Namespace("acme", "fp")
        limit, share = self.quotas.limit("acme"), self.quotas.granted("acme")
        for num_blocks in range(NUM_BLOCKS, 0, -1):
            try:
                with self.cache.open(space, ids[: num_blocks * 16]):
                    break
            except Exception as error:  # noqa: BLE001 - any error that reports a lack of blocks
                assert type(error).__name__ == "QuotaExceeded", error
        audit.check(self.cache, at_once=True)
        return limit, share, num_blocks


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(ManualClock(1_000.0))


def beaten(*replicas: Replica) -> list[tuple[int | None, int | None, int]]:
    for _ in range(3):
        for each in replicas:
            each.beat()
    return [each.standing for each in replicas]


def test_a_limit_set_on_one_replica_binds_all(store: MemoryStore) -> None:
    a, b = Replica("a", store, acme={}), Replica("b", store, acme={"max_blocks": 12})
    assert beaten(a, b) == [(None, None, 64), (None, None, 12)]
    a.put("acme", fleet_blocks=41)
    assert a.quotas.limit("acme") == 41
    assert beaten(a, b) == [(41, 21, 21), (41, 12, 12)], "b's own limit still applies"
    b.put("acme", fleet_blocks=10)
    assert beaten(a, b) == [(10, 5, 5), (10, 5, 5)]
    b.put("acme", fleet_blocks=10)
    a.put("acme", fleet_blocks=41)
    assert beaten(a, b) == [(41, 21, 21), (41, 20, 20)], "an equal limit, set again later, wins"
    b.put("acme")
    assert beaten(a, b) == [(None, None, 64), (None, None, 64)], (
        "a's own settings do not bring the limit back"
    )


def test_a_replica_that_drains_keeps_an_equal_share(store: MemoryStore) -> None:
    a, b = Replica("a", store, acme={"fleet_blocks": 30}), Replica("b", store, acme={})
    assert beaten(a, b) == [(30, 15, 15)] * 2
    b.coordinator.drain()
    c = Replica("c", store, acme={})
    assert beaten(a, b, c) == [(30, 10, 10)] * 3


def test_limits_added_to_or_removed_from_settings_are_published(store: MemoryStore) -> None:
    a = Replica("a", store, acme={"fleet_blocks": 40})
    assert beaten(a) == [(40, 40, 40)]
    b = Replica("b", store, acme={})
    assert b.coordinator.limits() == {"acme": 40}, "b learned it with its first beat"
    assert beaten(a, b) == [(40, 20, 20), (40, 20, 20)]
    c = Replica("c", store, acme={"fleet_blocks": 30})
    assert beaten(a, b, c) == [(30, 10, 10)] * 3
    c.keys.put_tenant("acme", TenantSettings())  # as if a person or another replica had changed the keys file
    assert beaten(a, b, c) == [(None, None, 64)] * 3
    a.keys.put_tenant("acme", TenantSettings(fleet_blocks=6))
    assert beaten(a, b, c) == [(6, 2, 2)] * 3
    a.keys.remove_tenant("acme")
    for each in (a, b, c):
        each.beat()
    assert b.coordinator.limits() == c.coordinator.limits() == {}
    assert a.coordinator.quotas.granted("acme") is None


def test_a_limit_set_while_the_store_is_away_is_published_later(store: MemoryStore) -> None:
    a, b = Replica("a", store, acme={}), Replica("b", store, acme={})
    assert beaten(a, b) == [(None, None, 64)] * 2
    store.is_reachable = False
    with pytest.raises(StoreUnavailable):
        a.put("acme", fleet_blocks=8)
    assert a.standing == (8, None, 64), "set, and not in force yet"
    store.is_reachable = True
    assert beaten(a, b) == [(8, 4, 4)] * 2
    store.is_reachable = False
    assert a.standing == (8, 4, 4), "the granted share stays in force"


def test_a_limit_below_a_replicas_guarantees(store: MemoryStore) -> None:
    """A guarantee shrinks to the share.

    If its blocks were promised to others meanwhile, it grows back once they are free.
    """
    a, b = Replica("a", store, acme={}), Replica("b", store, acme={"guaranteed_blocks": 50})
    assert beaten(a, b) == [(None, None, 64)] * 2
    a.put("acme", fleet_blocks=20)
    assert beaten(a, b) == [(20, 10, 10)] * 2
    b.cache.add_tenant(Tenant("other", guaranteed_blocks=40))
    a.put("acme")
    (of_a, of_b) = beaten(a, b)
    assert of_a == (None, None, 64) and of_b == (None, None, 10), "b grants only what it can keep"
    b.cache.remove_tenant("other")
    assert beaten(a, b) == [(None, None, 64)] * 2
