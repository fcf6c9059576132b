"""Whatever the service answers is accepted in the next request, in each API, whole and streamed.

The engine is the demo's, but its text is the test's: texts, calls of tools, calls that no client could send back as
they are, and calls that were cut off. A client here sends back exactly what it got.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service.running import Running
from tests.service.test_shapes import ASKED, BODIES, CHAT, CONTENTS, MESSAGES, RESPONSES, events, saying

Json = dict[str, Any]
Asks = Callable[[Running, str, Json], list[Any]]
"""Sends a body, and returns the messages of the answer as a client keeps them."""


def written(name: str, arguments: object, key: str = "arguments") -> str:
    """A call as a model writes it."""
    call = json.dumps({"name": name, key: arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


# ---- what a client keeps of an answer


def whole(live: Running, path: str, body: Json) -> list[Any]:
    answer = live.acme.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if path == CHAT:
        return [found["choices"][0]["message"]]
    if path == RESPONSES:
        return list(found["output"])
    if path == MESSAGES:
        return [{"role": "assistant", "content": found["content"]}]
    return [found["candidates"][0]["content"]]


def streamed(live: Running, path: str, body: Json) -> list[Any]:
    found = events(live, path, body)
    if path == CHAT:
        deltas = [each["choices"][0]["delta"] for each in found]
        message: Json = {
            "role": "assistant",
            "content": "".join(each.get("content") or "" for each in deltas),
        }
        calls = [call for each in deltas for call in each.get("tool_calls") or ()]
        return [message | ({"tool_calls": calls} if calls else {})]
    if path == RESPONSES:
        return list(found[-1]["response"]["output"])
    if path == MESSAGES:
        return [{"role": "assistant", "content": blocks_of(found)}]
    parts = [part for each in found for part in each["candidates"][0]["content"]["parts"]]
    return [{"role": "model", "parts": parts}]


def blocks_of(found: list[Json]) -> list[Json]:
    blocks: list[Json] = []
    for each in found:
        if each["type"] == "content_block_start":
            blocks.append(each["content_block"])
        elif each["type"] == "content_block_delta" and each["delta"]["type"] == "text_delta":
            blocks[-1]["text"] += each["delta"]["text"]
        elif each["type"] == "content_block_delta":
            blocks[-1]["input"] = json.loads(each["delta"]["partial_json"])
    return blocks


def continued(path: str, kept: list[Any]) -> Json:
    """The next request: the chat, what was kept of the answer, the results of its calls, and a question."""
    body = dict(BODIES[path])
    if path == CHAT:
        (message,) = kept
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "12"}
            for call in message.get("tool_calls") or ()
        ]
        return body | {"messages": [*body["messages"], message, *results, {"role": "user", "content": ASKED}]}
    if path == RESPONSES:
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "12"}
            for item in kept
            if item["type"] == "function_call"
        ]
        asked = {"role": "user", "content": ASKED}
        return body | {"input": [asked, *kept, *results, asked]}
    if path == MESSAGES:
        (message,) = kept
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "12"}
            for block in message["content"]
            if block["type"] == "tool_use"
        ]
        last = {"role": "user", "content": [*results, {"type": "text", "text": ASKED}]}
        return body | {"messages": [*body["messages"], message, last]}
    (content,) = kept
    results = [
        {
            "functionResponse": {
                "id": part["functionCall"]["id"],
                "name": part["functionCall"]["name"],
                "response": {"result": "12"},
            }
        }
        for part in content["parts"]
        if "functionCall" in part
    ]
    last = {"role": "user", "parts": [*results, {"text": ASKED}]}
    return body | {"contents": [*body["contents"], content, last]}


def num_calls(kept: list[Any]) -> int:
    return json.dumps(kept).count('"call_') + json.dumps(kept).count('"toolu_')


def goes_on(live: Running, path: str, ask: Asks, text: str) -> list[Any]:
    """Check that an answer of this text can be sent back. Return what the client kept of it."""
    with saying(live, text):
        kept = ask(live, path, BODIES[path])
        again = live.acme.post(path, json=continued(path, kept))
    assert again.status_code == 200, (text, kept, again.text)
    return kept


# ---- the model's answers

_CHARS = st.text(st.characters(exclude_categories=()), max_size=6)
"""With lone surrogates, which JSON can have as escapes, and no text can."""
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _CHARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_CHARS, inner, max_size=3),
    max_leaves=6,
)
_CALLS = st.builds(
    written,
    st.sampled_from(["find_page", "", "a b", "functions.find:0", "n" * 300]) | _CHARS,
    st.dictionaries(_CHARS, _VALUES, max_size=3)
    | _VALUES
    | st.just('{"topic": "pins"}')
    | st.just('{"topic": '),
    st.sampled_from(["arguments", "parameters"]),
)
_CUT = st.builds(lambda call, size: call[: size % len(call)], _CALLS, st.integers(0, 2**16))
_TEXT = st.text(max_size=12) | st.sampled_from(["\n", " ", "<tool_call>", "</tool_call>", "<tool", "\x00"])
ANSWERS = st.lists(_CALLS | _CUT | _TEXT, max_size=10).map("".join)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ANSWERS, path=st.sampled_from(sorted(BODIES)), ask=st.sampled_from([whole, streamed]))
def test_whatever_is_answered_can_be_sent_back(
    shared_service: Running, text: str, path: str, ask: Asks
) -> None:
    goes_on(shared_service, path, ask, text)


DEEP = written("find_page", json.loads('{"a":' * 60 + "1" + "}" * 60))
TOO_DEEP = (
    '<tool_call>{"name": "find_page", "arguments": ' + '{"a":' * 300 + "1" + "}" * 300 + "}</tool_call>"
)


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("", 0),
        ("I look. " + written("find_page", {"topic": "pins"}) * 8, 8),
        ("I look. " + written("find_page", {"topic": "pins"}) + " And here. " + written("find_page", {}), 2),
        (written("find_page", {"topic": "\ud800", "\udfff": ["\ud83d\ude00"]}), 1),
        (written("find_\ud800", {}), 1),
        (written("find_page", {"topic": "pins"}, "parameters"), 1),
        (written("find_page", None), 1),
        (written("find_page", '{"topic": "pins"}'), 1),
        (written("find_page", '{"topic": "pi'), 0),
        (written("find_page", {"topic": float("nan")}), 0),
        ('<tool_call>{"name": "find_page", "arguments": {"topic": 1e999}}</tool_call>', 0),
        ('<tool_call>{"name": "find_page", "arguments": {"topic": "pi', 0),
        (DEEP, 1),
        (TOO_DEEP, 0),
    ],
)  # fmt: skip
def test_an_odd_answer_can_be_sent_back(live: Running, path: str, ask: Asks, text: str, calls: int) -> None:
    kept = goes_on(live, path, ask, text)
    found = json.dumps(kept)
    assert found.count("find_") >= calls
    assert ("<tool_call>" in found) == (bool(text) and not calls), "what is no call stays text"


@pytest.mark.parametrize("path", BODIES)
def test_no_character_of_a_text_ends_a_line_of_a_stream(live: Running, path: str) -> None:
    """Clients in Python split lines at more characters than a newline, as ``events`` does here."""
    text = "one\x85two\u2028three\u2029four"
    kept = goes_on(live, path, streamed, text)
    assert json.dumps(text)[1:-1] in json.dumps(joined(kept))


def joined(kept: list[Any]) -> list[Any]:
    """What a client kept, with the texts of Google's parts as one."""
    parts = kept[0].get("parts", ())
    return ["".join(part["text"] for part in parts)] if parts else kept


def test_parameters_are_arguments(live: Running) -> None:
    with saying(live, written("find_page", {"topic": "pins"}, "parameters")):
        (message,) = whole(live, CHAT, BODIES[CHAT])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"topic": "pins"}


@pytest.mark.parametrize(
    "arguments", ['{"topic": "pi', "", "null", "5", '"x"', '{"a": "\\ud800"}', '{"a":' * 900]
)
def test_arguments_that_another_service_cut_off_are_accepted(live: Running, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "find_page", "arguments": arguments}}
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "an error"},
    ]
    items = [
        {"role": "user", "content": ASKED},
        {"type": "function_call", "call_id": "call_1", "name": "find_page", "arguments": arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": "an error"},
    ]
    for path, body in ((CHAT, {"messages": messages}), (RESPONSES, {"input": items})):
        with saying(live, "Yes."):
            answer = live.acme.post(path, json=BODIES[path] | body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("is_one", [True, False], ids=["one turn", "turns"])
def test_a_stream_can_be_sent_back_chunk_by_chunk(live: Running, is_one: bool) -> None:
    """As parts of one turn, or as Google's client keeps them: a turn for each chunk."""
    parts = [{"text": f"{number} "} for number in range(600)]
    turns = (
        [{"role": "model", "parts": parts}]
        if is_one
        else [{"role": "model", "parts": [each]} for each in parts]
    )
    body = BODIES[CONTENTS]
    asked = body["contents"][0]
    whole = {"role": "model", "parts": [{"text": "".join(each["text"] for each in parts)}]}
    counts = []
    for contents in ([asked, *turns, asked], [asked, whole, asked]):
        with saying(live, "Yes."):
            answer = live.acme.post(CONTENTS, json={**body, "contents": contents})
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["usageMetadata"]["promptTokenCount"])
    assert counts[0] == counts[1], "the pieces of an answer are one turn"
