"""The one form of a chat that all providers' shapes are read into, and the annotations that they share.

A provider's body is a ``ConversationBody``. It returns its messages and tools in the form that chat templates take
(``radixkv.tokenizer.protocol``). Everything behind the schema sees that form alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema
from pydantic_core import from_json

from radixkv.service.schemas.base import MAX_NAME, RequestBody
from radixkv.service.schemas.prompts import Salted
from radixkv.service.schemas.structured import Wanted

MAX_TOOLS = 128
"""Functions of a request, as OpenAI documents it. Google documents 512 of a tool, and Anthropic no maximum."""
MAX_TOOL_NAME = 128
VALUE_BYTES = 16
"""Bytes of a long chat for each of its JSON values. Real chats have far more; see ``service.budgets``."""

JsonObject = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "additionalProperties": {"description": "any JSON"}}),
]
"""Any JSON object."""

ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME}}}$")]
"""The name of a tool that is shown to the model, as OpenAI and Anthropic document it."""
CalledName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
"""The name in a call: the model wrote it, so it may be any text."""
CallId = Annotated[str, Field(min_length=1)]


class TextPart(RequestBody):
    """A part of a content. Only text is served; no address is ever fetched."""

    types: ClassVar[tuple[str, ...]] = ("text",)

    type: Annotated[str, WithJsonSchema({"const": "text"})]
    text: str


TurnContent = str | list[dict[str, str]] | None
"""A content in the form that chat templates take: a text, or parts, each ``{"type": "text", "text": …}``."""


def content_of(content: str | Iterable[TextPart] | None) -> TurnContent:
    """Return a content as the client sent it: text stays text, and parts stay parts."""
    if content is None or isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def arguments_of(text: str) -> dict[str, Any] | str:
    """Return the arguments of a call as chat templates take them.

    That is an object, or the text as it is if it isn't a JSON object: a model may have written anything, and may have
    been cut off. An empty text has no arguments.
    """
    if not text.strip():
        return {}
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def parts_of(content: TurnContent) -> list[dict[str, str]]:
    """Return a content as parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def joined(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns with adjacent ones of the assistant as one: its texts, then its calls.

    Providers read them so, and clients send an answer in pieces: Google's keeps each chunk of a stream as a turn.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        if not found or turn["role"] != "assistant" or found[-1]["role"] != "assistant":
            found.append(turn)
            continue
        last = found[-1]
        calls = [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]
        content = [*parts_of(last["content"]), *parts_of(turn["content"])]
        found[-1] = {**last, **turn, "content": content or None} | ({"tool_calls": calls} if calls else {})
    return found


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a prefix that the caller wants to stay resident for ``ttl_s`` seconds: the chat up to there."""

    turns: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    ttl_s: int


class ConversationBody(Salted):
    """A chat in a provider's shape. ``prompt_field``: the field that errors about the whole chat name.

    If another chat is joined to it, its ``Prompt.text`` is the JSON of its turns and tools.

    In a turn, ``content`` is a text, a list of parts if the client sent one, or None if an assistant's turn has none.
    The ``arguments`` of a call are an object, or a text that isn't one (``arguments_of``).
    """

    value_bytes: ClassVar[int | None] = VALUE_BYTES
    prompt_field: ClassVar[str] = "messages"
    is_beginning: ClassVar[bool] = False
    """Whether its prompt is only what every continuation begins with."""

    @property
    def continues(self) -> str | None:
        """Name of the chat that this one continues, if its prompt can't be made without it."""
        return None

    @property
    def rendered_at(self) -> str | None:
        """The time with which it is rendered, in ISO 8601, if it isn't the present."""
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
