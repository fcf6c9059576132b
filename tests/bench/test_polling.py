"""``radixkv bench control``: a run that is too short to mean anything, but has all figures."""

from __future__ import annotations

import json

import pytest

from radixkv.bench import polling
from radixkv.errors import ArgumentError


@pytest.mark.slow
def test_a_short_run_has_all_figures() -> None:
    done: list[int] = []
    result = polling.run(pairs=2, steps=60, polls_per_s=100, progress=done.append)
    assert done == [1, 2] and len(result["pairs"]) == 2
    assert all(pair["polls"] > 0 and 0 < pair["silent_cpu_ms"] for pair in result["pairs"])
    assert 0 < result["wall_ratio"] < 1_000 and 0 < result["cpu_ratio"] < 1_000
    assert json.loads(json.dumps(result))["benchmark"] == "control"
    assert "p99" in polling.table(result)


@pytest.mark.parametrize("wrong", [{"pairs": 0}, {"steps": 0}, {"steps": 10**6}, {"polls_per_s": 0}])
def test_arguments_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        polling.run(**wrong)
