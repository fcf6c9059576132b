"""The server takes new connections one by one, and its process is set up for short waits."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import struct
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from starlette.applications import Starlette

from radixkv.service import server
from radixkv.service.core import Service
from radixkv.service.draining import Drain
from radixkv.service.endpoint import Host
from radixkv.service.intake import Intake
from radixkv.service.options import ServeSettings
from radixkv.service.reloading import Reloader, ReloadingHost
from radixkv.service.server import ACCEPTS_A_TURN, WAITING_CONNECTIONS, Listener
from radixkv.service.turns import Turns
from tests.waiting import LIMIT_S, eventually_async, finished

_NUM_CONNECTIONS = 40
_MAX_WAITING_AT = 28
"""Offset in Linux's ``tcp_info`` of the number of connections that may wait at a listening socket."""


class _Host:
    """A host without work in progress."""

    def __init__(self) -> None:
        self.drain, self.limits, self.drain_s, self.turns = Drain(), self, 0.0, Turns()


def test_each_turn_of_the_loop_accepts_one_connection_of_a_flood() -> None:
    """Waiting connections cost the other clients one request a turn, however many wait."""

    async def accepted_by_turn(listening: socket.socket) -> list[int]:
        server = Listener(Starlette(), cast(Host, _Host()))
        serving = asyncio.create_task(server.serve([listening]))
        await eventually_async(lambda: server.started)
        with ExitStack() as stack:
            for _ in range(_NUM_CONNECTIONS):  # the loop is blocked meanwhile
                stack.enter_context(socket.create_connection(listening.getsockname()))
            found = [0]
            while found[-1] < _NUM_CONNECTIONS:
                await asyncio.sleep(0)
                found.append(len(server.server_state.connections))
        server.should_exit = True
        await serving
        return found

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        found = asyncio.run(finished(accepted_by_turn(listening)))
    assert max(b - a for a, b in pairwise(found)) == ACCEPTS_A_TURN


def test_many_connections_may_wait() -> None:
    async def most_waiting(listening: socket.socket) -> int:
        server = Listener(Starlette(), cast(Host, _Host()))
        serving = asyncio.create_task(server.serve([listening]))
        await eventually_async(lambda: server.started)
        info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        server.should_exit = True
        await serving
        return int(struct.unpack_from("I", info, _MAX_WAITING_AT)[0])

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        found = asyncio.run(finished(most_waiting(listening)))
    assert found == min(WAITING_CONNECTIONS, int(Path("/proc/sys/net/core/somaxconn").read_text()))


class _Follower(Reloader):
    """Follows nothing, until it is cancelled."""

    def __init__(self) -> None:
        self.is_over = False

    async def follow(self, host: ReloadingHost, context: ssl.SSLContext | None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_over = True


def test_the_configuration_can_change_until_the_drain_is_over() -> None:
    async def drained(listening: socket.socket) -> list[bool]:
        host, follower, answered = _Host(), _Follower(), asyncio.Event()
        host.drain_s = LIMIT_S
        server = Listener(Starlette(), cast(Host, host), reloader=follower)
        serving = asyncio.create_task(server.serve([listening]))
        await eventually_async(lambda: server.started)
        request = asyncio.create_task(answered.wait())
        server.server_state.tasks.add(request)
        request.add_done_callback(server.server_state.tasks.discard)
        server.should_exit = True
        await eventually_async(lambda: host.drain.is_stopping)
        for _ in range(3):
            await asyncio.sleep(0)
        found = [follower.is_over]
        answered.set()
        await serving
        return [*found, follower.is_over]

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        assert asyncio.run(finished(drained(listening))) == [False, True]


@pytest.mark.slow
def test_the_garbage_collector_skips_loaded_objects() -> None:
    """A collection over all modules and the model would stop every request for 0.2 s."""
    code = """
import gc, sys
from radixkv.service.turns import Turns
from radixkv.service.server import TURN_S, keep_latency_low
keep_latency_low()
print(gc.get_freeze_count() > 10_000, abs(sys.getswitchinterval() - TURN_S) < 1e-6)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_the_server_sets_the_interpreter_up_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that it loads is loaded by then."""
    seen = list[str]()

    def on_ready(service: Service, url: str) -> None:
        seen.append("ready")
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Intake, "start", lambda intake: seen.append("readers"))
    monkeypatch.setattr(server, "keep_latency_low", lambda: seen.append("low"))
    server.run(ServeSettings.parse({"port": "0", "num-blocks": "64"}), "0", on_ready)
    assert seen == ["readers", "low", "ready"]
