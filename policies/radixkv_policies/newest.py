"""Newest first: ``MRU`` evicts the leaf whose last use ended most recently, ``FILO`` the one inserted last.

SGLang has both (``--radix-eviction-policy mru``, ``filo``). They suit a loop that is longer than the cache: its oldest
blocks stay, and are hit in each round.

State a node: a stamp and an entry of a heap. Cost: O(log n).
"""

from __future__ import annotations

from radixkv_policies.fifo import Inserted
from radixkv_policies.leaves import LeafHeap, LeafPolicy
from radixkv_policies.policy import Handle


class FILO(LeafPolicy[Inserted]):
    """First in, last out."""

    def begin(self) -> None:
        super().begin()
        self._leaves = LeafHeap()

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Inserted:
        return Inserted(self.next_stamp())

    def entered(self, node: Handle, piece: Inserted, depth: int) -> None:
        self._leaves.add(node, -piece.stamp)

    def left(self, node: Handle, piece: Inserted) -> None:
        self._leaves.discard(node)

    def victim(self) -> Handle | None:
        return self._leaves.first()


class MRU(FILO):
    """Most recently used."""

    def ended(self, piece: Inserted) -> None:
        piece.stamp = self.next_stamp()
