"""Sums of usage records in memory, by hour, tenant, key, model and kind.

Each tenant has its own rows, so nothing of one tenant changes what another sees, nor how long it takes. Rows of hours
that ended more than ``keep_s`` ago are dropped, and a tenant has at most MOST_ROWS, of which the oldest hours go first.
A tenant that was removed and made again starts from nothing: the earlier rows are shown only to the operator.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

from radixkv.metering.records import Counts, Row, UsageRecord
from radixkv.signing import frame

MOST_ROWS: Final = 65_536


class Sum(NamedTuple):
    """One row and its counts. ``place`` orders rows: by hour, then by a hash of the row."""

    row: Row
    counts: Counts

    @property
    def place(self) -> str:
        """The hour, and 16 hex digits that name the row within it."""
        framed = frame(*self.row)
        return f"{self.row.hour}-{hashlib.blake2b(framed, digest_size=8).hexdigest()}"


class UsageSums:
    """Sums of records. Thread-safe. ``keep_s``: how long rows are kept after their hour began."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._tenants: dict[str, dict[Row, Counts]] = {}
        self._tenancies: dict[str, int] = {}
        self._incarnations: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def add(self, record: UsageRecord) -> None:
        """Count a record. O(1), and O(the tenant's rows) when its oldest hour is dropped."""
        with self._lock:
            now = record.tenancy + (record.kind == "removed")
            self._tenancies[record.tenant] = max(self._tenancy(record.tenant), now)
            if record.incarnation and record.tenancy >= self._incarnations.get(record.tenant, (0, ""))[0]:
                self._incarnations[record.tenant] = record.tenancy, record.incarnation
            rows = self._tenants.setdefault(record.tenant, {})
            row = record.row
            is_new = row not in rows
            rows[row] = rows.get(row, Counts()) + record.counts
            if is_new:
                self._drop_old(rows, record.time_s)

    def tenancy(self, tenant: str) -> int:
        """Return how often a tenant of this name was removed."""
        with self._lock:
            return self._tenancy(tenant)

    def incarnation(self, tenant: str) -> str:
        """Return the incarnation of the tenant that has this name now; empty if no record says it."""
        with self._lock:
            tenancy, incarnation = self._incarnations.get(tenant, (0, ""))
            return incarnation if tenancy == self._tenancy(tenant) else ""

    def of(self, tenant: str, start_s: float, end_s: float, more: Iterable[UsageRecord] = ()) -> list[Sum]:
        """Return a tenant's rows with hours that begin in ``[start_s, end_s)``, in order. O(the tenant's rows).

        ``more``: records that count here although they were not added.
        """
        tenancy = self.tenancy(tenant)
        return [each for each in self.all(tenant, start_s, end_s, more) if each.row.tenancy == tenancy]

    def all(
        self, tenant: str | None, start_s: float, end_s: float, more: Iterable[UsageRecord] = ()
    ) -> list[Sum]:
        """Return the rows of all tenants, or of one, also of removed ones. O(all rows). For the operator."""
        with self._lock:
            chosen = list(self._tenants) if tenant is None else [tenant]
        rows: dict[Row, Counts] = {}
        for each in chosen:
            with self._lock:  # taken for one tenant at a time: requests that end wait for it
                rows.update(self._tenants.get(each, {}))
        for record in more:
            rows[record.row] = rows.get(record.row, Counts()) + record.counts
        found = (Sum(*each) for each in rows.items() if start_s <= each[0].hour < end_s)
        return sorted(found, key=lambda each: (each.row.hour, each.place))

    def tenants(self) -> list[str]:
        """Return the tenants that have rows and were not removed since the last of them."""
        with self._lock:
            return [
                tenant
                for tenant, rows in self._tenants.items()
                if any(row.tenancy == self._tenancy(tenant) for row in rows)
            ]

    def _tenancy(self, tenant: str) -> int:
        return self._tenancies.get(tenant, 0)

    def _drop_old(self, rows: dict[Row, Counts], now_s: float) -> None:
        """Drop hours that are too old, and the oldest of too many; never the newest. O(1) if there are none."""
        if len(rows) <= MOST_ROWS and next(iter(rows)).hour + self._keep_s >= now_s:
            return
        hours = sorted({row.hour for row in rows})
        for hour in hours[:-1]:
            if len(rows) <= MOST_ROWS and hour + self._keep_s >= now_s:
                break
            for row in [row for row in rows if row.hour == hour]:
                del rows[row]


def total(sums: Iterable[Sum]) -> Counts:
    """Return the sum of all rows."""
    found = Counts()
    for each in sums:
        found = found + each.counts
    return found
