"""Pins: prefixes that stay resident for a time, whatever is asked for meanwhile, within a budget of their tenant.

A pin is a lease with an end: it holds the last node of its prefix like a running request, so the policy doesn't see
what is pinned, the law of guarantees counts it as in use (``eviction``), a split doesn't disturb it, and what an
interrupted call leaves behind is mended as for any lease. What is added here is who pins how much, and until when.

- **Budget.** A tenant pins at most ``Registry.pin_budget`` blocks; what several of its pins share counts once. Block
  tables of one tenant, sorted as bytes, are a tree of common beginnings: what a pin adds is what neither of its
  neighbours has. O(log pins) comparisons, no count a node or a block.
- **Time.** A pin ends when its time is over; somebody looks about once a second in upkeep, when a request is short of
  room, and when its tenant asks for its counts. Requests pay nothing for it. A request ends its own tenant's pins, and
  others' only where the pool is short and they borrow: so what a strict tenant sees never depends on others, and what
  others see doesn't as long as there is room.
- A clear or a purge ends the pins of what it forgets.

``lock`` is the cache's; every method is called under it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from radixkv.blocks import unpack
from radixkv.errors import ArgumentError, LeaseError, NotResident, PinBudgetExceeded
from radixkv.types import ID_BYTES

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache
    from radixkv.clock import Clock
    from radixkv.eviction import Evictor
    from radixkv.leases import Lease, Match
    from radixkv.namespaces import Namespace
    from radixkv.tenants import NamespaceTree, TenantState

MAX_TTL_S: Final = 366 * 86_400.0
"""Longest time of a pin; it may be pinned again before it ends."""

SLICE_PINS: Final = 16
"""Pins of a cleared tree that end before others get the lock."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix, as it was when it was told of.

    id: of the tenant's own; no other pin of the tenant ever gets it. num_tokens, num_blocks: of the whole prefix.
    ttl_s: seconds that were left.
    """

    id: int
    namespace: Namespace
    num_tokens: int
    num_blocks: int
    ttl_s: float


class Held:
    """A pin and its lease. ``until``: on the cache's clock."""

    __slots__ = ("id", "lease", "table", "tree", "until")

    def __init__(self, pin_id: int, lease: Lease, until: float) -> None:
        assert lease._node is not None
        self.id, self.lease, self.until = pin_id, lease, until
        self.table = lease._packed
        self.tree = cast("NamespaceTree", lease._node.tree)

    @property
    def prefix(self) -> tuple[Namespace, bytes]:
        """What is pinned; two namespaces may pin the very blocks of a base."""
        return self.tree.namespace, self.table


class TenantPins:
    """The pins of one tenant. ``num_blocks``: how many blocks they hold, each counted once."""

    __slots__ = ("_due", "_tables", "by_id", "by_prefix", "last_id", "num_blocks")

    def __init__(self) -> None:
        self.last_id = 0
        self.by_id: dict[int, Held] = {}
        self.settle()

    def settle(self) -> None:
        """Make everything anew that follows from ``by_id``. O(pins log pins)."""
        self.by_prefix = {held.prefix: held for held in self.by_id.values()}
        self._tables: list[bytes] = []
        self.num_blocks = 0
        for _, table in self.by_prefix:
            self.num_blocks += self.new_blocks(table)
            insort(self._tables, table)
        self._due = [(held.until, held.id) for held in self.by_id.values()]
        heapify(self._due)

    def new_blocks(self, table: bytes) -> int:
        """How many blocks of a table no other pin has. O(log pins) comparisons."""
        at = bisect_left(self._tables, table)
        beside = [*self._tables[max(at - 1, 0) : at], *self._tables[at : at + 2]]
        shared = [_num_common(table, other) for other in beside]
        return len(table) // ID_BYTES - max(shared, default=0)

    def add(self, held: Held) -> None:
        """A pin of a prefix that no other is of."""
        self.num_blocks += self.new_blocks(held.table)
        insort(self._tables, held.table)
        self.by_prefix[held.prefix] = held
        self.by_id[held.id] = held
        self.keep_until(held, held.until)

    def keep_until(self, held: Held, until: float) -> None:
        """Set its end anew. O(log pins), amortised."""
        held.until = until
        if len(self._due) > 2 * len(self.by_id) + 64:  # mostly of ends that were set anew
            self._due = [(each.until, each.id) for each in self.by_id.values()]
            heapify(self._due)
        else:
            heappush(self._due, (until, held.id))

    def discard(self, held: Held) -> None:
        """Without this one."""
        del self.by_id[held.id]
        del self.by_prefix[held.prefix]
        del self._tables[bisect_left(self._tables, held.table)]
        self.num_blocks -= self.new_blocks(held.table)

    def next_due(self, now: float) -> Held | None:
        """A pin whose time is over, or None. O(1), amortised."""
        while self._due and self._due[0][0] <= now:
            until, pin_id = self._due[0]
            held = self.by_id.get(pin_id)
            if held is not None and held.until == until:
                return held
            heappop(self._due)
        return None


class Pins:
    """The pins of one cache. ``leases``: the cache's."""

    def __init__(self, clock: Clock, evictor: Evictor, leases: set[Lease]) -> None:
        self._clock, self._evictor, self._leases = clock, evictor, leases
        self.tenants: dict[str, TenantPins] = {}
        self._num_held = 0

    @property
    def cache(self) -> PrefixCache | None:
        """Whose pins these are, as long as there are any: without, nothing here keeps the cache alive."""
        for own in self.tenants.values():
            for held in own.by_id.values():
                return cast("PrefixCache", held.lease._index)
        return None

    # --- a pin's life

    def renew(self, match: Match, num_tokens: int, ttl_s: float, budget: int) -> Pin | None:
        """The pin of exactly this match, to hold for ``ttl_s`` from now on; None if there is none, and may be one.

        ``num_tokens``: of the prefix that is to be pinned. Raises NotResident and PinBudgetExceeded.
        """
        if match.num_tokens < num_tokens:
            raise NotResident(num_tokens, match.num_tokens)
        own = self.tenants.get(match.namespace.tenant) or TenantPins()
        held = own.by_prefix.get((match.namespace, match._packed))
        if held is not None:
            own.keep_until(held, self._clock() + ttl_s)
            return self._told(held)
        needed = own.new_blocks(match._packed)
        if own.num_blocks + needed > budget:
            raise PinBudgetExceeded(needed, budget, own.num_blocks)
        return None

    def hold(self, lease: Lease, ttl_s: float) -> Pin:
        """A new pin with this lease."""
        node = lease._node
        assert node is not None
        own = self.tenants.setdefault(cast("NamespaceTree", node.tree).namespace.tenant, TenantPins())
        own.last_id += 1
        held = Held(own.last_id, lease, self._clock() + ttl_s)
        own.add(held)
        self._num_held += 1
        self._evictor.on_need = self.make_room
        return self._told(held)

    def unpin(self, pin: Pin) -> None:
        """End a pin. Raises LeaseError for one that has ended already, or that another cache told of."""
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

    def told(self, tenant: str | None) -> list[Pin]:
        """The pins that hold, of one tenant or of all, the oldest first."""
        now = self._clock()
        return [
            self._told(held)
            for tenant_id, own in self.tenants.items()
            if tenant is None or tenant_id == tenant
            for held in own.by_id.values()
            if held.until > now and not held.tree.detached
        ]

    # --- their end

    def make_room(self, requester: TenantState | None, pool_is_short: bool) -> None:
        """End what is due: a requester's own and, if the pool is short, what others borrow; of all tenants for None.

        O(1), O(tenants with pins) for the others, and what is due. When a tenant's own end doesn't depend on others:
        its policy hears of it, so that the order, and all that follows, would tell.
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
        """End what is due of one tenant's. O(1), and what is due."""
        own = self.tenants.get(tenant)
        if own is not None:
            now = self._clock()
            while (held := own.next_due(now)) is not None:
                self._end(own, held)

    def end_in(self, tree: NamespaceTree) -> int:
        """End some pins of a cleared tree, at most SLICE_PINS; returns how many. O(the tenant's pins)."""
        own = self.tenants.get(tree.namespace.tenant)
        if own is None:
            return 0
        ended = [held for held in own.by_id.values() if held.tree is tree][:SLICE_PINS]
        for held in ended:
            self._end(own, held)
        return len(ended)

    def _end(self, own: TenantPins, held: Held) -> None:
        """Moves no node of a tree that can be reached, for a call may be about to lease one."""
        held.lease._is_open = False  # first: what an interrupted end leaves is settled by that
        self._leases.discard(held.lease)
        own.discard(held)
        node = held.lease._node
        assert node is not None
        self._evictor.release(node, held.tree, False)
        self._num_held -= 1
        if not self._num_held:
            self._evictor.on_need = None

    def settle(self) -> None:
        """After an interruption: keep the pins whose lease is open and whose tree can be reached, end the others."""
        for own in self.tenants.values():
            for held in list(own.by_id.values()):
                is_reached = held.tree.tenant.trees.get(held.tree.place) is held.tree
                if not (held.lease.is_open and held.lease in self._leases and is_reached):
                    held.lease._is_open = False
                    self._leases.discard(held.lease)
                    del own.by_id[held.id]
            own.settle()
        self._num_held = sum([len(own.by_id) for own in self.tenants.values()])
        self._evictor.on_need = self.make_room if self._num_held else None

    # --- counts

    def num_blocks(self, tenant: str | None = None) -> int:
        """Blocks that pins hold, of one tenant or of all."""
        return sum(own.num_blocks for own in self._of(tenant))

    def num_pins(self, tenant: str | None = None) -> int:
        """Pins of one tenant or of all."""
        return sum(len(own.by_id) for own in self._of(tenant))

    def _of(self, tenant: str | None) -> list[TenantPins]:
        return [own for tenant_id, own in self.tenants.items() if tenant is None or tenant_id == tenant]

    def _told(self, held: Held) -> Pin:
        lease = held.lease
        left_s = held.until - self._clock()
        return Pin(held.id, held.tree.namespace, lease.num_tokens, len(held.table) // ID_BYTES, left_s)


def require_ttl(ttl_s: object) -> float:
    """Seconds that a pin may hold. Raises ArgumentError for anything else."""
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= MAX_TTL_S:
        raise ArgumentError("ttl_s", ttl_s, f"seconds > 0, at most {MAX_TTL_S:.0f}")
    return float(ttl_s)


def _borrows(owner: TenantState) -> bool:
    """Whether an end of the owner's pins could make room for others."""
    return owner.protected_blocks > owner.guaranteed_blocks


def _num_common(one: bytes, other: bytes) -> int:
    """In how many blocks two tables agree before they differ or one ends."""
    size = min(len(one), len(other)) // ID_BYTES * ID_BYTES
    differs = unpack(one[:size]) != unpack(other[:size])
    return int(np.argmax(differs)) if differs.any() else size // ID_BYTES
