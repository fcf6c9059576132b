"""The benchmark of replicas: figures as JSON, a deterministic fleet, and the gain from routing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from radixkv.bench import fleet, replicas
from radixkv.cli.main import commands
from radixkv.errors import ConfigError
from radixkv.simulator.workloads import TraceLine
from tests.redis_server import RedisServer


def small(**options: object) -> replicas.Options:
    defaults = {"segments": 400, "requests": 120, "num_blocks": 600, "fleets": (3,)}
    return replicas.Options(**{**defaults, **options})  # type: ignore[arg-type]


BY_THE_CLOCK = ("death", "paused", "failover")
"""Figures of leases that end while a process or a Redis is away."""


@pytest.mark.slow
def test_figures_are_present_and_are_json(redis_server: RedisServer) -> None:
    done: list[str] = []
    chosen = [name for name in replicas.FIGURES if name not in BY_THE_CLOCK]
    result = replicas.run(small(redis=redis_server.url, progress=done.append), chosen)
    assert json.loads(json.dumps(result))["figures"] == result["figures"]
    assert set(chosen) <= set(done)
    reaches = [each["reach"] for each in result["figures"] if each["reach"] is not None]
    assert reaches == [0.15, 1e6, 24.0, 24.0, 3.0, 1e6, 2.0, 1.5, 1.8, 1.2]
    assert all({"name", "value", "unit", "reach"} <= set(each) for each in result["figures"])
    assert "route decision" in replicas.table(result)


@pytest.mark.timing
def test_figures_by_the_clock_are_present(redis_server: RedisServer) -> None:
    result = replicas.run(small(redis=redis_server.url), BY_THE_CLOCK)
    reaches = [each["reach"] for each in result["figures"] if each["reach"] is not None]
    assert reaches == [1.2, 5.0]


def test_a_figure_is_met_on_its_side_of_the_bound() -> None:
    assert replicas.Figure("a", 1.0, "s", 1.0).as_dict()["met"] is True
    assert replicas.Figure("a", 2.0, "s", 1.0).as_dict()["met"] is False
    assert replicas.Figure("a", 2.0, "s", 1.0, at_most=False).as_dict()["met"] is True
    assert replicas.Figure("a", 0.5, "s", 1.0, at_most=False).as_dict()["met"] is False
    assert replicas.Figure("a", 0.5, "s").as_dict()["met"] is None


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="--figure"):
        replicas.run(small(), ["speed"])


def test_the_command_prints_json() -> None:
    options = ["--figure", "cluster", "--requests", "40", "--num-blocks", "600", "--fleet", "2", "--json"]
    done = CliRunner().invoke(commands, ["bench", "replicas", *options])
    assert "×" in {each["unit"] for each in json.loads(done.stdout)["figures"]} and done.stderr == ""


def simulated(cost: str, requests: int = 400) -> fleet.Outcome:
    return fleet.Simulation(4, 2_000, cost=cost, seed=1).run(fleet.trace_like(1, requests, requests_s=0.7))


@pytest.mark.slow
def test_linear_routing_hits_more_than_turns_and_keeps_the_balance() -> None:
    linear, turns = simulated("linear"), simulated("round_robin")
    assert linear.num_requests == turns.num_requests == 400
    assert linear.hit_rate > 1.5 * turns.hit_rate
    assert linear.imbalance < 1.3


def test_a_simulation_depends_on_its_seed_alone() -> None:
    first, second = simulated("linear", 100), simulated("linear", 100)
    assert (first.hit_rate, first.imbalance) == (second.hit_rate, second.imbalance)


def test_a_prompt_of_a_trace_has_its_tokens() -> None:
    assert len(fleet.Prompts(0).key(TraceLine(1.5, [0, 1], 700, 5))) == 4 * 700


def test_a_trace_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 512, "output_length": 5, "hash_ids": [at]} for at in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = replicas.Options(trace=path, num_blocks=100, fleets=(), requests=9)
    with pytest.raises(ConfigError, match="requests that hit something"):
        replicas.run(options, ["cluster"])
    with pytest.raises(
        ConfigError,
        match="--num-blocks=1 is not allowed; allowed: enough blocks for every prompt; one needs 2",
    ):
        replicas.run(replace(options, num_blocks=1), ["cluster"])
