"""The one form of a chat that all providers' shapes are read into, and the annotations that they share.

A provider's body is a ``ConversationBody``. It returns its messages and tools in the form that chat templates take
(``radixkv.tokenizer.protocol``). Everything behind the schema sees that form alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from radixkv.service.schemas.base import TWO_VALUES, RequestBody, first_at_most
from radixkv.service.schemas.prompts import Salted
from radixkv.service.schemas.structured import Wanted

MAX_TURNS = 512
MAX_PARTS = 8
MAX_CALLS = 5
MAX_TOOLS = 64
MAX_TOOL_NAME = 64
MAX_CALL_ID = 128
MAX_JSON_NAMES = 32
MAX_VALUES = 32_000
"""JSON values of a chat's body."""

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


def text_of(content: str | Iterable[TextPart] | None) -> str:
    """Return a content as one text: its parts follow each other."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a prefix that the caller wants to stay resident for ``ttl_s`` seconds: the chat up to there."""

    turns: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    ttl_s: int


class ConversationBody(Salted):
    """A chat in a provider's shape. ``prompt_field``: the field that errors about the whole chat name.

    If another chat is joined to it, its ``Prompt.text`` is the JSON of its turns and tools.
    """

    prompt_field: ClassVar[str] = "messages"
    is_beginning: ClassVar[bool] = False
    """Whether its prompt is only what every continuation begins with."""

    @property
    def continues(self) -> str | None:
        """Name of the chat that this one continues, if its prompt can't be made without it."""
        return None

    def breakpoints(self) -> list[Breakpoint]:
        """Return the breakpoints, in the order of the chat; at most as many as the provider writes."""
        return []

    def wanted(self) -> Wanted:
        """Return what the answer has to be."""
        return Wanted()

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
