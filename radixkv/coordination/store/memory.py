"""The store as a plain object, with the clock as an argument. Every other store is tested against it.

Replicas of one process share one store, which is always up to date. ``is_reachable = False`` simulates an outage.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from radixkv.clock import Clock, monotonic
from radixkv.coordination.store.holdings import Holdings
from radixkv.coordination.store.protocol import (
    ENTRIES_A_READ,
    JOB_TTL_S,
    LISTED_S,
    MAX_CONFIRMED,
    MAX_JOBS,
    MAX_NOTES,
    MAX_PARTS,
    MAX_PINS,
    MAX_PURGES,
    MAX_REPLICAS,
    Durable,
    Fetched,
    Grant,
    Logged,
    Looked,
    SavedSnapshot,
    Seen,
    Share,
    Store,
    TenantFacts,
    Verdict,
    WriteResult,
)
from radixkv.coordination.store.wire import (
    MAX_LEASE_MS,
    NEVER,
    NO_LIMIT,
    Confirmed,
    Entry,
    Limit,
    Raised,
    Registration,
)
from radixkv.coordination.values import FleetPin, JobPart, Load, WarmJob, Writer
from radixkv.errors import StoreUnavailable
from radixkv.uncopied import refuse_copies


@dataclass(slots=True)
class Record:
    """One replica in the store. ``log`` has its entries by number, in order."""

    registration: Registration
    load: Load = field(default_factory=Load)
    live_until: float = 0.0
    listed_until: float = 0.0
    log: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    saved: SavedSnapshot | None = None
    replaced_until: float = 0.0
    """Until when another process that had the id may think that its lease runs."""


@dataclass(slots=True)
class Account:
    """One tenant in the store; ``shares`` with the time at which each expires."""

    limit: Limit = NO_LIMIT
    raised: Raised = NEVER
    shares: dict[str, tuple[float, Share]] = field(default_factory=dict)
    confirmed: dict[str, Confirmed] = field(default_factory=dict)


@dataclass(slots=True)
class Pinned:
    """One pin of a tenant in the store; ``parts`` by replica."""

    pin: FleetPin
    until: float
    parts: dict[str, JobPart] = field(default_factory=dict)


class MemoryStore(Store):
    """See ``protocol.Store``. Thread-safe; leases, shares and jobs expire by ``clock``."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.clock = clock
        self.is_reachable = True
        self.records: dict[str, Record] = {}
        self.accounts: dict[bytes, Account] = {}
        self.announced: OrderedDict[bytes, int] = OrderedDict()
        self.jobs: OrderedDict[str, tuple[float, WarmJob]] = OrderedDict()
        self.num_jobs = 0
        self._id = secrets.token_hex(16)
        self.pinned: dict[bytes, dict[str, Pinned]] = {}
        self.noted: dict[bytes, dict[bytes, bytes]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def _open(self) -> Iterator[None]:
        if not self.is_reachable:
            raise StoreUnavailable("the memory store is switched off")
        with self._lock:
            yield

    def lose(self) -> None:
        """Forget everything, as a store does that restarts without having saved."""
        with self._lock:
            for kept in (self.records, self.accounts, self.announced, self.jobs, self.pinned, self.noted):
                kept.clear()
            self._id = secrets.token_hex(16)

    def close(self) -> None:
        """Do nothing: there are no connections."""

    # ---- a replica's own facts

    def boot(self, registration: Registration) -> Durable:
        with self._open():
            old = self.records.get(registration.replica_id)
            before = 0 if old is None else old.registration.epoch
            epoch = max(before + 1, registration.epoch + 1, int(self.clock() * 1000))
            left_s = 0.0 if old is None else self._replaced_left_s(old)
            if old is not None and old.registration.process != registration.process:
                left_s = max(left_s, old.live_until - self.clock())
            left_ms = math.ceil(left_s * 1000)
            booted = replace(registration, epoch=epoch, last_seq=1, proof="", replaced_ms=left_ms)
            record = Record(booted, replaced_until=self.clock() + left_s)
            record.listed_until = 0.0 if old is None else old.listed_until
            record.log[1] = Entry("clear", b"")
            self.records[registration.replica_id] = record
            return Durable(epoch, None)

    def _replaced_left_s(self, record: Record) -> float:
        stated_s = record.registration.replaced_ms / 1000
        return max(0.0, min(stated_s, record.replaced_until - self.clock()))

    def beat(self, registration: Registration, load: Load) -> WriteResult:
        with self._open():
            record, result = self._checked(registration.writer)
            if record is not None:
                left_ms = math.ceil(self._replaced_left_s(record) * 1000)
                last_seq = record.registration.last_seq
                record.registration = replace(registration, last_seq=last_seq, replaced_ms=left_ms)
                record.live_until = self.clock() + registration.lease_ms / 1000
                record.listed_until = record.live_until + LISTED_S
                record.load = load
                saved = record.saved
                needed = saved.seq + 1 if saved is not None and saved.epoch == registration.epoch else 1
                is_whole = needed > result.last_seq or needed in record.log
                if not is_whole or next(reversed(record.log), 0) > result.last_seq:
                    return WriteResult("OK", 0)
            return result

    def append(self, writer: Writer, first_seq: int, entries: Sequence[Entry]) -> WriteResult:
        with self._open():
            record, result = self._checked(writer)
            if record is None:
                return result
            if first_seq != result.last_seq + 1:
                return WriteResult("GAP", result.last_seq)
            record.log.update(enumerate(entries, first_seq))
            return _advance(record, result.last_seq + len(entries))

    def snapshot(
        self, writer: Writer, seq: int, keep_from: int, holdings: Holdings, *, anew: bool
    ) -> WriteResult:
        with self._open():
            record, result = self._checked(writer)
            if record is None:
                return result
            last = result.last_seq
            if not anew and seq != last:
                return WriteResult("GAP", last)
            if anew:
                seq = max(seq, last) + 1
                keep_from = last = seq + 1
                record.log[last] = Entry("store", b"")
            groups = [(namespace, tier, b"".join(held)) for namespace, tier, held in holdings.groups()]
            record.saved = SavedSnapshot(writer.epoch, seq, groups)
            record.log = OrderedDict((number, at) for number, at in record.log.items() if number >= keep_from)
            return _advance(record, last)

    def leave(self, writer: Writer, proof: str) -> WriteResult:
        with self._open():
            record, result = self._checked(writer)
            if record is not None:
                record.registration = replace(record.registration, beats=0, proof=proof)
                record.live_until, record.listed_until = 0.0, self.clock() + self._replaced_left_s(record)
                record.load = Load()
            return WriteResult(result.verdict, 0)

    def _checked(self, writer: Writer) -> tuple[Record | None, WriteResult]:
        """Return the writer's record, or None and the verdict for a writer without a valid record."""
        record = self.records.get(writer.replica_id)
        if record is None:
            return None, WriteResult("LOST", 0)
        stored = record.registration
        if (stored.epoch, stored.nonce) == (writer.epoch, writer.nonce):
            return record, WriteResult("OK", stored.last_seq)
        verdict: Verdict = "LOST" if stored.epoch < writer.epoch else "FENCED"
        return None, WriteResult(verdict, 0)

    # ---- reading

    def fetch(self, replica_ids: Sequence[str] | None = None) -> Fetched:
        with self._open():
            now = self.clock()
            if replica_ids is None:
                found = [record for record in self.records.values() if record.listed_until > now]
                found = sorted(found, key=lambda record: -record.live_until)[:MAX_REPLICAS]
            else:
                found = [self.records[name] for name in replica_ids if name in self.records]
            seen = [Seen(each.registration, max(0.0, each.live_until - now), each.load) for each in found]
            return Fetched(seen, [])

    def read(self, cursors: Mapping[str, tuple[int, int]], block_s: float = 0.0) -> dict[str, list[Logged]]:
        """Read as any store does, but never wait."""
        with self._open():
            found = {}
            for name, cursor in cursors.items():
                record = self.records.get(name)
                epoch = 0 if record is None else record.registration.epoch
                log = {} if record is None else record.log
                new = [Logged(epoch, seq, entry) for seq, entry in log.items() if (epoch, seq) > cursor]
                if new:
                    found[name] = new[:ENTRIES_A_READ]
            return found

    def load(self, replica_id: str, epoch: int, after_seq: int) -> SavedSnapshot | None:
        with self._open():
            record = self.records.get(replica_id)
            saved = None if record is None else record.saved
            return saved if saved is not None and saved.epoch == epoch and saved.seq > after_seq else None

    # ---- tenants

    def set_limit(self, tenant: bytes, limit: Limit, expected: int) -> Durable:
        with self._open():
            account = self._account(tenant)
            is_expected = account.limit.stamp == expected
            if is_expected:
                account.limit = limit
            return Durable(int(is_expected), None)

    def reserve(self, tenant: bytes, share: Share, keep_s: float, limit: Limit = NO_LIMIT) -> Grant:
        with self._open():
            account, now = self._account(tenant), self.clock()
            stated = account.limit if account.limit.stamp else NO_LIMIT
            if share.blocks and stated != limit:
                return Grant("STALE", 0, 0, None)
            latest = now + MAX_LEASE_MS / 1000
            counted = {name: kept for name, kept in account.shares.items() if now < kept[0] <= latest}
            mine = counted.get(share.replica_id)
            is_rival = mine is not None and mine[1].epoch == share.epoch and mine[1].nonce != share.nonce
            if not is_rival:
                counted.pop(share.replica_id, None)
            others = sum(each.blocks for _, each in counted.values() if each.fingerprint == share.fingerprint)
            if mine is not None and mine[1].epoch > share.epoch:
                return Grant("FENCED", 0, others, limit.blocks)
            if is_rival:
                return Grant("OK", 0, others, limit.blocks)
            left = share.blocks if limit.blocks is None else max(0, limit.blocks - others)
            granted = min(share.blocks, left)
            account.shares = counted
            if granted:
                account.shares[share.replica_id] = now + keep_s, share._replace(blocks=granted)
            return Grant("OK", granted, others, limit.blocks)

    def raise_generation(self, tenant: bytes, raised: Raised, standing: bytes) -> Durable:
        with self._open():
            account = self._account(tenant)
            if account.raised.standing != standing:
                return Durable(0, None)
            account.raised, account.confirmed = raised, {}
            self._announce(tenant)
            return Durable(1, None)

    def announce(self, tenant: bytes) -> None:
        with self._open():
            self._announce(tenant)

    def _announce(self, tenant: bytes) -> None:
        self.announced[tenant] = max(max(self.announced.values(), default=0) + 1, int(self.clock() * 1000))
        self.announced.move_to_end(tenant)
        if len(self.announced) > MAX_PURGES:
            self.announced.popitem(last=False)

    def confirm(self, tenant: bytes, writer: Writer, raised: Raised, proof: str) -> bool:
        with self._open():
            account = self.accounts.get(tenant)
            if account is None or account.raised != raised or not raised.token:
                return False
            account.confirmed[writer.replica_id] = Confirmed(writer.nonce, proof)
            if len(account.confirmed) > MAX_CONFIRMED:
                listed, now = self.records, self.clock()
                account.confirmed = {
                    name: each
                    for name, each in account.confirmed.items()
                    if name in listed and listed[name].listed_until > now
                }
            return True

    def tenant(self, tenant: bytes) -> TenantFacts:
        with self._open():
            account, now = self.accounts.get(tenant, Account()), self.clock()
            shares = tuple(share for until, share in account.shares.values() if until > now)
            raised, confirmed = account.raised, dict(account.confirmed)
            return TenantFacts(account.limit.blocks, raised, shares, confirmed, raised.standing)

    def look_at(self, tenants: Sequence[bytes], replica_id: str = "") -> list[Looked | None]:
        with self._open():
            accounts = [self.accounts.get(tenant, Account()) for tenant in tenants]
            return [
                Looked(
                    each.raised,
                    each.confirmed.get(replica_id, Confirmed()),
                    each.limit,
                    each.raised.standing,
                )
                for each in accounts
            ]

    def unannounced(self, positions: Mapping[bytes, int]) -> set[bytes]:
        with self._open():
            return {tenant for tenant, at in positions.items() if self.announced.get(tenant, -1) < at}

    def identity(self) -> str:
        with self._open():
            return self._id

    def purges(self, after: int) -> list[tuple[bytes, int]]:
        with self._open():
            found = list(self.announced.items())
            start = after if found and found[-1][1] >= after else 0
            return [item for item in found if item[1] > start]

    def _account(self, tenant: bytes) -> Account:
        return self.accounts.setdefault(tenant, Account())

    # ---- jobs

    def save_job(self, job: WarmJob) -> WarmJob:
        with self._open():
            known = self._job(job.id)
            if known is None:
                self.jobs[job.id] = (self.clock() + JOB_TTL_S, job)
                while len(self.jobs) > MAX_JOBS:
                    self.jobs.popitem(last=False)
                self.num_jobs = len(self.jobs)
            return known or job

    def own_job(self, job_id: str, owner: Writer, expected: Writer) -> bool:
        with self._open():
            job = self._job(job_id)
            if job is None or job.owner != expected:
                return False
            self._put(replace(job, owner=owner))
            return True

    def add_part(self, job_id: str, owner: Writer, part: JobPart) -> bool:
        with self._open():
            job = self._job(job_id)
            if job is None or job.owner != owner:
                return False
            old = [each for each in job.parts if each.replica_id == part.replica_id]
            if not old and len(job.parts) >= MAX_PARTS:
                return False
            if old and (old[0].epoch > part.epoch or old[0].writer == part.writer):
                return False
            parts = [each for each in job.parts if each.replica_id != part.replica_id]
            self._put(replace(job, parts=tuple(sorted([*parts, part], key=lambda each: each.replica_id))))
            return True

    def save_part(self, job_id: str, part: JobPart) -> bool:
        with self._open():
            job = self._job(job_id)
            if job is None or all(each.replica_id != part.replica_id for each in job.parts):
                return False
            parts = tuple(part if each.replica_id == part.replica_id else each for each in job.parts)
            self._put(replace(job, parts=parts))
            return True

    def drop_job(self, job_id: str) -> None:
        with self._open():
            self.jobs.pop(job_id, None)

    def load_job(self, job_id: str) -> WarmJob | None:
        with self._open():
            return self._job(job_id)

    # ---- pins

    def keep_pin(
        self, tenant: bytes, pin: FleetPin, ttl_s: float, *, anew: bool, most: int = MAX_PINS
    ) -> Durable:
        with self._open():
            pinned = self._pinned(tenant)
            known = pinned.get(pin.id)
            others = [
                (each.until, name) for name, each in pinned.items() if name != pin.id and each.pin.is_ended
            ]
            for _, name in sorted(others)[: max(0, len(others) - MAX_PINS)]:
                del pinned[name]
            if known is not None and not anew:
                return Durable(1, None)
            num_live = sum(not each.pin.is_ended for name, each in pinned.items() if name != pin.id)
            if (known is None or known.pin.is_ended) and num_live >= most:
                return Durable(0, None)
            parts = {} if known is None else known.parts
            kept = replace(pin, is_ended=False, parts=())
            pinned[pin.id] = Pinned(kept, self.clock() + ttl_s, parts)
            return Durable(1, None)

    def end_pin(self, tenant: bytes, pin: FleetPin, keep_s: float) -> Durable:
        with self._open():
            pinned = self._pinned(tenant)
            known = pinned.get(pin.id) or Pinned(
                replace(pin, is_ended=False, parts=()), self.clock() + keep_s
            )
            if known.pin.is_ended:
                return Durable(0, None)
            pinned[pin.id] = Pinned(replace(known.pin, is_ended=True), known.until)
            return Durable(1, None)

    def state_pin(self, tenant: bytes, pin_id: str, part: JobPart) -> bool:
        with self._open():
            known = self._pinned(tenant).get(pin_id)
            if known is None or known.pin.is_ended:
                return False
            old = known.parts.get(part.replica_id)
            if old.epoch > part.epoch if old is not None else len(known.parts) >= MAX_PARTS:
                return False
            known.parts[part.replica_id] = part
            return True

    def pins(self, tenant: bytes) -> list[FleetPin]:
        with self._open():
            return [
                replace(
                    each.pin,
                    remaining_s=each.until - self.clock(),
                    parts=tuple(part for _, part in sorted(each.parts.items())),
                )
                for _, each in sorted(self._pinned(tenant).items())
            ]

    # ---- notes of folders

    def keep_notes(self, folder: bytes, notes: Mapping[bytes, bytes]) -> Durable:
        with self._open():
            kept, num_left_out = self.noted.setdefault(folder, {}), 0
            for tag, note in notes.items():
                if tag in kept or len(kept) < MAX_NOTES:
                    kept[tag] = note
                else:
                    num_left_out += 1
            return Durable(num_left_out, None)

    def notes(self, folder: bytes, tags: Sequence[bytes]) -> list[bytes | None]:
        with self._open():
            kept = self.noted.get(folder, {})
            return [kept.get(tag) for tag in tags]

    # ---- inside

    def _pinned(self, tenant: bytes) -> dict[str, Pinned]:
        """Return a tenant's pins that haven't expired."""
        now, found = self.clock(), self.pinned.get(tenant, {})
        self.pinned[tenant] = {name: each for name, each in found.items() if each.until > now}
        return self.pinned[tenant]

    def _job(self, job_id: str) -> WarmJob | None:
        until, job = self.jobs.get(job_id, (0.0, None))
        return job if until > self.clock() else None

    def _put(self, job: WarmJob) -> None:
        self.jobs[job.id] = (self.jobs[job.id][0], job)


refuse_copies(MemoryStore, "its replicas share this one. Pass it on")


def _advance(record: Record, seq: int) -> WriteResult:
    record.registration = replace(record.registration, last_seq=seq)
    return WriteResult("OK", seq)
