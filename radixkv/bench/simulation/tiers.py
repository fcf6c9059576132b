"""Replay of a trace through a cache with tiers below it: host memory, then disk.

The cache is the real one (``replay``), and each tier is the table of slots that the disk tier uses
(``radixkv.tiers.slots``). One record is one block of the trace.

    request    what the device has; then, block by block in a row, what the host or the disk has
    eviction   a block that leaves the device goes to the host, and one that leaves the host goes to the disk
    copies     a block that comes back keeps its copy below (keep-copy), so its next eviction writes nothing

    budget     with one, the disk takes only what ``radixkv.tiers.write_budget`` chose when a request came

A block that leaves the device while the host has its copy counts there as just used. The deepest blocks of an evicted
prefix go first, so the shallowest leave a tier last. Loads and copies take no time here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.bench.simulation.replay import Replay
from radixkv.bench.simulation.trace import Trace
from radixkv.config import Namespace, resolve
from radixkv.index.tokens import TOKEN_BYTES, Key
from radixkv.tiers.slots import SlotTable
from radixkv.tiers.write_budget import Point, WriteBudget, kind_of, point_positions

_OWNER = b"all"
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


def replay_tiers(
    trace: Trace,
    policy: str,
    capacity: int,
    host_blocks: int,
    disk_blocks: int,
    seed: int = 0,
    *,
    disk_writes: float | None = None,
) -> TieredOutcome:
    """Return the hits of a cache of ``capacity`` blocks over tiers of these sizes; 0: no such tier. O(blocks).

    ``disk_writes``: blocks a second that the disk may be written on average; None for no bound.
    """
    below = _Below(host_blocks, disk_blocks, disk_writes)
    run = _TieredReplay(trace, policy, capacity, seed, below)
    hits = run.run().hit_blocks
    return TieredOutcome(hits, run.host_hits, run.disk_hits, below.host.num_writes, below.disk.num_writes)


class _Tier:
    """One tier: its table, and how many blocks were written to it."""

    def __init__(self, num_blocks: int, below: _Tier | None, chosen: set[bytes] | None = None) -> None:
        self.table = SlotTable(num_blocks)
        self._chosen = chosen
        self.num_writes = 0
        self._below = below

    def find(self, locator: bytes) -> bool:
        """Whether it has a block, which then counts as just used."""
        slot = self.table.find(locator)
        if slot is not None:
            self.table.touch(slot)
        return slot is not None

    def put(self, locator: bytes) -> None:
        """Take a block from the tier above, and give the one that leaves for it to the tier below."""
        if self.find(locator):
            return
        if self._chosen is not None:
            if locator not in self._chosen:
                return
            self._chosen.remove(locator)
        leaving = self.table.victim(_OWNER)
        if self._below is not None and leaving is not None:
            self._below.put(self.table.entry(leaving).locator)
        slot = self.table.take(locator, _OWNER)
        if slot is None:  # a tier of no size: the block goes on
            if self._below is not None:
                self._below.put(locator)
            return
        self.table.seal(slot)
        self.num_writes += 1


class _Below:
    """The tiers, which hear from the cache's journal what leaves the device."""

    grain_tokens = 1

    def __init__(self, host_blocks: int, disk_blocks: int, disk_writes: float | None) -> None:
        self.budget = None if disk_writes is None else WriteBudget(disk_writes, disk_blocks)
        self.chosen: set[bytes] = set()
        self.disk = _Tier(disk_blocks, None, None if self.budget is None else self.chosen)
        self.host = _Tier(host_blocks, self.disk)

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """The tiers keep their copies of what comes back."""

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Blocks leave the device: the deepest goes first."""
        whole = key if isinstance(key, bytes) else b"".join(key)
        for at in range(stop - 1, start - 1, -1):
            self.host.put(whole[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES])

    def has_chosen(self, locator: bytes) -> bool:
        """Whether the disk has a block, or will take it."""
        return locator in self.chosen or self.disk.table.find(locator) is not None

    def cleared(self, namespace: Namespace) -> None:
        """No trace clears a namespace."""


class _TieredReplay(Replay):
    def __init__(self, trace: Trace, policy: str, capacity: int, seed: int, below: _Below) -> None:
        super().__init__(trace, resolve("policy", policy), capacity, seed, journal=below)
        self._below, self._times = below, trace.times
        self.host_hits = np.zeros(len(trace), np.int64)
        self.disk_hits = np.zeros(len(trace), np.int64)

    def about_to_open(self, number: int, namespace: Namespace, key: bytes) -> None:
        """Count what the tiers have behind what the device has, before the request evicts anything."""
        matched = self.cache.match(namespace, key).num_tokens
        blocks = [key[at : at + TOKEN_BYTES] for at in range(0, len(key), TOKEN_BYTES)]
        for locator in blocks[matched:]:
            if self._below.host.find(locator):
                self.host_hits[number] += 1
            elif self._below.disk.find(locator):
                self.disk_hits[number] += 1
            else:
                break
        if self._below.budget is not None:
            in_memory = matched + int(self.host_hits[number])
            known = in_memory + int(self.disk_hits[number])
            self._choose(self._below.budget, namespace.tenant, blocks, in_memory, known, self._times[number])

    def _choose(
        self, budget: WriteBudget, tenant: str, blocks: list[bytes], in_memory: int, known: int, now: float
    ) -> None:
        """Ask the budget what the disk level asks it: which blocks a prompt needs, has found, and will compute."""
        budget.asked(tenant, _points(blocks, in_memory, len(blocks)))
        offers = [(known, len(blocks), False)]
        if in_memory and not self._below.has_chosen(blocks[in_memory - 1]):
            offers.insert(0, (0, in_memory, True))
        for first, stop, is_used in offers:
            new = [each for each in blocks[first:stop] if not self._below.has_chosen(each)]
            kind = kind_of(is_used=is_used, continues=known > 0, num_blocks=len(blocks))
            points = _points(blocks, first, stop)
            if new and budget.offered(tenant, kind, points, len(new), len(new), now):
                for at in range(0, len(new), _AT_ONCE):
                    part = new[at : at + _AT_ONCE]
                    if not budget.spend(tenant, len(part), now):
                        break
                    self._below.chosen.update(part)


def _points(blocks: list[bytes], first: int, stop: int) -> list[Point]:
    """Return the points of a prompt in blocks ``(first, stop]``. An id of the trace stands for a whole prefix."""
    return [Point(blocks[at - 1], num_blocks) for at, num_blocks in point_positions(first, stop)]
