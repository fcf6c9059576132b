"""Where keys become tenants: the one place in which a keyring is told to the cache and the fleet.

The cache knows the tenants of the keys and nobody else. A keyring is taken whole or not at all: promises that
shrink come first, those that grow last, and if one can't be made, what was changed is changed back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.errors import ArgumentError
from radixkv.namespaces import Tenant
from radixkv.service.auth import Keyring

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache
    from radixkv.coordination.base import BaseCoordinator


class Tenancy:
    """The tenants that the cache was told. ``take`` is called by one thread at a time."""

    def __init__(self, cache: PrefixCache, coordinator: BaseCoordinator) -> None:
        self._cache, self._coordinator = cache, coordinator
        self._told: dict[str, Tenant] = {}

    def take(self, ring: Keyring) -> None:
        """Add, change and remove tenants until they are the ring's. Raises ArgumentError, and changes nothing."""
        wanted = {name: settings.tenant(name) for name, settings in ring.settings.items()}
        gone = [Tenant(name) for name in self._told if name not in wanted]
        self._tell([*gone, *(each for each in wanted.values() if self._told.get(each.id) != each)])
        for each in gone:
            self._strike(each.id)
            self._cache.remove_tenant(each.id)
        self._told = wanted
        self._coordinator.tenants.meet(wanted)

    def _strike(self, tenant: str) -> None:
        """Off the lists of bases: a tenant that is called so one day is another one."""
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
