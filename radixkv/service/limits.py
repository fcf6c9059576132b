"""Limits on requests: bounds for every tenant, and the gate that holds each tenant to its rate.

A tenant's rate is a token bucket: ``burst`` requests at once, then ``requests_per_s``. The gate also counts the
requests in progress. Both are kept by tenant and don't depend on other tenants' requests. So a refusal, and its time
to retry, reveals nothing about other tenants. O(1) a request, a few words of memory a tenant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from radixkv.clock import Clock
from radixkv.errors import made_again
from radixkv.service.engine_loop import Busy


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on client requests. Rates, requests in progress, queues and jobs are counted by tenant.

    - ``requests_per_s``, ``burst``, ``max_body_bytes``: for tenants without own values in the keys file.
    - ``body_timeout_s``: the time for a body to arrive.
    - ``timeout_s``: the time for a whole answer; jobs have no limit.
    - ``drain_s``: the time that answers in progress have to finish when the process ends.
    """

    max_body_bytes: int = 4 * 2**20
    requests_per_s: float = 1000.0
    burst: int = 2000
    max_concurrent: int = 256
    max_queued: int = 32
    max_jobs: int = 256
    job_ttl_s: float = 600.0
    body_timeout_s: float = 30.0
    timeout_s: float = 600.0
    drain_s: float = 20.0


class TooFast(Exception):
    """The tenant's bucket is empty; ``wait_s`` until a request may pass."""

    def __init__(self, wait_s: float, requests_per_s: float, burst: int) -> None:
        self.wait_s, self.requests_per_s, self.burst = wait_s, requests_per_s, burst
        super().__init__(f"{requests_per_s:g} requests a second, {burst} at once")

    def __reduce__(self) -> tuple[Any, ...]:
        return made_again(self)


@dataclass(frozen=True, slots=True)
class Rate:
    """A tenant's rate limit after a request: requests at once, those left now, and the seconds until all are."""

    burst: int
    left: int
    reset_s: float


class TokenBucket:
    """At most ``burst`` tokens, ``rate`` new ones a second; full at first."""

    __slots__ = ("at", "level")

    def __init__(self, level: float, at: float) -> None:
        self.level, self.at = level, at

    def take(self, now: float, rate: float, burst: int) -> float:
        """Take a token: return 0.0 if there was one, otherwise the seconds until there will be. O(1)."""
        self.level = min(burst, self.level + (now - self.at) * rate)
        self.at = now
        if self.level < 1.0:
            return (1.0 - self.level) / rate
        self.level -= 1.0
        return 0.0


class Gate:
    """Buckets and requests in progress, by tenant. To be used from the event loop's thread."""

    def __init__(self, max_concurrent: int, clock: Clock) -> None:
        self.max_concurrent, self._clock = max_concurrent, clock
        self._buckets: dict[str, TokenBucket] = {}
        self._under_way: dict[str, int] = {}

    @contextmanager
    def admit(self, tenant: str, requests_per_s: float, burst: int) -> Iterator[None]:
        """Admit one request of the tenant; it is in progress until the ``with`` ends. Raises TooFast or Busy."""
        now = self._clock()
        bucket = self._buckets.setdefault(tenant, TokenBucket(burst, now))
        wait_s = bucket.take(now, requests_per_s, burst)
        if wait_s:
            raise TooFast(wait_s, requests_per_s, burst)
        if self._under_way.get(tenant, 0) >= self.max_concurrent:
            raise Busy
        self._under_way[tenant] = self._under_way.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._under_way[tenant] -= 1

    def rate(self, tenant: str, requests_per_s: float, burst: int) -> Rate:
        """Return what a tenant's rate leaves now. O(1)."""
        bucket = self._buckets.get(tenant)
        level = float(burst) if bucket is None else bucket.level
        if bucket is not None:
            level = min(burst, level + (self._clock() - bucket.at) * requests_per_s)
        return Rate(burst, int(level), (burst - level) / requests_per_s)

    def forget(self, tenant: str) -> None:
        """Forget a tenant that was removed."""
        self._buckets.pop(tenant, None)
