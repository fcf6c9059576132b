"""SIGHUP: what changes, what needs a restart, and what a bad file does."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme

from radixkv.service.limits import Limits
from radixkv.service.precedence import Sources
from radixkv.service.reload_counts import ReloadCounts
from radixkv.service.reloading import Reloader, reloader
from tests.service.running import client, served
from tests.waiting import ended, eventually


class Host:
    """A host that only takes limits. ``taken`` has all that it took."""

    def __init__(self) -> None:
        self.reloads, self.taken = ReloadCounts(), list[Limits]()

    def set_limits(self, limits: Limits) -> None:
        self.taken.append(limits)


class Running:
    """A reloader that runs in a thread, of a file that tests change."""

    def __init__(self, path: Path, context: ssl.SSLContext | None = None, **flags: str) -> None:
        sources = Sources("serve", flags, {}, str(path))
        self.host, self.reloader = Host(), Reloader(sources, sources.resolve())
        self._context, self._stop = context, threading.Event()
        self._thread = threading.Thread(target=lambda: anyio.run(self._follow))
        self._thread.start()

    async def _follow(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self.reloader.follow, self.host, self._context)
            await anyio.to_thread.run_sync(self._stop.wait)
            group.cancel_scope.cancel()

    def reload(self) -> None:
        """Ask, and wait until one more reload is counted."""
        before = self.num_counted
        self.reloader.ask()
        eventually(lambda: self.num_counted > before)

    @property
    def num_counted(self) -> int:
        return self.host.reloads.num_done + self.host.reloads.num_refused

    def close(self) -> None:
        self._stop.set()
        ended(self._thread)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "radixkv.yaml"
    path.write_text("burst: 5\nlog-level: warning\n")
    return path


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "radixkv.service")
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_a_changed_file_changes_what_can_change(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    running = Running(path, **{"max-queued": "9"})
    try:
        path.write_text("burst: 6\nmax-queued: 1\nnum-blocks: 8192\nlog-level: info\n")
        running.reload()
        assert (running.host.taken[-1].burst, running.host.taken[-1].max_queued) == (6, 9), "a flag wins"
        assert logging.getLogger().level == logging.INFO
        assert [each.getMessage() for each in caplog.records] == [
            "the configuration is reloaded; changed: burst, log-level",
            "a restart is needed for the new values of: num-blocks",
        ]
        caplog.clear()
        running.reload()
        assert [each.getMessage() for each in caplog.records] == [
            "the configuration is reloaded; changed: nothing",
            "a restart is needed for the new values of: num-blocks",
        ], "it says so until the restart"
        path.write_text("log-level: warning\n")
        running.reload()
        assert running.host.taken[-1].burst == 2000, "a removed value is the default's"
    finally:
        running.close()


@pytest.mark.parametrize(
    "bad", ["burst: 0", "bursts: 7", "burst: [", "burst: 7\nburst: 8", "burst: 7\nmodel: nowhere"]
)
def test_a_bad_file_changes_nothing(path: Path, bad: str, caplog: pytest.LogCaptureFixture) -> None:
    running = Running(path)
    try:
        level = logging.getLogger().level
        path.write_text(f"log-level: debug\n{bad}\n")
        running.reload()
        path.unlink()
        running.reload()
        assert not running.host.taken and logging.getLogger().level == level
        assert (running.host.reloads.num_done, running.host.reloads.num_refused) == (0, 2)
        assert all(each.levelno == logging.ERROR for each in caplog.records) and len(caplog.records) == 2
        assert str(path) in caplog.text and "nothing has changed" in caplog.text
    finally:
        running.close()


def test_a_thousand_requests_at_once_end_with_the_last_file(path: Path) -> None:
    running = Running(path)
    try:
        for number in range(1, 1001):
            if number % 100 == 0:
                path.write_text(f"burst: {number}\n")
            running.reloader.ask()
        eventually(lambda: running.host.taken and running.host.taken[-1].burst == 1000)
        assert running.host.reloads.num_refused + running.host.reloads.num_done < 1000, (
            "they are taken together"
        )
    finally:
        running.close()


def test_a_renewed_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    authority = trustme.CA()
    cert, key, path = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "radixkv.yaml"

    def renew() -> bytes:
        issued = authority.issue_cert("127.0.0.1")
        cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        key.chmod(0o600)
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    first = renew()
    path.write_text(f"tls-cert: {cert}\ntls-key: {key}\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    running = Running(path, context)
    try:
        assert presented(context, authority) == first
        second = renew()
        running.reload()
        assert presented(context, authority) == second
        cert.write_text("half a cert")
        running.reload()
        assert running.host.reloads.num_refused == 1 and presented(context, authority) == second
    finally:
        running.close()


def presented(context: ssl.SSLContext, authority: trustme.CA) -> bytes | None:
    """Return the certificate that a client of this context sees."""
    client_side, server_side = socket.socketpair()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    def serve() -> None:
        with context.wrap_socket(server_side, server_side=True):
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    with client_side, trusting.wrap_socket(client_side, server_hostname="127.0.0.1") as connection:
        found = connection.getpeercert(binary_form=True)
    ended(thread)
    return found


def test_a_signal_during_the_handling_of_another_does_not_hang() -> None:
    """At any call that the handler makes, the next signal comes."""
    sources = Sources("serve", {}, {}, None)
    asked, sent = Reloader(sources, sources.resolve()), 0

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        nonlocal sent
        if sent < 50 and event == "call" and frame.f_code.co_name != "interrupt":
            sent += 1
            signal.raise_signal(signal.SIGHUP)

    with asked.catching():
        sys.settrace(interrupt)
        try:
            asked.ask()
        finally:
            sys.settrace(None)
    assert sent >= 1


def test_without_a_file_a_signal_is_not_caught() -> None:
    sources = Sources("serve", {}, {}, None)
    assert reloader(sources, sources.resolve()) is None


@pytest.mark.slow
def test_a_process_reloads_at_sighup_and_goes_on_after_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "radixkv.yaml"
    path.write_text("num-blocks: 1024\nmax-body-bytes: 100000\n")
    with (
        served(tmp_path / "log", "--config", str(path)) as process,
        client(process.url, "demo-acme") as acme,
        client(process.url, "demo-operator") as operator,
    ):
        assert f"  config   {path}" in process.output
        body = {"prompt": "a" * 2000}
        assert acme.post("/v1/lookup", json=body).status_code == 200

        def replace(text: str) -> None:
            """Write the file in one step, as an operator should."""
            (tmp_path / "new.yaml").write_text(text)
            (tmp_path / "new.yaml").replace(path)

        def reloads(name: str) -> float:
            lines = operator.get("/metrics").text.splitlines()
            return float(next(line.split()[1] for line in lines if line.startswith(f"radixkv_{name} ")))

        replace("num-blocks: 1024\nmax-body-bytes: 1000\n")
        process.process.send_signal(signal.SIGHUP)
        eventually(lambda: reloads("config_reloads") == 1)
        assert acme.post("/v1/lookup", json=body).status_code == 413
        replace("max-body-bytes: lots\n")
        process.process.send_signal(signal.SIGHUP)
        eventually(lambda: reloads("config_reloads_refused") == 1)
        assert acme.post("/v1/lookup", json=body).status_code == 413, "the limits before still hold"
        assert acme.post("/v1/lookup", json={"prompt": "a"}).status_code == 200
        replace("num-blocks: 1024\nmax-body-bytes: 100000\n")
        for _ in range(2):  # they may be one reload
            process.process.send_signal(signal.SIGHUP)
        eventually(lambda: acme.post("/v1/lookup", json=body).status_code == 200)
        assert reloads("config_reloads") in (2, 3) and reloads("config_reloads_refused") == 1
        assert process.stop() == 0
    assert "max-body-bytes='lots' is not allowed" in process.output
