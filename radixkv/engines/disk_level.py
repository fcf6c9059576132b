"""The disk below the second level: saved blocks are kept in a folder, and come back after an eviction or a restart.

    a request asks what could be loaded     is_waiting   promotes what the disk has: disk → staging → slot
    a step's blocks are saved               note_saved   stores them when the disk has time: slot → disk
    a step begins                           begin_step   stores what waits, ends what is over
    a worker filled slots                   filled       their staging memory is free again
    a purge, a reset                        purge, reset the keys of the records are destroyed

The scheduler's thread uses it, except for ``purge``. Only threads of the tier wait for the disk. A block is one record.

**Promotion.** The records are read into staging memory, which no step of a worker touches. When they are proven, the
worker copies them into slots in its own order, behind the zeroing of these slots. A promotion that is cut off, purged
or refused leaves nothing. Its tokens are computed.

**Single flight.** A request waits if another one's promotion brings its next block. It also waits if staging memory is
short. Both waits are at most ``LEAST_WAIT_S``. If the block comes ahead, the request uses what is there and reads on
itself.

**Hardly slower than computing.** A request waits at most for ``PATIENCE`` of the time that computing its tokens would
take, at least ``LEAST_WAIT_S`` and at most ``MOST_WAIT_S``. That time is the median of the last samples, so a few slow
ones don't count. If the disk needs longer, what has come is used, and the disk rests: no request asks it for ``REST_S``
seconds. Each further time in a row doubles the rest, up to ``MOST_REST_S``.

**Shares.** Tenants that asked in the last ``SHARED_S`` seconds have equal shares of three quarters of the staging rows.
The last quarter is for one that comes, so it finds rows, whatever the others do.

**A write budget**, if there is one, chooses among them (``write_budget``). It is asked when blocks are saved, and again
when a later prompt finds them in memory.

**Stores** go on behind the requests. While the disk has free slots, or a write budget, a block is stored soon after it
was saved. It waits without a lease: if it is evicted first, it is not stored. A full disk stores a block when it leaves
host memory, so the two hold different blocks. Its slot stays taken until then; ``LEAVING_PART`` bounds how many do.
What leaves beyond that is not stored. A block that is being stored needs its slot until a thread has encrypted it, and
gives it back after ``STORE_S`` in any case. At most an eighth of the slots are needed so. So the disk takes as much as
it can write, and never holds up host memory, even if it hangs.

**Weights.** Version 0 is what the engine loaded at its start; the fingerprint of the records says what that is. A later
version gets a random number, so nothing of it is found after a restart.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from xxhash import xxh3_128

from radixkv.clock import Clock, monotonic
from radixkv.config import MAX_WEIGHTS, Namespace
from radixkv.engines.host_blocks import Slots
from radixkv.engines.host_index import ONE_MORE, HostIndex
from radixkv.errors import CapacityError, LeaseError, TierError
from radixkv.index.engine_blocks import own_room
from radixkv.index.load_target import paths_of
from radixkv.index.sequence import Sequence as Held
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.tiers.disk_tier import DiskTier
from radixkv.tiers.io_threads import IOThreads, Job
from radixkv.tiers.write_budget import Point, WriteBudget, kind_of, point_positions

PATIENCE: Final = 0.5
"""Share of the time that computing would take, for which a request waits for the disk."""
LEAST_WAIT_S: Final = 0.1
MOST_WAIT_S: Final = 2.0
SHARED_S: Final = 5.0
"""For so long a tenant that asked for staging memory has its share of it."""
STORE_S: Final = 5.0
"""The longest time for which a block that is being stored needs its slot."""
Need: TypeAlias = Literal["waits", "announced", "asked"]
"""Why something comes: a request waits for it, an announced one will, or somebody asked where to send it."""
AHEAD_S: Final = 2.0
"""The longest time for a part of what comes before anybody waits for it."""
REST_S: Final = 30.0
MOST_REST_S: Final = 960.0
LEAVING_PART: Final = 64
"""Over a full disk, one of so many slots of host memory is free or waits to be stored."""
CLOSING_S: Final = 10.0
"""The longest time for which ``close`` stores what waits."""
MAX_WAITING_STORES: Final = 4_096
"""Saved ranges that may wait for the disk. The oldest are dropped."""
MAX_STORES: Final = 64
"""Blocks that are stored at once; at most an eighth of the slots, at least one."""
FIRST_SECONDS_A_TOKEN: Final = 1e-4
"""Taken for the time to compute a token, before steps were measured."""
MOST_SECONDS_A_TOKEN: Final = 0.1
"""A sample above that is no measure of computing: something held it up."""
NUM_SAMPLES: Final = 15
LEARNING_S: Final = 0.1
"""The longest time for which a request waits until the folder has applied its tenant's purges."""
PAY_AGAIN_S: Final = 5.0
"""Seconds until the keys of a purged tenant are destroyed again, if that failed. The same for a fleet's store."""
_MAX_KNOWN: Final = 65_536
_COUNTS: Final = (
    "disk_loaded_blocks",
    "disk_failed_blocks",
    "disk_timeouts",
    "disk_unstored_blocks",
    "disk_unchosen_blocks",
    "disk_load_us",
    "disk_loads",
)
_POLL_S: Final = 0.001
_ADMIN_S: Final = 0.5
"""The shortest time for which ``close`` waits for a purge or a reset that runs."""

_log = logging.getLogger(__name__)


class HostMemory(Protocol):
    """The memory of the worker: its slots, and ``num_staging`` rows of the same size."""

    num_staging: int

    def slot_bytes(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""

    def staging_bytes(self, row: int) -> memoryview:
        """Return the bytes of a row of staging memory."""


@dataclass(slots=True)
class _Promotion:
    """Records on their way from the disk, for the blocks of ``sequence`` from ``start`` on. ``key``: of all blocks."""

    namespace: Namespace
    generation: int
    key: bytes
    sequence: Held
    start: int
    rows: list[int]
    jobs: list[Job]
    began_at: float
    ends_at: float
    need: Need
    is_dropped: bool = False


class _Saved(NamedTuple):
    """Blocks ``[first, stop)`` of a prompt that are in slots, and not yet on the disk."""

    namespace: Namespace
    generation: int
    key: bytes
    first: int
    stop: int


class _Leaving(NamedTuple):
    """Slots of blocks of a prompt from ``first`` on, which host memory has evicted.

    ``known``: the generations that the folder knew. ``since``: its purges of the tenant.
    """

    namespace: Namespace
    key: bytes
    first: int
    slots: Slots
    known: tuple[int, int]
    since: int


@dataclass(slots=True)
class _Store:
    """Blocks that are being stored. ``slots``: in use until the threads have their bytes; none then.

    ``has_left``: whether host memory has evicted them.
    """

    slots: Slots
    has_left: bool
    began_at: float
    jobs: list[Job] = field(default_factory=list)


_FAILED: Final = Job(lambda job, memory: False)
_FAILED.end(False)


class DiskLevel:
    """Promotes and stores the blocks of ``index`` by ``tier``, whose segments are blocks.

    - ``memory``: the slots' bytes. ``fill``: makes the worker copy rows of staging memory into slots, in this step.
    - ``fleet_generation``: returns the newest generation of a tenant that its salts have shown.
    - ``serves``: whether a tenant's blocks may be on the disk.
    - ``bytes_per_s``: the most that is written on average; None for no bound.
    - ``num_ahead_rows``: rows of the memory for what comes before anybody waits for it.

    It closes the tier. Raises nothing that the disk does.
    """

    def __init__(
        self,
        tier: DiskTier,
        index: HostIndex,
        memory: HostMemory,
        fill: Callable[[Slots, Slots], None],
        *,
        fleet_generation: Callable[[str], int] = lambda tenant: 0,
        serves: Callable[[str], bool] = lambda tenant: True,
        bytes_per_s: float | None = None,
        num_ahead_rows: int = 0,
        clock: Clock = monotonic,
    ) -> None:
        self.tier, self._clock = tier, clock
        self._index, self._cache, self._memory, self._fill = index, index.cache, memory, fill
        self._fleet_generation, self._serves = fleet_generation, serves
        self._size, self._record_bytes = self._cache.config.block_size, tier.settings.record_bytes
        self._num_rows = memory.num_staging - num_ahead_rows
        self._free_rows = list(range(self._num_rows))
        self._free_ahead = list(range(self._num_rows, memory.num_staging))
        self._holder_of = [""] * memory.num_staging
        self._num_held: Counter[str] = Counter()
        """Staging rows of tenants, those for what comes ahead excepted."""
        self._asked_at: dict[str, float] = {}
        """When tenants asked for staging memory, the latest last."""
        self._filling: dict[int, list[int]] = {}
        self._filled_now: list[int] = []
        self._promotions: dict[str, _Promotion] = {}
        self._asked: set[str] = set()
        self._queued: dict[str, float] = {}
        """Until when a request waits for others' promotions, before its own begins."""
        self._waiting: deque[_Saved] = deque()
        self._stores: list[_Store] = []
        self._leaving: deque[_Leaving] = deque()
        self._num_leaving, self._most_leaving = 0, max(index.num_slots // LEAVING_PART, 1)
        self._most_stores = min(MAX_STORES, max(index.num_slots // 8, 1))
        index.watch(self._leave, lambda: index.num_slots // LEAVING_PART if self._stores_later else 0)
        self._known: dict[str, tuple[int, int]] = {}
        """The generations, of the cache and of the salts, for which the folder is known to be up to date."""
        self._learning: dict[str, tuple[Job, float]] = {}
        self._owed: dict[str, int] = {}
        """Tenants whose records must be destroyed, and a number of the last call that asked for it."""
        self._num_owed, self._owing = 0, threading.Lock()
        self._pays_at = self._meets_at = clock()
        self._problems: dict[str, str] = {}
        """Why tenants are still owed."""
        self._meeting: Job | None = None
        self._admin = IOThreads(1, 1)
        self._must_reset = self._is_closing = False
        self._resetting: Job | None = None
        self._weights = {0: 0}
        self._rests_until, self._rest_s = clock(), REST_S
        self._seconds_a_token = FIRST_SECONDS_A_TOKEN
        self._samples = deque([FIRST_SECONDS_A_TOKEN] * 2, maxlen=NUM_SAMPLES)
        self._budget = None if bytes_per_s is None else WriteBudget(bytes_per_s, tier.num_slots)
        self.budget_bytes = 0
        """What the budget had left when it was last asked."""
        self._computing: dict[int, tuple[float, int]] = {}
        self._brought: Counter[str] = Counter()
        self.counts = dict.fromkeys(_COUNTS, 0)

    # --- requests

    def is_waiting(
        self,
        request_id: str,
        namespace: Namespace,
        generation: int,
        key: bytes,
        num_local: int,
        *,
        need: Need = "waits",
    ) -> bool:
        """Whether a request waits for the disk: ask again. The first call begins a promotion, the last one ends it.

        One that needs more rows of staging memory than are free comes in parts. ``need``: a request that is to come
        takes neither rows nor threads from those that wait. One that was only asked about takes no slots from other
        tenants beyond its own one's guarantee, and the write budget hears only of what the disk had of it.
        ``key``: whole blocks. ``num_local``: tokens that the engine has itself. Never waits. Costs a hash of the key,
        once a request.
        """
        promotion = self._promotions.get(request_id)
        is_new = promotion is None and request_id not in self._queued
        if promotion is not None:
            if self._clock() < promotion.ends_at and not all(job.is_done for job in promotion.jobs):
                return True
            del self._promotions[request_id]
            stop = self._end(request_id, promotion)
            if not stop or self._index.reach(namespace, key, promotion.start) < stop:
                return False
            self._asked.discard(request_id)  # more of it may be there
        if request_id in self._asked:
            return False
        if self.place_of(namespace) is None:
            self._asked.add(request_id)
            return False
        if not self.is_known(namespace.tenant) and self._clock() < self._learning[namespace.tenant][1]:
            return True
        if not self.is_known(namespace.tenant):
            self._asked.add(request_id)
            if need == "waits":
                self._rest()
            return False
        first = self._index.reach(namespace, key, num_local // self._size)
        if need == "waits" and self._take_over(namespace, key, first):
            first = self._index.reach(namespace, key, num_local // self._size)
        if self._budget is not None and is_new and need != "asked":
            self._tell_budget(self._budget, namespace, generation, key, first)
        is_queued = (
            self._is_queued(request_id, namespace, key, first) if need == "waits" else not self._free_ahead
        )
        if is_queued:
            return True
        self._asked.add(request_id)
        if need == "asked" and self._bringing(namespace, key, first):
            return False  # a request for it has come
        return self._begin(request_id, namespace, generation, key, first, num_local, need)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; what comes from the disk for it is dropped."""
        self._asked.discard(request_id)
        self._queued.pop(request_id, None)
        self.take_brought(request_id)
        promotion = self._promotions.pop(request_id, None)
        if promotion is not None:
            self._drop(promotion)

    def take_brought(self, request_id: str) -> int:
        """Return how many blocks came from the disk for a request since the last call."""
        return self._brought.pop(request_id, 0)

    def num_brought(self, request_id: str) -> int:
        """Return what ``take_brought`` will return."""
        return self._brought[request_id]

    @property
    def num_running(self) -> int:
        """Promotions, stores, and steps that fill slots, which haven't ended."""
        return len(self._promotions) + len(self._stores) + len(self._filling)

    @property
    def is_resting(self) -> bool:
        """Whether no request asks the disk for a while, because it was slower than computing."""
        return self._clock() < self._rests_until

    @property
    def has_budget(self) -> bool:
        """Whether a write budget chooses what is stored."""
        return self._budget is not None

    @property
    def num_waiting(self) -> int:
        """Saved prompts that wait to be stored."""
        return len(self._waiting)

    # --- single records, for ``RecordReader``

    def place_of(self, namespace: Namespace) -> Namespace | None:
        """Return the namespace of the records of one; None if the disk isn't to be asked for it now."""
        is_shut = namespace.tenant in self._owed or not self._serves(namespace.tenant)
        is_shut |= self.is_resting or self.tier.state != "open" or self._is_resetting()
        return None if is_shut else self._on_disk(namespace)

    def located(self, namespace: Namespace, key: bytes, first: int) -> int:
        """Return how many blocks of a prompt in a row, from ``first`` on, could be read. Tells the budget."""
        if self._budget is not None:
            self._tell_budget(self._budget, namespace, self._cache.generation(namespace.tenant), key, first)
        return self.tier.locate(self._on_disk(namespace), key, first)

    def may_have(self, namespace: Namespace, key: bytes) -> bool:
        """Whether the last block of a key may be found. True if that isn't known, or a budget must hear of it."""
        place = self.place_of(namespace)
        if place is None:
            return False
        if self._budget is not None or not self.is_known(namespace.tenant):
            return True
        return self.tier.locate(place, key, len(key) // (self._size * TOKEN_BYTES) - 1, 1) > 0

    def read(self, place: Namespace, key: bytes, block: int, row: int) -> Job | None:
        """Begin to read a record into a row of staging memory. None if the disk refuses."""
        return self.tier.load(place, key, block, self._memory.staging_bytes(row))

    def take_row(self, tenant: str) -> int | None:
        """Return a free row of staging memory; None without one, or if the tenant has its share."""
        return self._held(self._free_rows.pop(), tenant) if self.num_rows_for(tenant) else None

    @property
    def num_free_rows(self) -> int:
        """Free rows of staging memory, for what somebody waits for."""
        return len(self._free_rows)

    def num_rows_for(self, tenant: str) -> int:
        """Return how many rows of staging memory a tenant may take now. O(tenants that asked lately)."""
        now = self._clock()
        self._asked_at.pop(tenant, None)
        self._asked_at[tenant] = now
        while self._asked_at[first := next(iter(self._asked_at))] < now - SHARED_S:
            del self._asked_at[first]
        share = max((self._num_rows - self._num_rows // 4) // len(self._asked_at), 1)
        return min(max(share - self._num_held[tenant], 0), self.num_free_rows)

    def _held(self, row: int, tenant: str) -> int:
        self._holder_of[row] = tenant
        self._num_held[tenant] += 1
        return row

    def give_row(self, row: int) -> None:
        """Zero a row, and take it back."""
        self._memory.staging_bytes(row)[:] = bytes(len(self._memory.staging_bytes(row)))
        self._take_back([row])

    @property
    def num_used_rows(self) -> int:
        """Rows of staging memory that aren't free."""
        return self._memory.num_staging - len(self._free_rows) - len(self._free_ahead)

    def patience_s(self, num_tokens: int) -> float:
        """Return for how long a request may wait for so many tokens."""
        return max(min(PATIENCE * self._seconds_a_token * num_tokens, MOST_WAIT_S), LEAST_WAIT_S)

    def read_ended(self, is_good: bool) -> None:
        """Count a record that was read for one request."""
        self.counts["disk_loaded_blocks" if is_good else "disk_failed_blocks"] += 1

    def load_ended(self, seconds: float) -> None:
        """Count a request's load, and how long it took."""
        self.counts["disk_loads"] += 1
        self.counts["disk_load_us"] += int(seconds * 1e6)

    def rested(self, *, is_slow: bool) -> None:
        """Leave the disk alone for a while, because it was slower than computing; or take that it was fast."""
        if is_slow:
            self._rest()
        else:
            self._rest_s = REST_S

    # --- steps

    def begin_step(self, step: int, num_tokens: int | None) -> None:
        """Begin a step, which computes ``num_tokens`` tokens: store what waits, and end stores that are over.

        A step without tokens waits a moment for the disk. None: it doesn't, and isn't measured (``computed_in``).
        """
        if num_tokens is not None and num_tokens >= self._size:
            self._computing[step] = self._clock(), num_tokens
        if self._filled_now:
            self._filling[step] = self._filled_now
            self._filled_now = []
        self.retry()
        self._end_stores()
        self._begin_stores()
        self.tier.maintain()
        if num_tokens == 0 and self._promotions:
            next(iter(self._promotions.values())).jobs[0].poll(_POLL_S)

    def computed(self, steps: Iterable[int]) -> None:
        """Take that these steps have ended: they tell how long computing takes."""
        for step in steps:
            began, num_tokens = self._computing.pop(step, (0.0, 0))
            if num_tokens:
                self.computed_in(self._clock() - began, num_tokens)
                self._computing = {later: each for later, each in self._computing.items() if later > step}

    def computed_in(self, seconds: float, num_tokens: int) -> None:
        """Take that so many tokens took so many seconds to compute."""
        if num_tokens >= self._size and 0 <= seconds <= MOST_SECONDS_A_TOKEN * num_tokens:
            self._samples.append(seconds / num_tokens)
            self._seconds_a_token = median(self._samples)

    def filled(self, steps: Iterable[int]) -> None:
        """Take that the worker has filled the slots of these steps."""
        for step in steps:
            self._take_back(self._filling.pop(step, ()))

    def undo(self) -> None:
        """Take that no worker fills slots any more."""
        rows = [*self._filled_now, *(row for each in self._filling.values() for row in each)]
        self._filled_now, self._filling = [], {}
        for row in rows:
            self.give_row(row)

    def _take_back(self, rows: Iterable[int]) -> None:
        for row in rows:
            (self._free_rows if row < self._num_rows else self._free_ahead).append(row)
            if row < self._num_rows:
                tenant = self._holder_of[row]
                self._num_held[tenant] -= 1
                if not self._num_held[tenant]:
                    del self._num_held[tenant]

    def note_saved(self, namespace: Namespace, generation: int, key: bytes, first: int, stop: int) -> None:
        """Store blocks ``[first, stop)`` of a prompt, which are committed, when the disk has time."""
        if not self._serves(namespace.tenant) or self._stores_later:
            return
        self._wait_to_store(_Saved(namespace, generation, key, first, stop))
        self._begin_stores()

    def choose(
        self,
        namespace: Namespace,
        generation: int,
        key: bytes,
        first: int,
        entries: Slots,
        *,
        is_used: bool = False,
    ) -> None:
        """Let the budget choose blocks of a prompt from ``first`` on, with these entries, when they become known.

        What is chosen is stored when host memory has its bytes. O(a hash of the key).
        """
        if self._budget is None or not len(entries):
            return
        stop = len(key) // (self._size * TOKEN_BYTES)
        kind = kind_of(is_used=is_used, continues=is_used or first > 0, num_blocks=stop)
        points = self._points(namespace, generation, key, first, first + len(entries))
        num_bytes = len(entries) * self._record_bytes
        if self._budget.offered(namespace.tenant, kind, points, len(entries), num_bytes, self._clock()):
            self._index.choose(entries)
        else:
            self.counts["disk_unchosen_blocks"] += len(entries)

    # --- purges

    def purge(self, tenant: str) -> None:
        """Destroy the keys of a tenant's records. Waits for the disk: by any thread but the scheduler's.

        Raises TierError or OSError: then repeat it. The tenant's records are not served meanwhile.
        """
        self._known.pop(tenant, None)
        self.tier.purge(tenant)

    def owe(self, tenant: str) -> None:
        """Serve nothing of a tenant, and destroy the keys of its records as soon as the disk can. By any thread."""
        with self._owing:
            self._num_owed += 1
            self._owed[tenant] = self._num_owed

    def pay(self, tenant: str, timeout_s: float) -> bool:
        """Destroy the keys of a tenant that ``owe`` named. Returns whether that was done in this time; else it is
        repeated until it is."""
        job = self.begin_to_pay(tenant)
        if job is not None:
            job.poll(timeout_s)
        return tenant not in self._owed

    def begin_to_pay(self, tenant: str) -> Job | None:
        """Do the same without waiting. The job ends when it was done or has failed; None if the disk hangs."""
        return self._admin.submit(lambda job, memory: self._paid(tenant), is_load=True)

    @property
    def owed(self) -> frozenset[str]:
        """Tenants whose records may still be on the disk, though they were purged or cleared. None is served."""
        with self._owing:
            return frozenset(self._owed)

    def problem(self, tenant: str) -> str:
        """Return why an owed tenant isn't paid yet."""
        return self._problems.get(tenant, "the disk doesn't answer")

    def retry(self) -> None:
        """Begin again what failed, if it is time: a reset, and what is owed. Never waits."""
        self._reset_if_due()
        self._pay_if_due()

    def follows(self, store_id: str) -> bool:
        """Whether the folder knows that the fleet's purges come from this store; empty: from none. Never waits.

        If not, a thread lets it forget what another store's purges were to destroy (``DiskTier.meet_store``).
        """
        if not store_id or self.tier.store_id == store_id:
            return True
        is_meeting = self._meeting is not None and not self._meeting.is_done
        if not is_meeting and self._clock() >= self._meets_at:
            self._meets_at = self._clock() + PAY_AGAIN_S
            self._meeting = self._admin.submit(lambda job, memory: self._met(store_id), is_load=True)
        return False

    def _met(self, store_id: str) -> bool:
        try:
            self.tier.meet_store(store_id)
        except (OSError, TierError) as error:
            _log.error("the disk can't forget what it knew from another store, and stays closed: %s", error)
            return False
        return True

    def reset(self) -> None:
        """Forget all records, in a thread. Until that is done, the disk is closed to everybody."""
        for promotion in list(self._promotions.values()):
            for job in promotion.jobs:
                job.cancel()
        self._waiting.clear()
        self._must_reset = True
        self._reset_if_due()

    def know_generations(self) -> None:
        """Serve from now on: all purges of the fleet are known, by ``fleet_generation``."""
        self.tier.apply_generations({})

    def close(self, give_all: Callable[[Callable[[], bool]], None] | None = None) -> None:
        """Store what host memory has, for at most ``CLOSING_S``, sync, and give the folder back.

        ``give_all``: saves what lies above host memory until its argument is true; called when the rest is stored.
        ``owed`` stays as it is then.
        """
        for request_id in list(self._promotions):
            self.forget(request_id)
        ends_at = self._clock() + CLOSING_S
        for tenant in self.owed:
            self.pay(tenant, max(ends_at - self._clock(), 0.0))
        self._is_closing = True
        self._waiting.extend(self._unsaved())
        self._finish(ends_at)
        if give_all is not None and self.tier.state == "open":
            give_all(lambda: self._is_finished_by(ends_at))  # each may take the slots of the one before
            self._finish(ends_at)
        self._waiting.clear()
        is_idle = self._admin.close(max(ends_at - self._clock(), _ADMIN_S))
        self.tier.close(is_in_use=not is_idle)
        for store in self._stores:
            self._free_slots(store)
        self._stores = []
        self._give_up_leaving()

    def _unsaved(self) -> Iterator[_Saved]:
        """Return all that host memory has, and that the budget has chosen if there is one."""
        for namespace, key, entries in paths_of(self._cache):
            if not self._serves(namespace.tenant):
                continue
            generation = self._cache.generation(namespace.tenant)
            for first, stop in self._index.filled_ranges(entries):
                its = entries[first:stop]
                for start, end in self._index.chosen(its) if self.has_budget else [(0, len(its))]:
                    yield _Saved(namespace, generation, key, first + start, first + end)

    def _is_finished_by(self, ends_at: float) -> bool:
        """Store what waits until then. Returns whether the time is over."""
        self._finish(ends_at)
        return self._clock() >= ends_at

    def _finish(self, ends_at: float) -> None:
        """Store what waits until then."""
        while (self._waiting or self._stores or self._leaving) and self._clock() < ends_at:
            if self.tier.state != "open":
                return
            for store in self._stores:
                for job in store.jobs:
                    job.poll(ends_at - self._clock())
            self._end_stores()
            self._begin_stores()

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        taken, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return taken

    # --- promotion

    def _is_queued(self, request_id: str, namespace: Namespace, key: bytes, first: int) -> bool:
        """Whether others' promotions bring block ``first`` too, or hold the staging memory; for a short time."""
        if not self._promotions and not self._filling and not self._filled_now:
            return False
        is_coming = bool(self._bringing(namespace, key, first))
        num_free = self.num_rows_for(namespace.tenant)
        has_rows = len(self._free_rows) == self._num_rows or (
            self.tier.locate(self._on_disk(namespace), key, first, num_free + 1) <= num_free
        )
        if not is_coming and has_rows:
            return False
        return self._clock() < self._queued.setdefault(request_id, self._clock() + LEAST_WAIT_S)

    def _bringing(self, namespace: Namespace, key: bytes, block: int, *, is_ahead: bool = False) -> list[str]:
        """Return whose promotions bring this block of a prompt: of requests that wait, or of those to come."""
        num_bytes = (block + 1) * self._size * TOKEN_BYTES
        return [
            request_id
            for request_id, each in self._promotions.items()
            if (each.need != "waits") == is_ahead
            and each.namespace == namespace
            and len(each.key) >= num_bytes
            and each.key[:num_bytes] == key[:num_bytes]
        ]

    def _take_over(self, namespace: Namespace, key: bytes, first: int) -> bool:
        """Use what has come ahead for a request that waits now: it reads the rest for itself, before all others' ahead.

        Returns whether something was coming.
        """
        ahead = self._bringing(namespace, key, first, is_ahead=True)
        for request_id in ahead:
            self._end(request_id, self._promotions.pop(request_id))
        return bool(ahead)

    def _begin(
        self,
        request_id: str,
        namespace: Namespace,
        generation: int,
        key: bytes,
        first: int,
        num_local: int,
        need: Need,
    ) -> bool:
        on_disk, tenant, waits = self._on_disk(namespace), namespace.tenant, need == "waits"
        num = self.tier.locate(
            on_disk, key, first, self.num_rows_for(tenant) if waits else len(self._free_ahead)
        )
        if (first + num) * self._size <= max(num_local, first * self._size):
            return False
        try:
            if need == "asked":
                with self._cache.match_and_lease(namespace, key):
                    num = own_room(self._cache, namespace.tenant, num)
                    num = self._index.own_room(namespace.tenant, num)
            if not num:
                return False
            stop = first + num
            key = key[: stop * self._size * TOKEN_BYTES]
            is_known = self._cache.match(namespace, key).num_blocks == stop  # then all of it is to be matched
            sequence = self._cache.open(namespace, key + ONE_MORE if is_known else key)
        except (CapacityError, LeaseError):
            return False
        now = self._clock()
        ends_at = now + (self.patience_s(num * self._size) if waits else AHEAD_S)
        promotion = _Promotion(namespace, generation, key, sequence, first, [], [], now, ends_at, need)
        with self._dropped_after_error(promotion):
            for block in range(first, stop):
                row = self._held(self._free_rows.pop(), tenant) if waits else self._free_ahead.pop()
                promotion.rows.append(row)
                memory = self._memory.staging_bytes(row)
                job = self.tier.load(on_disk, key, block, memory, is_awaited=waits)
                if job is None:
                    self.give_row(promotion.rows.pop())
                    break
                promotion.jobs.append(job)
            if not promotion.jobs:
                self._drop(promotion)
                return False
            self._promotions[request_id] = promotion
        return True

    def _end(self, request_id: str, promotion: _Promotion) -> int:
        """Use the leading records that are proven. Returns the position behind them if that is all; else 0."""
        with self._dropped_after_error(promotion):
            return self._used(request_id, promotion)

    def _used(self, request_id: str, promotion: _Promotion) -> int:
        self.load_ended(self._clock() - promotion.began_at)
        if all(job.is_done for job in promotion.jobs):
            self._rest_s = REST_S
        elif promotion.need == "waits":
            self._rest()
        num_good = next((at for at, job in enumerate(promotion.jobs) if not job.wait(0)), len(promotion.jobs))
        self.counts["disk_failed_blocks"] += len(promotion.jobs) - num_good
        is_current = self._cache.generation(promotion.namespace.tenant) == promotion.generation
        if not num_good or not is_current or self._is_resetting():
            self._drop(promotion)
            return 0
        num_good = self._fill_slots(promotion, num_good)
        self._drop(promotion)
        if not num_good:
            return 0
        self.counts["disk_loaded_blocks"] += num_good
        self._brought[request_id] += num_good
        stop = promotion.start + num_good
        if promotion.need == "asked" and self._budget is not None:
            namespace, generation = promotion.namespace, promotion.generation
            points = self._points(namespace, generation, promotion.key, promotion.start, stop)
            self._budget.asked(namespace.tenant, points)
        return stop if num_good == len(promotion.jobs) else 0

    def _fill_slots(self, promotion: _Promotion, num_good: int) -> int:
        """Let the worker copy the first records into slots. Returns how many of them are in slots then.

        The promotion loses the rows that it copies: not those of blocks that came otherwise.
        """
        stop = promotion.start + num_good
        try:
            if promotion.sequence.num_committed_tokens < stop * self._size:
                promotion.sequence.commit(stop * self._size)
        except LeaseError:  # purged a moment ago
            return 0
        key = promotion.key[: stop * self._size * TOKEN_BYTES]
        entries = self._cache.match(promotion.namespace, key).block_ids[promotion.start :].astype(np.int64)
        num_good = len(entries)
        at, tenant = self._index.lacking(entries), promotion.namespace.tenant
        if promotion.need == "asked":
            at = at[: self._index.own_room(tenant, len(at))]
        slots = self._index.give(tenant, entries[at], may_evict=True)
        used = at[: len(slots)].tolist()
        rows = [promotion.rows[each] for each in used]
        if rows:
            self._filled_now += rows
            promotion.rows[:] = [row for row in promotion.rows if row not in set(rows)]
            self._fill(slots, np.array(rows, np.int64))
            self._index.filled(entries[used])
        return self._index.num_filled(entries)

    def _drop(self, promotion: _Promotion) -> None:
        """Release a promotion, once. No job touches its memory any more."""
        for job in promotion.jobs:
            job.cancel()
        while promotion.rows:
            self.give_row(promotion.rows.pop())
        if not promotion.is_dropped:
            promotion.is_dropped = True
            promotion.sequence.release()

    @contextmanager
    def _dropped_after_error(self, promotion: _Promotion) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop(promotion)
            raise

    # --- stores

    def _end_stores(self) -> None:
        """Count stores that have ended. Free the slots of those whose bytes were taken, or should have been."""
        running, now = [], self._clock()
        for store in self._stores:
            if now - store.began_at >= STORE_S or not any(job.needs_memory for job in store.jobs):
                self._free_slots(store)
            if all(job.is_done for job in store.jobs):
                self.counts["disk_unstored_blocks"] += sum(not job.wait(0) for job in store.jobs)
            else:
                running.append(store)
        self._stores = running

    def _free_slots(self, store: _Store) -> None:
        """Free the slots of a store, once. A job that hasn't taken its bytes never does."""
        for job in store.jobs:
            if job.needs_memory:
                job.cancel()
        slots, store.slots = store.slots, store.slots[:0]
        self._index.unuse(slots)
        if store.has_left:
            self._num_leaving -= len(slots)

    def _leave(self, namespace: Namespace, key: bytes, first: int, slots: Slots) -> None:
        """Keep slots whose entries are evicted until they are stored. Under the lock of host memory's index."""
        tenant = namespace.tenant
        known = self._known.get(tenant)
        is_shut = not self._stores_later or not self._serves(tenant) or tenant in self._owed
        if is_shut or known is None or self._is_resetting() or self.tier.state != "open":
            return
        kept = slots[: self._most_leaving - self._num_leaving]
        self.counts["disk_unstored_blocks"] += len(slots) - len(kept)
        if len(kept):
            leaving = _Leaving(namespace, key, first, kept, known, self.tier.num_purges(tenant))
            self._index.use(kept)
            self._num_leaving += len(kept)
            self._leaving.append(leaving)

    @property
    def _stores_later(self) -> bool:
        """Whether blocks are stored when they leave host memory, and not before."""
        return self._budget is None and self.tier.is_full and not self._is_closing

    def _store_leaving(self, most: int) -> int:
        """Begin to store up to ``most`` blocks that have left host memory. Returns how many."""
        num = 0
        while self._leaving and num < most:
            leaving = self._leaving.popleft()
            tenant = leaving.namespace.tenant
            if self._is_resetting() or not self.is_known(tenant) or self._known.get(tenant) != leaving.known:
                self._give_up(leaving)
                continue
            now, later = leaving.slots[: most - num], leaving.slots[most - num :]
            if len(later):
                self._leaving.appendleft(leaving._replace(first=leaving.first + len(now), slots=later))
            on_disk, store = self._on_disk(leaving.namespace), _Store(now, True, self._clock())
            self._stores.append(store)
            there = self.tier.locate(on_disk, leaving.key, leaving.first, len(now))
            for at, slot in enumerate(now[there:].tolist(), leaving.first + there):
                content = self._memory.slot_bytes(slot)
                job = self.tier.store(on_disk, leaving.key, at, content, since=leaving.since)
                if job is not None:
                    store.jobs.append(job)
            num += len(now)
        return num

    def _give_up(self, leaving: _Leaving) -> None:
        self.counts["disk_unstored_blocks"] += len(leaving.slots)
        self._free_slots(_Store(leaving.slots, True, 0.0))

    def _give_up_leaving(self) -> None:
        """Free the slots of all that has left host memory and isn't being stored."""
        while self._leaving:
            self._give_up(self._leaving.popleft())

    def _wait_to_store(self, saved: _Saved) -> None:
        if len(self._waiting) >= MAX_WAITING_STORES:
            dropped = self._waiting.popleft()
            self.counts["disk_unstored_blocks"] += dropped.stop - dropped.first
        self._waiting.append(saved)

    def _begin_stores(self) -> None:
        most = self._most_stores
        num_running = sum(len(store.slots) for store in self._stores)
        if self._leaving and self.tier.state != "open":
            self._give_up_leaving()
        elif self._leaving:
            num_running += self._store_leaving(most - num_running)
        while self._waiting and num_running < most and self.tier.state == "open":
            saved = self._waiting.popleft()
            if self._is_resetting() or not self._is_current(saved) or saved.namespace.tenant in self._owed:
                self.counts["disk_unstored_blocks"] += saved.stop - saved.first
                continue
            if not self.is_known(saved.namespace.tenant):
                self._waiting.appendleft(saved)
                return
            stop = min(saved.stop, saved.first + most - num_running)
            num_stores = self._store(saved._replace(stop=stop))
            num_running += max(num_stores, 0)
            if num_stores < 0:
                self.counts["disk_unchosen_blocks"] += saved.stop - saved.first
            elif stop < saved.stop:
                self._waiting.appendleft(saved._replace(first=stop))

    def _store(self, saved: _Saved) -> int:
        """Begin to store blocks that are still here. Returns how many, or −1 if the budget has no bytes left."""
        on_disk = self._on_disk(saved.namespace)
        since = self.tier.num_purges(saved.namespace.tenant)
        if not self._is_current(saved) or saved.namespace.tenant in self._owed:
            return 0
        key = saved.key[: saved.stop * self._size * TOKEN_BYTES]
        there = self.tier.locate(on_disk, key, saved.first)
        entries = self._cache.match(saved.namespace, key).block_ids[saved.first + there : saved.stop]
        slots = self._index.filled_slots(entries)
        blocks = range(saved.first + there, saved.first + there + len(slots))
        if self._budget is not None and blocks:
            num_bytes = len(blocks) * self._record_bytes
            is_affordable = self._budget.spend(saved.namespace.tenant, num_bytes, self._clock())
            self.budget_bytes = int(self._budget.left_bytes())
            if not is_affordable:
                return -1
        store = _Store(slots, False, self._clock())
        self._index.use(slots)
        self._stores.append(store)
        for block, slot in zip(blocks, slots.tolist(), strict=True):
            content = self._memory.slot_bytes(slot)
            job = self.tier.store(on_disk, key, block, content, since=since)
            if job is None:
                break
            store.jobs.append(job)
        return len(store.jobs)

    # --- the write budget

    def _tell_budget(
        self, budget: WriteBudget, namespace: Namespace, generation: int, key: bytes, first: int
    ) -> None:
        """Tell that a prompt needs the blocks behind ``first``, and offer those before it, which it found in memory.

        O(a hash of the key).
        """
        num_blocks = len(key) // (self._size * TOKEN_BYTES)
        budget.asked(namespace.tenant, self._points(namespace, generation, key, first, num_blocks))
        if first and not self.tier.locate(self._on_disk(namespace), key, first - 1, 1):
            entries = self._cache.match(namespace, key).block_ids[:first].astype(np.int64)
            self.choose(namespace, generation, key, 0, entries, is_used=True)
            for start, stop in self._index.chosen(entries):
                self._wait_to_store(_Saved(namespace, generation, key, start, stop))

    def _points(
        self, namespace: Namespace, generation: int, key: bytes, first: int, stop: int
    ) -> list[Point]:
        """Return the points of a prompt in blocks ``(first, stop]``. O(a hash of the key)."""
        digest = xxh3_128(repr((namespace, generation)).encode())
        view, before, found = memoryview(key), 0, list[Point]()
        for at, num_blocks in point_positions(first, stop):
            end = at * self._size * TOKEN_BYTES
            digest.update(view[before:end])
            before = end
            found.append(Point(digest.digest(), num_blocks))
        return found

    # --- tenants

    def _is_current(self, saved: _Saved) -> bool:
        return self._cache.generation(saved.namespace.tenant) == saved.generation

    def is_known(self, tenant: str) -> bool:
        """Whether the folder has applied the tenant's purges. If not, a thread begins to, again if it failed.

        The time until which a request waits for it is that of the first try.
        """
        generations = self._cache.generation(tenant), self._fleet_generation(tenant)
        if self._known.get(tenant) == generations:
            self._learning.pop(tenant, None)
            return True
        job, ends_at = self._learning.get(tenant, (_FAILED, self._clock() + LEARNING_S))
        if job.is_done:
            learning = self._admin.submit(lambda job, memory: self._learn(tenant, generations), is_load=True)
            self._learning[tenant] = learning or _FAILED, ends_at
        return False

    def _learn(self, tenant: str, generations: tuple[int, int]) -> bool:
        """Purge the tenant in the folder, if it was purged in the cache or in the fleet since. In a thread."""
        before = self._known.get(tenant, (0, generations[1]))
        if before[0] < generations[0]:
            self.tier.purge(tenant)
        if generations[1]:
            self.tier.apply_generations({tenant: generations[1]})
        if len(self._known) >= _MAX_KNOWN:
            self._known = {}
        self._known[tenant] = generations
        return True

    def _paid(self, tenant: str) -> bool:
        """Destroy the keys of a tenant, in a thread. Returns whether that is done."""
        asked, generation = self._owed.get(tenant), self._cache.generation(tenant)
        if asked is None:
            return True
        try:
            self.tier.purge(tenant)
        except (OSError, TierError) as error:
            if self._problems.get(tenant) != str(error):
                _log.error("the disk can't forget tenant %r, which is tried again: %s", tenant, error)
            self._problems[tenant] = str(error)
            return False
        self._problems.pop(tenant, None)
        known = self._known.get(tenant)
        if known is not None:
            self._known[tenant] = generation, known[1]
        with self._owing:
            if self._owed.get(tenant) == asked:
                del self._owed[tenant]
        return True

    def _pay_if_due(self) -> None:
        """Try again what failed, once in ``PAY_AGAIN_S``. It queues behind a call that hangs."""
        if self._owed and self._clock() >= self._pays_at:
            self._pays_at = self._clock() + PAY_AGAIN_S
            for tenant in self.owed:
                self.pay(tenant, 0.0)

    def _is_resetting(self) -> bool:
        return self._must_reset or self._resetting is not None

    def _reset_if_due(self) -> None:
        """Begin a reset that is due, and end one that is over. One that failed is repeated."""
        if self._resetting is not None and self._resetting.is_done:
            self._must_reset |= not self._resetting.wait(0)
            self._resetting = None
        if self._must_reset and self._resetting is None:
            self._resetting = self._admin.submit(lambda job, memory: self.tier.purge_all(), is_load=True)
            self._must_reset = self._resetting is None

    def _rest(self) -> None:
        """Leave the disk alone for a while."""
        self.counts["disk_timeouts"] += 1
        self._rests_until = self._clock() + self._rest_s
        _log.warning("the disk is slower than computing: no request asks it for %g s", self._rest_s)
        self._rest_s = min(2 * self._rest_s, MOST_REST_S)

    def _on_disk(self, namespace: Namespace) -> Namespace:
        """Return the namespace of the records: later versions of the weights are of this process alone."""
        if namespace.weights not in self._weights:
            self._weights[namespace.weights] = 1 + secrets.randbelow(MAX_WEIGHTS)
        return namespace._replace(weights=self._weights[namespace.weights])
