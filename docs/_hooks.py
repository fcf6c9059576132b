"""Hooks of MkDocs: generated pages, links that leave ``docs/``, marks of code that no test runs, and nothing external.

Links in the documents are paths in the repository, so that they work on a git host too. In the site a link to a
document outside of ``docs/`` leads to its page, a link to an example to its place on the page of examples. A link to
other code stays as text.

A build fails if a page, a style or a script would load anything from another origin.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

_TREE = [str(Path(__file__).parents[1] / folder) for folder in ("", "policies", "kernels")]
sys.path[:0] = _TREE  # the code of this tree, whatever is installed

import _generate as generate
from tests.docs.blocks import not_run

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ORIGINS = {site: source for source, site in generate.INCLUDED.items()}
"""Where a page of the site comes from in the repository, if not from ``docs/``."""

_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_FENCED = re.compile(r"^( *)(`{3,})(.*)\n((?:.*\n)*?)\1\2 *$", re.MULTILINE)
_MARKER = re.compile(r"^<!-- not run: (.+) -->$", re.MULTILINE)
_NOT_RUN = '<p class="not-run">Not run by the tests – {}</p>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    sys.path[:0] = _TREE  # MkDocs has taken it away after the import
    for path, text in generate.pages().items():
        if (in_place := files.get_file_from_path(path)) is not None:  # the page for readers of the repository
            files.remove(in_place)
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt links and marks."""
    path = page.file.src_uri
    return marked(linked(markdown, path))


def linked(markdown: str, path: str) -> str:
    """Return a page with links for the site. ``path``: of the page, in the site. Code is left as it is."""
    origin = ORIGINS.get(path, f"docs/{path}")

    def replaced(found: re.Match[str]) -> str:
        target, hash_, anchor = found[2].partition("#")
        if not target or ":" in target:
            return found[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        to = site_path(place)
        if to is None:
            return re.sub(r"^!?\[|\]\($", "", found[1])
        to, _, own = to.partition("#")
        relative = posixpath.relpath(to, posixpath.dirname(path) or ".")
        return found[1] + relative + (f"#{own}" if own and not anchor else hash_ + anchor) + found[3]

    parts, end = [], 0
    for code in _FENCED.finditer(markdown):
        parts += [_LINK.sub(replaced, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(replaced, markdown[end:])])


def site_path(place: str) -> str | None:
    """Return where a path of the repository is in the site, or None if it isn't there."""
    if place in generate.INCLUDED:
        return generate.INCLUDED[place]
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    if place == "examples":
        return generate.EXAMPLES
    if posixpath.dirname(place) == "examples":
        return f"{generate.EXAMPLES}#{Path(place).stem}"
    return None


def marked(markdown: str) -> str:
    """Return a page on which each block of code that no test runs, or not completely, says so with the reason."""
    markdown = _MARKER.sub(lambda found: _NOT_RUN.format(found[1]) + "\n", markdown)

    def with_reasons(found: re.Match[str]) -> str:
        by_reason: dict[str, dict[str, None]] = {}
        for line in found[4].splitlines():
            if line.startswith("$ ") and (left_out := not_run(line.removeprefix("$ "))):
                by_reason.setdefault(left_out[1], {})[f"`{left_out[0]}`"] = None
        if found[3].strip() != "console" or not by_reason:
            return found[0]
        reasons = "; ".join(f"{', '.join(commands)}: {reason}" for reason, commands in by_reason.items())
        return f"{found[0]}\n\n" + _NOT_RUN.format(reasons).replace("<p ", '<p markdown="1" ') + "\n"

    return _FENCED.sub(with_reasons, markdown)


# --- nothing from elsewhere

_TAG = re.compile(r"<(link|script|img|iframe|source|video|audio|object|embed|use)\b([^>]*)>", re.IGNORECASE)
_SOURCE = re.compile(
    r"""\b(?:src|srcset|href|data|poster|xlink:href)\s*=\s*["']?([^"'\s>]+)""", re.IGNORECASE
)
_CSS = re.compile(r"""(?:@import\s*(?:url\()?|url\()\s*["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)
_SCRIPT = re.compile(r"""["'`]((?:https?:)?//[\w.-]+\.[a-z]{2,}/[^"'`\s]*)["'`]""", re.IGNORECASE)
_RELATIONS = re.compile(r"""\brel\s*=\s*["']?(canonical|prev|next|edit|alternate|license)\b""", re.IGNORECASE)

_FETCHED_BY_MATERIAL = re.compile(r"https://(?:unpkg\.com|api\.github\.com|gitlab\.com)/[^\"'`\s]*")
"""Addresses in Material's script of functions that this site doesn't use: diagrams, and facts of a repository."""


def external_loads(text: str, kind: str) -> list[str]:
    """Return the addresses that a page (``.html``), a style (``.css``) or a script (``.js``) loads from elsewhere.

    Links that a reader follows don't count. In a script every address counts that is a string of its own.
    """
    return [address for address in _addresses(text, kind) if re.match(r"(https?:)?//", address)]


def _addresses(text: str, kind: str) -> Iterator[str]:
    if kind == ".html":
        for tag in _TAG.finditer(text):
            if not _RELATIONS.search(tag[2]):
                yield from _SOURCE.findall(tag[2])
        yield from _CSS.findall("".join(re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)))
    elif kind == ".css":
        yield from _CSS.findall(text)
    elif kind == ".js":
        yield from (each for each in _SCRIPT.findall(text) if not each.startswith("http://www.w3.org/"))


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Take out addresses that would be fetched, and fail if any is left."""
    from mkdocs.exceptions import PluginError

    site = Path(config["site_dir"])
    for script in site.rglob("*.js"):
        text = script.read_text("utf-8")
        if _FETCHED_BY_MATERIAL.search(text):
            script.write_text(_FETCHED_BY_MATERIAL.sub("about:blank", text), "utf-8")
    found = [
        f"{path.relative_to(site)}: {address}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css", ".js")
        for address in external_loads(path.read_text("utf-8"), path.suffix)
    ]
    if found:
        raise PluginError("the site would load from elsewhere:\n" + "\n".join(found))
