"""Following the logs of others: what a reader knows of one registration, and what all of it may take.

A log is followed by number. Number ``seq + 1`` is applied, older ones are old, a later one is a gap: then the
snapshot is loaded, which stands at some number ``s``, and reading goes on behind ``s``. If there is no
snapshot that reaches over the gap, everything known is forgotten: a hint may be missing, but a lost
``remove`` must not live on. A new epoch is a new log, and the old one is dropped as it is.
"""

from __future__ import annotations

from typing import Literal

from radixkv.coordination.holdings import Holdings, split
from radixkv.coordination.wire import Entry

Outcome = Literal["applied", "old", "gap"]


class Budget:
    """How many segments of all others together the view may hold, and what became of it."""

    def __init__(self, max_digests: int) -> None:
        self.max_digests = max_digests
        self.num_digests = 0
        self.num_forgotten = 0
        self.num_gaps = 0

    @property
    def room(self) -> int:
        """Segments that still fit."""
        return max(0, self.max_digests - self.num_digests)


class RemoteLog:
    """What is known of what one registration holds, up to number ``seq`` of its log."""

    def __init__(self, epoch: int, nonce: str, budget: Budget) -> None:
        self.epoch, self.nonce = epoch, nonce
        self.seq = 0
        self.holdings = Holdings()
        self._budget = budget

    def offer(self, seq: int, entry: Entry) -> Outcome:
        """Take in the entry at ``seq`` if it is the next one."""
        if seq <= self.seq:
            return "old"
        if seq > self.seq + 1:
            return "gap"
        before = self.holdings.num_digests
        self._budget.num_forgotten += self.holdings.apply(entry, self._budget.room)
        self._budget.num_digests += self.holdings.num_digests - before
        self.seq = seq
        return "applied"

    def load(self, groups: list[tuple[bytes, bytes]], seq: int) -> None:
        """Put a snapshot in the place of everything known."""
        self.forget(seq)
        fresh = Holdings()
        room = self._budget.room
        for namespace, packed in groups:
            left_out = fresh.store(namespace, split(packed), room - fresh.num_digests)
            self._budget.num_forgotten += left_out
        self._budget.num_digests += fresh.num_digests
        self.holdings = fresh

    def forget(self, seq: int) -> None:
        """Know nothing, and go on behind ``seq``. O(1)."""
        self._budget.num_digests -= self.holdings.num_digests
        self.holdings, self.seq = Holdings(), seq
