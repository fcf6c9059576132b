"""The laws of a cache, checked on a snapshot: ``check(cache)`` raises, ``inspect(cache)`` reports.

A law is an invariant that must hold at any time. The snapshot is read in slices under the cache's lock, and
requests continue between slices. It still shows one moment (``radixkv.index.snapshot``). Everything else works on
the snapshot, without the lock, so a live cache may be audited at any time. A finding is checked again on a snapshot
taken under one hold of the lock, so that a mistake of the sliced reading is never reported. Block accounting is one
NumPy count over all ids. Python code runs for each resident node and each running sequence.

The laws, as named in a report:

    conservation       free + trees + private runs + lent == num_blocks, every id once and in range
    lendings           a sequence that is lent to the device is in one lending, of its tenant; others are in none
    reference-counts   a run's owners are the sequences that end with it and the runs that continue it, at least one
    one-namespace      a tree's blocks are reached only from its namespace, a base's also from its readers' of its model
    prefix-closure     a node's parent is resident, and the node's depth is its parent's plus its own blocks
    labels             a label is ``blocks × block_size × 4`` bytes, at least one block
    siblings           children are keyed by their first block and differ in it; a child has one parent, in its tree
    leases             a node's uses are the leases that end there plus its children in use
    bases              a base leases the path of its ids and blocks, and the trees behind it begin with its blocks
    tables             a block table is the leased path and the sequence's own runs, as many as all its tokens need
    committed          cached ≤ committed ≤ tokens, and the leased path is a prefix of the sequence's ids
    quotas             no tenant uses more than its limit, and every guarantee can be met
    usage              the used, resident and evictable blocks of a tenant, and the blocks of a tree, equal their sums
    policy             a policy holds exactly the nodes that no lease protects
    announcements      an announcement hangs in trees of its namespace only, where its resident part ends, and counts it
    sessions           what a session alone used is of its namespace, and no other session has its path
    pins               a pin holds a lease in its tenant's trees; a tenant's pinned blocks are those of its pins

The laws of tiers below the cache have the tier's name in ``tier_counts`` in front: ``host``, ``disk``.
The index of host memory is a cache with all the laws above: ``host-conservation``, … No disk is read. The others are

    host-slots         a slot of host memory is free, of one entry, or in use without one; free ones aren't in use
    host-filled        an entry that counts as filled has a slot
    host-pools         a pool counts the slots that were taken from it, free ones are of none, all pools have all slots
    host-spare         a pool's spare slots are its own, and it counts them
    host-copies        a block above and the entry with its copy are joined one to one
    disk-slots         a slot is free, being filled, sealed or leaving; only sealed and leaving ones are leased
    disk-owners        an owner's slots, records and counts agree, all owners' add up, and their guarantees fit
    disk-records       a sealed slot has the header of its record, under the key of its tenant's generation
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import ArgumentError, IntegrityError
from radixkv.index.snapshot import (
    AnnouncementSnapshot,
    NodeSnapshot,
    RunSnapshot,
    SequenceSnapshot,
    Snapshot,
    TreeSnapshot,
)

if TYPE_CHECKING:
    from radixkv.index.below import Below

TOKEN_BYTES = 4
ID_BYTES = 4
MAX_SHOWN = 5
"""Block ids named in one violation."""

SLICE = 256
"""Nodes or sequences that are checked before ``pause`` is called."""

T = TypeVar("T")
NodeAt = tuple[int, int | None]
"""(tree, node) as indices into the snapshot. Node None is the root."""


class Audited(Protocol):
    """What the audit needs of a cache. If the cache has ``snapshot_in_slices(pause)`` too, that is preferred.

    If it has something ``below``, the laws of that are checked too.
    """

    def snapshot(self) -> Snapshot: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """A broken law and where. ``detail`` holds ids, counts and indices of the snapshot, never token ids."""

    law: str
    detail: str

    def __str__(self) -> str:
        return f"{self.law}: {self.detail}"


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The result of an audit. ``counts``: the objects that it checked. ``seconds`` includes taking the snapshot."""

    violations: tuple[Violation, ...]
    counts: Mapping[str, int]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every law holds."""
        return not self.violations

    def as_dict(self) -> dict[str, object]:
        """Return the report as JSON types."""
        return {
            "ok": self.ok,
            "violations": [{"law": found.law, "detail": found.detail} for found in self.violations],
            "counts": dict(self.counts),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        counted = ", ".join(f"{number} {name}" for name, number in self.counts.items())
        if self.ok:
            return f"all laws hold: {counted}; {self.seconds * 1e3:.1f} ms"
        found = "\n".join(f"  {violation}" for violation in self.violations)
        return f"{len(self.violations)} violations in {counted}:\n{found}"


class BrokenLaws(IntegrityError):
    """An audit found broken laws; ``report`` says which."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(str(report))


def check(cache: Audited, *, at_once: bool = False) -> Report:
    """Check every law now. Raises IntegrityError, with ``report``, if one is broken. Linear in resident nodes.

    ``at_once``: read the cache under one hold of its lock. This is quicker, but requests wait for it.
    """
    report = inspect(cache, at_once=at_once)
    if not report.ok:
        raise BrokenLaws(report)
    return report


def inspect(cache: Audited, pause: Callable[[], None] = lambda: None, *, at_once: bool = False) -> Report:
    """Check every law now, and return a report in any case. Linear in resident nodes.

    ``pause`` is called between slices of some hundred nodes or sequences, without the cache's lock; it may sleep.
    ``at_once``: see ``check``. Raises ArgumentError if ``cache`` has no ``snapshot()``.
    """
    if not callable(getattr(cache, "snapshot", None)):
        raise ArgumentError("cache", cache, "a PrefixCache, or what has its snapshot()")
    start = time.perf_counter()
    in_slices = None if at_once else getattr(cache, "snapshot_in_slices", None)
    snapshot: Snapshot = cache.snapshot() if in_slices is None else in_slices(pause)
    violations = violations_of(snapshot, pause)
    if violations and in_slices is not None:
        snapshot = cache.snapshot()
        violations = violations_of(snapshot, pause)
    below: Below | None = getattr(cache, "below", None)
    if below is not None:
        violations += tuple(_violations_below(below, pause))
    return Report(violations, _counts(snapshot), time.perf_counter() - start)


def violations_of(snapshot: Snapshot, pause: Callable[[], None] = lambda: None) -> tuple[Violation, ...]:
    """Return the laws that a snapshot breaks."""
    return tuple(_Audit(snapshot, pause).violations())


def _violations_below(below: Below, pause: Callable[[], None]) -> Iterator[Violation]:
    for tier, found in below.violations(pause).items():
        for law, detail in found:
            yield Violation(f"{tier}-{law}", detail)
    for tier, index in below.indexes().items():
        for violation in inspect(index, pause).violations:
            yield Violation(f"{tier}-{violation.law}", violation.detail)


def num_evictable(snapshot: Snapshot, about_to_lease: frozenset[int] | set[int] = frozenset()) -> int:
    """Return the number of blocks in nodes that no lease protects, without those in ``about_to_lease``. O(nodes)."""
    found = 0
    for tree in snapshot.trees:
        for node in tree.nodes:
            if not node.uses:
                found += len(node.block_ids) // ID_BYTES
                if about_to_lease:
                    found -= sum(block in about_to_lease for block in _ids(node.block_ids).tolist())
    return found


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Return the names of the fields that differ between two snapshots.

    The order of free, lent and held ids is ignored. O(size).
    """
    found = []
    for field in dataclasses.fields(Snapshot):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name in ("free_ids", "lent_ids", "held_ids"):
            old, new = sorted(map(int, old)), sorted(map(int, new))
        if old != new:
            found.append(field.name)
    return found


def _counts(snapshot: Snapshot) -> dict[str, int]:
    return {
        "blocks": snapshot.num_blocks,
        "free": len(snapshot.free_ids),
        "lent": len(snapshot.lent_ids),
        "trees": len(snapshot.trees),
        "nodes": sum(len(tree.nodes) for tree in snapshot.trees),
        "sequences": len(snapshot.sequences),
        "runs": len(snapshot.runs),
        "leases": len(snapshot.leases),
        "tenants": len(snapshot.tenants),
        "pins": len(snapshot.pins),
        "announcements": len(snapshot.announcements),
        "lendings": len(snapshot.lendings),
    }


def _ids(packed: bytes) -> NDArray[np.int32]:
    return np.frombuffer(packed, np.int32)


class _Audit:
    """One pass over one snapshot. Each method yields the violations of one law."""

    def __init__(self, snapshot: Snapshot, pause: Callable[[], None]) -> None:
        self.snapshot, self.pause = snapshot, pause
        self.block_bytes = snapshot.block_size * TOKEN_BYTES

    def violations(self) -> Iterator[Violation]:
        malformed = [*self._references(), *self._labels(), *self._closure()]
        yield from malformed
        yield from self._conservation()
        if malformed:  # the laws below follow these references
            return
        yield from self._siblings()
        yield from self._children()
        yield from self._leases()
        yield from self._reference_counts()
        yield from self._committed()
        yield from self._tables()
        yield from self._bases()
        yield from self._lendings()
        yield from self._usage()
        yield from self._pins()
        yield from self._announcements()
        yield from self._sessions()

    def _sliced(self, items: Iterable[T]) -> Iterator[T]:
        for at, item in enumerate(items, 1):
            yield item
            if not at % SLICE:
                self.pause()

    # Each block has one owner.

    def _conservation(self) -> Iterator[Violation]:
        places = list(self._places())
        ids = np.concatenate([block_ids for _, block_ids in places])
        num_blocks = self.snapshot.num_blocks
        outside = (ids < 0) | (ids >= num_blocks)
        if outside.any():
            yield Violation("conservation", f"block ids out of range: {_shown(ids[outside])}")
            ids = ids[~outside]
        owners = np.bincount(ids, minlength=num_blocks)
        for kind, wrong in (("no owner", owners == 0), ("several owners", owners > 1)):
            if wrong.any():
                blocks = np.flatnonzero(wrong)
                where = "; ".join(
                    f"{block} in {self._where(places, block)}" for block in blocks[:MAX_SHOWN].tolist()
                )
                yield Violation("conservation", f"{len(blocks)} blocks have {kind}: {where}")

    def _places(self) -> Iterator[tuple[str, NDArray[np.int32]]]:
        """Each owner of blocks and the ids that it owns."""
        yield "the free list", self.snapshot.free_ids
        yield "the lent blocks", np.array(self.snapshot.lent_ids, dtype=np.int32)
        yield "the held blocks", self.snapshot.held_ids
        for at, lending in enumerate(self.snapshot.lendings):
            yield f"lending {at}", _ids(lending.block_ids)
        for at, tree in enumerate(self.snapshot.trees):
            yield f"tree {at}", _ids(b"".join(node.block_ids for node in tree.nodes))
        for at, run in enumerate(self.snapshot.runs):
            if run.node is None:
                yield f"run {at}", _ids(run.block_ids)

    @staticmethod
    def _where(places: list[tuple[str, NDArray[np.int32]]], block: int) -> str:
        named = [name for name, block_ids in places for _ in range(int((block_ids == block).sum()))]
        return " and ".join(named) or "nothing"

    # The shape of a tree.

    def _labels(self) -> Iterator[Violation]:
        for name, _, node in self._nodes():
            size, rest = divmod(len(node.block_ids), ID_BYTES)
            if rest or not size or len(node.label) != size * self.block_bytes:
                yield Violation(
                    "labels", f"{name} has {len(node.block_ids)} id bytes and {len(node.label)} label bytes"
                )

    def _closure(self) -> Iterator[Violation]:
        for at, tree in enumerate(self.snapshot.trees):
            for index, node in self._sliced(enumerate(tree.nodes)):
                if node.parent is None:
                    above = len(tree.head_ids) // ID_BYTES
                elif 0 <= node.parent < index:
                    above = tree.nodes[node.parent].depth
                else:
                    yield Violation("prefix-closure", f"node {index} of tree {at} has no resident parent")
                    continue
                depth = above + len(node.block_ids) // ID_BYTES
                if node.depth != depth:
                    yield Violation(
                        "prefix-closure", f"node {index} of tree {at} has depth {node.depth}, not {depth}"
                    )

    def _siblings(self) -> Iterator[Violation]:
        for at, tree in enumerate(self.snapshot.trees):
            seen: set[tuple[int | None, bytes]] = set()
            for index, node in self._sliced(enumerate(tree.nodes)):
                first = node.label[: self.block_bytes]
                if node.child_key != first:
                    yield Violation(
                        "siblings", f"node {index} of tree {at} is not held under its first block"
                    )
                if (node.parent, first) in seen:
                    yield Violation("siblings", f"node {index} of tree {at} begins like a sibling")
                seen.add((node.parent, first))

    def _children(self) -> Iterator[Violation]:
        """Each child belongs to one parent, in the same tree."""
        for at, tree in enumerate(self.snapshot.trees):
            there = Counter(node.parent for node in tree.nodes)
            if tree.root_children != there[None]:
                held = f"{tree.root_children} children, {there[None]} are there"
                yield Violation("siblings", f"the root of tree {at} holds {held}")
            for index, node in self._sliced(enumerate(tree.nodes)):
                if node.num_children != there[index]:
                    held = f"{node.num_children} children, {there[index]} are there"
                    yield Violation("siblings", f"node {index} of tree {at} holds {held}")

    def _nodes(self) -> Iterator[tuple[str, TreeSnapshot, NodeSnapshot]]:
        for at, tree in enumerate(self.snapshot.trees):
            for index, node in self._sliced(enumerate(tree.nodes)):
                yield f"node {index} of tree {at}", tree, node

    # Leases.

    def _leases(self) -> Iterator[Violation]:
        held: Counter[NodeAt] = Counter(sequence.node for sequence in self.snapshot.sequences)
        held.update(lease.node for lease in self.snapshot.leases)
        held.update(run.node for run in self.snapshot.runs if run.node is not None)
        held.update(base.node for base in self.snapshot.bases)
        for at, tree in enumerate(self.snapshot.trees):
            for node in self._sliced(tree.nodes):
                if node.uses:
                    held[(at, node.parent)] += 1
            for index, uses in self._sliced(enumerate([node.uses for node in tree.nodes])):
                if uses != held[(at, index)]:
                    yield Violation(
                        "leases", f"node {index} of tree {at} counts {uses} uses, {held[(at, index)]} exist"
                    )
            if tree.root_uses != held[(at, None)]:
                yield Violation(
                    "leases", f"the root of tree {at} counts {tree.root_uses} uses, {held[(at, None)]} exist"
                )

    def _references(self) -> Iterator[Violation]:
        """Indices point to existing objects, and a run continues a run that ends before it."""
        snapshot = self.snapshot
        named = [(f"sequence {at}", sequence.node) for at, sequence in enumerate(snapshot.sequences)]
        named += [(f"lease {at}", lease.node) for at, lease in enumerate(snapshot.leases)]
        named += [(f"run {at}", run.node) for at, run in enumerate(snapshot.runs) if run.node is not None]
        named += [(f"base {at}", base.node) for at, base in enumerate(snapshot.bases)]
        for name, (tree, node) in named:
            if not 0 <= tree < len(snapshot.trees) or not -1 < (node or 0) < max(
                len(snapshot.trees[tree].nodes), 1
            ):
                yield Violation("leases", f"{name} holds a node that isn't in a tree")
        for at, behind in enumerate(snapshot.trees):
            if behind.base is not None and not 0 <= behind.base < len(snapshot.bases):
                yield Violation("bases", f"tree {at} follows a base that holds no blocks")
        for at, sequence in enumerate(snapshot.sequences):
            if sequence.run is not None and not 0 <= sequence.run < len(snapshot.runs):
                yield Violation("reference-counts", f"sequence {at} ends with a run that doesn't exist")
        for at, run in enumerate(snapshot.runs):
            if not run.block_ids:
                yield Violation("reference-counts", f"run {at} is empty")
            if run.parent is not None and not self._continues(run):
                yield Violation("reference-counts", f"run {at} overlaps the run that it continues")

    def _continues(self, run: RunSnapshot) -> bool:
        assert run.parent is not None
        if not 0 <= run.parent < len(self.snapshot.runs):
            return False
        parent = self.snapshot.runs[run.parent]
        return parent.start + len(parent.block_ids) // ID_BYTES <= run.start

    def _reference_counts(self) -> Iterator[Violation]:
        owners: Counter[int | None] = Counter(run.parent for run in self.snapshot.runs)
        owners.update(sequence.run for sequence in self.snapshot.sequences)
        for at, run in enumerate(self.snapshot.runs):
            if run.owners != owners[at] or not owners[at]:
                yield Violation(
                    "reference-counts", f"run {at} counts {run.owners} owners, {owners[at]} exist"
                )

    # What sequences and leases hold.

    def _path(self, at: NodeAt) -> list[NodeSnapshot]:
        """Return the nodes from the root to this one."""
        tree, index = at
        nodes = self.snapshot.trees[tree].nodes
        path = []
        while index is not None:
            path.append(nodes[index])
            index = nodes[index].parent
        return path[::-1]

    def _path_ids(self, at: NodeAt) -> NDArray[np.int32]:
        head_ids = self.snapshot.trees[at[0]].head_ids
        return _ids(head_ids + b"".join(node.block_ids for node in self._path(at)))

    def _path_key(self, at: NodeAt) -> bytes:
        tree = self.snapshot.trees[at[0]]
        head = b"" if tree.base is None else self.snapshot.bases[tree.base].key
        size = len(tree.head_ids) // ID_BYTES * self.block_bytes
        return head[:size] + b"".join(node.label for node in self._path(at))

    def _bases(self) -> Iterator[Violation]:
        snapshot = self.snapshot
        for at, base in enumerate(snapshot.bases):
            is_behind = snapshot.trees[base.node[0]].base is not None
            if self._path_key(base.node) != base.key or (is_behind and not base.is_over):
                yield Violation(
                    "bases", f"base {at} leases a path of other ids, or a path after another base"
                )
            if not np.array_equal(self._path_ids(base.node), _ids(base.block_ids)):
                yield Violation("bases", f"base {at} names other blocks than it leases")
        for at, tree in enumerate(snapshot.trees):
            if tree.base is None:
                if tree.head_ids:
                    yield Violation("bases", f"tree {at} begins with blocks of no base")
                continue
            base = snapshot.bases[tree.base]
            owner, reader = snapshot.trees[base.node[0]].namespace, tree.namespace
            if not tree.head_ids or not base.block_ids.startswith(tree.head_ids):
                yield Violation("bases", f"tree {at} begins with other blocks than its base {tree.base}")
            may_read = (reader.tenant in base.readers and not base.is_over) or tree.detached
            same_kv = (reader.model, reader.adapter, reader.weights) == (
                owner.model,
                owner.adapter,
                owner.weights,
            )
            if not may_read or not same_kv or (not base.base_id and reader != owner):
                yield Violation(
                    "one-namespace", f"tree {at} follows base {tree.base}, which its tenant may not read"
                )

    def _chain(self, sequence: SequenceSnapshot) -> list[RunSnapshot]:
        """Return the runs of a sequence, first to last."""
        runs, at = [], sequence.run
        while at is not None:
            runs.append(self.snapshot.runs[at])
            at = runs[-1].parent
        return runs[::-1]

    def _committed(self) -> Iterator[Violation]:
        for at, sequence in self._sliced(enumerate(self.snapshot.sequences)):
            cached, committed = sequence.num_cached_tokens, sequence.num_committed_tokens
            if not 0 <= cached <= committed <= sequence.num_tokens:
                sizes = f"{cached} cached, {committed} committed, {sequence.num_tokens} tokens"
                yield Violation("committed", f"sequence {at} has {sizes}")
            if len(sequence.key) != sequence.num_tokens * TOKEN_BYTES:
                yield Violation(
                    "committed",
                    f"sequence {at} has {sequence.num_tokens} tokens, {len(sequence.key)} key bytes",
                )
            key = self._path_key(sequence.node)
            if not sequence.key.startswith(key):
                yield Violation("committed", f"sequence {at} leases a path that is no prefix of its ids")
            if len(key) // self.block_bytes != committed // self.snapshot.block_size:
                depth = len(key) // self.block_bytes
                yield Violation(
                    "committed", f"sequence {at} leases {depth} blocks, but committed {committed} tokens"
                )

    def _tables(self) -> Iterator[Violation]:
        snapshot = self.snapshot
        for at, sequence in self._sliced(enumerate(snapshot.sequences)):
            yield from self._table(f"sequence {at}", sequence)
        for at, lease in enumerate(snapshot.leases):
            if not np.array_equal(self._path_ids(lease.node), _ids(lease.block_ids)):
                yield Violation("tables", f"lease {at} names other blocks than those of its path")
        for at, run in enumerate(snapshot.runs):
            if run.node is not None:
                size = len(run.block_ids) // ID_BYTES
                if not np.array_equal(
                    self._path_ids(run.node)[run.start : run.start + size], _ids(run.block_ids)
                ):
                    yield Violation("tables", f"run {at} leases other blocks than its own")

    def _table(self, name: str, sequence: SequenceSnapshot) -> Iterator[Violation]:
        snapshot = self.snapshot
        owner = snapshot.trees[sequence.node[0]].namespace
        runs = self._chain(sequence)
        trees = {sequence.node[0]} | {run.node[0] for run in runs if run.node is not None}
        if owner != sequence.namespace or any(snapshot.trees[tree].namespace != owner for tree in trees):
            yield Violation("one-namespace", f"{name} reaches a tree of another namespace")
        num_tokens = sequence.num_tokens + sequence.num_reserved_tokens
        size = -(-num_tokens // snapshot.block_size)
        table = np.full(size, -1, dtype=np.int32)
        path = self._path_ids(sequence.node)[:size]
        table[: len(path)] = path
        for run in runs:
            stop = run.start + len(run.block_ids) // ID_BYTES
            if stop > size:
                yield Violation(
                    "tables",
                    f"{name} holds blocks up to {stop}, its {num_tokens} tokens need {size}",
                )
                return
            table[run.start : stop] = _ids(run.block_ids)
        if not np.array_equal(table, _ids(sequence.block_ids)):
            wrong = len(sequence.block_ids) // ID_BYTES
            where = (
                np.flatnonzero(table != _ids(sequence.block_ids))[:MAX_SHOWN].tolist()
                if wrong == size
                else "length"
            )
            yield Violation(
                "tables", f"{name} has a block table that isn't its path and its runs, at {where}"
            )

    def _lendings(self) -> Iterator[Violation]:
        snapshot = self.snapshot
        lent: Counter[int] = Counter()
        for at, lending in enumerate(snapshot.lendings):
            lent.update(lending.sequences)
            there = [sequence for sequence in lending.sequences if 0 <= sequence < len(snapshot.sequences)]
            tenants = {snapshot.sequences[sequence].namespace.tenant for sequence in there}
            if len(there) < len(lending.sequences) or tenants != {lending.tenant}:
                yield Violation("lendings", f"lending {at} has sequences that don't run, or another tenant's")
        for at, sequence in enumerate(snapshot.sequences):
            if lent[at] != sequence.is_lent:
                said = "is lent" if sequence.is_lent else "isn't lent"
                yield Violation("lendings", f"sequence {at} {said}, and {lent[at]} lendings name it")

    # Counts.

    def _usage(self) -> Iterator[Violation]:
        snapshot = self.snapshot
        used: Counter[str] = Counter()
        evictable: Counter[str] = Counter()
        resident: Counter[str] = Counter()
        unprotected: Counter[str] = Counter()
        for at, tree in enumerate(snapshot.trees):
            tenant = tree.namespace.tenant
            blocks = sum(len(node.block_ids) // ID_BYTES for node in tree.nodes)
            if tree.num_blocks != blocks:
                yield Violation("usage", f"tree {at} counts {tree.num_blocks} blocks, {blocks} are there")
            used[tenant] += blocks
            resident[tenant] += 0 if tree.detached else blocks
            evictable[tenant] += sum(len(node.block_ids) // ID_BYTES for node in tree.nodes if not node.uses)
            unprotected[tenant] += sum(not node.uses for node in tree.nodes)
        for tenant, at in self._private_runs():
            used[tenant] += len(snapshot.runs[at].block_ids) // ID_BYTES
        for lending in snapshot.lendings:
            used[lending.tenant] += len(lending.block_ids) // ID_BYTES
        for counted in snapshot.tenants:
            name = counted.tenant
            if (counted.used_blocks, counted.evictable_blocks) != (used[name], evictable[name]):
                counts = f"{counted.used_blocks} used and {counted.evictable_blocks} evictable blocks"
                yield Violation(
                    "usage", f"a tenant counts {counts}, {used[name]} and {evictable[name]} are there"
                )
            if counted.resident_blocks not in (None, resident[name]):
                counts = f"{counted.resident_blocks} resident blocks, {resident[name]} are there"
                yield Violation("usage", f"a tenant counts {counts}")
            if counted.policy_nodes != unprotected[name]:
                nodes = f"{counted.policy_nodes} nodes, {unprotected[name]} are unprotected"
                yield Violation("policy", f"a tenant's policy holds {nodes}")
            if counted.max_blocks is not None and used[name] > counted.max_blocks:
                yield Violation(
                    "quotas", f"a tenant uses {used[name]} blocks of at most {counted.max_blocks}"
                )
        promised = sum(
            max(used[each.tenant] - evictable[each.tenant], each.guaranteed_blocks)
            for each in snapshot.tenants
        )
        if any(each.guaranteed_blocks for each in snapshot.tenants) and promised > snapshot.num_blocks:
            yield Violation("quotas", f"{promised} blocks are held or guaranteed, of {snapshot.num_blocks}")
        if unknown := (+used).keys() - {counted.tenant for counted in snapshot.tenants}:
            yield Violation("usage", f"{len(unknown)} tenants own blocks and aren't counted")

    def _pins(self) -> Iterator[Violation]:
        snapshot = self.snapshot
        leases = Counter((lease.node, lease.block_ids) for lease in snapshot.leases)
        leases.subtract((pin.node, pin.block_ids) for pin in snapshot.pins)
        blocks: dict[str, set[int]] = {}
        for at, pin in self._sliced(enumerate(snapshot.pins)):
            if leases[pin.node, pin.block_ids] < 0:
                yield Violation("pins", f"pin {at} holds no lease of its own")
            elif snapshot.trees[pin.node[0]].namespace.tenant != pin.tenant:
                yield Violation("pins", f"pin {at} holds a node of another tenant")
            blocks.setdefault(pin.tenant, set()).update(_ids(pin.block_ids).tolist())
        for counted in snapshot.tenants:
            pinned = len(blocks.get(counted.tenant, ()))
            if counted.pinned_blocks != pinned:
                yield Violation(
                    "pins", f"a tenant counts {counted.pinned_blocks} pinned blocks, {pinned} are"
                )

    # Requests that wait.

    def _announcements(self) -> Iterator[Violation]:
        if not self.snapshot.announcements:
            return
        own = Counter(
            tree.namespace for tree in self.snapshot.trees if not tree.detached and tree.base is None
        )
        below = self._below()
        for at, waiting in self._sliced(enumerate(self.snapshot.announcements)):
            resident, hooked = self._from_bases(waiting), 0
            for (tree_at, node), end in waiting.hooks:
                tree = self.snapshot.trees[tree_at] if 0 <= tree_at else None
                if tree is None or tree.detached or tree.namespace != waiting.namespace:
                    yield Violation("announcements", f"announcement {at} hangs in a tree that can't serve it")
                    continue
                hooked += tree.base is None
                resident = max(resident, end)
                if not self._ends_there((tree_at, node), end, waiting, below):
                    yield Violation(
                        "announcements", f"announcement {at} hangs where its resident part doesn't end"
                    )
            if hooked != own[waiting.namespace]:
                yield Violation(
                    "announcements", f"announcement {at} isn't kept up in the tree of its namespace"
                )
            if waiting.resident != resident:
                counts = f"counts {waiting.resident} resident bytes, {resident} are there"
                yield Violation("announcements", f"announcement {at} {counts}")

    def _below(self) -> set[tuple[int, int | None, bytes]]:
        """Return each child as (tree, parent, first block)."""
        return {
            (at, node.parent, node.child_key)
            for at, tree in enumerate(self.snapshot.trees)
            for node in self._sliced(tree.nodes)
        }

    def _ends_there(
        self, at: NodeAt, end: int, waiting: AnnouncementSnapshot, below: set[tuple[int, int | None, bytes]]
    ) -> bool:
        """Whether the path to a node and the ids agree in ``end`` bytes, within the node, and in no block more."""
        key, step, path = waiting.key[: waiting.size], self.block_bytes, self._path_key(at)
        start = len(path) - (0 if at[1] is None else len(self.snapshot.trees[at[0]].nodes[at[1]].label))
        if (
            end % step
            or not path.startswith(key[:end])
            or not (start < end <= len(path) or end == start == len(path))
        ):
            return False
        following = key[end : end + step]
        if len(following) < step:
            return True
        if end < len(path):
            return path[end : end + step] != following
        return (*at, following) not in below

    def _from_bases(self, waiting: AnnouncementSnapshot) -> int:
        """Return how many bytes bases give."""
        found, key, step = 0, waiting.key[: waiting.size], self.block_bytes
        for base in self.snapshot.bases:
            owner = self.snapshot.trees[base.node[0]].namespace
            same_kv = owner[1:3] + owner[4:] == waiting.namespace[1:3] + waiting.namespace[4:]
            if not base.is_over and same_kv and waiting.namespace.tenant in base.readers:
                end = 0
                while end < len(key) and key[end : end + step] == base.key[end : end + step]:
                    end += step
                found = max(found, end)
        return found

    # Sessions.

    def _sessions(self) -> Iterator[Violation]:
        snapshot = self.snapshot
        users = snapshot.sole_users
        if not users:
            return
        for tree_at, tree in enumerate(snapshot.trees):
            for node in self._sliced(tree.nodes):
                if node.sole_user is not None and users[node.sole_user].namespace != tree.namespace:
                    yield Violation(
                        "sessions", f"tree {tree_at} has a node of a session of another namespace"
                    )
                if node.parent is not None:
                    above = tree.nodes[node.parent].sole_user
                    if not self._is_used_by(above, node.sole_user):
                        where = f"a node of tree {tree_at} and the node below it"
                        yield Violation("sessions", f"{where} have different sessions")
        for at, sequence in self._sliced(enumerate(snapshot.sequences)):
            tree_at, node_at = sequence.node
            user = None if node_at is None else snapshot.trees[tree_at].nodes[node_at].sole_user
            if not self._is_used_by(user, sequence.sole_user):
                yield Violation("sessions", f"sequence {at} has the path of another session alone")

    def _is_used_by(self, user: int | None, other: int | None) -> bool:
        """Whether the user of a node is nobody alone, or stands for the other user, which uses the node too."""
        if user is None:
            return True
        return other is not None and user in (other, self.snapshot.sole_users[other].family)

    def _private_runs(self) -> set[tuple[str, int]]:
        """(tenant, run) of the runs that own their blocks.

        A run that two tenants reach appears for both, and then breaks ``usage``.
        """
        found: set[tuple[str, int]] = set()
        for sequence in self.snapshot.sequences:
            at = sequence.run
            while at is not None:
                run = self.snapshot.runs[at]
                if run.node is None:
                    found.add((sequence.namespace.tenant, at))
                at = run.parent
        return found


def _shown(ids: NDArray[np.int32]) -> str:
    more = ", …" if len(ids) > MAX_SHOWN else ""
    return ", ".join(map(str, ids[:MAX_SHOWN].tolist())) + more
