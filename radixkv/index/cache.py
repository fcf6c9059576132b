"""PrefixCache: what users call. It checks arguments, takes the lock, and calls the functions that do the work.

The life of a request is in ``requests``, forgetting in ``purge``, snapshots for the audit in ``snapshot``, beams on the
device in ``device_beams``, promises to tenants in ``tenant_settings``. All of them work on the ``CacheState`` that this
class extends. Handles that users hold are ``sequence.Sequence``, ``leases.Lease`` and ``lent_beams.LentBeams``.

The index decides, storage executes: the copies that ``append`` and ``extend`` decide leave as one StepPlan, which the
storage launches under the lock, so that plans run in the order in which they were made; a launch never waits
for the device. Without storage (``layout=None``) the engine fetches the plan with ``flush``.

Every public method validates everything before it changes anything: a call that refuses has changed nothing. A call
that is interrupted while it changes something costs the sequences that it works on (``recovery.mend``). New sequences
and leases are registered last, and ``CacheLock.broken`` is set first: no call is done on a cache that isn't repaired.

The lock is held for microseconds; ``evict``, ``clear`` and ``snapshot_in_slices`` give it up between slices. The
exceptions are calls that are not on a request's path: ``insert`` reads the free list, ``snapshot`` everything; and
taking back lent beams, 0.25 ms for 4 of them and up to 1 ms for 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING, Any, SupportsIndex

from radixkv._compiled import mypyc_attr
from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import ArgumentError, ConfigError, FlushRequired, OutOfBlocks, wrong_count
from radixkv.index import device_beams, forgotten, purge, recovery, requests, snapshot, stats, tenant_settings
from radixkv.index.bases import BaseInfo, Publication
from radixkv.index.changes import Journal
from radixkv.index.holders import LeaseState, SequenceState
from radixkv.index.leases import Lease
from radixkv.index.lent_beams import LentBeams
from radixkv.index.locking import Held
from radixkv.index.match import Match
from radixkv.index.pins import Pin, require_ttl
from radixkv.index.recovery import Mending, mend
from radixkv.index.scrubbing import ScrubBlocks
from radixkv.index.sequence import Sequence, append_to
from radixkv.index.snapshot import Snapshot
from radixkv.index.state import CacheState
from radixkv.index.stats import CacheStats, TenantStats
from radixkv.index.tokens import TOKEN_BYTES, TokenIds, encode
from radixkv.index.tree import Node
from radixkv.index.validation import (
    block_ids_of,
    deadline_of,
    list_of,
    readers_of,
    require_base_id,
    require_between,
    require_namespace,
    require_parts,
    require_policy,
    require_tenant_id,
)
from radixkv.storage.plan import BlockIds, StepPlan
from radixkv_policies import RequestHints as RequestHints
from radixkv_policies import TokenRange as TokenRange

if TYPE_CHECKING:
    from radixkv.index.arguments import BaseId, Hints, MatchLike, OnPending, Seconds, StorageLike, TenantId
    from radixkv.storage.device import BlockStorage


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache(CacheState):
    """A prefix cache over one pool of KV blocks. Safe to use from several threads.

    config: see CacheConfig. clock: seconds, for policies and timeouts. journal: hears what becomes resident and
    what leaves (see ``changes.Journal``). storage: of an engine that owns its KV (``layout=None``): a BlockStorage over
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
        super().__init__(config, clock, journal, scrub_blocks, _storage_of(config, storage))

    def __repr__(self) -> str:
        config, standing = self._config, "dead" if self.is_dead else "broken" if self.is_broken else ""
        if standing:
            return f"<PrefixCache, {standing}>"
        blocks = f"{self._pool.num_free} of {config.num_blocks} blocks free"
        return f"<PrefixCache: {blocks}, {len(self._sequences)} sequences, {len(self._tenants)} tenants>"

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
        self._maintenance.maintain()

    # --- match and lease

    def match(self, namespace: Namespace, ids: TokenIds) -> Match:
        """The longest resident prefix of ``ids``, in whole blocks. Pure: it splits nothing and stamps nothing.

        Raises TokenError. O(nodes on the path).
        """
        require_namespace(namespace)
        key = encode(ids)
        with self._lock:
            return requests.find(self, namespace, key)

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
                lease = requests.lease(self, match)
                if self._evictor.on_hand_out is not None:
                    self._evictor.on_hand_out()
                handle = Lease(self, lease)
                self._leases.add(lease)
                return handle
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, lease=lease)
                raise

    # --- requests

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
            require_namespace(namespace)
        if hints is not None and not isinstance(hints, RequestHints):
            raise ArgumentError("hints", hints, "a RequestHints, or None")
        computes = isinstance(on_pending, str) and on_pending == "compute"
        deadline = None if computes else deadline_of(on_pending, timeout_s)
        key = encode(ids)
        if len(key) > requests.MAX_BLOCKS_AT_ONCE * self._block_bytes and requests.takes_many_victims(
            self, len(key)
        ):
            return self._open_long(namespace, key, on_pending, deadline, hints, None)
        return self._open(namespace, key, on_pending, deadline, hints, None, None)

    def _open(
        self,
        namespace: Namespace,
        key: bytes,
        on_pending: OnPending,
        deadline: float | None,
        hints: Hints,
        already_touched: Node | None,
        publication: Publication | None,
    ) -> Sequence:
        sequence: SequenceState | None = None
        with self._lock:
            if on_pending != "compute":
                requests.await_pending(self, namespace, key, on_pending, deadline)
            try:
                sequence = requests.open_sequence(self, namespace, key, hints, already_touched, publication)
                handle = Sequence(self, sequence)
                self._sequences.add(sequence)
                return handle
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
        lease: LeaseState | None = None
        sequence: Sequence | None = None
        try:
            with self._lock:
                if on_pending != "compute":
                    requests.await_pending(self, namespace, key, on_pending, deadline)
                try:
                    lease, needed, tenant = requests.lease_of_long(self, namespace, key, publication)
                    self._leases.add(lease)
                except BaseException as error:
                    self._damage.error, self._lock.broken = error, self
                    mend(self, error, lease=lease)
                    raise
            with Lease(self, lease):
                requests.make_room(self, needed, tenant)
                sequence = self._open(namespace, key, on_pending, deadline, hints, lease._node, publication)
            return sequence
        except BaseException as error:
            opened = None if sequence is None else sequence._state
            with self._lock:
                mend(self, error, opened, lease=lease)
            raise

    def append(self, sequences: SequenceABC[Sequence], ids: TokenIds) -> None:
        """One id to each of a batch, all or nothing; the copies of shared tails go in one launch.

        ``ids`` has one id for each sequence. Raises LeaseError, ArgumentError (a sequence twice, lengths that
        differ, another cache's), TokenError, OutOfBlocks, and changes nothing; if the copies themselves fail, that
        error, and the sequences that they were for are released. O(batch).
        """
        append_to(self, self._states_of(list_of("sequences", sequences)), ids)

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
                return requests.take_plan(self)
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                self._pool.copies = waiting
                mend(self, error)
                raise

    def reorder(self, sequences: SequenceABC[Sequence], parents: Iterable[int]) -> list[Sequence]:
        """A beam step: the result's i-th sequence continues ``sequences[parents[i]]``; consumes all inputs.

        Inputs that nobody continues are released; shared tails are copied at their first write. Raises
        LeaseError, ArgumentError, and changes nothing. O(inputs + results).
        """
        inputs = self._states_of(list_of("sequences", sequences))
        chosen = [
            require_between(f"parents[{at}]", parent, 0, len(inputs) - 1)
            for at, parent in enumerate(list_of("parents", parents))
        ]
        result: list[SequenceState] = []
        with self._lock:
            try:
                requests.require_batch(inputs)
                result = [requests.fork(self, inputs[parent]) for parent in chosen]
                handles = [Sequence(self, child) for child in result]
                self._sequences.update(result)
                for sequence in inputs:
                    requests.release(self, sequence)
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
        handles = list_of("sequences", sequences)
        lending = device_beams.lend(self, self._states_of(handles), max_steps, num_blocks, groups)
        try:
            return LentBeams(self, handles, lending)
        except BaseException:
            device_beams.take_back(self, lending)
            raise

    def _states_of(self, sequences: list[Any]) -> list[SequenceState]:
        """What the cache knows of sequences that a user gave. Raises ArgumentError for what is no sequence of its."""
        states = []
        for at, sequence in enumerate(sequences):
            if not isinstance(sequence, Sequence) or sequence._cache is not self:
                raise ArgumentError(f"sequences[{at}]", sequence, "a sequence of this cache")
            states.append(sequence._state)
        return states

    # --- blocks by hand

    def evict(self, num_blocks: SupportsIndex) -> int:
        """Free up to ``num_blocks`` resident blocks by policy; returns how many were freed."""
        left = num_blocks = require_between("num_blocks", num_blocks, 0, None)
        while left:
            wanted = min(left, requests.SLICE_BLOCKS)
            with self._lock, Mending(self):
                self._evictor.end_due_pins(None, wanted)
                freed = self._evictor.evict(wanted)
            left -= freed
            if freed < wanted or not left:
                break
            requests.let_others()
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
        with self._lock, Mending(self):
            self._pool.give_back(ids)

    def insert(self, namespace: Namespace, ids: TokenIds, block_ids: Any) -> int:
        """Make blocks that the engine owns and filled resident under ``ids``.

        ``block_ids``: one for each whole block of ``ids``, distinct, each lent (``allocate``) or free. Returns how
        many leading tokens were resident already: their blocks stay as they were, lent or free; the others
        become the tree's. Raises TokenError, NamespaceError, ArgumentError, and changes nothing. O(blocks + free).
        """
        require_namespace(namespace)
        key, blocks = encode(ids), block_ids_of(block_ids)
        size = self._block_bytes
        if len(blocks) != len(key) // size:
            allowed = f"{len(key) // size}, one for each whole block of ids"
            raise wrong_count("block_ids", len(blocks), allowed)
        with self._lock, Mending(self):
            return requests.insert(self, namespace, key[: len(blocks) * size], blocks)

    # --- pins

    def pin(self, namespace: Namespace, ids: TokenIds, ttl_s: Any) -> Pin:
        """Keep a prefix resident for ``ttl_s`` seconds, whatever is evicted; pinned again, its time begins anew.

        All whole blocks of ``ids`` have to be resident; they count once against the tenant's ``pin_budget``, and as
        in use. A tenant has at most ``Tenant.max_pins`` pins. A clear or a purge ends the pin. Raises TokenError,
        ArgumentError, NotResident, PinLimitExceeded, PinBudgetExceeded, and OutOfBlocks if the blocks are borrowed and
        others couldn't have what they are guaranteed; then nothing is changed. O(nodes on the path + blocks), and log
        of the tenant's pins.
        """
        require_namespace(namespace)
        ttl_s, key = require_ttl(ttl_s), self._whole_blocks(ids)
        if self._clock is monotonic:
            self._maintenance.start()
        lease: LeaseState | None = None
        with self._lock:
            try:
                self._pins.end_due(namespace.tenant)
                match = requests.find(self, namespace, key)
                budget = self._registry.pin_budget(namespace.tenant)
                limit = self._registry.pin_limit(namespace.tenant)
                pin = self._pins.renew(match, len(key) // TOKEN_BYTES, ttl_s, budget, limit)
                if pin is None:
                    lease = requests.lease(self, match)
                    self._leases.add(lease)
                    pin = self._pins.hold(lease, ttl_s)
                return pin
            except BaseException as error:
                self._damage.error, self._lock.broken = error, self
                mend(self, error, lease=lease)
                raise

    def _whole_blocks(self, ids: TokenIds) -> bytes:
        """The key of the whole blocks of ``ids``. Raises ArgumentError if there is none."""
        key, size = encode(ids), self._block_bytes
        if len(key) < size:
            allowed = f"at least {self._block_size} token ids, one block"
            raise wrong_count("ids", len(key) // TOKEN_BYTES, allowed)
        return key[: len(key) // size * size]

    def unpin(self, pin: Any) -> None:
        """End a pin before its time. Raises LeaseError for one that has ended."""
        if not isinstance(pin, Pin):
            raise ArgumentError("pin", pin, "a Pin")
        with self._lock, Mending(self):
            self._pins.unpin(pin)

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
        with self._lock, Mending(self):
            tenant_settings.add(self, tenant)

    def remove_tenant(self, tenant: TenantId) -> None:
        """Take back a tenant's guarantee and limit and forget all that it has; what runs goes on undisturbed.

        From then on it is like one that was never added: its counts and what its policy learned are forgotten too, and
        the sums in ``stats`` no longer contain them. Raises ArgumentError, and changes nothing, for one that
        wasn't, and for one whose sequences hold more than the limit of such tenants.
        """
        require_tenant_id(tenant)
        with self._lock, Mending(self):
            namespaces = tenant_settings.remove(self, tenant)
        for namespace in namespaces:
            self.clear(namespace)

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
        require_namespace(namespace)
        return purge.clear(self, namespace)

    def purge(self, tenant: TenantId) -> int:
        """Forget everything of a tenant and raise its generation; returns how many blocks were resident.

        At once for matching: nothing that it had is ever matched again. Its running sequences raise StaleGeneration
        from their next call on, except for their first ``release``, which gives back the blocks that they hold; until
        then these are quarantined and the tenant's. Its settings stay. Raises ArgumentError for what is no tenant's id.
        O(namespaces + sequences), then slices.
        """
        require_tenant_id(tenant)
        return purge.purge(self, tenant)

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
        require_namespace(namespace)
        key = self._whole_blocks(ids)
        publication = Publication(require_base_id(base_id), namespace, key, readers_of(readers, namespace))
        try:
            if requests.takes_many_victims(self, len(key)):
                return self._open_long(namespace, key, "compute", None, None, publication)
            return self._open(namespace, key, "compute", None, None, None, publication)
        except FlushRequired:
            raise
        except OutOfBlocks:
            with self._lock:
                short = requests.shortfall(self, namespace, key)
            blocks = len(key) // self._block_bytes
            allowed = f"{short} fewer while the rest of the pool is guaranteed to tenants or held"
            problem = f"has {blocks} blocks; allowed: {allowed}"
            raise ArgumentError("ids", blocks, allowed, problem=problem) from None

    def unpublish(self, base_id: BaseId) -> None:
        """Nobody reads a base from now on; what is computed of it isn't published any more.

        At once for matching, and what its readers have behind it is forgotten. Sequences that run behind it go on; the
        base keeps its blocks until the last of them is released, from then on they are resident in its account's
        namespace like any others. Raises ArgumentError for an id that no base has.
        """
        purge.unpublish(self, base_id)

    def set_readers(self, base_id: BaseId, readers: Iterable[str]) -> None:
        """Let these tenants read a base, and no others: for whom is struck from the list it is unpublished.

        Raises ArgumentError, and changes nothing, for an id that no base has, and for readers that publish.
        """
        purge.set_readers(self, base_id, readers)

    def bases(self) -> list[BaseInfo]:
        """All bases, also those that are being computed. For the operator: no tenant is told who else reads."""
        with self._lock:
            return self._bases.infos()

    # --- counts

    def stats(self) -> CacheStats:
        """Counts of the whole cache at this moment. O(namespaces + tenants)."""
        with self._lock:
            return stats.stats_of(self)

    def tenant_stats(self, tenant: TenantId) -> TenantStats:
        """Counts of one tenant, whose pins that are due end; zero for one that isn't known. O(its namespaces)."""
        require_tenant_id(tenant)
        with self._lock, Mending(self):
            self._pins.end_due(tenant)
            return stats.tenant_stats_of(tenant, self._tenants.get(tenant), self._pins)

    def tenants(self) -> list[str]:
        """The tenants that the cache has seen."""
        with self._lock:
            return list(self._tenants)

    def snapshot(self) -> Snapshot:
        """Everything the audit needs, at one moment, under one hold. O(nodes + sequences + free blocks)."""
        return snapshot.at_once(self)

    def snapshot_in_slices(self, pause: Callable[[], None] | None = None) -> Snapshot:
        """The same, at the moment when it ends, with the lock held for no longer than a slice of nodes takes.

        ``pause`` is called between slices, without the lock; it may sleep, and use the cache.
        """
        if pause is not None and not callable(pause):
            raise ArgumentError("pause", pause, "a function without arguments, or None")
        return snapshot.in_slices(self, (lambda: None) if pause is None else pause)

    # --- for the lock and maintenance

    def _repair(self) -> None:
        recovery.repair(self)

    def _give_up(self, held: Held) -> None:
        forgotten.give_up(self, held)

    def _end_due_pins(self) -> None:
        is_over = False
        while not is_over:
            with self._lock, Mending(self):
                is_over = self._pins.end_slice()
            if not is_over:
                requests.let_others()


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
