"""The cost of an adversary that sees everything: hits of a cache, compared with an LRU that gets the same requests.

Before each request the adversary looks into both caches. If there is a prompt that the LRU still holds and the other
cache has evicted, it asks for that prompt. Otherwise it asks for a new prompt or a recent one. A client outside knows
less, so these bounds hold for it too.
"""

from __future__ import annotations

import random

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.clock import ManualClock
from radixkv_policies.auto import FREE_LOSS, MAX_LOSS

pytestmark = pytest.mark.slow

NS = Namespace("a", "m")
NUM_REQUESTS = 3_000
PROMPT = 3
"""The number of blocks of a prompt. One more token is left to compute."""
BETWEEN_DECISIONS = 60
"""The number of block uses between two decisions, at one request in half a second."""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.release) for seed in (1, 2))]


def _ids(prompt: int) -> list[int]:
    return [10 * prompt + at for at in range(PROMPT + 1)]


def _starve(policy: str, seed: int) -> tuple[int, int]:
    """The hits of the policy and of LRU, in blocks."""
    rng, clock = random.Random(seed), ManualClock()
    ours, lru = caches = [
        PrefixCache(CacheConfig(60, 1, policy=name, segment_tokens=1), clock=clock)
        for name in (policy, "lru")
    ]
    recent, fresh = [0], 0
    for _ in range(NUM_REQUESTS):
        clock.advance(0.5)
        starved = (
            prompt
            for prompt in reversed(recent[-40:])
            if ours.match(NS, _ids(prompt)).num_tokens < lru.match(NS, _ids(prompt)).num_tokens
        )
        prompt = next(starved, None)
        if prompt is None and rng.random() < 0.3:
            prompt = rng.choice(recent[-80:])
        if prompt is None:
            prompt = fresh = fresh + 1
        recent.append(prompt)
        for cache in caches:
            with cache.open(NS, _ids(prompt)) as sequence:
                sequence.commit(PROMPT)
            cache.maintain()
    for cache in caches:
        audit.check(cache)
    return ours.stats().hit_tokens, lru.stats().hit_tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_auto_loses_no_more_than_its_allowance(seed: int) -> None:
    """The bound holds for the real cache, not only for the shadows that count the loss."""
    ours, lru = _starve("auto", seed)
    assert lru - ours <= MAX_LOSS * PROMPT * NUM_REQUESTS + FREE_LOSS + BETWEEN_DECISIONS


@pytest.mark.parametrize("seed", SEEDS)
def test_learned_yields_to_lru(seed: int) -> None:
    """It does not count its losses, but ranks like LRU while LRU has more hits."""
    ours, lru = _starve("learned", seed)
    assert lru - ours <= 0.05 * PROMPT * NUM_REQUESTS


def test_the_adversary_defeats_an_unbounded_policy() -> None:
    """A positive control: a policy without such a bound falls far below LRU."""
    ours, lru = _starve("lrfu", 0)
    assert lru - ours > 0.2 * PROMPT * NUM_REQUESTS
