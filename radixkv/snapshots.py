"""What the cache says of itself: counts for people and metrics, snapshots for the audit.

Functions over the cache's parts, called under its lock. Counts are summed here, when somebody asks, so that
requests don't pay for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from radixkv.bases import Base, Bases
from radixkv.blocks import BlockPool, unpack
from radixkv.config import CacheConfig
from radixkv.pins import Pins
from radixkv.sequence import Run, Sequence
from radixkv.tenants import NamespaceTree, TenantState
from radixkv.tree import Node
from radixkv.types import (
    ID_BYTES,
    BaseSnapshot,
    CacheStats,
    LeaseSnapshot,
    NodeSnapshot,
    PinSnapshot,
    RunSnapshot,
    SequenceSnapshot,
    Snapshot,
    TenantSnapshot,
    TenantStats,
    TreeSnapshot,
)

NodeIndex = tuple[int, int | None]

NOWHERE: NodeIndex = (-1, None)
"""Where a node is that no tree reaches: only in a cache with a broken law, which the audit then names."""

NO_BASE = -1
"""What a tree stands behind if that has let go of its blocks: a broken law too."""


def stats_of(
    pool: BlockPool,
    tenants: dict[str, TenantState],
    num_sequences: int,
    num_copied_blocks: int,
    pins: Pins,
    bases: Bases,
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
        quarantined_blocks=quarantined,
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


def snapshot_of(
    config: CacheConfig,
    pool: BlockPool,
    tenants: dict[str, TenantState],
    sequences: Iterable[Sequence],
    leases: Iterable[tuple[Node | None, bytes]],
    pins: Pins,
    bases: list[Base],
) -> Snapshot:
    """See PrefixCache.snapshot. Copies references to immutable bytes, not the bytes."""
    states = list(tenants.values())
    trees = [tree for state in states for tree in (*state.trees.values(), *state.detached)]
    where: dict[Node, NodeIndex] = defaultdict(lambda: NOWHERE)
    number = {base: index for index, base in enumerate(bases)}
    tree_snapshots = tuple(_tree_snapshot(index, tree, where, number) for index, tree in enumerate(trees))
    running = list(sequences)
    runs = _runs_of(running)
    run_index = {run: index for index, run in enumerate(runs)}
    run_snapshots = [_run_snapshot(run, run_index, where) for run in runs]
    sequence_snapshots = [_sequence_snapshot(each, run_index, run_snapshots, where) for each in running]
    return Snapshot(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        free_ids=pool.free_ids(),
        lent_ids=tuple(pool.lent),
        held_ids=unpack(bytes(pool.held)),
        trees=tree_snapshots,
        runs=tuple(run_snapshots),
        sequences=tuple(sequence_snapshots),
        leases=tuple(LeaseSnapshot(where[node], packed) for node, packed in leases if node is not None),
        tenants=tuple(
            TenantSnapshot(
                state.tenant_id,
                state.used_blocks,
                state.evictable_blocks,
                len(state.policy),
                state.guaranteed_blocks,
                state.settings.limit,
                state.held_blocks,
                pins.num_blocks(state.tenant_id),
            )
            for state in states
        ),
        pins=tuple(
            PinSnapshot(tenant, where[held.lease._node or held.tree.root], held.table, held.until)
            for tenant, own in pins.tenants.items()
            for held in own.by_id.values()
        ),
        bases=tuple(
            BaseSnapshot(base.base_id, where[base.node], base.key, base.block_ids, base.readers, base.is_over)
            for base in bases
        ),
    )


def _tree_snapshot(
    index: int, tree: NamespaceTree, where: dict[Node, NodeIndex], number: dict[Base, int]
) -> TreeSnapshot:
    nodes: list[NodeSnapshot] = []
    where[tree.root] = (index, None)
    pending: list[tuple[bytes, Node]] = list(tree.root.children.items())
    while pending:
        child_key, node = pending.pop()
        assert node.parent is not None
        parent = where.get(node.parent, (index, -1))[1]
        where[node] = (index, len(nodes))
        label = node.label[: node.num_blocks * tree.block_bytes]
        nodes.append(NodeSnapshot(parent, label, node.block_ids, node.depth, node.uses, child_key))
        pending.extend(node.children.items())
    base = None if tree.base is None else number.get(tree.base, NO_BASE)
    return TreeSnapshot(
        tree.namespace, tree.detached, tree.num_blocks, tree.root.uses, tuple(nodes), base, tree.head_ids
    )


def _runs_of(sequences: list[Sequence]) -> list[Run]:
    found: dict[Run, None] = {}
    for sequence in sequences:
        run = sequence._run
        while run is not None and run not in found:
            found[run] = None
            run = run.parent
    return list(found)


def _run_snapshot(run: Run, index: dict[Run, int], where: dict[Node, NodeIndex]) -> RunSnapshot:
    parent = None if run.parent is None else index[run.parent]
    node = None if run.node is None else where[run.node]
    return RunSnapshot(parent, run.start, bytes(run.block_ids), run.owners, node)


def _sequence_snapshot(
    sequence: Sequence, index: dict[Run, int], runs: list[RunSnapshot], where: dict[Node, NodeIndex]
) -> SequenceSnapshot:
    """A sequence; the blocks that are its own alone are added to ``runs`` as one more run."""
    last = None if sequence._run is None else index[sequence._run]
    own = bytes(sequence._table[sequence._own * ID_BYTES :])
    if own:
        runs.append(RunSnapshot(last, sequence._own, own, 1, None))
        last = len(runs) - 1
    return SequenceSnapshot(
        namespace=sequence._tree.namespace,
        node=where[sequence._node],
        run=last,
        block_ids=bytes(sequence._table),
        num_tokens=sequence.num_tokens,
        num_cached_tokens=sequence._num_cached,
        num_committed_tokens=sequence._num_committed,
        key=sequence.key_between(0, sequence._size),
    )
