"""``radixkv serve`` as a process: its banner, its curl lines and its shutdown."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from radixkv.engines import Generation
from radixkv.engines.steps import Steps
from radixkv.service.server import bind
from tests.service.running import Process, Running, client, model_held, served, service_in_thread
from tests.waiting import LIMIT_S, ended, eventually

# Each process imports torch.
pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with served(tmp_path_factory.mktemp("serve") / "log", forked=False) as process:
        yield process


def test_the_banner_names_random_weights_and_the_demo_keys(demo: Process) -> None:
    banner = demo.output
    assert "random weights" in banner and demo.url.startswith("http://127.0.0.1:")
    assert all(key in banner for key in ("demo-acme", "demo-globex", "demo-operator"))


def test_the_readme_shows_the_banner(demo: Process) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    printed = demo.output.replace(demo.url, "http://127.0.0.1:8400").split("\nCtrl-C")[0].splitlines()
    drawn_anew = [line for line in printed if line.startswith("  replica ")]
    missing = [line for line in printed if line not in readme.splitlines()]
    assert missing == drawn_anew and len(drawn_anew) == 1


def test_the_curl_lines_work_as_they_are_printed(demo: Process, tmp_path: Path) -> None:
    lines = [line for line in demo.output.splitlines() if line.startswith("curl ")]
    assert len(lines) == 3

    def paste(line: str) -> list[dict[str, object]]:
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path
        )
        assert done.returncode == 0 and not done.stderr, done
        return [json.loads(each) for each in done.stdout.splitlines()]

    (warmed,), (found,), (cold, warm) = (paste(line) for line in lines)
    tokens = warmed["tokens"]
    assert isinstance(tokens, int) and 1400 <= tokens <= 1600
    assert found == {"matched_tokens": tokens, "matched_blocks": warmed["blocks"]}
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (cold, warm)]  # type: ignore[index]
    assert cached == [0, tokens]
    assert all("time_to_first_token_s" in each["timings"] for each in (cold, warm))  # type: ignore[operator]
    assert cold["choices"] == warm["choices"]


def test_it_listens_on_loopback_only(demo: Process) -> None:
    port = f"{int(demo.url.rsplit(':', 1)[1]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port}")]
    assert listening == [f"0100007F:{port}"]


ENDLESS = {"prompt": "Go on", "max_tokens": 8000, "ignore_eos": True}


class RunningCompletion(threading.Thread):
    """A thread that requests a completion. ``lines`` has the lines of the answer so far."""

    def __init__(self, url: str, key: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._key, self._body = url, key, {**ENDLESS, **fields}
        self.status, self.lines = 0, list[str]()
        self.start()

    def run(self) -> None:
        with (
            client(self._url, self._key) as tenant,
            tenant.stream("POST", "/v1/completions", json=self._body) as answer,
        ):
            self.status = answer.status_code
            self.lines.extend(line for line in answer.iter_lines() if line)

    def error(self) -> str:
        """Return the code of the error that the answer ended with."""
        ended(self)
        return str(json.loads(self.lines[-1].removeprefix("data: "))["error"]["code"])


def is_stopping(url: str) -> bool:
    """Whether a service has begun to end, or has ended."""
    with client(url, None) as anonymous:
        try:
            return anonymous.get("/readyz").status_code == 503
        except httpx.TransportError:
            return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_with_code_0(tmp_path: Path, number: signal.Signals) -> None:
    with served(tmp_path / "log", environment={"RADIXKV_DRAIN_S": "3600"}) as process:
        banner = process.output
        stream = RunningCompletion(process.url, "demo-acme", stream=True)
        eventually(lambda: stream.lines)
        process.process.send_signal(number)
        eventually(lambda: is_stopping(process.url), "it has noticed the first one")
        process.process.send_signal(number)
        assert process.process.wait() == 0
        ended(stream)
    assert process.output == banner, "there is neither a traceback nor an error"


@contextmanager
def ending(live: Running, stack: ExitStack) -> Iterator[None]:
    """Let a service end, which ``stack`` has entered, while the ``with`` block runs."""
    closing = threading.Thread(target=stack.close)
    closing.start()
    try:
        eventually(lambda: live.service.drain.is_stopping)
        yield
    finally:
        ended(closing)


def test_a_service_that_drains_goes_on_with_its_requests_and_takes_no_more() -> None:
    with ExitStack() as stack:
        live = stack.enter_context(service_in_thread(**{"drain-s": "3600"}))
        with client(live.url, "demo-globex") as globex, ExitStack() as held:
            held.enter_context(model_held(live.service, "globex"))
            asked = [
                RunningCompletion(live.url, "demo-acme", stream=each, max_tokens=5) for each in (False, True)
            ]
            eventually(lambda: live.service.engine_loop.num_unfinished == 3)
            with ending(live, stack):
                ready, refused = globex.get("/readyz"), globex.post("/v1/lookup", json={"token_ids": [1]})
                held.close()
    assert ready.status_code == 503 and "stopping" in ready.json()["reasons"]
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "shutting_down")
    for each in asked:
        ended(each)
    assert [each.status for each in asked] == [200, 200] and asked[1].lines[-1] == "data: [DONE]"


def test_requests_that_go_on_after_the_drain_time_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with service_in_thread(**{"drain-s": "0.1"}) as live:

        def endless(
            ns: object, prompts: object, most: int, admission: object, *, on_step: Any, stop: Any, **_: object
        ) -> Steps[Generation]:
            row: list[int] = []
            while not stop():
                row.append(9)
                on_step([[9]])
                yield None
            return Generation([row], [2], [0], ["stop"], 0.0, 0.0)

        monkeypatch.setattr(live.service.engine, "generating", endless)
        stream = RunningCompletion(live.url, "demo-acme", stream=True)
        eventually(lambda: stream.lines)
    assert stream.error() == "shutting_down" and stream.status == 200


def test_requests_that_still_wait_after_the_drain_time_are_refused() -> None:
    with ExitStack() as held, service_in_thread(**{"drain-s": "0.1"}) as live:
        held.enter_context(model_held(live.service, "globex"))  # until the service has ended
        asked = [RunningCompletion(live.url, "demo-acme", stream=each) for each in (False, True)]
        eventually(lambda: live.service.engine_loop.num_unfinished == 3)
    assert [(each.error(), each.status) for each in asked] == [("shutting_down", 503)] * 2


def test_an_unread_stream_does_not_delay_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRACE_S", "_HURRIED_GRACE_S"):
        monkeypatch.setattr(f"radixkv.service.server.{name}", 0.1)
    with service_in_thread(**{"num-blocks": "1024", "drain-s": "0"}) as live:
        place = urlsplit(live.url)
        content = json.dumps({**ENDLESS, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer demo-acme\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        unread = socket.create_connection((place.hostname, place.port))
        unread.sendall(head.encode() + content)
        eventually(lambda: live.service.engine_loop.num_unfinished)
    unread.close()


def test_a_busy_port_is_a_one_line_error(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        process = Process(["--port", port], tmp_path / "log")
        assert process.process.wait(LIMIT_S) == 2
    (line,) = process.output.splitlines()
    assert line.startswith(f"radixkv: --port={port} is not allowed") and "no other process" in line


def test_settings_come_from_the_environment_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"tenants": {"initech": "the-key"}}')
    environment = {
        "RADIXKV_KEYS": str(keys),
        "RADIXKV_REPLICA": "env",
        "RADIXKV_BLOCK_SIZE": "32",
        "RADIXKV_POLICY": "lfu",
    }
    with (
        served(tmp_path / "log", environment=environment) as process,
        client(process.url, "the-key") as initech,
    ):
        (own,) = initech.get("/v1/replicas").json()["replicas"]
        assert (own["id"], own["block_size"]) == ("env", 32)
        assert "demo" not in process.output.replace("radixkv-demo", "") and "curl" not in process.output
        with client(process.url, "demo-acme") as demo:
            assert demo.get("/v1/stats").status_code == 401
        assert eventually(lambda: initech.get("/readyz").status_code == 200)
