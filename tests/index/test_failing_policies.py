"""A policy that isn't built in and fails: its tenant goes on with ``lru``, and nobody's call fails."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, RequestHints, Sequence, Tenant, audit
from radixkv.clock import ManualClock
from radixkv.errors import CapacityError
from radixkv.index import recovery
from radixkv_policies import LRU, POLICIES, Auto, Policy

A, B = Namespace("a", "m"), Namespace("b", "m")
HOOKS = (
    *(
        "leased",
        "unleased",
        "removed",
        "victim",
        "touched",
        "opened",
        "noted",
        "inserted",
        "extended",
        "split",
    ),
    *("trimmed", "admit", "most", "announced", "withdrawn", "expect_requests", "__len__"),
)


def failing(hook: str, first: int = 1, base: type[Policy] = Auto, answer: Any = RuntimeError) -> type[Policy]:
    """A policy of which one hook fails from its n-th call on: it raises ``answer``, or returns it."""
    calls = 0

    def method(self: Policy, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < first:
            return getattr(base, hook)(self, *args)
        if isinstance(answer, type):
            raise answer("it went wrong")
        return answer

    return type("Failing", (base,), {hook: method})


def play(cache: PrefixCache, steps: int, seed: int = 0) -> None:
    """Random requests of both tenants in a small pool. Every law holds after each step."""
    rng, running, waiting = random.Random(seed), list[Sequence](), list[Any]()
    session = cache.session(A, "s")
    for _ in range(steps):
        namespace, ids = rng.choice((A, B)), [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        kind = rng.randrange(10)
        try:
            if kind < 5:
                running.append(cache.open(namespace, ids, hints=RequestHints({"turn": 1})))
                running[-1].commit(len(ids))
            elif kind == 5 and running:
                running[-1].extend(ids)
                running[-1].commit(running[-1].num_tokens)
            elif kind == 6:
                waiting.append(cache.announce(namespace, ids))
            elif kind == 7 and waiting:
                waiting.pop(0).withdraw()
            elif kind == 8:
                cache.note(A, ids, RequestHints({"tool_pending": True}))
                with session.open(ids) as sequence:
                    sequence.commit(len(ids))
                session.pause()
            else:
                cache.evict(2)
        except CapacityError:
            pass
        if len(running) > 2:
            running.pop(0).release()
        cache.stats()
        audit.check(cache)
    for each in (*running, session):
        each.release() if isinstance(each, Sequence) else each.close()
    for announcement in waiting:
        announcement.withdraw()


def made(policy: Any, num_blocks: int = 24) -> PrefixCache:
    """A cache in which tenant a has this policy."""
    cache = PrefixCache(CacheConfig(num_blocks, 2, segment_tokens=2), clock=ManualClock())
    cache.add_tenant(Tenant("a", policy=policy))
    return cache


def policy_of(cache: PrefixCache, tenant: str = "a") -> type[Policy]:
    """The class of a tenant's policy."""
    return type(cache._tenants[tenant].policy)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("first", [1, 3])
def test_a_hook_that_raises(hook: str, first: int, caplog: pytest.LogCaptureFixture) -> None:
    base = POLICIES["doorkeeper"] if hook == "admit" else Auto
    cache = made(failing(hook, 1 if hook in ("expect_requests", "withdrawn") else first, base))
    with caplog.at_level(logging.INFO, "radixkv.index"):
        for seed in range(3):
            play(cache, 40, seed)
    assert policy_of(cache) is LRU
    assert cache.stats().failed_policies == cache.tenant_stats("a").failed_policies == 1
    assert cache.tenant_stats("b").failed_policies == 0
    (told,) = [each.getMessage() for each in caplog.records]
    assert f"policy Failing of tenant 'a' failed in {hook}, so lru replaces it" in told
    assert "RuntimeError: it went wrong" in told and "\n" not in told
    cache.evict(24)
    assert cache.free_blocks == 24
    audit.check(cache)


@pytest.mark.parametrize("hook", ["victim", "most", "admit", "removed", "unleased", "inserted", "trimmed"])
def test_a_request_of_another_tenant_gets_its_blocks(hook: str) -> None:
    """It evicts what the failing policy's tenant has."""
    cache = made(failing(hook), 8)
    for first in range(2):
        with cache.open(A, [first, *range(1, 7)]) as sequence:
            sequence.commit(7)
    with cache.open(B, range(16)) as sequence:
        sequence.commit(16)
    assert cache.match(B, range(16)).num_tokens == 16
    assert cache.tenant_stats("a").resident_blocks == 0
    audit.check(cache)


def in_use(cache: PrefixCache) -> Any:
    """A node that is leased."""
    running = cache.open(A, [9, 9, 9])
    running.commit(3)
    return running._state._node, running


@pytest.mark.parametrize(
    "what", ["nothing", "a number", "a node in use", "a node of another tenant", "no blocks"]
)
def test_an_answer_that_cannot_be_right(what: str) -> None:
    cache = made("lru", 8)
    node, running = in_use(cache)
    with cache.open(B, [1, 1]) as other:
        other.commit(2)
        foreign = other._state._node
    answers = {"nothing": None, "a number": 5, "a node in use": node, "a node of another tenant": foreign}
    wrong = failing("most" if what == "no blocks" else "victim", answer=answers.get(what, 0))
    cache.add_tenant(Tenant("a", policy=wrong))
    for first in range(3):
        with cache.open(A, [first, *range(1, 7)]) as sequence:
            sequence.commit(7)
    assert policy_of(cache) is LRU and cache.stats().failed_policies == 1
    running.release()
    audit.check(cache)


def test_the_order_of_the_failed_policy_is_kept() -> None:
    cache = made(failing("noted", base=LRU))
    for first in range(6):
        with cache.open(A, [first, 0, 0]) as sequence:
            sequence.commit(3)
    with cache.open(A, [0, 0, 0]):
        pass
    cache.note(A, [0, 0], RequestHints({"turn": 1}))
    assert policy_of(cache) is LRU
    for gone in (1, 2, 3, 4, 5, 0):
        cache.evict(1)
        assert cache.match(A, [gone, 0]).num_tokens == 0
    assert cache.tenant_stats("a").resident_blocks == 0


def test_a_policy_that_fails_for_ever_stays_away_after_a_repair() -> None:
    cache = made(failing("inserted"))
    play(cache, 20)
    with cache._lock:
        recovery.mend(cache, KeyboardInterrupt())
    play(cache, 20)
    assert policy_of(cache) is LRU and cache.stats().failed_policies == 1 and not cache.is_dead


@pytest.mark.parametrize("hook", ["inserted", "unleased", "begin"])
def test_a_repair_succeeds_though_a_policy_cannot_start_again(hook: str) -> None:
    """Without that, the cache would be dead for all tenants."""
    made_before = 0

    def factory(*args: Any, **named: Any) -> Policy:
        nonlocal made_before
        made_before += 1
        return LRU(*args, **named) if made_before == 1 else failing(hook)(*args, **named)

    cache = made(factory)
    play(cache, 20)
    with cache._lock:
        recovery.mend(cache, KeyboardInterrupt())
    assert policy_of(cache) is LRU and cache.stats().failed_policies == 1
    play(cache, 20)
    assert not cache.is_dead


def test_other_settings_give_the_tenant_another_policy() -> None:
    cache = made(failing("victim"))
    play(cache, 30)
    assert policy_of(cache) is LRU
    cache.add_tenant(Tenant("a", policy="fifo"))
    assert policy_of(cache) is POLICIES["fifo"]
    play(cache, 30)
    assert policy_of(cache) is POLICIES["fifo"] and cache.stats().failed_policies == 1


def test_a_policy_that_cannot_be_made_for_a_tenant_that_nobody_added() -> None:
    config = CacheConfig(24, 2, default_tenant=Tenant("*", policy=failing("begin")))
    cache = PrefixCache(config)
    play(cache, 40)
    assert policy_of(cache) is policy_of(cache, "b") is LRU and cache.stats().failed_policies == 2


def test_a_policy_that_cannot_be_made_is_refused_where_it_is_set() -> None:
    cache = made("lru")
    with pytest.raises(RuntimeError, match="it went wrong"):
        cache.add_tenant(Tenant("a", policy=failing("begin")))
    play(cache, 20)


def test_a_policy_that_calls_the_cache() -> None:
    """It gets ReentrantCall. If it doesn't catch it, it fails like any other."""
    caches: list[PrefixCache] = []

    class Calls(LRU):
        def touched(self, nodes: Any) -> None:
            caches[0].stats()

    caches.append(made(Calls))
    play(caches[0], 30)
    assert policy_of(caches[0]) is LRU and caches[0].stats().failed_policies == 1


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_is_no_fault_of_the_policy_interrupts_the_call(error: type[BaseException]) -> None:
    cache = made(failing("touched", 2, answer=error))
    for _ in range(2):
        with cache.open(A, [1, 1, 1]) as sequence:
            sequence.commit(3)
    with pytest.raises(error):
        cache.open(A, [1, 1, 1])
    assert policy_of(cache).__name__ == "Failing" and cache.stats().failed_policies == 0
    audit.check(cache)


def test_a_built_in_policy_has_its_own_hooks() -> None:
    """They cost nothing more than without this."""
    cache = made("lru")
    state = cache._tenants["a"]
    assert not state.guarded and state.on_leased.__name__ == "pop"


def test_the_metric_is_told() -> None:
    from radixkv.service.metrics import TenantLabels, _CacheCollector

    cache: Any = made(failing("victim"))
    play(cache, 30)
    collector = _CacheCollector(cache, lambda: ["a", "b"], TenantLabels())
    collector.read()
    samples = {
        (sample.name, sample.labels.get("tenant")): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }
    assert samples["radixkv_cache_failed_policies_total", None] == 1
    assert samples["radixkv_tenant_failed_policies_total", "a"] == 1
    assert samples["radixkv_tenant_failed_policies_total", "b"] == 0
