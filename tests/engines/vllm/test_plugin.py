"""Which engines' blocks are zeroed, and which blocks: without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.engines.vllm import plugin
from radixkv.engines.vllm.cache import VllmCache
from radixkv.signing import KeySet
from radixkv.tenancy.request_keys import RequestFacts
from radixkv.tenancy.salt import SaltReader, make_salt

KEYS = KeySet.derive([b"a secret of the fleet"])
ACME, GLOBEX, INITECH = (RequestFacts(make_salt(KEYS, who)) for who in ("acme", "globex", "initech"))


def config(scheduler: Any) -> Any:
    return SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=scheduler))


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("radixkv.engines.vllm.AsyncScheduler", True),
        (VllmCache, True),
        (None, False),
        ("vllm.v1.core.sched.scheduler.Scheduler", False),
        ("radixkvish.Scheduler", False),
        (SimpleNamespace, False),
    ],
)
def test_only_radixkv_s_schedulers_have_their_blocks_zeroed(scheduler: Any, expected: bool) -> None:
    assert plugin.is_ours(config(scheduler)) is expected


def test_an_engine_that_is_switched_off_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_OFF", "1")
    assert not plugin.is_ours(config("radixkv.engines.vllm.Scheduler"))
    assert not plugin.is_ours(None)


def made() -> VllmCache:
    """A cache of 8 blocks of 4 tokens that acme has filled."""
    cache = VllmCache(9, 4, 64, model="m", salts=SaltReader(KEYS), policy="lru", scrub=True)
    assert cache.allocate("a", ACME, list(range(32)), 0, 32) is not None
    cache.end_step(cache.begin_step())
    cache.release("a")
    cache.take_blocks_to_zero()
    return cache


def test_a_block_that_has_several_tenants_between_two_steps_is_named_once() -> None:
    cache = made()
    cache.begin_step()
    taken = cache.allocate("b", GLOBEX, list(range(32)), 0, 32)
    cache.release("b")  # preempted in the same step
    again = cache.allocate("c", INITECH, list(range(32)), 0, 32)
    assert taken is not None and again is not None
    assert sorted(cache.take_blocks_to_zero()) == sorted(taken) == sorted(again)
    assert cache.take_blocks_to_zero() == []
    cache.release("c")


def test_a_load_that_runs_beside_the_step_is_not_zeroed_unless_it_fails() -> None:
    cache = made()
    cache.begin_step()
    taken = cache.allocate("b", GLOBEX, list(range(12)), 0, 12)
    assert taken is not None and len(taken) == 3
    cache.leave_unzeroed(taken)
    assert cache.take_blocks_to_zero() == []
    cache.zero_from("b", 4)
    assert cache.take_blocks_to_zero() == taken[1:]
    cache.release("b")


def test_without_zeroing_nothing_is_named() -> None:
    cache = VllmCache(9, 4, 64, model="m", policy="lru")
    assert cache.allocate("a", RequestFacts(), list(range(8)), 0, 8) is not None
    cache.zero_from("a", 0)
    assert cache.take_blocks_to_zero() == []
    cache.release("a")
