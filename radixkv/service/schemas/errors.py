"""The body of every answer that is not a success."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from radixkv.service.schemas.base import ReplyBody


class ErrorDetail(ReplyBody):
    """What was wrong, where, and what is allowed."""

    type: str = Field(
        description="the type of the error, stable across versions; /docs/errors describes all types"
    )
    message: str = Field(description="one line for people; its text may change")
    field: str | None = Field(
        description="the field that was wrong, such as messages[2].role; null: no single field"
    )
    value: Any = Field(description="the value that was wrong, shortened")
    allowed: str | None = Field(description="what is allowed")
    docs_url: str = Field(description="path on this service: the meaning of the type, and what to do")


class OpenAIErrorDetail(ReplyBody):
    """What was wrong, in OpenAI's form."""

    message: str
    type: str = Field(description="invalid_request_error, rate_limit_error, server_error and the like")
    param: str | None = Field(description="the field that was wrong; null: no single field")
    code: str = Field(
        description="such as context_length_exceeded or model_not_found; else a type of /docs/errors"
    )


class CompletionErrorDetail(OpenAIErrorDetail):
    """What was wrong, in OpenAI's form, with the facts of radixkv's form beside it."""

    field: str | None = Field(description="the same as param")
    value: Any = Field(description="the value that was wrong, shortened")
    allowed: str | None = Field(description="what is allowed")
    docs_url: str = Field(description="path on this service: the meaning of the error, and what to do")


class CompletionErrorReply(ReplyBody):
    """The body of every answer of ``/v1/completions`` that is not a success."""

    error: CompletionErrorDetail


class OpenAIErrorReply(ReplyBody):
    """The body of every answer of an OpenAI endpoint that is not a success."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(ReplyBody):
    """What was wrong, in Anthropic's form."""

    type: str = Field(description="invalid_request_error, rate_limit_error, overloaded_error and the like")
    message: str
    details: dict[str, Any] | None = Field(
        default=None,
        description="only for thread, which isn't served: by it clients go on without",
        exclude_if=lambda details: details is None,
    )


class AnthropicErrorReply(ReplyBody):
    """The body of every answer of an Anthropic endpoint that is not a success."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str = Field(description="the same as in the header request-id")


class GoogleErrorDetail(ReplyBody):
    """What was wrong, in Google's form."""

    code: int = Field(description="the status of the answer")
    message: str
    status: str = Field(description="INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED and the like")
    details: list[dict[str, Any]] = Field(description="fieldViolations, if a field was wrong")


class GoogleErrorReply(ReplyBody):
    """The body of every answer of a Gemini endpoint that is not a success."""

    error: GoogleErrorDetail


class ErrorReply(ReplyBody):
    """The body of every answer that is not a success."""

    error: ErrorDetail
