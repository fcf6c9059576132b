"""``write_budget``: never more bytes than came in, a bounded burst, the last write may overdraw, and equal parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.tiers.disk.write_budget import BURST_S, WriteBudget

MOST_BYTES = 400_000


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, MOST_BYTES), st.floats(0.0, 300.0)), max_size=120
    ),
    st.sampled_from([1.0, 5_000.0, 1e6]),
)
def test_no_window_has_more_than_the_budget(writes: list[tuple[str, int, float]], rate: float) -> None:
    """Beyond what comes in, at most the burst and one write are written."""
    budget, now, spent = WriteBudget(rate), 0.0, list[tuple[float, int]]()
    for tenant, num_bytes, pause_s in writes:
        now += pause_s
        if budget.spend(tenant, num_bytes, now):
            spent.append((now, num_bytes))
    for at, (began, _) in enumerate(spent):
        written = 0
        for ended, num_bytes in spent[at:]:
            written += num_bytes
            assert written <= ((ended - began) + BURST_S) * rate * (1 + 1e-9) + MOST_BYTES


def test_it_begins_with_a_second_and_saves_up_no_more_than_the_burst() -> None:
    budget = WriteBudget(100.0)
    assert budget.left_bytes(5.0) == 100.0
    assert budget.spend("a", 250, 5.5) and not budget.spend("a", 1, 5.5), "the last write may overdraw"
    assert budget.left_bytes(5.5) == -100.0 and not budget.spend("a", 1, 6.5)
    assert budget.spend("a", 1, 7.5)
    assert budget.left_bytes(1e6) == 100.0 * BURST_S


@given(st.lists(st.tuples(st.integers(1, 3_000), st.floats(0.0, 100.0)), max_size=80))
def test_who_writes_alone_has_all_of_it(writes: list[tuple[int, float]]) -> None:
    budget, now = WriteBudget(100.0), 0.0
    for num_bytes, pause_s in writes:
        now += pause_s
        left = budget.left_bytes(now)
        assert budget.spend("a", num_bytes, now) == (left > 0)


@pytest.mark.parametrize("num_flooding", [1, 4])
def test_a_flood_leaves_the_others_their_parts(num_flooding: int) -> None:
    """Ten writes of each that floods for each one of b, which asks for less than its part."""
    budget, written = WriteBudget(1_000.0), dict.fromkeys("b", 0)
    for second in range(600):
        for number in range(10 * num_flooding):
            name = f"flood-{number % num_flooding}"
            written[name] = written.get(name, 0) + 1_000 * budget.spend(name, 1_000, float(second))
        assert budget.spend("b", 100, second + 0.5) or second < 2 * BURST_S, "once the savings are spent"
        written["b"] += 100
    assert sum(written.values()) <= 1_000 * (600 + 1 + BURST_S) + 1_000
    assert sum(written.values()) >= 1_000 * (600 - 60), "nothing that b leaves is wasted for long"
    floods = [written[f"flood-{number}"] for number in range(num_flooding)]
    assert max(floods) - min(floods) <= 1_000 * BURST_S, "and they share what is left"
