"""Ghost keys: opaque 64-bit names of prefixes at a coarse grain, for policies that remember what was evicted.

A segment is ``segment_tokens`` of a prompt. Its key is the xxh3 of the namespace and of everything up to its end. So
equal prefixes of a namespace have equal keys, and different prefixes have different keys. Only blocks that became
resident get keys, and only when a segment ends within them. Each byte of a prefix is hashed once, at memory speed: a
sequence keeps the ``SegmentKeys`` of its prefix from one commit to the next.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64, xxh3_64_intdigest

if TYPE_CHECKING:
    from radixkv.config import Namespace


@lru_cache(maxsize=1_024)
def _seed(namespace: Namespace) -> int:
    return xxh3_64_intdigest(namespace.framed())


class SegmentKeys:
    """Computes the keys of the segments of one prefix of a namespace, in the order of their ends."""

    __slots__ = ("_at", "_segment_bytes", "_state")

    def __init__(self, namespace: Namespace, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._state: Any = xxh3_64(seed=_seed(namespace))
        self._at = 0  # number of bytes hashed so far

    def between(self, start: int, stop: int, base: bytes, base_size: int, tail: bytearray) -> tuple[int, ...]:
        """Return keys of the segments that end within bytes ``(start, stop]`` of ``base[:base_size] + tail``, in order.

        ``start`` must not be before the last ``stop``. O(bytes since the last call).
        """
        size, at, keys = self._segment_bytes, self._at, []
        update, digest = self._state.update, self._state.intdigest
        end, last = start - start % size + size, min(stop, base_size)
        if end <= last:
            update(memoryview(base)[at:end])
            keys.append(digest())
            at, end = end, end + size
        if end <= last:  # most of a long prompt, through one buffer: cheaper than a slice for each segment
            read, segment = BytesIO(base), bytearray(size)
            read.seek(at)
            fill = read.readinto
            while end <= last:
                fill(segment)
                update(segment)
                keys.append(digest())
                at, end = end, end + size
        while end <= stop:
            if at < base_size:
                update(base[at:base_size])
            update(tail[max(at - base_size, 0) : end - base_size])
            keys.append(digest())
            at, end = end, end + size
        self._at = at
        return tuple(keys)
