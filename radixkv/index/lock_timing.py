"""Measurement of lock holds, for benchmarks."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any, cast

from radixkv import _compiled
from radixkv.index.locking import SourceLock
from radixkv.index.state import CacheState


def time_holds(cache: CacheState) -> array[int]:
    """From now on, append the duration of each hold of the cache's lock to the result, in ns. For one thread only."""
    holds = _Holds()
    if _compiled.is_compiled:
        lock: Any = cache._lock
        lock._acquire = holds.noting(lock._acquire, holds.begin)
        lock._release = holds.noting(holds.end, lock._release)
    else:
        cache._lock = cast(Any, _TimedLock(holds))
    return holds.spans


class _Holds:
    def __init__(self) -> None:
        self.spans, self._since = array("q"), 0

    def begin(self) -> None:
        self._since = time.perf_counter_ns()

    def end(self) -> None:
        self.spans.append(time.perf_counter_ns() - self._since)

    def noting(self, first: Callable[..., Any], second: Callable[[], Any]) -> Callable[..., Any]:
        def both(*arguments: Any) -> Any:
            result = first(*arguments)
            second()
            return result

        return both


class _TimedLock(SourceLock):
    """The lock of the pure build."""

    __slots__ = ("_holds",)

    def __init__(self, holds: _Holds) -> None:
        super().__init__()
        self._holds = holds

    def __enter__(self) -> None:
        super().__enter__()
        self._holds.begin()

    def __exit__(self, *_: object) -> None:
        self._holds.end()
        self.release()
