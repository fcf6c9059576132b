"""URLs that may hold a password, for display."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"((?:pas|pw)\w{0,8}=)[^&#]*", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PLACE = r"(?:\[[0-9a-f:.]+(?:%\w+)?\]|[\w.~%-]*)(?::[0-9]{0,5})?"
_PLACES = rf"{_PLACE}(?:,{_PLACE})*"
_DATABASE = re.compile(rf"{_PLACES}(?:/[0-9/]*)?(?:\?(?:[a-z_]+=[^&#]*(?:&|$))*)?", re.IGNORECASE)
_ANY_PATH = re.compile(rf"{_PLACES}(?:/.*)?", re.IGNORECASE)
_HAS_ANY_PATH = ("http:", "https:", "unix:", "redis+sentinel:", "rediss+sentinel:")


def without_password(url: str) -> str:
    """Return the URL for display: without what is before its last @, and without the value of ``…password=``.

    What doesn't begin with a scheme and ``://`` may be a password up to the @. The rest is shown only if it is hosts
    with ports, a path and options. If not, there may be a password without an @.
    """
    text = _PASSWORD.sub(r"\1…", url)
    scheme = "" if (found := _SCHEME.match(text)) is None else found[0]
    _, at, place = text[len(scheme) :].rpartition("@")
    form = _ANY_PATH if scheme.lower().startswith(_HAS_ANY_PATH) else _DATABASE
    return f"{scheme}{'…@' if at else ''}{place if form.fullmatch(place) else '…'}"
