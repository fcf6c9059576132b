"""Evictor: leases, residency and victims.

Every change of nodes, and of which nodes are in use, goes through this module. So the policy hears of it, and the
tenant's ``protected_blocks`` and ``evictable_blocks`` stay correct. The operations are ``lease`` and ``release``,
``split``, ``add_leased``, and the trimming of victims.

Eviction picks a tenant (``ranking.Ranking``) and asks its policy for a victim. It trims that leaf from the tail, by
exactly the blocks needed. This costs O(blocks evicted): no heap is rebuilt and no tree is walked. The counts say in
advance whether eviction can free enough. So a refusal changes nothing.

The law of guarantees: free blocks plus borrowed evictable blocks can always give every tenant its guarantee. Borrowed
evictable blocks are each tenant's evictable blocks above its guarantee. So the law is the same as

    promised_blocks = Σ over tenants of max(protected, guaranteed) ≤ blocks of the pool

One sum decides whether a request can be granted. A tenant within its guarantee doesn't raise the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeAlias, cast

from radixkv.errors import FlushRequired, IntegrityError, OutOfBlocks, QuotaExceeded
from radixkv.index.blocks import BlockPool
from radixkv.index.changes import Journal
from radixkv.index.ranking import Ranking
from radixkv.index.scrubbing import ENGINE
from radixkv.index.tenants import NamespaceTree, TenantState
from radixkv.index.tokens import ID_BYTES, TAIL_FILL, TOKEN_BYTES, Key
from radixkv.index.tree import Node, path_between

if TYPE_CHECKING:
    from radixkv.index.tenants import Base


OnEvict: TypeAlias = Callable[[list[Node], bytes], object]
"""Hears of blocks that leave: nodes and their packed ids, in order. Of the last node only the last blocks may leave."""


class Evictor:
    """Keeps resident blocks within the pool. All methods are called under the cache's lock."""

    __slots__ = (
        "_block_size",
        "_grain",
        "_journal",
        "_pool",
        "_ranking",
        "_segment_blocks",
        "evictable_blocks",
        "has_tails",
        "on_evict",
        "on_hand_out",
        "on_need",
        "promised_blocks",
        "resident_blocks",
    )

    def __init__(
        self,
        pool: BlockPool,
        tenants: dict[str, TenantState],
        block_size: int,
        journal: Journal | None,
        segment_blocks: int = 1,
    ) -> None:
        self._pool, self._block_size, self._journal = pool, block_size, journal
        self._segment_blocks = segment_blocks
        self._grain = journal.grain_tokens if journal is not None else 0
        self._ranking = Ranking(tenants)
        self.evictable_blocks = 0  # of all tenants
        self.promised_blocks = 0
        self.resident_blocks = 0  # of all tenants
        self.has_tails = False  # whether one was ever kept (tails)
        self.on_need: Callable[[TenantState | None, bool], object] | None = None  # ends expired pins
        self.on_hand_out: Callable[[], object] | None = None  # orders the streams of a GPU
        self.on_evict: OnEvict | None = None  # hears of blocks before others get them

    # --- leases: O(1) if the node is in use already, otherwise O(ancestors that come into use)

    def lease(self, node: Node, tree: NamespaceTree) -> None:
        """Protect a node and its ancestors from eviction."""
        uses = node.uses
        node.uses = uses + 1
        if uses:
            return
        tenant, at = tree.tenant, node
        leased = tenant.on_leased
        while (parent := at.parent) is not None:
            leased(at)
            at = parent
            uses = at.uses
            at.uses = uses + 1
            if uses:
                break
        num_blocks = node.depth - at.depth
        tenant.evictable_blocks -= num_blocks
        tenant.protected_blocks = protected = tenant.protected_blocks + num_blocks
        self.evictable_blocks -= num_blocks
        if protected > tenant.guaranteed_blocks:
            self.promised_blocks += min(protected - tenant.guaranteed_blocks, num_blocks)

    def release(self, node: Node, tree: NamespaceTree, asks: bool = True) -> None:
        """Undo one ``lease``. Nodes without further uses become evictable.

        They are freed at once if the tree was cleared, or if ``asks`` is set and the policy doesn't admit them.
        """
        node.uses = uses = node.uses - 1
        if uses:
            return
        tenant, at = tree.tenant, node
        unleased = tenant.on_unleased
        while (parent := at.parent) is not None:
            unleased(at)
            at = parent
            at.uses = uses = at.uses - 1
            if uses:
                break
        num_blocks = node.depth - at.depth
        if tenant.protected_blocks > tenant.guaranteed_blocks:
            self.promised_blocks -= min(tenant.protected_blocks - tenant.guaranteed_blocks, num_blocks)
        tenant.protected_blocks -= num_blocks
        tenant.evictable_blocks += num_blocks
        self.evictable_blocks += num_blocks
        if tenant.ranked_blocks < 0:
            self._ranking.rank(tenant)
        if tree.detached:
            freed = bytearray()
            self.reclaim(node, freed)
            self._pool.give(freed)
        elif asks and tenant.on_admit is not None:
            freed = bytearray()
            self._give_up_declined(node, tree, freed)
            self._pool.give(freed)
        if tree.root.children is None:
            tenant.drop_if_empty(tree)
            if tree.base is not None:
                self.let_go(tree.base)

    def let_go(self, base: Base) -> None:
        """Release the lease of a base that is unpublished and has no tree behind it."""
        if base.is_left:
            base.is_held = False
            self.release(base.node, base.tree)

    def _give_up_declined(self, node: Node, tree: NamespaceTree, freed: bytearray) -> None:
        """Remove nodes that the policy doesn't admit, leaf by leaf upward. Adds their ids to ``freed``. O(blocks
        freed).
        """
        tenant, at = tree.tenant, node
        admit, trimmed = tenant.on_admit, tenant.on_trimmed
        assert admit is not None
        while (parent := at.parent) is not None and not at.uses and at.children is None and not admit(at):
            if self.on_evict is not None:
                self.on_evict([at], at.block_ids)
            if trimmed is not None:
                trimmed(at, at.num_blocks)
            tenant.declined_blocks += at.num_blocks
            self.drop(at, tree, freed)
            at = parent

    def drop(self, leaf: Node, tree: NamespaceTree, freed: bytearray) -> None:
        """Remove an unused leaf of a reachable tree. Adds its ids to ``freed``. The tree may be empty then."""
        tenant, num_blocks = tree.tenant, leaf.num_blocks
        if self._journal is not None:
            self.report_removed(leaf, num_blocks)
        tenant.on_removed(leaf)
        tree.remove(leaf)
        if tree.hooks is not None:
            tree.hooks.removed(leaf)
        freed += leaf.block_ids
        tenant.evictable_blocks -= num_blocks
        self.evictable_blocks -= num_blocks
        self.count_resident(tenant, -num_blocks)

    def unprotected_above(self, node: Node) -> int:
        """Return how many evictable blocks a lease on ``node`` would protect. O(ancestors)."""
        found = 0
        at: Node | None = node
        while at is not None and not at.uses:
            found += len(at.block_ids) // ID_BYTES
            at = at.parent
        return found

    # --- residency

    def split(self, child: Node, at: int, tree: NamespaceTree) -> Node:
        """Cut a node after ``at`` label bytes and return the upper half."""
        upper = tree.split(child, at)
        if tree.tenant.on_split is not None:
            tree.tenant.on_split(upper, child, upper.num_blocks)
        if tree.hooks is not None:
            tree.hooks.split(upper, child)
        return upper

    def add_leased(
        self,
        parent: Node,
        key: bytes,
        start: int,
        stop: int,
        block_ids: bytes,
        tree: NamespaceTree,
        hints: object = None,
        ghost_keys: tuple[int, ...] | None = None,
    ) -> Node:
        """Add ``key[start:stop]`` below ``parent``. Moves a lease from ``parent`` to the deepest new node and returns
        that node.
        """
        deepest = tree.attach(parent, key, start, stop, block_ids)
        if not tree.detached:
            self.count_resident(tree.tenant, len(block_ids) // ID_BYTES)
        if tree.tenant.on_inserted is not None:
            self._tell_inserted(parent, deepest, tree, hints, ghost_keys or ())
        if tree.hooks is not None:
            tree.hooks.attached(parent, key[start : start + tree.block_bytes])
        return deepest

    def _tell_inserted(
        self, parent: Node, deepest: Node, tree: NamespaceTree, hints: object, ghost_keys: tuple[int, ...]
    ) -> None:
        """Tell the policy of the new nodes, each with the keys of the segments that end in it."""
        inserted, size = tree.tenant.on_inserted, self._segment_blocks
        assert inserted is not None
        above = None if parent is tree.root else parent
        if deepest.parent is parent:  # the usual case
            inserted(deepest, deepest.num_blocks, deepest.depth, hints, ghost_keys, above)
            return
        told = before = parent.depth // size
        for node in path_between(parent, deepest):
            passed = node.depth // size
            keys = ghost_keys[told - before : passed - before]
            inserted(node, node.num_blocks, node.depth, hints, keys, above)
            above, told = node, passed

    def grow(
        self,
        leaf: Node,
        label: bytes,
        block_ids: bytes,
        tree: NamespaceTree,
        hints: object = None,
        ghost_keys: tuple[int, ...] | None = None,
    ) -> None:
        """Add blocks in place to a leaf that has one use. O(label after), at most MAX_GROWN_LABEL_BYTES."""
        leaf.label += label
        leaf.block_ids += block_ids
        added = len(block_ids) // ID_BYTES
        leaf.depth += added
        tree.num_blocks += added
        if not tree.detached:
            self.count_resident(tree.tenant, added)
        if tree.tenant.on_extended is not None:
            tree.tenant.on_extended(leaf, added, hints, ghost_keys or ())
        if tree.hooks is not None:
            tree.hooks.grown(leaf, len(label))

    def count_resident(self, tenant: TenantState, num_blocks: int) -> None:
        """Count blocks that a match can reach from now on; a negative number if it can't any more."""
        tenant.resident_blocks += num_blocks
        self.resident_blocks += num_blocks

    # --- blocks

    @property
    def _usable_blocks(self) -> int:
        """Blocks that tenants can have: all that are not lent. If the engine owns the pool, all: it lends them."""
        return self._pool.num_blocks - (0 if self._pool.is_engines else len(self._pool.lent))

    def require(
        self, needed: int, tenant: TenantState, about_to_lease: int = 0, of_them_lent: int = 0
    ) -> int:
        """Raise unless the tenant can have ``needed`` blocks after a lease protects ``about_to_lease`` more of its own.

        Raises QuotaExceeded if its limit is too low, whatever it evicts. Raises OutOfBlocks if the pool can't give the
        blocks without those guaranteed to others. Both errors tell only the tenant's own numbers. For a bare lease,
        ``needed`` is what it protects. Returns by how much ``promised_blocks`` will rise: 0 within the guarantee. O(1).
        """
        evictable, used = tenant.evictable_blocks - about_to_lease, tenant.used_blocks
        if used - evictable + needed > tenant.max_blocks:
            raise QuotaExceeded(needed, tenant.max_blocks, used, evictable)
        protected, guaranteed = tenant.protected_blocks, tenant.guaranteed_blocks
        rise = max(protected + about_to_lease + needed, guaranteed) - max(protected, guaranteed)
        if self.promised_blocks + rise > self._usable_blocks + of_them_lent:
            limit = min(tenant.max_blocks, self._pool.num_blocks)
            raise OutOfBlocks(needed or about_to_lease, limit - used, evictable)
        return rise

    def surely_has(self, num_blocks: int, tenant: TenantState) -> bool:
        """Whether this many more blocks, newly protected or taken, are certainly granted. A quick check. O(1)."""
        used = tenant.protected_blocks + tenant.evictable_blocks
        return (
            used + num_blocks <= tenant.max_blocks
            and self.promised_blocks + num_blocks <= self._usable_blocks
            and not self._pool.is_loose
        )

    def require_fetched(self, num_blocks: int, tenant: TenantState | None, about_to_lease: int = 0) -> None:
        """Raise FlushRequired if only waiting copies prevent the use of this many blocks, after ``require`` has granted
        them.

        Blocks that waiting copies name can't be handed out. A strict tenant evicts what it would evict without the
        copies, and nothing more. For other tenants, more victims are evicted instead. O(1); O(tenants) while there are
        such blocks and few free ones.
        """
        pool = self._pool
        if num_blocks <= pool.num_free or not pool.is_loose:
            return
        if tenant is not None and tenant.settings.mode == "strict":
            victims = tenant.used_blocks + num_blocks - tenant.max_blocks
        else:
            victims = -about_to_lease
            for each in self._ranking.tenants:
                borrowed = max(each.used_blocks - each.guaranteed_blocks, 0)
                victims += each.evictable_blocks if each is tenant else min(each.evictable_blocks, borrowed)
        room = pool.num_free + max(victims - len(pool.exposed), 0)
        if num_blocks > room:
            raise FlushRequired(num_blocks, room)

    def end_due_pins(self, requester: TenantState | None, num_blocks: int) -> None:
        """End the requester's expired pins before ``require``, whether the tenant is short of blocks or not.

        If the pool is short, also end other tenants' expired pins on borrowed blocks. For None, end those of all
        tenants. Moves no node.
        """
        if self.on_need is not None:
            is_short = self.promised_blocks + num_blocks > self._usable_blocks
            self.on_need(requester, requester is None or is_short)

    def take(self, num_blocks: int, tenant: TenantState, table: bytearray) -> None:
        """Add packed ids of ``num_blocks`` blocks for a tenant to ``table``. Evicts the missing ones.

        The blocks count for no tenant yet: see ``charge``. Raises like ``require``.
        """
        self.end_due_pins(tenant, num_blocks)
        if not self.surely_has(num_blocks, tenant):
            self.require(num_blocks, tenant)
            self.require_fetched(num_blocks, tenant)
        self.take_granted(num_blocks, tenant, table)

    def take_granted(self, num_blocks: int, tenant: TenantState, table: bytearray) -> None:
        """Take blocks like ``take``, after ``require``. O(blocks evicted + turns × log tenants)."""
        start, size = len(table), num_blocks * ID_BYTES
        over = tenant.protected_blocks + tenant.evictable_blocks + num_blocks - tenant.max_blocks
        if over > num_blocks:
            self.keep_limit(tenant, 0)
            over = num_blocks
        if over > 0 and self._pool.exposed:
            self.keep_limit(tenant, num_blocks)
        elif over > 0:  # it gets back what it gives up
            self._evict_from(tenant, over * ID_BYTES, table)
            self._pool.reuse(table, start)
            size -= over * ID_BYTES
        self._take(size, tenant, table)
        self._pool.hand_out(table, start, tenant.owner_tag)
        if self.on_hand_out is not None:
            self.on_hand_out()

    def take_for_engine(self, num_blocks: int) -> bytearray:
        """Return packed ids of ``num_blocks`` blocks that are about to be lent. Raises OutOfBlocks, and then changes
        nothing.
        """
        if num_blocks > self.spare_blocks:
            self.end_due_pins(None, num_blocks)
        spare = self.spare_blocks
        if num_blocks > spare:
            free = self._pool.num_free
            raise OutOfBlocks(num_blocks, free, max(spare - free, 0))
        self.require_fetched(num_blocks, None)
        taken = bytearray()
        self._take(num_blocks * ID_BYTES, None, taken)
        self._pool.hand_out(taken, 0, ENGINE)
        if self.on_hand_out is not None:
            self.on_hand_out()
        return taken

    def _take(self, size: int, requester: TenantState | None, table: bytearray) -> None:
        """Add ``size`` bytes of packed ids to ``table``: free blocks first, then those of victims.

        Victims that waiting copies name can't be handed out. If there are any, all victims go to the pool first.
        """
        if self._pool.exposed:
            self._evict_to_pool(size // ID_BYTES, requester)
        size -= self._pool.take(size, table)
        if size:
            self._evict(size, requester, table)

    def _evict_to_pool(self, num_blocks: int, requester: TenantState | None) -> None:
        while (short := num_blocks - self._pool.num_free) > 0:
            if not self.evict(short, requester):
                raise IntegrityError(f"{short} blocks are missing, and nothing is left to evict")

    def charge(self, tenant: TenantState, num_blocks: int) -> None:
        """Charge taken blocks to the tenant. They are private to a sequence or leased in its tree."""
        tenant.protected_blocks = protected = tenant.protected_blocks + num_blocks
        if protected > tenant.guaranteed_blocks:
            self.promised_blocks += min(protected - tenant.guaranteed_blocks, num_blocks)
        if protected + tenant.evictable_blocks > tenant.ranked_blocks:
            self._ranking.rank(tenant)

    def give(self, block_ids: bytes | bytearray | memoryview, tenant: TenantState) -> None:
        """Free private blocks of the tenant's sequences."""
        self._pool.give(block_ids)
        self._discharge(tenant, len(block_ids) // ID_BYTES)

    def _discharge(self, tenant: TenantState, num_blocks: int) -> None:
        """Uncount this many private blocks of the tenant."""
        if tenant.protected_blocks > tenant.guaranteed_blocks:
            self.promised_blocks -= min(tenant.protected_blocks - tenant.guaranteed_blocks, num_blocks)
        tenant.protected_blocks -= num_blocks

    def require_all(self, needs: dict[TenantState, int]) -> None:
        """Raise like ``require`` unless several tenants can have what they need at once. O(tenants)."""
        rise = 0
        if self.on_need is not None:
            total = sum(needs.values())
            for tenant in needs:
                self.end_due_pins(tenant, total)
        for tenant, needed in needs.items():
            rise += self.require(needed, tenant, of_them_lent=-rise)
        if self._pool.is_loose:
            total = sum(needs.values())
            for tenant in needs:
                self.require_fetched(total, tenant)

    def evict(self, num_blocks: int, requester: TenantState | None = None) -> int:
        """Free up to ``num_blocks`` blocks by policy. Returns how many. O(blocks evicted + turns × log tenants).

        If there is a requester, ``require`` must have granted it this many blocks.
        """
        num_blocks, freed = min(num_blocks, self.evictable_blocks), bytearray()
        self._evict(num_blocks * ID_BYTES, requester, freed)
        if requester is not None:
            self._ranking.rank(requester)
        self._pool.give(freed)
        return num_blocks

    def evict_for(self, tenant: TenantState, num_blocks: int) -> int:
        """Free up to ``num_blocks`` blocks that may be evicted for a tenant. Returns how many. O(tenants + evicted).

        These are its own and, unless it is strict, what others have borrowed.
        """
        if tenant.settings.mode == "strict":
            return self.evict_own(num_blocks, tenant)
        return self.evict(min(num_blocks, self.available_to(tenant)), tenant)

    def evict_own(self, num_blocks: int, tenant: TenantState) -> int:
        """Free up to ``num_blocks`` blocks of the tenant by its policy. Returns how many. O(blocks evicted)."""
        num_blocks, freed = min(num_blocks, tenant.evictable_blocks), bytearray()
        self._evict_from(tenant, num_blocks * ID_BYTES, freed)
        self._pool.give(freed)
        return num_blocks

    def keep_limit(self, tenant: TenantState, about_to_take: int) -> None:
        """Evict the tenant's own blocks that would exceed its limit. ``require`` has checked that this is possible."""
        over = tenant.used_blocks + about_to_take - tenant.max_blocks
        if over > 0:
            freed = bytearray()
            self._evict_from(tenant, over * ID_BYTES, freed)
            self._pool.give(freed)

    @property
    def spare_blocks(self) -> int:
        """Blocks that are guaranteed to no tenant. O(1)."""
        return self._usable_blocks - self.promised_blocks

    def settle_promises(self, tenants: Collection[TenantState]) -> None:
        """Recompute the promised blocks and the ranks of tenants above their share. O(tenants)."""
        self.promised_blocks = sum(max(each.protected_blocks, each.guaranteed_blocks) for each in tenants)
        for each in tenants:
            self._ranking.rank(each)

    def _evict(self, size: int, requester: TenantState | None, freed: bytearray) -> None:
        """Add packed ids of evicted blocks to ``freed``, ``size`` bytes in all.

        If the requester's own blocks went last, it has no rank afterwards: ``charge`` follows and ranks it.
        """
        ranking = self._ranking
        while size:
            tenant, turn = ranking.next(requester)
            turn = min(turn * ID_BYTES, size)
            self._evict_from(tenant, turn, freed)
            size -= turn
            if size or tenant is not requester:
                ranking.rank(tenant)

    def _evict_from(self, tenant: TenantState, size: int, freed: bytearray) -> None:
        """Add packed ids of the tenant's blocks to ``freed``, exactly ``size`` bytes."""
        victim, removed, trimmed, left = tenant.on_victim, tenant.on_removed, tenant.on_trimmed, size
        most, num_detached, on_evict, first = tenant.on_most, 0, self.on_evict, len(freed)
        evicted: list[Node] = []
        if tenant.waiting is not None:
            tenant.waiting.end_due()  # what is evicted must not depend on when somebody looked
        while left:
            node = victim()
            if not isinstance(node, Node) or node.children is not None or node.uses:
                tenant.refuse_victim()
                continue
            tree, ids = cast(NamespaceTree, node.tree), node.block_ids
            if tree.tenant is not tenant:
                tenant.refuse_victim()
                continue
            cut = left if most is None else min(most(node) * ID_BYTES, left)
            if on_evict is not None:
                evicted.append(node)
                if len(ids) > cut:  # its label changes
                    on_evict(evicted, bytes(freed[first:]) + ids[-cut:])
                    evicted, first = [], len(freed) + cut
            if trimmed is not None:
                trimmed(node, min(len(ids), cut) // ID_BYTES)
            if self._journal is not None:
                self.report_removed(node, min(len(ids), cut) // ID_BYTES)
            if tree.detached:
                num_detached += min(len(ids), cut) // ID_BYTES
            if len(ids) > cut:
                freed += tree.trim(node, cut)
                left -= cut
                if tree.hooks is not None:
                    tree.hooks.trimmed(node)
                continue
            removed(node)
            tree.remove(node)
            freed += ids
            left -= len(ids)
            if tree.hooks is not None:
                tree.hooks.removed(node)
            if tree.root.children is None:
                tenant.drop_if_empty(tree)
        if on_evict is not None and evicted:
            on_evict(evicted, bytes(freed[first:]))
        num_blocks = size // ID_BYTES
        tenant.evictable_blocks -= num_blocks
        tenant.evicted_blocks += num_blocks
        self.evictable_blocks -= num_blocks
        self.count_resident(tenant, num_detached - num_blocks)

    def available_to(self, requester: TenantState | None) -> int:
        """Return how many evictable blocks may be evicted for a tenant: all of its own, and what others have borrowed.

        For None all of them. O(tenants).
        """
        if requester is None:
            return self.evictable_blocks
        found = requester.evictable_blocks
        for each in self._ranking.tenants:
            if each is not requester:
                found += min(each.evictable_blocks, max(each.used_blocks - each.guaranteed_blocks, 0))
        return found

    def reclaim(self, node: Node, freed: bytearray) -> None:
        """Remove a node from a cleared tree, and its ancestors while nothing else holds them. Adds their ids to
        ``freed``.
        """
        tree = cast(NamespaceTree, node.tree)
        tenant = tree.tenant
        at: Node | None = node
        while at is not None and at.parent is not None and not at.uses and at.children is None:
            parent = at.parent
            if tree.is_linked(at):
                tenant.on_removed(at)
                tree.remove(at)
                freed += at.block_ids
                tenant.evictable_blocks -= at.num_blocks
                self.evictable_blocks -= at.num_blocks
            at = parent
        if tree.root.children is None:
            tenant.drop_if_empty(tree)
            if tree.base is not None:
                self.let_go(tree.base)

    def take_back(self, node: Node, tree: NamespaceTree) -> None:
        """Remove a path of a detached tree whose only use is one lease on its end, and that is all of the tree.

        Its blocks count for the tenant as before: a sequence has them now. O(nodes).
        """
        tenant, at = tree.tenant, node
        while (parent := at.parent) is not None:
            at.uses -= 1
            tenant.on_unleased(at)
            tenant.on_removed(at)
            tree.remove(at)
            at = parent
        at.uses -= 1
        tenant.drop_if_empty(tree)
        if tree.base is not None:
            self.let_go(tree.base)

    # --- journal

    def report_stored(self, tree: NamespaceTree, key: Key, start: int, stop: int) -> None:
        """Tell the journal that blocks ``[start, stop)`` became resident. ``key`` reaches at least to ``stop``."""
        if self.reports(tree, start, stop):
            assert self._journal is not None
            size = self._block_size
            self._journal.stored(tree.namespace, key, start * size, stop * size)

    def reports(self, tree: NamespaceTree, start: int, stop: int) -> bool:
        """Whether the journal wants blocks ``[start, stop)`` reported."""
        grain, size = self._grain, self._block_size
        if not grain or tree.detached or tree.base is not None:  # blocks behind a base are never reported
            return False
        return start * size // grain < stop * size // grain

    def report_removed(self, node: Node, num_blocks: int) -> None:
        """Tell the journal, which there must be, that the last blocks of a node leave."""
        tree, start, stop = cast(NamespaceTree, node.tree), node.depth - num_blocks, self.reported_depth(node)
        if self.reports(tree, start, stop):
            assert self._journal is not None
            size = self._block_size
            self._journal.removed(tree.namespace, tree.labels_to(node), start * size, stop * size)

    def reported_depth(self, node: Node) -> int:
        """Return up to which block the journal hears of a node: all but a tail (``tails``)."""
        if not self.has_tails:
            return node.depth
        end = len(node.block_ids) // ID_BYTES * node.tree.block_bytes
        return node.depth - (1 if node.label.startswith(TAIL_FILL, end - TOKEN_BYTES) else 0)
