"""Maintenance: a separate thread that ends pins and announcements and lets policies learn.

The cache holds its ``Maintenance``. The thread calls ``maintain`` about once a second. It rests at least nine times as
long as it worked, so it takes at most a tenth of a core. It holds no reference while it rests, and ends when the cache
is gone. An error doesn't end the thread: ``threading.excepthook`` reports it.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from radixkv.index.below import Below
    from radixkv.index.cachelock import CacheLock
    from radixkv.index.pins import Pins
    from radixkv.index.residency import Claims
    from radixkv.index.tenants import TenantState

PERIOD_S: Final = 1.0
REST: Final = 9.0
"""The thread rests this many times as long as it worked."""


class Maintenance:
    """Lets the policies of ``tenants`` learn. ``lock`` is the cache's, held only to read the list of tenants."""

    def __init__(
        self, lock: CacheLock, tenants: Mapping[str, TenantState], pins: Pins, claims: Claims
    ) -> None:
        self._lock, self._tenants, self._pins, self._claims = lock, tenants, pins, claims
        self._has_started = False

    def maintain(self, below: Below | None = None) -> None:
        """End what has expired, then let policies learn without the lock, also those below the cache.

        Raises the first error at the end.
        """
        with self._lock:
            duties = [tenant.policy.maintain for tenant in self._tenants.values()]
            cache = self._pins.cache or self._claims.cache
        if cache is not None:
            duties.insert(0, cache._end_due)
            del cache
        if below is not None:
            duties.append(below.maintain)
        failures: list[Exception] = []
        for duty in duties:
            try:
                duty()
            except Exception as error:  # noqa: BLE001 a policy may be any code; its failure concerns only its tenant
                failures.append(error)
        if failures:
            raise failures.pop(
                0
            )  # not in a variable: the exception refers to this frame, and the cycle would keep the cache alive

    def start(self) -> None:
        """Maintain the cache from the first call on, for as long as this object lives."""
        if self._has_started:
            return
        self._has_started = True
        gone = threading.Event()
        weakref.finalize(self, gone.set)
        thread = threading.Thread(
            target=_run, args=(weakref.ref(self), gone), name="radixkv-maintenance", daemon=True
        )
        thread.start()


def _run(reference: weakref.ref[Maintenance], gone: threading.Event) -> None:
    rest_s = PERIOD_S
    while not gone.wait(rest_s):
        maintenance = reference()
        if maintenance is None:
            return
        began_s = time.thread_time()
        try:
            maintenance.maintain()
        except Exception:  # noqa: BLE001 reported like an uncaught error, but the thread continues
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        rest_s = max(PERIOD_S, REST * (time.thread_time() - began_s))
        del maintenance
