"""The tiers below the cache of any engine in the same process: what was evicted comes back.

    commit                keep         new whole blocks → host memory, while it has free slots
    eviction              leave        blocks that leave → host memory, unless their copy is there
    Sequence.loading      begin        a ``TierLoading``: host memory, the disk and further tiers → blocks
    purge, clear, …       forgotten    reaches every tier

Host memory (``host.tier``), a disk (``disk.tier``) and further ones are ``Tier``s. Here the cache and the only worker
are in one process, so what was decided is done at once, in the caller's thread and on its stream.

**Nothing older than a purge.** A tenant's mark changes before a purge or a clear forgets anything, and again
afterwards. A save or a load takes the mark before it looks at anything, and does nothing once the mark is another.

**Not kept here**: what a reader of a published base computed (it ends with the base), and requests that leave nothing.
A strict tenant has its share of host memory for itself, or nothing there, and nothing in the tiers below it.

A thread (``start``) evicts ahead, zeroes slots after purges, looks after a disk, and ends loads whose sequence was
released or that nobody asks any more.

An error in here costs hits: it is logged, what was decided and not done is undone, and the tiers go on. After
``MOST_ERRORS`` errors within ``ERRORS_S`` seconds they rest for ``REST_S``. Requests go on without them meanwhile.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import ArgumentError, ConfigError, LeaseError, TierError
from radixkv.forks import OwnLock
from radixkv.index.below import Part, Scope, Target
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.sizes import physical_bytes
from radixkv.storage.device import BlockStorage
from radixkv.storage.lossy_codec import LossyCodec
from radixkv.tiers.disk.durations import Durations
from radixkv.tiers.disk.patience import DiskPatience
from radixkv.tiers.fair_lock import FairLock
from radixkv.tiers.further import Further
from radixkv.tiers.host.cleaner import Cleaner
from radixkv.tiers.host.lossy_memory import LossyBlocks
from radixkv.tiers.host.memory import HostBlocks, bytes_of_row
from radixkv.tiers.host.staging import StagingRows
from radixkv.tiers.host.steps import MAX_STAGED_BLOCKS
from radixkv.tiers.host.tier import DeviceBlocks, HostTier
from radixkv.tiers.loading import RecordReader, TierLoading
from radixkv.tiers.pending import FolderNotes, Pending
from radixkv.tiers.prefetch import AHEAD_ROWS, ASKED_S, BEGUN_PART, MAX_PAUSE_S, Asked, LaterPrompts, Prefetch
from radixkv.tiers.settings import (
    UNCACHED_SALT,
    TierSettings,
    disk_errors,
    require_fingerprint,
)
from radixkv.tiers.tier import Offer, TierDetails, may_lie_below
from radixkv.tiers.unusable_disk import UnusableDisk
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.index.below import Expected, GiveAll
    from radixkv.index.cache import PrefixCache
    from radixkv.storage.plan import BlockIds
    from radixkv.tiers.disk.tier import DiskTier

MOST_ERRORS: Final = 5
ERRORS_S: Final = 60.0
REST_S: Final = 60.0
MAX_SLOTS: Final = 2**31 - 1
COUNTS: Final = (
    "capacity_blocks", "resident_blocks", "hit_blocks", "read_bytes", "written_bytes", "loads", "load_seconds",
    "errors", "open", "owed_purges", "unchosen_blocks", "lost_blocks", "budget_bytes",
)  # fmt: skip
"""Names of ``Ladder.counts``."""
_TICK_S: Final = 0.2
_BUSY_TICK_S: Final = 0.01

_log = logging.getLogger(__name__)


class Ladder:
    """The tiers below a cache with this storage. Any thread may use them.

    ``fingerprint``: of what computes the KV. ``policy_clock``: of host memory's policy, like the cache's; waits for the
    disk take ``clock``.

    Raises ConfigError if host memory doesn't hold two blocks, or the machine hasn't got it. The same for KV that can't
    be quantised (``LossyCodec``), for a disk without a fingerprint, and for the disk's folder (``DiskSettings``). A
    disk that fails, or whose key file is damaged, is left out: ``unusable_disk``.
    """

    def __init__(
        self,
        storage: BlockStorage,
        settings: TierSettings,
        fingerprint: str = "",
        *,
        policy: str = "learned",
        always_scrubs: bool = False,
        clock: Clock = monotonic,
        policy_clock: Clock = monotonic,
    ) -> None:
        self.gate = FairLock()
        if settings.disk is not None:
            require_fingerprint(fingerprint)
        self.memory, num_ahead = _memory(storage, settings)
        self._further = Further(settings.further, lambda tenant: self._fleet_generation(tenant), clock)
        self.block_bytes, self.num_slots = self.memory.block_bytes, self.memory.num_slots
        self._size, self._num_blocks, self._clock = storage.block_size, storage.num_blocks, clock
        self.host = HostTier(
            self.memory,
            storage.block_size,
            num_above=storage.num_blocks,
            policy=policy,
            scrub="always" if always_scrubs else "cross-tenant",
            further=self._further,
            outside=self.gate.outside,
            clock=clock,
            policy_clock=policy_clock,
        )
        self._marks: Counter[str] = Counter()
        self._changing: Counter[str] = Counter()
        self._unkept: dict[str, Tenant] = {}
        """Settings of tenants that were refused their share of host memory."""
        self._lock, self._following = OwnLock(), OwnLock()
        self._is_off = self._is_closed = False
        self._errors_at: deque[float] = deque(maxlen=MOST_ERRORS)
        self._rests_until = clock()
        self._opened_at = clock()
        self._fleet_generation: Callable[[str], int | None] = lambda tenant: 0
        self._knows: Callable[[], bool] = lambda: False
        self._store_id: Callable[[], str] = lambda: ""
        self._stop, self._has_work = threading.Event(), threading.Event()
        self._cleaner = Cleaner(storage.num_blocks, self._has_work.set)
        self._thread: threading.Thread | None = None
        self._last_error: type[Exception] | None = None
        self._prefetch: Prefetch | None = None
        self._later = LaterPrompts()
        self._give_all: GiveAll = lambda is_over: None
        self._unusable: UnusableDisk | None = None
        if settings.disk is not None:
            disk = self._open_disk(settings, storage, fingerprint, num_ahead)
            if disk is not None:
                self._prefetch = self._made_prefetch(disk)
        self.reader = self._made_reader(settings, num_ahead)
        self._loadings: WeakSet[TierLoading] = WeakSet()
        self._weights: dict[str, int] = {}
        """The version of a model's weights, by model, if somebody changed them."""

    # --- whose KV, and since when

    def _made_reader(self, settings: TierSettings, num_ahead: int) -> RecordReader | None:
        """Return the reader of the tiers below host memory, if there are any."""
        disk, size, clock = self.disk, self._size, self._clock
        if disk is not None:
            rows, patience = disk.rows, disk.patience
        elif settings.further:
            rows, patience = (
                StagingRows(self.memory, self.num_slots, num_ahead, clock),
                DiskPatience(size, clock),
            )
        else:
            return None
        return RecordReader(disk, self._further, rows, patience, self._may_go_below, size, clock)

    def _may_go_below(self, tenant: str) -> bool:
        """Whether a tenant's blocks may lie below host memory: those of strict ones may not."""
        return may_lie_below(self.host.cache.tenant(tenant))

    def keeps(self, namespace: Namespace) -> bool:
        """Whether KV of a namespace are kept now. Any thread."""
        return not self._is_shut and self.has(namespace) and namespace.tenant not in self._unkept

    @property
    def _is_shut(self) -> bool:
        """Whether nothing is loaded or kept now. Any thread."""
        return self._is_off or self._clock() < self._rests_until

    def mark(self, tenant: str) -> int | None:
        """Return a number that changes with each purge or clear of a tenant; None while one runs. Any thread."""
        with self._lock:
            return None if self._changing[tenant] else self._marks[tenant]

    def is_current(self, mark: int, tenant: str) -> bool:
        """Whether nothing of a tenant was purged, cleared or found wrong since the mark."""
        return not self._is_shut and self.mark(tenant) == mark

    def expect(self, expected: Expected) -> None:
        """See ``Below``. What the disk has comes into host memory. Any thread."""
        if self._prefetch is not None and self._brings(expected.namespace.tenant):
            self._prefetch.add(expected)

    def prefetch(
        self, namespace: Namespace, key: bytes, resident_tokens: Callable[[], int], in_s: float = 0.0
    ) -> None:
        """See ``Below``. Unless it takes longer than ``ASKED_S``. O(1), or O(log(prompts)) for a later time."""
        mark, prefetch = self.mark(namespace.tenant), self._prefetch
        if prefetch is None or mark is None or not in_s <= MAX_PAUSE_S or not self._brings(namespace.tenant):
            return
        due_at = self._clock() + BEGUN_PART * in_s
        until = due_at + (1 - BEGUN_PART) * in_s + ASKED_S

        def is_open() -> bool:
            return self._clock() < until and self.mark(namespace.tenant) == mark

        asked = Asked(namespace, key, is_open, resident_tokens)
        if in_s > 0:
            self._later.add(due_at, asked)
        else:
            prefetch.ask(asked)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Take how long it took to compute tokens. A request waits for the disk for a part of that."""
        if self.reader is not None:
            self.reader.patience.computed_in(seconds, num_tokens)

    # --- purges and tenants, any thread

    @contextmanager
    def forgetting(self, scope: Scope) -> Iterator[None]:
        """See ``Below``. Rows that began before keep nothing below. Raises TierError for a disk that was closed.

        If the disk has learned the generation of a purge of the fleet, all that is here came after that purge. Host
        memory had forgotten the tenant before, and another process had other host memory.
        """
        self.require_disk()
        tenant, namespace = scope.tenant, scope.namespace
        assert tenant is not None
        if namespace is not None and not self.has(namespace):
            yield
            return
        has_learned = self._has_learned(scope)
        with self._lock:
            self._changing[tenant] += 1
            self._marks[tenant] += 1
        self._later.forget(tenant)
        try:
            with self._further.forgetting(scope) if has_learned else self._forgetting_below(scope):
                yield
                if namespace is not None or not has_learned:
                    self.host.forget(scope)
                    self._has_work.set()  # slots to zero
        finally:
            self._changed(tenant)

    @contextmanager
    def _forgetting_below(self, scope: Scope) -> Iterator[None]:
        """A context in which host memory and the cache forget something, and the tiers below do before and after."""
        if self._unusable is not None and scope.tenant is not None:
            self._unusable.add(scope.tenant)
        with (
            self._further.forgetting(scope),
            nullcontext() if self.disk is None else self.disk.forgetting(scope),
        ):
            yield

    def forget(self, scope: Scope) -> Pending:
        """Forget in all tiers what the cache may have forgotten before, or never had. Returns what is still to do."""
        if scope.tenant is not None:
            self.require_disk()
            is_here = scope.namespace is None or self.has(scope.namespace)
            with self.forgetting(scope) if is_here else self._forgetting_below(scope):
                pass  # a disk forgets the whole tenant, also if nothing of this namespace is kept here
        else:
            with self._forgetting_below(scope):
                pass
        return self.pending(scope.tenant)

    def pending(self, tenant: str | None = None) -> Pending:
        """Return what the disk still has to destroy of a tenant, or of all."""
        disk = self._unusable if self.disk is None else self.disk.purges
        return Pending([*([] if disk is None else [disk]), *self._further.forgetful], tenant)

    def _changed(self, tenant: str) -> None:
        """Take that a purge or a clear of a tenant has ended, or was interrupted."""
        with self._lock:
            self._marks[tenant] += 1
            self._changing[tenant] -= 1
            if not self._changing[tenant]:
                del self._changing[tenant]

    def is_on_disk(self, tenant: str) -> bool:
        """Whether a disk has, or may have, records of a tenant. O(1), any thread."""
        if self.disk is None:
            return self._unusable is not None and not self._unusable.is_lost
        return self.disk.records.folder.is_known(tenant)

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk, usable or not."""
        return self.disk is not None or self._unusable is not None

    def _has_learned(self, scope: Scope) -> bool:
        """Whether it is a purge of the fleet, and the disk has learned its generation."""
        disk = self.disk
        if not scope.generation or scope.tenant is None or disk is None:
            return False
        return disk.records.folder.fleet_generation(scope.tenant) == scope.generation

    def has(self, namespace: Namespace) -> bool:
        """Whether there may be KV of a namespace here."""
        is_left_out = namespace.salt.startswith(UNCACHED_SALT)
        return not is_left_out and namespace.weights >= self._weights.get(namespace.model, 0)

    def namespaces(self, tenant: str | None) -> list[Namespace]:
        """Return the namespaces that hold something in host memory, of one tenant or of all."""
        return self.host.cache.namespaces(tenant)

    def maintain(self) -> None:
        """See ``Below``."""
        self.host.cache.maintain()

    @property
    def _is_over(self) -> bool:
        """Whether nothing is left here that must keep any law."""
        return self._is_off or self._stop.is_set() or self.host.cache.is_dead

    def indexes(self) -> Mapping[str, PrefixCache]:
        """See ``Below``."""
        return {} if self._is_over else {"host": self.host.cache}

    def violations(self, pause: Callable[[], None]) -> Mapping[str, list[tuple[str, str]]]:
        """See ``Below``."""
        if self._is_over:
            return {}
        with self.moving():
            found = {"host": self.host.index.violations()}
        if self.disk is not None:
            found["disk"] = self.disk.records.violations(pause)
        return found

    def require_disk(self) -> None:
        """Raise TierError if the disk was closed: it can't forget any more."""
        if self._is_closed and self.disk is not None:
            raise TierError(
                "the disk below this cache is closed, and can't forget: open it again, then purge"
            )

    def follow(self, settings: Callable[[], Tenant]) -> None:
        """See ``Below``."""
        with self._following:
            self.add_tenant(settings())

    def add_tenant(self, tenant: Tenant) -> None:
        """Give a tenant its share of host memory and of the disk: as much of each as it has of the cache.

        If it can't have that of host memory, nothing of it is kept here until another change makes room. Two tenants'
        changes may come in another order than to the cache.
        """
        try:
            self._give_share(tenant)
        except ArgumentError as error:
            self._unkept[tenant.id] = tenant
            _log.warning("nothing of tenant %r is kept in host memory: %s", tenant.id, error)
        self._follow_on_disk(tenant)
        self._meet_unmet()

    def _give_share(self, tenant: Tenant) -> None:
        """Give a tenant its share of host memory: slots of its own, if it is strict. Raises ArgumentError.

        In shared slots a strict tenant could tell others' traffic.
        """
        self.host.cache.add_tenant(self._scaled(tenant))
        own = max(tenant.guaranteed_blocks * self.num_slots // self._num_blocks, 1)
        self._set_own_slots(tenant.id, own if tenant.mode == "strict" else 0)
        self._unkept.pop(tenant.id, None)

    def _follow_on_disk(self, tenant: Tenant) -> None:
        """Let the disk follow a tenant's settings. One that isn't kept in host memory has no slots there."""
        is_kept = tenant.id not in self._unkept
        if not is_kept or tenant.mode != "strict":
            self._set_own_slots(tenant.id, 0)
        if self.disk is not None and not self._is_closed:
            self.disk.follow(tenant.id, tenant, has_share=is_kept)

    def _set_own_slots(self, tenant: str, num_slots: int) -> None:
        """Give a tenant slots of its own. Waits for the gate only if that changes something. Raises ArgumentError."""
        if self.host.index.own_slots(tenant) != num_slots:
            with self.moving():
                self.host.index.set_strict(tenant, num_slots)

    def _made_prefetch(self, disk: DiskTier) -> Prefetch:
        def is_there(namespace: Namespace, key: bytes, num_tokens: int) -> bool:
            stop = len(key) // (self._size * TOKEN_BYTES)
            return self.host.index.reach(namespace, key, num_tokens // self._size) >= stop

        def is_loading(namespace: Namespace, key: bytes, num_tokens: int) -> bool:
            if self.reader is None:
                return False
            return self.reader.reads(
                namespace, key, self.host.index.reach(namespace, key, num_tokens // self._size)
            )

        return Prefetch(
            disk.promotions,
            self.keeps,
            self.host.cache.generation,
            is_there,
            is_loading,
            self._has_work.set,
        )

    def _brings(self, tenant: str) -> bool:
        """Whether a disk may bring something of a tenant ahead."""
        return not self._is_off and self.disk is not None and self.disk.serves(tenant)

    def _meet_unmet(self) -> None:
        """Give what host memory refused before, if there is room now."""
        for tenant in list(self._unkept.values()):
            with suppress(ArgumentError):
                self._give_share(tenant)
                self._follow_on_disk(tenant)

    # --- the cache

    @property
    def slice_blocks(self) -> int:
        """See ``Below``."""
        return self.host.slice_blocks

    def keep(self, tenant: str, take: Callable[[], Part | None]) -> None:
        """See ``Below``. Costs the bytes of new blocks; O(tokens) without one."""
        self._cleaner.used()
        with self.gate:
            mark = self.mark(tenant)  # before the part is taken: a later purge or clear changes it
            if self._is_shut or mark is None or tenant in self._unkept:
                return
            with self._guarded():
                part = take()
                if part is None:
                    return
                try:
                    self._keep(part, mark)
                finally:
                    part.release()

    def _keep(self, part: Part, mark: int) -> None:
        namespace = part.namespace
        if not self.keeps(namespace):
            return
        offer = Offer(
            namespace,
            self.host.cache.generation(namespace.tenant),
            part.key,
            0,
            len(part.key) // (self._size * TOKEN_BYTES),
        )
        self._offer(offer, DeviceBlocks(part.block_ids, lambda: self.mark(namespace.tenant) == mark))

    def may_have(self, namespace: Namespace, key: bytes) -> bool:
        """See ``Below``. O(nodes on the path), and with a disk a hash of the key."""
        last = len(key) // (self._size * TOKEN_BYTES) - 1
        if self.host.find(namespace, key, last):
            return True
        if self.disk is None and not self._further.tiers:
            return False
        with self.gate, self._guarded():
            is_on_disk = self.disk is not None and self.disk.promotions.may_have(namespace, key)
            return is_on_disk or (
                self._may_go_below(namespace.tenant) and self._further.has(namespace, key, last)
            )
        return False

    def begin(self, target: Target) -> TierLoading | None:
        """See ``Below``. O(tokens)."""
        namespace = target.namespace
        with self.gate:
            mark = self.mark(namespace.tenant)
            if mark is None or not self.keeps(namespace):
                return None
            with self._guarded():
                stop = self._host_stop(target)
                loading = TierLoading(self, target, mark, stop, self._size, self._clock)
                try:
                    if loading.begin():
                        self._loadings.add(loading)
                        return loading
                except BaseException:
                    loading.end()  # whoever keeps the error keeps the loading too
                    raise
        return None

    def _host_stop(self, target: Target) -> int:
        """Return the block where host memory's part of a sequence ends, with what is coming ahead of it."""
        namespace, key = target.namespace, target.key
        stop = self.host.index.reach(namespace, key, target.num_committed // self._size)
        disk = self.disk
        if disk is not None and disk.promotions.take_over(namespace, key, stop):
            self._run()
            stop += self.host.find(namespace, key, stop)
        return stop

    def attached(self, give_all: GiveAll, free_ahead: Callable[[int], None]) -> None:
        """See ``Below``."""
        self._give_all, self._cleaner.free_ahead = give_all, free_ahead

    @contextmanager
    def moving(self) -> Iterator[None]:
        """See ``Below``."""
        if self.gate.is_mine:
            yield
        else:
            with self.gate:
                yield

    def let_go(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """See ``Below``. Never waits: outside of ``moving``, while the tiers are busy, it names all."""
        self._cleaner.evicted(len(block_ids))
        with self._entered() as is_in:
            if is_in:
                with self._guarded():
                    return self.host.index.let_go(block_ids)
            else:
                self.host.index.let_go_later(block_ids)
        return np.ones(len(block_ids), np.bool_)

    def leave(self, namespace: Namespace, key: bytes, start: int, block_ids: BlockIds) -> None:
        """See ``Below``. Never waits: outside of ``moving``, what leaves while the tiers are busy is lost.

        It costs the bytes of blocks without a copy.
        """
        with self._entered() as is_in:
            if not is_in:
                self.host.count("lost_blocks", len(block_ids))
            elif self.keeps(namespace) and self.mark(namespace.tenant) is not None:
                with self._guarded():
                    generation = self.host.cache.generation(namespace.tenant)
                    offer = Offer(namespace, generation, key, start, start + len(block_ids))
                    self._offer(offer, DeviceBlocks(block_ids, lambda: True, are_leaving=True))

    @contextmanager
    def _entered(self) -> Iterator[bool]:
        """Enter the gate, unless this thread is in it, or another one: False then."""
        is_mine = self.gate.is_mine
        if is_mine or not self.gate.enter_if_free():
            yield is_mine
            return
        try:
            yield True
        finally:
            self.gate.leave()

    # --- Source, within the gate

    def safely(self, call: Callable[[], None]) -> bool:
        """See ``Source``."""
        is_good = False
        with self._guarded():
            call()
            is_good = True
        return is_good

    # --- for its owner

    def start(self) -> None:
        """Begin a thread that evicts ahead, zeroes slots after purges, and looks after a disk, also without requests.

        With a disk or further tiers it runs until ``close``. Without one it also ends when nobody has the tiers any
        more.
        """
        if self.reader is not None:
            run: Callable[[], None] = self._look_after_tiers
        elif self._cleaner.is_needed:
            run = partial(_evict_ahead, weakref.ref(self), self._stop, self._has_work)
            weakref.finalize(self, self._has_work.set).atexit = False
        else:
            return
        self._thread = threading.Thread(target=run, name="radixkv-tiers", daemon=True)
        self._thread.start()

    def _look_after_tiers(self) -> None:
        while not self._stop.wait(_BUSY_TICK_S):
            if self._is_off or self._prefetch is None or not self._prefetch.is_busy:
                self._has_work.wait(_TICK_S)
            self._has_work.clear()
            self._tick_safely()

    def _tick_safely(self) -> None:
        """Tick, and tell of an error once: without this thread nothing that a disk owes would be repeated."""
        try:
            with self.gate:
                self.tick()
            if not self._is_shut:
                self._cleaner.run()
            self._last_error = None
        except Exception as error:  # noqa: BLE001 whatever it is, the next tick may work
            self.host.count("errors")
            if type(error) is not self._last_error:
                _log.exception("a tick of the tiers below the cache failed; the next ones go on")
            self._last_error = type(error)

    def tick(self) -> None:
        """End what is over, and begin what is due. What a disk owes is repeated also while the tiers are off."""
        self._further.retry_due()
        disk = self.disk
        if disk is not None:
            disk.purges.retry_due()
            knows = (
                disk.records.state == "awaiting-generations" and self._knows()
            )  # asked before the store is
            if disk.purges.follows(self._store_id()) and knows:
                disk.purges.know_generations()
        if not self._is_off:
            with self._guarded():
                if self._prefetch is not None:
                    for asked in self._later.take_due(self._clock()):
                        self._prefetch.ask(asked)
                    self._prefetch.go_on()
                self._run()
        self._sweep()

    def _sweep(self) -> None:
        """End loads that don't go on."""
        if self.reader is not None:
            for loading in list(self._loadings):
                loading.sweep()
            self.reader.sweep()

    def _end_loads(self) -> None:
        for loading in list(self._loadings):
            loading.end()

    def weights_changed(self, model: str, version: int) -> None:
        """Forget everything, because the weights of a model are others. Nothing of earlier versions is kept any more.

        What is being loaded ends.
        """
        with self.gate, self._guarded():
            self._weights[model] = version
            self._end_loads()
            with self._further.forgetting(Scope(None)):
                self.host.reset(version)

    def close(self) -> None:
        """Store what the cache and host memory have, for some seconds at most, and give the disk's folder back.

        Raises TierError, after all that, if the disk still has what a purge or a clear was to destroy.
        """
        self.stop()
        self._later.clear()
        with self.moving():
            self._end_loads()
            self._sweep()
            if self.disk is not None:
                self.disk.close(None if self._is_off else self._give_all)
            self.host.close()
            self._is_off = self._is_closed = True
            self._further.close()
        unusable = None if self._unusable is None else self._unusable.unfinished()
        unfinished = unusable if self.disk is None else self.disk.unfinished()
        if unfinished is not None:
            raise TierError(unfinished)

    def stop(self) -> None:
        """End the thread of ``start``. Outside of the gate."""
        self._stop.set()
        self._has_work.set()
        if self._thread is not None:
            self._thread.join()

    def follow_generations(
        self,
        generation: Callable[[str], int | None],
        knows: Callable[[], bool],
        store_id: Callable[[], str] = lambda: "",
        notes: FolderNotes | None = None,
    ) -> None:
        """Take from now on which purges the fleet knows of, whether it knows all, and from where: see ``Tiered``."""
        self._fleet_generation, self._knows, self._store_id = generation, knows, store_id
        if self.disk is not None:
            self.disk.purges.notes = notes

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """Return counts by tier. Any thread.

        - ``capacity_blocks``, ``resident_blocks``; ``hit_blocks``: used by requests, each where it was found.
        - ``read_bytes``, ``written_bytes``; ``loads``, and ``load_seconds``, how long they took.
        - ``open``: 1 if it serves requests; 0 also while it rests. ``errors``.
        - ``owed_purges``: tenants whose purge isn't done there yet.
        - ``unchosen_blocks``: left out by the write budget. ``budget_bytes``: what the budget has left.
        - ``lost_blocks``: left the tier above, and found no room or no time here.
        """
        found = {"host": self._with_all_counts(self.host.counts(), is_open=True)}
        totals = self.host.totals_now()
        if self.disk is not None:
            below = self.disk.counts()
            below |= {
                "hit_blocks": totals["disk_loaded_blocks"],
                "errors": below["errors"] + totals["disk_timeouts"],
                "unchosen_blocks": totals["disk_unchosen_blocks"],
                "lost_blocks": totals["disk_unstored_blocks"],
            }
            found["disk"] = self._with_all_counts(below, is_open=bool(below["open"]))
        elif self._unusable is not None:
            found["disk"] = self._unusable.counts()
        for number, tier in enumerate(self._further.tiers):
            hits = 0 if self.reader is None else self.reader.num_hits[number + (self.disk is not None)]
            found[self._further.name_of(number)] = self._with_all_counts(
                {"open": 1, **tier.counts(), "hit_blocks": hits}, is_open=True
            )
        return found

    def _with_all_counts(self, counts: Mapping[str, float], *, is_open: bool) -> dict[str, float]:
        """Return counts by all names; nothing is open while the tiers rest."""
        return {**dict.fromkeys(COUNTS, 0.0), **counts, "open": int(is_open and not self._is_shut)}

    def details(self) -> Mapping[str, TierDetails]:
        """Return details of the tiers in ``counts``. Any thread."""
        age_s, sizes = self._clock() - self._opened_at, (self.block_bytes, self._size)
        own_state = "off" if self._is_off else "degraded" if self._is_shut else "open"
        found = {"host": TierDetails(self.host.load_durations, {}, {}, {}, own_state, age_s, *sizes)}
        disk = self.disk
        if disk is not None:
            tier = disk.records
            found["disk"] = TierDetails(
                disk.promotions.load_durations,
                tier.missed(),
                tier.unstored(),
                tier.durations,
                disk.state if own_state == "open" else own_state,
                age_s,
                *sizes,
                tier.num_found,
                tier.num_foreign,
                tier.num_returned,
                self.host.totals["disk_timeouts"],
            )
        elif self._unusable is not None:
            found["disk"] = TierDetails(Durations(), state="unusable", age_s=age_s)
        for number in range(len(self._further.tiers)):
            found[self._further.name_of(number)] = TierDetails(
                Durations(), {}, {}, {}, own_state, age_s, *sizes
            )
        return found

    # --- inside

    def _open_disk(
        self, settings: TierSettings, storage: BlockStorage, fingerprint: str, num_ahead_rows: int
    ) -> DiskTier | None:
        from radixkv.tiers.disk.folder import DamagedMaster
        from radixkv.tiers.disk.identity import fingerprint_of
        from radixkv.tiers.disk.records import DiskRecords, DiskSettings
        from radixkv.tiers.disk.tier import DiskTier

        disk = settings.disk
        assert disk is not None
        with disk_errors(disk.folder, disk.num_bytes):
            try:
                tier = DiskRecords(
                    DiskSettings(
                        disk.folder,
                        disk.num_bytes,
                        self.memory.block_bytes,
                        segment_tokens=self._size,
                        fingerprint=fingerprint_of(
                            engine=fingerprint,
                            layout=repr(getattr(storage, "layout", storage.pool.geometry)),
                            device=storage.device.type,
                            torch=torch.__version__,
                        ),
                        awaits_generations=disk.awaits_generations,
                        scheme=settings.dtype,
                    ),
                    [disk.secret, *disk.previous_secrets],
                    files=disk.files,
                )
            except (OSError, DamagedMaster) as error:
                self._unusable = UnusableDisk(disk.folder, error)
                return None
        self.host.disk = found = DiskTier(
            tier,
            self.host.index,
            self.memory,
            self.host.fill,
            fleet_generation=lambda tenant: self._fleet_generation(tenant),
            num_blocks=self._num_blocks,
            bytes_per_s=disk.bytes_per_s,
            num_ahead_rows=num_ahead_rows,
            clock=self._clock,
        )
        return found

    @property
    def disk(self) -> DiskTier | None:
        """The disk, if there is one."""
        return self.host.disk

    def _run(self) -> None:
        """Let host memory do what was decided."""
        self.host.run()
        self._wake_if_storing()

    def _offer(self, offer: Offer, source: DeviceBlocks) -> None:
        self.host.offer(offer, source)
        self._wake_if_storing()

    def _wake_if_storing(self) -> None:
        """Let the thread look again soon while blocks are being stored, because the next ones follow."""
        if self.disk is not None and self.disk.demotions.num_running:
            self._has_work.set()

    def _scaled(self, tenant: Tenant) -> Tenant:
        num_entries = self.host.cache.config.num_blocks

        def part(blocks: int) -> int:
            return blocks * num_entries // self._num_blocks

        least = max(part(tenant.guaranteed_blocks), 1 if tenant.mode == "strict" else 0)
        most = None if tenant.max_blocks is None else max(part(tenant.max_blocks), least, 1)
        if tenant.mode == "strict" and most is not None:
            most = least
        return replace(
            tenant, guaranteed_blocks=least, max_blocks=most, max_pinned_blocks=0 if least == 0 else None
        )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """After an error or an interruption in here, undo what was decided and not done. A purge in between is none.

        It would be done with blocks that hold something else then.
        """
        is_done = False
        try:
            yield
            is_done = True
        except LeaseError:
            is_done = True
        except Exception:  # noqa: BLE001 whatever it is, requests go on without tiers
            _log.exception("an operation of the tiers below the cache failed; its tokens are computed")
        finally:
            if not is_done:
                self._undo()

    def _undo(self) -> None:
        """Undo what was decided and not done; after several errors rest. If even that fails, serve nothing any more."""
        now, is_undone = self._clock(), False
        self.host.count("errors")
        try:
            self.host.undo()
            is_undone = True
        except Exception:  # noqa: BLE001 whatever it is, requests go on without tiers
            _log.exception("the tiers below the cache can't go on: nothing is kept or loaded until a restart")
        finally:
            self._is_off |= not is_undone
        self._errors_at.append(now)
        if len(self._errors_at) == MOST_ERRORS and now - self._errors_at[0] <= ERRORS_S:
            self._errors_at.clear()
            self._rests_until = now + REST_S
            _log.error("the tiers below the cache failed %d times: they rest for %g s", MOST_ERRORS, REST_S)


refuse_copies(Ladder, "it holds memory, threads and files. Make another")


def tiers_below(
    config: CacheConfig,
    storage: BlockStorage | None,
    settings: TierSettings | None = None,
    fingerprint: str = "",
    *,
    clock: Clock = monotonic,
) -> Ladder:
    """Return the tiers below a cache with this configuration, storage and clock; without ``settings``, those it names.

    Raises ConfigError without a storage, and as Ladder.
    """
    if storage is None:
        allowed = "0 without a layout or a storage: the cache must copy the blocks"
        raise ConfigError("host_blocks", config.host_blocks, allowed)
    return Ladder(
        storage,
        settings or TierSettings(0, None, config.host_blocks, config.tier_dtype),
        fingerprint,
        policy=config.policy,
        always_scrubs=config.scrub == "always",
        policy_clock=clock,
    )


def _evict_ahead(tiers: weakref.ref[Ladder], stop: threading.Event, has_work: threading.Event) -> None:
    """Evict ahead and zero slots when there is work, as long as the tiers are there and aren't closed."""
    while not stop.wait(_BUSY_TICK_S):
        has_work.wait()
        has_work.clear()
        found = tiers()
        if found is None:
            return
        found._tick_safely()
        del found


def _memory(storage: BlockStorage, settings: TierSettings) -> tuple[HostBlocks, int]:
    """Return the host memory for a storage's blocks, and its rows for what comes before anybody waits for it."""
    codec, tensors = None, _tensors_of(storage)
    block_bytes = sum(bytes_of_row(each[0]) for each in tensors.values())
    if settings.dtype != "exact":
        codec = LossyCodec(storage.pool, settings.dtype)
        block_bytes = codec.record_bytes
    num_slots = _num_slots(settings, block_bytes)
    num_rows, num_ahead = (
        max(min(num_slots // 4, most), 1) if settings.disk is not None or settings.further else 0
        for most in (MAX_STAGED_BLOCKS, AHEAD_ROWS)
    )
    if codec is None:
        memory = HostBlocks(num_slots, tensors, storage.num_blocks, num_staging=num_rows + num_ahead)
    else:
        memory = LossyBlocks(num_slots, codec, storage.num_blocks, num_staging=num_rows + num_ahead)
    return memory, num_ahead


def _num_slots(settings: TierSettings, block_bytes: int) -> int:
    blocks, physical = settings.host_blocks, physical_bytes()
    name, value = ("host_blocks", blocks) if blocks else ("host_memory", settings.host_bytes)
    wanted = blocks * block_bytes or settings.host_bytes
    if wanted > physical:
        raise ConfigError(name, value, f"at most what the machine has, {physical:,} bytes")
    if not 2 <= wanted // block_bytes <= MAX_SLOTS:
        least, most = 2 * block_bytes, MAX_SLOTS * block_bytes
        raise ConfigError(name, value, f"2 to {MAX_SLOTS:,} blocks, {least:,} to {most:,} bytes")
    return wanted // block_bytes


def _tensors_of(storage: BlockStorage) -> dict[str, torch.Tensor]:
    """Return the tensors that hold a storage's blocks, by blocks."""
    pool = storage.pool
    if pool.storage is not None:
        return {"kv": pool.storage}
    layers, sides = range(pool.num_layers), range(pool.planes_per_layer)
    return {f"{layer}.{side}": pool.plane(layer, side) for layer in layers for side in sides}
