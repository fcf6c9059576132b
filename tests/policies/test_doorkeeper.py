"""The doorkeeper: LRU's order, and a door that a slow reference opens and shuts alike; admission in a whole cache."""

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
    """Who was used before is let in, of the others a share; it follows the victims' ages, while the door's record is
    good.
    """

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.ghosts: set[int] = set()
        self.strictness, self.due = 0.0, {True: 0.0, False: 0.0}

    def inserted(self, blocks: list[Block], hints: RequestHints | None, prompt: int) -> None:
        """Known by a ghost, or new."""
        for block in blocks:
            block.flag = block.key in self.ghosts
            self.ghosts.discard(block.key)

    def used(self, block: Block) -> None:
        """Known from now on."""
        block.flag = True

    def ended(self, block: Block) -> None:
        """Its place in the order, and its age."""
        block.stamp, block.rank = self.life.now, self.life.clock()

    def key(self, block: Block) -> tuple[float, ...]:
        """When its last use ended."""
        return (block.stamp,)

    def admits(self, block: Block) -> bool:
        """By where its run of blocks with one history begins."""
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
        """It is remembered, and was young or old."""
        self.ghosts.add(block.key)
        policy = cast(Doorkeeper, self.life.policy)
        is_young = self.life.clock() - block.rank < doorkeeper.PATIENCE * policy._half_life.seconds
        step = SPEED / CAPACITY * (1 if is_young and policy.record.is_good else -1)
        self.strictness = min(max(self.strictness + step, 0.0), 2 * FEWEST)

    def declined(self, block: Block) -> None:
        """It is remembered."""
        self.ghosts.add(block.key)


class TestDoorkeeper(PolicyContract):
    """As every policy."""

    name = "doorkeeper"
    reference = DoorAndLastUse

    def make(self, clock: ManualClock | None = None) -> Doorkeeper:
        """One block a segment, so that each block has a key."""
        policy = super().make(clock)
        assert isinstance(policy, Doorkeeper)
        return policy


@pytest.mark.pure
def test_lives_in_which_the_door_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lives under pressure: newcomers are declined, and the reference agrees with each answer."""
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
    """Prompts that never return, and one that returns when LRU has just forgotten it: its hits in tokens."""
    hits = []
    for at in range(times):
        cache._clock.advance(1.0)  # type: ignore[attr-defined]
        for ids in ([at + 1] * 16, [0] * 8)[: 1 + (at % 10 == 0)]:
            with cache.open(NS, ids) as sequence:
                sequence.commit(len(ids))
                hits += [] if ids[0] else [sequence.num_cached_tokens]
    return hits


def make(policy: str = "doorkeeper") -> tuple[PrefixCache, Recorder]:
    """A cache of eight prompts, under a flood."""
    journal = Recorder(4)
    default = Tenant("default", max_pinned_blocks=8)
    config = CacheConfig(32, 4, policy=policy, segment_tokens=4, default_tenant=default)
    return PrefixCache(config, clock=ManualClock(), journal=journal), journal


def test_what_is_declined_is_free_at_once() -> None:
    """And counted, and remembered, and the journal hears of it; so what returns stays, which LRU never finds."""
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
    assert cache.match(NS, ids).num_tokens == 16, "known by now"
    audit.check(cache)


def test_what_is_declined_is_shared_while_it_runs() -> None:
    """A request finds what another that still runs computed; two uses at once are a use again, and it is kept."""
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
    """A prompt that was declined just now."""
    for at in range(100):
        ids = [10_000 + at] * 16
        with cache.open(NS, ids) as sequence:
            sequence.commit(16)
        if not cache.match(NS, ids).num_tokens:
            return ids
    raise AssertionError("the door is open")


def test_pins_and_inserts_pass_the_door() -> None:
    """What is pinned stays for its time whatever the policy says; blocks that an engine hands in may be declined."""
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


def test_the_record_of_a_door_that_loses() -> None:
    """A loop that fits the cache, in which everything returns late: the door opens, and costs next to nothing."""
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


def test_a_record_counts_what_lru_would_forget() -> None:
    """It forgets what ended before as many new blocks as the cache has; what was long ago fades."""
    record = Record(100)
    for now in range(150):
        record.made(1, float(now))
    assert record.is_forgotten(47.0) and not record.is_forgotten(51.0) and record.is_good
    record.won = -50.0
    assert not record.is_good
    for now in range(1_500):
        record.made(1, 150.0 + now)
    assert record.is_good and -10 < record.won < 0


def test_a_policy_without_a_door_is_never_asked() -> None:
    """The hook is None, so nothing is called."""
    cache = PrefixCache(CacheConfig(8, 4))
    with cache.open(NS, range(4)) as sequence:
        sequence.commit(4)
    assert cache._tenants["a"].on_admit is None and LRU(8, ManualClock(), 0).hook("admit") is None


def test_partial_tails_are_never_kept() -> None:
    """Whatever the policy: of a request's last block only a whole one outlives it."""
    for policy in ("lru", "doorkeeper", "learned"):
        cache = PrefixCache(CacheConfig(8, 4, policy=policy))
        for size in range(1, 13):
            with cache.open(NS, [size] * size) as sequence:
                sequence.commit(size)
            assert cache.match(NS, [size] * size).num_tokens == size // 4 * 4
            assert cache.stats().resident_blocks == size // 4 and cache.stats().sequence_blocks == 0
            cache.clear(NS)
        audit.check(cache)
