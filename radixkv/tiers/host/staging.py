"""Rows of staging memory, through which records come from the disk: who may have how many.

Tenants that asked in the last ``SHARED_S`` seconds have equal shares of three quarters of the rows. The last quarter is
for one that comes, so it finds rows, whatever the others do. What comes before anybody waits for it has rows of its
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Protocol

from radixkv.clock import Clock

SHARED_S: Final = 5.0
"""For so long a tenant that asked for staging memory has its share of it."""


class HostMemory(Protocol):
    """The memory of the worker: its slots, and ``num_staging`` rows of the same size."""

    num_staging: int

    def slot_bytes(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""

    def staging_bytes(self, row: int) -> memoryview:
        """Return the bytes of a row of staging memory."""


class StagingRows:
    """The rows of ``memory``: the last ``num_ahead`` for what comes ahead, the others for those that wait."""

    def __init__(self, memory: HostMemory, num_ahead: int, clock: Clock) -> None:
        self._memory, self._clock, self._num_rows = memory, clock, memory.num_staging - num_ahead
        self._free_rows = list(range(self._num_rows))
        self._free_ahead = list(range(self._num_rows, memory.num_staging))
        self._holder_of = [""] * memory.num_staging
        self._num_held: Counter[str] = Counter()
        """Rows of tenants, those for what comes ahead excepted."""
        self._asked_at: dict[str, float] = {}
        """When tenants asked for staging memory, the latest last."""
        self._filling: dict[int, list[int]] = {}
        self._filled_now: list[int] = []

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

    def fill(self, rows: Iterable[int]) -> None:
        """Take that the present step copies these rows into slots."""
        self._filled_now += rows

    def begin_step(self, step: int) -> None:
        """Give the step that begins its number."""
        if self._filled_now:
            self._filling[step] = self._filled_now
            self._filled_now = []

    def filled(self, steps: Iterable[int]) -> None:
        """Take that the worker has filled the slots of these steps."""
        for step in steps:
            self._take_back(self._filling.pop(step, ()))

    def undo(self) -> None:
        """Take that no worker fills slots any more."""
        rows = [*self._filled_now, *(row for each in self._filling.values() for row in each)]
        self._filled_now, self._filling = [], {}
        for row in rows:
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
