"""A server under audit, as one tenant sees it: OpenAI-compatible completions, streamed or whole. Needs httpx.

Requests go only to the base URL that the user named: redirects aren't followed, and proxies of the environment
aren't used. The client measures the time to the first token: from before the request is written to the first event
with text. If the server is busy (429, 503), the client waits for ``Retry-After``, at most 10 s, and asks again. The
clock then restarts. These retries are counted and reported. Every request asks the audit's ``Limit`` first.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.audit.target", "audit")

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from radixkv.audit.limit import Limit
from radixkv.errors import ConfigError, RadixKVError

BUSY_RETRIES = 30
MAX_WAIT_S = 10.0
ANSWER_S = 120.0
"""How long the audit waits for an answer. It doesn't wait beyond its own limit."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_PATHS = (COMPLETIONS, CHAT)
_CACHED_NAMES = ("cached_tokens", "num_cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens")


class TargetError(RadixKVError):
    """The server under audit can't be reached, or doesn't answer like an OpenAI-compatible server."""

    hint: ClassVar[str] = "Check --url, --key and --model, and that the server is up."


SALT_FIELD = "cache_salt"
"""The field in which engines take a salt: requests with other salts share no cache (vLLM, SGLang)."""


@dataclass(frozen=True, slots=True)
class Principal:
    """One side of an audit: its key, and the ``fields`` that every JSON body of its requests carries."""

    key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def salted(cls, salt: str, key: str | None = None) -> Principal:
        """Return a side that differs from the other by its salt, for engines without keys of tenants."""
        return cls(key, {SALT_FIELD: salt})

    @property
    def salt(self) -> str | None:
        """The salt in its requests; None if it has none."""
        found = self.fields.get(SALT_FIELD)
        return found if isinstance(found, str) else None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its requests: the authorization, if it has a key."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer. ``text`` is the whole body; for a stream, all its events."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def is_ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The JSON object of the body, or the JSON objects of a stream's events. Anything else is left out."""
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
        """The last usage in the reply; empty if there is none."""
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
    """Facts of a completion: its id, prompt tokens, and cached tokens (None: the server doesn't say)."""

    id: str
    prompt_tokens: int
    cached_tokens: int | None


_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of ``http`` URLs. httpx would load all certificate authorities for each client: 20 ms of CPU."""


class Target:
    """One tenant's view of a server. ``model`` None: the first model of ``/v1/models``, or none if it lists none.

    ``with`` closes it. Raises ConfigError for an invalid URL. Its methods raise TargetError, and Stopped where
    ``limit`` ends.
    """

    def __init__(
        self, url: str, principal: Principal | str, *, model: str | None = None, limit: Limit | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--url", url, "a base URL such as http://127.0.0.1:8400")
        self.url, self.num_retries = url.rstrip("/").removesuffix("/v1"), 0
        self.limit = limit or Limit()
        self.principal = Principal(principal) if isinstance(principal, str) else principal
        timeout = httpx.Timeout(ANSWER_S, connect=5.0)
        headers = self.principal.headers
        verify = parts.scheme == "https" or _NO_TLS
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=False, verify=verify
        )
        self._path: str | None = None
        self._model = model
        self.on_exchange: Callable[[httpx.Response], None] | None = None
        """Called with each answer, except those of ``open_stream`` and ``first_token_s``."""

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def request(self, method: str, path: str, **named: Any) -> httpx.Response:
        """Send any request and return the answer, whatever its status. Raises TargetError if there is no answer."""
        with self._answering():
            answer = self._http.request(method, path, **named)
        if self.on_exchange is not None:
            self.on_exchange(answer)
        return answer

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None, **named: Any) -> Reply:
        """Send a request with the principal's fields, again while the server is busy. Raises TargetError."""
        if body is not None:
            named["json"] = {**body, **self.principal.fields}
        for _ in range(BUSY_RETRIES):
            answer = self.request(method, path, **named)
            if answer.status_code not in (429, 503) or "Retry-After" not in answer.headers:
                return Reply(answer.status_code, answer.headers, answer.text)
            self._wait(answer)
        raise self._busy(answer.status_code)

    def complete(self, prompt: str) -> Completion:
        """Compute a prompt and one more token. Raises TargetError."""
        answer = self._asked(prompt)
        self._json(answer)
        reply = Reply(answer.status_code, answer.headers, answer.text)
        return Completion(str(reply.document.get("id", "")), reply.prompt_tokens, reply.cached_tokens)

    @contextmanager
    def open_stream(self, body: Mapping[str, Any]) -> Iterator[None]:
        """A streamed completion that has begun; it is read when the ``with`` ends. Raises TargetError."""
        with self._answering(), self._http.stream("POST", self.endpoint(), json=dict(body)) as answer:
            yield
            answer.read()

    @contextmanager
    def cleaning(self) -> Iterator[None]:
        """Within it, what a check made is removed, also after its end. A request that fails ends the ``with``."""
        with suppress(TargetError), self.limit.cleaning():
            yield

    def pause(self, seconds: float) -> None:
        """Wait. Raises Stopped."""
        with self.limit.waiting():
            time.sleep(max(min(seconds, self.limit.left_s), 0.0))

    def first_token_s(self, prompt: str) -> float:
        """Return the seconds until the first token of a streamed completion. Raises TargetError."""
        path, body = self.endpoint(), self.body(prompt, stream=True)
        for _ in range(BUSY_RETRIES):
            with self._answering():
                began = time.perf_counter()
                with self._http.stream("POST", path, json=body) as answer:
                    if answer.status_code == 200:
                        return self._until_text(answer, began)
                    answer.read()
            self._wait(answer)
        raise self._busy(answer.status_code)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Within it, a request is sent and answered. Raises TargetError if it isn't, and Stopped."""
        try:
            with self.limit.waiting():
                self._http.timeout = httpx.Timeout(min(ANSWER_S, self.limit.left_s), connect=5.0)
                yield
        except httpx.HTTPError as error:
            self.limit.check()
            raise TargetError(f"{self.url} can't be reached: {error or type(error).__name__}") from None

    def _busy(self, status: int) -> TargetError:
        return TargetError(f"{self.url} stayed busy: it answered {status} {BUSY_RETRIES} times")

    def _until_text(self, answer: httpx.Response, began: float) -> float:
        found = None
        for line in answer.iter_lines():
            self.limit.check()
            if found is None and line.startswith("data:") and _has_choice(line[5:]):
                found = time.perf_counter() - began
        if found is None:
            kind = answer.headers.get("content-type", "an answer without a type")
            if not kind.startswith("text/event-stream"):
                raise TargetError(f"{self.url} doesn't stream: asked for a stream, it sent {kind}")
            raise TargetError(f"{self.url} ended a stream without a token")
        return found

    def _asked(self, prompt: str) -> httpx.Response:
        path, body = self.endpoint(), self.body(prompt)
        for _ in range(BUSY_RETRIES):
            answer = self.request("POST", path, json=body)
            if answer.status_code == 200:
                return answer
            self._wait(answer)
        raise self._busy(answer.status_code)

    def _wait(self, answer: httpx.Response) -> None:
        if answer.status_code not in (429, 503):
            raise TargetError(f"{self.url} answered {answer.status_code}: {_shortened(answer.text)}")
        self.num_retries += 1
        self.pause(_seconds(answer.headers.get("Retry-After")))

    def body(self, prompt: str, *, stream: bool = False) -> dict[str, Any]:
        """Return the body of a completion of one token."""
        body = {**self.options(), "stream": stream}
        if self.endpoint() == COMPLETIONS:
            return {**body, "prompt": prompt}
        return {**body, "messages": [{"role": "user", "content": prompt}]}

    @property
    def model(self) -> str | None:
        """The model that requests name, if there is one and it is known already."""
        return self._model

    def options(self) -> dict[str, Any]:
        """Fields of every completion's body: one token, greedy, the principal's fields, and the model if known."""
        self.endpoint()
        named = {} if self._model is None else {"model": self._model}
        return {"max_tokens": 1, "temperature": 0, **self.principal.fields, **named}

    def endpoint(self) -> str:
        """Return the path of completions. The first call finds it, and the model if none was given."""
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
            raise TargetError(f"{self.url} answered, but not with a JSON object")
        return document


BUSY = (429, 502, 503, 504)
"""Statuses of a server that is busy, or that a proxy doesn't reach: they say nothing about the request."""


def answered(reply: Reply) -> Reply:
    """Return a reply of a server that isn't busy. Raises TargetError."""
    if reply.status in BUSY:
        raise TargetError(f"the server answered {reply.reason}")
    return reply


def granted(reply: Reply) -> Reply:
    """Return a reply with a status of 2xx. Raises TargetError."""
    if not reply.is_ok:
        raise TargetError(f"the server answered {reply.reason}")
    return reply


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
    """Return the seconds that a busy server asks to wait: 1 if it doesn't say, and never more than MAX_WAIT_S."""
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
    """Return the cached tokens of a usage, under the names that servers use for them."""
    details = usage.get("prompt_tokens_details")
    for place in (details if isinstance(details, dict) else {}, usage):
        for name in _CACHED_NAMES:
            found = count(place.get(name))
            if found is not None:
                return found
    return None


def count(value: object) -> int | None:
    """Return a JSON value as a count; None if it is no integer ≥ 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _shortened(text: str) -> str:
    return " ".join(text.split())[:200]
