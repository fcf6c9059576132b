"""``radixkv bench control``: a run that is too short to mean anything, but has all figures."""

from __future__ import annotations

import json
from functools import partial

import pytest

from radixkv.errors import ArgumentError


@pytest.mark.slow
def test_a_short_run_has_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client polls once before it can be told to stop, so each pair has a poll."""
    from radixkv.bench import polling

    small = partial(polling.demo_model, num_layers=1, hidden_size=64, intermediate_size=64)
    monkeypatch.setattr(polling, "demo_model", small)
    done: list[int] = []
    result = polling.run(pairs=2, steps=8, polls_per_s=100, progress=done.append)
    assert done == [1, 2] and len(result["pairs"]) == 2
    assert all(pair["polls"] > 0 and 0 < pair["silent_cpu_ms"] for pair in result["pairs"])
    assert min(result["wall_ratio"], result["cpu_ratio"]) > 0
    assert json.loads(json.dumps(result))["benchmark"] == "control"
    assert "p99" in polling.table(result)


@pytest.mark.parametrize("wrong", [{"pairs": 0}, {"steps": 0}, {"steps": 10**6}, {"polls_per_s": 0}])
def test_arguments_are_checked(wrong: dict[str, int]) -> None:
    from radixkv.bench import polling

    with pytest.raises(ArgumentError):
        polling.run(**wrong)
