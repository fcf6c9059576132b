"""fork_blocks compared with an oracle that knows only bytes, on every path of this process.

On its own this file tests the torch path, and CUDA if there is a GPU. ``test_interpreter.py`` runs the same file in a
process that interprets the Triton kernel.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv_kernels import InputError, fork_blocks, reference
from radixkv_kernels.checks import STORAGE_SHAPE
from tests.kernels.pools import DEVICES, DTYPES, IS_INTERPRETING, IS_SHORT, examples


class Case(NamedTuple):
    shape: tuple[int, int, int, int, int, int]
    dtype: torch.dtype
    seed: int
    pairs: list[tuple[int, int, int]]

    def storage(self, device: str) -> torch.Tensor:
        """Storage full of random bytes, so NaNs with every payload occur and no two rows are equal."""
        shape = (*self.shape[:-1], self.shape[-1] * self.dtype.itemsize)
        noise = np.random.default_rng(self.seed).integers(0, 256, shape, dtype=np.uint8)
        return torch.from_numpy(noise).view(self.dtype).to(device)

    def columns(self) -> list[np.ndarray]:
        return list(np.array(self.pairs, dtype=np.int32).reshape(-1, 3).T)


def bytes_of(storage: torch.Tensor) -> np.ndarray:
    return storage.view(torch.uint8).cpu().numpy().copy()


def expected(case: Case, before: np.ndarray) -> np.ndarray:
    """The expected bytes, row by row. Bytes that no pair names stay as they were."""
    after = before.copy()
    _, num_layers, _, _, _, _ = case.shape
    for source, target, num_rows in case.pairs:
        for layer in range(num_layers):
            for plane in (0, 1):
                for row in range(num_rows):
                    after[target, layer, plane, row] = before[source, layer, plane, row]
    return after


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_blocks, block_size = draw(st.integers(2, 9)), draw(st.integers(1, 9))
    heads, size = (
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 33])),
    )
    shape = (num_blocks, draw(st.integers(1, 3)), 2, block_size, heads, size)
    ids = draw(st.permutations(range(num_blocks)))
    num_sources = draw(st.integers(1, num_blocks - 1))
    targets = ids[num_sources:][: draw(st.integers(0, 5))]
    sources = st.sampled_from(ids[:num_sources])  # several targets may share one source
    rows = st.integers(1, block_size)
    pairs = [(draw(sources), target, draw(rows)) for target in targets]
    return Case(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**32 - 1)), pairs)


@pytest.mark.parametrize("device", DEVICES)
@examples(150)
@given(case=cases())
def test_valid_rows_are_copied_and_nothing_else_changes(device: str, case: Case) -> None:
    storage = case.storage(device)
    want = expected(case, bytes_of(storage))
    truth = storage.clone()
    reference.fork_blocks(truth, *(column.tolist() for column in case.columns()))
    fork_blocks(storage, *case.columns())
    np.testing.assert_array_equal(bytes_of(truth), want)
    np.testing.assert_array_equal(bytes_of(storage), want)


def test_the_process_uses_the_requested_mode() -> None:
    assert IS_INTERPRETING == (os.environ.get("TRITON_INTERPRET") == "1")
    storage = torch.zeros(2, 1, 2, 1, 1, 1)
    storage[0] = 1
    fork_blocks(storage, [0], [1], [1])
    assert storage[1].all()
    if IS_INTERPRETING:
        kernel = sys.modules["radixkv_kernels.copy_triton"].copy_kernel
        assert type(kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[::3] if IS_SHORT else DTYPES, ids=str)
def test_planes_longer_than_a_chunk(device: str, dtype: torch.dtype) -> None:
    # 5 rows of 4 x 257 elements: several chunks a plane, a ragged last one, and row lengths that are no power of two.
    case = Case((4, 2, 2, 5, 4, 257), dtype, 7, [(0, 1, 5), (2, 3, 4)])
    storage = case.storage(device)
    want = expected(case, bytes_of(storage))
    fork_blocks(storage, *case.columns())
    np.testing.assert_array_equal(bytes_of(storage), want)


@pytest.mark.parametrize("device", DEVICES)
def test_offsets_beyond_32_bits(device: str) -> None:
    # Rows of 5 bytes, so words are bytes. A block has 640 bytes, and these blocks start beyond 2**31. On the torch
    # path, pages that are never written cost no memory. The interpreter copies the whole storage onto itself.
    storage = torch.empty((3_500_000, 1, 2, 64, 1, 5), dtype=torch.int8, device=device)
    source, target, bystander = (
        storage[block_id, 0, :, :3] for block_id in (3_499_999, 3_499_998, 3_499_997)
    )
    source.copy_(torch.arange(30, dtype=torch.int8).view(source.shape))
    target.fill_(-1)
    bystander.fill_(-2)
    fork_blocks(storage, [3_499_999], [3_499_998], [2])
    assert torch.equal(target[:, :2], source[:, :2])
    assert (target[:, 2] == -1).all()
    assert (bystander == -2).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_storage_that_starts_anywhere_in_memory(device: str, offset: int) -> None:
    case = Case((3, 1, 2, 4, 2, 8), torch.int8, offset, [(0, 2, 3)])
    whole = case.storage(device)
    room = torch.zeros(whole.numel() + 16, dtype=torch.int8, device=device)
    storage = room[offset : offset + whole.numel()].view(whole.shape)
    storage.copy_(whole)
    fork_blocks(storage, *case.columns())
    np.testing.assert_array_equal(bytes_of(storage), expected(case, bytes_of(whole)))
    outside = torch.cat((room[:offset], room[offset + whole.numel() :]))
    assert not outside.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda ids: ids, id="list"),
        pytest.param(lambda ids: np.array(ids, dtype=np.int32), id="numpy-int32"),
        pytest.param(lambda ids: np.array(ids, dtype=np.uint64), id="numpy-uint64"),
        pytest.param(lambda ids: torch.tensor(ids, dtype=torch.int32), id="torch-int32"),
        pytest.param(lambda ids: torch.tensor(ids), id="torch-int64"),
        pytest.param(lambda ids: np.repeat(np.array(ids, dtype=np.int32), 2)[::2], id="strided"),
    ],
)
def test_pairs_in_every_form(device: str, form) -> None:
    case = Case((5, 1, 2, 3, 1, 4), torch.float16, 3, [(0, 4, 2), (1, 3, 3)])
    storage = case.storage(device)
    want = expected(case, bytes_of(storage))
    fork_blocks(storage, *(form(column.tolist()) for column in case.columns()))
    np.testing.assert_array_equal(bytes_of(storage), want)


@pytest.mark.parametrize(
    "empty",
    [[], np.empty(0, dtype=np.int32), torch.empty(0, dtype=torch.int32)],
    ids=type,
)
def test_nothing_to_copy_launches_nothing(empty, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(reference, "fork_blocks", launched)
    if IS_INTERPRETING:
        from radixkv_kernels import copy_triton

        monkeypatch.setattr(copy_triton, "copy", launched)
    case = Case((2, 1, 2, 3, 1, 4), torch.float16, 3, [])
    storage = case.storage("cpu")
    before = bytes_of(storage)
    fork_blocks(storage, empty, empty, empty)
    np.testing.assert_array_equal(bytes_of(storage), before)
    with pytest.raises(AssertionError, match="launched"):  # the check itself works
        fork_blocks(storage, [0], [1], [1])


BAD_PAIRS = [
    # src, dst, num_rows, the argument named in the error, its value, and the allowed values in the message
    ([0, 6], [1, 2], [1, 1], "src[1]", 6, "0 to num_blocks - 1 = 5"),
    ([-1], [1], [1], "src[0]", -1, "0 to num_blocks"),
    ([0], [6], [1], "dst[0]", 6, "0 to num_blocks"),
    ([0, 0], [1, -7], [1, 1], "dst[1]", -7, "0 to num_blocks"),
    ([0], [1], [0], "num_rows[0]", 0, "1 to block_size = 4"),
    ([0], [1], [5], "num_rows[0]", 5, "1 to block_size"),
    ([0], [1], [-(2**31)], "num_rows[0]", -(2**31), "1 to block_size"),
    (
        [0, 1],
        [2],
        [1, 1],
        "(len(src), len(dst), len(num_rows))",
        (2, 1, 2),
        "equal lengths",
    ),
    ([0], [1], [], "(len(src), len(dst), len(num_rows))", (1, 1, 0), "equal lengths"),
    ([0, 1, 0], [3, 2, 3], [1, 1, 1], "dst[2]", 3, "once"),
    ([0, 1], [1, 2], [1, 1], "src[1]", 1, "also a target"),
    ([2], [2], [1], "src[0]", 2, "also a target"),
    ([2**31], [1], [1], "src[0]", 2**31, "0 to num_blocks"),
    (np.array([2**64 - 1], dtype=np.uint64), [1], [1], "src[0]", 2**64 - 1, "0 to num_blocks"),
    ([0], [1], torch.tensor([True]), "num_rows.dtype", "torch.bool", "integers"),
    ([2**70], [1], [1], "src.dtype", "object", "integers"),
    ([0], [1.0], [1], "dst.dtype", "float64", "integers"),
    ([0], [1], [True], "num_rows.dtype", "bool", "integers"),
    ([0], torch.tensor([1.0]), [1], "dst.dtype", "torch.float32", "integers"),
    (
        [0],
        torch.tensor([1.0], dtype=torch.bfloat16),
        [1],
        "dst.dtype",
        "torch.bfloat16",
        "integers",
    ),
    ([[0]], [1], [1], "src.shape", (1, 1), "one dimension"),
    (
        torch.empty(1, dtype=torch.int32, device="meta"),
        [1],
        [1],
        "src.device",
        "meta",
        "host",
    ),
]


@pytest.mark.parametrize(("src", "dst", "num_rows", "argument", "value", "allowed"), BAD_PAIRS)
def test_bad_pairs_are_named_and_change_nothing(src, dst, num_rows, argument, value, allowed) -> None:
    storage = Case((6, 1, 2, 4, 1, 2), torch.int8, 1, []).storage("cpu")
    before = bytes_of(storage)
    with pytest.raises(InputError) as caught:
        fork_blocks(storage, src, dst, num_rows)
    assert (caught.value.argument, caught.value.value) == (argument, value)
    assert allowed in caught.value.allowed
    for part in (argument, repr(value), caught.value.allowed):
        assert part in str(caught.value)
    np.testing.assert_array_equal(bytes_of(storage), before)


CONTIGUOUS = ("storage.stride()", f"a contiguous tensor {STORAGE_SHAPE}")
SIX_DIMENSIONS = ("storage.shape", f"{STORAGE_SHAPE}, every dimension at least 1")


@pytest.mark.parametrize(
    ("storage", "argument", "allowed"),
    [
        pytest.param(torch.zeros(4, 2, 2, 4, 1, 8)[..., ::2], *CONTIGUOUS, id="strided"),
        pytest.param(torch.zeros(4, 2, 2, 4, 1, 8)[:, :1], *CONTIGUOUS, id="layer-view"),
        pytest.param(torch.zeros(4, 2, 2, 4, 8), *SIX_DIMENSIONS, id="rank-5"),
        pytest.param(torch.zeros(4, 2, 3, 4, 1, 8), *SIX_DIMENSIONS, id="three-planes"),
        pytest.param(torch.zeros(4, 0, 2, 4, 1, 8), *SIX_DIMENSIONS, id="no-layers"),
        pytest.param(
            torch.empty(2**31, 1, 2, 1, 1, 1, device="meta"),
            "storage.shape",
            "at most 2147483647 blocks (block ids are int32)",
            id="ids-beyond-int32",
        ),
        pytest.param(np.zeros((4, 2, 2, 4, 1, 8)), "storage", f"a torch.Tensor {STORAGE_SHAPE}", id="numpy"),
    ],
)
def test_storage_of_a_wrong_form_is_refused(storage, argument: str, allowed: str) -> None:
    with pytest.raises(InputError) as caught:
        fork_blocks(storage, [0], [1], [1])
    assert (caught.value.argument, caught.value.allowed) == (argument, allowed)


@given(pairs=st.lists(st.tuples(*[st.integers(-2, 7)] * 3), max_size=5))
def test_a_call_either_raises_and_changes_nothing_or_copies(
    pairs: list[tuple[int, int, int]],
) -> None:
    case = Case((6, 1, 2, 4, 1, 2), torch.int8, 1, pairs)
    storage = case.storage("cpu")
    before = bytes_of(storage)
    sources, targets = {pair[0] for pair in pairs}, [pair[1] for pair in pairs]
    is_good = all(0 <= s < 6 and 0 <= t < 6 and 1 <= n <= 4 for s, t, n in pairs)
    is_good = is_good and len(set(targets)) == len(targets) and not sources & set(targets)
    try:
        fork_blocks(storage, *case.columns())
    except InputError:
        assert not is_good
        np.testing.assert_array_equal(bytes_of(storage), before)
    else:
        assert is_good
        np.testing.assert_array_equal(bytes_of(storage), expected(case, before))
