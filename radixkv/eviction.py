"""Evictor: leases, residency and victims.

What changes which nodes there are, and which of them are in use, goes through here, so that the policy is told
and the tenant's ``evictable_blocks`` and ``used_blocks`` are kept in step: ``lease`` and ``release``, ``split``,
``add_leased``, and the trimming of victims.

Eviction asks the policy of the tenant whose turn it is (``namespaces.next_victim``) for its victim and trims that
leaf from its tail, exactly the blocks needed: O(blocks evicted), no heap rebuilt, no tree walked. Whether it can
suffice is known before it begins, from the counts, so a refusal changes nothing.
"""

from __future__ import annotations

from typing import cast

from radixkv.blocks import BlockPool
from radixkv.errors import IntegrityError, OutOfBlocks
from radixkv.namespaces import NamespaceTree, TenantState, next_victim
from radixkv.tree import Node
from radixkv.types import ID_BYTES, Journal


class Evictor:
    """Keeps what is resident within the pool. All methods are called under the cache's lock."""

    __slots__ = ("_block_size", "_grain", "_journal", "_pool", "_tenants")

    def __init__(
        self, pool: BlockPool, tenants: dict[str, TenantState], block_size: int, journal: Journal | None
    ) -> None:
        self._pool, self._tenants, self._block_size, self._journal = pool, tenants, block_size, journal
        self._grain = journal.grain_tokens if journal is not None else 0

    # --- leases: O(1) if the node is in use already, otherwise O(ancestors that come into use)

    def lease(self, node: Node, tree: NamespaceTree) -> None:
        """Protect a node of the tree, and with it its ancestors."""
        node.uses = uses = node.uses + 1
        if uses > 1:
            return
        tenant, num_bytes = tree.tenant, 0
        leased = tenant.policy.leased
        while (parent := node.parent) is not None:
            num_bytes += len(node.block_ids)
            leased(node)
            node = parent
            node.uses = uses = node.uses + 1
            if uses > 1:
                break
        tenant.evictable_blocks -= num_bytes // ID_BYTES

    def release(self, node: Node, tree: NamespaceTree) -> None:
        """Undo one ``lease``; what nobody uses any more becomes evictable, and goes at once if its tree was cleared."""
        node.uses = uses = node.uses - 1
        if uses:
            return
        released, tenant, num_bytes = node, tree.tenant, 0
        unleased = tenant.policy.unleased
        while (parent := node.parent) is not None:
            num_bytes += len(node.block_ids)
            unleased(node)
            node = parent
            node.uses = uses = node.uses - 1
            if uses:
                break
        tenant.evictable_blocks += num_bytes // ID_BYTES
        if tree.detached:
            self.reclaim(released)
        if not tree.root.children:
            tenant.drop_if_empty(tree)

    def unprotected_above(self, node: Node) -> int:
        """Blocks that a lease on ``node`` would take from the evictable ones. O(ancestors)."""
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
        tree.tenant.policy.split(upper, child)
        return upper

    def add_leased(
        self, parent: Node, key: bytes, start: int, stop: int, block_ids: bytes, tree: NamespaceTree
    ) -> Node:
        """Add ``key[start:stop]`` below ``parent``; a lease on ``parent`` moves to the deepest new node, the result."""
        nodes = tree.attach(parent, key, start, stop, block_ids)
        inserted = tree.tenant.policy.inserted
        for node in nodes:
            inserted(node, len(node.block_ids) // ID_BYTES, node.depth)
        return nodes[-1]

    # --- blocks

    @property
    def evictable_blocks(self) -> int:
        """Blocks that evictions could free now. O(tenants)."""
        return sum(tenant.evictable_blocks for tenant in self._tenants.values())

    def require(self, needed: int, about_to_lease: int = 0) -> None:
        """Raise OutOfBlocks unless ``needed`` blocks can be had after ``about_to_lease`` more are protected.

        Resident blocks that a waiting plan names don't count as evictable: they would be held until ``flush``.
        """
        free = self._pool.num_free
        if needed > free:
            evictable = max(self.evictable_blocks - about_to_lease - self._pool.num_named_in_trees, 0)
            if needed > free + evictable:
                raise OutOfBlocks(needed, free, evictable)

    def take(self, num_blocks: int, requester: TenantState | None) -> bytes:
        """Packed ids of ``num_blocks`` blocks, evicting what is short. Raises OutOfBlocks, and changes nothing."""
        taken = self._pool.take(num_blocks)
        if taken is None:
            self.require(num_blocks)
            taken = self._evict_and_take(num_blocks, requester)
        return taken

    def _evict_and_take(self, num_blocks: int, requester: TenantState | None) -> bytes:
        pool = self._pool
        while (taken := pool.take(num_blocks)) is None:  # once, or twice if a waiting plan holds some
            short = num_blocks - pool.num_free
            if not self.evict(short, requester):
                raise IntegrityError(f"{short} blocks were counted as evictable and could not be evicted")
        return taken

    def evict(self, num_blocks: int, requester: TenantState | None) -> int:
        """Free up to ``num_blocks`` blocks by policy; returns how many. O(blocks evicted + victims × tenants)."""
        freed = 0
        while freed < num_blocks:
            turn = next_victim(self._tenants, requester)
            if turn is None:
                break
            tenant, most = turn
            freed += self._evict_from(tenant, min(most, num_blocks - freed))
        return freed

    def _evict_from(self, tenant: TenantState, num_blocks: int) -> int:
        policy, left = tenant.policy, num_blocks
        while left:
            node = policy.victim()
            if not isinstance(node, Node) or node.children or node.uses:
                raise IntegrityError(
                    f"policy {type(policy).__name__} named a victim that is no evictable leaf"
                )
            size = len(node.block_ids) // ID_BYTES
            if size > left:
                policy.trimmed(node, left)
                self._remove(node, left, tenant)
                break
            policy.trimmed(node, size)
            policy.removed(node)
            self._remove(node, size, tenant)
            left -= size
        tenant.evicted_blocks += num_blocks
        return num_blocks

    def reclaim(self, node: Node) -> None:
        """Free a node of a cleared tree, and its ancestors as far as nothing else holds them."""
        tenant = cast(NamespaceTree, node.tree).tenant
        at: Node | None = node
        while at is not None and at.parent is not None and not at.uses and not at.children:
            parent = at.parent
            if at.tree.is_linked(at):
                tenant.policy.removed(at)
                self._remove(at, at.num_blocks, tenant)
            at = parent

    def _remove(self, node: Node, num_blocks: int, tenant: TenantState) -> None:
        """Take the last ``num_blocks`` of an evictable leaf out of its tree and give them to the pool."""
        tree = cast(NamespaceTree, node.tree)
        if self._journal is not None and not tree.detached:
            self._report_removed(tree, node, num_blocks)
        self._pool.give(tree.trim(node, num_blocks))
        tenant.evictable_blocks -= num_blocks
        tenant.used_blocks -= num_blocks
        if not tree.root.children:
            tenant.drop_if_empty(tree)

    # --- journal

    def report_stored(self, tree: NamespaceTree, key: bytes, start: int, stop: int) -> None:
        """Tell the journal that blocks ``[start, stop)`` became resident; ``key`` reaches at least to ``stop``."""
        if self.reports(tree, start, stop):
            assert self._journal is not None
            self._journal.stored(
                tree.namespace,
                key[: stop * tree.block_bytes],
                start * self._block_size,
                stop * self._block_size,
            )

    def reports(self, tree: NamespaceTree, start: int, stop: int) -> bool:
        """Whether the journal wants to hear of blocks ``[start, stop)``."""
        grain, size = self._grain, self._block_size
        return bool(grain) and not tree.detached and start * size // grain < stop * size // grain

    def _report_removed(self, tree: NamespaceTree, node: Node, num_blocks: int) -> None:
        start = node.depth - num_blocks
        if self.reports(tree, start, node.depth):
            assert self._journal is not None
            size = self._block_size
            self._journal.removed(tree.namespace, tree.key_of(node), start * size, node.depth * size)
