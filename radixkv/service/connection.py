"""One HTTP/1.1 connection: uvicorn's with httptools, with bounds on what a client can make the server wait for or keep.

httptools is fast and lenient. So bytes reach it in pieces that the connection chooses, and what it would accept but
another server could read in another way is refused:

- A head is parsed when it is complete: within HEAD_TIMEOUT_S, with at most MAX_HEAD_BYTES. One feed completes at most
  one request, and the next one is parsed after the answer. Nothing is kept for pipelined requests but their bytes.
- A request of HTTP/1.1 has one ``Host``. The version is 1.0 or 1.1. ``Transfer-Encoding`` is ``chunked`` or absent.
  Fields after a chunked body are dropped. Between two parts of a body are at most MAX_HEAD_BYTES of framing.
- A request that states its length twice, by two ``Content-Length`` or beside ``Transfer-Encoding``, is refused by
  httptools: a proxy could read another one, and one client's body would be another client's request.
- ``Upgrade`` is taken out of the head, because httptools would not read the body then. CONNECT is refused.
- A request that is not HTTP is answered with 400 and its connection is closed, without a traceback. The log has at most
  one line about such requests every NOISE_EVERY_S, with their number.

If the client doesn't read an answer, about UNREAD_BYTES of it are kept here and as much again in the kernel. Then
``send`` waits, and so does the work that makes the answer. A client that doesn't read UNREAD_BYTES in UNREAD_S is cut
off. A stream of events has a time limit of its own, and is cut off only when it has ended.

``turns`` bounds how long the loop parses heads before it does other work.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from radixkv.clock import Clock, monotonic
from radixkv.service.turns import READ_FIRST, Turns

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 16 * 1024
UNREAD_BYTES = 16 * 1024
UNREAD_S = 60.0
NOISE_EVERY_S = 60.0
_PIECE_BYTES: Final = 8 * 1024
"""Bytes of a body that are parsed at once: a few hundred chunks at most, in less than a millisecond."""
_MOST_HELD: Final = 64 * 1024
"""Bytes that wait to be parsed, before no more are read."""
_NOISE = ("Invalid HTTP request received", "Unsupported upgrade request", "No supported WebSocket library")
_END: Final = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)
_BARE_LF = re.compile(rb"(?<!\r)\n")
_TARGET = re.compile(rb"[\x21-\x7e]+")


class Flow(FlowControl):
    """Pauses reading and writing. While many bytes wait to be parsed, no more are read."""

    def __init__(self, transport: asyncio.Transport, held: bytearray) -> None:
        super().__init__(transport)
        self._held = held

    def resume_reading(self) -> None:
        """Read on, unless enough waits."""
        if len(self._held) <= _MOST_HELD:
            super().resume_reading()


class Cycle(RequestResponseCycle):
    """One request and its answer. A client that is gone ends its answer at once."""

    is_stream = False
    """Whether the answer is a stream of events."""
    _ends_by_closing = False
    """Whether the end of the connection is the end of the answer: HTTP/1.0 has no chunks."""

    async def send(self, message: ASGISendEvent) -> None:
        """Send a part of the answer, unless the client is gone."""
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self.is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
            if self.scope["http_version"] == "1.0" and not _states_length(message):
                self._ends_by_closing, self.chunked_encoding = True, False
        elif self._ends_by_closing and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        while self.flow.write_paused and not self.disconnected and not self.transport.is_closing():
            await self.flow.drain()
        if self.transport.is_closing():  # asyncio logs each write to a connection that is lost
            self.disconnected = True
            self.message_event.set()
        await super().send(message)

    async def receive(self) -> ASGIReceiveEvent:
        """Return a part of the body, or that the client is gone."""
        if self.transport.is_closing():
            self.disconnected = True
        return await super().receive()


class Connection(HttpToolsProtocol):
    """A bounded HTTP/1.1 connection; see the module's docstring."""

    turns: Turns
    cycle: Cycle | None  # type: ignore[assignment]
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    _is_in_body = False
    """Whether the head of a request was parsed, and the end of its body wasn't."""
    _is_in_head = False
    """Whether fields are those of a head: not those after a chunked body."""
    _num_framing = 0
    """Bytes since the head or the last part of the body."""
    _last = b""
    """The last bytes of the body that were parsed: the end of a chunked body may begin with them."""
    _body_left: int | None = None
    """Bytes of the body that are missing; None if it is chunked."""
    _num_searched = 0
    """Bytes that wait to be parsed and in which no head ends."""
    _waits = False
    """Whether it waits for its turn to be parsed."""
    _is_first = False
    """Whether its last request was one of the first rank, so that it doesn't wait to be parsed."""

    @classmethod
    def of(cls, turns: Turns) -> type[Connection]:
        """Return the class of connections whose heads are parsed in these turns."""
        return type(cls.__name__, (cls,), {"turns": turns})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the output that is kept for the client, and wait for the first head."""
        super().connection_made(transport)
        self.access_log = False  # no line for each request, whatever handlers the root logger has
        transport.set_write_buffer_limits(high=UNREAD_BYTES)
        _bound_unsent(transport.get_extra_info("socket"))
        self._held = bytearray()
        self.flow = Flow(transport, self._held)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Keep the bytes, and parse them when it is this connection's turn."""
        self._unset_keepalive_if_required()
        self._held += data
        self._parse_in_turn()
        if len(self._held) > _MOST_HELD:
            self.flow.pause_reading()

    @property
    def _num_unreceived(self) -> int:
        """Bytes of the body that the handler hasn't taken yet. Once it has answered, it takes no more."""
        return 0 if self.cycle is None else len(self.cycle.body)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse_in_turn(self) -> None:
        if self._waits or not self._held or self.parser is None:
            return
        self._is_first = self.cycle is not None and READ_FIRST in self.cycle.scope["state"]
        if self._is_first or self.turns.may_read():
            self._parse()
        else:
            self._wait_to_parse()

    def _wait_to_parse(self) -> None:
        self._waits = True
        self.turns.read_later(self._parse_later)

    def _parse_later(self) -> None:
        self._waits = False
        if self.parser is not None:
            self._parse()

    def _parse(self) -> None:
        """Parse the bytes that wait, up to the end of a request: the next one waits for the answer."""
        while self._held and not self.transport.is_closing():
            if not self._is_in_body and self._is_answering:
                break
            piece = self._next_piece()
            if piece is None:
                break
            if not self._fed(piece):
                return
            if self._held and not self._is_first and not self.turns.may_read():
                self._wait_to_parse()
                break
        if self.flow.read_paused and (not self._is_answering or self._num_unreceived <= HIGH_WATER_LIMIT):
            self.flow.resume_reading()
        if self._is_answering:
            self._stop_waiting()
        else:
            self._await_head()

    def _next_piece(self) -> bytes | None:
        """Take the bytes to parse now: a whole head, or a part of a body that ends where the body may end."""
        held = self._held
        if self._is_in_body:
            if self._body_left is not None:
                size = min(self._body_left, len(held), _PIECE_BYTES)
            else:
                overlap = len(self._last)
                found = (self._last + held[:_PIECE_BYTES]).find(_END)
                size = min(len(held), _PIECE_BYTES) if found < 0 else found + len(_END) - overlap
            return self._taken(size)
        while held[:2] == b"\r\n":
            del held[:2]
            self._num_searched = 0
        at = held.find(_END, max(self._num_searched - len(_END), 0), MAX_HEAD_BYTES)
        if at >= 0:
            return _UPGRADE.sub(b"", self._taken(at + len(_END)))
        self._num_searched = len(held)
        if len(held) >= MAX_HEAD_BYTES or not _may_be_head(held):
            self._refuse()
        return None

    def _taken(self, size: int) -> bytes:
        piece = bytes(self._held[:size])
        del self._held[:size]
        self._num_searched = 0
        return piece

    def _fed(self, piece: bytes) -> bool:
        """Parse a piece; return False after an error, which was answered."""
        self._num_framing += len(piece)
        is_chunked = self._is_in_body and self._body_left is None
        try:
            with self.turns.reading():
                self.parser.feed_data(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse()
            return False
        if self._num_framing > MAX_HEAD_BYTES + _PIECE_BYTES:
            self._refuse()
            return False
        self._last = (self._last + piece)[1 - len(_END) :] if is_chunked else b""
        return True

    def _refuse(self) -> None:
        msg = "Invalid HTTP request received."
        self.logger.warning(msg)
        self.send_400_response(msg)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, if an answer can still be sent, and close."""
        self._held.clear()
        if self._is_answering:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head; those after a chunked body don't count."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer the request. Raises ValueError for a head that isn't valid: httptools then stops."""
        self._is_in_head = False
        version, method = self.parser.get_http_version(), self.parser.get_method()
        self._check_head(version, method)
        raw_path, _, query = self.url.partition(b"?")
        scope = self.scope
        scope["method"], scope["http_version"] = method.decode("ascii"), version
        path = raw_path.decode("ascii")
        scope["path"] = self.root_path + (unquote(path) if "%" in path else path)
        scope["raw_path"] = self.root_path.encode("ascii") + raw_path
        scope["query_string"] = query
        self.cycle = Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version == "1.1",
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self._is_in_body, self._num_framing, self._last = True, 0, b""
        task = self.loop.create_task(self.cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _check_head(self, version: str, method: bytes) -> None:
        values: dict[bytes, list[bytes]] = {b"host": [], b"transfer-encoding": [], b"content-length": []}
        for name, value in self.headers:
            if name in values:
                values[name].append(value)
        hosts, encodings = values[b"host"], values[b"transfer-encoding"]
        if version not in ("1.0", "1.1") or method == b"CONNECT" or not _TARGET.fullmatch(self.url):
            raise ValueError("request line")
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise ValueError("host")
        if encodings and (version == "1.0" or [each.strip().lower() for each in encodings] != [b"chunked"]):
            raise ValueError("transfer-encoding")
        self._body_left = None if encodings else int((values[b"content-length"] or [b"0"])[0])

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_framing = 0
        if self._body_left is not None:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request's body."""
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Parse the next request, if its bytes are there."""
        super().on_response_complete()
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self._await_reader()
        if not self.transport.is_closing() and self._held:
            self._unset_keepalive_if_required()
            self._parse_in_turn()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Send on: the client has read."""
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to wait for anything."""
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._held.clear()

    def _await_head(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def _close(self) -> None:
        self.transport.close()
        self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a further request."""
        super().timeout_keep_alive_handler()
        self._await_reader()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _await_reader(self) -> None:
        """Cut the client off if it doesn't read on."""
        if self._unread is None:
            self._unread_bytes = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(UNREAD_S, self._cut_off)

    def _cut_off(self) -> None:
        self._unread = None
        left = self.transport.get_write_buffer_size()
        if not left:
            return
        is_own = self._is_answering and self.cycle is not None and self.cycle.is_stream
        if (is_own and not self.transport.is_closing()) or left <= self._unread_bytes - UNREAD_BYTES:
            self._await_reader()
        else:
            _drop_unsent(self.transport.get_extra_info("socket"))
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def _states_length(message: ASGISendEvent) -> bool:
    """Whether the beginning of an answer says where it ends, or has no body."""
    assert message["type"] == "http.response.start"
    names = {name.lower() for name, _ in message.get("headers", ())}
    return b"content-length" in names or message["status"] in (204, 304)


def _may_be_head(held: bytearray) -> bool:
    """Whether bytes may be the beginning of a head: a client that speaks TLS gets its 400 at once."""
    return bytes(held[:2]) in (b"", b"\r") or (held[:1].isalpha() and _BARE_LF.search(held) is None)


def _bound_unsent(connection: socket.socket | None) -> None:
    """Limit the kernel's unsent bytes to UNREAD_BYTES, if the system allows it."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if connection is not None and option is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, option, UNREAD_BYTES)


def _drop_unsent(connection: socket.socket | None) -> None:
    """Let the kernel drop what the client hasn't read, when the connection is closed, and not keep it for minutes."""
    if connection is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Noise(logging.Filter):
    """Passes one log line every NOISE_EVERY_S of those that any sender of garbage can cause; the line has their
    number."""

    def __init__(self, clock: Clock = monotonic) -> None:
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._count, self._again_at = 0, float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record."""
        if record.levelno != logging.WARNING or not str(record.msg).startswith(_NOISE):
            return True
        with self._lock:
            self._count += 1
            now = self._clock()
            if now < self._again_at:
                return False
            record.msg, record.args = (
                "%d requests were not valid HTTP since the last such line",
                (self._count,),
            )
            self._count, self._again_at = 0, now + NOISE_EVERY_S
            return True


def quieten() -> None:
    """Put a Noise filter on uvicorn's log, once."""
    log = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, Noise) for each in log.filters):
        log.addFilter(Noise())
