"""One line of a usage log: a JSON object with its number ``n`` first and its MAC last.

    {"n": 7, …, "mac": HMAC-SHA256(key, ("usage line", MAC of line 6, the object without "mac"))}

So a line proves itself and the line before it. Who lacks the key can't change, insert, move or remove one unnoticed;
cutting off the end is noticed by ``head``, see ``usage_folder``.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from radixkv.signing import mac

MAC_BYTES: Final = 32
MAX_LINE_BYTES: Final = 16_384
LINE: Final = "usage line"
_MAC = re.compile(rb',"mac":"([0-9a-f]{64})"\}\n\Z')


class Link(NamedTuple):
    """The end of a chain: the number of its last line, and its MAC."""

    n: int
    mac: bytes


START: Final = Link(0, bytes(MAC_BYTES))


class Line(NamedTuple):
    """A line as it was read: its number, all its fields, its MAC, and the bytes that the MAC covers."""

    n: int
    fields: Mapping[str, Any]
    mac: bytes
    body: bytes

    def follows(self, before: bytes, key: bytes, label: str = LINE) -> bool:
        """Whether its MAC is that of this line behind a line with the MAC ``before``; in constant time."""
        return hmac.compare_digest(mac(key, label, before, self.body), self.mac)


def sealed(key: bytes, before: Link, fields: Mapping[str, Any], label: str = LINE) -> tuple[bytes, Link]:
    """Return the next line of a chain, and the chain's new end. O(line), about 10 µs."""
    body = json.dumps({"n": before.n + 1, **fields}, separators=(",", ":")).encode("ascii")
    made = mac(key, label, before.mac, body)
    return b'%b,"mac":"%b"}\n' % (body[:-1], made.hex().encode()), Link(before.n + 1, made)


def parsed(line: bytes) -> Line:
    """Return a whole line. Raises ValueError for any other bytes."""
    found = _MAC.search(line) if len(line) <= MAX_LINE_BYTES else None
    if found is None:
        raise ValueError("no line of a usage log")
    body = line[: found.start()] + b"}"
    try:
        fields = json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    n = fields.get("n") if isinstance(fields, dict) else None
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError("no number")
    return Line(n, fields, bytes.fromhex(found[1].decode()), body)
