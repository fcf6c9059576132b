"""The built site in a real browser: at three widths, light and dark, with its search, and nothing from elsewhere.

``make test-browser`` builds the site first.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

import _generate as generate
import _hooks as hooks
from tests.browser import PATIENCE_MS, launched
from tests.docs.blocks import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser]

SITE = ROOT / "site"
WIDTHS = {"phone": 390, "tablet": 820, "desktop": 1440}
PAGES = {
    "home": ("", "First requests"),
    "concept": ("concepts/copy-on-write/", "fork"),
    "api": ("reference/api/radixkv/", "PrefixCache"),
    "http": ("reference/http/", "/v1/warm"),
    "errors": ("reference/errors/", "quota_exceeded"),
    "comparison": ("comparison/", "SGLang"),
}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    assert (SITE / "index.html").is_file(), "build the site first: make docs"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Browser, origin: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of some width and scheme. At its end, every request went to the origin and the console is empty."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": WIDTHS[width], "height": 900}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda each: asked.append(each.url))
    yield page
    assert asked and [url for url in asked if not url.startswith((origin, "data:", "blob:"))] == []
    assert said == []
    context.close()


def shot(page: Page, name: str) -> None:
    """Keep a picture in the folder that SCREENSHOTS names, to look at."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}.png")


OUTSIDE = """[...document.querySelectorAll('article *')].filter(each => {
    const box = each.getBoundingClientRect()
    return box.width && box.right > innerWidth + 1 && !each.closest('pre, .md-typeset__scrollwrap')
}).map(each => each.outerHTML.slice(0, 100))"""
"""Elements that end outside of the window, but for code and tables, which scroll by themselves."""

LOOKS = [(width, scheme) for width in WIDTHS for scheme in ("light", "dark")]


@pytest.mark.parametrize("opened", LOOKS, indirect=True, ids=["-".join(each) for each in LOOKS])
def test_pages_fit_their_width_in_both_schemes(
    opened: Page, origin: str, request: pytest.FixtureRequest
) -> None:
    width, scheme = request.node.callspec.params["opened"]
    for name, (path, word) in PAGES.items():
        opened.goto(origin + path)
        opened.get_by_text(word).first.wait_for(state="attached")
        assert opened.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width], (
            f"{name} scrolls sideways"
        )
        assert opened.evaluate(OUTSIDE) == [], name
        dark = opened.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 128")
        assert dark == (scheme == "dark"), name
        shot(opened, f"{name}-{width}-{scheme}")


@pytest.mark.parametrize("opened", [("phone", "light"), ("desktop", "dark")], indirect=True)
def test_search_finds_a_word(opened: Page, origin: str) -> None:
    opened.goto(origin)
    button = opened.locator(".md-header__button[for=__search]")  # on a phone
    button.click() if button.is_visible() else opened.locator(".md-search__input").click()
    opened.locator(".md-search__input").press_sequentially("eviction")
    first = opened.locator(".md-search-result__link").first
    first.wait_for()
    shot(opened, f"search-{(opened.viewport_size or {})['width']}")
    first.click()
    opened.wait_for_load_state()
    assert opened.url != origin and "evict" in opened.locator("article").inner_text().lower()


@pytest.mark.parametrize("opened", [("desktop", "light")], indirect=True)
def test_the_palette_can_be_switched_and_is_kept(opened: Page, origin: str) -> None:
    opened.goto(origin)
    scheme = "document.body.dataset.mdColorScheme"
    assert opened.evaluate(scheme) == "default"
    opened.locator("label[title='Use light colours']").click()
    opened.locator("label[title='Use dark colours']").click()
    assert opened.evaluate(scheme) == "slate"
    opened.goto(origin + "glossary/")
    assert opened.evaluate(scheme) == "slate"


@pytest.mark.parametrize("opened", [("phone", "light")], indirect=True)
def test_the_menu_opens_on_a_phone(opened: Page, origin: str) -> None:
    opened.goto(origin)
    opened.locator(".md-header__button[for=__drawer]").click()
    opened.locator(".md-nav--primary").get_by_text("Reference", exact=True).first.wait_for()
    opened.wait_for_timeout(500)
    shot(opened, "menu-phone")
    assert opened.evaluate("document.documentElement.scrollWidth") <= WIDTHS["phone"]


def test_the_build_loads_nothing_from_elsewhere() -> None:
    files = [path for path in SITE.rglob("*") if path.suffix in (".html", ".css", ".js")]
    assert len(files) > 30
    assert {
        path: found for path in files if (found := hooks.external_loads(path.read_text(), path.suffix))
    } == {}
    assert not [
        path for path in files if "fonts.googleapis" in (text := path.read_text()) or "unpkg.com" in text
    ]


def test_the_search_knows_every_page() -> None:
    places = {
        each["location"].partition("#")[0]
        for each in json.loads((SITE / "search" / "search_index.json").read_text())["docs"]
    }
    built = {path.parent.relative_to(SITE).as_posix() + "/" for path in SITE.rglob("index.html")} - {"./"}
    assert built <= places


@pytest.mark.parametrize("name", generate.API)
def test_each_public_name_is_documented(name: str) -> None:
    page = (SITE / "reference" / "api" / name / "index.html").read_text()
    for module in generate.API[name][1]:
        for each in generate.public_names(module):
            assert f'id="{module}.{each}"' in page, each
