"""One HTTP/1.1 connection: uvicorn's, with bounds on what a client can make the server wait for, keep, or log.

- The head of a request must arrive within HEAD_TIMEOUT_S.
- If the client doesn't read an answer, about UNREAD_BYTES of it are kept here and as much again in the kernel. Then
  ``send`` waits, and so does the work that makes the answer.
- A request that is not HTTP is answered with 400 and its connection is closed, without a traceback. The log has at most
  one line about such requests every NOISE_EVERY_S, with their number.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from radixkv.clock import Clock, monotonic

HEAD_TIMEOUT_S = 20.0
UNREAD_BYTES = 16 * 1024
NOISE_EVERY_S = 60.0
_NOISE = ("Invalid HTTP request received", "Unsupported upgrade request", "No supported WebSocket library")


class Connection(H11Protocol):
    """A bounded HTTP/1.1 connection; see the module's docstring."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the output that is kept for the client, and wait for the first head."""
        super().connection_made(transport)
        self.access_log = False  # no line for each request, whatever handlers the root logger has
        transport.set_write_buffer_limits(high=UNREAD_BYTES)
        _bound_unsent(transport.get_extra_info("socket"))
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Restart the wait for a head, unless these bytes ended one."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, if an answer can still be sent, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and (
            self.cycle is None or self.cycle.response_complete
        ):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the wait for a head."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _bound_unsent(connection: socket.socket | None) -> None:
    """Limit the kernel's unsent bytes to UNREAD_BYTES, if the system allows it."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if connection is not None and option is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, option, UNREAD_BYTES)


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
