"""The attacks of ``radixkv bench hostile``: requests of a tenant, or of a client without a key, to slow down others.

Each attack keeps a number of connections busy until it is stopped, or until its deadline. It runs in a process of its
own (``run``), because a shared interpreter would distort the timed calls.

    bodies      bodies of almost 4 MiB that end in a refusal: empty messages, unknown fields, labels, ids, numbers
    tokenising  60 lookups at once, each of 516,000 characters
    internal    250 connections that send a body to ``/internal/warm`` under a forged signature, and never finish it
    stops       streams of 32 choices with four long stop strings
    streams     three long streams that the client does not read
    completions eight long completions at once
    routes      32 connections, each with one small ``/v1/route`` of 512 ids after the other
    lookups     the same with 250 connections of lookups of three ids
    keyless     the same with 250 connections of ``/healthz`` without a key
    downloads   the same with 32 connections that download the largest file of ``/docs`` without a key
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

MAX_BODY_BYTES = 4 * 2**20
_ANSWER_BYTES = 2**16
_HOLD_S = 30.0
_UNDER_WAY_S = 5.0
_LARGEST = "/docs/assets/swagger-ui-bundle.js"
_PAUSE_S = 0.01
"""The pause after an answer or a broken connection. It limits the rate of an attack and avoids a busy loop."""


@dataclass(frozen=True, slots=True)
class Attack:
    """``connections`` concurrent clients. Each sends the ``requests`` one after the other, each on a new connection.

    A client waits up to 30 s for an answer. Without ``reads``, it keeps the connection open for 30 s and reads
    nothing. With ``floods``, it sends the first request again on the same connection as soon as it has the answer,
    whatever that is.
    """

    name: str
    connections: int
    requests: tuple[bytes, ...]
    reads: bool = True
    floods: bool = False


@dataclass(slots=True)
class Seen:
    """The number of answers by status. Status 0 counts connections that ended without an answer."""

    statuses: Counter[int] = field(default_factory=Counter)


def attacks(host: str, key: str) -> tuple[Attack, ...]:
    """Return all attacks on the server at ``host`` (``address:port``), with a tenant's key. They take about 50 MB."""

    def post(path: str, body: str | bytes | dict[str, Any], *headers: str, key: str | None = key) -> bytes:
        if isinstance(body, dict):
            body = json.dumps(body)
        content = body if isinstance(body, bytes) else body.encode()
        return _head("POST", path, host, len(content), key, headers) + content

    def kept(request: bytes) -> bytes:
        return request.replace(b"connection: close\r\n", b"")

    tokenising = json.dumps({"prompt": _text(516_000)})
    stream = {"prompt": "Go on.", "max_tokens": 400, "temperature": 1.0, "stream": True, "ignore_eos": True}
    stops = [
        stream | {"n": 32, "stop": [secrets.token_hex(length // 2) for _ in range(4)]}
        for length in (100_000, 1_000, 200)
    ]
    unread = post("/v1/completions", stream | {"max_tokens": 3_000})
    long = post("/v1/completions", {"prompt": _text(4_000), "max_tokens": 1_500, "ignore_eos": True})
    internal = _head(
        "POST", "/internal/warm", host, MAX_BODY_BYTES, None, tuple(_signature_headers())
    ) + bytes(MAX_BODY_BYTES - 1)
    return (
        Attack("bodies", 8, tuple(post(path, body) for path, body in _bodies())),
        Attack("tokenising", 60, (post("/v1/lookup", tokenising),)),
        Attack("internal", 250, (internal,)),
        Attack("stops", 4, tuple(post("/v1/completions", body) for body in stops)),
        Attack("streams", 3, (unread,), reads=False),
        Attack("completions", 8, (long,)),
        Attack("routes", 32, (kept(post("/v1/route", {"token_ids": list(range(512))})),), floods=True),
        Attack("lookups", 250, (kept(post("/v1/lookup", {"token_ids": [1, 2, 3]})),), floods=True),
        Attack("keyless", 250, (kept(_head("GET", "/healthz", host, 0, None)),), floods=True),
        Attack("downloads", 32, (kept(_head("GET", _LARGEST, host, 0, None)),), floods=True),
    )


def run(url: str, key: str, names: Sequence[str], deadline_s: float, nice: int, pipe: Connection) -> None:
    """Attack until a message comes through ``pipe``, or for ``deadline_s`` seconds. This is the target of a process.

    Sends ``True`` through ``pipe`` after the first answer, or after 5 seconds without one. At the end it sends a dict
    of the number of answers by status. ``nice`` lowers the priority of the process.
    """
    os.nice(nice)
    place = urlsplit(url)
    assert place.hostname is not None and place.port is not None
    chosen = [each for each in attacks(f"{place.hostname}:{place.port}", key) if each.name in names]
    seen = asyncio.run(_all((place.hostname, place.port), chosen, deadline_s, pipe))
    pipe.send(dict(seen.statuses))


async def _all(
    address: tuple[str, int], chosen: Sequence[Attack], deadline_s: float, pipe: Connection
) -> Seen:
    seen, until = Seen(), time.monotonic() + deadline_s
    tasks = [
        asyncio.create_task(_client(address, attack, number, seen))
        for attack in chosen
        for number in range(attack.connections)
    ]
    under_way_by = time.monotonic() + _UNDER_WAY_S
    while not seen.statuses and time.monotonic() < under_way_by:
        await asyncio.sleep(0.05)
    pipe.send(True)
    while time.monotonic() < until and not pipe.poll():
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen


async def _client(address: tuple[str, int], attack: Attack, number: int, seen: Seen) -> None:
    """Send requests of an attack in an endless loop, one connection at a time."""
    while attack.floods:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        with suppress(OSError):
            made = partial(_Flood, attack.requests[0], seen, over)
            transport, _ = await loop.create_connection(made, *address)
            with closing(transport):
                await over
        await asyncio.sleep(_PAUSE_S)
    while True:
        request = attack.requests[number % len(attack.requests)]
        status = 0
        with suppress(OSError):
            status = await _sent(address, request, attack.reads)
        seen.statuses[status] += 1
        number += 1
        await asyncio.sleep(_PAUSE_S)


class _Flood(asyncio.Protocol):
    """Sends a request again and again. ``over`` ends with the connection."""

    def __init__(self, request: bytes, seen: Seen, over: asyncio.Future[None]) -> None:
        self._request, self._seen, self._over = request, seen, over
        self._head, self._left = b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the answer, and send the request again when it has ended."""
        if not self._left:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._seen.statuses[int(head[9:12])] += 1
            fields = head.lower().partition(b"content-length: ")[2]
            self._head, self._left = b"", int(fields.partition(b"\r\n")[0] or b"0")
        self._left -= len(data)
        if not self._left:
            self._transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        """Let the client connect again."""
        if not self._over.done():
            self._over.set_result(None)


async def _sent(address: tuple[str, int], request: bytes, reads: bool) -> int:
    """Send a request on a new connection, read the whole answer, and return its status."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        if not reads:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        await loop.sock_connect(connection, address)
        with suppress(ConnectionError):  # the server may answer before the request ends
            await loop.sock_sendall(connection, request)
        if not reads:
            await asyncio.sleep(_HOLD_S)
            return 0
        async with asyncio.timeout(_HOLD_S):
            head = await loop.sock_recv(connection, _ANSWER_BYTES)
            while await loop.sock_recv(connection, _ANSWER_BYTES):
                pass
        return int(head[9:12]) if head.startswith(b"HTTP/1.1 ") else 0


def _head(
    method: str, path: str, host: str, length: int, key: str | None, headers: Sequence[str] = ()
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "content-type: application/json",
             f"content-length: {length}", "connection: close", *headers]  # fmt: skip
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode()


def _signature_headers() -> list[str]:
    return [
        f"x-radixkv-tenant: {secrets.token_hex(8)}",
        f"x-radixkv-timestamp: {time.time() * 1000:.0f}",
        f"x-radixkv-nonce: {secrets.token_hex(16)}",
        f"x-radixkv-body: {secrets.token_hex(32)}",
        f"x-radixkv-signature: {secrets.token_hex(32)}",
    ]


def _text(num_chars: int) -> str:
    return (
        "Rule 7: answer politely, name the page of the manual, and ask if in doubt. " * (num_chars // 70)
    )[:num_chars]


def _bodies() -> list[tuple[str, str]]:
    """Paths and bodies just below the size limit. The service refuses each of them."""

    def filled(before: str, item: Callable[[int], str], after: str, most: int = 10**9) -> str:
        parts, size, number = [], len(before) + len(after), 0
        while number < most and size + len(part := item(number)) + 1 < MAX_BODY_BYTES:
            parts.append(part)
            size, number = size + len(part) + 1, number + 1
        return before + ",".join(parts) + after

    return [
        ("/v1/lookup", filled('{"messages":[', lambda _: '{"role":"user","content":""}', "]}", 144_000)),
        ("/v1/lookup", filled('{"prompt":"x",', lambda at: f'"f{at}":1', "}", 330_000)),
        (
            "/v1/completions",
            filled('{"prompt":"x","logit_bias":{', lambda at: f'"{at}":[]', "}}", 330_000),
        ),
        (
            "/v1/completions",
            filled('{"prompt":"x","hints":{"labels":{', lambda at: f'"{at}":1', "}}}", 380_000),
        ),
        ("/v1/lookup", filled('{"token_ids":[', lambda _: "1", "]}")),
        ("/v1/lookup", filled('{"token_ids":[', lambda at: str(at % 8_000), "]}")),
        ("/v1/completions", filled('{"prompt":[', lambda _: '""', "]}")),
        ("/v1/warm", filled('{"messages":[', lambda _: "{}", "]}")),
        ("/v1/lookup", '{"prompt":"' + "\\u0020" * (MAX_BODY_BYTES // 6 - 10) + '"}'),
        ("/v1/lookup", '{"prompt":' + "[" * (MAX_BODY_BYTES - 100) + "}"),
    ]
