"""The store over Redis 6.2 or newer, or Valkey: single, Cluster or Sentinel. The only importer of the client library.

What stands where, under ``rk1:`` (``{…}`` is the hash tag: the keys of one replica share a shard, so do
those of one tenant, and of one job):

    {r:RID}:meta      hash     the registration: epoch, nonce, address, proof, canary, last_seq …
    {r:RID}:lease     string   the nonce, expiring: liveness
    {r:RID}:ev        stream   the log, at ids epoch-seq
    {r:RID}:snapmeta  hash     epoch, seq, count, checksum of the snapshot in {r:RID}:snap:0 …
    {r:RID}:load      hash     load, as of the last beat
    {t:TD}:q          hash     a tenant: limit, said, generation, token, raised, r:RID share, c:RID nonce and proof
    {t:TD}:p          hash     its pins of the fleet: p:PIN until:state:…, s:PIN:RID what became of it there
    {w:JOB}:job       hash     a warm job, kept for an hour
    replicas          zset     replica ids by live-until in ms: discovery only
    purges            zset     tenants in the order in which their generation was raised: discovery only
    jobs              zset     warm jobs by the ms at which they end, to count them by

Where a write goes is asked of the server: the shard of its tag, the master that Sentinel names, or the one
there is. ``WAIT 1`` follows the writes that must not be lost (epoch, limit, generation, pin), on the connection
that wrote, where the server has had a replica. Bounded: 1,024 replicas, 65,536 announced purges, snapshots of
4 M segments; a log ends behind the snapshot before the last one; 4,096 jobs of 1,024 parts, for an hour; 256 pins
a tenant, and as many that were ended, of 1,024 parts.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.coordination.store.redis", "redis")

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha1
from inspect import signature
from typing import Any, Literal
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import SSLConnection, parse_url
from redis.exceptions import (
    ConnectionError,
    MovedError,
    NoScriptError,
    RedisClusterException,
    ResponseError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from radixkv.clock import Clock, monotonic
from radixkv.coordination.coordinator import BaseCoordinator
from radixkv.coordination.loop import Loop
from radixkv.coordination.settings import REPLICA_ID, Settings, check_published_block_size, without_password
from radixkv.coordination.store import redis_scripts as scripts
from radixkv.coordination.store.holdings import Holdings
from radixkv.coordination.store.protocol import (
    JOB_TTL_S,
    LISTED_S,
    MAX_CONFIRMED,
    MAX_JOBS,
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
    Standing,
    TenantFacts,
    Verdict,
)
from radixkv.coordination.store.redis_streams import (
    SERVER_BLOCK_S,
    StreamReads,
    is_wrong_type,
    translated,
    unavailable,
)
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
from radixkv.coordination.values import FleetPin, JobPart, Load, ReplicaInfo, WarmJob, Writer
from radixkv.errors import ConfigError, StoreUnavailable

log = logging.getLogger("radixkv.coordination")

PREFIX = "rk1:"
REPLICAS_KEY = PREFIX + "replicas"
PURGES_KEY = PREFIX + "purges"
JOBS_KEY = PREFIX + "jobs"
RETENTION_S = 7 * 24 * 3600
"""A registration, its log and its snapshot outlive the last beat by this much: epochs go on from it."""

_RETENTION_MS = RETENTION_S * 1000
_SNAPSHOT_TRIES = 3
_TELL_S = 60.0
_TENANTS_A_CALL = 1_024
_POSITION = re.compile(rb"([0-9]{1,15})(\.[0-9]+)?")
_TYPES = {
    "meta": "hash",
    "lease": "string",
    "ev": "stream",
    "snapmeta": "hash",
    "load": "hash",
    "q": "hash",
    "p": "hash",
    "job": "hash",
    "replicas": "zset",
    "purges": "zset",
    "jobs": "zset",
}
"""What type a key has whose name ends so."""
_ENTRY_ID = re.compile(rb"([0-9]{1,15})-([0-9]{1,15})")
_REPLICA_ID = re.compile(REPLICA_ID.encode())
_URL = re.compile(r"(rediss?|unix|rediss?\+(?:sentinel|cluster))://(?:(.*)@)?([^/?]*)(/[^?]*)?(\?.*)?")
_FORMS = (
    "redis://[user:password@]host[:port][/db], rediss://… (TLS), unix:///path, redis+cluster://host:port,host:port "
    "or redis+sentinel://host:port,host:port/service; also rediss+cluster:// and rediss+sentinel://"
)


# What the library leaves untyped.
_parse_url: Any = parse_url
_cluster_client: Any = RedisCluster
_cluster_node: Any = ClusterNode
_sentinel_client: Any = Sentinel

_OBJECTS = {"connection_pool", "credential_provider", "event_dispatcher", "redis_connect_func", "retry"}
_OPTIONS = frozenset(
    {*signature(redis.Redis).parameters, "path", "connection_class", "sentinel_username", "sentinel_password"}
    - _OBJECTS
)
"""What a URL, and what stands behind its question mark, may come to."""

Args = Sequence[str | bytes | int]


class ReplicaKeys:
    """The names of one replica's keys."""

    def __init__(self, replica_id: str) -> None:
        tagged = f"{PREFIX}{{r:{replica_id}}}:"
        self.meta, self.lease, self.log = tagged + "meta", tagged + "lease", tagged + "ev"
        self.snapshot_meta, self.snapshot_prefix = tagged + "snapmeta", tagged + "snap:"
        self.load = tagged + "load"


@dataclass(frozen=True, slots=True)
class Address:
    """Where the servers are, from a URL. ``options`` go to every connection, TLS and credentials among them."""

    kind: str
    hosts: tuple[tuple[str, int], ...]
    service: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ConfigError, without the password."""
        if not isinstance(url, str):
            raise ConfigError("redis", url, _FORMS)
        try:
            return cls._parse(url)
        except (ValueError, TypeError) as error:
            raise ConfigError("redis", without_password(url), f"{_FORMS} ({error})") from None

    @classmethod
    def _parse(cls, url: str) -> Address:
        found = _URL.fullmatch(url)
        if found is None:
            raise ValueError("no such form")
        scheme, user, hosts, path, query = (part or "" for part in found.groups())
        plain, _, kind = scheme.partition("+")
        names = [name for name in hosts.split(",") if name]
        is_socket = plain == "unix"
        if not is_socket and re.search("[/?#]", user):
            raise ValueError("special characters before the @ have to be percent-encoded")
        user = f"{user}@" if user else ""
        path = path.strip("/")
        service, _, database = path.partition("/") if kind == "sentinel" else ("", "", path)
        if not is_socket and not re.fullmatch("[0-9]*", database):
            raise ValueError(f"{database!r} is no number of a database")
        shown = url if is_socket else f"{plain}://{user}{names[0] if names else ''}/{database}{query}"
        options = dict(_parse_url(shown))
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise ValueError(f"there is no option {unknown[0]}")
        if is_socket:
            return cls("single", (), "", options)
        if kind == "sentinel" and not service:
            raise ValueError("the service's name is missing")
        default = 26379 if kind == "sentinel" else 6379
        listed = tuple(_host(f"{plain}://{name}", default) for name in names or ["localhost"])
        if len(listed) > 1 and not kind:
            raise ValueError("several hosts")
        options.pop("host", None)
        options.pop("port", None)
        if options.pop("connection_class", None) is SSLConnection:
            options["ssl"] = True
        return cls(kind or "single", listed, service, options)


def _host(url: str, default_port: int) -> tuple[str, int]:
    if urlsplit(url).port == 0:
        raise ValueError("there is no port 0")
    options = _parse_url(url)
    return options.get("host", "localhost"), int(options.get("port", default_port))


class Connection:
    """Clients of one deployment, made when first needed; every error of theirs is StoreUnavailable. Thread-safe.

    A Cluster's client is used for its map of slots alone: commands go to the node that has the key.
    """

    def __init__(self, url: str, reply_timeout_s: float) -> None:
        self.num_script_reloads = 0
        self._address = Address.parse(url)
        self._reply_timeout_s = reply_timeout_s
        self._options = self._address.options | {
            "socket_timeout": reply_timeout_s,
            "socket_connect_timeout": reply_timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "decode_responses": False,
            "redis_connect_func": _greet,
        }
        self._client: Any = None
        self._is_stale = False
        self._had_replica = False
        self._sentinel: Any = None
        self._master: tuple[str, int] | None = None
        self._opening = threading.Lock()
        self._digests: dict[str, str] = {}
        if self._address.kind == "single":
            self._client = self._plain()  # so that an option which can't work is refused at once

    def run(self, script: str, keys: Sequence[str], args: Args) -> Any:
        """The script's answer. Raises StoreUnavailable."""
        return self._at(keys[0], lambda node: self._evaluate(node, script, keys, args))

    def repair(self, keys: Sequence[str]) -> None:
        """Delete those of these keys, which share a tag, that have another type than we give them; log which.

        Whoever wrote them can delete keys too; what stood there is lost to a store, and told to it again.
        """
        self._at(keys[0], lambda node: self._repair(node, keys))

    def run_durably(self, script: str, keys: Sequence[str], args: Args) -> tuple[Any, bool | None]:
        """The script's answer, and whether a replica has what it wrote: None where the server has none."""

        def act(node: Any) -> tuple[Any, bool | None]:
            with node.client() as one:
                answer = self._evaluate(one, script, keys, args)
                num_replicas = int(one.info("replication").get("connected_slaves", 0))
                self._had_replica = self._had_replica or num_replicas > 0
                if not self._had_replica:
                    return answer, None
                wait_ms = max(1, int(self._reply_timeout_s * 500))
                return answer, int(one.execute_command("WAIT", 1, wait_ms)) >= 1

        found: tuple[Any, bool | None] = self._at(keys[0], act)
        return found

    def gather(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies to commands of one key each, ``(name, key, …)``: one round trip to each shard.

        A reply may be an exception: that of its command, or of its shard. Raises StoreUnavailable if no shard
        answers.
        """
        replies: list[Any] = [None] * len(commands)
        failure: StoreUnavailable | None = None
        num_failed = 0
        by_node = self._by_node([str(command[1]) for command in commands])
        for node, indices in by_node:
            pipeline = node.pipeline(transaction=False)
            for index in indices:
                pipeline.execute_command(*commands[index])
            try:
                with translated():
                    answers = pipeline.execute(raise_on_error=False)
            except StoreUnavailable as error:
                answers, failure, num_failed = [error] * len(indices), error, num_failed + 1
                self._is_stale = True
            for index, answer in zip(indices, answers, strict=True):
                replies[index] = answer
                self._is_stale = self._is_stale or isinstance(answer, MovedError)
        if failure is not None and num_failed == len(by_node):
            raise failure
        return replies

    def of(self, command: str, *args: Any) -> Any:
        """The reply to one command of one key, which comes first."""
        return self._at(str(args[0]), lambda node: node.execute_command(command, *args))

    def slot(self, key: str) -> int:
        """The slot of a key in a Cluster; 0 anywhere else. Keys of one slot can share a command."""
        client = self._open()
        return int(client.keyslot(key)) if isinstance(client, _cluster_client) else 0

    def borrow(self, key: str) -> tuple[Any, Any]:
        """A raw connection to the node of ``key``, and the pool that it goes back to."""
        pool = self._node(key).connection_pool
        return pool, pool.get_connection()

    def check(self) -> None:
        """Under Sentinel: leave a master that is none any more, even if it still answers."""
        if self._sentinel is None:
            return
        with translated():
            master = self._sentinel.discover_master(self._address.service)
            known, self._master = self._master, master
            if known not in (None, master):
                self._open().connection_pool.disconnect(inuse_connections=False)

    def suspect(self) -> None:
        """The map of slots may be behind: ask again before the next command."""
        self._is_stale = True

    def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        for each in self._sentinel.sentinels if self._sentinel else ():
            each.close()

    def _at(self, key: str, act: Callable[[Any], Any]) -> Any:
        with translated():
            try:
                return act(self._node(key))
            except MovedError:
                self._is_stale = True
                return act(self._node(key))
            except Exception:
                self._is_stale = True
                raise

    def _evaluate(self, node: Any, script: str, keys: Sequence[str], args: Args) -> Any:
        try:
            return self._run(node, script, keys, args)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._repair(node, keys)
            return self._run(node, script, keys, args)

    def _run(self, node: Any, script: str, keys: Sequence[str], args: Args) -> Any:
        digest = self._digests.setdefault(script, sha1(script.encode(), usedforsecurity=False).hexdigest())
        try:
            return node.evalsha(digest, len(keys), *keys, *args)
        except NoScriptError:
            self.num_script_reloads += 1
            return node.eval(script, len(keys), *keys, *args)

    def _repair(self, node: Any, keys: Sequence[str]) -> None:
        types = [_TYPES[key.rpartition(":")[2]] for key in keys]
        for place in self._run(node, scripts.REPAIR, keys, types):
            at = int(place) - 1
            log.warning("Redis: %s was no %s, which only an outsider writes: deleted", keys[at], types[at])

    def _by_node(self, keys: Sequence[str]) -> list[tuple[Any, list[int]]]:
        found: dict[int, tuple[Any, list[int]]] = {}
        for index, key in enumerate(keys):
            node = self._node(key)
            found.setdefault(id(node), (node, []))[1].append(index)
        return list(found.values())

    def _node(self, key: str) -> Any:
        """The client of the server that ``key`` belongs on. Raises StoreUnavailable."""
        client = self._open()
        if not isinstance(client, _cluster_client):
            return client
        with translated():
            return client.get_redis_connection(client.get_node_from_key(key))

    def _open(self) -> Any:
        with self._opening, translated():
            if self._client is None:
                self._client = self._make()
            elif self._is_stale and isinstance(self._client, _cluster_client):
                self._client = self._remapped(self._client)
            elif self._is_stale and self._address.kind == "single":
                self._client = self._upgraded(self._client)
            self._is_stale = False
            return self._client

    def _make(self) -> Any:
        if self._address.kind == "cluster":
            return self._cluster(self._address.hosts)
        if self._address.kind == "sentinel":
            return self._by_sentinel()
        return self._plain()

    def _plain(self) -> Any:
        if not self._address.hosts:
            return redis.Redis.from_pool(redis.ConnectionPool(**self._options))
        host, port = self._address.hosts[0]
        return redis.Redis(host=host, port=port, **self._options)

    def _upgraded(self, client: Any) -> Any:
        """A plain URL may lead to a node of a Cluster: it answers MOVED, and is asked for the others then."""
        if client.info("server").get("redis_mode") != "cluster":
            return client
        return self._cluster(self._address.hosts)

    def _remapped(self, client: Any) -> Any:
        """A Cluster's client asks the nodes that it knows; if all of those are gone, those of the URL may not be."""
        try:
            client.nodes_manager.initialize()
        except RedisClusterException:
            return self._cluster(self._address.hosts)
        return client

    def _cluster(self, hosts: Sequence[tuple[str, int]]) -> Any:
        if self._options.get("db", 0):
            raise ConfigError("redis", f"database {self._options['db']}", "database 0 in a Cluster")
        options = {name: value for name, value in self._options.items() if name != "db"}
        options["redis_connect_func"] = _check_peer  # its client greets by itself
        nodes = [_cluster_node(host, port) for host, port in hosts]
        return _cluster_client(startup_nodes=nodes, require_full_coverage=False, **options)

    def _by_sentinel(self) -> Any:
        options = dict(self._options)
        asked = {
            name: options[name]
            for name in (
                "socket_timeout",
                "socket_connect_timeout",
                "retry",
                "protocol",
                "redis_connect_func",
            )
        }
        asked |= {name: value for name, value in options.items() if name.startswith("ssl")}
        for name in ("username", "password"):
            if value := options.pop(f"sentinel_{name}", None):
                asked[name] = value
        self._sentinel = _sentinel_client(self._address.hosts, sentinel_kwargs=asked, **options)
        return self._sentinel.master_for(self._address.service)


def _greet(connection: Any) -> None:
    """What follows a connect: authentication and all that, if there is a server behind it."""
    _check_peer(connection)
    connection.on_connect()


def _check_peer(connection: Any) -> None:
    """Raises ConnectionError for a connection to itself.

    TCP allows it, where a port of this machine that the kernel gives to clients has no listener: the client
    would answer itself, and the server could not have its port back.
    """
    mine = connection._sock.getsockname()
    if mine and mine == connection._sock.getpeername():
        raise ConnectionError(f"connected to itself at {mine}: there is no server")


class RedisStore:
    """See ``store.Store``. Reads wait on connections of their own, and one thread at a time may ``read``."""

    def __init__(self, url: str, reply_timeout_s: float = 2.0) -> None:
        self.connection = Connection(url, reply_timeout_s)
        self._reading = Connection(url, reply_timeout_s + SERVER_BLOCK_S)
        self._streams = StreamReads(self._reading)
        self.num_jobs = 0
        self._told: dict[str, float] = {}

    def close(self) -> None:
        """Let go of connections."""
        self._streams.close()
        self._reading.close()
        self.connection.close()

    # ---- a replica's own facts

    @translated()
    def boot(self, registration: Registration) -> Durable:
        """See the protocol."""
        names = ReplicaKeys(registration.replica_id)
        fields = [item for pair in registration_fields(registration).items() for item in pair]
        epoch, replicated = self.connection.run_durably(
            scripts.BOOT,
            [names.meta, names.lease, names.log, names.snapshot_meta, names.load],
            [registration.epoch, _RETENTION_MS, names.snapshot_prefix, registration.process, *fields],
        )
        return Durable(int(epoch), replicated)

    @translated()
    def beat(self, registration: Registration, load: Load) -> Standing:
        """See the protocol."""
        self.connection.check()
        writer, lease_ms = registration.writer, registration.lease_ms
        names = ReplicaKeys(writer.replica_id)
        fields = [item for pair in beat_fields(registration).items() for item in pair]
        loads = [item for name in LOAD_FIELDS for item in (name, str(getattr(load, name)))]
        standing: list[str | bytes | int] = [writer.epoch, writer.nonce, lease_ms]
        form: list[str | bytes | int] = [_RETENTION_MS, names.snapshot_prefix, len(fields)]
        verdict, last_seq, now_ms = self.connection.run(
            scripts.BEAT,
            [names.meta, names.lease, names.log, names.snapshot_meta, names.load],
            [*standing, *form, *fields, *loads],
        )
        if verdict == b"OK":
            self._list(writer.replica_id, int(now_ms), lease_ms)
        return _standing(verdict, last_seq)

    def _list(self, replica_id: str, now_ms: int, lease_ms: int) -> None:
        """Be listed; who is listed for longer than the longest lease is nobody."""
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
    def append(self, writer: Writer, first_seq: int, entries: Sequence[Entry]) -> Standing:
        """See the protocol."""
        names = ReplicaKeys(writer.replica_id)
        args: Args = [writer.epoch, writer.nonce, first_seq, pack_entries(entries)]
        return _standing(*self.connection.run(scripts.APPEND, [names.meta, names.log], args))

    @translated()
    def snapshot(
        self, writer: Writer, seq: int, keep_from: int, holdings: Holdings, *, anew: bool
    ) -> Standing:
        """See the protocol."""
        names = ReplicaKeys(writer.replica_id)
        snapshot = pack_snapshot(holdings.groups())
        standing: list[str | bytes | int] = [writer.epoch, writer.nonce, seq, keep_from, 1 if anew else 0]
        form: list[str | bytes | int] = [_RETENTION_MS, snapshot.checksum, names.snapshot_prefix]
        keys = [names.meta, names.log, names.snapshot_meta]
        return _standing(*self.connection.run(scripts.SNAPSHOT, keys, [*standing, *form, *snapshot.chunks]))

    @translated()
    def leave(self, writer: Writer, proof: str) -> Standing:
        """See the protocol."""
        names = ReplicaKeys(writer.replica_id)
        keys = [names.meta, names.lease, names.load]
        args: Args = [writer.epoch, writer.nonce, proof]
        verdict, last_seq, until_ms = self.connection.run(scripts.LEAVE, keys, args)
        if verdict == b"OK" and int(until_ms):
            listed_ms = int(until_ms) - int(LISTED_S * 1000)
            self.connection.of("ZADD", REPLICAS_KEY, listed_ms, writer.replica_id)
        elif verdict == b"OK":
            self.connection.of("ZREM", REPLICAS_KEY, writer.replica_id)
        return _standing(verdict, last_seq)

    # ---- reading

    @translated()
    def fetch(self, replica_ids: Sequence[str] | None = None) -> Fetched:
        """See the protocol."""
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
            except WireError as error:  # its replica states it anew with its next beat
                self._tell(name, f"replica {name}: its registration can't be read: {error}")
        return found

    def _tell(self, about: str, message: str) -> None:
        """Log something once a minute at most for each that it is about."""
        now = monotonic()
        if len(self._told) >= MAX_REPLICAS:
            self._told.clear()
        if now >= self._told.get(about, now) + (_TELL_S if about in self._told else 0.0):
            self._told[about] = now
            log.warning("Redis: %s", message)

    def _listed(self) -> list[str]:
        self._reading.check()
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
        """See the protocol."""
        logs = {ReplicaKeys(name).log: name for name in cursors}
        ids = {key: "{}-{}".format(*cursors[name]) for key, name in logs.items()}
        news = self._streams.read(ids, block_s)
        return {logs[key]: [_logged(*entry) for entry in entries] for key, entries in news if key in logs}

    @translated()
    def load(self, replica_id: str, epoch: int, after_seq: int) -> SavedSnapshot | None:
        """See the protocol."""
        names = ReplicaKeys(replica_id)
        for _ in range(_SNAPSHOT_TRIES):
            found = self.connection.of("HMGET", names.snapshot_meta, "epoch", "seq", "count", "checksum")
            with suppress(WireError):  # torn: the writer replaced it while it was read
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
        """See the protocol."""
        blocks = "" if limit.blocks is None else limit.blocks
        args: Args = [expected, format_said(limit), _RETENTION_MS, blocks]
        answer, replicated = self.connection.run_durably(scripts.LIMIT, [_tenant_key(tenant)], args)
        return Durable(int(answer), replicated)

    @translated()
    def reserve(self, tenant: bytes, share: Share, keep_s: float, limit: Limit = NO_LIMIT) -> Grant:
        """See the protocol."""
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
        """See the protocol."""
        args: Args = [standing, *raised_fields(raised)]
        written, replicated = self.connection.run_durably(scripts.RAISE, [_tenant_key(tenant)], args)
        if written:
            self.announce(tenant)
        return Durable(int(written), replicated)

    @translated()
    def announce(self, tenant: bytes) -> None:
        """See the protocol."""
        self.connection.run(scripts.ANNOUNCE, [PURGES_KEY], [tenant.hex(), MAX_PURGES])

    @translated()
    def confirm(self, tenant: bytes, writer: Writer, raised: Raised, proof: str) -> bool:
        """See the protocol."""
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
        """See the protocol. What has not the form of this version counts for nothing."""
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
        """See the protocol. What has not the form of this version counts for nothing."""
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
        """See the protocol."""
        found: set[bytes] = set()
        for some in _slices(list(positions)):
            args: Args = [item for each in some for item in (each.hex(), positions[each])]
            places = self.connection.run(scripts.UNANNOUNCED, [PURGES_KEY], args)
            found |= {some[int(place) - 1] for place in places}
        return found

    @translated()
    def purges(self, after: int) -> list[tuple[bytes, int]]:
        """See the protocol."""
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
        """See the protocol."""
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
        """See the protocol."""
        args: Args = [format_owner(owner), format_owner(expected)]
        return int(self.connection.run(scripts.OWN, [_job_key(job_id)], args)) == 1

    @translated()
    def add_part(self, job_id: str, owner: Writer, part: JobPart) -> bool:
        """See the protocol."""
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
        """See the protocol."""
        args: Args = [PART_PREFIX + part.replica_id, format_part(part)]
        return int(self.connection.run(scripts.PART, [_job_key(job_id)], args)) == 1

    @translated()
    def drop_job(self, job_id: str) -> None:
        """See the protocol."""
        self.connection.of("DEL", _job_key(job_id))

    @translated()
    def load_job(self, job_id: str) -> WarmJob | None:
        """See the protocol."""
        try:
            fields = self.connection.of("HGETALL", _job_key(job_id))
            return parse_job(job_id, fields) if fields else None
        except WireError as error:
            reason = str(error).replace(job_id, "…")
        except StoreUnavailable as error:
            if not is_wrong_type(error.__cause__):
                raise
            reason = "a key of another type"
        self._tell("job", f"a warm job can't be read, and counts as none: {reason}")
        return None

    # ---- pins

    @translated()
    def keep_pin(
        self, tenant: bytes, pin: FleetPin, ttl_s: float, *, anew: bool, most: int = MAX_PINS
    ) -> Durable:
        """See the protocol."""
        args: Args = [pin.id, max(1, int(ttl_s * 1000)), format_pin(pin), MAX_PINS, 1 if anew else 0, most]
        answer, replicated = self.connection.run_durably(scripts.KEEP, [_pins_key(tenant)], args)
        return Durable(int(answer), replicated)

    @translated()
    def end_pin(self, tenant: bytes, pin: FleetPin, keep_s: float) -> Durable:
        """See the protocol."""
        args: Args = [pin.id, max(1, int(keep_s * 1000)), format_pin(pin)]
        answer, replicated = self.connection.run_durably(scripts.UNPIN, [_pins_key(tenant)], args)
        return Durable(int(answer), replicated)

    @translated()
    def state_pin(self, tenant: bytes, pin_id: str, part: JobPart) -> bool:
        """See the protocol."""
        args: Args = [pin_id, part.replica_id, part.epoch, format_part(part), MAX_PARTS]
        return int(self.connection.run(scripts.STATE, [_pins_key(tenant)], args)) == 1

    @translated()
    def pins(self, tenant: bytes) -> list[FleetPin]:
        """See the protocol. What has not the form of this version counts for nothing."""
        now_ms, *pairs = self.connection.run(scripts.TENANT, [_pins_key(tenant)], [])
        return parse_pins(dict(zip(pairs[::2], pairs[1::2], strict=True)), int(now_ms))


class RedisCoordinator(BaseCoordinator):
    """A coordinator over Redis, with a thread that reads. ``poll`` reads at once what it would read soon."""

    def __init__(
        self, settings: Settings, url: str, clock: Clock = monotonic, wall: Clock = time.time
    ) -> None:
        check_published_block_size(settings.block_size)
        # Two reads that meet a shard which is away must fit into a lease, or the others' would run out meanwhile.
        reply_timeout_s = min(2.0, max(0.5, settings.lease_s / 4))
        self._redis = RedisStore(url, reply_timeout_s)
        super().__init__(settings, self._redis, clock, wall)
        self._reader_loop = Loop(f"radixkv-reader-{settings.replica_id}", self.reader.step)

    def register(self, address: str | None = None) -> ReplicaInfo:
        """See the protocol. The view of the others is there when it returns, if Redis is."""
        info = super().register(address)
        if self._registered:
            self.poll()
        return info

    def poll(self) -> None:
        """Fetch the registrations and read all logs now, as far as Redis can be reached."""
        with suppress(StoreUnavailable):
            self.reader.refresh()

    def _num_script_reloads(self) -> int:
        return self._redis.connection.num_script_reloads

    def _loops(self) -> list[Loop]:
        return [self._loop, self._reader_loop]


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


def _standing(verdict: bytes, last_seq: bytes) -> Standing:
    known: dict[bytes, Verdict] = {b"OK": "OK", b"GAP": "GAP", b"LOST": "LOST", b"FENCED": "FENCED"}
    return Standing(known[verdict], int(last_seq))


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


def _job_key(job_id: str) -> str:
    return f"{PREFIX}{{w:{job_id}}}:job"
