"""Ghost keys: opaque 64-bit names of prefixes at a coarse grain, for policies that remember what was evicted.

A segment is ``segment_tokens`` of a prompt; its key is the xxh3 of the namespace and of everything up to its end, so
equal prefixes of a namespace have equal keys, and other prefixes others. Only blocks that became resident are named,
and only when a segment ends within them: a commit costs one pass over its prefix at memory speed, nothing a block.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from xxhash import xxh3_64, xxh3_64_intdigest

if TYPE_CHECKING:
    from radixkv.namespaces import Namespace


@lru_cache(maxsize=1_024)
def _seed(namespace: Namespace) -> int:
    return xxh3_64_intdigest(namespace.framed())


def segment_keys(namespace: Namespace, key: bytes, start: int, stop: int, segment_bytes: int) -> list[int]:
    """Keys of the segments that end within ``key[start:stop]``, shallowest first. O(stop) bytes."""
    state, at, keys = xxh3_64(seed=_seed(namespace)), 0, []
    view = memoryview(key)
    for end in range(start - start % segment_bytes + segment_bytes, stop + 1, segment_bytes):
        state.update(view[at:end])
        keys.append(state.intdigest())
        at = end
    return keys
