"""Least recently used: the leaf whose last use ended longest ago goes first.

The order is that of ``unleased``: a node that a request leases leaves the order and enters it again, at the
young end, when its last lease is released. Since a path is released child before parent, a node stands
before its parent and the oldest is a leaf. Differs from textbook LRU in counting the *end* of a use, so a
long generation doesn't age while it runs.

State a node: one entry of an ordered dict. Cost: O(1) each; the dict's own methods serve as hooks, so that a
request enters no Python function of the policy (0.06 µs a node instead of 0.13).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.policy import Handle, Policy


@mypyc_attr(allow_interpreted_subclasses=True)
class LRU(Policy):
    """Least recently used."""

    def begin(self) -> None:
        super().begin()
        self._order: OrderedDict[Handle, None] = OrderedDict()

    def order(self) -> tuple[Callable[..., object], Callable[..., object], Callable[..., object]]:
        return self._order.pop, self._order.setdefault, self._order.pop

    def split(self, upper: Handle, lower: Handle, num_blocks: int) -> None:
        if lower in self._order:
            self._order[upper] = None

    def leased(self, node: Handle) -> object:
        """Out of the order."""
        return self._order.pop(node)

    def unleased(self, node: Handle) -> object:
        """To the young end."""
        return self._order.setdefault(node)

    def removed(self, node: Handle) -> object:
        """Out of the order."""
        return self._order.pop(node)

    def victim(self) -> Handle | None:
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)
