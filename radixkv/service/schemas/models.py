"""The served model, and the version of the service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from radixkv.service.schemas.base import ReplyBody


class ModelReply(ReplyBody):
    """OpenAI's model object, with the model's length."""

    id: str = Field(description="the name that completions and chats use")
    object: Literal["model"] = "model"
    created: int = Field(description="time at which this process began, in Unix seconds")
    owned_by: str
    max_model_len: int = Field(description="most tokens of a prompt with its answer")


class ModelsReply(ReplyBody):
    """OpenAI's list of models: the one that this service serves."""

    object: Literal["list"] = "list"
    data: list[ModelReply]


class VersionReply(ReplyBody):
    """The version of radixkv."""

    version: str
