"""Each policy but LRU and LFU: the promises of a policy, and exactly the order that its slow reference says.

The references work on single blocks and plain lists, look at every block at every question, and never forget a ghost.
"""

from __future__ import annotations

from math import log2
from typing import cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from radixkv.clock import ManualClock
from radixkv_policies import LRFU, Auto, Learned, RequestHints, Survival
from radixkv_policies.hazard import EDGES_S, ranks_at
from radixkv_policies.hints import DEFAULT_PRIORITY
from radixkv_policies.tail_lru import MEAN_STEP
from tests.policies.contract import CAPACITY, Block, Life, PolicyContract, Reference, lives
from tests.policies.test_lru import LastUseEndedFirst

Hints = RequestHints | None


class InsertedFirst(Reference):
    """Who was inserted first; what a request adds to its own leaf counts with it."""

    clock = 0

    def place(self, blocks: list[Block]) -> None:
        """Put new blocks at the young end, or where the new ones are that they continue."""
        before = blocks[0].node.blocks
        at = before.index(blocks[0])
        joins = at > 0 and before[at - 1].is_new and blocks[0].is_new
        self.clock += 1
        for block in blocks:
            block.stamp = before[at - 1].stamp if joins else self.clock

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """Their place in the queue."""
        self.place(blocks)

    def key(self, block: Block) -> tuple[float, ...]:
        """Its place."""
        return (block.stamp,)


class TestFIFO(PolicyContract):
    """First in, first out."""

    name = "fifo"
    reference = InsertedFirst


class SmallestSumFirst(Reference):
    """Half as much for each half-life since a use ended, summed over all uses ever. The half-life is the policy's."""

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.ghosts: dict[int, list[float]] = {}

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """A use that runs, on top of what was."""
        for block in blocks:
            block.uses, block.notes = 1, self.ghosts.pop(block.key, [])

    def used(self, block: Block) -> None:
        """Another use that runs."""
        block.uses += 1

    def policy(self) -> LRFU:
        """Whose half-life it is."""
        return cast(LRFU, self.life.policy)

    def ended(self, block: Block) -> None:
        """All that ran are counted now."""
        now = self.policy().half_lives()
        block.notes = block.notes + [now] * block.uses
        block.uses, block.stamp = 0, self.life.now

    def evicted(self, block: Block) -> None:
        """It is remembered."""
        self.ghosts[block.key] = block.notes

    def key(self, block: Block) -> tuple[float, ...]:
        """The sum, up to a factor that all have."""
        last = max(block.notes)
        return (last + log2(sum(2.0 ** (end - last) for end in block.notes)), block.stamp)


class TestLRFU(PolicyContract):
    """Decayed frequency."""

    name = "lrfu"
    reference = SmallestSumFirst


class TwoLists(LastUseEndedFirst):
    """ARC. ``flag``: used again."""

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.target = 0.0
        self.once: list[int] = []
        self.again: list[int] = []

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """A ghost that returns moves the target."""
        known = {b.key: b.key in self.again for b in blocks if b.key in self.again or b.key in self.once}
        self.once = [key for key in self.once if key not in known]
        self.again = [key for key in self.again if key not in known]
        once, again = len(self.once) + 1, len(self.again) + 1
        for block in blocks:
            block.flag = block.key in known
            block.is_new = not block.flag
            if block.flag:
                step = -max(1.0, once / again) if known[block.key] else max(1.0, again / once)
                self.target = min(max(self.target + step, 0.0), CAPACITY)

    def used(self, block: Block) -> None:
        """Used again."""
        block.flag = True

    def evicted(self, block: Block) -> None:
        """It is remembered by the list that it was in."""
        ghosts = self.again if block.flag else self.once
        ghosts.append(block.key)
        del ghosts[:-CAPACITY]

    def key(self, block: Block) -> tuple[float, ...]:
        """The list whose turn it is, then the last use."""
        num_once = sum(not other.flag for node in self.life.nodes for other in node.blocks)
        from_once = num_once >= max(1.0, self.target)
        return (block.flag == from_once, block.stamp)


class TestARC(PolicyContract):
    """Adaptive replacement."""

    name = "arc"
    reference = TwoLists


class ThreeQueues(InsertedFirst):
    """S3-FIFO. ``flag``: in the main queue."""

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.ghosts: list[int] = []

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """Run by run: whom a ghost knows goes to the main queue."""
        known = {block.key for block in blocks if block.key in self.ghosts}
        self.ghosts = [key for key in self.ghosts if key not in known]
        run: list[Block] = []
        for block in blocks:
            block.flag = block.key in known
            block.is_new = not block.flag
            if run and run[-1].flag != block.flag:
                self.place(run)
                run = []
            run.append(block)
        self.place(run)

    def used(self, block: Block) -> None:
        """Up to three."""
        block.uses = min(block.uses + 1, 3)

    def evicted(self, block: Block) -> None:
        """Who failed in the small queue is remembered."""
        if not block.flag:
            self.ghosts.append(block.key)
            del self.ghosts[:-CAPACITY]

    def _head(self, leaves: list[Block]) -> Block:
        small = [block for block in leaves if not block.flag]
        main = [block for block in leaves if block.flag]
        num_small = sum(not other.flag for node in self.life.nodes for other in node.blocks)
        from_small = not main or (bool(small) and num_small >= max(0.1 * CAPACITY, 1))
        return min(small if from_small else main, key=lambda block: block.stamp)

    def settle(self, leaves: list[Block]) -> None:
        """The heads that earned it go to the young end of the main queue, with all of their run."""
        while (head := self._head(leaves)).uses > (0 if head.flag else 1):
            run = [b for b in head.node.blocks if b.stamp == head.stamp]
            self.clock += 1
            for block in run:
                block.uses = block.uses - 1 if block.flag else 0
                block.flag, block.stamp = True, self.clock

    def key(self, block: Block) -> tuple[float, ...]:
        """Whether it is the head."""
        leaves = [node.blocks[-1] for node in self.life.leaves()]
        return (block is not self._head(leaves), block.stamp)


class TestS3FIFO(PolicyContract):
    """Three queues."""

    name = "s3fifo"
    reference = ThreeQueues


class TheHand(InsertedFirst):
    """SIEVE. ``flag``: used since the hand came by."""

    hand = 0

    def used(self, block: Block) -> None:
        """A mark."""
        block.flag = True

    def settle(self, leaves: list[Block]) -> None:
        """Walk from the hand on to the first without a mark."""
        while True:
            ahead = [block for block in leaves if block.stamp >= self.hand]
            if not ahead:
                self.hand = 0
                continue
            head = min(ahead, key=lambda block: block.stamp)
            self.hand = head.stamp
            if not head.flag:
                return
            for block in head.node.blocks:
                block.flag = block.flag and block.stamp != head.stamp
            self.hand += 1

    def key(self, block: Block) -> tuple[float, ...]:
        """The first from the hand on."""
        return (block.stamp < self.hand, block.stamp)


class TestSIEVE(PolicyContract):
    """The hand."""

    name = "sieve"
    reference = TheHand


class LeastWorthFirst(Reference):
    """GDSF: uses times cost, over the inflation when the last use ended."""

    inflation = 0.0

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.ghosts: dict[int, int] = {}

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """One more than is remembered."""
        for block in blocks:
            block.uses = self.ghosts.pop(block.key, 0) + 1

    def used(self, block: Block) -> None:
        """One more."""
        block.uses += 1

    def ended(self, block: Block) -> None:
        """On top of the inflation."""
        block.rank, block.stamp = self.inflation, self.life.now

    def key(self, block: Block) -> tuple[float, ...]:
        """A token costs its position ÷ 30,962 more than the first."""
        cost = 1 + 512 * (5.2e5 / 4e14) / (16.1e9 / 4e14) * block.depth
        return (block.rank + block.uses * cost, block.stamp)

    def evicted(self, block: Block) -> None:
        """Remembered; the inflation is its worth."""
        self.inflation = max(self.inflation, self.key(block)[0])
        self.ghosts[block.key] = block.uses


class TestGDSF(PolicyContract):
    """Cost and frequency."""

    name = "gdsf"
    reference = LeastWorthFirst


class SmallestChanceFirst(LastUseEndedFirst):
    """The chance of the class, none beyond the horizon. Classes and chances are the policy's."""

    def ended(self, block: Block) -> None:
        """When, too."""
        super().ended(block)
        block.rank = self.life.clock.now

    def key(self, block: Block) -> tuple[float, ...]:
        """Chance, then age."""
        policy = cast(Survival, self.life.policy)
        event = policy.pieces(block.node)[-1].event
        assert event is not None
        since = self.life.clock.now - policy.horizon_s
        group = policy.classes[event.group]
        chance = group.num_returned / group.num_counted if block.rank >= since else 0.0
        return (chance, block.rank, block.stamp)


class TestSurvival(PolicyContract):
    """Chance to return."""

    name = "survival"
    reference = SmallestChanceFirst


class SpareFirst(LastUseEndedFirst):
    """Tail-optimised LRU. ``rank``: the reach; ``notes``: the mean new blocks when it became the end of a leaf."""

    mean = 0.0
    objective = 8

    def opened(self, path: list[Block], num_blocks: int, hints: Hints) -> None:
        """The mean of new blocks."""
        self.mean += MEAN_STEP * (min(num_blocks - len(path), self.objective) - self.mean)

    def ended(self, block: Block) -> None:
        """Nothing is below it any more that counts."""
        super().ended(block)
        block.rank, block.notes = 0.0, [self.mean]

    def evicted(self, block: Block) -> None:
        """What is above it reached as far."""
        above = block.above
        if above is not None:
            above.rank = max(above.rank, block.rank, block.depth)
            above.notes = [self.mean]

    def cleared(self, block: Block) -> None:
        """As an eviction."""
        self.evicted(block)

    def key(self, block: Block) -> tuple[float, ...]:
        """What is left of the budget, then the last use."""
        reach = max(block.rank, block.depth)
        spare = self.objective - round(block.notes[0]) - (reach - block.depth)
        return (spare <= 0, block.stamp)


class TestTailLRU(PolicyContract):
    """The objective's budget first."""

    name = "tail_lru"
    reference = SpareFirst


class LowestPriorityFirst(LastUseEndedFirst):
    """``rank``: the priority; ``notes``: for how long it holds, and until when."""

    def _give(self, block: Block, hints: Hints) -> None:
        block.rank, block.notes = DEFAULT_PRIORITY, [float("inf"), float("inf")]
        if hints is None:
            return
        if hints.priority is not None:
            block.rank, block.notes[0] = hints.priority, hints.duration_s or float("inf")
        for span in hints.ranges:
            token = (block.depth - 1) * 2
            if span.start <= token and (span.stop is None or token < span.stop):
                block.rank, block.notes[0] = span.priority, span.duration_s or float("inf")

    def opened(self, path: list[Block], num_blocks: int, hints: Hints) -> None:
        """A request's own priorities are set anew."""
        if hints is not None and (hints.priority is not None or hints.ranges):
            for block in path:
                self._give(block, hints)

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """The request's."""
        for block in blocks:
            self._give(block, hints)

    def ended(self, block: Block) -> None:
        """From now on its duration runs."""
        super().ended(block)
        block.notes[1] = self.life.clock.now + block.notes[0]

    def key(self, block: Block) -> tuple[float, ...]:
        """The priority as it is now, then the last use."""
        holds = self.life.clock.now < block.notes[1]
        return (block.rank if holds else DEFAULT_PRIORITY, block.stamp)


class TestPriority(PolicyContract):
    """Given priorities."""

    name = "priority"
    reference = LowestPriorityFirst


class GeneratedFirst(LastUseEndedFirst):
    """``flag``: a prompt held it."""

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """Within its request's prompt or not."""
        for block in blocks:
            block.flag = block.depth <= prompt

    def used(self, block: Block) -> None:
        """Found by a prompt."""
        block.flag = True

    def key(self, block: Block) -> tuple[float, ...]:
        """Answers first."""
        return (block.flag, block.stamp)


class TestPrefixFirst(PolicyContract):
    """Prompts outlive answers."""

    name = "prefix_first"
    reference = GeneratedFirst


class FewestHitsFirst(LastUseEndedFirst):
    """What the class is worth at its age, as of when the leaf came or all were ranked; then who waits longest, then who
    came first. Classes and what they are worth are the policy's.
    """

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.places: dict[object, tuple[float, float, int]] = {}
        self.ranked_s, self.num_came = life.clock.now, 0

    def policy(self) -> Learned:
        """Whose classes they are."""
        return cast(Learned, self.life.policy)

    def settle(self, leaves: list[Block]) -> None:
        """Rank who came, or all if the policy did so since."""
        policy, now_s = self.policy(), self.life.clock.now
        is_anew, self.ranked_s = policy._counted_s > self.ranked_s, policy._counted_s
        before, self.places = self.places, {}
        for leaf in sorted(leaves, key=lambda leaf: leaf.stamp):
            piece = policy.pieces(leaf.node)[-1]
            came, age_s = (piece, piece.ended_s, piece.group), now_s - piece.ended_s
            if came in before:
                worth, _, place = before[came]
            else:
                worth = float(policy.rank[piece.group, max(np.flatnonzero(age_s >= EDGES_S))])
                self.num_came = place = self.num_came + 1
            if is_anew:
                worth = float(ranks_at(policy.rank, np.array([piece.group]), np.array([age_s]))[0])
            self.places[came] = worth, piece.ended_s, place

    def key(self, block: Block) -> tuple[float, ...]:
        """Its place."""
        piece = self.policy().pieces(block.node)[-1]
        return self.places[piece, piece.ended_s, piece.group]


class TestLearned(PolicyContract):
    """Learned hazards."""

    name = "learned"
    reference = FewestHitsFirst


class TestAuto(PolicyContract):
    """The best of three; its choice is in test_auto.py."""

    name = "auto"


class Held(Auto):
    """Somebody is in charge, and stays it."""

    def maintain(self) -> None:
        """Learn, but decide nothing."""
        self._learned.maintain()


class UnderLearned(FewestHitsFirst):
    """The order of ``learned`` within ``auto``."""

    def policy(self) -> Learned:
        """The candidate."""
        return cast(Auto, self.life.policy)._learned


class UnderLRFU(SmallestSumFirst):
    """The order of ``lrfu`` within ``auto``."""

    def policy(self) -> LRFU:
        """The candidate."""
        return cast(Auto, self.life.policy)._lrfu


@pytest.mark.parametrize(
    ("name", "reference"), [("learned", UnderLearned), ("lrfu", UnderLRFU), ("lru", LastUseEndedFirst)]
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(ops=lives)
def test_auto_evicts_in_the_order_of_who_is_in_charge(
    name: str, reference: type[Reference], ops: list[tuple[int, int, int]]
) -> None:
    clock = ManualClock()
    policy = Held(CAPACITY, clock, 7, block_size=2)
    policy._in_charge = ("learned", "lrfu", "lru").index(name)
    assert policy.in_charge == name
    life = Life(policy, clock, reference)
    for op in ops:
        life.step(op)
    life.end_all()
