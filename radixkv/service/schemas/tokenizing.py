"""Texts to token ids and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from radixkv.service.schemas.base import MAX_NAME, Neutral, ReplyBody, RequestBody
from radixkv.service.schemas.prompts import MAX_MESSAGES, Message, Text, TokenIds

_Model = Annotated[str, Field(max_length=MAX_NAME)]
_MODEL = Field(default=None, description="name of the served model; null: that model")


def _one_form(schema: dict[str, Any]) -> None:
    """Add the rule to the JSON schema: one of text and messages is required."""
    given, left_out = {"not": {"type": "null"}}, {"type": "null"}
    schema["oneOf"] = [
        {"required": [one], "properties": {one: given, other: left_out}}
        for one, other in (("prompt", "messages"), ("messages", "prompt"))
    ]


class TokenizeRequest(RequestBody):
    """A text, or messages of a chat: exactly one of them."""

    model_config = ConfigDict(json_schema_extra=_one_form)
    without_prompts: ClassVar[Mapping[str, object]] = {"prompt": None, "messages": None}

    model: _Model | None = _MODEL
    prompt: Text | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    add_generation_prompt: bool = Field(
        default=True, description="for messages: with the opening of the assistant's answer"
    )
    add_special_tokens: Annotated[Any, Neutral(True)] = None
    return_token_strs: Annotated[Any, Neutral(False)] = None


class DetokenizeRequest(RequestBody):
    """Token ids."""

    without_prompts: ClassVar[Mapping[str, object]] = {"tokens": [0]}

    model: _Model | None = _MODEL
    tokens: TokenIds


class TokenizeReply(ReplyBody):
    """The ids of a text or a chat, as a completion or a chat would have them."""

    count: int
    max_model_len: int = Field(description="most tokens of a prompt with its answer")
    tokens: list[int]


class DetokenizeReply(ReplyBody):
    """The text of ids, without special ones."""

    prompt: str
