"""Records that wait to be written, bounded for each tenant, so that one tenant's records push out no other's.

A tenant's first MOST_EACH records wait as they are. While the disk fails and there are more, they are merged with a
waiting record of the same row. Sums stay exact then. A record of a new row beyond MOST_ROWS is lost, and counted.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, NamedTuple

from radixkv.billing.usage_record import Row, UsageRecord

MOST_EACH: Final = 2_048
MOST_ROWS: Final = 512

Written = Future[None]
"""Done once its record is in its file."""


class Waiting(NamedTuple):
    """A record that waits, and what to tell once it is written; None if nothing waits for it."""

    record: UsageRecord
    written: Written | None


class _Lane:
    """One tenant's waiting records."""

    __slots__ = ("merged", "records")

    def __init__(self) -> None:
        self.records: deque[Waiting] = deque()
        self.merged: dict[Row, UsageRecord] = {}

    @property
    def has_place(self) -> bool:
        return not self.merged and len(self.records) < MOST_EACH

    def wait(self, record: UsageRecord) -> Written:
        written: Written = Future()
        self.records.append(Waiting(record, written))
        return written

    def merge(self, record: UsageRecord) -> bool:
        """Add it to the record of its row; False if there are too many rows."""
        before = self.merged.get(record.row)
        if before is None and len(self.merged) >= MOST_ROWS:
            return False
        counts = record.counts if before is None else before.counts + record.counts
        self.merged[record.row] = replace(before or record, counts=counts)
        return True

    def take(self, most: int) -> list[Waiting]:
        found = [self.records.popleft() for _ in range(min(most, len(self.records)))]
        while self.merged and len(found) < most:
            row = next(iter(self.merged))
            found.append(Waiting(self.merged.pop(row), None))
        return found


class Pending:
    """All tenants' waiting records. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self.num_lost = 0

    def __len__(self) -> int:
        """Number of records that wait."""
        return sum(len(lane.records) + len(lane.merged) for lane in self._lanes.values())

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, record: UsageRecord) -> Written | None:
        """Take a record. Returns its future; None if it was merged or lost, so nothing should wait for it. O(1)."""
        lane = self._lanes.setdefault(record.tenant, _Lane())
        if lane.has_place:
            return lane.wait(record)
        if not lane.merge(record):
            self.num_lost += max(record.counts.requests, 1)
        return None

    def take(self, most: int) -> list[Waiting]:
        """Remove and return some records: each tenant's in order, tenant by tenant in turns."""
        found: list[Waiting] = []
        while self._lanes and len(found) < most:
            tenant, lane = next(iter(self._lanes.items()))
            found += lane.take(most - len(found))
            if not (lane.records or lane.merged):
                del self._lanes[tenant]
        return found
