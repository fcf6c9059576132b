"""Connections to Redis or Valkey from a URL: single, Cluster or Sentinel. The only importer of the client library.

The server decides where a command goes: to the shard of its key's tag, to the master that Sentinel names, or to the
only server. Writes that must not be lost are followed by ``WAIT 1`` on the same connection, if the server has had a
replica.

Another server may take the place of one, under the same address. Connections to the old one may stay open, and it may
still answer reads. So if a connection is broken or silent, or leads to a server that can't serve (``is_refusal``), no
other one to the same address is used any more. A new connection is not used if it leads to a replica. A command that
was refused was not executed, and is tried once more over a new connection.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.coordination.store.redis", "redis")

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha1
from inspect import signature
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import SSLConnection, parse_url
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from radixkv.configuration.urls import without_password
from radixkv.coordination.store import redis_scripts as scripts
from radixkv.errors import ConfigError, RadixKVError, StoreUnavailable
from radixkv.uncopied import refuse_copies

log = logging.getLogger("radixkv.coordination")

_TYPES = {
    "meta": "hash",
    "lease": "string",
    "ev": "stream",
    "snapmeta": "hash",
    "load": "hash",
    "q": "hash",
    "p": "hash",
    "job": "hash",
    "n": "hash",
    "replicas": "zset",
    "purges": "zset",
    "jobs": "zset",
}
"""The type of a key, by the end of its name."""
_URL = re.compile(r"(rediss?|unix|rediss?\+(?:sentinel|cluster))://(?:(.*)@)?([^/?]*)(/[^?]*)?(\?.*)?")
_FORMS = (
    "redis://[user:password@]host[:port][/db], rediss://… (TLS), unix:///path, redis+cluster://host:port,host:port "
    "or redis+sentinel://host:port,host:port/service; also rediss+cluster:// and rediss+sentinel://"
)


# The library has no types for this.
_parse_url: Any = parse_url
_cluster_client: Any = RedisCluster
_cluster_node: Any = ClusterNode
_sentinel_client: Any = Sentinel

_OBJECTS = {"connection_pool", "credential_provider", "event_dispatcher", "redis_connect_func", "retry"}
_OPTIONS = frozenset(
    {*signature(redis.Redis).parameters, "path", "connection_class", "sentinel_username", "sentinel_password"}
    - _OBJECTS
)
"""Options that a URL and its query may set."""

# MOVED is an AskError too.
_REFUSALS = (AskError, BusyLoadingError, ClusterDownError, ReadOnlyError, TryAgainError)
_REFUSED = re.compile(r"\b(READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|MISCONF)\b")
_LEFT_ALONE = re.compile(r"\bUNBLOCKED\b|with replica instances")
"""What a server answers to a command that waits while it becomes a replica."""
_IN_SCRIPT = re.compile(
    r"(ERR )?Error running script \(call to f_\w+\): @user_script: ?\d+: (@user_script: ?\d+: )?-?"
    r"| script: \w+, on @user_script: ?\d+\."
)

Args = Sequence[str | bytes | int]


@contextmanager
def translated() -> Iterator[None]:
    """Turn any error of the client or the server into StoreUnavailable, and also an impossible answer.

    The type of the error doesn't matter: the client parses the server's bytes without checks. Garbage, torn connections
    and disconnects by other threads show as ValueError, AttributeError, RecursionError and others.
    """
    try:
        yield
    except RadixKVError:
        raise
    except Exception as error:
        raise unavailable(error) from error


def is_wrong_type(error: object) -> bool:
    """Whether a server reported that a key has another type, to a command or, in older versions, to a script."""
    return isinstance(error, Exception) and "WRONGTYPE" in str(error)


def unavailable(error: Exception) -> StoreUnavailable:
    """Return the StoreUnavailable for an error of the client, or for one that a server answered with."""
    return StoreUnavailable(f"Redis: {type(error).__name__}: {_IN_SCRIPT.sub('', str(error))}")


def is_refusal(error: object) -> bool:
    """Whether a server reported that it can't serve now, to a command or inside a script: nothing was executed.

    A script's first write is refused, or none: a server takes no other role meanwhile.
    """
    if isinstance(error, _REFUSALS) or isinstance(getattr(error, "__context__", None), ReadOnlyError):
        return True
    return isinstance(error, ResponseError) and _REFUSED.search(str(error)) is not None


def _cause(error: object) -> object:
    return error.__cause__ if isinstance(error, StoreUnavailable) else error


def _is_of_data(error: object) -> bool:
    """Whether a server that can serve answered: the error is about the command or its keys."""
    if not isinstance(error, ResponseError) or is_refusal(error):
        return False
    return _LEFT_ALONE.search(str(error)) is None


class _Malformed(ValueError):
    """What is wrong with a URL, in words that quote nothing of it."""


@dataclass(frozen=True, slots=True)
class Address:
    """The servers' addresses, from a URL. ``options`` go to every connection, TLS and credentials among them."""

    kind: str
    hosts: tuple[tuple[str, int], ...]
    service: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL. Raises ConfigError, without the password, and without the options: one may be a misspelt one."""
        if not isinstance(url, str):
            raise ConfigError("redis", type(url).__name__, _FORMS)
        try:
            return cls._parse(url)
        except _Malformed as error:
            allowed = f"{_FORMS} ({error})"
        except (ValueError, TypeError):  # their texts quote the URL
            allowed = _FORMS
        raise ConfigError("redis", without_password(url.partition("?")[0]), allowed)

    @classmethod
    def _parse(cls, url: str) -> Address:
        found = _URL.fullmatch(url)
        if found is None:
            raise _Malformed("not a URL of these forms")
        scheme, user, hosts, path, query = (part or "" for part in found.groups())
        plain, _, kind = scheme.partition("+")
        names = [name for name in hosts.split(",") if name]
        is_socket = plain == "unix"
        if not is_socket and re.search("[/?#]", user):
            raise _Malformed("special characters before the @ have to be percent-encoded")
        user = f"{user}@" if user else ""
        path = path.strip("/")
        service, _, database = path.partition("/") if kind == "sentinel" else ("", "", path)
        if not is_socket and not re.fullmatch("[0-9]*", database):
            raise _Malformed("the database isn't a number")
        shown = url if is_socket else f"{plain}://{user}{names[0] if names else ''}/{database}{query}"
        options = dict(_parse_url(shown))
        if options.keys() - _OPTIONS:
            raise _Malformed("it has an unknown option")
        if is_socket:
            return cls("single", (), "", options)
        if kind == "sentinel" and not service:
            raise _Malformed("the service's name is missing")
        default = 26379 if kind == "sentinel" else 6379
        listed = tuple(_host(f"{plain}://{name}", default) for name in names or ["localhost"])
        if len(listed) > 1 and not kind:
            raise _Malformed("several hosts")
        options.pop("host", None)
        options.pop("port", None)
        if options.pop("connection_class", None) is SSLConnection:
            options["ssl"] = True
        return cls(kind or "single", listed, service, options)


def _host(url: str, default_port: int) -> tuple[str, int]:
    if urlsplit(url).port == 0:
        raise _Malformed("there is no port 0")
    options = _parse_url(url)
    return options.get("host", "localhost"), int(options.get("port", default_port))


class Connection:
    """Clients of one deployment, made when first needed; all their errors become StoreUnavailable. Thread-safe.

    A Cluster's client is used only for its map of slots: commands go to the node that has the key.
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
            "redis_connect_func": _greet_master,
        }
        self._client: Any = None
        self._is_stale = False
        self._had_replica = False
        self._sentinel: Any = None
        self._master: tuple[str, int] | None = None
        self._opening = threading.Lock()
        self._digests: dict[str, str] = {}
        if self._address.kind == "single":
            self._client = self._plain()  # made now, so that an impossible option is refused at once

    def run(self, script: str, keys: Sequence[str], args: Args) -> Any:
        """Run a script and return its answer. Raises StoreUnavailable."""
        return self._at(keys[0], lambda node: self._evaluate(node, script, keys, args))

    def repair(self, keys: Sequence[str]) -> None:
        """Delete those of these keys, which share a tag, that have an unexpected type; log which.

        Any writer that made them could delete keys too. Their content counts as lost by the store, and is written
        again.
        """
        self._at(keys[0], lambda node: self._repair(node, keys))

    def run_durably(self, script: str, keys: Sequence[str], args: Args) -> tuple[Any, bool | None]:
        """Run a script; return its answer, and whether a replica of the server has the write (None if it has no
        replica)."""

        def act(node: Any) -> tuple[Any, bool | StoreUnavailable | None]:
            with node.client() as one:
                answer = self._evaluate(one, script, keys, args)
                try:
                    with self.watched(node):
                        return answer, self._is_replicated(one)
                except StoreUnavailable as error:  # not to be taken for a refusal: the script has run
                    return answer, error

        answer, replicated = self._at(keys[0], act)
        if isinstance(replicated, StoreUnavailable):
            raise replicated
        return answer, replicated

    def _is_replicated(self, one: Any) -> bool | None:
        num_replicas = int(one.info("replication").get("connected_slaves", 0))
        self._had_replica = self._had_replica or num_replicas > 0
        if not self._had_replica:
            return None
        wait_ms = max(1, int(self._reply_timeout_s * 500))
        return int(one.execute_command("WAIT", 1, wait_ms)) >= 1

    def gather(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the replies to commands of one key each, ``(name, key, …)``: one round trip to each shard.

        A reply may be an exception: that of its command, or of its shard. Raises StoreUnavailable if no shard
        answers. Commands that are refused are sent once more.
        """
        replies: list[Any] = [None] * len(commands)
        left: Sequence[int] = range(len(commands))
        for _ in range(2):
            self._gather(commands, left, replies)
            left = [index for index in left if is_refusal(_cause(replies[index]))]
            if not left:
                break
        failures = [reply for reply in replies if isinstance(reply, StoreUnavailable)]
        if failures and len(failures) == len(replies):
            raise failures[0]
        return replies

    def _gather(
        self, commands: Sequence[tuple[Any, ...]], indices: Sequence[int], replies: list[Any]
    ) -> None:
        for node, places in self._by_node(commands, indices):
            pipeline = node.pipeline(transaction=False)
            for place in places:
                pipeline.execute_command(*commands[place])
            try:
                with self.watched(node):
                    answers = pipeline.execute(raise_on_error=False)
            except StoreUnavailable as error:
                answers = [error] * len(places)
            for place, answer in zip(places, answers, strict=True):
                replies[place] = answer
                if isinstance(answer, Exception):
                    self._leave(node, answer)

    def of(self, command: str, *args: Any) -> Any:
        """Return the reply to one command of one key, which is its first argument."""
        return self._at(str(args[0]), lambda node: node.execute_command(command, *args))

    def slot(self, key: str) -> int:
        """Return the slot of a key in a Cluster, and 0 anywhere else. Keys of one slot can share a command."""
        client = self._open()
        return int(client.keyslot(key)) if isinstance(client, _cluster_client) else 0

    def check(self) -> None:
        """Under Sentinel: leave a server that is no longer the master, even if it still answers."""
        if self._sentinel is None:
            return
        with translated():
            master = self._sentinel.discover_master(self._address.service)
        known, self._master = self._master, master
        client = self._client
        if known not in (None, master) and client is not None:
            self._drop(client)

    @contextmanager
    def watched(self, node: Any) -> Iterator[None]:
        """What is done over the connections of a server. Its errors become StoreUnavailable, and end connections.

        Only an error about a command or its keys doesn't: otherwise another server may have the address now, or the
        slots.
        """
        with translated():
            try:
                yield
            except Exception as error:
                self._leave(node, error)
                raise

    def _leave(self, node: Any, error: Exception) -> None:
        cause = _cause(error)
        if _is_of_data(cause):
            return
        has_moved = isinstance(cause, AskError)
        self._is_stale = self._is_stale or has_moved or isinstance(self._client, _cluster_client)
        if not has_moved:
            self._drop(node)

    def _drop(self, node: Any) -> None:
        """Close the idle connections to a server, and use a new client for it. Those in use end with their commands.

        The clients of a Cluster's nodes stay, because their addresses are those of the servers themselves.
        """
        with self._opening:
            if self._client is node:
                self._client = None
        node.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        for each in self._sentinel.sentinels if self._sentinel else ():
            each.close()

    def _at(self, key: str, act: Callable[[Any], Any]) -> Any:
        try:
            return self._once(key, act)
        except StoreUnavailable as error:
            if not is_refusal(error.__cause__):
                raise
        return self._once(key, act)

    def _once(self, key: str, act: Callable[[Any], Any]) -> Any:
        node = self.node(key)
        with self.watched(node):
            return act(node)

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
            log.warning(
                "Redis: %s was not a %s. No replica writes that, so it was deleted", keys[at], types[at]
            )

    def _by_node(
        self, commands: Sequence[tuple[Any, ...]], indices: Sequence[int]
    ) -> list[tuple[Any, list[int]]]:
        found: dict[int, tuple[Any, list[int]]] = {}
        for index in indices:
            node = self.node(str(commands[index][1]))
            found.setdefault(id(node), (node, []))[1].append(index)
        return list(found.values())

    def node(self, key: str) -> Any:
        """Return the client of the server that has ``key``: another one than before if its connections were left.

        Raises StoreUnavailable.
        """
        client = self._open()
        if not isinstance(client, _cluster_client):
            return client
        try:
            with translated():
                return client.get_redis_connection(client.get_node_from_key(key))
        except StoreUnavailable:
            self._is_stale = True
            raise

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
        """Return a Cluster client if a plain URL leads to a node of a Cluster, which answers MOVED."""
        if client.info("server").get("redis_mode") != "cluster":
            return client
        return self._cluster(self._address.hosts)

    def _remapped(self, client: Any) -> Any:
        """Read the map of slots again. If all nodes that the client knows are gone, make a new client from the URL."""
        try:
            client.nodes_manager.initialize()
        except RedisClusterException:
            return self._cluster(self._address.hosts)
        return client

    def _cluster(self, hosts: Sequence[tuple[str, int]]) -> Any:
        if self._options.get("db", 0):
            raise ConfigError("redis", f"database {self._options['db']}", "database 0 in a Cluster")
        options = {name: value for name, value in self._options.items() if name != "db"}
        options["redis_connect_func"] = _check_peer  # the Cluster client sends its greeting itself
        nodes = [_cluster_node(host, port) for host, port in hosts]
        return _cluster_client(startup_nodes=nodes, require_full_coverage=False, **options)

    def _by_sentinel(self) -> Any:
        options = dict(self._options)
        asked = {
            name: options[name] for name in ("socket_timeout", "socket_connect_timeout", "retry", "protocol")
        }
        asked["redis_connect_func"] = _greet
        asked |= {name: value for name, value in options.items() if name.startswith("ssl")}
        for name in ("username", "password"):
            if value := options.pop(f"sentinel_{name}", None):
                asked[name] = value
        if self._sentinel is None:
            self._sentinel = _sentinel_client(self._address.hosts, sentinel_kwargs=asked, **options)
        return self._sentinel.master_for(self._address.service)


refuse_copies(Connection, "it holds sockets. Make another")


def _greet(connection: Any) -> None:
    """Send what follows a connect, such as authentication, if there is a server."""
    _check_peer(connection)
    connection.on_connect()


def _greet_master(connection: Any) -> None:
    """Do the same. Raises ReadOnlyError if the server is a replica."""
    _greet(connection)
    require_master(connection)


def require_master(connection: Any) -> None:
    """Raise ReadOnlyError if a connection leads to a replica. What a replica has may be old.

    A replica of a Cluster names its master to every command (MOVED), so it is no danger.
    """
    is_replica = b"role:slave" in _info(connection, "replication")
    if is_replica and b"cluster_enabled:1" not in _info(connection, "cluster"):
        raise ReadOnlyError("the server at this address is a replica")


def _info(connection: Any, section: str) -> bytes:
    connection.send_command("INFO", section)
    reply = connection.read_response()
    if not isinstance(reply, bytes):
        raise ConnectionError(f"the server doesn't answer INFO {section}")
    return reply


def _check_peer(connection: Any) -> None:
    """Raise ConnectionError for a connection to itself.

    TCP allows such a connection if a local port in the kernel's range for clients has no listener. The client would
    then answer itself, and the server could not get its port back.
    """
    mine = connection._sock.getsockname()
    if mine and mine == connection._sock.getpeername():
        raise ConnectionError(f"connected to itself at {mine}: there is no server")
