"""Auto: the candidate whose shadow hits most takes over, and only on evidence."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.clock import ManualClock
from radixkv_policies import Learned, RequestHints
from radixkv_policies.auto import FREE_LOSS, MAX_LOSS, RELEASE, Auto, _Shadows

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


def _ahead(shadows: _Shadows, times: list[float]) -> None:
    """``learned`` hits what nobody else does, a segment at each time."""
    for time_s in times:
        shadows.num_uses += 1
        shadows._num_lately += 1
        shadows._count(time_s, (True, False, False))


@pytest.mark.parametrize(("times", "said"), [([1.0] * 40, 2), ([float(i) for i in range(40)], 0)])
def test_what_a_request_hits_is_one_chance(times: list[float], said: int) -> None:
    """Forty segments of one request are no evidence; those of forty requests are."""
    shadows = _Shadows(Learned(100, ManualClock(), 0))
    _ahead(shadows, times)
    assert shadows.decide(2, 1.0) == said


def test_who_lost_the_allowance_gets_the_lead_back() -> None:
    """Not before a part of it is allowed again, and only who wins."""
    shadows = _Shadows(Learned(100, ManualClock(), 0))
    shadows.debt = FREE_LOSS + 1
    _ahead(shadows, [float(i) for i in range(40)])
    assert shadows.decide(2, 1.0) == 2
    shadows.num_uses = round((shadows.debt / RELEASE - FREE_LOSS) / MAX_LOSS) + 1
    assert shadows.debt <= RELEASE * shadows.allowed
    assert shadows.decide(2, 1.0) == 0
    assert shadows.decide(2, 0.0) == 0 and shadows.decide(2, 1.0) == 2


def test_the_safe_one_follows_who_loses_unless_another_is_ahead_of_it() -> None:
    """``lrfu`` and ``lru`` hit the same that ``learned``, in charge, misses; then ``lrfu`` a little more, and more."""
    shadows = _Shadows(Learned(100, ManualClock(), 0))
    for number in range(400):
        shadows.num_uses += 1
        shadows._num_lately += 3
        shadows._count(float(number), (False, True, True))
    assert shadows.decide(0, 1.0) == 2
    shadows.debt = 0
    for number in range(400, 404):
        shadows._count(float(number), (False, True, False))
    assert shadows.decide(0, 1.0) == 2
    for number in range(404, 440):
        shadows._count(float(number), (False, True, False))
    assert shadows.decide(0, 1.0) == 1


def test_a_shadow_hears_of_what_was_left_behind() -> None:
    """A session goes on elsewhere: in the shadow of ``learned`` too its last request is worth what its new class is."""
    clock = ManualClock()
    policy = Auto(1_000, clock, 0)
    for number, node in enumerate(("a1", "b1", "a2")):
        clock.advance(10.0)
        hints = policy.opened([], 3, RequestHints(labels={"session": node[0]}))
        policy.inserted(node, 3, 3, hints, range(10 * number, 10 * number + 3))
        policy.unleased(node)
    left, kept = (policy._learned.pieces(node)[-1] for node in ("a1", "b1"))
    rank = np.ones_like(policy._learned.rank)
    rank[left.group] = 0.0
    policy._learned._model.rank = rank
    shadows = _Shadows(policy._learned)
    shadows.replay(deque(policy._log), 7)
    assert left.group != kept.group
    assert not any(key in shadows._by_rank for key in left.keys[:2])
    assert all(key in shadows._by_rank for key in kept.keys)
