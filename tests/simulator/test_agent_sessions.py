"""Generated sessions of agents: the seed determines them, they are readable, and as long as the measured ones."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from radixkv.cli.main import commands
from radixkv.errors import ConfigError
from radixkv.simulator.agent_sessions import generate_sessions
from radixkv.simulator.packed_sessions import read_sessions


def test_the_seed_determines_them_and_more_do_not_change_the_first() -> None:
    few, more = list(generate_sessions(5, 3)), list(generate_sessions(8, 3))
    assert few == more[:5] and list(generate_sessions(5, 4)) != few
    assert len({each["id"] for each in more}) == 8


@pytest.mark.slow
def test_their_statistics_are_the_measured_ones() -> None:
    made = list(generate_sessions(400))
    mains = [[row for row in each["requests"] if row[1] == "0"] for each in made]
    firsts = [rows[0][2] for rows in mains]
    growth = [after[2] - before[2] for rows in mains for before, after in pairwise(rows) if after[6] > 0]
    tools = [row[5] for rows in mains for row in rows if row[8] == "tool_use"]
    turns = [row[5] for rows in mains for row in rows if row[8] == "end_turn"]
    prompts = [row[2] for rows in mains for row in rows]

    def near(values: list[float], share: float, measured: float, allowed: float) -> None:
        assert np.percentile(values, share) == pytest.approx(measured, rel=allowed)

    near([len(rows) for rows in mains], 50, 46, 0.2)
    near(firsts, 25, 18_445, 0.15)
    near(firsts, 75, 106_852, 0.25)
    near(growth, 50, 640, 0.1)
    near([row[3] for rows in mains for row in rows], 50, 222, 0.05)
    near(tools, 50, 8.5, 0.2)
    near(tools, 75, 17.9, 0.3)
    near(tools, 90, 63.7, 0.3)
    near(turns, 75, 162.7, 0.5)
    near(prompts, 50, 104_130, 0.3)
    near(prompts, 75, 140_952, 0.3)
    assert len(tools) / len(prompts) == pytest.approx(0.864, abs=0.02)
    folds = sum(
        row[6] < 0.9 * sum(run[1] for run in before[7]) + 0.9 * before[6]
        for rows in mains
        for before, row in pairwise(rows)
    )
    assert folds / len(prompts) == pytest.approx(0.019, abs=0.006)
    assert sum(len({row[1] for row in each["requests"]}) > 1 for each in made) / 400 == pytest.approx(
        0.037, abs=0.03
    )


@pytest.mark.parametrize("name", ["sessions.jsonl", "sessions.jsonl.gz"])
def test_the_command_writes_a_file_that_the_simulator_reads(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    done = CliRunner().invoke(commands, ["workload", "--sessions", "6", "--seed", "2", "--output", str(path)])
    assert done.exit_code == 0, done.output
    data = path.read_bytes()
    lines = (gzip.decompress(data) if name.endswith("gz") else data).decode().splitlines()
    assert [json.loads(line) for line in lines] == list(generate_sessions(6, 2))
    assert sum(len(each.turns) for each in read_sessions([path])) > 20


@pytest.mark.parametrize("wrong", [0, -1, 100_001])
def test_the_number_is_checked(wrong: int) -> None:
    with pytest.raises(ConfigError, match="--sessions"):
        next(generate_sessions(wrong))


@pytest.mark.parametrize(
    "option", [["--mix", "chat=1"], ["--duration", "1h"], ["--no-labels"], ["--block-tokens", "16"]]
)
def test_options_of_a_mix_are_refused(option: list[str]) -> None:
    done = CliRunner().invoke(commands, ["workload", "--sessions", "2", *option])
    assert isinstance(done.exception, ConfigError) and option[0].removeprefix("--no-") in str(done.exception)
