"""Copies of rows equal torch's, whatever the ids and the layout of the tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.tiers.host.row_copies import put_rows, rows_of, zero_rows

ROWS = 12


def tensor(strided: bool, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    """12 rows of 2 x 3 elements; ``strided``: they lie apart, as behind an axis of keys and values."""
    values = torch.arange(2 * ROWS * 3).to(dtype)
    return values.view(2, ROWS, 3).movedim(1, 0) if strided else values.view(ROWS, 2, 3).clone()


some_ids = st.lists(st.integers(0, ROWS - 1), unique=True) | st.builds(
    lambda first, num: list(range(first, min(first + num, ROWS))),
    st.integers(0, ROWS - 1),
    st.integers(1, ROWS),
)


@given(some_ids, st.booleans(), st.booleans(), st.data())
def test_they_equal_torchs(ids: list[int], from_strided: bool, to_strided: bool, data: st.DataObject) -> None:
    to = data.draw(st.permutations(range(ROWS)))[: len(ids)]
    source, target, expected = tensor(from_strided), tensor(to_strided) + 1_000, tensor(to_strided) + 1_000
    found = rows_of(source, np.array(ids, np.int64))
    assert torch.equal(found, source[torch.tensor(ids, dtype=torch.int64)])
    put_rows(target, np.array(to, np.int64), found)
    expected[torch.tensor(to, dtype=torch.int64)] = found
    assert torch.equal(target, expected)
    zero_rows(target, np.array(ids, np.int64))
    expected[torch.tensor(ids, dtype=torch.int64)] = 0
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
def test_elements_of_each_size(dtype: torch.dtype) -> None:
    source, target = tensor(False, dtype), torch.zeros(ROWS, 2, 3, dtype=dtype)
    for ids in ([3, 4, 5], [9, 0, 7]):
        put_rows(target, np.array(ids), rows_of(source, np.array(ids)))
        assert torch.equal(target[ids], source[ids])


@pytest.mark.parametrize("ids", [[10, 11, 12], [0, 12], [12], [5, 40]])
def test_a_row_that_is_not_there_is_refused(ids: list[int]) -> None:
    where, target = np.array(ids, np.int64), tensor(False)
    with pytest.raises(IndexError):
        rows_of(target, where)
    with pytest.raises(IndexError):
        put_rows(target, where, torch.zeros(len(ids), 2, 3, dtype=torch.int16))
    with pytest.raises(IndexError):
        zero_rows(target, where)
    assert torch.equal(target, tensor(False))
