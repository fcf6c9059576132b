"""The served model, and the version of the service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from radixkv.service.schemas.base import ReplyBody


class ModelReply(ReplyBody):
    """OpenAI's model object with the model's length, and the fields of Anthropic's beside its own."""

    id: str = Field(description="the name that completions and chats use")
    object: Literal["model"] = "model"
    created: int = Field(description="time at which this process began, in Unix seconds")
    owned_by: str
    max_model_len: int = Field(description="most tokens of a prompt with its answer")
    type: Literal["model"] = "model"
    display_name: str
    created_at: str = Field(description="the same time as created, in RFC 3339")
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int = Field(description="the same as max_model_len")
    max_tokens: int = Field(description="the same as max_model_len")
    forgeable_roles: str | None = Field(
        description="why a message can look like several messages to this model; null if none can"
    )


class ModelsReply(ReplyBody):
    """OpenAI's list of models: the one that this service serves. It is Anthropic's only page too."""

    object: Literal["list"] = "list"
    data: list[ModelReply]
    has_more: bool = False
    first_id: str | None = Field(description="null for an empty page")
    last_id: str | None = Field(description="null for an empty page")


class VersionReply(ReplyBody):
    """The version of radixkv."""

    version: str
