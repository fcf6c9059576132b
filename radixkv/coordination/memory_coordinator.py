"""A coordinator over a store in memory, shared by replicas of one process.

Without a shared store the replica is alone: it needs no journal, and starts no thread. So nothing beats, and its one
beat, at its registration, states a lease without an end.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from radixkv.clock import Clock, monotonic
from radixkv.coordination.coordinator import Coordinator
from radixkv.coordination.settings import Settings, check_published_block_size
from radixkv.coordination.store.memory import MemoryStore
from radixkv.coordination.view.reader import Known
from radixkv.errors import StoreUnavailable

if TYPE_CHECKING:
    from radixkv.index.changes import Journal

_WITHOUT_END_S = 1e9


class MemoryCoordinator(Coordinator):
    """A coordinator over a MemoryStore; without a store, of a replica that is alone.

    ``clock``: for a replica that is alone; others have their store's.
    """

    def __init__(
        self, settings: Settings, store: MemoryStore | None = None, clock: Clock = monotonic
    ) -> None:
        if store is not None:
            check_published_block_size(settings.block_size)
        self._is_alone = store is None
        shared = MemoryStore(clock) if store is None else store
        super().__init__(settings, shared, shared.clock)

    @property
    def lease_s(self) -> float:
        """How long a beat counts: for ever if the replica is alone."""
        return _WITHOUT_END_S if self._is_alone else super().lease_s

    @property
    def journal(self) -> Journal | None:
        """The journal that the cache reports its changes to; None if alone."""
        return None if self._is_alone else self._publisher

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
