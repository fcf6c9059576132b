"""CacheState: everything that the lock of a cache guards.

``PrefixCache`` is this class with the methods that users call. The modules of the index work on the state under its
lock: ``requests``, ``purge``, ``recovery``, ``snapshot``, ``device_beams``, ``tenant_settings``. Code outside the index
never writes its attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from radixkv import _compiled
from radixkv._compiled import mypyc_attr
from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig, resolve
from radixkv.errors import ConfigError
from radixkv.index.bases import BaseInfo, Bases
from radixkv.index.blocks import BlockPool
from radixkv.index.cachelock import CacheLock
from radixkv.index.changes import Journal, Recorder
from radixkv.index.endings import Endings
from radixkv.index.eviction import Evictor
from radixkv.index.holders import LeaseState, Lending, SequenceState
from radixkv.index.locking import Held, SourceLock
from radixkv.index.maintenance import Maintenance
from radixkv.index.pins import Pins
from radixkv.index.registry import Registry
from radixkv.index.residency import Claims
from radixkv.index.runs import Runs
from radixkv.index.scrubbing import ENGINE, Scrubber, ScrubBlocks
from radixkv.index.tenants import TenantState
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.uncopied import refuse_copies
from radixkv_policies import Policy

if TYPE_CHECKING:
    from radixkv.index.below import Below
    from radixkv.storage.device import BlockStorage


class Damage:
    """What an interrupted call worked on. Filled by plain assignments, which need no memory.

    ``error`` interrupted the call. If it is a refusal, the call changed nothing. ``is_known`` is false if a second
    interruption came before the other fields were filled. Then every sequence and lease may be affected.
    """

    __slots__ = ("error", "is_known", "lease", "lent", "num_failed", "others", "sequences")

    def __init__(self) -> None:
        self.num_failed = 0
        self.clear()

    def clear(self) -> None:
        """Reset to no damage."""
        self.error: BaseException | None = None
        self.is_known = False
        self.sequences: SequenceState | Iterable[SequenceState] | None = None
        self.others: Iterable[SequenceState] = ()
        self.lease: LeaseState | None = None
        self.lent: bytes | bytearray = b""


@mypyc_attr(allow_interpreted_subclasses=True)
class CacheState:
    """The state of one cache. See ``PrefixCache`` for the arguments."""

    def __init__(
        self,
        config: CacheConfig,
        clock: Clock,
        journal: Journal | None,
        scrub_blocks: ScrubBlocks,
        storage: BlockStorage | None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._segment_blocks = config.segment_blocks
        self._block_size = config.block_size
        self._block_bytes = config.block_size * TOKEN_BYTES
        self._storage = storage
        self._below: Below | None = None
        self._lock = _make_lock()
        self._damage = Damage()
        self._scrubber = _make_scrubber(config, storage, scrub_blocks)
        self._pool = BlockPool(
            config.num_blocks,
            self._scrubber,
            is_deferred=storage is None,
            is_engines=config.blocks == "engine",
        )
        self._tenants: dict[str, TenantState] = {}
        self._evictor = Evictor(self._pool, self._tenants, config.block_size, journal, config.segment_blocks)
        if storage is not None and storage.fences is not None:
            self._evictor.on_hand_out = storage.join
        self._journal = journal
        self._sequences: set[SequenceState] = set()
        self._computing: dict[SequenceState, None] = {}
        self._steps: dict[int, dict[SequenceState, None]] = {}
        self._leases: set[LeaseState] = set()
        self._lendings: set[Lending] = set()
        self._bases = Bases(self._block_bytes)
        self._publishing = self._bases.publishing
        self._runs = Runs(self._pool, self._evictor, self._block_bytes)
        self._recorder = Recorder()
        self._pins = Pins(clock, self._evictor, self._leases)
        self._claims = Claims(clock)
        self._endings = Endings()
        self._maintenance = Maintenance(self._lock, self._tenants, self._pins, self._claims)
        self._registry = Registry(
            config,
            clock,
            self._tenants,
            self._evictor,
            self._bases,
            self._scrubber,
            self._maintenance,
            self._block_bytes,
        )
        if clock is monotonic and resolve("policy", config.policy).maintain is not Policy.maintain:
            self._maintenance.start()

    def __repr__(self) -> str:
        config, standing = self._config, "broken" if self.is_broken else ""
        if self.is_dead:
            standing = "dead" if self._lock.death is not None else "closed by a fork"
        if standing:
            return f"<PrefixCache, {standing}>"
        blocks = f"{self._pool.num_free} of {config.num_blocks} blocks free"
        return f"<PrefixCache: {blocks}, {len(self._sequences)} sequences, {len(self._tenants)} tenants>"

    @property
    def config(self) -> CacheConfig:
        """The configuration that the cache was made with."""
        return self._config

    @property
    def storage(self) -> BlockStorage | None:
        """The block storage: a DeviceStorage if there is a layout, None if the engine executes ``flush`` itself."""
        return self._storage

    @property
    def below(self) -> Below | None:
        """What lies below it, if anything, for the audit."""
        return self._below

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken without an eviction; with ``blocks="engine"``, those to reclaim. O(1), no lock."""
        return self._pool.num_free

    @property
    def evictable_blocks(self) -> int:
        """Resident blocks that no lease protects. O(1), no lock."""
        return self._evictor.evictable_blocks

    @property
    def resident_blocks(self) -> int:
        """Blocks that a match can reach. O(1), no lock."""
        return self._evictor.resident_blocks

    @property
    def endings(self) -> Endings:
        """When what was forgotten: see ``open(as_of=…)``."""
        return self._endings

    def tenants(self) -> list[str]:
        """Return the tenants that the cache has seen."""
        with self._lock:
            return list(self._tenants)

    def bases(self) -> list[BaseInfo]:
        """Return all bases, also those that are being computed. For the operator: don't show one tenant the other
        readers.
        """
        with self._lock:
            return self._bases.infos()

    @property
    def is_dead(self) -> bool:
        """Whether no call works any more.

        Either the cache's state couldn't be repaired after an error, and every call raises IntegrityError. Or this
        process was forked from the one that made the cache, and every call raises ClosedByFork.
        """
        return self._lock.is_over

    @property
    def is_broken(self) -> bool:
        """Whether the cache is dead, or the next call must repair its state before it does anything."""
        return self._lock.broken is not None or self.is_dead

    def require_alive(self) -> None:
        """Raise IntegrityError or ClosedByFork if the cache is dead, and ReentrantCall in one of its callbacks."""
        with self._lock:
            pass

    def _repair(self) -> None:
        """Make the state whole before a call. For the lock. Raises IntegrityError."""
        raise NotImplementedError("PrefixCache does this")

    def _give_up(self, held: Held) -> None:
        """Release what a finaliser gave up, unless it is released already. For the lock."""
        raise NotImplementedError("PrefixCache does this")

    def _end_due(self) -> None:
        """End expired pins, in slices, and expired announcements. For maintenance. O(what has expired)."""
        raise NotImplementedError("PrefixCache does this")


refuse_copies(CacheState, "it owns its blocks. Make another from its config")


def _make_lock() -> CacheLock:
    """Make a lock for a cache, for the running build."""
    return CacheLock() if _compiled.is_compiled else cast(CacheLock, SourceLock())


def _make_scrubber(
    config: CacheConfig, storage: BlockStorage | None, scrub_blocks: ScrubBlocks | None
) -> Scrubber | None:
    """Make the scrubber of a cache. None if nothing can zero its blocks, or no zeroing is set. Raises ConfigError."""
    if scrub_blocks is not None and not callable(scrub_blocks):
        raise ConfigError("scrub_blocks", scrub_blocks, "a function of int32 block ids, or None")
    if scrub_blocks is not None and storage is not None:
        raise ConfigError(
            "scrub_blocks", scrub_blocks, "None with a layout or a storage, which zeroes its blocks itself"
        )
    zero: Any = scrub_blocks if storage is None else storage.scrub
    if zero is None and config.scrub == "always":
        allowed = (
            "'cross-tenant' or 'never' unless there is a layout, a storage or scrub_blocks of the engine's"
        )
        raise ConfigError("scrub", config.scrub, allowed)
    if zero is None or config.scrub == "never":
        return None
    scrubber = Scrubber(config.num_blocks, zero, config.scrub)
    if storage is not None and config.layout is None:  # an engine's tensors may contain any data
        scrubber.filled(np.arange(config.num_blocks, dtype=np.int32), ENGINE)
    return scrubber
