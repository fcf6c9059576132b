"""The turns that chat templates get: what the client sent, in one form for all APIs."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.service.schemas.chat import ChatRequest
from radixkv.service.schemas.contents import GenerateContentRequest
from radixkv.service.schemas.conversations import ConversationBody
from radixkv.service.schemas.messages import MessagesRequest
from radixkv.service.schemas.responses import ResponsesRequest
from tests.service.running import Running
from tests.service.test_shapes import saying

Turn = dict[str, Any]


def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def call(arguments: object, call_id: str = "c1") -> Turn:
    return {"id": call_id, "type": "function", "function": {"name": "find", "arguments": arguments}}


CASES: list[tuple[type[ConversationBody], dict[str, Any], list[Turn]]] = [
    (
        ChatRequest,
        {
            "messages": [
                {"role": "developer", "content": parts("Be", " brief.")},
                {"role": "user", "name": "ada", "content": "Why?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [call('{"a": [1]}'), call('{"a"', "c2")],
                },
                {"role": "tool", "tool_call_id": "c1", "content": parts("12")},
                {"role": "tool", "tool_call_id": "c2", "content": "none"},
                {"role": "assistant", "content": "", "name": "radix"},
                {"role": "user", "content": []},
                {"role": "assistant"},
            ]
        },
        [
            {"role": "system", "content": parts("Be", " brief.")},
            {"role": "user", "content": "Why?", "name": "ada"},
            {"role": "assistant", "content": None, "tool_calls": [call({"a": [1]}), call('{"a"', "c2")]},
            {"role": "tool", "content": parts("12"), "tool_call_id": "c1"},
            {"role": "tool", "content": "none", "tool_call_id": "c2"},
            {"role": "assistant", "content": "", "name": "radix"},
            {"role": "user", "content": []},
            {"role": "assistant", "content": None},
        ],
    ),
    (
        ResponsesRequest,
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": parts("Why", "?", kind="input_text")},
                {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
                {"type": "message", "role": "assistant", "content": parts("Look.", kind="output_text")},
                {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "cut"},
                {"type": "function_call_output", "call_id": "c1", "output": "12"},
                {"role": "assistant", "content": "It is 12."},
            ],
        },
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": parts("Why", "?")},
            {"role": "assistant", "content": parts("Look."), "tool_calls": [call({}), call("cut")]},
            {"role": "tool", "tool_call_id": "c1", "content": "12"},
            {"role": "assistant", "content": "It is 12."},
        ],
    ),
    (
        MessagesRequest,
        {
            "max_tokens": 1,
            "system": parts("Be", " brief."),
            "messages": [
                {"role": "user", "content": "Why?"},
                {
                    "role": "assistant",
                    "content": [
                        *parts("I look."),
                        {"type": "tool_use", "id": "c1", "name": "find", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": parts("1", "2")},
                        {"type": "tool_result", "tool_use_id": "c2"},
                        *parts("Go", " on."),
                    ],
                },
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "find", "input": {}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}]},
                {"role": "assistant", "content": []},
                {"role": "user", "content": parts("Go on.")},
            ],
        },
        [
            {"role": "system", "content": parts("Be", " brief.")},
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": parts("I look."), "tool_calls": [call({"a": 1})]},
            {"role": "tool", "tool_call_id": "c1", "content": parts("1", "2")},
            {"role": "tool", "tool_call_id": "c2", "content": ""},
            {"role": "user", "content": parts("Go", " on.")},
            {"role": "assistant", "content": None, "tool_calls": [call({})]},
            {"role": "tool", "tool_call_id": "c1", "content": "x"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": parts("Go on.")},
        ],
    ),
    (
        GenerateContentRequest,
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "Why"}, {"text": "?"}]},
                {
                    "role": "model",
                    "parts": [{"functionCall": {"id": "c1", "name": "find", "args": {"a": 1}}}],
                },
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"id": "c1", "name": "find", "response": {"result": "12"}}},
                        {"text": "Go on."},
                    ],
                },
                {"role": "model", "parts": []},
                {"role": "user", "parts": [{"text": "Go on."}]},
                {"role": "model", "parts": [{"text": "I"}]},
                {"role": "model", "parts": [{"text": " look."}]},
                {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "find", "args": {}}}]},
                {"role": "model", "parts": [{"functionCall": {"id": "c2", "name": "find", "args": {}}}]},
            ],
        },
        [
            {"role": "system", "content": parts("Be brief.")},
            {"role": "user", "content": parts("Why", "?")},
            {"role": "assistant", "content": None, "tool_calls": [call({"a": 1})]},
            {"role": "tool", "name": "find", "tool_call_id": "c1", "content": "12"},
            {"role": "user", "content": parts("Go on.")},
            {"role": "assistant", "content": None},
            {"role": "user", "content": parts("Go on.")},
            {"role": "assistant", "content": parts("I", " look."), "tool_calls": [call({}), call({}, "c2")]},
        ],
    ),
]


@pytest.mark.parametrize(("model", "body", "turns"), CASES, ids=[case[0].__name__ for case in CASES])
def test_turns_are_what_the_client_sent(
    model: type[ConversationBody], body: dict[str, Any], turns: list[Turn]
) -> None:
    assert model.model_validate(body).turns() == turns


def test_functions_of_a_namespace_have_its_name(live: Running) -> None:
    function = {"type": "function", "name": "spawn", "description": "Start one."}
    group = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [function]}
    called = {
        "type": "function_call",
        "call_id": "c1",
        "namespace": "agents",
        "name": "spawn",
        "arguments": "{}",
    }
    body = ResponsesRequest.model_validate(
        {"input": [called], "tools": [group, {"type": "function", "name": "find"}]}
    )
    names = [spec["function"]["name"] for spec in body.tool_specs()]
    assert names == ["agents.spawn", "find"]
    assert body.tool_specs()[0]["function"]["description"] == "Agents.\nStart one."
    assert body.turns()[0]["tool_calls"][0]["function"]["name"] == "agents.spawn"
    text = '<tool_call>{"name": "agents.spawn", "arguments": {}}</tool_call>'
    with saying(live, text):
        answer = live.acme.post(
            "/v1/responses", json={"input": "x", "tools": [group], "max_output_tokens": 99}
        )
    (found,) = answer.json()["output"]
    assert (found["namespace"], found["name"]) == ("agents", "spawn")


def test_a_breakpoint_ends_after_its_part(live: Running) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    content = [*parts("One. "), {**parts("Two. ")[0], **mark}, *parts("Three.")]
    message = {"role": "user", "name": "ada", "content": content}
    body = ChatRequest.model_validate({"messages": [message], "prompt_cache_options": {"mode": "explicit"}})
    (found,) = body.breakpoints()
    assert found.turns == [{"role": "user", "name": "ada", "content": parts("One. ", "Two. ")}]


def test_parts_and_their_text_are_one_prompt_for_a_template_of_texts(live: Running) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        for content in ("Which page explains pins?", parts("Which page", " explains pins?"))
    ]
    one, other = (live.acme.post("/v1/chat/completions", json=body).json()["usage"] for body in bodies)
    assert one["prompt_tokens"] == other["prompt_tokens"]
