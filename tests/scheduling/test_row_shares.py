"""The rows of a step: bounded for strict tenants, shared by weight, and nobody sits out for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduling.row_shares import MAX_PASSED, RowShares

MOST = 8
"""Rows of others in a step."""


class Request:
    def __init__(self, tenant: str, num_rows: int, weight: float = 1.0) -> None:
        self.tenant, self.num_rows, self.weight, self.num_passed = tenant, num_rows, weight, 0

    def __repr__(self) -> str:
        return f"{self.tenant}:{self.num_rows}"


def shares_of(*strict: str) -> RowShares:
    return RowShares(MOST, lambda: strict)


def step(shares: RowShares, ready: list[Request]) -> list[Request]:
    shares.begin()
    return shares.admit(ready)


def steps(shares: RowShares, ready: list[Request], num: int) -> Counter[Request]:
    """How many of some steps each request took part in."""
    return Counter([each for _ in range(num) for each in step(shares, ready)])


def test_without_strict_tenants_all_take_part() -> None:
    ready = [Request("a", 5), Request("b", 40), Request("a", 3)]
    assert step(shares_of(), ready) == ready and not any(each.num_passed for each in ready)


def test_one_strict_tenant_takes_part_in_each_step() -> None:
    own = [Request("strict", 6), Request("strict", 5)]
    others = [Request("a", 4), Request("b", 4), Request("b", 8)]
    taken = steps(shares_of("strict"), [*others, *own], 100)
    assert [taken[each] for each in own] == [100, 100]
    assert all(taken[each] >= 100 // (MAX_PASSED + 1) for each in others)


def test_tenants_share_rows_by_weight() -> None:
    ready = [*(Request("heavy", 2, 3.0) for _ in range(8)), *(Request("light", 2, 1.0) for _ in range(8))]
    taken = steps(shares_of("idle"), ready, 400)
    rows = Counter[str]()
    for each, num in taken.items():
        rows[each.tenant] += num
    assert rows.total() == 400 * MOST // 2
    assert 2.5 < rows["heavy"] / rows["light"] < 3.5
    each_of_one = [num for each, num in taken.items() if each.tenant == "light"]
    assert max(each_of_one) - min(each_of_one) <= 2, "a tenant's requests take turns"


def test_a_flood_of_requests_is_no_larger_share() -> None:
    flood, calm = [Request("flood", 1) for _ in range(64)], Request("calm", 1)
    assert steps(shares_of("idle"), [*flood, calm], 50)[calm] == 50


def test_idle_time_saves_nothing_up() -> None:
    shares, busy, back = shares_of("idle"), [Request("busy", MOST)], [Request("back", MOST)]
    steps(shares, [*busy, *back], 2)
    steps(shares, [*busy, Request("busy", MOST)], 100)
    taken = steps(shares, [*busy, *back], 20)
    assert abs(taken[busy[0]] - taken[back[0]]) <= 2


def test_a_request_that_alone_has_too_many_rows_gets_steps() -> None:
    large, small = Request("a", 3 * MOST), [Request("b", 2) for _ in range(6)]
    taken = steps(shares_of("idle"), [large, *small], 100)
    assert taken[large] >= 5 and all(taken[each] for each in small)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from("abST"), st.integers(1, MOST), st.sampled_from((0.5, 1.0, 4.0))),
        max_size=12,
    ),
    st.sampled_from(("", "S", "ST", "STU")),
    st.integers(0, 12),
)
def test_the_bounds_hold_for_all_requests(
    kinds: list[tuple[str, int, float]], strict: str, num_later: int
) -> None:
    """Also for those that come in the middle of a step."""
    shares, longest = shares_of(*strict), 0
    ready = [Request(*kind) for kind in kinds]
    for _ in range(3 * MAX_PASSED):
        shares.begin()
        taken = shares.admit(ready[num_later:]) + shares.admit(ready[:num_later])
        num_later = 0
        assert bool(taken) == bool(ready) and len({*taken}) == len(taken)
        longest = max([longest, *(each.num_passed for each in ready)])
        rows = Counter[str]()
        for each in taken:
            rows[each.tenant] += each.num_rows
        if not strict:
            assert len(taken) == len(ready)
            continue
        assert sum(num for name, num in rows.items() if name not in strict) <= MOST
        for name in strict:
            assert rows.total() - rows[name] <= MOST or not rows[name]
    assert longest <= MAX_PASSED + len(ready), "each goes before all others in the end"
