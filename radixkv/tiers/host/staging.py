"""Rows of staging memory, through which records come from the disk: who may have how many.

Tenants that asked in the last ``SHARED_S`` seconds have equal shares of three quarters of the rows. The last quarter is
for one that comes, so it finds rows, whatever the others do. What comes before anybody waits for it has rows of its
own.

A worker copies rows into slots in a step (``fill``). Until it has (``filled``), such a slot holds other bytes than its
entry says, maybe another tenant's. So threads that read slots beside the worker don't take these (``num_ready``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

import numpy as np

from radixkv.clock import Clock
from radixkv.tiers.host.memory import Slots

SHARED_S: Final = 5.0
"""For so long a tenant that asked for staging memory has its share of it."""


class HostMemory(Protocol):
    """The memory of the worker: its slots, and ``num_staging`` rows of the same size."""

    num_staging: int

    def slot_bytes(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""

    def staging_bytes(self, row: int) -> memoryview:
        """Return the bytes of a row of staging memory."""


class _Filled(NamedTuple):
    """What steps copy: rows into slots."""

    rows: list[int]
    slots: Slots


class StagingRows:
    """The rows of ``memory``, which has ``num_slots`` slots.

    The last ``num_ahead`` rows are for what comes ahead, the others for those that wait.
    """

    def __init__(self, memory: HostMemory, num_slots: int, num_ahead: int, clock: Clock) -> None:
        self._memory, self._clock, self._num_rows = memory, clock, memory.num_staging - num_ahead
        self._free_rows = list(range(self._num_rows))
        self._free_ahead = list(range(self._num_rows, memory.num_staging))
        self._holder_of = [""] * memory.num_staging
        self._num_held: Counter[str] = Counter()
        """Rows of tenants, those for what comes ahead excepted."""
        self._asked_at: dict[str, float] = {}
        """When tenants asked for staging memory, the latest last."""
        self._filling: dict[int, list[_Filled]] = {}
        self._filled_now: list[_Filled] = []
        self._num_fills = np.zeros(num_slots, np.int32)
        """In how many steps a slot is filled."""

    def bytes_of(self, row: int) -> memoryview:
        """Return the bytes of a row."""
        return self._memory.staging_bytes(row)

    def take(self, tenant: str) -> int | None:
        """Return a free row; None without one, or if the tenant has its share."""
        return self.take_one(tenant) if self.num_for(tenant) else None

    def take_one(self, tenant: str) -> int:
        """Return a free row for a tenant for which ``num_for`` has counted one."""
        row = self._free_rows.pop()
        self._holder_of[row] = tenant
        self._num_held[tenant] += 1
        return row

    def take_ahead(self) -> int:
        """Return a free row for what comes ahead. There must be one."""
        return self._free_ahead.pop()

    @property
    def num_ahead(self) -> int:
        """Free rows for what comes ahead."""
        return len(self._free_ahead)

    @property
    def num_free(self) -> int:
        """Free rows, for what somebody waits for."""
        return len(self._free_rows)

    def num_for(self, tenant: str) -> int:
        """Return how many rows a tenant may take now. O(tenants that asked lately)."""
        now = self._clock()
        self._asked_at.pop(tenant, None)
        self._asked_at[tenant] = now
        while self._asked_at[first := next(iter(self._asked_at))] < now - SHARED_S:
            del self._asked_at[first]
        share = max((self._num_rows - self._num_rows // 4) // len(self._asked_at), 1)
        return min(max(share - self._num_held[tenant], 0), self.num_free)

    @property
    def are_all_free(self) -> bool:
        """Whether nobody that waits has a row."""
        return len(self._free_rows) == self._num_rows

    def give(self, row: int) -> None:
        """Zero a row, and take it back."""
        self._memory.staging_bytes(row)[:] = bytes(len(self._memory.staging_bytes(row)))
        self._take_back([row])

    @property
    def num_used(self) -> int:
        """Rows that aren't free."""
        return self._memory.num_staging - len(self._free_rows) - len(self._free_ahead)

    # --- steps that copy rows into slots

    @property
    def num_filling(self) -> int:
        """Steps that copy rows into slots, which haven't ended."""
        return len(self._filling)

    @property
    def are_filling(self) -> bool:
        """Whether rows are being copied into slots, or will be in the present step."""
        return bool(self._filling or self._filled_now)

    def fill(self, rows: list[int], slots: Slots) -> None:
        """Record that the present step copies these rows into these slots."""
        self._filled_now.append(_Filled(rows, slots))
        np.add.at(self._num_fills, slots, 1)

    def begin_step(self, step: int) -> None:
        """Give the step that begins its number."""
        if self._filled_now:
            self._filling[step], self._filled_now = self._filled_now, []

    def filled(self, steps: Iterable[int]) -> None:
        """Record that the worker has filled the slots of these steps."""
        for step in steps:
            for each in self._filling.pop(step, ()):
                np.subtract.at(self._num_fills, each.slots, 1)
                self._take_back(each.rows)

    def num_ready(self, slots: Slots) -> int:
        """Return how many of these slots, from the first on, aren't being filled."""
        is_filling = self._num_fills[slots] > 0
        return int(is_filling.argmax()) if is_filling.any() else len(slots)

    def undo(self) -> None:
        """Record that no worker fills slots any more. O(all slots)."""
        lost = [*self._filled_now, *(each for step in self._filling.values() for each in step)]
        self._filled_now, self._filling = [], {}
        self._num_fills[:] = 0
        for each in lost:
            for row in each.rows:
                self.give(row)

    def _take_back(self, rows: Iterable[int]) -> None:
        for row in rows:
            if row >= self._num_rows:
                self._free_ahead.append(row)
                continue
            self._free_rows.append(row)
            tenant = self._holder_of[row]
            self._num_held[tenant] -= 1
            if not self._num_held[tenant]:
                del self._num_held[tenant]
