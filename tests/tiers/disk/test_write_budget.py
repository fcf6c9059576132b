"""``write_budget``: never more bytes than the budget, spent on prompts that come back, whatever other tenants do."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.tiers.disk import write_budget
from radixkv.tiers.disk.write_budget import BURST_S, Kind, Point, WriteBudget, kind_of, point_positions

BLOCK_BYTES = 1_000


def points_of(prompt: str, first: int, stop: int) -> list[Point]:
    return [Point(f"{prompt}/{at}".encode(), weight) for at, weight in point_positions(first, stop)]


@given(st.integers(0, 5_000), st.integers(0, 5_000))
def test_points_stand_for_every_block_once(first: int, num_blocks: int) -> None:
    found = point_positions(first, first + num_blocks)
    assert found == [each for each in point_positions(0, first + num_blocks) if each[0] > first]
    every = point_positions(0, first + num_blocks)
    assert sum(weight for _, weight in every) == (every[-1][0] if every else 0)
    assert len(every) <= 2 * (first + num_blocks).bit_length()
    assert not every or every[-1][0] * 3 // 2 + 1 >= first + num_blocks


OFFERS = st.lists(
    st.tuples(
        st.sampled_from(["acme", "globex", "initech"]),
        st.integers(1, 400),
        st.booleans(),
        st.floats(0.0, 300.0),
    ),
    max_size=120,
)


@given(OFFERS, st.sampled_from([1.0, 5_000.0, 1e6]))
def test_no_window_has_more_than_the_budget(offers: list[tuple[str, int, bool, float]], rate: float) -> None:
    """Beyond what comes in, at most the burst and the last call of each tenant are written."""
    budget, now = WriteBudget(rate, 10_000), 0.0
    spent: list[tuple[float, int]] = []
    for tenant, num_blocks, is_used, pause_s in offers:
        now += pause_s
        num_bytes = num_blocks * BLOCK_BYTES
        kind = kind_of(is_used=is_used, continues=is_used, num_blocks=num_blocks)
        points = points_of(f"{tenant}-{now}", 0, num_blocks)
        if budget.offered(tenant, kind, points, num_blocks, num_bytes, now) and budget.spend(
            tenant, num_bytes, now
        ):
            spent.append((now, num_bytes))
    for at, (began, _) in enumerate(spent):
        for end in range(at, len(spent)):
            written = sum(num_bytes for _, num_bytes in spent[at : end + 1])
            income = (spent[end][0] - began + 1.0) * rate
            assert written <= income + BURST_S * rate + 4 * 400 * BLOCK_BYTES


class Disk:
    """A disk of LRU blocks, with a budget or with first come, first served."""

    def __init__(self, rate: float, num_blocks: int, learns: bool) -> None:
        self.budget, self.learns = WriteBudget(rate, num_blocks), learns
        self.blocks: OrderedDict[str, None] = OrderedDict()
        self.num_blocks, self.num_hits, self.num_written = num_blocks, 0, 0

    def request(self, tenant: str, prompt: str, found: int, stop: int, now: float) -> None:
        """A prompt needs blocks ``[0, stop)``. It found ``found`` of them in memory, and computes what isn't here."""
        names = [f"{tenant}/{prompt}/{at}" for at in range(stop)]
        for name in names[found:]:
            if name not in self.blocks:
                break
            self.num_hits += 1
            self.blocks.move_to_end(name)
        self.budget.asked(tenant, points_of(f"{tenant}/{prompt}", found, stop))
        kind = kind_of(is_used=False, continues=found > 0, num_blocks=stop)
        new = [name for name in names[found:] if name not in self.blocks]
        if new:
            self._offer(tenant, kind, points_of(f"{tenant}/{prompt}", found, stop), new, now)

    def _offer(self, tenant: str, kind: Kind, points: Iterable[Point], new: list[str], now: float) -> None:
        num_bytes = len(new) * BLOCK_BYTES
        is_chosen = self.budget.offered(tenant, kind, points, len(new), num_bytes, now)
        if (is_chosen or not self.learns) and self.budget.spend(tenant, num_bytes, now):
            self.num_written += len(new)
            self.blocks |= dict.fromkeys(new)
            while len(self.blocks) > self.num_blocks:
                self.blocks.popitem(last=False)


def hits(learns: bool) -> tuple[int, int]:
    """Serve 3,000 prompts: one in four is of 6 blocks and comes back twice; the others, of 20, never do."""
    chance, disk = random.Random(0), Disk(16 * BLOCK_BYTES * 0.4, 100_000, learns)
    comes_back: list[tuple[int, str]] = []
    for number in range(3_000):
        for due, prompt in [each for each in comes_back if each[0] <= number]:
            comes_back.remove((due, prompt))
            disk.request("acme", prompt, 0, 6, float(number))
        if chance.random() < 0.25:
            disk.request("acme", f"kept-{number}", 0, 6, float(number))
            comes_back += [(number + 100, f"kept-{number}"), (number + 300, f"kept-{number}")]
        else:
            disk.request("acme", f"once-{number}", 0, 20, float(number))
    return disk.num_hits, disk.num_written


def test_it_writes_what_comes_back() -> None:
    chosen, first_come = hits(True), hits(False)
    assert chosen[1] <= first_come[1] * 1.02, "no more is written"
    assert chosen[0] >= 1.8 * first_come[0]


def test_a_flood_of_another_tenant_takes_no_part_of_the_budget() -> None:
    """Alone, beside a tenant that offers a hundred times as much, and after thousands of names of tenants."""

    def written(flood: int, names: int) -> int:
        budget = WriteBudget(10 * BLOCK_BYTES, 10_000)
        for number in range(names):
            budget.offered(f"t{number}", kind_of(is_used=True, continues=True, num_blocks=9), [], 9, 9, 0.0)
        num_written = 0
        for number in range(600):
            now = 4_000.0 + number
            for each in range(flood):
                kind = kind_of(is_used=False, continues=False, num_blocks=400)
                if budget.offered("globex", kind, points_of(f"{now}-{each}", 0, 400), 400, 400_000, now):
                    budget.spend("globex", 400_000, now)
            kind = kind_of(is_used=True, continues=True, num_blocks=4)
            if budget.offered("acme", kind, points_of(f"a{number % 50}", 0, 4), 4, 4_000, now):
                num_written += budget.spend("acme", 4_000, now)
            budget.asked("acme", points_of(f"a{number % 50}", 0, 4))
        return num_written

    alone = written(0, 0)
    assert alone > 570
    assert written(20, 0) > 0.95 * alone
    assert written(20, 5_000) > 0.95 * alone


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_budget, "MAX_POINTS", 50)
    monkeypatch.setattr(write_budget, "MAX_TENANTS", 4)
    budget = WriteBudget(1e6, 1_000)
    for number in range(200):
        kind = kind_of(is_used=number % 2 == 0, continues=number % 3 == 0, num_blocks=1 << number)
        budget.offered(f"t{number % 9}", kind, points_of(f"p{number}", 0, 64), 64, 64, float(number))
    assert len(budget._tenants) == 4
    assert all(len(each.points) <= 50 and len(each.kinds) <= 4 * 24 for each in budget._tenants.values())


def test_it_begins_with_a_second_and_saves_up_no_more_than_the_burst() -> None:
    budget = WriteBudget(100.0, 1_000)
    kind = kind_of(is_used=False, continues=False, num_blocks=1)
    assert budget.offered("acme", kind, [], 1, 10, 5.0) and budget.left_bytes(5.0) == 100.0
    assert budget.spend("acme", 110, 5.5) and not budget.spend("acme", 1, 5.5), "the last call may overdraw"
    assert not budget.offered("acme", kind, [], 1, 10, 5.5)
    assert budget.offered("acme", kind, [], 1, 10, 7.0) and budget.left_bytes(7.0) == 190.0
    budget.offered("acme", kind, [], 1, 10, 1e6)
    assert 100.0 * BURST_S <= budget.left_bytes(1e6) <= 2 * 100.0 * BURST_S
