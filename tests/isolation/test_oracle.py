"""The oracle: it tells a lie from the truth, and its KV tells whose it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv import Namespace
from tests.model import Oracle, chain, rows_of

NS = Namespace("a", "m")
few_ids = st.lists(st.integers(0, 2), max_size=10)


def test_what_is_a_lie() -> None:
    """Never committed, committed elsewhere, half a block, more than was asked for, cleared."""
    oracle = Oracle(2)
    oracle.commit(NS, [1, 2, 3, 4, 5], 5)
    assert [oracle.served_lie(NS, [1, 2, 3, 4, 5], size) for size in (0, 2, 4)] == [None] * 3
    for ids, size in (([1, 2, 3, 4, 5], 5), ([1, 2, 3], 4), ([1, 9], 2), ([1, 2, 3, 4, 5, 6], 6)):
        assert oracle.served_lie(NS, ids, size)
    assert oracle.served_lie(Namespace("b", "m"), [1, 2], 2)
    assert oracle.served_lie(NS._replace(salt="x"), [1, 2], 2)
    oracle.clear(NS)
    assert oracle.served_lie(NS, [1, 2], 2) and not oracle.served_lie(NS, [1, 2], 0)


@given(
    few_ids,
    few_ids,
    st.sampled_from([NS, Namespace("b", "m"), Namespace("a", "m", "s"), NS._replace(salt="s")]),
)
def test_kv_tells_whose_it_is(one: list[int], two: list[int], other: Namespace) -> None:
    """Rows agree exactly as far as namespace and ids do; exact in float64; a chain goes on where it stopped."""
    common = 0
    while NS == other and common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    mine, theirs = chain(NS, one), chain(other, two)
    assert mine[:common] == theirs[:common] and not set(mine[common:]) & set(theirs[common:])
    rows = rows_of(mine)
    assert rows.shape == (2, len(one)) and rows[0].astype(int).tolist() == [state >> 12 for state in mine]
    assert (rows[1] == -rows[0]).all()
    if one:
        assert chain(NS, [*one, *two])[len(one) :] == chain(NS, two, mine[-1])
