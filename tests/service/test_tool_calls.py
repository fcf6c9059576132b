"""Tool calls in generated text, split at every place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.service.tool_calls import ToolCall, ToolCallReader

CALL = '<tool_call>\n{"name": "find", "arguments": {"topic": "pins"}}\n</tool_call>'
FOUND = ToolCall("find", '{"topic": "pins"}')


def read(pieces: list[str]) -> list[str | ToolCall]:
    reader = ToolCallReader()
    found = [each for piece in pieces for each in reader.push(piece)] + reader.close()
    joined: list[str | ToolCall] = []
    for each in found:
        if joined and isinstance(each, str) and isinstance(joined[-1], str):
            joined[-1] += each
        else:
            joined.append(each)
    return joined


def test_a_call_is_found_wherever_the_text_is_split() -> None:
    text = f"Let me look.\n{CALL}{CALL}"
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]]) == ["Let me look.\n", FOUND, FOUND]
    assert read(list(text)) == ["Let me look.\n", FOUND, FOUND]


def test_a_text_that_is_no_call_stays_text() -> None:
    for text in (
        "<tool_call>", "<tool_call>{", "<tool_call>[]</tool_call>", '<tool_call>{"name": 5}</tool_call>', "a < b",
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "</tool_call>", "<tool_", f"<tool_call>{'[' * 9999}",
    ):  # fmt: skip
        assert read([text]) == read(list(text)) == [text]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<tool", "x", "{", '{"name": "f"}', "<"])))
def test_pieces_never_change_what_is_read(pieces: list[str]) -> None:
    assert read(pieces) == read(["".join(pieces)])
