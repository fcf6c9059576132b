"""A fleet under faults: four replicas in processes of their own, two routers, and the Redis between them.

Over a single Redis, each replica and the routers have a proxy of their own, so that one can be cut off alone. Clients
of a Cluster and of Sentinel get addresses from the servers. There the servers fail instead of the connections.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLong
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from fuzz.fleet import worker
from fuzz.fleet.plan import NAMES, Step
from fuzz.fleet.servers import Servers
from radixkv.coordination import Router
from tests.redis_server import RedisServer
from tests.tcp_proxy import TcpProxy

_SPAWN = multiprocessing.get_context("spawn")
_NUM_ROUTERS = 2


class Replica:
    """One process that claims an id. Commands are answered in any order. A process that has ended answers nothing."""

    def __init__(self, name: str, url: str, path: Path, seed: int) -> None:
        self.name = name
        self.pipe, theirs = _SPAWN.Pipe()
        arguments = (theirs, url, name, str(path), seed)
        self.process = _SPAWN.Process(target=worker.main, args=arguments, daemon=True)
        self.process.start()
        self.spawned_at = time.monotonic()
        theirs.close()
        self.is_paused = False
        self.was_killed = False
        self._number = 0
        self._sending = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def ask(self, command: str, *arguments: Any) -> Future[Any]:
        """Send a command. Return its answer as a future, which is None if the process has ended."""
        answer: Future[Any] = Future()
        with self._sending:
            self._number += 1
            self._asked[self._number] = answer
            try:
                self.pipe.send((self._number, command, arguments))
            except (OSError, ValueError):
                self._forget()
        return answer

    def signal(self, number: int) -> None:
        """Send SIGSTOP, SIGCONT or SIGKILL."""
        pid = self.process.pid
        if pid is not None and self.process.is_alive():
            os.kill(pid, number)
        self.is_paused = number == signal.SIGSTOP

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self.was_killed = True
        self.signal(signal.SIGKILL)
        self.process.join()
        self.pipe.close()
        self._thread.join()

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, value = self.pipe.recv()
                answer = self._asked.pop(number, None)
                if answer is not None:
                    answer.set_result(value)
        self._forget()

    def _forget(self) -> None:
        for number in list(self._asked):
            answer = self._asked.pop(number, None)
            if answer is not None and not answer.done():
                answer.set_result(None)


def answered(answer: Future[Any], timeout_s: float) -> Any:
    """Return the answer, or None if it doesn't come in time."""
    try:
        return answer.result(timeout_s)
    except TooLong:
        return None


class World:
    """The fleet. See the module's docstring. ``claimants`` has the processes of each id, oldest first."""

    def __init__(self, store: str, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.servers = Servers(store, folder)
        self.proxies: dict[str, TcpProxy] = {}
        self.claimants: dict[str, list[Replica]] = {name: [] for name in NAMES}
        self.dead_since: dict[str, float] = {}
        self._active: list[Step] = []
        self._disturbed: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        self.routers: list[Router] = []
        self._num_histories = 0
        for name in (*NAMES, "router"):
            if isinstance(self.servers.group, RedisServer):
                self.proxies[name] = TcpProxy(self.servers.group.host, self.servers.group.port)
        for name in NAMES:
            self.spawn(name)
        for _ in range(_NUM_ROUTERS):
            self.routers.append(Router.connect(self.url("router"), fleet_secret=worker.SECRET))

    def url(self, name: str) -> str:
        """Return the URL of Redis for a replica or the routers."""
        proxy = self.proxies.get(name)
        return self.servers.url if proxy is None else f"redis://127.0.0.1:{proxy.port}/0"

    def spawn(self, name: str) -> Replica:
        """Start one more process that claims an id."""
        self._num_histories += 1
        path = self.folder / f"{name}.{self._num_histories}.history"
        replica = Replica(name, self.url(name), path, self.seed)
        self.claimants[name].append(replica)
        self.dead_since.pop(name, None)
        return replica

    def living(self) -> list[Replica]:
        """Return the last claimant of each id, if its process runs and isn't paused."""
        found = [claimants[-1] for claimants in self.claimants.values() if claimants]
        return [each for each in found if not each.was_killed and not each.is_paused]

    def disturbed_until(self, name: str) -> float:
        """Return until when the last beat of a dead replica may have been in flight, or Redis may not have counted its
        lease.
        """
        return float("inf") if any(_delays(step, name) for step in self._active) else self._disturbed[name]

    def begin(self, step: Step) -> None:
        """Begin a step."""
        self._active.append(step)
        claimants, proxy = (
            self.claimants[step.target] if step.target in NAMES else [],
            self.proxies.get(step.target),
        )
        if step.what == "kill":
            for each in claimants:
                each.kill()
            claimants.clear()
            self.dead_since.setdefault(step.target, time.monotonic())
        elif step.what == "claim":
            self.spawn(step.target)
        elif step.what == "pause":
            for each in claimants:
                each.signal(signal.SIGSTOP)
        elif step.what == "turn":
            for each in claimants[-1:]:
                each.ask("turn", 3600.0 if step.chance % 2 else -3600.0)
        elif proxy is not None:
            self._disturb(proxy, step)
        else:
            self.servers.act(step.what, step.chance)

    def end(self, step: Step) -> None:
        """End the fault of a step."""
        proxy = self.proxies.get(step.target)
        if step.what == "kill" and not self.claimants[step.target]:
            self.spawn(step.target)
        elif step.what == "pause":
            for each in self.claimants[step.target]:
                each.signal(signal.SIGCONT)
        elif proxy is not None and step.what in ("partition", "reset", "delay"):
            proxy.hold = proxy.refuse = proxy.reset = False
            proxy.delay_s = 0.0
        elif step.what in (
            "restart empty",
            "restart with data",
            "restart as saved",
            "restart node",
            "pause server",
        ):
            self.servers.heal()
        self._active.remove(step)
        self._disturbed |= {name: time.monotonic() for name in NAMES if _delays(step, name)}

    def heal(self) -> None:
        """End all faults: everything runs and is connected."""
        self.servers.heal()
        for proxy in self.proxies.values():
            proxy.hold = proxy.refuse = proxy.reset = False
            proxy.delay_s = 0.0
            proxy.cut(None)
        for name, claimants in self.claimants.items():
            for each in claimants:
                each.signal(signal.SIGCONT)
            if not claimants:
                self.spawn(name)

    def close(self) -> None:
        """End all processes, routers and proxies."""
        for claimants in self.claimants.values():
            for each in claimants:
                each.kill()
        for router in self.routers:
            router.close()
        self.servers.close()
        for proxy in self.proxies.values():
            proxy.close()

    def _disturb(self, proxy: TcpProxy, step: Step) -> None:
        if step.what == "partition":
            proxy.hold = True
        elif step.what == "delay":
            proxy.delay_s = 0.001 + step.chance % 100 / 1000
        elif step.what == "reset":
            proxy.reset = proxy.refuse = True
        else:
            proxy.cut("after" if step.chance % 2 else "before")


def _delays(step: Step, name: str) -> bool:
    """Return whether the messages of that replica can arrive late, or its lease can be counted wrongly."""
    of_all = step.what in ("pause server", "skew") or step.what.startswith(("restart", "fail over"))
    return of_all or (step.what in ("partition", "delay") and step.target == name)
