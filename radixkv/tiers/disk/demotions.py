"""What of host memory a disk gets, and when: what waits, what leaves, what is being stored.

**A write budget**, if there is one, has equal parts for the tenants that write (``write_budget``). It is asked before a
block is stored, and charged once that has begun (``_store``). What found no bytes is offered again when a later prompt
finds it in memory.

**Stores** go on behind the requests. While the disk has free slots, or a write budget, a block is stored soon after it
was saved. It waits without a lease: if it is evicted first, it is lost. A full disk stores a block when it leaves host
memory, so the two hold different blocks. Its slot stays taken until then: ``LeavingSlots`` bounds how many do. What
leaves beyond that is lost. A disk that takes nothing now has no reserve. A block that is being stored needs its slot
until a thread has encrypted it, and gives it back after ``STORE_S`` in any case. At most an eighth of the slots are
needed so. So the disk takes as much as it can write, and never holds up host memory, even if it hangs.

What the disk can't take at once goes on waiting, and costs the budget nothing. So do blocks of a tenant whose purges
the folder doesn't know; the others' go on. In one step ``MAX_LOOKS`` waiting ranges are looked at.

A slot that a worker is still to fill holds other bytes until then, maybe another tenant's (``host.staging``). Its
block waits until it is filled. If it leaves before, or the disk is closed, it is lost.

Nothing is written while that isn't worth it (``patience``), until ``close``. What was saved waits, what leaves is
lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.forks import OwnLock
from radixkv.index.load_target import paths_of
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.disk.patience import DiskPatience
from radixkv.tiers.disk.records import DiskRecords
from radixkv.tiers.disk.write_budget import WriteBudget
from radixkv.tiers.host.index import HostIndex
from radixkv.tiers.host.memory import Slots
from radixkv.tiers.host.staging import HostMemory, StagingRows
from radixkv.tiers.pending import PendingPurges
from radixkv.tiers.tier import Offer

STORE_S: Final = 5.0
"""The longest time for which a block that is being stored needs its slot."""
MAX_STORES: Final = 64
"""Blocks that are stored at once; at most an eighth of the slots, at least one."""
MAX_LOOKS: Final = 64
"""Waiting ranges that are looked at in one step, whatever becomes of them."""
MAX_LOOK_BYTES: Final = 1 << 20
"""Bytes of their keys, after which no more are looked at: 8 ms, for 8 prompts of 32,000 tokens."""
MAX_WAITING_STORES: Final = 4_096
"""Saved ranges that may wait for the disk. The oldest are dropped."""
MAX_WAITING_BYTES: Final = 64 << 20
"""Bytes of their keys: 4 for each token of a range's prompt, up to its end."""
LEAST_PART: Final = 64
MOST_PART: Final = 8


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


class WaitingStores:
    """Saved ranges of prompts that wait for a disk, oldest first: bounded in number, and in bytes of their keys.

    Each call is O(1), but for what ``add`` drops and ``clear``.
    """

    def __init__(self) -> None:
        self._ranges: deque[Offer] = deque()
        self.num_bytes = 0
        """Of the keys of all that waits."""

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._ranges)

    def add(self, saved: Offer) -> int:
        """Let a range wait behind all others. Returns how many blocks of the oldest ones make way for it."""
        num_dropped = 0
        while self._ranges and (
            len(self._ranges) >= MAX_WAITING_STORES or self.num_bytes + len(saved.key) > MAX_WAITING_BYTES
        ):
            num_dropped += self.take().num_blocks
        self.give_back(saved, is_next=False)
        return num_dropped

    def take(self) -> Offer:
        """Take the oldest one. There must be one."""
        saved = self._ranges.popleft()
        self.num_bytes -= len(saved.key)
        return saved

    def give_back(self, saved: Offer, *, is_next: bool) -> None:
        """Let one that was taken wait again, before or behind all others."""
        (self._ranges.appendleft if is_next else self._ranges.append)(saved)
        self.num_bytes += len(saved.key)

    def clear(self) -> int:
        """Drop all. Returns how many blocks that are."""
        num_dropped = sum(each.num_blocks for each in self._ranges)
        self._ranges.clear()
        self.num_bytes = 0
        return num_dropped


class LeavingSlots:
    """How much of host memory waits for a full disk: as much as what leaves at once needs, no more than a part of it.

    A full disk stores a block when it leaves host memory. Until then its slot stays in use: it is *leaving*. So that
    the next prompt need not wait for the disk, some of the ``num_slots`` slots are kept free for it, as a reserve:

        reserve    slots that are free or leaving: as many as were leaving or wanted at once, at most, since host memory
                   was given anew once or twice; at least one of ``LEAST_PART``, at most one of ``MOST_PART``
        room       what more may leave: the reserve without what is leaving; the rest is lost

    So the first long prompt makes it grow. Those that follow lose nothing if the disk has stored what left for the one
    before. With short prompts it is small again after host memory was given anew twice. A disk that is too slow, or
    hangs, has one of ``MOST_PART``. All calls are O(1); ``add`` and ``room`` by any thread.
    """

    def __init__(self, num_slots: int) -> None:
        self.num = 0
        """Slots that are leaving."""
        self._num_slots, self._num_given = num_slots, 0
        self._most_now = self._most_before = 0
        self._adding = OwnLock()

    def given(self, num_blocks: int, num_slots: int) -> None:
        """Take that so many blocks want slots, of a pool that has ``num_slots`` now."""
        if self._num_given >= num_slots:
            self._most_before, self._most_now, self._num_given = self._most_now, 0, 0
        self._num_slots, self._num_given = num_slots, self._num_given + num_blocks
        self._most_now = max(self._most_now, self.num + num_blocks)

    @property
    def reserve(self) -> int:
        """How many slots should be free or leaving."""
        wanted = max(self._most_now, self._most_before, self._num_slots // LEAST_PART)
        return min(wanted, self._num_slots // MOST_PART)

    @property
    def room(self) -> int:
        """How many more slots may leave; of a small pool one at a time."""
        return max(self.reserve - self.num, 1 - self.num, 0)

    def add(self, num_slots: int) -> None:
        """Take that so many more slots are leaving; fewer if it is negative."""
        with self._adding:
            self.num += num_slots


class DiskDemotions:
    """Stores the blocks of ``index`` by ``tier``: those of tenants for which ``serves`` is true. See DiskTier."""

    def __init__(
        self,
        records: DiskRecords,
        index: HostIndex,
        memory: HostMemory,
        purges: PendingPurges,
        patience: DiskPatience,
        rows: StagingRows,
        serves: Callable[[str], bool],
        bytes_per_s: float | None,
        clock: Clock,
    ) -> None:
        self._records, self._index, self._cache, self._memory = records, index, index.cache, memory
        self._purges, self._patience, self._serves, self._clock = purges, patience, serves, clock
        self._rows = rows
        self._size, self._record_bytes = self._cache.config.block_size, records.settings.record_bytes
        self._waiting = WaitingStores()
        self._num_looks = self._num_look_bytes = 0
        self._stores: list[_Store] = []
        self._leaving: deque[_Leaving] = deque()
        self._leaving_slots = LeavingSlots(index.num_slots)
        self._most_stores = min(MAX_STORES, max(index.num_slots // 8, 1))
        self._is_closing = False
        self._budget = None if bytes_per_s is None else WriteBudget(bytes_per_s)
        self.budget_bytes = 0
        """What the budget had left within the last second, or at the last step."""
        self._told_at = -inf
        self._counts = {"disk_unstored_blocks": 0, "disk_unchosen_blocks": 0}

    def reserve_for(self, tenant: str, num_blocks: int, num_slots: int) -> int:
        """Return how many slots should be free, or used by what leaves.

        A tenant's ``num_blocks`` want slots, of a pool that has ``num_slots``. O(1).
        """
        if not self._serves(tenant):
            return 0
        self._leaving_slots.given(num_blocks, num_slots)
        is_needed = self._stores_later and self._is_open and not self._is_worthless
        return self._leaving_slots.reserve if is_needed else 0

    @property
    def num_running(self) -> int:
        """Stores that haven't ended."""
        return len(self._stores)

    @property
    def num_waiting(self) -> int:
        """Saved prompts that wait to be stored."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is stored, waits to be, or leaves; or the disk takes nothing."""
        return not (self._waiting or self._stores or self._leaving) or not self._is_open

    @property
    def has_budget(self) -> bool:
        """Whether a write budget bounds what is stored."""
        return self._budget is not None

    def offer(self, offer: Offer) -> None:
        """Store blocks, which are committed, when the disk has time."""
        if not self._serves(offer.namespace.tenant) or self._stores_later:
            return
        self._wait_to_store(offer)
        self._begin_stores()

    def step(self) -> None:
        """End stores that are over, and begin more."""
        self._num_looks = self._num_look_bytes = 0
        self._end_stores()
        self._begin_stores()
        if self._budget is not None and (now := self._clock()) - self._told_at >= 1.0:
            self._told_at, self.budget_bytes = now, max(int(self._budget.left_bytes(now)), 0)

    def forget_waiting(self) -> None:
        """Store nothing of what waits."""
        self._counts["disk_unstored_blocks"] += self._waiting.clear()

    def begin_to_close(self) -> None:
        """Let all that host memory has wait to be stored."""
        self._is_closing = True
        for saved in self._unsaved():
            self._waiting.give_back(saved, is_next=False)

    def poll(self, timeout_s: float) -> None:
        """Wait for a block that is being stored; for this time if there is none."""
        if self._stores and self._stores[0].jobs:
            self._stores[0].jobs[-1].poll(timeout_s)
        else:
            time.sleep(timeout_s)

    def close(self) -> None:
        """Store nothing more, and free all slots."""
        self.forget_waiting()
        for store in self._stores:
            self._free_slots(store)
        self._stores = []
        self._give_up_leaving()

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        taken, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return taken

    def offer_again(self, namespace: Namespace, generation: int, key: bytes, first: int) -> None:
        """With a write budget, store blocks before ``first`` that a prompt found in memory and the disk lacks.

        There were no bytes for them when they were saved. O(tokens up to them).
        """
        if self._budget is None or not first or not self._serves(namespace.tenant):
            return
        if not self._records.locate(self._purges.on_disk(namespace), key, first - 1, 1):
            self._wait_to_store(Offer(namespace, generation, key, 0, first))

    # --- inside

    def _unsaved(self) -> Iterator[Offer]:
        """Return all that host memory has."""
        for namespace, key, entries in paths_of(self._cache):
            if not self._serves(namespace.tenant):
                continue
            generation = self._cache.generation(namespace.tenant)
            for first, stop in self._index.filled_ranges(entries):
                yield Offer(namespace, generation, key, first, stop)

    def _end_stores(self) -> None:
        """Count stores that have ended. Free the slots of those whose bytes were taken, or should have been."""
        running, now = [], self._clock()
        for store in self._stores:
            if now - store.began_at >= STORE_S or not any(job.needs_memory for job in store.jobs):
                self._free_slots(store)
            if all(job.is_done for job in store.jobs):
                self._counts["disk_unstored_blocks"] += sum(not job.wait(0) for job in store.jobs)
            else:
                running.append(store)
        self._stores = running

    def _free_slots(self, store: _Store) -> None:
        """Free the slots of a store, once. A job that hasn't taken its bytes never does."""
        for job in store.jobs:
            if job.needs_memory:
                job.cancel()
        slots, uses = store.slots, self._index.uses_of(store.slots)
        num_left = len(slots) * store.has_left
        try:
            store.slots = slots[:0]
            self._leaving_slots.add(-num_left)
            self._index.unuse(slots)
        except BaseException:
            if not store.slots.size and (self._index.uses_of(slots) == uses).all():  # another call does it
                store.slots = slots
                self._leaving_slots.add(num_left)
            raise

    def leave(self, namespace: Namespace, key: bytes, first: int, slots: Slots) -> None:
        """Keep slots whose entries are evicted until they are stored, up to the first that is being filled.

        Under the lock of host memory's index.
        """
        tenant = namespace.tenant
        if not self._stores_later or not self._serves(tenant):
            return
        known = self._purges.known(tenant)
        is_shut = (
            known is None or self._purges.is_owed(tenant) or self._purges.is_resetting or not self._is_open
        )
        room = 0 if is_shut or self._is_worthless else self._leaving_slots.room
        kept = slots[: min(self._rows.num_ready(slots), room)]
        self._counts["disk_unstored_blocks"] += len(slots) - len(kept)
        if known is not None and len(kept):
            leaving = _Leaving(namespace, key, first, kept, known, self._records.num_purges(tenant))
            self._index.use(kept)
            self._leaving_slots.add(len(kept))
            self._leaving.append(leaving)

    @property
    def _is_worthless(self) -> bool:
        return self._patience.is_worthless and not self._is_closing

    @property
    def _stores_later(self) -> bool:
        """Whether blocks are stored when they leave host memory, and not before."""
        return self._budget is None and self._records.is_full and not self._is_closing

    @property
    def _is_open(self) -> bool:
        return self._records.state == "open"

    def _store_leaving(self, most: int) -> None:
        """Begin to store up to ``most`` blocks that have left host memory. What the disk can't take now is lost."""
        num = 0
        while self._leaving and num < most:
            leaving = self._leaving.popleft()
            tenant = leaving.namespace.tenant
            if (
                self._purges.is_resetting
                or not self._purges.is_known(tenant)
                or self._purges.known(tenant) != leaving.known
            ):
                self._give_up(leaving)
                continue
            now, later = leaving.slots[: most - num], leaving.slots[most - num :]
            if len(later):
                self._leaving.appendleft(leaving._replace(first=leaving.first + len(now), slots=later))
            on_disk, store = self._purges.on_disk(leaving.namespace), _Store(now, True, self._clock())
            self._stores.append(store)
            there = self._records.locate(on_disk, leaving.key, leaving.first, len(now))
            for at, slot in enumerate(now[there:].tolist(), leaving.first + there):
                content = self._memory.slot_bytes(slot)
                job = self._records.store(
                    on_disk, leaving.key, at, content, since=leaving.since, begun=store.jobs
                )
                self._counts["disk_unstored_blocks"] += job is None
            num += len(now)

    def _give_up(self, leaving: _Leaving) -> None:
        self._counts["disk_unstored_blocks"] += len(leaving.slots)
        self._free_slots(_Store(leaving.slots, True, 0.0))

    def _give_up_leaving(self) -> None:
        """Free the slots of all that has left host memory and isn't being stored."""
        while self._leaving:
            self._give_up(self._leaving.popleft())

    def _wait_to_store(self, saved: Offer) -> None:
        self._counts["disk_unstored_blocks"] += self._waiting.add(saved)

    def _begin_stores(self) -> None:
        """Begin to store what leaves, then what waits, as far as ``_may_look`` allows in one step."""
        if self._leaving and not self._is_open:
            self._give_up_leaving()
        elif self._leaving:
            self._store_leaving(self._room)
        if self._is_worthless:
            return
        for _ in range(len(self._waiting)):
            if not self._room or not self._is_open or not self._may_look:
                return
            saved, self._num_looks = self._waiting.take(), self._num_looks + 1
            if not self._is_wanted(saved):
                self._counts["disk_unstored_blocks"] += saved.num_blocks
            elif not self._purges.is_known(saved.namespace.tenant):
                if self._is_closing and self._purges.has_failed(saved.namespace.tenant):
                    self._counts["disk_unstored_blocks"] += saved.num_blocks
                else:
                    self._waiting.give_back(saved, is_next=False)  # the others go on
            elif not self._store(saved):
                return

    @property
    def _room(self) -> int:
        """How many more blocks may be stored at once."""
        return max(self._most_stores - sum(len(store.slots) for store in self._stores), 0)

    @property
    def _may_look(self) -> bool:
        return self._num_looks < MAX_LOOKS and self._num_look_bytes < MAX_LOOK_BYTES

    def _store(self, saved: Offer) -> bool:
        """Begin to store blocks that are still here; the rest goes on waiting. Returns whether the disk takes more.

        O(tokens up to the last of them).
        """
        on_disk, tenant = self._purges.on_disk(saved.namespace), saved.namespace.tenant
        since = self._records.num_purges(tenant)
        if not self._is_wanted(saved):
            self._counts["disk_unstored_blocks"] += saved.num_blocks
            return True
        self._num_look_bytes += len(saved.key)
        key = saved.key[: saved.stop * self._size * TOKEN_BYTES]
        first = saved.first + self._records.locate(on_disk, key, saved.first)
        entries = self._cache.match(saved.namespace, key).block_ids[first : saved.stop]
        here = first + len(entries)
        if here < saved.stop and not self._stores_later:  # else ``leave`` has heard of it
            self._counts["disk_unstored_blocks"] += self._records.num_missing(on_disk, key, here)
        saved = saved._replace(stop=here)
        ranges = self._index.filled_ranges(entries)
        if not ranges:
            return True
        start, stop = ranges[0]
        if start:  # what lay before has left; the disk may have some of the next ones
            self._waiting.give_back(saved._replace(first=first + start), is_next=True)
            return True
        slots = self._index.filled_slots(entries[: min(stop, self._room)])  # some may have gone just now
        num_ready = self._rows.num_ready(slots)
        if num_ready and self._budget is not None and not self._budget.may_spend(tenant, self._clock()):
            self._counts["disk_unchosen_blocks"] += saved.stop - first
            return True
        num_begun = self._begin(on_disk, key, first, slots[:num_ready], since)
        if self._budget is not None and num_begun:
            self._budget.spend(tenant, num_begun * self._record_bytes, self._clock())
            self.budget_bytes = max(int(self._budget.left_bytes(self._clock())), 0)
        left = saved._replace(first=first + num_begun)
        if num_begun == num_ready < len(slots):
            self._leave_unready(left)
        elif num_begun < ranges[-1][1]:
            self._waiting.give_back(left, is_next=True)
        return num_begun == num_ready

    def _begin(self, on_disk: Namespace, key: bytes, first: int, slots: Slots, since: int) -> int:
        """Begin to store blocks from ``first`` on, out of these slots. Returns how many the disk takes now."""
        if not len(slots):
            return 0
        store = _Store(slots, False, self._clock())
        self._index.use(slots)
        self._stores.append(store)
        for block, slot in enumerate(slots.tolist(), first):
            content = self._memory.slot_bytes(slot)
            if self._records.store(on_disk, key, block, content, since=since, begun=store.jobs) is None:
                break
        return len(store.jobs)

    def _leave_unready(self, saved: Offer) -> None:
        """Let blocks whose slots are being filled wait. After ``begin_to_close`` no worker tells of them any more."""
        if self._is_closing:
            self._counts["disk_unstored_blocks"] += saved.num_blocks
        else:
            self._waiting.give_back(saved, is_next=False)

    def _is_wanted(self, saved: Offer) -> bool:
        """Whether a range may be stored: the disk serves the tenant, and nothing was purged since, nor is to be."""
        tenant = saved.namespace.tenant
        is_current = self._serves(tenant) and self._cache.generation(tenant) == saved.generation
        return is_current and not self._purges.is_resetting and not self._purges.is_owed(tenant)
