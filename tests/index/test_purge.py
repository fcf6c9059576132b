"""A purge ends a tenant's generation.

Matches fail at once. Running sequences are stale and free their blocks at release.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from radixkv import (
    CacheConfig,
    LeaseError,
    Namespace,
    PrefixCache,
    QuotaExceeded,
    Sequence,
    StaleGeneration,
    Tenant,
    audit,
)

A, ALSO_A, B = Namespace("a", "m"), Namespace("a", "m", "adapter"), Namespace("b", "m")
IDS = np.arange(40)


def make() -> PrefixCache:
    """A cache in which both tenants have the same prompt."""
    cache = PrefixCache(CacheConfig(num_blocks=64, block_size=4))
    for namespace in (A, ALSO_A, B):
        with cache.open(namespace, IDS) as sequence:
            sequence.commit(40)
    return cache


CALLS: dict[str, Callable[[PrefixCache, Sequence], object]] = {
    "commit": lambda _, sequence: sequence.commit(41),
    "append": lambda _, sequence: sequence.append(1),
    "extend": lambda _, sequence: sequence.extend([1, 2]),
    "truncate": lambda _, sequence: sequence.truncate(40),
    "fork": lambda _, sequence: sequence.fork(2),
    "reorder": lambda cache, sequence: cache.reorder([sequence], [0]),
    "a batch": lambda cache, sequence: cache.append([sequence], [1]),
}


def test_nothing_of_the_old_generation_is_matched() -> None:
    """All namespaces of the tenant are forgotten and another tenant's stays. The tenant starts again from nothing."""
    cache = make()
    assert cache.purge("a") == 20 and cache.generation("a") == 1 and cache.generation("b") == 0
    assert [cache.match(namespace, IDS).num_tokens for namespace in (A, ALSO_A, B)] == [0, 0, 40]
    assert cache.stats().free_blocks == 54
    with cache.open(A, IDS) as sequence:
        assert sequence.num_cached_tokens == 0
        sequence.commit(40)
    assert cache.match(A, IDS).num_tokens == 40
    assert cache.purge("nobody") == 0
    audit.check(cache)


@pytest.mark.parametrize("name", CALLS)
def test_running_sequences_are_stale(name: str) -> None:
    """Every call raises StaleGeneration and changes nothing. The first release does not raise, a second one does."""
    cache = make()
    sequence, other = cache.open(A, [*IDS, 7, 8]), cache.open(B, [*IDS, 7])
    cache.purge("a")
    audit.check(cache)
    assert not sequence.is_open and other.is_open
    assert cache.stats().quarantined_blocks == 10, "leased blocks stay until the release"
    before = cache.stats()
    with pytest.raises(StaleGeneration, match="purged"):
        CALLS[name](cache, sequence)
    assert cache.stats() == before
    other.append(9)
    sequence.release()
    with pytest.raises(LeaseError, match="released"):
        sequence.release()
    other.release()
    stats = cache.stats()
    assert (stats.quarantined_blocks, stats.sequence_blocks, stats.resident_blocks) == (0, 0, 10)
    audit.check(cache)


def test_leaving_with_releases_a_stale_sequence() -> None:
    """The end of a ``with`` block after a purge releases the blocks without an error, also for forks."""
    cache = make()
    with cache.open(A, [*IDS, 7]) as sequence:
        children = sequence.fork(2)
        cache.purge("a")
        assert cache.purge("a") == 0, "nothing is left to forget"
    for child in children:
        child.release()
    assert cache.stats().free_blocks == 54
    audit.check(cache)


def test_a_stale_sequence_never_feeds_the_new_generation() -> None:
    """The new generation matches no block of the old one, even for the same tokens."""
    cache = make()
    old = cache.open(A, np.arange(100, 120))
    cache.purge("a")
    with pytest.raises(StaleGeneration):
        old.commit(20)
    with cache.open(A, np.arange(100, 120)) as new:
        assert new.num_cached_tokens == 0
        new.commit(20)
    old.release()
    assert cache.match(A, np.arange(100, 120)).num_tokens == 20
    audit.check(cache)


def test_leases_and_matches_of_the_old_generation() -> None:
    """An old match can no longer be leased. An old lease holds its blocks until its release."""
    cache = make()
    match = cache.match(A, IDS)
    lease = cache.lease(match)
    cache.purge("a")
    with pytest.raises(LeaseError, match="stale"):
        cache.lease(match)
    assert cache.stats().quarantined_blocks == 10
    lease.release()
    assert cache.stats().quarantined_blocks == 0
    audit.check(cache)


def test_quarantined_blocks_count_against_the_tenant() -> None:
    """Quarantined blocks count against the tenant's limit. The tenant's settings survive the purge."""
    cache = PrefixCache(CacheConfig(num_blocks=64, block_size=4))
    cache.add_tenant(Tenant("a", max_blocks=12))
    held = cache.open(A, IDS)
    cache.purge("a")
    assert cache.tenant("a") == Tenant("a", max_blocks=12)
    with pytest.raises(QuotaExceeded, match="of the tenant's 12"):
        cache.open(A, IDS)
    held.release()
    cache.open(A, IDS).release()
    audit.check(cache)
