"""Threads for calls that block. Only this module passes such calls from the event loop to a thread.

| calls | threads |
|---|---|
| of the operator and of maintenance, also to the store | OPERATOR_THREADS, which no tenant's call uses |
| that change keys and tenants, and wait for their file's lock | KEY_THREADS, so that a held lock blocks nothing else |
| to the store for a tenant's jobs and pins | STORE_THREADS, so that an outage of the store blocks nothing else |
| of a tenant | TENANT_THREADS at once, however many requests it makes; ALL_TENANTS_THREADS for all tenants together |
| to the cache | the caller's, if the cache is in another process; otherwise none: they take microseconds |

When the process ends, it tells the fleet so, and leaves it, in separate threads that wait behind no other call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")

OPERATOR_THREADS = 8
KEY_THREADS = 4
STORE_THREADS = 8
TENANT_THREADS = 2
ALL_TENANTS_THREADS = 32


class Threads:
    """Lanes of threads. To be used from one event loop."""

    def __init__(self, cache_waits: bool = False) -> None:
        """``cache_waits``: see ``EngineLimits``."""
        self._cache_waits = cache_waits
        self._operator: anyio.CapacityLimiter | None = None
        self._keys: anyio.CapacityLimiter | None = None
        self._store: anyio.CapacityLimiter | None = None
        self._tenants: anyio.CapacityLimiter | None = None
        self._own: dict[str, anyio.CapacityLimiter] = {}

    async def administer(self, call: Callable[[], T]) -> T:
        """Run ``call()`` in a thread of the operator. If the wait is cancelled, a running call continues."""
        self._operator = self._operator or anyio.CapacityLimiter(OPERATOR_THREADS)
        return await anyio.to_thread.run_sync(call, limiter=self._operator)

    async def change_keys(self, call: Callable[[], T]) -> T:
        """Run ``call()``, which changes keys or tenants, in a thread."""
        self._keys = self._keys or anyio.CapacityLimiter(KEY_THREADS)
        return await anyio.to_thread.run_sync(call, limiter=self._keys)

    async def ask_store(self, function: Callable[..., T], *args: object, **named: object) -> T:
        """Call the store for a tenant's job or pin."""
        self._store = self._store or anyio.CapacityLimiter(STORE_THREADS)
        return await anyio.to_thread.run_sync(partial(function, *args, **named), limiter=self._store)

    async def ask_cache(
        self, tenant: str | None, function: Callable[..., T], *args: object, **named: object
    ) -> T:
        """Call the cache for a tenant; None: for the operator."""
        call = partial(function, *args, **named)
        if not self._cache_waits:
            return call()
        return await (self.administer(call) if tenant is None else self.run(tenant, call))

    async def run(self, tenant: str, call: Callable[[], T]) -> T:
        """Run ``call()`` in a thread, in the tenant's turn."""
        self._tenants = self._tenants or anyio.CapacityLimiter(ALL_TENANTS_THREADS)
        own = self._own.setdefault(tenant, anyio.CapacityLimiter(TENANT_THREADS))
        try:
            async with own:
                return await anyio.to_thread.run_sync(call, limiter=self._tenants)
        finally:
            idle = not own.borrowed_tokens and not own.statistics().tasks_waiting
            if idle and self._own.get(tenant) is own:
                del self._own[tenant]
