"""The grid of serving: its cells, and a file of runs that can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from radixkv.cli.main import commands
from radixkv.errors import ConfigError
from radixkv.simulator import simulate_grid
from radixkv.simulator.serving import Serving, Settings
from radixkv.simulator.simulate_grid import MAX_BYTES, Cell, Runs, cells_of

EXCERPT = Path(__file__).parents[1] / "engines" / "agent_sessions.jsonl.gz"
FIGURES = {
    "requests_per_hour": 10.0,
    "latency_p95_s": 2.0,
    "longest_wait_s": 3.0,
    "refused_requests": 0.0,
}
SHORT = Settings(warm_up_s=0.0, measure_s=60.0)


def test_the_table_has_each_load_with_and_without_a_host() -> None:
    cells = cells_of("table", 60)
    assert len(set(cells)) == len(cells) == 24
    assert cells[0] == Cell(32, 5_120, 0, 20_000.0, 1.0)
    assert {round(cell.oversubscription, 2) for cell in cells} == {1.5, 2.0, 4.0}
    assert all(cell.host_blocks in (0, 4 * cell.capacity) for cell in cells)


def test_a_seed_draws_different_cells_and_always_the_same() -> None:
    drawn = cells_of("drawn", 60, 1)
    assert drawn == cells_of("drawn", 60, 1) != cells_of("drawn", 60, 2)
    assert len(set(drawn)) == 60 and cells_of("drawn", 10, 1) == drawn[:10]


def test_runs_are_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second call serves only what the first did not. An interrupted line is served again."""
    served: list[tuple[int, str]] = []
    serve = Serving.run

    def noted(self: Serving) -> Any:
        served.append((self._settings.seed, self._replicas[0].queue.__class__.__name__))
        return serve(self)

    monkeypatch.setattr(Serving, "run", noted)
    file = tmp_path / "runs.jsonl"
    given: dict[str, Any] = {"num_cells": 1, "settings": SHORT}
    first = simulate_grid.run([EXCERPT], seeds=1, resume=file, **given)
    assert len(served) == 3
    text = file.read_bytes()
    file.write_bytes(text[:-10])
    again = simulate_grid.run([EXCERPT], seeds=1, resume=file, **given)
    assert served[3:] == [(0, "RequestQueue")] and file.read_bytes() == text
    assert again["results"] == first["results"] == simulate_grid.run([EXCERPT], seeds=1, **given)["results"]
    del served[:]
    more = simulate_grid.run([EXCERPT], seeds=2, resume=file, **given)
    assert {seed for seed, _ in served} == {1} and len(served) == 3
    assert more["results"][0]["least_against_fcfs"] <= more["results"][0]["against_fcfs"]


def test_the_ratios_are_those_of_the_runs(tmp_path: Path) -> None:
    """Figures are read of a file, so the ratios can be computed by hand."""
    file = tmp_path / "runs.jsonl"
    simulate_grid.run([EXCERPT], seeds=2, num_cells=1, settings=SHORT, resume=file)
    head, *lines = file.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for at, row in enumerate(rows):  # FCFS, lpm and the candidate of each seed
        row["figures"] = {name: (at % 3 + 1) * value for name, value in FIGURES.items()}
    rows[5]["figures"]["requests_per_hour"] = 20.0
    file.write_text("\n".join([head, *map(json.dumps, rows), ""]))
    found = simulate_grid.run([EXCERPT], seeds=2, num_cells=1, settings=SHORT, resume=file)
    (row,) = found["results"]
    assert (row["against_fcfs"], row["least_against_fcfs"]) == (2.5, 2.0)
    assert (row["against_lpm"], row["least_against_lpm"]) == (1.25, 1.0)
    assert (row["p95_against_fcfs"], row["wait_against_lpm"]) == (3.0, 1.5)
    assert "× FCFS: least 2.500" in simulate_grid.table(found)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b'{"run": 1, "figures": {}}',
        b'{"run": "a"}',
        b"[" * 3_000,
        json.dumps({"run": 5, "figures": FIGURES}).encode(),
        json.dumps({"run": "a", "figures": FIGURES | {"latency_p95_s": float("nan")}}).encode(),
        json.dumps({"run": "a", "figures": FIGURES | {"latency_p95_s": -1}}).encode(),
        json.dumps({"run": "a", "figures": FIGURES | {"latency_p95_s": 10**400}}).encode(),
        json.dumps({"run": "a" * 5_000, "figures": FIGURES}).encode(),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(ConfigError, match="line 2"):
        Runs(file, {"a": 1})


def test_a_file_of_other_runs_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    Runs(file, {"a": 1}).put("x", FIGURES)
    text = file.read_bytes()
    assert Runs(file, {"a": 1}).get("x") == FIGURES
    with pytest.raises(ConfigError, match="same sessions"):
        Runs(file, {"a": 2})
    assert file.read_bytes() == text
    with pytest.raises(ConfigError, match="read and written"):
        Runs(tmp_path, {"a": 1})


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_bytes(b'{"a": 1}\n' + bytes(MAX_BYTES))
    with pytest.raises(ConfigError, match="at most"):
        Runs(file, {"a": 1})


@pytest.mark.parametrize(
    "bad",
    [
        {"seeds": 0},
        {"seeds": 101},
        {"num_cells": 0},
        {"num_cells": 1_001},
        {"grid": "x"},
        {"scheduler": "x"},
        {"policy": "all"},
        {"policy": "x"},
    ],
)
def test_invalid_arguments_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        simulate_grid.run([EXCERPT], **bad)


def test_the_command(tmp_path: Path) -> None:
    short = ["simulate", "--serve", str(EXCERPT), "--warm-up", "0", "--measure", "60s"]
    grid = [*short, "--grid", "drawn", "--cells", "2", "--seeds", "1", "--resume", str(tmp_path / "runs")]
    done = CliRunner().invoke(commands, grid)
    assert done.exit_code == 0 and "2 cells, seeds 0" in done.output
    assert len((tmp_path / "runs").read_text().splitlines()) == 7
    found = json.loads(CliRunner().invoke(commands, [*grid, "--json"]).stdout)
    assert found["policy"] == "learned+queue" and len(found["results"]) == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--serve", "--grid", "table", "--capacity", "1k"],
        ["--serve", "--grid", "table", "--sessions", "3"],
        ["--serve", "--grid", "table", "--jobs", "3"],
        ["--serve", "--seeds", "3"],
        ["--grid", "table"],
    ],
)
def test_options_that_mean_nothing_are_refused(options: list[str]) -> None:
    done = CliRunner().invoke(commands, ["simulate", str(EXCERPT), *options])
    assert done.exit_code != 0 and "only with" in str(done.exception)
