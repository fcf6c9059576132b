"""Discovers the other replicas, and follows their logs, over any store.

The registrations are fetched once a beat, and at least every second. A replica is live as long as its lease has time
left. This time is counted on the local clock from before the fetch, and checked at each question. So a replica is gone
when its lease is over, even if the store is gone too. Only a beat extends a lease; jumps of the store's clock don't.
Only the logs of replicas that are live, proven and compatible are read, each after its cursor ``(epoch, seq)``.
``view.RemoteLog`` defines gaps.

A registration counts only if its last beat is signed (``proofs.py``); an unsigned one is ignored. If a replica's
registration was damaged, or an older one was written back, the replica counts as lost by the store until its next beat.
The signed time may be further away than its lease plus the allowed skew (``MAX_CLOCK_SKEW_S``). Then the replica is
listed, but its log isn't read and it gets no requests. The reason: any writer can write back an old record of a dead
replica.

A registration that can't be read for a moment (one shard of a Cluster is unreachable) is kept until its lease is over.
The other shards continue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from radixkv.clock import Clock
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.proofs import Proofs
from radixkv.coordination.settings import Settings
from radixkv.coordination.store.protocol import ENTRIES_A_READ, Fetched, Logged, Seen, Store
from radixkv.coordination.store.wire import Registration
from radixkv.coordination.values import MAX_CLOCK_SKEW_S, WIRE_VERSION, Load, ReplicaInfo, Writer
from radixkv.coordination.view.view import RemoteLog, View
from radixkv.errors import StoreUnavailable

BLOCK_S = 0.25
_FETCH_S = 1.0
"""A new replica is seen after at most this time, or after a beat's time if that is shorter."""
_MIN_FETCH_S = 0.05
_READS_A_POLL = 64
_SILENT_S = 0.5
"""After this long without an answer to a fetch the store counts as lost, well before the client's timeout."""


@dataclass(frozen=True, slots=True)
class Known:
    """Another replica in the local view: its registration, when it expires, and its column if it has one."""

    info: ReplicaInfo
    column: int | None


@dataclass(frozen=True, slots=True)
class Remote:
    """Another replica at the last fetch; ``log`` is None if it is not followed."""

    registration: Registration
    info: ReplicaInfo
    live_until: float
    log: RemoteLog | None

    def known(self, now: float) -> Known:
        """Return its state as of ``now``."""
        remaining_s = max(0.0, self.live_until - now)
        live = remaining_s > 0
        if self.log is None:
            return Known(replace(self.info, live=live, lease_remaining_s=remaining_s), None)
        last_seq = max(self.info.last_seq, self.log.seq)
        info = replace(self.info, live=live, lease_remaining_s=remaining_s, last_seq=last_seq)
        return Known(info, self.log.column)


class _Sighted(NamedTuple):
    """The last beat seen of a replica, and the latest end of the lease that the replica stated."""

    registration: Registration
    latest: float

    @property
    def lease_s(self) -> float:
        """The stated length of the lease."""
        return self.registration.lease_ms / 1000

    def is_before(self, other: Registration) -> bool:
        """Whether ``other`` has a later beat, of the same registration or of a newer one."""
        mine = self.registration
        if mine.nonce != other.nonce and mine.epoch == other.epoch:
            return 0 < other.beats
        return 0 < other.beats and (mine.epoch, mine.beats) < (other.epoch, other.beats)

    def is_as_new_as(self, other: Registration) -> bool:
        """Whether ``other`` has the same registration and no later beat. A registration that left has no beat."""
        mine = self.registration
        return mine.writer == other.writer and 0 < other.beats <= mine.beats


class _Replaced(NamedTuple):
    """An earlier process of an id.

    - ``writer``: the last registration of the id that was seen.
    - ``until``: the latest time at which the process may believe that its lease runs.
    - ``most_s``: the most seconds of such a lease, from any start.
    """

    writer: Writer
    until: float
    most_s: float


class Reader:
    """Follows the other replicas. It keeps ``remotes``, which is replaced and never changed.

    One thread at a time may poll. The rest may be called from any thread.

    - ``any_block_size``: follow replicas of any block size, not only of the settings' size.
    - ``fetched_at``: when the registrations were last read.
    - ``failed_at``: when the store last failed to answer. ``failure`` has the reason until it answers.
    """

    def __init__(
        self,
        settings: Settings,
        keys: FleetKeys,
        store: Store,
        clock: Clock,
        *,
        any_block_size: bool = False,
        wall: Clock = time.time,
    ) -> None:
        self.view = View(settings.view_digests)
        self.remotes: dict[str, Remote] = {}
        self._sighted: dict[str, _Sighted] = {}
        self._lost: dict[str, float] = {}
        self._replaced: dict[str, _Replaced] = {}
        self.fetched_at = float("-inf")
        self.failed_at = float("-inf")
        self._asked_at = float("inf")
        self.failure = ""
        self._unsigned: dict[str, float] = {}
        self._settings = settings
        self._proofs = Proofs(keys)
        self._wall = wall
        self._store = store
        self._clock = clock
        block_size = 0 if any_block_size else settings.block_size
        self._mine = Registration(settings.replica_id, 0, "", "", "", block_size, WIRE_VERSION, keys.canary)
        self._tried_at = self._fetch_at = float("-inf")
        self._failures = 0
        self._lock = threading.Lock()

    @property
    def is_lost(self) -> bool:
        """Whether the store didn't answer the last time, or an answer takes too long now; local."""
        return bool(self.failure) or self._clock() > self._asked_at + _SILENT_S

    def step(self) -> float:
        """Run one step of the reader's thread."""
        try:
            self.poll(BLOCK_S)
        except StoreUnavailable:
            self._failures += 1
            return float(min(self._settings.beat_s, 2.0, 0.05 * 2 ** min(self._failures, 10)))
        self._failures = 0
        return 0.0 if any(self._followed()) else min(_FETCH_S, max(0.0, self._fetch_at - self._clock()))

    def poll(self, block_s: float = 0.0) -> None:
        """Fetch the registrations if it is time, and read the logs; wait up to ``block_s`` for new entries."""
        with self._asking():
            if not self._tried_at <= self._clock() < self._fetch_at:  # or the clock was turned back
                self._refresh()
                return
            self._read(max(0.0, min(block_s, self._fetch_at - self._clock())))

    def refresh(self) -> None:
        """Fetch the registrations now, and read all that is in the logs."""
        with self._asking():
            self._refresh()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Let one thread read at a time, and flush the view at the end. Only a failed call marks the store as lost."""
        with self._lock:
            try:
                yield
            except StoreUnavailable as error:
                self.failed_at, self.failure = self._clock(), str(error)
                raise
            finally:
                self.view.flush()

    def registrations(self) -> frozenset[Writer]:
        """Return the registrations of all other known replicas; local."""
        return frozenset(remote.registration.writer for remote in self.remotes.values())

    def is_signed(self, registration: Registration) -> bool:
        """Whether a replica of the fleet signed the registration, at any time. Local; about 10 µs."""
        return self._proofs.is_beat(registration) or self._proofs.is_farewell(registration)

    def is_registered(self, writer: Writer) -> bool:
        """Whether the store's last registration of the id is exactly this one, signed. Raises StoreUnavailable."""
        seen = self._store.fetch([writer.replica_id]).seen
        return any(each.registration.writer == writer and self.is_signed(each.registration) for each in seen)

    def sorted_out(self, fetched: Iterable[Seen]) -> tuple[list[Seen], dict[str, bool]]:
        """Return the signed registrations, and the ids of unsigned ones: True if the id may still be that of a replica.

        For one lease after an unsigned registration was first seen, it may be that of a replica. A live replica writes
        its registration again within that time. Local.
        """
        now, signed, unsigned = self._clock(), list[Seen](), dict[str, bool]()
        for seen in fetched:
            name = seen.registration.replica_id
            if self.is_signed(seen.registration):
                self._unsigned.pop(name, None)
                signed.append(seen)
            else:
                since = self._unsigned.setdefault(name, now)
                unsigned[name] = abs(now - since) <= self._settings.lease_s
        return signed, unsigned

    def remaining_s(self, seen: Seen) -> float:
        """Return the longest time for which a replica may believe that its lease runs, counted from now. Local.

        ``seen``: as just fetched. The store's own view of the lease doesn't count.
        """
        registration, now = seen.registration, self._clock()
        sighted = self._sighted.get(registration.replica_id)
        if sighted is None or not sighted.is_as_new_as(registration):
            return self._latest_s(seen)
        if self._is_turned(now):
            return sighted.lease_s
        is_lost = registration.beats < sighted.registration.beats
        return max(0.0, (self._lost_until(sighted) if is_lost else self._latest(sighted)) - now)

    def forgotten(self, known: Mapping[str, int]) -> set[str]:
        """Return replicas that a store with the epochs ``known`` has lost, but that may have a running lease. Local."""
        now, sighted = self._clock(), list(self._sighted.items())
        lost = [(name, each) for name, each in sighted if known.get(name, 0) < each.registration.epoch]
        return {name for name, each in lost if self._lost_until(each) > now or self._is_turned(now)}

    def replaced(self, fetched: Iterable[Seen]) -> set[str]:
        """Return ids with an earlier process that may have a running lease, even if the new process has left. Local.

        ``fetched``: the registrations as of now.
        """
        now = self._clock()
        known = self._counted_anew(now) if self._is_turned(now) else self._replaced
        noted = known | self._noted(fetched, now, known)
        return {name for name, each in noted.items() if each.until > now}

    def _counted_anew(self, now: float) -> dict[str, _Replaced]:
        """Recount after the clock was turned: leases that may have run at the last check may still run."""
        last = self._tried_at
        return {
            name: each._replace(until=now + each.most_s * (each.until > last))
            for name, each in self._replaced.items()
        }

    def _noted(
        self, fetched: Iterable[Seen], now: float, known: Mapping[str, _Replaced]
    ) -> dict[str, _Replaced]:
        names = {seen.registration.replica_id: seen.registration for seen in fetched}
        noted = {name: self._note(registration, now, known.get(name)) for name, registration in names.items()}
        return {name: each for name, each in noted.items() if each.most_s > 0}

    def _note(self, registration: Registration, now: float, known: _Replaced | None) -> _Replaced:
        """Record the earlier process of an id, as stated by the registration and as seen before it."""
        if known is not None and known.writer == registration.writer:
            return known
        sighted = self._sighted.get(registration.replica_id)
        stated_s = registration.replaced_ms / 1000
        found = [(now + stated_s, stated_s)]
        if known is not None:
            found.append((known.until, known.most_s))
        if sighted is not None and sighted.registration.process != registration.process:
            latest = now + sighted.lease_s if self._is_turned(now) else self._latest(sighted)
            found.append((latest, sighted.lease_s))
        return _Replaced(registration.writer, *(max(each) for each in zip(*found, strict=True)))

    def _latest(self, sighted: _Sighted) -> float:
        """Return the latest possible end of a replica's lease.

        While the store was unreachable, it may have accepted a beat that was then lost unseen.
        """
        return max(sighted.latest, self.failed_at + sighted.lease_s)

    def _lost_until(self, sighted: _Sighted) -> float:
        """Return the latest time at which a replica that the store has lost may believe that its lease runs.

        Its last beat may never have been seen, but it is not later than the moment at which the loss is noticed.
        """
        return self._lost.setdefault(sighted.registration.replica_id, self._clock() + sighted.lease_s)

    def known(self) -> list[Known]:
        """Return all other replicas as of now; local."""
        now = self._clock()
        return [remote.known(now) for remote in self.remotes.values()]

    def _refresh(self) -> None:
        before = self._clock()
        if self._is_turned(before):
            self._turn(before)
        self._tried_at = before
        self._fetch_at = before + min(self._settings.beat_s, _FETCH_S)
        old = self.remotes
        self._asked_at = before
        try:
            fetched, after = self._store.fetch(), self._clock()
        finally:
            self._asked_at = float("inf")
        self.fetched_at = before
        signed, unsigned = self.sorted_out(fetched.seen)
        self._unsigned = {name: since for name, since in self._unsigned.items() if name in unsigned}
        self._keep_sighted(fetched, signed, before)
        self._fetch_at = before + self._pause_s(signed)
        fresh = {
            seen.registration.replica_id: self._remote(seen, before, after, old)
            for seen in fetched.seen
            if seen.registration.replica_id != self._settings.replica_id
        }
        self._replace(fresh | {name: old[name] for name in fetched.unread if name in old})
        for name, log in self._followed():
            if log.seq == 0 or log.hole:
                self._load_snapshot(name, log, max(0, log.hole - 1))
        for _ in range(_READS_A_POLL):
            if not self._read(0.0):
                self._catch_up()
                break
        self.failure = ""

    def _is_turned(self, now: float) -> bool:
        """Whether the clock has jumped since the last check, or there was no check for two leases.

        Times then mean nothing.
        """
        return not 0.0 <= now - self._tried_at <= 2 * self._settings.lease_s

    def _turn(self, now: float) -> None:
        """Extend the leases that may have run at the last check, by at most their stated length."""
        self._sighted = {
            name: each._replace(latest=now + each.lease_s) for name, each in self._sighted.items()
        }
        self._replaced = self._counted_anew(now)
        lost = [
            name for name in list(self._lost) if name in self._sighted
        ]  # another thread may add one during this
        self._lost = {name: now + self._sighted[name].lease_s for name in lost}
        self.failed_at = min(self.failed_at, now)
        self.remotes = {
            name: replace(each, live_until=min(each.live_until, now + each.info.lease_remaining_s))
            for name, each in self.remotes.items()
        }

    def _pause_s(self, seen: Iterable[Seen]) -> float:
        """Return the time until the next fetch.

        It is short enough that a lease extended in time never seems expired before.
        """
        shortest_s = min((each.remaining_s for each in seen if each.remaining_s > 0), default=_FETCH_S)
        return max(_MIN_FETCH_S, min(self._settings.beat_s, _FETCH_S, shortest_s / 2))

    def _replace(self, fresh: dict[str, Remote]) -> None:
        kept = {id(remote.log) for remote in fresh.values()}
        old, self.remotes = self.remotes, fresh
        for remote in old.values():
            if remote.log is not None and id(remote.log) not in kept:
                remote.log.forget(0)

    def _remote(self, seen: Seen, before: float, after: float, old: dict[str, Remote]) -> Remote:
        registration, load = seen.registration, seen.load
        known, log = old.get(registration.replica_id), None
        is_signed, live_until = self.is_signed(registration), before + _stated_s(seen)
        if is_signed:
            live_until = min(self._sight(seen, after), live_until)
        off = _off(registration, self._wall()) if is_signed and registration.beats else None
        info = describe(registration, self._mine, is_signed, off, live_until - before, load)
        info = replace(info, draining=self._proofs.is_drain(registration))
        if info.live and info.proven and info.incompatible is None:
            log = None if known is None else known.log
            if log is None or (log.epoch, log.nonce) != (registration.epoch, registration.nonce):
                log = RemoteLog(registration.epoch, registration.nonce, self.view)
        return Remote(registration, info, live_until, log)

    def _keep_sighted(self, fetched: Fetched, signed: list[Seen], now: float) -> None:
        """Drop expired and departed replicas. Any other replica that is missing was lost by the store.

        Record what the new registrations replaced before they are recorded themselves. Replicas that are still listed
        are kept: otherwise the same beat would be seen as new, and would count for another lease.
        """
        listed = {seen.registration.replica_id for seen in fetched.seen}.union(fetched.unread)
        self._sighted = {
            name: each
            for name, each in self._sighted.items()
            if name in listed or max(each.latest + each.lease_s, self._lost.get(name, now)) > now
        }
        missing = self._sighted.keys() - listed
        unlisted = self._store.fetch(sorted(missing)).seen if missing else []
        unlisted = [seen for seen in unlisted if self.is_signed(seen.registration)]
        running = {name: each for name, each in self._replaced.items() if each.until > now}
        self._replaced = running | self._noted([*signed, *unlisted], self._clock(), self._replaced)
        for seen in unlisted:
            name, registration = seen.registration.replica_id, seen.registration
            if not registration.beats and registration.epoch >= self._sighted[name].registration.epoch:
                del self._sighted[name]
        for name in self._lost.keys() - self._sighted.keys():
            del self._lost[name]

    def _sight(self, seen: Seen, after: float) -> float:
        """Return the latest end of a lease. Only a beat extends a lease, by the time that the beat states."""
        registration, latest = seen.registration, after + self._latest_s(seen)
        if not registration.beats:
            return latest
        name, sighted = registration.replica_id, self._sighted.get(registration.replica_id)
        if sighted is None or not sighted.is_as_new_as(registration):
            sighted = self._sighted[name] = _Sighted(registration, latest)
            self._lost.pop(name, None)
        return min(latest, sighted.latest)

    def _latest_s(self, seen: Seen) -> float:
        """Return how long a lease may still run if a beat has extended it since the last fetch.

        That is the store's value, or the whole lease if an earlier beat was seen. The reason: a store whose clock has
        just jumped ahead ends leases that have hardly begun.
        """
        sighted = self._sighted.get(seen.registration.replica_id)
        if sighted is not None and sighted.is_before(seen.registration):
            return seen.registration.lease_ms / 1000
        return _stated_s(seen)

    def _followed(self) -> Iterator[tuple[str, RemoteLog]]:
        return ((name, remote.log) for name, remote in self.remotes.items() if remote.log is not None)

    def _read(self, block_s: float) -> bool:
        """Apply new entries of the logs, in order. Return whether there may be more."""
        logs = dict(self._followed())
        if not logs:
            return False
        news = self._store.read({name: (log.epoch, log.seq) for name, log in logs.items()}, block_s)
        self.failure = ""
        for name, entries in news.items():
            for logged in entries:
                if not self._take(name, logs[name], logged):
                    break
        return any(len(entries) >= ENTRIES_A_READ for entries in news.values())

    def _take(self, name: str, log: RemoteLog, logged: Logged) -> bool:
        """Apply one entry. Returns False if it belongs to a registration that isn't known yet."""
        epoch, seq, entry = logged
        if epoch != log.epoch:  # it has registered again, or another writer wrote here
            self._fetch_at = min(self._fetch_at, self._tried_at + _MIN_FETCH_S)
            return False
        if entry is None:
            self.view.num_gaps += 1
            log.miss(max(seq, log.seq))
        elif log.offer(seq, entry) == "gap":
            self.view.num_gaps += 1
            self._load_snapshot(name, log, log.seq)
            if log.offer(seq, entry) == "gap":
                log.miss(seq - 1)
                log.offer(seq, entry)
        return True

    def _catch_up(self) -> None:
        """Handle logs that don't reach their registration's last number, by a snapshot.

        Such a log was trimmed past the cursor and is empty, or it couldn't be read, for example while a master is
        replaced. Without a snapshot, the log starts again at the next fetch.
        """
        for name, remote in self.remotes.items():
            log = remote.log
            if log is None or log.seq >= remote.registration.last_seq:
                continue
            self.view.num_gaps += 1
            self._load_snapshot(name, log, log.seq)
            if log.seq < remote.registration.last_seq:
                log.forget(0)

    def _load_snapshot(self, name: str, log: RemoteLog, after: int) -> None:
        """Replace the known holdings by the replica's snapshot, if there is one after number ``after``."""
        saved = self._store.load(name, log.epoch, after)
        if saved is not None:
            log.load(saved.groups, saved.seq)


def _stated_s(seen: Seen) -> float:
    """Return how long a lease still runs by the store's clock, at most the stated length."""
    return min(seen.remaining_s, seen.registration.lease_ms / 1000 or seen.remaining_s)


def _off(registration: Registration, wall_s: float) -> float | None:
    """Return the seconds since the last beat was sent (< 0: in the future) if out of range; otherwise None."""
    ago_s = wall_s - registration.stated_ms / 1000
    longest_s = registration.lease_ms / 1000 + MAX_CLOCK_SKEW_S
    return None if -MAX_CLOCK_SKEW_S <= ago_s <= longest_s else ago_s


def describe(
    registration: Registration,
    mine: Registration,
    is_signed: bool,
    off_s: float | None,
    remaining_s: float,
    load: Load,
) -> ReplicaInfo:
    """Return another replica's ReplicaInfo, as its reader judges it. ``off_s``: see ``_off``."""
    difference = mine.difference(registration)
    reason = None if difference is None else "another {}: {} here, {} there".format(*difference)
    if reason is None and off_s is not None:
        longest_s = registration.lease_ms / 1000 + MAX_CLOCK_SKEW_S
        reason = (
            f"its last beat is {off_s:.0f} s old by the clock here: at most {longest_s:.0f} s are allowed"
        )
    address = registration.address
    return ReplicaInfo(
        id=registration.replica_id,
        epoch=registration.epoch,
        nonce=registration.nonce,
        address=address or None,
        fingerprint=registration.fingerprint,
        block_size=registration.block_size,
        wire_version=registration.wire_version,
        live=remaining_s > 0,
        last_seq=registration.last_seq,
        lease_remaining_s=max(0.0, remaining_s),
        proven=is_signed and registration.beats > 0 and off_s is None,
        incompatible=reason,
        load=load,
        weights=registration.weights,
    )
