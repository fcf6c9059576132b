"""Fairness between tenants: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

A tenant's *tag* is the virtual time at which its next request may start. The tenant with the smallest tag is next. A
start of ``cost`` tokens raises its tag by ``cost ÷ weight``. Virtual time is the largest tag at which a request
started. A tenant whose first request arrives has the larger of virtual time and its tag, so idle time saves nothing up.
When a request arrives while none waits, virtual time becomes the largest tag.

While two tenants have requests waiting, their tokens divided by their weights differ by at most the largest request of
each, divided by its weight: the guarantee of deficit round robin, in O(log tenants) a start.

Tags are integers, so that they are exact at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from radixkv.scheduling.waiting import Line, WaitingRequest

MIN_WEIGHT: Final = 1e-100
MAX_WEIGHT: Final = 1e100
"""Bounds of a weight: those of a tenant of the cache."""

_SHIFT: Final = 384
"""Bits of a tag after the point: with the largest weight, a token still counts about 2⁵¹."""


def virtual_cost(num_tokens: int, weight: float) -> int:
    """Return the virtual time that some tokens of a tenant take."""
    above, below = weight.as_integer_ratio()
    return (num_tokens << _SHIFT) * below // above


class TenantQueue:
    """The lines of a tenant, by priority, and its tag."""

    __slots__ = (
        "_kappa", "_lines", "_listed", "_priorities", "_whole_missing", "entry", "name", "num_waiting", "tag", "weight",
    )  # fmt: skip

    def __init__(self, name: str, weight: float, kappa: int, whole_missing: float) -> None:
        self.name, self.weight = name, weight
        self._kappa, self._whole_missing = kappa, whole_missing
        self._lines: dict[int, Line] = {}
        self._priorities: list[int] = []
        """A heap of the negative priorities whose lines may have waiting requests. ``_listed`` holds the same."""
        self._listed: set[int] = set()
        self.num_waiting = 0
        self.tag = 0
        self.entry = 0
        """The number of its valid entry in the heap of active tenants."""

    def line(self) -> Line | None:
        """Return the line of the highest priority that waits. O(log priorities), amortised."""
        while self._priorities:
            line = self._lines[-self._priorities[0]]
            if line.num_waiting:
                return line
            self._listed.discard(-heappop(self._priorities))
        return None

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Iterate over the waiting requests, in no order, some twice."""
        for line in self._lines.values():
            yield from line

    def line_of(self, priority: int) -> Line:
        """Return the line of a priority, which gets a request. O(log priorities)."""
        if priority not in self._listed:
            self._listed.add(priority)
            heappush(self._priorities, -priority)
        if priority not in self._lines:
            self._lines[priority] = Line(self._kappa, self._whole_missing)
        return self._lines[priority]


class VirtualTime:
    """Orders the tenants that have requests waiting. Each call takes O(log tenants), amortised."""

    def __init__(self) -> None:
        self.now = 0
        self._latest = 0
        self._heap: list[tuple[int, int, TenantQueue]] = []
        self._entries = 0
        self._num_active = 0

    def enter(self, tenant: TenantQueue, *, is_new: bool = True) -> None:
        """Let a tenant take part: it has a first waiting request, a new one or one that is given back."""
        if not self._num_active and is_new:
            self.now = self._latest
        self._num_active += 1
        self._move(tenant, max(tenant.tag, self.now))

    def leave(self, tenant: TenantQueue) -> None:
        """Leave a tenant out: its last request left."""
        tenant.entry = 0
        self._num_active -= 1

    def charge(self, tenant: TenantQueue, num_tokens: int) -> int:
        """Charge a start to a tenant that takes part. Returns its cost in virtual time."""
        cost = virtual_cost(num_tokens, tenant.weight)
        self.now = max(self.now, tenant.tag)
        self._move(tenant, tenant.tag + cost)
        return cost

    def refund(self, tenant: TenantQueue, cost: int) -> None:
        """Refund a start to a tenant that takes part. What it did not use while it was passed over is not saved up."""
        self._move(tenant, max(tenant.tag - cost, self.now))

    def first(self) -> TenantQueue | None:
        """Return the tenant that is next; None if none has a request."""
        while self._heap:
            _, entry, tenant = self._heap[0]
            if entry == tenant.entry:
                return tenant
            heappop(self._heap)
        return None

    def is_over(self, tenant: TenantQueue) -> bool:
        """Whether a tenant without waiting requests has nothing left that counts."""
        return not tenant.entry and tenant.tag <= self.now

    def _move(self, tenant: TenantQueue, tag: int) -> None:
        tenant.tag = tag
        self._latest = max(self._latest, tag)
        if len(self._heap) > 2 * self._num_active + 64:  # mostly outdated entries
            self._heap = [each for each in self._heap if each[1] == each[2].entry]
            heapify(self._heap)
        tenant.entry = self._entries = self._entries + 1
        heappush(self._heap, (tenant.tag, tenant.entry, tenant))
