"""Quotas of the fleet: what a tenant may use on all replicas of a model together, and this replica's share of it.

The limit is what an operator set last, at any replica: by ``PUT``, or by a keys file that begins to name one, also at a
replica's start. It is in the store, and binds replicas whose own settings don't name it too.
Each live replica may have an equal share. A replica states its share in the store as a number of blocks, valid for a
lease. The store grants what the limit leaves beside the others' shares, so shares never add up to more. After a join, a
replica over its share shrinks here first, then updates the store; the new replica gets its share at its next step.
Without the store the last grant holds. No request waits for any of this: the cache has a limit, and keeps to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from radixkv.errors import ArgumentError

if TYPE_CHECKING:
    from radixkv.coordination.coordinator import Coordinator
    from radixkv.index.cache import PrefixCache
    from radixkv.service.auth import Keyring
    from radixkv.service.schemas.tenants import TenantSettings
    from radixkv.service.tenant_sync import TenantSync


class Quotas:
    """Keeps this replica's shares. Thread-safe; ``step`` is called again and again."""

    def __init__(
        self,
        cache: PrefixCache,
        coordinator: Coordinator,
        ring: Callable[[], Keyring],
        tenant_sync: TenantSync,
    ) -> None:
        self._cache, self._coordinator, self._ring, self._tenant_sync = cache, coordinator, ring, tenant_sync
        self._named: dict[str, int | None] = {}
        self._said: set[str] = set()
        self._limits: dict[str, int] = {}
        self._lock = threading.Lock()

    def say(self, tenant: str) -> None:
        """An operator has just said here what holds for a tenant, or removed it: state that now.

        Even if it is what was said here before, since others may have been told otherwise. Raises CoordinationError;
        then a later step states it.
        """
        self._said.add(tenant)
        with self._lock:
            self._state()

    def limit(self, tenant: str) -> int | None:
        """What the tenant may use on all replicas together, whoever was told; None: no limit. Local."""
        settings = self._ring().settings.get(tenant)
        own = None if settings is None else settings.fleet_blocks
        is_news = tenant in self._said or own != self._named.get(tenant)
        return own if is_news else self._limits.get(tenant)

    def granted(self, tenant: str) -> int | None:
        """This replica's share of that, in force; None if there is none. Local."""
        return None if self.limit(tenant) is None else self._tenant_sync.granted(tenant)

    def step(self) -> None:
        """State what was said here, and all shares as they ought to be now.

        Two calls of the store for each tenant with a quota at most, and three for each of which something was said.
        Raises CoordinationError.
        """
        with self._lock:
            for tenant, settings in self._state().items():
                if tenant in self._limits:
                    self._keep(tenant, self._limits[tenant], settings)
                elif self._tenant_sync.granted(tenant) is not None:
                    self._coordinator.reserve(tenant, 0)
                    self._hold(tenant, None)

    def _state(self) -> Mapping[str, TenantSettings]:
        """State what was said, and what the settings here have begun, or ceased, to name; these settings."""
        said = set(self._said)
        settings = self._ring().settings  # read later, so that it has what was said
        named = {tenant: each.fleet_blocks for tenant, each in settings.items()}
        news = {
            tenant for tenant in named.keys() | self._named if named.get(tenant) != self._named.get(tenant)
        }
        for tenant in sorted(said | news):
            self._coordinator.set_limit(tenant, named.get(tenant))
            self._named[tenant] = named.get(tenant)
            self._said.discard(tenant)
        for tenant in self._named.keys() - named.keys():
            self._coordinator.reserve(tenant, 0)
        self._named, self._limits = named, self._coordinator.limits()
        return settings

    def _keep(self, tenant: str, limit: int, settings: TenantSettings) -> None:
        wanted = min(self._equal_share(limit), settings.max_blocks or self._cache.config.num_blocks)
        if wanted < (self._tenant_sync.granted(tenant) or 0) and not self._hold(tenant, wanted):
            return
        grant = self._coordinator.quotas.granted(tenant)
        if grant is None or grant.blocks != wanted:
            grant = self._coordinator.reserve(tenant, wanted)
        self._hold(tenant, grant.blocks)

    def _equal_share(self, limit: int) -> int:
        """What is left over goes to the first by name."""
        info = self._coordinator.info()
        names = sorted(
            each.id for each in [info, *self._coordinator.peers()] if each.fingerprint == info.fingerprint
        )
        return limit // len(names) + (names.index(info.id) < limit % len(names))

    def _hold(self, tenant: str, blocks: int | None) -> bool:
        """Hold the tenant to so much; False while that can't be, as what runs holds more."""
        try:
            self._tenant_sync.grant(tenant, blocks)
        except ArgumentError:
            return False
        return True
