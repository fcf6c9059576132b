"""The table of slots keeps its law, never hands out a leased slot, and evicts by quotas."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from radixkv.errors import ArgumentError, IntegrityError
from radixkv.tiers.disk.slots import NO_QUOTA, Overuse, Owner, Quota, SlotTable
from tests.tiers.support import next_victim, num_of

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


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
    assert table.drop_of(A, table.slots_of(A)) == [slot] and not table.seal(slot)
    assert table.find(b"1") is None and table.num_free == 3
    table.check()


def test_random_lives_keep_the_law() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        table = SlotTable(chance.randint(1, 6))
        table.set_quota(B, Quota(seed % 2))
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
                table.drop_of(owner, table.slots_of(owner))
            table.check()


# --- quotas


def filled(num_slots: int, **numbers: int) -> SlotTable:
    """A table with so many records of owners a, b and c, stored in this order: a0, a1, … b0, …"""
    table = SlotTable(num_slots)
    for name, num in numbers.items():
        for number in range(num):
            sealed(table, f"{name}{number}".encode(), name.encode() * 16)
    return table


def there(table: SlotTable, name: str, num: int) -> list[int]:
    return [number for number in range(num) if table.find(f"{name}{number}".encode()) is not None]


def test_a_flood_takes_nothing_that_another_owner_is_guaranteed() -> None:
    table = filled(10, a=4)
    table.set_quota(A, Quota(guaranteed=4))
    for number in range(100):
        sealed(table, b"b%d" % number, B)
    assert there(table, "a", 4) == [0, 1, 2, 3] and there(table, "b", 100) == [*range(94, 100)]
    table.check()


def test_the_owner_furthest_above_its_share_loses_its_oldest_record() -> None:
    table = filled(12, a=8, b=4)
    table.set_quota(A, Quota(guaranteed=6))  # 2 above
    table.set_quota(B, Quota(weight=2.0))  # 4 above, by its weight 2
    for number in range(2):
        sealed(table, b"c%d" % number, C)
    assert (num_of(table, A), num_of(table, B), num_of(table, C)) == (7, 3, 2)
    sealed(table, b"c2", C)  # 2 above by itself; the others 1 and 1.5
    assert there(table, "c", 3) == [1, 2] and there(table, "a", 8) == [*range(1, 8)]
    assert there(table, "b", 4) == [1, 2, 3]
    table.check()


def test_owners_without_a_quota_end_up_with_equal_shares() -> None:
    table = filled(9, a=9)
    for number in range(30):
        sealed(table, b"b%d" % number, B)
    for number in range(30):
        sealed(table, b"c%d" % number, C)
    assert sorted(num_of(table, each) for each in (A, B, C)) == [3, 3, 3]
    assert there(table, "a", 9) == [6, 7, 8] and there(table, "c", 30) == [27, 28, 29]
    table.check()


def test_an_owner_never_has_more_than_its_most() -> None:
    table = SlotTable(10)
    table.set_quota(A, Quota(1, 3))
    for number in range(9):
        sealed(table, b"a%d" % number, A)
    assert there(table, "a", 9) == [6, 7, 8] and table.num_free == 7
    slots = [table.find(b"a%d" % number) for number in (6, 7, 8)]
    for slot in slots:
        assert slot is not None
        table.lease(slot)
    assert table.take(b"a9", A) is None  # all that it may lose is being read
    table.set_quota(B, Quota(0, 0))
    assert table.take(b"b0", B) is None and table.num_free == 7
    table.check()


def test_a_quota_may_change_while_there_are_records() -> None:
    table = filled(10, a=6, b=4)
    leased = table.find(b"a0")
    assert leased is not None
    table.lease(leased)
    table.set_quota(A, Quota(0, 2))
    assert num_of(table, A) == 6  # nothing is dropped here
    table.set_quota(A, Quota(0, 7))
    table.set_quota(A, Quota(0, 2))
    found = []
    for number in range(6, 11):
        sealed(table, b"a%d" % number)
        found.append(there(table, "a", 11))
    assert found == [[0, 3, 4, 5, 6], [0, 5, 6, 7], [0, 7, 8], [0, 9], [0, 10]]  # the first one is being read
    table.release(leased)
    table.check()
    table.set_quota(A, Quota(2))
    for number in range(4, 40):
        sealed(table, b"b%d" % number, B)
    assert there(table, "a", 11) == [0, 10]
    table.set_quota(A, NO_QUOTA)
    for number in range(40):
        sealed(table, b"c%d" % number, C)
    assert (num_of(table, A), num_of(table, B), num_of(table, C)) == (2, 4, 4)  # A has less than its share
    table.check()


def test_records_that_are_filled_when_a_limit_sinks_are_not_taken_away() -> None:
    table = SlotTable(10)
    slots = [table.take(b"a%d" % number, A) for number in range(4)]
    table.set_quota(A, Quota(0, 1))
    assert table.take(b"a4", A) is None  # threads write them
    assert all(slot is not None and table.seal(slot) for slot in slots)
    for number in range(4, 9):
        sealed(table, b"a%d" % number, A)
    assert there(table, "a", 9) == [8] and num_of(table, A) == 1
    table.check()


def test_an_owner_is_forgotten_with_its_last_record_and_quota() -> None:
    table = filled(3, a=1, b=2)
    sealed(table, b"b3", B)  # begins to rank
    for number in range(1_000):
        owner = b"%016d" % number
        sealed(table, b"x%d" % number, owner)
        table.drop_of(owner, table.slots_of(owner))
    assert len(table._owners) == 2 and table._overuse._heap is not None
    assert len(table._overuse._heap) < 200  # and so are the ranks of those that are gone
    table.set_quota(C, Quota(1))
    table.set_quota(C, NO_QUOTA)
    assert C not in table._owners
    table.check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"guaranteed": -1}, "guaranteed=-1 is not allowed; allowed: an integer ≥ 0"),
        ({"guaranteed": True}, "guaranteed=True"),
        ({"guaranteed": 1.5}, r"guaranteed=1\.5"),
        ({"guaranteed": 3, "most": 2}, "most=2 is not allowed; allowed: an integer ≥ 3"),
        ({"most": "9"}, "most='9'"),
        ({"weight": 0}, "weight=0"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"weight": float("inf")}, "weight=inf"),
        ({"weight": "1"}, "weight='1'"),
    ],
)
def test_a_wrong_quota_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Quota(**given)


def test_more_guarantees_than_slots_are_refused() -> None:
    table = SlotTable(8)
    table.set_quota(A, Quota(5))
    with pytest.raises(ArgumentError, match="guaranteed=4 is not allowed; allowed: 0 to 3"):
        table.set_quota(B, Quota(4))
    table.set_quota(A, Quota(4))
    table.set_quota(B, Quota(4))
    with pytest.raises(ArgumentError, match="guaranteed=1 is not allowed; allowed: 0 to 0"):
        table.set_quota(C, Quota(1))
    table.check()


def test_a_restart_keeps_the_order_of_each_owner() -> None:
    records = [(slot, b"%d" % slot, (A, B)[slot % 2]) for slot in range(8)]  # the newest first
    table = SlotTable(8)
    assert len(table.restore(records)) == 8
    table.set_quota(A, Quota(3))
    lost = []
    for number in range(3):
        owner = b"%016d" % number
        victim = next_victim(table, owner)
        assert victim is not None
        lost.append(table._entries[victim].locator)
        sealed(table, b"c%d" % number, owner)
    assert lost == [b"7", b"5", b"3"]  # B is furthest above its share all the time
    table.check()


def allowed_victims(table: SlotTable, name: bytes) -> set[bytes]:
    """The records of which the next ``take`` of an owner may evict one, found the slow way; empty for none."""
    free = {each: [] for each in (A, B, C)}
    for each, owner in table._owners.items():
        free[each] = [locator for locator, slot in owner.order.items() if slot not in table._leases]
    own, quota = free[name][:1], table._owners[name].quota if name in table._owners else NO_QUOTA
    used = {each: table._owners[each].used if each in table._owners else 0 for each in free}
    if quota.most is not None and used[name] >= quota.most:
        return set(own)
    over = {
        each: (used[each] - table._owners[each].quota.guaranteed) / table._owners[each].quota.weight
        for each in free
        if free[each]
    }
    top = max([0.0, *over.values()])
    if own and over[name] == top:
        return set(own)
    others = {free[each][0] for each in over if over[each] == top > 0}
    return others or set(own)


def random_quota(chance: random.Random) -> Quota:
    guaranteed = chance.randint(0, 4)
    most = None if chance.random() < 0.5 else guaranteed + chance.randint(0, 4)
    return Quota(guaranteed, most, chance.choice((0.5, 1.0, 3.0)))


@pytest.mark.slow
def test_random_quotas_evict_what_they_should() -> None:
    num_evictions = num_refused = 0
    for seed in range(100):
        chance = random.Random(seed)
        table, leased, filling = SlotTable(chance.randint(1, 12)), list[int](), list[int]()
        for number in range(200):
            name, deed = chance.choice((A, B, C)), chance.random()
            if deed < 0.6:
                is_short = not table.num_free or (name in table._owners and table._owners[name].is_full)
                owner = table._owners.get(name) or Owner(name)
                is_above, num_used = owner.is_above, owner.used
                allowed, victim = allowed_victims(table, name), next_victim(table, name)
                before = {entry.locator for entry in table._entries.values()}
                owners = {entry.locator: entry.owner for entry in table._entries.values()}
                within = {
                    each for each, owner in table._owners.items() if owner.used <= owner.quota.guaranteed
                }
                slot = table.take(b"%d" % number, name)
                gone = before - {entry.locator for entry in table._entries.values()}
                assert (victim is None) == (not is_short or not allowed)
                assert bool(gone) == bool(is_short and allowed) and (not gone or gone & allowed)
                assert {owners[each] for each in gone} & within <= {name}
                assert len(gone) <= 1 + is_above
                assert (slot is None) == (is_short and not allowed) or is_above
                if slot is not None:
                    assert owner.quota.most is None or owner.used <= max(owner.quota.most, num_used - 1)
                    filling.append(slot)
                num_evictions, num_refused = num_evictions + len(gone), num_refused + (slot is None)
            elif deed < 0.8 and filling:
                table.seal(filling.pop(chance.randrange(len(filling))))
            elif deed < 0.84 and filling:
                table.give_up(filling.pop())
            elif deed < 0.88 and (slot := table.find(b"%d" % chance.randint(0, number))) is not None:
                table.lease(slot)
                leased.append(slot)
            elif deed < 0.93 and leased:
                table.release(leased.pop())
            elif deed < 0.96:
                others = table._guaranteed - (
                    table._owners[name].quota.guaranteed if name in table._owners else 0
                )
                quota = random_quota(chance)
                if quota.guaranteed + others <= table.num_slots:
                    table.set_quota(name, quota)
                else:
                    with pytest.raises(ArgumentError):
                        table.set_quota(name, quota)
            elif deed < 0.97:
                table.drop_of(name, table.slots_of(name))
            elif deed < 0.98 and table._slots:
                table.touch(chance.choice(list(table._slots.values())))
            table.check()
    assert num_evictions > 2_000 and num_refused > 200


def test_a_guarantee_is_met_when_nothing_is_in_use() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        table = SlotTable(12)
        table.set_quota(A, Quota(chance.randint(1, 5)))
        table.set_quota(B, Quota(chance.randint(1, 7)))
        most = dict.fromkeys((A, B), 0)
        for number in range(300):
            name = chance.choices((A, B, C), (1, chance.random(), 9))[0]
            slot = table.take(b"%d" % number, name)
            if slot is None:  # the others need all for their guarantees
                assert name == C and num_of(table, A) + num_of(table, B) == table._guaranteed == 12
            else:
                assert table.seal(slot)
            for each in most:
                most[each] = max(most[each], min(num_of(table, each), table._owners[each].quota.guaranteed))
                assert num_of(table, each) >= most[each]  # what it once had of its guarantee, it keeps
        table.check()


@pytest.mark.slow
def test_many_owners_cost_little() -> None:
    """100,000 records of 10,000 owners: an eviction ranks a few of them, not all."""
    table = SlotTable(100_000)
    table.restore((slot, b"%d" % slot, b"%016d" % (slot % 10_000)) for slot in range(100_000))
    began = time.thread_time()
    for number in range(20_000):
        sealed(table, b"x%d" % number, b"%016d" % (7 * number % 10_000))
    assert time.thread_time() - began < 5  # 0.2 s; a scan of the owners would take a minute
    table.check()


def test_an_owner_that_grows_without_being_ranked_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overuse, "grew", lambda self, owner: None)
    table = filled(4, a=2, b=2)
    sealed(table, b"b2", B)
    sealed(table, b"c1", C)
    with pytest.raises(IntegrityError, match="owners: 0 slots are free"):
        table.check()
