"""What a policy is: an order over the nodes of one tenant, told of what happens to them.

A policy sees opaque handles, sizes, depths and a clock: never token ids, so it can't leak what it can't see.
It keeps the *evictable* nodes, those that no lease protects, and names the next victim among them.

The life of a node, as the cache tells it:

    inserted ─▶ in use ──unleased──▶ evictable ──leased──▶ in use …  evictable ──trimmed*, removed──▶ gone

What the cache promises, and a policy may build on:

- A use of a node is a use of all its ancestors: they are leased no later, and unleased in the same call or
  later, child before parent. ``touched`` names a request's whole matched path.
- So in any order by last use, or by counts of uses with that as the tie-break, a node comes before its
  parent, and the first evictable node is a leaf.
- Only the node that ``victim`` named is trimmed, and only while it is evictable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

Handle = Hashable
"""A node, as a policy sees it: it can be compared, hashed and kept, nothing else."""

Clock = Callable[[], float]


class Policy(ABC):
    """The order in which one tenant's nodes are evicted.

    capacity: blocks that the cache can hold; what a policy remembers is bounded by it.
    clock: seconds, never backwards. seed: of whatever it draws at random.
    """

    def __init__(self, capacity: int, clock: Clock, seed: int) -> None:
        self._capacity, self._clock, self._seed = capacity, clock, seed

    @abstractmethod
    def inserted(self, node: Handle, num_blocks: int, depth: int) -> None:
        """A new node, in use. ``depth``: blocks from the root to its end."""

    @abstractmethod
    def touched(self, nodes: Sequence[Handle]) -> None:
        """A request uses these nodes, a path from the root downward; each may be in use or evictable."""

    @abstractmethod
    def extended(self, node: Handle, num_blocks: int) -> None:
        """A leaf in use grew by ``num_blocks``."""

    @abstractmethod
    def split(self, upper: Handle, lower: Handle) -> None:
        """``upper`` is new and takes the first blocks of ``lower``, with its history; in use if ``lower`` is."""

    @abstractmethod
    def leased(self, node: Handle) -> None:
        """An evictable node came into use."""

    @abstractmethod
    def unleased(self, node: Handle) -> None:
        """A node in use became evictable."""

    @abstractmethod
    def trimmed(self, node: Handle, num_blocks: int) -> None:
        """The victim lost its last ``num_blocks`` to an eviction."""

    @abstractmethod
    def removed(self, node: Handle) -> None:
        """An evictable node is gone: nothing is left of it after an eviction, or it was cleared."""

    @abstractmethod
    def victim(self) -> Handle | None:
        """The evictable leaf to go next, or None if nothing is evictable. A question: it changes no order."""

    @abstractmethod
    def __len__(self) -> int:
        """How many nodes are evictable."""
