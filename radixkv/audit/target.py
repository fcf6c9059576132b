"""A server under audit, seen by one tenant: OpenAI-compatible completions, streamed or whole. Needs httpx.

Nothing is sent anywhere but to the base URL that the user named: redirects aren't followed, proxies of the environment
aren't used. The time to the first token is the client's: from before the request is written to the first event
that carries text. A server that is busy (429, 503) is asked again after what it says, at most 10 s, and the
clock starts anew; how often that happened is counted and reported.
"""

from __future__ import annotations

from radixkv.extras import require

require("radixkv.audit.target", "audit")

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from radixkv.errors import ConfigError, RadixKVError

BUSY_RETRIES = 30
MAX_WAIT_S = 10.0
_PATHS = ("/v1/completions", "/v1/chat/completions")


class TargetError(RadixKVError):
    """The server under audit can't be reached, or doesn't answer as an OpenAI-compatible one does."""


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

    def __init__(
        self, url: str, key: str, *, model: str | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--url", url, "a base URL such as http://127.0.0.1:8400")
        self.url, self.num_retries = url.rstrip("/").removesuffix("/v1"), 0
        timeout = httpx.Timeout(120.0, connect=5.0)
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
        self._fields = dict(extra or {})
        self._path: str | None = None
        self._model = model

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def request(self, method: str, path: str, **named: Any) -> httpx.Response:
        """Any request, whatever the answer. Raises TargetError if there is none."""
        try:
            return self._http.request(method, path, **named)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def complete(self, prompt: str) -> Completion:
        """Compute a prompt and one token more. Raises TargetError."""
        document = self._json(self._asked(prompt, stream=False))
        usage = document.get("usage")
        counted = usage if isinstance(usage, dict) else {}
        details = counted.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Completion(
            str(document.get("id", "")),
            _count(counted.get("prompt_tokens")) or 0,
            _count(cached),
        )

    def matched_tokens(self, prompt: str) -> int:
        """Tokens of a prompt that a lookup finds; 0 too from servers that have none. Raises TargetError."""
        answer = self.request("POST", "/v1/lookup", json={"prompt": prompt, **self._fields})
        return (_count(self._json(answer).get("matched_tokens")) or 0) if answer.status_code == 200 else 0

    def first_token_s(self, prompt: str) -> float:
        """Seconds until the first token of a streamed completion. Raises TargetError."""
        path, body = self._endpoint(), self._body(prompt, stream=True)
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

    def _asked(self, prompt: str, *, stream: bool) -> httpx.Response:
        path, body = self._endpoint(), self._body(prompt, stream=stream)
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

    def _body(self, prompt: str, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "stream": stream, **self._fields}
        if self._model is not None:
            body["model"] = self._model
        if self._endpoint() == _PATHS[0]:
            return {**body, "prompt": prompt}
        return {**body, "messages": [{"role": "user", "content": prompt}]}

    def _endpoint(self) -> str:
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
        try:
            document = answer.json()
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
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


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _shortened(text: str) -> str:
    return " ".join(text.split())[:200]
