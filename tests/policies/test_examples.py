"""A plain example for each policy: what a full cache evicts first. The contract suites check the whole order.

A prompt here is one number, and one block long: ``ask(cache, 1, 2)`` is a request for prompt 1, then one for prompt 2.
"""

from __future__ import annotations

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.clock import ManualClock
from radixkv_policies import POLICIES, RequestHints

NS = Namespace("acme", "model")


def cache_of(policy: str, room: int, clock: ManualClock | None = None) -> PrefixCache:
    """A cache with room for ``room`` prompts, and a block for the token that a request computes."""
    return PrefixCache(CacheConfig(room + 1, block_size=2, policy=policy), clock=clock or ManualClock())


def ask(cache: PrefixCache, *prompts: int, hints: RequestHints | None = None) -> None:
    """One request after another."""
    for prompt in prompts:
        with cache.open(NS, [prompt, prompt, prompt], hints=hints) as sequence:
            sequence.commit(3)


def cached(cache: PrefixCache) -> list[int]:
    """The prompts that the cache holds."""
    return [prompt for prompt in range(20) if cache.match(NS, [prompt, prompt]).num_tokens]


def evicted(cache: PrefixCache, number: int) -> list[int]:
    """The prompts that an eviction takes, in its order."""
    order = []
    for _ in range(number):
        before = cached(cache)
        cache.evict(1)
        order += [prompt for prompt in before if prompt not in cached(cache)]
    return order


def test_lru() -> None:
    """Room for two: the third evicts the one whose last use is longest ago."""
    cache = cache_of("lru", room=2)
    ask(cache, 1, 2, 3)
    assert cached(cache) == [2, 3]
    ask(cache, 2, 4)
    assert cached(cache) == [2, 4]


def test_lfu() -> None:
    """The one with the fewest uses goes first, though it is the youngest."""
    cache = cache_of("lfu", room=4)
    ask(cache, 1, 1, 1, 2, 2, 3)
    assert evicted(cache, 3) == [3, 2, 1]


def test_fifo() -> None:
    """Uses don't count: the first in is the first out."""
    cache = cache_of("fifo", room=4)
    ask(cache, 1, 2, 3, 1, 1)
    assert evicted(cache, 3) == [1, 2, 3]


def test_lrfu() -> None:
    """Uses count, and count less the longer ago they were: after a day, three old ones are worth less than one."""
    clock = ManualClock()
    cache = cache_of("lrfu", room=4, clock=clock)
    ask(cache, 1, 1, 1, 2)
    assert evicted(cache, 1) == [2]
    clock.advance(86_400.0)
    ask(cache, 3)
    assert evicted(cache, 2) == [1, 3]


def test_arc() -> None:
    """What was used once goes before what was used again, though that is older."""
    cache = cache_of("arc", room=4)
    ask(cache, 1, 1, 2, 3, 3)
    assert evicted(cache, 3) == [2, 1, 3]


def test_s3fifo() -> None:
    """Newcomers wait in a small queue, and only what is used twice there moves to the main one."""
    cache = cache_of("s3fifo", room=4)
    ask(cache, 1, 1, 1, 2, 3, 3)
    assert evicted(cache, 3) == [2, 3, 1]


def test_sieve() -> None:
    """One use, however old, spares a prompt once when the hand comes by."""
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
    """The lowest priority goes first, then the one without hints, then the highest."""
    cache = cache_of("priority", room=4)
    ask(cache, 1, hints=RequestHints(priority=80))
    ask(cache, 2)
    ask(cache, 3, hints=RequestHints(priority=10))
    assert evicted(cache, 3) == [3, 2, 1]


def test_prefix_first() -> None:
    """What a model wrote goes before a prompt that is older."""
    cache = cache_of("prefix_first", room=6)
    ask(cache, 1)
    with cache.open(NS, [2, 2, 2]) as sequence:
        sequence.extend([9, 9, 9])
        sequence.commit(6)
    cache.evict(2)
    assert cache.match(NS, [2, 2, 2, 9, 9, 9]).num_tokens == 2
    assert cached(cache) == [1, 2]


def test_tail_lru() -> None:
    """A conversation loses only the end that is computed fast enough, here 8 of 16 blocks; LRU would go on with it."""
    cache = PrefixCache(CacheConfig(40, block_size=512, policy="tail_lru"))
    for prompt in (1, 2):
        with cache.open(NS, [prompt] * 8192) as sequence:
            sequence.commit(8192)
    cache.evict(12)
    assert [cache.match(NS, [prompt] * 8192).num_tokens // 512 for prompt in (1, 2)] == [8, 12]


@pytest.mark.parametrize("policy", ["survival", "doorkeeper", "learned", "auto"])
def test_those_that_learn(policy: str) -> None:
    """Before they have learned anything they evict as LRU does."""
    cache = cache_of(policy, room=2)
    ask(cache, 1, 2, 3)
    assert cached(cache) == [2, 3]


def test_each_policy_is_shown() -> None:
    """A policy that is added comes with its example."""
    shown = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(POLICIES) <= shown | {"survival", "doorkeeper", "learned", "auto"}
