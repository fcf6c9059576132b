"""What tenants may have behind an engine that knows none: their settings, for host memory and the disk.

    configure      sets tenants before the first step, and again for the names that other keys give them
    set_tenant     (of a control channel) guarantee, limit, weight and mode, in blocks of host memory
    host memory    its index is the cache that gets them (``control_tenants``); strict tenants get slots of their own
    disk           as much of it as the blocks are of host memory; nothing of strict tenants
    forgetting     a purge, a clear or a removal reaches the disk, which forgets the whole tenant

What a control channel sets doesn't outlive the process. Tenants that must be strict from the start on are configured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from radixkv.engines.control.tenants import TenantCommands
from radixkv.errors import ArgumentError, ConfigError, RadixKVError
from radixkv.forks import OwnLock
from radixkv.index.below import Scope
from radixkv.signing import KeySet
from radixkv.tenancy.salt import SaltReader
from radixkv.tiers.pending import Pending

if TYPE_CHECKING:
    from radixkv.engines.vllm.steps import VllmSteps

OWED: Final = "disk_owed_purges"
"""The metric of ``take_owed``."""


class LevelTenants:
    """Lets host memory, and a disk if there is one, follow the settings of its index's tenants."""

    def __init__(self, level: VllmSteps) -> None:
        self._level, self._lock = level, OwnLock()
        self._to_own: dict[str, int] = {}
        self._told_owed = 0

    def configure(self, tenants: Mapping[str, Mapping[str, Any]], keys: KeySet) -> None:
        """Set tenants by the fleet's names, with fields of ``config.Tenant``, for salts of these keys. Any thread.

        Raises ConfigError, which names the tenant.
        """
        commands = TenantCommands(self._level.cache, SaltReader(keys), self.follow)
        for name, given in tenants.items():
            try:
                commands.set({**given, "tenant": name}, b"")
            except RadixKVError as error:
                raise ConfigError(
                    f"tenants[{name!r}]", dict(given), "settings that can be kept", problem=str(error)
                ) from None

    def follow(self, tenant: str) -> None:
        """Follow the settings that a tenant has now; None of them takes its quotas back. Any thread."""
        with self._lock:
            settings = self._level.cache.tenant(tenant)
            is_strict = settings is not None and settings.mode == "strict"
            self._to_own[tenant] = settings.guaranteed_blocks if settings is not None and is_strict else 0
            if self._level.disk is not None:
                self._level.disk.follow(tenant, settings)

    @contextmanager
    def forgetting(self, scope: Scope) -> Iterator[Pending]:
        """Within this, host memory forgets something of a tenant, and the disk forgets the tenant. Any thread.

        Yields what the disk still has to destroy afterwards. To wait for it isn't for the engine's thread.
        """
        if self._level.disk is None:
            yield Pending()
        else:
            with self._level.disk.forgetting(scope) as pending:
                yield pending

    def is_on_disk(self, tenant: str) -> bool:
        """Whether the disk has, or may have, records of a tenant. Any thread."""
        return self._level.disk is not None and self._level.disk.records.folder.is_known(tenant)

    def take_owed(self) -> dict[str, int]:
        """Return how many purges the disk owes, by the name of the metric; nothing if that is as at the last call."""
        purges = None if self._level.disk is None else self._level.disk.purges
        told, self._told_owed = self._told_owed, 0 if purges is None else purges.num_owed
        return {} if self._told_owed == told else {OWED: self._told_owed}

    def begin_step(self) -> None:
        """Give strict tenants their slots, and take them back. The engine's thread calls it. O(1) without a change."""
        if not self._to_own:
            return
        with self._lock:
            changes, self._to_own = self._to_own, {}
        index = self._level.index
        for tenant, num_slots in sorted(changes.items(), key=lambda each: each[1] - index.own_slots(each[0])):
            if index.own_slots(tenant) == num_slots:
                continue
            try:
                index.set_strict(tenant, num_slots)
            except ArgumentError:  # another one's change, which makes room, hasn't come yet: it keeps nothing
                with self._lock:
                    self._to_own.setdefault(tenant, num_slots)
