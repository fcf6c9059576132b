"""An OpenAI-compatible server on a real socket, with a prefix cache that may be shared across keys.

Its answers take simulated time, by the clock of its ``Behaviour``: ``COMPUTE_S`` for an unknown prompt, almost nothing
for others, and some noise. Real times on a busy machine would be too noisy for a test.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from radixkv.clock import ManualClock
from tests.waiting import is_set

COMPUTE_S = 0.008


@dataclass
class Behaviour:
    """The faults of a server."""

    shares: bool = False
    caches: bool = True
    tells_cached: bool = True
    global_metrics: bool = False
    counts_in_ids: bool = False
    constant_ids: bool = False
    at_streams: str = ""
    """What happens at each stream: ``no stream`` answers as without one, ``refused`` with 400, ``busy`` with 429,
    ``dies`` ends the server, and ``hangs`` sets ``hung`` and doesn't answer until ``released`` is set."""
    hung: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    chat_only: bool = False
    salt_chars: int | None = None
    """Tenants are told apart by this many characters of ``cache_salt``, not by keys."""
    busy_every: int = 0
    known: set[tuple[str, str]] = field(default_factory=set)
    served: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    paths: list[str] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)
    noise: random.Random = field(default_factory=lambda: random.Random(0))


@contextmanager
def openai_server(behaviour: Behaviour) -> Iterator[str]:
    """The base URL of the server while the ``with`` block runs. The server accepts any key."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def log_message(self, *_: Any) -> None:
            """Write no log."""

        def do_GET(self) -> None:
            behaviour.paths.append(self.path)
            if self.path == "/v1/models":
                self._json({"object": "list", "data": [{"id": "some-model"}]})
            elif self.path == "/metrics" and behaviour.global_metrics:
                self._send(
                    200, f"requests_total {len(behaviour.paths)}\ntokens {len(behaviour.known)}\n".encode()
                )
            else:
                self._json({"error": "no such path"}, 404)

        def do_DELETE(self) -> None:
            self._json({"error": "no such path"}, 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = "/v1/chat/completions" if behaviour.chat_only else "/v1/completions"
            if self.path != path:
                self._json({"error": "no such path"}, 404)
                return
            try:
                request = json.loads(body)
                prompt = request["messages"][0]["content"] if behaviour.chat_only else request["prompt"]
                assert request["model"] == "some-model" and prompt and isinstance(prompt, str)
            except (ValueError, LookupError, AssertionError):
                self._json({"error": "bad request"}, 400)
                return
            if request.get("stream") and self._fails():
                return
            number = next(behaviour.served)
            if behaviour.busy_every and number % behaviour.busy_every == 0:
                self._json({"error": "busy"}, 429, {"Retry-After": "0"})
                return
            who = "" if behaviour.shares else self.headers.get("Authorization", "")
            if behaviour.salt_chars is not None:
                who = str(request.get("cache_salt", ""))[: behaviour.salt_chars]
            self._complete(number, prompt, who, bool(request.get("stream")))

        def _fails(self) -> bool:
            """Whether a stream was answered by what the behaviour says of it."""
            if behaviour.at_streams == "refused":
                self._json({"error": "no streams"}, 400)
            elif behaviour.at_streams == "busy":
                self._json({"error": "busy"}, 429, {"Retry-After": "1"})
            elif behaviour.at_streams == "dies":
                server.socket.close()
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            elif behaviour.at_streams == "hangs":
                behaviour.hung.set()
                is_set(behaviour.released, "the end of the test")
            else:
                return False
            return True

        def _complete(self, number: int, prompt: str, who: str, stream: bool) -> None:
            cached = (who, prompt) in behaviour.known
            behaviour.clock.advance(behaviour.noise.expovariate(4 / COMPUTE_S) + (0 if cached else COMPUTE_S))
            if behaviour.caches:
                behaviour.known.add((who, prompt))
            tokens = len(prompt.split())
            usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 1}
            if behaviour.tells_cached:
                usage["prompt_tokens_details"] = {"cached_tokens": tokens if cached else 0}
            name = (
                f"cmpl-{number}" if behaviour.counts_in_ids else f"cmpl-{behaviour.noise.randbytes(8).hex()}"
            )
            name = "cmpl-0" if behaviour.constant_ids else name
            choice = {"delta": {"content": "x"}} if behaviour.chat_only else {"text": "x"}
            document = {"id": name, "choices": [choice], "usage": usage}
            if stream and behaviour.at_streams != "no stream":
                events = [
                    b": ping\n\n",
                    b"data: " + json.dumps(document).encode() + b"\n\n",
                    b"data: [DONE]\n\n",
                ]
                self._send(200, b"".join(events), {"Content-Type": "text/event-stream"})
            else:
                self._json(document)

        def _json(self, document: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self._send(status, json.dumps(document).encode(), headers)

        def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        behaviour.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
