"""Least recently used: evicts the leaf whose last use ended longest ago.

The order is that of ``unleased``. A node that a request leases leaves the order. It enters again, as the youngest,
when its last lease is released. A path is released child before parent, so a node comes before its parent and the
oldest is a leaf. Textbook LRU counts the start of a use. Here the *end* counts, so a long generation doesn't age
while it runs.

State a node: one entry of an ordered dict. Cost: O(1) each. The dict's own methods serve as hooks, so a request calls
no Python function of the policy (0.06 µs a node instead of 0.13).

Once the tenant's waiting requests are announced, the nodes that they need leave the order (``_kept``), and the
``queue`` says which of them are evicted before all others, and which after. ``_needed`` counts for each node the
requests that need all of it. The first node in the order is still a leaf, because who needs a node needs its parent.
Then the hooks are methods, and an announcement costs O(nodes on the path).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.policy import Handle, Policy, Shape
from radixkv_policies.queue import Queue


@mypyc_attr(allow_interpreted_subclasses=True)
class LRU(Policy):
    """Least recently used."""

    def begin(self) -> None:
        super().begin()
        self._order: OrderedDict[Handle, None] = OrderedDict()
        self._queue: Queue | None = None
        self._shape: Shape | None = None
        self._kept: dict[Handle, None] = {}
        self._needed: dict[Handle, int] = {}
        self._bottoms: dict[
            Handle, Handle | None
        ] = {}  # by request: the deepest node that it needs as a whole
        self._perhaps: set[Handle] = set()  # kept nodes that may have become leaves

    def order(self) -> tuple[Callable[..., object], Callable[..., object], Callable[..., object]]:
        if self._queue is not None:
            return self.leased, self.unleased, self.removed
        return self._order.pop, self._order.setdefault, self._order.pop

    def hook(self, name: str) -> Callable[..., Any] | None:
        if name == "most" and self._queue is None:
            return None
        return super().hook(name)

    def split(self, upper: Handle, lower: Handle, num_blocks: int) -> None:
        if lower in self._order:
            self._order[upper] = None
        if self._queue is not None:
            if lower in self._kept:
                self._kept[upper] = None
            if lower in self._needed:
                self._needed[upper] = self._needed[lower]

    def leased(self, node: Handle) -> object:
        """Remove the node from the order."""
        if self._queue is None or node in self._order:
            return self._order.pop(node)
        self._queue.leave(node)
        return self._kept.pop(node)

    def unleased(self, node: Handle) -> object:
        """Add the node as the youngest."""
        if node not in self._needed:
            return self._order.setdefault(node)
        self._perhaps.add(node)
        return self._kept.setdefault(node)

    def removed(self, node: Handle) -> object:
        """Remove the node from the order."""
        if self._shape is not None:
            above = self._shape.parent(node)
            if above is not None and above in self._kept:
                self._perhaps.add(above)
        return self.leased(node)

    def victim(self) -> Handle | None:
        if self._queue is None:
            return next(iter(self._order), None)
        if self._perhaps:
            self._look_at_kept()
        cold = self._queue.first()
        if cold is not None:
            return cold
        idle = next(iter(self._order), None)
        return self._queue.last() if idle is None else idle

    def most(self, node: Handle) -> int:
        assert self._queue is not None and self._shape is not None
        size = self._shape.num_blocks(node)
        free = size - self._queue.covered(node)
        return free if 0 < free else size

    def __len__(self) -> int:
        return len(self._order) + len(self._kept)

    # --- waiting requests

    def expect_requests(self, shape: Shape) -> None:
        """Heed waiting requests from now on."""
        self._queue, self._shape = Queue(), shape

    def announced(
        self, request: Handle, node: Handle | None, num_blocks: int, missing: float, hints: object
    ) -> None:
        assert self._queue is not None and self._shape is not None
        bottom = node
        if node is not None and num_blocks < self._shape.num_blocks(node):
            bottom = self._shape.parent(node)
        was = self._bottoms.get(request)
        self._bottoms[request] = bottom
        before = self._queue.announced(request, node, num_blocks, missing)
        self._need(bottom)
        self._need_no_longer(was)
        for each in (before, bottom):
            self._look_again(each)

    def withdrawn(self, request: Handle) -> None:
        if self._queue is not None:
            before = self._queue.withdrawn(request)
            self._need_no_longer(self._bottoms.pop(request, None))
            self._look_again(before)

    def _need(self, node: Handle | None) -> None:
        """One more request needs all of the path to a node."""
        assert self._shape is not None
        while node is not None:
            num = self._needed.get(node, 0)
            self._needed[node] = num + 1
            if not num and node in self._order:
                del self._order[node]
                self._kept[node] = None
            node = self._shape.parent(node)

    def _need_no_longer(self, node: Handle | None) -> None:
        assert self._queue is not None and self._shape is not None
        while node is not None:
            num = self._needed[node]
            if num > 1:
                self._needed[node] = num - 1
            else:
                del self._needed[node]
                if node in self._kept:
                    self._queue.leave(node)
                    del self._kept[node]
                    self._order[node] = None
            node = self._shape.parent(node)

    def _look_again(self, node: Handle | None) -> None:
        assert self._queue is not None
        if node is not None:
            self._queue.leave(node)
            if node in self._kept:
                self._perhaps.add(node)

    def _look_at_kept(self) -> None:
        """Enter kept nodes that are leaves now."""
        assert self._queue is not None and self._shape is not None
        for node in self._perhaps:
            if node in self._kept and self._queue.covered(node) and self._shape.is_leaf(node):
                self._queue.leave(node)
                self._queue.enter(node)
        self._perhaps.clear()
