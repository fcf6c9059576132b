"""Gemini's cached contents, and generation from contents, as far as cached contents need it.

The names are Google's, so they are in camel case; bodies may have them in snake case. Texts and calls of functions are
served. No address is ever fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from radixkv.service.schemas.base import MAX_NAME, TWO_VALUES, Neutral, ReplyBody, RequestBody
from radixkv.service.schemas.chat import DEFAULT_MAX_TOKENS
from radixkv.service.schemas.completions import MAX_STOP_CHARS, MAX_STOPS, CompletionRequest, Hints
from radixkv.service.schemas.conversations import (
    MAX_TOOLS,
    MAX_TURNS,
    MAX_VALUES,
    CallId,
    ConversationBody,
    JsonObject,
    ToolName,
)
from radixkv.service.schemas.prompts import Adapter

MAX_PARTS = 32
MAX_SETTINGS = 16
MAX_DISPLAY_NAME = 128
_FORMS = ("text", "functionCall", "functionResponse")


class GoogleBody(RequestBody):
    """A body of Google's. A name may be in snake case too, as in Google's own clients."""

    @model_validator(mode="before")
    @classmethod
    def _camel_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = _camel_names(cls)
        return {name if names.get(name, name) in data else names.get(name, name): data[name] for name in data}


@cache
def _camel_names(model: type[BaseModel]) -> dict[str, str]:
    """Return the fields of a body by their names in snake case."""
    found = {
        re.sub("([A-Z])", lambda letter: f"_{letter[1].lower()}", name): name for name in model.model_fields
    }
    return {snake: name for snake, name in found.items() if snake != name}


MAX_SIGNATURE_CHARS: Final = 65_536


class FunctionCallPart(RequestBody):
    """A call that the model made."""

    id: CallId | None = None
    name: ToolName
    args: JsonObject = Field(default_factory=dict)


class FunctionResponsePart(RequestBody):
    """The result of a call."""

    id: CallId | None = None
    name: ToolName
    response: JsonObject


class Part(GoogleBody):
    """A text, a call or a result: exactly one of them."""

    text: str | None = None
    functionCall: FunctionCallPart | None = None
    functionResponse: FunctionResponsePart | None = None
    thought: Annotated[Any, Neutral(False)] = None
    thoughtSignature: Annotated[str, Field(max_length=MAX_SIGNATURE_CHARS)] | None = Field(
        default=None,
        description="has no effect: clients send one with each call, and this model has no thoughts",
    )

    @model_validator(mode="after")
    def _one_form(self) -> Part:
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            found = {
                "name": "text",
                "value": " and ".join(given) or None,
                "allowed": f"exactly one of {', '.join(_FORMS)}",
            }
            raise PydanticCustomError(TWO_VALUES, "not one part", found)
        return self


class ContentTurn(RequestBody):
    """One turn of a chat."""

    role: Literal["user", "model", "function", "system"] = "user"
    parts: Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        """Its texts, which follow each other."""
        return "".join(part.text for part in self.parts if part.text is not None)

    def turns(self) -> Iterator[dict[str, Any]]:
        """Yield its turns in the form that chat templates take: results first, then the rest."""
        for part in self.parts:
            if part.functionResponse is not None:
                yield _result(part.functionResponse)
        calls = [_call(part.functionCall) for part in self.parts if part.functionCall is not None]
        has_text = any(part.text is not None for part in self.parts)
        if calls or has_text:
            role = "assistant" if self.role == "model" or calls else "user"
            yield {"role": role, "content": self.text} | ({"tool_calls": calls} if calls else {})


def _call(part: FunctionCallPart) -> dict[str, Any]:
    return {
        "id": part.id or part.name,
        "type": "function",
        "function": {"name": part.name, "arguments": part.args},
    }


def _result(part: FunctionResponsePart) -> dict[str, Any]:
    content = part.response.get("output", part.response.get("result", part.response))
    text = content if isinstance(content, str) else to_json(content)
    return {"role": "tool", "tool_call_id": part.id or part.name, "content": text}


def to_json(value: object) -> str:
    """Return a result of a function as the text that the model reads."""
    return json.dumps(value, ensure_ascii=False)


class FunctionDeclaration(GoogleBody):
    """A function that the model may call, with the schema of its arguments in one of two fields."""

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    parametersJsonSchema: JsonObject | None = None
    behavior: Annotated[Any, Neutral("BLOCKING", "UNSPECIFIED")] = None
    response: Annotated[Any, Neutral({})] = None
    responseJsonSchema: Annotated[Any, Neutral({})] = None

    def spec(self) -> dict[str, Any]:
        """Return the function in the form that chat templates take."""
        parameters = self.parametersJsonSchema or self.parameters
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {
            "type": "function",
            "function": {name: value for name, value in function.items() if value is not None},
        }


class ContentTool(GoogleBody):
    """Functions. Tools of the provider's servers aren't served."""

    functionDeclarations: Annotated[list[FunctionDeclaration], Field(max_length=MAX_TOOLS, fail_fast=True)]


class FunctionCallingConfig(GoogleBody):
    """Whether the model sees the functions. No call can be forced."""

    mode: Literal["AUTO", "NONE", "MODE_UNSPECIFIED"] = "AUTO"
    allowedFunctionNames: Annotated[Any, Neutral([])] = None


class ContentToolConfig(GoogleBody):
    """How functions are used."""

    functionCallingConfig: FunctionCallingConfig | None = None


class ContentChat(ConversationBody, GoogleBody):
    """A chat in Gemini's form."""

    without_prompts: ClassVar[Mapping[str, object]] = {
        "contents": [],
        "systemInstruction": None,
        "tools": None,
    }
    max_values: ClassVar[int | None] = MAX_VALUES
    prompt_field: ClassVar[str] = "contents"

    contents: Annotated[list[ContentTurn], Field(max_length=MAX_TURNS, fail_fast=True)] = Field(
        default_factory=list, description="the conversation"
    )
    systemInstruction: ContentTurn | None = Field(None, description="the system's text")
    tools: Annotated[list[ContentTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    toolConfig: ContentToolConfig | None = None

    def turns(self) -> list[dict[str, Any]]:
        """Return the conversation in the form that chat templates take."""
        system = self.systemInstruction
        first = [] if system is None else [{"role": "system", "content": system.text}]
        return [*first, *(turn for content in self.contents for turn in content.turns())]

    def tool_specs(self) -> list[dict[str, Any]]:
        """Return the functions that the model may call."""
        config = None if self.toolConfig is None else self.toolConfig.functionCallingConfig
        if config is not None and config.mode == "NONE":
            return []
        return [each.spec() for tool in self.tools or () for each in tool.functionDeclarations]


_Ttl = Annotated[
    str, Field(pattern=r"^[0-9]{1,8}(\.[0-9]{1,9})?s$", description="seconds such as 3600s or 3.5s")
]
_Time = Annotated[str, Field(max_length=64, description="a time such as 2026-01-31T09:30:00Z")]


class ForModel(RequestBody):
    """A body that names its model."""

    model: Annotated[str, Field(max_length=MAX_NAME)] = Field(
        description="name of the served model, with or without models/"
    )


class CachedContentRequest(ContentChat, ForModel):
    """A chat that stays resident under a name, with salt."""

    is_beginning: ClassVar[bool] = True

    displayName: Annotated[str, Field(max_length=MAX_DISPLAY_NAME)] | None = None
    ttl: _Ttl | None = Field(None, description="time until it ends; null: an hour")
    expireTime: _Time | None = Field(None, description="its end, in place of ttl")


class CachedContentUpdate(GoogleBody):
    """A new end of a cached content: one of the two. Nothing else can be updated."""

    ttl: _Ttl | None = None
    expireTime: _Time | None = None
    name: Annotated[str, Field(max_length=MAX_NAME, description="changes nothing")] | None = None


class GenerationConfig(GoogleBody):
    """How to generate."""

    temperature: float = Field(default=1.0, ge=0.0, le=2.0, description="0 is greedy")
    topP: float = Field(default=1.0, gt=0.0, le=1.0)
    topK: float | None = Field(default=None, ge=1, le=2**31 - 1)
    maxOutputTokens: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description=f"most tokens of the answer; null: {DEFAULT_MAX_TOKENS}, or what fits",
    )
    stopSequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOPS)
        ]
        | None
    ) = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    candidateCount: Annotated[Any, Neutral(1)] = None
    responseMimeType: Annotated[Any, Neutral("text/plain")] = None
    responseModalities: Annotated[Any, Neutral(["TEXT"])] = None
    responseSchema: Annotated[Any, Neutral({})] = None
    responseJsonSchema: Annotated[Any, Neutral({})] = None
    presencePenalty: Annotated[Any, Neutral(0)] = None
    frequencyPenalty: Annotated[Any, Neutral(0)] = None
    responseLogprobs: Annotated[Any, Neutral(False)] = None
    logprobs: Annotated[Any, Neutral(0)] = None
    thinkingConfig: Annotated[Any, Neutral({})] = None
    speechConfig: Annotated[Any, Neutral()] = None
    mediaResolution: Annotated[Any, Neutral()] = None


class SafetySetting(RequestBody):
    """A filter. This service has none, so it changes nothing."""

    category: Annotated[str, Field(max_length=MAX_NAME)]
    threshold: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    method: Annotated[str, Field(max_length=MAX_NAME)] | None = None


class GenerateContentRequest(ContentChat):
    """Gemini's request for an answer, with salt, adapter, hints and ignoreEos.

    With ``cachedContent`` the chat continues that content, in the content's namespace.
    """

    contents: Annotated[list[ContentTurn], Field(max_length=MAX_TURNS, fail_fast=True)] = Field(
        description="the conversation"
    )
    cachedContent: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of a cached content, which comes before the contents"
    )
    generationConfig: GenerationConfig | None = None
    safetySettings: Annotated[list[SafetySetting], Field(max_length=MAX_SETTINGS)] | None = Field(
        None, description="changes nothing"
    )
    adapter: Adapter | None = None
    hints: Hints | None = None
    ignoreEos: bool = Field(
        False, description="go on to maxOutputTokens, also after the end-of-sequence token"
    )
    labels: Annotated[Any, Neutral({})] = None
    store: Annotated[Any, Neutral(False)] = None
    serviceTier: Annotated[Any, Neutral("standard", "unspecified")] = None

    @model_validator(mode="after")
    def _nothing_beside_the_content(self) -> GenerateContentRequest:
        own = [
            name for name in ("systemInstruction", "tools", "toolConfig") if getattr(self, name) is not None
        ]
        if self.cachedContent is not None and own:
            found = {
                "name": own[0],
                "value": "given",
                "allowed": "left out with cachedContent, which has its own",
            }
            raise PydanticCustomError(TWO_VALUES, "beside a cached content", found)
        return self

    @property
    def continues(self) -> str | None:
        """Name of the cached content."""
        return self.cachedContent

    def order(self, salt: str, max_tokens: int) -> CompletionRequest:
        """Return what to generate. ``max_tokens``: the most tokens if the request doesn't say."""
        config = self.generationConfig or GenerationConfig.model_validate({})
        fields: dict[str, Any] = {
            "prompt": "-",
            "salt": salt,
            "adapter": self.adapter,
            "hints": self.hints,
            "ignore_eos": self.ignoreEos,
            "temperature": config.temperature,
            "top_p": config.topP,
            "top_k": None if config.topK is None else int(config.topK),
            "stop": config.stopSequences,
            "seed": config.seed,
            "max_tokens": config.maxOutputTokens or max_tokens,
        }
        return CompletionRequest.model_validate(fields)


class ChatDocument(RequestBody):
    """A chat in the form that chat templates take."""

    turns: Annotated[list[JsonObject], Field(max_length=2 * MAX_TURNS * MAX_PARTS)]
    tools: Annotated[list[JsonObject], Field(max_length=MAX_TOOLS * MAX_TOOLS)]


class JoinedChat(ConversationBody):
    """A cached content and the chat that continues it. Made by the service from two ``Prompt.text``."""

    without_prompts: ClassVar[Mapping[str, object]] = {"before": None, "after": None}
    max_values: ClassVar[int | None] = 2 * MAX_VALUES
    prompt_field: ClassVar[str] = "contents"

    before: ChatDocument | None = None
    after: ChatDocument | None = None

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns of both."""
        return [turn for each in (self.before, self.after) if each is not None for turn in each.turns]

    def tool_specs(self) -> list[dict[str, Any]]:
        """Return the functions of the cached content."""
        return [] if self.before is None else list(self.before.tools)


class CachedContentUsage(ReplyBody):
    """What a cached content holds."""

    totalTokenCount: int = Field(description="tokens that stay resident, in whole blocks")


class CachedContentReply(ReplyBody):
    """A cached content."""

    name: str = Field(description="cachedContents/ and an id")
    model: str
    displayName: str = ""
    createTime: str
    updateTime: str = Field(description="time of the last create or update that this replica received")
    expireTime: str
    usageMetadata: CachedContentUsage


class CachedContentsReply(ReplyBody):
    """A page of the caller's cached contents."""

    cachedContents: list[CachedContentReply]
    nextPageToken: str = Field(
        "", description="the query's pageToken for the next page; empty: there is none"
    )


class NoReply(ReplyBody):
    """An empty object."""


class FunctionCallAnswer(ReplyBody):
    """A call of the model."""

    id: str
    name: str
    args: dict[str, Any]


class TextAnswerPart(ReplyBody):
    """A text of the answer."""

    text: str


class CallAnswerPart(ReplyBody):
    """A call in the answer."""

    functionCall: FunctionCallAnswer


class AnswerContent(ReplyBody):
    """The answer's parts."""

    role: Literal["model"] = "model"
    parts: Sequence[TextAnswerPart | CallAnswerPart]


class Candidate(ReplyBody):
    """The answer. In a stream: its next parts."""

    index: int = 0
    content: AnswerContent
    finishReason: Literal["STOP", "MAX_TOKENS"] | None = Field(None, description="null: not finished yet")


class ContentUsage(ReplyBody):
    """Tokens of the prompt, with the cached content, and of the answer."""

    promptTokenCount: int
    cachedContentTokenCount: int = Field(description="tokens of the prompt that were read from the cache")
    candidatesTokenCount: int
    totalTokenCount: int


class GenerateContentReply(ReplyBody):
    """Gemini's answer. In a stream: one chunk."""

    candidates: list[Candidate]
    usageMetadata: ContentUsage | None = Field(
        None, description="null in all chunks of a stream but the last"
    )
    modelVersion: str
    responseId: str
