"""The single figures of the index benchmark at a small size: all are present, valid JSON and checked."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest

from radixkv.bench import figures, index, shapes
from radixkv.bench.drive import OPERATIONS
from radixkv.errors import IntegrityError

SMALL = figures.Sizes(
    repeats=10, leaves=200, beam_tokens=520, caches=(40, 400), prompts=(100, 1_500), shapes=0.002
)


@cache
def measured() -> dict[str, Any]:
    return index.run("thin", limit=250, num_blocks=5_000, figures=SMALL)


@pytest.fixture
def result() -> dict[str, Any]:
    """Measured once, during a test: see ``_fine_cpu_time``."""
    return measured()


@pytest.mark.slow
def test_each_figure_is_present_and_is_json(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result)) == result
    found = {each["name"]: each for each in result["figures"]}
    for part in (
        "thin: p99 ÷ p50 of open", "thin: resident memory a block", "match of a resident prompt of 4,096 tokens",
        "evict(1)", "evict(4)", "evict(256)", "fork of a sequence of 520 tokens into 8", "reorder of 8", "append to 8",
        "a count of blocks", "match_and_lease of 2,900", "insert of 64 blocks, 60 of them resident",
    ):  # fmt: skip
        assert any(part in name for name in found), part
    fields = {"name", "value", "unit", "p99", "reach", "stretch", "floor", "floor_value", "ratio"}
    for each in found.values():
        assert set(each) == fields
        assert math.isfinite(each["value"])
        assert (each["floor"] is None) == (each["ratio"] is None)
        if each["ratio"] is not None:
            assert each["ratio"] == pytest.approx(each["value"] / each["floor_value"])


@pytest.mark.slow
def test_a_burst_computes_each_whole_block_once(result: dict[str, Any]) -> None:
    """2,900 tokens are 181 whole blocks and 4 tokens: the other seven requests compute these 4."""
    (burst,) = [each for each in result["figures"] if "burst" in each["name"]]
    assert burst["value"] == burst["reach"] == 2_900 + 7 * 4


def test_scaling_with_cache_and_prompt_size(result: dict[str, Any]) -> None:
    scaling = result["scaling"]
    by_cache = [each for each in scaling if each["size"] == "resident blocks"]
    assert [each["operation"] for each in by_cache] == ["match", "a request that evicts", "evict(1)"]
    assert all(list(each["values"]) == ["40", "400"] and each["reach"] for each in by_cache)
    by_prompt = {each["operation"]: each for each in scaling if each["size"] == "prompt tokens"}
    assert {"open", "commit", "extend", "fork", "trim", "release", "match"} <= set(by_prompt)
    for each in scaling:
        first, last = each["values"].values()
        assert each["ratio"] == pytest.approx(last / first)


def test_the_matched_prompt_has_five_nodes() -> None:
    cache = figures.PrefixCache(figures.CacheConfig(num_blocks=2_000))
    keys = figures.five_node_keys(0)
    for key in keys:
        figures.publish(cache, key)
    assert cache.stats().num_nodes == 9  # 5 on the path, and the remainders of 4 others
    assert cache.match(figures.NAMESPACE, keys[0]).num_tokens == 4_096


@pytest.mark.parametrize("shape", shapes.shapes(0, 0.002), ids=lambda shape: shape.name)
def test_a_shape_is_measured_and_audited(shape: shapes.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shapes.measure(shape)
    assert json.loads(json.dumps(found)) == found
    assert found["shape"] == shape.name and set(found["operations"]) == set(OPERATIONS)
    assert found["requests"] == shape.requests.most and found["nodes"] > 0

    def broken(cache: object) -> None:
        raise IntegrityError("planted")

    monkeypatch.setattr(shapes.audit, "check", broken)
    with pytest.raises(IntegrityError, match="planted"):
        shapes.measure(shape)


def test_the_table_has_the_figures(result: dict[str, Any]) -> None:
    text = index.table(result)
    for word in (
        "match of a resident prompt",
        "by resident blocks",
        "by prompt tokens",
        "diverging",
        "last ÷ first",
    ):
        assert word in text
