"""From keys to tenants: the only place that gives the list of tenants to the cache and the fleet.

The cache has exactly the tenants of the keyring, told apart by their incarnations: the same name with another one is
another tenant. Tenants that are gone are removed first. Then the settings of each tenant are applied on their own:
guarantees that shrink first, those that grow last. One that can't be kept leaves that tenant as it was.

Tenants whose settings don't say how much they may pin have equal parts of a quarter of the pool, so that prompt caching
with TTLs works without further settings, and pins leave most of the pool to everybody's requests.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from radixkv.config import Tenant
from radixkv.engines.protocol import Tiered
from radixkv.errors import ArgumentError, ConfigError, ControlError, RadixKVError
from radixkv.service.auth import Keyring
from radixkv.service.problems import store_unavailable

if TYPE_CHECKING:
    from radixkv.coordination.coordinator import Coordinator
    from radixkv.engines import EngineCache
    from radixkv.service.schemas.tenants import TenantSettings


_PINNABLE: Final = 4
"""Tenants may pin one part of so many of the pool by default, all together."""


def pin_share(num_blocks: int, num_tenants: int) -> int:
    """Return how many blocks a tenant may pin by default.

    The number of tenants is rounded up to a power of two. So it rarely changes, and with it the settings of all.
    """
    return num_blocks // (_PINNABLE << max(num_tenants - 1, 0).bit_length())


class TenantSync:
    """Keeps the cache's tenants equal to the keyring's. Thread-safe."""

    def __init__(self, cache: EngineCache, coordinator: Coordinator, num_blocks: int = 0) -> None:
        """``num_blocks``: of the pool, of which tenants may pin a part by default."""
        self._cache, self._coordinator, self._num_blocks = cache, coordinator, num_blocks
        self._pin_share = 0
        self._told: dict[str, Tenant] = {}
        self._settings: dict[str, TenantSettings] = {}
        self._granted: dict[str, int] = {}
        self._removals: dict[str, int] = {}
        self._unpurged: set[str] = set()
        self._leaving: set[str] = set()  # being removed, perhaps again and again
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
                own = settings.tenant(tenant, blocks, self._pin_share)
                held = replace(own, incarnation=self._told[tenant].incarnation)
                self._add(held)
                self._told[tenant] = held
                if blocks is None:
                    del self._granted[tenant]
                else:
                    self._granted[tenant] = blocks

    def take(self, ring: Keyring) -> dict[str, RadixKVError]:
        """Remove, add and change tenants to match the ring. Returns, by name, why one couldn't be removed or set.

        Such a tenant stays as it was; a new one isn't added. A later call tries it again. It doesn't wait for a disk,
        which owes what removed tenants had.
        """
        with self._lock:
            return self._take(ring)

    def _add(self, tenant: Tenant) -> None:
        if isinstance(self._cache, Tiered):
            self._cache.add_tenant(tenant, wait_s=0.0)
        else:
            self._cache.add_tenant(tenant)

    def _take(self, ring: Keyring) -> dict[str, RadixKVError]:
        refused: dict[str, RadixKVError] = {}
        for name, told in [*self._told.items()]:
            if name not in ring.settings or ring.incarnation(name) != told.incarnation:
                try:
                    self._remove(name)
                except (ArgumentError, ControlError) as error:
                    refused[name] = error
        self._pin_share = pin_share(self._num_blocks, len(ring.settings))
        wanted: dict[str, Tenant] = {}
        for name, settings in ring.settings.items():
            try:
                own = settings.tenant(name, self._granted.get(name), self._pin_share)
                wanted[name] = replace(own, incarnation=ring.incarnation(name))
            except ArgumentError as error:
                refused.setdefault(name, error)
        for each in sorted(wanted.values(), key=self._growth):
            if each.id in refused:
                continue
            try:
                if self._told.get(each.id) != each:
                    self._add(each)
            except (ArgumentError, ConfigError, ControlError) as error:
                refused[each.id] = error
            else:
                self._told[each.id], self._settings[each.id] = each, ring.settings[each.id]
        self._coordinator.purges.meet(self._told)
        return refused

    def _growth(self, wanted: Tenant) -> int:
        told = self._told.get(wanted.id)
        return wanted.guaranteed_blocks - (0 if told is None else told.guaranteed_blocks)

    def _remove(self, tenant: str) -> None:
        if tenant not in self._leaving:  # first: nobody may take what follows for the same tenant
            self._leaving.add(tenant)
            self._removals[tenant] = self.num_removals(tenant) + 1
            self._unpurged.add(tenant)
        self._strike(tenant)
        if isinstance(self._cache, Tiered):
            self._cache.remove_tenant(tenant, wait_s=0.0)
        else:
            self._cache.remove_tenant(tenant)
        self._leaving.discard(tenant)
        del self._told[tenant], self._settings[tenant]
        self._granted.pop(tenant, None)

    def _strike(self, tenant: str) -> None:
        """Remove a tenant from the readers of bases: a later tenant of the same name is another one."""
        for base in self._cache.bases():
            if tenant in base.readers:
                self._cache.set_readers(base.base_id, [each for each in base.readers if each != tenant])
