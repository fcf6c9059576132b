"""The one form of a chat that all providers' shapes are read into, and the annotations that they share.

A provider's body is a ``ConversationBody``. It returns its messages and tools in the form that chat templates take
(``radixkv.tokenizer.protocol``). Everything behind the schema sees that form alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from radixkv.service.schemas.base import TWO_VALUES, RequestBody, first_at_most
from radixkv.service.schemas.prompts import Salted

MAX_TURNS = 512
MAX_PARTS = 8
MAX_CALLS = 5
MAX_TOOLS = 64
MAX_TOOL_NAME = 64
MAX_CALL_ID = 128
MAX_JSON_NAMES = 32

JsonObject = Annotated[
    dict[str, Any],
    first_at_most(MAX_JSON_NAMES),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_JSON_NAMES,
            "propertyNames": {"type": "string"},
            "additionalProperties": {"description": "any JSON"},
        }
    ),
]
"""Any JSON object, with at most MAX_JSON_NAMES names at its top."""

ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME}}}$")]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID)]


def _content_form(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


class TextPart(RequestBody):
    """A part of a content. Only text is served; no address is ever fetched."""

    type: Annotated[str, WithJsonSchema({"const": "text"})]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else "text"
        if kind != "text":
            raise PydanticCustomError(
                TWO_VALUES, "not text", {"name": "type", "value": kind, "allowed": '"text"'}
            )
        return data


Content = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("many")],
    Discriminator(_content_form),
]
"""A content as one text or as parts."""


def text_of(content: str | list[TextPart] | None) -> str:
    """Return a content as one text: its parts follow each other."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class ConversationBody(Salted):
    """A chat in a provider's shape."""

    def turns(self) -> list[dict[str, Any]]:
        """Return the messages in the form that chat templates take."""
        raise NotImplementedError

    def tool_specs(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call, in that form."""
        raise NotImplementedError


def num_chars(value: object) -> int:
    """Return the characters of all texts of a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_chars, value)) + sum(map(num_chars, value.values()))
    return sum(map(num_chars, value)) if isinstance(value, list | tuple) else 1
