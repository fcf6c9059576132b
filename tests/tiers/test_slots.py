"""The table of slots keeps its law, never hands out a leased slot, and keeps partitions apart."""

from __future__ import annotations

import random

import pytest

from radixkv.errors import ArgumentError
from radixkv.tiers.slots import SlotTable

A, B = b"a" * 16, b"b" * 16


def sealed(table: SlotTable, locator: bytes, owner: bytes = A) -> int:
    slot = table.take(locator, owner)
    assert slot is not None and table.find(locator) is None  # not before it is sealed
    assert table.seal(slot)
    return slot


def test_the_least_recently_used_record_leaves_first() -> None:
    table = SlotTable(2)
    first, second = sealed(table, b"1"), sealed(table, b"2")
    table.touch(first)
    assert sealed(table, b"3") == second
    assert table.find(b"1") == first and table.find(b"2") is None
    table.check()


def test_a_leased_slot_is_not_reused_until_its_release() -> None:
    table = SlotTable(1)
    slot = sealed(table, b"1")
    table.lease(slot)
    assert table.take(b"2", A) is None
    table.drop(slot)
    assert table.find(b"1") is None and table.num_free == 0
    table.release(slot)
    assert table.take(b"2", A) == slot
    table.check()


def test_a_record_is_filled_once_and_not_found_after_its_owner_left() -> None:
    table = SlotTable(3)
    slot = table.take(b"1", A)
    assert slot is not None and table.take(b"1", A) is None
    assert table.drop_owner(A) == [slot] and not table.seal(slot)
    assert table.find(b"1") is None and table.num_free == 3
    table.check()


def test_partitions_take_nothing_of_each_other() -> None:
    table = SlotTable(4, {B: 1})
    for each in range(9):
        sealed(table, b"%d" % each)
    assert table.num_of(A) == 3
    mine = sealed(table, b"own", B)
    sealed(table, b"another", B)
    assert table.find(b"own") is None and table.find(b"another") == mine and table.num_of(A) == 3
    with pytest.raises(ArgumentError, match="0 to "):
        table.set_partition(A, 2)
    with pytest.raises(ArgumentError, match="size=5 is not allowed"):
        SlotTable(4, {B: 5})
    table.check()


def test_random_lives_keep_the_law() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        table = SlotTable(chance.randint(1, 6), {B: 1} if seed % 2 else None)
        filling: list[int] = []
        leased: list[int] = []
        for _ in range(150):
            locator, owner = b"%d" % chance.randint(0, 9), chance.choice((A, B))
            deed = chance.randint(0, 6)
            if deed <= 1 and (slot := table.take(locator + owner, owner)) is not None:
                assert slot not in filling and slot not in leased
                filling.append(slot)
            elif deed == 2 and filling:
                table.seal(filling.pop(chance.randrange(len(filling))))
            elif deed == 3 and filling:
                table.give_up(filling.pop())
            elif deed == 4 and (slot := table.find(locator + owner)) is not None:
                table.lease(slot)
                leased.append(slot)
            elif deed == 5 and leased:
                table.release(leased.pop())
            elif deed == 6 and chance.random() < 0.2:
                table.drop_owner(owner)
            table.check()
