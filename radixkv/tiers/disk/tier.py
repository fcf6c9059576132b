"""The disk below host memory: saved blocks are kept in a folder, and come back after an eviction or a restart.

    a step's blocks are saved               offer        stores them when the disk has time: slot → disk
    a request asks what could be loaded     find, read   single records, into staging memory, for ``loading``
                                            promotions   the same into slots, for vLLM's connector and prompts to come
    a step begins                           begin_step   stores what waits, ends what is over
    a worker filled slots                   filled       their staging memory is free again
    a purge, a reset                        forget, reset  the keys of the records are destroyed

The scheduler's thread uses it, except for what forgets. Only threads of the tier wait for the disk. A block is one
record (``records``).

Its parts, which engines may hold themselves:

    purges        purges that are to be carried out, news of the fleet, resets   (``pending``)
    promotions    what comes: promotions, single flight                          (``promotions``)
    demotions     what goes: what waits, leaves, is stored; the budget           (``demotions``)
    rows          staging memory and its shares                                  (``host.staging``)
    patience      for how long requests wait, when the disk rests                (``patience``)

**Tenants** have parts of the disk (``follow``): as much of it as their settings give them of the tier above.

**Strict tenants** have nothing on the disk (``tier.may_lie_below`` is the rule). How long it takes to read, to store or
to forget would tell them of others' traffic. So nothing of them is stored or looked for, and no request, purge or clear
of theirs waits for the disk. If the folder has records of a tenant that is strict now, their keys are destroyed. That
is pending until it is done, like a purge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from radixkv.clock import Clock, monotonic
from radixkv.config import Namespace, Tenant
from radixkv.errors import ArgumentError
from radixkv.forks import OwnLock
from radixkv.index.below import Scope
from radixkv.tiers.disk.demotions import DiskDemotions
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.disk.patience import DiskPatience
from radixkv.tiers.disk.promotions import DiskPromotions
from radixkv.tiers.disk.records import DiskRecords
from radixkv.tiers.disk.slots import NO_QUOTA, Quota
from radixkv.tiers.host.index import HostIndex
from radixkv.tiers.host.memory import Slots
from radixkv.tiers.host.staging import HostMemory, StagingRows
from radixkv.tiers.pending import Pending, PendingPurges
from radixkv.tiers.tier import Offer, Records, may_lie_below
from radixkv.uncopied import refuse_copies

CLOSING_S: Final = 10.0
"""The longest time for which ``close`` stores what waits."""
_MOST_NAMED: Final = 8
_POLL_S: Final = 0.001
_ADMIN_S: Final = 0.5
"""The shortest time for which ``close`` waits for a purge or a reset that runs."""

_log = logging.getLogger(__name__)


class DiskTier:
    """Keeps the blocks of ``index`` as ``records``, whose segments are blocks. A ``Tier``.

    - ``memory``: the slots' bytes. ``fill``: makes the worker copy rows of staging memory into slots, in this step.
    - ``fleet_generation``: returns the newest generation of a tenant that its salts have shown, or the fleet. None
      while what is above may have older KV: then the disk isn't asked, and stores nothing.
    - ``num_blocks``: blocks that tenants' settings count, in the tier above; None for the slots of host memory.
    - ``bytes_per_s``: the most that is written on average; None for no bound.
    - ``num_ahead_rows``: rows of the memory for what comes before anybody waits for it.

    It closes the records. Raises nothing that the disk does.
    """

    def __init__(
        self,
        records: DiskRecords,
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
        self.records, self._clock = records, clock
        self._num_blocks = index.num_slots if num_blocks is None else num_blocks
        self._strict: set[str] = set()
        self._unmet: dict[str, Quota] = {}
        """Quotas whose guarantee didn't fit yet."""
        self._following = OwnLock()
        self.purges = PendingPurges(records, index.cache, fleet_generation, clock)
        self.rows = StagingRows(memory, index.num_slots, num_ahead_rows, clock)
        self.patience = DiskPatience(index.cache.config.block_size, clock)
        self.demotions = DiskDemotions(
            records, index, memory, self.purges, self.patience, self.rows, self.serves, bytes_per_s, clock
        )
        self.promotions = DiskPromotions(
            records, index, fill, self.rows, self.patience, self.purges, self.demotions, self.serves, clock
        )
        index.watch(self.demotions.leave, self.demotions.reserve_for)

    @property
    def is_open(self) -> bool:
        """Whether the disk serves requests now. Any thread."""
        return self.state == "open"

    @property
    def state(self) -> str:
        """Whether the disk serves requests now, or why not: see TierDetails. Any thread."""
        is_resting = self.records.state == "open" and self.patience.is_resting
        return "resting" if is_resting else self.records.state

    # --- Tier

    def offer(self, offer: Offer, source: Records = ()) -> None:
        """See ``Tier``. It takes the bytes from the slots when the disk has time, so it needs no ``source``."""
        self.demotions.offer(offer)

    def find(self, namespace: Namespace, key: bytes, first: int) -> int:
        """See ``Tier``. 0 while it may serve nothing of the tenant. O(tokens) of what is there, no I/O."""
        is_open = self.promotions.place_of(namespace) is not None and self.purges.is_known(namespace.tenant)
        return self.promotions.located(namespace, key, first) if is_open else 0

    def read(
        self,
        namespace: Namespace,
        key: bytes,
        block: int,
        into: memoryview,
        *,
        begun: list[Job] | None = None,
    ) -> Job | None:
        """See ``Tier`` and ``DiskRecords.load``."""
        return self.records.load(self.purges.on_disk(namespace), key, block, into, begun=begun)

    def forget(self, scope: Scope) -> Pending:
        """See ``Tier``. The keys of records are those of tenants, so a namespace takes all of its tenant with it.

        Any thread.
        """
        tenant = scope.tenant
        if tenant is None:
            self.purges.add_all_but(scope.but)
        elif self.may_have(tenant):
            self.purges.add(tenant)
            self.purges.retry(tenant)
        return Pending([self.purges], tenant)

    def wait(self, timeout_s: float) -> bool:
        """See ``Tier``."""
        ends_at = self._clock() + timeout_s
        while not self.demotions.is_idle and self._clock() < ends_at:
            self.demotions.step()
            self.demotions.poll(_POLL_S)
        return self.demotions.is_idle

    # --- tenants, any thread

    def serves(self, tenant: str) -> bool:
        """Whether a tenant's blocks may be on the disk: those of strict ones may not."""
        return tenant not in self._strict

    def may_have(self, tenant: str) -> bool:
        """Whether there may be records of a tenant: of a strict one only until its old ones are destroyed. O(1)."""
        return self.serves(tenant) or self.records.folder.is_known(tenant)

    @contextmanager
    def forgetting(self, scope: Scope) -> Iterator[Pending]:
        """Within this, what lies above forgets a tenant. From the beginning on, the disk serves nothing of it.

        What it forgot early may have been stored again, so it forgets once more at the end, and only then destroys the
        keys. Yields what will be left to do.
        """
        if scope.tenant is not None and self.may_have(scope.tenant):
            self.purges.add(scope.tenant)
        try:
            yield Pending([self.purges], scope.tenant)
        finally:
            self.forget(scope)

    def follow(self, tenant: str, settings: Tenant | None, *, has_share: bool = True) -> None:
        """Take the settings that a tenant has now; None: it has none any more. Never waits for the disk.

        It has as much of the disk as its guarantee and its limit are of ``num_blocks``, without ``has_share`` no such
        part. Two tenants' changes may come in another order than to the cache. Then a guarantee may not fit yet, which
        is logged; the next change gives it. What the disk has of a strict tenant is pending from now on, and its keys
        are destroyed. O(log tenants), and O(guarantees that don't fit).
        """
        is_strict = not may_lie_below(settings)
        with self._following:
            if is_strict:
                self._leave_out(tenant)
            else:
                self._strict.discard(tenant)
                if settings is not None:
                    self.purges.set_incarnation(tenant, settings.incarnation)
            has_share &= settings is not None and not is_strict
            self._give(tenant, self._quota_of(settings) if settings is not None and has_share else NO_QUOTA)

    def _leave_out(self, tenant: str) -> None:
        """Have nothing of a strict tenant from now on."""
        was_served = self.serves(tenant) and self.purges.known(tenant) is not None  # a store of it may run
        self._strict.add(tenant)
        if was_served or self.records.folder.is_known(tenant):
            _log.info("the disk forgets what it has of tenant %r, which is strict", tenant)
            self.purges.add(tenant)
            self.purges.retry(tenant)

    def _quota_of(self, settings: Tenant) -> Quota:
        least, limit = (
            blocks * self.records.num_slots // self._num_blocks
            for blocks in (settings.guaranteed_blocks, settings.max_blocks or 0)
        )
        return Quota(least, None if settings.max_blocks is None else max(limit, least, 1), settings.weight)

    def _give(self, tenant: str, quota: Quota) -> None:
        self._unmet.pop(tenant, None)
        try:
            self.records.set_quota(tenant, quota)
        except ArgumentError as error:
            _log.warning("tenant %r is guaranteed no part of the disk: %s", tenant, error)
            self.records.set_quota(tenant, replace(quota, guaranteed=0))
            self._unmet[tenant] = quota
            return
        for each, unmet in list(self._unmet.items()):
            with suppress(ArgumentError):
                self.records.set_quota(each, unmet)
                del self._unmet[each]

    # --- steps

    @property
    def num_running(self) -> int:
        """Promotions, stores, and steps that fill slots, which haven't ended."""
        return self.promotions.num_running + self.demotions.num_running + self.rows.num_filling

    def begin_step(self, step: int, num_tokens: int | None) -> None:
        """Begin a step, which computes ``num_tokens`` tokens: store what waits, and end stores that are over.

        A step without tokens waits a moment for the disk. None: it doesn't, and isn't measured (``computed_in``).
        """
        if num_tokens is not None:
            self.patience.begin_step(step, num_tokens)
        self.purges.retry_due()
        self.rows.begin_step(step)
        self.demotions.step()
        self.records.maintain()
        if num_tokens == 0:
            self.promotions.poll(_POLL_S)

    def filled(self, steps: Iterable[int]) -> None:
        """Take that the worker has filled the slots of these steps."""
        self.rows.filled(steps)

    def undo(self) -> None:
        """Take that no worker fills slots any more."""
        self.rows.undo()

    def reset(self) -> None:
        """Forget all records, in a thread. Until that is done, the disk is closed to everybody."""
        self.promotions.cancel()
        self.demotions.forget_waiting()
        self.purges.reset()

    def close(self, give_all: Callable[[Callable[[], bool]], None] | None = None) -> None:
        """Store what host memory has, for at most ``CLOSING_S``, sync, and give the folder back.

        ``give_all``: saves what lies above host memory until its argument is true; called when the rest is stored.
        What is ``unfinished`` then stays so, and is logged.
        """
        self.promotions.close()
        ends_at = self._clock() + CLOSING_S
        Pending([self.purges]).wait(max(ends_at - self._clock(), 0.0))
        self.demotions.begin_to_close()
        self.wait(ends_at - self._clock())
        if give_all is not None and self.records.state == "open":

            def is_over() -> bool:
                self.wait(ends_at - self._clock())  # the next one may take the slots of the one before
                return self._clock() >= ends_at

            give_all(is_over)
            self.wait(ends_at - self._clock())
        self.demotions.forget_waiting()
        is_idle = self.purges.close(max(ends_at - self._clock(), _ADMIN_S))
        self.records.close(is_in_use=not is_idle)
        self.demotions.close()
        unfinished = self.unfinished()
        if unfinished is not None:
            _log.error("%s", unfinished)

    def unfinished(self) -> str | None:
        """Say which tenants' records the closed disk may still have, though it was to destroy them.

        None: no such ones.
        """
        owed, num_removed, folder = (
            sorted(self.purges.owed),
            self.purges.num_removed,
            self.records.settings.folder,
        )
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
            f"{self.purges.problem(owed[0] if owed else '')}. Purge them again at the next start. For a tenant that "
            f"was removed: `radixkv disk forget {folder} --tenant NAME`"
        )

    def counts(self) -> dict[str, float]:
        """Return what the disk has and did since the start, by the names of ``Ladder.counts``. Any thread."""
        tier, durations = self.records.counts(), self.promotions.load_durations
        errors = ("refused", "read_errors", "write_errors", "sync_errors", "damaged")
        return {
            "capacity_blocks": self.records.num_slots,
            "resident_blocks": tier["sealed"],
            "read_bytes": tier.get("read_bytes", 0),
            "written_bytes": tier.get("written_bytes", 0),
            "loads": durations.count,
            "load_seconds": durations.seconds,
            "errors": sum(tier.get(name, 0) for name in errors),
            "open": int(self.is_open),
            "owed_purges": self.purges.num_owed,
            "budget_bytes": self.demotions.budget_bytes,
        }

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        return self.promotions.take_counts() | self.demotions.take_counts() | self.patience.take_counts()


refuse_copies(DiskTier, "it holds threads and files. Make another")
