"""SIGHUP: the configuration file is read again, and what can change while the process runs is changed.

    SIGHUP ──▶ read and check everything, in a thread ──▶ event loop: limits, log level, certificate, at once
                   │ an error: it is logged, and nothing changes

Signals that come during a reload cause one more, so the last state of the file always counts. A setting that needs a
restart keeps its value; the log names it at each reload until then. Certificate and key are read again even if their
paths stay: new connections get the new certificate.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio.to_thread

from radixkv.errors import RadixKVError
from radixkv.service.limits import Limits
from radixkv.service.options import RouteSettings, ServeSettings, tls_context
from radixkv.service.precedence import Sources, Value
from radixkv.service.reload_counts import ReloadCounts

log = logging.getLogger("radixkv.service")


class ReloadingHost(Protocol):
    """What a reload changes."""

    @property
    def reloads(self) -> ReloadCounts:
        """The counts."""

    def set_limits(self, limits: Limits) -> None:
        """Replace the bounds on requests."""


@dataclass(frozen=True, slots=True)
class _Read:
    values: Mapping[str, Value]
    settings: ServeSettings | RouteSettings
    tls: ssl.SSLContext | None


class Reloader:
    """Reloads the settings of one process. ``values`` are those in force."""

    def __init__(self, sources: Sources, values: Mapping[str, Value]) -> None:
        self._sources, self._values = sources, dict(values)
        self._asked = False  # without a lock: a signal may interrupt the handler of the one before
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Take SIGHUP while the ``with`` lasts; only in the main thread. Before ``follow`` runs, it is remembered."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGHUP, lambda number, frame: self.ask())
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)

    def ask(self) -> None:
        """Ask for a reload, from a signal handler or any thread."""
        self._asked = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def follow(self, host: ReloadingHost, context: ssl.SSLContext | None) -> None:
        """Reload whenever it was asked for, until cancelled. ``context``: the one that connections begin with."""
        self._loop = asyncio.get_running_loop()
        while True:
            while self._asked:
                self._asked = False
                await self._reload(host, context)
            await self._wake.wait()
            self._wake.clear()

    async def _reload(self, host: ReloadingHost, context: ssl.SSLContext | None) -> None:
        try:
            found = await anyio.to_thread.run_sync(self._read)
        except (RadixKVError, OSError) as error:
            log.error("the configuration is not reloaded, and nothing has changed: %s", error)
            host.reloads.num_refused += 1
            return
        host.set_limits(found.settings.limits)
        logging.getLogger().setLevel(found.settings.log_level.upper())
        if context is not None and found.tls is not None:
            _present(context, found.tls)
        self._report(found.values, is_tls=context is not None)
        host.reloads.num_done += 1

    def _read(self) -> _Read:
        """Read and check all sources. Raises ConfigError, OSError."""
        found = self._sources.read()
        settings = found.parsed()
        return _Read(found.values, settings, None if settings.tls is None else tls_context(settings.tls))

    def _report(self, values: Mapping[str, Value], *, is_tls: bool) -> None:
        """Log what has changed, and take the new values of what can change."""
        changed, waiting = [], []
        for name, value in values.items():
            if value.text == self._values[name].text:
                continue
            can_change = value.setting.reloads and (is_tls or not name.startswith("tls-"))
            if not can_change or (name.startswith("tls-") and value.text is None):
                waiting.append(name)
            else:
                changed.append(name)
                self._values[name] = value
        log.info("the configuration is reloaded; changed: %s", ", ".join(changed) or "nothing")
        if waiting:
            log.warning("a restart is needed for the new values of: %s", ", ".join(waiting))


def reloader(sources: Sources, values: Mapping[str, Value]) -> Reloader | None:
    """Return the reloader of a process that has a file to read again: of settings, or of a certificate."""
    has_file = sources.path is not None or values["tls-cert"].text is not None
    return Reloader(sources, values) if has_file else None


def _present(context: ssl.SSLContext, new: ssl.SSLContext) -> None:
    """Let new connections have the certificate of ``new``."""

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = new

    context.sni_callback = choose
