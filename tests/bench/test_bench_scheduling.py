"""``radixkv bench scheduling``: a short run has all figures, and a decision is fast."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixkv.bench import scheduling
from radixkv.errors import ConfigError


def test_a_decision_over_a_long_queue_is_fast() -> None:
    """A decision takes 5 times as much CPU time as a bare heap. The best of five runs, since others slow it down."""
    runs = (scheduling.run(requests=10_000, decisions=500) for _ in range(5))
    result = min(runs, key=lambda each: each["median_us"] / each["heap_us"])
    assert 0 < result["peek_us"] < result["median_us"] <= result["p99_us"]
    assert result["median_us"] <= 10 * result["heap_us"]
    assert json.loads(json.dumps(result)) == result
    text = scheduling.table(result)
    assert "10,000 waiting requests of 16 tenants" in text and "announcing 100,000 tokens" in text
    assert 0 < result["announce_us"] < 3 * result["match_us"]


@pytest.mark.slow
def test_a_longer_queue_costs_little_more() -> None:
    short, long = (
        min(scheduling.run(requests=size, decisions=500)["median_us"] for _ in range(3))
        for size in (100, 20_000)
    )
    assert long < 10 * short


@pytest.mark.parametrize(
    "wrong",
    [{"requests": 0}, {"requests": 10**7}, {"tenants": 0}, {"decisions": 0}, {"changes": -1}, {"changes": 9}],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
        scheduling.run(**{"requests": 8, **wrong})
