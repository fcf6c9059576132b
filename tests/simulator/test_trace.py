"""Traces: every format is read, equal prefixes get equal ids, and errors name the file and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.simulator.trace import read
from tests.simulator.traces import mooncake, write

LINE = {"time": 0, "tokens": 40, "block_tokens": 16, "hashes": ["a", "b"]}
CHAT = {"chat_id": 4, "timestamp": 0, "input_length": 40, "output_length": 9, "hash_ids": [1, 2, 3]}


def test_mooncakes_format(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 2_500, "input_length": 1_100, "output_length": 7, "hash_ids": [5, 6, 7]},
        {"timestamp": 1_000, "input_length": 600, "output_length": 3, "hash_ids": [5, 9]},
    )
    trace = read([path])
    assert trace.block_tokens == 512
    assert trace.times.tolist() == [0.0, 1.5], "sorted, relative to the first request"
    assert trace.prompt_tokens.tolist() == [600, 1_100]
    assert trace.output_tokens.tolist() == [3, 7]
    assert trace.blocks.tolist() == [0, 0, 1], "partial blocks at the end are dropped"
    assert trace.tenants == ("default",)
    assert read([path], keep_tails=True).blocks.tolist() == [0, 1, 0, 2, 3]


def test_bailians_format(tmp_path: Path) -> None:
    known = {"type": "text", "turn": 1, "parent_chat_id": -1}
    longer = {"input_length": 60, "hash_ids": [1, 2, 3, 4], "labels": {"turn": 7, "tool_pending": True}}
    path = write(
        tmp_path / "trace.jsonl",
        {**CHAT, **known},
        {**CHAT, **known, **longer, "chat_id": 9, "parent_chat_id": 4, "timestamp": 61.5, "turn": 2},
        {**CHAT, "chat_id": 12, "parent_chat_id": 9, "timestamp": 70},
        {**CHAT, "chat_id": 13, "parent_chat_id": 2, "timestamp": 71, "tenant": "acme"},
    )
    trace = read([path])
    assert trace.block_tokens == 16 and trace.times.tolist() == [0.0, 61.5, 70.0, 71.0]
    assert trace.prompt_tokens.tolist() == [40, 60, 40, 40]
    assert trace.blocks.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4], (
        "partial blocks are dropped, and tenants are apart"
    )
    assert trace.labels == (
        {"session": 4, "type": "text", "turn": 1},
        {"session": 4, "type": "text", "turn": 7, "tool_pending": True},
        {"session": 4},
        {"session": 2},
    )
    again = read([path, write(tmp_path / "other.jsonl", {**CHAT, "chat_id": 20, "parent_chat_id": 9})])
    assert again.labels[1] == {"session": 9}, "chats of another file are different chats"
    assert read([write(tmp_path / "plain.jsonl", {**LINE, "chat_id": 3})]).labels == (None,)


def test_the_plain_format(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {
            **LINE,
            "tokens": 20,
            "output_tokens": 13,
            "tenant": "acme",
            "labels": {"turn": 1, "type": None},
            "duration_s": 2.5,
        },
        {**LINE, "time": 1, "hashes": ["a", "c"]},
    )
    trace = read([path])
    assert trace.block_tokens == 16
    assert trace.num_prompt_blocks.tolist() == [1, 2], (
        "the second block of the first line belongs to its answer"
    )
    assert trace.tenants == ("acme", "default")
    assert trace.blocks.tolist() == [0, 1, 2, 3], "tenants share nothing"
    assert trace.durations.tolist() == [2.5, 0.0]
    assert trace.labels == ({"turn": 1}, None)


def test_null_fields_count_as_missing(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("tenant", "duration_s", "output_tokens", "labels", "hash_ids", "token_ids"))
    path = write(tmp_path / "trace.jsonl", {**LINE, **nothing})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    trace = read([path])
    assert trace.tenants == ("default",) and trace.labels == (None,) and trace.prompt_tokens.tolist() == [40]
    write(path, {**LINE, "tokens": None})
    with pytest.raises(ConfigError, match="line 1: tokens is not set"):
        read([path])


def test_token_ids_are_cut_into_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"time": 0, "token_ids": list(range(10)), "output_ids": [1, 2, 3]},
        {"time": 1, "token_ids": [*range(10), 1, 2, 3, 4, 5]},
        {"time": 2, "token_ids": [9, 1, 2, 3, 4, 5, 6, 7]},
    )
    trace = read([path], block_tokens=4)
    assert trace.blocks.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert trace.num_prompt_blocks.tolist() == [2, 3, 2]


def test_equal_hashes_after_different_beginnings_are_different(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl", LINE, {**LINE, "hashes": ["b", "a"]}, {**LINE, "hashes": ["a", "b"]}
    )
    assert read([path]).blocks.tolist() == [0, 1, 2, 3, 0, 1]


def test_several_files_are_several_tenants(tmp_path: Path) -> None:
    paths = [mooncake(tmp_path / "acme.jsonl", [1, 2]), mooncake(tmp_path / "globex.jsonl", [1, 2], [1, 2])]
    trace = read(paths)
    assert trace.tenants == ("acme", "globex")
    assert trace.num_different_blocks == 4
    assert len(read(paths, tenants=["globex"])) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"time": 0}, "line 2: hashes"),
        ({**LINE, "hashes": ["a"]}, "line 2: hashes"),
        ({**LINE, "hashes": [1.5, 2]}, "line 2: hashes"),
        ({**LINE, "tokens": -1}, "line 2: tokens"),
        ({**LINE, "tokens": True}, "line 2: tokens"),
        ({**LINE, "time": "now"}, "line 2: time"),
        ({**LINE, "time": float("nan")}, "line 2: time"),
        ({**LINE, "tenant": ""}, "line 2: tenant"),
        ({**LINE, "time": 10**400}, "line 2: time"),
        ({**LINE, "labels": [1]}, "line 2: labels"),
        ({**LINE, "labels": {"type": ["chat"]}}, "line 2: labels.*'type': .'chat'.* is not allowed"),
        (
            {**LINE, "labels": {"priority": 101}},
            "line 2: labels.*priority=101 is not allowed; allowed: 0 to 100",
        ),
        (
            {**LINE, "labels": {"priority": "high"}},
            "line 2: labels.*priority='high' is not allowed; allowed: 0 to 100",
        ),
        (
            {**LINE, "labels": {"priority": 50, "priority_duration_s": 0}},
            "line 2: labels.*duration_s=0 is not allowed",
        ),
        ({**LINE, "duration_s": -1}, "line 2: duration_s"),
        ({**LINE, "block_tokens": 0}, "line 2: block_tokens"),
        ({**LINE, "block_tokens": 32}, "blocks of 16 tokens"),
        ({"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [1]}, "blocks of 16 tokens"),
        ({"time": 0, "token_ids": [1, -2]}, "index 1"),
        ({**CHAT, "chat_id": "a"}, "line 2: chat_id"),
        ({**CHAT, "parent_chat_id": -2}, "line 2: parent_chat_id"),
        ({**CHAT, "type": 3}, "line 2: type"),
        ({**CHAT, "turn": -1}, "line 2: turn"),
        ({**CHAT, "hash_ids": [1]}, "line 2: hash_ids"),
        ({**CHAT, "hash_ids": [*range(9)]}, "an id for each 16 tokens, at most 5 here; there are 9"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read([write(tmp_path / "trace.jsonl", LINE, line)])


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "3", "[" * 100_000])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1"):
        read([path])


def test_hash_ids_of_smaller_blocks_are_refused(tmp_path: Path) -> None:
    """Other collections have an id for each 16 tokens. The first two ids would have counted as the whole prompt."""
    line = {"timestamp": 0, "input_length": 1_030, "output_length": 20, "hash_ids": list(range(65))}
    said = r"line 1: hash_ids='\[0, .*\.\.\.\]' .* an id for each 512 tokens, at most 4 here; there are 65"
    with pytest.raises(ConfigError, match=said):
        read([write(tmp_path / "trace.jsonl", line)])


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary", "missing", "."):
        with pytest.raises(ConfigError, match="TRACE"):
            read([tmp_path / name])
    with pytest.raises(ConfigError, match="at least one file"):
        read([])


def test_an_unknown_tenant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="default"):
        read([mooncake(tmp_path / "t.jsonl", [1])], tenants=["acme"])
