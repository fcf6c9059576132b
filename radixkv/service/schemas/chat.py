"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from radixkv.service.schemas import ignored
from radixkv.service.schemas.base import MAX_NAME, TWO_VALUES, ReplyBody, RequestBody
from radixkv.service.schemas.completions import (
    MAX_CHOICES,
    CompletionRequest,
    Hints,
    LogitBias,
    Penalty,
    PromptTokensDetails,
    RepetitionPenalty,
    Stop,
    StreamOptions,
    Timings,
    TopK,
    answered,
)
from radixkv.service.schemas.conversations import (
    MAX_TOOLS,
    Breakpoint,
    CalledName,
    CallId,
    ConversationBody,
    JsonObject,
    ToolName,
    arguments_of,
    content_of,
)
from radixkv.service.schemas.prompt_caching import (
    CacheOptions,
    MarkedPart,
    latest,
    marks_of,
    ttl_of,
    whole_prompt,
)
from radixkv.service.schemas.prompts import Adapter
from radixkv.service.schemas.structured import MAX_TOP_LOGPROBS, ChoiceLogprobs, ResponseFormat, Wanted

DEFAULT_MAX_TOKENS = 4096
"""Most tokens of an answer if the request doesn't say, within the model's length."""


def _content_form(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


Content = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[MarkedPart], Field(fail_fast=True), Tag("many")],
    Discriminator(_content_form),
]
"""A content as one text or as parts."""


class CalledFunction(RequestBody):
    """The function of a call."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/chat/completions"]["messages[].tool_calls[].function"]

    name: CalledName
    arguments: str = Field("", description="JSON as text, or what the model wrote in its place")


class Call(RequestBody):
    """A call that the assistant made."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/chat/completions"]["messages[].tool_calls[]"]
    types: ClassVar[tuple[str, ...]] = ("function",)

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def shown(self) -> dict[str, Any]:
        """Return the call in the form that chat templates take."""
        return call_of(self.id, self.function.name, arguments_of(self.function.arguments))


def call_of(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    """Return a call in the form that chat templates take."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatMessage(RequestBody):
    """One message. ``developer`` is another name of ``system``."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/chat/completions"]["messages[]"]

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="text, or parts that are text")
    name: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="the name of who speaks, for templates that write it"
    )
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: CallId | None = None

    def turn(self) -> dict[str, Any]:
        """Return the message in the form that chat templates take."""
        role = "system" if self.role == "developer" else self.role
        content = content_of(self.content)
        turn: dict[str, Any] = {
            "role": role,
            "content": "" if content is None and role != "assistant" else content,
        }
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_calls:
            turn["tool_calls"] = [call.shown() for call in self.tool_calls]
        return turn | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


class FunctionSpec(RequestBody):
    """A function that the model may call."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/chat/completions"]["tools[].function"]

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments")


class NamedFunction(RequestBody):
    """A function by its name."""

    name: ToolName


class NamedTool(RequestBody):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


def choice_form(value: Any) -> str:
    """Return the tag of a tool choice's form."""
    return "one" if isinstance(value, dict) else "text"


class ToolSpec(RequestBody):
    """A tool. Only functions are served."""

    types: ClassVar[tuple[str, ...]] = ("function",)

    type: Literal["function"]
    function: FunctionSpec


class ChatRequest(ConversationBody):
    """OpenAI's chat request with OpenAI's defaults, and salt, adapter, hints, top_k and ignore_eos.

    ``prompt_cache_key`` names a session for the eviction policy: it separates nothing, since the tenant and the salt
    do.
    """

    model_config = ConfigDict(json_schema_extra=answered)
    without_prompts: ClassVar[Mapping[str, object]] = {"messages": [], "tools": None, "response_format": None}
    drops: ClassVar[ignored.Drops] = ignored.CHAT
    other_names: ClassVar[Mapping[str, str]] = {
        **ConversationBody.other_names,
        "max_completion_tokens": "max_tokens",
    }

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of the served model; null: that model"
    )
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        description="the conversation; the model's chat template makes its text"
    )
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["auto", "none", "required"], Tag("text")] | Annotated[NamedTool, Tag("one")],
            Discriminator(choice_form),
        ]
        | None
    ) = Field(
        None,
        description="none: the tools aren't shown to the model; required: the answer is calls of them; a tool: the "
        "answer is a call of it",
    )
    adapter: Adapter | None = None
    hints: Hints | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="answers")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="another name of max_tokens"
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description=f"most tokens of an answer; null: {DEFAULT_MAX_TOKENS}, or what fits",
    )
    temperature: float = Field(1.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: TopK | None = Field(None, description="-1: all tokens, as if left out")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="the same seed draws the same tokens")
    stop: Stop | None = Field(None, description="the answer ends before the first of these texts")
    stream: bool = Field(False, description="answer with server-sent events, while tokens are generated")
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(False, description="go on to max_tokens, also after the end-of-sequence token")
    prompt_cache_key: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of a session, for the eviction policy; separates nothing"
    )
    prompt_cache_options: CacheOptions | None = None
    logprobs: bool = Field(False, description="log probabilities of the answer's tokens")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="with logprobs: of as many of the likeliest tokens at each place",
    )
    logit_bias: LogitBias | None = Field(None, description="added to the scores of tokens, by id as text")
    presence_penalty: Penalty = Field(
        0.0, description="subtracted from the scores of tokens that the answer has"
    )
    frequency_penalty: Penalty = Field(0.0, description="the same, for each time")
    repetition_penalty: RepetitionPenalty = Field(
        1.0, description="scores of tokens of prompt and answer are divided by it, negative ones multiplied"
    )
    min_tokens: int = Field(
        0, ge=0, le=2**31 - 1, description="no end-of-sequence token before so many tokens"
    )
    response_format: ResponseFormat | None = Field(None, description="JSON, or JSON of a schema")
    parallel_tool_calls: bool | None = Field(None, description="false: a forced answer has one call")

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            found = {"name": "top_logprobs", "value": self.top_logprobs, "allowed": "logprobs: true with it"}
            raise PydanticCustomError(TWO_VALUES, "without logprobs", found)
        return self

    def turns(self) -> list[dict[str, Any]]:
        """Return the messages in the form that chat templates take."""
        return [message.turn() for message in self.messages]

    def tool_specs(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def wanted(self) -> Wanted:
        """Return what the answer has to be."""
        choice, wanted = self.tool_choice, self.response_format
        name = choice.function.name if isinstance(choice, NamedTool) else None
        return Wanted(
            None if wanted is None else wanted.schema_of_answer,
            "response_format",
            choice == "required" or name is not None,
            None if name is None else (name,),
            name is not None or self.parallel_tool_calls is False,
        )

    def breakpoints(self) -> list[Breakpoint]:
        """Return the breakpoints that are written."""
        options, turns, tools = self.prompt_cache_options, self.turns(), self.tool_specs()
        found: list[Breakpoint] = []
        for index, number, mark in latest(marks_of([each.content for each in self.messages]), options):
            content = (self.messages[index].content or [])[:number]
            last = {name: value for name, value in turns[index].items() if name != "tool_calls"}
            last["content"] = content_of(content)
            found.append(Breakpoint([*turns[:index], last], tools, ttl_of(mark, options)))
        return [*found, *whole_prompt(turns, tools, options)]

    def order(self, max_tokens: int) -> CompletionRequest:
        """Return what to generate. ``max_tokens``: the most tokens if the request doesn't say."""
        hints = self.hints
        if hints is None and self.prompt_cache_key is not None:
            hints = Hints(labels={"session": self.prompt_cache_key})
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "model", "salt", "adapter", "n", "temperature", "top_p", "top_k", "seed", "stop", "stream",
                "ignore_eos", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
            )
        }  # fmt: skip
        return CompletionRequest.model_validate(
            {
                **fields,
                "prompt": "-",
                "hints": hints,
                "max_tokens": max_tokens if self.max_tokens is None else self.max_tokens,
                "stream_options": self.stream_options if self.stream else None,
                "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            }
        )


class FunctionReply(ReplyBody):
    """The function of a call."""

    name: str
    arguments: str = Field(description="the text of a JSON object")


class CallReply(ReplyBody):
    """A call of the model. In a stream it comes as a whole."""

    index: int | None = Field(None, description="number of the call; only in a stream")
    id: str
    type: Literal["function"] = "function"
    function: FunctionReply


class AnswerMessage(ReplyBody):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[CallReply] | None = None


class ChatChoice(ReplyBody):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatUsage(ReplyBody):
    """Tokens of the prompt and of the answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatReply(ReplyBody):
    """OpenAI's chat completion, with timings."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    timings: Timings
