"""The control channel between two processes: a handshake that proves the key on both sides, then signed messages.

    client → server   RKC1, nonce (32), the ids of up to 4 keys that the client has (16 each, the rest zeros)
    server → client   RKC1, nonce (32), id of the key that both have (16), proof of the server (32)
    client → server   proof of the client (32)

    message           length of the head (4), length of the tail (4), MAC (32), head (JSON object), tail (bytes)

Proofs are MACs of all bytes before them, each side's with its own label. Messages are signed with a key of this
connection and this direction, and with their number. So a recorded handshake or message is useless, in the same
connection and in any other. Lengths are checked before anything of that length is read. Only fields of a fixed length
are read before a MAC was checked. Every read has a deadline for the whole of what is read.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from radixkv.errors import ControlError
from radixkv.signing import MAX_KEYS, key_id, mac
from radixkv.uncopied import refuse_copies

MAX_HEAD_BYTES: Final = 65_536
"""Most bytes of a message's head."""
MAX_REQUEST_BYTES: Final = 16_384
"""Most bytes of a request's head. Parsing them takes less than a millisecond, whatever they are."""
MAX_TAIL_BYTES: Final = 1 << 19
"""Most bytes of a message's tail: a key of 131,072 token ids."""
HANDSHAKE_S: Final = 1.0
"""Seconds for the whole handshake, once the server has accepted the connection."""
MESSAGE_S: Final = 5.0
"""Seconds for a message, from its first byte to its last."""

_MARK = b"RKC1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_ID_BYTES = 16
_HELLO_BYTES = len(_MARK) + _NONCE_BYTES + MAX_KEYS * _ID_BYTES
_ANSWER_BYTES = len(_MARK) + _NONCE_BYTES + _ID_BYTES + _MAC_BYTES
_LENGTHS = struct.Struct(">II")
_CREDENTIALS = struct.Struct("3i")
_TIME = struct.Struct("@ll")
_CHUNK_BYTES = 65_536


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process that made the other end of a Unix socket, as the kernel recorded it."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(content)[1])


class _Reader:
    """Reads whole pieces from a connection, and keeps what came with them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""

    def has_some(self, until: float) -> bool:
        """Wait for a byte. Returns False if the other side has closed the connection. Raises OSError."""
        if not self._rest:
            self._rest = _read_some(self._connection, until)
        return bool(self._rest)

    def read(self, size: int, until: float) -> bytes:
        """Return ``size`` bytes. Raises ControlError if the connection ends before, OSError."""
        pieces, missing = [self._rest], size - len(self._rest)
        while missing > 0:
            pieces.append(_read_some(self._connection, until))
            if not pieces[-1]:
                raise ControlError("the other side closed the connection")
            missing -= len(pieces[-1])
        content = b"".join(pieces)
        self._rest = content[size:]
        return content[:size]


class Channel:
    """One side of a connection after the handshake. One thread sends and receives, in turn."""

    def __init__(
        self, connection: socket.socket, reader: _Reader, key: bytes, sends: bytes, receives: bytes
    ) -> None:
        self._connection, self._reader, self._sends, self._receives = connection, reader, sends, receives
        self.key = key
        """The key that both sides have proven."""
        self._num_sent = self._num_received = 0

    @classmethod
    def accept(cls, connection: socket.socket, keys: Sequence[bytes]) -> Channel:
        """Prove and check the key as the server, which accepts ``keys``. Raises ControlError, OSError."""
        until = time.monotonic() + HANDSHAKE_S
        connection.settimeout(None)
        reader = _Reader(connection)
        hello = reader.read(_HELLO_BYTES, until)
        offered = hello[len(_MARK) + _NONCE_BYTES :]
        ids = {offered[at : at + _ID_BYTES] for at in range(0, len(offered), _ID_BYTES)}
        key = next((key for key in keys if key_id(key) in ids), None)
        if not hello.startswith(_MARK) or key is None:
            raise ControlError("the client has none of the accepted keys")
        answer = _MARK + secrets.token_bytes(_NONCE_BYTES) + key_id(key)
        proof = mac(key, "control server", hello, answer)
        _write(connection, answer + proof, until)
        found = reader.read(_MAC_BYTES, until)
        if not hmac.compare_digest(found, mac(key, "control client", hello, answer, proof)):
            raise ControlError("the client has not proven that it has the key")
        client, server = _session(key, hello, answer)
        return cls(connection, reader, key, sends=server, receives=client)

    @classmethod
    def connect(cls, connection: socket.socket, keys: Sequence[bytes], until: float) -> Channel:
        """Prove and check the key as the client, which accepts ``keys``. Raises ControlError, OSError.

        ``until``: the deadline, on ``time.monotonic``. The server may have to accept others first.
        """
        connection.settimeout(None)
        reader = _Reader(connection)
        ids = b"".join(key_id(key) for key in keys[:MAX_KEYS])
        hello = (_MARK + secrets.token_bytes(_NONCE_BYTES) + ids).ljust(_HELLO_BYTES, b"\0")
        _write(connection, hello, until)
        try:
            content = reader.read(_ANSWER_BYTES, until)
        except (ControlError, ConnectionError):
            raise ControlError("the engine closes the connection: it may have other keys") from None
        answer, proof = content[:-_MAC_BYTES], content[-_MAC_BYTES:]
        key = next((key for key in keys if key_id(key) == answer[-_ID_BYTES:]), None)
        if not answer.startswith(_MARK) or key is None:
            raise ControlError("the engine has none of these keys")
        if not hmac.compare_digest(proof, mac(key, "control server", hello, answer)):
            raise ControlError("the engine has not proven that it has the key")
        _write(connection, mac(key, "control client", hello, answer, proof), until)
        client, server = _session(key, hello, answer)
        return cls(connection, reader, key, sends=client, receives=server)

    def send(self, head: Mapping[str, Any], tail: bytes = b"") -> None:
        """Send a message. Raises ControlError if it is too long, OSError."""
        content = json.dumps(head, separators=(",", ":")).encode()
        if len(content) > MAX_HEAD_BYTES or len(tail) > MAX_TAIL_BYTES:
            raise _too_long(len(content), len(tail), MAX_HEAD_BYTES, MAX_TAIL_BYTES)
        proof = mac(self._sends, "message", self._num_sent, content, tail)
        self._num_sent += 1
        message = b"".join((_LENGTHS.pack(len(content), len(tail)), proof, content, tail))
        _write(self._connection, message, time.monotonic() + MESSAGE_S)

    def receive(
        self, idle_s: float, *, max_head: int = MAX_HEAD_BYTES, max_tail: int = 0
    ) -> tuple[dict[str, Any], bytes] | None:
        """Return the next message, or None if the other side has closed the connection between two messages.

        Waits ``idle_s`` for its first byte and MESSAGE_S for the rest. Raises ControlError, OSError.
        """
        if not self._reader.has_some(time.monotonic() + idle_s):
            return None
        until = time.monotonic() + MESSAGE_S
        start = self._reader.read(_LENGTHS.size + _MAC_BYTES, until)
        head_bytes, tail_bytes = _LENGTHS.unpack_from(start)
        if head_bytes > max_head or tail_bytes > max_tail:
            raise _too_long(head_bytes, tail_bytes, max_head, max_tail)
        content = self._reader.read(head_bytes + tail_bytes, until)
        head, tail = content[:head_bytes], content[head_bytes:]
        expected = mac(self._receives, "message", self._num_received, head, tail)
        if not hmac.compare_digest(start[_LENGTHS.size :], expected):
            raise ControlError("a message without the signature of this connection")
        self._num_received += 1
        try:
            document = json.loads(head)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise ControlError("a message that is not a JSON object")
        return document, tail


refuse_copies(Channel, "it holds a socket, and a copy would use its counters twice. Make another")


def _too_long(head: int, tail: int, max_head: int, max_tail: int) -> ControlError:
    allowed = f"at most {max_head:,} and {max_tail:,} bytes"
    return ControlError(f"a message of {head:,} bytes with {tail:,} bytes of ids; allowed: {allowed}")


def _session(key: bytes, hello: bytes, answer: bytes) -> tuple[bytes, bytes]:
    """Return the keys of one connection: the client's messages, the server's messages."""
    return mac(key, "control messages", "client", hello, answer), mac(
        key, "control messages", "server", hello, answer
    )


def _wait_at_most(connection: socket.socket, option: int, until: float) -> None:
    """Limit the next calls of ``recv`` or ``send``. Raises TimeoutError if the time is over.

    The kernel keeps the limit of a blocking socket. Python's own limit would release the interpreter's lock twice for
    each call, and each time the engine's thread and this one have to agree again who runs.
    """
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the other side is too slow")
    connection.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(*divmod(int(left_s * 1e6) + 1, 1_000_000)))


def _read_some(connection: socket.socket, until: float) -> bytes:
    _wait_at_most(connection, socket.SO_RCVTIMEO, until)
    try:
        return connection.recv(_CHUNK_BYTES)
    except BlockingIOError:
        raise TimeoutError("the other side sends too slowly") from None


def _write(connection: socket.socket, content: bytes, until: float) -> None:
    left = memoryview(content)
    while left:
        _wait_at_most(connection, socket.SO_SNDTIMEO, until)
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            raise TimeoutError("the other side reads too slowly") from None
