"""Services that bear a busy machine: what it could exceed takes long, and what is waited for comes soon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from radixkv.clock import monotonic
from tests.tiers.support import PATIENT_S
from tests.waiting import eventually

HELD_BY = "RADIXKV_TESTS_HELD_BY"
"""Environment variable of a service in a process of its own: a file that holds its warms as long as it exists."""
BEAT_S = 0.5
"""A replica beats this often, however long its lease is."""

TIMES: dict[str, float] = {
    "api_client._CONNECT_S": PATIENT_S,
    "connection.HEAD_TIMEOUT_S": PATIENT_S,
    "fleet.peers._CONNECT_TIMEOUT_S": PATIENT_S,
    "fleet.peers._ORDER_TIMEOUT_S": PATIENT_S,
    "fleet.peers._PURGE_TIMEOUT_S": PATIENT_S,
    "fleet.warm_jobs._KNOWN_WITHIN_S": PATIENT_S,
    "key_store.LOCK_WAIT_S": PATIENT_S,
    "reading_pool.MAX_READING_S": PATIENT_S,
    "server.GRACE_S": PATIENT_S,
    "server._HURRIED_GRACE_S": PATIENT_S,
    "server._LAST_RESORT_S": PATIENT_S,
    "engine_loop.STALLED_AFTER_S": PATIENT_S,
}
"""Times of ``radixkv.service``, as ``patient_services`` sets them. A test of what happens when one is over sets it."""


@contextmanager
def patient_services() -> Iterator[None]:
    """No service gives up a client, a replica, a reading process or Redis because that one stalls."""
    import uvicorn

    from radixkv.coordination.settings import Settings
    from radixkv.coordination.store.redis import RedisStore
    from radixkv.signing import RequestVerifier

    connect = RedisStore.__init__
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in TIMES.items():
            patch.setattr(f"radixkv.service.{name}", seconds)
        kept = {"timeout_keep_alive": int(PATIENT_S)}
        patch.setattr(uvicorn.Config, "__init__", partialmethod(uvicorn.Config.__init__, **kept))
        late = {"max_skew_s": PATIENT_S}
        patch.setattr(RequestVerifier, "__init__", partialmethod(RequestVerifier.__init__, **late))
        patch.setattr(RedisStore, "__init__", lambda store, url, *_: connect(store, url, PATIENT_S))
        patch.setattr(Settings, "beat_s", BEAT_S)
        yield


@contextmanager
def holdable_warms() -> Iterator[None]:
    """A service computes nothing of a warm or a pin as long as the file exists that its environment names."""
    from radixkv.service.warming import Warmer

    compute = Warmer._compute

    def held(*given: Any) -> Any:
        """In the model's thread, which waits."""
        yield from ()
        file = os.environ.get(HELD_BY)
        eventually(lambda: file is None or not Path(file).exists(), "the end of what holds warms")
        return (yield from compute(*given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Warmer, "_compute", held)
        yield


class LeapingClock:
    """The time of the machine, and what a test adds to it with ``leap``."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return monotonic() + self._ahead_s

    def leap(self, seconds: float) -> None:
        """Let time pass."""
        self._ahead_s += seconds


@contextmanager
def leaping() -> Iterator[LeapingClock]:
    """The clock of the services, and of their replicas over Redis, that are made during the ``with``."""
    from radixkv.coordination.redis_coordinator import RedisCoordinator
    from radixkv.service.core import Service

    clock = LeapingClock()
    given: dict[str, Any] = {"clock": clock}
    with pytest.MonkeyPatch.context() as patch:
        for each in (Service, RedisCoordinator):
            patch.setattr(each, "__init__", partialmethod(each.__init__, **given))
        yield clock
