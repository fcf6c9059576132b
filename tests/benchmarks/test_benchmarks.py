"""Each benchmark for developers, run by its command for a moment: it has all figures, and they fit together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from tests.bench.forking import fork_services
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]


def measured(module: ModuleType, *arguments: str) -> dict[str, Any]:
    """Return what the benchmark's command prints as JSON."""
    done = CliRunner().invoke(module.main, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["machine"] in module.table(result)
    return result


def test_policies_are_compared_with_lru() -> None:
    from benchmarks import policies

    options = "--workload trace --policy lrfu --rounds 2 --limit 65 --num-blocks 100000"
    baseline, lrfu = measured(policies, *options.split())["results"]
    assert (baseline["policy"], lrfu["policy"]) == ("lru", "lrfu")
    assert (baseline["ratio"], baseline["added_us"]) == (1.0, 0.0)
    assert baseline["cpu_us"] > 0 and lrfu["cpu_us"] > 0 and lrfu["ratio"] > 0
    assert baseline["hit_rate"] == lrfu["hit_rate"] > 0, "everything fits"


def test_matches_are_timed_beside_evictions_which_hold_the_lock_in_slices() -> None:
    from benchmarks import concurrency

    interval = sys.getswitchinterval()
    result = measured(concurrency, *["--num-blocks", "6000", "--evict-blocks", "2000", "--matches", "3000"])
    assert sys.getswitchinterval() == interval
    rows = [row for row in result["latency"] if row["beside"] in concurrency.BESIDE]
    assert [row["beside"] for row in rows] == ["nothing", "computing", "evicting"] * 2
    assert all(row["calls"] == 3_000 and row["p50_us"] <= row["p99_us"] <= row["max_us"] for row in rows)
    assert all(row["evict_calls"] >= 1 for row in rows if row["beside"] == "evicting")
    holds = {row["calls_of"]: row for row in result["holds"]}
    assert holds["match"]["holds"] == holds["match"]["calls"] == 1_000
    assert holds["evict(2000)"]["calls"] == 1 and holds["evict(2000)"]["holds"] > 1
    assert all(row["max_us"] <= row["call_max_us"] for row in holds.values())


def test_a_decision_over_a_long_queue_is_fast() -> None:
    """A decision takes 5 times as much CPU time as a bare heap. The best of five runs, since others slow it down."""
    from benchmarks import scheduling

    runs = (measured(scheduling, "--decisions", "500") for _ in range(5))
    result = min(runs, key=lambda each: each["median_us"] / each["heap_us"])
    assert 0 < result["peek_us"] < result["median_us"] <= result["p99_us"]
    assert result["median_us"] <= 10 * result["heap_us"]
    assert 0 < result["announce_us"] < 3 * result["match_us"]


@pytest.mark.slow
def test_completions_are_served_at_once_and_in_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import serving
    from radixkv.bench import service_process

    fork_services(monkeypatch, service_process)
    options = "--together 3 --crowd 6 --fits 2 --max-tokens 8 --prefix-tokens 60 --rounds 1"
    result = measured(serving, *options.split())
    assert result["failed"] == 0 and result["same_text"]
    for each in (*result["together_rounds"], *result["crowd_rounds"]):
        assert each["ratio"] == pytest.approx(each["sequence_s"] / each["together_s"])
    assert result["crowd_blocks"] < 6 * (60 + 8) // serving.BLOCK_SIZE + 20


@pytest.mark.slow
def test_steps_are_timed_beside_a_client_that_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client polls once before it can be told to stop, so each pair has a poll."""
    from benchmarks import control

    small = partial(control.demo_model, num_layers=1, hidden_size=64, intermediate_size=64)
    monkeypatch.setattr(control, "demo_model", small)
    result = measured(control, *["--pairs", "2", "--steps", "8", "--polls-per-s", "100"])
    assert len(result["pairs"]) == 2
    assert all(pair["polls"] > 0 and 0 < pair["silent_cpu_ms"] for pair in result["pairs"])
    assert min(result["wall_ratio"], result["cpu_ratio"]) > 0


@pytest.mark.slow
def test_exact_tiers_change_nothing_and_a_wrong_scale_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import tier_dtype, trained_model
    from radixkv.storage.lossy_codec import LossyCodec

    monkeypatch.setattr(trained_model, "ROWS", 2)
    monkeypatch.setattr(trained_model, "LENGTH", 32)
    line = b"The quick brown fox jumps over the lazy dog; then it reads what it wrote, and writes it again.\n"
    monkeypatch.setattr(trained_model, "text", lambda: line * 500)

    def rows() -> dict[str, dict[str, Any]]:
        result = measured(tier_dtype, *["--steps", "2", "--prompts", "2", "--tokens", "100"])
        return {row["dtype"]: row for row in result["results"]}

    found = rows()
    assert found["exact"]["max_logit"] == found["exact"]["kl"] == 0.0 and found["exact"]["same_choice"] == 1.0
    for dtype in ("fp8", "int8"):
        row = found[dtype]
        assert 0 < row["mean_logit"] < row["max_logit"] < 1 and 0 < row["kl"] < 0.01
        assert abs(row["loss"] - found["exact"]["loss"]) < 0.05
        assert row["bytes_per_token"] == 3 * 2 * 2 * (64 + 4) and row["of_16_bits"] == 68 / 128
    assert found["int8"]["mean_logit"] < found["fp8"]["mean_logit"]
    original = LossyCodec.decode
    monkeypatch.setattr(
        LossyCodec, "decode", lambda self, given: [2 * each for each in original(self, given)]
    )
    worse = rows()
    assert worse["exact"]["max_logit"] == 0.0
    assert worse["int8"]["mean_logit"] > 10 * found["int8"]["mean_logit"]


@pytest.mark.slow
def test_our_side_of_lmcache_has_all_figures(tmp_path: Path) -> None:
    from benchmarks import beside_lmcache

    found = beside_lmcache.measure("radixkv", sys.executable, 64, tmp_path)
    assert tuple(found) == beside_lmcache.FIGURES
    assert all(wall > 0 and cpu > 0 for wall, cpu in found.values())
    assert not list(tmp_path.iterdir())


@pytest.mark.engines
def test_both_caches_of_vllm_take_the_same_steps() -> None:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "policies"))
    done = subprocess.run(
        [os.environ["RADIXKV_VLLM"], "-m", "benchmarks.vllm_steps", "--pairs", "1", "--only", "short-400"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6_000:]
    plain, with_events = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert not plain["events"] and with_events["events"]
    for found in (plain, with_events):
        assert found["share"] > 0 and found["last"]["radixkv"]["cached"] > 0
        assert found["last"]["radixkv"]["steps"] == found["last"]["stock"]["steps"]
