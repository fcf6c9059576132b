"""Maintenance: pins end and policies learn, in a thread apart from those that call the cache.

The cache holds its ``Maintenance``. The thread calls ``maintain`` about once a second and rests nine times as long as
that took, so it takes at most a tenth of a core. It holds no reference while it rests, and ends when the cache is gone.
A failure stops nothing else: ``threading.excepthook`` reports it, and the thread goes on.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from radixkv.index.cachelock import CacheLock
    from radixkv.index.pins import Pins
    from radixkv.index.tenants import TenantState

PERIOD_S: Final = 1.0
REST: Final = 9.0
"""Rests so many times as long as it worked."""


class Maintenance:
    """Lets the policies of ``tenants`` learn; ``lock`` is the cache's, and is held to look who they are."""

    def __init__(self, lock: CacheLock, tenants: Mapping[str, TenantState], pins: Pins) -> None:
        self._lock, self._tenants, self._pins = lock, tenants, pins
        self._has_started = False

    def maintain(self) -> None:
        """End the pins whose time is over; let policies learn, without the lock. What failed first is raised last."""
        with self._lock:
            duties = [tenant.policy.maintain for tenant in self._tenants.values()]
            cache = self._pins.cache
        if cache is not None:
            duties.insert(0, cache._end_due_pins)
            del cache
        failures: list[Exception] = []
        for duty in duties:
            try:
                duty()
            except Exception as error:  # noqa: BLE001 a policy is anybody's, and its tenant's alone
                failures.append(error)
        if failures:
            raise failures.pop(
                0
            )  # no name for it here: it knows this frame, and a cycle would keep the cache

    def start(self) -> None:
        """Keep up for as long as this object lives, from the first call on."""
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
        except Exception:  # noqa: BLE001 told as if it had ended the thread, which is needed still
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        rest_s = max(PERIOD_S, REST * (time.thread_time() - began_s))
        del maintenance
