"""The doorkeeper: LRU's order, admission as in a slow reference, and admission in a whole cache."""

from __future__ import annotations

import random
from math import exp
from typing import cast

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, RequestHints, Tenant, audit
from radixkv.clock import ManualClock
from radixkv_policies import LRU, Doorkeeper, doorkeeper
from radixkv_policies.doorkeeper import FEWEST, SHARED_TOKENS, SPEED, Record
from tests.index.test_changes import Recorder, resident_segments
from tests.policies.contract import CAPACITY, Block, Life, PolicyContract, Reference, _Op

NS = Namespace("a", "m")


class DoorAndLastUse(Reference):
    """A block that was used before is admitted, and a share of the others.

    The share follows the ages of the victims, while the record of admissions is good.
    """

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.ghosts: set[int] = set()
        self.strictness, self.due = 0.0, {True: 0.0, False: 0.0}

    def inserted(self, blocks: list[Block], hints: RequestHints | None, prompt: int) -> None:
        """Note whether a ghost knows the block."""
        for block in blocks:
            block.flag = block.key in self.ghosts
            self.ghosts.discard(block.key)

    def used(self, block: Block) -> None:
        """From now on the block is known."""
        block.flag = True

    def ended(self, block: Block) -> None:
        """Note the block's place in the order, and its age."""
        block.stamp, block.rank = self.life.now, self.life.clock()

    def key(self, block: Block) -> tuple[float, ...]:
        """When the last use ended."""
        return (block.stamp,)

    def admits(self, block: Block) -> bool:
        """The decision depends on where the block's run of equal history starts."""
        blocks = block.node.blocks
        at = blocks.index(block)
        if block.flag:
            return True
        while at and not blocks[at - 1].flag:
            at -= 1
        start = block.node.depth - len(blocks) + at
        continues = start > SHARED_TOKENS / 512
        over = self.strictness - FEWEST if continues else min(self.strictness, FEWEST)
        self.due[continues] += exp(-max(over, 0.0))
        self.due[continues] -= (admits := self.due[continues] >= 1)
        return admits

    def evicted(self, block: Block) -> None:
        """Remember the block. Whether it was young changes the strictness."""
        self.ghosts.add(block.key)
        policy = cast(Doorkeeper, self.life.policy)
        is_young = self.life.clock() - block.rank < doorkeeper.PATIENCE * policy._half_life.seconds
        step = SPEED / CAPACITY * (1 if is_young and policy.record.is_good else -1)
        self.strictness = min(max(self.strictness + step, 0.0), 2 * FEWEST)

    def declined(self, block: Block) -> None:
        """Remember the block."""
        self.ghosts.add(block.key)


class TestDoorkeeper(PolicyContract):
    """The contract of every policy."""

    name = "doorkeeper"
    reference = DoorAndLastUse

    def make(self, clock: ManualClock | None = None) -> Doorkeeper:
        """One block for each segment, so that each block has a key."""
        policy = super().make(clock)
        assert isinstance(policy, Doorkeeper)
        return policy


@pytest.mark.pure
def test_long_lives_with_many_declined_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lives under pressure decline many new blocks. The reference must agree with each decision."""
    monkeypatch.setattr(doorkeeper, "PATIENCE", 1e6)
    num_declined = 0
    for seed in range(20):
        rng = random.Random(seed)
        clock = ManualClock()
        policy = Doorkeeper(CAPACITY, clock, 0, block_size=2)
        life = Life(policy, clock, DoorAndLastUse)
        for _ in range(150):
            op: _Op = (rng.choice((0, 1, 4, 5, 6, 7, 8, 9, 10, 11)), rng.randrange(41), rng.randrange(1, 5))
            life.step(op)
        num_declined += life.num_declined
        life.end_all()
    assert num_declined > 100


def flood(cache: PrefixCache, times: int) -> list[int]:
    """Prompts that never return, and one that returns just after LRU has evicted it.

    Return that prompt's hits in tokens.
    """
    hits = []
    for at in range(times):
        cache._clock.advance(1.0)  # type: ignore[attr-defined]
        for ids in ([at + 1] * 16, [0] * 8)[: 1 + (at % 10 == 0)]:
            with cache.open(NS, ids) as sequence:
                sequence.commit(len(ids))
                hits += [] if ids[0] else [sequence.num_cached_tokens]
    return hits


def make(policy: str = "doorkeeper") -> tuple[PrefixCache, Recorder]:
    """A cache for eight prompts, with its journal."""
    journal = Recorder(4)
    default = Tenant("default", max_pinned_blocks=8)
    config = CacheConfig(32, 4, policy=policy, segment_tokens=4, default_tenant=default)
    return PrefixCache(config, clock=ManualClock(), journal=journal), journal


def test_declined_blocks_are_free_at_once() -> None:
    """Declined blocks are counted and remembered, and the journal reports them.

    So a prompt that returns stays; LRU never finds it.
    """
    cache, journal = make()
    hits = flood(cache, 1_000)
    assert sum(hits[-50:]) > 150 and not any(flood(make("lru")[0], 1_000))
    stats = cache.stats()
    assert stats.declined_blocks == cache.tenant_stats("a").declined_blocks > 500
    assert stats.evicted_blocks > 0 and journal.held == resident_segments(cache.snapshot(), 4)
    ids = _declined(cache)
    assert not cache.match(NS, ids).num_tokens
    with cache.open(NS, ids) as sequence:
        sequence.commit(16)
    assert cache.match(NS, ids).num_tokens == 16, "the ghost is known by now"
    audit.check(cache)


def test_blocks_of_a_running_request_are_shared_before_they_are_declined() -> None:
    """A request finds the blocks of a running request.

    Two simultaneous uses count as a second use, so the blocks are kept.
    """
    cache, _ = make()
    flood(cache, 1_000)
    num_kept = 0
    for at in range(20):
        ids = [40_000 + at] * 16
        with cache.open(NS, ids) as sequence:
            sequence.commit(16)
            with cache.open(NS, ids) as twin:
                assert twin.num_cached_tokens == 12
            assert cache.match(NS, ids).num_tokens == 16
        num_kept += cache.match(NS, ids).num_tokens >= 12
    assert num_kept == 20
    audit.check(cache)


def _declined(cache: PrefixCache) -> list[int]:
    """A prompt that was just declined."""
    for at in range(100):
        ids = [10_000 + at] * 16
        with cache.open(NS, ids) as sequence:
            sequence.commit(16)
        if not cache.match(NS, ids).num_tokens:
            return ids
    raise AssertionError("the doorkeeper admits every prompt")


def test_pins_are_kept_and_inserts_may_be_declined() -> None:
    """Pinned blocks stay for their time under any policy. Blocks that an engine inserts may be declined."""
    cache, journal = make()
    flood(cache, 1_000)
    seen = set()
    for at in range(20):
        ids = [20_000 + at] * 8
        with cache.open(NS, ids) as sequence:
            sequence.commit(8)
            pin = cache.pin(NS, ids, 60)
        assert cache.match(NS, ids).num_tokens == 8
        cache.unpin(pin)
        handed = [30_000 + at] * 8
        cache.insert(NS, handed, cache.allocate(2))
        seen.add(cache.match(NS, handed).num_tokens)
        assert cache.stats().lent_blocks == 0 and journal.held == resident_segments(cache.snapshot(), 4)
        audit.check(cache)
    assert 0 in seen


def test_a_losing_doorkeeper_admits_everything() -> None:
    """In a loop that fits the cache, every prompt returns late.

    The doorkeeper then admits nearly all, and costs almost nothing.
    """
    hits = {}
    for policy in ("lru", "doorkeeper"):
        cache, _ = make(policy)
        found = 0
        for at in range(3_000):
            cache._clock.advance(30.0 if at % 10 else 600.0)  # type: ignore[attr-defined]
            with cache.open(NS, [at % 7 + at // 300] * 16) as sequence:
                found += sequence.num_cached_tokens
                sequence.commit(16)
        hits[policy] = found
    assert hits["doorkeeper"] > 0.95 * hits["lru"] > 0


def test_a_record_counts_what_lru_would_evict() -> None:
    """The record drops uses that ended more new blocks ago than the cache holds. Old wins and losses fade."""
    record = Record(100)
    for now in range(150):
        record.made(1, float(now))
    assert record.is_forgotten(47.0) and not record.is_forgotten(51.0) and record.is_good
    record.won = -50.0
    assert not record.is_good
    for now in range(1_500):
        record.made(1, 150.0 + now)
    assert record.is_good and -10 < record.won < 0


def test_a_policy_without_admission_has_no_hook() -> None:
    """The hook is None, so nothing is called."""
    cache = PrefixCache(CacheConfig(8, 4))
    with cache.open(NS, range(4)) as sequence:
        sequence.commit(4)
    assert cache._tenants["a"].on_admit is None and LRU(8, ManualClock(), 0).hook("admit") is None


def test_partial_tails_are_never_kept() -> None:
    """Under any policy, only whole blocks of a request stay after it."""
    for policy in ("lru", "doorkeeper", "learned"):
        cache = PrefixCache(CacheConfig(8, 4, policy=policy))
        for size in range(1, 13):
            with cache.open(NS, [size] * size) as sequence:
                sequence.commit(size)
            assert cache.match(NS, [size] * size).num_tokens == size // 4 * 4
            assert cache.stats().resident_blocks == size // 4 and cache.stats().sequence_blocks == 0
            cache.clear(NS)
        audit.check(cache)
