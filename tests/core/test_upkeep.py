"""The thread in which policies learn: there for policies that do, for as long as their cache."""

from __future__ import annotations

import threading

import pytest

from radixkv import CacheConfig, PrefixCache, upkeep
from radixkv_policies import POLICIES, Policy

LEARNING = [name for name, policy in POLICIES.items() if policy.maintain is not Policy.maintain]


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "radixkv-upkeep"}


@pytest.mark.parametrize("policy", LEARNING)
def test_it_ends_with_its_cache(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing collects garbage: no cycle keeps the cache."""
    monkeypatch.setattr(upkeep, "PERIOD_S", 0.01)
    before = threads()
    cache = PrefixCache(CacheConfig(num_blocks=8, policy=policy))
    (thread,) = threads() - before
    cache.maintain()
    del cache
    thread.join(60)
    assert not thread.is_alive()


def test_lru_has_none() -> None:
    before = threads()
    cache = PrefixCache(CacheConfig(num_blocks=8))
    assert threads() <= before and cache.stats().free_blocks == 8
