"""The report: one page that loads nothing, escapes its input, and renders in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from radixkv.simulator.generator import Part, generate, line
from radixkv.simulator.report import render
from radixkv.simulator.simulate import run
from tests import browser

EVIL = '"><script>document.title="stolen"<!--&<b>'


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small run of two tenants. The name of one is an attack on the page."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    parts = [Part("acme", "chat", 2.0, 0.0, 200.0), Part(EVIL, "rag", 2.0, 0.0, 200.0)]
    path.write_text("\n".join(line(call, 512) for call in generate(parts)))
    return run([path], policies=["lfu", "optimum_bypass"], capacities=[100, 500, 2_000], jobs=1)


def test_it_loads_nothing_from_anywhere(result: dict[str, Any]) -> None:
    page = render(result)
    script = re.compile(r"<script[^>]*>.*?</script>", re.DOTALL)
    markup = script.sub("<script></script>", page)
    assert not re.search(r"(src|href)\s*=", markup)
    assert "default-src 'none'" in markup
    assert page.count("<html") == 1


def test_names_are_escaped(result: dict[str, Any]) -> None:
    page = render(result)
    assert EVIL not in page
    assert "&lt;script&gt;document" in page


def test_the_report_shows_the_rows_and_the_advice(result: dict[str, Any]) -> None:
    page = render(result)
    for row in result["results"]:
        assert f"<td>{100 * row['token_hit_rate']:.1f}\N{NO-BREAK SPACE}%</td>" in page
    for said in result["advice"]:
        assert said.split("&")[0].replace("'", "&#x27;") in page


def test_the_report_shows_the_worst_stretch_of_each_policy(result: dict[str, Any]) -> None:
    page = render(result)
    deepest = min(
        (row for row in result["results"] if row["policy"] == "lfu"),
        key=lambda row: row["worst_slice"]["above_lru"],
    )
    stretch = deepest["worst_slice"]
    assert (
        f"<tr><td>lfu</td><td>{stretch['from_s']:,.0f}–{stretch['to_s']:,.0f} s</td>"
        f"<td>{deepest['capacity']:,}</td><td>{100 * stretch['above_lru']:.2f}</td></tr>"
    ) in page
    assert page.count("its worst stretch") == 1 and ">-0.0" not in page


@pytest.mark.browser
@pytest.mark.parametrize("width", [500, 1200])
def test_a_browser_draws_it(result: dict[str, Any], width: int, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(result), encoding="utf-8")
    html, console = browser.dom(page, tmp_path / "profile", width)
    assert "<title>radixkv simulate</title>" in html and "stolen" not in re.findall(
        "<title>(.*?)</title>", html
    )
    assert not console, console
    assert html.count('class="main-svg"') >= 4, (
        "one chart for all tenants, one for the slices, one for each tenant"
    )
    for name in ("lru", "optimum", "lfu", "optimum_bypass"):
        assert re.search(rf'class="legendtext"[^>]*>{name}<', html), name
    assert 'class="js-fill"' in html, "the band between LRU and the optimum is drawn"
    (chart,) = set(re.findall(r'class="main-svg"[^>]*?width="([\d.]+)"', html)) or {"0"}
    assert 0.7 * width < float(chart) <= width
    image = browser.screenshot(page, tmp_path / "profile", width)
    assert len(image) > 30_000, "an empty page is smaller"
