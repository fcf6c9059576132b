"""``write_budget``: never more bytes than came in, a bounded burst, and the last write may overdraw."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.tiers.disk.write_budget import BURST_S, WriteBudget

MOST_BYTES = 400_000


@given(
    st.lists(st.tuples(st.integers(1, MOST_BYTES), st.floats(0.0, 300.0)), max_size=120),
    st.sampled_from([1.0, 5_000.0, 1e6]),
)
def test_no_window_has_more_than_the_budget(writes: list[tuple[int, float]], rate: float) -> None:
    """Beyond what comes in, at most the burst and one write are written."""
    budget, now, spent = WriteBudget(rate), 0.0, list[tuple[float, int]]()
    for num_bytes, pause_s in writes:
        now += pause_s
        if budget.spend(num_bytes, now):
            spent.append((now, num_bytes))
    for at, (began, _) in enumerate(spent):
        written = 0
        for ended, num_bytes in spent[at:]:
            written += num_bytes
            assert written <= ((ended - began) + BURST_S) * rate * (1 + 1e-9) + MOST_BYTES


def test_it_begins_with_a_second_and_saves_up_no_more_than_the_burst() -> None:
    budget = WriteBudget(100.0)
    assert budget.left_bytes(5.0) == 100.0
    assert budget.spend(250, 5.5) and not budget.spend(1, 5.5), "the last write may overdraw"
    assert budget.left_bytes(5.5) == -100.0 and not budget.spend(1, 6.5)
    assert budget.spend(1, 7.5)
    assert budget.left_bytes(1e6) == 100.0 * BURST_S
