"""The thread in which policies learn. It exists only for policies that learn, and only as long as their cache."""

from __future__ import annotations

import threading

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, Tenant
from radixkv.index import maintenance
from radixkv_policies import LRU, POLICIES, Policy
from tests.waiting import ended, eventually

LEARNING = [name for name, policy in POLICIES.items() if policy.maintain is not Policy.maintain]


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "radixkv-maintenance"}


@pytest.mark.parametrize("policy", LEARNING)
def test_the_maintenance_thread_ends_with_its_cache(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends without a garbage collection: no reference cycle keeps the cache alive."""
    monkeypatch.setattr(maintenance, "PERIOD_S", 0.01)
    before = threads()
    cache = PrefixCache(CacheConfig(num_blocks=8, policy=policy))
    (thread,) = threads() - before
    cache.maintain()
    del cache
    ended(thread)


def test_lru_has_no_maintenance_thread() -> None:
    before = threads()
    cache = PrefixCache(CacheConfig(num_blocks=8))
    assert threads() <= before and cache.stats().free_blocks == 8


class Failing(LRU):
    """A policy that cannot learn."""

    def maintain(self) -> None:
        raise RuntimeError("no more room for what it learns")


def test_a_failing_policy_does_not_stop_the_maintenance_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[threading.ExceptHookArgs] = []
    learned: list[str] = []

    class Learning(LRU):
        def maintain(self) -> None:
            learned.append("something")

    monkeypatch.setattr(maintenance, "PERIOD_S", 0.01)
    monkeypatch.setattr(threading, "excepthook", told.append)
    before = threads()
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=4))
    cache.add_tenant(Tenant("a", max_pinned_blocks=4, policy=Failing))
    cache.add_tenant(Tenant("b", policy=Learning))
    with cache.open(Namespace("a", "m"), range(8)) as sequence:
        sequence.commit(8)
    cache.pin(Namespace("a", "m"), range(8), 0.001)
    eventually(lambda its=cache: not its.stats().num_pins, "the end of the pin")
    eventually(lambda: len(learned) > 1, "what the other policy learns")
    eventually(lambda: len(told) > 1, "the report of each failure")
    assert {each.exc_type for each in told} == {RuntimeError}
    with pytest.raises(RuntimeError, match="no more room"):
        cache.maintain()
    (thread,) = threads() - before
    del cache, sequence

    def is_over() -> bool:
        told.clear()  # a recorded error keeps the failed policy's cache alive
        return not thread.is_alive()

    eventually(is_over, "the end of the thread")
