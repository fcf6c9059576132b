"""Anthropic's messages.

A chat is blocks. A breakpoint is a block with ``cache_control``: the prefix up to its end stays resident for its TTL. A
breakpoint on a tool covers the system text too, since the models' templates write tools after it or around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from radixkv.service.schemas import ignored
from radixkv.service.schemas.base import MAX_NAME, TWO_VALUES, ReplyBody, RequestBody
from radixkv.service.schemas.chat import call_of
from radixkv.service.schemas.completions import CompletionRequest, Hints, Stop, TopK
from radixkv.service.schemas.conversations import (
    Breakpoint,
    CalledName,
    CallId,
    ConversationBody,
    JsonObject,
    TextPart,
    ToolName,
    content_of,
    joined,
)
from radixkv.service.schemas.prompts import Adapter
from radixkv.service.schemas.structured import JsonSchema, Wanted
from radixkv.service.usage import TTL_1H, TTL_5M

MAX_BREAKPOINTS = 4
_TTLS: Mapping[str, int] = {"5m": TTL_5M, "1h": TTL_1H}


class CacheControl(RequestBody):
    """A breakpoint: the prefix up to here stays resident for the time, within the tenant's budget."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/messages"]["cache_control"]

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def ttl_s(self) -> int:
        """The time in seconds."""
        return _TTLS[self.ttl]


class TextBlock(TextPart):
    """A text."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/messages"]["content[] (texts)"]

    cache_control: CacheControl | None = None


class ContentBlock(TextBlock):
    """A text of a message, beside calls and results."""

    types: ClassVar[tuple[str, ...]] = ("text", "tool_use", "tool_result")


class ToolUseBlock(RequestBody):
    """A call that the assistant made."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/messages"]["content[] (calls)"]

    type: Literal["tool_use"]
    id: CallId
    name: CalledName
    input: JsonObject
    cache_control: CacheControl | None = None


def _result_form(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


class ToolResultBlock(RequestBody):
    """The result of a call."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/messages"]["content[] (results)"]

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: (
        Annotated[
            Annotated[str, Tag("one")] | Annotated[list[TextBlock], Field(fail_fast=True), Tag("many")],
            Discriminator(_result_form),
        ]
        | None
    ) = None
    cache_control: CacheControl | None = None


def _block_form(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return str(kind) if kind in ("tool_use", "tool_result") else "text"


Block = Annotated[
    Annotated[ContentBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_block_form),
]


def _content_form(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


class TurnMessage(RequestBody):
    """One message. Results of tools are blocks of the user."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[Block], Field(fail_fast=True), Tag("many")],
        Discriminator(_content_form),
    ] = Field(description="text, or blocks: texts, calls of tools and their results")

    @model_validator(mode="after")
    def _fits_role(self) -> TurnMessage:
        kind = {"user": ToolUseBlock, "assistant": ToolResultBlock}.get(
            self.role, (ToolUseBlock, ToolResultBlock)
        )
        if any(isinstance(block, kind) for block in self.blocks):
            raise PydanticCustomError(
                TWO_VALUES,
                "a block of the other role",
                {
                    "name": "content",
                    "value": self.role,
                    "allowed": "tool_use of the assistant, tool_result of the user",
                },
            )
        return self

    @property
    def blocks(self) -> Sequence[TextBlock | ToolUseBlock | ToolResultBlock]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock.model_construct(type="text", text=self.content)]
        return self.content

    def turns(self, num_blocks: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the turns of its first blocks, in the form that chat templates take."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        blocks = self.content[:num_blocks]
        calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
        if calls or not blocks:
            texts = content_of(block for block in blocks if isinstance(block, TextBlock))
            yield {"role": self.role, "content": texts or None} | ({"tool_calls": calls} if calls else {})
            return
        for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
            if is_result:
                yield from (_result(block) for block in group if isinstance(block, ToolResultBlock))
            else:
                texts = content_of(block for block in group if isinstance(block, TextBlock))
                yield {"role": self.role, "content": texts}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return call_of(block.id, block.name, block.input)


def _result(block: ToolResultBlock) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content_of(block.content) or ""}


class MessageTool(RequestBody):
    """A tool that the client runs. Tools of the provider's servers aren't served."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/messages"]["tools[]"]
    types: ClassVar[tuple[str, ...]] = ("custom",)

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: JsonObject = Field(description="JSON schema of the input")
    cache_control: CacheControl | None = None

    def spec(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {
            "type": "function",
            "function": {name: value for name, value in function.items() if value is not None},
        }


class ToolChoice(RequestBody):
    """Whether the model sees the tools, and has to call one: any, or the one of this name."""

    type: Literal["auto", "none", "any", "tool"]
    name: ToolName | None = Field(None, description="with the type tool")
    disable_parallel_tool_use: bool = Field(False, description="true: a forced answer has one call")

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            found = {
                "name": "name",
                "value": self.name,
                "allowed": "a name with the type tool, and only with it",
            }
            raise PydanticCustomError(TWO_VALUES, "a name without its type", found)
        return self


class JsonOutput(RequestBody):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(validation_alias="schema")


class OutputConfig(RequestBody):
    """The form of the answer."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/messages"]["output_config"]

    format: JsonOutput | None = None


class Diagnostics(RequestBody):
    """A request for a diagnosis of the cache. It is answered with ``unavailable``."""

    previous_message_id: Annotated[str, Field(max_length=MAX_NAME)] | None = None


class CountTokensRequest(ConversationBody):
    """A chat in Anthropic's form: the system text, messages and tools."""

    without_prompts: ClassVar[Mapping[str, object]] = {
        "system": None,
        "messages": [],
        "tools": None,
        "output_config": None,
        "output_format": None,
    }
    drops: ClassVar[ignored.Drops] = ignored.MESSAGES

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of the served model; null: that model"
    )
    system: (
        Annotated[
            Annotated[str, Tag("one")] | Annotated[list[TextBlock], Field(fail_fast=True), Tag("many")],
            Discriminator(_content_form),
        ]
        | None
    ) = Field(None, description="the system's text, or its blocks")
    messages: Annotated[list[TurnMessage], Field(fail_fast=True)] = Field(
        description="the conversation; the last message is the user's"
    )
    tools: Annotated[list[MessageTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = Field(
        None, description="a breakpoint at the end of the last message"
    )
    output_config: OutputConfig | None = Field(None, description="the form of the answer: JSON of a schema")
    output_format: JsonOutput | None = Field(None, description="another name of output_config.format")

    @field_validator("messages")
    @classmethod
    def _end_with_the_user(cls, messages: list[TurnMessage]) -> list[TurnMessage]:
        if messages and messages[-1].role == "assistant":
            allowed = "a last message of the user: an answer that was begun can't be continued"
            raise PydanticCustomError(
                TWO_VALUES, "begun", {"name": len(messages) - 1, "value": "assistant", "allowed": allowed}
            )
        return messages

    @model_validator(mode="after")
    def _few_breakpoints(self) -> CountTokensRequest:
        num = sum(1 for _ in self._marks()) + (self.cache_control is not None)
        if num > MAX_BREAKPOINTS:
            found = {
                "name": "cache_control",
                "value": f"{num} breakpoints",
                "allowed": f"at most {MAX_BREAKPOINTS}",
            }
            raise PydanticCustomError(TWO_VALUES, "too many breakpoints", found)
        return self

    def turns(self) -> list[dict[str, Any]]:
        """Return the system text and the messages in the form that chat templates take."""
        messages = joined(turn for message in self.messages for turn in message.turns())
        return [*self._system_turns(None), *messages]

    def tool_specs(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call."""
        is_hidden = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if is_hidden else [tool.spec() for tool in self.tools or ()]

    def wanted(self) -> Wanted:
        """Return what the answer has to be."""
        form = (
            self.output_format
            if self.output_config is None
            else self.output_config.format or self.output_format
        )
        choice = self.tool_choice
        must_call = choice is not None and choice.type in ("any", "tool")
        name = None if choice is None else choice.name
        return Wanted(
            None if form is None else form.schema_,
            "output_config.format",
            must_call,
            None if name is None else (name,),
            choice is not None and (choice.type == "tool" or choice.disable_parallel_tool_use),
        )

    def breakpoints(self) -> list[Breakpoint]:
        """Return the breakpoints: at tools, in the system text, in messages, and at the end."""
        found = [self._breakpoint(*mark) for mark in self._marks()]
        if self.cache_control is not None:
            found.append(Breakpoint(self.turns(), self.tool_specs(), self.cache_control.ttl_s))
        return found

    def _system_turns(self, num_blocks: int | None) -> list[dict[str, Any]]:
        if self.system is None:
            return []
        blocks = self.system if isinstance(self.system, str) else self.system[:num_blocks]
        return [{"role": "system", "content": content_of(blocks)}]

    def _marks(self) -> Iterator[tuple[Literal["tools", "system"] | int, int, CacheControl]]:
        """Yield the places of breakpoints: tools, the system or the index of a message, and the number of a block."""
        for number, tool in enumerate(self.tools or (), 1):
            if tool.cache_control is not None:
                yield "tools", number, tool.cache_control
        for number, block in enumerate(() if isinstance(self.system, str) else self.system or (), 1):
            if block.cache_control is not None:
                yield "system", number, block.cache_control
        for index, message in enumerate(self.messages):
            for number, each in enumerate(message.blocks, 1):
                if each.cache_control is not None:
                    yield index, number, each.cache_control

    def _breakpoint(
        self, place: Literal["tools", "system"] | int, number: int, mark: CacheControl
    ) -> Breakpoint:
        specs = self.tool_specs()
        if place == "tools":
            return Breakpoint(self._system_turns(None), specs[:number], mark.ttl_s)
        if place == "system":
            return Breakpoint(self._system_turns(number), specs, mark.ttl_s)
        before = [turn for message in self.messages[:place] for turn in message.turns()]
        turns = [*self._system_turns(None), *joined([*before, *self.messages[place].turns(number)])]
        return Breakpoint(turns, specs, mark.ttl_s)


class MessagesRequest(CountTokensRequest):
    """Anthropic's request for a message, with salt, adapter, hints and ignore_eos."""

    max_tokens: int = Field(
        ge=0,
        le=2**31 - 1,
        description="most tokens of the answer; 0: the prompt is computed, nothing is generated",
    )
    adapter: Adapter | None = None
    hints: Hints | None = None
    temperature: float = Field(1.0, ge=0.0, le=1.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: TopK | None = Field(None, description="-1: all tokens, as if left out")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="the same seed draws the same tokens")
    stop_sequences: Stop | None = Field(None, description="the answer ends before the first of these texts")
    stream: bool = Field(False, description="answer with server-sent events, while tokens are generated")
    ignore_eos: bool = Field(False, description="go on to max_tokens, also after the end-of-sequence token")
    diagnostics: Diagnostics | None = None

    def order(self) -> CompletionRequest:
        """Return what to generate."""
        names = (
            "model",
            "salt",
            "adapter",
            "hints",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "stream",
            "ignore_eos",
        )
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        fields |= {"prompt": "-", "stop": self.stop_sequences, "max_tokens": max(self.max_tokens, 1)}
        return CompletionRequest.model_validate(fields)


class CountTokensReply(ReplyBody):
    """The length of a chat."""

    input_tokens: int = Field(description="tokens of the chat up to the opening of the answer")


class TextAnswer(ReplyBody):
    """A text of the answer."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ToolUseAnswer(ReplyBody):
    """A call of the model."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class CacheCreation(ReplyBody):
    """Tokens that were written under promises, by TTL."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(ReplyBody):
    """Tokens of the prompt and of the answer. The prompt has the sum of the first three."""

    input_tokens: int = Field(description="neither read from the cache nor promised")
    cache_creation_input_tokens: int = Field(description="computed, and promised for a TTL")
    cache_read_input_tokens: int = Field(description="read from the cache")
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class CacheMiss(ReplyBody):
    """Why a cache wasn't used."""

    type: Literal["unavailable"] = "unavailable"


class DiagnosticsReply(ReplyBody):
    """The diagnosis of the cache."""

    cache_miss_reason: CacheMiss = CacheMiss()


class MessageReply(ReplyBody):
    """Anthropic's message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextAnswer | ToolUseAnswer]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None = None
    diagnostics: DiagnosticsReply | None = Field(None, description="null unless the request asked for them")
    usage: MessageUsage


def parsed(arguments: str) -> dict[str, Any]:
    """Return the input of a call from the text of its JSON object."""
    return dict(json.loads(arguments))
