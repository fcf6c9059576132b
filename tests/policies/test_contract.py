"""Tests of the contract itself: policies that break a promise fail it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, find, settings

from radixkv import CacheConfig, Namespace, PrefixCache, Tenant
from radixkv.clock import ManualClock
from radixkv_policies import LFU, LRU, POLICIES, Policy
from radixkv_policies.leaves import LeafPolicy
from tests.policies.contract import Life, Reference, lives
from tests.policies.test_lfu import LowestPriorityFirst
from tests.policies.test_lru import LastUseEndedFirst


class Newest(LRU):
    """Evicts the most recent node, so a parent goes before its child."""

    def victim(self) -> Any:
        """The youngest node."""
        return next(reversed(self._order), None)


class Forgetful(LRU):
    """Loses the upper half of a node that is split while it is evictable."""

    def split(self, upper: Any, lower: Any, num_blocks: int) -> None:
        """Do nothing."""


class Restless(LRU):
    """Each question for the victim makes the victim the youngest."""

    def victim(self) -> Any:
        """The oldest node, moved to the young end."""
        oldest = super().victim()
        if oldest is not None:
            self._order.move_to_end(oldest)
        return oldest


class Ageless(LFU):
    """Never ages."""

    def trimmed(self, node: Any, num_blocks: int) -> None:
        """Only shrink the node."""
        LeafPolicy.trimmed(self, node, num_blocks)


@pytest.mark.parametrize(
    "broken, reference",
    [
        (Newest, None),
        (Forgetful, None),
        (Restless, None),
        (Ageless, LowestPriorityFirst),
        (LFU, LastUseEndedFirst),
        (LRU, LowestPriorityFirst),
    ],
)
def test_the_contract_detects_a_broken_policy(
    broken: type[Policy], reference: type[Reference] | None
) -> None:
    """Some life shows the fault."""

    def breaks(ops: list[Any]) -> bool:
        clock = ManualClock()
        life = Life(broken(64, clock, 0), clock, reference)
        try:
            for op in ops:
                life.step(op)
            life.end_all()
        except (AssertionError, KeyError):
            return True
        return False

    found = find(
        lives,
        breaks,
        settings=settings(max_examples=5_000, phases=[Phase.generate], database=None, derandomize=True),
    )
    assert breaks(found)


def test_a_policy_without_an_order_is_refused() -> None:
    """The error names the missing part, before anything depends on the policy."""

    class Half(Policy):
        def victim(self) -> Any:
            """Do nothing."""

        def __len__(self) -> int:
            return 0

    with pytest.raises(TypeError, match="the policy Half has no leased, unleased, removed"):
        Half(64, ManualClock(), 0)


def test_a_policy_is_an_instance_of_its_own_class_only() -> None:
    """This also holds for compiled policies."""
    policies = [policy(64, ManualClock(), 0) for policy in POLICIES.values()]
    for policy in policies:
        assert [isinstance(policy, kind) for kind in POLICIES.values()] == [
            type(policy) is kind for kind in POLICIES.values()
        ]
        assert isinstance(policy, Policy)


@pytest.mark.parametrize("name", POLICIES)
def test_the_memory_of_a_policy_is_freed_with_its_cache(name: str) -> None:
    """Compiled pieces are invisible to the garbage collector. A cycle through one would keep everything alive."""
    clock = ManualClock()
    cache = PrefixCache(CacheConfig(num_blocks=80, policy=name), clock=clock)
    cache.add_tenant(Tenant("t"))
    for number in range(4):
        with cache.open(Namespace("t", "m"), np.arange(1_024) + 5_000 * (number % 3)) as sequence:
            sequence.commit(1_024)
        clock.advance(1.0)
    assert cache.stats().evicted_blocks
    seen = weakref.ref(clock)
    del cache, sequence, clock
    gc.collect()
    assert seen() is None
