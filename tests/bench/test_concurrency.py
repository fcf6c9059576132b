"""The concurrency benchmark at a small size: its figures, evictions that really overlap with calls, its refusals."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from radixkv.bench import concurrency
from radixkv.cli.main import commands
from radixkv.errors import ArgumentError


def test_matches_beside_evictions() -> None:
    """Latency beside each kind of thread with both switch intervals; how long each kind of call holds the lock."""
    interval, seen = sys.getswitchinterval(), list[int]()
    result = concurrency.run(num_blocks=6_000, evict_blocks=2_000, matches=3_000, progress=seen.append)
    assert json.loads(json.dumps(result)) == result
    assert sys.getswitchinterval() == interval and seen == [1, 2, 3, 4, 5, 6]
    rows = [row for row in result["latency"] if row["beside"] in concurrency.BESIDE]
    assert [row["beside"] for row in rows] == ["nothing", "computing", "evicting"] * 2
    assert {row["switch_interval_us"] for row in rows} == {interval * 1e6, 50}
    assert all(row["calls"] == 3_000 and row["p50_us"] <= row["p99_us"] <= row["max_us"] for row in rows)
    evicting = [row for row in rows if row["beside"] == "evicting"]
    assert all(row["evict_calls"] >= 1 and row["longest_evict_us"] > 0 for row in evicting)
    text = concurrency.table(result)
    assert "longest hold of evict(2000)" in text and result["machine"] in text and "audit clean" in text


def test_lock_holds_are_recorded_and_evictions_are_sliced() -> None:
    holds = {
        row["calls_of"]: row
        for row in concurrency.run(num_blocks=6_000, evict_blocks=3_000, matches=1)["holds"]
    }
    assert holds["match"]["holds"] == holds["match"]["calls"] == 1_000
    assert holds["open, commit, release"]["holds"] >= 3_000
    assert holds["evict(3000)"]["calls"] == 1 and holds["evict(3000)"]["holds"] > 1
    assert all(row["max_us"] <= row["call_max_us"] for row in holds.values())


def test_calls_during_a_span_are_found() -> None:
    def spans(*pairs: tuple[int, int]) -> concurrency._Spans:
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return concurrency._Spans(table[:, 0], table[:, 1])

    calls = spans((0, 4), (5, 9), (10, 14), (15, 40), (41, 42))
    assert calls.during(spans((6, 7), (20, 25), (30, 35))).starts.tolist() == [5, 15]
    assert calls.during(spans((3, 11))).starts.tolist() == [0, 5, 10]
    assert calls.during(spans()).starts.tolist() == []


@pytest.mark.parametrize(("name", "value"), [("matches", 0), ("evict_blocks", 3), ("evict_blocks", 5_900)])
def test_impossible_options_are_refused(name: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=name):
        concurrency.run(**{"num_blocks": 6_000, "evict_blocks": 100, name: value})


def test_the_command() -> None:
    arguments = ["bench", "concurrency", "--num-blocks", "3000", "--evict-blocks", "400", "--matches", "100"]
    done = CliRunner().invoke(commands, [*arguments, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["benchmark"] == "concurrency", done
