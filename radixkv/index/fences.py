"""Fence: a point that work on a device must pass before the blocks of released sequences are used again."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from radixkv.errors import ReentrantCall
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.index.holders import SequenceState
    from radixkv.index.state import CacheState


class Fence:
    """A point that transfers or kernels must pass. Sequences released after it keep their blocks until then.

        fence = Fence()
        sequence.release(after=fence)       # a transfer still reads its blocks
        ...
        fence.lift()                        # the transfer is done

    Make one for each step or transfer; any number of sequences, also of several caches, may wait for it. All methods
    may be called from any thread. If a fence that somebody waits for is garbage-collected, it gives a ResourceWarning
    and is lifted, because nothing else could lift it.
    """

    __slots__ = ("_is_lifted", "_waiting")

    def __init__(self) -> None:
        self._is_lifted = False
        self._waiting: list[tuple[CacheState, SequenceState]] = []

    def __del__(self) -> None:
        waiting = getattr(self, "_waiting", [])  # __init__ may have been interrupted
        if any(not cache.is_dead for cache, _ in waiting) and not self._is_lifted:
            self._give_up()
            warnings.warn(
                f"a fence was never lifted: {len(waiting)} sequences waited for it",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<Fence, {'lifted' if self._is_lifted else f'{len(self._waiting)} sequences wait'}>"

    @property
    def is_lifted(self) -> bool:
        """Whether it was lifted."""
        return self._is_lifted

    def lift(self) -> None:
        """Release what waits for this fence. What is released after it from now on is released at once. Idempotent.

        In a callback of a cache or a finaliser, that cache's next call does the release. O(blocks of the sequences).
        """
        self._is_lifted = True
        caches = self._give_up()
        self._waiting.clear()
        for cache in caches:
            try:
                cache.require_alive()  # any call releases what was given up
            except ReentrantCall:
                continue

    def _give_up(self) -> list[CacheState]:
        """Let the next call of each cache release what waits. Returns these caches.

        There is no lock: a sequence that is given up twice is released once.
        """
        waiting = list(self._waiting)
        for cache, state in waiting:
            cache._lock.forgotten.append((cache, state))
        return list({id(cache): cache for cache, _ in waiting}.values())

    def hold(self, cache: CacheState, state: SequenceState) -> None:
        """Let a sequence wait. If the fence is lifted, the cache's next call releases it. For the cache."""
        self._waiting.append((cache, state))
        if self._is_lifted:
            cache._lock.forgotten.append((cache, state))


refuse_copies(Fence, "sequences wait for this one. Pass it on, or make another")
