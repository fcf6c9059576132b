"""Registry: the tenants of a cache with their settings, policies and trees; and the tree to which a request belongs.

A tenant's state and a tree are made before the cache knows whether there are enough blocks. They are registered once
that is certain. So a refusal leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from radixkv.clock import Clock, monotonic
from radixkv.config import Tenant, resolve
from radixkv.errors import ArgumentError, NamespaceError
from radixkv.index.bases import Bases, longest
from radixkv.index.guarded import fallback
from radixkv.index.tenants import NamespaceTree, TenantState
from radixkv_policies import Policy

if TYPE_CHECKING:
    from radixkv.config import CacheConfig, Namespace
    from radixkv.index.eviction import Evictor
    from radixkv.index.maintenance import Maintenance
    from radixkv.index.scrubbing import Scrubber


class Registry:
    """The tenants of one cache, ``tenants`` by id. Used under the cache's lock.

    ``maintenance`` is started for policies that learn.
    """

    __slots__ = (
        "_bases",
        "_block_bytes",
        "_clock",
        "_config",
        "_evictor",
        "_maintenance",
        "_scrubber",
        "tenants",
    )

    def __init__(
        self,
        config: CacheConfig,
        clock: Clock,
        tenants: dict[str, TenantState],
        evictor: Evictor,
        bases: Bases,
        scrubber: Scrubber | None,
        maintenance: Maintenance,
        block_bytes: int,
    ) -> None:
        self._config, self._clock, self.tenants = config, clock, tenants
        self._evictor, self._bases, self._scrubber = evictor, bases, scrubber
        self._maintenance, self._block_bytes = maintenance, block_bytes

    # --- trees

    def tree(self, namespace: Namespace) -> NamespaceTree | None:
        """Return the tree of a namespace, or None."""
        tenant = self.tenants.get(namespace.tenant)
        return None if tenant is None else tenant.trees.get(namespace)

    def resident_tree(self, namespace: Namespace, key: bytes, stop: int) -> NamespaceTree | None:
        """Return the tree where most of ``key[:stop]`` is resident. None if nothing is, or the tenant has had no
        request yet.

        The tree may not be registered.
        """
        tree, tenant = self.tree(namespace), self.tenants.get(namespace.tenant)
        if tenant is None or tenant.bases is None or not self.admits(namespace.tenant):
            return tree
        return self.tree_for(namespace, tree, key, stop)

    def tree_for(
        self, namespace: Namespace, own: NamespaceTree | None, key: bytes, stop: int
    ) -> NamespaceTree:
        """Return the tree to which a request for ``key`` belongs: most of ``key[:stop]`` is resident there.

        The tree may not be registered.
        """
        tenant = self.tenants.get(namespace.tenant) if own is None else own.tenant
        if tenant is None or not self.admits(namespace.tenant):
            own = self.new_tree(namespace)  # may refuse the tenant
            tenant = own.tenant
        if tenant.bases is not None:
            own = longest(tenant, namespace, own, key, stop, self._block_bytes)
        return own or NamespaceTree(namespace, tenant, self._block_bytes)

    def new_tree(self, namespace: Namespace) -> NamespaceTree:
        """Make an empty tree that isn't registered, so that a refusal leaves nothing behind."""
        tenant, default = self.tenants.get(namespace.tenant), self._config.default_tenant
        if not self.admits(namespace.tenant):
            raise NamespaceError(
                f"tenant {namespace.tenant!r} is not known; allowed: tenants that were added"
            )
        if tenant is None:
            assert default is not None
            tenant = self._new_default_state(replace(default, id=namespace.tenant))
        return NamespaceTree(namespace, tenant, self._block_bytes)

    def register(self, tree: NamespaceTree) -> None:
        """Make a tree reachable, because it is about to hold something."""
        self.tenants.setdefault(tree.namespace.tenant, tree.tenant)
        if tree.base is not None:
            tree.base.trees.add(tree)
        tree.tenant.register(tree)

    # --- tenants

    def admits(self, tenant_id: str) -> bool:
        """Whether a tenant may have requests: it was added, or tenants that weren't added are allowed."""
        tenant = self.tenants.get(tenant_id)
        return self._config.default_tenant is not None or (tenant is not None and tenant.is_added)

    def pin_budget(self, tenant_id: str) -> int:
        """Return how many blocks a tenant may pin.

        By default this is its guarantee. For a tenant that wasn't added it is half of what it may use.
        """
        tenant = self.tenants.get(tenant_id)
        if tenant is None:
            return 0
        settings = tenant.settings
        if tenant.is_added or settings.max_pinned_blocks is not None:
            return settings.pin_budget
        return (settings.limit or self._config.num_blocks) // 2

    def pin_limit(self, tenant_id: str) -> int:
        """Return how many pins a tenant may have."""
        tenant = self.tenants.get(tenant_id)
        return 0 if tenant is None else tenant.settings.max_pins

    def new_state(self, settings: Tenant, *, is_added: bool = False) -> TenantState:
        """Make an empty state for a tenant. Raises like ``new_policy``."""
        owner_tag = self.new_owner_tag(settings)
        state = TenantState(settings, self.new_policy(settings), is_added=is_added, owner_tag=owner_tag)
        state.bases = self._bases.readable_by(settings.id)
        return state

    def _new_default_state(self, settings: Tenant) -> TenantState:
        """Make an empty state for a tenant that wasn't added, with ``lru`` if its policy can't be made."""
        try:
            return self.new_state(settings)
        except (ArgumentError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - a policy may be any code
            failure = error
        tag = self.new_owner_tag(settings)
        state = TenantState(settings, fallback(), is_added=False, owner_tag=tag)
        state.bases = self._bases.readable_by(settings.id)
        state.note_failure("its start", failure, str(settings.policy or self._config.policy))
        return state

    def state_of(self, tenant_id: str) -> TenantState:
        """Return a tenant's state. For a tenant that the cache doesn't know, a new one that isn't registered."""
        known = self.tenants.get(tenant_id)
        return known if known is not None else self.new_state(Tenant(tenant_id))

    def new_owner_tag(self, settings: Tenant) -> int:
        """Return a new label for the blocks of a tenant. Blocks that it had before aren't its own any more."""
        return (
            0 if self._scrubber is None else self._scrubber.new_owner_tag(is_strict=settings.mode == "strict")
        )

    def new_policy(self, settings: Tenant) -> Policy:
        """Make a policy for a tenant, by its own setting or the cache's. Raises ArgumentError if the result is no
        policy.
        """
        config, wanted = self._config, settings.policy
        named = wanted is None or isinstance(wanted, str)
        factory: Any = resolve("policy", wanted or config.policy) if named else wanted
        policy = factory(
            config.num_blocks,
            self._clock,
            config.seed,
            block_size=config.block_size,
            segment_blocks=config.segment_blocks,
        )
        if not isinstance(policy, Policy):
            raise ArgumentError(
                "policy",
                wanted,
                "a name, or a callable that takes the arguments of Policy and returns a Policy",
            )
        if self._clock is monotonic and type(policy).maintain is not Policy.maintain:
            self._maintenance.start()
        return policy

    def require_promise(self, tenant: Tenant, state: TenantState) -> None:
        """Raise ArgumentError unless a guarantee can be met in addition to all others, and the limit can be kept.

        O(tenants).
        """
        others = [each for each in self.tenants.values() if each is not state]
        left = self._config.num_blocks - sum(each.guaranteed_blocks for each in others)
        wanted = tenant.guaranteed_blocks
        if wanted > left:
            allowed = f"at most {left}: the guarantees would exceed the pool by {wanted - left} blocks"
            raise ArgumentError("guaranteed_blocks", wanted, allowed)
        held = state.protected_blocks
        counted = max(held, state.guaranteed_blocks) if tenant.id in self.tenants else 0
        if tenant.limit is not None and held > tenant.limit:
            raise ArgumentError(
                "max_blocks", tenant.limit, f"at least {held}, which its sequences and pins hold"
            )
        short = max(wanted, held) - counted - self._evictor.spare_blocks
        if short > 0:
            allowed = f"{short} fewer while running sequences, pins and bases hold the rest of the pool"
            raise ArgumentError("guaranteed_blocks", wanted, allowed)
