"""Which running requests take part in a step, so that its rows stay bounded for strict tenants.

A row is a sequence that gets its next token in the step. While a strict tenant is known,

- the rows of tenants that aren't strict are at most ``most`` in a step, also if no strict request is there yet: so one
  that comes finds a short step under way;
- each strict tenant in a step has at most ``most`` rows of all others beside its own.

So one strict tenant takes part in each step, whatever others do. Several take turns if they have more rows together.
What doesn't fit sits out. The others' requests follow strict ones, and a request that has sat out MAX_PASSED steps goes
before all. Among equals the tenants take turns by virtual time, in rows divided by weights, and a tenant's requests by
how long they sat out. A request that has more rows than ``most`` by itself is alone in its step, or beside one strict
tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from heapq import heapify, heappop, heappush
from typing import Final, Protocol, TypeVar

from radixkv.scheduling.virtual_time import virtual_cost

MAX_PASSED: Final = 16
"""Steps in a row that a request sits out before it goes first."""


class Stepping(Protocol):
    """A request that could take part in the step. ``num_passed`` is written here, 0 at first."""

    num_passed: int

    @property
    def tenant(self) -> str:
        """Its tenant."""

    @property
    def weight(self) -> float:
        """The weight of its tenant."""

    @property
    def num_rows(self) -> int:
        """Rows that it has in a step."""


R = TypeVar("R", bound=Stepping)


class RowShares:
    """Chooses the requests of each step. Not thread-safe.

    - ``most``: rows, see above.
    - ``strict``: returns the strict tenants that are known. Called only for a step whose rows would be more.
    """

    def __init__(self, most: int, strict: Callable[[], Collection[str]]) -> None:
        self._most, self._known = most, strict
        self._strict_turns, self._turns = _Turns(most), _Turns(most)
        self.begin()

    def begin(self) -> None:
        """Begin a step, without any request."""
        self._rows = Counter[str]()
        self._num_rows = self._num_lax = 0
        self._strict: Collection[str] | None = None

    def admit(self, ready: Iterable[R]) -> list[R]:
        """Return which of some requests take part in the step beside those that do already. O(n log n) for n.

        Each of the others has sat out a step more.
        """
        requests = list(ready)
        if self._num_rows + sum(each.num_rows for each in requests) <= self._most:
            taken = requests
            for each in taken:
                self._count(each)
        else:
            taken = self._chosen(requests)
        for each in requests:
            each.num_passed += 1
        for each in taken:
            each.num_passed = 0
        return taken

    def _chosen(self, requests: list[R]) -> list[R]:
        if self._strict is None:
            self._strict = self._known()
            self._num_lax -= sum(rows for name, rows in self._rows.items() if name in self._strict)
        if not self._strict:
            return requests
        late = [each for each in requests if each.num_passed >= MAX_PASSED]
        late.sort(key=lambda each: -each.num_passed)
        taken = [each for each in late if self._take(each)]
        rest = [each for each in requests if each.num_passed < MAX_PASSED]
        first = [each for each in rest if each.tenant in self._strict]
        then = [each for each in rest if each.tenant not in self._strict]
        taken += self._strict_turns.take(first, self._take)
        return taken + self._turns.take(then, self._take)

    def _take(self, request: Stepping) -> bool:
        if self._num_rows and not self._fits(request.tenant, request.num_rows):
            return False
        self._count(request)
        return True

    def _fits(self, tenant: str, num_rows: int) -> bool:
        assert self._strict is not None
        is_strict = tenant in self._strict
        if (self._num_rows - self._rows[tenant] if is_strict else self._num_lax + num_rows) > self._most:
            return False
        views = [rows for name, rows in self._rows.items() if name != tenant and name in self._strict]
        return not views or self._num_rows + num_rows - min(views) <= self._most

    def _count(self, request: Stepping) -> None:
        num_rows = request.num_rows
        self._rows[request.tenant] += num_rows
        self._num_rows += num_rows
        if self._strict is None or request.tenant not in self._strict:
            self._num_lax += num_rows


class _Turns:
    """Turns of tenants by virtual time: start-time fair queueing of rows. See ``virtual_time``."""

    def __init__(self, most: int) -> None:
        self._most, self._now = most, 0
        self._tags: dict[str, int] = {}

    def take(self, requests: list[R], fits: Callable[[Stepping], bool]) -> list[R]:
        """Offer requests to ``fits``, those of the tenant with the smallest tag first. Returns those that it took."""
        lines: dict[str, list[R]] = {}
        for each in requests:
            lines.setdefault(each.tenant, []).append(each)
        for tenant, line in lines.items():
            line.sort(key=lambda each: each.num_passed)  # taken from the end
            self._enter(tenant, line[0].weight)
        taken: list[R] = []
        heap = [(self._tags[tenant], tenant) for tenant in lines]
        heapify(heap)
        while heap:
            tag, tenant = heappop(heap)
            request = lines[tenant].pop()
            if fits(request):
                taken.append(request)
                self._now = max(self._now, tag)
                tag = self._tags[tenant] = tag + virtual_cost(request.num_rows, request.weight)
            if lines[tenant]:
                heappush(heap, (tag, tenant))
        self._tags = {name: tag for name, tag in self._tags.items() if name in lines or tag > self._now}
        return taken

    def _enter(self, tenant: str, weight: float) -> None:
        """Idle time saves nothing up, and no debt is longer than one step of the tenant alone."""
        tag = self._tags.get(tenant, self._now)
        self._tags[tenant] = min(tag, self._now + virtual_cost(self._most, weight))
