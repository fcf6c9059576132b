"""OpenAI's responses, without state: each request has the whole conversation, and nothing of it is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from radixkv.service.schemas.base import MAX_NAME, TWO_VALUES, Neutral, ReplyBody, RequestBody
from radixkv.service.schemas.chat import DEFAULT_MAX_TOKENS, ArgumentsText, choice_form
from radixkv.service.schemas.completions import CompletionRequest, Hints, TopK
from radixkv.service.schemas.conversations import (
    MAX_PARTS,
    MAX_TOOLS,
    MAX_TURNS,
    MAX_VALUES,
    Breakpoint,
    CallId,
    ConversationBody,
    JsonObject,
    ToolName,
    text_of,
)
from radixkv.service.schemas.prompt_caching import (
    MarkedPart,
    PartBreakpoint,
    ResponseCacheOptions,
    Retention,
    latest,
    marks_of,
    ttl_of,
    whole_prompt,
)
from radixkv.service.schemas.prompts import Adapter
from radixkv.service.schemas.structured import MAX_TOP_LOGPROBS, TextFormat, TokenLogprob, Wanted

MAX_INCLUDED = 8
_TEXTS = ("input_text", "output_text", "text")
_Id = Annotated[str, Field(max_length=MAX_NAME, description="changes nothing")]
_Status = Annotated[Literal["in_progress", "completed", "incomplete"], Field(description="changes nothing")]


class ResponsePart(MarkedPart):
    """A text of an item. Only text is served; no address is ever fetched."""

    type: Annotated[str, WithJsonSchema({"enum": list(_TEXTS)})]
    text: str
    prompt_cache_breakpoint: PartBreakpoint | None = None
    annotations: Annotated[Any, Neutral([])] = None
    logprobs: Annotated[Any, Neutral([])] = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else "text"
        if kind not in _TEXTS:
            found = {"name": "type", "value": kind, "allowed": '"input_text" or "output_text"'}
            raise PydanticCustomError(TWO_VALUES, "not text", found)
        return data


def _form(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


_Content = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[list[ResponsePart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("many")],
    Discriminator(_form),
]


class MessageItem(RequestBody):
    """A message. ``developer`` is another name of ``system``."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: _Id | None = None
    status: _Status | None = None
    phase: Annotated[Any, Neutral("final_answer", "commentary")] = None


class CallItem(RequestBody):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: ArgumentsText
    id: _Id | None = None
    status: _Status | None = None
    caller: Annotated[Any, Neutral({"type": "direct"})] = None
    namespace: Annotated[Any, Neutral()] = None
    async_: Annotated[Any, Neutral(False), Field(validation_alias="async")] = None


class OutputItem(RequestBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: _Content
    id: _Id | None = None
    status: _Status | None = None
    caller: Annotated[Any, Neutral({"type": "direct"})] = None


def _item_form(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return str(kind) if kind in ("function_call", "function_call_output") else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(_item_form),
]


class ResponseTool(RequestBody):
    """A function that the model may call. Tools of the provider's servers aren't served."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = Field(None, description="changes nothing")
    allowed_callers: Annotated[Any, Neutral(["direct"])] = None
    defer_loading: Annotated[Any, Neutral(False)] = None
    output_schema: Annotated[Any, Neutral({})] = None

    def spec(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {
            "type": "function",
            "function": {name: value for name, value in function.items() if value is not None},
        }


class NamedChoice(RequestBody):
    """A function by its name."""

    type: Literal["function"]
    name: ToolName


class TextOptions(RequestBody):
    """The form of the answer."""

    format: TextFormat | None = Field(None, description="text, JSON, or JSON of a schema")
    verbosity: Annotated[Any, Neutral("medium")] = None


class ResponseStreamOptions(RequestBody):
    """Options of a stream."""

    include_obfuscation: Annotated[Any, Neutral(False)] = None


class ResponsesRequest(ConversationBody):
    """OpenAI's request for a response, with salt, adapter, hints, top_k, seed and ignore_eos.

    ``user``, ``safety_identifier``, ``metadata`` and ``service_tier`` change nothing. ``prompt_cache_key`` names a
    session for the eviction policy: it separates nothing.
    """

    without_prompts: ClassVar[Mapping[str, object]] = {
        "input": "-",
        "instructions": None,
        "tools": None,
        "text": None,
    }
    max_values: ClassVar[int | None] = MAX_VALUES
    prompt_field: ClassVar[str] = "input"

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of the served model; null: that model"
    )
    input: Annotated[
        Annotated[str, Tag("one")]
        | Annotated[list[Item], Field(max_length=MAX_TURNS, fail_fast=True), Tag("many")],
        Discriminator(_form),
    ] = Field(description="the user's text, or the items of the conversation")
    instructions: str | None = Field(None, description="the system's text")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["auto", "none", "required"], Tag("text")] | Annotated[NamedChoice, Tag("one")],
            Discriminator(choice_form),
        ]
        | None
    ) = Field(
        None,
        description="none: the tools aren't shown to the model; required: the answer is calls of them; a function: the "
        "answer is a call of it",
    )
    adapter: Adapter | None = None
    hints: Hints | None = None
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description=f"most tokens of the answer; null: {DEFAULT_MAX_TOKENS}, or what fits",
    )
    temperature: float = Field(1.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: TopK | None = Field(None, description="-1: all tokens, as if left out")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="the same seed draws the same tokens")
    stream: bool = Field(False, description="answer with server-sent events, while tokens are generated")
    stream_options: ResponseStreamOptions | None = None
    ignore_eos: bool = Field(
        False, description="go on to the most tokens, also after the end-of-sequence token"
    )
    text: TextOptions | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of a session, for the eviction policy; separates nothing"
    )
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    user: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(None, description="changes nothing")
    safety_identifier: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="changes nothing"
    )
    store: Annotated[Any, Neutral(False)] = None
    previous_response_id: Annotated[Any, Neutral()] = None
    conversation: Annotated[Any, Neutral()] = None
    background: Annotated[Any, Neutral(False)] = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=MAX_INCLUDED)] | None
    ) = Field(None, description="message.output_text.logprobs: log probabilities of the answer's tokens")
    max_tool_calls: Annotated[Any, Neutral()] = None
    metadata: Annotated[Any, Neutral({})] = None
    moderation: Annotated[Any, Neutral()] = None
    parallel_tool_calls: bool | None = Field(None, description="false: a forced answer has one call")
    prompt: Annotated[Any, Neutral()] = None
    reasoning: Annotated[Any, Neutral({})] = None
    service_tier: Annotated[Any, Neutral("auto", "default")] = None
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="with include of the log probabilities: of as many of the likeliest tokens at each place",
    )
    truncation: Annotated[Any, Neutral("disabled")] = None

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> ResponsesRequest:
        if self.top_logprobs and not self.include:
            allowed = "include: [message.output_text.logprobs] with it"
            found = {"name": "top_logprobs", "value": self.top_logprobs, "allowed": allowed}
            raise PydanticCustomError(TWO_VALUES, "without logprobs", found)
        return self

    def wanted(self) -> Wanted:
        """Return what the answer has to be."""
        choice, form = self.tool_choice, None if self.text is None else self.text.format
        name = choice.name if isinstance(choice, NamedChoice) else None
        return Wanted(
            None if form is None else form.schema_of_answer,
            "text.format",
            choice == "required" or name is not None,
            None if name is None else (name,),
            name is not None or self.parallel_tool_calls is False,
        )

    @property
    def items(self) -> Sequence[MessageItem | CallItem | OutputItem]:
        """The conversation as items."""
        if isinstance(self.input, str):
            return [MessageItem.model_construct(role="user", content=self.input)]
        return self.input

    def turns(self) -> list[dict[str, Any]]:
        """Return the conversation in the form that chat templates take."""
        return self._turns(self.items)

    def tool_specs(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call."""
        return [] if self.tool_choice == "none" else [tool.spec() for tool in self.tools or ()]

    def breakpoints(self) -> list[Breakpoint]:
        """Return the breakpoints that are written."""
        options, tools, items = self.prompt_cache_options, self.tool_specs(), self.items
        contents = [
            each.content
            if isinstance(each, MessageItem)
            else each.output
            if isinstance(each, OutputItem)
            else ""
            for each in items
        ]
        found: list[Breakpoint] = []
        for index, number, mark in latest(marks_of(contents), options):
            name = "content" if isinstance(items[index], MessageItem) else "output"
            last = items[index].model_copy(update={name: contents[index][:number]})
            turns = self._turns([*items[:index], last])
            found.append(Breakpoint(turns, tools, ttl_of(mark, options)))
        return [*found, *whole_prompt(self.turns(), tools, options)]

    def _turns(self, items: Sequence[MessageItem | CallItem | OutputItem]) -> list[dict[str, Any]]:
        """Return turns. Calls join the assistant's turn before them."""
        turns = [{"role": "system", "content": self.instructions}] if self.instructions is not None else []
        found: list[dict[str, Any]] = list(turns)
        for item in items:
            if isinstance(item, MessageItem):
                role = "system" if item.role == "developer" else item.role
                found.append({"role": role, "content": text_of(item.content)})
            elif isinstance(item, OutputItem):
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            else:
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": ""})
                found[-1].setdefault("tool_calls", []).append(_call(item))
        return found

    def order(self, max_tokens: int) -> CompletionRequest:
        """Return what to generate. ``max_tokens``: the most tokens if the request doesn't say."""
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
        if self.hints is None and self.prompt_cache_key is not None:
            fields["hints"] = Hints(labels={"session": self.prompt_cache_key})
        most = max_tokens if self.max_output_tokens is None else self.max_output_tokens
        fields["logprobs"] = (self.top_logprobs or 0) if self.include else None
        return CompletionRequest.model_validate({**fields, "prompt": "-", "max_tokens": most})


def _call(item: CallItem) -> dict[str, Any]:
    function = {"name": item.name, "arguments": json.loads(item.arguments or "{}")}
    return {"id": item.call_id, "type": "function", "function": function}


class WriteDetails(ReplyBody):
    """Written tokens by TTL."""

    ttl_30m_tokens: int
    ttl_12h_tokens: int


class InputDetails(ReplyBody):
    """Tokens of the prompt by what the cache did."""

    cached_tokens: int = Field(description="read from the cache")
    cache_write_tokens: int = Field(description="computed, and promised for a TTL")
    cache_write_tokens_details: WriteDetails


class OutputDetails(ReplyBody):
    """Tokens of the answer."""

    reasoning_tokens: int = 0


class ResponseUsage(ReplyBody):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class OutputText(ReplyBody):
    """A text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)


class OutputMessage(ReplyBody):
    """The answer's message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(ReplyBody):
    """A call of the model."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = Field(description="the text of a JSON object")
    status: Literal["in_progress", "completed"]


class IncompleteDetails(ReplyBody):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class CacheDiagnosis(ReplyBody):
    """The diagnosis of the cache."""

    type: Literal["unavailable"] = "unavailable"


class ResponseReply(ReplyBody):
    """OpenAI's response. What the request says about tools isn't repeated."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool = True
    tool_choice: Literal["auto"] = "auto"
    tools: list[str] = Field(default_factory=list)
    store: bool = False
    prompt_cache_diagnostics: CacheDiagnosis | None = Field(
        None, description="null unless the request asked for it"
    )
    usage: ResponseUsage | None
