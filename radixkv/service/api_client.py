"""The command line's HTTP client of a running service, and its reader of prompt files.

A file is one prompt, its text. A ``.jsonl`` file has one prompt a line: a JSON string, or an object with one of
``prompt``, ``messages`` and ``token_ids``, and optionally ``salt`` and ``adapter``.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import httpx

from radixkv.errors import ArgumentError, ConfigError, RadixKVError
from radixkv.service.auth import DEMO_KEYS, DEMO_OPERATOR_KEY, is_key
from radixkv.uncopied import refuse_copies

_JSON = {"Content-Type": "application/json"}
_POLL_S = 0.05
_CONNECT_S = 5.0
_BUSY_RETRIES = 30
MAX_WAIT_S = 10.0
_PROMPT_FIELDS = frozenset({"prompt", "messages", "token_ids", "salt", "adapter"})

Document = dict[str, Any]


class ServiceError(RadixKVError):
    """The service can't be reached, or refused the request; one line with the reason."""

    hint: ClassVar[str] = "Check --url and --key, and that the service is up."


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt, as fields of a request, and its place in the files."""

    name: str
    fields: Document


class Client:
    """Requests to one service with one key. ``with`` closes it."""

    def __init__(self, url: str, key: str | None, *, as_operator: bool = False) -> None:
        try:
            parts = httpx.URL(url)
        except (TypeError, httpx.InvalidURL):
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError("--url", url, "a base URL such as http://127.0.0.1:8400")
        is_local = parts.host in ("127.0.0.1", "localhost", "::1")
        if key is None and is_local:
            key = DEMO_OPERATOR_KEY if as_operator else next(iter(DEMO_KEYS.values()))
        if key is None:
            raise ConfigError("--key", None, "a key of that service")
        if not isinstance(key, str) or not is_key(key):
            raise ConfigError("--key", "…", "1 to 512 visible ASCII characters without spaces")
        headers = {"Authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=timeout,
            trust_env=not is_local,
            verify=ssl.create_default_context(),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Document:
        """Return the JSON answer to a request, empty if there is none; retries while the service is busy.

        Raises ServiceError, and ArgumentError for a body that can't be written as JSON.
        """
        for _ in range(_BUSY_RETRIES):
            answer = self._send(method, path, body)
            if answer.status_code not in (429, 503):
                break
            time.sleep(_pause_s(answer.headers.get("Retry-After")))
        document = {} if answer.status_code == 204 else _json(answer)
        if answer.is_error or document is None:
            raise ServiceError(_complaint(self._http.base_url, answer, document))
        return document

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        try:
            content = None if body is None else json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError):
            raise ArgumentError("body", body, "values that JSON can represent") from None
        try:
            return self._http.request(method, path, content=content, headers=_JSON if content else None)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            reason = str(error) or type(error).__name__
            raise ServiceError(f"{self._http.base_url} can't be reached: {reason}") from None

    def warm(self, fields: Mapping[str, Any], on_progress: Callable[[float], None]) -> Document:
        """Warm in the background and follow the job. ``on_progress`` gets the share that is done."""
        job = self.call("POST", "/v1/warm", {**fields, "wait": False})["job"]
        while True:
            status = self.call("GET", f"/v1/warm/{job}")
            total = status["progress"]["total"]
            if status["state"] == "done":
                on_progress(1.0)
                return dict(status["result"])
            if status["state"] == "failed":
                raise ServiceError(f"the warm failed: {status['error']['message']}")
            on_progress(status["progress"]["computed"] / total if total else 1.0)
            time.sleep(_POLL_S)


refuse_copies(Client, "it holds connections. Make another")


def _pause_s(retry_after: str | None) -> float:
    """Return the seconds to wait for a busy service: as it says, at most MAX_WAIT_S; 1 if it gives no number."""
    is_number = retry_after is not None and retry_after.isascii() and retry_after.isdecimal()
    return min(float(retry_after or 1), MAX_WAIT_S) if is_number else 1.0


def _json(answer: httpx.Response) -> Document | None:
    try:
        document = answer.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _complaint(url: httpx.URL, answer: httpx.Response, document: Document | None) -> str:
    error = (document or {}).get("error")
    if not isinstance(error, dict):
        return f"{url} answered {answer.status_code}, but it isn't a radixkv service"
    allowed = f"; allowed: {error['allowed']}" if error.get("allowed") else ""
    return f"{url} answered {answer.status_code}: {error.get('message')}{allowed}"


def sources(files: Sequence[str]) -> list[Source]:
    """Return all prompts of the files, in order. Raises ConfigError with file and line."""
    return [source for name in files for source in _of_file(Path(name))]


def _of_file(path: Path) -> Iterator[Source]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its text isn't UTF-8"
        raise ConfigError("FILE", str(path), f"a file of UTF-8 text that can be read ({reason})") from None
    if path.suffix != ".jsonl":
        if not text:
            raise ConfigError("FILE", str(path), "a file that isn't empty")
        yield Source(str(path), {"prompt": text})
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Source(f"{path}:{number}", _of_line(line, f"{path}:{number}"))


def _of_line(line: str, place: str) -> Document:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError("FILE", place, "a line of JSON") from None
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, dict) or not set(value) <= _PROMPT_FIELDS:
        fields = ", ".join(sorted(_PROMPT_FIELDS))
        raise ConfigError("FILE", place, f"a JSON string, or an object with fields of {fields}")
    return value
