"""What connectors and tools read of vLLM's own manager, as views of a VllmCache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from radixkv.engines.vllm.cache import VllmCache
from radixkv.engines.vllm.views import FreeBlocks, ManagerView, ResidentBlocks
from radixkv.tenancy.request_keys import RequestFacts

PLAIN = RequestFacts()
IDS = list(range(18))


def made() -> tuple[VllmCache, ManagerView]:
    cache = VllmCache(40, 4, 256, model="m", policy="lru")
    return cache, ManagerView(SimpleNamespace(block_size=4), cache)


def test_views_follow_requests_and_name_what_others_may_find() -> None:
    cache, view = made()
    free, resident = FreeBlocks(cache), ResidentBlocks(cache)
    blocks, num_cached = view.req_to_blocks, view.num_cached_block
    assert (view.block_size, len(blocks), free.num_free_blocks, len(resident)) == (4, 0, 39, 0)
    step = cache.begin_step()
    cache.lookup("a", PLAIN, IDS)
    cache.allocate("a", PLAIN, IDS, 0, 18)
    assert list(blocks) == list(num_cached) == ["a"] and num_cached["a"] == 4
    cache.lookup("b", PLAIN, IDS)
    cache.allocate("b", PLAIN, IDS, 16, 2)
    cache.end_step(step)
    first, second = blocks["a"], blocks["b"]
    assert [each.block_id for each in first] == cache.blocks("a")
    assert [each.ref_cnt for each in first] == [2, 2, 2, 2, 1]
    names = [each.block_hash for each in first]
    assert names == [each._block_hash for each in second] and names[4] is None and len({*names}) == 5
    assert len(resident) == 4 and free.num_free_blocks == 39 - 6
    cache.release("a")
    assert "a" not in blocks and [each.ref_cnt for each in blocks["b"]] == [1] * 5
    with pytest.raises(KeyError):
        num_cached["a"]
    cache.release("b")
    assert not blocks and free.num_free_blocks == 39


def test_names_differ_between_namespaces_and_lengths() -> None:
    cache, view = made()
    step = cache.begin_step()
    for name, salt, ids in (("a", None, IDS), ("b", "salt", IDS), ("c", None, [*IDS[:4], *IDS[:8]])):
        facts = RequestFacts(cache_salt=salt)
        found, num_found = cache.lookup(name, facts, ids)
        cache.allocate(name, facts, ids, num_found, len(ids) - num_found)
        assert not found
    cache.end_step(step)
    names = {name: [each.block_hash for each in view.req_to_blocks[name]] for name in "abc"}
    assert names["a"][0] == names["c"][0] and names["a"][1] != names["c"][1] != names["c"][0]
    assert set(names["a"]) & set(names["b"]) == {None}
    for name in "abc":
        cache.release(name)


def test_tokens_that_an_engine_claims_without_a_lookup_are_never_shared() -> None:
    """Such as on a decode worker, whose requests come with all but one token computed elsewhere."""
    cache, view = made()
    step = cache.begin_step()
    assert len(cache.allocate("a", PLAIN, IDS, 17, 1) or ()) == 1 and len(cache.blocks("a")) == 5
    cache.end_step(step)
    cache.commit("a", IDS, 18)
    assert view.num_cached_block["a"] == 0
    assert cache.lookup("b", PLAIN, IDS) == ([], 0) and cache.cache.resident_blocks == 0
    cache.release("a")
    assert cache.cache.resident_blocks == 0 and not cache.has_requests
