"""``radixkv bench ttft-tiers``: a short run has all ways, which answer alike, and each finds what it should.

Whether a slow disk is left alone is decided by the clock. On a busy machine only good disks have a certain result.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.files.system import Files
from tests.tiers.support import patient_disks


class GoodFiles(Files):
    """Files that stay good in place of bad ones."""

    def __init__(self, seconds: float | None) -> None:
        self.is_armed = False

    def end(self) -> None:
        """Do nothing."""


def short_run(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The result of a run with a small model."""
    from radixkv.bench import ttft_tiers

    small = partial(ttft_tiers.demo_model, num_layers=1, hidden_size=64, intermediate_size=64)
    patch.setattr(ttft_tiers, "demo_model", small)
    for name, value in (("_MISSES", 20), ("_NODES", 20), ("_EVICTIONS", 1)):
        patch.setattr(ttft_tiers, name, value)
    return ttft_tiers.run(tokens=150, rounds=1)


@pytest.mark.slow
def test_each_way_finds_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from radixkv.bench import ttft_tiers

    monkeypatch.setattr(ttft_tiers, "_BadFiles", GoodFiles)
    with patient_disks():
        result = short_run(monkeypatch)
    assert result["same_tokens"] and min(result["miss_us"], result["evict_us"], result["evict_below_us"]) > 0
    assert {way: each["cached_tokens"] for way, each in result["ways"].items()} == {
        "cold": 0, "cache": 144, "host": 144, "disk": 144, "slow": 144, "hung": 144,
    }  # fmt: skip
    assert json.loads(json.dumps(result)) == result
    assert "a disk that never answers" in ttft_tiers.table(result)


@pytest.mark.timing
def test_a_bad_disk_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    result = short_run(monkeypatch)
    assert result["same_tokens"]
    assert [result["ways"][way]["cached_tokens"] for way in ("disk", "slow", "hung")] == [144, 0, 0]


@pytest.mark.parametrize("wrong", [{"tokens": 63}, {"tokens": 2_001}, {"rounds": 0}])
def test_settings_are_checked(wrong: dict[str, int]) -> None:
    from radixkv.bench import ttft_tiers

    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
        ttft_tiers.run(**wrong)
