"""Snapshots of a live cache: read in slices, but consistent at one moment. Other threads wait for at most one slice.

Reading 50,000 nodes under the lock takes tens of milliseconds. So a ``Gathering`` reads some hundred nodes at a time
and lets requests run between slices. Their changes are reported to it, and it reads the changed nodes again:

    visit      every tree is walked from its root, a slice of nodes under each hold of the lock
    catch up   nodes that changed since they were read are read again, then those that changed during that, and so on
    last hold  the remaining nodes, and sequences, leases, counts and the free list: all as of this moment

The result is what one long hold at the last moment would have found. So the audit checks the same laws. A cache that
fits into one slice is read under one hold.

The module ``changes`` explains these reports. Requests pay nothing while there is none.

Cost: O(nodes + changes). A hold is O(SLICE_NODES + running sequences), 0.1 ms, plus 15 ns for each child of a visited
node: 3 ms for a node with 200,000 children. The last hold is O(SLICE_NODES + running sequences + trees + tenants),
about 1 µs for each of these, plus a copy of the free list.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, cast

from radixkv.index.blocks import unpack
from radixkv.index.changes import SLICE_TENANTS, Changes
from radixkv.index.holders import Run, SequenceState
from radixkv.index.tenants import NamespaceTree, TenantState
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES
from radixkv.index.tree import Node, SoleUser
from radixkv.storage.plan import BlockIds

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.state import CacheState
    from radixkv.index.tenants import Base


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node. ``parent`` is its index in the tree's list (None below the root). ``depth`` counts blocks to its end."""

    parent: int | None
    label: bytes
    block_ids: bytes
    depth: int
    uses: int
    child_key: bytes
    """The key under which the parent's children hold it."""
    num_children: int
    """The number of its children."""
    sole_user: int | None = None
    """The session, or family of sessions, that alone used it: an index into the snapshot's sole users."""


@dataclass(frozen=True, slots=True)
class SoleUserSnapshot:
    """A session, or a family of sessions, that alone used some nodes. ``family``: its family's index; None for that."""

    namespace: Namespace
    family: int | None


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """A tree, parents before children. ``num_blocks``, ``root_uses`` and ``root_children`` are the cache's counts."""

    namespace: Namespace
    detached: bool
    num_blocks: int
    root_uses: int
    root_children: int
    nodes: tuple[NodeSnapshot, ...]
    base: int | None = None
    """The base that the tree continues, an index into the snapshot's bases."""
    head_ids: bytes = b""
    """The blocks of that base that it continues."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Blocks ``[start, start + n)`` of some sequences. ``parent`` is an index into the snapshot's runs.

    ``node`` is the (tree, node) that it leases once a tree owns its blocks; None while they are private.
    """

    parent: int | None
    start: int
    block_ids: bytes
    owners: int
    node: tuple[int, int | None] | None


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """A running sequence. ``node`` is the leased (tree, node); node None is the root. ``run`` is its last run."""

    namespace: Namespace
    node: tuple[int, int | None]
    run: int | None
    block_ids: bytes
    num_tokens: int
    num_cached_tokens: int
    num_committed_tokens: int
    key: bytes
    is_lent: bool = False
    """Whether it is lent to the device. The snapshot then shows the state before it was lent."""
    num_reserved_tokens: int = 0
    """Tokens without ids that have a place in its blocks."""
    sole_user: int | None = None
    """Its session, if that alone used some nodes: an index into the snapshot's sole users."""


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """A lease on a match."""

    node: tuple[int, int | None]
    block_ids: bytes


@dataclass(frozen=True, slots=True)
class PinSnapshot:
    """A pin: the node that it leases, which is among the snapshot's leases. ``until``: on the cache's clock."""

    tenant: str
    node: tuple[int, int | None]
    block_ids: bytes
    until: float


@dataclass(frozen=True, slots=True)
class AnnouncementSnapshot:
    """An open announcement. ``size``: key bytes in whole blocks. ``resident``: bytes of them that are resident.

    ``hooks``: for each tree that could serve it, the (tree, node) where its resident part ends, and the bytes.
    """

    namespace: Namespace
    key: bytes
    size: int
    resident: int
    hooks: tuple[tuple[tuple[int, int | None], int], ...]


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """A tenant's counts as the cache keeps them. ``policy_nodes``: how many nodes its policy calls evictable.

    ``max_blocks`` is None for a tenant that may use the whole pool.
    """

    tenant: str
    used_blocks: int
    evictable_blocks: int
    policy_nodes: int
    guaranteed_blocks: int
    max_blocks: int | None
    pinned_blocks: int = 0
    resident_blocks: int | None = None
    """None: not counted, as in snapshots that were made by hand."""


@dataclass(frozen=True, slots=True)
class BaseSnapshot:
    """A base that holds blocks. ``node`` is the (tree, node) that it leases. ``is_over``: it is unpublished."""

    base_id: str
    node: tuple[int, int | None]
    key: bytes
    block_ids: bytes
    readers: frozenset[str]
    is_over: bool


@dataclass(frozen=True, slots=True)
class LendingSnapshot:
    """Sequences that are lent to the device, as indices, their tenant, and the blocks lent in addition to their own."""

    tenant: str
    sequences: tuple[int, ...]
    block_ids: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the audit needs, taken at one moment. Keep it in the process: labels are token ids.

    ``has_tails``: whether a tail was ever kept (``tails``).
    (tree, node) pairs index ``trees`` and the tree's ``nodes``.
    """

    num_blocks: int
    block_size: int
    free_ids: BlockIds
    lent_ids: tuple[int, ...]
    held_ids: BlockIds
    trees: tuple[TreeSnapshot, ...]
    runs: tuple[RunSnapshot, ...]
    sequences: tuple[SequenceSnapshot, ...]
    leases: tuple[LeaseSnapshot, ...]
    tenants: tuple[TenantSnapshot, ...]
    pins: tuple[PinSnapshot, ...] = ()
    bases: tuple[BaseSnapshot, ...] = ()
    lendings: tuple[LendingSnapshot, ...] = ()
    has_tails: bool = False
    announcements: tuple[AnnouncementSnapshot, ...] = ()
    sole_users: tuple[SoleUserSnapshot, ...] = ()


SLICE_NODES = 256
"""Approximate number of nodes to read under one hold of the lock."""

PATIENCE = 64
"""After this many slices of catching up, the last hold may take twice as much. Only very many changes cause this."""

NodeIndex = tuple[int, int | None]

NOWHERE: NodeIndex = (-1, None)
"""The index of a node that no tree reaches. Only in a cache with a broken law; the audit then reports it."""

NO_BASE = -1
"""The base of a tree whose base has released its blocks. This is a broken law too."""

_NodeState = tuple[Node | None, bytes, bytes, int, int, bool, int, SoleUser | None]
"""A node as it was read: parent, label, block ids, depth, uses; whether its parent holds it under its first block; its
number of children; its sole user.
"""


class _SequenceState(NamedTuple):
    namespace: Namespace
    node: Node
    run: Run | None
    own: int
    table: bytes
    size: int
    num_cached: int
    num_committed: int
    base: bytes
    base_size: int
    tail: bytes
    is_lent: bool
    reserved: int
    user: SoleUser | None


class _RunState(NamedTuple):
    parent: Run | None
    start: int
    block_ids: memoryview
    owners: int
    node: Node | None


class _End(NamedTuple):
    """What is read only in the last hold."""

    free_ids: BlockIds
    lent_ids: tuple[int, ...]
    held_ids: BlockIds
    trees: list[NamespaceTree]
    detached: set[NamespaceTree]
    runs: dict[Run, _RunState]
    sequences: list[_SequenceState]
    leases: list[tuple[Node, bytes]]
    pins: list[tuple[str, Node, bytes, float]]
    announcements: list[tuple[Namespace, bytes, int, int, list[tuple[Node, int]]]]
    bases: dict[Base, tuple[frozenset[str], bool]]
    lendings: tuple[LendingSnapshot, ...]
    tenants: tuple[TenantSnapshot, ...]


class Gathering:
    """One snapshot in progress.

    Call ``at_once``, or ``step`` until it returns True, then ``close``, then ``snapshot``.
    """

    def __init__(self, cache: CacheState) -> None:
        self._cache = cache
        self._changes = Changes()
        self._most, self._num_steps = SLICE_NODES, 0
        self._end: _End | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._num_tenants = 0  # tenants with visited trees and reported changes
        self._new_tenants: list[TenantState] = []
        self._to_visit: dict[Node, None] = {}
        self._to_reread: set[Node] = set()
        self._held: set[Node] = set()  # leased when they were read
        self._states: dict[Node, _NodeState] = {}
        self._tree_blocks: dict[NamespaceTree, int] = {}
        self._found: list[Node] = []  # children of visited nodes; not in ``_to_visit`` yet
        self._read_now: list[tuple[list[Node], Iterable[_NodeState]]] = []  # not in ``_states`` yet
        self._held_now: set[Node] = set()
        self._num_found = 0

    @property
    def is_visiting(self) -> bool:
        """Whether some nodes were never read. Otherwise it is catching up."""
        return bool(self._to_visit)

    # --- under the lock: no large table grows there

    def at_once(self) -> None:
        """Read everything under one hold."""
        with self._cache._lock:
            self._find_new_trees(None)
            self._visit_found(
                len(self._found) + self._cache._config.num_blocks
            )  # a correct cache has no more nodes
            self._finish(set(), set())
        self._sort([], [], set(), set())

    def step(self) -> bool:
        """Read a slice under one hold. Returns whether it was the last."""
        changes = self._changes
        visited = list(islice(reversed(self._to_visit), SLICE_NODES))
        reread = [] if visited else list(islice(self._to_reread, SLICE_NODES))
        self._num_steps += 1
        if not visited and not self._num_steps % PATIENCE:
            self._most *= 2
        with self._cache._lock:
            if changes.is_lost:
                self._begin_anew()
                visited, reread, _ = [], [], changes.take()
            told, removed = changes.take()
            has_all_trees = self._find_new_trees(SLICE_TENANTS)
            self._visit([node for node in visited if node not in removed])
            self._visit_found(SLICE_NODES - len(visited))
            is_visited = has_all_trees and not self._found and len(visited) == len(self._to_visit)
            is_last = is_visited and len(self._to_reread) + len(told) <= self._most
            if is_last:
                self._finish(self._to_reread.union(told, self._held), removed)
            else:
                self._reread(set(reread), removed)
                held = self._holders()
                self._held_now = {node for nodes, _ in self._read_now for node in nodes if node in held}
                self._cache._recorder.begin(changes, self._new_tenants)
        self._sort(visited, reread, told, removed)
        return is_last

    def close(self) -> None:
        """End the reports of changes."""
        while True:
            with self._cache._lock:
                if self._cache._recorder.end(self._changes):
                    return
            time.sleep(0)

    def _find_new_trees(self, most: int | None) -> bool:
        """Begin with the trees of the next tenants, at most ``most``. Returns whether all have begun.

        Tenants are never removed from the list.
        """
        tenants, begin = self._cache._tenants, self._num_tenants
        self._new_tenants = list(islice(tenants.values(), begin, None if most is None else begin + most))
        for tenant in self._new_tenants:
            self._found += [tree.root for tree in (*tenant.trees.values(), *tenant.detached)]
        self._num_tenants += len(self._new_tenants)
        return self._num_tenants == len(tenants)

    def _visit_found(self, most: int) -> None:
        """Visit the nodes that were found, level by level, at most ``most`` nodes."""
        while self._found and len(self._found) <= most:
            nodes, self._found = self._found, []
            self._visit(nodes)
            most -= len(nodes)

    def _visit(self, nodes: list[Node]) -> None:
        self._read(nodes)
        found = self._found
        for node in nodes:
            found += node.child_nodes()

    def _reread(self, nodes: set[Node], removed: set[Node]) -> None:
        """Read nodes again, and their parents."""
        parents = {node.parent for node in (*nodes, *removed) if node.parent is not None}
        self._read(list((nodes | parents) - removed))

    def _read(self, nodes: list[Node]) -> None:
        """Record the state of nodes in columns.

        This takes 0.4 µs per node and adds nothing for the garbage collector.
        """
        states = zip(
            [node.parent for node in nodes],
            [node.label for node in nodes],
            [node.block_ids for node in nodes],
            [node.depth for node in nodes],
            [node.uses for node in nodes],
            [node.tree.is_linked(node) for node in nodes],
            [node.num_children for node in nodes],
            [node.sole_user for node in nodes],
            strict=True,
        )
        self._read_now.append((nodes, states))
        for tree in cast("set[NamespaceTree]", {node.tree for node in nodes}):
            self._tree_blocks[tree] = tree.num_blocks

    def _holders(self) -> set[Node]:
        """Return the nodes on which leases end. Every object that leases a node must be included here."""
        cache = self._cache
        held = {sequence._node for sequence in cache._sequences}
        held.update([lease._node for lease in cache._leases if lease._node is not None])
        held.update([run.node for run in _runs_of(cache._sequences) if run.node is not None])
        held.update([base.node for base in cache._bases.held()])
        return held

    def _finish(self, changed: set[Node], removed: set[Node]) -> None:
        """Read changed and leased nodes, and everything that isn't a node."""
        cache = self._cache
        tenants, pool = list(cache._tenants.values()), cache._pool
        trees = [tree for tenant in tenants for tree in (*tenant.trees.values(), *tenant.detached)]
        unseen = {tree.root for tree in trees if tree.root not in self._states}
        self._reread(changed | self._holders() | unseen, removed)
        place = {sequence: at for at, sequence in enumerate(cache._sequences)}
        self._end = _End(
            free_ids=pool.free_ids(),
            lent_ids=tuple(pool.lent.ids().tolist()),
            held_ids=unpack(pool.held),
            trees=trees,
            detached={tree for tenant in tenants for tree in tenant.detached},
            runs={
                run: _RunState(run.parent, run.start, run.block_ids, run.owners, run.node)
                for run in _runs_of(cache._sequences)
            },
            sequences=[_sequence_state(sequence) for sequence in cache._sequences],
            leases=[(lease._node, lease._packed) for lease in cache._leases if lease._node is not None],
            pins=[
                (tenant_id, held.lease._node or held.tree.root, held.table, held.until)
                for tenant_id, own in cache._pins.tenants.items()
                for held in own.by_id.values()
            ],
            announcements=[
                (
                    claim.namespace,
                    claim.key,
                    claim.size,
                    claim.end,
                    [(each.node, each.end) for each in claim.hooks],
                )
                for waiting in cache._claims.tenants.values()
                for claim in waiting.by_number.values()
            ],
            bases={base: (base.readers, base.is_over) for base in cache._bases.held()},
            lendings=tuple(
                [
                    LendingSnapshot(
                        beams.tenant.tenant_id,
                        tuple([place.get(sequence, -1) for sequence in beams.sequences]),
                        bytes(beams.block_ids),
                    )
                    for beams in cache._lendings
                ]
            ),
            tenants=tuple(
                [_tenant_snapshot(tenant, cache._pins.num_blocks(tenant.tenant_id)) for tenant in tenants]
            ),
        )

    # --- without the lock

    def _sort(self, visited: list[Node], reread: list[Node], told: set[Node], removed: set[Node]) -> None:
        """Store the results of a hold."""
        for nodes, states in self._read_now:
            self._states.update(zip(nodes, states, strict=True))
            self._held.difference_update(nodes)
        self._held |= self._held_now
        self._to_reread.difference_update(reread)
        self._to_reread |= told
        self._to_reread |= {node.parent for node in removed if node.parent is not None}
        self._to_reread -= removed
        self._held -= removed
        for node in visited:
            del self._to_visit[node]
        for node in removed:
            self._to_visit.pop(node, None)
            self._states.pop(node, None)
        self._to_visit.update(dict.fromkeys(self._found))
        self._num_found += len(self._found)
        if self._num_found > 4 * self._cache._config.num_blocks + len(self._tree_blocks):
            self._to_visit = {}  # the tree has a cycle: the audit will report it
        self._found, self._read_now, self._held_now = [], [], set()

    def snapshot(self, pause: Callable[[], None] = lambda: None) -> Snapshot:
        """Return the snapshot. ``pause`` is called after every SLICE_NODES nodes."""
        end, cache = self._end, self._cache
        assert end is not None
        nodes: defaultdict[object, list[Node]] = defaultdict(list)
        for node in self._states:
            if node is not node.tree.root:
                nodes[node.tree].append(node)
        where: defaultdict[Node, NodeIndex] = defaultdict(lambda: NOWHERE)
        at_base = {base: at for at, base in enumerate(end.bases)}
        at_user: dict[SoleUser, int] = {}
        trees = tuple(
            self._tree_snapshot(at, tree, nodes[tree], where, at_base, at_user, pause)
            for at, tree in enumerate(end.trees)
        )
        at_run = {run: at for at, run in enumerate(end.runs)}
        runs = [
            RunSnapshot(
                None if run.parent is None else at_run[run.parent],
                run.start,
                bytes(run.block_ids),
                run.owners,
                None if run.node is None else where[run.node],
            )
            for run in end.runs.values()
        ]
        sequences = tuple(_sequence_snapshot(each, at_run, runs, where, at_user) for each in end.sequences)
        return Snapshot(
            num_blocks=cache._config.num_blocks,
            block_size=cache._config.block_size,
            free_ids=end.free_ids,
            lent_ids=end.lent_ids,
            held_ids=end.held_ids,
            trees=trees,
            runs=tuple(runs),
            sequences=sequences,
            leases=tuple(LeaseSnapshot(where[node], packed) for node, packed in end.leases),
            tenants=end.tenants,
            pins=tuple(
                PinSnapshot(tenant, where[node], packed, until) for tenant, node, packed, until in end.pins
            ),
            bases=tuple(
                BaseSnapshot(base.base_id, where[base.node], base.key, base.block_ids, readers, is_over)
                for base, (readers, is_over) in end.bases.items()
            ),
            lendings=end.lendings,
            has_tails=cache._evictor.has_tails,
            announcements=tuple(
                AnnouncementSnapshot(
                    namespace,
                    key,
                    size,
                    resident,
                    tuple((where.get(node, NOWHERE), stop) for node, stop in hooks),
                )
                for namespace, key, size, resident, hooks in end.announcements
            ),
            sole_users=tuple(_user_snapshot(user, at_user) for user in at_user),
        )

    def _tree_snapshot(
        self,
        at: int,
        tree: NamespaceTree,
        nodes: list[Node],
        where: dict[Node, NodeIndex],
        at_base: dict[Base, int],
        at_user: dict[SoleUser, int],
        pause: Callable[[], None],
    ) -> TreeSnapshot:
        """Return one tree. A parent is less deep than its children, so it comes before them."""
        states, found = self._states, []
        nodes.sort(key=lambda node: states[node][3])
        where.update({node: (at, index) for index, node in enumerate(nodes)})
        where[tree.root] = (at, None)
        for index, node in enumerate(nodes, 1):
            parent, label, block_ids, depth, uses, is_linked, num_children, user = states[node]
            above, parent_index = (-1, None) if parent is None else where.get(parent, NOWHERE)
            label = label[: len(block_ids) // ID_BYTES * tree.block_bytes]
            first = label[: tree.block_bytes] if is_linked else b""
            place = parent_index if above == at else -1
            at_its = _index_of(user, at_user)
            found.append(NodeSnapshot(place, label, block_ids, depth, uses, first, num_children, at_its))
            if not index % SLICE_NODES:
                pause()
        detached = self._end is not None and tree in self._end.detached
        root = states[tree.root]
        base = None if tree.base is None else at_base.get(tree.base, NO_BASE)
        return TreeSnapshot(
            tree.namespace,
            detached,
            self._tree_blocks[tree],
            root[4],
            root[6],
            tuple(found),
            base,
            tree.head_ids,
        )


def at_once(cache: CacheState) -> Snapshot:
    """See ``PrefixCache.snapshot``."""
    gathering = Gathering(cache)
    gathering.at_once()
    return gathering.snapshot()


def in_slices(cache: CacheState, pause: Callable[[], None]) -> Snapshot:
    """See ``PrefixCache.snapshot_in_slices``."""
    gathering = Gathering(cache)
    try:
        while not gathering.step():
            if gathering.is_visiting:
                pause()
            time.sleep(0)  # otherwise this thread takes the lock again before a waiting thread wakes up
    finally:
        gathering.close()
    return gathering.snapshot(pause)


def _runs_of(sequences: Iterable[SequenceState]) -> dict[Run, None]:
    found: dict[Run, None] = {}
    for sequence in sequences:
        run = sequence._run
        while run is not None and run not in found:
            found[run] = None
            run = run.parent
    return found


def _sequence_state(sequence: SequenceState) -> _SequenceState:
    return _SequenceState(
        sequence._tree.namespace,
        sequence._node,
        sequence._run,
        sequence._own,
        bytes(sequence._table),
        sequence._size,
        sequence._num_cached,
        sequence._num_committed,
        sequence._prompt_key,
        sequence._prompt_size,
        bytes(sequence._tail),
        sequence.is_lent,
        sequence._reserved,
        sequence._user,
    )


def _tenant_snapshot(tenant: TenantState, pinned_blocks: int) -> TenantSnapshot:
    return TenantSnapshot(
        tenant.tenant_id,
        tenant.used_blocks,
        tenant.evictable_blocks,
        tenant.num_ranked,
        tenant.guaranteed_blocks,
        tenant.settings.limit,
        pinned_blocks,
        tenant.resident_blocks,
    )


def _sequence_snapshot(
    state: _SequenceState,
    at_run: dict[Run, int],
    runs: list[RunSnapshot],
    where: dict[Node, NodeIndex],
    at_user: dict[SoleUser, int],
) -> SequenceSnapshot:
    """Return a sequence. The blocks that belong to it alone are added to ``runs`` as one more run."""
    last = None if state.run is None else at_run[state.run]
    own = state.table[state.own * ID_BYTES :]
    if own:
        runs.append(RunSnapshot(last, state.own, own, 1, None))
        last = len(runs) - 1
    key = state.base[: min(state.size, state.base_size)] + state.tail[: max(state.size - state.base_size, 0)]
    return SequenceSnapshot(
        namespace=state.namespace,
        node=where[state.node],
        run=last,
        block_ids=state.table,
        num_tokens=state.size // TOKEN_BYTES,
        num_cached_tokens=state.num_cached,
        num_committed_tokens=state.num_committed,
        key=key,
        is_lent=state.is_lent,
        num_reserved_tokens=state.reserved,
        sole_user=_index_of(state.user, at_user),
    )


def _index_of(user: SoleUser | None, at_user: dict[SoleUser, int]) -> int | None:
    """Return the index of a sole user. A new one comes last, after its family."""
    if user is None:
        return None
    if user not in at_user:
        _index_of(user.family, at_user)
        at_user[user] = len(at_user)
    return at_user[user]


def _user_snapshot(user: SoleUser, at_user: dict[SoleUser, int]) -> SoleUserSnapshot:
    return SoleUserSnapshot(
        cast("Namespace", user.namespace), None if user.family is None else at_user[user.family]
    )
