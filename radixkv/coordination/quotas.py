"""What operators say that tenants may use on all replicas together, as one replica knows it.

A limit is said to one replica, stands in the store, and binds all: each looks at the limits of the tenants that it has
met, in turn, and keeps to what it read last. The fleet's secret signs tenant, blocks and stamp, so nobody who can only
write to the store can bind a tenant or free it. Whoever is told reads what stands, and takes a greater stamp: of two
words the later holds, and a withdrawal is a word too. A store that lost one, or went back to an earlier one, is told
again by any replica that remembers it.

Bounded: 65,536 tenants, about 200 bytes each.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from radixkv.clock import Clock
from radixkv.coordination.store.protocol import Durable, Store
from radixkv.coordination.store.wire import NO_LIMIT, Limit
from radixkv.errors import StoreUnavailable

if TYPE_CHECKING:
    from radixkv.coordination.keys import FleetKeys

_MAX_LIMITS = 65_536
_TRIES = 8
"""Each that fails is another operator's word at the same moment."""


class Limits:
    """See the module's docstring. Thread-safe."""

    def __init__(self, keys: FleetKeys, store: Store, wall: Clock = time.time) -> None:
        """``wall``: seconds since 1970, for stamps in ms; a clock that is wrong makes greater stamps, never smaller."""
        self._keys, self._store, self._wall = keys, store, wall
        self._known: OrderedDict[bytes, Limit] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def known(self) -> dict[bytes, Limit]:
        """The last word on each tenant, by its digest; also withdrawals. Local."""
        with self._lock:
            return dict(self._known)

    def of(self, tenant: bytes) -> Limit:
        """The last word on a tenant; ``NO_LIMIT`` if there is none. Local."""
        return self._known.get(tenant, NO_LIMIT)

    def state(self, tenant: bytes, blocks: int | None) -> Durable:
        """Say what holds from now on; the same as stands is written once more. Raises StoreUnavailable."""
        for _ in range(_TRIES):
            (looked,) = self._store.look_at([tenant])
            if looked is None:
                raise StoreUnavailable("a tenant's limit can't be read: its shard is away")
            last = max(self.of(tenant), self._proven(tenant, looked.limit), key=_by_stamp)
            if not last.stamp or last.blocks != blocks:
                stamp = max(last.stamp + 1, int(self._wall() * 1000))
                last = Limit(blocks, stamp, self._keys.limit_proof(tenant, stamp, blocks))
            written = self._store.set_limit(tenant, last, looked.limit.stamp)
            if written.value:
                self._keep(tenant, last)
                return Durable(blocks or 0, written.replicated)
        raise StoreUnavailable("others change this tenant's limit all the time")

    def compare(self, tenant: bytes, stands: Limit) -> None:
        """Take what stands in the store, or give it back what it has lost. Raises StoreUnavailable."""
        mine = self.of(tenant)
        if stands == mine:
            return
        proven = self._proven(tenant, stands)
        if _by_stamp(proven) > _by_stamp(mine):
            self._keep(tenant, proven)
        elif mine.stamp:
            self._store.set_limit(tenant, mine, stands.stamp)

    def _proven(self, tenant: bytes, limit: Limit) -> Limit:
        is_proven = limit.stamp and self._keys.is_limit_proof(limit.proof, tenant, limit.stamp, limit.blocks)
        return limit if is_proven else NO_LIMIT

    def _keep(self, tenant: bytes, limit: Limit) -> None:
        with self._lock:
            if _by_stamp(limit) >= _by_stamp(self.of(tenant)):
                self._known[tenant] = limit
                self._known.move_to_end(tenant)
            if len(self._known) > _MAX_LIMITS:
                self._known.popitem(last=False)


def _by_stamp(limit: Limit) -> tuple[int, str]:
    return limit.stamp, limit.proof
