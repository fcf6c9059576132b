"""A coordinator over a store in memory, shared by replicas of one process.

Without a shared store the replica is alone: it needs no lease and no journal, and starts no thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.coordination.coordinator import Coordinator
from radixkv.coordination.settings import Settings, check_published_block_size
from radixkv.coordination.store.memory import MemoryStore
from radixkv.coordination.values import ReplicaInfo, Writer
from radixkv.coordination.view.reader import Known
from radixkv.errors import StoreUnavailable

if TYPE_CHECKING:
    from radixkv.index.changes import Journal


class MemoryCoordinator(Coordinator):
    """A coordinator over a MemoryStore; without a store, of a replica that is alone."""

    def __init__(self, settings: Settings, store: MemoryStore | None = None) -> None:
        if store is not None:
            check_published_block_size(settings.block_size)
        self._is_alone = store is None
        shared = MemoryStore() if store is None else store
        super().__init__(settings, shared, shared.clock)

    @property
    def journal(self) -> Journal | None:
        """The journal that the cache reports its changes to; None if alone."""
        return None if self._is_alone else self._publisher

    def info(self) -> ReplicaInfo:
        """Return the ReplicaInfo of this replica; if it is alone, its lease never runs out."""
        info = super().info()
        if self._is_alone and self._registered:
            return replace(info, live=True, lease_remaining_s=self.settings.lease_s)
        return info

    @property
    def knows_generations(self) -> bool:
        """Whether every purge is known here; always true for a replica that is alone."""
        return self._is_alone or super().knows_generations

    @property
    def store_id(self) -> str:
        """The id of the store; empty for a replica that is alone."""
        return "" if self._is_alone else super().store_id

    def _start_threads(self) -> None:
        if not self._is_alone:
            super()._start_threads()

    def _others(self) -> list[Known]:
        """Return the other replicas.

        The list is always current: the store is an object of this process and never waits.
        """
        with suppress(StoreUnavailable):
            self.reader.refresh()
        return self.reader.known()

    def _living(self, replica_ids: Sequence[str]) -> set[Writer]:
        return {self._writer} if self._is_alone else super()._living(replica_ids)
