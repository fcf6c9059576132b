"""Blocking reads of Redis streams.

``StreamReads`` is the ``read`` of ``redis.RedisStore``: XREAD over streams of any slots. Each slot has a separate
connection, and one thread waits for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.coordination.store.protocol import ENTRIES_A_READ
from radixkv.coordination.store.redis_connection import Connection, is_wrong_type, translated
from radixkv.errors import StoreUnavailable

SERVER_BLOCK_S = 1.0
_SWEEP_S = 0.005


@dataclass(slots=True)
class _UnderWay:
    """One XREAD that waits in the server, on its connection."""

    cursors: dict[str, str]
    pool: Any
    connection: Any
    sent_at: float
    failure: StoreUnavailable | None = None
    """The error found when the connection was checked.

    Another check would make the client connect again, without an answer.
    """

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Whether something can be received, or the connection is broken, or the server is silent."""
        if self.failure is None:
            try:
                with translated():
                    return bool(self.connection.can_read(wait_s)) or self._is_silent()
            except StoreUnavailable as failure:
                self.failure = failure
        return True

    def serves(self, cursors: Mapping[str, str]) -> bool:
        """Whether its answer covers all entries behind ``cursors``, and no other stream."""
        return self.cursors.keys() == cursors.keys() and all(
            _position(self.cursors[key]) <= _position(cursor) for key, cursor in cursors.items()
        )

    def receive(self) -> Any:
        """Wait for the answer and return it. Raises what the client raises."""
        if self.failure is not None:
            raise self.failure
        return self.connection.read_response()

    def _is_silent(self) -> bool:
        return time.monotonic() - self.sent_at > 2 * SERVER_BLOCK_S

    def end(self, *, is_broken: bool) -> None:
        """Give the connection back; close it if an answer could still come over it."""
        if is_broken:
            self.connection.disconnect()
        self.pool.release(self.connection)


class StreamReads:
    """XREAD over streams of any slots: one command a slot, and one thread that waits for all of them.

    Streams of different slots can't share a command. So a Cluster needs a blocking connection for each slot that has a
    log; a single server needs one. A slot whose server fails is left out of this read and retried in the next one.
    The other slots continue.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: dict[int, _UnderWay] = {}

    def read(self, cursors: Mapping[str, str], block_s: float) -> list[tuple[str, list[Any]]]:
        """Return ``(stream, [[id, fields], …])``; waits up to ``block_s``.

        Raises StoreUnavailable if no slot answers.
        """
        slots: dict[int, dict[str, str]] = {}
        for key, cursor in cursors.items():
            slots.setdefault(self._connection.slot(key), {})[key] = cursor
        found: list[tuple[str, list[Any]]] = []
        failures: list[StoreUnavailable] = []
        for reading in self._sent(slots, block_s, failures):
            try:
                with translated():
                    found += [(key.decode(), entries) for key, entries in self._receive(reading) or ()]
            except StoreUnavailable as failure:
                failures.append(failure)
        if slots and len(failures) >= len(slots):
            raise failures[0]
        return found

    def close(self) -> None:
        """End the reads in progress."""
        for slot in list(self._waiting):
            self._waiting.pop(slot).end(is_broken=True)

    def _sent(
        self, slots: Mapping[int, Mapping[str, str]], block_s: float, failures: list[StoreUnavailable]
    ) -> list[_UnderWay]:
        """Send the reads, and return those that can be received: without waiting the new ones, else those with data."""
        sent = []
        for slot, streams in slots.items():
            try:
                if block_s == 0:
                    sent.append(self._send(streams, ()))
                elif not self._is_waiting(slot, streams):
                    self._waiting[slot] = self._send(streams, ("BLOCK", int(SERVER_BLOCK_S * 1000)))
            except StoreUnavailable as failure:
                failures.append(failure)
        if block_s == 0:
            return sent
        self._wait(block_s)
        ready = [slot for slot, reading in self._waiting.items() if reading.is_ready() or slot not in slots]
        return [self._waiting.pop(slot) for slot in ready]

    def _is_waiting(self, slot: int, streams: Mapping[str, str]) -> bool:
        reading = self._waiting.get(slot)
        if reading is not None and not reading.serves(streams):
            self._waiting.pop(slot).end(is_broken=True)
            return False
        return reading is not None

    def _send(self, cursors: Mapping[str, str], block: tuple[Any, ...]) -> _UnderWay:
        with translated():
            pool, connection = self._connection.borrow(next(iter(cursors)))
            reading = _UnderWay(dict(cursors), pool, connection, time.monotonic())
            try:
                connection.send_command(
                    "XREAD", "COUNT", ENTRIES_A_READ, *block, "STREAMS", *cursors, *cursors.values()
                )
            except Exception:
                self._give_up(reading)
                raise
        return reading

    def _wait(self, block_s: float) -> None:
        """Wait for an answer. One connection is waited for; several are polled in turn."""
        if len(self._waiting) == 1:
            next(iter(self._waiting.values())).is_ready(block_s)
            return
        deadline = time.monotonic() + block_s
        while time.monotonic() < deadline and not any(each.is_ready() for each in self._waiting.values()):
            time.sleep(_SWEEP_S)

    def _receive(self, reading: _UnderWay) -> Any:
        with translated():
            try:
                answer = reading.receive()
            except Exception as error:
                self._give_up(reading)
                if is_wrong_type(error):
                    for key in reading.cursors:
                        self._connection.repair([key])
                raise
        reading.end(is_broken=False)
        return answer

    def _give_up(self, reading: _UnderWay) -> None:
        self._connection.suspect()
        reading.end(is_broken=True)


def _position(cursor: str) -> tuple[int, int]:
    epoch, _, seq = cursor.partition("-")
    return int(epoch), int(seq)
