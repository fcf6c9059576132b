"""``/docs`` in a real browser: it shows the operations, and sends no request to another host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from radixkv.service.operations import OPERATIONS
from tests.browser import PATIENCE_MS, launched
from tests.service.running import Running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def view(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()


def watched(view: Page) -> tuple[list[str], list[str]]:
    """Return the URLs that a page requests, and its messages to the console."""
    asked: list[str] = []
    said: list[str] = []
    view.on("request", lambda request: asked.append(request.url))
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    return asked, said


def test_docs_shows_the_operations_and_asks_no_other_host(live: Running, view: Page) -> None:
    asked, said = watched(view)
    view.goto(f"{live.url}/docs")
    view.locator(".opblock").first.wait_for()
    assert view.locator(".opblock").count() == len(OPERATIONS)
    view.locator(".opblock-summary-description", has_text="Warm a prefix").click()
    body = view.locator(".opblock.is-open .opblock-section-request-body")
    body.wait_for()
    assert "Rule 1: answer politely" in body.inner_text()
    assert asked and all(url.startswith(f"{live.url}/") for url in asked), asked
    assert not said
    assert len(view.screenshot(full_page=True)) > 10_000


def test_a_request_can_be_tried(live: Running, view: Page) -> None:
    asked, said = watched(view)
    view.goto(f"{live.url}/docs")
    view.locator(".opblock-summary-description", has_text="Check health").click()
    view.get_by_role("button", name="Try it out").click()
    view.get_by_role("button", name="Execute").click()
    view.locator(".live-responses-table .response-col_status", has_text="200").first.wait_for()
    assert f"{live.url}/healthz" in asked and all(url.startswith(f"{live.url}/") for url in asked)
    assert not said


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_of_errors_fits_the_window(live: Running, view: Page, width: int) -> None:
    asked, said = watched(view)
    view.set_viewport_size({"width": width, "height": 900})
    view.goto(f"{live.url}/docs/errors#quota_exceeded")
    assert view.locator("#quota_exceeded").is_visible()
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    assert all(url.startswith(f"{live.url}/") for url in asked) and not said
