"""What differs between two versions of a text: which lines, which bytes, and whether it is of a kind that changes.

A line is *volatile* if its two versions are equal but for dates, times, ids, checksums and long numbers, or if it has
changed from each request to the next. Patterns are matched line by line, on lines of at most MAX_LINE_CHARS; each has
no nested repetition, so a line costs linear time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final, Literal

VolatileKind = Literal["date", "time", "id", "checksum", "number", "text"]

MAX_LINE_CHARS: Final = 4096
"""A longer line is never called volatile."""
MAX_ALIGNED: Final = 128
"""Items that are aligned exactly; comparing more would cost their number squared."""

_MONTH: Final = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|"
    "Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY: Final = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_PATTERN: Final = re.compile(
    r"(?P<date>\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?!\d)|\b\d{1,2}[-/.]\d{1,2}[-/.]\d{4}\b"
    rf"|\b{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?\b|\b\d{{1,2}}\.? {_MONTH}(?:,? \d{{4}})?\b|\b{_DAY}\b)"
    r"|(?P<time>(?:(?<=T)|(?<!\d))\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
    r"(?:Z\b|[+-]\d{2}:?\d{2}\b)?)"
    r"|(?P<id>\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\b[A-Za-z]{2,12}[_-](?=[A-Za-z0-9]*\d)[A-Za-z0-9]{8,64}\b)"
    r"|(?P<checksum>\b(?:0x)?(?=[0-9a-fA-F]*[a-fA-F])(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{6,128}\b)"
    r"|(?P<number>\b\d{6,32}\b)"
)
"""What changes by its nature."""
_KINDS: Final[Mapping[str, VolatileKind]] = {
    "date": "date",
    "time": "time",
    "id": "id",
    "checksum": "checksum",
    "number": "number",
}
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_THOUGHTS: Final = ("think", "thinking", "thought", "reasoning")
"""Tags between which models write their reasoning."""


@dataclass(frozen=True, slots=True)
class Span:
    """The part in which two texts differ, in bytes of UTF-8: ``(start, end)`` in the earlier and in the new one."""

    earlier: tuple[int, int]
    new: tuple[int, int]


def span_of(earlier: str, new: str) -> Span:
    """Return the bytes in which two texts differ. O(characters)."""
    start, earlier_end, end = chars_of(earlier, new)
    first = len(new[:start].encode())
    return Span(
        (first, first + len(earlier[start:earlier_end].encode())),
        (first, first + len(new[start:end].encode())),
    )


def chars_of(earlier: str, new: str) -> tuple[int, int, int]:
    """Return ``(start, earlier_end, end)``: the characters in which two texts differ."""
    most = min(len(earlier), len(new))
    start = _num_common(earlier, new, most)
    after = _num_common(earlier[::-1], new[::-1], most - start)
    return start, len(earlier) - after, len(new) - after


def _num_common(left: str, right: str, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def without_thoughts(text: str) -> str:
    """Return an answer without its reasoning: between two tags, or up to the first closing one. O(characters)."""
    for tag in _THOUGHTS:
        opening, closing = f"<{tag}>", f"</{tag}>"
        first = text.find(closing)
        if first < 0:
            continue
        parts = list[str]()
        at = 0 if 0 <= text.find(opening) < first else first + len(closing)  # a template may have opened it
        while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
            parts.append(text[at:start])
            at = end + len(closing)
        text = "".join([*parts, text[at:]])
    return text.strip()


def volatile_kind(earlier: str, new: str) -> VolatileKind | None:
    """Return the kind of what differs between two lines, if that changes by its nature; None otherwise."""
    if max(len(earlier), len(new)) > MAX_LINE_CHARS:
        return None
    ours, theirs = list(_PATTERN.finditer(new)), list(_PATTERN.finditer(earlier))
    if len(ours) != len(theirs) or _PATTERN.sub("\0", new) != _PATTERN.sub("\0", earlier):
        return None
    for one, other in zip(ours, theirs, strict=True):
        if one[0] != other[0]:
            return _KINDS.get(one.lastgroup or "", "id") if one.lastgroup == other.lastgroup else "id"
    return None


def kind_of_changing(earlier: str, new: str) -> VolatileKind:
    """Return the kind of a line that has changed in each request."""
    found = volatile_kind(earlier, new)
    if found is not None:
        return found
    is_number = _NUMBER.sub("\0", earlier) == _NUMBER.sub("\0", new)
    return "number" if is_number else "text"


def aligned(earlier: Sequence[str], new: Sequence[str]) -> list[tuple[str, int, int, int, int]]:
    """Return operations as ``difflib`` does that make the new list of the earlier one.

    They are exact if at most MAX_ALIGNED items are left without what is equal at both ends. If more are left, what was
    cut off at the beginning is found, and anything else is one replacement.
    """
    most = min(len(earlier), len(new))
    first = next((at for at in range(most) if earlier[at] != new[at]), most)
    last = next((at for at in range(most - first) if earlier[-1 - at] != new[-1 - at]), most - first)
    ours, theirs = new[first : len(new) - last], earlier[first : len(earlier) - last]
    found = [("equal", 0, first, 0, first)] if first else []
    if max(len(ours), len(theirs)) > MAX_ALIGNED:
        found += _shifted(theirs, ours, first)
    elif ours or theirs:
        codes = SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes()
        found += [(kind, a + first, b + first, c + first, d + first) for kind, a, b, c, d in codes]
    if last:
        found.append(("equal", len(earlier) - last, len(earlier), len(new) - last, len(new)))
    return found


def _shifted(earlier: Sequence[str], new: Sequence[str], first: int) -> list[tuple[str, int, int, int, int]]:
    """Align two long lists by the longest end of the earlier one with which the new one begins. O(n)."""
    num = _num_overlapping(earlier, new)
    cut = len(earlier) - num
    kind = "delete" if num or not new else "replace" if earlier else "insert"
    if kind != "delete":
        return [(kind, first, first + len(earlier), first, first + len(new))]
    found = [("delete", first, first + cut, first, first)]
    if num:
        found.append(("equal", first + cut, first + len(earlier), first, first + num))
    if len(new) > num:
        found.append(("insert", first + len(earlier), first + len(earlier), first + num, first + len(new)))
    return found


def _num_overlapping(earlier: Sequence[str], new: Sequence[str]) -> int:
    """Return the length of the longest end of one list that is the beginning of the other (Knuth, Morris, Pratt)."""
    borders = [0]
    length = 0
    for item in new[1:]:
        while length and new[length] != item:
            length = borders[length - 1]
        length += new[length] == item
        borders.append(length)
    length = 0
    for item in earlier if new else ():
        if length == len(new):
            length = borders[length - 1]
        while length and new[length] != item:
            length = borders[length - 1]
        length += new[length] == item
    return length
