"""Documents: links lead somewhere, and lists are rendered as lists by every Markdown."""

from __future__ import annotations

import re

import pytest

import _generate as generate
from tests.docs.blocks import DOCUMENTS, ROOT

GENERATED = {
    "docs/reference/http.md",
    "docs/reference/commands.md",
    "docs/reference/settings.md",
    "docs/reference/metrics.md",
    "docs/reference/errors.md",
    "docs/reference/clients.md",
    f"docs/{generate.EXAMPLES}",
    *(f"docs/reference/api/{name}.md" for name in generate.API),
}
"""Pages that exist only in the site."""


def without_code(text: str) -> str:
    """A document without its blocks and spans of code."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "code", text)


def anchors(document: str) -> set[str]:
    """The anchors of a document's headings, as git hosts make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def broken(document: str, text: str) -> list[str]:
    """The relative links of a document that lead nowhere, in the repository or in the site."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        target, _, anchor = link.partition("#")
        if ":" in target:
            continue
        path = (ROOT / document).parent / target if target else ROOT / document
        place = path.resolve().relative_to(ROOT).as_posix()
        is_there = path.exists() or place in GENERATED
        has_anchor = place in GENERATED or not anchor or (is_there and anchor in anchors(place))
        if not (is_there and has_anchor):
            found.append(link)
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    assert broken(document, (ROOT / document).read_text()) == []


def test_a_link_to_nowhere_is_found() -> None:
    text = "[a](docs/nothing.md) [b](README.md#nothing) [c](README.md) [d](https://example.org/x) `[e](x)`"
    assert broken("README.md", text) == ["docs/nothing.md", "README.md#nothing"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lists_and_tables_follow_an_empty_line(document: str) -> None:
    """Git hosts need none, the site does."""
    found, before = [], ""
    for line in without_code((ROOT / document).read_text()).splitlines():
        is_item, is_row = re.match(r"(-|\d+\.) ", line), line.startswith("|")
        follows = re.match(r"(-|\d+\.) |  ", before)
        if before.strip() and ((is_item and not follows) or (is_row and not before.startswith("|"))):
            found.append(line)
        before = line
    assert found == []
