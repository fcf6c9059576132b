"""Endings: when each tenant and each namespace was forgotten last, so that a request that came before is refused.

A request notes ``Endings.num`` when its caller is known, and gives it as ``as_of`` when it opens, however long it has
waited by then. If its tenant was purged or removed meanwhile, or its namespace was cleared, it must not compute what
was forgotten. All methods may be called from any thread, and never wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixkv.errors import StaleGeneration
from radixkv.forks import OwnLock

if TYPE_CHECKING:
    from radixkv.config import Namespace

MAX_ENDINGS: Final = 16_384
"""Endings that are kept of a tenant. Its requests that came before an older one are refused: they waited too long."""


class Endings:
    """The last endings of one cache. ``num``: how many there were. ``most``: how many are kept of each tenant.

    Each tenant has its own, so a tenant that clears often ends no other's requests.
    """

    __slots__ = ("_lock", "_most", "_tenants", "num")

    def __init__(self, most: int = MAX_ENDINGS) -> None:
        self.num, self._most = 0, most
        self._tenants: dict[str, _Ended] = {}
        self._lock = OwnLock()

    def end_tenant(self, tenant: str) -> None:
        """Note that a tenant is purged or removed."""
        self._note(tenant, hash(tenant))

    def end_namespace(self, namespace: Namespace) -> None:
        """Note that one namespace is cleared."""
        self._note(namespace.tenant, hash(namespace))

    def end_waiting(self, tenant: str, *, salt: str | None = None, adapter: str | None = None) -> None:
        """Refuse a tenant's requests that came before and haven't opened, or those with this salt or adapter.

        Call it before several namespaces are cleared: a request may wait in one that holds nothing yet.
        """
        self._note(tenant, hash((tenant, salt, adapter)))

    def require_current(self, what: Namespace | str, as_of: int) -> None:
        """Raise StaleGeneration if a request has ended that came after the first ``as_of`` endings. O(1).

        For a namespace: if ``PrefixCache.open`` would refuse it. For a tenant's id: if the tenant was purged or
        removed. This is for a request that runs, because a clear lets it go on.
        """
        if as_of == self.num:
            return
        tenant = what if isinstance(what, str) else what.tenant
        ended = self._tenants.get(tenant)
        if ended is None:
            return
        last = ended.last
        if max(ended.oldest, last.get(hash(tenant), 0)) > as_of:
            raise StaleGeneration("the tenant of this request was purged or removed since it came")
        if isinstance(what, str):
            return
        salt, adapter = what.salt, what.adapter
        newest = max(
            last.get(hash(what), 0),
            last.get(hash((tenant, None, None)), 0),
            last.get(hash((tenant, salt, None)), 0),
            last.get(hash((tenant, None, adapter)), 0),
            last.get(hash((tenant, salt, adapter)), 0),
        )
        if newest > as_of:
            raise StaleGeneration("the namespace of this request was cleared since it came")

    def _note(self, tenant: str, what: int) -> None:
        with self._lock:
            ended = self._tenants.setdefault(tenant, _Ended())
            ended.last.pop(what, None)
            ended.last[what] = self.num + 1
            if len(ended.last) > self._most:
                ended.oldest = ended.last.pop(next(iter(ended.last)))
            self.num += 1


class _Ended:
    """The endings of one tenant: the last of each kind, the oldest first, and the newest that isn't kept any more."""

    __slots__ = ("last", "oldest")

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.oldest = 0
