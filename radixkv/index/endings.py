"""Endings: when each tenant and each namespace was forgotten last, so that a request that came before is refused.

A request notes ``Endings.num`` when its caller is known, and gives it as ``as_of`` when it opens, however long it has
waited by then. If its tenant was purged or removed meanwhile, or its namespace was cleared, it must not compute what
was forgotten. All methods may be called from any thread, and never wait.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from radixkv.errors import StaleGeneration

if TYPE_CHECKING:
    from radixkv.config import Namespace

MAX_ENDINGS: Final = 65_536
"""Endings that are kept. A request that came before an older one is refused anywhere: it has waited too long."""


class Endings:
    """The last endings of one cache. ``num``: how many there were. ``most``: how many are kept."""

    __slots__ = ("_last", "_lock", "_most", "_oldest", "num")

    def __init__(self, most: int = MAX_ENDINGS) -> None:
        self.num, self._most = 0, most
        self._oldest = 0
        self._last: dict[int, int] = {}
        self._lock = threading.Lock()

    def end_tenant(self, tenant: str) -> None:
        """Note that a tenant is purged or removed."""
        self._note(hash(tenant))

    def end_namespace(self, namespace: Namespace) -> None:
        """Note that one namespace is cleared."""
        self._note(hash(namespace))

    def end_waiting(self, tenant: str, *, salt: str | None = None, adapter: str | None = None) -> None:
        """Refuse a tenant's requests that came before and haven't opened, or those with this salt or adapter.

        Call it before several namespaces are cleared: a request may wait in one that holds nothing yet.
        """
        self._note(hash((tenant, salt, adapter)))

    def require_current(self, what: Namespace | str, as_of: int) -> None:
        """Raise StaleGeneration if a request has ended that came after the first ``as_of`` endings. O(1).

        For a namespace: if ``PrefixCache.open`` would refuse it. For a tenant's id: if the tenant was purged or
        removed. This is for a request that runs, because a clear lets it go on.
        """
        if as_of == self.num:
            return
        if isinstance(what, str):
            self._require_tenant(what, as_of)
            return
        last, tenant, salt, adapter = self._last, what.tenant, what.salt, what.adapter
        self._require_tenant(tenant, as_of)
        newest = max(
            last.get(hash(what), 0),
            last.get(hash((tenant, None, None)), 0),
            last.get(hash((tenant, salt, None)), 0),
            last.get(hash((tenant, None, adapter)), 0),
            last.get(hash((tenant, salt, adapter)), 0),
        )
        if newest > as_of:
            raise StaleGeneration("the namespace of this request was cleared since it came")

    def _require_tenant(self, tenant: str, as_of: int) -> None:
        if max(self._oldest, self._last.get(hash(tenant), 0)) > as_of:
            raise StaleGeneration("the tenant of this request was purged or removed since it came")

    def _note(self, what: int) -> None:
        with self._lock:
            self.num += 1
            self._last.pop(what, None)
            self._last[what] = self.num
            if len(self._last) > self._most:
                self._oldest = self._last.pop(next(iter(self._last)))
