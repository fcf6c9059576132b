"""The disk below the second level: saved blocks are kept in a folder, and come back after an eviction or a restart.

    a request asks what could be loaded     is_waiting   promotes what the disk has: disk → staging → slot
    a step's blocks are saved               note_saved   stores them when the disk has time: slot → disk
    a step begins                           begin_step   stores what waits, ends what is over
    a worker filled slots                   filled       their staging memory is free again
    a purge, a reset                        purge, reset the keys of the records are destroyed

The scheduler's thread uses it, except for ``purge``. Only threads of the tier wait for the disk. A block is one record.

Its parts, which engines may hold themselves:

    debts         purges that are owed, news of the fleet, resets         (``pending``)
    filling       slots whose bytes haven't come yet: they aren't stored  (``filling_slots``)
    lane_of       what a tenant shares with others, or has for itself     (``DiskLane``)

        promotions    what comes: promotions, single flight, single records   (``promotions``)
        stores        what goes: what waits, leaves, is stored; the budget    (``stores``)
        rows          staging memory and its shares                           (``staging``)
        patience      for how long requests wait, when the disk rests         (``patience``)

**Strict tenants** notice nothing of others here, nor are they noticed. ``set_partition`` gives each slots of the disk,
threads and a part of its bandwidth (``tiers.tier_lanes``), and a lane. In its lane it has rows, waiting stores, a bound
of running ones, rests, and a part of the write budget, as large as its part of the disk. What is left is that all use
one device and one process: how long a step computes is measured for all lanes, because its tokens are those of all.
What one load measured while it computed counts for its tenant's lane alone (``TierLoading``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from radixkv.clock import Clock, monotonic
from radixkv.config import Namespace
from radixkv.errors import ArgumentError
from radixkv.tiers.disk.durations import Durations
from radixkv.tiers.disk.filling_slots import FillingSlots
from radixkv.tiers.disk.patience import DiskPatience
from radixkv.tiers.disk.promotions import DiskPromotions
from radixkv.tiers.disk.stores import DiskStores
from radixkv.tiers.disk.tier import DiskTier
from radixkv.tiers.host.index import HostIndex
from radixkv.tiers.host.memory import Slots
from radixkv.tiers.host.staging import HostMemory, StagingRows
from radixkv.tiers.pending import DiskDebts, Pending
from radixkv.uncopied import refuse_copies

CLOSING_S: Final = 10.0
"""The longest time for which ``close`` stores what waits."""
LEAST_ROWS: Final = 2
"""Rows of staging memory of a lane: for a request, and for what comes before anybody waits for it."""
_MOST_NAMED: Final = 8
_POLL_S: Final = 0.001
_ADMIN_S: Final = 0.5
"""The shortest time for which ``close`` waits for a purge or a reset that runs."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskLane:
    """What the tenants without a partition share, or one with a partition has for itself."""

    rows: StagingRows
    patience: DiskPatience
    stores: DiskStores
    promotions: DiskPromotions


class DiskLevel:
    """Promotes and stores the blocks of ``index`` by ``tier``, whose segments are blocks.

    - ``memory``: the slots' bytes. ``fill``: makes the worker copy rows of staging memory into slots, in this step.
    - ``fleet_generation``: returns the newest generation of a tenant that its salts have shown, or the fleet. None
      while what is above may have older KV: then the disk isn't asked, and stores nothing.
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
        fleet_generation: Callable[[str], int | None] = lambda tenant: 0,
        serves: Callable[[str], bool] = lambda tenant: True,
        bytes_per_s: float | None = None,
        num_ahead_rows: int = 0,
        clock: Clock = monotonic,
    ) -> None:
        self.tier, self._clock = tier, clock
        self._index, self._fill, self._serves, self._bytes_per_s = index, fill, serves, bytes_per_s
        self.debts = DiskDebts(tier, index.cache, fleet_generation, clock)
        self.load_durations = Durations()
        """How long requests' loads took, of all lanes."""
        self._lanes: dict[str, DiskLane] = {}
        self._filling = FillingSlots(index.num_slots)
        self._left_counts: Counter[str] = Counter()
        self._left_rows: list[StagingRows] = []
        """Of lanes that have ended; some of their rows were in use then."""
        self.shared = self._made_lane(
            StagingRows.of(memory, num_ahead_rows, clock),
            memory,
            lambda tenant: serves(tenant) and tenant not in self._lanes,
            index.num_slots,
        )
        """The lane of all tenants without a partition."""
        self._memory, self._num_rows = memory, memory.num_staging - num_ahead_rows
        index.watch(self._leave, self._reserve_for)

    def _made_lane(
        self,
        rows: StagingRows,
        memory: HostMemory,
        serves: Callable[[str], bool],
        num_slots: int,
        tenant: str = "",
    ) -> DiskLane:
        tier, index, clock, rate = self.tier, self._index, self._clock, self._bytes_per_s
        if tenant and rate is not None:
            rate *= tier.partition(tenant) / tier.num_slots
        patience = DiskPatience(index.cache.config.block_size, clock)
        debts, filling = self.debts, self._filling
        stores = DiskStores(
            tier, index, memory, debts, patience, filling, serves, rate, clock, num_slots, tenant
        )
        promotions = DiskPromotions(
            tier,
            index,
            self._fill,
            rows,
            patience,
            debts,
            stores,
            filling,
            serves,
            clock,
            self.load_durations,
        )
        return DiskLane(rows, patience, stores, promotions)

    # --- lanes

    def lane_of(self, tenant: str) -> DiskLane:
        """Return a tenant's lane. O(1)."""
        return self._lanes.get(tenant, self.shared)

    def own_lane(self, tenant: str) -> DiskLane | None:
        """Return the lane that a tenant has for itself, if it has one."""
        return self._lanes.get(tenant)

    @property
    def lanes(self) -> list[DiskLane]:
        """All lanes."""
        return [self.shared, *self._lanes.values()]

    @property
    def is_open(self) -> bool:
        """Whether the disk serves the tenants of all lanes now. O(lanes). Any thread."""
        states = [self.tier.state, *map(self.tier.state_for, list(self._lanes))]
        return set(states) == {"open"} and not any(lane.patience.is_resting for lane in self.lanes)

    def set_partition(self, tenant: str, num_slots: int, num_host_slots: int) -> None:
        """Give a tenant slots of the disk and a lane of its own, 0 for none.

        If that changes, its lane ends. What comes in it is dropped and read again when it is asked for; what waits or
        leaves in it isn't stored, which is counted. What waits in the shared lane is stored all the same. Raises
        ArgumentError, and leaves it none, if the slots or the rows of staging memory don't suffice.
        """
        if tenant in self._lanes and self.tier.partition(tenant) == num_slots:
            return
        self._end_lane(tenant)
        num_rows = max(self._num_rows * num_slots // self.tier.num_slots, LEAST_ROWS)
        if num_slots and self.shared.rows.num_rows < num_rows + LEAST_ROWS:
            self.tier.set_partition(tenant, 0)
            allowed = (
                f"at most {self.shared.rows.num_rows - LEAST_ROWS}: others have the rest of staging memory"
            )
            raise ArgumentError("staging rows", num_rows, allowed)
        try:
            self.tier.set_partition(tenant, num_slots)
        except ArgumentError:
            self.tier.set_partition(tenant, 0)
            raise
        if num_slots:
            self.debts.set_strict(tenant, True)
            rows = self.shared.rows.part(num_rows)
            self._lanes[tenant] = self._made_lane(
                rows,
                self._memory,
                lambda each: each == tenant and self._serves(tenant),
                num_host_slots,
                tenant,
            )
        self._share_budget()

    def _end_lane(self, tenant: str) -> None:
        lane = self._lanes.pop(tenant, None)
        if lane is not None:
            lane.promotions.close()
            lane.stores.close()
            lane.rows.end()
            self._left_rows = [each for each in (*self._left_rows, lane.rows) if each.num_used]
            self.debts.set_strict(tenant, False)
            self._left_counts.update(_counts_of(lane))
            self._share_budget()

    def _share_budget(self) -> None:
        """Leave the others the part of the write budget that strict tenants don't have."""
        if self._bytes_per_s is not None:
            num_slots = self.tier.num_slots
            num_left = max(num_slots - sum(map(self.tier.partition, self._lanes)), 1)
            self.shared.stores.set_rate(self._bytes_per_s * num_left / num_slots)

    def _leave(self, namespace: Namespace, key: bytes, first: int, slots: Slots) -> None:
        self.lane_of(namespace.tenant).stores.leave(namespace, key, first, slots)

    def _reserve_for(self, tenant: str, num_blocks: int, num_slots: int) -> int:
        return self.lane_of(tenant).stores.reserve_for(tenant, num_blocks, num_slots)

    # --- requests, by their ids

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; what comes from the disk for it is dropped. O(lanes)."""
        for lane in self.lanes:
            lane.promotions.forget(request_id)

    def num_brought(self, request_id: str) -> int:
        """Return how many blocks came from the disk for a request, which it hasn't ``used``. O(lanes)."""
        return sum(lane.promotions.num_brought(request_id) for lane in self.lanes)

    def used(self, request_id: str, num_blocks: int) -> None:
        """Take that a request has loaded so many blocks of these, and doesn't need the others. O(lanes)."""
        for lane in self.lanes:
            lane.promotions.used(request_id, num_blocks)

    # --- steps

    @property
    def is_storing(self) -> bool:
        """Whether blocks are being stored. O(lanes)."""
        return any(lane.stores.num_running for lane in self.lanes)

    @property
    def num_running(self) -> int:
        """Promotions, stores, and steps that fill slots, which haven't ended."""
        return sum(
            lane.promotions.num_running + lane.stores.num_running + lane.rows.num_filling
            for lane in self.lanes
        )

    @property
    def budget_bytes(self) -> int:
        """What the budgets had left when they were last asked."""
        return sum(lane.stores.budget_bytes for lane in self.lanes)

    @property
    def num_used_rows(self) -> int:
        """Rows of staging memory that aren't free."""
        return sum(rows.num_used for rows in self._rows)

    @property
    def _rows(self) -> list[StagingRows]:
        return [*(lane.rows for lane in self.lanes), *self._left_rows]

    def begin_step(self, step: int, num_tokens: int | None) -> None:
        """Begin a step, which computes ``num_tokens`` tokens: store what waits, and end stores that are over.

        A step without tokens waits a moment for the disk. None: it doesn't, and isn't measured (``computed_in``).
        """
        if num_tokens is not None:
            for lane in self.lanes:
                lane.patience.begin_step(step, num_tokens)
        self.debts.retry()
        for rows in self._rows:
            rows.begin_step(step)
        self._filling.begin_step(step)
        for lane in self.lanes:
            lane.stores.step()
        self.tier.maintain()
        if num_tokens == 0:
            self.shared.promotions.poll(_POLL_S)

    def computed(self, steps: Iterable[int]) -> None:
        """Take that these steps have ended: they tell all lanes how long computing takes."""
        steps = list(steps)
        for lane in self.lanes:
            lane.patience.computed(steps)

    def computed_in(self, seconds: float, num_tokens: int) -> None:
        """Tell all lanes that the engine computed so many tokens, of any tenants, in so many seconds."""
        for lane in self.lanes:
            lane.patience.computed_in(seconds, num_tokens)

    def filled(self, steps: Iterable[int]) -> None:
        """Take that the worker has filled the slots of these steps."""
        steps = list(steps)
        for rows in self._rows:
            rows.filled(steps)
        self._filling.filled(steps)

    def undo(self) -> None:
        """Take that no worker fills slots any more."""
        for rows in self._rows:
            rows.undo()
        self._filling.undo()

    def reset(self) -> None:
        """Forget all records, in a thread. Until that is done, the disk is closed to everybody."""
        for lane in self.lanes:
            lane.promotions.cancel()
            lane.stores.forget_waiting()
        self.debts.reset()

    def close(self, give_all: Callable[[Callable[[], bool]], None] | None = None) -> None:
        """Store what host memory has, for at most ``CLOSING_S``, sync, and give the folder back.

        ``give_all``: saves what lies above host memory until its argument is true; called when the rest is stored.
        What is ``unpaid`` then stays so, and is logged.
        """
        for lane in self.lanes:
            lane.promotions.close()
        ends_at = self._clock() + CLOSING_S
        Pending([self.debts]).wait(max(ends_at - self._clock(), 0.0))
        for lane in self.lanes:
            lane.stores.begin_to_close()
        self._finish(ends_at)
        if give_all is not None and self.tier.state == "open":

            def is_over() -> bool:
                self._finish(ends_at)  # the next one may take the slots of the one before
                return self._clock() >= ends_at

            give_all(is_over)
            self._finish(ends_at)
        for lane in self.lanes:
            lane.stores.forget_waiting()
        is_idle = self.debts.close(max(ends_at - self._clock(), _ADMIN_S))
        self.tier.close(is_in_use=not is_idle)
        for lane in self.lanes:
            lane.stores.close()
        unpaid = self.unpaid()
        if unpaid is not None:
            _log.error("%s", unpaid)

    def unpaid(self) -> str | None:
        """Say which tenants' records the closed disk may still have, though they were purged, cleared or removed.

        None: no such ones.
        """
        owed, num_removed, folder = sorted(self.debts.owed), self.debts.num_removed, self.tier.settings.folder
        if not owed and not num_removed:
            return None
        kinds = []
        if owed:
            named = ", ".join(repr(each) for each in owed[:_MOST_NAMED]) + ", …" * (len(owed) > _MOST_NAMED)
            kinds.append(f"{len(owed)} purged or cleared tenants ({named})")
        if num_removed:
            kinds.append(f"{num_removed} tenants that were removed before the start")
        return (
            f"{folder} was closed and may still have the records of {' and of '.join(kinds)}: "
            f"{self.debts.problem(owed[0] if owed else '')}. Purge them again at the next start. For a tenant that was "
            f"removed: `radixkv disk forget {folder} --tenant NAME`"
        )

    def _finish(self, ends_at: float) -> None:
        """Store what waits until then, in all lanes at once."""
        while busy := [lane.stores for lane in self.lanes if not lane.stores.is_idle]:
            if self._clock() >= ends_at:
                return
            for stores in busy:
                stores.step()
            busy[0].poll(_POLL_S)

    def counts(self) -> dict[str, float]:
        """Return what the disk has and did since the start, by the names of ``LowerTiers.counts``. Any thread."""
        tier, durations = self.tier.counts(), self.load_durations
        errors = ("refused", "read_errors", "write_errors", "sync_errors", "damaged")
        return {
            "capacity_blocks": self.tier.num_slots,
            "resident_blocks": tier["sealed"],
            "read_bytes": tier.get("read_bytes", 0),
            "written_bytes": tier.get("written_bytes", 0),
            "loads": durations.count,
            "load_seconds": durations.seconds,
            "errors": sum(tier.get(name, 0) for name in errors),
            "open": int(self.is_open),
            "owed_purges": self.debts.num_owed,
            "budget_bytes": self.budget_bytes,
        }

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        found, self._left_counts = self._left_counts, Counter()
        for lane in self.lanes:
            found.update(_counts_of(lane))
        return dict(found)


refuse_copies(DiskLevel, "it holds threads and files. Make another")


def _counts_of(lane: DiskLane) -> dict[str, int]:
    """Return a lane's counts since the last call."""
    return lane.promotions.take_counts() | lane.stores.take_counts() | lane.patience.take_counts()
