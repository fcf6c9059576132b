"""A long prompt gets its blocks in slices.

The policy gets the same calls as in one step, and the same blocks are evicted.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, RequestHints, audit
from radixkv.clock import ManualClock
from radixkv.index import requests
from radixkv.index.registry import Registry
from radixkv_policies import POLICIES
from tests.model import resident_prefixes

pytestmark = pytest.mark.pure
NS = Namespace("a", "m")
ASK_AGAIN = ("learned", "auto", "arc", "s3fifo")
"""These policies are asked again after each slice, so they may evict other blocks.

Two of them draw another sample, one finds another list above its target, and for one a slice finds a ghost that without
slices the prompt's own evictions would have pushed out, or the reverse. Later matches may differ too.
"""


class Recorded(PrefixCache):
    """Records the paths that its policies get, by their depths, and the calls of ``opened``."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._registry = _Noting(self._registry)
        self.told = self._registry.told


class _Noting(Registry):
    def __init__(self, original: Registry) -> None:
        for name in Registry.__slots__:
            setattr(self, name, getattr(original, name))
        self.told: list[tuple[Any, ...]] = []

    def new_policy(self, settings: Any) -> Any:
        policy = super().new_policy(settings)
        for name in ("touched", "opened"):
            setattr(policy, name, self._noting(name, getattr(policy, name)))
        policy.hook = lambda name: (  # type: ignore[method-assign]
            getattr(policy, name) if name in vars(policy) else type(policy).hook(policy, name)
        )
        return policy

    def _noting(self, name: str, method: Any) -> Any:
        def noted(nodes: Any, *rest: Any) -> Any:
            self.told.append((name, [node.depth for node in nodes], *rest))
            return method(nodes, *rest)

        return noted


@pytest.mark.parametrize("policy", POLICIES)
def test_slices_do_not_change_the_order_of_eviction(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random histories with hints. A use of matched blocks is reported once."""
    rng = random.Random(policy)
    clock = ManualClock()
    config = CacheConfig(40, 2, policy=policy, segment_tokens=2)
    short, long = (Recorded(config, clock=clock) for _ in range(2))
    num_sliced = 0
    for _ in range(250):
        clock.advance(rng.random() * 4)
        ids = [rng.randrange(3)] * rng.randrange(1, 14) + [rng.randrange(2) for _ in range(rng.randrange(16))]
        hints = RequestHints(labels={"turn": rng.randrange(3)}, priority=rng.randrange(101))
        for cache in (short, long):
            with monkeypatch.context() as patch:
                if cache is long:
                    patch.setattr(requests, "MAX_VICTIMS_AT_ONCE", 0)
                    patch.setattr(requests, "MAX_BLOCKS_AT_ONCE", 2)
                    patch.setattr(requests, "SLICE_BLOCKS", 3)
                    num_sliced += len(ids) > 4 and requests.takes_slices(cache, len(ids) * 4)
                with cache.open(NS, ids, hints=hints) as sequence:
                    sequence.commit(len(ids))
            cache.maintain()
            audit.check(cache)
        told = [name for name, *_ in long.told]
        assert told in (["opened"], ["touched", "opened"])
        if policy not in ASK_AGAIN:
            assert short.told == long.told
            assert resident_prefixes(short) == resident_prefixes(long)
        short.told.clear()
        long.told.clear()
    assert num_sliced > 100


def test_blocks_added_between_slices_are_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two slices another request computes more of the prompt.

    Its blocks are reported once, and the blocks above them once.
    """
    for name in ("MAX_VICTIMS_AT_ONCE", "MAX_BLOCKS_AT_ONCE"):
        monkeypatch.setattr(requests, name, 0)
    cache = Recorded(CacheConfig(24, 2, policy="lfu"))
    for ids in (range(8), [9] * 20):
        with cache.open(NS, ids) as sequence:
            sequence.commit(len(ids))
    other = cache.open(NS, range(14))
    cache.told.clear()
    make_room = requests.make_room

    def commit_and_make(*args: Any) -> None:
        other.commit(12)
        make_room(*args)

    monkeypatch.setattr(requests, "make_room", commit_and_make)
    with cache.open(NS, range(30)) as sequence:
        assert sequence.num_cached_tokens == 12
    assert [paths for name, paths, *_ in cache.told if name == "touched"] == [[4], [6]]
    other.release()
    audit.check(cache)
