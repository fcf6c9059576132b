"""Blocks of the engine: inserts from a position, with a record and a lease; and a pool that the engine owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv import (
    ArgumentError,
    ConfigError,
    KVLayout,
    Lease,
    Namespace,
    NotResident,
    PrefixCache,
    QuotaExceeded,
    RequestHints,
    Tenant,
    audit,
)
from radixkv.config import CacheConfig
from radixkv.index.engine_blocks import own_room
from radixkv_policies.lru import LRU
from tests.index.support import NS, compute, make_cache, same

OTHER = Namespace("b", "m")


def make_engines(num_blocks: int = 16, block_size: int = 4, **settings: Any) -> PrefixCache:
    """A cache whose blocks the engine owns."""
    return make_cache(num_blocks, block_size, blocks="engine", **settings)


def ids_of(cache: PrefixCache) -> dict[str, list[int]]:
    """Return where each block is."""
    found = cache.snapshot()
    resident = [np.frombuffer(node.block_ids, np.int32) for tree in found.trees for node in tree.nodes]
    return {
        "engine": sorted(found.lent_ids),
        "to reclaim": sorted(found.free_ids.tolist()),
        "resident": sorted(np.concatenate(resident).tolist()) if resident else [],
    }


# --- insert


def test_the_record_of_an_insert() -> None:
    """It names what was resident, the blocks of the whole prefix, and what stays the engine's."""
    cache = make_cache(32)
    compute(cache, range(8))
    theirs = cache.match(NS, range(8)).block_ids.tolist()
    mine = cache.allocate(4)
    record = cache.insert(NS, range(18), mine)
    assert (record.num_tokens, record.num_resident_tokens) == (16, 8)
    assert record.block_ids.tolist() == theirs + mine[2:].tolist()
    assert record.surplus.tolist() == mine[:2].tolist() and record.evicted.tolist() == []
    assert record.lease is None and record.end == cache.match(NS, range(16)).end
    assert sorted(cache.snapshot().lent_ids) == sorted(mine[:2].tolist())
    assert repr(record) == "<Inserted: 8 of 16 tokens are new, 2 blocks left over, 0 evicted>"
    audit.check(cache)


def test_insert_from_a_position() -> None:
    """Only blocks from there on are given. What comes before must be resident."""
    cache = make_cache(32)
    compute(cache, range(8))
    mine = cache.allocate(2)
    record = cache.insert(NS, range(16), mine, start=8)
    assert record.num_resident_tokens == 8 and record.surplus.tolist() == []
    assert cache.match(NS, range(16)).block_ids[2:].tolist() == mine.tolist()
    more, before = cache.allocate(1), cache.snapshot()
    with pytest.raises(NotResident) as refused:
        cache.insert(NS, [*range(8), 99, 99, 99, 99, *range(4)], more, start=12)
    assert (refused.value.num_tokens, refused.value.resident_tokens) == (12, 8)
    assert same(before, cache)
    assert cache.insert(NS, range(12), [], start=12).num_resident_tokens == 16 - 4
    audit.check(cache)


def test_the_trees_own_blocks_are_accepted_where_they_are() -> None:
    """An engine may pass a whole block table. A tree's block at another position is refused."""
    cache = make_cache(32)
    compute(cache, range(8))
    theirs, mine = cache.match(NS, range(8)).block_ids, cache.allocate(2)
    record = cache.insert(NS, range(16), np.concatenate([theirs, mine]))
    assert record.surplus.tolist() == [] and cache.stats().lent_blocks == 0
    mine, before = cache.allocate(1), cache.snapshot()
    for wrong in ([*theirs[::-1], *mine], [theirs[0], theirs[0], *mine]):
        with pytest.raises(ArgumentError, match="owned already"):
            cache.insert(NS, [*range(8), 7, 7, 7, 7], wrong)
    with pytest.raises(ArgumentError, match="owned already"):
        cache.insert(OTHER, range(4), theirs[:1])
    assert same(before, cache)
    audit.check(cache)


def test_one_block_twice_is_refused_among_surplus_and_new_blocks() -> None:
    cache = make_cache(32)
    compute(cache, range(4))
    mine, before = cache.allocate(2).tolist(), cache.snapshot()
    with pytest.raises(ArgumentError, match="each block once"):
        cache.insert(NS, range(8), [mine[0], mine[0]])
    assert same(before, cache)


@pytest.mark.parametrize("num_known", [0, 2, 4])
def test_insert_with_a_lease(num_known: int) -> None:
    """The whole prefix is leased, whatever was resident, until the release."""
    cache = make_cache(8)
    if num_known:
        compute(cache, range(4 * num_known))
    record = cache.insert(NS, range(16), cache.allocate(4), lease=True)
    assert isinstance(record.lease, Lease) and record.lease.num_tokens == 16
    assert record.lease.block_ids.tolist() == record.block_ids.tolist() and record.lease.end == record.end
    cache.free(record.surplus)
    assert cache.evict(8) == 0
    audit.check(cache)
    record.lease.release()
    assert cache.evict(8) == 4
    audit.check(cache)


def test_priorities_of_inserted_blocks() -> None:
    """The hints of an insert reach the policy: of three inserts the least important one is evicted first."""
    cache = make_cache(8, policy="priority")
    for first, priority in ((0, 90), (100, 10), (200, 50)):
        ids = range(first, first + 4)
        cache.insert(NS, ids, cache.allocate(1), hints=RequestHints(priority=priority))
    for gone in (100, 200, 0):
        assert cache.match(NS, range(gone, gone + 4)).num_tokens == 4
        cache.evict(1)
        assert cache.match(NS, range(gone, gone + 4)).num_tokens == 0


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ({"start": 3}, "a multiple of the block size, 4"),
        ({"start": -4}, "from 0 to 8"),
        ({"start": 12}, "from 0 to 8"),
        ({"start": True}, "start"),
        ({"start": "8"}, "start"),
        ({"start": 4}, "block_ids has 2 items; allowed: 1"),
        ({"hints": {"priority": 3}}, "a RequestHints"),
    ],
)
def test_wrong_arguments_of_an_insert(named: dict[str, Any], problem: str) -> None:
    cache = make_cache()
    mine = cache.allocate(2)
    before = cache.snapshot()
    with pytest.raises(ArgumentError, match=problem):
        cache.insert(NS, range(8), mine, **named)
    assert same(before, cache)


# --- the engine owns the pool


def test_all_blocks_are_the_engines_until_inserted() -> None:
    """Reclaimed blocks are the engine's again. Each block is in one place at any time."""
    cache = make_engines(8)
    assert ids_of(cache) == {"engine": list(range(8)), "to reclaim": [], "resident": []}
    cache.insert(NS, range(16), [6, 4, 2, 0])
    assert ids_of(cache) == {"engine": [1, 3, 5, 7], "to reclaim": [], "resident": [0, 2, 4, 6]}
    assert (cache.free_blocks, cache.evictable_blocks, cache.resident_blocks) == (0, 4, 4)
    assert cache.reclaim(1).tolist() == [0]  # the tail of the leaf
    assert cache.match(NS, range(16)).block_ids.tolist() == [6, 4, 2]
    assert sorted(cache.reclaim(100).tolist()) == [2, 4, 6]
    assert ids_of(cache) == {"engine": list(range(8)), "to reclaim": [], "resident": []}
    assert cache.reclaim(3).tolist() == []
    audit.check(cache)


def test_a_lease_keeps_blocks_from_being_reclaimed() -> None:
    cache = make_engines(8)
    lease = cache.insert(NS, range(12), [0, 1, 2], lease=True).lease
    cache.insert(NS, [*range(8), 9, 9, 9, 9], [3], start=8)
    assert lease is not None and cache.reclaim(8).tolist() == [3]
    lease.release()
    assert sorted(cache.reclaim(8).tolist()) == [0, 1, 2]


def test_an_insert_names_what_it_evicted() -> None:
    """Blocks above a tenant's limit come back with the record, and not later with ``reclaim``."""
    cache = make_engines(16)
    cache.add_tenant(Tenant("a", max_blocks=3))
    cache.insert(NS, range(12), [0, 1, 2])
    record = cache.insert(NS, range(50, 58), [3, 4])
    assert sorted(record.evicted.tolist()) == [1, 2] and record.surplus.tolist() == []
    assert ids_of(cache)["resident"] == [0, 3, 4] and cache.reclaim(0).tolist() == []
    with pytest.raises(QuotaExceeded):
        cache.insert(NS, range(100, 116), [5, 6, 7, 8])
    audit.check(cache)


class Declining(LRU):
    """Admits nothing."""

    def admit(self, node: Any) -> bool:
        """Decline."""
        return False


def test_blocks_that_a_policy_declines_come_back_with_the_insert() -> None:
    cache = make_engines(8)
    cache.add_tenant(Tenant("a", policy=Declining))
    record = cache.insert(NS, range(8), [5, 6])
    assert sorted(record.evicted.tolist()) == [5, 6] and cache.resident_blocks == 0
    assert ids_of(cache)["engine"] == list(range(8))


class Fickle(LRU):
    """Admits blocks until it is told otherwise."""

    admits = True

    def admit(self, node: Any) -> bool:
        """Admit, or not any more."""
        return self.admits


def test_resident_blocks_that_a_policy_gives_up_at_an_insert_come_back_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The insert brings nothing new: its hints are a use of what is there, and the policy may end it."""
    cache = make_engines(8)
    cache.add_tenant(Tenant("a", policy=Fickle))
    cache.insert(NS, range(8), [5, 6])
    monkeypatch.setattr(Fickle, "admits", False)
    record = cache.insert(NS, range(8), [5, 6], hints=RequestHints(priority=1))
    assert sorted(record.evicted.tolist()) == [5, 6] and cache.free_blocks == 0
    assert ids_of(cache)["engine"] == list(range(8))
    audit.check(cache)


def test_what_other_calls_free_is_reclaimed_next() -> None:
    """A clear, a purge and a lowered limit put blocks nowhere silently: the next ``reclaim`` hands all of them over."""
    cache = make_engines(16)
    cache.insert(NS, range(8), [0, 1])
    cache.insert(OTHER, range(12), [2, 3, 4])
    cache.clear(NS)
    assert cache.free_blocks == 2 and ids_of(cache)["to reclaim"] == [0, 1]
    cache.purge("b")
    assert sorted(cache.reclaim(0).tolist()) == [0, 1, 2, 3, 4] and cache.free_blocks == 0
    cache.insert(NS, range(12), [0, 1, 2])
    cache.add_tenant(Tenant("a", max_blocks=1))
    assert sorted(cache.reclaim(1).tolist()) == [1, 2]
    audit.check(cache)


def test_reclaim_for_a_tenant_keeps_the_guarantees_of_others() -> None:
    cache = make_engines(16)
    cache.add_tenant(Tenant("b", guaranteed_blocks=2))
    cache.insert(OTHER, range(12), [0, 1, 2])
    cache.insert(NS, range(8), [3, 4])
    assert sorted(cache.reclaim(16, tenant="a").tolist()) == [2, 3, 4]
    assert cache.match(OTHER, range(12)).num_tokens == 8
    assert sorted(cache.reclaim(16).tolist()) == [0, 1]
    audit.check(cache)


def test_reclaim_for_a_tenant_without_requests_keeps_the_guarantees_too() -> None:
    """A tenant that the cache doesn't know yet gets what others have borrowed, and stays unknown."""
    cache = make_engines(8)
    cache.add_tenant(Tenant("a", guaranteed_blocks=2))
    cache.insert(NS, range(16), [0, 1, 2, 3])
    assert len(cache.reclaim(4, "new")) == 2
    assert cache.blocks_of("a").resident_blocks == 2 and cache.tenants() == ["a"]
    assert len(cache.reclaim(4, "new")) == 0 and len(cache.reclaim(4)) == 2
    audit.check(cache)


def test_a_tenants_own_room() -> None:
    """Free blocks come first, then what its guarantee lacks, then its own victims. Others lose nothing."""
    cache = make_cache(16)
    cache.add_tenant(Tenant("a"))
    compute(cache, range(24))
    compute(cache, range(32), OTHER)
    with cache.match_and_lease(NS, range(8)):
        assert own_room(cache, "a", 2) == 2 and cache.match(NS, range(24)).num_tokens == 24
        assert own_room(cache, "a", 5) == 5 and cache.match(NS, range(24)).num_tokens == 12
        assert own_room(cache, "a", 16) == 6, "not what is leased"
        assert cache.match(NS, range(24)).num_tokens == 8
    assert cache.match(OTHER, range(32)).num_tokens == 32 and cache.free_blocks == 6
    assert own_room(cache, "new", 20) == 6 and own_room(cache, "new", 0) == 0
    assert "new" not in cache.tenants()
    audit.check(cache)


def test_a_tenants_own_room_has_its_guarantee() -> None:
    cache = make_cache(16)
    cache.add_tenant(Tenant("a", guaranteed_blocks=6))
    compute(cache, range(40), OTHER)
    compute(cache, range(100, 124), OTHER)
    assert own_room(cache, "a", 4) == 4 and own_room(cache, "a", 16) == 6
    assert cache.blocks_of("b").resident_blocks == 16, "nothing was evicted yet"
    compute(cache, range(24))
    assert own_room(cache, "a", 4) == 4 and cache.match(NS, range(24)).num_tokens == 8, "its own now"
    assert cache.blocks_of("b").resident_blocks == 10
    audit.check(cache)


def test_reclaim_of_more_than_a_slice() -> None:
    """The lock is released between slices; the ids are those of one call."""
    cache = make_engines(3_000, 1)
    cache.insert(NS, range(3_000), range(3_000))
    assert len(set(cache.reclaim(2_500).tolist())) == 2_500 and cache.resident_blocks == 500
    audit.check(cache)


def test_only_the_engines_blocks_can_be_inserted() -> None:
    """Neither a resident block nor one that waits to be reclaimed."""
    cache = make_engines(8)
    cache.insert(NS, range(8), [0, 1])
    cache.insert(OTHER, range(4), [2])
    cache.clear(OTHER)
    before = cache.snapshot()
    for block_id in (0, 2):
        with pytest.raises(ArgumentError, match="block_ids"):
            cache.insert(NS, range(90, 94), [block_id])
    assert same(before, cache)


@pytest.mark.parametrize("call", ["open", "publish", "allocate", "free", "evict"])
def test_calls_that_need_blocks_of_the_cache_are_refused(call: str) -> None:
    cache = make_engines(8)
    cache.insert(NS, range(8), [0, 1])
    before = cache.snapshot()
    calls: dict[str, Any] = {
        "open": lambda: cache.open(NS, range(9)),
        "publish": lambda: cache.publish("base", NS, range(8), ["b"]),
        "allocate": lambda: cache.allocate(1),
        "free": lambda: cache.free([3]),
        "evict": lambda: cache.evict(1),
    }
    with pytest.raises(ConfigError, match="blocks='engine' is not allowed; allowed: 'cache'"):
        calls[call]()
    assert same(before, cache)


def test_reclaim_needs_a_pool_of_the_engine() -> None:
    with pytest.raises(ConfigError, match="blocks='cache' is not allowed; allowed: 'engine' for reclaim"):
        make_cache().reclaim(1)
    with pytest.raises(ArgumentError, match="num_blocks=-1"):
        make_engines().reclaim(-1)
    with pytest.raises(ArgumentError, match="tenant"):
        make_engines().reclaim(1, tenant="")


def test_settings_of_a_pool_of_the_engine() -> None:
    with pytest.raises(ConfigError, match="blocks='mine'"):
        CacheConfig(8, blocks="mine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layout"):
        CacheConfig(8, layout=KVLayout(1, 1, 8), blocks="engine")


def test_a_strict_tenants_blocks_are_zeroed_before_the_engine_has_them() -> None:
    """Also those that come back in a record."""
    zeroed: list[int] = []
    cache = PrefixCache(
        CacheConfig(8, 4, blocks="engine"), scrub_blocks=lambda ids: zeroed.extend(ids.tolist())
    )
    cache.add_tenant(Tenant("a", guaranteed_blocks=2, mode="strict"))
    cache.insert(NS, range(8), [0, 1])
    record = cache.insert(NS, range(90, 98), [2, 3])
    assert sorted(zeroed) == sorted(record.evicted.tolist()) == [0, 1]
    zeroed.clear()
    assert sorted(cache.reclaim(2).tolist()) == sorted(zeroed) == [2, 3]


# --- counts


def test_counts_without_a_lock() -> None:
    """They are those of ``stats``, for the cache and for each tenant, through commits, evictions and clears."""
    cache = make_cache(16)
    cache.add_tenant(Tenant("a", guaranteed_blocks=4, mode="strict"))
    tenants = {name: cache.blocks_of(name) for name in ("a", "b")}

    def agrees() -> None:
        stats = cache.stats()
        found = cache.free_blocks, cache.evictable_blocks, cache.resident_blocks
        assert found == (stats.free_blocks, stats.evictable_blocks, stats.resident_blocks)
        for name, blocks in tenants.items():
            told = cache.tenant_stats(name)
            assert (blocks.evictable_blocks, blocks.resident_blocks) == (
                told.evictable_blocks,
                told.resident_blocks,
            )
        audit.check(cache)

    agrees()
    compute(cache, range(16))
    compute(cache, range(20), OTHER)
    agrees()
    with cache.open(OTHER, range(18)) as running:
        agrees()
        cache.clear(OTHER)
        running.commit(18)
        agrees()
    cache.evict(2)
    agrees()
    cache.purge("a")
    agrees()
    cache.remove_tenant("a")
    agrees()


def test_free_blocks_of_a_tenant() -> None:
    """Below its limit, as far as the pool has them. A strict tenant's number says nothing of others."""
    cache = make_cache(16)
    cache.add_tenant(Tenant("a", guaranteed_blocks=4, mode="strict"))
    cache.add_tenant(Tenant("b", max_blocks=14))
    strict, burst = cache.blocks_of("a"), cache.blocks_of("b")
    assert (strict.free_blocks, burst.free_blocks) == (4, 14)
    compute(cache, range(40), Namespace("c", "m"))
    assert (strict.free_blocks, burst.free_blocks) == (4, 6)
    compute(cache, range(12))
    assert (strict.free_blocks, burst.free_blocks) == (1, 3)
    assert cache.blocks_of("nobody").free_blocks == 3
    with pytest.raises(ArgumentError, match="tenant"):
        cache.blocks_of("a/b")
