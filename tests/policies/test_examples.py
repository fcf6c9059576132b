"""A plain example for each policy: the first victim of a full cache. The contract suites check the whole order.

A prompt here is one number, and one block long: ``ask(cache, 1, 2)`` is a request for prompt 1, then one for prompt 2.
"""

from __future__ import annotations

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.clock import ManualClock
from radixkv_policies import POLICIES, RequestHints

NS = Namespace("acme", "model")


def cache_of(policy: str, room: int, clock: ManualClock | None = None) -> PrefixCache:
    """A cache for ``room`` prompts, plus a block for the token that a request computes."""
    return PrefixCache(CacheConfig(room + 1, block_size=2, policy=policy), clock=clock or ManualClock())


def ask(cache: PrefixCache, *prompts: int, hints: RequestHints | None = None) -> None:
    """Make one request after another."""
    for prompt in prompts:
        with cache.open(NS, [prompt, prompt, prompt], hints=hints) as sequence:
            sequence.commit(3)


def cached(cache: PrefixCache) -> list[int]:
    """The prompts that the cache holds."""
    return [prompt for prompt in range(20) if cache.match(NS, [prompt, prompt]).num_tokens]


def evicted(cache: PrefixCache, number: int) -> list[int]:
    """The prompts that ``number`` evictions take, in order."""
    order = []
    for _ in range(number):
        before = cached(cache)
        cache.evict(1)
        order += [prompt for prompt in before if prompt not in cached(cache)]
    return order


def test_lru() -> None:
    """The cache holds two prompts. The third evicts the one with the oldest last use."""
    cache = cache_of("lru", room=2)
    ask(cache, 1, 2, 3)
    assert cached(cache) == [2, 3]
    ask(cache, 2, 4)
    assert cached(cache) == [2, 4]


def test_lfu() -> None:
    """The prompt with the fewest uses goes first, even if it is the youngest."""
    cache = cache_of("lfu", room=4)
    ask(cache, 1, 1, 1, 2, 2, 3)
    assert evicted(cache, 3) == [3, 2, 1]


def test_fifo() -> None:
    """Uses do not count: the first in is the first out."""
    cache = cache_of("fifo", room=4)
    ask(cache, 1, 2, 3, 1, 1)
    assert evicted(cache, 3) == [1, 2, 3]


def test_lrfu() -> None:
    """Older uses count less. After a day, three old uses count less than one new use."""
    clock = ManualClock()
    cache = cache_of("lrfu", room=4, clock=clock)
    ask(cache, 1, 1, 1, 2)
    assert evicted(cache, 1) == [2]
    clock.advance(86_400.0)
    ask(cache, 3)
    assert evicted(cache, 2) == [1, 3]


def test_arc() -> None:
    """A prompt used once goes before an older prompt that was used again."""
    cache = cache_of("arc", room=4)
    ask(cache, 1, 1, 2, 3, 3)
    assert evicted(cache, 3) == [2, 1, 3]


def test_slru() -> None:
    """The cache holds two prompts. Prompt 1 was used again, so it is protected, and the younger 2 is evicted."""
    cache = cache_of("slru", room=2)
    ask(cache, 1, 1, 2, 3)
    assert cached(cache) == [1, 3]


def test_slru_bound() -> None:
    """Only one of four prompts fits in the protected segment. The older one goes back, as the youngest on probation."""
    cache = cache_of("slru", room=4)
    ask(cache, 1, 1, 2, 3, 3)
    assert evicted(cache, 3) == [2, 1, 3]


def test_s3fifo() -> None:
    """New prompts wait in a small queue. Only a second use moves them to the main queue."""
    cache = cache_of("s3fifo", room=4)
    ask(cache, 1, 1, 1, 2, 3, 3)
    assert evicted(cache, 3) == [2, 3, 1]


def test_sieve() -> None:
    """One use, however old, spares a prompt once when the hand passes."""
    cache = cache_of("sieve", room=4)
    ask(cache, 1, 1, 2, 3, 3)
    assert evicted(cache, 3) == [2, 1, 3]


def test_gdsf() -> None:
    """The end of a long prompt costs more to compute than a short prompt, so the short one goes first."""
    cache = PrefixCache(CacheConfig(12, block_size=2, policy="gdsf"))
    with cache.open(NS, [1] * 17) as sequence:
        sequence.commit(17)
    ask(cache, 2)
    assert evicted(cache, 1) == [2]


def test_priority() -> None:
    """The lowest priority goes first, then the prompt without hints, then the highest priority."""
    cache = cache_of("priority", room=4)
    ask(cache, 1, hints=RequestHints(priority=80))
    ask(cache, 2)
    ask(cache, 3, hints=RequestHints(priority=10))
    assert evicted(cache, 3) == [3, 2, 1]


def test_prefix_first() -> None:
    """Generated tokens go before an older prompt."""
    cache = cache_of("prefix_first", room=6)
    ask(cache, 1)
    with cache.open(NS, [2, 2, 2]) as sequence:
        sequence.extend([9, 9, 9])
        sequence.commit(6)
    cache.evict(2)
    assert cache.match(NS, [2, 2, 2, 9, 9, 9]).num_tokens == 2
    assert cached(cache) == [1, 2]


def test_tail_lru() -> None:
    """A conversation loses only its end that can be recomputed in time, here 8 of 16 blocks.

    LRU would evict all of it.
    """
    cache = PrefixCache(CacheConfig(40, block_size=512, policy="tail_lru"))
    for prompt in (1, 2):
        with cache.open(NS, [prompt] * 8192) as sequence:
            sequence.commit(8192)
    cache.evict(12)
    assert [cache.match(NS, [prompt] * 8192).num_tokens // 512 for prompt in (1, 2)] == [8, 12]


@pytest.mark.parametrize("policy", ["survival", "doorkeeper", "learned", "auto"])
def test_learning_policies(policy: str) -> None:
    """Before they have learned anything they evict like LRU."""
    cache = cache_of(policy, room=2)
    ask(cache, 1, 2, 3)
    assert cached(cache) == [2, 3]


def test_each_policy_is_shown() -> None:
    """A new policy must come with its example."""
    shown = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(POLICIES) <= shown | {"survival", "doorkeeper", "learned", "auto"}
