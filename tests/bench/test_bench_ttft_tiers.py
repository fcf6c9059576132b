"""``radixkv bench ttft-tiers``: a short run has all ways, which answer alike, and each finds what it should."""

from __future__ import annotations

import json

import pytest

from radixkv.bench import tiered_ttft
from radixkv.errors import ConfigError
from tests.forked import small_demo_model


@pytest.mark.slow
def test_each_way_finds_its_tokens() -> None:
    with small_demo_model():
        result = tiered_ttft.run(tokens=150, rounds=2)
    assert result["same_tokens"] and min(result["miss_us"], result["evict_us"], result["evict_below_us"]) > 0
    assert {way: each["cached_tokens"] for way, each in result["ways"].items()} == {
        "cold": 0, "cache": 144, "host": 144, "disk": 144, "slow": 0, "hung": 0,
    }  # fmt: skip
    assert json.loads(json.dumps(result)) == result
    assert "a disk that never answers" in tiered_ttft.table(result)


@pytest.mark.parametrize("wrong", [{"tokens": 63}, {"tokens": 2_001}, {"rounds": 0}])
def test_settings_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
        tiered_ttft.run(**wrong)
