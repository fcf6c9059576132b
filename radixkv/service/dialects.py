"""The forms of errors: radixkv's own, and those of the providers whose APIs the service speaks.

Only the form differs. An ``ApiError`` says what was wrong; a dialect writes it with the provider's names and statuses.
Each answer of a provider's endpoint has the request's id in the provider's header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from starlette.responses import Response

from radixkv.service.limits import Rate
from radixkv.service.problems import ApiError, Json
from radixkv.service.schemas.errors import (
    AnthropicErrorReply,
    CompletionErrorReply,
    ErrorReply,
    GoogleErrorReply,
    OpenAIErrorReply,
)

Written = tuple[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How errors are written.

    - ``write``: returns status and body of an error; it gets the request's id too.
    - ``reply``: the model of the bodies.
    - ``id_header``: the header with the request's id; None: there is none.
    - ``rate_headers``: returns the headers about the tenant's rate limit, if the provider has such.
    """

    write: Callable[[ApiError, str], Written]
    reply: type[BaseModel] = ErrorReply
    id_header: str | None = None
    rate_headers: Callable[[Rate], Mapping[str, str]] | None = None

    def status(self, status: int) -> int:
        """Return the status that stands for a status of radixkv's own form."""
        return self.write(ApiError(status, "internal", ""), "")[0]

    def answer(self, error: ApiError, request_id: str) -> Response:
        """Return the answer to an error."""
        status, body = self.write(error, request_id)
        response = Json(body, status, error.headers)
        if self.id_header is not None:
            response.headers.setdefault(self.id_header, request_id)
        return response


_ANSWER_FIELDS: Final = frozenset({"max_tokens", "max_output_tokens", "maxOutputTokens"})


def _message(error: ApiError, prompt: str, answer: str) -> str:
    """Return the message. What is too long begins with the provider's own words for it: clients look for them, to
    shorten the chat or the answer and try again."""
    message = str(error.body["message"])
    if not error.is_too_long:
        return message
    return f"{answer if error.body['field'] in _ANSWER_FIELDS else prompt}: {message}"


def _own(error: ApiError, request_id: str) -> Written:
    return error.status, {"error": error.body}


_OPENAI_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_OPENAI_CODES: Mapping[str, str] = {
    "unauthorized": "invalid_api_key",
    "busy": "rate_limit_exceeded",
    "rate_limited": "rate_limit_exceeded",
}


def _openai(error: ApiError, request_id: str) -> Written:
    status = 400 if error.status == 422 else error.status
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    too_long = "This model's maximum context length is exceeded"
    return status, {
        "error": {
            "message": _message(error, too_long, too_long),
            "type": kind,
            "param": error.body["field"],
            "code": _openai_code(error),
        }
    }


def _completion(error: ApiError, request_id: str) -> Written:
    """Return OpenAI's form with the facts of radixkv's own beside it: clients read both."""
    status, body = _openai(error, request_id)
    facts = {name: error.body[name] for name in ("field", "value", "allowed", "docs_url")}
    return status, {"error": body["error"] | facts}


def _openai_code(error: ApiError) -> str:
    if error.is_too_long:
        return "context_length_exceeded"
    if error.status == 404 and error.body["field"] == "model":
        return "model_not_found"
    return _OPENAI_CODES.get(error.type, error.type)


_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


_THREAD: Final = "thread"
"""The field that continues a stored message. Anthropic's client goes on without it if the error's details say so."""


def _anthropic(error: ApiError, request_id: str) -> Written:
    status = {422: 400, 503: 529}.get(error.status, error.status)
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    answer = "input length and `max_tokens` exceed context limit"
    described: dict[str, Any] = {"type": kind, "message": _message(error, "prompt is too long", answer)}
    if error.body["field"] == _THREAD:
        described["details"] = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
    return status, {"type": "error", "error": described, "request_id": request_id}


_GOOGLE_STATUSES: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_GOOGLE_EXHAUSTED = frozenset({"pin_budget_exceeded", "pin_limit_exceeded"})


def _google(error: ApiError, request_id: str) -> Written:
    status = 429 if error.type in _GOOGLE_EXHAUSTED else {422: 400}.get(error.status, error.status)
    too_long = "The input token count exceeds the maximum number of tokens allowed"
    message, field = _message(error, too_long, too_long), error.body["field"]
    described: dict[str, Any] = {
        "code": status,
        "message": message,
        "status": _GOOGLE_STATUSES.get(status, "INVALID_ARGUMENT"),
        "details": [],
    }
    if field is not None:
        violation = {"field": field, "description": message}
        kind = "type.googleapis.com/google.rpc.BadRequest"
        described["details"] = [{"@type": kind, "fieldViolations": [violation]}]
    return status, {"error": described}


OWN = Dialect(_own)
"""radixkv's form: see ``problems``."""


def _openai_rate(rate: Rate) -> Mapping[str, str]:
    return {
        "x-ratelimit-limit-requests": str(rate.burst),
        "x-ratelimit-remaining-requests": str(rate.left),
        "x-ratelimit-reset-requests": f"{rate.reset_s:.3f}s",
    }


OPENAI = Dialect(_openai, OpenAIErrorReply, "x-request-id", _openai_rate)
"""OpenAI's: ``error`` with ``message``, ``type``, ``param`` and ``code``. A body that can't be
served has status 400. Its answers say what the tenant's rate leaves."""

OPENAI_COMPLETION = Dialect(_completion, CompletionErrorReply, "x-request-id", _openai_rate)
"""OpenAI's, with ``field``, ``value``, ``allowed`` and ``docs_url`` of radixkv's own form beside it."""

ANTHROPIC = Dialect(_anthropic, AnthropicErrorReply, "request-id")
"""Anthropic's: ``type``, ``error`` with ``type`` and ``message``, and ``request_id``. What is 422 and 503 in radixkv's
form is 400 and 529."""

GOOGLE = Dialect(_google, GoogleErrorReply)
"""Google's: ``error`` with ``code``, ``message``, ``status`` and ``details``. A body that can't be served has status
400, and what exceeds a tenant's pins 429. The answers have the request's id themselves."""

_OPENAI_PATHS: Final = tuple(
    f"/v1/{name}"
    for name in (
        *(
            "chat/",
            "completions",
            "responses",
            "conversations",
            "embeddings",
            "moderations",
            "images/",
            "audio/",
        ),
        *(
            "files",
            "uploads",
            "batches",
            "fine_tuning/",
            "assistants",
            "threads",
            "vector_stores",
            "realtime",
        ),
    )
)
"""What OpenAI's client asks for, as far as radixkv has no paths of its own there."""


def dialect_of(path: str, headers: Mapping[str, str], otherwise: Dialect = OWN) -> Dialect:
    """Return the form of errors for a path that no endpoint has, or that several providers have: that of the client
    that asks, as its headers or the path tell."""
    if "anthropic-version" in headers or path.startswith("/v1/messages"):
        return ANTHROPIC
    if "x-goog-api-key" in headers or path.startswith("/v1beta/"):
        return GOOGLE
    return OPENAI if path.startswith(_OPENAI_PATHS) else otherwise
