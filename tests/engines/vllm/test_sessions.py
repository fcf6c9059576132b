"""Sessions of a coding agent in vLLM's scheduler: radixkv finds as much as vLLM's own cache, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.test_same_tokens import ROOT

pytestmark = [pytest.mark.engines]

SCRIPT = Path(__file__).with_name("sessions.py")
EXCERPT = SCRIPT.parents[1] / "agent_sessions.jsonl.gz"
NUM_REQUESTS = 529


def test_sessions_of_an_agent_find_as_much_as_in_vllm() -> None:
    """Sums of three orders of 24 sessions, 8 at a time. Each order may lose a hundredth."""
    rows = replayed("--concurrent", "8")
    assert [(row["seed"], row["cache"]) for row in rows] == [
        (seed, cache) for seed in range(3) for cache in ("stock", "radixkv")
    ]
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        assert ours["requests"] == stock["requests"] == NUM_REQUESTS and ours["prompt"] == stock["prompt"]
        assert ours["cached"] >= 0.99 * stock["cached"] > 0
        assert (ours["sequences"], ours["unaccounted"], ours["violations"]) == (0, 0, [])
        assert 0 < stock["cached"] < stock["prompt"]
    cached = [sum(row["cached"] for row in rows if row["cache"] == cache) for cache in ("stock", "radixkv")]
    assert cached[1] >= cached[0], rows


def test_with_a_queue_sessions_find_far_more_and_none_waits_beyond_the_bound() -> None:
    """All sessions at a time, with little prefill: vLLM's order evicts what the next request needs."""
    rows = replayed("--concurrent", "24", "--oversubscribed", "3", "--step-tokens", "256", "--seeds", "0")
    stock, ours = rows
    assert ours["requests"] == stock["requests"] == NUM_REQUESTS and ours["prompt"] == stock["prompt"]
    assert ours["cached"] >= 1.5 * stock["cached"] > 0
    assert (ours["sequences"], ours["unaccounted"], ours["violations"]) == (0, 0, [])
    assert ours["most_above_bound"] <= 0 and stock["longest_wait_s"] > 60


def replayed(*arguments: str) -> list[dict[str, Any]]:
    """Replay the sessions in the engine's environment."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "policies"))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [os.environ["RADIXKV_VLLM"], str(SCRIPT), str(EXCERPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows
