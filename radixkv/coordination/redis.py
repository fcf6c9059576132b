"""Coordination over Redis 6.2 or newer (or Valkey). The only importer of the client library.

    writer   one thread: beats, appends what the journal brought, writes snapshots     (base.py, scripts.py)
    reader   one thread: discovers replicas, follows all their logs in one XREAD BLOCK (view.py)

What stands where, under ``rk1:`` (``{…}`` is the hash tag, so that one replica's keys share a shard):

    {r:RID}:meta      hash     the registration: epoch, nonce, address, proof, canary, last_seq …
    {r:RID}:lease     string   the nonce, expiring: liveness
    {r:RID}:ev        stream   the log, at ids epoch-seq
    {r:RID}:snapmeta  hash     epoch, seq, count, checksum of the snapshot in {r:RID}:snap:0 …
    {r:RID}:load      hash     load, as of the last beat
    replicas          zset     replica ids by live-until in ms: discovery only
    {w:JOB}:job       hash     a warm job, kept for an hour

Reading: the registrations are fetched at every beat's time, and at least every second. Liveness is the
lease's remaining time, counted from before the fetch on the local clock, and compared at each question; so a
replica is gone when its lease is, even if Redis is gone too. Only the logs of replicas that are live, proven
and compatible are read. A registration that can't be parsed is nobody's.

Bounded: 1,024 replicas, a budget of segments over all logs, snapshots of 4 M segments; a log holds at most
twice ``snapshot_entries`` entries and what one write adds.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha1
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from radixkv.clock import Clock, monotonic
from radixkv.coordination import scripts
from radixkv.coordination.base import JOB_TTL_S, BaseCoordinator, Known, Standing, Verdict, describe
from radixkv.coordination.holdings import Holdings
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.loop import Loop
from radixkv.coordination.protocol import WIRE_VERSION, Health, JobPart, Load, ReplicaInfo, WarmJob
from radixkv.coordination.settings import Settings, check_published_block_size, without_password
from radixkv.coordination.view import Budget, RemoteLog
from radixkv.coordination.wire import (
    LOAD_FIELDS,
    MAX_SNAPSHOT_CHUNKS,
    REGISTRATION_FIELDS,
    Entry,
    Registration,
    WireError,
    format_part,
    job_fields,
    number,
    pack_snapshot,
    parse_entry,
    parse_job,
    parse_load,
    parse_registration,
    registration_fields,
    unpack_snapshot,
)
from radixkv.errors import ConfigError, StoreUnavailable

PREFIX = "rk1:"
REPLICAS_KEY = PREFIX + "replicas"
RETENTION_S = 7 * 24 * 3600
"""A registration, its log and its snapshot outlive the last beat by this much: epochs go on from it."""

_LISTED_S = 3600
"""A replica that is gone is listed, as not live, for this long."""
_MAX_REPLICAS = 1024
_FETCH_S = 1.0
"""A new replica is seen after this long at the latest, or a beat's time if that is shorter."""
_BLOCK_S = 0.25
_ENTRIES_A_READ = 512
_READS_A_POLL = 64
_SNAPSHOT_TRIES = 3
_ENTRY_ID = re.compile(rb"([0-9]{1,15})-([0-9]{1,15})")
_REPLICA_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class ReplicaKeys:
    """The names of one replica's keys."""

    def __init__(self, replica_id: str) -> None:
        tagged = f"{PREFIX}{{r:{replica_id}}}:"
        self.meta, self.lease, self.log = tagged + "meta", tagged + "lease", tagged + "ev"
        self.snapshot_meta, self.snapshot_prefix = tagged + "snapmeta", tagged + "snap:"
        self.load = tagged + "load"


class Connection:
    """One client of one server: scripts by their digest, loaded again where the server lost them, and errors
    as StoreUnavailable. Thread-safe."""

    def __init__(self, url: str, reply_timeout_s: float) -> None:
        self.num_script_reloads = 0
        try:
            self.client: Any = redis.Redis.from_url(
                url,
                socket_timeout=reply_timeout_s,
                socket_connect_timeout=reply_timeout_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except (ValueError, TypeError) as error:
            allowed = f"redis://host:port/db, rediss://… or unix://… ({error})"
            raise ConfigError("redis", without_password(url), allowed) from None
        self._digests: dict[str, str] = {}

    def run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """The script's answer. Raises StoreUnavailable."""
        digest = self._digests.setdefault(script, sha1(script.encode(), usedforsecurity=False).hexdigest())
        with self.store() as client:
            try:
                return client.evalsha(digest, len(keys), *keys, *args)
            except NoScriptError:
                self.num_script_reloads += 1
                client.script_load(script)
                return client.evalsha(digest, len(keys), *keys, *args)

    @contextmanager
    def store(self) -> Iterator[Any]:
        """The client; any error of it, or of the server, is StoreUnavailable."""
        try:
            yield self.client
        except RedisError as error:
            raise StoreUnavailable(f"Redis: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


@dataclass(frozen=True, slots=True)
class Remote:
    """Another replica at the last fetch; ``log`` is None where it is not followed."""

    registration: Registration
    info: ReplicaInfo
    live_until: float
    log: RemoteLog | None

    def known(self, now: float) -> Known:
        """As of ``now``."""
        remaining_s = max(0.0, self.live_until - now)
        live = remaining_s > 0
        if self.log is None:
            return Known(replace(self.info, live=live, lease_remaining_s=remaining_s), None)
        last_seq = max(self.info.last_seq, self.log.seq)
        info = replace(self.info, live=live, lease_remaining_s=remaining_s, last_seq=last_seq)
        return Known(info, self.log.holdings)


class Reader:
    """Discovers the other replicas and follows their logs. ``remotes`` is replaced, never changed."""

    def __init__(self, settings: Settings, keys: FleetKeys, connection: Connection, clock: Clock) -> None:
        self.budget = Budget(settings.view_digests)
        self.remotes: dict[str, Remote] = {}
        self._settings = settings
        self._keys = keys
        self._connection = connection
        self._clock = clock
        self._mine = Registration(
            settings.replica_id, 0, "", "", "", settings.block_size, WIRE_VERSION, keys.canary
        )
        self._fetch_at = 0.0
        self._failures = 0
        self._lock = threading.Lock()

    def step(self) -> float:
        """What the reader's thread repeats."""
        try:
            self.poll(_BLOCK_S)
        except StoreUnavailable:
            self._failures += 1
            return float(min(self._settings.beat_s, 2.0, 0.05 * 2 ** min(self._failures, 10)))
        self._failures = 0
        return 0.0 if any(self._followed()) else max(0.0, self._fetch_at - self._clock())

    def poll(self, block_s: float = 0.0) -> None:
        """Fetch the registrations if it is time, and read the logs; wait for news up to ``block_s``."""
        with self._lock:
            if self._clock() >= self._fetch_at:
                self._refresh()
                return
            wait_s = min(block_s, self._fetch_at - self._clock())
            self._read(max(1, int(wait_s * 1000)) if wait_s > 0 else None)

    def refresh(self) -> None:
        """Fetch the registrations now, and read all that is in the logs."""
        with self._lock:
            self._refresh()

    def fetch(self) -> list[tuple[Registration, float, Load]]:
        """All registrations that discovery names, with the seconds their leases run and their loads."""
        with self._connection.store() as client:
            names = client.zrevrangebyscore(REPLICAS_KEY, "+inf", "-inf", start=0, num=_MAX_REPLICAS)
            ids = [name.decode() for name in names if _REPLICA_ID.fullmatch(name)]
            pipeline = client.pipeline(transaction=False)
            for keys in map(ReplicaKeys, ids):
                pipeline.hmget(keys.meta, REGISTRATION_FIELDS)
                pipeline.get(keys.lease)
                pipeline.pttl(keys.lease)
                pipeline.hmget(keys.load, LOAD_FIELDS)
            replies = pipeline.execute(raise_on_error=False)
        found = []
        for index, name in enumerate(ids):
            answers = replies[4 * index : 4 * index + 4]
            if any(isinstance(answer, Exception) for answer in answers):
                continue  # a key of another type: nobody of this version wrote it
            try:
                found.append(_fetched(name, *answers))
            except WireError:
                continue
        return found

    def _refresh(self) -> None:
        before = self._clock()
        self._fetch_at = before + min(self._settings.beat_s, _FETCH_S)
        old = self.remotes
        fresh = {
            registration.replica_id: self._remote(registration, remaining_s, load, before, old)
            for registration, remaining_s, load in self.fetch()
            if registration.replica_id != self._settings.replica_id
        }
        kept = {id(remote.log) for remote in fresh.values()}
        self.remotes = fresh
        for remote in old.values():
            if remote.log is not None and id(remote.log) not in kept:
                remote.log.forget(0)
        for _ in range(_READS_A_POLL):
            if not self._read(None):
                self._catch_up()
                break

    def _remote(
        self,
        registration: Registration,
        remaining_s: float,
        load: Load,
        before: float,
        old: dict[str, Remote],
    ) -> Remote:
        info = describe(registration, self._mine, self._keys, remaining_s, load)
        log = None
        if info.live and info.proven and info.incompatible is None:
            known = old.get(registration.replica_id)
            log = None if known is None else known.log
            if log is None or (log.epoch, log.nonce) != (registration.epoch, registration.nonce):
                log = RemoteLog(registration.epoch, registration.nonce, self.budget)
                self._load_snapshot(registration.replica_id, log)
        return Remote(registration, info, before + remaining_s, log)

    def _followed(self) -> Iterator[tuple[str, RemoteLog]]:
        return ((name, remote.log) for name, remote in self.remotes.items() if remote.log is not None)

    def _read(self, block_ms: int | None) -> bool:
        """Take in what the logs have, in order. Whether there may be more."""
        logs = {ReplicaKeys(name).log: (name, log) for name, log in self._followed()}
        if not logs:
            return False
        cursors = {key: f"{log.epoch}-{log.seq}" for key, (_, log) in logs.items()}
        with self._connection.store() as client:
            streams = client.xread(cursors, count=_ENTRIES_A_READ, block=block_ms)
        for key, entries in streams or ():
            name, log = logs[key.decode()]
            for entry_id, fields in entries:
                if not self._take(name, log, entry_id, fields):
                    break
        return any(len(entries) >= _ENTRIES_A_READ for _, entries in streams or ())

    def _take(self, name: str, log: RemoteLog, entry_id: bytes, fields: dict[bytes, bytes]) -> bool:
        """Take in one entry; False if it belongs to a registration that isn't known yet."""
        position = _ENTRY_ID.fullmatch(entry_id)
        epoch, seq = (0, 0) if position is None else (int(position[1]), int(position[2]))
        if epoch != log.epoch:
            self._fetch_at = 0.0
            return False
        try:
            entry = parse_entry(fields, epoch, seq)
        except WireError:
            self.budget.num_gaps += 1
            log.forget(max(seq, log.seq))
            return True
        if log.offer(seq, entry) == "gap":
            self.budget.num_gaps += 1
            self._load_snapshot(name, log)
            if log.offer(seq, entry) == "gap":
                log.forget(seq - 1)
                log.offer(seq, entry)
        return True

    def _catch_up(self) -> None:
        """A log that ends before its registration's last number was trimmed past us, down to nothing."""
        for name, remote in self.remotes.items():
            log = remote.log
            if log is None or log.seq >= remote.registration.last_seq:
                continue
            self.budget.num_gaps += 1
            self._load_snapshot(name, log)
            if log.seq < remote.registration.last_seq:
                log.forget(remote.registration.last_seq)

    def _load_snapshot(self, name: str, log: RemoteLog) -> None:
        """Put the replica's snapshot in the place of what is known, if there is one that is newer."""
        keys = ReplicaKeys(name)
        for _ in range(_SNAPSHOT_TRIES):
            with self._connection.store() as client:
                epoch, seq, count, checksum = client.hmget(
                    keys.snapshot_meta, ["epoch", "seq", "count", "checksum"]
                )
            try:
                if epoch is None or number(epoch) != log.epoch or number(seq) <= log.seq:
                    return
                log.load(self._groups(keys, number(count), checksum or b""), number(seq))
                return
            except WireError:
                continue  # torn: the writer replaced it while it was read

    def _groups(self, keys: ReplicaKeys, count: int, checksum: bytes) -> list[tuple[bytes, bytes]]:
        if not 0 < count <= MAX_SNAPSHOT_CHUNKS:
            raise WireError(f"a snapshot of {count} chunks")
        with self._connection.store() as client:
            chunks = client.mget([keys.snapshot_prefix + str(index) for index in range(count)])
        if any(chunk is None for chunk in chunks):
            raise WireError("a snapshot that lacks a chunk")
        return unpack_snapshot(chunks, checksum.decode("ascii", "replace"))


class RedisCoordinator(BaseCoordinator):
    """A coordinator over Redis. ``poll`` reads at once what the reader's thread would read soon."""

    def __init__(self, settings: Settings, url: str, clock: Clock = monotonic) -> None:
        check_published_block_size(settings.block_size)
        super().__init__(settings, clock)
        reply_timeout_s = min(2.0, max(0.5, settings.lease_s / 2))
        self._connection = Connection(url, reply_timeout_s)
        self._reading = Connection(url, reply_timeout_s + _BLOCK_S)
        self._reader = Reader(settings, self.keys, self._reading, clock)
        self._reader_loop = Loop(f"radixkv-reader-{settings.replica_id}", self._reader.step)
        self._names = ReplicaKeys(settings.replica_id)
        self._snapshot_seq = 0

    def register(self, address: str | None = None) -> ReplicaInfo:
        """See the protocol. The view of the others is there when it returns, if Redis is."""
        info = super().register(address)
        if self._registered:
            self.poll()
        return info

    def poll(self) -> None:
        """Fetch the registrations and read all logs now, as far as Redis can be reached."""
        try:
            self._reader.refresh()
        except StoreUnavailable:
            return

    def health(self) -> Health:
        """Standing and counters; local."""
        budget = self._reader.budget
        return replace(
            super().health(),
            num_script_reloads=self._connection.num_script_reloads,
            num_view_digests=budget.num_digests,
            num_view_gaps=budget.num_gaps,
            num_view_forgotten=budget.num_forgotten,
        )

    def _loops(self) -> list[Loop]:
        return [self._loop, self._reader_loop]

    def _disconnect(self) -> None:
        self._connection.close()
        self._reading.close()

    def _others(self) -> list[Known]:
        now = self.clock()
        return [remote.known(now) for remote in self._reader.remotes.values()]

    # ---- the writer's store

    def _live_registrations(self) -> list[Registration]:
        return [registration for registration, remaining_s, _ in self._reader.fetch() if remaining_s > 0]

    def _boot(self, registration: Registration) -> int:
        names = self._names
        fields = [item for pair in registration_fields(registration).items() for item in pair]
        epoch = self._connection.run(
            scripts.BOOT,
            [names.meta, names.lease, names.log, names.snapshot_meta, names.load],
            [registration.epoch, RETENTION_S * 1000, names.snapshot_prefix, *fields],
        )
        self._snapshot_seq = 0
        return int(epoch)

    def _send_beat(self, registration: Registration, load: Load) -> Standing:
        names = self._names
        lease_ms = max(1, int(self.settings.lease_s * 1000))
        fields = [item for name in LOAD_FIELDS for item in (name, str(getattr(load, name)))]
        verdict, last_seq, now_ms = self._connection.run(
            scripts.BEAT,
            [names.meta, names.lease, names.log, names.snapshot_meta, names.load],
            [
                *self._writer(),
                lease_ms,
                RETENTION_S * 1000,
                registration.proof,
                names.snapshot_prefix,
                *fields,
            ],
        )
        if verdict == b"OK":
            with self._connection.store() as client:
                pipeline = client.pipeline(transaction=False)
                pipeline.zadd(REPLICAS_KEY, {self.replica_id: int(now_ms) + lease_ms})
                pipeline.zremrangebyscore(REPLICAS_KEY, "-inf", int(now_ms) - _LISTED_S * 1000)
                pipeline.execute()
        return _standing(verdict, last_seq)

    def _append(self, entries: list[Entry], first_seq: int) -> Standing:
        args = [
            item
            for entry in entries
            for item in (entry.op, entry.namespace, entry.parent, "device", entry.digests)
        ]
        answer = self._connection.run(
            scripts.APPEND, [self._names.meta, self._names.log], [*self._writer(), first_seq, *args]
        )
        return _standing(*answer)

    def _replace(self, mirror: Holdings, seq: int) -> Standing:
        standing = self._write_snapshot(mirror, seq, 0, anew=True)
        if standing.verdict == "OK":
            self._snapshot_seq = standing.last_seq
        return standing

    def _compact(self) -> None:
        """Once enough was appended: a snapshot of the mirror, and the log trimmed behind the one before it.

        Readers that lag less than one snapshot behind never see a gap.
        """
        if self._seq - self._snapshot_seq < self.settings.snapshot_entries:
            return
        standing = self._write_snapshot(self._publisher.mirror, self._seq, self._snapshot_seq + 1, anew=False)
        self._obey(standing)
        if standing.verdict == "OK":
            self._snapshot_seq = self._seq
            self._num_replaced += 1

    def _write_snapshot(self, mirror: Holdings, seq: int, keep_from: int, *, anew: bool) -> Standing:
        names = self._names
        snapshot = pack_snapshot(mirror.items())
        standing: list[str | bytes | int] = [*self._writer(), seq, keep_from, 1 if anew else 0]
        form: list[str | bytes | int] = [RETENTION_S * 1000, snapshot.checksum, names.snapshot_prefix]
        answer = self._connection.run(
            scripts.SNAPSHOT,
            [names.meta, names.log, names.snapshot_meta],
            [*standing, *form, *snapshot.chunks],
        )
        return _standing(*answer)

    def _retire(self) -> None:
        names = self._names
        answer = self._connection.run(scripts.LEAVE, [names.meta, names.lease, names.load], self._writer())
        if answer[0] == b"OK":
            with self._connection.store() as client:
                client.zrem(REPLICAS_KEY, self.replica_id)

    def _writer(self) -> list[str | bytes | int]:
        return [self._epoch, self._nonce]

    # ---- jobs

    def _save_job(self, job: WarmJob) -> None:
        with self._connection.store() as client:
            pipeline = client.pipeline(transaction=True)
            pipeline.hset(_job_key(job.id), mapping=job_fields(job))
            pipeline.pexpire(_job_key(job.id), int(JOB_TTL_S * 1000))
            pipeline.execute()

    def _save_part(self, job_id: str, part: JobPart) -> bool:
        answer = self._connection.run(
            scripts.PART, [_job_key(job_id)], [f"part:{part.replica_id}", format_part(part)]
        )
        return int(answer) == 1

    def _load_job(self, job_id: str) -> WarmJob | None:
        with self._connection.store() as client:
            fields = client.hgetall(_job_key(job_id))
        try:
            return parse_job(job_id, fields) if fields else None
        except WireError:
            return None

    def _live_epochs(self, replica_ids: Sequence[str]) -> dict[str, int]:
        with self._connection.store() as client:
            pipeline = client.pipeline(transaction=False)
            for names in map(ReplicaKeys, replica_ids):
                pipeline.hmget(names.meta, ["epoch", "nonce"])
                pipeline.get(names.lease)
            replies = pipeline.execute()
        live = {}
        for index, name in enumerate(replica_ids):
            (epoch, nonce), lease = replies[2 * index : 2 * index + 2]
            if lease is not None and lease == nonce:
                live[name] = int(epoch)
        return live


def _fetched(
    name: str, meta: list[bytes | None], nonce: bytes | None, pttl_ms: int, load: list[bytes | None]
) -> tuple[Registration, float, Load]:
    registration = parse_registration(name, meta)
    is_leased = nonce == registration.nonce.encode()
    return registration, max(0.0, pttl_ms / 1000) if is_leased else 0.0, parse_load(load)


def _standing(verdict: bytes, last_seq: bytes) -> Standing:
    known: dict[bytes, Verdict] = {b"OK": "OK", b"GAP": "GAP", b"LOST": "LOST", b"FENCED": "FENCED"}
    return Standing(known[verdict], int(last_seq))


def _job_key(job_id: str) -> str:
    return f"{PREFIX}{{w:{job_id}}}:job"
