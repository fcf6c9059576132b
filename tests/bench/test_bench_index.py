"""The index benchmark: its workloads are deterministic, its checks hold, its output is JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv.bench import index, workloads
from radixkv.errors import ConfigError


@pytest.mark.parametrize("name", ["trace", "thin", "unique"])
def test_run_is_checked_and_is_json(name: str) -> None:
    seen: list[int] = []
    result = index.run(name, limit=70, num_blocks=60_000, progress=seen.append)
    assert json.loads(json.dumps(result)) == result
    assert result["radixkv"]["requests"] == 70
    assert result["radixkv"]["hit_tokens"] == result["hit_tokens_if_nothing_were_forgotten"]
    assert set(result["floors"]) == {"memcmp", "xxh3", "sha256"}
    assert seen == [0, 64]
    assert name in index.table(result)


def test_eviction_keeps_the_hits_below_the_bound() -> None:
    result = index.run("trace", limit=60, num_blocks=12_000)
    assert result["radixkv"]["evicted_blocks"] > 0
    assert result["radixkv"]["hit_tokens"] <= result["hit_tokens_if_nothing_were_forgotten"]


def test_workloads_depend_on_the_seed_alone() -> None:
    def ids(seed: int) -> list[bytes]:
        return [request.full.tobytes() for request in workloads.trace_like(seed, 20)]

    assert ids(3) == ids(3)
    assert ids(3) != ids(4)


def test_a_trace_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n' * 2)
    first, second = workloads.trace_file(0, path, 10)
    assert len(first.prompt) == 700
    assert len(first.full) == 705
    assert first.prompt.tobytes() == second.prompt.tobytes()
    assert index.run("trace", trace=path, num_blocks=1_000)["radixkv"]["hit_tokens"] == 688


def test_a_bad_trace_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 700}\n')
    with pytest.raises(ConfigError, match="line 1"):
        list(workloads.trace_file(0, path, 10))


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match="trace, chat, thin or unique"):
        index.run("nonsense")
