"""The queue of an engine's waiting requests: fair between tenants, cache-first within a tenant.

``virtual_time`` chooses the tenant, ``waiting`` its request. The order within a tenant depends on that tenant's own
calls alone, whatever others have waiting: ``peek(now, tenant=…)`` shows it. Others only change when its turns come,
within the bound of ``virtual_time``. Priorities and deadlines compare requests of one tenant; no other tenant notices
them.

A priority goes before all lower ones of its tenant, so the bound on waiting is one within a priority.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import isfinite
from typing import Any, Final

from radixkv.errors import ArgumentError
from radixkv.scheduling.virtual_time import MAX_WEIGHT, MIN_WEIGHT, TenantQueue, VirtualTime
from radixkv.scheduling.waiting import (
    KAPPA,
    MAX_PRIORITY,
    REMOVED,
    STARTED,
    WAITING,
    WHOLE_MISSING,
    WaitingRequest,
)

MAX_TOKENS: Final = 2**40
"""Most tokens of a request."""

MAX_TENANTS: Final = 1_000_000
"""Most tenants with a weight of their own."""

_MAX_KAPPA: Final = 1_000_000


class RequestQueue:
    """Orders waiting requests. Not thread-safe: an engine calls it from the thread that schedules.

    - ``kappa``: whole requests that may start between two cold ones, 0 to 1,000,000. 0 keeps the order of arrival.
    - ``whole_missing``: a request with at most this share of its tokens missing is whole, 0 to 1.

    Calls take O(log requests + log tenants), amortised. A call with an invalid argument raises ArgumentError and
    changes nothing.
    """

    def __init__(self, *, kappa: int = KAPPA, whole_missing: float = WHOLE_MISSING) -> None:
        self._kappa = _checked_integer("kappa", kappa, 0, _MAX_KAPPA)
        self._whole_missing = _checked_share("whole_missing", whole_missing)
        self._time = VirtualTime()
        self._tenants: dict[str, TenantQueue] = {}
        self._weights: dict[str, float] = {}
        self._idle = OrderedDict[str, TenantQueue]()  # the tenants without a waiting request
        self._num_waiting = self._num_arrived = self._missing_tokens = self._early_tokens = 0

    def __len__(self) -> int:
        return self._num_waiting

    def tokens_ahead(self, missing: float = 1.0) -> int:
        """Return the tokens to compute of the waiting requests that go before a new one with this missing share. O(1).

        What a router should know of this queue. Before a cold request go all, before a whole one those that are whole
        or were preempted. Tenants, priorities, deadlines and credits are left out.
        """
        is_early = self._kappa > 0 and _checked_share("missing", missing) <= self._whole_missing
        return self._early_tokens if is_early else self._missing_tokens

    def num_waiting(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        known = self._tenants.get(tenant)
        return 0 if known is None else known.num_waiting

    def set_weight(self, tenant: str, weight: float) -> None:
        """Set the weight of a tenant, from its next start on; without it, 1. From 1e-100 to 1e100."""
        _check_tenant(tenant)
        if not _is_number(weight) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ArgumentError("weight", weight, f"a number from {MIN_WEIGHT} to {MAX_WEIGHT}")
        if tenant not in self._weights and len(self._weights) >= MAX_TENANTS:
            raise ArgumentError("tenant", tenant, f"at most {MAX_TENANTS:,} tenants with a weight")
        self._weights[tenant] = float(weight)
        if tenant in self._tenants:
            self._tenants[tenant].weight = float(weight)

    def forget_weight(self, tenant: str) -> None:
        """Give a tenant the weight 1 again. Without effect if it has no other."""
        self._weights.pop(tenant, None)
        if tenant in self._tenants:
            self._tenants[tenant].weight = 1.0

    def add(
        self,
        tenant: str,
        *,
        tokens: int,
        missing: float = 1.0,
        priority: int = 0,
        start_by: float | None = None,
        item: Any = None,
    ) -> WaitingRequest:
        """Let a request arrive. Returns its handle for the other calls.

        - ``tokens``: of its prompt, 1 to 2⁴⁰.
        - ``missing``: the share of them that is not resident, 0 to 1.
        - ``priority``: 0 to 100. The highest goes first among the requests of this tenant.
        - ``start_by``: from this time on the request goes first in its priority, the earliest such time first. On the
          clock of ``peek``.
        - ``item``: anything of the engine's.
        """
        _check_tenant(tenant)
        size = _checked_integer("tokens", tokens, 1, MAX_TOKENS)
        share = _checked_share("missing", missing)
        rank = _checked_integer("priority", priority, 0, MAX_PRIORITY)
        due = None if start_by is None else _checked_time("start_by", start_by)
        owner = self._owner(tenant)
        request = WaitingRequest(
            self, owner.line_of(rank), self._num_arrived, tenant, size, share, rank, due, item
        )
        self._num_arrived += 1
        self._entered(owner, request)
        request._line.arrive(request)
        return request

    def update(self, request: WaitingRequest, missing: float) -> None:
        """Say how much of a waiting request is not resident now."""
        share = _checked_share("missing", missing)
        self._check_state(request, WAITING)
        self._count(request, -1)
        request.missing = share
        self._count(request, 1)
        request._line.rank(request)

    def peek(self, now: float, *, tenant: str | None = None) -> WaitingRequest | None:
        """Return the request that starts next; None if none waits.

        - ``now``: the time, for deadlines.
        - ``tenant``: among the requests of this tenant only, as if no other were there.
        """
        at = _checked_time("now", now)
        if tenant is not None:
            _check_tenant(tenant)
        owner = self._time.first() if tenant is None else self._tenants.get(tenant)
        line = None if owner is None else owner.line()
        return None if line is None else line.first(at)

    def start(self, request: WaitingRequest) -> None:
        """Let a waiting request start, and charge its missing tokens to its tenant.

        The bounds hold for an engine that starts what ``peek`` returns. It may start another request, or pass one over
        that it can't start now: ``start`` it, and ``give_back`` it after others had their turn.
        """
        self._check_state(request, WAITING)
        owner = self._tenants[request.tenant]
        request._line.start(request)
        request.state = STARTED
        request._cost = self._time.charge(owner, request.missing_tokens)
        self._left(owner, request)

    def give_back(self, request: WaitingRequest) -> None:
        """Undo a start, as if the request had waited on. Call it soon after the start."""
        self._check_state(request, STARTED)
        owner = self._back(request)
        self._entered(owner, request, is_new=False)
        self._time.refund(owner, request._cost)
        request._line.give_back(request)

    def requeue(self, request: WaitingRequest, missing: float = 1.0) -> None:
        """Let a request that was preempted wait again. It goes before all of its priority that never started.

        Its next start is charged too, for what is missing then.
        """
        share = _checked_share("missing", missing)
        self._check_state(request, STARTED)
        request.missing = share
        owner = self._back(request)
        request._line.come_back(request)
        self._entered(owner, request)

    def remove(self, request: WaitingRequest) -> None:
        """Let a waiting request go without a start: it was cancelled."""
        self._check_state(request, WAITING)
        request._line.remove(request)
        request.state = REMOVED
        self._left(self._tenants[request.tenant], request)

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Iterate over the waiting requests, oldest first. O(n log n)."""
        found = {request for tenant in self._tenants.values() for request in tenant}
        return iter(sorted(found, key=lambda request: request.arrival))

    def _owner(self, tenant: str) -> TenantQueue:
        owner = self._tenants.get(tenant)
        if owner is None:
            weight = self._weights.get(tenant, 1.0)
            owner = self._tenants[tenant] = TenantQueue(tenant, weight, self._kappa, self._whole_missing)
        return owner

    def _back(self, request: WaitingRequest) -> TenantQueue:
        """Return the tenant of a request that started. The tenant may have been forgotten since."""
        owner = self._owner(request.tenant)
        line = owner.line_of(request.priority)
        if line is not request._line:
            request._line = line
            request.forget_entries()
        return owner

    def _entered(self, owner: TenantQueue, request: WaitingRequest, *, is_new: bool = True) -> None:
        request.state = WAITING
        if not owner.num_waiting:
            self._idle.pop(owner.name, None)
            self._time.enter(owner, is_new=is_new)
        owner.num_waiting += 1
        self._num_waiting += 1
        self._count(request, 1)

    def _left(self, owner: TenantQueue, request: WaitingRequest) -> None:
        owner.num_waiting -= 1
        self._num_waiting -= 1
        self._count(request, -1)
        if not owner.num_waiting:
            self._time.leave(owner)
            self._idle[owner.name] = owner
            self._forget()

    def _count(self, request: WaitingRequest, sign: int) -> None:
        self._missing_tokens += sign * request.missing_tokens
        if request._is_preempted or request.missing <= self._whole_missing:
            self._early_tokens += sign * request.missing_tokens

    def _forget(self) -> None:
        """Forget tenants without waiting requests, faster than they come."""
        for _ in range(min(len(self._idle), 2)):
            name, owner = self._idle.popitem(last=False)
            if self._time.is_over(owner):
                del self._tenants[name]
            else:
                self._idle[name] = owner

    def _check_state(self, request: WaitingRequest, state: str) -> None:
        if not isinstance(request, WaitingRequest) or request._queue is not self:
            raise ArgumentError("request", request, "a handle that add of this queue returned")
        if request.state is not state:
            raise ArgumentError("request", request, f"a request that is {state}")


def _check_tenant(tenant: object) -> None:
    if not isinstance(tenant, str):
        raise ArgumentError("tenant", tenant, "a string")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _checked_integer(name: str, value: int, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ArgumentError(name, value, f"an integer from {least} to {most:,}")
    return value


def _checked_share(name: str, value: float) -> float:
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise ArgumentError(name, value, "a number from 0 to 1")
    return float(value)


def _checked_time(name: str, value: float) -> float:
    if not _is_number(value) or not -1e300 <= value <= 1e300 or not isfinite(value):
        raise ArgumentError(name, value, "seconds, a finite number")
    return float(value)
