"""Ends of matches, match and lease in one call, and touch."""

from __future__ import annotations

import pytest

from radixkv import LeaseError, Namespace, OutOfBlocks, Tenant, TokenError, audit
from tests.index.support import NS, compute, make_cache, same


def test_equal_ends_are_one_key() -> None:
    """An end is the same before and after a split, an eviction and a second computation."""
    cache = make_cache()
    compute(cache, range(16))
    end = cache.match(NS, range(8)).end
    known = {end: "here"}
    compute(cache, [*range(8), 9, 9, 9, 9])  # splits the node there
    assert known[cache.match(NS, range(8)).end] == "here" and end.num_tokens == 8
    cache.evict(16)
    assert cache.match(NS, range(8)).end != end
    compute(cache, range(8))
    assert cache.match(NS, range(8)).end == end
    with cache.match_and_lease(NS, range(11)) as lease:
        assert lease.end == end and hash(lease.end) == hash(end)
    assert repr(end) == "<End after 8 tokens of tenant 'a'>"


def test_ends_of_other_prefixes_and_namespaces_differ() -> None:
    """Also if the last tokens are equal, and if only the namespace differs."""
    cache = make_cache(64)
    prompts = [[*([first] * 4), *([7] * 80)] for first in (1, 2)]
    ends = set()
    for namespace in (NS, Namespace("b", "m"), NS._replace(salt="s"), NS._replace(adapter="x")):
        for prompt in prompts:
            compute(cache, prompt, namespace)
            ends |= {cache.match(namespace, prompt).end, cache.match(namespace, prompt[:80]).end}
            cache.evict(64)
    assert len(ends) == 4 * 2 * 2
    end = ends.pop()
    assert end != "an end" and (end == end) and end not in ends


def test_match_and_lease_is_a_match_and_its_lease() -> None:
    cache = make_cache(8)
    compute(cache, range(16))
    match = cache.match(NS, range(14))
    with cache.match_and_lease(NS, range(14)) as lease:
        assert (lease.num_tokens, lease.block_ids.tolist()) == (12, match.block_ids.tolist())
        assert cache.evict(8) == 1
        audit.check(cache)
    with pytest.raises(LeaseError):
        lease.release()
    assert cache.evict(8) == 3
    with cache.match_and_lease(NS, range(14)) as miss:
        assert miss.num_tokens == 0 and miss.block_ids.tolist() == [] and cache.namespaces() == []
    audit.check(cache)


def test_match_and_lease_refuses_like_a_lease() -> None:
    """Borrowed blocks can't be leased if others' guarantees need them. Nothing changes."""
    cache = make_cache(8)
    compute(cache, range(24))
    cache.add_tenant(Tenant("b", guaranteed_blocks=4))
    before = cache.snapshot()
    for call in (cache.match_and_lease, cache.touch):
        with pytest.raises(OutOfBlocks):
            call(NS, range(24))
        with pytest.raises(TokenError):
            call(NS, [-1])
    assert same(before, cache)


def test_a_touch_is_a_use() -> None:
    """The prefix that was touched last is evicted last. What is resident doesn't change."""
    cache = make_cache(8)
    for first in (0, 100):
        compute(cache, range(first, first + 8))
    resident = cache.resident_blocks
    assert cache.touch(NS, range(6)) == 4 and cache.touch(NS, range(50, 60)) == 0
    assert cache.resident_blocks == resident == 4
    audit.check(cache)
    cache.evict(3)
    assert cache.match(NS, range(8)).num_tokens == 4


def test_open_without_a_lookup() -> None:
    """All is computed again, in other blocks, and counts as neither hit nor missed. It is committed as usual."""
    cache = make_cache()
    compute(cache, range(8))
    before = cache.stats()
    with cache.open(NS, range(12), lookup=False) as sequence:
        assert sequence.num_cached_tokens == 0
        assert not set(sequence.block_table.tolist()) & set(cache.match(NS, range(8)).block_ids.tolist())
        sequence.commit(12)
        audit.check(cache)
    after = cache.stats()
    assert (after.requests, after.hit_tokens) == (before.requests + 1, before.hit_tokens)
    assert after.missed_tokens == before.missed_tokens
    assert cache.match(NS, range(12)).num_tokens == 12 and cache.resident_blocks == 3
    audit.check(cache)


def test_open_without_a_lookup_beside_a_base() -> None:
    """It reads no base either, and evicts for itself if the pool is full."""
    cache = make_cache(8)
    cache.add_tenant(Tenant("b"))
    with cache.publish("base", Namespace("op", "m"), range(8), ["b"]) as publishing:
        publishing.commit(8)
    reader = Namespace("b", "m")
    with cache.open(reader, range(12), lookup=False) as sequence:
        assert sequence.num_cached_tokens == 0
        sequence.commit(12)
    audit.check(cache)
    with cache.open(reader, range(13)) as sequence:
        assert sequence.num_cached_tokens == 12
    audit.check(cache)
