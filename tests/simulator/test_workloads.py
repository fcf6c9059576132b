"""Workloads: each depends on its seed alone, and a trace file is read whole or a bad line of it is named."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.simulator import workloads

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["trace", "chat", "thin", "unique"])
def test_workloads_depend_on_the_seed_alone(name: str) -> None:
    def ids(seed: int) -> list[tuple[str, int, bytes]]:
        requests = workloads.build(name, seed, limit=20).requests()
        return [(tenant, len(prompt), full.tobytes()) for tenant, prompt, full in requests]

    assert ids(3) == ids(3)
    assert ids(3) != ids(4)
    assert len(ids(3)) == 20


def test_the_generated_trace_has_the_shape_of_the_real_one() -> None:
    """Prompts have 13,500 tokens on average. A third of them continue an earlier prompt."""
    requests = list(workloads.trace_like(0, 600))
    mean = sum(len(request.prompt) for request in requests) / len(requests)
    starts: set[bytes] = set()
    continued = 0
    for request in requests:
        continued += request.prompt[:1024].tobytes() in starts
        starts.add(request.prompt[:1024].tobytes())
    assert 10_000 < mean < 17_000
    assert 0.2 < continued / len(requests) < 0.45


def test_a_trace_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n' * 2)
    first, second = workloads.trace_file(0, path, 10)
    assert len(first.prompt) == 700
    assert len(first.full) == 705
    assert first.prompt.tobytes() == second.prompt.tobytes()


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "nothing",
        "[]",
        '{"timestamp": "0", "input_length": 7, "output_length": 5, "hash_ids": [0]}',
        '{"timestamp": 0, "input_length": -7, "output_length": 5, "hash_ids": [0]}',
        '{"timestamp": 0, "input_length": 7, "output_length": 5, "hash_ids": "0"}',
        '{"timestamp": 0, "input_length": 7, "output_length": 5, "hash_ids": [0.5]}',
    ],
)
def test_a_bad_trace_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        list(workloads.trace_file(0, path, 10))


def test_lines_of_a_trace_are_read_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
    path.write_text(json.dumps(line) + "\n{}\n")
    (request,) = islice(workloads.trace_lines(path, 1), 1)
    assert request == workloads.TraceLine(1.5, [0, 1], 700, 5)
    with pytest.raises(ConfigError, match="line 2"):
        list(workloads.trace_lines(path, 10))
    plain = {"time": 3, "tokens": 700, "output_tokens": 500, "block_tokens": 512, "hashes": [7, 8]}
    path.write_text(json.dumps(plain) + "\n")
    assert list(workloads.trace_lines(path, 10)) == [workloads.TraceLine(3.0, [7, 8], 700, 500)]
    for wrong in ({"hashes": ["a", "b"]}, {"hashes": [-1, 8]}, {"tokens": 0}, {"block_tokens": 16}):
        path.write_text(json.dumps({**plain, **wrong}) + "\n")
        with pytest.raises(ConfigError, match=r"(request|line) 1"):
            list(workloads.trace_lines(path, 10))
    path.write_text("\n")
    with pytest.raises(ConfigError, match="at least one request"):
        list(workloads.trace_lines(path, 10))
