"""Guarantees and limits of tenants, and their changes.

Each function runs under the cache's lock. ``require_removable`` and ``note_forgotten`` take it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.config import Namespace, Tenant
from radixkv.errors import ArgumentError
from radixkv.index.guarded import taken_over
from radixkv.index.validation import require_tenant_id

if TYPE_CHECKING:
    from radixkv.index.state import CacheState
    from radixkv.index.tenants import TenantState


def add(cache: CacheState, tenant: Tenant) -> bool:
    """See PrefixCache.add_tenant. Returns whether the KV so far are another tenant's (``incarnation``): forget them."""
    state = cache._tenants.get(tenant.id)
    if state is None:
        state = cache._registry.new_state(tenant, is_added=True)
    before = state.settings
    is_another = bool(before.incarnation and tenant.incarnation) and before.incarnation != tenant.incarnation
    cache._evictor.end_due_pins(state, tenant.guaranteed_blocks)
    cache._registry.require_promise(tenant, state)
    if is_another:
        state.must_forget = True  # first: if this is interrupted, the repeated call forgets too
    _follow_policy(cache, state, tenant)
    if state.settings.mode != tenant.mode:
        state.owner_tag = cache._registry.new_owner_tag(tenant)
    cache._tenants[tenant.id] = state
    state.is_added = True
    _set(cache, state, tenant)
    if state.must_forget:
        cache._endings.end_tenant(tenant.id)
    return state.must_forget


def note_forgotten(cache: CacheState, tenant: str) -> None:
    """Note that nothing of an earlier tenant of this name is left. Takes the lock."""
    with cache._lock:
        state = cache._tenants.get(tenant)
        if state is not None:
            state.must_forget = False


def require_removable(cache: CacheState, tenant: str) -> None:
    """Raise ArgumentError if ``PrefixCache.remove_tenant`` would. O(1)."""
    require_tenant_id(tenant)
    with cache._lock:
        _removable(cache, tenant)


def _removable(cache: CacheState, tenant: str) -> tuple[TenantState, Tenant]:
    """Return a tenant that may be removed, and the settings that it has then. Raises ArgumentError for another one."""
    state = cache._tenants.get(tenant)
    if state is None or not (state.is_added or state.must_forget):
        raise ArgumentError("tenant", tenant, "a tenant that was added")
    settings = replace(cache._config.default_tenant or Tenant(tenant), id=tenant)
    if settings.limit is not None and state.protected_blocks > settings.limit:
        allowed = f"a tenant whose sequences and pins hold at most {settings.limit} blocks, the default limit"
        raise ArgumentError("tenant", tenant, allowed)
    return state, settings


def remove(cache: CacheState, tenant: str) -> list[Namespace]:
    """See PrefixCache.remove_tenant. Returns the tenant's namespaces, which the caller must clear."""
    state, settings = _removable(cache, tenant)
    state.must_forget = True  # see add
    cache._endings.end_tenant(tenant)
    if state.waiting is not None:
        state.waiting.end_all()
    _renew_policy(cache, state, settings)  # also forgets what the old policy learned of the tenant
    state.forget_counts()
    state.is_added = False
    if state.settings.mode != settings.mode:
        state.owner_tag = cache._registry.new_owner_tag(settings)
    _set(cache, state, settings)
    return state.namespaces


def _set(cache: CacheState, tenant: TenantState, settings: Tenant) -> None:
    """Apply settings. First evicts what exceeds their limit: an interrupted call leaves no tenant above its limit."""
    over = 0 if settings.limit is None else tenant.used_blocks - settings.limit
    if over > 0:
        cache._evictor.evict_own(over, tenant)
    tenant.set(settings)
    cache._evictor.settle_promises(cache._tenants.values())


def _follow_policy(cache: CacheState, tenant: TenantState, settings: Tenant) -> None:
    """Give a tenant the policy of its settings. A new policy takes over its nodes in the order of the old one.

    Counts of uses and ghosts of the old policy are forgotten. O(nodes), under the lock. This is rare, and a policy that
    knew only half of the nodes would name wrong victims.
    """
    config = cache._config
    if (settings.policy or config.policy) != (tenant.settings.policy or config.policy):
        _renew_policy(cache, tenant, settings)


def _renew_policy(cache: CacheState, tenant: TenantState, settings: Tenant) -> None:
    """Give a tenant a new policy that takes over its nodes."""
    policy = cache._registry.new_policy(settings)
    tenant.has_failed_policy = False
    nodes = [node for tree in (*tenant.trees.values(), *tenant.detached) for node in tree.nodes()]
    evictable = [node for node in nodes if not node.uses]
    tenant.follow(taken_over(policy, tenant.policy, nodes, evictable, len(evictable)))
    cache._recorder.follow(tenant)
    for sequence in cache._sequences:
        if sequence._tree.tenant is tenant:
            sequence._hints = None  # made by the old policy
