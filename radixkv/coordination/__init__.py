"""Coordination: replicas publish what they hold, so that others can route, warm, pin and purge.

``coordinator.py`` describes the guarantees and the calls. Importing this package loads no store client; ``connect``
loads one if it is given a URL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv._compiled import follow

follow(__path__)

from radixkv.coordination.coordinator import Coordinator
from radixkv.coordination.keys import SEGMENT_TOKENS
from radixkv.coordination.routing.router import Candidate, Router
from radixkv.coordination.settings import Settings
from radixkv.coordination.values import (
    Health,
    Hint,
    JobPart,
    Load,
    ReplicaInfo,
    WarmJob,
)
from radixkv.errors import ConfigError, needs
from radixkv.signing import RequestVerifier, is_signed, sign_request

if TYPE_CHECKING:
    from radixkv.coordination.store.memory import MemoryStore

__all__ = [
    "SEGMENT_TOKENS",
    "Candidate",
    "Coordinator",
    "Health",
    "Hint",
    "JobPart",
    "Load",
    "ReplicaInfo",
    "RequestVerifier",
    "Router",
    "Settings",
    "WarmJob",
    "connect",
    "is_signed",
    "sign_request",
]


def connect(
    url: str | None,
    *,
    replica_id: str,
    fleet_secret: bytes,
    fingerprint: str,
    block_size: int,
    address: str | None = None,
    lease_s: float = 10.0,
    background: bool = True,
    store: MemoryStore | None = None,
) -> Coordinator:
    """Make a coordinator that isn't registered yet: over Redis at ``url``, or in memory if ``url`` is None.

    In memory, replicas of one process see each other through a shared ``store``. Without a shared store the replica is
    alone, and its ``journal`` is None. ``background=False`` starts no threads: the caller then calls ``beat`` and
    ``publish`` itself (and ``poll`` over Redis). Nothing is sent before ``register()``.

    Raises ConfigError for a setting that can't work, and for a ``url`` without the extra ``redis``.
    """
    settings = Settings(
        replica_id=replica_id,
        fleet_secret=fleet_secret,
        fingerprint=fingerprint,
        block_size=block_size,
        address=address,
        lease_s=lease_s,
        background=background,
    )
    if url is None:
        from radixkv.coordination.memory_coordinator import MemoryCoordinator
        from radixkv.coordination.store.memory import MemoryStore

        if not isinstance(store, MemoryStore | None):
            raise ConfigError("store", store, "a MemoryStore, or None")
        return MemoryCoordinator(settings, store)
    if store is not None:
        raise ConfigError("store", store, "None where there is a URL")
    try:
        from radixkv.coordination.redis_coordinator import RedisCoordinator
    except ModuleNotFoundError as error:
        raise ConfigError("redis", url, "None", problem=needs("redis")) from error
    return RedisCoordinator(settings, url)
