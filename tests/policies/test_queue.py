"""Eviction that knows the queue: blocks of waiting requests are evicted before idle ones or after them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from radixkv import Announcement, CacheConfig, Namespace, PrefixCache, Tenant, audit
from radixkv.clock import ManualClock
from tests.index.support import compute

NS = Namespace("a", "m")
HEEDING = ("lru", "learned", "lrfu", "auto")
"""The policies that heed waiting requests."""


def make(policy: str, num_blocks: int = 64) -> PrefixCache:
    """A cache with its own clock."""
    return PrefixCache(CacheConfig(num_blocks, 4, policy=policy), clock=ManualClock())


def ids(name: int, num_blocks: int) -> list[int]:
    """A prompt that shares nothing with others."""
    return [1_000 * name + at for at in range(4 * num_blocks)]


def serve(cache: PrefixCache, *prompts: list[int]) -> None:
    """Requests, one after the other."""
    clock = cache._clock
    assert isinstance(clock, ManualClock)
    for prompt in prompts:
        clock.advance(1.0)
        compute(cache, prompt, NS)


def blocks(cache: PrefixCache, *prompts: list[int]) -> list[int]:
    """Resident blocks of each."""
    return [cache.match(NS, prompt).num_blocks for prompt in prompts]


@pytest.mark.parametrize("policy", HEEDING)
def test_the_order_of_victims(policy: str) -> None:
    """Cold requests lose first, the newest first, then idle prompts; requests that miss little lose last."""
    cache = make(policy)
    whole, idle, cold, later = ids(1, 4), ids(2, 4), ids(3, 4), ids(4, 4)
    newest = ids(5, 4)
    serve(cache, whole, idle, newest, cold, later)
    cache.announce(NS, whole + ids(9, 2))
    cache.announce(NS, cold + ids(9, 12))
    cache.announce(NS, later + ids(9, 12))
    cache.announce(NS, newest + ids(9, 4))
    prompts = (later, cold, idle, newest, whole)
    for left in ([3, 4, 4, 4, 4], [0, 4, 4, 4, 4], [0, 0, 4, 4, 4], [0, 0, 0, 4, 4], [0, 0, 0, 0, 4]):
        cache.evict(sum(blocks(cache, *prompts)) - sum(left))
        assert blocks(cache, *prompts) == left
        audit.check(cache)
    cache.evict(4)
    assert blocks(cache, whole) == [0]


@pytest.mark.parametrize("policy", HEEDING)
def test_the_tail_that_nobody_waits_for_goes_first(policy: str) -> None:
    """A request that needs half of a leaf keeps that half."""
    cache = make(policy)
    prompt, other = ids(1, 6), ids(2, 4)
    serve(cache, prompt, other)
    cache.announce(NS, prompt[:12] + ids(9, 1))
    cache.evict(7)
    assert blocks(cache, prompt, other) == [3, 0]
    cache.evict(1)
    assert blocks(cache, prompt) == [2]
    audit.check(cache)


@pytest.mark.parametrize("policy", HEEDING)
def test_a_shared_beginning_is_kept_for_the_oldest(policy: str) -> None:
    """A node that requests need is evicted after what follows it, and as its oldest request."""
    cache = make(policy)
    head = ids(1, 3)
    first, second, idle = head + ids(2, 2), head + ids(3, 2), ids(4, 3)
    serve(cache, first, second, idle)
    cache.announce(NS, first)
    cache.announce(NS, second)
    cache.evict(3)
    assert blocks(cache, first, second, idle) == [5, 5, 0]
    cache.evict(2)
    assert blocks(cache, first, second) == [5, 3]
    cache.evict(2)
    assert blocks(cache, first, second) == [3, 3]
    audit.check(cache)


@pytest.mark.parametrize("policy", HEEDING)
def test_a_request_that_waits_no_longer_is_idle_again(policy: str) -> None:
    cache = make(policy)
    one, two = ids(1, 4), ids(2, 4)
    serve(cache, one, two)
    waits = cache.announce(NS, one)
    cache.evict(1)
    assert blocks(cache, one, two) == [4, 3]
    waits.withdraw()
    with cache.open(NS, two) as sequence:
        sequence.commit(len(two))
    cache.evict(4)
    assert blocks(cache, one, two) == [0, 4]
    audit.check(cache)


@pytest.mark.parametrize("policy", HEEDING)
def test_a_missing_half_makes_it_cold(policy: str) -> None:
    """A request that loses more than half of its blocks loses the rest first."""
    cache = make(policy)
    one, two, idle = ids(1, 4), ids(2, 4), ids(3, 2)
    serve(cache, one, two, idle)
    cache.announce(NS, one)
    cache.announce(NS, two + ids(9, 5))  # cold from the start
    cache.evict(4)
    assert blocks(cache, one, two, idle) == [4, 0, 2]
    cache.evict(2 + 3)
    assert blocks(cache, one, idle) == [1, 0]
    serve(cache, ids(4, 2))
    cache.evict(1)
    assert blocks(cache, one, ids(4, 2)) == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("policy", HEEDING)
@pytest.mark.parametrize("seed", range(4))
def test_random_lives(policy: str, seed: int) -> None:
    """No node is lost, no victim is wrong, and other tenants don't change what a strict one has."""
    choose = random.Random(seed)
    alone, among = make(policy, 40), make(policy, 40)
    for cache in (alone, among):
        cache.add_tenant(Tenant("a", guaranteed_blocks=16, max_blocks=16))
        cache.add_tenant(Tenant("b", guaranteed_blocks=16, max_blocks=16))
    waits: dict[PrefixCache, list[tuple[Announcement, list[int]]]] = {alone: [], among: []}
    for step in range(400):
        prompt = [choose.randrange(2) for _ in range(choose.randrange(1, 40))]
        kind, which, is_other = choose.randrange(7), choose.randrange(8), choose.random() < 0.5
        for cache in (among,) if is_other else (alone, among):
            _play(cache, NS._replace(tenant="b") if is_other else NS, prompt, kind, which, waits[cache])
        if not is_other:
            assert cache_of(alone) == cache_of(among)
        if step % 10 == 0:
            audit.check(alone)
            audit.check(among)
    assert cache_of(alone) == cache_of(among)


def cache_of(cache: PrefixCache) -> list[Any]:
    """What tenant ``a`` has."""
    trees = [tree for tree in cache.snapshot().trees if tree.namespace.tenant == "a"]
    return sorted((node.depth, node.label) for tree in trees for node in tree.nodes)


def _play(
    cache: PrefixCache,
    namespace: Namespace,
    prompt: list[int],
    kind: int,
    which: int,
    waits: list[tuple[Announcement, list[int]]],
) -> None:
    clock = cache._clock
    assert isinstance(clock, ManualClock)
    own = [each for each in waits if each[0].namespace == namespace]
    if namespace.tenant == "a":
        clock.advance(0.5)
    if kind < 2 and len(own) < 8:
        waits.append((cache.announce(namespace, prompt), prompt))
    elif kind == 2 and own:
        each = own[which % len(own)]
        waits.remove(each)
        if which % 2:
            each[0].withdraw()
        else:
            compute(cache, each[1], namespace)
            cache.open(namespace, each[1], announcement=each[0]).release()
    elif kind == 3 and which == 0:
        cache.clear(namespace)
    else:
        compute(cache, prompt, namespace)
