"""Counts of the cache, for people and metrics. Snapshots for the audit are in ``snapshot``.

Functions over the cache's parts, called under its lock. They sum counts only when called, so that requests don't pay
for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.index.blocks import unpack
from radixkv.index.pins import Pins
from radixkv.index.tenants import TenantState
from radixkv.index.tokens import ID_BYTES

if TYPE_CHECKING:
    from radixkv.index.state import CacheState


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of a whole cache at one moment. Blocks unless the name says otherwise; tokens since the start."""

    num_blocks: int
    free_blocks: int
    resident_blocks: int
    """Blocks that trees own and that can be matched."""
    sequence_blocks: int
    """Blocks private to running sequences."""
    quarantined_blocks: int
    """Blocks of cleared namespaces that running sequences hold. Also freed blocks that a copy waiting for ``flush``
    reads; these count for no tenant.
    """
    lent_blocks: int
    """Blocks lent to the engine."""
    evictable_blocks: int
    """Blocks that trees own and no lease protects."""
    num_nodes: int
    num_sequences: int
    num_namespaces: int
    num_tenants: int
    """Tenants added or seen since the start, including removed ones."""
    requests: int
    hit_tokens: int
    """Tokens of prompts whose KV were found here or came back from below. See ``missed_tokens``."""
    missed_tokens: int
    """Other tokens of prompts. What comes back from below counts here from the opening until it is committed."""
    evicted_blocks: int
    copied_blocks: int
    """Copies that copy-on-write decided. A waiting copy is not made if its block is given up first."""
    scrubbed_blocks: int
    """Blocks zeroed because they changed tenant or a strict tenant freed them."""
    declined_blocks: int
    """Blocks given up as soon as they were unused, because the policy didn't admit them."""
    pinned_blocks: int
    """Blocks kept by pins, each counted once. An expired pin counts until maintenance ends it, about a second later."""
    num_pins: int
    num_bases: int
    """Published bases, including those still being computed."""
    device_blocks: int
    """Blocks lent to the device for beam steps, in addition to the sequences' own. Part of ``sequence_blocks``."""
    base_blocks: int
    """Resident blocks held by bases that are published, or unpublished and still read. Charged to the publisher."""
    failed_policies: int = 0
    """Policies that raised an error. ``lru`` replaced them, each for its tenant alone."""


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Counts of one tenant. They reveal nothing of other tenants or of the pool."""

    tenant: str
    used_blocks: int
    resident_blocks: int
    sequence_blocks: int
    evictable_blocks: int
    num_namespaces: int
    requests: int
    hit_tokens: int
    missed_tokens: int
    evicted_blocks: int
    declined_blocks: int
    pinned_blocks: int
    num_pins: int
    failed_policies: int = 0
    """Policies of the tenant that raised an error. ``lru`` replaced them."""


def stats_of(cache: CacheState) -> CacheStats:
    """See PrefixCache.stats."""
    pool, pins, bases = cache._pool, cache._pins, cache._bases
    states = list(cache._tenants.values())
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
        num_sequences=len(cache._sequences),
        num_namespaces=sum(len(state.namespaces) for state in states),
        num_tenants=len(states),
        requests=sum(state.requests for state in states),
        hit_tokens=sum(state.hit_tokens for state in states),
        missed_tokens=sum(state.missed_tokens for state in states),
        evicted_blocks=sum(state.evicted_blocks for state in states),
        copied_blocks=cache._runs.num_copied_blocks,
        scrubbed_blocks=0 if pool.scrubber is None else pool.scrubber.num_scrubbed,
        declined_blocks=sum(state.declined_blocks for state in states),
        pinned_blocks=pins.num_blocks(),
        num_pins=pins.num_pins(),
        num_bases=len(bases.published) + len(bases.under_way()),
        device_blocks=sum(len(beams.block_ids) // ID_BYTES for beams in cache._lendings),
        base_blocks=len(set(unpack(b"".join(base.block_ids for base in bases.held())).tolist())),
        failed_policies=sum(state.failed_policies for state in states),
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
        failed_policies=state.failed_policies,
    )
