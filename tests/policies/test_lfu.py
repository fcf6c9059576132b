"""LFU with dynamic aging: the contract of a policy, the plain order, and fading of old uses."""

from __future__ import annotations

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv_policies import RequestHints
from tests.policies.contract import Block, PolicyContract, Reference

NS = Namespace("a", "m")


class LowestPriorityFirst(Reference):
    """The count of uses plus the cache's age when the last use ended.

    Among equals the block with the earliest end goes first.
    """

    age = 0.0

    def inserted(self, blocks: list[Block], hints: RequestHints | None, prompt: int) -> None:
        """Count the first use, whatever the leaf had that they extend."""
        for block in blocks:
            block.uses = 1

    def used(self, block: Block) -> None:
        """Count another use."""
        block.uses += 1

    def ended(self, block: Block) -> None:
        """The priority is set when a use ends."""
        block.rank, block.stamp = self.age + block.uses, self.life.now

    def key(self, block: Block) -> tuple[float, ...]:
        """The priority, then the end of the last use."""
        return (block.rank, block.stamp)

    def evicted(self, block: Block) -> None:
        """The age is the priority of the last victim."""
        self.age = max(self.age, block.rank)


class TestLFU(PolicyContract):
    """The contract of every policy, in exactly this order."""

    name = "lfu"
    reference = LowestPriorityFirst


def _ask(cache: PrefixCache, token_id: int) -> None:
    with cache.open(NS, [token_id] * 3) as sequence:
        sequence.commit(3)


def test_prompts_with_many_uses_stay() -> None:
    """A prompt with three uses stays longer than a newer one with a single use."""
    cache = PrefixCache(CacheConfig(16, 2, policy="lfu"))
    for token_id in (1, 1, 1, 2, 2, 3):
        _ask(cache, token_id)
    for gone in (3, 2, 1):
        assert cache.evict(1) == 1
        left = [token_id for token_id in (1, 2, 3) if cache.match(NS, [token_id] * 2).num_tokens]
        assert left == list(range(1, gone))
    audit.check(cache)


def test_old_uses_fade() -> None:
    """A prompt that was often used long ago is evicted by a stream of others."""
    cache = PrefixCache(CacheConfig(8, 2, policy="lfu"))
    for _ in range(10):
        _ask(cache, 1)
    for token_id in range(2, 200):
        _ask(cache, token_id)
    assert cache.match(NS, [1, 1]).num_tokens == 0
    audit.check(cache)


def test_a_shared_prefix_stays_longer_than_its_ends() -> None:
    """A use of an end is also a use of the shared beginning."""
    cache = PrefixCache(CacheConfig(32, 2, policy="lfu"))
    for token_id in range(6):
        with cache.open(NS, [9, 9, token_id, token_id, 5]) as sequence:
            sequence.commit(5)
    assert cache.evict(6) == 6
    assert cache.match(NS, [9, 9, 1]).num_tokens == 2
    audit.check(cache)
