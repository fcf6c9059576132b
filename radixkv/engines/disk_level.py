"""The disk below the second level: saved blocks are kept in a folder, and come back after an eviction or a restart.

    a request asks what could be loaded     is_waiting   promotes what the disk has: disk → staging → slot
    a step's blocks are saved               note_saved   stores them when the disk has time: slot → disk
    a step begins                           begin_step   stores what waits, ends what is over
    a worker filled slots                   filled       their staging memory is free again
    a purge, a reset                        purge, reset the keys of the records are destroyed

The scheduler's thread uses it, except for ``purge``. Only threads of the tier wait for the disk. A block is one record.

Its parts, which engines may hold themselves:

    promotions    what comes: promotions, single flight, single records   (``disk_promotions``)
    stores        what goes: what waits, leaves, is stored; the budget    (``disk_stores``)
    debts         purges that are owed, news of the fleet, resets         (``disk_debts``)
    rows          staging memory and its shares                           (``staging_rows``)
    patience      for how long requests wait, when the disk rests         (``disk_patience``)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from radixkv.clock import Clock, monotonic
from radixkv.engines.disk_debts import DiskDebts
from radixkv.engines.disk_patience import DiskPatience
from radixkv.engines.disk_promotions import DiskPromotions
from radixkv.engines.disk_stores import DiskStores
from radixkv.engines.host_blocks import Slots
from radixkv.engines.host_index import HostIndex
from radixkv.engines.staging_rows import HostMemory, StagingRows
from radixkv.tiers.disk_tier import DiskTier

CLOSING_S: Final = 10.0
"""The longest time for which ``close`` stores what waits."""
_POLL_S: Final = 0.001
_ADMIN_S: Final = 0.5
"""The shortest time for which ``close`` waits for a purge or a reset that runs."""


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
        self.debts = DiskDebts(tier, index.cache, fleet_generation, clock)
        self.rows = StagingRows(memory, num_ahead_rows, clock)
        self.patience = DiskPatience(index.cache.config.block_size, clock)
        self.stores = DiskStores(tier, index, memory, self.debts, self.patience, serves, bytes_per_s, clock)
        self.promotions = DiskPromotions(
            tier, index, fill, self.rows, self.patience, self.debts, self.stores, serves, clock
        )

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
        self.rows.begin_step(step)
        self.debts.retry()
        self.stores.step()
        self.tier.maintain()
        if num_tokens == 0:
            self.promotions.poll(_POLL_S)

    def reset(self) -> None:
        """Forget all records, in a thread. Until that is done, the disk is closed to everybody."""
        self.promotions.cancel()
        self.stores.forget_waiting()
        self.debts.reset()

    def close(self, give_all: Callable[[Callable[[], bool]], None] | None = None) -> None:
        """Store what host memory has, for at most ``CLOSING_S``, sync, and give the folder back.

        ``give_all``: saves what lies above host memory until its argument is true; called when the rest is stored.
        ``owed`` stays as it is then.
        """
        self.promotions.close()
        ends_at = self._clock() + CLOSING_S
        for tenant in self.debts.owed:
            self.debts.pay(tenant, max(ends_at - self._clock(), 0.0))
        self.stores.begin_to_close()
        self.stores.finish(ends_at)
        if give_all is not None and self.tier.state == "open":

            def is_over() -> bool:
                self.stores.finish(ends_at)  # the next one may take the slots of the one before
                return self._clock() >= ends_at

            give_all(is_over)
            self.stores.finish(ends_at)
        self.stores.forget_waiting()
        is_idle = self.debts.close(max(ends_at - self._clock(), _ADMIN_S))
        self.tier.close(is_in_use=not is_idle)
        self.stores.close()

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        return self.promotions.take_counts() | self.stores.take_counts() | self.patience.take_counts()
