"""What all shapes of providers share: calls of tools in answers, errors inside streams, and sums of usage.

The engine is the demo's, but its text is the test's: a random model never calls a tool.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from radixkv.engines import Generation
from radixkv.engines.steps import Steps
from radixkv.errors import OutOfBlocks
from radixkv.service.endpoints.completions import MAX_STEPS_AHEAD
from tests.service.running import Running

CALL = '<tool_call>\n{"name": "find_page", "arguments": {"topic": "pins"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"topic": {"type": "string"}}}
ASKED = "Which page explains pins?"
OPENAI_TOOL = {"type": "function", "function": {"name": "find_page", "parameters": SCHEMA}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [OPENAI_TOOL],
        "max_tokens": 200,
    },
    "/v1/responses": {
        "input": ASKED,
        "tools": [{"type": "function", "name": "find_page", "parameters": SCHEMA}],
        "max_output_tokens": 200,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{"name": "find_page", "input_schema": SCHEMA}],
        "max_tokens": 200,
    },
    "/v1beta/models/radixkv-demo:generateContent": {
        "contents": [{"role": "user", "parts": [{"text": ASKED}]}],
        "tools": [{"functionDeclarations": [{"name": "find_page", "parameters": SCHEMA}]}],
        "generationConfig": {"maxOutputTokens": 200},
    },
}
CHAT, RESPONSES, MESSAGES, CONTENTS = BODIES


@contextmanager
def saying(live: Running, text: str, *, fails_after: int | None = None) -> Iterator[None]:
    """Let the engine generate a text; with ``fails_after``, raise an error of capacity after so many tokens."""
    engine: Any = live.service.engine
    ids = live.service.tokenizer.encode(text)

    def generate(
        ns: Any, prompts: Any, max_new_tokens: int, admission: Any, *, on_step: Any, stop: Any, **_: Any
    ) -> Steps[Generation]:
        done: list[int] = []
        for token_id in ids:
            if len(done) == fails_after:
                raise OutOfBlocks(needed=4, free=1, evictable=0)
            done.append(token_id)
            on_step([[token_id]])
            if stop():
                break
            yield None
        lengths = [len(key) // 4 for key in prompts]
        return Generation([done], lengths, [0], ["stop"], 0.001, 0.002)

    engine.generating = generate
    try:
        yield
    finally:
        del engine.generating


def streamed(path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path and the body of the same request as a stream."""
    if path == CONTENTS:
        return path.replace(":generate", ":streamGenerate") + "?alt=sse", body
    return path, {**body, "stream": True}


def events(live: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    path, body = streamed(path, body)
    answer = live.acme.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, CONTENTS])
def test_the_demo_models_answers_end_soon_if_nothing_is_said(live: Running, path: str) -> None:
    """A random model goes on and on; as many tokens as fit would take a minute."""
    body = {
        name: value
        for name, value in BODIES[path].items()
        if not name.startswith(("max", "generation", "tools"))
    }
    answer = live.acme.post(path, json=body).json()
    usage = answer.get("usage") or answer["usageMetadata"]
    names = ("completion_tokens", "output_tokens", "candidatesTokenCount")
    assert 0 < next(usage[name] for name in names if name in usage) <= 64


def test_a_call_in_an_answer_has_each_shapes_form(live: Running) -> None:
    with saying(live, f"I look. {CALL}"):
        chat, response, message, content = (
            live.acme.post(path, json=body).json() for path, body in BODIES.items()
        )
    arguments = {"topic": "pins"}
    (choice,) = chat["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"].strip() == "I look."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == arguments
    text, call = response["output"]
    assert (text["type"], text["content"][0]["text"].strip()) == ("message", "I look.")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "find_page",
        arguments,
    )
    assert response["status"] == "completed"
    text, call = message["content"]
    assert text["text"].strip() == "I look." and message["stop_reason"] == "tool_use"
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "find_page", arguments)
    text, call = content["candidates"][0]["content"]["parts"]
    assert text["text"].strip() == "I look."
    assert (call["functionCall"]["name"], call["functionCall"]["args"]) == ("find_page", arguments)


@pytest.mark.parametrize("text", [f"I look. {CALL}", "I look."])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_call_marks_the_session_as_waiting_for_a_tool(
    live: Running, monkeypatch: pytest.MonkeyPatch, path: str, is_stream: bool, text: str
) -> None:
    noted: list[tuple[Any, ...]] = []

    def note(cache: Any, namespace: Any, key: bytes, hints: Any) -> None:
        noted.append((namespace.tenant, len(key) % 4, dict(hints.labels)))

    monkeypatch.setattr(type(live.service.cache), "note", note)
    with saying(live, text):
        if is_stream:
            events(live, path, BODIES[path])
        else:
            assert live.acme.post(path, json=BODIES[path]).status_code == 200
    assert noted == ([("acme", 0, {"tool_pending": True})] if CALL in text else [])


def test_a_call_in_a_stream_has_each_shapes_events(live: Running) -> None:
    with saying(live, f"I look. {CALL}"):
        chat, response, message, content = (events(live, path, body) for path, body in BODIES.items())
    deltas = [each["choices"][0]["delta"] for each in chat]
    (called,) = (each["tool_calls"][0] for each in deltas if each.get("tool_calls"))
    assert (
        called["function"]["name"] == "find_page" and chat[-1]["choices"][0]["finish_reason"] == "tool_calls"
    )

    assert [each["sequence_number"] for each in response] == list(range(len(response)))
    items = [each["item"] for each in response if each["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["message", "function_call"]
    assert response[-1]["response"]["output"] == items and response[-1]["type"] == "response.completed"
    added = [each for each in response if each["type"] == "response.output_item.added"]
    assert [each["output_index"] for each in added] == [0, 1]

    kinds = [each["type"] for each in message]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    starts = [each["content_block"]["type"] for each in message if each["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    pieces = [
        each["delta"].get("partial_json", "") for each in message if each["type"] == "content_block_delta"
    ]
    assert json.loads("".join(pieces)) == {"topic": "pins"}
    assert message[-2]["delta"]["stop_reason"] == "tool_use"

    parts = [part for each in content for part in each["candidates"][0]["content"]["parts"]]
    assert parts[-1]["functionCall"]["args"] == {"topic": "pins"}
    assert "".join(part.get("text", "") for part in parts).strip() == "I look."


def test_without_tools_the_same_text_is_text(live: Running) -> None:
    with saying(live, CALL):
        for path, body in BODIES.items():
            plain = {name: value for name, value in body.items() if name != "tools"}
            answer = live.acme.post(path, json=plain)
            assert "<tool_call>" in answer.text, path


@pytest.mark.parametrize("path", BODIES)
def test_an_error_inside_a_stream_has_the_shapes_form(live: Running, path: str) -> None:
    """After the first token the status is sent already. The model isn't further ahead than MAX_STEPS_AHEAD."""
    with saying(
        live, "One two three four five six seven eight nine ten. " * 8, fails_after=MAX_STEPS_AHEAD + 4
    ):
        last = events(live, path, BODIES[path])[-1]
    if path == CHAT:
        assert (
            set(last["error"]) == {"message", "type", "param", "code"}
            and last["error"]["code"] == "no_capacity"
        )
    elif path == RESPONSES:
        assert (last["type"], last["code"]) == ("error", "no_capacity")
    elif path == MESSAGES:
        assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"
    else:
        assert (last["error"]["code"], last["error"]["status"]) == (503, "UNAVAILABLE")


def test_an_error_inside_a_stream_of_completions_is_openais_with_our_facts(live: Running) -> None:
    body = {"prompt": "x", "max_tokens": 200}
    with saying(live, "One two three four five six seven. " * 12, fails_after=MAX_STEPS_AHEAD + 4):
        error = events(live, "/v1/completions", body)[-1]["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "no_capacity", None)
    assert error["docs_url"] == "/docs/errors#no_capacity"


def test_an_error_ends_googles_array(live: Running) -> None:
    path = CONTENTS.replace(":generate", ":streamGenerate")
    with saying(live, "One two three four five six seven. " * 12, fails_after=MAX_STEPS_AHEAD + 4):
        chunks = live.acme.post(path, json=BODIES[CONTENTS]).json()
    assert chunks[0]["candidates"] and chunks[-1]["error"]["status"] == "UNAVAILABLE"


@pytest.mark.parametrize("path", BODIES)
def test_an_error_before_a_stream_is_a_status(live: Running, path: str) -> None:
    with saying(live, "x", fails_after=0):
        answer = live.acme.post(*streamed(path, {})[:1], json=streamed(path, BODIES[path])[1])
    assert answer.status_code == (529 if path == MESSAGES else 503) and "retry-after" in answer.headers


def parts_of(usage: dict[str, Any]) -> tuple[int, int, int, int]:
    """Read, written, uncached and prompt tokens of a usage in any shape."""
    if "cache_read_input_tokens" in usage:
        read, written, rest = (
            usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"], usage["input_tokens"],
        )  # fmt: skip
        assert sum(usage["cache_creation"].values()) == written
        return read, written, rest, read + written + rest
    if "input_tokens_details" in usage:
        details, prompt = usage["input_tokens_details"], usage["input_tokens"]
        assert sum(details["cache_write_tokens_details"].values()) == details["cache_write_tokens"]
    else:
        details, prompt = usage["prompt_tokens_details"], usage["prompt_tokens"]
    read, written = details["cached_tokens"], details["cache_write_tokens"]
    return read, written, prompt - read - written, prompt


def random_request(draw: random.Random, salt: str) -> tuple[str, dict[str, Any], list[dict[str, str]]]:
    """A path, a body with random breakpoints, and its messages."""
    texts = [
        f"Rule {draw.randrange(3)}: answer politely.\n" * draw.randint(1, 12)
        for _ in range(draw.randint(1, 4))
    ]
    messages = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(texts)
    ]
    if len(messages) % 2 == 0:
        messages.append({"role": "user", "content": "Why?"})
    common = {"salt": salt, "temperature": 0}
    path = draw.choice([CHAT, RESPONSES, MESSAGES])
    is_marked = [draw.random() < 0.4 for _ in messages]
    if path == MESSAGES:
        marks = [{"cache_control": {"type": "ephemeral", "ttl": draw.choice(["5m", "1h"])}} for _ in messages]
        kind = "text"
    else:
        marks = [
            {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": draw.choice(["30m", "12h"])}}
            for _ in messages
        ]
        kind = "text" if path == CHAT else "input_text"
    blocks = [
        {
            "role": each["role"],
            "content": [{"type": kind, "text": each["content"], **(mark if marked else {})}],
        }
        for each, mark, marked in zip(messages, marks, is_marked, strict=True)
    ]
    if path == MESSAGES:
        if sum(is_marked) > 4:
            blocks = [*messages]
        return path, {**common, "messages": blocks, "max_tokens": draw.choice([0, 1])}, messages
    name = "messages" if path == CHAT else "input"
    options = draw.choice([{}, {"prompt_cache_options": {"mode": draw.choice(["implicit", "explicit"])}}])
    most = "max_tokens" if path == CHAT else "max_output_tokens"
    return path, {**common, **options, name: blocks, most: 1}, messages


@pytest.mark.slow
def test_usage_of_random_requests_adds_up_to_the_prompt(live: Running, salt: str) -> None:
    draw, num_written = random.Random(23), 0
    for _ in range(120):
        path, body, messages = random_request(draw, salt)
        answer = live.acme.post(path, json=body)
        assert answer.status_code == 200, answer.text
        read, written, rest, prompt = parts_of(answer.json()["usage"])
        counted = live.acme.post("/tokenize", json={"messages": messages}).json()["count"]
        assert prompt == counted == read + written + rest and min(read, written, rest) >= 0
        assert read % 16 == 0
        num_written += written
    assert num_written > 0
