"""The benchmark of policies: each policy beside LRU, over the same requests. Its output is JSON."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from radixkv.bench import policies
from radixkv.cli.main import commands
from radixkv.config import policy_names
from radixkv.errors import ConfigError


def test_policies_are_compared_with_lru() -> None:
    seen: list[int] = []
    result = policies.run(
        "trace", policies=["lrfu"], rounds=2, limit=65, num_blocks=100_000, progress=seen.append
    )
    assert json.loads(json.dumps(result)) == result
    baseline, lrfu = result["results"]
    assert (baseline["policy"], lrfu["policy"]) == ("lru", "lrfu")
    assert (baseline["ratio"], baseline["added_us"]) == (1.0, 0.0)
    assert baseline["cpu_us"] > 0 and lrfu["cpu_us"] > 0 and lrfu["ratio"] > 0
    assert baseline["hit_rate"] == lrfu["hit_rate"] > 0  # everything fits
    assert seen == [1, 65, 66, 130, 131, 195, 196, 260]
    text = policies.table(result)
    assert "lrfu" in text and "× lru" in text and result["machine"] in text


def test_policy_all_runs_every_policy() -> None:
    result = policies.run("thin", policies=["all"], rounds=1, limit=40, num_blocks=64)
    assert [row["policy"] for row in result["results"]] == list(policy_names())


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--policy.*'mru'.*lrfu"):
        policies.run(policies=["mru"], limit=1)


def test_the_command() -> None:
    asked = [
        "--workload",
        "thin",
        "--policy",
        "fifo",
        "--rounds",
        "1",
        "--limit",
        "20",
        "--num-blocks",
        "500",
    ]
    done = CliRunner().invoke(commands, ["bench", "policies", *asked, "--json"], catch_exceptions=False)
    assert [row["policy"] for row in json.loads(done.stdout)["results"]] == ["lru", "fifo"]
