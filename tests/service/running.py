"""Services to test against: in a thread of this process, or in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from radixkv.service.core import Limits, Service
from radixkv.service.engine_loop import Work
from radixkv.service.local import running
from radixkv.service.options import ServeSettings
from tests.forked import Forked
from tests.redis_server import RedisServer
from tests.tiers.support import PATIENT_S
from tests.waiting import LIMIT_S, eventually

KEYS = {"acme": "demo-acme", "globex": "demo-globex", "operator": "demo-operator"}
LEASE_S = "600"
"""The lease of services, in seconds: none ends before a test does. A test can let one end by ``lease_over``."""
_PATIENT = {"lease-s": LEASE_S, "body-timeout-s": str(PATIENT_S)}
ALWAYS = {"port": "0", "threads": "1", "num-blocks": "1024", **_PATIENT}
"""Settings of services in threads, unless a test chooses others."""
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""httpx would load all certificate authorities for each client, in 20 ms of CPU."""
_KEEPALIVE_S = 2.0
"""Shorter than the server's own keep-alive: the client must not reuse a connection that the server is closing."""


class Running:
    """A service under test.

    ``acme``, ``globex`` and ``operator`` are clients with their keys. ``nobody`` has no key.
    """

    def __init__(self, service: Service, url: str) -> None:
        self.service, self.url = service, url
        self.acme, self.globex, self.operator = (
            client(url, KEYS[who]) for who in ("acme", "globex", "operator")
        )
        self.nobody = client(url, None)

    def close(self) -> None:
        for each in (self.acme, self.globex, self.operator, self.nobody):
            each.close()


def client(url: str, key: str | None) -> httpx.Client:
    """A client with a key, or without one if ``key`` is None."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(keepalive_expiry=_KEEPALIVE_S)
    return httpx.Client(
        base_url=url, headers=headers, timeout=LIMIT_S, limits=limits, trust_env=False, verify=_NO_TLS
    )


def requested(method: str, url: str, **fields: Any) -> httpx.Response:
    """The answer to one request on a connection of its own."""
    with client("", None) as someone:
        return someone.request(method, url, **fields)


def answered(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Repeat a request while the answer is 429 or 503 with ``Retry-After``, and return the first other answer."""

    def final() -> httpx.Response | None:
        answer = ask()
        return None if answer.status_code in (429, 503) and "Retry-After" in answer.headers else answer

    found: httpx.Response = eventually(final, "an answer that isn't to try again")
    return found


def sent(live: Running, who: str, path: str, body: dict[str, Any], all_but: int = 0) -> socket.socket:
    """A connection on which a request was sent. Closing it is how the test hangs up.

    ``who``: a name of KEYS, or a key. ``all_but``: how many of the body's last bytes are not sent.
    """
    place, content = urlsplit(live.url), json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {KEYS.get(who, who)}",
        "content-type: application/json", f"content-length: {len(content)}", "", "",
    )  # fmt: skip
    connection = socket.create_connection((place.hostname, place.port), timeout=LIMIT_S)
    connection.sendall("\r\n".join(head).encode() + content[: len(content) - all_but])
    return connection


@contextmanager
def service_in_thread(limits: Limits | None = None, **settings: str) -> Iterator[Running]:
    """A service with the demo model in a thread of this process, so that tests can inspect its objects."""
    parsed = ServeSettings.parse({**ALWAYS, **settings})
    with running(parsed, limits) as (service, url):
        found = Running(service, url)
        try:
            yield found
        finally:
            found.close()


def lease_over(redis: RedisServer, name: str) -> None:
    """Let a replica's lease end in the store, as if it hadn't beaten for as long."""
    redis.command(f"DEL rk1:{{r:{name}}}:lease")


@contextmanager
def model_held(service: Service, tenant: str = "acme") -> Iterator[None]:
    """Keep the model's thread busy while the ``with`` block runs."""
    release = threading.Event()

    def hold(work: Work[None]) -> None:
        while not release.wait(0.01):
            work.check()

    work = service.engine_loop.call(tenant, hold)
    eventually(lambda: work.future.running())
    try:
        yield
    finally:
        release.set()


class Process:
    """``radixkv serve`` in a process of its own. ``url`` is set once the service has printed its banner.

    ``forked``: fork the process from one that has done all imports. This is for tests that start many processes and do
    not test the start itself.
    """

    def __init__(
        self,
        options: Sequence[str],
        log: Path,
        environment: dict[str, str] | None = None,
        *,
        forked: bool = True,
    ) -> None:
        self.log = log
        self.url = ""
        patient = [part for name, value in _PATIENT.items() for part in (f"--{name}", value)]
        options = ["--threads", "1", *patient, *options]
        self.process: subprocess.Popen[bytes] | Forked
        if forked:
            log.touch()
            variables = {**os.environ, **(environment or {})}
            self.process = Forked(["radixkv", "serve", *options], log, environment=variables)
            return
        command = [sys.executable, "-m", "radixkv", "serve", *options]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )

    def wait_ready(self) -> str:
        """Wait for the banner and return the base URL that it names."""

        def banner() -> str | None:
            assert self.process.poll() is None, self.output
            return self.output if "Ctrl-C" in self.output else None

        found = eventually(banner, "the banner")
        self.url = found.split(" at ", 1)[1].split("\n", 1)[0]
        return self.url

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(LIMIT_S)


@contextmanager
def served(
    log: Path, *options: str, environment: dict[str, str] | None = None, forked: bool = True
) -> Iterator[Process]:
    """A process that is ready to serve while the ``with`` block runs."""
    process = Process(["--port", "0", *options], log, environment, forked=forked)
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()
