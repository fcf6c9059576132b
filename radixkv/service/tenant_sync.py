"""From keys to tenants: the only place that gives the list of tenants to the cache and the fleet.

The cache has exactly the tenants of the keyring. A keyring is applied completely or not at all. Guarantees that shrink
are applied first, those that grow last. If one can't be kept, all changes are undone.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from radixkv.config import Tenant
from radixkv.engines.engine_protocol import without_waiting
from radixkv.errors import ArgumentError
from radixkv.service.auth import Keyring
from radixkv.service.problems import store_unavailable

if TYPE_CHECKING:
    from radixkv.coordination.coordinator import Coordinator
    from radixkv.engines import EngineCache
    from radixkv.service.schemas.tenants import TenantSettings


class TenantSync:
    """Keeps the cache's tenants equal to the keyring's. Thread-safe."""

    def __init__(self, cache: EngineCache, coordinator: Coordinator) -> None:
        self._cache, self._coordinator = cache, coordinator
        self._told: dict[str, Tenant] = {}
        self._settings: dict[str, TenantSettings] = {}
        self._granted: dict[str, int] = {}
        self._removals: dict[str, int] = {}
        self._unpurged: set[str] = set()
        self._lock = threading.Lock()

    def num_removals(self, tenant: str) -> int:
        """Return how often a tenant of this name was removed here, to distinguish it from an earlier one."""
        return self._removals.get(tenant, 0)

    def era(self, tenant: str) -> tuple[int, bytes]:
        """Return a value that changes when a tenant is purged, anywhere, or removed here. Local."""
        return self.num_removals(tenant), self._coordinator.job_owner(tenant)

    def require_purged(self, tenant: str) -> None:
        """Raise ApiError 503 while the fleet may have records of a removed tenant of this name."""
        if tenant in self._unpurged:
            message = (
                "a tenant with this id was removed, and not all of its records are purged yet; try again"
            )
            raise store_unavailable(message)

    @property
    def unpurged(self) -> frozenset[str]:
        """Return the names that were removed here and weren't purged in the fleet since."""
        return frozenset(self._unpurged)

    def purged(self, tenant: str) -> None:
        """Record that a removed tenant was purged in the fleet."""
        self._unpurged.discard(tenant)

    def granted(self, tenant: str) -> int | None:
        """Return this replica's share of a tenant's quota, in force; None if it has none, or none was granted yet."""
        return self._granted.get(tenant)

    def grant(self, tenant: str, blocks: int | None) -> None:
        """Limit a tenant to this share of its quota; None: no share. Raises ArgumentError if that can't be kept."""
        with self._lock:
            settings = self._settings.get(tenant)
            if settings is not None and self._granted.get(tenant) != blocks:
                held = settings.tenant(tenant, blocks)
                self._tell([held])
                self._told[tenant] = held
                if blocks is None:
                    del self._granted[tenant]
                else:
                    self._granted[tenant] = blocks

    def take(self, ring: Keyring) -> None:
        """Add, change and remove tenants to match the ring. If it raises ArgumentError, nothing is changed.

        It doesn't wait for a disk, which owes what removed tenants had.
        """
        with self._lock, without_waiting(self._cache):
            self._take(ring)

    def _take(self, ring: Keyring) -> None:
        self._granted = {name: blocks for name, blocks in self._granted.items() if name in ring.settings}
        wanted = {
            name: settings.tenant(name, self._granted.get(name)) for name, settings in ring.settings.items()
        }
        gone = [Tenant(name) for name in self._told if name not in wanted]
        self._tell([*gone, *(each for each in wanted.values() if self._told.get(each.id) != each)])
        for each in gone:
            self._removals[each.id] = self.num_removals(each.id) + 1
            self._unpurged.add(each.id)
            self._strike(each.id)
            self._cache.remove_tenant(each.id)
        self._told, self._settings = wanted, dict(ring.settings)
        self._coordinator.purges.meet(wanted)

    def _strike(self, tenant: str) -> None:
        """Remove a tenant from the readers of bases: a later tenant of the same name is another one."""
        for base in self._cache.bases():
            if tenant in base.readers:
                self._cache.set_readers(base.base_id, [each for each in base.readers if each != tenant])

    def _tell(self, changed: list[Tenant]) -> None:
        before = {each.id: self._told.get(each.id) for each in changed}

        def growth(each: Tenant) -> int:
            old = before[each.id]
            return each.guaranteed_blocks - (0 if old is None else old.guaranteed_blocks)

        done: list[Tenant] = []
        try:
            for each in sorted(changed, key=growth):
                self._cache.add_tenant(each)
                done.append(each)
        except ArgumentError:
            for each in reversed(done):
                old = before[each.id]
                if old is None:
                    self._cache.remove_tenant(each.id)
                else:
                    self._cache.add_tenant(old)
            raise
