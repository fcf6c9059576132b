"""Quotas of tenants over all replicas: the limits that operators set, and this replica's shares of them.

An operator sets a limit on one replica. The store keeps it, and it binds all replicas. Each replica reads the limits of
the tenants that it has met, in turn, and applies the last one it read. The fleet secret signs tenant, blocks and stamp,
so a writer to the store without the secret can neither limit a tenant nor lift its limit.

A replica reads the current limit and writes a higher stamp. The highest stamp wins; a withdrawal has a stamp too. If a
store loses a limit, or goes back to an earlier one, any replica that remembers the limit writes it again.

A share is an absolute number and is written again with every beat, so a lost number repairs itself. While the store is
unreachable the last grant stays valid.

Bounds: 65,536 limits and 4,096 shares, about 200 bytes each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from radixkv.clock import Clock
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.store.protocol import Durable, Grant, Share, Store
from radixkv.coordination.store.wire import NO_LIMIT, Limit
from radixkv.coordination.validation import check_tenant
from radixkv.coordination.values import Writer
from radixkv.errors import ArgumentError, CapacityError, StaleEpoch, StoreUnavailable, UnreadableRecord

log = logging.getLogger("radixkv.coordination")

_MAX_LIMITS = 65_536
_MAX_SHARES = 4_096
_MAX_BLOCKS = 10**15 - 1
_ITEM_BYTES = 200
_TRIES = 8
"""Each failed try means that another operator set a limit at the same moment."""


class Limits:
    """The limits that are known here. Thread-safe."""

    def __init__(self, keys: FleetKeys, store: Store, wall: Clock = time.time) -> None:
        """``wall``: seconds since 1970, for stamps in ms. A wrong clock makes stamps greater, never smaller."""
        self._keys, self._store, self._wall = keys, store, wall
        self._known: OrderedDict[bytes, Limit] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def known(self) -> dict[bytes, Limit]:
        """Return the last limit of each tenant, by its digest, withdrawals included. Local."""
        with self._lock:
            return dict(self._known)

    def of(self, tenant: bytes) -> Limit:
        """Return the last limit of a tenant; ``NO_LIMIT`` if there is none. Local."""
        return self._known.get(tenant, NO_LIMIT)

    def state(self, tenant: bytes, blocks: int | None) -> Durable:
        """Set a limit; a limit equal to the current one is written once more. Raises StoreUnavailable.

        One call of the store, if its limit is the one known here; two more for each change by others.
        """
        stands = self.of(tenant)
        for _ in range(_TRIES):
            last = max(self.of(tenant), self._proven(tenant, stands), key=_by_stamp)
            if not last.stamp or last.blocks != blocks:
                stamp = max(last.stamp + 1, int(self._wall() * 1000))
                last = Limit(blocks, stamp, self._keys.limit_proof(tenant, stamp, blocks))
            written = self._store.set_limit(tenant, last, stands.stamp)
            if written.value:
                self._keep(tenant, last)
                return Durable(blocks or 0, written.replicated)
            (looked,) = self._store.look_at([tenant])
            if looked is None:
                raise StoreUnavailable("a tenant's limit can't be read: its shard can't be reached")
            stands = looked.limit
        raise StoreUnavailable("other replicas keep changing this tenant's limit; try again")

    def compare(self, tenant: bytes, stands: Limit) -> None:
        """Take over the store's limit, or write back the one that it has lost. Raises StoreUnavailable."""
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


class Quotas:
    """This replica's shares, and the limits that they count against.

    ``restate`` may be called by one thread at a time, the rest from any thread.
    """

    def __init__(
        self, keys: FleetKeys, store: Store, fingerprint: str, is_registered: Callable[[Writer], bool]
    ) -> None:
        """``fingerprint``: of the model; shares count in its blocks. ``is_registered``: asks the store."""
        self._keys, self._store, self._fingerprint = keys, store, fingerprint
        self._is_registered = is_registered
        self.limits = Limits(keys, store)
        self._wanted: dict[str, int] = {}
        self._grants: dict[str, Grant] = {}

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of shares and limits."""
        return (len(self._wanted) + len(self._grants) + len(self.limits)) * _ITEM_BYTES

    def granted(self, tenant: str) -> Grant | None:
        """Return the last grant; local."""
        return self._grants.get(tenant)

    def set_limit(self, tenant: str, blocks: int | None) -> Durable:
        """Set the tenant's limit over the fleet. Raises StoreUnavailable."""
        return self.limits.state(self._keys.tenant(tenant), blocks)

    def reserve(self, writer: Writer, tenant: str, blocks: int, keep_s: float) -> Grant:
        """Request blocks for this replica to hold. Raises ArgumentError, CapacityError, StoreUnavailable.

        CapacityError: 4,096 other tenants hold a share here.
        """
        check_tenant(tenant)
        _check_blocks(blocks)
        if tenant not in self._wanted and len(self._wanted) >= _MAX_SHARES:
            raise CapacityError(f"{_MAX_SHARES} tenants hold a share here, the most that a replica keeps")
        grant = self._reserve(writer, tenant, blocks, keep_s)
        if blocks:
            self._wanted[tenant], self._grants[tenant] = blocks, grant
        else:
            self._wanted.pop(tenant, None)
            self._grants.pop(tenant, None)
        return grant

    def restate(self, writer: Writer, keep_s: float) -> None:
        """Write every share again. Raises StoreUnavailable."""
        for tenant, blocks in list(self._wanted.items()):
            try:
                self._grants[tenant] = self._reserve(writer, tenant, blocks, keep_s)
            except UnreadableRecord as error:  # only this tenant is affected: its last grant stays valid
                log.warning("%s", error)

    def _reserve(self, writer: Writer, tenant: str, blocks: int, keep_s: float) -> Grant:
        """Write a share under the limit that is known here; a different limit in the store is compared with it first.

        A share of a greater epoch fences this replica only if the registration is another's too, because shares aren't
        signed. Otherwise nothing is granted until that share expires. Raises StaleEpoch, StoreUnavailable,
        UnreadableRecord.
        """
        digest, share = self._keys.tenant(tenant), Share(*writer, self._fingerprint, blocks)
        for _ in range(_TRIES):
            grant = self._store.reserve(digest, share, keep_s, self.limits.of(digest))
            if grant.verdict == "STALE":
                (looked,) = self._store.look_at([digest])
                if looked is None:
                    raise StoreUnavailable("a tenant's limit can't be read: its shard can't be reached")
                self.limits.compare(digest, looked.limit)
            elif grant.verdict == "FENCED" and self._is_registered(writer):
                log.warning(
                    "no share is granted to tenant %s: an unregistered process still holds one", digest.hex()
                )
                return Grant("OK", 0, grant.others, grant.limit)
            elif grant.verdict == "FENCED":
                raise StaleEpoch(f"replica {writer.replica_id} is fenced: a younger process holds its share")
            else:
                return grant
        raise UnreadableRecord(f"no replica wrote the limit of tenant {digest.hex()} in the store")


def check_limit(tenant: object, blocks: object) -> None:
    """Raise ArgumentError unless this can be a tenant's limit over the fleet."""
    check_tenant(tenant)
    if blocks is not None:
        _check_blocks(blocks)


def _by_stamp(limit: Limit) -> tuple[int, str]:
    return limit.stamp, limit.proof


def _check_blocks(blocks: object) -> None:
    if not isinstance(blocks, int) or isinstance(blocks, bool) or not 0 <= blocks <= _MAX_BLOCKS:
        raise ArgumentError("blocks", blocks, f"an integer from 0 to {_MAX_BLOCKS}")
