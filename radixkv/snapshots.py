"""What the cache says of itself: counts for people and metrics. Snapshots for the audit: ``gathering``.

Functions over the cache's parts, called under its lock. Counts are summed here, when somebody asks, so that
requests don't pay for them.
"""

from __future__ import annotations

from radixkv.bases import Bases
from radixkv.blocks import BlockPool, unpack
from radixkv.pins import Pins
from radixkv.tenants import TenantState
from radixkv.types import ID_BYTES, CacheStats, TenantStats


def stats_of(
    pool: BlockPool,
    tenants: dict[str, TenantState],
    num_sequences: int,
    num_copied_blocks: int,
    pins: Pins,
    bases: Bases,
    num_device_blocks: int,
) -> CacheStats:
    """See PrefixCache.stats."""
    states = list(tenants.values())
    resident = sum(state.resident_blocks for state in states)
    quarantined = sum(state.quarantined_blocks for state in states)
    return CacheStats(
        num_blocks=pool.num_blocks,
        free_blocks=pool.num_free,
        resident_blocks=resident,
        sequence_blocks=sum(state.used_blocks for state in states) - resident - quarantined,
        quarantined_blocks=quarantined + len(pool.held) // ID_BYTES,
        lent_blocks=len(pool.lent),
        evictable_blocks=sum(state.evictable_blocks for state in states),
        num_nodes=sum(tree.num_nodes for state in states for tree in state.trees.values()),
        num_sequences=num_sequences,
        num_namespaces=sum(len(state.namespaces) for state in states),
        num_tenants=len(states),
        requests=sum(state.requests for state in states),
        hit_tokens=sum(state.hit_tokens for state in states),
        missed_tokens=sum(state.missed_tokens for state in states),
        evicted_blocks=sum(state.evicted_blocks for state in states),
        copied_blocks=num_copied_blocks,
        scrubbed_blocks=0 if pool.scrubber is None else pool.scrubber.num_scrubbed,
        declined_blocks=sum(state.declined_blocks for state in states),
        pinned_blocks=pins.num_blocks(),
        num_pins=pins.num_pins(),
        num_bases=len(bases.published) + len(bases.under_way()),
        device_blocks=num_device_blocks,
        base_blocks=len(set(unpack(b"".join(base.block_ids for base in bases.held())).tolist())),
    )


def tenant_stats_of(tenant_id: str, state: TenantState | None, pins: Pins) -> TenantStats:
    """See PrefixCache.tenant_stats."""
    if state is None:
        return TenantStats(tenant_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    resident = state.resident_blocks
    return TenantStats(
        tenant=tenant_id,
        used_blocks=state.used_blocks,
        resident_blocks=resident,
        sequence_blocks=state.used_blocks - resident - state.quarantined_blocks,
        evictable_blocks=state.evictable_blocks,
        num_namespaces=len(state.namespaces),
        requests=state.requests,
        hit_tokens=state.hit_tokens,
        missed_tokens=state.missed_tokens,
        evicted_blocks=state.evicted_blocks,
        declined_blocks=state.declined_blocks,
        pinned_blocks=pins.num_blocks(tenant_id),
        num_pins=pins.num_pins(tenant_id),
    )
