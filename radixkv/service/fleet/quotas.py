"""Quotas of the fleet: a tenant's limit over all replicas of a model, and this replica's share of it.

An operator sets the limit at any replica: by ``PUT``, or by a keys file that newly names one, also at a replica's
start. The last setting counts. It is in the store, and also applies to replicas whose own settings don't name it.

Each live replica may have an equal share. A replica requests its share from the store as a number of blocks, for one
lease. The store grants what the limit leaves in addition to the other replicas' shares, so the shares never exceed the
limit. After a join, a replica over its share shrinks here first, then updates the store. The new replica gets its share
at its next step. Without the store, the last grant stays in force. No request waits for any of this: the cache has a
limit and enforces it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from radixkv.errors import ArgumentError
from radixkv.service.fitting import Room

if TYPE_CHECKING:
    from radixkv.coordination.coordinator import Coordinator
    from radixkv.service.auth import Keyring
    from radixkv.service.schemas.tenants import TenantSettings
    from radixkv.service.tenant_sync import TenantSync


class Quotas:
    """Keeps this replica's shares. Thread-safe. ``step`` is called repeatedly."""

    def __init__(
        self,
        num_blocks: int,
        coordinator: Coordinator,
        ring: Callable[[], Keyring],
        tenant_sync: TenantSync,
    ) -> None:
        self._num_blocks, self._coordinator, self._ring, self._tenant_sync = (
            num_blocks,
            coordinator,
            ring,
            tenant_sync,
        )
        self._named: dict[str, int | None] = {}
        self._said: set[str] = set()
        self._limits: dict[str, int] = {}
        self._guaranteed: tuple[Keyring | None, int] = None, 0
        """A keyring, and the blocks that all of its tenants together are guaranteed."""
        self._lock = threading.Lock()

    def say(self, tenant: str) -> None:
        """Write a limit to the store now, because an operator set or removed it here.

        This happens even if the limit is the same as before, because other replicas may have written another one since.
        Raises CoordinationError; a later step then writes it.
        """
        self._said.add(tenant)
        with self._lock:
            self._state()

    def limit(self, tenant: str) -> int | None:
        """Return the tenant's limit over all replicas, wherever it was set; None: no limit. Local."""
        settings = self._ring().settings.get(tenant)
        own = None if settings is None else settings.fleet_blocks
        is_news = tenant in self._said or own != self._named.get(tenant)
        return own if is_news else self._limits.get(tenant)

    def granted(self, tenant: str) -> int | None:
        """Return this replica's share of the limit, in force; None if there is none. Local."""
        return None if self.limit(tenant) is None else self._tenant_sync.granted(tenant)

    def room(self, tenant: str) -> Room:
        """Return the blocks that a tenant can have here. Local; O(quotas), O(tenants) after a change of settings."""
        ring = self._ring()
        own, share = (
            ring.settings.get(tenant),
            self.granted(tenant) or None,
        )  # with none, its requests wait for one
        if own is not None and own.mode == "strict":
            return Room(own.guaranteed_blocks, share, self._num_blocks)
        known, total = self._guaranteed
        if known is not ring:
            total = sum(each.guaranteed_blocks for each in ring.settings.values())
            self._guaranteed = ring, total
        others = total - (0 if own is None else own.guaranteed_blocks)
        for name in [*self._limits]:  # a share may be less than the guarantee
            each, granted = ring.settings.get(name), self.granted(name)
            if each is not None and granted is not None and name != tenant:
                others -= max(each.guaranteed_blocks - granted, 0)
        limits = [each for each in (None if own is None else own.max_blocks, self.limit(tenant)) if each]
        return Room(min(limits, default=None), share, self._num_blocks - others)

    def step(self) -> None:
        """Write limits that were set here, and update all shares.

        At most two calls of the store for each tenant with a quota, and three for each tenant with a changed limit.
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
        """Write limits that were set here, and those that the settings here newly name or no longer name.

        Returns these settings.
        """
        said = set(self._said)
        settings = self._ring().settings  # read after ``_said``, so that the settings include those changes
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
        wanted = min(self._equal_share(limit), settings.max_blocks or self._num_blocks)
        if wanted < (self._tenant_sync.granted(tenant) or 0) and not self._hold(tenant, wanted):
            return
        grant = self._coordinator.quotas.granted(tenant)
        if grant is None or grant.blocks != wanted:
            grant = self._coordinator.reserve(tenant, wanted)
        self._hold(tenant, grant.blocks)

    def _equal_share(self, limit: int) -> int:
        """Return this replica's equal share. The remainder goes to the first replicas by name."""
        info = self._coordinator.info()
        names = sorted(
            each.id
            for each in [info, *self._coordinator.peers(draining=True)]
            if each.fingerprint == info.fingerprint
        )
        return limit // len(names) + (names.index(info.id) < limit % len(names))

    def _hold(self, tenant: str, blocks: int | None) -> bool:
        """Limit the tenant to this many blocks. Returns False while its running requests hold more."""
        try:
            self._tenant_sync.grant(tenant, blocks)
        except ArgumentError:
            return False
        return True
