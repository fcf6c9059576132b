"""The control channel of an engine: a Unix socket, by which an operator reaches the cache inside its process.

    with ControlServer(cache, "/run/radixkv", "engine.keys", salts=reader) as control:
        engine = HFEngine(model, cache, control=control)

The socket is ``control.sock`` in a directory that only the engine's user can enter. ``radixkv stats --socket PATH``,
``purge``, ``keys`` and ``audit run`` use it; programs use ``ControlClient``. The server takes connections of its own
user and of root, and commands after both sides have proven the key of the purpose ``control`` (``channel``).

    command    fields                                        answer
    stats                                                    cache: counts of the whole cache, and its blocks;
                                                             tiers: counts of what lies below, if something does
    tenants    after, limit, or tenant                       tenants: counts of each; next: the next ``after``, or null
    set_tenant tenant, and fields of ``config.Tenant``       tenants: their names in the cache
    remove_tenant  tenant                                    tenants, owed
    namespaces tenant, after                                 namespaces: digests (``digest_of``); next
    lookup     a namespace; ids                              matched_tokens, matched_blocks
    touch      a namespace; ids                              tokens
    clear      a namespace                                   blocks, owed
    pin        a namespace, ttl_s; ids                       id, num_tokens, num_blocks, ttl_s
    pins       tenant, after, limit                          pins: of each also its namespace's digest; next
    unpin      tenant, id
    purge      tenant, generation                            tenants, generation, blocks, owed, known
    audit                                                    ok, violations (the first 50), counts, seconds
    keys                                                     keys: purpose, id and place of each
    reload_keys                                              keys, as read again from the file; ends connections that
                                                             were opened by a key that isn't among them any more

A namespace is ``model``, ``adapter``, ``weights``, and either ``tenant`` and ``salt`` or, with a SaltReader, a
request's ``cache_salt``. Without ``weights`` it is of the present version. ``tenant`` is the cache's name of a tenant.
With a SaltReader, commands about one tenant take the fleet's name of it too, except for ``pins`` and ``unpin``.
``purge`` forgets what the tenant has. If it names a ``generation``, salts of older generations are refused from then
on. ``owed``: a disk below couldn't destroy its records yet. It serves none of them, and tries again every 5 s;
``stats`` says how many purges it owes. ``known``: false if nothing was there, because neither the cache nor a disk has
met the tenant.
``ids`` are token ids as ``tokens.encode`` returns them: the tail of the message.

**Time.** Short commands run between two steps: the engine calls ``run_pending`` after each. If it doesn't for
``patience_s``, the connection's thread runs the command itself; the cache allows that. If the engine says that it makes
no steps (``is_idle``), that happens at once. Commands whose work grows with the cache (``purge``, ``clear``, ``audit``)
run in the connection's thread, in slices, as they do over HTTP. A stranger costs an engine little: it gets no further
than the handshake, and no more than 200 connections a second are accepted. Of all clients together, 250 commands a
second are begun.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Final

from radixkv.audit.invariants import inspect
from radixkv.clock import Clock, monotonic
from radixkv.config import Namespace
from radixkv.engines.control.channel import MAX_REQUEST_BYTES, MAX_TAIL_BYTES, Channel, peer_uid
from radixkv.engines.control.tenants import (
    SETTINGS,
    Answer,
    Fields,
    TenantCommands,
    is_known_to,
    number_of,
    refuse_removed,
    still_owes,
    text_of,
)
from radixkv.errors import ArgumentError, ConfigError, ControlError, LeaseError, RadixKVError
from radixkv.index.below import Scope
from radixkv.index.cache import PrefixCache
from radixkv.signing import KeySet, key_id
from radixkv.tenancy.salt import ANONYMOUS, SaltReader
from radixkv.tiers import pending as pendings
from radixkv.tiers.pending import Pending
from radixkv.uncopied import refuse_copies

__all__ = ["MAX_CLIENTS", "SOCKET_NAME", "ControlServer"]

SOCKET_NAME: Final = "control.sock"
MAX_CLIENTS: Final = 8
"""Most connections that have proven the key."""
IDLE_S: Final = 60.0
"""Seconds after which a connection without a command is closed."""

_ACCEPT_EVERY_S = 0.005
_COMMAND_EVERY_S = 0.004
_MAX_HANDSHAKES = 32
"""Most connections that haven't proven the key yet. It takes 160 ms to accept as many: each has at least this time."""
_BACKLOG = 128
_MAX_VIOLATIONS = 50
_SLICE_PAUSE_S = 0.002

log = logging.getLogger("radixkv.engines")


class _Turn:
    """A command that waits for a step's end."""

    __slots__ = ("answer", "command", "done", "error")

    def __init__(self, command: Callable[[], Answer]) -> None:
        self.command, self.done = command, threading.Event()
        self.answer: Answer = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the command. Its error is for the connection's thread; only an interruption is raised here too."""
        try:
            self.answer = self.command()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self.done.set()


class ControlServer:
    """The server of one cache. ``with`` starts and stops its threads: one for new connections, one for each connection.

    - ``directory``: made with mode 0700 if it is missing.
    - ``keys_file``: of ``radixkv keys derive``, with keys of the purpose ``control``.
    - ``salts``: the engine's reader of salts. ``purge`` raises generations in it, ``reload_keys`` replaces its keys.
    - ``patience_s``: how long a short command waits for ``run_pending``. 0 for an engine that never calls it.
    - ``is_idle``: whether the engine makes no steps now. Called by other threads.
    - ``on_purge``: called before and after a purge or a removal of a tenant, by other threads.
    - ``forgetting_below``: returns a context in which the cache forgets something of a tenant. The tiers below serve
      nothing of the tenant from its beginning on, and begin to destroy what they have at its end.
    - ``knows_below``: whether the tiers below may have something of a tenant that the cache hasn't met. By any thread.
    - ``follow_below``: called with the tenant, after its settings have changed in the cache. By any thread.
    - ``on_keys``: called with keys that were read again, before salts of them are accepted. If it raises, none are.
    - ``tiers``: counts of the tiers below, by their names. By any thread.
    - ``weights``: the version of the weights now. Called by other threads.

    Raises ConfigError for a directory that isn't the user's alone or is in use, and for keys that can't be used.
    """

    def __init__(
        self,
        cache: PrefixCache,
        directory: Path | str,
        keys_file: Path | str,
        *,
        salts: SaltReader | None = None,
        patience_s: float = 0.25,
        is_idle: Callable[[], bool] = lambda: False,
        on_purge: Callable[[], None] = lambda: None,
        forgetting_below: Callable[[Scope], AbstractContextManager[Pending]] = lambda scope: nullcontext(
            Pending()
        ),
        knows_below: Callable[[str], bool] = lambda tenant: False,
        follow_below: Callable[[str], None] = lambda tenant: None,
        on_keys: Callable[[KeySet], None] = lambda keys: None,
        tiers: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
        weights: Callable[[], int] = lambda: 0,
        clock: Clock = monotonic,
    ) -> None:
        if not isinstance(patience_s, (int, float)) or not 0 <= patience_s <= 60:
            raise ConfigError("patience_s", patience_s, "0 to 60 seconds")
        self._cache, self._keys_file, self._salts = cache, keys_file, salts
        self._patience_s, self._is_idle, self._clock = patience_s, is_idle, clock
        self._on_purge, self._on_keys, self._tiers, self._weights = on_purge, on_keys, tiers, weights
        self._forgetting_below, self._knows_below = forgetting_below, knows_below
        self._keys = self._loaded_keys()
        self._waiting: deque[_Turn] = deque()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._meeting: list[socket.socket] = []  # connections in the handshake, the oldest first
        self._proven: dict[socket.socket, bytes] = {}
        """The key by which each connection was opened."""
        self._next_command_at = 0.0
        self._auditing = threading.Lock()
        self._tenants = tenants = TenantCommands(cache, salts, follow_below)
        self._commands: dict[str, tuple[Callable[[Fields, bytes], Answer], frozenset[str], bool]] = {
            "stats": (self._stats, frozenset(), True),
            "tenants": (tenants.counts, frozenset({"after", "limit", "tenant"}), True),
            "set_tenant": (tenants.set, SETTINGS | {"tenant"}, True),
            "remove_tenant": (self._remove, frozenset({"tenant"}), False),
            "namespaces": (tenants.namespaces, frozenset({"tenant", "after"}), True),
            "lookup": (self._lookup, _NAMESPACE_FIELDS, True),
            "touch": (self._touch, _NAMESPACE_FIELDS, True),
            "clear": (self._clear, _NAMESPACE_FIELDS, False),
            "pins": (tenants.pins, frozenset({"tenant", "after", "limit"}), True),
            "pin": (self._pin, _NAMESPACE_FIELDS | {"ttl_s"}, True),
            "unpin": (self._unpin, frozenset({"tenant", "id"}), True),
            "purge": (self._purge, frozenset({"tenant", "generation"}), False),
            "audit": (self._audit, frozenset(), False),
            "keys": (self._show_keys, frozenset(), False),
            "reload_keys": (self._reload_keys, frozenset(), False),
        }
        self.path = Path(directory) / SOCKET_NAME
        self._directory = _own_directory(Path(directory))
        self._listener = _listening(self._directory, self.path)
        self._thread = threading.Thread(target=self._accept, name="radixkv-control", daemon=True)

    def __enter__(self) -> ControlServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Close all connections, end the threads, remove the socket. A command that runs is finished first."""
        self._stopping.set()
        with self._lock:
            connections = list(self._connections)
        for each in (self._listener, *connections):
            _shut(each)
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            threads = list(self._connections.values())
        for thread in threads:
            thread.join()
        if self._directory >= 0:
            self._listener.close()
            with suppress(FileNotFoundError):
                os.unlink(SOCKET_NAME, dir_fd=self._directory)
            os.close(self._directory)
            self._directory = -1

    def run_pending(self, budget_s: float = 0.001) -> int:
        """Run commands that wait, between two steps of the engine; returns how many. 0.1 µs if there are none.

        It begins no further one after ``budget_s``. At most MAX_CLIENTS commands wait.
        """
        if not self._waiting:
            return 0
        until, done = self._clock() + budget_s, 0
        while True:
            try:
                turn = self._waiting.popleft()
            except IndexError:
                return done
            turn.run()
            done += 1
            if self._clock() >= until:
                return done

    # --- connections

    def _accept(self) -> None:
        """Accept connections, at most 200 a second. Where too many are in the handshake, end the oldest one's."""
        while not self._stopping.wait(_ACCEPT_EVERY_S):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                if error.errno not in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE):
                    raise
                log.warning("a control connection can't be accepted: %s", error)
                self._stopping.wait(1.0)
                continue
            name = "radixkv-control-client"
            thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
            with self._lock:
                if len(self._meeting) >= _MAX_HANDSHAKES:
                    oldest = next(iter(self._meeting))
                    self._meeting.remove(oldest)
                    _shut(oldest)
                self._meeting.append(connection)
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = self._met(connection)
            while channel is not None and self._answered(channel):
                pass
        except (ControlError, OSError) as error:  # OSError: a deadline, or a connection that ended
            log.info("a control connection ended: %s", error)
        finally:
            with self._lock:
                if connection in self._meeting:
                    self._meeting.remove(connection)
                self._proven.pop(connection, None)
                del self._connections[connection]
                connection.close()

    def _met(self, connection: socket.socket) -> Channel | None:
        """Return the channel of a client that has proven the key, if there is a place for it."""
        uid = peer_uid(connection)
        if uid not in (os.geteuid(), 0):
            log.warning("a control connection of user %d is refused", uid)
            return None
        channel = Channel.accept(connection, self._keys.accepted("control"))
        with self._lock:
            if connection not in self._meeting:  # it took too long
                return None
            self._meeting.remove(connection)
            self._proven[connection] = channel.key
            is_full = len(self._proven) > MAX_CLIENTS
        if is_full:
            channel.send({"error": f"the engine has {MAX_CLIENTS} control connections already"})
            return None
        return channel

    def _answered(self, channel: Channel) -> bool:
        """Answer one command; returns whether there may be another."""
        if self._stopping.is_set():
            return False
        received = channel.receive(IDLE_S, max_head=MAX_REQUEST_BYTES, max_tail=MAX_TAIL_BYTES)
        if received is None:
            return False
        self._pace()
        try:
            answer: Answer = {"answer": self._done(channel.key, *received)}
        except RadixKVError as error:
            kind, found = type(error).__name__, vars(error)
            numbers = {name: each for name, each in found.items() if type(each) is int}
            answer = {"error": f"{kind}: {error}", "kind": kind, "numbers": numbers}
        channel.send(answer)
        return self._is_accepted(channel.key)

    def _is_accepted(self, key: bytes) -> bool:
        return key in self._keys.accepted("control")

    def _pace(self) -> None:
        """Wait until the next command may begin: a thread that never pauses would keep the interpreter's lock busy."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next_command_at)
            self._next_command_at = begin + _COMMAND_EVERY_S
        if begin > now:
            self._stopping.wait(begin - now)

    def _done(self, key: bytes, request: Answer, ids: bytes) -> Answer:
        name = request.pop("command", None)
        known = self._commands.get(name) if isinstance(name, str) else None
        if known is None:
            raise ArgumentError("command", name if isinstance(name, str) else "…", ", ".join(self._commands))
        nested = [field for field, value in request.items() if isinstance(value, (list, dict))]
        if nested:
            raise ArgumentError("field", nested[0], "fields whose values are texts, numbers or null")
        command, fields, is_short = known
        refuse_removed(request)
        unknown = request.keys() - fields
        if unknown:
            raise ArgumentError("field", min(unknown), ", ".join(sorted(fields)) or "no fields")

        def begin() -> Answer:
            if not self._is_accepted(key):
                raise ControlError(
                    "the key of this connection isn't accepted any more: connect with a current one"
                )
            return command(request, ids)

        return self._between_steps(begin) if is_short else begin()

    def _between_steps(self, command: Callable[[], Answer]) -> Answer:
        """Let the engine's thread run a command, or run it here if that doesn't come for ``patience_s``."""
        if self._is_idle():
            return command()
        turn = _Turn(command)
        self._waiting.append(turn)
        if not turn.done.wait(self._patience_s):
            try:
                self._waiting.remove(turn)
            except ValueError:
                turn.done.wait()  # it runs at this moment
            else:
                turn.run()
        if isinstance(turn.error, Exception):
            raise turn.error
        if turn.error is not None:
            raise ControlError("the engine was interrupted")
        return turn.answer

    # --- commands

    def _stats(self, fields: Fields, ids: bytes) -> Answer:
        cache, tiers = asdict(self._cache.stats()), self._tiers()
        return {"cache": cache, "tiers": tiers} if tiers else {"cache": cache}

    def _lookup(self, fields: Fields, ids: bytes) -> Answer:
        match = self._cache.match(self._namespace(fields), ids)
        return {"matched_tokens": match.num_tokens, "matched_blocks": match.num_blocks}

    def _touch(self, fields: Fields, ids: bytes) -> Answer:
        return {"tokens": self._cache.touch(self._namespace(fields), ids)}

    def _clear(self, fields: Fields, ids: bytes) -> Answer:
        namespace = self._namespace(fields)
        with self._forgetting([namespace.tenant]) as owed:
            blocks = self._cache.clear(namespace)
        return {"blocks": blocks, "owed": bool(owed)}

    def _pin(self, fields: Fields, ids: bytes) -> Answer:
        pin = self._cache.pin(self._namespace(fields), ids, fields.get("ttl_s"))
        return {"id": pin.id, "num_tokens": pin.num_tokens, "num_blocks": pin.num_blocks, "ttl_s": pin.ttl_s}

    def _unpin(self, fields: Fields, ids: bytes) -> Answer:
        pin_id = number_of(fields, "id", 1, 2**53, None)
        found = self._cache.pins(text_of(fields, "tenant"), after=pin_id - 1, limit=1)
        if not found or found[0].id != pin_id:
            raise LeaseError(f"there is no pin {pin_id} of this tenant")
        self._cache.unpin(found[0])
        return {}

    def _purge(self, fields: Fields, ids: bytes) -> Answer:
        tenant, generation = text_of(fields, "tenant"), fields.get("generation")
        if self._salts is None:
            if generation is not None:
                raise ArgumentError("generation", generation, "none, because this engine reads no salts")
            names = [tenant]
        else:
            names = self._salts.tenant_ids(tenant)
            if generation is not None:  # before the purge: no older request may fill the cache behind it
                for name in names:
                    self._salts.raise_generation(name, generation)
        is_known = any(is_known_to(self._cache, name) or self._knows_below(name) for name in names)
        self._on_purge()
        try:
            with self._forgetting(names) as owed:
                blocks = sum([self._cache.purge(name) for name in names])
        finally:
            self._on_purge()
        return {
            "tenants": names,
            "generation": self._generation(names),
            "blocks": blocks,
            "owed": bool(owed),
            "known": is_known,
        }

    def _remove(self, fields: Fields, ids: bytes) -> Answer:
        names = self._tenants.removable(fields)
        self._on_purge()
        try:
            with self._forgetting(names) as owed:
                removed = self._tenants.remove(fields, ids)
        finally:
            self._on_purge()
        return {**removed, "owed": bool(owed)}

    @contextmanager
    def _forgetting(self, names: list[str]) -> Iterator[list[str]]:
        """Within this, the cache forgets something of these tenants. The tiers below forget the tenants.

        Yields a list, which has the tenants of which they still have to destroy something, some seconds afterwards.
        """
        owed: list[str] = []
        with ExitStack() as stack:
            pending = [stack.enter_context(self._forgetting_below(Scope(name))) for name in names]
            yield owed
        ends_at = monotonic() + pendings.FORGET_S
        for name, below in zip(names, pending, strict=True):
            is_done = not below or below.wait(max(ends_at - monotonic(), 0.0))
            if not is_done or still_owes(self._cache, name):
                owed.append(name)

    def _generation(self, names: list[str]) -> int:
        if self._salts is None or names == [ANONYMOUS]:
            return max(self._cache.generation(name) for name in names)
        return max(self._salts.generation(name) for name in names)

    def _audit(self, fields: Fields, ids: bytes) -> Answer:
        if not self._auditing.acquire(blocking=False):
            raise ControlError("another audit of this cache is running")
        try:
            report = inspect(self._cache, lambda: time.sleep(_SLICE_PAUSE_S)).as_dict()
        finally:
            self._auditing.release()
        found = report["violations"]
        assert isinstance(found, list)
        return {**report, "violations": found[:_MAX_VIOLATIONS], "num_violations": len(found)}

    def _show_keys(self, fields: Fields, ids: bytes) -> Answer:
        keys = self._keys
        return {
            "keys": [
                {"id": key_id(key)[:8].hex(), "purpose": purpose, "place": place}
                for purpose in keys.purposes
                for place, key in enumerate(keys.accepted(purpose))
            ]
        }

    def _reload_keys(self, fields: Fields, ids: bytes) -> Answer:
        keys = self._loaded_keys()
        self._on_keys(keys)
        if self._salts is not None:
            self._salts.use(keys)
        self._keys = keys
        with self._lock:
            ended = [each for each, key in self._proven.items() if not self._is_accepted(key)]
        for each in ended:
            _shut(each, socket.SHUT_RD)  # the answer of a command that runs, such as this one, still goes out
        return self._show_keys(fields, ids)

    def _loaded_keys(self) -> KeySet:
        keys = KeySet.load(self._keys_file)
        keys.accepted("control")
        return keys

    def _namespace(self, fields: Fields) -> Namespace:
        given = {"weights": self._weights()} | {
            name: fields[name] for name in ("adapter", "weights") if name in fields
        }
        model = text_of(fields, "model")
        if "cache_salt" not in fields:
            return Namespace(text_of(fields, "tenant"), model, salt=fields.get("salt", ""), **given)
        if self._salts is None or "tenant" in fields or "salt" in fields:
            raise ArgumentError("cache_salt", "…", "given alone, to an engine that reads salts")
        return self._salts.read(fields["cache_salt"]).namespace(model, **given)


refuse_copies(ControlServer, "it holds sockets and threads. Make another")


_NAMESPACE_FIELDS = frozenset({"tenant", "model", "adapter", "salt", "weights", "cache_salt"})


def _own_directory(path: Path) -> int:
    """Open the socket's directory, and lock it for this process. Raises ConfigError unless it is the user's alone."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        allowed = f"a directory that can be opened, and isn't a symbolic link ({error.strerror})"
        raise ConfigError("directory", str(path), allowed) from None
    try:
        status = os.fstat(directory)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError("directory", str(path), "a directory of this user, with mode 0700")
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        raise ConfigError("directory", str(path), "a directory that no other engine uses") from None
    except ConfigError:
        os.close(directory)
        raise
    return directory


def _listening(directory: int, path: Path) -> socket.socket:
    """Return the listening socket, mode 0600. One that an ended process left is replaced, which the lock makes sure of.

    The address goes through the open directory. So no other directory can take its place, and its length has no limit.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(SOCKET_NAME, dir_fd=directory, follow_symlinks=False).st_mode):
                raise ConfigError(
                    "directory", str(path.parent), f"one whose {SOCKET_NAME} is a socket, or missing"
                )
            os.unlink(SOCKET_NAME, dir_fd=directory)
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        os.chmod(SOCKET_NAME, 0o600, dir_fd=directory)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        os.close(directory)
        raise
    return listener


def _shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wake the thread that waits for this socket."""
    with suppress(OSError):  # it isn't connected any more
        connection.shutdown(how)
