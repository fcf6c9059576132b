"""The contract itself: policies that break a promise fail it."""

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
from tests.policies.contract import Life, Reference, lives
from tests.policies.test_lfu import LowestPriorityFirst
from tests.policies.test_lru import LastUseEndedFirst


class Newest(LRU):
    """Evicts what was used last: a parent before its child."""

    def victim(self) -> Any:
        """The youngest."""
        return next(reversed(self._order), None)


class Forgetful(LRU):
    """Loses the upper half of a node that is split while evictable."""

    def split(self, upper: Any, lower: Any, num_blocks: int) -> None:
        """Says nothing of it."""


class Restless(LRU):
    """Asking for a victim makes it the youngest."""

    def victim(self) -> Any:
        """The oldest, once."""
        oldest = super().victim()
        if oldest is not None:
            self._order.move_to_end(oldest)
        return oldest


class Ageless(LFU):
    """Never ages."""

    def trimmed(self, node: Any, num_blocks: int) -> None:
        """Learns nothing from it."""


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
def test_a_broken_policy_is_found(broken: type[Policy], reference: type[Reference] | None) -> None:
    """Some life shows it."""

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
    """It says what is missing, before anything depends on it."""

    class Half(Policy):
        def victim(self) -> Any:
            """Nothing."""

        def __len__(self) -> int:
            return 0

    with pytest.raises(TypeError, match="the policy Half has no leased, unleased, removed"):
        Half(64, ManualClock(), 0)


def test_policies_are_instances_of_their_own_classes_only() -> None:
    """Compiled ones too."""
    policies = [policy(64, ManualClock(), 0) for policy in POLICIES.values()]
    for policy in policies:
        assert [isinstance(policy, kind) for kind in POLICIES.values()] == [
            type(policy) is kind for kind in POLICIES.values()
        ]
        assert isinstance(policy, Policy)


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_policy_remembers_goes_with_its_cache(name: str) -> None:
    """Pieces, compiled, are nothing that the collector looks into: a cycle through one would keep all for ever."""
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
