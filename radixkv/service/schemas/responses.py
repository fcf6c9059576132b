"""OpenAI's responses, without state: each request has the whole conversation, and nothing of it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from radixkv.service.schemas import ignored
from radixkv.service.schemas.base import MAX_NAME, TWO_VALUES, ReplyBody, RequestBody
from radixkv.service.schemas.chat import DEFAULT_MAX_TOKENS, call_of, choice_form
from radixkv.service.schemas.completions import CompletionRequest, Hints, TopK
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
    joined,
)
from radixkv.service.schemas.prompt_caching import (
    MarkedPart,
    PartBreakpoint,
    ResponseCacheOptions,
    latest,
    marks_of,
    ttl_of,
    whole_prompt,
)
from radixkv.service.schemas.prompts import Adapter
from radixkv.service.schemas.structured import MAX_TOP_LOGPROBS, TextFormat, TokenLogprob, Wanted

MAX_INCLUDED = 8
_TEXTS = ("input_text", "output_text", "text")


class ResponsePart(MarkedPart):
    """A text of an item. Only text is served; no address is ever fetched."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/responses"]["input[].content[]"]
    types: ClassVar[tuple[str, ...]] = _TEXTS

    type: Annotated[str, WithJsonSchema({"enum": list(_TEXTS)})]
    text: str
    prompt_cache_breakpoint: PartBreakpoint | None = None


def _form(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


_Content = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[ResponsePart], Field(fail_fast=True), Tag("many")],
    Discriminator(_form),
]


_CALL, _OUTPUT = "function_call", "function_call_output"
LOGPROBS: Final = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
]
IN_NAMESPACE = "."
"""Between a namespace and the name of its function, in what the model reads and writes. No name of a tool has it."""


class MessageItem(RequestBody):
    """A message. ``developer`` is another name of ``system``."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/responses"]["input[] (messages)"]
    types: ClassVar[tuple[str, ...]] = ("message", _CALL, _OUTPUT)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content

    @model_validator(mode="before")
    @classmethod
    def _refers_to_nothing(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") == "item_reference":
            why = "nothing is stored: send store: false, and clients repeat the items themselves"
            raise ignored.refusal("type", data["type"], "the whole item", why)
        return data


class CallItem(RequestBody):
    """A call that the assistant made."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/responses"]["input[] (calls)"]

    type: Literal["function_call"]
    call_id: CallId
    namespace: CalledName | None = None
    name: CalledName
    arguments: str = Field("", description="JSON as text, or what the model wrote in its place")

    @property
    def shown_name(self) -> str:
        """The name that the model wrote."""
        return self.name if self.namespace is None else f"{self.namespace}{IN_NAMESPACE}{self.name}"


class OutputItem(RequestBody):
    """The result of a call."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/responses"]["input[] (results)"]

    type: Literal["function_call_output"]
    call_id: CallId
    output: _Content


def _item_form(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return str(kind) if kind in (_CALL, _OUTPUT) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(_item_form),
]


class ResponseTool(RequestBody):
    """A function that the model may call. Tools of the provider's servers aren't served."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/responses"]["tools[]"]
    types: ClassVar[tuple[str, ...]] = ("function", "namespace")

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments")

    def specs(self) -> list[dict[str, Any]]:
        """Return the tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        given = {name: value for name, value in function.items() if value is not None}
        return [{"type": "function", "function": given}]


class NamespaceTool(RequestBody):
    """Functions with a common name before their own. The model sees each as ``namespace.function``."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = Field(None, description="shown with each of the functions")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)]

    def specs(self) -> list[dict[str, Any]]:
        """Return the functions in the form that chat templates take."""
        found = [spec["function"] for tool in self.tools for spec in tool.specs()]
        for each in found:
            each["name"] = f"{self.name}{IN_NAMESPACE}{each['name']}"
            described = [text for text in (self.description, each.get("description")) if text]
            each |= {"description": "\n".join(described)} if described else {}
        return [{"type": "function", "function": each} for each in found]


def _tool_form(value: Any) -> str:
    return "group" if isinstance(value, dict) and value.get("type") == "namespace" else "plain"


_Tool = Annotated[
    Annotated[ResponseTool, Tag("plain")] | Annotated[NamespaceTool, Tag("group")], Discriminator(_tool_form)
]


class NamedChoice(RequestBody):
    """A function by its name."""

    type: Literal["function"]
    name: ToolName


class TextOptions(RequestBody):
    """The form of the answer."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE["/v1/responses"]["text"]

    format: TextFormat | None = Field(None, description="text, JSON, or JSON of a schema")


class InputTokensRequest(ConversationBody):
    """A chat in the form of OpenAI's Responses: the system's text, items and tools."""

    without_prompts: ClassVar[Mapping[str, object]] = {
        "input": "-",
        "instructions": None,
        "tools": None,
        "text": None,
    }
    drops: ClassVar[ignored.Drops] = ignored.RESPONSES
    prompt_field: ClassVar[str] = "input"

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of the served model; null: that model"
    )
    input: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[Item], Field(fail_fast=True), Tag("many")],
        Discriminator(_form),
    ] = Field(description="the user's text, or the items of the conversation")
    instructions: str | None = Field(None, description="the system's text")
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
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
    text: TextOptions | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: a forced answer has one call")

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
        shown = [] if self.tool_choice == "none" else self.tools or []
        return [spec for tool in shown for spec in tool.specs()]

    def _turns(self, items: Sequence[MessageItem | CallItem | OutputItem]) -> list[dict[str, Any]]:
        """Return turns. Texts and calls of the assistant that follow each other are one turn."""
        found: list[dict[str, Any]] = []
        for item in items:
            if isinstance(item, MessageItem):
                role = "system" if item.role == "developer" else item.role
                found.append({"role": role, "content": content_of(item.content)})
            elif isinstance(item, OutputItem):
                found.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output)}
                )
            else:
                call = call_of(item.call_id, item.shown_name, arguments_of(item.arguments))
                found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        system = [{"role": "system", "content": self.instructions}] if self.instructions is not None else []
        return [*system, *joined(found)]


class ResponsesRequest(InputTokensRequest):
    """OpenAI's request for a response, with salt, adapter, hints, top_k, seed and ignore_eos.

    ``prompt_cache_key`` names a session for the eviction policy: it separates nothing.
    """

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
    ignore_eos: bool = Field(
        False, description="go on to the most tokens, also after the end-of-sequence token"
    )
    prompt_cache_key: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of a session, for the eviction policy; separates nothing"
    )
    prompt_cache_options: ResponseCacheOptions | None = None
    include: Annotated[list[Included], Field(max_length=MAX_INCLUDED)] | None = Field(
        None,
        description=f"{LOGPROBS}: log probabilities of the answer's tokens; the others add nothing, because answers "
        "have no thoughts, images and calls of the provider's own tools",
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="with include of the log probabilities: of as many of the likeliest tokens at each place",
    )

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has the log probabilities of its tokens."""
        return LOGPROBS in (self.include or ())

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> ResponsesRequest:
        if self.top_logprobs and not self.has_logprobs:
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
        fields["logprobs"] = (self.top_logprobs or 0) if self.has_logprobs else None
        return CompletionRequest.model_validate({**fields, "prompt": "-", "max_tokens": most})


class InputTokensReply(ReplyBody):
    """The length of a chat."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int = Field(description="tokens of the chat up to the opening of the answer")


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
    namespace: str | None = Field(None, description="that of the function; null: it has none")
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
