"""Takes out of a recording what changes from run to run, and the words of other projects.

1. Paths, addresses, keys, dates and random ids become fixed placeholders. The same id gets the same placeholder
   everywhere in a recording, so what a client repeats stays a repetition, and what it changes stays a change.
2. Prompts and descriptions of tools belong to the projects that wrote them. In a text of more than LONG characters
   each word is replaced by a word of radixkv's own documents, always by the same. So lengths, punctuation, lines and
   tags stay, and two texts begin alike exactly as far as they did. Names, schemas and everything short stay as sent.
3. Headers of the connection, and those of the SDKs that only describe the machine, are left out.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.agents import recordings
from tests.agents.clients import KEY

ROOT = Path(__file__).parents[2]
LONG = 60
HEADER = "header"
UNORDERED = ("client_metadata",)
"""Fields whose names come in another order each time."""
VERBATIM = frozenset(
    {
        "arguments",
        "call_id",
        "data",
        "definition",
        "encrypted_content",
        "id",
        "name",
        "pattern",
        "signature",
        "type",
        "url",
    }
    | {HEADER}
)
"""Names of fields whose text has a form of its own."""
NOT_KEPT = re.compile(
    r"(accept-encoding|accept-language|baggage|connection|content-length|host|sec-.*|traceparent|tracestate|x-stainless-.*)\Z"
)

_UUID = r"(?<![0-9A-Za-z])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9A-Za-z])"
_HEX = r"(?<![0-9A-Za-z])[0-9a-f]{24,}(?![0-9A-Za-z])"
_PREFIXED = r"\b(?:ses|msg|prt|usr|thread|conv|lc_run-)_?[0-9A-Za-z]{16,}\b"
_IDS = re.compile(f"{_UUID}|{_HEX}|{_PREFIXED}")
_DAYS, _MONTHS = "Mon|Tue|Wed|Thu|Fri|Sat|Sun", "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_TIMES = (
    (
        re.compile(r"\b20[23][0-9]-[01][0-9]-[0-3][0-9]T[0-9:.]{5,}(?:Z|[+-][0-9:]{4,6})?"),
        "2026-01-01T00:00:00Z",
    ),
    (re.compile(r"\b20[23][0-9]-[01][0-9]-[0-3][0-9]\b"), "2026-01-01"),
    (re.compile(rf"\b(?:{_DAYS}) (?:{_MONTHS}) [0-9]{{1,2}} 20[23][0-9]\b"), "Thu Jan 1 2026"),
    (
        re.compile(
            r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day, (?:January|February|March|April|May|June|July|August"
            r"|September|October|November|December) [0-9]{1,2}, 20[23][0-9]\b"
        ),
        "Thursday, January 1, 2026",
    ),
    (re.compile(r"\b[0-9]{1,2}/[0-9]{1,2}/20[23][0-9]\b"), "1/1/2026"),
    (re.compile(r"\bChunk ID: [0-9a-f]{6}\b"), "Chunk ID: 000000"),
    (re.compile(r"\bProcess Group PGID: [0-9]+"), "Process Group PGID: 1"),
    (re.compile(r"\bWall time: [0-9.]+ seconds\b"), "Wall time: 0.0 seconds"),
)
_TIMES_IN_MS = range(1_767_225_600_000, 2_208_988_800_000)
"""Milliseconds since 1970, from 2026 to 2040."""
_WORD = re.compile(r"(?<![<$/_\w.-])[A-Za-z]{3,}(?![\w-])")


@dataclass(frozen=True)
class Places:
    """Paths, the address and the name of the model of a run, which another run may have otherwise."""

    home: str
    work: str
    folder: str
    url: str
    model: str

    def replaced(self, text: str) -> str:
        """Return a text with placeholders for them."""
        port = self.url.rpartition(":")[2]
        for found, placeholder in (
            (self.work, "/home/user/project"),
            (re.sub(r"[^A-Za-z0-9]", "-", self.work), "-home-user-project"),
            (self.home, "/home/user"),
            (self.folder, "/opt/clients"),
            (self.url, "http://127.0.0.1:8400"),
            (f"127.0.0.1:{port}", "127.0.0.1:8400"),
            (KEY, recordings.KEY),
            (self.model, recordings.MODEL),
            (platform.release(), "6.1.0"),
            (socket.gethostname(), "machine"),
        ):
            text = text.replace(found, placeholder)
        return text


class Minimiser:
    """Replaces texts of one recording. Ids are numbered in the order in which they come."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._ids: dict[str, str] = {}

    def value(self, value: Any, name: str = "") -> Any:
        """Return a JSON value with its texts replaced; ``name``: of the field that has it."""
        if isinstance(value, Mapping):
            names = sorted(value) if name in UNORDERED else value
            return {key: self.value(value[key], key) for key in names}
        if isinstance(value, list | tuple):
            return [self.value(each, name) for each in value]
        if isinstance(value, int) and value in _TIMES_IN_MS:
            return _TIMES_IN_MS[0]
        return self.text(value, name) if isinstance(value, str) else value

    def text(self, text: str, name: str = "") -> str:
        """Return a text without what changes from run to run, and without others' words if it is long."""
        if text.startswith("{") and (document := _object(text)) is not None:
            separators = None if '": ' in text else (",", ":")
            return json.dumps(self.value(document, name), separators=separators, ensure_ascii=False)
        text = self._places.replaced(text)
        for pattern, date in _TIMES if name != HEADER else ():
            text = pattern.sub(date, text)
        text = _IDS.sub(self._numbered, text)
        is_prose = len(text) > LONG and name not in VERBATIM and not text.startswith("x-anthropic-")
        return _WORD.sub(_other_word, text) if is_prose else text

    def _numbered(self, found: re.Match[str]) -> str:
        """Return the placeholder of an id, of the same form: its letters and digits count the ids."""
        identity = found[0]
        if identity not in self._ids:
            digits = str(len(self._ids) + 1).rjust(4, "0")
            head = re.match(r"[a-z]+_(?:run-)?", identity)
            kept = head[0] if head else ""
            blank = re.sub(r"[0-9A-Za-z]", "0", identity[len(kept) :])
            self._ids[identity] = kept + blank[: -len(digits)] + digits
        return self._ids[identity]


def minimised(requests: list[dict[str, Any]], places: Places) -> list[dict[str, Any]]:
    """Return the requests of a run as they are kept."""
    minimiser = Minimiser(places)
    return [
        {
            "method": each["method"],
            "path": minimiser.text(each["path"]),
            "headers": {
                name: minimiser.text(value, HEADER)
                for name, value in sorted(each["headers"].items())
                if not NOT_KEPT.match(name)
            },
            "body": minimiser.value(each["body"]),
            "answer": minimiser.value(each["answer"]),
            "status": each["status"],
        }
        for each in requests
    ]


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@cache
def _words() -> tuple[str, ...]:
    """Return the words of radixkv's own documents."""
    documents = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/scheduling.md")
    text = " ".join((ROOT / each).read_text("utf-8") for each in documents)
    return tuple(sorted({word.lower() for word in re.findall(r"\b[A-Za-z]{3,12}\b", text)}))


@cache
def _other(word: str) -> str:
    words = _words()
    return words[int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % len(words)]


def _other_word(found: re.Match[str]) -> str:
    """Return the word that stands for a word, with capitals where that has them."""
    word = found[0]
    other = _other(word.lower())
    if word.isupper():
        return other.upper()
    return other.capitalize() if word[0].isupper() else other
