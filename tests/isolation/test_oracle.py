"""The oracle detects false matches, and its KV identifies the owner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv import Namespace
from tests.model import Oracle, chain, rows_of

NS = Namespace("a", "m")
few_ids = st.lists(st.integers(0, 2), max_size=10)


def test_the_oracle_detects_false_matches() -> None:
    """False matches: never committed, committed elsewhere, half a block, more than requested, or cleared."""
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
def test_kv_identifies_namespace_and_ids(one: list[int], two: list[int], other: Namespace) -> None:
    """Rows agree exactly as far as namespace and ids do. They are exact in float64, and a chain can be continued."""
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
