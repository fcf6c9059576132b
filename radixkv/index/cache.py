"""PrefixCache: the public API. It checks arguments, takes the lock, and calls the functions that do the work.

These functions work on the ``CacheState`` that this class extends:

    requests           the life of a request
    announcements      prompts that wait
    sessions           requests of one agent or conversation
    purge              clear, purge and unpublish
    snapshot           snapshots for the audit
    device_beams       beam search on the device
    tenant_settings    guarantees and limits of tenants

Users hold handles: ``sequence.Sequence``, ``sessions.Session``, ``leases.Lease`` and ``lent_beams.LentBeams``.

The index decides, the storage executes. ``append`` and ``extend`` decide copies. The copies leave as one StepPlan,
which the storage launches under the lock. So plans run in the order in which they were made. A launch never waits for
the device. Without storage (``layout=None``) the engine fetches the plan with ``flush``.

Every public method validates all arguments before it changes anything. So a refused call has changed nothing. If a call
is interrupted while it changes something, the sequences that it works on are lost (``recovery.mend``). New sequences
and leases are registered last, and ``CacheLock.broken`` is set first. So no call runs on a cache that needs repair.

The lock is held for microseconds. ``evict``, ``clear`` and ``snapshot_in_slices`` release it between slices.
``snapshot`` holds it while it reads everything. Taking back lent beams holds it for 0.25 ms with 4 beams and up to 1 ms
with 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

from radixkv._compiled import mypyc_attr
from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import ArgumentError, ConfigError, wrong_count
from radixkv.index import (
    announcements,
    engine_blocks,
    failed_loads,
    forgotten,
    purge,
    recovery,
    requests,
    sessions,
    snapshot,
    stats,
    tenant_settings,
)
from radixkv.index.ahead import MAX_STEP, end_step, num_found, step_failed
from radixkv.index.announcements import Announcement
from radixkv.index.bases import Publication
from radixkv.index.below import Below, Scope, forgetting, made_for
from radixkv.index.changes import Journal
from radixkv.index.engine_blocks import Inserted
from radixkv.index.leases import Lease, end_due, lease_match, take_lease, take_pin
from radixkv.index.lent_beams import LentBeams, lend_beams
from radixkv.index.load_target import attach, end_computed_step, follow, forgotten_too, namespaces_of
from radixkv.index.locking import Held
from radixkv.index.match import Match
from radixkv.index.opening import open_base, open_handle
from radixkv.index.pins import Pin, require_ttl
from radixkv.index.recovery import Mending
from radixkv.index.scrubbing import ScrubBlocks
from radixkv.index.sequence import Sequence, append_to, flush, reorder, states_of
from radixkv.index.sessions import Session
from radixkv.index.snapshot import Snapshot
from radixkv.index.state import CacheState
from radixkv.index.stats import CacheStats, TenantStats
from radixkv.index.tenants import TenantBlocks
from radixkv.index.tokens import ID_BYTES, TokenIds, encode
from radixkv.index.validation import (
    block_ids_of,
    first_block,
    list_of,
    packed_ids,
    readers_of,
    require_base_id,
    require_between,
    require_flags,
    require_hints,
    require_namespace,
    require_noted,
    require_parts,
    require_policy,
    require_tenant_id,
    storage_of,
    whole_blocks,
)
from radixkv.storage.plan import BlockIds, StepPlan
from radixkv_policies import RequestHints as RequestHints
from radixkv_policies import TokenRange as TokenRange

if TYPE_CHECKING:
    from radixkv.index.arguments import (
        Announced,
        BaseId,
        Flag,
        Hints,
        MatchLike,
        Removed,
        SessionName,
        StorageLike,
        TenantId,
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache(CacheState):
    """A prefix cache over one pool of KV blocks. It is safe to use from several threads.

    - ``config``: see CacheConfig.
    - ``clock``: returns seconds, for policies and timeouts.
    - ``journal``: receives which blocks become resident and which leave (see ``changes.Journal``).
    - ``storage``: only for an engine that owns its KV (``layout=None``). A BlockStorage over the engine's tensors.
      The cache then copies and zeroes blocks in it.
    - ``scrub_blocks``: only for an engine that executes ``flush`` itself. A function that zeroes the blocks of an
      int32 array, in order with the engine's other work on these blocks.

    Raises ConfigError, and ArgumentError for an invalid clock or journal.

    The cache calls the clock, the journal, ``scrub_blocks``, the storage and policies (except ``maintain``) under its
    lock. They must not wait. If one of them calls the cache, it gets ReentrantCall. If a finaliser (``__del__``)
    releases something in the middle of a call, the next call does the release.

    If an error interrupts a call and neither this call nor the next can repair the cache's state, the cache is dead.
    Every call then raises IntegrityError. Leaving a ``with`` block of a dead cache raises nothing.

    In a forked child of the process the cache is closed: every call raises ClosedByFork. In the parent it goes on.
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
        super().__init__(config, clock, journal, scrub_blocks, storage_of(config, storage))
        attach(self, self._made_below())

    def _made_below(self) -> Below | None:
        return made_for(self._config, self._storage, self._clock)

    def maintain(self) -> None:
        """End expired pins, and let policies learn without the lock, also that of host memory.

        A cache on the monotonic clock has threads for this. With another clock, call it between requests.
        """
        self._maintenance.maintain(self._below)

    # --- match and lease

    def match(self, namespace: Namespace, ids: TokenIds) -> Match:
        """Return the longest resident prefix of ``ids``, in whole blocks. Changes nothing, not even recency.

        Raises TokenError. O(nodes on the path).
        """
        require_namespace(namespace)
        key = encode(ids)
        with self._lock:
            return requests.find(self, namespace, key)

    def lease(self, match: MatchLike) -> Lease:
        """Protect a match's blocks from eviction.

        Raises LeaseError if some of the blocks are no longer resident. Raises OutOfBlocks if the blocks are borrowed,
        and without them the pool couldn't give other tenants their guarantees. After an error nothing has changed.
        """
        if not isinstance(match, Match):
            raise ArgumentError("match", match, "a Match")
        return lease_match(self, match)

    def match_and_lease(self, namespace: Namespace, ids: TokenIds) -> Lease:
        """Match, and lease what matches, in one walk. A miss gives a lease of no tokens.

        Raises TokenError, and OutOfBlocks like ``lease``. O(nodes on the path).
        """
        require_namespace(namespace)
        return take_lease(self, namespace, encode(ids))

    def match_ahead(self, namespace: Namespace, ids: TokenIds) -> int:
        """Return how many tokens ``open(ids, ahead=True)`` would find: resident ones, and those that a step computes.

        Raises TokenError. Changes nothing. O(nodes on the path + sequences that compute).
        """
        require_namespace(namespace)
        key = encode(ids)
        with self._lock:
            return num_found(self, namespace, key)

    def touch(self, namespace: Namespace, ids: TokenIds) -> int:
        """Tell the policy that the longest resident prefix of ``ids`` is used now, as a lease and its release do.

        Returns its tokens. Raises TokenError, and OutOfBlocks like ``lease``. O(nodes on the path).
        """
        require_namespace(namespace)
        key = encode(ids)
        with self._lock, Mending(self):
            return requests.touch(self, namespace, key)

    def count_reads(
        self, tenant: TenantId, num_tokens: SupportsIndex, *, as_of: SupportsIndex | None = None
    ) -> None:
        """Count tokens that a request read without opening a sequence, as hits in the tenant's statistics. O(1).

        ``as_of``: see ``open``. Raises StaleGeneration if the tenant was purged or removed since.
        """
        require_tenant_id(tenant)
        num_read = require_between("num_tokens", num_tokens, 0, None)
        came = None if as_of is None else require_between("as_of", as_of, 0, None)
        with self._lock:
            if came is not None:
                self._endings.require_current(tenant, came)
            state = self._tenants.get(tenant)
            if state is not None:
                state.hit_tokens += num_read

    # --- requests that wait

    def announce(
        self, namespace: Namespace, ids: TokenIds, hints: Hints = None, *, ttl_s: Any = 600.0
    ) -> Announcement:
        """Tell the cache of a request that waits. Its prompt is not protected, and nothing is promised.

        The announcement shows at any time how much of the prompt is resident. The tenant's policy may evict the blocks
        of idle prompts first. It ends by ``open(announcement=…)``, ``withdraw`` or after ``ttl_s`` seconds, at most a
        year. ``hints``: facts that the policy may use, also at ``open``. What a disk has of it comes into host memory.

        A tenant has at most ``CacheConfig.max_announcements``. Each keeps its ids, 4 bytes a token. Raises TokenError,
        NamespaceError, ArgumentError, AnnouncementLimitExceeded, and then changes nothing. O(nodes on the path).
        """
        require_namespace(namespace)
        require_hints(hints)
        return announcements.announce(self, namespace, encode(ids), hints, require_ttl(ttl_s), self._below)

    def changed_announcements(self) -> list[Announcement]:
        """Return the open announcements of all tenants whose residency has changed since the last call.

        Each comes once, in the order of their announcement. A new one hasn't changed. For the operator: don't show a
        tenant those of others. O(changed × log changed + expired + tenants that announced).
        """
        return announcements.changed(self)

    def session(self, namespace: Namespace, name: SessionName = None) -> Session:
        """Return a new session: the requests of one agent or conversation. ``with`` closes it.

        ``name``: its label ``session`` for policies, up to 256 characters; None for a new one. It separates nothing:
        sessions of one namespace share its prefixes. Raises NamespaceError, ArgumentError. O(1).
        """
        require_namespace(namespace)
        return sessions.make(self, namespace, name)

    def note(self, namespace: Namespace, ids: TokenIds, hints: RequestHints) -> None:
        """Tell the policy what became known of the last request of a prompt: labels such as ``tool_pending``.

        Without a resident block of the prompt the policy hears nothing. ``expected_gap_s`` also lets a disk bring the
        prompt near before that time. Raises TokenError, ArgumentError. O(nodes on the path + nodes of the request).
        """
        require_namespace(namespace)
        require_noted(hints)
        sessions.note(self, namespace, encode(ids), hints)

    # --- requests

    def open(
        self,
        namespace: Namespace,
        ids: TokenIds,
        *,
        hints: Hints = None,
        lookup: Flag = True,
        ahead: Flag = False,
        on_pending: Removed = None,
        timeout_s: Removed = None,
        announcement: Announced = None,
        as_of: SupportsIndex | None = None,
    ) -> Sequence:
        """Match, lease, and allocate the rest: returns a sequence with a block for every token of ``ids``.

        Uses at most ``(n − 1) // block_size`` matched blocks: one token is left at least, to compute logits.

        ``hints``: facts about the request that the policy may use; None for those of the announcement.

        ``announcement``: of this request in this namespace; it ends. One that has ended already is ignored.

        ``lookup``: False finds nothing: all tokens are computed, and count as neither hit nor missed.

        ``ahead``: True also shares whole blocks that a running step computes (``Sequence.computing``). They count in
        ``num_ahead_tokens``, not in ``num_cached_tokens``. It replaces ``on_pending`` and ``timeout_s``.

        ``as_of``: ``endings.num`` when the request came, for a request that has waited since. Raises StaleGeneration if
        its tenant was purged or removed, or its namespace cleared, after that.

        Raises TokenError, NamespaceError, ArgumentError, QuotaExceeded, OutOfBlocks, and then changes nothing. O(nodes
        on the path + blocks evicted).
        """
        if type(namespace) is not Namespace:
            require_namespace(namespace)
        if hints is not None and not isinstance(hints, RequestHints):
            require_hints(hints)
        if announcement is not None:
            announcements.require_own(self, announcement, namespace)
        if on_pending is not None or timeout_s is not None:
            problem = "and timeout_s were removed: use ahead=True"
            raise ArgumentError("on_pending", on_pending, "ahead=True", problem=problem)
        if type(lookup) is not bool or type(ahead) is not bool:
            require_flags(lookup=lookup, ahead=ahead)
        came = None if as_of is None else require_between("as_of", as_of, 0, None)
        return open_handle(self, namespace, encode(ids), hints, None, lookup, ahead, announcement, None, came)

    def step_done(self, step: SupportsIndex) -> int:
        """Commit what step ``step`` computed (``Sequence.computing``), also for the sequences that lean on it.

        Returns the committed tokens of all of them. What was purged meanwhile is left out. A step that no open sequence
        waits for changes nothing. Raises ArgumentError. O(sequences of the step).
        """
        step = require_between("step", step, 0, MAX_STEP)
        return end_computed_step(self, step)

    def step_failed(self, step: SupportsIndex) -> int:
        """Withdraw what step ``step`` was to compute. Sequences that lean on it are cut to their committed part.

        Returns how many were cut. The sequences that it computed keep their tokens: compute them again, in another
        step. Raises ArgumentError. O(sequences of the step).
        """
        step = require_between("step", step, 0, MAX_STEP)
        return end_step(self, step, step_failed)

    def forget(self, sequence: Any, from_token: SupportsIndex) -> int:
        """Forget the KV of a sequence from a token on, because they are wrong: a load failed.

        Nothing from the block of ``from_token`` on matches any more, nor what was computed behind it. Returns how many
        blocks were resident there. The sequence goes back to the whole blocks before: compute the rest again. It keeps
        its blocks if nobody else holds them; otherwise it gets new ones, so read ``block_table`` again. Pins and bases
        that held such blocks end. Other sequences continue as after ``clear``: forget in each that is to go on.

        Raises ArgumentError (a sequence of another cache, a token of a base that it reads), LeaseError (its steps must
        end first, and forks that share committed blocks must commit them or be released), CapacityError, and then
        changes nothing. O(blocks + nodes forgotten + sequences).
        """
        state = states_of(self, [sequence])[0]
        return forgotten_too(self._below, state, partial(failed_loads.forget, self, state, from_token))

    def append(self, sequences: SequenceABC[Sequence], ids: TokenIds) -> None:
        """Append one id to each sequence of a batch, all or nothing. One launch copies all shared tails.

        ``ids`` has one id for each sequence. Raises LeaseError, ArgumentError (a sequence twice, lengths that differ, a
        sequence of another cache), TokenError, OutOfBlocks, and then changes nothing. If the copies themselves fail,
        raises their error and releases the sequences that needed a copy. O(batch).
        """
        append_to(self, states_of(self, list_of("sequences", sequences)), ids)

    def flush(self) -> StepPlan:
        """Fetch, and forget, the copies that an engine which owns its KV must execute before it writes again.

        Call this once a step, and execute the plan, of ``(source, target, num_rows)``, before any other call. Until
        then, blocks that waiting copies read are not handed out again, even if they are freed, and they count for no
        tenant. A call that needs them raises FlushRequired. With storage, the cache executes copies at once.
        """
        return flush(self)

    def reorder(self, sequences: SequenceABC[Sequence], parents: Iterable[int]) -> list[Sequence]:
        """Make a beam step: the i-th result continues ``sequences[parents[i]]``. All inputs are consumed.

        Inputs that no result continues are released. Shared tails are copied at their first write. Raises LeaseError,
        ArgumentError, and then changes nothing. O(inputs + results).
        """
        inputs = states_of(self, list_of("sequences", sequences))
        chosen = [
            require_between(f"parents[{at}]", parent, 0, len(inputs) - 1)
            for at, parent in enumerate(list_of("parents", parents))
        ]
        return reorder(self, inputs, chosen)

    def lend(
        self,
        sequences: Iterable[Sequence],
        max_steps: SupportsIndex,
        *,
        num_blocks: SupportsIndex | None = None,
        groups: Iterable[SupportsIndex] | None = None,
    ) -> LentBeams:
        """Let the device make beam steps by itself: at least ``max_steps`` steps, each a ``reorder`` and an ``append``.

        - ``num_blocks``: blocks to lend for the steps, charged to the tenant until they are taken back. None lends
          enough for any choice of parents. Lend fewer if ``lend_more`` may follow.
        - ``groups``: a number for each sequence. A beam continues only beams of its own group. The device never reads
          the whole blocks that all beams of a group share.

        Until ``reconcile`` the sequences refuse every call except ``release``. Raises LeaseError, ArgumentError (a
        sequence twice, of another cache, of several tenants, or one that publishes), ConfigError without storage,
        QuotaExceeded and OutOfBlocks, and then changes nothing. O(sequences × (their blocks + max_steps)).
        """
        handles = list_of("sequences", sequences)
        return lend_beams(self, handles, states_of(self, handles), max_steps, num_blocks, groups)

    # --- blocks by hand

    def evict(self, num_blocks: SupportsIndex, tenant: TenantId | None = None) -> int:
        """Free up to ``num_blocks`` blocks by policy, anybody's or what may go for a tenant. Returns how many."""
        num_blocks = require_between("num_blocks", num_blocks, 0, None)
        self._require_own_blocks("evict")
        return engine_blocks.evict(self, num_blocks, tenant)

    def allocate(self, num_blocks: SupportsIndex) -> BlockIds:
        """Lend ``num_blocks`` blocks to the engine until ``free`` or ``insert``; int32 ids. Raises OutOfBlocks."""
        num_blocks = require_between("num_blocks", num_blocks, 0, None)
        self._require_own_blocks("allocate")
        return engine_blocks.allocate(self, num_blocks)

    def free(self, block_ids: Any) -> None:
        """Take lent blocks back. Raises ArgumentError, and changes nothing, if a block isn't lent."""
        ids = block_ids_of(block_ids)
        self._require_own_blocks("free")
        with self._lock, Mending(self):
            self._pool.give_back(ids)

    def _require_own_blocks(self, call: str) -> None:
        if self._pool.is_engines:
            raise requests.engine_has_blocks(call)

    def reclaim(self, num_blocks: SupportsIndex, tenant: TenantId | None = None) -> BlockIds:
        """With ``blocks="engine"``: hand blocks to the engine, int32 ids. They are ``num_blocks`` if there are as many.

        First come all blocks that other calls freed since the last reclaim, maybe more than ``num_blocks``. Then blocks
        are evicted by policy. ``reclaim(0)`` evicts nothing. ``tenant``: the blocks are for it, and other tenants keep
        what is guaranteed to them. None keeps no guarantees. Raises ArgumentError. O(blocks + tenants).
        """
        if tenant is not None:
            require_tenant_id(tenant)
        return engine_blocks.reclaim(self, require_between("num_blocks", num_blocks, 0, None), tenant)

    def insert(
        self,
        namespace: Namespace,
        ids: TokenIds,
        block_ids: Any,
        *,
        start: SupportsIndex = 0,
        hints: Hints = None,
        lease: bool = False,
        request: Any = None,
    ) -> Inserted:
        """Make blocks that the engine has filled resident under ``ids``.

        - ``block_ids``: one distinct id for each whole block of ``ids`` from position ``start`` on. Each is lent to the
          engine (``allocate``, or ``blocks="engine"``), or the block that the tree has at this position, or free.
        - ``start``: a multiple of the block size, in tokens. What comes before must be resident.
        - ``hints``: begin a request for the policy, with facts.
        - ``lease``: also lease the whole prefix.
        - ``request``: an earlier insert of the same request. The policy sees one request, and ``hints`` is ignored.

        The tree takes what it lacks. Raises TokenError, NamespaceError, ArgumentError, NotResident, QuotaExceeded,
        OutOfBlocks, and then changes nothing. O(nodes on the path + blocks), and O(free) if a block is free.
        """
        require_namespace(namespace)
        require_hints(hints)
        key, size = encode(ids), self._block_size
        key, first = key[: len(key) - len(key) % self._block_bytes], first_block(start, len(key), size)
        packed, num_blocks = packed_ids(block_ids), len(key) // self._block_bytes - first
        if len(packed) != num_blocks * ID_BYTES:
            raise wrong_count("block_ids", len(packed) // ID_BYTES, f"{num_blocks}, one a whole block of ids")
        return engine_blocks.insert(self, namespace, key, packed, first, hints, bool(lease), request)

    # --- pins

    def pin(
        self, namespace: Namespace, ids: TokenIds, ttl_s: Any, *, as_of: SupportsIndex | None = None
    ) -> Pin:
        """Keep a prefix resident for ``ttl_s`` seconds, whatever is evicted. Pinning it again restarts the time.

        All whole blocks of ``ids`` must be resident. They count as in use, and once against the tenant's
        ``pin_budget``. A tenant has at most ``Tenant.max_pins`` pins. A clear or a purge ends the pin. ``as_of``: see
        ``open``.

        Raises TokenError, ArgumentError, NotResident, PinLimitExceeded, PinBudgetExceeded. Raises OutOfBlocks if the
        blocks are borrowed and other tenants couldn't get their guarantees. After an error nothing has changed. O(nodes
        on the path + blocks), plus log of the tenant's pins.
        """
        require_namespace(namespace)
        ttl_s, key = require_ttl(ttl_s), whole_blocks(encode(ids), self._block_size)
        if self._clock is monotonic:
            self._maintenance.start()
        came = None if as_of is None else require_between("as_of", as_of, 0, None)
        return take_pin(self, namespace, key, ttl_s, came)

    def unpin(self, pin: Any) -> None:
        """End a pin before its time. Raises LeaseError for a pin that has ended."""
        if not isinstance(pin, Pin):
            raise ArgumentError("pin", pin, "a Pin")
        with self._lock, Mending(self):
            self._pins.unpin(pin)

    def pins(
        self, tenant: TenantId | None = None, *, after: SupportsIndex = 0, limit: SupportsIndex | None = None
    ) -> list[Pin]:
        """Return the active pins of one tenant or of all, each with the seconds left. A tenant's pins are sorted by id.

        ``after``: only pins with a greater id, ≥ 0. ``limit``: at most this many, ≥ 0; None for all. Raises
        ArgumentError. O(pins of these tenants). For one tenant with ``limit``, little more than the pins returned.
        """
        if tenant is not None:
            require_tenant_id(tenant)
        after = require_between("after", after, 0, None)
        most = None if limit is None else require_between("limit", limit, 0, None)
        with self._lock:
            return self._pins.told(tenant, after, most)

    # --- tenants

    def add_tenant(self, tenant: Tenant) -> None:
        """Set a tenant's guarantee and limit from now on, or change those of a tenant that was added before.

        Blocks above a new limit are evicted; running sequences keep theirs. A new policy takes over the resident blocks
        in the order of the old policy. With another ``incarnation``, all its namespaces are cleared, and what a disk
        has of it.

        Raises ConfigError for a strict tenant if the cache can't zero its blocks. Raises ArgumentError in these cases:

        - The guarantees of all tenants would exceed the pool.
        - Running sequences and pins hold too much of the pool to meet it, or the tenant's own hold more than the limit.

        After an error nothing has changed. O(tenants + blocks evicted), and O(its nodes) for a new policy.
        """
        if not isinstance(tenant, Tenant):
            raise ArgumentError("tenant", tenant, "a Tenant")
        require_policy(tenant.policy)
        if tenant.mode == "strict" and self._scrubber is None:
            allowed = "'burst' without scrubbing: a strict tenant's blocks are zeroed, by a storage or by scrub_blocks"
            raise ConfigError("mode", tenant.mode, allowed)
        with self._lock, Mending(self):
            forgets = tenant_settings.add(self, tenant)
        follow(self, tenant.id, forgets=forgets)
        if forgets:
            tenant_settings.note_forgotten(self, tenant.id)

    def remove_tenant(self, tenant: TenantId) -> None:
        """Remove a tenant's guarantee and limit and forget all its blocks. Its running sequences continue.

        The tenant is then like one that was never added. Its counts and what its policy learned are forgotten too, and
        the sums in ``stats`` no longer contain them. Raises ArgumentError, and changes nothing, for a tenant that
        wasn't added, and for one whose sequences and pins hold more than the limit of tenants that weren't added.
        """
        require_tenant_id(tenant)
        with forgetting(self._below, Scope(tenant)):
            with self._lock, Mending(self):
                namespaces = tenant_settings.remove(self, tenant)
            follow(self, tenant)
            for namespace in namespaces:
                self.clear(namespace)
        tenant_settings.note_forgotten(self, tenant)

    def tenant(self, tenant: TenantId) -> Tenant | None:
        """Return a tenant's settings; None for a tenant that the cache doesn't know."""
        require_tenant_id(tenant)
        with self._lock:
            state = self._tenants.get(tenant)
            return None if state is None else state.settings

    # --- namespaces

    def namespaces(self, tenant: TenantId | None = None) -> list[Namespace]:
        """Return the namespaces that hold something, also below, of one tenant or of all."""
        if tenant is not None:
            require_tenant_id(tenant)
        return namespaces_of(self, tenant)

    def clear(self, namespace: Namespace) -> int:
        """Forget everything in a namespace. Returns how many blocks were resident.

        Nothing of it matches from now on. Running sequences continue, but what they hold or commit is never matched and
        is freed at their release. A base that was published from the namespace is unpublished. A base that the
        namespace reads stays readable. O(1) under the lock (for a reader of bases: O(its trees)), then slices.
        """
        require_namespace(namespace)
        with forgetting(self._below, Scope(namespace.tenant, namespace)):
            return purge.clear(self, namespace)

    def purge(self, tenant: TenantId) -> int:
        """Forget everything of a tenant and raise its generation. Returns how many blocks were resident.

        For a tenant that the cache doesn't know (``tenant`` returns None) it returns 0; a disk below forgets it too.
        Nothing of it is ever matched again. Its running sequences raise StaleGeneration from their next call on. Only
        their first ``release`` works, and it returns their blocks. Until then these blocks are quarantined and count
        for the tenant. The tenant's settings stay. Raises ArgumentError for an invalid tenant id. O(namespaces +
        sequences), then slices.
        """
        return self._purged(tenant, 0)

    def _purged(self, tenant: TenantId, fleet_generation: int) -> int:
        """Purge a tenant, because the fleet gave it this generation; 0: for another reason."""
        require_tenant_id(tenant)
        with forgetting(self._below, Scope(tenant, generation=fleet_generation)):
            return purge.purge(self, tenant)

    def generation(self, tenant: TenantId) -> int:
        """Return how often a tenant was purged in this cache."""
        require_tenant_id(tenant)
        with self._lock:
            state = self._tenants.get(tenant)
            return 0 if state is None else state.generation

    # --- bases

    def publish(
        self,
        base_id: BaseId,
        namespace: Namespace,
        ids: TokenIds,
        readers: Iterable[str],
        *,
        as_of: SupportsIndex | None = None,
    ) -> Sequence:
        """Publish the whole blocks of ``ids`` for other tenants to read. Returns a sequence for the engine to compute.

        The base becomes readable when the sequence has committed all its tokens. If it is released earlier, nothing is
        published. ``namespace`` belongs to the account that publishes and pays. The base serves the ``readers``'
        namespaces with the same model, adapter and weights, whatever their salt. It stays resident until ``unpublish``.

        Raises like ``open``. Also raises ArgumentError, and changes nothing, if another base has the id, if there is no
        whole block, if a reader publishes, or if the publisher reads. Raises it too, with the shortfall, if the pool
        can't give the blocks in addition to those that are guaranteed and held.
        """
        require_namespace(namespace)
        key = whole_blocks(encode(ids), self._block_size)
        base = Publication(require_base_id(base_id), namespace, key, readers_of(readers, namespace))
        came = None if as_of is None else require_between("as_of", as_of, 0, None)
        return open_base(self, namespace, key, base, came)

    def unpublish(self, base_id: BaseId) -> None:
        """Withdraw a base: no tenant reads it from now on. A base that is still being computed won't be published.

        Matching stops at once, and what its readers cached behind it is forgotten. Sequences that run behind it
        continue. The base keeps its blocks until the last of them is released. Then the blocks are ordinary resident
        blocks in the namespace of the account. Raises ArgumentError for an unknown base id.
        """
        purge.unpublish(self, base_id)

    def set_readers(self, base_id: BaseId, readers: Iterable[str]) -> None:
        """Let exactly these tenants read a base. For readers that are removed, the base is unpublished.

        Raises ArgumentError, and changes nothing, for an unknown base id, and for readers that publish.
        """
        purge.set_readers(self, base_id, readers)

    # --- counts

    def blocks_of(self, tenant: TenantId) -> TenantBlocks:
        """Return the same counts of one tenant, as an object to keep: its properties always show the present."""
        require_tenant_id(tenant)
        return TenantBlocks(self._tenants, self._pool, tenant)

    def stats(self) -> CacheStats:
        """Return counts of the whole cache at this moment. O(namespaces + tenants)."""
        with self._lock:
            return stats.stats_of(self)

    def tenant_stats(self, tenant: TenantId) -> TenantStats:
        """Return counts of one tenant, after ending its expired pins. Zero for an unknown tenant. O(its namespaces)."""
        require_tenant_id(tenant)
        with self._lock, Mending(self):
            self._pins.end_due(tenant)
            return stats.tenant_stats_of(tenant, self._tenants.get(tenant), self._pins)

    def snapshot(self) -> Snapshot:
        """Return what the audit needs, at one moment, in one hold of the lock. O(nodes + sequences + free blocks)."""
        return snapshot.at_once(self)

    def snapshot_in_slices(self, pause: Callable[[], None] | None = None) -> Snapshot:
        """Return a snapshot of the moment when this call ends. The lock is held for a slice of nodes at a time.

        ``pause`` is called between slices, without the lock. It may sleep, and it may use the cache.
        """
        if pause is not None and not callable(pause):
            raise ArgumentError("pause", pause, "a function without arguments, or None")
        return snapshot.in_slices(self, (lambda: None) if pause is None else pause)

    # --- for the lock and maintenance

    def _repair(self) -> None:
        recovery.repair(self)

    def _give_up(self, held: Held) -> None:
        forgotten.give_up(self, held)

    def _end_due(self) -> None:
        end_due(self)
