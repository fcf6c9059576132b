"""A server under audit, seen by one tenant: OpenAI-compatible completions, streamed or whole. Needs httpx.

Nothing is sent anywhere but to the base URL that the user named: redirects aren't followed, proxies of the environment
aren't used. The time to the first token is the client's: from before the request is written to the first event
that carries text. A server that is busy (429, 503) is asked again after what it says, at most 10 s, and the
clock starts anew; how often that happened is counted and reported.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.audit.target", "audit")

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from radixkv.errors import ConfigError, RadixKVError

BUSY_RETRIES = 30
MAX_WAIT_S = 10.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_PATHS = (COMPLETIONS, CHAT)
_CACHED_NAMES = ("cached_tokens", "num_cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens")


class TargetError(RadixKVError):
    """The server under audit can't be reached, or doesn't answer as an OpenAI-compatible one does."""


@dataclass(frozen=True, slots=True)
class Principal:
    """One side of an audit: what all its requests carry. ``fields`` are added to every JSON body."""

    key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its requests."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came: ``text`` is the whole body, of a stream all its events."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def is_ok(self) -> bool:
        """Whether the status is one of success."""
        return 200 <= self.status < 300

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The JSON object of the body, or those of the events of a stream. Anything else is left out."""
        whole = _object(self.text)
        if whole is not None:
            return [whole]
        lines = (line[5:] for line in self.text.splitlines() if line.startswith("data:"))
        return [found for found in map(_object, lines) if found is not None]

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object of the body; empty if there is none."""
        return _object(self.text) or {}

    @property
    def usage(self) -> dict[str, Any]:
        """The last usage that was told; empty if there is none."""
        told = [each["usage"] for each in self.documents if isinstance(each.get("usage"), dict)]
        return told[-1] if told else {}

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 if the server doesn't say."""
        return count(self.usage.get("prompt_tokens")) or 0

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were cached; None if the server doesn't say."""
        return _cached(self.usage)

    @property
    def reason(self) -> str:
        """Status and body in a line, for a message."""
        return f"{self.status}: {_shortened(self.text)}"


@dataclass(frozen=True, slots=True)
class Completion:
    """What a completion told: its id, prompt tokens, and how many were cached (None: the server doesn't say)."""

    id: str
    prompt_tokens: int
    cached_tokens: int | None


class Target:
    """One tenant's view of a server. ``model`` None: what ``/v1/models`` lists first, or nothing at all.

    ``with`` closes it. Raises ConfigError for a URL that is none, TargetError later.
    """

    def __init__(self, url: str, principal: Principal | str, *, model: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--url", url, "a base URL such as http://127.0.0.1:8400")
        self.url, self.num_retries = url.rstrip("/").removesuffix("/v1"), 0
        self.principal = Principal(principal) if isinstance(principal, str) else principal
        timeout = httpx.Timeout(120.0, connect=5.0)
        headers = self.principal.headers
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
        self._path: str | None = None
        self._model = model
        self.on_exchange: Callable[[httpx.Response], None] | None = None
        """Is told each answer but those of timed streams."""

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def request(self, method: str, path: str, **named: Any) -> httpx.Response:
        """Any request, whatever the answer. Raises TargetError if there is none."""
        try:
            answer = self._http.request(method, path, **named)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if self.on_exchange is not None:
            self.on_exchange(answer)
        return answer

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None, **named: Any) -> Reply:
        """A request with the principal's fields, asked again while the server is busy. Raises TargetError."""
        if body is not None:
            named["json"] = {**body, **self.principal.fields}
        for _ in range(BUSY_RETRIES):
            answer = self.request(method, path, **named)
            if answer.status_code not in (429, 503) or "Retry-After" not in answer.headers:
                return Reply(answer.status_code, answer.headers, answer.text)
            self._wait(answer)
        raise TargetError(f"{self.url} stayed busy")

    def complete(self, prompt: str) -> Completion:
        """Compute a prompt and one token more. Raises TargetError."""
        answer = self._asked(prompt)
        self._json(answer)
        reply = Reply(answer.status_code, answer.headers, answer.text)
        return Completion(str(reply.document.get("id", "")), reply.prompt_tokens, reply.cached_tokens)

    @contextmanager
    def open_stream(self, body: Mapping[str, Any]) -> Iterator[None]:
        """A streamed completion that has begun and isn't read until the ``with`` ends. Raises TargetError."""
        try:
            with self._http.stream("POST", self.endpoint(), json=dict(body)) as answer:
                yield
                answer.read()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def pause(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def first_token_s(self, prompt: str) -> float:
        """Seconds until the first token of a streamed completion. Raises TargetError."""
        path, body = self.endpoint(), self.body(prompt, stream=True)
        for _ in range(BUSY_RETRIES):
            try:
                began = time.perf_counter()
                with self._http.stream("POST", path, json=body) as answer:
                    if answer.status_code == 200:
                        return self._until_text(answer, began)
                    answer.read()
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None
            self._wait(answer)
        raise TargetError(f"{self.url} stayed busy")

    def _until_text(self, answer: httpx.Response, began: float) -> float:
        found = None
        for line in answer.iter_lines():
            if found is None and line.startswith("data:") and _has_choice(line[5:]):
                found = time.perf_counter() - began
        if found is None:
            raise TargetError(f"{self.url} ended a stream without a token")
        return found

    def _asked(self, prompt: str) -> httpx.Response:
        path, body = self.endpoint(), self.body(prompt)
        for _ in range(BUSY_RETRIES):
            answer = self.request("POST", path, json=body)
            if answer.status_code == 200:
                return answer
            self._wait(answer)
        raise TargetError(f"{self.url} stayed busy")

    def _wait(self, answer: httpx.Response) -> None:
        if answer.status_code not in (429, 503):
            raise TargetError(f"{self.url} answered {answer.status_code}: {_shortened(answer.text)}")
        self.num_retries += 1
        time.sleep(_seconds(answer.headers.get("Retry-After")))

    def body(self, prompt: str, *, stream: bool = False) -> dict[str, Any]:
        """The body of a completion of one token."""
        body = {**self.options(), "stream": stream}
        if self.endpoint() == COMPLETIONS:
            return {**body, "prompt": prompt}
        return {**body, "messages": [{"role": "user", "content": prompt}]}

    @property
    def model(self) -> str | None:
        """The model that requests name, once it is known."""
        return self._model

    def options(self) -> dict[str, Any]:
        """What the body of every completion begins with: one token, greedy, and the model if one has to be named."""
        self.endpoint()
        named = {} if self._model is None else {"model": self._model}
        return {"max_tokens": 1, "temperature": 0, **self.principal.fields, **named}

    def endpoint(self) -> str:
        """Where completions are asked for: found at the first call, with the model if the server wants one named."""
        if self._path is None:
            if self._model is None:
                self._model = self._first_model()
            probes = [(path, self.request("POST", path, json={}).status_code) for path in _PATHS]
            known = [path for path, status in probes if status not in (404, 405)]
            if not known:
                raise TargetError(f"{self.url} has neither {_PATHS[0]} nor {_PATHS[1]}")
            self._path = known[0]
        return self._path

    def _first_model(self) -> str | None:
        answer = self.request("GET", "/v1/models")
        if answer.status_code != 200:
            return None
        listed = self._json(answer).get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        name = first.get("id") if isinstance(first, dict) else None
        return name if isinstance(name, str) else None

    def _json(self, answer: httpx.Response) -> dict[str, Any]:
        document = _object(answer.text)
        if document is None:
            raise TargetError(f"{self.url} answered something else than a JSON object")
        return document

    def _unreachable(self, error: Exception) -> TargetError:
        return TargetError(f"{self.url} can't be reached: {error or type(error).__name__}")


def _has_choice(data: str) -> bool:
    """Whether an event carries a token: a choice with text, or with a delta that has content or a finish reason."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    choices = document.get("choices") if isinstance(document, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict):
        return False
    delta = first.get("delta")
    told = delta if isinstance(delta, dict) else first
    return bool(told.get("text") or told.get("content") or first.get("finish_reason"))


def _seconds(retry_after: str | None) -> float:
    """How long a busy server asks to wait: a second if it doesn't say, and never more than MAX_WAIT_S."""
    try:
        asked = float(retry_after or 1)
    except ValueError:
        return 1.0
    return min(asked, MAX_WAIT_S) if asked >= 0 else 1.0


def _object(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _cached(usage: Mapping[str, Any]) -> int | None:
    """What a usage says was cached, by the names that servers have for it."""
    details = usage.get("prompt_tokens_details")
    for place in (details if isinstance(details, dict) else {}, usage):
        for name in _CACHED_NAMES:
            found = count(place.get(name))
            if found is not None:
                return found
    return None


def count(value: object) -> int | None:
    """A number of things, as JSON told it; None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _shortened(text: str) -> str:
    return " ".join(text.split())[:200]
