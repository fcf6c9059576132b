"""A coordinator over Redis: a separate thread reads the logs of the others."""

from __future__ import annotations

import time
from contextlib import suppress

from radixkv.clock import Clock, monotonic
from radixkv.coordination.coordinator import Coordinator
from radixkv.coordination.loop import Loop
from radixkv.coordination.settings import Settings, check_published_block_size
from radixkv.coordination.store.redis import RedisStore
from radixkv.coordination.values import ReplicaInfo
from radixkv.errors import StoreUnavailable


class RedisCoordinator(Coordinator):
    """A coordinator over Redis, with a reading thread. ``poll`` reads immediately instead."""

    def __init__(
        self, settings: Settings, url: str, clock: Clock = monotonic, wall: Clock = time.time
    ) -> None:
        check_published_block_size(settings.block_size)
        # Two reads that meet an unreachable shard must fit into a lease. Otherwise the leases of others would run out.
        reply_timeout_s = min(2.0, max(0.5, settings.lease_s / 4))
        self._redis = RedisStore(url, reply_timeout_s)
        super().__init__(settings, self._redis, clock, wall)
        self._reader_loop = Loop(f"radixkv-reader-{settings.replica_id}", self.reader.step)

    def register(self, address: str | None = None) -> ReplicaInfo:
        """Register as every coordinator does; if Redis is reachable, the view of the others is ready on return."""
        info = super().register(address)
        if self._registered:
            self.poll()
        return info

    def poll(self) -> None:
        """Fetch the registrations and read all logs now, as far as Redis can be reached."""
        with suppress(StoreUnavailable):
            self.reader.refresh()

    def _num_script_reloads(self) -> int:
        return self._redis.connection.num_script_reloads

    def _loops(self) -> list[Loop]:
        return [self._loop, self._reader_loop]
