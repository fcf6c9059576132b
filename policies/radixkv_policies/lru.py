"""Least recently used: the leaf whose last use ended longest ago goes first.

The order is that of ``unleased``: a node that a request leases leaves the order and enters it again, at the
young end, when its last lease is released. Since a path is released child before parent, a node stands
before its parent and the oldest is a leaf. Differs from textbook LRU in counting the *end* of a use, so a
long generation doesn't age while it runs.

State a node: one entry of an ordered dict. Cost: O(1) each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from radixkv_policies.policy import Clock, Handle, Policy


class LRU(Policy):
    """Least recently used."""

    def __init__(self, capacity: int, clock: Clock, seed: int) -> None:
        super().__init__(capacity, clock, seed)
        self._order: OrderedDict[Handle, None] = OrderedDict()

    def inserted(self, node: Handle, num_blocks: int, depth: int) -> None:
        """It enters the order when its first use ends."""

    def touched(self, nodes: Sequence[Handle]) -> None:
        """Recency is set when the use ends."""

    def extended(self, node: Handle, num_blocks: int) -> None:
        """Size doesn't matter here."""

    def split(self, upper: Handle, lower: Handle) -> None:
        if lower in self._order:
            self._order[upper] = None

    def leased(self, node: Handle) -> None:
        del self._order[node]

    def unleased(self, node: Handle) -> None:
        self._order[node] = None

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        """Size doesn't matter here."""

    def removed(self, node: Handle) -> None:
        del self._order[node]

    def victim(self) -> Handle | None:
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)
