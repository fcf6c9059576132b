"""The store over Redis 6.2 or newer, or Valkey: single, Cluster or Sentinel.

All keys are under ``rk1:``. ``{…}`` is the hash tag: the keys of one replica share a shard, and so do the keys of one
tenant, of one job, and of one folder:

    {r:RID}:meta      hash     the registration: epoch, nonce, address, proof, canary, last_seq …
    {r:RID}:lease     string   the nonce, expiring: liveness
    {r:RID}:ev        stream   the log, at ids epoch-seq
    {r:RID}:snapmeta  hash     epoch, seq, count, checksum of the snapshot in {r:RID}:snap:0 …
    {r:RID}:load      hash     load, as of the last beat
    {t:TD}:q          hash     a tenant: limit, said, generation, token, raised, r:RID share, c:RID nonce and proof
    {t:TD}:p          hash     its pins of the fleet: p:PIN until:state:…, s:PIN:RID its state on that replica
    {w:JOB}:job       hash     a warm job, kept for an hour
    {d:FOLDER}:n      hash     notes of a disk's folder: what its tenants' generations are, sealed by the folder
    replicas          zset     replica ids by live-until in ms: discovery only
    purges            zset     tenants in the order in which their generation was raised: discovery only
    jobs              zset     warm jobs by the ms at which they end, for counting
    store             string   a random id; another one shows that all this was lost

Writes that must not be lost (epoch, limit, generation, pin, note) wait for a second copy: ``Connection.run_durably``.

Bounds: 1,024 replicas; 65,536 announced purges; snapshots of 4 M segments. A log reaches back to the snapshot before
the last one. 4,096 jobs of 1,024 parts, for an hour. 256 pins a tenant and as many ended ones, of 1,024 parts.
65,536 notes a folder.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from radixkv.clock import monotonic
from radixkv.coordination.settings import REPLICA_ID
from radixkv.coordination.store import redis_scripts as scripts
from radixkv.coordination.store.holdings import Holdings
from radixkv.coordination.store.protocol import (
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
from radixkv.coordination.store.redis_connection import (
    Args,
    Connection,
    is_wrong_type,
    translated,
    unavailable,
)
from radixkv.coordination.store.redis_streams import StreamReads
from radixkv.coordination.store.wire import (
    LOAD_FIELDS,
    MAX_LEASE_MS,
    MAX_SNAPSHOT_CHUNKS,
    NO_LIMIT,
    PART_PREFIX,
    RAISED_FIELDS,
    REGISTRATION_FIELDS,
    Confirmed,
    Entry,
    Groups,
    Limit,
    Raised,
    Registration,
    WireError,
    beat_fields,
    format_confirmed,
    format_owner,
    format_part,
    format_pin,
    format_said,
    job_fields,
    number,
    pack_entries,
    pack_snapshot,
    parse_confirmed,
    parse_entry,
    parse_job,
    parse_limit,
    parse_load,
    parse_pins,
    parse_raised,
    parse_registration,
    parse_tenant,
    raised_fields,
    registration_fields,
    unpack_snapshot,
)
from radixkv.coordination.values import FleetPin, JobPart, Load, WarmJob, Writer
from radixkv.errors import StoreUnavailable

log = logging.getLogger("radixkv.coordination")

PREFIX = "rk1:"
REPLICAS_KEY = PREFIX + "replicas"
PURGES_KEY = PREFIX + "purges"
JOBS_KEY = PREFIX + "jobs"
STORE_KEY = PREFIX + "store"
RETENTION_S = 7 * 24 * 3600
"""A registration, its log and its snapshot are kept this long after the last beat, so that epochs continue."""

_RETENTION_MS = RETENTION_S * 1000
_SNAPSHOT_TRIES = 3
_TELL_S = 60.0
_TENANTS_A_CALL = 1_024
_POSITION = re.compile(rb"([0-9]{1,15})(\.[0-9]+)?")
_ENTRY_ID = re.compile(rb"([0-9]{1,15})-([0-9]{1,15})")
_REPLICA_ID = re.compile(REPLICA_ID.encode())


class ReplicaKeys:
    """The names of one replica's keys."""

    def __init__(self, replica_id: str) -> None:
        tagged = f"{PREFIX}{{r:{replica_id}}}:"
        self.meta, self.lease, self.log = tagged + "meta", tagged + "lease", tagged + "ev"
        self.snapshot_meta, self.snapshot_prefix = tagged + "snapmeta", tagged + "snap:"
        self.load = tagged + "load"


class RedisStore(Store):
    """See ``protocol.Store``. One thread at a time may ``read``."""

    def __init__(self, url: str, reply_timeout_s: float = 2.0) -> None:
        self.connection = Connection(url, reply_timeout_s)
        self._streams = StreamReads(self.connection)
        self.num_jobs = 0
        self._told: dict[str, float] = {}

    def close(self) -> None:
        """Close the connections."""
        self._streams.close()
        self.connection.close()

    # ---- a replica's own facts

    @translated()
    def boot(self, registration: Registration) -> Durable:
        names = ReplicaKeys(registration.replica_id)
        fields = [item for pair in registration_fields(registration).items() for item in pair]
        epoch, replicated = self.connection.run_durably(
            scripts.BOOT,
            [names.meta, names.lease, names.log, names.snapshot_meta, names.load],
            [registration.epoch, _RETENTION_MS, names.snapshot_prefix, registration.process, *fields],
        )
        return Durable(int(epoch), replicated)

    @translated()
    def beat(self, registration: Registration, load: Load) -> WriteResult:
        self.connection.check()
        writer, lease_ms = registration.writer, registration.lease_ms
        names = ReplicaKeys(writer.replica_id)
        fields = [item for pair in beat_fields(registration).items() for item in pair]
        loads = [item for name in LOAD_FIELDS for item in (name, str(getattr(load, name)))]
        claim: list[str | bytes | int] = [writer.epoch, writer.nonce, lease_ms]
        form: list[str | bytes | int] = [_RETENTION_MS, names.snapshot_prefix, len(fields)]
        verdict, last_seq, now_ms = self.connection.run(
            scripts.BEAT,
            [names.meta, names.lease, names.log, names.snapshot_meta, names.load],
            [*claim, *form, *fields, *loads],
        )
        if verdict == b"OK":
            self._list(writer.replica_id, int(now_ms), lease_ms)
        return _write_result(verdict, last_seq)

    def _list(self, replica_id: str, now_ms: int, lease_ms: int) -> None:
        """List the replica; entries listed for longer than the longest lease are not replicas and are removed."""
        commands = [
            ("ZADD", REPLICAS_KEY, now_ms + lease_ms, replica_id),
            ("ZREMRANGEBYSCORE", REPLICAS_KEY, "-inf", now_ms - int(LISTED_S * 1000)),
        ]
        replies = self.connection.gather(commands)
        if any(map(is_wrong_type, replies)):
            self.connection.repair([REPLICAS_KEY])
            replies = self.connection.gather(commands)
        _raise_first(replies)

    @translated()
    def append(self, writer: Writer, first_seq: int, entries: Sequence[Entry]) -> WriteResult:
        names = ReplicaKeys(writer.replica_id)
        args: Args = [writer.epoch, writer.nonce, first_seq, pack_entries(entries)]
        return _write_result(*self.connection.run(scripts.APPEND, [names.meta, names.log], args))

    @translated()
    def snapshot(
        self, writer: Writer, seq: int, keep_from: int, holdings: Holdings, *, anew: bool
    ) -> WriteResult:
        names = ReplicaKeys(writer.replica_id)
        snapshot = pack_snapshot(holdings.groups())
        claim: list[str | bytes | int] = [writer.epoch, writer.nonce, seq, keep_from, 1 if anew else 0]
        form: list[str | bytes | int] = [_RETENTION_MS, snapshot.checksum, names.snapshot_prefix]
        keys = [names.meta, names.log, names.snapshot_meta]
        return _write_result(*self.connection.run(scripts.SNAPSHOT, keys, [*claim, *form, *snapshot.chunks]))

    @translated()
    def leave(self, writer: Writer, proof: str) -> WriteResult:
        names = ReplicaKeys(writer.replica_id)
        keys = [names.meta, names.lease, names.load]
        args: Args = [writer.epoch, writer.nonce, proof]
        verdict, last_seq, until_ms = self.connection.run(scripts.LEAVE, keys, args)
        if verdict == b"OK" and int(until_ms):
            listed_ms = int(until_ms) - int(LISTED_S * 1000)
            self.connection.of("ZADD", REPLICAS_KEY, listed_ms, writer.replica_id)
        elif verdict == b"OK":
            self.connection.of("ZREM", REPLICAS_KEY, writer.replica_id)
        return _write_result(verdict, last_seq)

    # ---- reading

    @translated()
    def fetch(self, replica_ids: Sequence[str] | None = None) -> Fetched:
        ids = self._listed() if replica_ids is None else list(replica_ids)
        commands: list[tuple[Any, ...]] = []
        for names in map(ReplicaKeys, ids):
            commands.append(("HMGET", names.meta, *REGISTRATION_FIELDS))
            commands.append(("GET", names.lease))
            commands.append(("PTTL", names.lease))
            commands.append(("HMGET", names.load, *LOAD_FIELDS))
        replies = self.connection.gather(commands) if commands else []
        found = Fetched([], [])
        for index, name in enumerate(ids):
            answers = replies[4 * index : 4 * index + 4]
            if is_wrong_type(answers[3]):
                answers[3] = [None] * len(LOAD_FIELDS)
            failures = [each for each in answers if isinstance(each, Exception)]
            try:
                if not failures and not any(each is not None for each in answers[0]):
                    continue
                if not failures:
                    found.seen.append(_seen(name, *answers))
                elif all(map(is_wrong_type, failures)):
                    raise WireError("a key of another type")
                else:
                    found.unread.append(name)
            except WireError as error:  # its replica writes it again with its next beat
                self._tell(name, f"replica {name}: its registration can't be read: {error}")
        return found

    def _tell(self, about: str, message: str) -> None:
        """Log a message at most once a minute for each subject."""
        now = monotonic()
        if len(self._told) >= MAX_REPLICAS:
            self._told.clear()
        if now >= self._told.get(about, now) + (_TELL_S if about in self._told else 0.0):
            self._told[about] = now
            log.warning("Redis: %s", message)

    def _listed(self) -> list[str]:
        self.connection.check()
        try:
            reply = self.connection.of("ZREVRANGE", REPLICAS_KEY, 0, MAX_REPLICAS - 1)
        except StoreUnavailable as error:
            if not is_wrong_type(error.__cause__):
                raise
            self.connection.repair([REPLICAS_KEY])  # each is listed again by its next beat
            return []
        return [name.decode() for name in reply if _REPLICA_ID.fullmatch(name)]

    @translated()
    def read(self, cursors: Mapping[str, tuple[int, int]], block_s: float = 0.0) -> dict[str, list[Logged]]:
        logs = {ReplicaKeys(name).log: name for name in cursors}
        ids = {key: "{}-{}".format(*cursors[name]) for key, name in logs.items()}
        news = self._streams.read(ids, block_s)
        return {logs[key]: [_logged(*entry) for entry in entries] for key, entries in news if key in logs}

    @translated()
    def load(self, replica_id: str, epoch: int, after_seq: int) -> SavedSnapshot | None:
        names = ReplicaKeys(replica_id)
        for _ in range(_SNAPSHOT_TRIES):
            found = self.connection.of("HMGET", names.snapshot_meta, "epoch", "seq", "count", "checksum")
            with suppress(WireError):  # torn: the writer replaced it during the read
                if found[0] is None or number(found[0]) != epoch or number(found[1]) <= after_seq:
                    return None
                groups = self._groups(names, number(found[2]), found[3] or b"")
                return SavedSnapshot(epoch, number(found[1]), groups)
        return None

    def _groups(self, names: ReplicaKeys, count: int, checksum: bytes) -> Groups:
        if not 0 < count <= MAX_SNAPSHOT_CHUNKS:
            raise WireError(f"a snapshot of {count} chunks")
        chunks = self.connection.of("MGET", *(names.snapshot_prefix + str(index) for index in range(count)))
        if any(chunk is None for chunk in chunks):
            raise WireError("a snapshot that lacks a chunk")
        return unpack_snapshot(chunks, checksum.decode("ascii", "replace"))

    # ---- tenants

    @translated()
    def set_limit(self, tenant: bytes, limit: Limit, expected: int) -> Durable:
        blocks = "" if limit.blocks is None else limit.blocks
        args: Args = [expected, format_said(limit), _RETENTION_MS, blocks]
        answer, replicated = self.connection.run_durably(scripts.LIMIT, [_tenant_key(tenant)], args)
        return Durable(int(answer), replicated)

    @translated()
    def reserve(self, tenant: bytes, share: Share, keep_s: float, limit: Limit = NO_LIMIT) -> Grant:
        args: Args = [
            share.replica_id,
            share.epoch,
            share.nonce,
            share.fingerprint,
            share.blocks,
            int(keep_s * 1000),
            _RETENTION_MS,
            "" if limit.blocks is None else limit.blocks,
            format_said(limit) if limit.stamp else "",
            MAX_LEASE_MS,
        ]
        verdict, granted, others = self.connection.run(scripts.RESERVE, [_tenant_key(tenant)], args)
        known: dict[bytes, Literal["OK", "FENCED", "STALE"]]
        known = {b"OK": "OK", b"FENCED": "FENCED", b"STALE": "STALE"}
        blocks = None if verdict == b"STALE" else limit.blocks
        return Grant(known[verdict], int(granted), int(others), blocks)

    @translated()
    def raise_generation(self, tenant: bytes, raised: Raised, standing: bytes) -> Durable:
        args: Args = [standing, *raised_fields(raised)]
        written, replicated = self.connection.run_durably(scripts.RAISE, [_tenant_key(tenant)], args)
        if written:
            self.announce(tenant)
        return Durable(int(written), replicated)

    @translated()
    def announce(self, tenant: bytes) -> None:
        self.connection.run(scripts.ANNOUNCE, [PURGES_KEY], [tenant.hex(), MAX_PURGES])

    @translated()
    def confirm(self, tenant: bytes, writer: Writer, raised: Raised, proof: str) -> bool:
        if not raised.token:
            return False
        key, confirmed = _tenant_key(tenant), format_confirmed(Confirmed(writer.nonce, proof))
        args: Args = [raised.standing, writer.replica_id, confirmed, MAX_CONFIRMED]
        answer = int(self.connection.run(scripts.CONFIRM, [key], args))
        if answer > 1:
            listed = {b"c:" + name.encode() for name in self._listed()}
            fields = self.connection.of("HKEYS", key)
            gone = [each for each in fields if each.startswith(b"c:") and each not in listed]
            if gone:
                self.connection.of("HDEL", key, *gone)
        return answer > 0

    @translated()
    def tenant(self, tenant: bytes) -> TenantFacts:
        # values without this version's format are ignored
        now_ms, *pairs = self.connection.run(scripts.TENANT, [_tenant_key(tenant)], [])
        found = parse_tenant(dict(zip(pairs[::2], pairs[1::2], strict=True)))
        now = int(now_ms)
        shares = tuple(
            Share(name, epoch, nonce, model, blocks)
            for name, (epoch, nonce, blocks, ends, model) in found.shares.items()
            if now < ends <= now + MAX_LEASE_MS
        )
        return TenantFacts(found.limit, found.raised, shares, found.confirmed, found.standing)

    @translated()
    def look_at(self, tenants: Sequence[bytes], replica_id: str = "") -> list[Looked | None]:
        # values without this version's format are ignored
        replies: list[Any] = []
        fields = (*RAISED_FIELDS, "c:" + replica_id, "limit", "said")
        for some in _slices(tenants):
            replies += self.connection.gather([("HMGET", _tenant_key(tenant), *fields) for tenant in some])
        for tenant, reply in zip(tenants, replies, strict=True):
            if is_wrong_type(reply):
                self.connection.repair([_tenant_key(tenant)])
        return [_looked(reply) for reply in replies]

    @translated()
    def unannounced(self, positions: Mapping[bytes, int]) -> set[bytes]:
        found: set[bytes] = set()
        for some in _slices(list(positions)):
            args: Args = [item for each in some for item in (each.hex(), positions[each])]
            places = self.connection.run(scripts.UNANNOUNCED, [PURGES_KEY], args)
            found |= {some[int(place) - 1] for place in places}
        return found

    @translated()
    def identity(self) -> str:
        held: bytes = self.connection.run(scripts.IDENTITY, [STORE_KEY], [secrets.token_hex(16)])
        return held.decode()

    @translated()
    def purges(self, after: int) -> list[tuple[bytes, int]]:
        reply = self.connection.run(scripts.ANNOUNCED, [PURGES_KEY], [after])
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return [
            (bytes.fromhex(name.decode()), int(stated[1]))
            for name, position in pairs
            if re.fullmatch(rb"[0-9a-f]{64}", name) and (stated := _POSITION.fullmatch(position))
        ]

    # ---- jobs

    @translated()
    def save_job(self, job: WarmJob) -> WarmJob:
        fields = [item for pair in job_fields(job).items() for item in pair]
        ttl_ms = int(JOB_TTL_S * 1000)
        if not int(self.connection.run(scripts.JOB, [_job_key(job.id)], [ttl_ms, *fields])):
            return self.load_job(job.id) or job
        num_jobs, *oldest = self.connection.run(scripts.LIST, [JOBS_KEY], [job.id, ttl_ms, MAX_JOBS])
        self.num_jobs = int(num_jobs)
        if oldest:
            _raise_first(self.connection.gather([("DEL", _job_key(job_id.decode())) for job_id in oldest]))
        return job

    @translated()
    def own_job(self, job_id: str, owner: Writer, expected: Writer) -> bool:
        args: Args = [format_owner(owner), format_owner(expected)]
        return int(self.connection.run(scripts.OWN, [_job_key(job_id)], args)) == 1

    @translated()
    def add_part(self, job_id: str, owner: Writer, part: JobPart) -> bool:
        args: Args = [
            format_owner(owner),
            PART_PREFIX + part.replica_id,
            part.epoch,
            part.nonce,
            format_part(part),
            MAX_PARTS,
        ]
        return int(self.connection.run(scripts.ADD, [_job_key(job_id)], args)) == 1

    @translated()
    def save_part(self, job_id: str, part: JobPart) -> bool:
        args: Args = [PART_PREFIX + part.replica_id, format_part(part)]
        return int(self.connection.run(scripts.PART, [_job_key(job_id)], args)) == 1

    @translated()
    def drop_job(self, job_id: str) -> None:
        self.connection.of("DEL", _job_key(job_id))

    @translated()
    def load_job(self, job_id: str) -> WarmJob | None:
        try:
            fields = self.connection.of("HGETALL", _job_key(job_id))
            return parse_job(job_id, fields) if fields else None
        except WireError as error:
            reason = str(error).replace(job_id, "…")
        except StoreUnavailable as error:
            if not is_wrong_type(error.__cause__):
                raise
            reason = "a key of another type"
        self._tell("job", f"a warm job can't be read and is ignored: {reason}")
        return None

    # ---- pins

    @translated()
    def keep_pin(
        self, tenant: bytes, pin: FleetPin, ttl_s: float, *, anew: bool, most: int = MAX_PINS
    ) -> Durable:
        args: Args = [pin.id, max(1, int(ttl_s * 1000)), format_pin(pin), MAX_PINS, 1 if anew else 0, most]
        answer, replicated = self.connection.run_durably(scripts.KEEP, [_pins_key(tenant)], args)
        return Durable(int(answer), replicated)

    @translated()
    def end_pin(self, tenant: bytes, pin: FleetPin, keep_s: float) -> Durable:
        args: Args = [pin.id, max(1, int(keep_s * 1000)), format_pin(pin)]
        answer, replicated = self.connection.run_durably(scripts.UNPIN, [_pins_key(tenant)], args)
        return Durable(int(answer), replicated)

    @translated()
    def state_pin(self, tenant: bytes, pin_id: str, part: JobPart) -> bool:
        args: Args = [pin_id, part.replica_id, part.epoch, format_part(part), MAX_PARTS]
        return int(self.connection.run(scripts.STATE, [_pins_key(tenant)], args)) == 1

    @translated()
    def pins(self, tenant: bytes) -> list[FleetPin]:
        # values without this version's format are ignored
        now_ms, *pairs = self.connection.run(scripts.TENANT, [_pins_key(tenant)], [])
        return parse_pins(dict(zip(pairs[::2], pairs[1::2], strict=True)), int(now_ms))

    # ---- notes of folders

    @translated()
    def keep_notes(self, folder: bytes, notes: Mapping[bytes, bytes]) -> Durable:
        num_left_out, replicated = 0, None
        for some in _slices(list(notes)):
            args: Args = [MAX_NOTES, *(item for tag in some for item in (tag.hex(), notes[tag]))]
            left_out, has_copy = self.connection.run_durably(scripts.NOTE, [_notes_key(folder)], args)
            num_left_out += int(left_out)
            replicated = has_copy if replicated is None or has_copy is False else replicated
        return Durable(num_left_out, replicated)

    @translated()
    def notes(self, folder: bytes, tags: Sequence[bytes]) -> list[bytes | None]:
        key, found = _notes_key(folder), list[bytes | None]()
        for some in _slices(tags):
            (reply,) = self.connection.gather([("HMGET", key, *(tag.hex() for tag in some))])
            if is_wrong_type(reply):
                self.connection.repair([key])
                reply = [None] * len(some)
            _raise_first([reply])
            found += reply
        return found


def _raise_first(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise unavailable(reply)


def _seen(
    name: str, meta: list[bytes | None], nonce: bytes | None, pttl_ms: int, load: list[bytes | None]
) -> Seen:
    registration = parse_registration(name, meta)
    is_leased = nonce == registration.nonce.encode()
    return Seen(registration, max(0.0, pttl_ms / 1000) if is_leased else 0.0, parse_load(load))


def _logged(entry_id: bytes, fields: list[bytes]) -> Logged:
    position = _ENTRY_ID.fullmatch(entry_id)
    epoch, seq = (0, 0) if position is None else (int(position[1]), int(position[2]))
    try:
        return Logged(epoch, seq, parse_entry(dict(zip(fields[::2], fields[1::2], strict=True)), epoch, seq))
    except (ValueError, TypeError):  # a WireError, or no fields
        return Logged(epoch, seq, None)


def _write_result(verdict: bytes, last_seq: bytes) -> WriteResult:
    known: dict[bytes, Verdict] = {b"OK": "OK", b"GAP": "GAP", b"LOST": "LOST", b"FENCED": "FENCED"}
    return WriteResult(known[verdict], int(last_seq))


def _slices(tenants: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (tenants[at : at + _TENANTS_A_CALL] for at in range(0, len(tenants), _TENANTS_A_CALL))


def _looked(reply: Any) -> Looked | None:
    if isinstance(reply, Exception):
        return Looked() if is_wrong_type(reply) else None
    *raising, confirmed, blocks, said = reply
    raised, standing = parse_raised(*raising)
    return Looked(raised, parse_confirmed(confirmed), parse_limit(blocks, said), standing)


def _tenant_key(tenant: bytes) -> str:
    return f"{PREFIX}{{t:{tenant.hex()}}}:q"


def _pins_key(tenant: bytes) -> str:
    return f"{PREFIX}{{t:{tenant.hex()}}}:p"


def _notes_key(folder: bytes) -> str:
    return f"{PREFIX}{{d:{folder.hex()}}}:n"


def _job_key(job_id: str) -> str:
    return f"{PREFIX}{{w:{job_id}}}:job"
