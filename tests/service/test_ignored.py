"""Fields that change nothing: each entry of the table is accepted and dropped, and what would change the answer is
refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from radixkv.service.problems import ApiError
from radixkv.service.prompts import PromptRules
from radixkv.service.reading import Reader, Reading
from radixkv.service.schemas.base import RequestBody
from radixkv.service.schemas.chat import ChatRequest
from radixkv.service.schemas.completions import CompletionRequest
from radixkv.service.schemas.contents import GenerateContentRequest
from radixkv.service.schemas.ignored import TABLE, Ignored
from radixkv.service.schemas.messages import MessagesRequest
from radixkv.service.schemas.responses import ResponsesRequest
from radixkv.tokenizer import load_tokenizer

Json = dict[str, Any]
Path = tuple[str | int, ...]
READER = Reader(load_tokenizer(), PromptRules(8000, 8192, 16, 16384))
TEXT = {"type": "text", "text": "Why?"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

BODIES: Mapping[str, tuple[type[RequestBody], Json, Mapping[str, Path]]] = {
    "/v1/chat/completions": (
        ChatRequest,
        {
            "messages": [
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "12"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "stream": True,
            "stream_options": {},
        },
        {
            "": (),
            "stream_options": ("stream_options",),
            "messages[]": ("messages", 1),
            "messages[].tool_calls[]": ("messages", 1, "tool_calls", 0),
            "messages[].tool_calls[].function": ("messages", 1, "tool_calls", 0, "function"),
            "tools[].function": ("tools", 0, "function"),
        },
    ),
    "/v1/completions": (
        CompletionRequest,
        {"prompt": "Why?", "stream": True, "stream_options": {}},
        {"": (), "stream_options": ("stream_options",)},
    ),
    "/v1/responses": (
        ResponsesRequest,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "12"},
            ],
            "tools": [{"type": "function", "name": "f"}],
            "text": {},
        },
        {
            "": (),
            "text": ("text",),
            "input[] (messages)": ("input", 0),
            "input[] (calls)": ("input", 1),
            "input[] (results)": ("input", 2),
            "input[].content[]": ("input", 0, "content", 0),
            "tools[]": ("tools", 0),
        },
    ),
    "/v1/messages": (
        MessagesRequest,
        {
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": [TEXT]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "12"}]},
            ],
            "tools": [{"name": "f", "input_schema": {}}],
            "cache_control": {"type": "ephemeral"},
            "output_config": {},
        },
        {
            "": (),
            "cache_control": ("cache_control",),
            "output_config": ("output_config",),
            "content[] (texts)": ("messages", 0, "content", 0),
            "content[] (calls)": ("messages", 1, "content", 0),
            "content[] (results)": ("messages", 2, "content", 0),
            "tools[]": ("tools", 0),
        },
    ),
    ":generateContent": (
        GenerateContentRequest,
        {
            "contents": [
                {"role": "user", "parts": [{"text": "Why?"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
                {
                    "role": "user",
                    "parts": [{"functionResponse": {"name": "f", "response": {"result": "12"}}}],
                },
            ],
            "tools": [{"functionDeclarations": [{"name": "f"}]}],
            "generationConfig": {},
        },
        {
            "": (),
            "generationConfig": ("generationConfig",),
            "parts[]": ("contents", 0, "parts", 0),
            "parts[].functionCall": ("contents", 1, "parts", 0, "functionCall"),
            "parts[].functionResponse": ("contents", 2, "parts", 0, "functionResponse"),
            "functionDeclarations[]": ("tools", 0, "functionDeclarations", 0),
        },
    ),
}


def read(model: type[RequestBody], body: Json) -> Reading[Any]:
    return READER.read(json.dumps(body).encode(), model)


def changed(body: Json, path: Path, name: str, value: Any) -> Json:
    """A body with one more field in the object at a path."""
    found = copy.deepcopy(body)
    inner: Any = found
    for part in path:
        inner = inner[part]
    inner[name] = value
    return found


def accepted(entry: Ignored) -> list[Any]:
    """Values that the table says change nothing."""
    if entry.names:
        one = {name: accepted(each)[0] for name, each in entry.names.items() if accepted(each)}
        values: list[Any] = [one, {}]
    else:
        values = ["x", 5, {"a": [1]}, None] if entry.values is None else [*entry.values, None]
    return [[each] for each in values if each is not None] + [[]] if entry.many else values


ENTRIES = [
    (api, place, name, entry)
    for api, places in TABLE.items()
    for place, drops in places.items()
    for name, entry in drops.items()
]


@pytest.mark.parametrize(
    ("api", "place", "name", "entry"), ENTRIES, ids=[f"{e[0]} {e[1]}.{e[2]}" for e in ENTRIES]
)
def test_an_entry_changes_nothing_or_is_refused_by_name(
    api: str, place: str, name: str, entry: Ignored
) -> None:
    model, body, places = BODIES[api]
    before = read(model, body)
    for value in accepted(entry):
        found = read(model, changed(body, places[place], name, value))
        assert (found.body, found.prompts) == (before.body, before.prompts), value
    if entry.values is None and not entry.names:
        return
    with pytest.raises(ApiError) as refused:
        read(model, changed(body, places[place], name, ["something", "else"]))
    said = refused.value.body
    assert name in said["field"] and "is not supported, because " in said["message"]
    assert entry.about in said["message"] and said["allowed"]


def test_the_table_has_bodies_of_all_its_places() -> None:
    assert {api: list(places) for api, places in TABLE.items()} == {
        api: list(places) for api, (_, _, places) in BODIES.items()
    }


REFUSED: list[tuple[str, Json, str]] = [
    ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("/v1/chat/completions", {"store": True}, "store"),
    ("/v1/chat/completions", {"web_search_options": {}}, "web_search_options"),
    ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ("/v1/responses", {"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.effort"),
    ("/v1/responses", {"include": ["reasoning.encrypted_content", "x"]}, "include[1]"),
    ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"context_management": [{"type": "compaction"}]}, "context_management"),
    ("/v1/responses", {"tools": [{"type": "web_search", "filters": {}}]}, "tools[0].type"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ("/v1/messages", {"thread": {"type": "create"}}, "thread"),
    ("/v1/responses", {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input[0].type"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
    (
        "/v1/messages",
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0].type",
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
            ]
        },
        "messages[0].content[0].type",
    ),
    (
        "/v1/messages",
        {"tools": [{"type": "web_search_20250305", "name": "s", "max_uses": 5}]},
        "tools[0].type",
    ),
    (
        ":generateContent",
        {"generationConfig": {"thinkingConfig": {"thinkingBudget": 8192}}},
        "generationConfig.thinkingConfig.thinkingBudget",
    ),
    (":generateContent", {"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
]


@pytest.mark.parametrize(("api", "fields", "named"), REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(api: str, fields: Json, named: str) -> None:
    model, body, _ = BODIES[api]
    with pytest.raises(ApiError) as refused:
        read(model, {**body, **fields})
    assert refused.value.body["field"] == named, refused.value.body


def test_names_in_snake_case_are_known_to_google() -> None:
    model, body, _ = BODIES[":generateContent"]
    config = {"thinking_config": {"thinking_budget": 0, "include_thoughts": True}, "candidate_count": 1}
    fields = {"generation_config": config, "safety_settings": [{"category": "x"}]}
    found = read(model, {**{name: body[name] for name in ("contents", "tools")}, **fields})
    assert found.prompts == read(model, body).prompts


def leaves(drops: Mapping[str, Ignored]) -> Iterator[Ignored]:
    for entry in drops.values():
        yield entry
        yield from leaves(entry.names)


def test_each_entry_says_why() -> None:
    for places in TABLE.values():
        for drops in places.values():
            assert all(entry.about for entry in leaves(drops))
