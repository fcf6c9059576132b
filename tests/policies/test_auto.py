"""Auto: the candidate with the most hits in its shadow takes over, and only on sufficient evidence."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.clock import ManualClock
from radixkv_policies import Learned, RequestHints
from radixkv_policies.auto import FREE_LOSS, MAX_LOSS, RELEASE, Auto, _Shadows

pytestmark = pytest.mark.slow

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


def test_auto_withstands_a_scan() -> None:
    """Popular prompts under a flood of prompts that never return.

    Auto has more hits than LRU and nearly those of LRFU.
    """
    rng = random.Random(5)
    asks = [10 * rng.randrange(12) if rng.random() < 0.3 else 1_000 + 10 * i for i in range(1_500)]
    hits = {policy: _drive(policy, asks)[0] for policy in ("lru", "lrfu", "auto")}
    assert hits["auto"] > 1.2 * hits["lru"] and hits["auto"] > 0.8 * hits["lrfu"]


@pytest.mark.slow
def test_auto_follows_a_changing_mix() -> None:
    """Popular prompts and a shifting window alternate every 15 minutes.

    Auto is not far below LRU over the whole run.
    """
    rng = random.Random(6)
    asks = []
    for i in range(2_700):
        popular = i // 900 % 2 == 0
        asks.append(10 * rng.randrange(14) if popular else 100_000 + 10 * (i + rng.randrange(-12, 1)))
    hits = {policy: _drive(policy, asks)[0] for policy in ("lru", "auto")}
    assert hits["auto"] >= 0.97 * hits["lru"]


def _shadow_hits(policy: Auto) -> tuple[int, int]:
    """The number of uses, and the debt."""
    return policy.shadows.num_uses, policy.shadows.debt


def test_an_adversary_costs_auto_at_most_the_allowance() -> None:
    """The adversary asks for prompts that the other candidates would hold and the active one does not.

    However long this goes on, the active candidates lose at most the allowance to the shadow of LRU, plus the uses
    between two decisions.
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
    """``learned`` alone has a hit of one segment at each of these times."""
    for time_s in times:
        shadows.num_uses += 1
        shadows._num_lately += 1
        shadows._count(time_s, (True, False, False))


@pytest.mark.parametrize(("times", "said"), [([1.0] * 40, 2), ([float(i) for i in range(40)], 0)])
def test_hits_of_one_request_count_as_one_chance(times: list[float], said: int) -> None:
    """Forty segments of one request are no evidence. Forty segments of forty requests are."""
    shadows = _Shadows(Learned(100, ManualClock(), 0))
    _ahead(shadows, times)
    assert shadows.decide(2, 1.0) == said


def test_a_candidate_that_lost_the_allowance_can_return() -> None:
    """It gets the lead only after part of the allowance is free again, and only if it has more hits."""
    shadows = _Shadows(Learned(100, ManualClock(), 0))
    shadows.debt = FREE_LOSS + 1
    _ahead(shadows, [float(i) for i in range(40)])
    assert shadows.decide(2, 1.0) == 2
    shadows.num_uses = round((shadows.debt / RELEASE - FREE_LOSS) / MAX_LOSS) + 1
    assert shadows.debt <= RELEASE * shadows.allowed
    assert shadows.decide(2, 1.0) == 0
    assert shadows.decide(2, 0.0) == 0 and shadows.decide(2, 1.0) == 2


def test_lru_replaces_a_losing_candidate_unless_another_is_ahead() -> None:
    """``lrfu`` and ``lru`` have hits that the active ``learned`` misses.

    Then ``lrfu`` has a few more hits, and then many more.
    """
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


def test_a_shadow_learns_of_superseded_requests() -> None:
    """A session continues elsewhere.

    In the shadow of ``learned`` too, its last request then has the worth of its new class.
    """
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
