"""Packed sessions of agents: what is read, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.simulator import packed_sessions
from radixkv.simulator.packed_sessions import read_sessions

EXCERPT = Path(__file__).parents[1] / "engines" / "agent_sessions.jsonl.gz"
ROW = [0.0, "0", 1_100, 50, 2.0, 0, 0, [[1, 17]], "tool_use"]


def written(path: Path, *requests: Any, **fields: Any) -> Path:
    path.write_text(json.dumps({"id": "s", "requests": list(requests), **fields}) + "\n")
    return path


def test_prompts_that_extend_the_last_have_its_blocks(tmp_path: Path) -> None:
    rows = [
        ROW,
        [12.0, "0", 2_000, 60, 1.0, 0, 17, [[18, 8]], "end_turn"],
        [500.0, "0", 1_700, 60, 1.0, 0, 8, [[90, 16]], ""],
    ]
    (session,) = read_sessions([written(tmp_path / "a.jsonl", *rows)])
    first, second, third = session.turns
    assert [first.blocks.tolist(), second.blocks.tolist(), third.blocks.tolist()] == [
        [0, 1],
        [0, 1, 2],
        [0, 3, 4],
    ]
    assert session.num_blocks == 5 and session.tenant == "default"
    assert [turn.pause_s for turn in session.turns] == [0.0, 10.0, 300.0]
    assert [turn.tool_pending for turn in session.turns] == [True, False, False]
    assert first.prompt_tokens == 1_100 and first.is_main


def test_subagents_have_prompts_of_their_own(tmp_path: Path) -> None:
    rows = [
        ROW,
        [3.0, "1", 600, 9, 1.0, 0, 0, [[40, 9]], "tool_use"],
        [9.0, "0", 1_100, 9, 1.0, 0, 17, [], ""],
    ]
    (session,) = read_sessions([written(tmp_path / "a.jsonl", *rows)])
    assert [turn.blocks.tolist() for turn in session.turns] == [[0, 1], [2], [0, 1]]
    assert [turn.is_main for turn in session.turns] == [True, False, True]


def test_real_sessions_are_read_and_several_files_are_tenants(tmp_path: Path) -> None:
    plain = tmp_path / "globex.jsonl"
    plain.write_bytes(gzip.decompress(EXCERPT.read_bytes()))
    alone, together = read_sessions([EXCERPT]), read_sessions([EXCERPT, plain])
    assert len(together) == 2 * len(alone) > 20
    assert {each.tenant for each in together} == {"agent_sessions", "globex"}
    turns = [turn for each in alone for turn in each.turns]
    assert all(turn.prompt_tokens >= 512 * len(turn.blocks) for turn in turns)
    assert all(0.5 <= turn.pause_s <= 300 for each in alone for turn in each.turns[1:])


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("row", "requests"),
        (ROW[:8], "requests"),
        ([-1.0, *ROW[1:]], "t"),
        ([float("nan"), *ROW[1:]], "t"),
        ([True, *ROW[1:]], "t"),
        ([0, 7, *ROW[2:]], "requests"),
        ([0, "0", -1, *ROW[3:]], "tokens_in"),
        ([0, "0", 2**41, *ROW[3:]], "tokens_in"),
        ([0, "0", 10, 1.5, *ROW[4:]], "tokens_out"),
        ([*ROW[:6], 18, *ROW[7:]], "keep"),
        ([*ROW[:7], [[0, 2**40]], ""], "runs"),
        ([*ROW[:7], [[0, 2**20], [0, 1]], ""], "runs"),
        ([*ROW[:7], [[0]], ""], "runs"),
        ([*ROW[:7], {"a": 1}, ""], "runs"),
        ([*ROW[:7], [["0", 1]], ""], "runs"),
        ([*ROW[:8], None], "requests"),
    ],
)
def test_an_invalid_request_is_refused_with_its_place(row: Any, named: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(
        ConfigError, match=rf"a\.jsonl line 1: requests\[1\].*{named if named != 'requests' else ''}"
    ):
        read_sessions([written(path, ROW, row)])


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b'{"id": "s"}', b'{"id": 7, "requests": []}', b"[" * 100_000, b"\xff\xfe", b'"x"']
)
def test_an_invalid_line_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="line 1"):
        read_sessions([path])


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(EXCERPT.read_bytes()[:5_000])
    spoilt = tmp_path / "spoilt.gz"
    spoilt.write_bytes(b"\x1f\x8b" + b"\x00" * 50)
    for path in (tmp_path / "nothing", tmp_path, cut, spoilt):
        with pytest.raises(ConfigError, match="SESSIONS"):
            read_sessions([path])
    with pytest.raises(ConfigError, match="at least 3 requests"):
        read_sessions([written(tmp_path / "short.jsonl", ROW, ROW)])


@pytest.mark.slow
def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that unpacks to one huge line, to many lines, or to many blocks."""
    line, many = tmp_path / "line.gz", tmp_path / "many.gz"
    line.write_bytes(gzip.compress(b" " * (2**26 + 2)))
    many.write_bytes(gzip.compress(b" " * 1_000 + b"\n"))
    with pytest.raises(ConfigError, match="lines of at most"):
        read_sessions([line])
    monkeypatch.setattr(packed_sessions, "MAX_BYTES", 1_000)
    with pytest.raises(ConfigError, match="in all, unpacked"):
        read_sessions([many])
    monkeypatch.undo()
    monkeypatch.setattr(packed_sessions, "MAX_TOTAL_BLOCKS", 5)
    with pytest.raises(ConfigError, match="at most 5 blocks"):
        read_sessions([written(tmp_path / "blocks.jsonl", ROW, ROW, ROW)])
