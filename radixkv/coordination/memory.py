"""Replicas of one process that share a plain object: the reference semantics, on a clock handed in.

There is no log here and no snapshot, only what they add up to: for each replica its registration, its lease,
and what it holds. A write is compared with the registration as a store's script would, and a read is always
up to date. ``store.is_reachable = False`` is an outage: writes raise StoreUnavailable, and views run out.

A coordinator without a shared store is alone. It needs no lease and no journal, and starts no thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from radixkv.clock import Clock, monotonic
from radixkv.coordination.base import (
    JOB_TTL_S,
    BaseCoordinator,
    Known,
    Standing,
    Verdict,
    describe,
)
from radixkv.coordination.holdings import Holdings
from radixkv.coordination.protocol import JobPart, Load, ReplicaInfo, WarmJob
from radixkv.coordination.settings import Settings, check_published_block_size
from radixkv.coordination.wire import Entry, Registration
from radixkv.errors import StoreUnavailable
from radixkv.types import Journal

_MAX_JOBS = 4096


@dataclass(slots=True)
class Record:
    """One replica in the store."""

    registration: Registration
    holdings: Holdings
    load: Load
    live_until: float = 0.0


class MemoryStore:
    """What replicas of one process share. Thread-safe; ``clock`` decides about leases and jobs."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.clock = clock
        self.is_reachable = True
        self.records: dict[str, Record] = {}
        self.jobs: OrderedDict[str, tuple[float, WarmJob]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self) -> threading.Lock:
        """The lock of everything in it. Raises StoreUnavailable during an outage."""
        if not self.is_reachable:
            raise StoreUnavailable("the memory store is switched off")
        return self._lock

    def lose(self) -> None:
        """Forget everything, as a store does that restarts without having saved."""
        with self._lock:
            self.records.clear()
            self.jobs.clear()


class MemoryCoordinator(BaseCoordinator):
    """A coordinator over a MemoryStore; over none, one that is alone."""

    def __init__(self, settings: Settings, store: MemoryStore | None = None) -> None:
        if store is not None:
            check_published_block_size(settings.block_size)
        self._is_alone = store is None
        self.store = MemoryStore() if store is None else store
        super().__init__(settings, self.store.clock)

    @property
    def journal(self) -> Journal | None:
        """What the cache reports its changes to; None if alone."""
        return None if self._is_alone else self._publisher

    def info(self) -> ReplicaInfo:
        """This replica; alone, its lease never runs out."""
        info = super().info()
        if self._is_alone and self._registered:
            return replace(info, live=True, lease_remaining_s=self.settings.lease_s)
        return info

    def _start_threads(self) -> None:
        if not self._is_alone:
            super()._start_threads()

    def _live_registrations(self) -> list[Registration]:
        with self.store.open():
            now = self.clock()
            return [record.registration for record in self.store.records.values() if record.live_until > now]

    def _boot(self, registration: Registration) -> int:
        with self.store.open():
            old = self.store.records.get(registration.replica_id)
            before = 0 if old is None else old.registration.epoch
            epoch = max(before + 1, registration.epoch + 1, int(self.clock() * 1000))
            booted = replace(registration, epoch=epoch, last_seq=1, proof="")
            self.store.records[registration.replica_id] = Record(booted, Holdings(), Load())
            return epoch

    def _send_beat(self, registration: Registration, load: Load) -> Standing:
        with self.store.open():
            record, standing = self._standing()
            if record is not None:
                record.registration = replace(record.registration, proof=registration.proof)
                record.live_until = self.clock() + self.settings.lease_s
                record.load = load
            return standing

    def _append(self, entries: list[Entry], first_seq: int) -> Standing:
        with self.store.open():
            record, standing = self._standing()
            if record is None:
                return standing
            if first_seq != standing.last_seq + 1:
                return Standing("GAP", standing.last_seq)
            for entry in entries:
                record.holdings.apply(entry)
            return self._advance(record, standing.last_seq + len(entries))

    def _replace(self, mirror: Holdings, seq: int) -> Standing:
        with self.store.open():
            record, standing = self._standing()
            if record is None:
                return standing
            record.holdings = mirror.copy()
            return self._advance(record, max(seq, standing.last_seq) + 1)

    def _compact(self) -> None:
        """There is no log."""

    def _disconnect(self) -> None:
        """There is no connection."""

    def _retire(self) -> None:
        with self.store.open():
            record, _ = self._standing()
            if record is not None:
                record.live_until = 0.0

    def _standing(self) -> tuple[Record | None, Standing]:
        """This replica's record, or None with the verdict on who writes without one."""
        record = self.store.records.get(self.replica_id)
        if record is None:
            return None, Standing("LOST", 0)
        stored = record.registration
        if stored.epoch == self._epoch and stored.nonce == self._nonce:
            return record, Standing("OK", stored.last_seq)
        verdict: Verdict = "LOST" if stored.epoch < self._epoch else "FENCED"
        return None, Standing(verdict, 0)

    def _advance(self, record: Record, seq: int) -> Standing:
        record.registration = replace(record.registration, last_seq=seq)
        return Standing("OK", seq)

    def _others(self) -> list[Known]:
        if not self.store.is_reachable:
            return []
        with self.store.open():
            others = [item for item in self.store.records.items() if item[0] != self.replica_id]
            return [self._known(record) for _, record in others]

    def _known(self, record: Record) -> Known:
        remaining_s = record.live_until - self.clock()
        info = describe(record.registration, self._registration(0), self.keys, remaining_s, record.load)
        return Known(info, record.holdings if info.reachable else None)

    def _save_job(self, job: WarmJob) -> None:
        with self.store.open():
            self.store.jobs[job.id] = (self.clock() + JOB_TTL_S, job)
            while len(self.store.jobs) > _MAX_JOBS:
                self.store.jobs.popitem(last=False)

    def _save_part(self, job_id: str, part: JobPart) -> bool:
        with self.store.open():
            until, job = self._stored_job(job_id)
            if job is None or all(known.replica_id != part.replica_id for known in job.parts):
                return False
            parts = tuple(part if known.replica_id == part.replica_id else known for known in job.parts)
            self.store.jobs[job_id] = (until, replace(job, parts=parts))
            return True

    def _load_job(self, job_id: str) -> WarmJob | None:
        with self.store.open():
            return self._stored_job(job_id)[1]

    def _stored_job(self, job_id: str) -> tuple[float, WarmJob | None]:
        until, job = self.store.jobs.get(job_id, (0.0, None))
        return (until, job) if until > self.clock() else (0.0, None)

    def _live_epochs(self, replica_ids: Sequence[str]) -> dict[str, int]:
        if self._is_alone:
            return {self.replica_id: self._epoch}
        live = {registration.replica_id: registration.epoch for registration in self._live_registrations()}
        return {name: live[name] for name in replica_ids if name in live}
