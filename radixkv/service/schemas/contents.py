"""Gemini's cached contents, and generation from contents, as far as cached contents need it.

The names are Google's, so they are in camel case; bodies may have them in snake case. Texts and calls of functions are
served. No address is ever fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from radixkv.service.schemas import ignored
from radixkv.service.schemas.base import MAX_NAME, TWO_VALUES, ReplyBody, RequestBody
from radixkv.service.schemas.chat import DEFAULT_MAX_TOKENS, call_of
from radixkv.service.schemas.completions import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    CompletionRequest,
    Hints,
    Penalty,
)
from radixkv.service.schemas.conversations import (
    CalledName,
    CallId,
    ConversationBody,
    JsonObject,
    joined,
)
from radixkv.service.schemas.prompts import Adapter
from radixkv.service.schemas.structured import MAX_TOP_LOGPROBS, JsonSchema, Wanted

MAX_DISPLAY_NAME = 128
_FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_][a-zA-Z0-9_.:-]{0,127}$")]
MAX_FUNCTIONS = 512
"""Functions of a tool, as Google documents it."""
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
    drops: ignored.Drops = getattr(model, "drops", {})
    found = {
        re.sub("([A-Z])", lambda letter: f"_{letter[1].lower()}", name): name
        for name in (*model.model_fields, *drops)
    }
    return {snake: name for snake, name in found.items() if snake != name}


class FunctionCallPart(GoogleBody):
    """A call that the model made."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE[":generateContent"]["parts[].functionCall"]

    id: CallId | None = None
    name: CalledName
    args: JsonObject = Field(default_factory=dict)


class FunctionResponsePart(GoogleBody):
    """The result of a call."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE[":generateContent"]["parts[].functionResponse"]

    id: CallId | None = None
    name: CalledName
    response: JsonObject


class Part(GoogleBody):
    """A text, a call or a result: exactly one of them."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE[":generateContent"]["parts[]"]

    text: str | None = None
    functionCall: FunctionCallPart | None = None
    functionResponse: FunctionResponsePart | None = None

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
    parts: Annotated[list[Part], Field(fail_fast=True)] = Field(default_factory=list)

    @property
    def texts(self) -> list[dict[str, str]]:
        """Its texts, as parts in the form that chat templates take."""
        return [{"type": "text", "text": part.text} for part in self.parts if part.text is not None]

    def turns(self) -> Iterator[dict[str, Any]]:
        """Yield its turns in the form that chat templates take: results first, then the rest."""
        for part in self.parts:
            if part.functionResponse is not None:
                yield _result(part.functionResponse)
        calls = [_call(part.functionCall) for part in self.parts if part.functionCall is not None]
        if calls or self.texts or not self.parts:
            role = "assistant" if self.role == "model" or calls else "user"
            content = self.texts or (None if role == "assistant" else "")
            yield {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})


def _call(part: FunctionCallPart) -> dict[str, Any]:
    return call_of(part.id or part.name, part.name, part.args)


def _result(part: FunctionResponsePart) -> dict[str, Any]:
    content = part.response.get("output", part.response.get("result", part.response))
    text = content if isinstance(content, str) else to_json(content)
    return {"role": "tool", "name": part.name, "tool_call_id": part.id or part.name, "content": text}


def to_json(value: object) -> str:
    """Return a result of a function as the text that the model reads."""
    return json.dumps(value, ensure_ascii=False)


_TYPES: Final = ("string", "number", "integer", "boolean", "array", "object", "null")
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_GOOGLES_ALONE: Final = frozenset({"nullable", "propertyOrdering", "example"})


def json_schema_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema from Google's form of one: types in capitals, ``nullable``, counts that may be texts.

    Properties have the order of ``propertyOrdering``. An object has no others, unless ``additionalProperties`` says so.
    """
    found: dict[str, Any] = {}
    for key, value in schema.items():
        name = _SCHEMA_NAMES.get(key, key)
        if name == "type" and isinstance(value, str) and value.lower() in _TYPES:
            found[name] = value.lower()
        elif name in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit():
            found[name] = int(value[:18])
        elif name == "properties" and isinstance(value, dict):
            order = schema.get("propertyOrdering", schema.get("property_ordering"))
            first = [each for each in order if each in value] if isinstance(order, list) else []
            found[name] = {each: _inner(value[each]) for each in dict.fromkeys([*first, *value])}
        elif name in ("$defs", "defs") and isinstance(value, dict):
            found["$defs"] = {each: _inner(inner) for each, inner in value.items()}
        elif name == "anyOf" and isinstance(value, list):
            found[name] = [_inner(each) for each in value]
        elif name in ("items", "additionalProperties"):
            found[name] = _inner(value)
        elif name == "ref":
            found["$ref"] = value
        elif name == "format" and value == "enum":
            continue
        elif name not in _GOOGLES_ALONE:
            found[name] = value
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


def _inner(schema: Any) -> Any:
    return json_schema_of(schema) if isinstance(schema, dict) else schema


_SCHEMA_NAMES: Final[Mapping[str, str]] = {
    re.sub("([A-Z])", lambda letter: f"_{letter[1].lower()}", name): name
    for name in (*_COUNTS, "anyOf", "additionalProperties", "propertyOrdering")
}
"""Fields of schemas by their names in snake case."""


class FunctionDeclaration(GoogleBody):
    """A function that the model may call, with the schema of its arguments in one of two fields."""

    drops: ClassVar[ignored.Drops] = ignored.TABLE[":generateContent"]["functionDeclarations[]"]

    name: _FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    parametersJsonSchema: JsonObject | None = None

    def spec(self) -> dict[str, Any]:
        """Return the function in the form that chat templates take."""
        parameters = self.parametersJsonSchema or (self.parameters and json_schema_of(self.parameters))
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {
            "type": "function",
            "function": {name: value for name, value in function.items() if value is not None},
        }


class ContentTool(GoogleBody):
    """Functions. Tools of the provider's servers aren't served."""

    functionDeclarations: Annotated[
        list[FunctionDeclaration], Field(max_length=MAX_FUNCTIONS, fail_fast=True)
    ]


class FunctionCallingConfig(GoogleBody):
    """Whether the model sees the functions, and has to call one of them: ANY."""

    mode: Literal["AUTO", "NONE", "ANY", "MODE_UNSPECIFIED"] = "AUTO"
    allowedFunctionNames: (
        Annotated[list[_FunctionName], Field(max_length=MAX_FUNCTIONS, fail_fast=True)] | None
    ) = Field(None, description="with ANY: the functions that may be called; null or empty: all")

    @model_validator(mode="after")
    def _names_of_forced(self) -> FunctionCallingConfig:
        if self.allowedFunctionNames and self.mode != "ANY":
            found = {"name": "allowedFunctionNames", "value": self.mode, "allowed": "mode ANY with it"}
            raise PydanticCustomError(TWO_VALUES, "names without their mode", found)
        return self


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
    prompt_field: ClassVar[str] = "contents"

    contents: Annotated[list[ContentTurn], Field(fail_fast=True)] = Field(
        default_factory=list, description="the conversation"
    )
    systemInstruction: ContentTurn | None = Field(None, description="the system's text")
    tools: Annotated[list[ContentTool], Field(fail_fast=True)] | None = None
    toolConfig: ContentToolConfig | None = None

    def turns(self) -> list[dict[str, Any]]:
        """Return the conversation in the form that chat templates take."""
        system = self.systemInstruction
        first = [] if system is None else [{"role": "system", "content": system.texts}]
        return [*first, *joined(turn for content in self.contents for turn in content.turns())]

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

    @model_validator(mode="after")
    def _forces_nothing(self) -> CachedContentRequest:
        config = None if self.toolConfig is None else self.toolConfig.functionCallingConfig
        if config is not None and config.mode == "ANY":
            found = {"name": "toolConfig", "value": "ANY", "allowed": "AUTO or NONE in a cached content"}
            raise PydanticCustomError(TWO_VALUES, "forced calls", found)
        return self

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

    drops: ClassVar[ignored.Drops] = ignored.TABLE[":generateContent"]["generationConfig"]

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
    responseMimeType: Literal["text/plain", "application/json"] = Field(
        default="text/plain",
        description="application/json: the answer is a JSON value, of a schema if there is one",
    )
    responseSchema: JsonSchema | None = Field(default=None, description="a schema of Google's form")
    responseJsonSchema: JsonSchema | None = Field(default=None, description="a JSON schema")
    presencePenalty: Penalty = Field(
        default=0.0, description="subtracted from the scores of tokens that the answer has"
    )
    frequencyPenalty: Penalty = Field(default=0.0, description="the same, for each time")
    responseLogprobs: bool = Field(default=False, description="log probabilities of the answer's tokens")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="with responseLogprobs: of as many of the likeliest tokens at each place",
    )

    @model_validator(mode="after")
    def _together(self) -> GenerationConfig:
        schemas = [name for name in ("responseSchema", "responseJsonSchema") if getattr(self, name)]
        found: dict[str, Any] | None = None
        if len(schemas) > 1:
            found = {
                "name": schemas[1],
                "value": "given",
                "allowed": "one of responseSchema and responseJsonSchema",
            }
        elif schemas and self.responseMimeType != "application/json":
            found = {
                "name": schemas[0],
                "value": "given",
                "allowed": "responseMimeType: application/json with it",
            }
        elif self.logprobs and not self.responseLogprobs:
            found = {"name": "logprobs", "value": self.logprobs, "allowed": "responseLogprobs: true with it"}
        if found is not None:
            raise PydanticCustomError(TWO_VALUES, "a field without another", found)
        return self

    @property
    def response_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of the answer; None for text."""
        if self.responseMimeType != "application/json":
            return None
        if self.responseSchema:
            return json_schema_of(self.responseSchema)
        return self.responseJsonSchema or {}


class GenerateContentRequest(ContentChat):
    """Gemini's request for an answer, with salt, adapter, hints and ignoreEos.

    With ``cachedContent`` the chat continues that content, in the content's namespace.
    """

    drops: ClassVar[ignored.Drops] = ignored.CONTENTS

    contents: Annotated[list[ContentTurn], Field(fail_fast=True)] = Field(description="the conversation")
    cachedContent: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of a cached content, which comes before the contents"
    )
    generationConfig: GenerationConfig | None = None
    adapter: Adapter | None = None
    hints: Hints | None = None
    ignoreEos: bool = Field(
        False, description="go on to maxOutputTokens, also after the end-of-sequence token"
    )

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

    def wanted(self) -> Wanted:
        """Return what the answer has to be."""
        config = self.generationConfig
        calling = None if self.toolConfig is None else self.toolConfig.functionCallingConfig
        must_call = calling is not None and calling.mode == "ANY"
        names = () if calling is None else calling.allowedFunctionNames or ()
        return Wanted(
            None if config is None else config.response_schema,
            "generationConfig.responseSchema",
            must_call,
            tuple(names) or None,
            choice_field="toolConfig.functionCallingConfig.allowedFunctionNames",
        )

    def without_long(self) -> Self:
        """Leave the schemas out too."""
        config = self.generationConfig
        if config is not None:
            config = config.model_copy(update={"responseSchema": None, "responseJsonSchema": None})
        return super().without_long().model_copy(update={"generationConfig": config})

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
            "presence_penalty": config.presencePenalty,
            "frequency_penalty": config.frequencyPenalty,
            "logprobs": (config.logprobs or 0) if config.responseLogprobs else None,
        }
        return CompletionRequest.model_validate(fields)


class CountedRequest(GenerateContentRequest):
    """The request for an answer whose tokens are counted."""

    drops: ClassVar[ignored.Drops] = {
        **GenerateContentRequest.drops,
        "model": ignored.Ignored("the path names the model"),
        "cachedContent": ignored.Ignored("the tokens of a cached content are counted when it is made", ()),
    }


class CountContentsRequest(ContentChat):
    """Contents to count: as they are, or as the request for an answer to them."""

    without_prompts: ClassVar[Mapping[str, object]] = {
        **ContentChat.without_prompts,
        "generateContentRequest": None,
    }

    generateContentRequest: CountedRequest | None = Field(
        None, description="a whole request, in place of contents"
    )

    @model_validator(mode="after")
    def _one_chat(self) -> CountContentsRequest:
        if (self.generateContentRequest is None) == (not self.contents):
            found = {
                "name": "contents",
                "value": "both" if self.contents else "none",
                "allowed": "contents, or generateContentRequest in their place",
            }
            raise PydanticCustomError(TWO_VALUES, "not one chat", found)
        return self

    def turns(self) -> list[dict[str, Any]]:
        """Return the conversation in the form that chat templates take."""
        asked = self.generateContentRequest
        return super().turns() if asked is None else asked.turns()

    def tool_specs(self) -> list[dict[str, Any]]:
        """Return the functions that the model may call."""
        asked = self.generateContentRequest
        return super().tool_specs() if asked is None else asked.tool_specs()


def _iso_time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is not None:
        raise ValueError("a local time has no offset")
    return text


class ChatDocument(RequestBody):
    """A chat in the form that chat templates take."""

    turns: list[JsonObject]
    tools: list[JsonObject]
    now: Annotated[str, Field(max_length=32), AfterValidator(_iso_time)] | None = None
    """The time with which it is rendered; None: the present."""


class JoinedChat(ConversationBody):
    """A cached content and the chat that continues it. Made by the service from two ``Prompt.text``."""

    without_prompts: ClassVar[Mapping[str, object]] = {"before": None, "after": None}
    prompt_field: ClassVar[str] = "contents"

    before: ChatDocument | None = None
    after: ChatDocument | None = None

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns of both."""
        return [turn for each in (self.before, self.after) if each is not None for turn in each.turns]

    def tool_specs(self) -> list[dict[str, Any]]:
        """Return the functions of the cached content."""
        return [] if self.before is None else list(self.before.tools)

    @property
    def rendered_at(self) -> str | None:
        """The time of the cached content."""
        return None if self.before is None else self.before.now


class CountContentsReply(ReplyBody):
    """The length of contents."""

    totalTokens: int = Field(description="tokens of the contents up to the opening of the answer")


class ContentModelReply(ReplyBody):
    """Gemini's model object."""

    name: str = Field(description="models/ and the name of the served model")
    baseModelId: str
    version: str = "1"
    displayName: str
    inputTokenLimit: int = Field(description="most tokens of a prompt")
    outputTokenLimit: int = Field(description="most tokens of a prompt with its answer")
    supportedGenerationMethods: Sequence[str] = (
        "generateContent",
        "streamGenerateContent",
        "countTokens",
        "createCachedContent",
    )


class ContentModelsReply(ReplyBody):
    """Gemini's list of models: the one that this service serves."""

    models: list[ContentModelReply]


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


class LogprobsCandidate(ReplyBody):
    """A token and the natural logarithm of its probability."""

    token: str
    tokenId: int
    logProbability: float


class TopCandidates(ReplyBody):
    """The likeliest tokens of a step, likeliest first."""

    candidates: list[LogprobsCandidate]


class LogprobsResult(ReplyBody):
    """The log probabilities of the answer's tokens, and of the likeliest ones at each place."""

    topCandidates: list[TopCandidates]
    chosenCandidates: list[LogprobsCandidate]


class Candidate(ReplyBody):
    """The answer. In a stream: its next parts."""

    index: int = 0
    content: AnswerContent
    finishReason: Literal["STOP", "MAX_TOKENS"] | None = Field(None, description="null: not finished yet")
    avgLogprobs: float | None = Field(
        default=None,
        description="with responseLogprobs: mean of the chosen tokens' log probabilities",
        exclude_if=lambda mean: mean is None,
    )
    logprobsResult: LogprobsResult | None = Field(
        default=None, description="with responseLogprobs", exclude_if=lambda result: result is None
    )


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
