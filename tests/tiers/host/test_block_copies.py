"""Which block above has its copy in which entry of host memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.tiers.host.index import NONE, BlockCopies
from tests.tiers.test_exclusive import lost, prompt_of, saved
from tests.tiers.test_tiered_cache import NS, OTHER, Owner


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_joined_blocks_are_taken_once() -> None:
    copies = BlockCopies(4, 6)
    copies.join(ids(0, 3), ids(5, 1))
    assert copies.take(ids(3, 2, 0)).tolist() == [1, NONE, 5]
    assert copies.take(ids(0, 1, 2, 3)).tolist() == [NONE] * 4 and not len(copies.wrong_blocks())


@pytest.mark.parametrize("again", [(ids(0), ids(2)), (ids(1), ids(5))])
def test_a_new_content_ends_the_old_one(again: tuple[np.ndarray, np.ndarray]) -> None:
    """A block that is joined again, or an entry, is joined to one thing."""
    copies = BlockCopies(4, 6)
    copies.join(ids(0), ids(5))
    copies.join(*again)
    assert not len(copies.wrong_blocks())
    assert copies.take(again[0]).tolist() == again[1].tolist()
    assert copies.take(ids(0)).tolist() == [NONE]


def test_random_calls_agree_with_a_dict() -> None:
    dice, copies, model = random.Random(0), BlockCopies(8, 8), dict[int, int]()
    for _ in range(3_000):
        some = ids(*dice.sample(range(8), dice.randrange(4)))
        what = dice.randrange(3)
        if what == 0:
            others = ids(*dice.sample(range(8), len(some)))
            copies.join(some, others)
            model = {b: e for b, e in model.items() if b not in some and e not in others}
            model |= dict(zip(some.tolist(), others.tolist(), strict=True))
        elif what == 1:
            copies.cut(some)
            model = {block: entry for block, entry in model.items() if entry not in some}
        else:
            assert copies.take(some).tolist() == [model.pop(block, NONE) for block in some.tolist()]
        assert not len(copies.wrong_blocks())


def test_blocks_with_a_copy_leave_without_a_question() -> None:
    owner = Owner(num_blocks=24, host_blocks=64)
    level, asked = owner.below.host, list[int]()
    demote = level.demote
    level.demote = lambda *given: (asked.append(1), demote(*given))[1]  # type: ignore[method-assign]
    for number in range(3):
        owner.ask(prompt_of(number))
    owner.evict()
    assert not asked and saved(owner) == 30
    assert [owner.ask(prompt_of(number)) for number in range(3)] == [(40, 1)] * 3
    owner.evict()
    assert not asked, "also what was loaded"
    owner.check()


def test_a_block_whose_copy_went_is_copied_when_it_leaves() -> None:
    owner = Owner(num_blocks=24, host_blocks=20, policy="lru")
    owner.ask(prompt_of(1))
    owner.ask(prompt_of(2))
    entries = owner.below.host.cache.match(NS, np.array(prompt_of(1)[:40], np.uint32).tobytes()).block_ids
    owner.below.host.index.take_away(entries.astype(np.int64))
    owner.evict()
    assert saved(owner) == 30 and lost(owner) == 0
    assert owner.ask(prompt_of(1)) == (40, 1) and owner.ask(prompt_of(2)) == (40, 1)
    owner.check()


def test_a_block_that_holds_something_else_has_no_copy() -> None:
    """Purged blocks go to others at once. What these compute there leaves as theirs."""
    owner = Owner(num_blocks=12, host_blocks=64)
    for number in range(8):
        owner.ask(prompt_of(number), NS if number % 2 else OTHER)
        owner.cache.purge(OTHER.tenant)
    owner.evict()
    assert [owner.ask(prompt_of(number)) for number in (1, 3, 5, 7)] == [(40, 1)] * 4
    owner.below.host.index.check()
    owner.check()
