"""Pins: prefixes that stay resident for a time, within a budget of their tenant.

A pin is a lease with an end. It holds the last node of its prefix like a running request. So the policy doesn't see
pinned nodes, guarantees count them as in use (``eviction``), a split doesn't disturb them, and recovery treats them
like any lease. This module adds how much each tenant pins, and until when.

- **Budget.** A tenant pins at most ``Registry.pin_budget`` blocks. Blocks that several of its pins share count once. A
  tenant's block tables, sorted as bytes, form a tree of common prefixes. So a pin adds the blocks that neither of its
  neighbours has. This takes O(log pins) comparisons and no count per node or block.
- **Number.** A tenant has at most ``Tenant.max_pins`` pins. The budget doesn't limit the number: pins of the same
  blocks in several namespaces, as of a base under several salts, use no budget. Each pin costs about 2 KiB.
- **Time.** A pin ends when its time is over. Expiry is checked by maintenance about once a second, when a request needs
  blocks, and when a tenant asks for its counts. Other requests pay nothing. A request ends its own tenant's expired
  pins. It ends those of others only if the pool is short and they borrow. So what a strict tenant sees never depends on
  others. For other tenants this holds as long as the pool isn't full.
- A clear or a purge ends the pins of what it forgets. Each tree knows its pins, so this costs only the ended pins.

``lock`` is the cache's lock. Every method is called under it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from radixkv.errors import ArgumentError, LeaseError, NotResident, PinBudgetExceeded, PinLimitExceeded
from radixkv.index.blocks import unpack
from radixkv.index.tokens import ID_BYTES

if TYPE_CHECKING:
    from radixkv.clock import Clock
    from radixkv.config import Namespace
    from radixkv.index.eviction import Evictor
    from radixkv.index.holders import LeaseState
    from radixkv.index.locking import Owner
    from radixkv.index.match import Match
    from radixkv.index.tenants import NamespaceTree, TenantState
    from radixkv.index.tree import Node

MAX_TTL_S: Final = 366 * 86_400.0
"""Longest time of a pin. A pin can be renewed before it ends."""

SLICE_PINS: Final = 64
"""Pins that maintenance ends before other threads may take the lock."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix, at the moment of the call that returned it.

    - ``id``: unique among the tenant's pins and never reused.
    - ``num_tokens``, ``num_blocks``: of the whole prefix.
    - ``ttl_s``: seconds that were left.
    """

    id: int
    namespace: Namespace
    num_tokens: int
    num_blocks: int
    ttl_s: float


class Held:
    """A pin and its lease. ``until``: the end, on the cache's clock."""

    __slots__ = ("id", "lease", "table", "tree", "until")

    def __init__(self, pin_id: int, lease: LeaseState, until: float) -> None:
        assert lease._node is not None
        self.id, self.lease, self.until = pin_id, lease, until
        self.table = lease._packed
        self.tree = cast("NamespaceTree", lease._node.tree)

    def share(self, table: bytes) -> None:
        """Use this copy of the block table, so that pins of the same blocks share one copy."""
        self.table = self.lease._packed = table

    @property
    def prefix(self) -> tuple[Namespace, bytes]:
        """The pinned prefix. Two namespaces may pin the same blocks of a base."""
        return self.tree.namespace, self.table


class TenantPins:
    """The pins of one tenant. ``num_blocks``: how many blocks they hold, each counted once."""

    __slots__ = ("_due", "_tables", "_users", "by_id", "by_prefix", "last_id", "num_blocks")

    def __init__(self) -> None:
        self.last_id = 0
        self.by_id: dict[int, Held] = {}  # sorted by id
        self.settle()

    def settle(self) -> None:
        """Rebuild everything that follows from ``by_id``. O(pins log pins)."""
        self.by_prefix: dict[tuple[Namespace, bytes], Held] = {}
        self._tables: list[bytes] = []  # without duplicates
        self._users: dict[bytes, int] = {}
        self.num_blocks = 0
        for held in self.by_id.values():
            self._count(held)
        self._due = [(held.until, held.id) for held in self.by_id.values()]
        heapify(self._due)

    def new_blocks(self, table: bytes) -> int:
        """Count the blocks of a table that no other pin has. O(log pins) comparisons."""
        if table in self._users:
            return 0
        at = bisect_left(self._tables, table)
        shared = [_num_common(table, other) for other in self._tables[max(at - 1, 0) : at + 1]]
        return len(table) // ID_BYTES - max(shared, default=0)

    def add(self, held: Held) -> None:
        """Add a pin of a prefix that isn't pinned yet."""
        self._count(held)
        self.by_id[held.id] = held
        self.keep_until(held, held.until)

    def _count(self, held: Held) -> None:
        """Count the pin's blocks. Pins with the same table are counted once."""
        if held.table in self._users:
            held.share(self._tables[bisect_left(self._tables, held.table)])
        else:
            self.num_blocks += self.new_blocks(held.table)
            insort(self._tables, held.table)
        self._users[held.table] = self._users.get(held.table, 0) + 1
        self.by_prefix[held.prefix] = held

    def keep_until(self, held: Held, until: float) -> None:
        """Set a new end of the pin. O(log pins), amortised."""
        held.until = until
        if len(self._due) > 2 * len(self.by_id) + 64:  # most entries are old ends of renewed pins
            self._due = [(each.until, each.id) for each in self.by_id.values()]
            heapify(self._due)
        else:
            heappush(self._due, (until, held.id))

    def discard(self, held: Held) -> None:
        """Remove this pin."""
        del self.by_id[held.id]
        del self.by_prefix[held.prefix]
        self._users[held.table] -= 1
        if not self._users[held.table]:
            del self._users[held.table]
            del self._tables[bisect_left(self._tables, held.table)]
            self.num_blocks -= self.new_blocks(held.table)

    def later(self, after: int) -> Iterator[Held]:
        """Yield pins with a greater id, sorted by id. Copies the ids unless ``after`` is 0."""
        if not after:
            return iter(self.by_id.values())
        ids = list(self.by_id)
        return (self.by_id[pin_id] for pin_id in ids[bisect_right(ids, after) :])

    def next_due(self, now: float) -> Held | None:
        """Return an expired pin, or None. O(1), amortised."""
        while self._due and self._due[0][0] <= now:
            until, pin_id = self._due[0]
            held = self.by_id.get(pin_id)
            if held is not None and held.until == until:
                return held
            heappop(self._due)
        return None


class Pins:
    """The pins of one cache. ``leases``: the cache's leases."""

    def __init__(self, clock: Clock, evictor: Evictor, leases: set[LeaseState]) -> None:
        self._clock, self._evictor, self._leases = clock, evictor, leases
        self.tenants: dict[str, TenantPins] = {}
        self._in: dict[NamespaceTree, dict[int, Held]] = {}
        self._num_held = 0

    @property
    def cache(self) -> Owner | None:
        """The cache, as long as there are pins. Without pins, this object doesn't keep the cache alive."""
        for own in self.tenants.values():
            for held in own.by_id.values():
                return held.lease._cache
        return None

    # --- a pin's life

    def renew(self, match: Match, num_tokens: int, ttl_s: float, budget: int, limit: int) -> Pin | None:
        """Renew the pin of exactly this match for ``ttl_s`` from now on. Returns None if a new pin is needed and
        allowed.

        ``num_tokens``: tokens of the prefix to pin. ``budget``: blocks that the tenant may pin. ``limit``: pins that it
        may have. Raises NotResident, PinLimitExceeded and PinBudgetExceeded.
        """
        if match.num_tokens < num_tokens:
            raise NotResident(num_tokens, match.num_tokens)
        own = self.tenants.get(match.namespace.tenant) or TenantPins()
        held = own.by_prefix.get((match.namespace, match._packed))
        if held is not None:
            own.keep_until(held, self._clock() + ttl_s)
            return self._told(held)
        if len(own.by_id) >= limit:
            raise PinLimitExceeded(limit, len(own.by_id))
        needed = own.new_blocks(match._packed)
        if own.num_blocks + needed > budget:
            raise PinBudgetExceeded(needed, budget, own.num_blocks)
        return None

    def hold(self, lease: LeaseState, ttl_s: float) -> Pin:
        """Make a new pin with this lease."""
        node = lease._node
        assert node is not None
        own = self.tenants.setdefault(cast("NamespaceTree", node.tree).namespace.tenant, TenantPins())
        own.last_id += 1
        held = Held(own.last_id, lease, self._clock() + ttl_s)
        own.add(held)
        self._in.setdefault(held.tree, {})[held.id] = held
        self._num_held += 1
        self._evictor.on_need = self.make_room
        return self._told(held)

    def unpin(self, pin: Pin) -> None:
        """End a pin. Raises LeaseError for a pin that has ended or that belongs to another cache."""
        own = self.tenants.get(pin.namespace.tenant) or TenantPins()
        held = own.by_id.get(pin.id)
        is_it = held is not None and (held.tree.namespace, held.lease.num_tokens) == (
            pin.namespace,
            pin.num_tokens,
        )
        if held is None or not is_it or held.tree.detached or held.until <= self._clock():
            raise LeaseError(
                "this pin has ended: it was unpinned, its time was over, or its namespace was cleared"
            )
        self._end(own, held)

    def told(self, tenant: str | None, after: int = 0, most: int | None = None) -> list[Pin]:
        """Return the active pins of one tenant or of all, oldest first: those after an id, at most ``most``."""
        now = self._clock()
        holding = (
            self._told(held)
            for own in self._of(tenant)
            for held in own.later(after)
            if held.until > now and not held.tree.detached
        )
        return list(islice(holding, most))

    # --- their end

    def make_room(self, requester: TenantState | None, pool_is_short: bool) -> None:
        """End expired pins: the requester's own and, if the pool is short, those of borrowers. For None, those of all
        tenants.

        O(1), O(tenants with pins) for the others, plus the ended pins. The end of a tenant's own pins must not depend
        on other tenants. Its policy hears of the end, so the policy's order would reveal it.
        """
        if requester is not None:
            self.end_due(requester.tenant_id)
            if not pool_is_short:
                return
        for tenant, own in self.tenants.items():
            held = own.next_due(self._clock())
            if held is not None and (requester is None or _borrows(held.tree.tenant)):
                self.end_due(tenant)

    def end_due(self, tenant: str) -> None:
        """End the expired pins of one tenant. O(1), plus the ended pins."""
        own = self.tenants.get(tenant)
        if own is not None:
            now = self._clock()
            while (held := own.next_due(now)) is not None:
                self._end(own, held)

    def end_slice(self) -> bool:
        """End at most SLICE_PINS expired pins, of all tenants. Returns True if none are left. O(tenants + ended)."""
        left, now = SLICE_PINS, self._clock()
        for own in self.tenants.values():
            while (held := own.next_due(now)) is not None:
                if not left:
                    return False
                self._end(own, held)
                left -= 1
        return True

    def end_one_in(self, tree: NamespaceTree) -> bool:
        """End one pin of a tree. Returns False if it has none. O(log pins)."""
        pins = self._in.get(tree)
        if not pins:
            return False
        _, held = pins.popitem()
        self._end(self.tenants[tree.namespace.tenant], held)
        return True

    def end_on(self, tree: NamespaceTree, nodes: set[Node]) -> None:
        """End the pins of a tree that lease one of these nodes. O(pins of the tree)."""
        for held in list(self._in.get(tree, {}).values()):
            if held.lease._node in nodes:
                self._end(self.tenants[tree.namespace.tenant], held)

    def _end(self, own: TenantPins, held: Held) -> None:
        """End a pin. Moves no node of a reachable tree, because a call may be about to lease one."""
        held.lease._is_open = False  # first: if the end is interrupted, ``settle`` finishes it
        self._leases.discard(held.lease)
        own.discard(held)
        beside = self._in[held.tree]
        beside.pop(held.id, None)
        if not beside:
            del self._in[held.tree]
        node = held.lease._node
        assert node is not None
        self._evictor.release(node, held.tree, False)
        self._num_held -= 1
        if not self._num_held:
            self._evictor.on_need = None

    def settle(self) -> None:
        """After an interruption, keep the pins with an open lease in a reachable tree. End the others."""
        for own in self.tenants.values():
            for held in list(own.by_id.values()):
                is_reached = held.tree.tenant.trees.get(held.tree.place) is held.tree
                if not (held.lease.is_open and held.lease in self._leases and is_reached):
                    held.lease._is_open = False
                    self._leases.discard(held.lease)
                    del own.by_id[held.id]
            own.settle()
        self._in = {}
        for own in self.tenants.values():
            for held in own.by_id.values():
                self._in.setdefault(held.tree, {})[held.id] = held
        self._num_held = sum([len(own.by_id) for own in self.tenants.values()])
        self._evictor.on_need = self.make_room if self._num_held else None

    # --- counts

    def num_blocks(self, tenant: str | None = None) -> int:
        """Number of blocks that pins hold, of one tenant or of all."""
        return sum(own.num_blocks for own in self._of(tenant))

    def num_pins(self, tenant: str | None = None) -> int:
        """Number of pins of one tenant or of all."""
        return sum(len(own.by_id) for own in self._of(tenant))

    def _of(self, tenant: str | None) -> Collection[TenantPins]:
        if tenant is None:
            return self.tenants.values()
        own = self.tenants.get(tenant)
        return () if own is None else (own,)

    def _told(self, held: Held) -> Pin:
        lease = held.lease
        left_s = held.until - self._clock()
        return Pin(held.id, held.tree.namespace, lease.num_tokens, len(held.table) // ID_BYTES, left_s)


def require_ttl(ttl_s: object) -> float:
    """Return the seconds that a pin may hold. Raises ArgumentError for an invalid value."""
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= MAX_TTL_S:
        raise ArgumentError("ttl_s", ttl_s, f"seconds > 0, at most {MAX_TTL_S:.0f}")
    return float(ttl_s)


def _borrows(owner: TenantState) -> bool:
    """Whether ending the owner's pins could free blocks for others."""
    return owner.protected_blocks > owner.guaranteed_blocks


def _num_common(one: bytes, other: bytes) -> int:
    """Return in how many leading blocks two tables agree."""
    size = min(len(one), len(other)) // ID_BYTES * ID_BYTES
    differs = unpack(one[:size]) != unpack(other[:size])
    return int(np.argmax(differs)) if differs.any() else size // ID_BYTES
