"""Values drawn from bytes, so that a corpus file is a test case with and without a fuzzer."""

from __future__ import annotations

import json
import struct
from typing import Any


class Material:
    """Reads ``data`` from its front. At its end, all values are zero or empty."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    @property
    def left(self) -> int:
        """The number of bytes that are left."""
        return len(self.data) - self.at

    def take(self, size: int) -> bytes:
        """Return up to ``size`` bytes."""
        found = self.data[self.at : self.at + size]
        self.at += len(found)
        return found

    def byte(self) -> int:
        """Return 0 to 255."""
        return (self.take(1) or b"\0")[0]

    def number(self) -> int:
        """Return a signed 64-bit integer, often a small one."""
        kind = self.byte()
        if kind < 160:
            return kind % 20
        return int(struct.unpack("<q", self.take(8).ljust(8, b"\0"))[0])

    def chunk(self) -> bytes:
        """Return bytes whose length is the first byte."""
        return self.take(self.byte())

    def rest(self) -> bytes:
        """Return the bytes that are left."""
        return self.take(self.left)

    def value(self, depth: int = 2) -> Any:
        """Return a possible answer: None, numbers, text, bytes, lists, objects."""
        kind = self.byte() % (9 if depth else 7)
        if kind == 0:
            return None
        if kind == 1:
            return bool(self.byte() % 2)
        if kind == 2:
            return self.number()
        if kind == 3:
            return struct.unpack("<d", self.take(8).ljust(8, b"\0"))[0]
        if kind == 4:
            return self.chunk().decode("utf-8", "replace")
        if kind == 5:
            return self.chunk()
        if kind == 6:
            return self.number() % 5
        items = [self.value(depth - 1) for _ in range(self.byte() % 4)]
        return items if kind == 7 else {str(at): item for at, item in enumerate(items)}

    def document(self) -> Any:
        """Return the rest parsed as JSON. If it isn't JSON, return a drawn value."""
        try:
            return json.loads(self.data[self.at :])
        except (ValueError, RecursionError):
            return self.value(4)
