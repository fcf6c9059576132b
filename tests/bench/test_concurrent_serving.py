"""``radixkv bench serving``: a run that is too short to mean anything, but has all figures."""

from __future__ import annotations

import json

import pytest

from radixkv.bench import concurrent_serving
from radixkv.errors import ArgumentError
from tests.bench.forking import fork_services


@pytest.mark.slow
def test_a_short_run_has_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_services(monkeypatch, concurrent_serving)
    done: list[int] = []
    result = concurrent_serving.run(
        together=3, crowd=6, fits=2, max_tokens=8, prefix_tokens=60, rounds=1, progress=done.append
    )
    assert done == [1, 2] and concurrent_serving.num_rounds(1) == 2
    assert result["failed"] == 0 and result["same_text"]
    for each in (*result["together_rounds"], *result["crowd_rounds"]):
        assert each["ratio"] == pytest.approx(each["sequence_s"] / each["together_s"])
    assert result["crowd_blocks"] < 6 * (60 + 8) // concurrent_serving.BLOCK_SIZE + 20
    assert json.loads(json.dumps(result))["benchmark"] == "serving"
    assert "texts equal" in concurrent_serving.table(result)


@pytest.mark.parametrize(
    "wrong", [{"together": 0}, {"crowd": 1_025}, {"rounds": 0}, {"prefix_tokens": 10**6}]
)
def test_arguments_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        concurrent_serving.run(**wrong)
