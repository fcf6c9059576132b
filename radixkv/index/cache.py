"""PrefixCache: the in-process API, and the one lock.

The life of a request, and what each step touches:

    open      walk the namespace's tree, lease the deepest matched node, take blocks (evicting leaves if short)
    commit    give whole blocks whose KV exist to the tree, move the lease down
    append    take a block, or copy-on-write a shared tail, for a whole batch at once
    fork      count one more owner of the last run; copy nothing
    reorder   fork and release at once, for a beam step
    lend      let the device make beam steps by itself (lending)
    release   give up the lease, free what is private

The index decides, storage executes: the copies that ``append`` and ``extend`` decide leave as one StepPlan, which the
storage launches under the lock, so that plans run in the order in which they were made; a launch never waits
for the device. Without storage (``layout=None``) the engine fetches the plan with ``flush``.

Every public method takes the lock, validates everything, and only then changes anything: a call that refuses has
changed nothing. One that is interrupted while it changes something costs the sequences that it works on
(``recovery.mend``); whatever it is about to return is known where it is mended, and registered last. Where a call is
interrupted, ``CacheLock.broken`` is set before anything else: no call is done on a cache that isn't repaired.

The lock is held for microseconds; ``evict``, ``clear`` and ``snapshot_in_slices`` give it up between slices. The
exceptions are calls that are not on a request's path: ``insert`` reads the free list, ``snapshot`` everything; and
taking back lent beams, 0.25 ms for 4 of them and up to 1 ms for 64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from radixkv._compiled import mypyc_attr
from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig, Namespace, Tenant, resolve
from radixkv.errors import (
    ArgumentError,
    ConfigError,
    FlushRequired,
    LeaseError,
    OutOfBlocks,
    PendingError,
    ReentrantCall,
    SequenceLent,
    StaleGeneration,
    wrong_count,
)
from radixkv.index import device_beams
from radixkv.index import purge as purge_module
from radixkv.index import snapshot as snapshot_module
from radixkv.index import stats as stats_module
from radixkv.index.bases import Base, BaseInfo, Bases, Publication
from radixkv.index.blocks import BlockPool
from radixkv.index.changes import Journal, Recorder
from radixkv.index.device_beams import Lending, LentBeams
from radixkv.index.eviction import Evictor
from radixkv.index.ghost_keys import SegmentKeys
from radixkv.index.leases import Lease, LeaseState, Match
from radixkv.index.locking import is_finalising, later, make_lock
from radixkv.index.maintenance import Upkeep
from radixkv.index.pins import Pin, Pins, require_ttl
from radixkv.index.recovery import Damage, mend, repair, taken_over
from radixkv.index.registry import Registry
from radixkv.index.runs import Runs
from radixkv.index.scrubbing import make_scrubber
from radixkv.index.sequence import MAX_CHILDREN, Sequence, SequenceState
from radixkv.index.snapshot import Snapshot
from radixkv.index.stats import CacheStats, TenantStats
from radixkv.index.tenants import NamespaceTree, TenantState
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES, TokenIds, encode, encode_one
from radixkv.index.tree import MAX_GROWN_LABEL_BYTES, Node, path_between
from radixkv.index.validation import (
    block_ids_of,
    deadline_of,
    list_of,
    readers_of,
    require_base_id,
    require_between,
    require_parts,
    require_policy,
    require_tenant_id,
)
from radixkv.storage.plan import BlockIds, StepPlan
from radixkv_policies import Policy
from radixkv_policies import RequestHints as RequestHints
from radixkv_policies import TokenRange as TokenRange

if TYPE_CHECKING:
    from radixkv.index.arguments import (
        BaseId,
        Hints,
        MatchLike,
        OnPending,
        ScrubBlocks,
        Seconds,
        StorageLike,
        TenantId,
    )
    from radixkv.storage.device import BlockStorage

SLICE_BLOCKS = 512
"""Blocks that ``evict`` frees before it lets others have the lock."""

MAX_BLOCKS_AT_ONCE = 2_048
"""Room for more blocks than this is made in slices if it takes many victims, before the call that needs it goes on."""

MAX_WAIT_S = 1.0
"""Longest wait for a pending block at one go: what was forgotten meanwhile wakes nobody, but is released then."""

MAX_VICTIMS_AT_ONCE = 512
"""Leaves that one call may have to evict at once, about; what an eviction costs is its victims, not its blocks."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache:
    """A prefix cache over one pool of KV blocks. Safe to use from several threads.

    config: see CacheConfig. clock: seconds, for policies and timeouts. journal: hears what becomes resident and
    what leaves (see ``types.Journal``). storage: of an engine that owns its KV (``layout=None``): a BlockStorage over
    its tensors, in which the cache then copies and zeroes blocks. scrub_blocks: of one that executes ``flush`` itself:
    zeroes the blocks of an int32 array, in the order of its other work on them. Raises ConfigError, and ArgumentError
    for a clock or a journal that is none.

    The clock, the journal, ``scrub_blocks``, policies (but for ``maintain``) and the storage are called under the
    cache's lock. They must not wait, and if one of them calls the cache it gets ReentrantCall. A release by a finaliser
    (``__del__``) that runs in the middle of a call is done by the next call.

    If an error interrupts a call and the cache's state can't be repaired, now or by the next call, the cache is dead:
    every call raises IntegrityError. Leaving a ``with`` block of a dead cache raises nothing.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        clock: Clock = monotonic,
        journal: Journal | None = None,
        scrub_blocks: ScrubBlocks = None,
        storage: StorageLike = None,
    ) -> None:
        require_parts(config, clock, journal)
        self._config = config
        self._clock = clock
        self._segment_blocks = config.segment_blocks
        self._block_size = config.block_size
        self._block_bytes = config.block_size * TOKEN_BYTES
        self._storage = _storage_of(config, storage)
        self._lock = make_lock()
        self._progress = self._lock.progress
        self._damage = Damage()
        self._num_waiting = 0
        self._scrubber = make_scrubber(config, self._storage, scrub_blocks)
        self._pool = BlockPool(config.num_blocks, self._scrubber, is_deferred=self._storage is None)
        self._tenants: dict[str, TenantState] = {}
        self._evictor = Evictor(self._pool, self._tenants, config.block_size, journal, config.segment_blocks)
        if self._storage is not None and self._storage.fences is not None:
            self._evictor.on_hand_out = self._storage.join
        self._journal = journal
        self._sequences: set[SequenceState] = set()
        self._leases: set[LeaseState] = set()
        self._lendings: set[Lending] = set()
        self._bases = Bases(self._block_bytes)
        self._publishing = self._bases.publishing
        self._runs = Runs(self._pool, self._evictor, self._block_bytes)
        self._recorder = Recorder()
        self._pins = Pins(clock, self._evictor, self._leases)
        self._upkeep = Upkeep(self._lock, self._tenants, self._pins)
        self._registry = Registry(
            config,
            clock,
            self._tenants,
            self._evictor,
            self._bases,
            self._scrubber,
            self._upkeep,
            self._block_bytes,
        )
        if clock is monotonic and resolve("policy", config.policy).maintain is not Policy.maintain:
            self._upkeep.start()

    @property
    def config(self) -> CacheConfig:
        """What it was made with."""
        return self._config

    @property
    def storage(self) -> BlockStorage | None:
        """The block storage, a DeviceStorage if there is a layout; None if the engine executes ``flush`` itself."""
        return self._storage

    def maintain(self) -> None:
        """End pins whose time is over, and let policies learn, without the lock. A cache on the monotonic clock has a
        thread that does; on another clock, as in a simulation, call it between requests.
        """
        self._upkeep.maintain()

    # --- match and lease

    def match(self, namespace: Namespace, ids: TokenIds) -> Match:
        """The longest resident prefix of ``ids``, in whole blocks. Pure: it splits nothing and stamps nothing.

        Raises TokenError. O(nodes on the path).
        """
        _require_namespace(namespace)
        key = encode(ids)
        with self._lock:
            return self._match(namespace, key)

    def _match(self, namespace: Namespace, key: bytes) -> Match:
        tree = self._registry.resident_tree(namespace, key, len(key))
        if tree is None:
            can_read = bool(self._bases.published) and self._registry.admits(namespace.tenant)
            return Match(namespace, *(self._bases.head(namespace, key) if can_read else (b"", b"")))
        table = bytearray()
        _, at, _, common = tree.walk(key, len(key), table)
        return Match(namespace, key[: at + common], bytes(table))

    def lease(self, match: MatchLike) -> Lease:
        """Protect a match's blocks from eviction.

        Raises LeaseError if they are not all resident any more, and OutOfBlocks if they are borrowed and the pool
        couldn't keep what others are guaranteed without them; then nothing is changed.
        """
        if not isinstance(match, Match):
            raise ArgumentError("match", match, "a Match")
        lease: LeaseState | None = None
        with self._lock:
            try:
                lease = LeaseState(self, self._lease_match(match), match)
                self._leases.add(lease)
                if self._evictor.on_hand_out is not None:
                    self._evictor.on_hand_out()
                return Lease(self, lease)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, lease=lease)
                raise

    def _lease_match(self, match: Match) -> Node | None:
        """The leased end of a match; None for a miss."""
        if not match.num_tokens:
            return None
        tree = self._registry.resident_tree(match.namespace, match._key, len(match._key))
        if tree is None and self._registry.admits(match.namespace.tenant):
            tree = self._registry.tree_for(match.namespace, None, match._key, len(match._key))
        table = bytearray()
        if tree is not None:
            node, _, child, common = tree.walk(match._key, len(match._key), table)
        if tree is None or table != match._packed:
            raise LeaseError(
                f"the match of {match.num_tokens} tokens is stale: its blocks were evicted; match again"
            )
        self._evictor.end_due_pins(tree.tenant, match.num_blocks)
        self._evictor.require(0, tree.tenant, self._newly_protected(node, child, common))
        if tree.base is not None:
            self._registry.register(tree)
        return self._lease_end(tree, node, child, common)

    def release_lease(self, lease: LeaseState) -> None:
        """See Lease.release."""
        with self._lock:
            try:
                if not lease._is_open:
                    raise LeaseError("this lease is released already")
                self._end_lease(lease)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, lease=lease)
                raise

    def require_leased(self, lease: LeaseState) -> None:
        """Raise LeaseError unless a lease holds its blocks."""
        with self._lock:
            if not lease._is_open:
                raise LeaseError("this lease is released already")

    def _end_lease(self, lease: LeaseState) -> None:
        lease._is_open = False
        self._leases.discard(lease)
        if lease._node is not None:
            self._evictor.release(lease._node, cast(NamespaceTree, lease._node.tree))

    def _lease_end(
        self, tree: NamespaceTree, node: Node, child: Node | None, common: int, told: Node | None = None
    ) -> Node:
        """Lease the end of a walk, splitting there if it lies inside a node, and tell the policy of the use.

        ``told``: what is above the end of this node it has heard of already, from the same request.
        """
        if child is not None:
            node = self._evictor.split(child, common, tree)
        self._evictor.lease(node, tree)
        touched = tree.tenant.on_touched
        if touched is not None:
            above = tree.root if told is None or told.tree is not tree else told
            if above is not node:
                touched(path_between(above, node))
        return node

    # --- open

    def open(
        self,
        namespace: Namespace,
        ids: TokenIds,
        *,
        on_pending: OnPending = "compute",
        timeout_s: Seconds = None,
        hints: Hints = None,
    ) -> Sequence:
        """Match, lease, and allocate the rest: a sequence with a block for every token of ``ids``.

        Uses at most ``(n − 1) // block_size`` matched blocks, so that one token is left to compute logits. If
        another sequence is computing the next block of this prompt: ``"compute"`` it too, ``"raise"``
        PendingError, or ``"wait"`` until it is committed or given up, at most ``timeout_s`` seconds (then
        PendingError). ``hints``: what the policy may use of the request.
        Raises TokenError, NamespaceError, ArgumentError, QuotaExceeded, OutOfBlocks, and changes nothing.
        O(nodes on the path + blocks evicted).
        """
        if type(namespace) is not Namespace:
            _require_namespace(namespace)
        if hints is not None and not isinstance(hints, RequestHints):
            raise ArgumentError("hints", hints, "a RequestHints, or None")
        computes = isinstance(on_pending, str) and on_pending == "compute"
        deadline = None if computes else deadline_of(on_pending, timeout_s)
        key = encode(ids)
        if len(key) > MAX_BLOCKS_AT_ONCE * self._block_bytes and self._takes_many_victims(len(key)):
            return self._open_long(namespace, key, on_pending, deadline, hints, None)
        return self._open(namespace, key, on_pending, deadline, hints)

    def _open(
        self,
        namespace: Namespace,
        key: bytes,
        on_pending: OnPending,
        deadline: float | None,
        hints: Hints,
        told: Node | None = None,
        publication: Publication | None = None,
    ) -> Sequence:
        """See ``open``; ``told``: see ``_lease_end``."""
        num_bytes, size, table = len(key), self._block_bytes, bytearray()
        sequence: SequenceState | None = None
        with self._lock:
            if on_pending != "compute":
                self._await_pending(namespace, key, on_pending, deadline)
            try:
                tree = self._registry.tree(namespace)
                if tree is None or tree.tenant.bases is not None:
                    tree = self._registry.tree_for(namespace, tree, key, num_bytes - 1)
                if publication is not None:
                    self._bases.require_new(publication)
                node, at, child, common = tree.walk(key, num_bytes - 1 if num_bytes else 0, table)
                cached = (at + common) // size
                total = -(-num_bytes // size)
                needed, tenant = total - cached, tree.tenant
                self._evictor.end_due_pins(tenant, total)
                if not self._evictor.surely_has(total, tenant):
                    protected = self._newly_protected(node, child, common)
                    self._evictor.require(needed, tenant, protected)
                    self._evictor.require_fetched(needed, tenant, protected)
                if tree.root.children is None:
                    self._registry.register(tree)
                node = self._lease_end(tree, node, child, common, told)
                self._evictor.take_granted(needed, tenant, table)
                self._evictor.charge(tenant, needed)
                num_cached = cached * self._block_size
                tenant.requests += 1
                tenant.hit_tokens += num_cached
                tenant.missed_tokens += num_bytes // TOKEN_BYTES - num_cached
                sequence = SequenceState(tree, node, key, table, num_cached, cached)
                if tenant.on_opened is not None:
                    path = path_between(tree.root, node)
                    sequence._hints = tenant.on_opened(path, max(num_bytes - TOKEN_BYTES, 0) // size, hints)
                if publication is not None:
                    publication.sequence = sequence
                    self._publishing[sequence] = publication
                self._sequences.add(sequence)
                return Sequence(self, sequence)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, sequence)
                raise

    def _open_long(
        self,
        namespace: Namespace,
        key: bytes,
        on_pending: OnPending,
        deadline: float | None,
        hints: Hints,
        publication: Publication | None,
    ) -> Sequence:
        """Make room in slices, what is matched leased meanwhile, so that nobody waits for thousands of evictions."""
        lease: Lease | None = None
        sequence: Sequence | None = None
        try:
            lease, needed, tenant = self._lease_long(namespace, key, on_pending, deadline, publication)
            with lease:
                self._make_room(needed, tenant)
                told = lease._state._node
                sequence = self._open(namespace, key, on_pending, deadline, hints, told, publication)
            return sequence
        except BaseException as error:
            opened = None if sequence is None else sequence._state
            leased = None if lease is None else lease._state
            with self._lock:
                mend(self, error, opened, lease=leased)
            raise

    def _lease_long(
        self,
        namespace: Namespace,
        key: bytes,
        on_pending: OnPending,
        deadline: float | None,
        publication: Publication | None,
    ) -> tuple[Lease, int, TenantState]:
        """A lease on what is matched of a key, how many more blocks it needs, and for whom.

        Refuses what ``_open`` would, before room is made for it.
        """
        table = bytearray()
        lease: LeaseState | None = None
        with self._lock:
            if on_pending != "compute":
                self._await_pending(namespace, key, on_pending, deadline)
            try:
                if publication is not None:
                    self._bases.require_new(publication)
                tree = self._registry.tree_for(namespace, self._registry.tree(namespace), key, len(key) - 1)
                node, at, child, common = tree.walk(key, len(key) - 1, table)
                needed = -(-len(key) // self._block_bytes) - len(table) // ID_BYTES
                self._evictor.end_due_pins(tree.tenant, needed + len(table) // ID_BYTES)
                protected = self._newly_protected(node, child, common)
                self._evictor.require(needed, tree.tenant, protected)
                self._evictor.require_fetched(needed, tree.tenant, protected)
                matched = Match(namespace, key[: at + common], bytes(table))
                if table and tree.base is not None:
                    self._registry.register(tree)
                end = self._lease_end(tree, node, child, common) if table else None
                lease = LeaseState(self, end, matched)
                self._leases.add(lease)
                return Lease(self, lease), needed, tree.tenant
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, lease=lease)
                raise

    def _takes_many_victims(self, num_bytes: int) -> bool:
        """Whether room for so many bytes of a key takes more evictions, by their mean size, than may hold others up."""
        with self._lock:
            short = num_bytes // self._block_bytes - self._pool.num_free
            num_leaves = sum(len(tenant.policy) for tenant in self._tenants.values())
            return short * num_leaves > MAX_VICTIMS_AT_ONCE * self._evictor.evictable_blocks

    def _make_room(self, num_blocks: int, tenant: TenantState) -> None:
        """Evict in slices until so many blocks are free for the tenant. Raises like ``Evictor.require``."""
        short = num_blocks
        while short > 0:
            with self._lock:
                try:
                    self._evictor.end_due_pins(tenant, num_blocks)
                    self._evictor.require(num_blocks, tenant)
                    self._evictor.require_fetched(num_blocks, tenant)
                    short = num_blocks - self._pool.num_free
                    if short > 0:
                        self._evictor.evict(min(short, SLICE_BLOCKS), tenant)
                except BaseException as error:
                    self._damage.error, self._lock.broken = error, self
                    mend(self, error)
                    raise
            time.sleep(0)  # see evict

    def _newly_protected(self, node: Node, child: Node | None, common: int) -> int:
        """Evictable blocks that a lease at a walk's end would protect."""
        above = self._evictor.unprotected_above(node)
        if child is not None and not child.uses:
            above += common // self._block_bytes
        return above

    # --- pending blocks: who is computing what

    def _await_pending(
        self, namespace: Namespace, key: bytes, on_pending: OnPending, deadline: float | None
    ) -> None:
        while self._is_pending(namespace, key):
            if on_pending == "raise":
                raise PendingError("another sequence is computing this prefix")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise PendingError("another sequence was still computing this prefix when timeout_s was over")
            self._num_waiting += 1
            try:
                self._lock.wait(MAX_WAIT_S if left is None else min(left, MAX_WAIT_S))
            finally:
                self._num_waiting -= 1

    def _is_pending(self, namespace: Namespace, key: bytes) -> bool:
        """Whether a running sequence computes the first block that a request for ``key`` would miss. O(sequences)."""
        size = self._block_bytes
        usable = max(len(key) - 1, 0) // size * size
        tree = self._registry.resident_tree(namespace, key, usable)
        if tree is None:
            return False
        node, at, child, _ = tree.walk(key, usable, bytearray())
        if child is not None or at == usable:
            return False
        block = key[at : at + size]
        return any(
            other._node is node and other._base.startswith(block, at, other._base_size)
            for other in self._sequences
        )

    # --- commit

    def commit_sequence(self, sequence: SequenceState, num_tokens: SupportsIndex) -> None:
        """See Sequence.commit."""
        with self._lock:
            try:
                if not sequence._is_open:
                    self._require_open(sequence)
                high = sequence._size // TOKEN_BYTES
                if type(num_tokens) is not int or not sequence._num_committed <= num_tokens <= high:
                    num_tokens = require_between("num_tokens", num_tokens, sequence._num_committed, high)
                sequence._num_committed = num_tokens
                new = num_tokens // self._block_size
                if new > (old := sequence._node.depth):
                    self._store(sequence, sequence._node, new)
                    if self._pool.is_deferred and len(self._pool.copies):
                        self._pool.expose(sequence._table[old * ID_BYTES : new * ID_BYTES])
                    if self._publishing:
                        self._complete(sequence)
                    if self._num_waiting:
                        self._progress.notify_all()
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, sequence)
                raise

    def _store(self, sequence: SequenceState, node: Node, new: int) -> None:
        """Make the blocks from the end of ``node``, which it leases, to ``new`` resident; moves its lease there.

        ``[node.depth, resident)`` the tree has already, from another sequence · ``[resident, new)`` becomes the tree's.
        """
        tree, size, resident = sequence._tree, self._block_bytes, node.depth
        key, at, stop = sequence._base, resident * size, new * size
        if stop > sequence._base_size:
            key, at, stop = sequence.key_between(at, stop), 0, stop - at
        if node.children is not None:
            node, at, taken_from = self._follow(sequence, node, key, at, stop)
            resident = node.depth
            if resident > taken_from:
                self._runs.adopt(sequence, taken_from, resident)
            if resident == new:
                return
        block_ids = bytes(sequence._table[resident * ID_BYTES : new * ID_BYTES])
        keys = None
        if tree.tenant.uses_ghost_keys and resident // self._segment_blocks < new // self._segment_blocks:
            keys = self._ghost_keys(sequence, resident, new)
        if (
            node.uses > 1
            or node.children is not None
            or node.parent is None
            or len(node.label) + stop - at > MAX_GROWN_LABEL_BYTES
        ):
            sequence._node = self._evictor.add_leased(
                node, key, at, stop, block_ids, tree, sequence._hints, keys
            )
        else:
            self._evictor.grow(node, key[at:stop], block_ids, tree, sequence._hints, keys)
        if sequence._own == resident:
            sequence._own = new
        else:
            self._runs.adopt(sequence, resident, new)
        if self._journal is not None and self._evictor.reports(tree, resident, new):
            self._evictor.report_stored(tree, sequence.key_to(new * size), resident, new)

    def _ghost_keys(self, sequence: SequenceState, start: int, stop: int) -> tuple[int, ...]:
        """Keys of the segments that end within blocks ``[start, stop)`` of a sequence."""
        size, keys = self._block_bytes, sequence._segment_keys
        if keys is None:
            keys = sequence._segment_keys = SegmentKeys(sequence._tree.namespace, self._segment_blocks * size)
        base, base_size, tail = sequence._base, sequence._base_size, sequence._tail
        return keys.between(start * size, stop * size, base, base_size, tail)

    def _follow(
        self, sequence: SequenceState, node: Node, key: bytes, start: int, stop: int
    ) -> tuple[Node, int, int]:
        """Move the sequence's lease down along what is resident of ``key[start:stop]``; the node and position there.

        Nodes that nobody uses get the sequence's blocks in place of their own, which are freed: leasing those
        would protect more than was granted. The third result is the block where they begin.
        """
        tree, evictor = sequence._tree, self._evictor
        end, at, child, common = tree.walk(key, stop, bytearray(), node, start)
        if child is not None:
            end, at = evictor.split(child, common, tree), at + common
        begin = end.depth
        if end is not node:
            unused = [each for each in path_between(node, end) if not each.uses]
            freed = bytearray()
            for each in unused:
                freed += each.block_ids
                each.block_ids = bytes(
                    sequence._table[(each.depth - each.num_blocks) * ID_BYTES : each.depth * ID_BYTES]
                )
            begin -= len(freed) // ID_BYTES
            evictor.lease(end, tree)
            evictor.release(node, tree)
            sequence._node = end
            if freed:
                evictor.give(freed, tree.tenant)
        return end, at, begin

    # --- append and extend: room for more tokens, copy-on-write

    def append(self, sequences: SequenceABC[Sequence], ids: TokenIds) -> None:
        """One id to each of a batch, all or nothing; the copies of shared tails go in one launch.

        ``ids`` has one id for each sequence. Raises LeaseError, ArgumentError (a sequence twice, lengths that
        differ, another cache's), TokenError, OutOfBlocks, and changes nothing; if the copies themselves fail, that
        error, and the sequences that they were for are released. O(batch).
        """
        self.append_to(self.states_of(list_of("sequences", sequences)), ids)

    def append_to(self, sequences: list[SequenceState], ids: TokenIds) -> None:
        """See ``append``."""
        if len(sequences) == 1 and type(ids) is tuple and len(ids) == 1:
            keys = [encode_one(ids[0])]
        else:
            key = encode(ids)
            if len(key) != len(sequences) * TOKEN_BYTES:
                raise wrong_count(
                    "ids", len(key) // TOKEN_BYTES, f"one for each of {len(sequences)} sequences"
                )
            keys = [key[at : at + TOKEN_BYTES] for at in range(0, len(key), TOKEN_BYTES)]
        unsure = sequences
        with self._lock:
            try:
                self._require_batch(sequences)
                copied = self._runs.grow(sequences, keys)
                if copied and self._storage is not None:
                    unsure = copied  # if a copy fails, its tail holds no KV; the others have all they need
                    self._storage.execute(self._take_plan())
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, unsure)
                raise

    def _take_plan(self) -> StepPlan:
        """The copies that have been decided; none wait afterwards."""
        plan = StepPlan.of(self._pool.copies.triples())
        self._pool.settle()
        return plan

    def extend_sequence(self, sequence: SequenceState, ids: TokenIds) -> None:
        """See Sequence.extend."""
        key = encode(ids)
        if len(key) > MAX_BLOCKS_AT_ONCE * self._block_bytes and self._takes_many_victims(len(key)):
            self._make_room_to_extend(sequence, len(key))
        with self._lock:
            try:
                if not sequence._is_open:
                    self._require_open(sequence)
                size = self._block_bytes
                if sequence._run is not None and sequence._size % size and sequence.shared_tail is not None:
                    if key and self._runs.grow([sequence], [key]) and self._storage is not None:
                        self._storage.execute(self._take_plan())
                else:
                    after = sequence._size + len(key)
                    needed = -(-after // size) - len(sequence._table) // ID_BYTES
                    if needed:
                        tenant = sequence._tree.tenant
                        self._evictor.take(needed, tenant, sequence._table)
                        self._evictor.charge(tenant, needed)
                    sequence._tail += key
                    sequence._size = after
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, sequence)
                raise

    def _make_room_to_extend(self, sequence: SequenceState, num_bytes: int) -> None:
        with self._lock:
            self._require_open(sequence)
        self._make_room(num_bytes // self._block_bytes, sequence._tree.tenant)

    def flush(self) -> StepPlan:
        """The copies that an engine which owns its KV must execute before it writes again; then they are forgotten.

        Fetch it once a step, and execute it before any other call. Until it is fetched, blocks that its copies read are
        not handed out again, even if they are freed, and are on nobody's account; a call that can't do without them
        raises FlushRequired. With storage, copies are executed as soon as they are decided, and the plan is
        empty.
        """
        with self._lock:
            waiting = self._pool.copies
            try:
                return self._take_plan()
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                self._pool.copies = waiting
                mend(self, error)
                raise

    # --- truncate, fork, reorder, release

    def truncate_sequence(self, sequence: SequenceState, num_tokens: SupportsIndex) -> None:
        """See Sequence.truncate."""
        with self._lock:
            try:
                self._require_open(sequence)
                low, high = sequence._num_committed, sequence.num_tokens
                num_tokens = require_between("num_tokens", num_tokens, low, high)
                keep = -(-num_tokens // self._block_size)
                self._runs.cut(sequence, keep)
                del sequence._table[keep * ID_BYTES :]
                sequence.cut_key(num_tokens * TOKEN_BYTES)
                if self._num_waiting:
                    self._progress.notify_all()
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, sequence)
                raise

    def fork_sequence(self, sequence: SequenceState, num_children: SupportsIndex) -> list[Sequence]:
        """See Sequence.fork."""
        num_children = require_between("num_children", num_children, 1, MAX_CHILDREN)
        children: list[SequenceState] = []
        with self._lock:
            try:
                self._require_open(sequence)
                children = [self._child(sequence) for _ in range(num_children)]
                handles = [Sequence(self, child) for child in children]
                self._sequences.update(children)
                return handles
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, sequence, children)
                raise

    def _child(self, sequence: SequenceState) -> SequenceState:
        child = sequence.child()
        self._evictor.lease(child._node, child._tree)
        return child

    def reorder(self, sequences: SequenceABC[Sequence], parents: Iterable[int]) -> list[Sequence]:
        """A beam step: the result's i-th sequence continues ``sequences[parents[i]]``; consumes all inputs.

        Inputs that nobody continues are released; shared tails are copied at their first write. Raises
        LeaseError, ArgumentError, and changes nothing. O(inputs + results).
        """
        inputs = self.states_of(list_of("sequences", sequences))
        chosen = [
            require_between(f"parents[{at}]", parent, 0, len(inputs) - 1)
            for at, parent in enumerate(list_of("parents", parents))
        ]
        result: list[SequenceState] = []
        with self._lock:
            try:
                self._require_batch(inputs)
                result = [self._child(inputs[parent]) for parent in chosen]
                handles = [Sequence(self, child) for child in result]
                self._sequences.update(result)
                for sequence in inputs:
                    self._release(sequence)
                return handles
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, inputs, result)
                raise

    def lend(
        self,
        sequences: Iterable[Sequence],
        max_steps: SupportsIndex,
        *,
        num_blocks: SupportsIndex | None = None,
        groups: Iterable[SupportsIndex] | None = None,
    ) -> LentBeams:
        """Let the device make beam steps by itself: at least ``max_steps`` of them, each ``reorder`` and ``append``.

        ``num_blocks`` are lent for them, charged to the tenant until they are taken back: None for as many as no choice
        of parents can exceed, fewer if ``lend_more`` may follow. ``groups``: a number for each sequence; a beam goes on
        from one of its own group, whose common whole blocks are never looked at. Until ``reconcile`` the sequences
        refuse everything but ``release``. Raises LeaseError, ArgumentError (a sequence twice, of another
        cache, of several tenants, or that publishes), ConfigError without storage, QuotaExceeded and OutOfBlocks, and
        changes nothing. O(sequences × (their blocks + max_steps)).
        """
        return device_beams.lend(self, list_of("sequences", sequences), max_steps, num_blocks, groups)

    def read_sequence(self, sequence: SequenceState) -> bytes:
        """The key of a sequence."""
        with self._lock:
            return sequence.key_between(0, sequence._size)

    def release_sequence(self, sequence: SequenceState) -> None:
        """See Sequence.release."""
        if not sequence._is_open and (beams := getattr(sequence, "_lent", None)) is not None:
            self.require_alive()
            device_beams.take_back(self, beams)
        with self._lock:
            try:
                if not sequence._is_open:
                    if not getattr(sequence, "_is_stale", False):
                        self._require_open(sequence)
                    sequence._is_stale = False
                self._release(sequence)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, sequence)
                raise

    def _release(self, sequence: SequenceState) -> None:
        sequence._is_open = False
        self._sequences.discard(sequence)
        self._runs.let_go(sequence)
        self._evictor.release(sequence._node, sequence._tree)
        if self._num_waiting:
            self._progress.notify_all()

    # --- blocks by hand

    def evict(self, num_blocks: SupportsIndex) -> int:
        """Free up to ``num_blocks`` resident blocks by policy; returns how many were freed."""
        left = num_blocks = require_between("num_blocks", num_blocks, 0, None)
        while left:
            with self._lock:
                try:
                    wanted = min(left, SLICE_BLOCKS)
                    self._evictor.end_due_pins(None, wanted)
                    freed = self._evictor.evict(wanted)
                except BaseException as error:
                    self._damage.error, self._lock.broken = error, self
                    mend(self, error)
                    raise
            left -= freed
            if freed < wanted or not left:
                break
            time.sleep(0)  # an unlocked lock is taken again before the thread that waits for it wakes up
        return num_blocks - left

    def allocate(self, num_blocks: SupportsIndex) -> BlockIds:
        """Lend ``num_blocks`` blocks to the engine, int32 ids, until ``free`` or ``insert``. Raises OutOfBlocks."""
        num_blocks = require_between("num_blocks", num_blocks, 0, None)
        taken = bytearray()
        with self._lock:
            try:
                taken = self._evictor.take_for_engine(num_blocks)
                return self._pool.lend(taken)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, lent=taken)
                raise

    def free(self, block_ids: Any) -> None:
        """Take lent blocks back. Raises ArgumentError, and changes nothing, if one isn't lent."""
        ids = block_ids_of(block_ids)
        with self._lock:
            try:
                self._pool.give_back(ids)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error)
                raise

    def insert(self, namespace: Namespace, ids: TokenIds, block_ids: Any) -> int:
        """Make blocks that the engine owns and filled resident under ``ids``.

        ``block_ids``: one for each whole block of ``ids``, distinct, each lent (``allocate``) or free. Returns how
        many leading tokens were resident already: their blocks stay as they were, lent or free; the others
        become the tree's. Raises TokenError, NamespaceError, ArgumentError, and changes nothing. O(blocks + free).
        """
        _require_namespace(namespace)
        key, blocks = encode(ids), block_ids_of(block_ids)
        size = self._block_bytes
        if len(blocks) != len(key) // size:
            allowed = f"{len(key) // size}, one for each whole block of ids"
            raise wrong_count("block_ids", len(blocks), allowed)
        with self._lock:
            try:
                self._pool.check_claim(blocks)
                key = key[: len(blocks) * size]
                tree = self._registry.tree_for(namespace, self._registry.tree(namespace), key, len(key))
                node, at, child, common = tree.walk(key, len(key), bytearray())
                resident = (at + common) // size
                if resident < len(blocks):
                    lent = sum(block_id in self._pool.lent for block_id in blocks[resident:].tolist())
                    self._evictor.end_due_pins(tree.tenant, len(blocks))
                    protected = self._newly_protected(node, child, common)
                    self._evictor.require(len(blocks) - resident, tree.tenant, protected, lent)
                    self._registry.register(tree)
                    self._insert(tree, self._lease_end(tree, node, child, common), key, blocks)
                return resident * self._block_size
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error)
                raise

    def _insert(self, tree: NamespaceTree, above: Node, key: bytes, blocks: BlockIds) -> None:
        """Make ``blocks`` after the end of ``above``, which is leased for that, the tree's."""
        evictor, resident = self._evictor, above.depth
        evictor.keep_limit(tree.tenant, len(blocks) - resident)
        evictor.charge(tree.tenant, len(blocks) - resident)
        at = resident * self._block_bytes
        keys = None
        if tree.tenant.uses_ghost_keys:
            named = SegmentKeys(tree.namespace, self._segment_blocks * self._block_bytes)
            keys = named.between(at, len(key), key, len(key), bytearray())
        node = evictor.add_leased(above, key, at, len(key), blocks[resident:].tobytes(), tree, None, keys)
        # only now: until a tree has them they are whose they were
        self._pool.claim(blocks[resident:], tree.tenant.label)
        if self._journal is not None:
            self._evictor.report_stored(tree, key, resident, len(blocks))
        evictor.release(node, tree)  # and perhaps gives them up

    # --- pins

    def pin(self, namespace: Namespace, ids: TokenIds, ttl_s: Any) -> Pin:
        """Keep a prefix resident for ``ttl_s`` seconds, whatever is evicted; pinned again, its time begins anew.

        All whole blocks of ``ids`` have to be resident; they count once against the tenant's ``pin_budget``, and as
        in use. A tenant has at most ``Tenant.max_pins`` pins. A clear or a purge ends the pin. Raises TokenError,
        ArgumentError, NotResident, PinLimitExceeded, PinBudgetExceeded, and OutOfBlocks if the blocks are borrowed and
        others couldn't have what they are guaranteed; then nothing is changed. O(nodes on the path + blocks), and log
        of the tenant's pins.
        """
        _require_namespace(namespace)
        ttl_s, key = require_ttl(ttl_s), encode(ids)
        if len(key) < self._block_bytes:
            allowed = f"at least {self._block_size} token ids, one block"
            raise wrong_count("ids", len(key) // TOKEN_BYTES, allowed)
        key = key[: len(key) // self._block_bytes * self._block_bytes]
        if self._clock is monotonic:
            self._upkeep.start()
        lease: LeaseState | None = None
        with self._lock:
            try:
                self._pins.end_due(namespace.tenant)
                match = self._match(namespace, key)
                budget = self._registry.pin_budget(namespace.tenant)
                limit = self._registry.pin_limit(namespace.tenant)
                pin = self._pins.renew(match, len(key) // TOKEN_BYTES, ttl_s, budget, limit)
                if pin is None:
                    lease = LeaseState(self, self._lease_match(match), match)
                    self._leases.add(lease)
                    pin = self._pins.hold(lease, ttl_s)
                return pin
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, lease=lease)
                raise

    def unpin(self, pin: Any) -> None:
        """End a pin before its time. Raises LeaseError for one that has ended."""
        if not isinstance(pin, Pin):
            raise ArgumentError("pin", pin, "a Pin")
        with self._lock:
            try:
                self._pins.unpin(pin)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error)
                raise

    def pins(
        self, tenant: TenantId | None = None, *, after: SupportsIndex = 0, limit: SupportsIndex | None = None
    ) -> list[Pin]:
        """The pins that hold, of one tenant or of all, each with the seconds that are left; a tenant's by id.

        ``after``: only those with a greater id, ≥ 0. ``limit``: at most so many, ≥ 0; None for all. Raises
        ArgumentError. O(the pins of these tenants), of one tenant's with ``limit`` little more than what is returned.
        """
        if tenant is not None:
            require_tenant_id(tenant)
        after = require_between("after", after, 0, None)
        most = None if limit is None else require_between("limit", limit, 0, None)
        with self._lock:
            return self._pins.told(tenant, after, most)

    def _end_due_pins(self) -> None:
        """End what is due, in slices. O(what is due)."""
        is_over = False
        while not is_over:
            with self._lock:
                try:
                    is_over = self._pins.end_slice()
                except BaseException as error:
                    self._damage.error, self._lock.broken = error, self
                    mend(self, error)
                    raise
            if not is_over:
                time.sleep(0)  # see evict

    # --- tenants

    def add_tenant(self, tenant: Tenant) -> None:
        """Promise a tenant its guarantee and hold it to its limit from now on; changes one that was added before.

        What it uses above a new limit is evicted; what runs meanwhile stays. A new policy takes over what is resident,
        in the order of the old one. Raises, and changes nothing: ConfigError for a strict tenant of a cache that can't
        zero its blocks; ArgumentError if the guarantees of all would exceed the pool, if running sequences and pins
        hold too much of it for this guarantee to be met, or if its own hold more than the limit. O(tenants + blocks
        evicted), and O(its nodes) for a new policy.
        """
        if not isinstance(tenant, Tenant):
            raise ArgumentError("tenant", tenant, "a Tenant")
        require_policy(tenant.policy)
        if tenant.mode == "strict" and self._scrubber is None:
            allowed = (
                "'burst' without scrubbing: a strict tenant's blocks are zeroed, by a storage or scrub_blocks"
            )
            raise ConfigError("mode", tenant.mode, allowed)
        with self._lock:
            try:
                state = self._tenants.get(tenant.id)
                if state is None:
                    state = self._registry.new_state(tenant, is_added=True)
                self._evictor.end_due_pins(state, tenant.guaranteed_blocks)
                self._registry.require_promise(tenant, state)
                self._follow_policy(state, tenant)
                if state.settings.mode != tenant.mode:
                    state.label = self._registry.new_label(tenant)
                self._tenants[tenant.id] = state
                state.is_added = True
                state.set(tenant)
                self._evictor.settle_promises(self._tenants.values())
                self._evictor.keep_limit(state, 0)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error)
                raise

    def _follow_policy(self, tenant: TenantState, settings: Tenant) -> None:
        """Give a tenant the policy that it is to have; a new one takes over its nodes, in the order of the old one.

        Uses that the old one counted are forgotten, ghosts too. O(nodes), under the lock: the rare act of an
        operator, and a policy that knew half of the nodes would name the wrong victims.
        """
        config = self._config
        if (settings.policy or config.policy) != (tenant.settings.policy or config.policy):
            self._renew_policy(tenant, settings)

    def _renew_policy(self, tenant: TenantState, settings: Tenant) -> None:
        """Give a tenant a new policy, which takes over its nodes."""
        policy = self._registry.new_policy(settings)
        nodes = [node for tree in (*tenant.trees.values(), *tenant.detached) for node in tree.nodes()]
        evictable = [node for node in nodes if not node.uses]
        tenant.follow(taken_over(policy, tenant.policy, nodes, evictable, len(evictable)))
        self._recorder.follow(tenant)
        for sequence in self._sequences:
            if sequence._tree.tenant is tenant:
                sequence._hints = None  # what the old one made of them

    def remove_tenant(self, tenant: TenantId) -> None:
        """Take back a tenant's guarantee and limit and forget all that it has; what runs goes on undisturbed.

        From then on it is like one that was never added: its counts and what its policy learned are forgotten too, and
        the sums in ``stats`` no longer contain them. Raises ArgumentError, and changes nothing, for one that
        wasn't, and for one whose sequences hold more than the limit of such tenants.
        """
        require_tenant_id(tenant)
        with self._lock:
            try:
                namespaces = self._remove_tenant(tenant)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error)
                raise
        for namespace in namespaces:
            self.clear(namespace)

    def _remove_tenant(self, tenant: str) -> list[Namespace]:
        state = self._tenants.get(tenant)
        if state is None or not state.is_added:
            raise ArgumentError("tenant", tenant, "a tenant that was added")
        settings = replace(self._config.default_tenant or Tenant(tenant), id=tenant)
        if settings.limit is not None and state.protected_blocks > settings.limit:
            allowed = f"one whose sequences and pins hold at most {settings.limit} blocks, the limit of those not added"
            raise ArgumentError("tenant", tenant, allowed)
        self._renew_policy(state, settings)  # what the old one learned of the tenant goes with it
        state.forget_counts()
        state.is_added = False
        if state.settings.mode != settings.mode:
            state.label = self._registry.new_label(settings)
        state.set(settings)
        self._evictor.settle_promises(self._tenants.values())
        self._evictor.keep_limit(state, 0)
        return state.namespaces

    def tenant(self, tenant: TenantId) -> Tenant | None:
        """What a tenant is promised and held to; None for one that the cache doesn't know."""
        require_tenant_id(tenant)
        with self._lock:
            state = self._tenants.get(tenant)
            return None if state is None else state.settings

    # --- namespaces

    def namespaces(self, tenant: TenantId | None = None) -> list[Namespace]:
        """The namespaces that hold something, of one tenant or of all."""
        if tenant is not None:
            require_tenant_id(tenant)
        with self._lock:
            return [
                namespace
                for state in self._tenants.values()
                if tenant is None or state.tenant_id == tenant
                for namespace in state.namespaces
            ]

    def clear(self, namespace: Namespace) -> int:
        """Forget everything of a namespace; returns how many blocks were resident.

        At once for matching. Running sequences go on undisturbed, but what they hold or commit from now on is
        never matched and is freed at their release. A base that was published from it is unpublished, one that it
        reads is read on. O(1) under the lock (a reader of bases: O(its trees)), then slices.
        """
        _require_namespace(namespace)
        return purge_module.clear(self, namespace)

    def purge(self, tenant: TenantId) -> int:
        """Forget everything of a tenant and raise its generation; returns how many blocks were resident.

        At once for matching: nothing that it had is ever matched again. Its running sequences raise StaleGeneration
        from their next call on, except for their first ``release``, which gives back the blocks that they hold; until
        then these are quarantined and the tenant's. Its settings stay. Raises ArgumentError for what is no tenant's id.
        O(namespaces + sequences), then slices.
        """
        require_tenant_id(tenant)
        return purge_module.purge(self, tenant)

    def generation(self, tenant: TenantId) -> int:
        """How often a tenant was purged here."""
        require_tenant_id(tenant)
        with self._lock:
            state = self._tenants.get(tenant)
            return 0 if state is None else state.generation

    # --- bases

    def publish(
        self, base_id: BaseId, namespace: Namespace, ids: TokenIds, readers: Iterable[str]
    ) -> Sequence:
        """Publish the whole blocks of ``ids`` for other tenants to read: a sequence, for the engine to compute.

        Its commit of all its tokens makes the base readable; if it is released before, nothing is published.
        ``namespace``: of the account that publishes and pays; the base is for ``readers``' namespaces of the same model
        and adapter, whatever their salt. It stays resident until ``unpublish``. Raises like ``open`` and, changing
        nothing, ArgumentError: an id that a base has, no whole block, a reader that publishes or a publisher that
        reads, and blocks that the pool can't give beside what is guaranteed and held, with the shortfall.
        """
        _require_namespace(namespace)
        key = encode(ids)
        if len(key) < self._block_bytes:
            allowed = f"at least {self._block_size} token ids, one block"
            raise wrong_count("ids", len(key) // TOKEN_BYTES, allowed)
        key = key[: len(key) - len(key) % self._block_bytes]
        publication = Publication(require_base_id(base_id), namespace, key, readers_of(readers, namespace))
        try:
            if self._takes_many_victims(len(key)):
                return self._open_long(namespace, key, "compute", None, None, publication)
            return self._open(namespace, key, "compute", None, None, None, publication)
        except FlushRequired:
            raise
        except OutOfBlocks:
            short = self._shortfall(namespace, key)
            blocks = len(key) // self._block_bytes
            allowed = f"{short} fewer while the rest of the pool is guaranteed to tenants or held"
            problem = f"has {blocks} blocks; allowed: {allowed}"
            raise ArgumentError("ids", blocks, allowed, problem=problem) from None

    def _shortfall(self, namespace: Namespace, key: bytes) -> int:
        """Blocks that the pool lacks for a base, beside what is promised."""
        with self._lock:
            tree, table = self._registry.tree(namespace) or self._registry.new_tree(namespace), bytearray()
            node, _, child, common = tree.walk(key, len(key) - 1, table)
            needed = (len(key) // self._block_bytes) - len(table) // ID_BYTES
            needed += self._newly_protected(node, child, common)
            unused = max(tree.tenant.guaranteed_blocks - tree.tenant.protected_blocks, 0)
            return max(needed - unused - self._evictor.spare_blocks, 1)

    def _complete(self, sequence: SequenceState) -> None:
        """Make a base readable if the sequence has committed all of it."""
        publication = self._publishing.get(sequence)
        if publication is None or sequence._num_committed * TOKEN_BYTES < len(publication.key):
            return
        tree, table = sequence._tree, bytearray()
        node, _, child, common = tree.walk(publication.key, len(publication.key), table)
        if child is not None:
            node = self._evictor.split(child, common, tree)
        base = Base(publication.base_id, publication.readers, publication.key, bytes(table), node, tree)
        self._evictor.lease(node, tree)
        self._bases.add(base, self._tenants)
        del self._publishing[sequence]

    def unpublish(self, base_id: BaseId) -> None:
        """Nobody reads a base from now on; what is computed of it isn't published any more.

        At once for matching, and what its readers have behind it is forgotten. Sequences that run behind it go on; the
        base keeps its blocks until the last of them is released, from then on they are resident in its account's
        namespace like any others. Raises ArgumentError for an id that no base has.
        """
        purge_module.unpublish(self, base_id)

    def set_readers(self, base_id: BaseId, readers: Iterable[str]) -> None:
        """Let these tenants read a base, and no others: for whom is struck from the list it is unpublished.

        Raises ArgumentError, and changes nothing, for an id that no base has, and for readers that publish.
        """
        purge_module.set_readers(self, base_id, readers)

    def bases(self) -> list[BaseInfo]:
        """All bases, also those that are being computed. For the operator: no tenant is told who else reads."""
        with self._lock:
            return self._bases.infos()

    # --- counts

    def stats(self) -> CacheStats:
        """Counts of the whole cache at this moment. O(namespaces + tenants)."""
        with self._lock:
            return stats_module.stats_of(
                self._pool,
                self._tenants,
                len(self._sequences),
                self._runs.num_copied_blocks,
                self._pins,
                self._bases,
                sum(len(beams.block_ids) // ID_BYTES for beams in self._lendings),
            )

    def tenant_stats(self, tenant: TenantId) -> TenantStats:
        """Counts of one tenant, whose pins that are due end; zero for one that isn't known. O(its namespaces)."""
        require_tenant_id(tenant)
        with self._lock:
            try:
                self._pins.end_due(tenant)
                return stats_module.tenant_stats_of(tenant, self._tenants.get(tenant), self._pins)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error)
                raise

    def tenants(self) -> list[str]:
        """The tenants that the cache has seen."""
        with self._lock:
            return list(self._tenants)

    def snapshot(self) -> Snapshot:
        """Everything the audit needs, at one moment, under one hold. O(nodes + sequences + free blocks)."""
        return snapshot_module.at_once(self)

    def snapshot_in_slices(self, pause: Callable[[], None] | None = None) -> Snapshot:
        """The same, at the moment when it ends, with the lock held for no longer than a slice of nodes takes.

        ``pause`` is called between slices, without the lock; it may sleep, and use the cache.
        """
        if pause is not None and not callable(pause):
            raise ArgumentError("pause", pause, "a function without arguments, or None")
        return snapshot_module.in_slices(self, (lambda: None) if pause is None else pause)

    # --- after an error, and from finalisers

    @property
    def is_dead(self) -> bool:
        """Whether the cache's state could not be repaired after an error: every call raises IntegrityError."""
        return self._lock.death is not None

    @property
    def is_broken(self) -> bool:
        """Whether the next call has to repair the cache's state before it does anything, or the cache is dead."""
        return self._lock.broken is not None

    def require_alive(self) -> None:
        """Raise IntegrityError if the cache is dead, ReentrantCall in one of its callbacks."""
        with self._lock:
            pass

    def require_readable(self, sequence: SequenceState) -> None:
        """Raise LeaseError unless the sequence has its blocks. A lent or a stale one has them until its release."""
        with self._lock:
            if not sequence.is_held:
                self._require_open(sequence)

    def repair(self) -> None:
        """For the lock: make the state whole before a call. Raises IntegrityError."""
        repair(self)

    def defer(self, held: SequenceState | LeaseState | Lending, error: ReentrantCall) -> None:
        """For a release that met ``error``: the next call does it for a finaliser; a callback gets ``error``."""
        if not self._lock.is_mine or not is_finalising(error):
            raise error
        later(self, held)

    def give_up(self, held: SequenceState | LeaseState | Lending) -> None:
        """For the lock: release what a finaliser gave up, unless it is released already."""
        if isinstance(held, SequenceState):
            self._give_up_sequence(held)
        elif isinstance(held, LeaseState):
            if held._is_open:
                self._give_up_lease(held)
        else:
            self._give_up_beams(held)

    def _give_up_sequence(self, sequence: SequenceState) -> None:
        beams = getattr(sequence, "_lent", None)
        if not sequence._is_open and beams is not None:
            self._give_up_beams(beams)
        if sequence not in self._sequences:
            return
        try:
            sequence._is_stale = False
            self._release(sequence)
        except BaseException as error:
            self._damage.error, self._lock.broken = error, self
            mend(self, error, sequence)
            raise

    def _give_up_lease(self, lease: LeaseState) -> None:
        try:
            self._end_lease(lease)
        except BaseException as error:
            self._damage.error, self._lock.broken = error, self
            mend(self, error, lease=lease)
            raise

    def _give_up_beams(self, beams: Lending) -> None:
        try:
            device_beams.take_back_now(self, beams)
        except BaseException as error:
            self._damage.error, self._lock.broken = error, self
            mend(self, error, beams.sequences)
            raise

    # --- checks

    def _require_open(self, sequence: SequenceState) -> None:
        if not sequence._is_open:
            if hasattr(sequence, "_is_interrupted"):
                raise LeaseError("this sequence was closed when a call that worked on it was interrupted")
            if getattr(sequence, "_is_stale", False):
                raise StaleGeneration("this sequence's tenant was purged: release it")
            if sequence.is_lent:
                raise SequenceLent("this sequence is lent to the device: reconcile its beams, or release it")
            raise LeaseError("this sequence is released or was consumed by reorder")

    def states_of(self, sequences: list[Any]) -> list[SequenceState]:
        """What the cache knows of sequences that a user gave. Raises ArgumentError for what is no sequence of its."""
        states = []
        for at, sequence in enumerate(sequences):
            if not isinstance(sequence, Sequence) or sequence._index is not self:
                raise ArgumentError(f"sequences[{at}]", sequence, "a sequence of this cache")
            states.append(sequence._state)
        return states

    def _require_batch(self, sequences: list[SequenceState]) -> None:
        for sequence in sequences:
            self._require_open(sequence)
        if len(set(sequences)) != len(sequences):
            problem = "has one of them twice; allowed: each sequence once"
            raise ArgumentError("sequences", sequences, "each sequence once", problem=problem)


def _require_namespace(namespace: object) -> None:
    if not isinstance(namespace, Namespace):
        raise ArgumentError("namespace", namespace, "a Namespace")


def _storage_of(config: CacheConfig, given: Any) -> BlockStorage | None:
    """The storage that the layout asks for, or the engine's, checked; None for neither."""
    if config.layout is None and given is None:
        return None
    from radixkv.storage.device import BlockStorage, DeviceStorage

    if config.layout is not None:
        if given is not None:
            raise ConfigError("storage", given, "None with a layout: the cache makes its own")
        return DeviceStorage(config.layout, config.num_blocks, config.block_size, config.device)
    wanted = (config.num_blocks, config.block_size)
    if not isinstance(given, BlockStorage) or (given.num_blocks, given.block_size) != wanted:
        raise ConfigError("storage", given, f"a BlockStorage of {wanted[0]} blocks of {wanted[1]} tokens")
    return given
