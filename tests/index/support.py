"""Helpers of the index's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.audit import invariants
from radixkv_policies.lru import LRU

NS = Namespace("a", "m")


def make_cache(num_blocks: int = 16, block_size: int = 4, **settings: Any) -> PrefixCache:
    """A cache without storage, for an engine that scrubs its own blocks."""
    return PrefixCache(CacheConfig(num_blocks, block_size, **settings), scrub_blocks=scrubbed)


def scrubbed(block_ids: NDArray[np.int32]) -> None:
    """Scrub nothing: these blocks hold no bytes."""
    assert len(block_ids)


def compute(cache: PrefixCache, ids: Sequence[int], namespace: Namespace = NS) -> int:
    """Open, commit and release one request. Return its number of cached tokens."""
    with cache.open(namespace, ids) as sequence:
        sequence.commit(len(ids))
        return sequence.num_cached_tokens


def same(before: Any, cache: PrefixCache) -> bool:
    """Whether a cache still equals the snapshot ``before``."""
    return not invariants.differences(before, cache.snapshot())


class Declining(LRU):
    """LRU that gives up every third leaf as soon as it is unused."""

    def begin(self) -> None:
        """Begin with none asked for."""
        super().begin()
        self._num_asked = 0

    def admit(self, node: Any) -> bool:
        """Whether to keep a leaf."""
        self._num_asked += 1
        return bool(self._num_asked % 3)
