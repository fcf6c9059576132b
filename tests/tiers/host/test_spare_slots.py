"""Entries whose slots are spare, in their order."""

from __future__ import annotations

import random

import numpy as np

from radixkv.tiers.host.index import SpareSlots


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_the_oldest_come_first_and_keep_their_place() -> None:
    spare = SpareSlots(8)
    spare.add(ids(3, 1))
    spare.add(ids(5, 3))
    assert spare.oldest(2, lambda each: each != 9).tolist() == [3, 1]
    assert spare.oldest(8, lambda each: each != 3).tolist() == [1, 5] and len(spare) == 3


def test_random_calls_agree_with_a_dict() -> None:
    dice, spare, model = random.Random(1), SpareSlots(16), dict[int, None]()
    for _ in range(5_000):
        some = dice.sample(range(16), dice.randrange(6))
        if dice.random() < 0.5:
            spare.add(ids(*some))
            for each in some:
                model.setdefault(each)
        else:
            spare.drop(ids(*some))
            for each in some:
                model.pop(each, None)
        most, used = dice.randrange(8), dice.randrange(16)
        wanted = [each for each in model if each != used][:most]
        assert spare.oldest(most, lambda each, used=used: each != used).tolist() == wanted
        assert len(spare) == len(model)


def test_what_was_dropped_takes_no_memory_for_ever() -> None:
    """Also behind an entry that stays."""
    spare = SpareSlots(8)
    spare.add(ids(0))
    for _ in range(1_000):
        spare.add(ids(1, 2))
        spare.drop(ids(1, 2))
    assert len(spare._added) <= 16 and spare.oldest(8, lambda each: each >= 0).tolist() == [0]
