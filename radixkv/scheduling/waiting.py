"""Requests that wait, and the line in which those of one tenant and one priority wait.

A request is *whole* if at most ``WHOLE_MISSING`` of its tokens are missing, otherwise *cold*. A line starts, in this
order:

1. requests that were preempted, in arrival order;
2. requests whose latest start has come, the most urgent first;
3. with less than κ credits the whole request with the least missing share, the oldest of equals, or the oldest cold one
   if none is whole; otherwise the oldest.

Each start of a whole request that passes an older one earns one credit, up to 2κ. Each start of the oldest costs κ,
down to 0. Without whole requests, and with κ = 0, the order is that of arrival.

**The bound.** Let a request arrive while e requests wait in its line. At most κ·(e + 1) requests that arrived later
start before it, whatever becomes resident or is evicted meanwhile. Requests with a deadline are not
counted, nor those that were preempted. Proof:
while it waits, a later request starts only by rule 3, with less than κ credits, and as a whole request: otherwise ours
or an older one would start. So each such start earns a credit. Only the start of the oldest costs credits. So before
our start only the e older ones cost credits, each at most κ and once. With L later starts, the credits before the last
of them are at least L − 1 − κ·e, and less than κ. So L ≤ κ·(e + 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Final

KAPPA: Final = 8
"""Whole requests that start between two cold ones, by default."""

WHOLE_MISSING: Final = 0.6
"""Largest missing share of a whole request."""

MAX_PRIORITY: Final = 100
"""Highest priority of a request; 0 is the lowest, and the default."""

WAITING: Final = "waiting"
STARTED: Final = "started"
REMOVED: Final = "removed"

_NOWHERE: Final = -1.0
"""The missing share under which a request isn't among the whole ones."""

_SPARE: Final = 64
"""Outdated entries that a heap may hold, besides as many as two for each waiting request."""


class WaitingRequest:
    """A request in a queue: the handle that ``RequestQueue.add`` returns. Read its fields; the queue writes them.

    - ``tenant``, ``tokens``, ``priority``, ``start_by``, ``item``: as they were given to ``add``.
    - ``missing``: the share of its tokens that is not resident, 0 to 1.
    - ``arrival``: its place in the order of all arrivals of the queue, from 0.
    - ``state``: "waiting", "started" or "removed".
    """

    __slots__ = (
        "_cost", "_credit", "_earned", "_in_cold", "_in_line", "_is_preempted", "_line", "_queue", "_whole_at",
        "arrival", "item", "missing", "priority", "start_by", "state", "tenant", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        queue: object,
        line: Line,
        arrival: int,
        tenant: str,
        tokens: int,
        missing: float,
        priority: int,
        start_by: float | None,
        item: Any,
    ) -> None:
        self.arrival, self.tenant, self.tokens, self.missing = arrival, tenant, tokens, missing
        self.priority, self.start_by, self.item = priority, start_by, item
        self.state = WAITING
        self._queue, self._line = queue, line
        self._is_preempted = False
        self.forget_entries()
        self._credit = self._earned = self._cost = (
            0  # of its last start: credits before it, and what it changed
        )

    def forget_entries(self) -> None:
        """Note that no heap of its line holds it: it has another line now."""
        self._in_line = self._in_cold = False
        self._whole_at = _NOWHERE

    @property
    def missing_tokens(self) -> int:
        """Tokens to compute when it starts, at least 1."""
        return max(round(self.missing * self.tokens), 1)

    def __repr__(self) -> str:
        return (
            f"<WaitingRequest {self.arrival} of {self.tenant!r}: {self.missing:.0%} of {self.tokens} tokens missing, "
            f"{self.state}>"
        )


Entry = tuple[float, int, WaitingRequest]

Heap = list[Entry]
"""Entries of urgency, arrival and request, the smallest first. Deadlines and missing shares are urgencies."""


class Line:
    """The waiting requests of one tenant and one priority. Each call takes O(log requests), amortised.

    The heaps hold outdated entries too: of requests that started, left or changed their class. They are dropped when
    they come to the top, or when they are more than half.
    """

    __slots__ = (
        "_all",
        "_cold",
        "_due",
        "_kappa",
        "_preempted",
        "_whole",
        "_whole_missing",
        "credit",
        "num_waiting",
    )

    def __init__(self, kappa: int, whole_missing: float) -> None:
        self._kappa, self._whole_missing = kappa, whole_missing
        self._whole, self._cold, self._preempted, self._due = Heap(), Heap(), Heap(), Heap()
        self._all = Heap()  # but those that were preempted
        self.credit = 0
        self.num_waiting = 0

    def arrive(self, request: WaitingRequest) -> None:
        """Let a new request wait. The credits of a line that was empty are over."""
        if not self.num_waiting:
            self.credit = 0
        self._add(request)

    def give_back(self, request: WaitingRequest) -> None:
        """Undo a start. The credits are as before it, unless other requests came since."""
        if self.num_waiting:
            self.credit = min(max(self.credit - request._earned, 0), 2 * self._kappa)
        else:
            self.credit = request._credit
        if request._is_preempted:
            self.come_back(request)
        else:
            self._add(request)

    def come_back(self, request: WaitingRequest) -> None:
        """Let a preempted request wait, ahead of all that have not started yet."""
        request._is_preempted = True
        self.num_waiting += 1
        self._push(self._preempted, 0.0, request, lambda entry: _is_preempted(entry[2]))

    def rank(self, request: WaitingRequest) -> None:
        """Put a waiting request in the class of its missing share."""
        if request._is_preempted:
            return
        if self._is_whole(request):
            if request._whole_at != request.missing:
                request._whole_at = request.missing
                self._push(self._whole, request.missing, request, self._waits_whole)
        elif not request._in_cold:
            request._in_cold = True
            self._push(self._cold, 0.0, request, self._waits_cold)

    def first(self, now: float) -> WaitingRequest | None:
        """Return the request that starts next; None if none waits."""
        return self._first_preempted() or self._first_due(now) or self._first_by_cache()

    def start(self, request: WaitingRequest) -> None:
        """Count the start of a request, which still waits."""
        request._credit = self.credit
        if not request._is_preempted:
            if self._oldest() is request:
                self.credit = max(self.credit - self._kappa, 0)
            elif self._is_whole(request):
                self.credit = min(self.credit + 1, 2 * self._kappa)
        request._earned = self.credit - request._credit
        self.num_waiting -= 1

    def remove(self, request: WaitingRequest) -> None:
        """Let a request go that will not start."""
        self.num_waiting -= 1

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Iterate over the waiting requests, in no order, some twice."""
        for heap in (self._whole, self._cold, self._preempted):
            yield from (entry[2] for entry in heap if entry[2].state is WAITING)

    def _add(self, request: WaitingRequest) -> None:
        self.num_waiting += 1
        if not request._in_line:
            request._in_line = True
            self._push(self._all, 0.0, request, _waits_in_line)
        self.rank(request)
        if request.start_by is not None:
            self._push(self._due, request.start_by, request, lambda entry: _is_waiting(entry[2]))

    def _first_preempted(self) -> WaitingRequest | None:
        while self._preempted:
            request = self._preempted[0][2]
            if _is_preempted(request):
                return request
            heappop(self._preempted)
        return None

    def _first_due(self, now: float) -> WaitingRequest | None:
        while self._due and self._due[0][0] <= now:
            request = self._due[0][2]
            if _is_waiting(request):
                return request
            heappop(self._due)
        return None

    def _first_by_cache(self) -> WaitingRequest | None:
        return self._oldest() if self.credit >= self._kappa else self._first_whole() or self._first_cold()

    def _oldest(self) -> WaitingRequest | None:
        """Return the oldest request that was not preempted."""
        while self._all:
            if _waits_in_line(self._all[0]):
                return self._all[0][2]
            heappop(self._all)[2]._in_line = False
        return None

    def _first_whole(self) -> WaitingRequest | None:
        """Return the whole request with the least missing."""
        while self._whole:
            if self._waits_whole(self._whole[0]):
                return self._whole[0][2]
            self._left_whole(heappop(self._whole))
        return None

    def _first_cold(self) -> WaitingRequest | None:
        while self._cold:
            if self._waits_cold(self._cold[0]):
                return self._cold[0][2]
            heappop(self._cold)[2]._in_cold = False
        return None

    def _left_whole(self, entry: Entry) -> None:
        if entry[2]._whole_at == entry[0]:
            entry[2]._whole_at = _NOWHERE

    def _is_whole(self, request: WaitingRequest) -> bool:
        return request.missing <= self._whole_missing

    def _waits_whole(self, entry: Entry) -> bool:
        return _waits_in_line(entry) and entry[0] == entry[2].missing and self._is_whole(entry[2])

    def _waits_cold(self, entry: Entry) -> bool:
        return _waits_in_line(entry) and not self._is_whole(entry[2])

    def _push(
        self, heap: Heap, urgency: float, request: WaitingRequest, belongs: Callable[[Entry], bool]
    ) -> None:
        """Push an entry; first drop the outdated ones if they are many."""
        if len(heap) > 2 * self.num_waiting + _SPARE:
            kept = {entry for entry in heap if belongs(entry)}
            for entry in set(heap) - kept:
                if heap is self._whole:
                    self._left_whole(entry)
                elif heap is self._cold:
                    entry[2]._in_cold = False
                elif heap is self._all:
                    entry[2]._in_line = False
            heap[:] = kept
            heapify(heap)
        heappush(heap, (urgency, request.arrival, request))


def _is_waiting(request: WaitingRequest) -> bool:
    return request.state is WAITING


def _waits_in_line(entry: Entry) -> bool:
    return entry[2].state is WAITING and not entry[2]._is_preempted


def _is_preempted(request: WaitingRequest) -> bool:
    return request.state is WAITING and request._is_preempted
