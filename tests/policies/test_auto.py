"""Auto: the candidate whose shadow hits most takes over, and only on evidence."""

from __future__ import annotations

import random

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.clock import ManualClock
from radixkv_policies.auto import FREE_LOSS, MAX_LOSS, Auto

NS = Namespace("a", "m")


def _drive(policy: str, asks: list[int]) -> tuple[int, str]:
    clock = ManualClock()
    cache = PrefixCache(CacheConfig(60, 1, policy=policy, segment_tokens=1), clock=clock)
    for ask in asks:
        clock.advance(1.0)
        with cache.open(NS, [ask, ask + 1, ask + 2, 0]) as sequence:
            sequence.commit(3)
        cache.maintain()
    audit.check(cache)
    chosen = cache._tenants["a"].policy
    return cache.stats().hit_tokens, chosen.in_charge if isinstance(chosen, Auto) else policy


def test_a_scan_is_withstood() -> None:
    """Popular prompts under a flood of prompts that never return: more hits than LRU, nearly those of LRFU."""
    rng = random.Random(5)
    asks = [10 * rng.randrange(12) if rng.random() < 0.3 else 1_000 + 10 * i for i in range(4_000)]
    hits = {policy: _drive(policy, asks)[0] for policy in ("lru", "lrfu", "auto")}
    assert hits["auto"] > 1.2 * hits["lru"] and hits["auto"] > 0.8 * hits["lrfu"]


def test_a_mix_that_turns() -> None:
    """Popular prompts, then a shifting window, every 15 minutes: not far below LRU over the whole run."""
    rng = random.Random(6)
    asks = []
    for i in range(6_000):
        popular = i // 900 % 2 == 0
        asks.append(10 * rng.randrange(14) if popular else 100_000 + 10 * (i + rng.randrange(-12, 1)))
    hits = {policy: _drive(policy, asks)[0] for policy in ("lru", "auto")}
    assert hits["auto"] >= 0.97 * hits["lru"]


def _shadow_hits(policy: Auto) -> tuple[int, int]:
    """Uses and debt."""
    return policy.shadows.num_uses, policy.shadows.debt


def test_an_adversary_is_paid_no_more_than_the_allowance() -> None:
    """Whoever is in charge is starved: prompts that the others would hold, and it does not, come next.

    However long that goes on, the shadow of LRU is ahead of those in charge by no more than the allowance and what
    came between two decisions.
    """
    clock = ManualClock()
    cache = PrefixCache(CacheConfig(60, 1, policy="auto", segment_tokens=1), clock=clock)
    rng = random.Random(7)
    recent: list[int] = []
    most, fresh, before = 0, 1_000, 0
    for _ in range(1_200):
        clock.advance(0.5)
        policy = cache._tenants["a"].policy if cache._tenants else None
        starved = [
            ask for ask in recent[-17::2] if cache.match(NS, [ask, ask + 1, ask + 2, 0]).num_tokens < 3
        ]
        fresh += 10
        ask = (
            rng.choice(starved) if starved else fresh if rng.random() < 0.8 else rng.choice(recent or [fresh])
        )
        recent.append(ask)
        with cache.open(NS, [ask, ask + 1, ask + 2, 0]) as sequence:
            sequence.commit(3)
        cache.maintain()
        if isinstance(policy, Auto):
            num_uses, debt = _shadow_hits(policy)
            most = max(most, debt - before) if policy.in_charge == "lru" else most
            assert debt <= MAX_LOSS * num_uses + FREE_LOSS + 60
    audit.check(cache)
    num_uses, debt = _shadow_hits(cache._tenants["a"].policy)  # type: ignore[arg-type]
    assert num_uses > 3_000 and debt <= MAX_LOSS * num_uses + FREE_LOSS + 60
