"""Host memory below a cache in the same process: what was decided is done at once, in the caller's thread.

A copy to host memory costs the bytes of the new blocks, a copy back those of the loaded ones. Both are on the caller's
stream, so they are in order with what the engine computes.

While host memory has free slots, each block is copied when it is committed. Later a block is copied when the cache
evicts it, unless its copy is still here (``host.index``). So the two hold different blocks when memory is short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import torch

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.errors import CapacityError
from radixkv.forks import OwnLock
from radixkv.index.below import Scope
from radixkv.tiers.disk.durations import Durations
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.further import Further
from radixkv.tiers.host.index import Scrub
from radixkv.tiers.host.memory import HostBlocks, Slots
from radixkv.tiers.host.steps import HostSteps
from radixkv.tiers.pending import Pending
from radixkv.tiers.tier import Offer, may_lie_below

if TYPE_CHECKING:
    from radixkv.storage.plan import BlockIds

LOCKED_BYTES: Final = 4 << 20
"""Bytes that are copied under one hold of the cache's lock: half a millisecond. At least one block."""


class DeviceBlocks(NamedTuple):
    """The cache's blocks with an offer's KV.

    ``is_current``: whether nothing was purged since they were taken. ``are_leaving``: they are being evicted.
    """

    block_ids: BlockIds
    is_current: Callable[[], bool]
    are_leaving: bool = False


class Put(Protocol):
    """Writes a range of blocks by a function of their ids, unless that isn't right any more."""

    def __call__(self, start: int, stop: int, copy: Callable[[BlockIds], None]) -> bool:
        """Return whether it did."""


class HostTier(HostSteps):
    """Host memory as a ``Tier``, for the one worker with ``memory``: below a cache of ``num_above`` blocks.

    ``further``: tiers below, beside the disk. ``outside``: a context in which other threads may use this; it is entered
    between parts of a long copy. ``policy_clock``: of the policy. Everything but ``find`` and ``counts`` is for one
    thread at a time.
    """

    def __init__(
        self,
        memory: HostBlocks,
        block_size: int,
        *,
        num_above: int,
        policy: str,
        scrub: Scrub,
        further: Further,
        outside: Callable[[], AbstractContextManager[None]],
        clock: Clock,
        policy_clock: Clock,
    ) -> None:
        super().__init__(
            memory.num_slots, block_size, policy=policy, scrub=scrub, num_above=num_above, clock=policy_clock
        )
        self.memory, self._further, self._outside, self._clock = memory, further, outside, clock
        self.slice_blocks = max(LOCKED_BYTES // memory.engine_bytes, 1)
        self.load_durations = Durations()
        self.totals = Counter[str]()
        """Everything that was counted, also of the disk."""
        self._lock = OwnLock()

    # --- Tier

    def offer(self, offer: Offer, source: DeviceBlocks) -> None:
        """See ``Tier``. The first ``offer.first`` blocks were offered before."""
        if source.are_leaving:
            self.demote(offer.namespace, offer.key, offer.first, source.block_ids)
        else:
            self.save_key(
                offer.namespace, offer.generation, offer.key, lambda: source.block_ids, source.is_current
            )
        self.run()

    def find(self, namespace: Namespace, key: bytes, first: int) -> int:
        """See ``Tier``. O(nodes)."""
        return self.index.reach(namespace, key, first) - first

    def read(
        self, namespace: Namespace, key: bytes, block: int, into: Put, *, begun: list[Job] | None = None
    ) -> Job | None:
        """Put all blocks from ``block`` on that are here, in parts, until one is refused. It has ended then.

        None if all of host memory is in use. Others may purge between parts what is being read: then ``into`` refuses.
        """
        try:
            lease = self.cache.match_and_lease(namespace, key)
        except CapacityError:
            return None
        began_at, index = self._clock(), self.index
        with lease:
            entries = lease.block_ids[block:].astype(np.int64)
            slots = index.filled_slots(entries)
            index.use(slots)
            try:
                blocks = self._put(slots, block, into)
                num_loaded = len(blocks)
                is_same = index.slots_of(entries[:num_loaded]) == slots[:num_loaded]
                index.loaded(entries[:num_loaded][is_same], blocks[is_same])
            finally:
                index.unuse(slots)
                with self._lock:
                    self.load_durations.add(self._clock() - began_at)
        return Job.ended(True)

    def forget(self, scope: Scope) -> Pending:
        """See ``Tier``. Nothing is left to do afterwards: what was forgotten is zeroed before others get its slots."""
        if scope.namespace is not None:
            self.cache.clear(scope.namespace)
        elif scope.tenant is not None:
            self.cache.purge(scope.tenant)
        else:
            for tenant in {each.tenant for each in self.cache.namespaces()} - scope.but:
                self.cache.purge(tenant)
        return Pending()

    def wait(self, timeout_s: float) -> bool:
        """See ``Tier``. A copy from a device may end in a later call."""
        self.run()
        return not self.num_running

    def counts(self) -> dict[str, float]:
        """See ``Tier``. Any thread."""
        totals = self.totals_now()
        return {
            "capacity_blocks": self.index.num_slots,
            "resident_blocks": self.index.num_used,
            "hit_blocks": totals["hit_blocks"],
            "read_bytes": totals["loaded_bytes"],
            "written_bytes": totals["saved_bytes"],
            "loads": self.load_durations.count,
            "load_seconds": self.load_durations.seconds,
            "errors": totals["failed_blocks"] + totals["unsaved_blocks"] + totals["errors"],
            "lost_blocks": totals["lost_blocks"],
        }

    def close(self) -> None:
        """See ``Tier``."""
        self.undo()

    # --- for the ladder

    def run(self) -> None:
        """Do what was decided, and take what became of it."""
        work = self.take_work(None)
        self.memory.load(work)
        self.memory.save(work)
        self.reported(self.memory.take_report())
        self.work_done()
        self._take_counts()

    def undo(self) -> None:
        """See HostSteps."""
        self.memory.undo()
        super().undo()

    def count(self, name: str, number: int = 1) -> None:
        """Count something that happened. Any thread."""
        with self._lock:
            self.totals[name] += number

    def totals_now(self) -> Counter[str]:
        """Return a copy of ``totals``. Any thread."""
        with self._lock:
            return self.totals.copy()

    def row_copy(self, row: int) -> Callable[[BlockIds], None]:
        """Return a function that copies a row of staging memory into a block."""
        return partial(self.memory.put, self.memory.stage_row(row))

    # --- inside

    def _offer_below(self, offer: Offer) -> None:
        super()._offer_below(offer)
        tenant = offer.namespace.tenant
        is_current = self.cache.generation(tenant) == offer.generation
        may_go = is_current and may_lie_below(self.cache.tenant(tenant))
        if may_go and self._further.is_open_for(offer.namespace):
            for tier in self._further.tiers:
                tier.offer(offer, self._records(offer))

    def _records(self, offer: Offer) -> Iterator[tuple[int, memoryview]]:
        """Yield those blocks of an offer in a row that are in slots, with their bytes."""
        entries = self.cache.match(offer.namespace, offer.key).block_ids[offer.first : offer.stop]
        slots = self.index.filled_slots(entries)
        if self.disk is not None:
            slots = slots[: self.disk.rows.num_ready(slots)]
        for block, slot in enumerate(slots.tolist(), offer.first):
            yield block, self.memory.slot_bytes(slot).toreadonly()

    def _put(self, slots: Slots, start: int, put: Put) -> Slots:
        """Put slots, which are in use, into blocks from block ``start`` on, and return the ids of these."""
        step, found = self.slice_blocks, [np.empty(0, np.int64)]

        def copy(staged: list[torch.Tensor], block_ids: BlockIds) -> None:
            self.memory.put(staged, block_ids)
            found.append(block_ids.astype(np.int64))

        try:
            for at in range(0, len(slots), step):
                if at:
                    with self._outside():
                        pass
                staged = self.memory.stage(slots[at : at + step])
                stop = min(at + step, len(slots))
                if not put(start + at, start + stop, partial(copy, staged)):
                    break
        finally:
            self.memory.counts["loaded_blocks"] += sum(map(len, found))
            self._take_counts()
        return np.concatenate(found)

    def _take_counts(self) -> None:
        with self._lock:
            taken = self.memory.take_counts()
            self.totals.update(taken)
            self.totals["hit_blocks"] += taken["loaded_blocks"]
            self.totals.update(self.take_counts())
