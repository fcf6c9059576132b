"""Each policy except LRU and LFU keeps the contract and evicts exactly in the order of its slow reference.

The references use single blocks and plain lists. They look at every block at every question, and never forget a ghost.
"""

from __future__ import annotations

import random
from math import log2
from typing import cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from radixkv.clock import ManualClock
from radixkv_policies import LRFU, SLRU, Auto, Learned, RequestHints, Survival
from radixkv_policies.hazard import EDGES_S, ranks_at
from radixkv_policies.hints import DEFAULT_PRIORITY
from radixkv_policies.slru import PROTECTED_SHARE
from radixkv_policies.tail_lru import MEAN_STEP
from tests.policies.contract import CAPACITY, NUM_LIVES, Block, Life, PolicyContract, Reference, lives
from tests.policies.test_lru import LastUseEndedFirst

Hints = RequestHints | None


class InsertedFirst(Reference):
    """FIFO: the block that was inserted first. Blocks that a request adds to its own leaf count with that leaf."""

    clock = 0

    def place(self, blocks: list[Block]) -> None:
        """Put new blocks at the young end, or beside the new blocks that they continue."""
        before = blocks[0].node.blocks
        at = before.index(blocks[0])
        joins = at > 0 and before[at - 1].is_new and blocks[0].is_new
        self.clock += 1
        for block in blocks:
            block.stamp = before[at - 1].stamp if joins else self.clock

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """Place the blocks in the queue."""
        self.place(blocks)

    def key(self, block: Block) -> tuple[float, ...]:
        """The place in the queue."""
        return (block.stamp,)


class TestFIFO(PolicyContract):
    """First in, first out."""

    name = "fifo"
    reference = InsertedFirst


class SmallestSumFirst(Reference):
    """LRFU: each use counts half as much for each half-life since its end, summed over all uses.

    The policy gives the half-life.
    """

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.ghosts: dict[int, list[float]] = {}

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """Start a running use, and add the ghost's uses."""
        for block in blocks:
            block.uses, block.notes = 1, self.ghosts.pop(block.key, [])

    def used(self, block: Block) -> None:
        """Count another running use."""
        block.uses += 1

    def policy(self) -> LRFU:
        """The policy that gives the half-life."""
        return cast(LRFU, self.life.policy)

    def ended(self, block: Block) -> None:
        """All running uses are counted now."""
        now = self.policy().half_lives()
        block.notes = block.notes + [now] * block.uses
        block.uses, block.stamp = 0, self.life.now

    def evicted(self, block: Block) -> None:
        """Remember the block's uses."""
        self.ghosts[block.key] = block.notes

    def key(self, block: Block) -> tuple[float, ...]:
        """The sum, up to a common factor."""
        last = max(block.notes)
        return (last + log2(sum(2.0 ** (end - last) for end in block.notes)), block.stamp)


class TestLRFU(PolicyContract):
    """Decayed frequency."""

    name = "lrfu"
    reference = SmallestSumFirst


class TwoLists(LastUseEndedFirst):
    """ARC. ``flag`` means that the block was used again."""

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
        once, again = len(self.once), len(self.again)
        for block in blocks:
            block.flag = block.key in known
            block.is_new = not block.flag
            if block.flag:
                step = -max(1.0, once / (again + 1)) if known[block.key] else max(1.0, again / (once + 1))
                self.target = min(max(self.target + step, 0.0), CAPACITY)
        held = [other for node in self.life.nodes for other in node.blocks]
        num_once = sum(not other.flag for other in held)
        del self.once[: max(len(self.once) + num_once - CAPACITY, 0)]
        del self.again[: max(len(self.again) + len(self.once) + len(held) - 2 * CAPACITY, 0)]

    def used(self, block: Block) -> None:
        """Mark the block as used again."""
        block.flag = True

    def evicted(self, block: Block) -> None:
        """The list that held the block remembers it."""
        (self.again if block.flag else self.once).append(block.key)

    def key(self, block: Block) -> tuple[float, ...]:
        """The list that is due first, then the last use."""
        num_once = sum(not other.flag for node in self.life.nodes for other in node.blocks)
        return (block.flag == (num_once > self.target), block.stamp)


class TestARC(PolicyContract):
    """Adaptive replacement."""

    name = "arc"
    reference = TwoLists


class TwoSegments(Reference):
    """SLRU, block by block. ``flag`` means that the block is protected."""

    clock = 0

    def youngest(self, block: Block) -> None:
        """Put the block at the most recently used end of its segment."""
        self.clock += 1
        block.stamp = self.clock

    def used(self, block: Block) -> None:
        """Promote the block."""
        block.flag = True

    def opened(self, path: list[Block], num_blocks: int, hints: Hints) -> None:
        """The whole path is promoted now."""
        self.keep_bound()

    def ended(self, block: Block) -> None:
        """All blocks of the node are used, the deepest first. So it is the oldest of them."""
        if block is block.node.blocks[-1]:
            for each in reversed(block.node.blocks):
                self.youngest(each)
            self.keep_bound()

    def keep_bound(self) -> None:
        """Move the oldest protected blocks that are not in use to probation."""
        protected = [block for node in self.life.nodes for block in node.blocks if block.flag]
        excess = len(protected) - max(int(PROTECTED_SHARE * CAPACITY), 1)
        unused = sorted((b for b in protected if not b.node.uses), key=lambda block: block.stamp)
        for block in unused[: max(excess, 0)]:
            block.flag = False
            self.youngest(block)

    def key(self, block: Block) -> tuple[float, ...]:
        """Probation first, then the last use."""
        return (block.flag, block.stamp)


class TestSLRU(PolicyContract):
    """Two segments."""

    name = "slru"
    reference = TwoSegments

    @pytest.mark.parametrize("seed", range(20))
    def test_long_lives_keep_the_bound(self, seed: int) -> None:
        """Long lives with many uses, so that blocks often move back, or with many clears of protected leaves."""
        rng = random.Random(seed)
        kinds = [1, 2, 3, 4, 5, 8, 8, 9, 9, 10, 12, 13, 13] if seed % 2 else [0, 0, *range(11), 7, 9]
        self.live([(rng.choice(kinds), rng.randrange(41), rng.randint(1, 4)) for _ in range(150)])

    def test_a_parent_moves_to_probation_after_its_children(self) -> None:
        """Splits of an unused node leave nodes with the same last use. The deepest one moves first."""
        policy = SLRU(10, ManualClock(), 0)  # protects two blocks
        policy.inserted("low", 6, 6)
        policy.unleased("low")
        policy.split("high", "low", 4)
        policy.split("middle", "low", 1)
        for node in ("low", "middle", "high"):
            policy.leased(node)
        policy.touched(["high", "middle", "low"])
        for node in ("low", "middle", "high"):
            policy.unleased(node)
        assert [piece.is_protected for piece in policy.pieces("high")] == [True, False]
        policy.split("top", "high", 1)
        policy.split("next", "high", 1)
        assert [policy.pieces(node)[0].is_protected for node in ("top", "next", "high")] == [
            True,
            True,
            False,
        ]
        policy.inserted("other", 1, 1)
        policy.touched(["other"])
        policy.unleased("other")
        assert [policy.pieces(node)[0].is_protected for node in ("top", "next", "other")] == [
            True,
            False,
            True,
        ]
        order = []
        while (victim := policy.victim()) is not None:
            order.append(victim)
            policy.trimmed(victim, policy.num_blocks(victim))
            policy.removed(victim)
        assert order == ["low", "middle", "high", "next", "top", "other"]


class ThreeQueues(InsertedFirst):
    """S3-FIFO. ``flag`` means that the block is in the main queue."""

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.ghosts: list[int] = []

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """Insert run by run. Blocks with a ghost go to the main queue."""
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
        """Count up to three uses."""
        block.uses = min(block.uses + 1, 3)

    def evicted(self, block: Block) -> None:
        """Remember blocks that are evicted from the small queue."""
        if not block.flag:
            self.ghosts.append(block.key)
            del self.ghosts[: -int(0.9 * CAPACITY)]

    def _head(self, leaves: list[Block]) -> Block:
        small = [block for block in leaves if not block.flag]
        main = [block for block in leaves if block.flag]
        num_small = sum(not other.flag for node in self.life.nodes for other in node.blocks)
        from_small = not main or (bool(small) and num_small >= max(0.1 * CAPACITY, 1))
        return min(small if from_small else main, key=lambda block: block.stamp)

    def settle(self, leaves: list[Block]) -> None:
        """Move heads with enough uses to the young end of the main queue, with all of their run."""
        while (head := self._head(leaves)).uses > (0 if head.flag else 1):
            run = [b for b in head.node.blocks if b.stamp == head.stamp]
            self.clock += 1
            for block in run:
                block.uses = block.uses - 1 if block.flag else 0
                block.flag, block.stamp = True, self.clock

    def key(self, block: Block) -> tuple[float, ...]:
        """Whether the block is the head."""
        leaves = [node.blocks[-1] for node in self.life.leaves()]
        return (block is not self._head(leaves), block.stamp)


class TestS3FIFO(PolicyContract):
    """Three queues."""

    name = "s3fifo"
    reference = ThreeQueues


class TheHand(InsertedFirst):
    """SIEVE. ``flag`` means that the block was used since the hand passed it."""

    hand = 0

    def used(self, block: Block) -> None:
        """Set the mark."""
        block.flag = True

    def settle(self, leaves: list[Block]) -> None:
        """Move the hand to the first block without a mark."""
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
        """The first block from the hand on."""
        return (block.stamp < self.hand, block.stamp)


class TestSIEVE(PolicyContract):
    """The moving hand."""

    name = "sieve"
    reference = TheHand


class LeastWorthFirst(Reference):
    """GDSF: uses times cost, plus the inflation when the last use ended."""

    inflation = 0.0

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.ghosts: dict[int, int] = {}

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """One use more than the ghost remembers."""
        for block in blocks:
            block.uses = self.ghosts.pop(block.key, 0) + 1

    def used(self, block: Block) -> None:
        """Count one use."""
        block.uses += 1

    def ended(self, block: Block) -> None:
        """Add the present inflation."""
        block.rank, block.stamp = self.inflation, self.life.now

    def key(self, block: Block) -> tuple[float, ...]:
        """A token at position p costs 1 + p ÷ 30,962 times the first token."""
        cost = 1 + 512 * (5.2e5 / 4e14) / (16.1e9 / 4e14) * block.depth
        return (block.rank + block.uses * cost, block.stamp)

    def evicted(self, block: Block) -> None:
        """Remember the uses. The inflation becomes the block's worth."""
        self.inflation = max(self.inflation, self.key(block)[0])
        self.ghosts[block.key] = block.uses


class TestGDSF(PolicyContract):
    """Cost and frequency."""

    name = "gdsf"
    reference = LeastWorthFirst


class SmallestChanceFirst(LastUseEndedFirst):
    """Survival: the chance of the block's class, or zero beyond the horizon. The policy gives classes and chances."""

    def ended(self, block: Block) -> None:
        """Also note the time."""
        super().ended(block)
        block.rank = self.life.clock.now

    def key(self, block: Block) -> tuple[float, ...]:
        """The chance, then the age."""
        policy = cast(Survival, self.life.policy)
        event = policy.pieces(block.node)[-1].event
        assert event is not None
        since = self.life.clock.now - policy.horizon_s
        group = policy.classes[event.group]
        chance = group.num_returned / group.num_counted if block.rank >= since else 0.0
        return (chance, block.rank, block.stamp)


class TestSurvival(PolicyContract):
    """The chance to return."""

    name = "survival"
    reference = SmallestChanceFirst


class SpareFirst(LastUseEndedFirst):
    """Tail-optimised LRU.

    ``rank`` is the reach, and ``notes`` holds the mean of new blocks when the block became a leaf's end.
    """

    mean = 0.0
    objective = 8

    def opened(self, path: list[Block], num_blocks: int, hints: Hints) -> None:
        """Update the mean of new blocks."""
        self.mean += MEAN_STEP * (min(num_blocks - len(path), self.objective) - self.mean)

    def ended(self, block: Block) -> None:
        """Nothing below the block counts any more."""
        super().ended(block)
        block.rank, block.notes = 0.0, [self.mean]

    def evicted(self, block: Block) -> None:
        """The block above has reached at least as far."""
        above = block.above
        if above is not None:
            above.rank = max(above.rank, block.rank, block.depth)
            above.notes = [self.mean]

    def cleared(self, block: Block) -> None:
        """A clear counts as an eviction."""
        self.evicted(block)

    def key(self, block: Block) -> tuple[float, ...]:
        """The rest of the budget, then the last use."""
        reach = max(block.rank, block.depth)
        spare = self.objective - round(block.notes[0]) - (reach - block.depth)
        return (spare <= 0, block.stamp)


class TestTailLRU(PolicyContract):
    """The objective's budget first."""

    name = "tail_lru"
    reference = SpareFirst


class LowestPriorityFirst(LastUseEndedFirst):
    """Priority. ``rank`` is the priority, and ``notes`` holds its duration and its end."""

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
        """A request with its own priorities sets them on all matched blocks."""
        if hints is not None and (hints.priority is not None or hints.ranges):
            for block in path:
                self._give(block, hints)

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """The blocks get the request's priority."""
        for block in blocks:
            self._give(block, hints)

    def ended(self, block: Block) -> None:
        """The duration starts now."""
        super().ended(block)
        block.notes[1] = self.life.clock.now + block.notes[0]

    def key(self, block: Block) -> tuple[float, ...]:
        """The present priority, then the last use."""
        holds = self.life.clock.now < block.notes[1]
        return (block.rank if holds else DEFAULT_PRIORITY, block.stamp)


class TestPriority(PolicyContract):
    """Given priorities."""

    name = "priority"
    reference = LowestPriorityFirst


class GeneratedFirst(LastUseEndedFirst):
    """Prefix-first. ``flag`` means that a prompt contained the block."""

    def inserted(self, blocks: list[Block], hints: Hints, prompt: int) -> None:
        """Note whether the block is within its request's prompt."""
        for block in blocks:
            block.flag = block.depth <= prompt

    def used(self, block: Block) -> None:
        """A prompt contained the block."""
        block.flag = True

    def key(self, block: Block) -> tuple[float, ...]:
        """Answers first."""
        return (block.flag, block.stamp)


class TestPrefixFirst(PolicyContract):
    """Prompts stay longer than answers."""

    name = "prefix_first"
    reference = GeneratedFirst


class FewestHitsFirst(LastUseEndedFirst):
    """Learned: the worth of the block's class at its age, as of its arrival or of the last full ranking.

    Among equals the block that waits longest is first, then the one that came first. The policy gives the classes and
    their worths.
    """

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.places: dict[object, tuple[float, float, int]] = {}
        self.ranked_s, self.num_came = life.clock.now, 0

    def policy(self) -> Learned:
        """The policy that gives the classes."""
        return cast(Learned, self.life.policy)

    def settle(self, leaves: list[Block]) -> None:
        """Rank new leaves, or all leaves if the policy has ranked all since."""
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
        """The place of the block."""
        piece = self.policy().pieces(block.node)[-1]
        return self.places[piece, piece.ended_s, piece.group]


class TestLearned(PolicyContract):
    """Learned hazards."""

    name = "learned"
    reference = FewestHitsFirst


class TestAuto(PolicyContract):
    """The best of three candidates. Tests of the choice are in test_auto.py."""

    name = "auto"


class Held(Auto):
    """``auto`` with one fixed candidate."""

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
@settings(max_examples=NUM_LIVES, suppress_health_check=[HealthCheck.too_slow])
@given(ops=lives)
def test_auto_evicts_in_the_order_of_its_active_candidate(
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
