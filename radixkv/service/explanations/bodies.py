"""From the bytes of a body to a request as the cache sees it: its namespace, and its conversation or prompt.

A body is bounded, parsed and validated as the service does. Where its API isn't told, its fields say it:

| field | API |
|---|---|
| ``contents`` | Gemini's contents |
| ``input`` | OpenAI's responses |
| ``prompt`` | completions |
| ``messages`` | Anthropic's messages if a field or a tool is theirs alone, otherwise OpenAI's chat completions |

A conversation is compared as the model reads it: after the rules for lines (``prompt_lines``). Each of its turns keeps
the name of the field that it comes from, such as ``messages[3]``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_core import from_json

from radixkv.errors import shown
from radixkv.service.budgets import budget_of
from radixkv.service.problems import ApiError, invalid
from radixkv.service.prompt_lines import applied
from radixkv.service.prompt_times import NO_TIMES, Times
from radixkv.service.prompts import PromptRules, prompts_of
from radixkv.service.reading import Reader
from radixkv.service.schemas.base import RequestBody
from radixkv.service.schemas.chat import ChatRequest
from radixkv.service.schemas.completions import CompletionRequest
from radixkv.service.schemas.contents import ChatDocument, CountedRequest, JoinedChat
from radixkv.service.schemas.conversations import ConversationBody
from radixkv.service.schemas.messages import CountTokensRequest, MessagesRequest
from radixkv.service.schemas.prompt_caching import uses_cache
from radixkv.service.schemas.responses import (
    CallItem,
    InputTokensRequest,
    MessageItem,
    NamespaceTool,
    ResponsesRequest,
)
from radixkv.tokenizer import Tokenizer
from radixkv.tokenizer.protocol import Tool, Turn

Api = Literal["chat", "messages", "responses", "contents", "completions"]
APIS: Final[tuple[Api, ...]] = get_args(Api)
_Chat = ChatRequest | MessagesRequest | ResponsesRequest | CountedRequest
_MODELS: Final[Mapping[Api, type[RequestBody]]] = {
    "chat": ChatRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
    "contents": CountedRequest,
    "completions": CompletionRequest,
}
_FIELD: Final[Mapping[str, Api]] = {
    "contents": "contents",
    "input": "responses",
    "prompt": "completions",
    "messages": "chat",
}
_ANTHROPIC: Final = frozenset(
    {"system", "stop_sequences", "thinking", "output_config", "output_format", "anthropic_version", "betas"}
)
"""Fields that only Anthropic's requests have."""
_PROMPT_FIELDS: Final = frozenset(
    {
        *("model", "salt", "cache_salt", "adapter", "messages", "system", "instructions", "input", "prompt"),
        *("contents", "tools", "systemInstruction", "system_instruction"),
    }
)
"""Fields that are compared by what they say. All others change no token of a prompt."""
_HIDING: Final = frozenset({"tool_choice", "toolConfig", "tool_config"})
"""Fields that may hide the tools from the model."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the form that chat templates take, after the rules for lines."""

    turns: Sequence[Turn]
    tools: Sequence[Tool]


Ids = NDArray[np.uint32]
"""Token ids ``[num_tokens]``."""
Content = Chat | str | tuple[int, ...]
"""What a prompt is made of: a conversation, a text, or token ids."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the cache sees it.

    - ``model``, ``adapter``, ``salt``: the parts of its namespace that a body names.
    - ``ids``: the token ids of its prompt, ``[num_tokens]``.
    - ``places``, ``tool_places``: the field from which each turn and each tool comes.
    - ``uses_cache``: whether it reads and writes the cache: not in explicit mode without breakpoints.
    - ``hides_tools``: whether it has tools that the model isn't shown.
    - ``fields``: its other fields, as sent.
    - ``rendering``: makes ids of changed contents.
    """

    api: Api
    model: str | None
    adapter: str | None
    salt: str
    content: Content
    ids: Ids = field(repr=False)
    places: Sequence[str]
    tool_places: Sequence[str]
    uses_cache: bool
    hides_tools: bool
    fields: Mapping[str, object] = field(repr=False)
    rendering: Rendering = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)


class Rendering:
    """Reads bodies, and renders contents, with one tokenizer and the rules of a service."""

    def __init__(self, tokenizer: Tokenizer, rules: PromptRules, times: Times = NO_TIMES) -> None:
        """``times``: with which conversations are rendered, if the tokenizer's template asks for the time."""
        self.tokenizer, self.rules, self._times = tokenizer, rules, times
        self._reader = Reader(tokenizer, rules)
        self._read_rules = replace(rules, lines=())

    def ids(self, content: Content) -> Ids:
        """Return the token ids of a content, whose rules for lines were applied. Raises ApiError."""
        if isinstance(content, Chat):
            turns, tools = [dict(turn) for turn in content.turns], [dict(tool) for tool in content.tools]
            document = ChatDocument.model_construct(turns=turns, tools=tools)
            body: JoinedChat | CompletionRequest = JoinedChat.model_construct(before=document)
        else:
            prompt = content if isinstance(content, str) else list(content)
            body = CompletionRequest.model_construct(prompt=prompt)
        (found,) = prompts_of(body, self.tokenizer, self._read_rules, self._times)
        return found.ids

    def read(self, raw: bytes, api: Api | None = None) -> Request:
        """Return the request of a body. Raises ApiError: as the service does, and for what can't be compared."""
        given = _parsed(raw, self.rules.max_ids)
        api = _api_of(given) if api is None else api
        for name in ("cachedContent", "cached_content") if api == "contents" else ():
            if given.get(name) is not None:
                allowed = "left out, with the fields of that content in the body"
                raise invalid(f"the body lacks the chat of its {name}", name, given[name], allowed)
        model = _MODELS[api]
        prompts = self._reader.read(raw, model, self._times).prompts
        body = _validated(raw, model)
        others = {name: value for name, value in given.items() if name not in _PROMPT_FIELDS}
        content: Content
        places: Sequence[str] = ("prompt",)
        tool_places: Sequence[str] = ()
        if isinstance(body, CompletionRequest):
            if len(prompts) > 1:
                raise invalid("prompt has several prompts", "prompt", len(prompts), "one prompt")
            prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
            content = prompt if isinstance(prompt, str) else tuple(prompts[0].ids.tolist())
        else:
            assert isinstance(body, _Chat)
            turns, places = self._as_read(body)
            content = Chat(turns, body.tool_specs())
            tool_places = _tool_places(body)
        return Request(
            api,
            _model_name(given),
            body.adapter,
            body.salt,
            content,
            prompts[0].ids,
            places,
            tool_places,
            not isinstance(body, ChatRequest | ResponsesRequest)
            or uses_cache(body.prompt_cache_options, len(body.breakpoints())),
            bool(given.get("tools")) and isinstance(content, Chat) and not content.tools,
            others,
            self,
        )

    def _as_read(self, body: ConversationBody) -> tuple[Sequence[Turn], Sequence[str]]:
        """Return the turns after the rules for lines, and where each comes from."""
        sent, places = body.turns(), _places(body)
        turns, used = applied(self.rules.lines, sent)
        assert len(places) == len(sent), "each turn comes from a field"
        if not used:
            return turns, places
        kept = [place for turn, place in zip(sent, places, strict=True) if self._is_kept(turn)]
        return turns, kept if len(kept) == len(turns) else places

    def _is_kept(self, turn: Turn) -> bool:
        """Whether the rules leave anything of a turn."""
        return len(applied(self.rules.lines, [turn, {"role": "assistant", "content": "x"}])[0]) == 2


def changed_fields(new: Request, earlier: Request) -> list[str]:
    """Return the fields that differ and change no token of the prompt, by name. O(size of the bodies)."""
    hides = new.hides_tools != earlier.hides_tools
    names = [
        name
        for name in sorted({*new.fields, *earlier.fields})
        if new.fields.get(name) != earlier.fields.get(name) and not (hides and name in _HIDING)
    ]
    return names if new.api == earlier.api else []


def num_common(left: Ids, right: Ids) -> int:
    """Return with how many equal ids both begin. O(n)."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(np.argmax(differs)) if differs.any() else size


def _parsed(raw: bytes, max_ids: int) -> dict[str, object]:
    """Return the JSON object of a body, of which nothing is validated yet. Raises ApiError."""
    allowed = "one JSON object"
    budget_of(CompletionRequest if b'"prompt"' in raw else ChatRequest, max_ids).check(raw)
    try:
        found = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is no JSON: {error}", allowed=allowed) from None
    if not isinstance(found, dict):
        raise invalid("the body is no object", None, found, allowed)
    return found


def _api_of(given: Mapping[str, object]) -> Api:
    found = [name for name in _FIELD if given.get(name) is not None]
    if len(found) != 1:
        allowed = "one of " + ", ".join(_FIELD)
        names = (
            ", ".join(found)
            if found
            else ", ".join(shown(name, 40) for name in list(given)[:8]) or "no field"
        )
        problem = f"the body has {names}: it is no request of a known API"
        raise invalid(problem, None, None, allowed)
    return "messages" if found == ["messages"] and _is_anthropic(given) else _FIELD[found[0]]


def _is_anthropic(given: Mapping[str, object]) -> bool:
    if any(given.get(name) is not None for name in _ANTHROPIC):
        return True
    tools, messages = given.get("tools"), given.get("messages")
    if any("input_schema" in each for each in _objects(tools)):
        return True
    blocks = (block for message in _objects(messages) for block in _objects(message.get("content")))
    return any("cache_control" in each or each.get("type") in ("tool_use", "tool_result") for each in blocks)


def _objects(value: object) -> Iterator[Mapping[str, object]]:
    return (each for each in value if isinstance(each, dict)) if isinstance(value, list) else iter(())


def _model_name(given: Mapping[str, object]) -> str | None:
    """Return the model that a body names; None: the one that is served."""
    name = given.get("model")
    return name.removeprefix("models/") if isinstance(name, str) else None


def _validated(raw: bytes, model: type[RequestBody]) -> RequestBody:
    """Return the body that the reader has accepted, with its long fields."""
    try:
        return model.model_validate_json(raw)
    except ValidationError:  # numbers such as 5.0, which a short body may have
        return model.model_validate(json.loads(raw, parse_float=_number))


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


# ---- where turns and tools come from


def _places(body: ConversationBody) -> list[str]:
    """Return the field of each turn. Turns of the assistant that follow each other are one, where an API joins them."""
    if isinstance(body, ChatRequest):
        return [f"messages[{index}]" for index in range(len(body.messages))]
    found: list[str] = []
    last = ""
    for role, place in _roles(body):
        if not (role == last == "assistant"):
            found.append(place)
        last = role
    return found


def _roles(body: ConversationBody) -> Iterator[tuple[str, str]]:
    """Yield the role and the field of each turn before any are joined."""
    if isinstance(body, CountTokensRequest):
        if body.system is not None:
            yield "system", "system"
        for index, message in enumerate(body.messages):
            for turn in message.turns():
                yield turn["role"], f"messages[{index}]"
    elif isinstance(body, InputTokensRequest):
        if body.instructions is not None:
            yield "system", "instructions"
        for index, item in enumerate(body.items):
            role = "assistant" if isinstance(item, CallItem) else "tool"
            place = "input" if isinstance(body.input, str) else f"input[{index}]"
            yield (item.role if isinstance(item, MessageItem) else role), place
    elif isinstance(body, CountedRequest):
        if body.systemInstruction is not None:
            yield "system", "systemInstruction"
        for index, content in enumerate(body.contents):
            for turn in content.turns():
                yield turn["role"], f"contents[{index}]"


def _tool_places(body: ConversationBody) -> list[str]:
    """Return the field of each tool that the model is shown."""
    if isinstance(body, CountedRequest):
        return [
            f"tools[{index}].functionDeclarations[{number}]"
            for index, tool in enumerate(body.tools or ())
            for number in range(len(tool.functionDeclarations))
        ]
    if isinstance(body, InputTokensRequest):
        return [
            f"tools[{index}].tools[{number}]" if isinstance(tool, NamespaceTool) else f"tools[{index}]"
            for index, tool in enumerate(body.tools or ())
            for number in range(len(tool.specs()))
        ]
    tools = body.tools if isinstance(body, ChatRequest | CountTokensRequest) else None
    return [f"tools[{index}]" for index in range(len(tools or ()))]
