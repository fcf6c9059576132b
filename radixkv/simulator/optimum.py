"""The offline optimum: an upper bound for all policies that don't know the future.

**Why it is exact.** A request that uses a block also uses the block's parent. So a parent's next use is never later
than its child's. The rule evicts the block with the farthest next use, and on ties the deepest one. That block is
always a leaf. So the rule of Belady (1966) for single blocks, which is optimal for equal blocks, never breaks a
prefix.

Leases don't change that. Between now and the earlier of two next uses neither block is leased, so the exchange
argument that proves the rule still holds. And the trace alone decides which blocks are leased, and which requests
don't fit.

Two variants differ in the treatment of running requests:

- *Without bypass* (``optimum``): a request's blocks are all resident while it runs, as in a real cache. Only blocks
  without a lease are evicted for them.
- *With bypass* (``optimum_bypass``): a request may run outside of the cache. Its blocks are kept only if their next use
  is earlier than that of others. No request is refused, and leases don't prevent eviction.

The result with bypass bounds policies that may reject blocks (``admit``). It is exact if requests take no time or
have no answers. Otherwise the rule may keep blocks of an answer without the blocks before them. No cache can do that,
so the bound may not be reachable.

The result without bypass has one exception too. If the same answer is generated again, it uses its blocks without a
hit, and the rule counts that as a use. The result is exact if all answers are new, as in every trace without equal
requests.

Cost: O(uses × log uses), O(uses) memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.simulator.trace import Outcome, Trace, events


class Step(NamedTuple):
    """The start of a request that uses ``trace.blocks[low:high]``, or its end, with the answer's blocks."""

    number: int
    ends: bool
    low: int
    high: int


def optimum(trace: Trace, capacity: int, *, bypass: bool = False) -> Outcome:
    """Return the largest possible number of hit blocks of a cache of ``capacity`` blocks."""
    steps = list(_steps(trace))
    if bypass:
        return _Bypass(trace, capacity, steps).run()
    return _Optimum(trace, capacity, list(_feasible(trace, capacity, steps))).run()


def _steps(trace: Trace) -> Iterator[Step]:
    splits = (trace.starts[:-1] + trace.num_prompt_blocks).tolist()
    starts = trace.starts.tolist()
    for number, ends in events(trace):
        yield (
            Step(number, True, splits[number], starts[number + 1])
            if ends
            else Step(number, False, starts[number], splits[number])
        )


def _feasible(trace: Trace, capacity: int, steps: list[Step]) -> Iterator[Step]:
    """Yield the steps without requests that don't fit beside the leased blocks. Answers that don't fit are dropped.

    Which ones fit doesn't depend on the policy, because each running request leases its whole path.
    """
    blocks = trace.blocks.tolist()
    leases: Counter[int] = Counter()
    held: dict[int, list[int]] = {}
    for step in steps:
        path = blocks[step.low : step.high]
        fits = len(leases) + sum(block not in leases for block in path) <= capacity
        if not step.ends:
            if fits:
                held[step.number] = path
                leases.update(path)
                yield step
        elif step.number in held:
            yield step if fits else step._replace(high=step.low)
            for block in held.pop(step.number):
                leases[block] -= 1
                if not leases[block]:
                    del leases[block]


class _Belady:
    """Base of both variants: the order of eviction, by a use of each block.

    A *use* is a position in ``trace.blocks``. ``rank`` orders the uses by the next use of the same block, the
    farthest first, then by depth, the deepest first. So the heap holds small integers. One is valid while it is its
    block's ``entry``.
    """

    keeps_for_answers: ClassVar[bool] = True
    """Whether an answer that is generated again counts as a use of its blocks."""

    def __init__(self, trace: Trace, capacity: int, steps: list[Step]) -> None:
        self.capacity, self.steps = capacity, steps
        self.blocks: list[int] = trace.blocks.tolist()
        order = _farthest_first(trace, steps, self.keeps_for_answers)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        self.rank: list[int] = rank.tolist()
        self.block_at: list[int] = trace.blocks[order].tolist()
        self.resident = bytearray(trace.num_different_blocks)
        self.num_resident = 0
        self.entry = [-1] * trace.num_different_blocks
        self.heap: list[int] = []
        self.hits = np.zeros(len(trace), np.int64)
        self.evicted = 0

    def run(self) -> Outcome:
        """Run all steps in order."""
        for step in self.steps:
            if not step.ends:
                self.hits[step.number] = self.matched(step)
            self.step(step)
        started = sum(not step.ends for step in self.steps)
        return Outcome(self.hits, len(self.hits) - started, self.evicted)

    def step(self, step: Step) -> None:
        raise NotImplementedError

    def matched(self, step: Step) -> int:
        """Number of resident blocks of the path, up to the first missing one."""
        resident = self.resident
        path = self.blocks[step.low : step.high]
        return next((at for at, block in enumerate(path) if not resident[block]), len(path))

    def enter(self, use: int) -> None:
        """Make the block of this use evictable, ordered by its next use."""
        rank = self.rank[use]
        self.entry[self.blocks[use]] = rank
        heappush(self.heap, rank)

    def evict(self) -> None:
        """Evict the first block in the order."""
        while True:
            rank = heappop(self.heap)
            block = self.block_at[rank]
            if self.entry[block] == rank:
                self.entry[block] = -1
                self.resident[block] = 0
                self.num_resident -= 1
                self.evicted += 1
                return


class _Optimum(_Belady):
    """Without bypass: a request's blocks are resident and leased from its start to its end."""

    def __init__(self, trace: Trace, capacity: int, steps: list[Step]) -> None:
        super().__init__(trace, capacity, steps)
        self.leases = [0] * len(self.entry)
        self.last_use = [-1] * len(self.entry)
        self.started: dict[int, Step] = {}

    def step(self, step: Step) -> None:
        """At a start, make space and lease the path. At an end, make space for the answer, then release everything."""
        self._lease(step)
        if not step.ends:
            self.started[step.number] = step
        else:
            self._release(step)
            self._release(self.started.pop(step.number))

    def _lease(self, step: Step) -> None:
        path = self.blocks[step.low : step.high]
        for use, block in enumerate(path, step.low):
            self.leases[block] += 1
            self.entry[block] = -1
            self.last_use[block] = use
        new = [block for block in path if not self.resident[block]]
        for _ in range(self.num_resident + len(new) - self.capacity):
            self.evict()
        for block in new:
            self.resident[block] = 1
        self.num_resident += len(new)

    def _release(self, step: Step) -> None:
        for block in self.blocks[step.low : step.high]:
            self.leases[block] -= 1
            if not self.leases[block]:
                self.enter(self.last_use[block])


class _Bypass(_Belady):
    """With bypass: of all resident and newly computed blocks, those with the nearest next uses stay."""

    keeps_for_answers = False

    def matched(self, step: Step) -> int:
        """Number of resident blocks of the path. Blocks of an answer count even if an earlier block is missing."""
        resident = self.resident
        return sum(resident[block] for block in self.blocks[step.low : step.high])

    def step(self, step: Step) -> None:
        """Keep all blocks of the step, then evict down to the capacity."""
        for use in range(step.low, step.high):
            block = self.blocks[use]
            if not self.resident[block]:
                self.resident[block] = 1
                self.num_resident += 1
            self.enter(use)
        for _ in range(self.num_resident - self.capacity):
            self.evict()


def _farthest_first(trace: Trace, steps: list[Step], keeps_for_answers: bool) -> NDArray[np.int64]:
    """Order all uses by the next use of their block, the farthest or never first; on ties the deepest first."""
    never = len(steps)
    step_of = np.full(len(trace.blocks), never, np.int64)
    for index, step in enumerate(steps):
        step_of[step.low : step.high] = index
    by_block = np.lexsort((step_of, trace.blocks))
    after = np.full(len(by_block), never, np.int64)
    same = trace.blocks[by_block[1:]] == trace.blocks[by_block[:-1]]
    after[by_block[:-1][same]] = step_of[by_block[1:][same]]
    if not keeps_for_answers:
        ends = np.array([*(step.ends for step in steps), False])
        after[ends[after]] = never
    depth = np.arange(len(trace.blocks)) - np.repeat(trace.starts[:-1], np.diff(trace.starts))
    return np.lexsort((-depth, -after))
