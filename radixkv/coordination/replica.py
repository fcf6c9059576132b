"""One replica's registration: what it writes about itself to a store, and what it knows about itself and the others.

The writer is a small state machine under one lock, driven by a thread (``_step``) or by a caller (``beat``,
``publish``). A store answers each write with a verdict:

    OK       written
    GAP      the log doesn't end where the writer thinks: write all holdings again
    LOST     the store has forgotten this registration: register again with a greater epoch, then write all holdings
    FENCED   a newer process has the id: report it, and write no more

After a failed write it is unknown what arrived, so the holdings are written again as well. This one path repairs an
overflow, an outage, a failover that lost writes, and a restart of the store. Sequence numbers are never reused, even
after a lost reply: another replica may have read the number before the store lost it.

Queries never take that lock, because it is held during calls to the store.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.clock import Clock
from radixkv.config import MAX_WEIGHTS
from radixkv.coordination.keys import DIGEST_BYTES, FleetKeys
from radixkv.coordination.loop import Loop
from radixkv.coordination.proofs import Proofs
from radixkv.coordination.publisher import Publisher
from radixkv.coordination.purges import OnPurge, Purges
from radixkv.coordination.quotas import Quotas
from radixkv.coordination.settings import Settings, check_address
from radixkv.coordination.store.protocol import Durable, Store, WriteResult
from radixkv.coordination.store.wire import Entry, Registration, new_nonce, new_process
from radixkv.coordination.values import (
    WIRE_VERSION,
    Health,
    Load,
    ReplicaInfo,
    Resident,
    State,
    Writer,
)
from radixkv.coordination.view.reader import Known, Reader
from radixkv.errors import (
    ArgumentError,
    ConfigError,
    CoordinationError,
    StaleEpoch,
    StoreUnavailable,
    UnreadableRecord,
)
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.index.changes import Journal

log = logging.getLogger("radixkv.coordination")

FLUSH_S = 0.02
"""While records come, all queued records are written together this often."""
_DROWSY_S = 1.0
"""After this long without a record, the publisher sleeps until a record wakes it."""
_ENTRIES_A_WRITE = 1_024
_ENTRY_BYTES = 256
"""Approximate bytes of an entry in the store, without its digests."""
_LOOKS_OF_THE_FENCED = 6
"""How many checks in a row, one per beat, a fenced replica makes before it takes its id back: two leases.

Each check must find the id unused.
"""
_DIGEST_BYTES_HELD = 130
"""Approximate bytes of a digest in the mirror."""


class _NotRegistered(StoreUnavailable):
    """The store was not asked, so this error says nothing about the store."""


class Replica:
    """One replica's registration; see the module's docstring. Every method may be called from any thread."""

    def __init__(self, settings: Settings, store: Store, clock: Clock, wall: Clock = time.time) -> None:
        """``wall``: seconds since 1970, sent in beats; other replicas compare it with their own clocks."""
        self.settings = settings
        self.store = store
        self.keys = FleetKeys(settings.fleet_secret)
        self.proofs = Proofs(self.keys)
        self.clock, self.wall = clock, wall
        self._loop = Loop(f"radixkv-publisher-{settings.replica_id}", self._step)
        self._publisher = Publisher(
            self.keys,
            max_records=settings.queue_records,
            max_bytes=settings.queue_bytes,
            wake=self._loop.wake,
            generation_of=lambda tenant: self.purges.first_met(tenant),
        )
        self.reader = Reader(settings, self.keys, store, clock, wall=wall)
        self.quotas = Quotas(self.keys, store, settings.fingerprint, self.reader.is_registered)
        self.purges = Purges(self.keys, store, self.reader, self.quotas.limits, self._publisher.raised)
        self._writing = threading.RLock()
        self._resident: Resident | None = None
        self._store_id = ""
        self._load = Load()
        self._weights = 0
        self._address = settings.address
        self._draining = False
        self._state: State = "new"
        self._reason = ""
        self._closed = False
        self._registered = False
        self._dirty = False
        self._process = new_process()
        self._writer = Writer(settings.replica_id, 0, "")
        self._seq = self._num_beats = 0
        self._lease_until = self._heard_until = self._next_beat = self._retry_at = float("-inf")
        self._looked_at = float("-inf")
        self._num_failures = 0
        self._num_published = self._num_replaced = self._num_outages = self._num_unreplicated = 0
        self._snapshot_seq = self._snapshot_bytes = self._kept_bytes = self._log_bytes = 0
        self._is_new_epoch = True
        self._met: frozenset[Writer] = frozenset()
        self._heard_bytes, self._heard_at = 0, float("-inf")
        self._fencers: list[Registration] = []
        self._num_looks = 0

    # ---- in the order of a replica's life

    @property
    def replica_id(self) -> str:
        """The name that this replica registers with."""
        return self.settings.replica_id

    @property
    def lease_s(self) -> float:
        """How long a beat counts."""
        return self.settings.lease_s

    @property
    def journal(self) -> Journal | None:
        """The journal that the cache reports its changes to; None if no other replica could ever read it."""
        return self._publisher

    def attach(
        self,
        resident: Resident,
        on_purge: OnPurge | None = None,
        owed: Callable[[], Collection[str]] = tuple,
        owes_removed: Callable[[], bool] = bool,
    ) -> None:
        """Set the source for a rebuild after the journal has overflowed. Without it, other replicas only lose hints.

        ``on_purge(tenant, raised)`` is called when the fleet purges a tenant that was met here; ``raised`` is the raise
        of its generation. It must return when nothing of the tenant can be matched. Without it such a purge is never
        confirmed.

        ``owed()`` returns tenants of whose purge something is left to do here. No purge of theirs is confirmed before.
        ``owes_removed()``: the same of tenants whose names weren't met here.
        """
        if not all(callable(getattr(resident, name, None)) for name in ("snapshot", "tenants")):
            raise ArgumentError(
                "resident", resident, "an object with snapshot() and tenants(), such as a PrefixCache"
            )
        if on_purge is not None and not callable(on_purge):
            raise ArgumentError("on_purge", on_purge, "a function of a tenant and a raise, or None")
        self._resident = self.purges.resident = resident
        self.purges.on_purge, self.purges.owed, self.purges.owes_removed = on_purge, owed, owes_removed

    def register(self, address: str | None = None) -> ReplicaInfo:
        """Take the id with a new epoch; start beating and publishing. ``address`` replaces the setting.

        Raises ConfigError if a live replica of the fleet has another secret, block size or wire version, StaleEpoch if
        another process took the id at the same moment. An unreachable store is no error: ``health().state`` is
        ``"unavailable"``, and the background thread tries again.
        """
        check_address(address)
        with self._writing:
            if self._closed:
                raise CoordinationError(f"the coordinator of replica {self.replica_id} is closed")
            self._address = self._address if address is None else address
            self._registered = self._draining = False
            self._set_state("new")
            try:
                self._join()
            except StoreUnavailable:
                self._retry_at = self.clock() + self._backoff_s()
        if self.settings.background:
            self._start_threads()
        return self.info()

    def beat(self) -> None:
        """Extend the lease now. Raises StaleEpoch if fenced, StoreUnavailable if the store is unreachable.

        If the store has forgotten this replica, it registers again. That raises ConfigError, as ``register`` does.
        """
        with self._writing, self._storing():
            self._require_registration()
            self._beat_now()
            self._heal()

    def publish(self) -> None:
        """Write the journal's queued records now. Raises the errors of ``beat``."""
        with self._writing, self._storing():
            self._require_active()
            self._digest()
            self._require_registration()
            self._heal()
            self._compact()

    def drain(self) -> None:
        """Tell the others to send no more prompts here, because this replica is about to leave.

        It stays a member until then: it beats, takes purges, and keeps its shares of quotas. An unreachable store is no
        error: the next beat says it.
        """
        self._draining = True
        with self._writing:
            if self._state == "ok":
                with suppress(CoordinationError, ConfigError):
                    self.beat()

    def leave(self) -> None:
        """Give the lease back, so that the others forget this replica at once. An unreachable store is no error."""
        with self._writing:
            if self._registered and self._state != "fenced":
                try:
                    with self._storing():
                        self.store.leave(self._writer, self.proofs.of_farewell(self._writer))
                except StoreUnavailable:
                    pass
            self._registered = False
            self._publisher.suspend()
            self._lease_until = float("-inf")
            if self._state != "fenced":
                self._set_state("left")

    def close(self) -> None:
        """Leave, end the threads, close the connections. Idempotent."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
        self._stop_threads()
        self.leave()
        self.store.close()

    def health(self) -> Health:
        """Return state and counters; local."""
        state, reason = self._state, self._reason
        failure = next((loop.failure for loop in self._loops() if loop.failure is not None), None)
        if failure is not None:
            state, reason = "failed", repr(failure)
        return Health(
            state=state,
            reason=reason,
            epoch=self._epoch,
            last_seq=self._seq,
            num_live_peers=len(self.peers(draining=True)),
            num_queued=self._publisher.num_queued,
            num_overflows=self._publisher.num_overflows,
            num_published=self._num_published,
            num_snapshots=self._num_replaced,
            num_outages=self._num_outages,
            num_mirror_digests=self._publisher.mirror.num_digests,
            num_script_reloads=self._num_script_reloads(),
            num_unreplicated=self._num_unreplicated,
            num_view_digests=self.reader.view.num_digests,
            num_view_gaps=self.reader.view.num_gaps,
            num_view_forgotten=self.reader.view.num_forgotten,
            num_jobs=self.store.num_jobs,
            queue_bytes=self._publisher.queued_bytes,
            mirror_bytes=self._publisher.mirror.num_digests * _DIGEST_BYTES_HELD,
            log_bytes=self._kept_bytes + self._log_bytes,
            snapshot_bytes=self._snapshot_bytes,
            view_bytes=self.reader.view.num_bytes,
            tenant_bytes=self.purges.num_bytes + self.quotas.num_bytes,
            namespace_bytes=self._publisher.namespace_bytes + self.keys.num_bytes,
        )

    def info(self) -> ReplicaInfo:
        """Return the ReplicaInfo of this replica; local."""
        remaining_s, writer = max(0.0, self._lease_until - self.clock()), self._writer
        return ReplicaInfo(
            id=self.replica_id,
            epoch=writer.epoch,
            nonce=writer.nonce,
            address=self._address,
            fingerprint=self.settings.fingerprint,
            block_size=self.settings.block_size,
            wire_version=WIRE_VERSION,
            live=self._registered and self._state != "fenced" and remaining_s > 0,
            last_seq=self._seq,
            lease_remaining_s=min(remaining_s, self.settings.lease_s),
            proven=True,
            is_self=True,
            load=self._load,
            weights=self._weights,
            draining=self._draining,
        )

    def replicas(self) -> list[ReplicaInfo]:
        """Return all known replicas, this one first, then by id; local. O(replicas)."""
        return [self.info(), *sorted((known.info for known in self._others()), key=lambda info: info.id)]

    def peers(self, *, draining: bool = False) -> list[ReplicaInfo]:
        """Return the other replicas that are ``reachable``, by id; ``draining``: also those that drain.

        Local. O(replicas).
        """
        return [info for info in self.replicas()[1:] if (info.answers if draining else info.reachable)]

    @property
    def unavailable(self) -> str | None:
        """Return why the store can't be used; None if it can, as far as is known. Local."""
        return (self._reason or self._state) if self._state == "unavailable" else None

    def report_load(self, load: Load) -> None:
        """Set the load that the next beat carries. Raises ArgumentError."""
        if not isinstance(load, Load):
            raise ArgumentError("load", load, "a Load")
        self._load = load

    def report_weights(self, version: int) -> None:
        """Set the version of the weights that the next beat carries. Raises ArgumentError."""
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_WEIGHTS:
            raise ArgumentError("version", version, f"an integer from 0 to {MAX_WEIGHTS}")
        self._weights = version

    @property
    def knows_generations(self) -> bool:
        """Whether every complete purge has been applied here: within the last lease, this replica read all purges.

        Local.

        While this is False, a tenant that forbids stale service isn't served. It is also False if more than a lease is
        left: then the clock was turned back, and no check has noticed it yet.
        """
        ends, now = (self._heard_until, self._lease_until), self.clock()
        return self._registered and now < min(ends) and max(ends) <= now + self.lease_s

    @property
    def store_id(self) -> str:
        """The id of the store from which all purges were read last; empty before. Local.

        Another one than before: the store lost what it had, and purges may be among it.
        """
        return self._store_id

    def _counted(self, written: Durable) -> Durable:
        self._num_unreplicated += written.replicated is False
        return written

    # ---- the writer

    def _step(self) -> float | None:
        """Run one step of the thread; return the seconds until the next one.

        While records come it runs every ``FLUSH_S``, so that records need no wake-ups. After ``_DROWSY_S`` without a
        record it sleeps, and the next record wakes it.
        """
        with self._writing:
            if self._state == "left" or self._closed:
                return self._sleep(None)
            if self._state == "fenced":
                if not self._is_abandoned():
                    return self.settings.beat_s
                self._registered = False
                self._set_state("new")
            now = self.clock()
            if now < self._looked_at:  # the clock was turned back, so its earlier values mean nothing
                self._next_beat = self._retry_at = self._lease_until = self._heard_at = now
            self._looked_at = now
            try:
                if now < self._retry_at:
                    self._digest_only()
                    return self._wait_s(self._retry_at - now)
                self._work(now)
            except StoreUnavailable:
                return self._wait_s(self._backoff_s())
            except ConfigError:
                return self._wait_s(self.settings.lease_s)
            except StaleEpoch:
                self._fence()
                return self.settings.beat_s
            self._num_failures = 0
            pause_s = self._next_beat - self.clock()
            return self._sleep(
                min(max(0.0, pause_s), self.settings.beat_s)
            )  # the clock may have been turned just now

    def _sleep(self, seconds: float | None) -> float | None:
        """Return the seconds to sleep: ``FLUSH_S`` if a record may come soon, or has just come."""
        if self._publisher.appended_bytes != self._heard_bytes:
            self._heard_bytes, self._heard_at = self._publisher.appended_bytes, self.clock()
        self._publisher.is_asleep = self.clock() - self._heard_at > _DROWSY_S or seconds is None
        if self._publisher.is_asleep and not self._publisher.num_queued:
            return seconds
        return FLUSH_S if seconds is None else min(seconds, FLUSH_S)

    def _work(self, now: float) -> None:
        if not self._registered:
            self._join()
        elif now >= self._next_beat:
            self.beat()
        if self._publisher.num_queued or self._publisher.is_lost:
            self.publish()

    def _wait_s(self, seconds: float) -> float | None:
        """Return the wait before the next try of the store, ``seconds`` at most; the queue is checked more often."""
        self._retry_at = self.clock() + seconds
        return self._sleep(min(seconds, 10 * FLUSH_S))

    def _backoff_s(self) -> float:
        """Return the backoff: doubles from 50 ms to a beat's time (at most 2 s), with jitter so that replicas
        spread out."""
        longest = min(2.0, max(0.05, self.settings.beat_s))
        delay = min(longest, 0.05 * 2 ** min(self._num_failures, 10))
        self._num_failures += 1
        return float(delay * random.uniform(0.5, 1.0))

    def _join(self) -> None:
        """Compare settings with the fleet, take an epoch, and send the first beat."""
        with self._storing():
            self._refuse_if_different()
            self._boot_now()
            self._beat_now()
            self._heal()

    def _refuse_if_different(self) -> None:
        mine = self._registration(0)
        for other, remaining_s, _ in self.store.fetch().seen:
            difference = mine.difference(other)
            if difference is not None and remaining_s > 0:
                setting, own, theirs = difference
                raise ConfigError(setting, own, f"the value of the live replica {other.replica_id}: {theirs}")

    def _registration(self, epoch: int, nonce: str = "") -> Registration:
        return Registration(
            replica_id=self.replica_id,
            epoch=epoch,
            nonce=nonce,
            address=self._address or "",
            fingerprint=self.settings.fingerprint,
            block_size=self.settings.block_size,
            wire_version=WIRE_VERSION,
            canary=self.keys.canary,
            last_seq=self._seq,
            weights=self._weights,
        )

    def _boot_now(self) -> None:
        """Fence the previous process of the id. The new log begins with a clear, at number 1."""
        nonce = new_nonce(self._process)
        booted = self._counted(self.store.boot(self._registration(self._epoch, nonce)))
        self._writer = Writer(self.replica_id, booted.value, nonce)
        self._seq = 1
        self._snapshot_seq = self._snapshot_bytes = self._kept_bytes = self._log_bytes = 0
        self._is_new_epoch = True
        self._registered = True
        self._dirty = self._dirty or self._publisher.mirror.num_digests > 0

    def _beat_now(self) -> None:
        before = self.clock()
        self._num_beats += 1
        stated = replace(
            self._registration(self._epoch, self._writer.nonce),
            lease_ms=max(1, int(self.lease_s * 1000)),
            beats=self._num_beats,
            stated_ms=int(self.wall() * 1000),
            draining=self.proofs.of_drain(self._writer) if self._draining else "",
        )
        result = self.store.beat(replace(stated, proof=self.proofs.of_beat(stated)), self._load)
        self._check(result)
        if result.verdict == "OK":
            self._lease_until = before + self.lease_s
            self._next_beat = before + self.settings.beat_s
            self._dirty = self._dirty or result.last_seq != self._seq
            others = self.reader.registrations()
            has_come = self._is_new_epoch or bool(others - self._met)
            raised = self.purges.restore(self._writer, everything=has_come)
            self.purges.apply_purges(self._writer, is_new=self._is_new_epoch, raised=raised)
            self._store_id = self.store.identity()  # after the purges: a loss in between shows
            self._is_new_epoch, self._met = False, others
            self._heard_until = before + self.lease_s
            self.quotas.restate(self._writer, self.lease_s)

    @property
    def _epoch(self) -> int:
        return self._writer.epoch

    def _heal(self) -> None:
        """Register again if the store lost the registration; write all holdings again if the log can't be trusted."""
        if not self._registered:
            self._refuse_if_different()
            self._boot_now()
            self._beat_now()
        if self._registered and self._dirty:
            self._send_holdings()
        if not self._registered or self._dirty:
            raise StoreUnavailable("the store loses what is written to it")

    def _send_holdings(self) -> None:
        """Replace everything written so far by the mirror."""
        seq, self._seq = self._seq, self._seq + 2  # it takes two numbers
        result = self.store.snapshot(self._writer, seq, 0, self._publisher.mirror, anew=True)
        self._check(result)
        if result.verdict == "OK":
            self._seq = self._snapshot_seq = result.last_seq
            self._dirty = False
            self._snapshot_taken(0)

    def _compact(self) -> None:
        """Write a snapshot once the appended entries take as much space as one; trim the log before the previous
        snapshot.

        Readers that lag less than one snapshot behind never see a gap.
        """
        appended = self._seq - self._snapshot_seq
        if appended < self.settings.snapshot_entries or self._log_bytes < self._snapshot_bytes:
            return
        keep_from, kept_bytes = self._snapshot_seq + 1, self._log_bytes
        mirror = self._publisher.mirror
        result = self.store.snapshot(self._writer, self._seq, keep_from, mirror, anew=False)
        self._check(result)
        if result.verdict == "OK":
            self._snapshot_seq = self._seq
            self._snapshot_taken(kept_bytes)

    def _snapshot_taken(self, kept_bytes: int) -> None:
        self._kept_bytes, self._log_bytes = kept_bytes, 0
        self._snapshot_bytes = self._publisher.mirror.num_digests * DIGEST_BYTES
        self._num_replaced += 1

    def _digest(self) -> None:
        """Digest the queued records. Write them, unless all holdings must be written again."""
        end = self._publisher.num_drained + self._publisher.num_queued
        while True:
            entries = self._drained()
            for start in range(0, len(entries), _ENTRIES_A_WRITE):
                self._write(entries[start : start + _ENTRIES_A_WRITE])
            self._beat_meanwhile()
            if self._publisher.num_drained >= end or not self._publisher.num_queued:
                return

    def _digest_only(self) -> None:
        """While the store is unreachable, keep the queue short and the mirror correct."""
        while self._publisher.num_queued or self._publisher.is_lost:
            self._dirty = bool(self._drained()) or self._dirty

    def _drained(self) -> list[Entry]:
        """Return the next entries.

        If records were lost, return none: the mirror is then rebuilt and sent as a whole.
        """
        entries, lost = self._publisher.drain()
        if lost:
            self._dirty = True
            if self._resident is not None:
                self._publisher.rebuild(self._resident, self._beat_meanwhile)
        return entries

    def _beat_meanwhile(self) -> None:
        """Send beats during long work, so that the lease doesn't expire.

        An unreachable store is not reported here; the caller notices it later.
        """
        if self._state != "ok" or self.clock() < self._next_beat:
            return
        self._next_beat = self.clock() + self.settings.beat_s
        try:
            self._beat_now()
        except StoreUnavailable:
            self._dirty = True

    def _write(self, entries: list[Entry]) -> None:
        if self._dirty or not self._registered:
            self._dirty = True
            return
        self._dirty = True
        first_seq, self._seq = self._seq + 1, self._seq + len(entries)
        result = self.store.append(self._writer, first_seq, entries)
        self._dirty = False
        self._check(result)
        if result.verdict == "OK":
            self._num_published += len(entries)
            self._log_bytes += sum([len(entry.digests) for entry in entries]) + len(entries) * _ENTRY_BYTES

    def _check(self, result: WriteResult) -> None:
        if result.verdict == "FENCED":
            raise StaleEpoch(f"replica {self.replica_id} is fenced: epoch {self._epoch} is not the last one")
        if result.verdict == "LOST":
            self._registered = False
        self._dirty = self._dirty or result.verdict != "OK"

    def _fence(self) -> None:
        """Enter the state fenced: a newer process has this id, whichever key of the store showed it."""
        self._lease_until = self._heard_until = float("-inf")
        self._fencers, self._num_looks = [], 0
        self._publisher.suspend()
        self._set_state("fenced", "a younger process has registered this id")

    def _is_abandoned(self) -> bool:
        """Whether no process has held this replica's lost id for two leases, so that this replica may take it again.

        A registration may reach the store long after its sender gave up on it. The sender may have died, or may be this
        process, which has registered again since then. Such a registration has never held a lease, and never will.
        """
        try:
            seen, unread = self.store.fetch([self.replica_id])
        except StoreUnavailable:
            return False
        fencers = [each.registration for each in seen]
        if unread or fencers != self._fencers or any(map(self._is_of_another, fencers)):
            self._fencers, self._num_looks = fencers, 0
        self._num_looks += 1
        return self._num_looks > _LOOKS_OF_THE_FENCED

    def _is_of_another(self, registration: Registration) -> bool:
        """Whether another process has sent a beat under this registration.

        Without that proof any writer may have made it.
        """
        return registration.writer != self._writer and self.reader.is_signed(registration)

    def _require_active(self) -> None:
        if self._state == "fenced":
            raise StaleEpoch(f"replica {self.replica_id} is fenced: epoch {self._epoch} is not the last one")
        if self._closed or self._state == "left":
            raise CoordinationError(f"replica {self.replica_id} has left")

    def _require_registration(self) -> None:
        self._require_active()
        if self._epoch == 0 or self._state == "refused":
            raise _NotRegistered(
                f"replica {self.replica_id} is not registered: {self._reason or self._state}"
            )

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Update the state by the outcome of calls to the store."""
        try:
            yield
        except (_NotRegistered, UnreadableRecord):
            raise
        except StoreUnavailable as error:
            if self._state == "ok":
                self._num_outages += 1
            self._set_state("unavailable", str(error))
            raise
        except ConfigError as error:
            self._set_state("refused", str(error))
            raise
        except StaleEpoch:
            self._fence()
            raise
        if self._registered:
            self._set_state("ok")

    def _set_state(self, state: State, reason: str = "") -> None:
        """Enter a state. The beginning of an outage and its end are logged, not what fails in between."""
        was, self._reason = self._state, reason
        self._state = state
        if state == "unavailable" and was != state:
            log.warning("replica %s: the store is unavailable: %s", self.replica_id, reason)
        elif state == "ok" and was == "unavailable":
            log.warning("replica %s: the store is available again", self.replica_id)

    def _others(self) -> list[Known]:
        """Return the local view; never waits for the store."""
        return self.reader.known()

    def _num_script_reloads(self) -> int:
        return 0

    def _loops(self) -> list[Loop]:
        return [self._loop]

    def _start_threads(self) -> None:
        for loop in self._loops():
            loop.start()
            loop.wake()

    def _stop_threads(self) -> None:
        for loop in self._loops():
            loop.stop()


refuse_copies(Replica, "it is registered once, and holds threads. Connect another")
