"""The picture: an SVG that shows the rows, on light and on dark pages, and loads nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from radixkv.simulator.generator import Part, generate, line
from radixkv.simulator.picture import draw
from radixkv.simulator.simulate import run

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"
COMMITTED = Path(__file__).parents[2] / "docs" / "hit-rate.svg"
SIZES = [100, 500, 2_000]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("\n".join(line(call, 512) for call in generate([Part("acme", "chat", 2.0, 0.0, 300.0)])))
    return run([path], policies=["lfu", "lrfu", "optimum_bypass"], capacities=SIZES, jobs=1)


def texts(svg: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]


def points(svg: ElementTree.Element, policy: str) -> list[tuple[float, float]]:
    """Return the points of a policy's line, in the picture's units."""
    (path, *_) = [
        path.attrib["d"]
        for group in svg.iter(f"{SVG}g")
        if group.get("id") == policy
        for path in group.iter(f"{SVG}path")
    ]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]


@pytest.mark.slow
def test_the_lines_are_the_rows(result: dict[str, Any]) -> None:
    """Heights are one linear function of the hit rate for all policies. Positions depend on the capacity only."""
    svg = ElementTree.fromstring(draw(result))
    rates = {
        (row["policy"], row["capacity"]): row["token_hit_rate"]
        for row in [*result["results"], *result["baselines"]]
    }
    drawn = {
        (name, size): point
        for name in ("lru", "optimum", "lfu", "lrfu", "optimum_bypass")
        for size, point in zip(SIZES, points(svg, name), strict=True)
    }
    assert drawn.keys() == rates.keys()
    low, high = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    steep = (drawn[high][1] - drawn[low][1]) / (rates[high] - rates[low])
    assert steep < 0, "a higher hit rate is nearer to the top"
    for key, (x, y) in drawn.items():
        assert y == pytest.approx(drawn[low][1] + steep * (rates[key] - rates[low]), abs=0.01)
        assert x == drawn["lru", key[1]][0]
    assert [drawn["lru", size][0] for size in SIZES] == sorted(x for x, _ in points(svg, "lru"))


def test_axes_and_lines_are_labelled(result: dict[str, Any]) -> None:
    labels = texts(ElementTree.fromstring(draw(result)))
    assert {"100", "500", "2,000", "capacity, blocks of 512 tokens", "token hit rate, %"} < set(labels)
    assert labels[-5:] == ["optimum_bypass", "optimum", "lfu", "lrfu", "lru"]


def test_the_same_result_gives_the_same_bytes(result: dict[str, Any]) -> None:
    assert draw(result) == draw(result)


def test_it_loads_nothing_and_is_small(result: dict[str, Any]) -> None:
    svg = draw(result)
    links = re.findall(r'(?:href|src)="([^"]*)"', svg)
    assert links and all(link.startswith("#") for link in links)
    assert "@import" not in svg and re.findall(r"url\((.)", svg) == ["#"] * svg.count("url(")
    assert len(svg) < 40_000


def test_black_and_white_are_swapped_on_a_dark_page(result: dict[str, Any]) -> None:
    svg = draw(result)
    swapped = set(re.findall(r'\[style\*="(?:fill|stroke): (#\w{6})"\]', svg))
    grey = {colour for colour in re.findall(r"(?:fill|stroke): (#\w{6})", svg) if _is_grey(colour)}
    assert grey == swapped and "prefers-color-scheme:dark" in svg


def _is_grey(colour: str) -> bool:
    channels = bytes.fromhex(colour[1:])
    return max(channels) - min(channels) < 16


def test_the_committed_picture_shows_the_policies_of_the_service() -> None:
    labels = texts(ElementTree.fromstring(COMMITTED.read_text("utf-8")))
    assert labels[-5:] == ["optimum", "learned", "auto", "lrfu", "lru"]
