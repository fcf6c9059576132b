"""Rows of staging memory, through which records come from the disk: who may have how many.

Tenants that asked in the last ``SHARED_S`` seconds have equal shares of three quarters of the rows. The last quarter is
for one that comes, so it finds rows, whatever the others do. What comes before anybody waits for it has rows of its
own. A strict tenant has rows for itself (``part``), which others give back to it first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Final, Protocol, Self

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
    """Rows of ``memory``: ``rows`` for those that wait, ``ahead`` for what comes ahead."""

    def __init__(
        self, memory: HostMemory, rows: Iterable[int], ahead: Iterable[int], num_rows: int, clock: Clock
    ) -> None:
        self._memory, self._clock, self._num_rows = memory, clock, num_rows
        self._free_rows, self._free_ahead = list(rows), list(ahead)
        self._of_ahead = set(self._free_ahead)
        self._whole: StagingRows | None = None
        self._parts: deque[StagingRows] = deque()
        """Those that lack rows, which come back first."""
        self._holder_of = [""] * memory.num_staging
        self._num_held: Counter[str] = Counter()
        """Rows of tenants, those for what comes ahead excepted."""
        self._asked_at: dict[str, float] = {}
        """When tenants asked for staging memory, the latest last."""
        self._filling: dict[int, list[int]] = {}
        self._filled_now: list[int] = []

    @classmethod
    def of(cls, memory: HostMemory, num_ahead: int, clock: Clock) -> Self:
        """Return all rows of a memory, of which the last ``num_ahead`` are for what comes ahead."""
        num_rows = memory.num_staging - num_ahead
        return cls(memory, range(num_rows), range(num_rows, memory.num_staging), num_rows, clock)

    @property
    def num_rows(self) -> int:
        """Rows for those that wait, free or not."""
        return self._num_rows

    def part(self, num_rows: int) -> StagingRows:
        """Return rows of their own for a tenant, of which one is for what comes ahead. At least two; less than all.

        Those that are in use now follow when they are free.
        """
        part = StagingRows(self._memory, (), (), num_rows - 1, self._clock)
        part._whole = self
        self._num_rows -= num_rows
        self._parts.extend([part] * num_rows)
        self._settle()
        return part

    def end(self) -> None:
        """Give the rows of a part back; those in use follow when they are free."""
        whole = self._whole
        assert whole is not None
        whole._num_rows += self._num_rows + 1
        whole._parts = deque(each for each in whole._parts if each is not self)
        self._num_rows = 0
        self._of_ahead -= set(self._free_ahead)
        free, self._free_rows, self._free_ahead = self._free_rows + self._free_ahead, [], []
        whole._free_rows += free
        whole._settle()

    @property
    def has_ended(self) -> bool:
        """Whether it was a part, and has no rows any more."""
        return self._whole is not None and not self._num_rows

    def _settle(self) -> None:
        """Give free rows to the parts that lack some."""
        while self._parts and self._free_rows:
            part, row = self._parts.popleft(), self._free_rows.pop()
            if part._of_ahead:
                part._free_rows.append(row)
            else:
                part._free_ahead.append(row)
                part._of_ahead.add(row)

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
        return self._num_held.total() + len(self._of_ahead) - len(self._free_ahead)

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
            if row not in self._of_ahead:
                tenant = self._holder_of[row]
                self._num_held[tenant] -= 1
                if not self._num_held[tenant]:
                    del self._num_held[tenant]
            if self.has_ended:
                self._of_ahead.discard(row)
                assert self._whole is not None
                self._whole._free_rows.append(row)
                self._whole._settle()
            else:
                (self._free_ahead if row in self._of_ahead else self._free_rows).append(row)
        self._settle()
