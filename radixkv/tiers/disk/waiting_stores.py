"""Saved ranges of prompts that wait for a disk, oldest first: bounded in number, and in bytes of their keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from radixkv.config import Namespace

MAX_WAITING_STORES: Final = 4_096
"""Saved ranges that may wait for the disk. The oldest are dropped."""
MAX_WAITING_BYTES: Final = 64 << 20
"""Bytes of their keys: 4 for each token of a range's prompt, up to its end."""


class Saved(NamedTuple):
    """Blocks ``[first, stop)`` of a prompt that are in slots, and not yet on the disk."""

    namespace: Namespace
    generation: int
    key: bytes
    first: int
    stop: int

    @property
    def num_blocks(self) -> int:
        """How many blocks wait."""
        return self.stop - self.first


class WaitingStores:
    """A queue of ranges. Each call is O(1), but for what ``add`` drops and ``clear``."""

    def __init__(self) -> None:
        self._ranges: deque[Saved] = deque()
        self.num_bytes = 0
        """Of the keys of all that waits."""

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[Saved]:
        return iter(self._ranges)

    def add(self, saved: Saved) -> int:
        """Let a range wait behind all others. Returns how many blocks of the oldest ones make way for it."""
        num_dropped = 0
        while self._ranges and (
            len(self._ranges) >= MAX_WAITING_STORES or self.num_bytes + len(saved.key) > MAX_WAITING_BYTES
        ):
            num_dropped += self.take().num_blocks
        self.give_back(saved, is_next=False)
        return num_dropped

    def take(self) -> Saved:
        """Take the oldest one. There must be one."""
        saved = self._ranges.popleft()
        self.num_bytes -= len(saved.key)
        return saved

    def give_back(self, saved: Saved, *, is_next: bool) -> None:
        """Let one that was taken wait again, before or behind all others."""
        (self._ranges.appendleft if is_next else self._ranges.append)(saved)
        self.num_bytes += len(saved.key)

    def clear(self) -> int:
        """Drop all. Returns how many blocks that are."""
        num_dropped = sum(each.num_blocks for each in self._ranges)
        self._ranges.clear()
        self.num_bytes = 0
        return num_dropped
