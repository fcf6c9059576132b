"""Purges of tenants: here, in the store, and on other replicas.

    operator ──▶ forget here ──▶ raise the tenant's generation in the store ──▶ notify other replicas now (signed)
    another replica's request ──▶ forget here, whatever is in the store ──▶ apply the raises in the store

A replica that can't be notified reads the generation in the store with its next beat.

This replica forgets first, because the store may hang or be down. The coordinator forgets here again after the raise,
because requests may have added something in between.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from radixkv.coordination.store.wire import Raised
from radixkv.engines.protocol import pending_of, purge
from radixkv.errors import CoordinationError

if TYPE_CHECKING:
    from radixkv.clock import Clock
    from radixkv.coordination.purges import Purge
    from radixkv.engines import EngineCache
    from radixkv.service.fleet.job_table import JobTable
    from radixkv.service.fleet.peers import Fleet
    from radixkv.service.fleet.pins import FleetPins
    from radixkv.service.limits import Gate
    from radixkv.service.tenant_sync import TenantSync
    from radixkv.service.threads import Threads

_AGAIN_S = 5.0
"""Seconds until a failed purge of a removed tenant is tried again."""


class TenantPurges:
    """Forgets everything of a tenant. To be used from the event loop's thread."""

    def __init__(
        self,
        fleet: Fleet,
        cache: EngineCache,
        threads: Threads,
        tenant_sync: TenantSync,
        gate: Gate,
        jobs: JobTable,
        fleet_pins: FleetPins,
        clock: Clock,
    ) -> None:
        self._fleet, self._coordinator = fleet, fleet.coordinator
        self._cache, self._administer = cache, threads.administer
        self._tenant_sync, self._gate = tenant_sync, gate
        self._jobs, self._fleet_pins = jobs, fleet_pins
        self._clock, self._again_at = clock, float("-inf")
        self._purged_at: dict[str, int] = {}
        """Removed tenants that the fleet has purged, and which removal that was: a disk here owes them."""

    async def purge(self, tenant: str, *, waits: bool = True) -> tuple[int, Purge]:
        """Forget everything of a tenant, here and on all replicas.

        Returns the number of blocks here, and the purge's progress. ``waits``: some seconds for a disk here.

        Raises CoordinationError if the store can't be reached. The tenant is then forgotten here, and on the replicas
        that could be notified.
        """
        num_blocks = await self._administer(partial(self._forget, tenant))
        self._jobs.forget(tenant)
        try:
            pins = await self._administer(partial(self._coordinator.fleet_pins, tenant))
            purge = await self._administer(partial(self._coordinator.purge, tenant))
            self._jobs.sweep()
            await self._fleet_pins.purged(tenant, pins)
            await self._fleet.send_purge(tenant, self._coordinator.purges.raised(tenant))
            if waits:
                await self._settle(tenant)
            if not purge.is_complete:
                purge = await self._administer(partial(self._coordinator.purge_report, tenant))
        except CoordinationError:
            await self._fleet.send_purge(tenant)
            if waits:
                await self._settle(tenant)
            raise
        return num_blocks, purge

    def _forget(self, tenant: str) -> int:
        return purge(self._cache, tenant)

    async def _settle(self, tenant: str) -> None:
        pending = pending_of(self._cache, tenant)
        if pending:
            await self._administer(pending.wait)

    async def purge_removed(self, *, waits: bool = False) -> None:
        """Purge tenants that were removed, for example from the keys file.

        A tenant stays unpurged while a disk here owes its purge. Calls within 5 seconds after a failure do nothing.
        ``waits``: see ``purge``. Raises CoordinationError.
        """
        if not self._tenant_sync.unpurged or self._clock() < self._again_at:
            return
        for tenant in self._tenant_sync.unpurged:
            removal = self._tenant_sync.num_removals(tenant)
            if self._purged_at.get(tenant) != removal:
                await self._purge_removed(tenant, waits)
                self._purged_at[tenant] = removal
            if not pending_of(self._cache, tenant) and self._tenant_sync.num_removals(tenant) == removal:
                del self._purged_at[tenant]
                self._tenant_sync.purged(tenant)

    async def _purge_removed(self, tenant: str, waits: bool) -> None:
        self._gate.forget(tenant)
        self._jobs.forget(tenant)
        await self._fleet_pins.removed(tenant)
        self._again_at = self._clock() + _AGAIN_S
        await self.purge(tenant, waits=waits)
        self._again_at = float("-inf")

    async def receive(self, tenant: str, raised: Raised) -> None:
        """Purge a tenant here at another replica's request, then apply the raises in the store.

        ``raised``: the tenant's generation and its proof; generation 0 if the other replica couldn't raise it. Raises
        ArgumentError for a wrong proof. Raises CoordinationError if the store can't be reached; the tenant is purged
        here nevertheless.
        """
        try:
            if raised.generation:
                await self._administer(partial(self._coordinator.apply_purge, tenant, raised))
            else:
                await self._purge_here(tenant)
            await self._settle(tenant)
            await self._administer(self._coordinator.apply_purges)
        except CoordinationError:
            await self._purge_here(tenant)
            raise
        finally:
            self._jobs.sweep()

    async def _purge_here(self, tenant: str) -> None:
        await self._administer(partial(self._forget, tenant))
        self._jobs.forget(tenant)
