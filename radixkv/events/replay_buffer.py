"""The last batches of a publisher, for consumers that missed some."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Kept(NamedTuple, Generic[T]):
    number: int
    payload: T
    size: int
    is_base: bool


class ReplayBuffer(Generic[T]):
    """The newest batches: at most ``max_batches`` and ``max_bytes``, but always the last one. One thread at a time."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._kept: deque[_Kept[T]] = deque()
        self._num_bases = 0

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._kept)

    def add(self, number: int, payload: T, size: int, is_base: bool) -> None:
        """Keep a batch of ``size`` bytes. Its number is greater than all before. Amortised O(1)."""
        self._kept.append(_Kept(number, payload, size, is_base))
        self.num_bytes += size
        self._num_bases += is_base
        while len(self._kept) > self._max_batches or (
            self.num_bytes > self._max_bytes and len(self._kept) > 1
        ):
            gone = self._kept.popleft()
            self.num_bytes -= gone.size
            self._num_bases -= gone.is_base

    def since(self, number: int, most: int) -> list[tuple[int, T]]:
        """Return the first ``most`` batches from a number on, in order. O(batches)."""
        later = ((each.number, each.payload) for each in self._kept if each.number >= number)
        return list(islice(later, most))

    def covers(self, number: int) -> bool:
        """Whether a reader that knows everything before ``number`` can continue with ``since``: nothing is missing, or
        a base follows."""
        return bool(self._num_bases) or (bool(self._kept) and self._kept[0].number <= number)
