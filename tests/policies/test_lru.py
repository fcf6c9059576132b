"""LRU: the contract of a policy, the plain order, and the order of blocks in a whole cache."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from tests.model import Blocks, resident_prefixes
from tests.policies.contract import NUM_LIVES, Block, PolicyContract, Reference

NS = Namespace("a", "m")
requests = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)), min_size=1, max_size=40
)


class LastUseEndedFirst(Reference):
    """The leaf with the oldest end of its last use."""

    def ended(self, block: Block) -> None:
        """Note the place in the order."""
        block.stamp = self.life.now

    def key(self, block: Block) -> tuple[float, ...]:
        """When the last use ended."""
        return (block.stamp,)


class TestLRU(PolicyContract):
    """The contract of every policy, in exactly this order."""

    name = "lru"
    reference = LastUseEndedFirst


@settings(max_examples=2 * NUM_LIVES)
@given(requests, st.sampled_from([1, 2, 3]), st.integers(8, 20))
def test_a_cache_evicts_like_an_lru_of_blocks(
    lives: list[tuple[int, list[int]]], block_size: int, num_blocks: int
) -> None:
    """Requests one after the other, with evictions between them.

    The cache always holds the same blocks as a slow model.
    """
    cache = PrefixCache(CacheConfig(num_blocks, block_size))
    model = Blocks(block_size)
    for num_evicted, ids in lives:
        whole = [tuple(ids[:stop]) for stop in range(block_size, len(ids) + 1, block_size)]
        cached = 0
        while cached < (len(ids) - 1) // block_size and whole[cached] in model.ended:
            cached += 1
        needed = -(-len(ids) // block_size) - cached
        if needed > num_blocks - cached:
            continue
        model.use(whole[:cached])
        model.evict(needed - (num_blocks - len(model.ended)))
        with cache.open(NS, ids) as sequence:
            assert sequence.num_cached_tokens == cached * block_size
            sequence.commit(len(ids))
        model.use(whole)
        assert resident_prefixes(cache) == set(model.ended)
        assert cache.evict(num_evicted) == min(num_evicted, len(model.ended))
        model.evict(num_evicted)
        assert resident_prefixes(cache) == set(model.ended)
    audit.check(cache)


def test_a_long_request_is_young_when_it_ends() -> None:
    """Recency is the end of a use. A long request is the youngest when it ends."""
    cache = PrefixCache(CacheConfig(8, 2))
    long = cache.open(NS, [1, 1, 1])
    long.commit(3)
    for token_id in (2, 3):
        with cache.open(NS, [token_id] * 3) as sequence:
            sequence.commit(3)
    long.release()
    assert cache.evict(2) == 2
    assert cache.match(NS, [1, 1]).num_tokens == 2
    assert cache.match(NS, [2, 2]).num_tokens == cache.match(NS, [3, 3]).num_tokens == 0
    audit.check(cache)


def test_the_tenant_with_most_blocks_loses_blocks() -> None:
    """With equal weights, the tenant with the most blocks loses blocks down to the level of the next."""
    cache = PrefixCache(CacheConfig(12, 1))
    for tenant, size in (("a", 6), ("b", 3), ("c", 2)):
        with cache.open(Namespace(tenant, "m"), range(size)) as sequence:
            sequence.commit(size)
    held = lambda: [cache.tenant_stats(tenant).resident_blocks for tenant in "abc"]  # noqa: E731
    assert held() == [6, 3, 2]
    cache.evict(3)
    assert held() == [3, 3, 2]
    cache.evict(2)
    assert held() == [2, 2, 2]
    with cache.open(Namespace("c", "m"), range(100, 108)) as sequence:
        sequence.commit(8)
    assert cache.tenant_stats("c").resident_blocks >= 8
    audit.check(cache)
