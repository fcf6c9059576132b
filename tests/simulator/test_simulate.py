"""A simulation: its rows, its scores and its errors, as a library and as commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.config import policy_names
from radixkv.errors import ConfigError
from radixkv.simulator.profiles import PROFILES, ModelProfile, profile_of
from radixkv.simulator.score import OPTIMUM_BYPASS, Curve
from radixkv.simulator.simulate import WorkerDied, known_policies, run, table
from tests.simulator.command import complaint
from tests.simulator.command import run as command
from tests.simulator.traces import mooncake, write
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

SIZES = [100, 400, 1_200]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minute of requests of two tenants."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    done = command(
        "workload", "--mix", "acme:chat=2", "--mix", "globex:rag=1,batch=1@20s-40s", "--duration", "1m",
        "--output", str(path),
    )  # fmt: skip
    assert done.code == 0 and not done.stdout, done
    return path


@pytest.fixture(scope="module")
def result(trace: Path) -> dict[str, Any]:
    return run([trace], capacities=SIZES, jobs=1)


@pytest.mark.slow
def test_a_row_for_each_policy_and_capacity(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result)) == result
    rows = [(row["policy"], row["capacity"]) for row in result["results"]]
    assert rows == [(name, size) for name in known_policies() for size in SIZES]
    assert set(known_policies()) == {*policy_names(), "optimum", OPTIMUM_BYPASS}
    for row in result["results"]:
        assert 0 <= row["token_hit_rate"] <= result["endless_token_hit_rate"]
        assert set(row["tenants"]) == {"acme", "globex"}


def test_the_gain_of_admission_is_reported(result: dict[str, Any], trace: Path) -> None:
    """For a policy that declines blocks: the doorkeeper, which is LRU plus admission."""
    by_key = {(row["policy"], row["capacity"]): row for row in result["results"]}
    for (name, size), row in by_key.items():
        if name == "doorkeeper":
            gain = row["token_hit_rate"] - by_key["lru", size]["token_hit_rate"]
            assert row["admission_gain"] == pytest.approx(gain)
        else:
            assert row["admission_gain"] is None and row["declined_blocks"] == 0
    assert by_key["doorkeeper", SIZES[0]]["declined_blocks"] > 0 and "admission adds" in table(result)
    assert "admission adds" not in table(run([trace], policies=["lru"], capacities=[200], jobs=1))


def test_scores_agree_with_their_definitions(result: dict[str, Any]) -> None:
    by_key = {(row["policy"], row["capacity"]): row for row in result["results"]}
    for (name, size), row in by_key.items():
        lru, best = by_key["lru", size], by_key["optimum", size]
        gap = best["token_hit_rate"] - lru["token_hit_rate"]
        assert row["share_of_gap"] == pytest.approx((row["token_hit_rate"] - lru["token_hit_rate"]) / gap)
        parts = row["tenants"].values()
        tokens = sum(part["token_hit_rate"] * part["prompt_tokens"] for part in parts)
        assert tokens == pytest.approx(row["token_hit_rate"] * row["prompt_tokens"])
        seconds = sum(part["prefill_seconds_saved"] for part in parts)
        assert seconds == pytest.approx(row["prefill_seconds_saved"]) and seconds > 0
        assert row["worst_slice"]["above_lru"] == min(each["above_lru"] for each in row["slices"])
        if name == "lru":
            assert row["capacity_for_lru_rate"] == size and row["memory_saved"] == 0
        if name == "optimum":
            assert row["capacity_for_lru_rate"] < size


def test_baselines_always_run(trace: Path) -> None:
    result = run([trace], policies=["lfu"], capacities=[500], jobs=1)
    assert [row["policy"] for row in result["results"]] == ["lfu"]
    assert [row["policy"] for row in result["baselines"]] == ["lru", "optimum"]
    assert result["results"][0]["share_of_gap"] is not None


def test_worker_processes_change_no_result(trace: Path, result: dict[str, Any]) -> None:
    seen: list[tuple[int, int]] = []
    policies = ["gdsf", "learned", "lru"]
    parallel = run([trace], policies=policies, capacities=SIZES, jobs=2,
                   progress=lambda *done: seen.append(done))  # fmt: skip
    assert parallel["results"] == [
        row for name in policies for row in result["results"] if row["policy"] == name
    ]
    assert seen == [(done + 1, len(seen)) for done in range(len(seen))]


def test_an_interrupt_ends_the_worker_processes(trace: Path) -> None:
    """An error or Ctrl-C also ends the worker processes, in the middle of their work."""

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([trace], capacities=SIZES, jobs=2, progress=stop)
    assert not active_children()


def test_scores_may_start_later_than_the_run(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", [1, 2], [1, 2], [1, 2])
    (row,) = run([path], policies=["lru"], capacities=[10], score_from_s=2.0, jobs=1)["results"]
    assert row["requests"] == 1 and row["token_hit_rate"] == 1.0
    (row,) = run([path], policies=["lru"], capacities=[10], jobs=1)["results"]
    assert row["requests"] == 3 and row["token_hit_rate"] == pytest.approx(2 / 3)


def test_partial_blocks_count_only_if_wanted(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", [1], [1], tokens=511)
    assert run([path], policies=["lru"], capacities=[4], jobs=1)["results"][0]["token_hit_rate"] == 0
    kept = run([path], policies=["lru"], capacities=[4], jobs=1, keep_tails=True)
    assert kept["results"][0]["token_hit_rate"] == 0.5


def test_a_request_larger_than_the_cache_is_refused_and_counted(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", [1], [2, 3, 4], [1])
    for row in run([path], policies=["all"], capacities=[2], jobs=1)["results"]:
        refused = 0 if row["policy"] == OPTIMUM_BYPASS else 1
        assert row["refused_requests"] == refused
        assert row["token_hit_rate"] == pytest.approx(1 / 5)


def test_curves() -> None:
    curve = Curve({1_000: 0.1, 2_000: 0.2, 8_000: 0.2, 16_000: 0.4})
    assert curve.capacity_for(0.05) == 500
    assert curve.capacity_for(0.1) == 1_000
    assert curve.capacity_for(0.15) == pytest.approx(1_000 * 2**0.5)
    assert curve.capacity_for(0.2) == 2_000
    assert curve.capacity_for(0.3) == pytest.approx(8_000 * 2**0.5)
    assert curve.capacity_for(0.41) is None


def test_profiles() -> None:
    kib = {name: profile.kv_bytes_per_token / 1_024 for name, profile in PROFILES.items()}
    assert kib["llama-3-8b"] == 128 and kib["llama-3-70b"] == 320 and kib["llama-2-13b"] == 800
    assert (
        kib["llama-3.1-405b"] == 504
        and kib["qwen2.5-7b"] == 56
        and kib["deepseek-v3"] == pytest.approx(68.6, abs=0.05)
    )
    seconds = profile_of("llama-3-8b", 100).prefill_seconds(np.array([0, 1_000, 2_000]))
    assert seconds[0] == 0 and seconds[1] == pytest.approx(0.163, abs=0.001)
    assert seconds[2] > 2 * seconds[1], "attention is quadratic"


@pytest.mark.parametrize("name", PROFILES)
def test_the_costs_for_policies_are_the_costs_of_prefill(name: str) -> None:
    """One more token, after different numbers of tokens."""
    profile, tokens = PROFILES[name], np.array([0, 1_000, 100_000])
    costs = profile.for_policies
    steps = profile.prefill_seconds(tokens + 1) - profile.prefill_seconds(tokens)
    assert steps == pytest.approx(
        costs.per_token_s + costs.per_token_and_position_s * (tokens + 0.5), rel=1e-6
    )


def test_a_policy_that_weighs_prefill_knows_the_model(tmp_path: Path) -> None:
    """The deep prompt stays only if tokens far behind the start of a prompt cost more."""
    deep, flat = list(range(40)), [100]
    path = mooncake(tmp_path / "t.jsonl", flat, flat, deep, *([200 + at] for at in range(10)), flat, deep)
    found = {}
    for attention in (0, 128):
        profile = ModelProfile("made up", 1e6 if attention else 1e12, 32, attention, 128, 2_048)
        (row,) = run([path], policies=["gdsf"], capacities=[42], profile=profile, jobs=1)["results"]
        found[attention] = round(row["token_hit_rate"] * row["prompt_tokens"] / 512)
    assert found[0] < found[128]


def test_priorities_hold_for_their_duration(tmp_path: Path) -> None:
    """The priority request stays while others come, for three seconds after its last use."""
    dear = {"labels": {"priority": 90, "priority_duration_s": 3}}
    asked = [(0, "a"), (1, "b"), (2, "c"), (2.5, "d"), (2.9, "a"), (4, "e"), (7, "f"), (8, "g"), (9, "a")]
    lines = (
        {"time": time, "tokens": 16, "block_tokens": 16, "hashes": [each]} | (dear if each == "a" else {})
        for time, each in asked
    )
    path = write(tmp_path / "t.jsonl", *lines)
    rows = run([path], policies=["priority", "lru"], capacities=[2], jobs=1)["results"]
    assert [round(row["token_hit_rate"] * len(asked)) for row in rows] == [1, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policies": ["nonsense"]}, "optimum_bypass"),
        ({"capacities": [0]}, "--capacity"),
        ({"capacities": []}, "--capacity"),
        ({"score_from_s": 99.0}, "--score-from"),
        ({"tenants": ["nobody"]}, "--tenants"),
    ],
)
def test_impossible_options_of_a_run_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", [1, 2], [1, 2])
    with pytest.raises(ConfigError, match=said):
        run([path], **{"policies": ["lru"], "capacities": [4], "jobs": 1, **options})


def test_a_trace_without_prompts_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"time": 0, "token_ids": [], "output_ids": [1] * 16})
    with pytest.raises(ConfigError, match="TRACE='1 requests without a prompt'"):
        run([path], policies=["lru"], capacities=[4], jobs=1)


# commands -------------------------------------------------------------------------------------------------------------


def test_the_command(trace: Path, tmp_path: Path) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "curves.svg"
    done = command(
        "simulate", str(trace), "--policy", "lfu,optimum", "--capacity", "0.5k,2k", "--score-from", "40s",
        "--tenants", "acme", "--jobs", "1", "--json", "--html", str(page), "--svg", str(picture),
    )  # fmt: skip
    assert done.code == 0 and not done.stderr, done
    result = json.loads(done.stdout)
    assert [(row["policy"], row["capacity"]) for row in result["results"]] == [
        ("lfu", 500), ("lfu", 2_000), ("optimum", 500), ("optimum", 2_000),
    ]  # fmt: skip
    assert result["score_from_s"] == 40 and result["tenants"] == ["acme"]
    assert page.read_text("utf-8").startswith("<!doctype html>") and picture.read_text("utf-8").endswith(
        "</svg>\n"
    )


def test_capacities_are_exact_and_take_capitals(trace: Path) -> None:
    sizes = "16.1k, 2K,0.001M,1e2"
    done = command("simulate", str(trace), "--policy", "lru", "--capacity", sizes, "--jobs", "1", "--json")
    assert [row["capacity"] for row in json.loads(done.stdout)["results"]] == [100, 1_000, 2_000, 16_100]


def test_the_text(result: dict[str, Any]) -> None:
    text = table(result)
    assert "token hit rate, %" in text and "tenant globex" in text
    assert all(name in text for name in known_policies())
    assert result["advice"][0] in text


def test_a_workload_is_printed_without_output_file(trace: Path) -> None:
    generated = command("workload", "--mix", "rag=5", "--duration", "30s")
    assert generated.code == 0 and not generated.stderr
    (first, *_) = generated.stdout.splitlines()
    assert json.loads(first)["tenant"] == "default"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "lru,nope"), "--policy='nope' is not allowed"),
        (("--capacity", "1x"), "--capacity='1x' is not allowed"),
        (("--capacity", "1.5"), "--capacity='1.5' is not allowed"),
        (("--capacity", "nan"), "--capacity"),
        (("--capacity", "1e99"), "--capacity='1e99' is not allowed"),
        (("--capacity", "1e999999999999"), "--capacity='1e999999999999' is not allowed"),
        (("--capacity", "1k,,2k"), "--capacity='' is not allowed"),
        (("--score-from", "soon"), "--score-from='soon' is not allowed"),
        (("--profile", "gpt"), "llama-3-8b"),
        (("--tflops", "0"), "--tflops"),
        (("--tenants", "nobody"), "default"),
        (("--html", "/nowhere/report.html"), "'--html': File '/nowhere/report.html' can't be written"),
        (("--svg", "/nowhere/curves.svg"), "'--svg': File '/nowhere/curves.svg' can't be written"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in complaint(command("simulate", str(mooncake(tmp_path / "t.jsonl", [1])), *arguments))


def test_wrong_files_and_durations_are_refused_by_name(tmp_path: Path) -> None:
    assert "missing.jsonl" in complaint(command("simulate", str(tmp_path / "missing.jsonl")))
    bad = write(tmp_path / "bad.jsonl", {"time": 0})
    assert "bad.jsonl line 1: hashes" in complaint(command("simulate", str(bad)))
    assert "--mix" in complaint(command("workload", "--mix", "talk=1"))
    assert "--duration" in complaint(command("workload", "--duration", "-1m"))
    assert "--duration=0.0 is not allowed" in complaint(command("workload", "--duration", "0"))
    assert "'--tokens-per-s': 'nan'" in complaint(command("workload", "--tokens-per-s", "nan"))
    full = complaint(command("workload", "--duration", "1m", "--output", "/dev/full"), code=1)
    assert "No space left on device" in full
    assert "the end of the trace (60 s)" in complaint(
        command("workload", "--mix", "rag=1@2m", "--duration", "1m")
    )


def test_the_progress_bar_goes_to_stderr(trace: Path) -> None:
    done = command("simulate", str(trace), "--policy", "lru", "--capacity", "100", "--jobs", "1")
    assert done.code == 0 and not done.stderr and "simulating" not in done.stdout


# --- worker processes

SCRIPT = """
from pathlib import Path
from radixkv.simulator.simulate import run
rows = run([Path({trace!r})], policies=["lru"], capacities=[200, 1_000], jobs=2)
print(len(rows["results"]))
"""


def test_a_script_without_a_main_guard_gets_an_explanation(trace: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(trace=str(trace)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines()[-1].startswith(
        "radixkv.simulator.simulate.WorkerDied: the script that calls run()"
    )
    assert '`if __name__ == "__main__":`' in done.stderr and done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "SIGKILL, as the kernel does when memory runs out"), (signal.SIGSEGV, "SIGSEGV;")],
)
def test_a_killed_worker_raises_an_error_with_its_signal(
    trace: Path, number: signal.Signals, words: str
) -> None:
    """While one worker is at work that doesn't end, one of the two is killed."""
    killed: list[int] = []

    def kill(done: int, of: int) -> None:
        if not killed:
            (first, *_) = active_children()
            assert first.pid is not None
            os.kill(first.pid, number)
            killed.append(first.pid)

    policies = ["lru", "tests.simulator.endless:Endless"]
    with pytest.raises(WorkerDied, match=f"one of 2 worker processes was killed by {words}") as caught:
        run([trace], policies=policies, capacities=SIZES[:1], jobs=2, progress=kill)
    assert "--jobs" in str(caught.value) and not active_children()
