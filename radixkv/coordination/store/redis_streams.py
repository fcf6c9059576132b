"""Blocking reads of Redis streams.

``StreamReads`` is the ``read`` of ``redis.RedisStore``: XREAD over streams of any slots. Each slot has a separate
connection, and one thread waits for all of them.

A server that has become a replica still answers reads, perhaps without ever hearing more. So a read that waits is ended
when the connections to its server were left, and a server without news is asked for its role.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.coordination.store.protocol import ENTRIES_A_READ
from radixkv.coordination.store.redis_connection import (
    Connection,
    is_wrong_type,
    require_master,
    translated,
)
from radixkv.errors import StoreUnavailable

SERVER_BLOCK_S = 1.0
_SWEEP_S = 0.005


@dataclass(slots=True)
class _UnderWay:
    """One XREAD that waits in the server, on its connection."""

    cursors: dict[str, str]
    node: Any
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

    def serves(self, node: Any, cursors: Mapping[str, str]) -> bool:
        """Whether its answer, from this server, covers all entries behind ``cursors``, and no other stream."""
        is_same = self.node is node and self.cursors.keys() == cursors.keys()
        return is_same and all(
            _position(self.cursors[key]) <= _position(cursor) for key, cursor in cursors.items()
        )

    def receive(self) -> Any:
        """Wait for the answer and return it. Raises what the client raises."""
        if self.failure is not None:
            raise self.failure
        answer = self.connection.read_response()
        if not answer:
            require_master(self.connection)
        return answer

    def _is_silent(self) -> bool:
        return time.monotonic() - self.sent_at > 2 * SERVER_BLOCK_S

    def end(self, *, is_broken: bool) -> None:
        """Give the connection back; close it if an answer could still come over it."""
        if is_broken:
            self.connection.disconnect()
        self.node.connection_pool.release(self.connection)


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
                node = self._connection.node(next(iter(streams)))
                if block_s == 0:
                    sent.append(self._send(node, streams, ()))
                elif not self._is_waiting(slot, node, streams):
                    self._waiting[slot] = self._send(node, streams, ("BLOCK", int(SERVER_BLOCK_S * 1000)))
            except StoreUnavailable as failure:
                failures.append(failure)
        if block_s == 0:
            return sent
        self._wait(block_s)
        ready = [slot for slot, reading in self._waiting.items() if reading.is_ready() or slot not in slots]
        return [self._waiting.pop(slot) for slot in ready]

    def _is_waiting(self, slot: int, node: Any, streams: Mapping[str, str]) -> bool:
        reading = self._waiting.get(slot)
        if reading is not None and not reading.serves(node, streams):
            self._waiting.pop(slot).end(is_broken=True)
            return False
        return reading is not None

    def _send(self, node: Any, cursors: Mapping[str, str], block: tuple[Any, ...]) -> _UnderWay:
        with self._connection.watched(node):
            connection = node.connection_pool.get_connection()
            reading = _UnderWay(dict(cursors), node, connection, time.monotonic())
            try:
                connection.send_command(
                    "XREAD", "COUNT", ENTRIES_A_READ, *block, "STREAMS", *cursors, *cursors.values()
                )
            except Exception:
                reading.end(is_broken=True)
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
        with self._connection.watched(reading.node):
            try:
                answer = reading.receive()
            except Exception as error:
                reading.end(is_broken=True)
                if is_wrong_type(error):
                    for key in reading.cursors:
                        self._connection.repair([key])
                raise
        reading.end(is_broken=False)
        return answer


def _position(cursor: str) -> tuple[int, int]:
    epoch, _, seq = cursor.partition("-")
    return int(epoch), int(seq)
