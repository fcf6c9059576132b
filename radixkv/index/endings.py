"""Endings: when each tenant and each namespace was forgotten last, so that a request that came before is refused.

A request notes ``Endings.num`` when its caller is known, and gives it as ``as_of`` when it opens. Between the two it may
wait for long. If its tenant was purged or removed meanwhile, or its namespace was cleared, it must not compute what was
forgotten. All methods are called under the cache's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixkv.errors import StaleGeneration

if TYPE_CHECKING:
    from radixkv.config import Namespace

MAX_ENDINGS: Final = 65_536
"""Endings that are kept. A request that came before an older one is refused in any namespace: it has waited too long."""


class Endings:
    """The last endings of one cache. ``num``: how many there were. ``most``: how many are kept."""

    __slots__ = ("_last", "_most", "_oldest", "num")

    def __init__(self, most: int = MAX_ENDINGS) -> None:
        self.num, self._most = 0, most
        self._oldest = 0
        self._last: dict[int, int] = {}

    def end(self, tenant: str, salt: str | None, adapter: str | None) -> None:
        """Note that a tenant's namespaces are forgotten: all, or those with this salt and adapter (None: any)."""
        self._note(hash((tenant, salt, adapter)))

    def end_namespace(self, namespace: Namespace) -> None:
        """Note that one namespace is forgotten."""
        self._note(hash(namespace))

    def require_current(self, namespace: Namespace, as_of: int) -> None:
        """Raise StaleGeneration if the namespace was forgotten after the first ``as_of`` endings. O(1)."""
        if as_of == self.num:
            return
        last, tenant, salt, adapter = self._last, namespace.tenant, namespace.salt, namespace.adapter
        newest = max(
            self._oldest,
            last.get(hash(namespace), 0),
            last.get(hash((tenant, None, None)), 0),
            last.get(hash((tenant, salt, None)), 0),
            last.get(hash((tenant, None, adapter)), 0),
            last.get(hash((tenant, salt, adapter)), 0),
        )
        if newest > as_of:
            raise StaleGeneration("what this request belongs to was purged, cleared or removed since it came")

    def _note(self, what: int) -> None:
        self.num += 1
        self._last.pop(what, None)
        self._last[what] = self.num
        if len(self._last) > self._most:
            self._oldest = self._last.pop(next(iter(self._last)))
