"""A private service in a thread of this process, over a real socket: for benchmarks and notebooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from radixkv import __version__
from radixkv.service.core import Service
from radixkv.service.limits import Limits
from radixkv.service.options import ServeSettings
from radixkv.service.server import Server, base_url, bind, registered


@contextmanager
def demo_service(**settings: str | None) -> Iterator[str]:
    """Run a service with embedded defaults on a free port during the ``with``; yield its base URL."""
    with running(ServeSettings.parse({"port": "0", **settings})) as (_, url):
        yield url


@contextmanager
def running(settings: ServeSettings, limits: Limits | None = None) -> Iterator[tuple[Service, str]]:
    """Run a registered service during the ``with``; yield it and its base URL. Raises as ``server.run``."""
    with bind(settings.host, settings.port) as listener:
        service = registered(settings, listener, limits)
        ready = threading.Event()
        server = Server(service, __version__, ready.set, settings.tls)
        thread = threading.Thread(target=server.run, args=([listener],), name="radixkv-service", daemon=True)
        thread.start()
        ready.wait()
        try:
            yield service, base_url(listener, settings.tls)
        finally:
            server.should_exit = True
            thread.join()
        if service.left_undone is not None:
            raise service.left_undone
