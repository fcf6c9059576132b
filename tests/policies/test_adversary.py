"""What somebody who sees everything can cost: hits of the live cache, beside those of an LRU that is asked the same.

Before each request the adversary looks into both caches. It asks for what the LRU still holds and the other has given
up, as long as there is such a prompt, and otherwise for a new one or one of the last. Nobody who asks from outside
knows as much: what is bounded here is bounded.
"""

from __future__ import annotations

import random

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.clock import ManualClock
from radixkv_policies.auto import FREE_LOSS, MAX_LOSS

NS = Namespace("a", "m")
NUM_REQUESTS = 3_000
PROMPT = 3
"""Blocks of a prompt; one more token is left to compute."""
BETWEEN_DECISIONS = 60
"""Uses of blocks that fit between two decisions, at one request in half a second."""


def _ids(prompt: int) -> list[int]:
    return [10 * prompt + at for at in range(PROMPT + 1)]


def _starve(policy: str, seed: int) -> tuple[int, int]:
    """Hits of the policy and of LRU, in blocks."""
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


@pytest.mark.parametrize("seed", range(3))
def test_auto_loses_no_more_than_its_allowance(seed: int) -> None:
    """Of the live cache, not only of the shadows that keep the account."""
    ours, lru = _starve("auto", seed)
    assert lru - ours <= MAX_LOSS * PROMPT * NUM_REQUESTS + FREE_LOSS + BETWEEN_DECISIONS


@pytest.mark.parametrize("seed", range(3))
def test_learned_yields_to_lru(seed: int) -> None:
    """It keeps no account, but while LRU hits more it ranks as that does."""
    ours, lru = _starve("learned", seed)
    assert lru - ours <= 0.05 * PROMPT * NUM_REQUESTS


def test_the_adversary_is_one() -> None:
    """A policy that does neither is pressed far below LRU."""
    ours, lru = _starve("lrfu", 0)
    assert lru - ours > 0.2 * PROMPT * NUM_REQUESTS
