"""One streamed completion of vLLM's HTTP server, over a Unix socket. Nothing that the server sends is believed unread.

Reading never waits: ``take`` returns what is there. Every length is bounded before anything of it is parsed, ids are
checked against the vocabulary, and rows against what was asked for. Anything else raises ControlError, and so does an
answer that ends early.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import h11

from radixkv.errors import ControlError
from radixkv.events.event_settings import too_long
from radixkv.uncopied import refuse_copies

_SEND_S: Final = 30.0
"""Seconds to connect, and to send a request."""
_MAX_HEAD_BYTES: Final = 16_384
_MAX_EVENT_BYTES: Final = 65_536
_MAX_ID_BYTES: Final = 16
"""Most bytes of an id of the prompt, which the first event repeats."""
_MAX_ROW_BYTES: Final = 512
_CHUNK_BYTES: Final = 65_536
_MAX_REFUSAL_BYTES: Final = 16_384
_REASONS: Final = ("stop", "length")

Reason = Literal["stop", "length"]


class CompletionRefused(ControlError):
    """vLLM ends a request with an error: its HTTP ``status``, and its ``reason`` in at most 300 characters."""

    hint: ClassVar[str] = "Read the reason. vLLM gives none if its scheduler ends a request."

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(f"vLLM refuses a request: {status}, {reason}")


def fetched(path: Path, target: str, timeout_s: float = 5.0, max_bytes: int = 65_536) -> bytes:
    """Return the body of ``GET target``. Raises ControlError unless it is a 200 of at most ``max_bytes``."""
    connection, http = _connected(path, timeout_s)
    with connection:
        try:
            connection.sendall(_request(http, "GET", target, b""))
            body, status = bytearray(), 0
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(connection.recv(_CHUNK_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += event.data
                    if len(body) > max_bytes:
                        raise ControlError(f"{target} is longer than {max_bytes:,} bytes")
                elif isinstance(event, h11.EndOfMessage):
                    break
                elif not isinstance(event, h11.InformationalResponse):
                    raise ControlError(f"{target} ended early")
        except (OSError, h11.RemoteProtocolError) as error:
            raise ControlError(f"{target} can't be read: {error}") from None
    if status != 200:
        raise ControlError(f"{target} answers {status}")
    return bytes(body)


class CompletionStream:
    """One completion of one prompt, of ``num_rows`` rows with at most ``max_new_tokens`` each.

    ``body``: of the request; it must ask for a stream with ids and usage. Raises ControlError.
    """

    def __init__(
        self,
        path: Path,
        body: Mapping[str, Any],
        *,
        num_rows: int,
        num_prompt_tokens: int,
        max_new_tokens: int,
        vocab_size: int,
    ) -> None:
        self.reasons: list[Reason | None] = [None] * num_rows
        self.num_cached_tokens: int | None = None
        """Tokens that were found; None until the end."""
        self.is_over = False
        self._num_new = [0] * num_rows
        self._num_prompt, self._max_new, self._vocab_size = num_prompt_tokens, max_new_tokens, vocab_size
        self._max_event = _MAX_EVENT_BYTES + _MAX_ID_BYTES * num_prompt_tokens + _MAX_ROW_BYTES * num_rows
        self._left_events = 4 * num_rows * max_new_tokens + 64
        self._unread = bytearray()
        self._status = 0
        self._connection, self._http = _connected(path, _SEND_S)
        try:
            content = json.dumps(body, separators=(",", ":")).encode()
            self._connection.sendall(_request(self._http, "POST", "/v1/completions", content))
            self._connection.setblocking(False)
        except OSError as error:
            self.close()
            raise ControlError(f"vLLM takes no request: {error}") from None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._connection.fileno()

    def close(self) -> None:
        """End the connection. vLLM cancels what isn't over. May be called again."""
        self._connection.close()

    def take(self) -> list[tuple[int, list[int]]]:
        """Return the new ids that are there, by row. Raises ControlError."""
        try:
            received = self._connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ControlError(f"vLLM's answer ended: {error}") from None
        found: list[tuple[int, list[int]]] = []
        try:
            self._http.receive_data(received)
            while not self.is_over:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    break
                self._read(event, found)
        except h11.RemoteProtocolError as error:
            raise ControlError(f"vLLM's answer is not HTTP: {error}") from None
        return found

    def _read(self, event: Any, found: list[tuple[int, list[int]]]) -> None:
        if isinstance(event, h11.InformationalResponse):
            return
        if isinstance(event, h11.Response):
            self._status = event.status_code
        elif self._status != 200 and isinstance(event, h11.Data | h11.EndOfMessage):
            self._unread += event.data if isinstance(event, h11.Data) else b""
            if isinstance(event, h11.EndOfMessage) or len(self._unread) > _MAX_REFUSAL_BYTES:
                raise _refusal(self._status, _document(bytes(self._unread[:_MAX_REFUSAL_BYTES])))
        elif isinstance(event, h11.Data):
            self._unread += event.data
            while not self.is_over and (end := self._unread.find(b"\n\n")) >= 0:
                if end > self._max_event:
                    break
                line = bytes(self._unread[:end])
                del self._unread[: end + 2]
                self._take_event(line, found)
            if len(self._unread) > self._max_event:
                raise ControlError(f"an event of vLLM has more than {self._max_event:,} bytes")
        else:
            raise ControlError("vLLM's answer ended early")

    def _take_event(self, line: bytes, found: list[tuple[int, list[int]]]) -> None:
        self._left_events -= 1
        if self._left_events < 0:
            raise ControlError("vLLM sends more events than tokens")
        if not line.startswith(b"data: "):
            raise ControlError("an event of vLLM has no data")
        if line == b"data: [DONE]":
            self._end()
            return
        document = _document(line[len(b"data: ") :])
        if document is None:
            raise ControlError("an event of vLLM is not a JSON object")
        if "error" in document:
            raise _refusal(500, document)
        choices, usage = document.get("choices"), document.get("usage")
        if not isinstance(choices, list) or len(choices) > len(self.reasons):
            raise ControlError("an event of vLLM has no choices")
        for choice in choices:
            if new := self._take_choice(choice):
                found.append(new)
        if usage is not None and not choices:
            self._take_usage(usage)

    def _take_choice(self, choice: Any) -> tuple[int, list[int]] | None:
        row = choice.get("index") if isinstance(choice, dict) else None
        if type(row) is not int or not 0 <= row < len(self.reasons) or self.reasons[row] is not None:
            raise ControlError("a choice of vLLM is not one of the rows that go on")
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        ids = [] if ids is None else ids
        is_right = isinstance(ids, list) and len(ids) <= self._max_new - self._num_new[row]
        if not is_right or any(type(each) is not int or not 0 <= each < self._vocab_size for each in ids):
            raise ControlError("ids of vLLM are not those of a row")
        if reason is not None:
            if reason not in _REASONS:
                raise ControlError("vLLM ends a row for another reason than its length or its end")
            self.reasons[row] = reason
        self._num_new[row] += len(ids)
        return (row, ids) if ids else None

    def _take_usage(self, usage: Any) -> None:
        found = usage if isinstance(usage, dict) else {}
        details = found.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        cached = 0 if cached is None else cached
        if found.get("prompt_tokens") != self._num_prompt:
            raise ControlError("vLLM counts another prompt")
        if type(cached) is not int or not 0 <= cached <= self._num_prompt:
            raise ControlError("vLLM counts cached tokens that the prompt doesn't have")
        self.num_cached_tokens = cached

    def _end(self) -> None:
        if None in self.reasons or self.num_cached_tokens is None:
            raise ControlError("vLLM's answer ended early")
        self.is_over = True


refuse_copies(CompletionStream, "it holds a socket. Pass it on")


def _document(content: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _refusal(status: int, document: dict[str, Any] | None) -> CompletionRefused:
    """Return vLLM's error. One inside a stream has its own status."""
    error = None if document is None else document.get("error")
    told = error if isinstance(error, dict) else {}
    code, message = told.get("code"), told.get("message")
    if type(code) is int and 400 <= code < 600:
        status = code
    text = message if isinstance(message, str) else "without a reason"
    return CompletionRefused(status, "".join(each if each.isprintable() else " " for each in text[:300]))


def _connected(path: Path, timeout_s: float) -> tuple[socket.socket, h11.Connection]:
    if (problem := too_long(path)) is not None:
        raise ControlError(f"vLLM's socket {problem}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise ControlError(f"vLLM can't be reached: {error}") from None
    return connection, h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)


def _request(http: h11.Connection, method: str, target: str, body: bytes) -> bytes:
    headers = [
        ("Host", "vllm"),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
    ]
    parts = (h11.Request(method=method, target=target, headers=headers), h11.Data(body), h11.EndOfMessage())
    return b"".join(sent for each in parts if (sent := http.send(each)))
