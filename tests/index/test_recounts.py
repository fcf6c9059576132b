"""What an engine says of a request afterwards replaces what its opening counted."""

from __future__ import annotations

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, Tenant, audit
from radixkv.errors import ArgumentError, StaleGeneration

ACME = Namespace("acme", "m")


def counted(cache: PrefixCache) -> tuple[int, int, int]:
    stats = cache.tenant_stats("acme")
    return stats.requests, stats.hit_tokens, stats.missed_tokens


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(CacheConfig(16, 4, default_tenant=None))


def test_an_engine_counts_a_request_otherwise_than_its_opening(cache: PrefixCache) -> None:
    cache.add_tenant(Tenant("acme"))
    with cache.open(ACME, range(12)) as first:
        assert counted(cache) == (1, 0, 12)
        first.recount(1, 8, 2)
        assert counted(cache) == (1, 8, 2)
        (child,) = first.fork(1)
        child.recount(1, 5, 5)
        assert counted(cache) == (1, 8, 2), "a fork was not counted"
        child.release()
    first.recount(0, 0, 0)
    assert counted(cache) == (0, 0, 0)
    first.recount(1, 0, 12)
    cache.count_reads("acme", 4)
    cache.count_reads("nobody", 4)
    came = cache.endings.num
    cache.purge("acme")
    with pytest.raises(StaleGeneration):
        cache.count_reads("acme", 4, as_of=came)
    assert counted(cache) == (1, 4, 12)
    for wrong in (-1, 1.0, None):
        with pytest.raises(ArgumentError):
            first.recount(1, wrong, 0)  # type: ignore[arg-type]
    assert counted(cache) == (1, 4, 12)
    audit.check(cache)


def test_a_removed_tenants_requests_count_for_no_later_one(cache: PrefixCache) -> None:
    cache.add_tenant(Tenant("acme"))
    with cache.open(ACME, range(12)) as before:
        cache.purge("acme")
        before.recount(1, 0, 4)
        assert counted(cache) == (1, 0, 4), "a purge keeps the counts"
        cache.remove_tenant("acme")
        cache.add_tenant(Tenant("acme"))
        before.recount(1, 0, 8)
        assert counted(cache) == (0, 0, 0)
        with cache.open(ACME, range(8)) as after:
            after.recount(1, 0, 5)
        before.recount(0, 0, 0)
        assert counted(cache) == (1, 0, 5)
    audit.check(cache)
