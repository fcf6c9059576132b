"""Pins stay resident for their time, within the budget, and never at the cost of other tenants' guarantees."""

from __future__ import annotations

import gc
import math
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import (
    ArgumentError,
    CacheConfig,
    LeaseError,
    Namespace,
    NamespaceError,
    NotResident,
    OutOfBlocks,
    Pin,
    PinBudgetExceeded,
    PinLimitExceeded,
    PrefixCache,
    QuotaExceeded,
    Tenant,
    TokenError,
    audit,
)
from radixkv.clock import ManualClock
from radixkv.config import MAX_PINS
from radixkv.errors import CapacityError
from radixkv.index import maintenance
from radixkv.index.pins import MAX_TTL_S, SLICE_PINS
from radixkv.index.purge import PIN_NODES, SLICE_NODES
from radixkv_policies import POLICIES
from tests.index.support import NS, compute, num_events, same
from tests.waiting import ended, eventually

OTHER = Namespace("b", "m")


def make(num_blocks: int = 16, *tenants: Tenant, policy: str = "lru", **default: Any) -> PrefixCache:
    """A cache with its own clock. Without tenants, every tenant may pin up to 8 blocks."""
    held_to = Tenant("default", **{"max_pinned_blocks": 8, **default})
    config = CacheConfig(num_blocks, 4, policy=policy, default_tenant=held_to, segment_tokens=4)
    cache = PrefixCache(config, clock=ManualClock(), scrub_blocks=lambda block_ids: None)
    for tenant in tenants:
        cache.add_tenant(tenant)
    return cache


def advance(cache: PrefixCache, seconds: float) -> None:
    clock = cache._clock
    assert isinstance(clock, ManualClock)
    clock.advance(seconds)


def matched(cache: PrefixCache, ids: Any, namespace: Namespace = NS) -> int:
    return cache.match(namespace, ids).num_tokens


def flood(cache: PrefixCache, namespace: Namespace = NS, times: int = 30) -> None:
    """Make requests that keep no blocks."""
    for at in range(times):
        compute(cache, [100 + at] * 8, namespace)


def test_a_pin_holds_until_its_time_ends() -> None:
    cache = make()
    compute(cache, range(16))
    pin = cache.pin(NS, range(11), 60)
    assert pin == Pin(1, NS, 8, 2, 60.0) and cache.pins() == [pin] == cache.pins("a")
    assert (cache.stats().pinned_blocks, cache.tenant_stats("a").num_pins) == (2, 1)
    flood(cache)
    assert matched(cache, range(16)) == 8
    advance(cache, 59.5)
    assert cache.pins()[0].ttl_s == 0.5 and cache.pins("b") == []
    cache.maintain()
    assert cache.evict(16) == 14 and matched(cache, range(16)) == 8
    advance(cache, 0.5)
    assert cache.pins() == []
    cache.maintain()
    assert cache.stats().num_pins == cache.stats().pinned_blocks == 0
    flood(cache)
    assert matched(cache, range(16)) == 0
    audit.check(cache)


def test_a_pin_can_be_ended_once() -> None:
    cache = make()
    compute(cache, range(8))
    pin = cache.pin(NS, range(8), 60)
    cache.unpin(pin)
    assert cache.evict(16) == 2 and not cache.pins()
    with pytest.raises(LeaseError, match="ended"):
        cache.unpin(pin)
    compute(cache, range(8))
    again = cache.pin(NS, range(8), 60)
    assert again.id != pin.id
    with pytest.raises(LeaseError):
        cache.unpin(pin)
    advance(cache, 60)
    with pytest.raises(LeaseError):
        cache.unpin(again)
    with pytest.raises(ArgumentError, match="a Pin"):
        cache.unpin("a pin")
    audit.check(cache)


def test_a_pin_of_another_cache_cannot_be_ended() -> None:
    here, there = make(), make()
    for cache, num_tokens in ((here, 8), (there, 4)):
        compute(cache, range(8))
        cache.pin(NS, range(num_tokens), 60)
    with pytest.raises(LeaseError):
        here.unpin(there.pins()[0])
    assert len(here.pins()) == len(there.pins()) == 1


def test_a_repeated_pin_restarts_its_time() -> None:
    """The new time may be longer or shorter. It stays one pin and is counted once."""
    cache = make()
    compute(cache, range(8))
    first = cache.pin(NS, range(8), 10)
    advance(cache, 9)
    assert cache.pin(NS, range(9), 10) == first
    advance(cache, 9)
    cache.maintain()
    assert [pin.ttl_s for pin in cache.pins()] == [1.0] and cache.stats().pinned_blocks == 2
    cache.pin(NS, range(8), 0.5)
    advance(cache, 0.5)
    cache.maintain()
    assert cache.stats().num_pins == 0
    for _ in range(1_000):
        cache.pin(NS, range(8), 1_000)
    assert len(cache._pins.tenants["a"]._due) < 100, "replaced expiry entries are dropped"
    audit.check(cache)


def test_only_a_fully_resident_prefix_can_be_pinned() -> None:
    cache = make()
    compute(cache, range(8))
    before = cache.snapshot()
    with pytest.raises(NotResident, match="only 8 of 12 tokens") as caught:
        cache.pin(NS, range(12), 60)
    assert (caught.value.num_tokens, caught.value.resident_tokens) == (12, 8)
    with pytest.raises(NotResident, match="only 0 of 8"):
        cache.pin(OTHER, range(8), 60)
    with pytest.raises(NotResident, match="only 0 of 8"):
        cache.pin(Namespace("nobody", "m"), range(8), 60)
    sequence = cache.open(NS, range(20, 28))
    with pytest.raises(NotResident):
        cache.pin(NS, range(20, 28), 60)
    sequence.release()
    assert same(before, cache)


@pytest.mark.parametrize("ttl_s", [0, -1, math.nan, math.inf, MAX_TTL_S * 2, True, "60", None, 10**400])
def test_an_invalid_time_is_refused(ttl_s: Any) -> None:
    cache = make()
    compute(cache, range(8))
    before = cache.snapshot()
    with pytest.raises(ArgumentError, match="ttl_s"):
        cache.pin(NS, range(8), ttl_s)
    assert same(before, cache)


def test_invalid_arguments_of_pin_are_refused() -> None:
    cache = make()
    compute(cache, range(8))
    with pytest.raises(ArgumentError, match="one block"):
        cache.pin(NS, range(3), 60)
    with pytest.raises(TokenError):
        cache.pin(NS, [1.5] * 4, 60)
    with pytest.raises(ArgumentError, match="a Namespace"):
        cache.pin("a", range(8), 60)  # type: ignore[arg-type]
    audit.check(cache)


def test_the_budget_counts_shared_blocks_once() -> None:
    cache = make(32, max_pinned_blocks=5)
    for tail in (1, 2, 3):
        compute(cache, [0] * 12 + [tail] * 4)
    for tail in (1, 2):
        cache.pin(NS, [0] * 12 + [tail] * 4, 60)
    cache.pin(NS, [0] * 8, 60)
    assert cache.stats().pinned_blocks == 5 and cache.stats().num_pins == 3
    before = cache.snapshot()
    with pytest.raises(PinBudgetExceeded, match="1 blocks to pin, 5 of the tenant's budget of 5") as caught:
        cache.pin(NS, [0] * 12 + [3] * 4, 60)
    assert (caught.value.needed, caught.value.budget, caught.value.pinned) == (1, 5, 5)
    assert same(before, cache)
    cache.unpin(cache.pins()[0])
    cache.pin(NS, [0] * 12 + [3] * 4, 60)
    advance(cache, 60)
    compute(cache, [9] * 12)
    assert cache.pin(NS, [9] * 12, 60).num_blocks == 3, "an expired pin does not count"
    audit.check(cache)


def test_the_budget_is_the_guarantee_unless_it_is_set() -> None:
    assert Tenant("a").pin_budget == 0 and Tenant("a", guaranteed_blocks=4).pin_budget == 4
    assert Tenant("a", guaranteed_blocks=4, mode="strict").pin_budget == 4
    assert Tenant("a", guaranteed_blocks=4, max_pinned_blocks=0).pin_budget == 0
    assert Tenant("a", max_blocks=4, max_pinned_blocks=4).pin_budget == 4
    for wrong in (-1, True, 1.5, "1"):
        with pytest.raises(ArgumentError, match="max_pinned_blocks"):
            Tenant("a", max_pinned_blocks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="at most 4, its limit"):
        Tenant("a", max_blocks=4, max_pinned_blocks=5)
    with pytest.raises(ArgumentError, match="at most 4, its limit"):
        Tenant("a", guaranteed_blocks=4, mode="strict", max_pinned_blocks=5)
    cache = PrefixCache(CacheConfig(8, 4))
    cache.add_tenant(Tenant("a"))
    compute(cache, range(4))
    with pytest.raises(PinBudgetExceeded, match="budget of 0"):
        cache.pin(NS, range(4), 60)
    audit.check(cache)


@pytest.mark.parametrize(
    ("default", "budget"),
    [(Tenant("any"), 4), (Tenant("any", max_blocks=6), 3), (Tenant("any", max_pinned_blocks=0), 0)],
)
def test_a_tenant_that_was_never_added_may_pin_half_of_its_limit(default: Tenant, budget: int) -> None:
    """A cache that was given no tenants belongs to its user."""
    cache = PrefixCache(CacheConfig(8, 4, default_tenant=default))
    compute(cache, range(20))
    for pinned in range(1, budget + 1):
        cache.pin(NS, range(4 * pinned), 60)
    before = cache.snapshot()
    with pytest.raises(
        PinBudgetExceeded, match=f"1 blocks to pin, {budget} of the tenant's budget of {budget}"
    ):
        cache.pin(NS, range(4 * budget + 4), 60)
    assert same(before, cache)
    cache.add_tenant(Tenant("a"))
    with pytest.raises(PinBudgetExceeded, match="budget of 0"):
        cache.pin(NS, range(20), 60)
    audit.check(cache)


def test_a_lower_budget_ends_no_pin() -> None:
    cache = make(16, Tenant("a", guaranteed_blocks=4))
    compute(cache, range(16))
    compute(cache, [7] * 4)
    cache.pin(NS, range(16), 60)
    cache.add_tenant(Tenant("a", guaranteed_blocks=2))
    assert len(cache.pins()) == 1 and cache.stats().pinned_blocks == 4
    with pytest.raises(PinBudgetExceeded):
        cache.pin(NS, [7] * 4, 60)
    audit.check(cache)


def test_a_pin_survives_splits() -> None:
    cache = make(32)
    compute(cache, range(16))
    cache.pin(NS, range(12), 60)
    for stop in (4, 8, 12):
        compute(cache, [*range(stop), 90, 91, 92, 93])
        assert cache.evict(32) > 0 and matched(cache, range(16)) == 12
        audit.check(cache)
    assert cache.stats().pinned_blocks == 3


def test_a_clear_or_a_purge_ends_pins() -> None:
    """This includes so many pins that they end in slices. A running sequence keeps only its own blocks."""
    num_pins = 2 * SLICE_NODES // PIN_NODES + 1
    for forget in (lambda cache: cache.clear(NS), lambda cache: cache.purge("a")):
        cache = make(64, max_pinned_blocks=64)
        for at in range(num_pins):
            compute(cache, [at] * 4)
            cache.pin(NS, [at] * 4, 60)
        compute(cache, range(4), OTHER)
        kept = cache.pin(OTHER, range(4), 60)
        running = cache.open(NS, [0] * 8)
        pin = cache.pins("a")[0]
        assert forget(cache) == num_pins
        assert cache.pins() == [kept] and cache.stats().pinned_blocks == 1
        audit.check(cache)
        with pytest.raises(LeaseError):
            cache.unpin(pin)
        running.release()
        assert cache.stats().free_blocks == 63
        cache.unpin(kept)
        audit.check(cache)


def test_removing_a_tenant_ends_its_pins() -> None:
    cache = make(16, Tenant("a", guaranteed_blocks=4))
    compute(cache, range(16))
    cache.pin(NS, range(16), 60)
    cache.remove_tenant("a")
    assert not cache.pins() and cache.stats().free_blocks == 16
    audit.check(cache)


def test_pins_leave_room_for_guarantees() -> None:
    """Borrowed blocks can be pinned only while the other tenants' guarantees can still be met."""
    cache = make(16, Tenant("a", max_pinned_blocks=16), Tenant("b", guaranteed_blocks=10))
    for first in (1, 2):
        compute(cache, [first] * 12 + [3] * 4)
    cache.pin(NS, [1] * 12 + [3] * 4, 60)
    before = cache.snapshot()
    with pytest.raises(OutOfBlocks):
        cache.pin(NS, [2] * 12, 60)
    assert same(before, cache)
    cache.pin(NS, [2] * 8, 60)
    assert cache.stats().pinned_blocks == 6
    with cache.open(OTHER, range(40)) as sequence:
        sequence.commit(40)
        with pytest.raises(OutOfBlocks):
            cache.open(NS, [9] * 4)
        audit.check(cache)
    with pytest.raises(ArgumentError, match="fewer"):
        cache.add_tenant(Tenant("b", guaranteed_blocks=11))
    audit.check(cache)


@pytest.mark.parametrize(
    "call", ["open", "extend", "append", "lease", "insert", "allocate", "evict", "add_tenant"]
)
def test_an_expired_pin_never_causes_a_refusal(call: str) -> None:
    """Without maintenance, a request that needs the blocks ends expired pins.

    A moment earlier it is refused or gets fewer blocks.
    """
    cache = make(8, Tenant("a", max_pinned_blocks=8))
    compute(cache, range(24))
    running, leased = cache.open(OTHER, range(8)), cache.match(NS, range(4))
    cache.pin(NS, range(24), 60)
    block = [5, 6, 7, 8]

    def act() -> int:
        if call == "open":
            cache.open(OTHER, range(20, 28)).release()
        elif call == "extend":
            running.extend(range(4))
        elif call == "append":
            cache.append([running, running.fork(1)[0]], [1, 2])
        elif call == "lease":
            cache.lease(leased).release()
        elif call == "insert":
            cache.insert(OTHER, block, cache.allocate(1))
        elif call == "allocate":
            cache.free(cache.allocate(6))
        elif call == "add_tenant":
            cache.add_tenant(Tenant("b", guaranteed_blocks=8))
        else:
            return cache.evict(6)
        return 6

    advance(cache, 59)
    if call == "lease":
        assert act() == 6
    elif call == "evict":
        assert act() == 0
    else:
        with pytest.raises((CapacityError, ArgumentError)):
            act()
    advance(cache, 1)
    assert act() == 6
    audit.check(cache)


def test_a_strict_tenant_may_pin_all_that_it_has() -> None:
    """Then its own requests are refused until a pin ends. Another tenant's requests do not touch its pins."""
    cache = make(16, Tenant("a", guaranteed_blocks=4, mode="strict"), Tenant("b"))
    compute(cache, range(16))
    cache.pin(NS, range(16), 60)
    with pytest.raises(QuotaExceeded):
        cache.open(NS, [9] * 4)
    advance(cache, 60)
    running = cache.open(OTHER, range(48))
    with pytest.raises(OutOfBlocks):
        cache.open(OTHER, range(4))
    assert cache.stats().num_pins == 1, (
        "only its own tenant could use the blocks, so the pin has not ended yet"
    )
    cache.open(NS, [9] * 4).release()
    assert cache.stats().num_pins == 0
    running.release()
    audit.check(cache)


def test_the_number_of_pins_of_a_tenant_is_limited() -> None:
    """The limit also applies to pins that use nothing of the budget.

    A pin that ends frees a place, and a pin can be renewed.
    """
    cache = make(16, max_pins=3)
    compute(cache, range(16))
    pins = [cache.pin(NS, range(4 * blocks), 60) for blocks in (4, 3, 2)]
    before = cache.snapshot()
    with pytest.raises(PinLimitExceeded, match="3 of the tenant's 3 pins are in use") as caught:
        cache.pin(NS, range(4), 60)
    assert (caught.value.limit, caught.value.num_pins) == (3, 3)
    assert same(before, cache)
    with pytest.raises(NotResident):
        cache.pin(NS, range(50, 54), 60)
    assert cache.pin(NS, range(8), 60) == pins[2]
    compute(cache, range(4), OTHER)
    assert cache.pin(OTHER, range(4), 60).id == 1, "each tenant has its own numbers"
    cache.unpin(pins[0])
    cache.pin(NS, range(4), 5)
    with pytest.raises(PinLimitExceeded):
        cache.pin(NS, range(16), 60)
    advance(cache, 5)
    cache.pin(NS, range(16), 60)
    assert cache.stats().num_pins == 4
    audit.check(cache)


def test_each_tenant_has_its_own_limit_of_pins() -> None:
    assert Tenant("a").max_pins == MAX_PINS == 1_024
    for wrong in (-1, True, 1.5, "1", None):
        with pytest.raises(ArgumentError, match="max_pins"):
            Tenant("a", max_pins=wrong)  # type: ignore[arg-type]
    cache = make(16, Tenant("a", guaranteed_blocks=4, max_pins=2), max_pins=0)
    compute(cache, range(16))
    pins = [cache.pin(NS, range(size), 60) for size in (4, 8)]
    cache.add_tenant(Tenant("a", guaranteed_blocks=4, max_pins=1))
    assert cache.pins() == pins, "a lower limit ends no pin"
    with pytest.raises(PinLimitExceeded, match="2 of the tenant's 1 pins"):
        cache.pin(NS, range(16), 60)
    compute(cache, range(4), OTHER)
    with pytest.raises(PinLimitExceeded, match="0 of the tenant's 0 pins"):
        cache.pin(OTHER, range(4), 60)
    audit.check(cache)


def test_pins_are_listed_in_parts() -> None:
    cache = make(16, max_pins=20)
    compute(cache, range(32))
    compute(cache, range(4), OTHER)
    pins = [cache.pin(NS, range(4 * blocks), 60 if blocks % 3 else 5) for blocks in range(1, 9)]
    other = cache.pin(OTHER, range(4), 60)
    assert cache.pins("a") == pins and cache.pins() == [*pins, other]
    assert cache.pins("a", limit=3) == pins[:3] and cache.pins("a", after=3, limit=3) == pins[3:6]
    assert cache.pins("a", after=8) == [] == cache.pins("a", limit=0) == cache.pins("c", limit=9)
    advance(cache, 5)
    cache.unpin(pins[4])
    assert [pin.id for pin in cache.pins("a", after=1, limit=3)] == [2, 4, 7], (
        "only pins that have not ended are listed"
    )
    for wrong in ({"after": -1}, {"after": "1"}, {"limit": -1}, {"limit": 1.5}):
        with pytest.raises(ArgumentError):
            cache.pins("a", **wrong)  # type: ignore[arg-type]


def test_pins_of_the_same_blocks_keep_one_block_table() -> None:
    """Readers of a base with several salts store the long block table once, not once for each pin."""
    cache = make(16, Tenant("a", guaranteed_blocks=8))
    with cache.publish("base", Namespace("operator", "m"), range(32), ["a"]) as sequence:
        sequence.commit(32)
    for salt in range(9):
        cache.pin(NS._replace(salt=str(salt)), range(32), 60)
    held = list(cache._pins.tenants["a"].by_id.values())
    assert len({id(each.table) for each in held} | {id(each.lease._packed) for each in held}) == 1
    assert cache.stats().pinned_blocks == 8
    cache.unpin(cache.pins()[0])
    assert cache.stats().pinned_blocks == 8
    audit.check(cache)


def num_steps(call: Callable[[], object]) -> int:
    """The number of bytecodes that a call runs. ``pins`` is interpreted in both builds."""
    return num_events(call, "opcode")


def pinned_in_salts(num_pins: int) -> PrefixCache:
    """A cache in which a tenant pins a base in many namespaces, and as many of its own prefixes in one."""
    cache = make(num_pins + 8, Tenant("a", guaranteed_blocks=num_pins + 4, max_pins=2 * num_pins))
    with cache.publish("base", Namespace("operator", "m"), [7] * 8, ["a"]) as sequence:
        sequence.commit(8)
    for at in range(num_pins):
        cache.pin(NS._replace(salt=str(at)), [7] * 8, 60)
        compute(cache, [100 + at] * 4, NS)
        cache.pin(NS, [100 + at] * 4, 60)
    return cache


def clear_all(cache: PrefixCache) -> None:
    for namespace in cache.namespaces("a"):
        cache.clear(namespace)


def expire(cache: PrefixCache) -> None:
    advance(cache, 60)
    cache.maintain()


def unpin_all(cache: PrefixCache) -> None:
    for pin in cache.pins("a"):
        cache.unpin(pin)


@pytest.mark.parametrize(
    "end",
    [
        lambda cache: cache.unpublish("base"),
        lambda cache: cache.set_readers("base", []),
        lambda cache: cache.purge("a"),
        lambda cache: cache.remove_tenant("a"),
        clear_all,
        expire,
        unpin_all,
    ],
    ids=["unpublish", "set_readers", "purge", "remove_tenant", "clear", "expire", "unpin"],
)
def test_ending_many_pins_takes_linear_time(end: Callable[[PrefixCache], object]) -> None:
    """Sixteen times as many pins take sixteen times as many steps, not 256 times."""
    few, many = pinned_in_salts(12), pinned_in_salts(192)
    steps = [num_steps(partial(end, cache)) for cache in (few, many)]
    assert steps[1] < 16 * 1.3 * steps[0], steps
    for cache in (few, many):
        audit.check(cache)


def test_one_pin_costs_the_same_among_many() -> None:
    """A pin, its renewal, a part of the list and an end cause no work for the other pins."""

    def live(cache: PrefixCache) -> None:
        cache.unpin(cache.pins("a", limit=1)[0])
        pin = cache.pin(NS._replace(salt="new"), [7] * 8, 60)
        cache.pin(NS._replace(salt="new"), [7] * 8, 60)
        cache.unpin(cache.pins("a", after=pin.id - 1, limit=1)[0])

    few, many = (num_steps(partial(live, pinned_in_salts(size))) for size in (4, 128))
    assert many < 1.5 * few, (few, many)


def test_maintenance_ends_pins_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is released between the slices."""
    cache = make(16, max_pins=300, max_pinned_blocks=16)
    cache.add_tenant(Tenant("a", guaranteed_blocks=8, max_pins=300))
    with cache.publish("base", Namespace("operator", "m"), range(8), ["a"]) as sequence:
        sequence.commit(8)
    for at in range(2 * SLICE_PINS + 1):
        cache.pin(NS._replace(salt=str(at)), range(8), 60)
    left: list[int] = []
    monkeypatch.setattr(time, "sleep", lambda _: left.append(cache.stats().num_pins))
    expire(cache)
    assert left == [SLICE_PINS + 1, 1] and cache.stats().num_pins == 0
    audit.check(cache)


def threads() -> set[threading.Thread]:
    """The maintenance threads. Those of other tests' caches may end at any time."""
    return {thread for thread in threading.enumerate() if thread.name == "radixkv-maintenance"}


@pytest.mark.parametrize("others", [0, 8])
def test_the_end_of_a_pin_does_not_depend_on_other_tenants(others: int) -> None:
    """The tenant's next request ends an expired pin, however much of the pool is guaranteed to other tenants."""
    clock = ManualClock()
    cache = PrefixCache(CacheConfig(16, 4), clock=clock, scrub_blocks=lambda ids: None)
    cache.add_tenant(Tenant("a", guaranteed_blocks=8, mode="strict"))
    if others:
        cache.add_tenant(Tenant("b", guaranteed_blocks=others))
    with cache.open(NS, range(4)) as sequence:
        sequence.commit(4)
    cache.pin(NS, range(4), 5.0)
    clock.advance(10.0)
    assert cache.snapshot().leases
    with cache.open(NS, [9]):
        assert not cache.snapshot().leases
        audit.check(cache)


def test_maintenance_ends_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread uses the monotonic clock and exists from the first pin on.

    The cache is freed with its last reference.
    """
    monkeypatch.setattr(maintenance, "PERIOD_S", 0.01)
    before = threads()
    cache = PrefixCache(CacheConfig(8, 4, default_tenant=Tenant("default", max_pinned_blocks=8)))
    compute(cache, range(8))
    assert threads() <= before
    cache.pin(NS, range(8), 0.05)
    cache.pin(NS, range(4), 0.02)
    (thread,) = threads() - before
    eventually(lambda its=cache: not its.stats().num_pins, "the end of the pins")
    assert cache.evict(8) == 2
    audit.check(cache)
    gc.collect()
    gc.disable()
    try:
        del cache
        ended(thread)
    finally:
        gc.enable()


ops = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 24), st.integers(1, 9)), max_size=50
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20)
@given(ops)
def test_pinned_blocks_are_never_evicted(policy: str, lives: list[tuple[int, int, int, int]]) -> None:
    """A plain list of pins is the reference.

    Each pin matches as a whole until it expires, and the count is their union.
    """
    cache = make(16, policy=policy, max_pinned_blocks=6)
    pinned: dict[tuple[Namespace, tuple[int, ...]], tuple[Pin, float]] = {}
    for kind, first, size, seconds in lives:
        namespace, ids = (NS, OTHER)[first % 2], (first // 2,) * size
        advance(cache, 1.0)
        now = cache._clock()
        pinned = {key: each for key, each in pinned.items() if each[1] > now}
        try:
            if kind < 4:
                compute(cache, ids, namespace)
            elif kind == 4:
                cache.evict(size)
            elif kind == 5:
                cache.clear(namespace)
                pinned = {key: each for key, each in pinned.items() if key[0] != namespace}
            elif kind == 6 and pinned:
                key = sorted(pinned)[seconds % len(pinned)]
                cache.unpin(pinned.pop(key)[0])
            elif size >= 4:
                key = (namespace, ids[: size // 4 * 4])
                pinned[key] = (cache.pin(*key, seconds), now + seconds)
        except PinBudgetExceeded as error:
            wanted = {key[1][:stop] for key in [*pinned, key] if key[0] == namespace for stop in _ends(key)}
            held = {each[1][:stop] for each in pinned if each[0] == namespace for stop in _ends(each)}
            assert (error.needed, error.pinned, error.budget) == (len(wanted) - len(held), len(held), 6)
            assert len(wanted) > 6
        except (CapacityError, NotResident):
            pass
        for (where, prefix), _ in pinned.items():
            assert matched(cache, prefix, where) == len(prefix)
        assert {pin.id for pin in cache.pins("a")} == {
            pin.id for pin, _ in pinned.values() if pin.namespace == NS
        }
        audit.check(cache)
    advance(cache, 10)
    cache.maintain()
    assert cache.stats().num_pins == cache.stats().pinned_blocks == 0
    assert cache.evict(16) + cache.stats().free_blocks >= 16
    audit.check(cache)


def _ends(key: tuple[Namespace, tuple[int, ...]]) -> range:
    return range(4, len(key[1]) + 1, 4)


def test_many_pins_are_counted_as_their_union() -> None:
    """The count is compared with a set of blocks, over random trees, pins and ends."""
    rng = random.Random(0)
    cache = make(512, max_pinned_blocks=512)
    pins: list[Pin] = []
    for _ in range(300):
        ids = [rng.randrange(2) for _ in range(rng.randrange(4, 32))]
        if rng.random() < 0.4 and pins:
            cache.unpin(pins.pop(rng.randrange(len(pins))))
        else:
            compute(cache, ids)
            new = cache.pin(NS, ids, 60)
            pins = [*(pin for pin in pins if pin.id != new.id), new]
        held = cache._pins.tenants["a"]
        union = {
            bytes(each.table[:at]) for each in held.by_id.values() for at in range(4, len(each.table) + 1, 4)
        }
        assert cache.stats().pinned_blocks == len(union) and len(pins) == cache.stats().num_pins
    audit.check(cache)


def test_an_unknown_tenant_has_no_pins() -> None:
    cache = PrefixCache(CacheConfig(8, 4, default_tenant=None))
    with pytest.raises((NotResident, NamespaceError)):
        cache.pin(NS, range(4), 60)
    assert cache.pins("a") == [] and cache.tenant_stats("a").pinned_blocks == 0
