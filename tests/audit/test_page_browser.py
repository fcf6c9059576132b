"""The report's page in a real browser, at phone and desktop width: nothing overlaps, overflows or is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from radixkv.audit.page import page
from tests.audit.reports import leaking, sound, without_timing
from tests.browser import PATIENCE_MS, launched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser]

SIZES = {"phone": (360, 780), "desktop": (1280, 900)}
REPORTS = {"sound": sound, "leaking": leaking, "without timing": without_timing}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as chromium:
        yield chromium


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", REPORTS)
def test_the_page_in_a_browser(browser: Browser, tmp_path: Path, name: str, size: str, scheme: Any) -> None:
    report = REPORTS[name]()
    path = tmp_path / "report.html"
    path.write_text(page(report), "utf-8")
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    view = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: asked.append(request.url))
    view.goto(path.as_uri())
    assert asked == [path.as_uri()] and not said
    assert view.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert view.locator("header .verdict").inner_text() == str(report.verdict)
    assert view.locator("header .verdict").is_visible()
    assert view.locator(".check").count() == len(report.checks)
    drawings = view.locator("svg").all()
    assert len(drawings) == (4 if report.samples else 0)
    for drawing in drawings:
        box = drawing.bounding_box()
        assert box is not None and box["width"] > 250 and box["height"] > 150
        for line in drawing.locator("polyline").all():
            drawn = line.bounding_box()
            assert drawn is not None and drawn["width"] > 0.5 * box["width"] and drawn["height"] > 50
            assert drawn["x"] >= box["x"] - 6 and drawn["y"] >= box["y"] - 6
    sizes = "[...document.querySelectorAll('main *')].filter(e => e.innerText && !e.closest('svg'))"
    assert view.evaluate(f"Math.min(...{sizes}.map(e => parseFloat(getComputedStyle(e).fontSize)))") >= 12
    outside = "filter(e => !e.closest('pre') && e.getBoundingClientRect().right > innerWidth + 1)"
    assert view.evaluate(f"{sizes}.{outside}.length") == 0
    words = view.evaluate(
        "[...document.querySelectorAll('th, td')].map(e => e.getBoundingClientRect().height)"
    )
    assert max(words, default=0) < 80, "a word in the table is broken"
    first = view.locator("details").first
    first.locator("summary").click()
    assert first.locator("pre").is_visible()
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    picture = view.screenshot(full_page=True)
    assert len(picture) > 10_000
    context.close()
