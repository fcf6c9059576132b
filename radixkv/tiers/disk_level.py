"""The disk below the second level: saved blocks are kept in a folder, and come back after an eviction or a restart.

    a request asks what could be loaded     is_waiting   promotes what the disk has: disk → staging → slot
    a step's blocks are saved               note_saved   stores them when the disk has time: slot → disk
    a step begins                           begin_step   stores what waits, ends what is over
    a worker filled slots                   filled       their staging memory is free again
    a purge, a reset                        purge, reset the keys of the records are destroyed

The scheduler's thread uses it, except for ``purge``. Only threads of the tier wait for the disk. A block is one record.

Its parts, which engines may hold themselves:

    debts         purges that are owed, news of the fleet, resets         (``pending``)
    promotions    what comes: promotions, single flight, single records   (``promotions``)
    stores        what goes: what waits, leaves, is stored; the budget    (``stores``)
    rows          staging memory and its shares                           (``staging``)
    patience      for how long requests wait, when the disk rests         (``patience``)
    filling       slots whose bytes haven't come yet: they aren't stored  (``filling_slots``)

**Tenants** have parts of the disk (``follow``): as much of it as their settings give them of the tier above.

**Strict tenants** have nothing on the disk. How long it takes to read, to store or to forget would tell them of others'
traffic. So nothing of them is stored or looked for, and no request, purge or clear of theirs waits for the disk. If the
folder has records of a tenant that is strict now, their keys are destroyed. That is pending until it is done, like a
purge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from radixkv.clock import Clock, monotonic
from radixkv.config import Tenant
from radixkv.errors import ArgumentError
from radixkv.forks import OwnLock
from radixkv.index.below import Scope
from radixkv.tiers.disk.filling_slots import FillingSlots
from radixkv.tiers.disk.patience import DiskPatience
from radixkv.tiers.disk.promotions import DiskPromotions
from radixkv.tiers.disk.slot_owners import NO_QUOTA, Quota
from radixkv.tiers.disk.stores import DiskStores
from radixkv.tiers.disk.tier import DiskTier
from radixkv.tiers.host.index import HostIndex
from radixkv.tiers.host.memory import Slots
from radixkv.tiers.host.staging import HostMemory, StagingRows
from radixkv.tiers.pending import Pending, PendingPurges
from radixkv.uncopied import refuse_copies

CLOSING_S: Final = 10.0
"""The longest time for which ``close`` stores what waits."""
_MOST_NAMED: Final = 8
_POLL_S: Final = 0.001
_ADMIN_S: Final = 0.5
"""The shortest time for which ``close`` waits for a purge or a reset that runs."""

_log = logging.getLogger(__name__)


class DiskLevel:
    """Promotes and stores the blocks of ``index`` by ``tier``, whose segments are blocks.

    - ``memory``: the slots' bytes. ``fill``: makes the worker copy rows of staging memory into slots, in this step.
    - ``fleet_generation``: returns the newest generation of a tenant that its salts have shown, or the fleet. None
      while what is above may have older KV: then the disk isn't asked, and stores nothing.
    - ``num_blocks``: blocks that tenants' settings count, in the tier above; None for the slots of host memory.
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
        num_blocks: int | None = None,
        bytes_per_s: float | None = None,
        num_ahead_rows: int = 0,
        clock: Clock = monotonic,
    ) -> None:
        self.tier, self._clock = tier, clock
        self._num_blocks = index.num_slots if num_blocks is None else num_blocks
        self._strict: set[str] = set()
        self._unmet: dict[str, Quota] = {}
        """Quotas whose guarantee didn't fit yet."""
        self._following = OwnLock()
        self.debts = PendingPurges(tier, index.cache, fleet_generation, clock)
        self._filling = FillingSlots(index.num_slots)
        self.rows = StagingRows(memory, num_ahead_rows, clock)
        self.patience = DiskPatience(index.cache.config.block_size, clock)
        self.stores = DiskStores(
            tier, index, memory, self.debts, self.patience, self._filling, self.serves, bytes_per_s, clock
        )
        self.promotions = DiskPromotions(
            tier,
            index,
            fill,
            self.rows,
            self.patience,
            self.debts,
            self.stores,
            self._filling,
            self.serves,
            clock,
        )
        index.watch(self.stores.leave, self.stores.reserve_for)

    @property
    def is_open(self) -> bool:
        """Whether the disk serves requests now. Any thread."""
        return self.state == "open"

    @property
    def state(self) -> str:
        """Whether the disk serves requests now, or why not: see TierDetails. Any thread."""
        is_resting = self.tier.state == "open" and self.patience.is_resting
        return "resting" if is_resting else self.tier.state

    # --- tenants, any thread

    def serves(self, tenant: str) -> bool:
        """Whether a tenant's blocks may be on the disk: those of strict ones may not."""
        return tenant not in self._strict

    def may_have(self, tenant: str) -> bool:
        """Whether there may be records of a tenant: of a strict one only until its old ones are destroyed. O(1)."""
        return self.serves(tenant) or self.tier.is_known(tenant)

    @contextmanager
    def forgetting(self, scope: Scope) -> Iterator[Pending]:
        """Within this, what lies above forgets a tenant. From the beginning on, the disk serves nothing of it.

        It owes it once more at the end: what it forgot early may have been stored again. Then it begins to destroy the
        keys. Of a strict tenant it owes nothing, unless older records of it are still here. Yields what will be left to
        do.
        """
        tenant = scope.tenant
        assert tenant is not None
        if self.may_have(tenant):
            self.debts.owe(tenant)
        try:
            yield Pending([self.debts], tenant)
        finally:
            if self.may_have(tenant):
                self.debts.owe(tenant)
                self.debts.begin_to_pay(tenant)

    def follow(self, tenant: str, settings: Tenant | None, *, has_share: bool = True) -> None:
        """Take the settings that a tenant has now; None: it has none any more. Never waits for the disk.

        It has as much of the disk as its guarantee and its limit are of ``num_blocks``, without ``has_share`` no such
        part. Two tenants' changes may come in another order than to the cache. Then a guarantee may not fit yet, which
        is logged; the next change gives it. What the disk has of a strict tenant is pending from now on, and its keys
        are destroyed. O(log tenants), and O(guarantees that don't fit).
        """
        is_strict = settings is not None and settings.mode == "strict"
        with self._following:
            if is_strict:
                self._leave_out(tenant)
            else:
                self._strict.discard(tenant)
                if settings is not None:
                    self.debts.set_incarnation(tenant, settings.incarnation)
            has_share &= settings is not None and not is_strict
            self._give(tenant, self._quota_of(settings) if settings is not None and has_share else NO_QUOTA)

    def _leave_out(self, tenant: str) -> None:
        """Have nothing of a strict tenant from now on."""
        was_served = self.serves(tenant) and self.debts.known(tenant) is not None  # a store of it may run
        self._strict.add(tenant)
        if was_served or self.tier.is_known(tenant):
            _log.info("the disk forgets what it has of tenant %r, which is strict", tenant)
            self.debts.owe(tenant)
            self.debts.begin_to_pay(tenant)

    def _quota_of(self, settings: Tenant) -> Quota:
        least, limit = (
            blocks * self.tier.num_slots // self._num_blocks
            for blocks in (settings.guaranteed_blocks, settings.max_blocks or 0)
        )
        return Quota(least, None if settings.max_blocks is None else max(limit, least, 1), settings.weight)

    def _give(self, tenant: str, quota: Quota) -> None:
        self._unmet.pop(tenant, None)
        try:
            self.tier.set_quota(tenant, quota)
        except ArgumentError as error:
            _log.warning("tenant %r is guaranteed no part of the disk: %s", tenant, error)
            self.tier.set_quota(tenant, replace(quota, guaranteed=0))
            self._unmet[tenant] = quota
            return
        for each, unmet in list(self._unmet.items()):
            with suppress(ArgumentError):
                self.tier.set_quota(each, unmet)
                del self._unmet[each]

    # --- steps

    @property
    def num_running(self) -> int:
        """Promotions, stores, and steps that fill slots, which haven't ended."""
        return self.promotions.num_running + self.stores.num_running + self.rows.num_filling

    def begin_step(self, step: int, num_tokens: int | None) -> None:
        """Begin a step, which computes ``num_tokens`` tokens: store what waits, and end stores that are over.

        A step without tokens waits a moment for the disk. None: it doesn't, and isn't measured (``computed_in``).
        """
        if num_tokens is not None:
            self.patience.begin_step(step, num_tokens)
        self.debts.retry()
        self.rows.begin_step(step)
        self._filling.begin_step(step)
        self.stores.step()
        self.tier.maintain()
        if num_tokens == 0:
            self.promotions.poll(_POLL_S)

    def filled(self, steps: Iterable[int]) -> None:
        """Take that the worker has filled the slots of these steps."""
        steps = list(steps)
        self.rows.filled(steps)
        self._filling.filled(steps)

    def undo(self) -> None:
        """Take that no worker fills slots any more."""
        self.rows.undo()
        self._filling.undo()

    def reset(self) -> None:
        """Forget all records, in a thread. Until that is done, the disk is closed to everybody."""
        self.promotions.cancel()
        self.stores.forget_waiting()
        self.debts.reset()

    def close(self, give_all: Callable[[Callable[[], bool]], None] | None = None) -> None:
        """Store what host memory has, for at most ``CLOSING_S``, sync, and give the folder back.

        ``give_all``: saves what lies above host memory until its argument is true; called when the rest is stored.
        What is ``unpaid`` then stays so, and is logged.
        """
        self.promotions.close()
        ends_at = self._clock() + CLOSING_S
        Pending([self.debts]).wait(max(ends_at - self._clock(), 0.0))
        self.stores.begin_to_close()
        self._finish(ends_at)
        if give_all is not None and self.tier.state == "open":

            def is_over() -> bool:
                self._finish(ends_at)  # the next one may take the slots of the one before
                return self._clock() >= ends_at

            give_all(is_over)
            self._finish(ends_at)
        self.stores.forget_waiting()
        is_idle = self.debts.close(max(ends_at - self._clock(), _ADMIN_S))
        self.tier.close(is_in_use=not is_idle)
        self.stores.close()
        unpaid = self.unpaid()
        if unpaid is not None:
            _log.error("%s", unpaid)

    def unpaid(self) -> str | None:
        """Say which tenants' records the closed disk may still have, though it was to destroy them.

        None: no such ones.
        """
        owed, num_removed, folder = sorted(self.debts.owed), self.debts.num_removed, self.tier.settings.folder
        if not owed and not num_removed:
            return None
        kinds = []
        for is_served, kind in ((True, "purged or cleared tenants"), (False, "strict tenants")):
            these = [each for each in owed if self.serves(each) == is_served]
            if these:
                named = ", ".join(map(repr, these[:_MOST_NAMED])) + ", …" * (len(these) > _MOST_NAMED)
                kinds.append(f"{len(these)} {kind} ({named})")
        if num_removed:
            kinds.append(f"{num_removed} tenants that were removed before the start")
        return (
            f"{folder} was closed and may still have the records of {' and of '.join(kinds)}: "
            f"{self.debts.problem(owed[0] if owed else '')}. Purge them again at the next start. For a tenant that was "
            f"removed: `radixkv disk forget {folder} --tenant NAME`"
        )

    def _finish(self, ends_at: float) -> None:
        """Store what waits until then."""
        while not self.stores.is_idle and self._clock() < ends_at:
            self.stores.step()
            self.stores.poll(_POLL_S)

    def counts(self) -> dict[str, float]:
        """Return what the disk has and did since the start, by the names of ``Ladder.counts``. Any thread."""
        tier, durations = self.tier.counts(), self.promotions.load_durations
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
            "budget_bytes": self.stores.budget_bytes,
        }

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        return self.promotions.take_counts() | self.stores.take_counts() | self.patience.take_counts()


refuse_copies(DiskLevel, "it holds threads and files. Make another")
