"""Announcements show at any time what a match would find, end as they should, and change no answer."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest

from radixkv import (
    Announcement,
    AnnouncementLimitExceeded,
    ArgumentError,
    CacheConfig,
    CapacityError,
    ConfigError,
    Namespace,
    NamespaceError,
    PrefixCache,
    RequestHints,
    Tenant,
    TokenError,
    audit,
)
from radixkv.clock import ManualClock
from tests.index.support import NS, Declining, compute, same

OTHER = Namespace("b", "m")


def make(num_blocks: int = 16, policy: str = "lru", **settings: Any) -> PrefixCache:
    """A cache with its own clock."""
    return PrefixCache(CacheConfig(num_blocks, 4, policy=policy, **settings), clock=ManualClock())


def advance(cache: PrefixCache, seconds: float) -> None:
    clock = cache._clock
    assert isinstance(clock, ManualClock)
    clock.advance(seconds)


def resident(*announcements: Announcement) -> list[int]:
    return [each.resident_tokens for each in announcements]


def test_residency_follows_the_cache() -> None:
    cache = make()
    waits = cache.announce(NS, range(22))
    assert (waits.num_tokens, waits.resident_tokens, waits.missing) == (22, 0, 1.0)
    assert waits.is_open and waits.namespace == NS
    assert "22 tokens" in repr(waits) and cache.changed_announcements() == []
    compute(cache, range(12))
    assert (waits.resident_tokens, waits.missing) == (12, pytest.approx(0.4))
    assert cache.changed_announcements() == [waits]
    assert cache.changed_announcements() == []
    compute(cache, range(22))
    assert (waits.resident_tokens, waits.missing) == (20, 0.0)
    cache.evict(2)
    assert waits.resident_tokens == cache.match(NS, range(22)).num_tokens == 12
    assert cache.changed_announcements() == [waits]
    cache.evict(16)
    assert (waits.resident_tokens, waits.missing) == (0, 1.0)
    audit.check(cache)


def test_only_matching_prompts_move() -> None:
    cache = make(64)
    same_start = cache.announce(NS, [*range(8), *range(50, 58)])
    other = cache.announce(NS, range(100, 116))
    elsewhere = cache.announce(OTHER, range(16))
    salted = cache.announce(NS._replace(salt="s"), range(16))
    short = cache.announce(NS, range(3))
    compute(cache, range(16))
    assert resident(same_start, other, elsewhere, salted, short) == [8, 0, 0, 0, 0]
    assert short.missing == 0.0  # it has no whole block
    assert cache.changed_announcements() == [same_start]
    compute(cache, [*range(8), *range(50, 70)])  # splits the node in which it hangs
    compute(cache, range(16), OTHER)
    assert resident(same_start, other, elsewhere, salted) == [16, 0, 16, 0]
    assert cache.changed_announcements() == [same_start, elsewhere]
    audit.check(cache)


def test_a_growing_leaf_takes_those_that_follow_it() -> None:
    cache = make()
    follows, leaves = cache.announce(NS, range(16)), cache.announce(NS, [*range(8), 9, 9, 9, 9])
    with cache.open(NS, range(8)) as sequence:
        sequence.commit(8)
        assert resident(follows, leaves) == [8, 8]
        sequence.extend([8, 9, 10, 11])
        sequence.commit(12)
        assert resident(follows, leaves) == [12, 8]
        sequence.extend([0, 0, 0, 0])
        sequence.commit(16)
        assert resident(follows, leaves) == [12, 8]
    audit.check(cache)
    compute(cache, [*range(8), 9, 9, 9, 9])
    assert resident(follows, leaves) == [12, 12]


def test_an_open_ends_it() -> None:
    cache = make()
    hints = RequestHints(labels={"session": "s"})
    waits = cache.announce(NS, range(8), hints)
    with cache.open(NS, range(8), announcement=waits) as sequence:
        sequence.commit(8)
        assert not waits.is_open and waits.resident_tokens == 0
        assert cache.changed_announcements() == []
    waits.withdraw()  # does nothing
    cache.open(NS, range(9), announcement=waits).release()  # one that has ended is ignored
    assert cache.snapshot().announcements == ()


def test_a_refused_open_keeps_it() -> None:
    cache = make(4)
    waits = cache.announce(NS, range(40))
    before = cache.snapshot()
    with pytest.raises(CapacityError):
        cache.open(NS, range(40), announcement=waits)
    assert waits.is_open and same(before, cache)
    with pytest.raises(ArgumentError, match="announcement"):
        cache.open(OTHER, range(4), announcement=waits)
    with pytest.raises(ArgumentError, match="announcement"):
        make().open(NS, range(4), announcement=waits)
    with pytest.raises(ArgumentError, match="announcement"):
        cache.open(NS, range(4), announcement="first")  # type: ignore[arg-type]
    assert waits.is_open and same(before, cache)


def test_withdrawing_forgets_it() -> None:
    cache = make()
    waits, stays = cache.announce(NS, range(8)), cache.announce(NS, range(8))
    waits.withdraw()
    assert not waits.is_open and stays.is_open and "ended" in repr(waits)
    compute(cache, range(8))
    assert resident(waits, stays) == [0, 8]
    assert cache.changed_announcements() == [stays]
    waits.withdraw()


def test_its_time_ends_it() -> None:
    cache = make()
    waits, longer = cache.announce(NS, range(8), ttl_s=10), cache.announce(NS, range(8), ttl_s=20)
    default = cache.announce(NS, range(8))
    advance(cache, 9.5)
    assert waits.is_open
    compute(cache, range(8))
    advance(cache, 0.5)
    assert not waits.is_open and longer.is_open
    assert cache.changed_announcements() == [longer, default]
    advance(cache, 600)
    assert not default.is_open
    cache.maintain()
    assert cache.snapshot().announcements == ()
    for wrong in (0, -1, "10", True, float("nan"), 1e9):
        with pytest.raises(ArgumentError, match="ttl_s"):
            cache.announce(NS, range(8), ttl_s=wrong)


def test_a_tenant_has_a_bounded_number() -> None:
    cache = make(max_announcements=3)
    held = [cache.announce(NS, range(8), ttl_s=5 + at) for at in range(3)]
    before = cache.snapshot()
    with pytest.raises(AnnouncementLimitExceeded, match="3 announcements") as caught:
        cache.announce(NS._replace(salt="s"), range(8))
    assert isinstance(caught.value, CapacityError) and caught.value.limit == 3 and same(before, cache)
    cache.announce(OTHER, range(8))  # another tenant has its own
    held[1].withdraw()
    cache.announce(NS, range(8))
    advance(cache, 5)
    cache.announce(NS, range(8))  # the first has ended
    with pytest.raises(ConfigError, match="max_announcements"):
        CacheConfig(4, max_announcements=-1)
    with pytest.raises(AnnouncementLimitExceeded):
        make(max_announcements=0).announce(NS, range(8))


def test_refused_announcements_change_nothing() -> None:
    cache = make(default_tenant=None)
    cache.add_tenant(Tenant("a"))
    before = cache.snapshot()
    with pytest.raises(NamespaceError):
        cache.announce(OTHER, range(8))
    with pytest.raises(TokenError):
        cache.announce(NS, [-1])
    with pytest.raises(ArgumentError, match="hints"):
        cache.announce(NS, range(8), "soon")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="namespace"):
        cache.announce("a", range(8))  # type: ignore[arg-type]
    assert same(before, cache) and cache.tenants() == ["a"]


def test_a_clear_empties_it_and_a_purge_ends_it() -> None:
    cache = make()
    waits, other = cache.announce(NS, range(8)), cache.announce(OTHER, range(8))
    compute(cache, range(8))
    compute(cache, range(8), OTHER)
    cache.changed_announcements()
    cache.clear(NS)
    assert waits.is_open and resident(waits, other) == [0, 8]
    assert cache.changed_announcements() == [waits]
    compute(cache, range(8))
    assert resident(waits, other) == [8, 8]
    cache.purge("a")
    assert not waits.is_open and other.is_open
    assert cache.changed_announcements() == []
    assert [each.namespace for each in cache.snapshot().announcements] == [OTHER]
    again = cache.announce(NS, range(8))
    compute(cache, range(8))
    assert resident(again) == [8]
    audit.check(cache)


def test_removing_a_tenant_ends_its_own() -> None:
    cache = make()
    cache.add_tenant(Tenant("a", guaranteed_blocks=4))
    waits, other = cache.announce(NS, range(8)), cache.announce(OTHER, range(8))
    cache.remove_tenant("a")
    assert not waits.is_open and other.is_open
    audit.check(cache)


def test_forgotten_blocks_are_missing() -> None:
    cache = make()
    waits = cache.announce(NS, range(16))
    with cache.open(NS, range(16)) as sequence:
        sequence.commit(16)
        cache.forget(sequence, 8)
        assert waits.resident_tokens == cache.match(NS, range(16)).num_tokens == 8
        audit.check(cache)
        sequence.commit(16)
        assert waits.resident_tokens == 16
    audit.check(cache)


def test_bases_count() -> None:
    cache = make(64)
    reader = cache.announce(OTHER, [*range(12), 7, 7, 7, 7])
    stranger = cache.announce(Namespace("c", "m"), range(16))
    base = cache.publish("base", NS, range(16), ["b"])
    assert reader.resident_tokens == 0
    base.commit(16)
    assert resident(reader, stranger) == [12, 0]
    assert cache.changed_announcements() == [reader]
    compute(cache, [*range(12), 7, 7, 7, 7, 8], OTHER)
    later = cache.announce(OTHER, [*range(12), 7, 7, 7, 7])
    assert resident(reader, later) == [16, 16]
    audit.check(cache)
    base.release()
    cache.unpublish("base")
    assert resident(reader, later, stranger) == [0, 0, 0]
    audit.check(cache)


def test_an_announcement_protects_nothing() -> None:
    cache = make(4)
    waits = cache.announce(NS, range(16))
    compute(cache, range(16))
    assert waits.resident_tokens == 16 and cache.evictable_blocks == 4
    compute(cache, range(100, 116), OTHER)
    assert waits.resident_tokens == 0 and waits.is_open


def test_blocks_that_a_policy_declines_are_missing() -> None:
    """The policy gives up every third leaf as soon as it is unused."""
    cache = make(default_tenant=Tenant("any", policy=Declining))
    prompts = [[first] * 8 for first in range(6)]
    waiting = [cache.announce(NS, prompt) for prompt in prompts]
    for prompt in prompts:
        compute(cache, prompt)
        assert resident(*waiting) == [cache.match(NS, each).num_tokens for each in prompts]
    assert resident(*waiting).count(0) == 2
    audit.check(cache)


def test_dropping_it_keeps_the_claim_but_not_the_cache() -> None:
    cache = make()
    cache.announce(NS, range(8), ttl_s=5)
    assert len(cache.snapshot().announcements) == 1
    advance(cache, 5)
    cache.maintain()
    assert cache.snapshot().announcements == ()
    cache.announce(NS, range(8)).withdraw()
    gone = weakref.ref(cache._maintenance)
    del cache
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("policy", ["lru", "learned", "auto", "lrfu"])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_life_equals_matches(policy: str, seed: int) -> None:
    """Each announcement equals a match after each call, changed ones are told once, and the audit is clean."""
    choose = random.Random(seed)
    cache = make(20, policy)
    namespaces = [NS, NS._replace(salt="s"), OTHER]
    waiting: list[tuple[Announcement, Namespace, list[int]]] = []
    seen: dict[Announcement, int] = {}
    for step in range(600):
        namespace = choose.choice(namespaces)
        ids = [choose.randrange(2) for _ in range(choose.randrange(1, 36))]
        kind = choose.randrange(8)
        if kind < 2 and len(waiting) < 12:
            waits = cache.announce(namespace, ids, ttl_s=choose.choice((3.0, 500.0)))
            waiting.append((waits, namespace, ids))
            seen[waits] = waits.resident_tokens
        elif kind == 2 and waiting:
            waits, namespace, ids = waiting.pop(choose.randrange(len(waiting)))
            if choose.random() < 0.5:
                waits.withdraw()
            else:
                cache.open(namespace, ids, announcement=waits).release()
        elif kind == 3:
            cache.evict(choose.randrange(5))
        elif kind == 4 and step % 50 == 0:
            cache.clear(namespace)
        else:
            with cache.open(namespace, ids) as sequence:
                for end in (*range(sequence.num_committed_tokens, len(ids), 5), len(ids)):
                    sequence.commit(end)
        advance(cache, 0.1)
        waiting = [each for each in waiting if each[0].is_open]
        for waits, its, prompt in waiting:
            assert waits.resident_tokens == cache.match(its, prompt).num_tokens
        if step % 7 == 0:
            told = cache.changed_announcements()
            assert len(set(told)) == len(told) and set(told) <= {waits for waits, _, _ in waiting}
            for waits, _, _ in waiting:
                assert waits in told or waits.resident_tokens == seen[waits]
                seen[waits] = waits.resident_tokens
        if step % 20 == 0:
            audit.check(cache)
    audit.check(cache)


def test_a_decision_costs_what_changed() -> None:
    """Changes of one prompt tell of one announcement, among thousands."""
    cache = make(4_096)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 1_000, (2_000, 64), dtype=np.uint32)
    waiting = [cache.announce(NS, prompt) for prompt in prompts]
    compute(cache, prompts[7])
    assert cache.changed_announcements() == [waiting[7]]
    assert waiting[7].missing == 0.0
