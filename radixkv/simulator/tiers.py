"""Replay of a trace through a cache with tiers below it: host memory, then disk.

The cache is the real one (``replay``), host memory has the index that serves (``radixkv.tiers.host.index``), and the
disk has the table of slots and the write budget of the disk tier. One record is one block of the trace.

    request    what the device has; then, block by block in a row, what the host or the disk has
    commit     the host knows the blocks, and copies them while it has free slots
    eviction   a block that leaves the device is copied to the host, unless its copy is still there
    disk       stores what the host copies; once it is full, what leaves the host, as far as ``leaving_slots`` lets it
    budget     with one (``radixkv.tiers.disk.write_budget``), the disk stores what the host copies, as far as the bytes
               go; and what a request finds in memory and the disk lacks

Without a host, the disk stores what leaves the device. Loads and copies take no time here; a full disk stores what left
the host for one request when the next one begins.

A request for which the device has no room begins when enough others have ended: here these end early. So only a prompt
that is larger than the device is refused.

A restart ends the requests that run, and begins with a new cache, host, policies and budget. The disk keeps its
records, and from then on evicts those first that were written first. A drain stores what the host has, then what the
device has, as ``DiskTier.close`` does. How long that takes isn't modelled: serving ends it after ``CLOSING_S``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.clock import Clock
from radixkv.config import Namespace, resolve
from radixkv.index.load_target import paths_of
from radixkv.index.tokens import TOKEN_BYTES, Key
from radixkv.simulator.replay import Replay
from radixkv.simulator.trace import Trace
from radixkv.tiers.disk.demotions import LeavingSlots
from radixkv.tiers.disk.slots import SlotTable
from radixkv.tiers.disk.write_budget import WriteBudget
from radixkv.tiers.host.index import HostIndex, Ids, Slots

_OWNER = b"all"
NO_ENTRIES = np.empty(0, np.int64)
_AT_ONCE = 64
"""Blocks for which the disk level asks the budget at once."""


class TieredOutcome(NamedTuple):
    """The result of a run. Hits: int64 ``[requests]``, in blocks; a block is counted in the first tier that has it.

    ``host_writes``, ``disk_writes``: blocks written to a tier in the whole run.
    """

    device_hits: NDArray[np.int64]
    host_hits: NDArray[np.int64]
    disk_hits: NDArray[np.int64]
    host_writes: int
    disk_writes: int


class Restart(NamedTuple):
    """A restart at a time in seconds: after a drain, or after a crash."""

    time_s: float
    drains: bool


def replay_tiers(
    trace: Trace,
    policy: str,
    capacity: int,
    host_blocks: int,
    disk_blocks: int,
    seed: int = 0,
    *,
    disk_writes: float | None = None,
    restart: Restart | None = None,
) -> TieredOutcome:
    """Return the hits of a cache of ``capacity`` blocks over tiers of these sizes; 0: no such tier. O(blocks).

    ``disk_writes``: blocks a second that the disk may be written on average; None for no bound.
    """
    disk = _Disk(disk_blocks, disk_writes)
    run = _TieredReplay(trace, policy, capacity, seed, host_blocks, disk, restart)
    hits = run.run().hit_blocks
    return TieredOutcome(hits, run.host_hits, run.disk_hits, run.host_writes, run.disk.num_writes)


def _blocks(key: bytes, start: int, stop: int) -> list[bytes]:
    """Return the ids of blocks ``[start, stop)``. An id of the trace stands for a whole prefix."""
    return [key[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES] for at in range(start, stop)]


class _Disk:
    """The disk: its table, its budget, and how many blocks were written to it."""

    def __init__(self, num_blocks: int, writes_per_s: float | None) -> None:
        self._num_blocks, self._writes_per_s = num_blocks, writes_per_s
        self.num_writes, self.now = 0, 0.0
        self._written: dict[bytes, None] = {}
        """All blocks that were written, in the order of their last writes."""
        self.open([])

    def open(self, records: list[tuple[int, bytes, bytes]]) -> None:
        """Begin with these records, the newest first, and a new budget."""
        self.table = SlotTable(self._num_blocks)
        self.table.restore(records)
        rate = self._writes_per_s
        self.budget = None if rate is None else WriteBudget(rate)

    def reopen(self) -> None:
        """Restart, with all records."""
        found = [(self.table.find(block), block) for block in reversed(self._written)]
        self.open([(slot, block, _OWNER) for slot, block in found if slot is not None])

    @property
    def stores_later(self) -> bool:
        """Whether it stores what leaves the host, and not what comes there. Not if there is none."""
        return self.budget is None and self.table.num_slots > 0 and not self.table.num_free

    def num_found(self, key: bytes, start: int) -> int:
        """Return how many blocks from ``start`` on it has in a row. They count as just used."""
        for num, block in enumerate(_blocks(key, start, len(key) // TOKEN_BYTES)):
            slot = self.table.find(block)
            if slot is None:
                return num
            self.table.touch(slot)
        return len(key) // TOKEN_BYTES - start

    def saved(self, blocks: list[bytes]) -> None:
        """The tier above has these blocks: take them, as far as the budget goes."""
        new = [each for each in blocks if self.table.find(each) is None]
        for at in range(0, len(new), _AT_ONCE):
            part = new[at : at + _AT_ONCE]
            if self.budget is not None and not self.budget.spend("", len(part), self.now):
                return
            self._put(part)

    def lacks(self, key: bytes, first: int) -> bool:
        """Whether it should have the blocks before ``first``, which a request found above, and hasn't the last one."""
        return (
            self.budget is not None
            and first > 0
            and self.table.find(_blocks(key, first - 1, first)[0]) is None
        )

    def _put(self, blocks: list[bytes]) -> None:
        for block in blocks:
            slot = None if self.table.find(block) is not None else self.table.take(block, _OWNER)
            if slot is not None:
                self.table.seal(slot)
                self.num_writes += 1
                self._written.pop(block, None)
                self._written[block] = None


class _Evictions:
    """The journal of the cache: the replay hears what leaves the device."""

    grain_tokens = 1

    def __init__(self) -> None:
        self.replay: _TieredReplay | None = None

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Commits are told by the replay."""

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Blocks leave the device."""
        assert self.replay is not None
        self.replay.leave(namespace, key if isinstance(key, bytes) else b"".join(key), start, stop)

    def cleared(self, namespace: Namespace) -> None:
        """No trace clears a namespace."""


class _TieredReplay(Replay):
    def __init__(
        self,
        trace: Trace,
        policy: str,
        capacity: int,
        seed: int,
        host_blocks: int,
        disk: _Disk,
        restart: Restart | None,
    ) -> None:
        self.disk, self._restart = disk, restart
        self._sizes = host_blocks, capacity, policy
        evictions = _Evictions()
        super().__init__(trace, resolve("policy", policy), capacity, seed, journal=evictions)
        evictions.replay = self
        self.host_hits = np.zeros(len(trace), np.int64)
        self.disk_hits = np.zeros(len(trace), np.int64)
        self.host_writes = 0

    def begin_empty(self) -> None:
        """See Replay. The host is new too."""
        super().begin_empty()
        self.host = _host(*self._sizes, self._clock)
        if self.host is not None:
            self.host.watch(self._leave_host, self._reserve_for)
        self._leaving, self._leaving_slots = NO_ENTRIES, LeavingSlots(self._sizes[0])
        """Slots that left the host for the present request; how many may."""
        self._loading: Ids = NO_ENTRIES
        """What the request that is about to open loads from the host."""

    def advanced(self) -> None:
        """Restart when it is time."""
        if self._restart is None or self._clock.now < self._restart.time_s:
            return
        for sequence in self._running.values():
            sequence.release()
        self._running.clear()
        if self._restart.drains:
            self.disk.now = self._clock.now
            self._drain()
        self.disk.reopen()
        self.begin_empty()
        self._restart = None

    def _drain(self) -> None:
        """Store what the host has and the disk lacks, then what only the device has."""
        host, on_device = self.host, paths_of(self.cache)
        if host is None:
            for namespace, key, blocks in on_device:
                self.leave(namespace, key, 0, len(blocks))
            return
        for _, key, entries in paths_of(host.cache):
            for start, stop in host.filled_ranges(entries):
                self._store(key, start, entries[start:stop])
        for _, key, blocks in on_device:
            self._store(key, 0, blocks)

    def maintain(self) -> None:
        """See Replay."""
        super().maintain()
        if self.host is not None:
            self.host.cache.maintain()

    def about_to_open(self, number: int, namespace: Namespace, key: bytes) -> None:
        """Count what the tiers have behind what the device has, before the request evicts anything."""
        self._make_way(len(key) // TOKEN_BYTES)
        self._end_leaving()
        self.disk.now = self._clock.now
        resident = self.cache.match(namespace, key).num_tokens
        reach = resident if self.host is None else self.host.reach(namespace, key, resident)
        self.host_hits[number] = reach - resident
        self._loading = NO_ENTRIES
        is_lacking = self.disk.lacks(key, reach)
        self.disk_hits[number] = self.disk.num_found(key, reach)
        if self.host is not None and (reach > resident or is_lacking):
            with self.host.cache.match_and_lease(namespace, key[: reach * TOKEN_BYTES]) as lease:
                entries = lease.block_ids
                self._loading = entries[resident:]
                if is_lacking:
                    for start, stop in self.host.filled_ranges(entries):
                        self._store(key, start, entries[start:stop])

    def _make_way(self, num_blocks: int) -> None:
        """End requests early, those that end first, until so many blocks fit beside what the others hold."""
        room = self.cache.config.num_blocks - num_blocks
        while self._running and sum([each.num_tokens for each in self._running.values()]) >= room:
            self._end(min(self._running, key=self._ends_at.__getitem__))

    def committed(self, namespace: Namespace, key: bytes) -> None:
        """The host knows the blocks, and copies them while it has free slots."""
        host, stop = self.host, len(key) // TOKEN_BYTES
        if host is None:
            return
        host.loaded(self._loading)
        self._loading = NO_ENTRIES
        first = host.cache.match(namespace, key).num_tokens
        if first == stop:
            host.touch(namespace, key)
        if first == stop or not host.know(namespace, key):
            return
        entries = host.cache.match(namespace, key).block_ids[first:].astype(np.int64)
        copied = entries[: len(host.give(namespace.tenant, entries, may_evict=False))]
        host.filled(copied)
        host.loaded(copied)
        self._copied(namespace, key, first, copied)

    def leave(self, namespace: Namespace, key: bytes, start: int, stop: int) -> None:
        """Blocks leave the device."""
        self.disk.now = self._clock.now
        host, key = self.host, key[: stop * TOKEN_BYTES]
        if host is None:
            self.disk.saved(_blocks(key, start, stop))
            return
        known = host.cache.match(namespace, key).block_ids[start:]
        if len(known) == stop - start and host.num_filled(known) == len(known):
            host.demoted(known)
            return
        lease = host.hold(namespace, key)
        if lease is not None:
            with lease:
                entries = lease.block_ids[start:].astype(np.int64)
                host.demoted(entries)
                at = host.lacking(entries)
                copied = entries[at[: len(host.give(namespace.tenant, entries[at], may_evict=True))]]
                host.filled(copied)
            if len(copied):
                self._copied(namespace, key, start + int(at[0]), copied)

    def _copied(self, namespace: Namespace, key: bytes, first: int, entries: Slots) -> None:
        """The host has copied entries of a key, from block ``first`` on."""
        self.host_writes += len(entries)
        if not self.disk.stores_later:
            self._store(key, first, entries)

    def _store(self, key: bytes, first: int, entries: Ids) -> None:
        self.disk.saved(_blocks(key, first, first + len(entries)))

    def _reserve_for(self, tenant: str, num_blocks: int, num_slots: int) -> int:
        self._leaving_slots.given(num_blocks, num_slots)
        return self._leaving_slots.reserve if self.disk.stores_later else 0

    def _leave_host(self, namespace: Namespace, key: bytes, first: int, slots: Slots) -> None:
        """A full disk stores what leaves the host. The slots stay in use until ``_end_leaving``."""
        if self.disk.stores_later and self.host is not None:
            slots = slots[: self._leaving_slots.room]
            self.host.use(slots)
            self._leaving_slots.add(len(slots))
            self._leaving = np.append(self._leaving, slots)
            self.disk.saved(_blocks(key, first, first + len(slots)))

    def _end_leaving(self) -> None:
        """The disk has stored what left the host."""
        if self.host is not None:
            self.host.unuse(self._leaving)
            self._leaving_slots.add(-len(self._leaving))
            self._leaving = NO_ENTRIES


def _host(num_blocks: int, capacity: int, policy: str, clock: Clock) -> HostIndex | None:
    """Return the index of host memory, as below a cache of ``capacity`` blocks."""
    if not num_blocks:
        return None
    return HostIndex(num_blocks, 1, num_above=capacity + 1, policy=policy, clock=clock, segment_tokens=1)
