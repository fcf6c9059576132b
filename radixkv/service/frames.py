"""Messages between a service and its reading processes: byte strings, preceded by their lengths.

u64 size of the rest | u64 number of parts | u64 length of each | the parts, each padded to 8 bytes
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

HEAD = struct.Struct("<Q")
"""The first field of a message: the number of bytes that follow."""


def framed(parts: Sequence[bytes]) -> list[bytes]:
    """Return a message as byte strings to send one after the other; long parts aren't copied."""
    lengths = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
    out, size = [lengths], len(lengths)
    for part in parts:
        padding = -len(part) % 8
        out += [part, bytes(padding)]
        size += len(part) + padding
    return [HEAD.pack(size), *filter(None, out)]


def parts_of(message: bytearray) -> list[memoryview]:
    """Return the parts of a message without its first field. Nothing is copied."""
    view = memoryview(message)
    (num,) = HEAD.unpack_from(message)
    lengths = struct.unpack_from(f"<{num}Q", message, HEAD.size)
    at, parts = HEAD.size * (num + 1), []
    for length in lengths:
        parts.append(view[at : at + length])
        at += length + (-length % 8)
    return parts


def send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    """Send a message; blocks."""
    for each in framed(parts):
        connection.sendall(each)


def receive(connection: socket.socket) -> list[memoryview] | None:
    """Return the next message; None once the other end has closed. Blocks."""
    head = _exactly(connection, HEAD.size)
    if head is None:
        return None
    message = _exactly(connection, HEAD.unpack(head)[0])
    return None if message is None else parts_of(message)


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    found, at = bytearray(size), 0
    while at < size:
        num = connection.recv_into(memoryview(found)[at:])
        if not num:
            return None
        at += num
    return found
