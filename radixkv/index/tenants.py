"""Tenants. The only module where two of them meet: in the choice of whose blocks go.

A tenant's state (its trees, its policy, its counts) is one object that another tenant's calls never reach.
Whose blocks go: ``Ranking``. What is promised to whom: ``eviction.Evictor.promised_blocks``.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from radixkv.errors import IntegrityError
from radixkv.index.tokens import ID_BYTES
from radixkv.index.tree import RadixTree

if TYPE_CHECKING:
    from radixkv.config import Namespace, Tenant
    from radixkv.index.bases import Base, Readable
    from radixkv_policies import Policy

NEVER_OUTGROWN: Final = 2**62
"""The rank of all tenants until something is evicted."""

UNLIMITED: Final = 2**62
"""The limit of a tenant that has none."""

UNRANKED: Final = -1
"""The rank of a tenant that has to be ranked before its blocks can go."""


class TenantState:
    """What one tenant has in the cache: its trees, its policy, its counts.

    ``settings``: what it is promised and held to; ``is_added`` unless they are the default's.
    ``label``: what its blocks are known by, see ``scrubbing``.
    ``protected_blocks``: leased in its trees, private to its sequences, or quarantined. ``evictable_blocks``: in its
    trees and protected by no lease. Together they are what it uses. ``on_…``: the policy's hooks, None for those that
    it leaves out, bound once so that a request doesn't look them up or call what does nothing.
    ``trees``: by namespace, and by ``NamespaceTree.place`` those behind a base, which ``behind`` lists by namespace.
    ``bases``: what it may read, or None.
    """

    __slots__ = (
        "bases",
        "behind",
        "declined_blocks",
        "detached",
        "evictable_blocks",
        "evicted_blocks",
        "generation",
        "guaranteed_blocks",
        "hit_tokens",
        "is_added",
        "label",
        "max_blocks",
        "missed_tokens",
        "on_admit",
        "on_extended",
        "on_inserted",
        "on_leased",
        "on_most",
        "on_opened",
        "on_removed",
        "on_split",
        "on_touched",
        "on_trimmed",
        "on_unleased",
        "policy",
        "protected_blocks",
        "rank_entry",
        "ranked_blocks",
        "requests",
        "settings",
        "tenant_id",
        "trees",
        "uses_ghost_keys",
        "weight",
    )

    def __init__(self, settings: Tenant, policy: Policy, *, is_added: bool, label: int = 0) -> None:
        self.tenant_id = settings.id
        self.label = label
        self.is_added = is_added
        self.set(settings)
        self.follow(policy)
        self.trees: dict[object, NamespaceTree] = {}
        self.behind: dict[Namespace, dict[NamespaceTree, None]] = {}
        self.bases: Readable | None = None
        self.detached: set[NamespaceTree] = set()
        self.protected_blocks = 0
        self.evictable_blocks = 0
        self.ranked_blocks, self.rank_entry = UNRANKED, UNRANKED
        self.generation = 0  # how often it was purged
        self.forget_counts()

    def forget_counts(self) -> None:
        """Count requests and evictions from zero on: the next tenant of this name is another one."""
        self.evicted_blocks = self.declined_blocks = 0
        self.requests = self.hit_tokens = self.missed_tokens = 0

    def follow(self, policy: Policy) -> None:
        """This policy is told of everything from now on."""
        self.policy, self.uses_ghost_keys = policy, policy.uses_ghost_keys
        self.on_leased, self.on_unleased, self.on_removed = policy.order()
        self.on_inserted, self.on_touched = policy.hook("inserted"), policy.hook("touched")
        self.on_extended, self.on_split = policy.hook("extended"), policy.hook("split")
        self.on_trimmed, self.on_most = policy.hook("trimmed"), policy.hook("most")
        self.on_opened, self.on_admit = policy.hook("opened"), policy.hook("admit")

    def set(self, settings: Tenant) -> None:
        """Promise it this, and hold it to this, from now on."""
        self.settings = settings
        self.weight, self.guaranteed_blocks = settings.weight, settings.guaranteed_blocks
        self.max_blocks = UNLIMITED if settings.limit is None else settings.limit

    @property
    def overuse(self) -> float:
        """By how much it is above its share, but for what is the same for all: ``(used − guarantee) ÷ weight``."""
        return (self.protected_blocks + self.evictable_blocks - self.guaranteed_blocks) / self.weight

    @property
    def used_blocks(self) -> int:
        """Blocks in its trees, detached ones included, and private to its sequences."""
        return self.protected_blocks + self.evictable_blocks

    @property
    def resident_blocks(self) -> int:
        """Blocks that a match can reach."""
        return sum(tree.num_blocks for tree in self.trees.values())

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of cleared namespaces that running sequences still hold."""
        return sum(tree.num_blocks for tree in self.detached)

    def trees_of(self, namespace: Namespace) -> list[NamespaceTree]:
        """The trees of a namespace: its own, and those behind bases. O(these trees)."""
        own = self.trees.get(namespace)
        return [*([] if own is None else [own]), *self.behind.get(namespace, ())]

    def register(self, tree: NamespaceTree) -> None:
        """Make a tree reachable. O(1)."""
        self.trees[tree.place] = tree
        if tree.base is not None:
            self.behind.setdefault(tree.namespace, {})[tree] = None

    def _strike(self, tree: NamespaceTree) -> None:
        """Make a tree unreachable. O(1)."""
        self.trees.pop(tree.place, None)
        behind = self.behind.get(tree.namespace)
        if behind is not None:
            behind.pop(tree, None)
            if not behind:
                del self.behind[tree.namespace]

    def settle_trees(self) -> None:
        """List anew which trees stand behind a base. O(trees)."""
        self.behind = {}
        for tree in list(self.trees.values()):
            self.register(tree)

    def detach(self, tree: NamespaceTree) -> None:
        """Make a tree unreachable; it lives on for the sequences that lease it. O(1)."""
        self._strike(tree)
        tree.detached = True
        self.detached.add(tree)

    def drop_if_empty(self, tree: NamespaceTree) -> None:
        """Forget a tree in which nothing is resident and nothing leased. O(1)."""
        if tree.is_empty:
            if tree.detached:
                self.detached.discard(tree)
            else:
                self._strike(tree)
            if tree.base is not None:
                tree.base.trees.discard(tree)

    @property
    def namespaces(self) -> list[Namespace]:
        """Those that hold something. O(trees)."""
        return list(dict.fromkeys(tree.namespace for tree in self.trees.values()))


class NamespaceTree(RadixTree):
    """The tree of a namespace, or one behind a base, with its owner. ``detached`` once it can't be reached any more.

    Behind a ``base`` it continues the first ``size`` bytes of its key; ``place`` is its key among its tenant's trees.
    """

    __slots__ = ("base", "detached", "namespace", "place", "tenant")

    def __init__(
        self,
        namespace: Namespace,
        tenant: TenantState,
        block_bytes: int,
        base: Base | None = None,
        size: int = 0,
    ) -> None:
        self.base = base
        if base is None:
            super().__init__(block_bytes)
            self.place: object = namespace
        else:
            super().__init__(
                block_bytes, base.key[:size], base.block_ids[: size // (block_bytes // ID_BYTES)]
            )
            self.place = (namespace, base, size)
        self.namespace = namespace
        self.tenant = tenant
        self.detached = False


class Ranking:
    """Whose blocks go: the tenant furthest above its share of those that have something evictable.

    A share is ``guarantee + weight ÷ Σ weights × what nobody is guaranteed``. The last factor is the same for
    all, so the order of ``(used − share) ÷ weight`` is that of ``(used − guarantee) ÷ weight``, the *overuse*, in
    which no other tenant occurs. On ties it is the requester; and nobody within its guarantee, but the requester.

    A heap of tenants by the overuse that they had when they were last ranked, which is never less than what it is
    now: a tenant that outgrows its rank (``ranked_blocks``) is ranked anew at once, one that shrank when it comes to
    the top. So a turn costs O(log tenants), where a scan of 64 tenants took 5 µs; until something is evicted nobody
    is ranked.
    """

    __slots__ = ("_entries", "_heap", "_tenants")

    def __init__(self, tenants: dict[str, TenantState]) -> None:
        self._tenants = tenants
        self._heap: list[tuple[float, int, TenantState]] | None = None
        self._entries = 0

    @property
    def tenants(self) -> Iterable[TenantState]:
        """All of them."""
        return self._tenants.values()

    def rank(self, tenant: TenantState) -> None:
        """Note what the tenant uses now. O(log tenants), amortised."""
        heap = self._heap
        if heap is None:
            tenant.ranked_blocks = NEVER_OUTGROWN
            return
        if len(heap) > 2 * len(self._tenants) + 64:  # mostly outdated entries
            heap[:] = [entry for entry in heap if entry[1] == entry[2].rank_entry]
            heapify(heap)
        tenant.ranked_blocks = tenant.used_blocks
        tenant.rank_entry = self._entries = self._entries + 1
        heappush(heap, (-tenant.overuse, self._entries, tenant))

    def next(self, requester: TenantState | None) -> tuple[TenantState, int]:
        """Whose blocks go next, and how many until it is another's turn. Something must be evictable.

        The tenant has no rank from then on: ``rank`` it once they are gone.
        """
        heap = self._heap
        if heap is None:
            if len(self._tenants) == 1:
                (tenant,) = self._tenants.values()
                return tenant, tenant.evictable_blocks
            heap = self._heap = []
            for tenant in self._tenants.values():
                self.rank(tenant)
        first = self._top(heap)
        if first is None:
            raise IntegrityError("blocks were counted as evictable, and no tenant has any")
        level, most = first.overuse, first.evictable_blocks
        if requester is not None and requester is not first:
            if requester.evictable_blocks and (requester.overuse >= level or level <= 0):
                first, most = requester, requester.evictable_blocks
            elif level <= 0:
                raise IntegrityError("a tenant within its guarantee would be another's victim")
            else:
                most = min(most, first.used_blocks - first.guaranteed_blocks)
        first.ranked_blocks, first.rank_entry = UNRANKED, UNRANKED
        second = self._top(heap) if heap else None
        if second is not None:
            most = min(most, max(int((first.overuse - second.overuse) * first.weight), 1))
        return first, most

    def _top(self, heap: list[tuple[float, int, TenantState]]) -> TenantState | None:
        """The tenant with the greatest overuse among those that have something evictable; its entry stays."""
        while heap:
            rank, entry, tenant = heap[0]
            if entry != tenant.rank_entry:
                heappop(heap)
            elif not tenant.evictable_blocks:
                heappop(heap)
                tenant.ranked_blocks, tenant.rank_entry = UNRANKED, UNRANKED
            elif -rank != tenant.overuse:
                heappop(heap)
                self.rank(tenant)
            else:
                return tenant
        return None
