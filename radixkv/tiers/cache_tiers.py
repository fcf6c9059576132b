"""Tiers below the cache of any engine: what it commits is kept, and comes back by ``Sequence.loading``.

    commit            CacheTiers.keep     new whole blocks → host memory, while it has free slots
    eviction          LowerTiers.leave    blocks that leave → host memory, unless their copy is there
    Sequence.loading  CacheTiers.begin    a ``TierLoading``: host memory → blocks
    purge, clear, …   LowerTiers          reaches every tier

``LowerTiers`` serves an engine that loads and saves by itself. Here the cache does it. All runs in the caller's thread
and on its stream, so it is in order with what the engine computes. A copy to host memory costs the bytes of the new
blocks, a copy back those of the loaded ones.

A disk's thread also ends loads whose sequence was released, and that nobody asks any more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig, Namespace
from radixkv.errors import CapacityError, ConfigError
from radixkv.index.below import Part, Target
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.tiers.host.memory import Slots
from radixkv.tiers.loading import Put, TierLoading
from radixkv.tiers.lower_tiers import LowerTiers
from radixkv.tiers.record_reader import RecordReader
from radixkv.tiers.settings import UNCACHED_SALT, DiskOptions, TierSettings

if TYPE_CHECKING:
    import torch

    from radixkv.storage.device import BlockStorage
    from radixkv.storage.plan import BlockIds


class CacheTiers(LowerTiers):
    """The tiers below a cache with this configuration and storage. ``CacheConfig.tier_dtype`` says how they keep KV.

    ``fingerprint``: of what computes the KV. ``clock``: the cache's, for the policy of host memory. Any thread may use
    it. Raises ConfigError without a storage, and as LowerTiers.
    """

    keeps_commits = True

    def __init__(
        self,
        config: CacheConfig,
        storage: BlockStorage | None,
        disk: DiskOptions | None = None,
        fingerprint: str = "",
        clock: Clock = monotonic,
    ) -> None:
        if storage is None:
            allowed = "0 without a layout or a storage: the cache must copy the blocks"
            raise ConfigError("host_blocks", config.host_blocks, allowed)
        super().__init__(
            storage,
            TierSettings(0, disk, config.host_blocks, config.tier_dtype),
            fingerprint,
            policy=config.policy,
            always_scrubs=config.scrub == "always",
            policy_clock=clock,
        )
        self.reader = None if self.disk is None else RecordReader(self.disk, storage.block_size, self._clock)
        self._loadings: WeakSet[TierLoading] = WeakSet()

    # --- Below

    def keep(self, tenant: str, take: Callable[[], Part | None]) -> None:
        """See ``Below``. Costs the bytes of new blocks; O(tokens) without one."""
        self._cleaner.used()
        with self.gate:
            mark = self.mark(tenant)  # before the part is taken: a later purge or clear changes it
            if self._is_shut or mark is None or tenant in self._unkept:
                return
            with self._guarded():
                part = take()
                if part is None:
                    return
                try:
                    self._keep(part, mark)
                finally:
                    part.release()

    def _keep(self, part: Part, mark: int) -> None:
        namespace = part.namespace
        if not self.keeps(namespace):
            return
        self.level.save_key(
            namespace,
            self.level.cache.generation(namespace.tenant),
            part.key,
            lambda: part.block_ids,
            lambda: self.mark(namespace.tenant) == mark,
        )
        self._run()

    def may_have(self, namespace: Namespace, key: bytes) -> bool:
        """See ``Below``. O(nodes on the path), and with a disk a hash of the key."""
        last = len(key) // (self._size * TOKEN_BYTES) - 1
        if self.level.index.reach(namespace, key, last) > last:
            return True
        disk = self.disk
        if disk is not None:
            with self.gate, self._guarded():
                return disk.promotions.may_have(namespace, key)
        return False

    def begin(self, target: Target) -> TierLoading | None:
        """See ``Below``. O(tokens)."""
        namespace = target.namespace
        with self.gate:
            mark = self.mark(namespace.tenant)
            if mark is None or not self.keeps(namespace):
                return None
            with self._guarded():
                size = self._size
                stop = self.level.index.reach(namespace, target.key, target.num_committed // size)
                loading = TierLoading(self, target, mark, stop, size, self._clock)
                try:
                    if loading.begin():
                        self._loadings.add(loading)
                        return loading
                except BaseException:
                    loading.end()  # whoever keeps the error keeps the loading too
                    raise
        return None

    def has(self, namespace: Namespace) -> bool:
        """See LowerTiers. The weights are those of each namespace."""
        return not namespace.salt.startswith(UNCACHED_SALT)

    def is_current(self, mark: int, tenant: str) -> bool:
        """Whether nothing of a tenant was purged, cleared or found wrong since the mark."""
        return not self._is_shut and self.mark(tenant) == mark

    # --- Source, within the gate

    def safely(self, call: Callable[[], None]) -> bool:
        """See ``Source``."""
        is_good = False
        with self._guarded():
            call()
            is_good = True
        return is_good

    def load_from_host(self, namespace: Namespace, key: bytes, start: int, put: Put) -> None:
        """See ``Source``."""
        try:
            lease = self.level.cache.match_and_lease(namespace, key)
        except CapacityError:  # all of it is in use
            return
        index = self.level.index
        with lease, self._timed():
            entries = lease.block_ids[start:].astype(np.int64)
            slots = index.filled_slots(entries)
            index.use(slots)
            try:
                blocks = self._load(slots, start, put)
                num_loaded = len(blocks)
                is_same = index.slots_of(entries[:num_loaded]) == slots[:num_loaded]
                index.loaded(entries[:num_loaded][is_same], blocks[is_same])
            finally:
                index.unuse(slots)

    def row_copy(self, row: int) -> Callable[[BlockIds], None]:
        """See ``Source``."""
        return partial(self.memory.put, self.memory.stage_row(row))

    def _load(self, slots: Slots, start: int, put: Put) -> Slots:
        """Put slots, which are in use, into blocks from block ``start`` on, and return the ids of these.

        Others enter the gate between parts, and may purge what is loaded: then ``put`` refuses.
        """
        step, found = self.slice_blocks, [np.empty(0, np.int64)]

        def copy(staged: list[torch.Tensor], block_ids: BlockIds) -> None:
            self.memory.put(staged, block_ids)
            found.append(block_ids.astype(np.int64))

        try:
            for at in range(0, len(slots), step):
                if at:
                    with self.gate.outside():
                        pass
                staged = self.memory.stage(slots[at : at + step])
                stop = min(at + step, len(slots))
                if not put(start + at, start + stop, partial(copy, staged)):
                    break
        finally:
            self.memory.counts["loaded_blocks"] += sum(map(len, found))
            self._take_counts()
        return np.concatenate(found)

    # --- the disk's thread

    def tick(self) -> None:
        """See LowerTiers. Also ends loads that don't go on."""
        super().tick()
        self._sweep()

    def close(self) -> None:
        """See LowerTiers. Loads end."""
        with self.moving():
            for loading in list(self._loadings):
                loading.end()
            self._sweep()
        super().close()

    def _sweep(self) -> None:
        if self.reader is not None:
            for loading in list(self._loadings):
                loading.sweep()
            self.reader.sweep()
