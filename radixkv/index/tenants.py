"""Tenants. This is the only module where tenants affect each other: when blocks are chosen for eviction.

A tenant's state (its trees, its policy, its counts) is one object that calls of other tenants never reach. ``Ranking``
chooses the tenant that loses blocks. ``eviction.Evictor.promised_blocks`` counts what is guaranteed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from radixkv.errors import IntegrityError
from radixkv.index.blocks import BlockPool
from radixkv.index.guarded import Guarded, fallback, hook_of, is_foreign, report, taken_over
from radixkv.index.residency import Claim, Hooks, Waiting
from radixkv.index.tokens import ID_BYTES
from radixkv.index.tree import Node, RadixTree, num_common_bytes
from radixkv.uncopied import refuse_copies
from radixkv_policies.policy import Shape

if TYPE_CHECKING:
    from radixkv.config import Namespace, Tenant
    from radixkv_policies import Policy

NEVER_OUTGROWN: Final = 2**62
"""The rank of all tenants until something is evicted."""

UNLIMITED: Final = 2**62
"""The limit of a tenant without a limit."""

UNRANKED: Final = -1
"""The rank of a tenant that must be ranked before its blocks can be evicted."""


Counted: TypeAlias = tuple[int, int, int, int]
"""What a tenant's counts have of a sequence: ``TenantState.num_lives`` then, requests, hit tokens, missed tokens."""

NOT_COUNTED: Final[Counted] = (-1, 0, 0, 0)


class TenantState:
    """One tenant's state in the cache: its trees, its policy, its counts.

    - ``settings``: its guarantee and limit. ``is_added`` is False if they are the default's.
    - ``owner_tag``: marks its blocks, see ``scrubbing``.
    - ``protected_blocks``: leased in its trees, private to its sequences, or quarantined.
    - ``evictable_blocks``: in its trees and protected by no lease. With ``protected_blocks`` this is all it uses.
    - ``resident_blocks``: in its trees that aren't detached, so a match can reach them.
    - ``on_…``: the policy's hooks, or None where the policy has none. They are bound once. So a request needs no
      look-up and calls no empty function. Those of a policy that isn't built in are ``guarded``.
    - ``failed_policies``: policies that raised an error and were replaced by ``lru``. ``has_failed_policy``: the last.
    - ``trees``: by namespace; trees behind a base by ``NamespaceTree.place``. ``behind`` lists these by namespace.
    - ``bases``: the bases that it may read, or None.
    - ``waiting``: its announced prompts; None until the first.
    - ``must_forget``: it has blocks of an earlier tenant of this name, which a call began to forget.
    """

    __slots__ = (
        "bases",
        "behind",
        "declined_blocks",
        "detached",
        "evictable_blocks",
        "evicted_blocks",
        "failed_policies",
        "generation",
        "guaranteed_blocks",
        "guarded",
        "has_failed_policy",
        "hit_tokens",
        "is_added",
        "is_strict",
        "max_blocks",
        "missed_tokens",
        "must_forget",
        "num_lives",
        "num_sessions",
        "on_admit",
        "on_extended",
        "on_inserted",
        "on_leased",
        "on_most",
        "on_noted",
        "on_opened",
        "on_removed",
        "on_split",
        "on_touched",
        "on_trimmed",
        "on_unleased",
        "on_victim",
        "owner_tag",
        "policy",
        "protected_blocks",
        "rank_entry",
        "ranked_blocks",
        "requests",
        "resident_blocks",
        "settings",
        "tenant_id",
        "trees",
        "uses_ghost_keys",
        "waiting",
        "weight",
    )

    def __init__(self, settings: Tenant, policy: Policy, *, is_added: bool, owner_tag: int = 0) -> None:
        self.tenant_id = settings.id
        self.owner_tag = owner_tag
        self.is_added = is_added
        self.waiting: Waiting | None = None
        self.set(settings)
        self.trees: dict[object, NamespaceTree] = {}
        self.behind: dict[Namespace, dict[NamespaceTree, None]] = {}
        self.bases: Readable | None = None
        self.detached: set[NamespaceTree] = set()
        self.guarded: list[Guarded] = []
        self.has_failed_policy, self.failed_policies = False, 0
        self.follow(policy)
        self.protected_blocks = 0
        self.evictable_blocks = 0
        self.resident_blocks = 0
        self.ranked_blocks, self.rank_entry = UNRANKED, UNRANKED
        self.generation = 0  # how often it was purged
        self.must_forget = False
        self.num_sessions = 0  # ever made, for their names
        self.num_lives = 0  # how often its counts began
        self.forget_counts()

    def forget_counts(self) -> None:
        """Reset the counts of requests and evictions. The next tenant of this name is a new one."""
        self.num_lives += 1
        self.evicted_blocks = self.declined_blocks = self.failed_policies = 0
        self.requests = self.hit_tokens = self.missed_tokens = 0

    def count(self, num_tokens: int, num_hit: int) -> Counted:
        """Count a request that was opened, with this prompt. Returns what ``recount`` needs."""
        self.requests += 1
        self.hit_tokens += num_hit
        self.missed_tokens += num_tokens - num_hit
        return self.num_lives, 1, num_hit, num_tokens - num_hit

    def recount(self, counted: Counted, requests: int, hit_tokens: int, missed_tokens: int) -> Counted:
        """Count these in place of what was counted, unless the counts began anew since."""
        if counted[0] != self.num_lives:
            return counted
        self.requests += requests - counted[1]
        self.hit_tokens += hit_tokens - counted[2]
        self.missed_tokens += missed_tokens - counted[3]
        return self.num_lives, requests, hit_tokens, missed_tokens

    def follow(self, policy: Policy) -> None:
        """Send all further events to this policy, and tell it of the announced prompts. O(claims)."""
        self.policy, self.uses_ghost_keys = policy, policy.uses_ghost_keys
        if self.waiting is None:
            self.take_hooks()
        else:
            self._announce_to(policy)

    def take_hooks(self) -> None:
        """Send all further events to the policy alone. A recorder must follow afterwards."""
        policy, self.guarded = self.policy, []
        leased, unleased, removed = policy.order()
        self.on_leased, self.on_unleased = self._hook("leased", leased), self._hook("unleased", unleased)
        self.on_removed, self.on_victim = self._hook("removed", removed), self._hook("victim", policy.victim)
        self.on_inserted, self.on_touched = self._optional("inserted"), self._optional("touched")
        self.on_extended, self.on_split = self._optional("extended"), self._optional("split")
        self.on_trimmed, self.on_most = self._optional("trimmed"), self._optional("most")
        self.on_opened, self.on_noted = self._optional("opened"), self._optional("noted")
        self.on_admit = self._optional("admit")
        if self.waiting is not None:
            self.waiting.on_announced = self._optional("announced")
            self.waiting.on_withdrawn = self._optional("withdrawn")

    def _optional(self, name: str) -> Callable[..., Any] | None:
        hook = self.policy.hook(name)
        return None if hook is None else self._hook(name, hook)

    def _hook(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook itself for a built-in policy, and a guarded one for others."""
        if not is_foreign(self.policy):
            return hook
        guarded = Guarded(name, hook, self.fall_back)
        self.guarded.append(guarded)
        return guarded

    def fall_back(self, where: str, error: Exception) -> None:
        """Let ``lru`` take over from a policy that isn't built in and failed. O(nodes)."""
        self.note_failure(where, error)
        nodes = [node for tree in (*self.trees.values(), *self.detached) for node in tree.nodes()]
        evictable = [node for node in nodes if not node.uses]
        new = fallback()
        taken_over(new, self.policy, nodes, evictable, len(evictable))
        if self.waiting is not None:
            new.expect_requests(SHAPE)
        self.policy, self.uses_ghost_keys = new, False
        for guarded in self.guarded:  # not new hooks: callers have these, and a recorder may come before them
            guarded.hook = hook_of(new, guarded.name)
        if self.waiting is not None:
            self.waiting.tell_all()

    def note_failure(self, where: str, error: Exception, policy: str = "") -> None:
        """Count and log that the policy failed. ``policy``: its name, by default that of the present one."""
        self.has_failed_policy = True
        self.failed_policies += 1
        report(policy or type(self.policy).__name__, self.tenant_id, where, error)

    def refuse_victim(self) -> None:
        """Take that the policy named a victim that isn't an evictable leaf of this tenant."""
        told = f"policy {type(self.policy).__name__} named a victim that isn't an evictable leaf"
        if not is_foreign(self.policy):
            raise IntegrityError(told)
        self.fall_back("victim", IntegrityError(told))

    @property
    def num_ranked(self) -> int:
        """The nodes that the policy counts as evictable."""
        try:
            return len(self.policy)
        except Exception as error:
            if not is_foreign(self.policy) or isinstance(error, MemoryError):
                raise
            self.fall_back("__len__", error)
        return len(self.policy)

    def _announce_to(self, policy: Policy) -> None:
        """Tell a policy of the announced prompts from now on."""
        assert self.waiting is not None
        try:
            policy.expect_requests(SHAPE)
        except Exception as error:
            if not is_foreign(policy) or isinstance(error, MemoryError):
                raise
            self.fall_back("expect_requests", error)
        self.take_hooks()
        self.waiting.tell_all()

    def set(self, settings: Tenant) -> None:
        """Apply new settings from now on."""
        self.settings, self.is_strict = settings, settings.mode == "strict"
        self.weight, self.guaranteed_blocks = settings.weight, settings.guaranteed_blocks
        self.max_blocks = UNLIMITED if settings.limit is None else settings.limit

    @property
    def overuse(self) -> float:
        """Return how far it is above its share, without the part that is equal for all: ``(used − guarantee) ÷
        weight``.
        """
        return (self.protected_blocks + self.evictable_blocks - self.guaranteed_blocks) / self.weight

    @property
    def used_blocks(self) -> int:
        """Blocks in its trees, including detached trees, and blocks private to its sequences."""
        return self.protected_blocks + self.evictable_blocks

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of cleared namespaces that running sequences still hold."""
        return sum(tree.num_blocks for tree in self.detached)

    def trees_of(self, namespace: Namespace) -> list[NamespaceTree]:
        """Return the trees of a namespace: its own, and those behind bases. O(these trees)."""
        own = self.trees.get(namespace)
        return [*([] if own is None else [own]), *self.behind.get(namespace, ())]

    def register(self, tree: NamespaceTree) -> None:
        """Make a tree reachable. O(1)."""
        self.trees[tree.place] = tree
        if tree.base is not None:
            self.behind.setdefault(tree.namespace, {})[tree] = None
        if self.waiting is not None:
            self.hook(tree)

    def wait(self, waiting: Waiting) -> None:
        """Keep up the residency of these claims from now on. O(trees + claims × nodes on the path)."""
        self.waiting = waiting
        waiting.on_announced = waiting.on_withdrawn = None
        for tree in list(self.trees.values()):
            self.hook(tree)
        self._announce_to(self.policy)

    def hook(self, tree: NamespaceTree) -> None:
        """Hook the claims of a reachable tree's namespace, unless they are hooked. O(claims × nodes on the path)."""
        assert self.waiting is not None
        if tree.hooks is None and tree.namespace in self.waiting.by_namespace:
            hooks = self.hooks_of(tree)
            for claim in self.waiting.by_namespace[tree.namespace]:
                if tree.may_serve(claim):
                    hooks.add(claim)

    def hooks_of(self, tree: NamespaceTree) -> Hooks:
        """The hooks of a reachable tree, while there are claims."""
        if tree.hooks is None:
            assert self.waiting is not None
            tree.hooks = Hooks(tree, self.waiting)
        return tree.hooks

    def _strike(self, tree: NamespaceTree) -> None:
        """Make a tree unreachable. O(1), and O(announced prompts of its namespace)."""
        if tree.hooks is not None:
            tree.hooks.close()
            tree.hooks = None
        self.trees.pop(tree.place, None)
        behind = self.behind.get(tree.namespace)
        if behind is not None:
            behind.pop(tree, None)
            if not behind:
                del self.behind[tree.namespace]

    def settle_trees(self) -> None:
        """Rebuild the list of trees behind a base. O(trees)."""
        self.behind = {}
        for tree in list(self.trees.values()):
            self.register(tree)

    def detach(self, tree: NamespaceTree) -> None:
        """Make a tree unreachable. It stays for the sequences that lease it. O(1)."""
        self._strike(tree)
        if not tree.detached:
            self.resident_blocks -= tree.num_blocks
        tree.detached = True
        self.detached.add(tree)

    def drop_if_empty(self, tree: NamespaceTree) -> None:
        """Forget a tree if nothing in it is resident or leased. O(1)."""
        if tree.is_empty:
            if tree.detached:
                self.detached.discard(tree)
            else:
                self._strike(tree)
            if tree.base is not None:
                tree.base.trees.discard(tree)

    @property
    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that hold something. O(trees)."""
        return list(dict.fromkeys(tree.namespace for tree in self.trees.values()))


def _parent(node: Any) -> Node | None:
    above: Node = node.parent
    return None if above.parent is None else above


def _is_leaf(node: Any) -> bool:
    return node.children is None


def _num_blocks(node: Any) -> int:
    return len(node.block_ids) // ID_BYTES


SHAPE: Final = Shape(_parent, _is_leaf, _num_blocks)
"""What policies may ask of a node."""


class TenantBlocks:
    """A tenant's counts of blocks, O(1) each and without the lock: see ``PrefixCache.blocks_of``."""

    __slots__ = ("_pool", "_tenant", "_tenants")

    def __init__(self, tenants: dict[str, TenantState], pool: BlockPool, tenant_id: str) -> None:
        self._tenants, self._pool, self._tenant = tenants, pool, tenant_id

    @property
    def free_blocks(self) -> int:
        """Blocks that it can take without an eviction.

        For a strict tenant all below its limit, because nothing of it depends on the others.
        """
        state, free = self._tenants.get(self._tenant), self._pool.num_free
        if state is None:
            return free
        below = max(state.max_blocks - state.protected_blocks - state.evictable_blocks, 0)
        return below if state.is_strict or below < free else free

    @property
    def evictable_blocks(self) -> int:
        """Its resident blocks that no lease protects."""
        state = self._tenants.get(self._tenant)
        return 0 if state is None else state.evictable_blocks

    @property
    def guaranteed_to_others(self) -> int:
        """Blocks that are guaranteed to the other tenants. O(tenants)."""
        states = list(self._tenants.items())
        return sum(state.guaranteed_blocks for tenant, state in states if tenant != self._tenant)

    @property
    def resident_blocks(self) -> int:
        """Its blocks that a match can reach."""
        state = self._tenants.get(self._tenant)
        return 0 if state is None else state.resident_blocks


refuse_copies(TenantBlocks, "it reads the counts of a running cache. Pass it on, or read them")


class NamespaceTree(RadixTree):
    """The tree of a namespace, or a tree behind a base, with its owner. ``detached``: it is no longer reachable.

    Behind a ``base`` the tree continues the first ``size`` bytes of the base's key. ``place`` is its key among its
    tenant's trees.
    """

    __slots__ = ("base", "detached", "hooks", "namespace", "place", "tenant")

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
        self.hooks: Hooks | None = None  # of announced prompts, if there are any

    def may_serve(self, claim: Claim) -> bool:
        """Whether a match of the claim's prompt could use this tree, see ``bases.longest``."""
        if self.base is None:
            return True
        step, size = self.block_bytes, claim.size
        if size < step or not claim.key.startswith(self.head_key[:step]):
            return False
        common = num_common_bytes(self.base.key, claim.key, 0, size, step)
        return common - step <= len(self.head_key) <= common


class Base:
    """A published prefix: its key, its blocks, the node that it leases, and the readers' trees behind it."""

    __slots__ = (
        "base_id",
        "block_ids",
        "is_held",
        "is_over",
        "key",
        "namespace",
        "node",
        "readers",
        "tree",
        "trees",
    )

    def __init__(
        self,
        base_id: str,
        readers: frozenset[str],
        key: bytes,
        block_ids: bytes,
        node: Node,
        tree: NamespaceTree,
    ) -> None:
        self.base_id, self.readers = base_id, readers
        self.key, self.block_ids = key, block_ids
        self.node, self.tree, self.namespace = node, tree, tree.namespace
        self.trees: set[NamespaceTree] = set()  # registered, or cleared and still in use
        self.is_over = False  # unpublished: requests no longer find it
        self.is_held = True  # it leases its node

    @property
    def is_left(self) -> bool:
        """Whether it is unpublished and unused."""
        return self.is_over and self.is_held and not self.trees

    @property
    def is_nameless(self) -> bool:
        """Whether nobody published it: it holds good blocks for what was forgotten behind them (``failed_loads``)."""
        return not self.base_id

    def is_for(self, tree: NamespaceTree) -> bool:
        """Whether requests may find a tree behind it."""
        return not self.is_over and tree.tenant.tenant_id in self.readers


Readable = dict[tuple[Any, Any, bytes], list[Base]]
"""Bases that a tenant may read, by model, adapter, weights and the key of their first block; the longest first."""
