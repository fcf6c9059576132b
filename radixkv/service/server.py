"""``radixkv serve``: one process from start to end.

    bind ─▶ load ─▶ listen ─▶ register ─▶ serve ─▶ signal ─▶ drain ─▶ end requests ─▶ leave the fleet, close

The port is taken before the model is loaded, so that a busy port is reported at once. The port listens before the
replica registers, so that no other replica gets an address that doesn't answer.

SIGINT and SIGTERM end the process with exit code 0, or with 1 if a disk still has what a purge was to destroy. While it
drains, for at most ``Limits.drain_s``, requests in progress continue; ``/readyz`` says ``stopping``, others send no
prompts here, and new requests of clients get 503. The replica stays a member of its fleet until its last request has
ended, so purges, removals of tenants and limits apply to the requests in progress. After the drain each stream ends
with an error event, and each request that still waits gets 503. A client has GRACE_S to read that; then its connection
is cut. A second signal ends the draining and the grace at once. SIGHUP reloads the configuration (``reloading``).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette

from radixkv.errors import ConfigError
from radixkv.service.app import create_app
from radixkv.service.build import build_service
from radixkv.service.connection import Connection, quieten
from radixkv.service.core import Service
from radixkv.service.endpoint import Host
from radixkv.service.limits import Limits
from radixkv.service.options import EVENT_OPTIONS, ServeSettings, Tls
from radixkv.service.reloading import Reloader

GRACE_S = 2.0
"""Time for clients to read the end of their answers."""
_HURRIED_GRACE_S = 0.2
_LAST_RESORT_S = 30
"""After this, uvicorn cancels remaining tasks. No request is among them: their connections were cut long before."""
_LOOK_EVERY_S = 0.05
ACCEPTS_A_TURN = 1
"""New connections that one turn of the event loop accepts.

asyncio would accept all that wait, and handle their requests first. A flood of connections would delay all others.
"""
WAITING_CONNECTIONS = 2048
"""Most connections that the kernel holds until they are accepted."""
TURN_S = 0.0005
"""A thread that computes lets another one run after this time.

Python's default is 5 ms. While another thread computes, a call pays this time after each wait for the disk or for
Redis. With ten waits, the default adds up to 50 ms.
"""
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class Listener(uvicorn.Server):
    """uvicorn's server around one host's application. It reports when it listens, and drains before it ends."""

    def __init__(
        self,
        app: Starlette,
        host: Host,
        on_ready: Callable[[], None] | None = None,
        tls: Tls | None = None,
        reloader: Reloader | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection.of(host.turns),
            ws="none",
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            backlog=ACCEPTS_A_TURN,
            timeout_graceful_shutdown=_LAST_RESORT_S,
        )
        super().__init__(config)
        quieten()
        self._host, self._on_ready, self._reloader = host, on_ready, reloader
        self._is_hurried = False
        self._reloading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, and report it."""
        await super().startup(sockets=sockets)
        for listener in sockets or ():
            listener.listen(WAITING_CONNECTIONS)  # again: asyncio uses one number for both
        if self.started and self._reloader is not None:
            self._reloading = asyncio.create_task(self._reloader.follow(self._host, self.config.ssl))
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, end requests in progress, close."""
        self._host.drain.is_stopping = True
        announcing = asyncio.create_task(self.announce())
        await self._until_idle(self._host.limits.drain_s)
        if self._reloading is not None:
            self._reloading.cancel()
        self._host.drain.end()
        ending = asyncio.create_task(self.end_work())
        cutting = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        await asyncio.gather(announcing, ending)
        cutting.cancel()

    async def announce(self) -> None:
        """Tell others that this process drains."""

    async def end_work(self) -> None:
        """End the work that streams wait for."""

    async def _until_idle(self, most_s: float) -> None:
        """Wait for requests in progress, for at most this long, and not after a second signal."""
        clock = asyncio.get_running_loop().time
        until = clock() + most_s
        while self.server_state.tasks and not self._is_hurried and clock() < until:
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _cut_off(self) -> None:
        """Cut connections to clients that don't read the end of their answers."""
        clock = asyncio.get_running_loop().time
        until = clock() + GRACE_S
        while self.server_state.connections and not self._is_hurried and clock() < until:
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.sleep(_HURRIED_GRACE_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; at the second signal, end at once."""
        self._is_hurried, self.should_exit = self.should_exit, True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM; a handled signal is not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Server(Listener):
    """The server of one service. Its fleet hears of the drain; ``Service.close`` leaves the fleet."""

    def __init__(
        self,
        service: Service,
        version: str,
        on_ready: Callable[[], None] | None = None,
        tls: Tls | None = None,
        reloader: Reloader | None = None,
    ) -> None:
        super().__init__(create_app(service, version=version), service, on_ready, tls, reloader)
        self._service = service

    async def announce(self) -> None:
        """Tell the fleet to send no more prompts here."""
        await anyio.to_thread.run_sync(self._service.fleet.coordinator.drain)

    async def end_work(self) -> None:
        """Cancel the model's work."""
        await anyio.to_thread.run_sync(self._service.engine_loop.close)


def run(
    settings: ServeSettings,
    version: str,
    on_ready: Callable[[Service, str], None],
    reloader: Reloader | None = None,
) -> None:
    """Serve until a signal comes. ``on_ready`` gets the service and its base URL.

    Raises ConfigError, and at the end TierError if a disk still has what a purge was to destroy.
    """
    with catching(reloader), bind(settings.host, settings.port) as listener:
        service = registered(settings, listener)
        service.intake.start()
        keep_latency_low()
        local = base_url(listener, settings.tls)
        server = Server(service, version, lambda: on_ready(service, local), settings.tls, reloader)
        server.run(sockets=[listener])
        if service.left_undone is not None:
            raise service.left_undone


def catching(reloader: Reloader | None) -> AbstractContextManager[None]:
    """Return the ``with`` in which SIGHUP reloads; without a reloader it ends the process, as by default."""
    return nullcontext() if reloader is None else reloader.catching()


def keep_latency_low() -> None:
    """Set up the interpreter for low latency. Call it once, after everything is loaded.

    Threads take turns every TURN_S. The garbage collector skips all objects that exist now. To scan the modules and
    the model would stop all threads for 0.2 s.
    """
    sys.setswitchinterval(TURN_S)
    gc.collect()
    gc.freeze()


def registered(settings: ServeSettings, listener: socket.socket, limits: Limits | None = None) -> Service:
    """Return a service that listens on a bound socket and has joined its fleet. Raises ConfigError."""
    local = base_url(listener, settings.tls)
    service = build_service(settings, address_of(settings, local), limits)
    try:
        listener.listen(128)
        _publish_events(service)
        service.fleet.coordinator.register()
    except BaseException:
        asyncio.run(service.close())
        raise
    return service


def _publish_events(service: Service) -> None:
    if service.events is None:
        return
    try:
        service.events.start(service.cache)
    except ConfigError as error:
        raise ConfigError(f"--{EVENT_OPTIONS[error.setting]}", error.value, error.allowed) from None


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to host and port (0: any free one), not listening yet.

    Raises ConfigError if it is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            allowed = f"a port of {host} that no other process uses, or 0 for any free one"
            raise ConfigError("--port", port, allowed) from None
        setting, value = ("--port", port) if error.errno == errno.EACCES else ("--host", host)
        raise ConfigError(setting, value, f"an address that can be bound: {error.strerror}") from None
    return listener


def base_url(listener: socket.socket, tls: Tls | None = None) -> str:
    """Return ``http://host:port`` of a bound socket, or ``https://…``."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def address_of(settings: ServeSettings, local: str) -> str:
    """Return the address at which other replicas reach this one.

    Raises ConfigError if the host doesn't determine it.
    """
    if settings.advertise is not None:
        return settings.advertise
    if settings.redis is not None and settings.host in _WILDCARDS:
        raise ConfigError(
            "--advertise",
            None,
            "a base URL at which other replicas reach this one, because --host has no single address",
        )
    return local
