"""Records on their way from a disk into slots of host memory, for requests that wait and prompts that come.

**Promotion.** The records are read into staging memory, which no step of a worker touches. When they are proven, the
worker copies them into slots in its own order, behind the zeroing of these slots. A promotion that is cut off, purged
or refused leaves nothing. Its tokens are computed.

**What is read is used.** Slots are reserved before the first read, and no more is read than these hold. What a request
waits for stays there until it has loaded it (``used``), or ends. Otherwise requests that need more than host
memory has would evict each other's blocks before they are loaded, and read them again.

**Single flight.** A request waits if another one's promotion brings its next block. It also waits if staging memory is
short. Both waits are at most ``LEAST_WAIT_S``. If the block comes ahead, the request uses what is there and reads on
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.errors import CapacityError, LeaseError
from radixkv.index.engine_blocks import own_room
from radixkv.index.sequence import Sequence as Held
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.tiers.disk.demotions import DiskDemotions
from radixkv.tiers.disk.durations import Durations
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.disk.patience import DiskPatience
from radixkv.tiers.disk.records import DiskRecords
from radixkv.tiers.host.index import ONE_MORE, HostIndex
from radixkv.tiers.host.memory import Slots
from radixkv.tiers.host.staging import StagingRows
from radixkv.tiers.pending import PendingPurges

Need: TypeAlias = Literal["waits", "announced", "asked"]
"""Why something comes: a request waits for it, an announced one will, or somebody asked where to send it."""
AHEAD_S: Final = 2.0
"""The longest time for a part of what comes before anybody waits for it."""
_NO_SLOTS: Final[Slots] = np.empty(0, np.int64)
_COUNTS: Final = ("disk_loaded_blocks", "disk_failed_blocks", "disk_load_us", "disk_loads")


@dataclass(slots=True)
class _Promotion:
    """Records on their way from the disk, for the blocks of ``sequence`` from ``start`` on.

    ``key``: of all blocks. ``num_purges``: of the tenant on this disk when it began. ``slots``: reserved for them.
    """

    namespace: Namespace
    generation: int
    num_purges: int
    key: bytes
    sequence: Held
    start: int
    slots: Slots
    rows: list[int]
    jobs: list[Job]
    began_at: float
    ends_at: float
    need: Need
    is_dropped: bool = False


class DiskPromotions:
    """Promotes the blocks of ``index`` that ``records`` have. ``fill``: see DiskTier."""

    def __init__(
        self,
        records: DiskRecords,
        index: HostIndex,
        fill: Callable[[Slots, Slots], None],
        rows: StagingRows,
        patience: DiskPatience,
        purges: PendingPurges,
        demotions: DiskDemotions,
        serves: Callable[[str], bool],
        clock: Clock,
    ) -> None:
        self._records, self._index, self._cache, self._fill = records, index, index.cache, fill
        self._rows, self._patience, self._purges, self._demotions = rows, patience, purges, demotions
        self._serves, self._clock, self._size = serves, clock, index.cache.config.block_size
        self._promotions: dict[str, _Promotion] = {}
        self._asked: set[str] = set()
        self._queued: dict[str, float] = {}
        """Until when a request waits for others' promotions, before its own begins."""
        self._held: dict[str, Held] = {}
        """What has come for a request and isn't used yet."""
        self._brought = Counter[str]()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self.load_durations = Durations()
        """How long requests' loads took."""

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

        One that needs more rows of staging memory than are free comes in parts. What has come for a request that waits
        can't be evicted until ``used`` or ``forget``. One that is to come takes neither rows nor threads from those
        that wait. One that was only asked about takes no slots from other tenants beyond its own one's guarantee.
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
        if not self._purges.is_known(namespace.tenant):
            if self._purges.may_wait(namespace.tenant):
                return True
            self._asked.add(request_id)
            return False
        first = self._index.reach(namespace, key, num_local // self._size)
        if is_new and need != "asked":
            self._demotions.offer_again(namespace, generation, key, first)
        is_queued = (
            self._is_queued(request_id, namespace, key, first)
            if need == "waits"
            else not self._rows.num_ahead
        )
        if is_queued:
            return True
        self._asked.add(request_id)
        return self._begin(request_id, namespace, generation, key, first, num_local, need)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; what comes from the disk for it is dropped."""
        self._asked.discard(request_id)
        self._queued.pop(request_id, None)
        self.used(request_id, 0)
        promotion = self._promotions.pop(request_id, None)
        if promotion is not None:
            self._drop(promotion)

    def take_brought(self, request_id: str) -> int:
        """Return how many blocks came from the disk for a request since the last call, or ``used``."""
        return self._brought.pop(request_id, 0)

    def num_brought(self, request_id: str) -> int:
        """Return what ``take_brought`` will return."""
        return self._brought[request_id]

    def used(self, request_id: str, num_blocks: int) -> None:
        """Take that a request has loaded so many blocks of those that came for it. The others may be evicted now."""
        num_used = min(self.take_brought(request_id), num_blocks)
        if num_used:
            self._counts["disk_loaded_blocks"] += num_used
        held = self._held.pop(request_id, None)
        if held is not None:
            held.release()

    @property
    def num_running(self) -> int:
        """Promotions that haven't ended."""
        return len(self._promotions)

    def poll(self, timeout_s: float) -> None:
        """Wait for the first record of a promotion, if there is one."""
        if self._promotions:
            next(iter(self._promotions.values())).jobs[0].poll(timeout_s)

    def cancel(self) -> None:
        """Let no promotion bring anything more."""
        for promotion in self._promotions.values():
            for job in promotion.jobs:
                job.cancel()

    def close(self) -> None:
        """End all promotions."""
        for request_id in [*self._promotions, *self._held]:
            self.forget(request_id)

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        taken, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return taken

    # --- for loads of single records (``loading``)

    def take_over(self, namespace: Namespace, key: bytes, first: int) -> bool:
        """End what comes ahead for a key from block ``first`` on, because its request has come. What has come is used.

        The request reads the rest itself, before all that comes ahead for others. Returns whether something was coming.
        """
        ahead = self._bringing(namespace, key, first, is_ahead=True)
        for request_id in ahead:
            self._end(request_id, self._promotions.pop(request_id))
        return bool(ahead)

    def place_of(self, namespace: Namespace) -> Namespace | None:
        """Return the namespace of the records of one; None if the disk isn't to be asked for it now."""
        tenant = namespace.tenant
        is_open = self._serves(tenant) and not self._patience.is_resting and self._purges.is_open_for(tenant)
        return self._purges.on_disk(namespace) if is_open else None

    def located(self, namespace: Namespace, key: bytes, first: int) -> int:
        """Return how many blocks of a prompt in a row, from ``first`` on, could be read."""
        self._demotions.offer_again(namespace, self._cache.generation(namespace.tenant), key, first)
        return self._records.locate(self._purges.on_disk(namespace), key, first, is_asked=True)

    def may_have(self, namespace: Namespace, key: bytes) -> bool:
        """Whether the last block of a key may be found. True if that isn't known, or the budget may take more."""
        place = self.place_of(namespace)
        if place is None:
            return False
        if self._demotions.has_budget or not self._purges.is_known(namespace.tenant):
            return True
        last = len(key) // (self._size * TOKEN_BYTES) - 1
        return self._records.locate(place, key, last, 1, is_asked=True) > 0

    def read_ended(self, *, is_good: bool, is_used: bool) -> None:
        """Count a record that was read for one request: a hit if that used it."""
        self._counts["disk_loaded_blocks"] += is_used
        self._counts["disk_failed_blocks"] += not is_good

    def load_ended(self, seconds: float) -> None:
        """Count a request's load, and how long it took."""
        self._counts["disk_loads"] += 1
        self._counts["disk_load_us"] += int(seconds * 1e6)
        self.load_durations.add(seconds)

    # --- inside

    def _is_queued(self, request_id: str, namespace: Namespace, key: bytes, first: int) -> bool:
        """Whether others' promotions bring block ``first`` too, or hold the staging memory; for a short time."""
        if not self._promotions and not self._rows.are_filling:
            return False
        is_coming = bool(self._bringing(namespace, key, first))
        num_free = self._rows.num_for(namespace.tenant)
        has_rows = self._rows.are_all_free or (
            self._records.locate(self._purges.on_disk(namespace), key, first, num_free + 1) <= num_free
        )
        if not is_coming and has_rows:
            return False
        return self._clock() < self._queued.setdefault(
            request_id, self._clock() + self._patience.patience_s(0)
        )

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
        on_disk, tenant, waits = self._purges.on_disk(namespace), namespace.tenant, need == "waits"
        num_purges = self._records.num_purges(tenant)
        num = self._records.locate(
            on_disk,
            key,
            first,
            self._rows.num_for(tenant) if waits else self._rows.num_ahead,
            is_asked=True,
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
        ends_at = now + (self._patience.patience_s(num * self._size) if waits else AHEAD_S)
        promotion = _Promotion(
            namespace,
            generation,
            num_purges,
            key,
            sequence,
            first,
            _NO_SLOTS,
            [],
            [],
            now,
            ends_at,
            need,
        )
        with self._dropped_after_error(promotion):
            stop = first + self._reserve(promotion, num)
            promotion.key = key[: stop * self._size * TOKEN_BYTES]
            for block in range(first, stop):
                row = self._rows.take_one(tenant) if waits else self._rows.take_ahead()
                promotion.rows.append(row)
                memory, jobs = self._rows.bytes_of(row), promotion.jobs
                if self._records.load(on_disk, key, block, memory, is_awaited=waits, begun=jobs) is None:
                    self._rows.give(promotion.rows.pop())
                    break
            if not promotion.jobs:
                self._drop(promotion)
                return False
            self._promotions[request_id] = promotion
        return True

    def _reserve(self, promotion: _Promotion, num: int) -> int:
        """Reserve slots for ``num`` blocks of a promotion. Returns how many of these, from the first on, have one."""
        first = promotion.start
        lacking = self._index.lacking(promotion.sequence.block_table[first : first + num])
        promotion.slots = self._index.reserve(promotion.namespace.tenant, len(lacking))
        num_slots = len(promotion.slots)
        return int(lacking[num_slots]) if num_slots < len(lacking) else num

    def _end(self, request_id: str, promotion: _Promotion) -> int:
        """Use the leading records that are proven. Returns the position behind them if that is all; else 0."""
        with self._dropped_after_error(promotion):
            return self._used(request_id, promotion)

    def _used(self, request_id: str, promotion: _Promotion) -> int:
        self.load_ended(self._clock() - promotion.began_at)
        num_good = next((at for at, job in enumerate(promotion.jobs) if not job.wait(0)), len(promotion.jobs))
        is_awaited = promotion.need == "waits"
        if is_awaited and not all(job.is_done for job in promotion.jobs):
            self._patience.rest()
        elif is_awaited and num_good:
            self._patience.was_fast()
        self._counts["disk_failed_blocks"] += len(promotion.jobs) - num_good
        if not num_good or not self._is_current(promotion):
            self._drop(promotion)
            return 0
        num_good = self._fill_slots(promotion, num_good)
        if is_awaited and num_good:
            self._hold(request_id, promotion)
        self._drop(promotion)
        if not num_good:
            return 0
        self._brought[request_id] += num_good
        stop = promotion.start + num_good
        return stop if num_good == len(promotion.jobs) else 0

    def _hold(self, request_id: str, promotion: _Promotion) -> None:
        """Hold what has come for a request until it is ``used``. A later part holds what came before it too."""
        before, self._held[request_id] = self._held.get(request_id), promotion.sequence
        promotion.is_dropped = True
        if before is not None:
            before.release()

    def _is_current(self, promotion: _Promotion) -> bool:
        """Whether nothing was purged or cleared since a promotion began, nor is to be."""
        tenant = promotion.namespace.tenant
        if self._purges.is_owed(tenant) or self._purges.is_resetting:
            return False
        num_purges, generation = self._records.num_purges(tenant), self._cache.generation(tenant)
        return (num_purges, generation) == (promotion.num_purges, promotion.generation)

    def _fill_slots(self, promotion: _Promotion, num_good: int) -> int:
        """Let the worker copy the first records into slots. Returns how many of them are in slots then.

        The promotion loses the rows that it copies: not those of blocks that came otherwise.
        """
        stop = promotion.start + num_good
        self._give_back(promotion)
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
            self._rows.fill(rows, slots)
            promotion.rows[:] = [row for row in promotion.rows if row not in set(rows)]
            self._fill(slots, np.array(rows, np.int64))
            self._index.filled(entries[used])
        return self._index.num_filled(entries)

    def _drop(self, promotion: _Promotion) -> None:
        """Release a promotion, once. No job touches its memory any more."""
        for job in promotion.jobs:
            job.cancel()
        while promotion.rows:
            self._rows.give(promotion.rows.pop())
        self._give_back(promotion)
        if not promotion.is_dropped:
            promotion.is_dropped = True
            promotion.sequence.release()

    def _give_back(self, promotion: _Promotion) -> None:
        """Let the slots that a promotion has reserved be given to its blocks now, or to others. Once."""
        slots, promotion.slots = promotion.slots, _NO_SLOTS
        self._index.unuse(slots)

    @contextmanager
    def _dropped_after_error(self, promotion: _Promotion) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop(promotion)
            raise
