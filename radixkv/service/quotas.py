"""Quotas of the fleet: what a tenant may use on all replicas of a model together, and this replica's share of it.

Each live replica may have an equal share. It is stated in the store, absolute, and counts for a lease; the store grants
what the limit leaves beside the others' shares, so they never add up to more. Whoever has too much, as one has
joined, gives back first here and then there; whoever joined gets it at its next step. Without the store the
last grant holds. Nothing of this is on the path of a request: the cache is told of a limit, and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.errors import ArgumentError

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache
    from radixkv.coordination.base import BaseCoordinator
    from radixkv.service.auth import Keyring
    from radixkv.service.schemas.tenants import TenantSettings
    from radixkv.service.tenancy import Tenancy


class Quotas:
    """Keeps this replica's shares. ``step`` by one thread at a time, again and again."""

    def __init__(
        self,
        cache: PrefixCache,
        coordinator: BaseCoordinator,
        ring: Callable[[], Keyring],
        tenancy: Tenancy,
    ) -> None:
        self._cache, self._coordinator, self._ring, self._tenancy = cache, coordinator, ring, tenancy
        self._limits: dict[str, tuple[int, int]] = {}

    def granted(self, tenant: str) -> int | None:
        """This replica's share of a tenant's quota, in force; None if it has none. Local."""
        return self._tenancy.granted(tenant)

    def step(self) -> None:
        """State all shares as they ought to be now. Two calls of the store a tenant with a quota at most.

        Raises CoordinationError.
        """
        limited = {
            tenant: settings
            for tenant, settings in self._ring().settings.items()
            if settings.fleet_blocks is not None
        }
        for tenant in [tenant for tenant in self._limits if tenant not in limited]:
            self._coordinator.set_limit(tenant, None)
            self._coordinator.reserve(tenant, 0)
            del self._limits[tenant]
        for tenant, settings in limited.items():
            self._keep(tenant, settings)

    def _keep(self, tenant: str, settings: TenantSettings) -> None:
        limit = settings.fleet_blocks
        assert limit is not None
        stated = self._coordinator.info().epoch, limit
        if self._limits.get(tenant) != stated:
            self._coordinator.set_limit(tenant, limit)
            self._limits[tenant] = stated
        wanted = min(self._equal_share(limit), settings.max_blocks or self._cache.config.num_blocks)
        if wanted < (self._tenancy.granted(tenant) or 0) and not self._give_back(tenant, wanted):
            return
        grant = self._coordinator.tenants.granted(tenant)
        if grant is None or grant.blocks != wanted:
            grant = self._coordinator.reserve(tenant, wanted)
        self._give_back(tenant, grant.blocks)

    def _equal_share(self, limit: int) -> int:
        """What is left over goes to the first by name."""
        info = self._coordinator.info()
        names = sorted(
            each.id for each in [info, *self._coordinator.peers()] if each.fingerprint == info.fingerprint
        )
        return limit // len(names) + (names.index(info.id) < limit % len(names))

    def _give_back(self, tenant: str, blocks: int) -> bool:
        """Hold the tenant to so much; False while what runs holds more."""
        try:
            self._tenancy.grant(tenant, blocks)
        except ArgumentError:
            return False
        return True
