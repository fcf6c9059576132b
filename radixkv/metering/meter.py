"""The meter: what each tenant used, for ``GET /v1/usage`` and for the folder of records.

    model's thread   bill ──▶ sums, in memory ──▶ writer, if there is a folder

Every request that used the model is billed in one place: completions of all shapes where they are generated
(``service.endpoints.completions``), warms and pins where they share what is computed (``service.warming``), bases where
they are published. Whichever way a request ends, it is billed for what was read, computed and generated until then; if
that is nothing, there is no record.

**Held.** ``sample`` is told each tenant's resident and pinned tokens about once a second. They count for the time since
the sample before. A record of kind ``held`` is written every TELL_EVERY_S and at the end of an hour. A crash loses
what was not written.

**Tenancies.** A tenant that is removed gets a record of kind ``removed``. A later tenant of the same name sees nothing
of what was before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from radixkv.clock import Clock, monotonic
from radixkv.metering.records import HOUR_S, Counts, Kind, UsageRecord
from radixkv.metering.sums import Sum, UsageSums
from radixkv.metering.writer import WAIT_S, UsageWriter, WriterState

OPERATOR: Final = ""
"""The operator's name in records; no tenant can have it."""
TELL_EVERY_S: Final = 60.0
KEEP_S: Final = 35 * 86_400.0
TTL_CLASSES: Final = (300, 1_800, 3_600, 43_200, *(86_400 * days for days in range(1, 32)))
"""Other TTLs are billed as the next of these, in seconds; longer ones as the last."""


class Payer(NamedTuple):
    """Who pays: a tenant, the id of its key (empty: none was used), and which tenant of that name it is."""

    tenant: str
    key: str = ""
    tenancy: int = 0
    incarnation: str = ""


class Level(NamedTuple):
    """Tokens that a tenant has resident, and those of them that pins keep."""

    resident: int
    pinned: int


_NOTHING: Final = Level(0, 0)


@dataclass(slots=True)
class _Held:
    """What a tenant holds since ``since_s``, and token-seconds that no record says yet."""

    payer: Payer
    since_s: float
    level: Level = _NOTHING
    held: float = 0.0
    pinned: float = 0.0

    def advance(self, now_s: float) -> None:
        seconds = now_s - self.since_s
        self.held += self.level.resident * seconds
        self.pinned += self.level.pinned * seconds
        self.since_s = now_s

    def counts(self) -> Counts:
        return Counts(held_token_ms=int(self.held * 1000), pinned_token_ms=int(self.pinned * 1000))

    def told(self, counts: Counts) -> None:
        self.held -= counts.held_token_ms / 1000
        self.pinned -= counts.pinned_token_ms / 1000


class Meter:
    """Counts usage of one service process. Thread-safe. ``close`` it.

    ``removals``: how often a tenant of a name was removed in this process. ``incarnation``: of the tenant of a name.
    """

    def __init__(
        self,
        model: str,
        sums: UsageSums | None = None,
        log: UsageWriter | None = None,
        removals: Callable[[str], int] = lambda tenant: 0,
        incarnation: Callable[[str], str] = lambda tenant: "",
        *,
        wall: Callable[[], float] = time.time,
        clock: Clock = monotonic,
    ) -> None:
        self._model, self._sums, self._log = model, sums or UsageSums(KEEP_S), log
        self._removals, self._incarnation = removals, incarnation
        self._wall, self._clock = wall, clock
        self._noticed: dict[str, int] = {}
        self._held: dict[str, _Held] = {}
        self._told_at, self._hour = clock(), int(wall() // HOUR_S)
        self._lock = threading.RLock()

    def payer(self, tenant: str, key: str = "") -> Payer:
        """Return who pays for a request that begins now."""
        with self._lock:
            self._notice(tenant)
            return self._payer(tenant, key)

    def bill(self, kind: Kind, payer: Payer, usage: Counts) -> int:
        """Count a request that ended. From any thread, about 50 µs; never waits for a disk.

        Returns the number of its record, for ``written``.
        """
        written: dict[int, int] = {}
        for ttl_s, tokens in usage.written.items():
            ttl_class = TTL_CLASSES[min(bisect_left(TTL_CLASSES, ttl_s), len(TTL_CLASSES) - 1)]
            written[ttl_class] = written.get(ttl_class, 0) + tokens
        return self._record(kind, payer, replace(usage, written=written, requests=1))

    async def written(self, number: int) -> None:
        """Wait until a record is in its file, so that it outlives the process. Called before an answer ends.

        Returns after WAIT_S at the latest, and at once without a folder or while its disk fails.
        """
        if self._log is None or not number:
            return
        loop = asyncio.get_running_loop()
        appended = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(appended.set)

        self._log.on_appended(number, tell)
        with suppress(TimeoutError):
            await asyncio.wait_for(appended.wait(), WAIT_S)

    def sample(self, levels: Mapping[str, Level]) -> None:
        """Take what each tenant holds now; write records of it if it is time. O(tenants)."""
        now_s, hour = self._clock(), int(self._wall() // HOUR_S)
        with self._lock:
            for tenant in {*self._held, *levels}:
                self._advance(tenant, levels.get(tenant), now_s)
            if hour != self._hour or now_s >= self._told_at + TELL_EVERY_S:
                self._tell(self._hour * HOUR_S + HOUR_S - 1 if hour != self._hour else self._wall())
                self._told_at, self._hour = now_s, hour

    def forget_absent(self, tenants: Collection[str]) -> None:
        """End the tenancies of tenants in the records that no longer exist, or were made again. Called once."""
        with self._lock:
            for tenant in {*self._sums.tenants()} - {OPERATOR}:
                logged, now = self._sums.incarnation(tenant), self._incarnation(tenant)
                if tenant not in tenants or (logged and now and logged != now):
                    self._end(tenant)

    def of(self, tenant: str, start_s: float, end_s: float) -> list[Sum]:
        """Return a tenant's own rows, with what it held up to now. O(the tenant's rows)."""
        with self._lock:
            self._notice(tenant)
            untold = self._untold([tenant])
        return self._sums.of(tenant, start_s, end_s, untold)

    def all(self, tenant: str | None, start_s: float, end_s: float) -> list[Sum]:
        """Return the rows of all tenants, or of one, removed ones too. O(all rows)."""
        with self._lock:
            untold = self._untold(list(self._held) if tenant is None else [tenant])
        return self._sums.all(tenant, start_s, end_s, untold)

    @property
    def log_state(self) -> WriterState | None:
        """The state of the folder of records; None without one."""
        return None if self._log is None else self._log.state()

    def close(self) -> None:
        """Write what tenants held, and end the records. Waits for the disk, for seconds at most."""
        with self._lock:
            for tenant in [*self._held]:
                self._advance(tenant, None, self._clock())
            self._tell(self._wall())
        if self._log is not None:
            self._log.close()

    # --- with the lock held

    def _of(self, kind: Kind, payer: Payer, counts: Counts, time_s: float | None = None) -> UsageRecord:
        moment = self._wall() if time_s is None else time_s
        tenant, key, tenancy, incarnation = payer
        return UsageRecord(moment, tenant, kind, self._model, key, tenancy, counts, incarnation)

    def _record(self, kind: Kind, payer: Payer, counts: Counts, time_s: float | None = None) -> int:
        record = self._of(kind, payer, counts, time_s)
        self._sums.add(record)
        return 0 if self._log is None else self._log.record(record)

    def _notice(self, tenant: str) -> None:
        """End the tenancy of a tenant that was removed since."""
        removals = self._removals(tenant)
        if removals > self._noticed.get(tenant, 0):
            self._noticed[tenant] = removals
            self._end(tenant)

    def _end(self, tenant: str) -> None:
        """End the tenancy of a tenant."""
        earlier = Payer(tenant, "", self._sums.tenancy(tenant), self._sums.incarnation(tenant))
        self._record("removed", earlier, Counts())

    def _payer(self, tenant: str, key: str = "") -> Payer:
        return Payer(tenant, key, self._sums.tenancy(tenant), self._incarnation(tenant))

    def _advance(self, tenant: str, level: Level | None, now_s: float) -> None:
        """Count what a tenant held until now, and take what it holds from now on; None: it is gone."""
        self._notice(tenant)
        payer = self._payer(tenant)
        held = self._held.get(tenant)
        if held is not None:
            held.advance(now_s)
            if level is None or held.payer != payer:
                self._tell_of(self._held.pop(tenant), self._wall())
                held = None
        if level is not None:
            held = held or self._held.setdefault(tenant, _Held(payer, now_s))
            held.level = level

    def _tell(self, time_s: float) -> None:
        for held in self._held.values():
            self._tell_of(held, time_s)

    def _tell_of(self, held: _Held, time_s: float) -> None:
        counts = held.counts()
        if counts.held_token_ms or counts.pinned_token_ms:
            held.told(counts)
            self._record("held", held.payer, counts, time_s)

    def _untold(self, tenants: Collection[str]) -> list[UsageRecord]:
        """Return records of what tenants held since the last record, which are not written."""
        held = [self._held[tenant] for tenant in tenants if tenant in self._held]
        for each in held:
            each.advance(self._clock())
        found = [self._of("held", each.payer, each.counts()) for each in held]
        return [each for each in found if each.counts != Counts()]


def usage_levels(state: Callable[[], WriterState | None]) -> list[tuple[str, str, Callable[[], float]]]:
    """Return the gauges of the folder of records, which are 0 without one: names, texts, and what reads them."""

    def level(
        name: str, text: str, read: Callable[[WriterState], float]
    ) -> tuple[str, str, Callable[[], float]]:
        return name, text, lambda: 0.0 if (found := state()) is None else read(found)

    return [
        level("usage_records_written", "Usage records in files since the start", lambda log: log.num_written),
        level("usage_records_durable", "Those that were synced to the disk", lambda log: log.num_durable),
        level("usage_records_waiting", "Usage records that wait to be written", lambda log: log.num_waiting),
        level(
            "usage_lost",
            "Usage records that were never written: the disk failed or was too slow for too long",
            lambda log: log.num_lost,
        ),
        level("usage_errors", "Failed writes and syncs of usage records", lambda log: log.num_errors),
        level("usage_failing", "1 while usage records can't be written", lambda log: bool(log.problem)),
        level(
            "usage_lines_skipped",
            "Lines found at the start that were no records, such as the torn end of a crash",
            lambda log: log.num_skipped,
        ),
    ]
