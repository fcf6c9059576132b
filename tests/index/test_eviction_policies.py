"""Each tenant has its own policy. It can change while the cache runs, and does not affect other tenants' order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from radixkv import ArgumentError, CacheConfig, ConfigError, Namespace, PrefixCache, Tenant, audit
from radixkv.clock import ManualClock
from radixkv_policies import LFU, LRFU, LRU, POLICIES
from tests.index.support import NS, compute, same
from tests.model import resident_prefixes

OTHER = Namespace("b", "m")


def kind(cache: PrefixCache, tenant: str) -> type:
    return type(cache._tenants[tenant].policy)


def test_each_tenant_has_its_own_policy() -> None:
    config = CacheConfig(16, 4, policy="lru", default_tenant=Tenant("default", policy="fifo"))
    cache = PrefixCache(config, clock=ManualClock())
    cache.add_tenant(Tenant("a", policy="lrfu"))
    cache.add_tenant(Tenant("b"))
    for namespace in (NS, OTHER, Namespace("c", "m")):
        compute(cache, range(8), namespace)
    assert [kind(cache, tenant) for tenant in "abc"] == [LRFU, LRU, POLICIES["fifo"]]
    assert cache.tenant("a") == Tenant("a", policy="lrfu")
    cache.remove_tenant("a")
    compute(cache, range(8))
    assert kind(cache, "a") is POLICIES["fifo"]
    audit.check(cache)


def test_a_policy_can_be_made_by_a_factory() -> None:
    made: list[dict[str, Any]] = []

    def factory(*args: Any, **named: Any) -> LFU:
        made.append(named)
        return LFU(*args, **named)

    cache = PrefixCache(CacheConfig(16, 4, segment_tokens=8))
    cache.add_tenant(Tenant("a", policy=factory))
    cache.add_tenant(Tenant("a", policy=factory, weight=2.0))
    assert made == [{"block_size": 4, "segment_blocks": 2}] and kind(cache, "a") is LFU
    audit.check(cache)


@pytest.mark.parametrize("wrong", ["best", 5, lambda *args, **named: None])
def test_an_invalid_policy_is_refused(wrong: Any) -> None:
    cache = PrefixCache(CacheConfig(16, 4))
    compute(cache, range(8))
    before = cache.snapshot()
    for tenant in ("a", "new"):
        with pytest.raises(ArgumentError, match="policy"):
            cache.add_tenant(Tenant(tenant, policy=wrong))
    assert same(before, cache) and kind(cache, "a") is LRU and cache.tenant("new") is None
    if isinstance(wrong, str):
        with pytest.raises(ConfigError, match=r"default_tenant\.policy"):
            CacheConfig(16, default_tenant=Tenant("default", policy=wrong))


@pytest.mark.parametrize("after", POLICIES)
@pytest.mark.parametrize("before", ["lru", "learned"])
def test_a_policy_can_change_while_the_cache_runs(before: str, after: str) -> None:
    """The resident blocks, leases and running sequences stay, in their old order. Later requests work."""
    clock = ManualClock()
    config = CacheConfig(
        24, 2, policy=before, segment_tokens=2, default_tenant=Tenant("x", max_pinned_blocks=2)
    )
    cache = PrefixCache(config, clock=clock)
    rng = random.Random(0)

    def live() -> None:
        for _ in range(30):
            clock.advance(1.0)
            compute(cache, [rng.randrange(2) for _ in range(rng.randrange(1, 12))], rng.choice((NS, OTHER)))

    live()
    running = cache.open(NS, [1] * 9)
    running.commit(5)
    cache.pin(NS, [1] * 2, 1_000)
    held, others = resident_prefixes(cache), cache.tenant_stats("b")
    cache.add_tenant(Tenant("a", policy=after, max_pinned_blocks=2))
    audit.check(cache)
    assert resident_prefixes(cache) == held and cache.tenant_stats("b") == others
    assert (kind(cache, "a"), kind(cache, "b")) == (POLICIES[after], POLICIES[before])
    running.commit(9)
    running.release()
    live()
    assert cache.match(NS, [1] * 2).num_tokens == 2
    audit.check(cache)
    cache.unpin(cache.pins()[0])
    assert cache.evict(24) + cache.stats().free_blocks >= 24
    audit.check(cache)


def test_a_new_policy_takes_over_the_order() -> None:
    """A change from LRU to LRU under another name evicts the same blocks as no change."""
    caches = [PrefixCache(CacheConfig(24, 2)) for _ in range(2)]
    rng = random.Random(0)
    for at in range(300):
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        for cache in caches:
            compute(cache, ids)
        if at % 10 == 0:
            caches[0].add_tenant(Tenant("a", policy=lambda *args, **named: LRU(*args, **named)))
        assert resident_prefixes(caches[0]) == resident_prefixes(caches[1])
    assert caches[0].stats().evicted_blocks > 300
    audit.check(caches[0])
