"""Helpers of the index's tests."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import radixkv
from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.audit import invariants
from radixkv.clock import ManualClock
from radixkv_policies.lru import LRU

NS = Namespace("a", "m")
_LIBRARY = f"{Path(radixkv.__file__).parent}/"


def make_cache(num_blocks: int = 16, block_size: int = 4, **settings: Any) -> PrefixCache:
    """A cache without storage, for an engine that scrubs its own blocks. Its time stands still."""
    config = CacheConfig(num_blocks, block_size, **settings)
    return PrefixCache(config, scrub_blocks=scrubbed, clock=ManualClock())


def scrubbed(block_ids: NDArray[np.int32]) -> None:
    """Scrub nothing: these blocks hold no bytes."""
    assert len(block_ids)


def compute(cache: PrefixCache, ids: Sequence[int], namespace: Namespace = NS) -> int:
    """Open, commit and release one request. Return its number of cached tokens."""
    with cache.open(namespace, ids) as sequence:
        sequence.commit(len(ids))
        return sequence.num_cached_tokens


def collect_leftovers() -> None:
    """Collect what other tests left, without its warnings: they would count, or be errors, in a test of warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def same(before: Any, cache: PrefixCache) -> bool:
    """Whether a cache still equals the snapshot ``before``."""
    return not invariants.differences(before, cache.snapshot())


def num_events(call: Callable[[], object], event: str) -> int:
    """The number of lines ("line") or bytecodes ("opcode") that a call runs in interpreted modules of radixkv.

    The collector is off meanwhile: finalisers of other caches would count too.
    """
    found = 0

    def trace(frame: FrameType, each: str, _: object) -> Any:
        nonlocal found
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return None
        frame.f_trace_opcodes = event == "opcode"
        found += each == event
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return found


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
