"""The forms of errors: radixkv's own, and those of the providers whose APIs the service speaks.

Only the form differs. An ``ApiError`` says what was wrong; a dialect writes it with the provider's names and statuses.
Each answer of a provider's endpoint has the request's id in the provider's header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from radixkv.service.problems import ApiError, Json
from radixkv.service.schemas.errors import ErrorReply, OpenAIErrorReply

Written = tuple[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How errors are written.

    - ``write``: returns status and body of an error; it gets the request's id too.
    - ``reply``: the model of the bodies.
    - ``id_header``: the header with the request's id; None: there is none.
    """

    write: Callable[[ApiError, str], Written]
    reply: type[BaseModel] = ErrorReply
    id_header: str | None = None

    def status(self, status: int) -> int:
        """Return the status that stands for a status of radixkv's own form."""
        return self.write(ApiError(status, "internal", ""), "")[0]

    def answer(self, error: ApiError, request_id: str) -> Response:
        """Return the answer to an error."""
        status, body = self.write(error, request_id)
        return Json(body, status, error.headers)


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
    return status, {
        "error": {
            "message": error.body["message"],
            "type": kind,
            "param": error.body["field"],
            "code": _openai_code(error),
        }
    }


def _openai_code(error: ApiError) -> str:
    if error.is_too_long:
        return "context_length_exceeded"
    if error.status == 404 and error.body["field"] == "model":
        return "model_not_found"
    return _OPENAI_CODES.get(error.type, error.type)


OWN = Dialect(_own)
"""radixkv's form: see ``problems``."""

OPENAI = Dialect(_openai, OpenAIErrorReply, "x-request-id")
"""OpenAI's: ``error`` with ``message``, ``type``, ``param`` and ``code``. A body that can't be
served has status 400."""
