"""The project's documents: their fenced blocks, and the commands in their text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    file.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "policies/*.md", "kernels/*.md")
    for file in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^ *```(.*)$")
_MARKER = re.compile(r"^<!-- not run: (.+) -->$")
_SPAN = re.compile(r"`((?:radixkv|make|python -m) [^`]+)`")
NOT_RUN = {
    r"make |python fuzz/": "sets up an environment, or takes minutes",
    r"(RADIXKV_COMPILE=0 )?pip install ": "installs; the tests of packaging build and import wheels",
    r"radixkv serve ": "runs until it is stopped; the tests run a demo server",
    r"radixkv audit run": "takes minutes; the tests of the command line run it with fewer examples",
    r"radixkv .*--device cuda": "needs a GPU",
}
"""Commands of console blocks that the tests don't run, and why. The site shows the reason below the block."""


def not_run(line: str) -> tuple[str, str] | None:
    """The first two words of a command that the tests don't run, and why they don't; None if they do."""
    reason = next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, line)), None)
    return None if reason is None else (" ".join(line.split()[:2]), reason)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is the number of its first line. ``not_run`` is the reason in the marker."""

    document: str
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    def commands(self) -> list[str]:
        """Return the lines after ``$``. Each is joined with its continuation lines."""
        joined = self.text.replace("\\\n", " ")
        return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


def blocks_of(document: str) -> list[Block]:
    """Return the fenced blocks of a document, in order."""
    return blocks_in(document, (ROOT / document).read_text())


def blocks_in(document: str, text: str) -> list[Block]:
    """Return the fenced blocks of a text, in order."""
    found: list[Block] = []
    opened: tuple[int, str, str | None] | None = None
    body: list[str] = []
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            body.append(line)
        elif opened is None:
            marker = _MARKER.match(before)
            opened, body = (number + 1, fence[1].strip(), marker and marker[1]), []
        else:
            first, language, reason = opened
            found.append(Block(document, first, language, "\n".join(body) + "\n", reason))
            opened = None
        before = line if line.strip() else before
    assert opened is None, f"{document}: the block at line {opened and opened[0]} has no end"
    return found


def commands_in_text(document: str) -> list[str]:
    """Return the commands between single backticks, outside of blocks."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in _SPAN.findall(text)]
