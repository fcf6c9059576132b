"""The offline optimum: what nobody who can't see the future can beat.

**Why it is exact.** A request that uses a block uses its parent, so a parent's next use is never later than its
child's. Evicting the block with the farthest next use, the deepest first on ties, therefore always takes a leaf: the
rule of Belady (1966) for single blocks, optimal for equal blocks, never breaks a prefix. Leases don't change that:
between now and the earlier of two next uses neither block is leased, so the exchange that proves the rule goes
through, and which blocks are leased, and which requests find no room at all, depends on the trace alone.

*Without bypass* (``optimum``) a request's blocks are all resident while it runs, as in a live cache: what is evicted
for them are blocks that nobody leases. *With bypass* (``optimum_bypass``) a request may run outside of the cache:
its blocks are kept only if their next use comes earlier than that of others, no request is refused, and leases
don't bind. It is the bound for policies that decline to keep (``admit``): exact where requests take no time or have no
answers. Where an answer comes later than its prompt, blocks of it may be kept although what stands before them wasn't.
No cache can do that, so there it is a bound, and not always reached.

One reservation about the first: an answer that comes out the same again uses its blocks without gaining tokens, and
the rule counts that as a use. Where all answers are new when they are generated, as in every trace without equal
requests, the result is exact.

Cost: O(uses × log uses), O(uses) memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.bench.simulation.trace import Outcome, Trace, events


class Step(NamedTuple):
    """A request starts, using the blocks ``trace.blocks[low:high]``; or it ends, and these are its answer's."""

    number: int
    ends: bool
    low: int
    high: int


def optimum(trace: Trace, capacity: int, *, bypass: bool = False) -> Outcome:
    """The most hit blocks that a cache of ``capacity`` blocks can have."""
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
    """The steps without the requests that find no room beside what is leased; answers that find none are dropped.

    Which these are doesn't depend on the policy: what runs holds its path.
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
    """What both variants share: the order in which blocks go, by a use of each.

    A *use* is a position in ``trace.blocks``. ``rank`` orders the uses by the next use of the same block, farthest
    first, then the deepest first; so the heap holds small integers, valid while they are their block's ``entry``.
    """

    keeps_for_answers: ClassVar[bool] = True
    """An answer that comes out the same again is a use of its blocks."""

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
        """All steps in order."""
        for step in self.steps:
            if not step.ends:
                self.hits[step.number] = self.matched(step)
            self.step(step)
        started = sum(not step.ends for step in self.steps)
        return Outcome(self.hits, len(self.hits) - started, self.evicted)

    def step(self, step: Step) -> None:
        raise NotImplementedError

    def matched(self, step: Step) -> int:
        """Resident blocks of the path, from the first on."""
        resident = self.resident
        path = self.blocks[step.low : step.high]
        return next((at for at, block in enumerate(path) if not resident[block]), len(path))

    def enter(self, use: int) -> None:
        """The block of this use may go, in the order of its next use."""
        rank = self.rank[use]
        self.entry[self.blocks[use]] = rank
        heappush(self.heap, rank)

    def evict(self) -> None:
        """The block that goes first."""
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
        """Make room, then lease; or make room for the answer, then let go."""
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
    """With bypass: of what is resident and what was just computed, the blocks with the nearest next uses stay."""

    keeps_for_answers = False

    def matched(self, step: Step) -> int:
        """Resident blocks of the path, each by itself: an answer's may be there without those before them."""
        resident = self.resident
        return sum(resident[block] for block in self.blocks[step.low : step.high])

    def step(self, step: Step) -> None:
        """Keep everything, then the best of it."""
        for use in range(step.low, step.high):
            block = self.blocks[use]
            if not self.resident[block]:
                self.resident[block] = 1
                self.num_resident += 1
            self.enter(use)
        for _ in range(self.num_resident - self.capacity):
            self.evict()


def _farthest_first(trace: Trace, steps: list[Step], keeps_for_answers: bool) -> NDArray[np.int64]:
    """All uses, those first whose block is next used farthest ahead, or never; among equals the deepest."""
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
