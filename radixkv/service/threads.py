"""Threads for calls that block, fair between tenants; the operator has threads of its own.

A tenant has at most TENANT_THREADS calls in threads at once, however many requests it makes; its others wait behind
each other. All tenants together have ALL_TENANTS_THREADS. No call of a tenant ever takes one of the operator's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")

OPERATOR_THREADS = 8
TENANT_THREADS = 2
ALL_TENANTS_THREADS = 32


class Threads:
    """Lanes of threads. To be used from one event loop."""

    def __init__(self) -> None:
        self._operator: anyio.CapacityLimiter | None = None
        self._tenants: anyio.CapacityLimiter | None = None
        self._own: dict[str, anyio.CapacityLimiter] = {}

    async def administer(self, call: Callable[[], T]) -> T:
        """``call()`` in a thread of the operator's. A cancelled wait leaves a call that runs alone."""
        self._operator = self._operator or anyio.CapacityLimiter(OPERATOR_THREADS)
        return await anyio.to_thread.run_sync(call, limiter=self._operator)

    async def run(self, tenant: str, call: Callable[[], T]) -> T:
        """``call()`` in a thread, in the tenant's turn."""
        self._tenants = self._tenants or anyio.CapacityLimiter(ALL_TENANTS_THREADS)
        own = self._own.setdefault(tenant, anyio.CapacityLimiter(TENANT_THREADS))
        try:
            async with own:
                return await anyio.to_thread.run_sync(call, limiter=self._tenants)
        finally:
            idle = not own.borrowed_tokens and not own.statistics().tasks_waiting
            if idle and self._own.get(tenant) is own:
                del self._own[tenant]
