"""``radixkv serve``: one process from start to end.

    bind ─▶ load ─▶ listen ─▶ register ─▶ serve ─▶ signal ─▶ leave the fleet ─▶ let requests end ─▶ close

The port is taken before the model is loaded, so that a busy port is known at once, and it listens before the
replica registers, so that nobody is told an address where nothing answers. SIGINT and SIGTERM end the process
with exit code 0: requests have GRACE_S to finish, then they are cancelled, and everything is released.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio.to_thread
import uvicorn

from radixkv.errors import ConfigError
from radixkv.service.app import create_app
from radixkv.service.build import build_service
from radixkv.service.core import Limits, Service
from radixkv.service.settings import ServeSettings

GRACE_S = 5
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class Server(uvicorn.Server):
    """uvicorn's server around one service. Says when it listens; leaves the fleet before it stops."""

    def __init__(self, service: Service, version: str, on_ready: Callable[[], None] | None = None) -> None:
        config = uvicorn.Config(
            create_app(service, version=version),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self._service, self._on_ready = service, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, and say so."""
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leave the fleet, then let requests end."""
        self._service.is_stopping = True
        await anyio.to_thread.run_sync(self._service.fleet.coordinator.leave)
        await super().shutdown(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM; a signal that was obeyed is not raised again."""
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


def run(settings: ServeSettings, version: str, on_ready: Callable[[Service, str], None]) -> None:
    """Serve until a signal comes. ``on_ready`` gets the service and its base URL. Raises ConfigError."""
    with bind(settings.host, settings.port) as listener:
        service = registered(settings, listener)
        local = base_url(listener)
        Server(service, version, lambda: on_ready(service, local)).run(sockets=[listener])


def registered(settings: ServeSettings, listener: socket.socket, limits: Limits | None = None) -> Service:
    """A service that listens on a bound socket and has joined its fleet. Raises ConfigError."""
    service = build_service(settings, address_of(settings, base_url(listener)), limits)
    try:
        listener.listen(128)
        service.fleet.coordinator.register()
    except BaseException:
        asyncio.run(service.close())
        raise
    return service


def bind(host: str, port: int) -> socket.socket:
    """A socket at host and port (0: any free one), not listening yet. Raises ConfigError if it is taken."""
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


def base_url(listener: socket.socket) -> str:
    """``http://host:port`` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def address_of(settings: ServeSettings, local: str) -> str:
    """Where other replicas reach this one. Raises ConfigError if that can't be told from the host."""
    if settings.advertise is not None:
        return settings.advertise
    if settings.redis is not None and settings.host in _WILDCARDS:
        raise ConfigError(
            "--advertise", None, "a base URL at which the fleet reaches this replica, as --host names none"
        )
    return local
