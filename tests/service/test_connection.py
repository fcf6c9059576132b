"""HTTP as it is read: what httptools would accept and another server could read in another way is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from radixkv.service import connection
from radixkv.service.connection import MAX_HEAD_BYTES, UNREAD_BYTES, Connection
from radixkv.service.turns import READ_FIRST, READING_S, Turns
from tests.service.running import Running
from tests.waiting import LIMIT_S

HOST = b"host: x\r\n"
BODY = b'{"token_ids":[1,2,3]}'
ACME = b"authorization: Bearer demo-acme\r\ncontent-type: application/json\r\n"
NEXT = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
SIZED = b"content-length: %d\r\n" % len(BODY)


def raw(live: Running, *parts: bytes) -> bytes:
    """Everything that the server answers until it closes the connection."""
    place = urlsplit(live.url)
    received = b""
    with socket.create_connection((place.hostname, place.port), timeout=LIMIT_S) as client:
        for part in parts:
            client.sendall(part)
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(65_536):
                received += part
    return received


def statuses(answer: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def posted(fields: bytes, body: bytes, version: bytes = b"1.1") -> bytes:
    return b"POST /v1/lookup HTTP/" + version + b"\r\n" + HOST + ACME + fields + b"\r\n" + body


CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"15\r\n" + BODY + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET / HTTP/0.9\r\nhost: x\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET / HTTP/1.1\r\nhost: x\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n\xe9: a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /?\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /a\tb HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        posted(CHUNKED + SIZED, CHUNKS),
        posted(SIZED + CHUNKED, CHUNKS),
        posted(SIZED + SIZED, BODY),
        posted(b"content-length: +21\r\n", BODY),
        posted(b"content-length: 21, 21\r\n", BODY),
        posted(b"content-length: 99999999999999999999999\r\n", BODY),
        posted(b"transfer-encoding: gzip, chunked\r\n", CHUNKS),
        posted(b"transfer-encoding: chunked, identity\r\n", CHUNKS),
        posted(b"transfer-encoding: xchunked\r\n", CHUNKS),
        posted(b"transfer-encoding: identity\r\n", CHUNKS),
        posted(CHUNKED + CHUNKED, CHUNKS),
        posted(CHUNKED, CHUNKS, version=b"1.0"),
    ],
)
def test_what_two_servers_could_read_differently_is_refused(live: Running, request_: bytes) -> None:
    answer = raw(live, request_ + NEXT)
    assert statuses(answer) == [400], answer
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    "bad",
    [
        b"15\n" + BODY + b"\r\n0\r\n\r\n",
        b"15 \r\n" + BODY + b"\r\n0\r\n\r\n",
        b"0x15\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\n" + BODY,
        b"14\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"15;a=\nb\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"15;" + b"a" * 3 * MAX_HEAD_BYTES,
        CHUNKS[:-2] + b"a: b\r\n" * MAX_HEAD_BYTES,
    ],
    ids=lambda bad: str(bad[:12]),
)
def test_bad_chunks_end_the_connection(live: Running, bad: bytes) -> None:
    """The answer has begun to be made, so a 400 may come or not; nothing after it is read as a request."""
    answer = raw(live, posted(CHUNKED, bad))
    assert statuses(answer) in ([], [400]), answer


def test_what_h11_accepted_is_accepted(live: Running) -> None:
    for request in (
        posted(SIZED, BODY),
        posted(CHUNKED, CHUNKS),
        posted(b"Transfer-Encoding: CHUNKED\r\n", CHUNKS),
        posted(CHUNKED, b'2;ext="a"\r\n{"\r\n13\r\n' + BODY[2:] + b"\r\n00\r\n\r\n"),
        b"\r\n\r\n" + posted(SIZED, BODY),
        posted(SIZED, BODY, version=b"1.0"),
        posted(b"a: \xe9\r\n" + SIZED, BODY),
    ):
        close = b"" if b"HTTP/1.0" in request else NEXT
        answer = raw(live, request + close)
        assert statuses(answer) == [200, 200][: 1 + bool(close)], answer
    assert statuses(raw(live, b"GET http://x/healthz HTTP/1.1\r\nhost: x\r\n\r\n" + NEXT)) == [404, 200]
    assert statuses(raw(live, b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n" + NEXT)) == [404, 200]
    answer = raw(live, b"GET /v1/stats?a=%31&a=2 HTTP/1.1\r\nhost: x\r\n" + ACME + b"\r\n" + NEXT)
    assert statuses(answer) == [422, 200] and b"unknown field a" in answer


def test_the_body_of_a_request_that_asks_for_an_upgrade_is_read(live: Running) -> None:
    """Some clients ask for HTTP/2 with each request. httptools alone would read the body as the next request."""
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAA\r\n"
    answer = raw(live, posted(upgrade + SIZED, BODY) + NEXT)
    assert statuses(answer) == [200, 200] and b"matched_tokens" in answer
    smuggled = b"GET /v1/stats HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = raw(live, posted(upgrade + b"content-length: %d\r\n" % len(smuggled), smuggled) + NEXT)
    assert statuses(answer) == [400, 200], "the body is no second request"


def test_fields_after_a_chunked_body_are_no_fields_of_the_head(live: Running) -> None:
    request = b"POST /v1/lookup HTTP/1.1\r\n" + HOST + CHUNKED + b"content-type: application/json\r\n\r\n"
    trailing = CHUNKS[:-2] + b"authorization: Bearer demo-acme\r\n\r\n"
    assert statuses(raw(live, request + trailing + NEXT)) == [401, 200]


def test_requests_are_read_whole_however_their_bytes_are_split(live: Running) -> None:
    for request in (posted(SIZED, BODY) + NEXT, posted(CHUNKED, CHUNKS) + NEXT):
        for size in (1, 2, 3, 7, 64):
            parts = [request[at : at + size] for at in range(0, len(request), size)]
            assert statuses(raw(live, *parts)) == [200, 200]


def test_a_head_is_bounded(live: Running) -> None:
    long = b"GET /healthz HTTP/1.1\r\nhost: x\r\na: " + b"b" * MAX_HEAD_BYTES
    assert statuses(raw(live, long)) == [400]
    assert statuses(raw(live, long + b"\r\n\r\n" + NEXT)) == [400]
    fits = b"GET /healthz HTTP/1.1\r\nhost: x\r\na: " + b"b" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n"
    assert statuses(raw(live, fits + NEXT)) == [200, 200]


def test_bytes_after_the_last_request_are_not_read(live: Running) -> None:
    assert statuses(raw(live, NEXT + NEXT)) == [200]
    closing = posted(b"connection: close\r\n" + SIZED, BODY)
    assert statuses(raw(live, closing + NEXT)) == [200]


# ---- in turn


class StubTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.unsent, self.is_closed, self.is_aborted, self.is_paused = (
            b"",
            0,
            False,
            False,
            False,
        )

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return None

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Connections:
    """Connections to an application that notes the paths, and whose heads cost as much time as one may."""

    def __init__(self) -> None:
        self.work_s = 0.0
        self.turns = Turns(work_clock=lambda: self.work_s)
        self.paths: list[str] = []
        self.first: set[str] = set()
        self.may = asyncio.Event()
        self.may.set()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        if scope["path"] in self.first:
            scope["state"][READ_FIRST] = True
        await self.may.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def connected(self) -> tuple[Connection, StubTransport]:
        import uvicorn
        from uvicorn.server import ServerState

        config = uvicorn.Config(self.app, interface="asgi3", lifespan="off", log_config=None)
        config.load()
        made = Connection.of(self.turns)(config=config, server_state=ServerState(), app_state={})
        feed = made.parser.feed_data

        class Dear:
            def __getattr__(_, name: str) -> Any:
                return getattr(parser, name)

            def feed_data(_, data: bytes) -> None:
                feed(data)
                self.work_s += READING_S / 2

        parser, made.parser = made.parser, Dear()
        transport = StubTransport()
        made.connection_made(transport)
        return made, transport


def asked(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


async def turn(num: int = 1) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def test_heads_are_parsed_in_slices_and_known_first_connections_do_not_wait() -> None:
    async def test() -> None:
        all_of_them = Connections()
        all_of_them.first.add("/strict")
        strict, _ = all_of_them.connected()
        strict.data_received(asked("/strict"))
        await turn(4)
        others = [all_of_them.connected()[0] for _ in range(9)]
        all_of_them.paths.clear()
        for number, each in enumerate(others):
            each.data_received(asked(f"/{number}"))
        strict.data_received(asked("/strict"))
        parsed = []
        while len(all_of_them.paths) < 10:
            await turn()
            parsed.append(len(all_of_them.paths))
        assert all_of_them.paths.index("/strict") == 2, all_of_them.paths
        rest = [path for path in all_of_them.paths if path != "/strict"]
        assert rest == [f"/{number}" for number in range(9)]
        assert max(b - a for a, b in zip([0, *parsed], parsed, strict=False)) <= 3

    asyncio.run(test())


def test_a_pipelined_request_is_parsed_after_the_answer_to_the_one_before() -> None:
    async def test() -> None:
        all_of_them = Connections()
        all_of_them.may.clear()
        made, transport = all_of_them.connected()
        made.data_received(b"".join(asked(f"/{number}") for number in range(5000)))
        await turn(5)
        assert all_of_them.paths == ["/0"] and transport.is_paused, "the rest is bytes, and no more are read"
        all_of_them.may.set()
        await turn(200)
        assert 5 < len(all_of_them.paths) <= 201, "one a turn"
        assert all_of_them.paths == [f"/{number}" for number in range(len(all_of_them.paths))]

    asyncio.run(test())


def test_pipelined_requests_are_not_read_faster_than_they_are_answered() -> None:
    async def test() -> None:
        all_of_them = Connections()
        made, transport = all_of_them.connected()
        piece, most = b"".join(asked("/") for _ in range(2_000)), 0
        for _ in range(400):
            if not transport.is_paused:
                made.data_received(piece)
            await turn()
            if made.cycle is not None:  # the application listens for the end of the connection
                made.flow.resume_reading()
            most = max(most, len(made._held))
        assert len(all_of_them.paths) > 100 and most < 3 * len(piece), most

    asyncio.run(test())


def test_the_rest_of_a_body_that_was_refused_midway_is_read() -> None:
    """Otherwise the client would write for ever, and not read the answer."""

    async def test() -> None:
        all_of_them = Connections()
        all_of_them.may.clear()
        made, transport = all_of_them.connected()
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
        made.data_received(head + b"x" * 300_000)
        while made.cycle is None or len(made.cycle.body) <= HIGH_WATER_LIMIT:
            await turn()
        assert transport.is_paused and len(made._held) > 100_000
        all_of_them.may.set()
        await turn(100)
        assert not made._held and not transport.is_paused, "the answer is there, and the body isn't kept"
        made.data_received(b"x" * 700_000 + asked("/next"))
        await turn(400)
        assert all_of_them.paths == ["/", "/next"]

    asyncio.run(test())


def test_reading_goes_on_when_the_bytes_were_parsed() -> None:
    async def test() -> None:
        all_of_them = Connections()
        all_of_them.may.clear()
        made, transport = all_of_them.connected()
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n"
        made.data_received(head + b"x" * 150_000)
        assert transport.is_paused
        await turn(100)
        assert made.cycle is not None and len(made.cycle.body) == 150_000
        assert transport.is_paused, "the application has enough"
        made.cycle.body.clear()
        made.flow.resume_reading()
        made.data_received(b"x" * 50_000)
        await turn(20)
        assert not made.cycle.more_body
        made.connection_lost(None)

    asyncio.run(test())


def test_an_answer_of_unknown_length_ends_by_closing_for_http_1_0(live: Running) -> None:
    content = json.dumps({"prompt": "Hello", "max_tokens": 3, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\n" + ACME + b"content-length: %d\r\n\r\n" % len(content)
    answer = raw(live, head + content)
    fields, _, body = answer.partition(b"\r\n\r\n")
    assert statuses(answer) == [200] and b"transfer-encoding" not in fields.lower()
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")


def test_a_body_of_tiny_chunks_is_parsed_in_slices() -> None:
    async def test() -> None:
        all_of_them = Connections()
        all_of_them.may.clear()
        made, _ = all_of_them.connected()
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        made.data_received(head + b"1\r\nx\r\n" * 40_000)
        assert made.cycle is None or len(made.cycle.body) < 3_000
        await turn(100)
        assert made.cycle is not None and len(made.cycle.body) == 40_000
        made.connection_lost(None)

    asyncio.run(test())


# ---- clients that don't read


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Let UNREAD_S be over for all connections."""
    due: list[Callable[[], None]] = []

    def watch(made: Connection) -> None:
        if made._unread is None:
            made._unread_bytes = made.transport.get_write_buffer_size()
            made._unread = asyncio.get_running_loop().call_later(LIMIT_S, lambda: None)
            due.append(made._cut_off)

    def over() -> None:
        taken, due[:] = due[:], []
        for each in taken:
            each()

    monkeypatch.setattr(Connection, "_await_reader", watch)
    yield over


def test_a_client_that_reads_nothing_is_cut_off(unread: Callable[[], None]) -> None:
    async def test() -> None:
        made, transport = Connections().connected()
        transport.unsent = 3 * UNREAD_BYTES
        made.pause_writing()
        transport.unsent -= UNREAD_BYTES
        unread()
        assert not transport.is_aborted, "it reads, slowly"
        transport.unsent -= UNREAD_BYTES - 1
        unread()
        assert transport.is_aborted

    asyncio.run(test())


def test_a_client_that_reads_on_is_not_cut_off(unread: Callable[[], None]) -> None:
    async def test() -> None:
        made, transport = Connections().connected()
        transport.unsent = UNREAD_BYTES
        made.pause_writing()
        transport.unsent = 0
        made.resume_writing()
        unread()
        assert not transport.is_aborted

    asyncio.run(test())


def test_an_unread_stream_is_cut_off_once_it_has_ended(unread: Callable[[], None]) -> None:
    async def test() -> None:
        all_of_them = Connections()
        all_of_them.may.clear()
        made, transport = all_of_them.connected()
        made.data_received(asked("/"))
        assert made.cycle is not None
        made.cycle.is_stream = True
        transport.unsent = UNREAD_BYTES
        made.pause_writing()
        unread()
        assert not transport.is_aborted, "it has a time limit of its own"
        transport.close()
        unread()
        assert transport.is_aborted
        made.connection_lost(None)

    asyncio.run(test())


def test_an_idle_connection_whose_answer_is_unread_is_cut_off(unread: Callable[[], None]) -> None:
    async def test() -> None:
        made, transport = Connections().connected()
        transport.unsent = 100
        made.data_received(asked("/"))
        await turn(3)
        assert transport.written.startswith(b"HTTP/1.1 200 ")
        unread()
        assert transport.is_aborted

    asyncio.run(test())


def test_times_are_those_of_the_documentation() -> None:
    assert (connection.HEAD_TIMEOUT_S, connection.UNREAD_S) >= (20.0, 60.0)
    assert json.loads(BODY) == {"token_ids": [1, 2, 3]} and len(BODY) == 0x15
