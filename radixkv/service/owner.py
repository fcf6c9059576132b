"""Who a request belongs to: one value, from the check of its key to the last byte of its answer.

    key checked ──▶ Owner ──▶ queue ──▶ engine (``as_of``) ──▶ promises, bill, orders to other replicas ──▶ answer

A purge, a clear, a removal or a revocation ends what came before it, wherever that waits. The engine's cache refuses to
open a request that came before what it belongs to was forgotten. Everything else asks ``require``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixkv.engines.protocol import Counting
from radixkv.service.problems import revoked

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.engines import Engine
    from radixkv.engines.protocol import Tally
    from radixkv.metering.meter import Payer


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant and the key of a request, and the moment when it came.

    - ``payer``: who pays, of all tenants that ever had this name.
    - ``as_of``: ``EngineCache.endings.num`` when it came, before its key was checked.
    - ``keys``: returns the ids of the keys in force; None if the request has no key that is known here.
    """

    payer: Payer
    as_of: int
    engine: Engine
    keys: Callable[[], Collection[str]] | None = None

    @property
    def tenant(self) -> str:
        """Its tenant."""
        return self.payer.tenant

    @property
    def key_id(self) -> str:
        """The id of its key; empty without one."""
        return self.payer.key

    def require_key(self) -> None:
        """Raise ApiError 401 if its key was revoked meanwhile."""
        if self.keys is not None and self.payer.key not in self.keys():
            raise revoked()

    def require(self, namespace: Namespace | None = None) -> None:
        """Raise StaleGeneration if its tenant was purged or removed meanwhile, ApiError 401 if its key was revoked.

        ``namespace``: of a request that waits; also if that was cleared.
        """
        self.engine.cache.endings.require_current(self.tenant if namespace is None else namespace, self.as_of)
        self.require_key()

    @property
    def names_tenant(self) -> dict[str, str]:
        """Fields of an order to another replica: which tenant of the name it is for. None without a keys file."""
        return {"incarnation": self.payer.incarnation} if self.payer.incarnation else {}

    def count_reads(self, num_tokens: int) -> None:
        """Let the tenant's statistics count tokens that the request read without a run of the engine.

        Raises StaleGeneration if its tenant was purged or removed meanwhile: then it read nothing.
        """
        if isinstance(self.engine.cache, Counting):
            self.engine.cache.count_reads(self.tenant, num_tokens, as_of=self.as_of)

    def tallied(self, tally: Tally) -> dict[str, Any]:
        """Arguments for a call of the engine that keeps up a tally, if it has that ability."""
        return self.arguments | ({"tally": tally} if "tally" in self.engine.abilities else {})

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for a call of the engine. Without its ability "as_of", it may begin what is forgotten just now."""
        return {"as_of": self.as_of} if "as_of" in self.engine.abilities else {}
