"""The client of an engine's control channel: see ``radixkv.engines.control.server`` for the commands.

with ControlClient("/run/radixkv/control.sock", KeySet.load("engine.keys")) as client:
    client.call("lookup", {"tenant": "acme", "model": fingerprint}, ids)
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from radixkv.engines.control.channel import Channel, peer_uid
from radixkv.errors import CommandRefused, ControlError
from radixkv.index.tokens import TokenIds, encode
from radixkv.signing import KeySet
from radixkv.uncopied import refuse_copies

__all__ = ["ControlClient"]

_CONNECT_S = 30.0
"""Seconds to connect. A flood of strangers can delay it by some seconds."""


class ControlClient:
    """One connection to one engine, for one thread. ``with`` closes it.

    - ``path``: of the socket.
    - ``keys``: with keys of the purpose ``control``. Any of them will do that the engine accepts too.
    - ``timeout_s``: most seconds to wait for an answer.

    Raises ControlError if the engine can't be reached, belongs to another user or doesn't prove the key.
    """

    def __init__(self, path: Path | str, keys: KeySet, *, timeout_s: float = 60.0) -> None:
        accepted = keys.accepted("control")
        self._timeout_s = timeout_s
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            until = time.monotonic() + _CONNECT_S
            _connect(self._connection, Path(path), until)
            if os.geteuid() != 0 and peer_uid(self._connection) not in (os.geteuid(), 0):
                raise ControlError(f"another user serves {path}")
            self._channel = Channel.connect(self._connection, accepted, until)
        except OSError as error:
            self._connection.close()
            raise ControlError(f"{path} can't be reached: {error.strerror or error}") from None
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. May be called again."""
        self._connection.close()

    def call(
        self, command: str, fields: Mapping[str, Any] | None = None, ids: TokenIds = b""
    ) -> dict[str, Any]:
        """Return the answer to a command. ``ids``: token ids in any form, at most 131,072.

        Raises CommandRefused with the engine's reason, ControlError if the connection fails; then make a new client.
        TokenError.
        """
        try:
            with suppress(BrokenPipeError):  # the engine may have said why, before it closed the connection
                self._channel.send({**(fields or {}), "command": command}, encode(ids))
            received = self._channel.receive(self._timeout_s)
        except OSError as error:
            raise ControlError(f"the engine doesn't answer: {error}") from None
        if received is None:
            raise ControlError("the engine closed the connection")
        document, _ = received
        answer = document.get("answer")
        if isinstance(answer, dict):
            return answer
        message, kind = f"the engine refuses the command: {document.get('error')}", document.get("kind")
        numbers = document.get("numbers")
        if isinstance(kind, str) and isinstance(numbers, dict):
            raise CommandRefused(
                message, kind, {name: each for name, each in numbers.items() if type(each) is int}
            )
        raise ControlError(message)

    def tenants(self) -> Iterator[dict[str, Any]]:
        """Yield the counts of each tenant, page by page. A tenant that comes or goes meanwhile may be left out."""
        after: int | None = 0
        while after is not None:
            page = self.call("tenants", {"after": after})
            yield from page["tenants"]
            after = page["next"]


refuse_copies(ControlClient, "it holds a socket. Make another")


def _connect(connection: socket.socket, path: Path, until: float) -> None:
    """Connect through the open directory, so that the path has no limit of length. Raises OSError, ControlError."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISSOCK(status.st_mode):
            raise ControlError(f"{path} is not a socket")
        connection.settimeout(_CONNECT_S)
        while True:
            try:
                return connection.connect(f"/proc/self/fd/{directory}/{path.name}")
            except BlockingIOError:  # as many wait as the engine lets wait
                if time.monotonic() >= until:
                    raise
                time.sleep(0.02)
    finally:
        os.close(directory)
