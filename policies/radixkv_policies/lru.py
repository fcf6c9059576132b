"""Least recently used: evicts the leaf whose last use ended longest ago.

The order is that of ``unleased``. A node that a request leases leaves the order. It enters again, as the youngest,
when its last lease is released. A path is released child before parent, so a node comes before its parent and the
oldest is a leaf. Textbook LRU counts the start of a use. Here the *end* counts, so a long generation doesn't age
while it runs.

State a node: one entry of an ordered dict. Cost: O(1) each. The dict's own methods serve as hooks, so a request calls
no Python function of the policy (0.06 µs a node instead of 0.13).
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
        """Remove the node from the order."""
        return self._order.pop(node)

    def unleased(self, node: Handle) -> object:
        """Add the node as the youngest."""
        return self._order.setdefault(node)

    def removed(self, node: Handle) -> object:
        """Remove the node from the order."""
        return self._order.pop(node)

    def victim(self) -> Handle | None:
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)
