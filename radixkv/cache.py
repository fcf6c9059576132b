"""PrefixCache: the in-process API, and the one lock.

The life of a request, and what each step touches:

    open      walk the namespace's tree, lease the deepest matched node, take blocks (evicting leaves if short)
    commit    give whole blocks whose KV exist to the tree, move the lease down
    append    take a block, or copy-on-write a shared tail, for a whole batch at once
    fork      count one more owner of the last run; copy nothing
    reorder   fork and release at once, for a beam step
    release   give up the lease, free what is private

The index decides, storage executes: the copies that ``append`` and ``extend`` decide leave as one StepPlan, which the
storage launches under the lock, so that plans run in the order in which they were made; a launch never waits
for the device. Without storage (``layout=None``) the engine fetches the plan with ``flush``.

Every public method takes the lock, validates everything, and only then changes anything: a call that raises has
changed nothing. The lock is held for microseconds; ``evict`` and ``clear`` give it up between slices. The
exceptions are calls that are not on a request's path: ``insert`` reads the free list, ``snapshot`` everything.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from radixkv import snapshots
from radixkv.blocks import BlockPool, unpack
from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig
from radixkv.errors import ArgumentError, LeaseError, PendingError
from radixkv.eviction import Evictor
from radixkv.namespaces import Namespace, NamespaceTree, TenantState
from radixkv.plan import StepPlan, WaitingCopies
from radixkv.sequence import Run, Sequence
from radixkv.tokens import TOKEN_BYTES, TokenIds, encode, encode_one
from radixkv.tree import MAX_GROWN_LABEL_BYTES, Node, Walk
from radixkv.types import ID_BYTES, BlockIds, CacheStats, Journal, Snapshot, TenantStats
from radixkv_policies import POLICIES

if TYPE_CHECKING:
    from radixkv.storage.device import DeviceStorage

OnPending = Literal["compute", "raise", "wait"]

SLICE_BLOCKS = 256
"""Blocks that ``evict`` frees before it lets others have the lock."""

SLICE_NODES = 256
"""Nodes that ``clear`` visits before it lets others have the lock."""


class Match:
    """The longest resident prefix of some ids at one moment. A miss has ``num_tokens`` 0.

    ``num_tokens``: matched tokens, whole blocks. ``block_ids``: int32 ``[num_blocks]``, read-only, valid only
    while a lease holds them (``PrefixCache.lease``).
    """

    __slots__ = ("_key", "_packed", "namespace", "num_tokens")

    def __init__(self, namespace: Namespace, key: bytes, packed: bytes) -> None:
        self.namespace = namespace
        self.num_tokens = len(key) // TOKEN_BYTES
        self._key, self._packed = key, packed

    @property
    def num_blocks(self) -> int:
        """Matched blocks."""
        return len(self._packed) // ID_BYTES

    @property
    def block_ids(self) -> BlockIds:
        """Ids of the matched blocks, int32 ``[num_blocks]``, read-only."""
        return unpack(self._packed)

    def __repr__(self) -> str:
        return f"<Match of {self.num_tokens} tokens in {self.num_blocks} blocks>"


class Lease:
    """The right to use a match: its blocks are not evicted until ``release``. Use it in a ``with``."""

    __slots__ = ("_cache", "_is_open", "_node", "_packed", "num_tokens")

    def __init__(self, cache: PrefixCache, node: Node | None, match: Match) -> None:
        self._cache, self._node, self._is_open = cache, node, True
        self._packed = match._packed
        self.num_tokens = match.num_tokens

    @property
    def block_ids(self) -> BlockIds:
        """Ids of the leased blocks, int32, read-only."""
        return unpack(self._packed)

    @property
    def is_open(self) -> bool:
        """False once released."""
        return self._is_open

    def release(self) -> None:
        """Give the blocks back to eviction. A second call raises LeaseError."""
        self._cache._release_lease(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_open:
            self.release()


class PrefixCache:
    """A prefix cache over one pool of KV blocks. Safe to use from several threads.

    config: see CacheConfig. clock: seconds, for policies and timeouts. journal: hears what becomes resident and
    what leaves (see ``types.Journal``). Raises ConfigError if the storage can't be made.
    """

    def __init__(
        self, config: CacheConfig, *, clock: Clock = monotonic, journal: Journal | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        self._block_size = config.block_size
        self._block_bytes = config.block_size * TOKEN_BYTES
        if journal is not None and journal.grain_tokens % config.block_size:
            raise ArgumentError(
                "journal.grain_tokens", journal.grain_tokens, f"a multiple of block_size {config.block_size}"
            )
        self._storage = _make_storage(config)
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._num_waiting = 0
        self._pool = BlockPool(config.num_blocks)
        self._tenants: dict[str, TenantState] = {}
        self._evictor = Evictor(self._pool, self._tenants, config.block_size, journal)
        self._journal = journal
        self._sequences: set[Sequence] = set()
        self._leases: set[Lease] = set()
        self._copies = WaitingCopies()
        self._num_copied_blocks = 0

    @property
    def config(self) -> CacheConfig:
        """What it was made with."""
        return self._config

    @property
    def storage(self) -> DeviceStorage | None:
        """The block storage; None for ``layout=None``."""
        return self._storage

    # --- match and lease

    def match(self, namespace: Namespace, ids: TokenIds) -> Match:
        """The longest resident prefix of ``ids``, in whole blocks. Pure: it splits nothing and stamps nothing.

        Raises TokenError. O(nodes on the path).
        """
        _require_namespace(namespace)
        key = encode(ids)
        with self._lock:
            tree = self._tree(namespace)
            if tree is None:
                return Match(namespace, b"", b"")
            walk = tree.walk(key, len(key))
            packed = walk.block_ids()
        return Match(namespace, key[: walk.matched], packed)

    def lease(self, match: Match) -> Lease:
        """Protect a match's blocks from eviction. Raises LeaseError if they are not all resident any more."""
        if not isinstance(match, Match):
            raise ArgumentError("match", match, "a Match")
        with self._lock:
            if not match.num_tokens:
                return self._register(Lease(self, None, match))
            tree = self._tree(match.namespace)
            walk = tree.walk(match._key, len(match._key)) if tree is not None else None
            if walk is None or walk.block_ids() != match._packed:
                raise LeaseError(
                    f"the match of {match.num_tokens} tokens is stale: its blocks were evicted; match again"
                )
            assert tree is not None
            return self._register(Lease(self, self._lease_walk(walk, tree), match))

    def _register(self, lease: Lease) -> Lease:
        self._leases.add(lease)
        return lease

    def _release_lease(self, lease: Lease) -> None:
        with self._lock:
            if not lease._is_open:
                raise LeaseError("this lease is released already")
            lease._is_open = False
            self._leases.discard(lease)
            if lease._node is not None:
                self._evictor.release(lease._node, cast(NamespaceTree, lease._node.tree))

    def _lease_walk(self, walk: Walk, tree: NamespaceTree) -> Node:
        """Lease the end of a walk, splitting there if it lies inside a node, and tell the policy of the use."""
        node, path = walk.node, walk.path
        if walk.child is not None:
            node = self._evictor.split(walk.child, walk.common, tree)
            path = [*path, node]
        self._evictor.lease(node, tree)
        if path:
            tree.tenant.policy.touched(path)
        return node

    # --- open

    def open(
        self,
        namespace: Namespace,
        ids: TokenIds,
        *,
        on_pending: OnPending = "compute",
        timeout_s: float | None = None,
    ) -> Sequence:
        """Match, lease, and allocate the rest: a sequence with a block for every token of ``ids``.

        Uses at most ``(n − 1) // block_size`` matched blocks, so that one token is left to compute logits. If
        another sequence is computing the next block of this prompt: ``"compute"`` it too, ``"raise"``
        PendingError, or ``"wait"`` until it is committed or given up, at most ``timeout_s`` seconds (then
        PendingError). Raises TokenError, NamespaceError, OutOfBlocks, and changes nothing.
        O(nodes on the path + blocks evicted).
        """
        if type(namespace) is not Namespace:
            _require_namespace(namespace)
        key = encode(ids)
        with self._lock:
            if on_pending != "compute":
                self._await_pending(namespace, key, on_pending, timeout_s)
            return self._open(namespace, key)

    def _open(self, namespace: Namespace, key: bytes) -> Sequence:
        size, num_bytes = self._block_bytes, len(key)
        tree = self._tree(namespace) or self._new_tree(namespace)
        tenant = tree.tenant
        walk = tree.walk(key, num_bytes - 1 if key else 0)
        cached, table = (walk.at + walk.common) // size, walk.block_ids()
        needed = -(-num_bytes // size) - cached
        if needed > self._pool.num_free:
            self._evictor.require(needed, self._newly_protected(walk))
        if not tree.root.children:
            self._register_tree(tree)
        num_cached = cached * self._block_size
        sequence = Sequence(self, namespace, tree, self._lease_walk(walk, tree), key, num_cached)
        sequence._prompt_blocks = num_bytes // size
        if needed:
            fresh = self._evictor.take(needed, tenant)
            tenant.used_blocks += needed
            table += fresh
        sequence._table = bytearray(table)
        sequence._own = cached
        tenant.requests += 1
        tenant.hit_tokens += num_cached
        tenant.missed_tokens += num_bytes // TOKEN_BYTES - num_cached
        self._sequences.add(sequence)
        return sequence

    def _newly_protected(self, walk: Walk) -> int:
        """Evictable blocks that a lease at the walk's end would protect."""
        above = self._evictor.unprotected_above(walk.node)
        if walk.child is not None and not walk.child.uses:
            above += walk.common // self._block_bytes
        return above

    def _tree(self, namespace: Namespace) -> NamespaceTree | None:
        tenant = self._tenants.get(namespace.tenant)
        return None if tenant is None else tenant.trees.get(namespace)

    def _new_tree(self, namespace: Namespace) -> NamespaceTree:
        """An empty tree that is not registered yet, so that a refusal leaves nothing behind."""
        tenant = self._tenants.get(namespace.tenant)
        if tenant is None:
            config = self._config
            policy = POLICIES[config.policy](config.num_blocks, self._clock, config.seed)
            tenant = TenantState(namespace.tenant, policy)
        return NamespaceTree(namespace, tenant, self._block_bytes)

    def _register_tree(self, tree: NamespaceTree) -> None:
        """Make a tree reachable, for it is about to hold something."""
        self._tenants.setdefault(tree.namespace.tenant, tree.tenant)
        tree.tenant.trees[tree.namespace] = tree

    # --- pending blocks: who is computing what

    def _await_pending(
        self, namespace: Namespace, key: bytes, on_pending: OnPending, timeout_s: float | None
    ) -> None:
        if on_pending not in ("raise", "wait"):
            raise ArgumentError("on_pending", on_pending, "'compute', 'raise' or 'wait'")
        if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s >= 0):
            raise ArgumentError("timeout_s", timeout_s, "seconds ≥ 0, or None to wait as long as it takes")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._is_pending(namespace, key):
            if on_pending == "raise":
                raise PendingError("another sequence is computing this prefix")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise PendingError(
                    f"another sequence was still computing this prefix after timeout_s={timeout_s}"
                )
            self._num_waiting += 1
            try:
                self._progress.wait(left)
            finally:
                self._num_waiting -= 1

    def _is_pending(self, namespace: Namespace, key: bytes) -> bool:
        """Whether a running sequence computes the first block that a request for ``key`` would miss. O(sequences)."""
        tree = self._tree(namespace)
        if tree is None:
            return False
        size = self._block_bytes
        usable = max(len(key) - 1, 0) // size * size
        walk = tree.walk(key, usable)
        at, node = walk.at, walk.node
        if walk.child is not None or at == usable:
            return False
        block = key[at : at + size]
        depth = node.depth
        return any(
            other._node is node and other._prompt_blocks > depth and other._base.startswith(block, at)
            for other in self._sequences
        )

    # --- commit

    def commit_sequence(self, sequence: Sequence, num_tokens: int) -> None:
        """See Sequence.commit."""
        with self._lock:
            if not sequence._is_open:
                self._require_open(sequence)
            low, high = sequence._num_committed, sequence._size // TOKEN_BYTES
            if type(num_tokens) is not int or not low <= num_tokens <= high:
                num_tokens = _require_between("num_tokens", num_tokens, low, high)
            sequence._num_committed = num_tokens
            old, new = sequence._node.depth, num_tokens // self._block_size
            if new > old:
                self._store(sequence, old, new)
                if self._num_waiting:
                    self._progress.notify_all()

    def _store(self, sequence: Sequence, old: int, new: int) -> None:
        """Make blocks ``[old, new)`` resident and move the sequence's lease to their end.

        ``[old, resident)`` the tree has already, from another sequence · ``[resident, new)`` becomes the tree's.
        """
        tree, node, size = sequence._tree, sequence._node, self._block_bytes
        key, start, stop = sequence._base, old * size, new * size
        if stop > len(key):
            key, start, stop = sequence.key_between(start, stop), 0, stop - start
        at, resident = start, old
        if node.children:
            node, at = self._follow(sequence, node, key, start, stop)
            if at == stop:
                return
            resident += (at - start) // size
        block_ids = bytes(sequence._table[resident * ID_BYTES : new * ID_BYTES])
        length = len(node.label)
        if node.uses == 1 and not node.children and 0 < length <= MAX_GROWN_LABEL_BYTES - (stop - at):
            tree.grow(node, key[at:stop], block_ids)
            tree.tenant.policy.extended(node, new - resident)
        else:
            sequence._node = self._evictor.add_leased(node, key, at, stop, block_ids, tree)
        if self._pool.num_named:
            self._pool.forget_named(block_ids)
        if sequence._own == resident:
            sequence._own = new
        else:
            self._adopt(sequence, resident, new)
        if self._journal is not None and self._evictor.reports(tree, resident, new):
            self._evictor.report_stored(tree, sequence.key_between(0, new * size), resident, new)

    def _follow(self, sequence: Sequence, node: Node, key: bytes, start: int, stop: int) -> tuple[Node, int]:
        """Move the sequence's lease down along what is resident of ``key[start:stop]``; the node and position there."""
        tree, evictor = sequence._tree, self._evictor
        end, _, at, child, common = tree.walk(key, stop, node, start)
        if child is not None:
            end, at = evictor.split(child, common, tree), at + common
        if end is not node:
            evictor.lease(end, tree)
            evictor.release(node, tree)
            sequence._node = end
        return end, at

    def _adopt(self, sequence: Sequence, start: int, stop: int) -> None:
        """Blocks ``[start, stop)`` belong to the tree now: take them out of the sequence's own ones and its runs.

        A run that other sequences share keeps a lease on the node instead. Own blocks before ``start``
        duplicate what the tree has from another sequence; they become a run.
        """
        own = sequence._own
        if start > own:
            sequence._run = Run(sequence._run, own, sequence._table[own * ID_BYTES : start * ID_BYTES])
        sequence._own = max(own, stop)
        if start < own:
            self._adopt_runs(sequence, start, min(own, stop))

    def _adopt_runs(self, sequence: Sequence, start: int, stop: int) -> None:
        """Take blocks ``[start, stop)`` out of the sequence's runs; what is shared keeps a lease in their place."""
        node, run = sequence._node, sequence._run
        below: Run | None = None
        shared = False
        while run is not None and run.end > start:
            shared = shared or run.owners > 1
            if run.start < stop:
                if run.end > stop:
                    below, run = run, run.split(stop)
                if run.start < start:
                    run.split(start)
                if shared:
                    run.node = node
                    self._evictor.lease(node, sequence._tree)
                else:
                    run = run.parent
                    if below is None:
                        sequence._run = run
                    else:
                        below.parent = run
                    continue
            below, run = run, run.parent

    # --- append and extend: room for more tokens, copy-on-write

    def append(self, sequences: SequenceABC[Sequence], ids: TokenIds) -> None:
        """One id to each of a batch, all or nothing; the copies of shared tails go in one launch.

        ``ids`` has one id for each sequence. Raises LeaseError, ArgumentError (a sequence twice, lengths that
        differ, another cache's), TokenError, OutOfBlocks, and changes nothing; if the copies themselves fail, that
        error, and the sequences that they were for are released. O(batch).
        """
        self.append_to(list(sequences), ids)

    def append_to(self, sequences: list[Sequence], ids: TokenIds) -> None:
        """See ``append``."""
        if len(sequences) == 1 and type(ids) is tuple and len(ids) == 1:
            keys = [encode_one(ids[0])]
        else:
            key = encode(ids)
            if len(key) != len(sequences) * TOKEN_BYTES:
                raise ArgumentError(
                    "ids", f"{len(key) // TOKEN_BYTES} ids", f"one for each of {len(sequences)} sequences"
                )
            keys = [key[at : at + TOKEN_BYTES] for at in range(0, len(key), TOKEN_BYTES)]
        with self._lock:
            self._require_batch(sequences)
            self._grow(sequences, keys)

    def extend_sequence(self, sequence: Sequence, ids: TokenIds) -> None:
        """See Sequence.extend."""
        key = encode(ids)
        with self._lock:
            if not sequence._is_open:
                self._require_open(sequence)
            if key:
                self._extend(sequence, key)

    def _extend(self, sequence: Sequence, key: bytes) -> None:
        """Make room for ``key`` at the end of one sequence."""
        size = self._block_bytes
        if sequence._size % size and sequence.shared_tail is not None:
            self._grow([sequence], [key])
            return
        after = sequence._size + len(key)
        needed = -(-after // size) - len(sequence._table) // ID_BYTES
        if needed:
            tenant = sequence._tree.tenant
            sequence._table += self._evictor.take(needed, tenant)
            tenant.used_blocks += needed
        sequence._tail += key
        sequence._size = after

    def _grow(self, sequences: list[Sequence], keys: list[bytes]) -> None:
        """Make room for ``keys[i]`` at the end of ``sequences[i]``."""
        size = self._block_bytes
        fresh = [
            -(-(sequence._size + len(key)) // size) - len(sequence._table) // ID_BYTES
            for sequence, key in zip(sequences, keys, strict=True)
        ]
        needed = sum(fresh) + self._count_copies(sequences)
        blocks = self._evictor.take(needed, sequences[0]._tree.tenant) if needed else b""
        at = 0
        copied: list[Sequence] = []
        for sequence, key, num_fresh in zip(sequences, keys, fresh, strict=True):
            rows, taken = sequence._size % size // TOKEN_BYTES, at
            tail = sequence.shared_tail if rows else None
            if tail is not None:
                self._copy_on_write(sequence, tail, blocks[at : at + ID_BYTES], rows)
                copied.append(sequence)
                at += ID_BYTES
            sequence._table += blocks[at : at + num_fresh * ID_BYTES]
            at += num_fresh * ID_BYTES
            sequence._tail += key
            sequence._size += len(key)
            sequence._tree.tenant.used_blocks += (at - taken) // ID_BYTES
        assert at == len(blocks)
        if copied and self._storage is not None:
            self._execute_copies(self._storage, copied)

    def _count_copies(self, sequences: list[Sequence]) -> int:
        """Tail blocks to copy if every one of ``sequences`` writes: the last owner of a tail writes in place.

        Over shared partial tails, writers − 1 if every owner writes, otherwise writers.
        """
        size = self._block_bytes
        writers: dict[Run, int] = {}
        for sequence in sequences:
            tail = sequence.shared_tail if sequence._size % size else None
            if tail is not None:
                writers[tail] = writers.get(tail, 0) + 1
        return sum(count - (count == tail.owners and tail.node is None) for tail, count in writers.items())

    def _copy_on_write(self, sequence: Sequence, tail: Run, fresh: bytes, rows: int) -> None:
        """Give the sequence a tail block of its own, with the ``rows`` valid rows of the shared one."""
        source, target = unpack(bytes(sequence._table[-ID_BYTES:]) + fresh).tolist()
        self._copies.add(source, target, rows)
        if self._storage is None:  # before the tail is given up, which may free the source
            self._pool.name_in_plan(source, target, source_in_tree=tail.node is not None)
        self._num_copied_blocks += 1
        sequence._table[-ID_BYTES:] = fresh
        last = sequence.num_blocks - 1
        if tail.start < last:
            tail.split(last)
            if tail.node is not None:
                self._evictor.lease(tail.node, sequence._tree)
        parent = tail.parent
        if parent is not None:
            parent.owners += 1
        self._drop(tail, sequence._tree)
        sequence._run, sequence._own = parent, last

    def _execute_copies(self, storage: DeviceStorage, copied: list[Sequence]) -> None:
        """Launch the copies that ``copied`` need. If that fails, their tails hold no KV: nobody may go on with them."""
        try:
            storage.execute(self._copies.take())
        except BaseException:
            for sequence in copied:
                self._release(sequence)
            raise

    def flush(self) -> StepPlan:
        """The copies that an engine which owns its KV must execute before it writes again; then they are forgotten.

        Fetch it once a step. Until then blocks that the plan names are not handed out again, even if they are
        freed. With storage, copies are executed as soon as they are decided, and the plan is empty.
        """
        with self._lock:
            self._pool.settle()
            return self._copies.take()

    # --- truncate, fork, reorder, release

    def truncate_sequence(self, sequence: Sequence, num_tokens: int) -> None:
        """See Sequence.truncate."""
        with self._lock:
            self._require_open(sequence)
            low, high = sequence._num_committed, sequence.num_tokens
            num_tokens = _require_between("num_tokens", num_tokens, low, high)
            keep = -(-num_tokens // self._block_size)
            self._cut_runs(sequence, keep)
            del sequence._table[keep * ID_BYTES :]
            sequence.cut_key(num_tokens * TOKEN_BYTES)
            sequence._prompt_blocks = min(sequence._prompt_blocks, num_tokens // self._block_size)
            if self._num_waiting:
                self._progress.notify_all()

    def _cut_runs(self, sequence: Sequence, keep: int) -> None:
        """Give up the sequence's private blocks from position ``keep`` on."""
        run, tree = sequence._run, sequence._tree
        self._free_own(sequence, max(keep, sequence._own))
        sequence._own = min(keep, sequence._own)
        while run is not None and run.end > keep:
            if run.start < keep:
                parent = run.split(keep)
                if run.node is not None:
                    self._evictor.lease(run.node, sequence._tree)
            else:
                kept = run.parent
                if kept is None:
                    self._drop(run, tree)
                    sequence._run = None
                    return
                parent = kept
            parent.owners += 1
            self._drop(run, tree)
            sequence._run = run = parent

    def fork_sequence(self, sequence: Sequence, num_children: int) -> list[Sequence]:
        """See Sequence.fork."""
        num_children = _require_between("num_children", num_children, 1, None)
        with self._lock:
            self._require_open(sequence)
            return [self._child(sequence) for _ in range(num_children)]

    def _child(self, sequence: Sequence) -> Sequence:
        child = sequence.child()
        self._evictor.lease(child._node, child._tree)
        self._sequences.add(child)
        return child

    def reorder(self, sequences: SequenceABC[Sequence], parents: Iterable[int]) -> list[Sequence]:
        """A beam step: the result's i-th sequence continues ``sequences[parents[i]]``; consumes all inputs.

        Inputs that nobody continues are released; shared tails are copied at their first write. Raises
        LeaseError, ArgumentError, and changes nothing. O(inputs + results).
        """
        inputs = list(sequences)
        chosen = [_require_between("parents", parent, 0, len(inputs) - 1) for parent in _plain_list(parents)]
        with self._lock:
            self._require_batch(inputs)
            result = [self._child(inputs[parent]) for parent in chosen]
            for sequence in inputs:
                self._release(sequence)
            return result

    def read_sequence(self, sequence: Sequence) -> tuple[bytes, bytes]:
        """The key of a sequence, in two parts."""
        with self._lock:
            return sequence._base, bytes(sequence._tail)

    def release_sequence(self, sequence: Sequence) -> None:
        """See Sequence.release."""
        with self._lock:
            if not sequence._is_open:
                self._require_open(sequence)
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        sequence._is_open = False
        self._sequences.discard(sequence)
        self._free_own(sequence, sequence._own)
        if sequence._run is not None:
            self._drop(sequence._run, sequence._tree)
            sequence._run = None
        self._evictor.release(sequence._node, sequence._tree)
        if self._num_waiting:
            self._progress.notify_all()

    def _free_own(self, sequence: Sequence, start: int) -> None:
        """Free the blocks that are the sequence's alone, from position ``start`` on."""
        block_ids = sequence._table[start * ID_BYTES :]
        if block_ids:
            self._pool.give(block_ids)
            sequence._tree.tenant.used_blocks -= len(block_ids) // ID_BYTES

    def _drop(self, run: Run, tree: NamespaceTree) -> None:
        """One owner of the run is gone; without any it is freed, and so on upward."""
        at: Run | None = run
        while at is not None:
            at.owners -= 1
            if at.owners:
                return
            if at.node is not None:
                self._evictor.release(at.node, tree)
            else:
                self._pool.give(at.block_ids)
                tree.tenant.used_blocks -= len(at.block_ids) // ID_BYTES
            at = at.parent

    # --- blocks by hand

    def evict(self, num_blocks: int) -> int:
        """Free up to ``num_blocks`` resident blocks by policy; returns how many were freed."""
        left = num_blocks = _require_between("num_blocks", num_blocks, 0, None)
        while left:
            with self._lock:
                wanted = min(left, SLICE_BLOCKS)
                freed = self._evictor.evict(wanted, None)
            left -= freed
            if freed < wanted:
                break
        return num_blocks - left

    def allocate(self, num_blocks: int) -> BlockIds:
        """Lend ``num_blocks`` blocks to the engine, int32 ids, until ``free`` or ``insert``. Raises OutOfBlocks."""
        num_blocks = _require_between("num_blocks", num_blocks, 0, None)
        with self._lock:
            return self._pool.lend(self._evictor.take(num_blocks, None))

    def free(self, block_ids: Any) -> None:
        """Take lent blocks back. Raises ArgumentError, and changes nothing, if one isn't lent."""
        ids = _block_ids(block_ids)
        with self._lock:
            self._pool.give_back(ids)

    def insert(self, namespace: Namespace, ids: TokenIds, block_ids: Any) -> int:
        """Make blocks that the engine owns and filled resident under ``ids``.

        ``block_ids``: one for each whole block of ``ids``, distinct, each lent (``allocate``) or free. Returns how
        many leading tokens were resident already: their blocks stay as they were, lent or free; the others
        become the tree's. Raises TokenError, NamespaceError, ArgumentError, and changes nothing. O(blocks + free).
        """
        _require_namespace(namespace)
        key, blocks = encode(ids), _block_ids(block_ids)
        size = self._block_bytes
        if len(blocks) != len(key) // size:
            raise ArgumentError(
                "block_ids", f"{len(blocks)} blocks", f"{len(key) // size}, one for each whole block of ids"
            )
        with self._lock:
            self._pool.check_claim(blocks)
            tree = self._tree(namespace) or self._new_tree(namespace)
            key = key[: len(blocks) * size]
            walk = tree.walk(key, len(key))
            resident = walk.matched // size
            if resident < len(blocks):
                self._insert(tree, walk, key, blocks)
            return resident * self._block_size

    def _insert(self, tree: NamespaceTree, walk: Walk, key: bytes, blocks: BlockIds) -> None:
        evictor, resident = self._evictor, walk.matched // self._block_bytes
        self._register_tree(tree)
        self._pool.claim(blocks[resident:])
        tree.tenant.used_blocks += len(blocks) - resident
        above = self._lease_walk(walk, tree)
        node = evictor.add_leased(above, key, walk.matched, len(key), blocks[resident:].tobytes(), tree)
        evictor.release(node, tree)
        if self._journal is not None:
            self._evictor.report_stored(tree, key, resident, len(blocks))

    # --- namespaces

    def namespaces(self, tenant: str | None = None) -> list[Namespace]:
        """The namespaces that hold something, of one tenant or of all."""
        with self._lock:
            return [
                namespace
                for state in self._tenants.values()
                if tenant is None or state.tenant_id == tenant
                for namespace in state.trees
            ]

    def clear(self, namespace: Namespace) -> int:
        """Forget everything of a namespace; returns how many blocks were resident.

        At once for matching. Running sequences go on undisturbed, but what they hold or commit from now on is
        never matched and is freed at their release. O(1) under the lock, then slices.
        """
        with self._lock:
            _require_namespace(namespace)
            tree = self._tree(namespace)
            if tree is None:
                return 0
            forgotten = tree.num_blocks
            tree.tenant.detach(tree)
            tree.tenant.drop_if_empty(tree)
            if self._journal is not None:
                self._journal.cleared(namespace)
            self._progress.notify_all()
        pending = [tree.root]
        while pending:
            with self._lock:
                self._reclaim_slice(tree, pending)
        return forgotten

    def _reclaim_slice(self, tree: NamespaceTree, pending: list[Node]) -> None:
        """Free the unused leaves of a cleared tree, and with them their ancestors, as far as one slice goes."""
        for _ in range(min(SLICE_NODES, len(pending))):
            node = pending.pop()
            if node.children:
                pending.extend(node.children.values())
            else:
                self._evictor.reclaim(node)

    # --- counts

    def stats(self) -> CacheStats:
        """Counts of the whole cache at this moment. O(namespaces + tenants)."""
        with self._lock:
            return snapshots.stats_of(
                self._pool, self._tenants, len(self._sequences), self._num_copied_blocks
            )

    def tenant_stats(self, tenant: str) -> TenantStats:
        """Counts of one tenant; all zero for one that isn't known. O(its namespaces)."""
        with self._lock:
            return snapshots.tenant_stats_of(tenant, self._tenants.get(tenant))

    def tenants(self) -> list[str]:
        """The tenants that the cache has seen."""
        with self._lock:
            return list(self._tenants)

    def snapshot(self) -> Snapshot:
        """Everything the audit needs, at one moment. O(nodes + sequences + free blocks)."""
        with self._lock:
            return snapshots.snapshot_of(
                self._config,
                self._pool,
                self._tenants,
                self._sequences,
                [(lease._node, lease._packed) for lease in self._leases],
            )

    # --- checks

    def _require_open(self, sequence: Sequence) -> None:
        if not sequence._is_open:
            raise LeaseError("this sequence is released or was consumed by reorder")

    def _require_batch(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if not isinstance(sequence, Sequence) or sequence._index is not self:
                raise ArgumentError("sequences", sequence, "sequences of this cache")
            self._require_open(sequence)
        if len(set(sequences)) != len(sequences):
            raise ArgumentError("sequences", "one of them twice", "each sequence once")


def _require_namespace(namespace: object) -> None:
    if not isinstance(namespace, Namespace):
        raise ArgumentError("namespace", namespace, "a Namespace")


def _require_between(argument: str, value: Any, low: int, high: int | None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high) or isinstance(value, bool):
        allowed = f"an integer ≥ {low}" if high is None else f"an integer from {low} to {high}"
        raise ArgumentError(argument, value, allowed)
    return number


def _plain_list(values: Any) -> list[Any]:
    """A list of Python values, from any iterable or from an array or tensor with ``tolist``."""
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _block_ids(values: Any) -> BlockIds:
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ArgumentError("block_ids", values, "a one-dimensional array of integers")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 2**31 - 1):
        raise ArgumentError("block_ids", values, "block ids from 0 to 2³¹ − 1")
    return ids.astype(np.int32)


def _make_storage(config: CacheConfig) -> DeviceStorage | None:
    if config.layout is None:
        return None
    from radixkv.storage.device import DeviceStorage

    return DeviceStorage(config.layout, config.num_blocks, config.block_size, config.device)
