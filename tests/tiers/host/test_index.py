"""The index of host memory: who has which slot, in random lives beside a simple model."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixkv import Namespace, Tenant
from radixkv.errors import ArgumentError, IntegrityError
from radixkv.index.tokens import encode
from radixkv.tiers.host.index import HostIndex

SIZE = 4


def key_of(number: int, num_blocks: int = 5) -> bytes:
    return encode([1_000 * number + at for at in range(num_blocks * SIZE)])


def name_of(tenant: str) -> Namespace:
    return Namespace(tenant, "m")


def put(index: HostIndex, tenant: str, number: int, num_blocks: int = 5, *, may_evict: bool = True) -> int:
    """Give a prompt entries and slots, and fill these. Returns how many."""
    lease = index.hold(name_of(tenant), key_of(number, num_blocks))
    if lease is None:
        return 0
    with lease:
        entries = lease.block_ids.astype(np.int64)
        at = index.lacking(entries)
        slots = index.give(tenant, entries[at], may_evict=may_evict)
        index.filled(entries[at[: len(slots)]])
        return len(slots)


def test_slots_come_from_the_free_then_the_spare_then_the_oldest() -> None:
    index = HostIndex(10, SIZE, num_above=10, policy="lru")
    assert put(index, "a", 1) == 5 and put(index, "a", 2) == 5
    assert put(index, "a", 3, may_evict=False) == 0, "none is free"
    index.loaded(index.cache.match(name_of("a"), key_of(1)).block_ids)
    assert put(index, "a", 3) == 5
    reached = [index.reach(name_of("a"), key_of(number), 0) for number in (1, 2, 3)]
    assert reached == [0, 5, 5], "the spare ones were taken"
    assert put(index, "a", 4) == 5
    reached = [index.reach(name_of("a"), key_of(number), 0) for number in (2, 3, 4)]
    assert reached == [0, 5, 5], "the oldest were evicted"
    index.check()


def test_slots_in_use_are_never_given_again() -> None:
    index = HostIndex(5, SIZE, num_above=5, policy="lru")
    put(index, "a", 1)
    slots = index.slots_of(index.cache.match(name_of("a"), key_of(1)).block_ids)
    index.use(slots)
    assert put(index, "a", 2) == 0
    index.check()
    index.unuse(slots)
    assert put(index, "a", 3) == 5
    index.check()


@pytest.mark.parametrize(("scrub", "zeroed"), [("cross-tenant", 0), ("always", 5)])
def test_bytes_of_others_are_zeroed(scrub: str, zeroed: int) -> None:
    index = HostIndex(5, SIZE, num_above=5, policy="lru", scrub=scrub)  # type: ignore[arg-type]
    put(index, "a", 1)
    assert len(index.take_to_zero()) == 0
    put(index, "a", 2)
    assert len(index.take_to_zero()) == zeroed, "a tenant's own"
    put(index, "b", 3)
    assert len(index.take_to_zero()) == 5
    index.cache.purge("b")
    put(index, "b", 4)
    assert len(index.take_to_zero()) == 5, "what a purge left is nobody's"


def test_a_share_that_is_set_again_stays_one() -> None:
    index = HostIndex(20, SIZE, num_above=10, policy="lru")
    index.cache.add_tenant(Tenant("s", guaranteed_blocks=9, max_blocks=9, mode="strict"))
    for _ in range(50):
        index.set_strict("s", 6)
    assert index.own_slots("s") == 6 and len(index._pools) == 2
    assert put(index, "s", 1, 8) == 6
    for number in range(9):
        put(index, "b", number)
    assert index.reach(name_of("s"), key_of(1, 8), 0) == 6, "nobody else takes them"
    index.set_strict("s", 0)
    index.set_strict("t", 6)
    index.check()
    assert index.own_slots("s") == 0 and index.own_slots("t") == 6


def test_slots_of_ones_own_are_there_when_they_are_needed() -> None:
    """Others had all slots when it got some: they lose them, and it loses none of its own."""
    index = HostIndex(12, SIZE, num_above=12, policy="lru")
    index.cache.add_tenant(Tenant("s", guaranteed_blocks=10, max_blocks=10, mode="strict"))
    index.set_strict("s", 3)
    assert put(index, "s", 1, 3) == 3 and put(index, "b", 2, 9) == 9
    index.set_strict("s", 6)
    assert put(index, "s", 3, 3) == 3
    assert index.reach(name_of("s"), key_of(1, 3), 0) == index.reach(name_of("s"), key_of(3, 3), 0) == 3
    index.check()


def test_a_tenant_loses_nothing_of_its_own_for_slots_that_others_use() -> None:
    index = HostIndex(12, SIZE, num_above=12, policy="lru")
    index.cache.add_tenant(Tenant("s", guaranteed_blocks=10, max_blocks=10, mode="strict"))
    index.set_strict("s", 3)
    assert put(index, "s", 1, 3) == 3 and put(index, "b", 2, 9) == 9
    in_use = index.slots_of(index.cache.match(name_of("b"), key_of(2, 9)).block_ids)
    index.use(in_use)
    index.set_strict("s", 6)
    assert put(index, "s", 3, 3) == 0 and index.reach(name_of("s"), key_of(1, 3), 0) == 3
    index.unuse(in_use)
    assert put(index, "s", 3, 3) == 3 and index.reach(name_of("s"), key_of(1, 3), 0) == 3
    index.check()


def test_others_lose_only_what_is_needed_and_nobody_looks_at_all_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = HostIndex(100, SIZE, num_above=100, policy="lru")
    index.cache.add_tenant(Tenant("s", guaranteed_blocks=60, max_blocks=60, mode="strict"))
    index.set_strict("s", 10)
    assert put(index, "s", 1, 10) == 10 and put(index, "b", 2, 90) == 90
    index.set_strict("s", 50)
    spare = index.cache.match(name_of("s"), key_of(1, 10)).block_ids
    index.loaded(spare)
    assert put(index, "s", 3, 4) == 4
    assert index.reach(name_of("s"), key_of(1, 10), 0) == 10, "its spare slots are its own"
    assert index.reach(name_of("b"), key_of(2, 90), 0) == 86
    assert put(index, "s", 4, 36) == 36 and index.reach(name_of("b"), key_of(2, 90), 0) == 50
    monkeypatch.setattr(index, "_sharing", lambda: pytest.fail("nothing is to be freed"))
    assert put(index, "s", 5, 4) == 4
    index.check()


def test_slots_of_ones_own_that_were_shared_for_a_while() -> None:
    index = HostIndex(100, SIZE, num_above=100, policy="lru")
    index.cache.add_tenant(Tenant("s", guaranteed_blocks=99, max_blocks=99, mode="strict"))
    index.set_strict("s", 50)
    assert put(index, "s", 1, 50) == 50 and put(index, "b", 2, 50) == 50
    index.loaded(index.cache.match(name_of("s"), key_of(1, 50)).block_ids[:5])
    index.set_strict("s", 0)
    index.check()
    assert put(index, "b", 3, 5) == 5, "the spare ones"
    index.set_strict("s", 50)
    for number in range(10, 15):
        assert put(index, "s", number, 5) == 5
    index.check()


def test_fewer_slots_of_ones_own_go_back_at_once() -> None:
    index = HostIndex(12, SIZE, num_above=12, policy="lru")
    index.cache.add_tenant(Tenant("s", guaranteed_blocks=10, max_blocks=10, mode="strict"))
    index.set_strict("s", 8)
    assert put(index, "s", 1, 8) == 8
    index.set_strict("s", 2)
    assert put(index, "b", 2, 10) == 10
    index.check()


def test_more_slots_than_there_are_for_strict_tenants_are_refused() -> None:
    index = HostIndex(12, SIZE, num_above=12, policy="lru")
    index.set_strict("s", 8)
    with pytest.raises(
        ArgumentError, match="num_slots=5 is not allowed; allowed: 0 to 4: others have the rest"
    ):
        index.set_strict("t", 5)
    assert index.own_slots("t") == 0 and index.own_slots("s") == 8
    index.check()


def test_a_strict_tenant_without_slots_of_its_own_gets_none() -> None:
    """It was just set, or others have all slots for themselves: it shares none meanwhile."""
    index = HostIndex(12, SIZE, num_above=12, policy="lru")
    index.set_strict("t", 10)
    index.cache.add_tenant(Tenant("s", guaranteed_blocks=6, mode="strict"))
    assert put(index, "s", 1) == index.own_room("s", 5) == 0 and index.num_used == 0
    with pytest.raises(ArgumentError, match="others have the rest"):
        index.set_strict("s", 5)
    assert put(index, "s", 2, may_evict=False) == index.own_room("s", 5) == 0
    index.set_strict("t", 7)
    index.set_strict("s", 5)
    assert put(index, "s", 3) == 5
    index.check()


def test_what_a_tenant_shared_before_it_was_strict_is_its_own_then() -> None:
    index = HostIndex(20, SIZE, num_above=20, policy="lru")
    assert put(index, "s", 1, 4) == put(index, "s", 2, 4) == 4 and put(index, "b", 3, 4) == 4
    index.loaded(index.cache.match(name_of("s"), key_of(1, 4)).block_ids)
    index.cache.add_tenant(Tenant("s", guaranteed_blocks=12, mode="strict"))
    index.set_strict("s", 6)
    index.check()
    assert [index._pools[number].used for number in (0, 1)] == [4, 6]
    assert index.reach(name_of("s"), key_of(2, 4), 0) == 4, "spare ones went"
    assert put(index, "b", 4, 10) == 10 and index.reach(name_of("b"), key_of(3, 4), 0) == 4
    assert put(index, "s", 5, 2) == 2 and index.reach(name_of("s"), key_of(2, 4), 0) == 4
    index.check()


class _Meanwhile(np.ndarray):  # type: ignore[type-arg]
    """Counts of uses. Whoever compares them lets another thread do something first."""

    call: Callable[[], object] = staticmethod(lambda: None)

    def __eq__(self, other: object) -> Any:
        thread = threading.Thread(target=type(self).call)
        thread.start()
        thread.join()
        return np.asarray(self) == other


def test_a_purge_in_the_middle_of_undoing_gives_no_slot_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    index = HostIndex(8, SIZE, num_above=8, policy="lru")
    assert put(index, "a", 1, 4) == put(index, "b", 2, 4) == 4
    monkeypatch.setattr(_Meanwhile, "call", staticmethod(lambda: index.cache.purge("a")))
    uses = index._uses
    index._uses = uses.view(_Meanwhile)
    index.undo(np.empty(0, np.int64), np.empty(0, np.int64))
    index._uses = uses
    assert index.reach(name_of("a"), key_of(1, 4), 0) == 0
    index.check()
    assert put(index, "c", 3, 4) == 4
    index.check()


def test_all_that_leaves_is_told_whatever_lies_between() -> None:
    index, told = HostIndex(10, SIZE, num_above=10, policy="lru"), list[tuple[int, int, int]]()
    index.watch(
        lambda name, key, first, slots: told.append((first, len(slots), len(key) // (4 * SIZE))),
        lambda tenant, num_blocks, num_slots: 0,
    )
    put(index, "a", 1, 10)
    entries = index.cache.match(name_of("a"), key_of(1, 10)).block_ids.astype(np.int64)
    index.take_away(entries[[0, 4, 5, 8]])
    index.cache.evict(10)
    assert sorted(told) == [(1, 3, 4), (6, 2, 8), (9, 1, 10)]


def test_a_wrong_count_is_found() -> None:
    index = HostIndex(5, SIZE, num_above=5)
    put(index, "a", 1)
    index._slot_of[index.cache.match(name_of("a"), key_of(1)).block_ids[0]] = 3
    with pytest.raises(IntegrityError, match="of an entry twice"):
        index.check()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "learned", "s3fifo"])
@pytest.mark.parametrize("seed", range(3))
def test_random_lives_keep_the_law(policy: str, seed: int) -> None:
    """What the model says is filled never reads as another prompt's: a slot has the prompt that filled it last."""
    dice = random.Random(seed)
    index = HostIndex(24, SIZE, num_above=16, policy=policy)
    index.cache.add_tenant(Tenant("s", guaranteed_blocks=8, max_blocks=8, mode="strict"))
    index.set_strict("s", 4)
    content: dict[int, tuple[str, int, int]] = {}
    used: list[np.ndarray] = []
    for _ in range(600):
        tenant, number, size = dice.choice("abs"), dice.randrange(6), dice.randint(1, 6)
        namespace, key = name_of(tenant), key_of(number, size)
        what = dice.random()
        if what < 0.5:
            lease = index.hold(namespace, key)
            if lease is None:
                continue
            with lease:
                entries = lease.block_ids.astype(np.int64)
                index.demoted(entries)
                at = index.lacking(entries)
                slots = index.give(tenant, entries[at], may_evict=dice.random() < 0.8)
                for position, slot in zip(at.tolist(), slots.tolist(), strict=False):
                    assert not any(slot in each for each in used), "a slot in use was given"
                    content[slot] = tenant, number, position
                index.filled(entries[at[: len(slots)]])
        elif what < 0.6:
            index.loaded(index.cache.match(namespace, key).block_ids)
        elif what < 0.65:
            index.cache.purge(tenant)
        elif what < 0.68:
            index.set_strict("s", dice.choice((0, 2, 4, 8)))
        elif what < 0.7:
            index.cache.evict(dice.randint(1, 8))
        elif what < 0.75:
            slots = index.slots_of(index.cache.match(namespace, key).block_ids)
            used.append(slots[slots >= 0])
            index.use(used[-1])
        elif used and what < 0.85:
            index.unuse(used.pop(dice.randrange(len(used))))
        else:
            reached = index.reach(namespace, key, 0)
            slots = index.slots_of(index.cache.match(namespace, key).block_ids[:reached])
            assert [content[slot] for slot in slots.tolist()] == [
                (tenant, number, at) for at in range(reached)
            ]
        index.check()
    for each in used:
        index.unuse(each)
    index.check()
