"""What the cache says of itself: counts for people and metrics. Snapshots for the audit: ``snapshot``.

Functions over the cache's parts, called under its lock. Counts are summed here, when somebody asks, so that
requests don't pay for them.
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
    """Owned by trees and matchable."""
    sequence_blocks: int
    """Private to running sequences."""
    quarantined_blocks: int
    """Of cleared namespaces, held by running sequences; or freed and read by a copy that waits for ``flush``, on no
    tenant's account."""
    lent_blocks: int
    """Lent to the engine."""
    evictable_blocks: int
    """Owned by trees and protected by no lease."""
    num_nodes: int
    num_sequences: int
    num_namespaces: int
    num_tenants: int
    """Added or seen since the start; one that was removed counts on."""
    requests: int
    hit_tokens: int
    missed_tokens: int
    evicted_blocks: int
    copied_blocks: int
    """Copies that copy-on-write decided on; one that waits, for a block that is given up meanwhile, is not made."""
    scrubbed_blocks: int
    """Zeroed, because they changed tenant or a strict tenant freed them."""
    declined_blocks: int
    """Given up as soon as nobody used them, since the policy didn't admit them."""
    pinned_blocks: int
    """Kept by pins, each counted once. A pin whose time is over counts until maintenance comes by, about a second."""
    num_pins: int
    num_bases: int
    """Published, computed or not."""
    device_blocks: int
    """Lent to the device for beam steps, besides those that the sequences had; part of ``sequence_blocks``."""
    base_blocks: int
    """Held by bases that are published, or were and are still read; resident ones, charged to who publishes."""


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Counts of one tenant; says nothing of others or of the pool."""

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
