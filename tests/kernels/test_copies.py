"""fork_blocks, gather, scatter and scrub for every layout of a pool, compared with oracles that know only bytes.

On its own this file tests the torch path, and CUDA if there is a GPU. ``test_interpreter.py`` runs the same file in a
process that interprets the Triton kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv_kernels import InputError, Pool, fork_blocks, gather, launch, reference, scatter, scrub
from radixkv_kernels.checks import BlockPairs
from tests.kernels.pools import (
    DEVICES,
    FEW_LAYOUTS,
    IS_INTERPRETING,
    IS_SHORT,
    Shape,
    blocks_of,
    examples,
    memory_of,
    shapes,
)

NUMBERS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
@examples(100)
@given(shape=shapes(), data=st.data())
def test_fork_copies_the_valid_rows_in_every_layout(device: str, shape: Shape, data: st.DataObject) -> None:
    pool, memory = shape.pool(device)
    ids = data.draw(st.permutations(range(shape.num_blocks)))
    cut = data.draw(st.integers(1, shape.num_blocks - 1))
    targets = ids[cut:]
    sources = [data.draw(st.sampled_from(ids[:cut])) for _ in targets]
    num_rows = [data.draw(st.integers(1, shape.block_size)) for _ in targets]
    want = blocks_of(pool)
    for source, target, rows in zip(sources, targets, num_rows, strict=True):
        want[target, :, :rows] = want[source, :, :rows]
    truth, _ = shape.pool(device)
    reference.fork_blocks(truth, sources, targets, num_rows)
    fork_blocks(pool, sources, targets, num_rows)
    np.testing.assert_array_equal(blocks_of(truth), want)
    np.testing.assert_array_equal(blocks_of(pool), want)
    assert _only_blocks_changed(shape, memory, targets)


@pytest.mark.parametrize("device", DEVICES)
@examples(100)
@given(shape=shapes(), data=st.data())
def test_gather_stages_blocks_and_scatter_brings_them_back(
    device: str, shape: Shape, data: st.DataObject
) -> None:
    pool, memory = shape.pool(device)
    before = blocks_of(pool)
    ids = data.draw(st.lists(st.integers(0, shape.num_blocks - 1), max_size=5))
    staging = torch.empty((len(ids), *pool.block_shape), dtype=shape.dtype, device=device)
    staging.view(torch.uint8).fill_(0xA5)
    gather(pool, ids, staging)
    staged = before[ids].reshape(staging.view(torch.uint8).shape)
    np.testing.assert_array_equal(staging.view(torch.uint8).cpu().numpy(), staged)
    assert _only_blocks_changed(shape, memory, [])
    targets = data.draw(st.permutations(range(shape.num_blocks)))[: len(ids)]
    staging, ids = staging[: len(targets)], ids[: len(targets)]
    scatter(staging, pool, targets)
    want = before.copy()
    want[list(targets)] = before[ids]
    np.testing.assert_array_equal(blocks_of(pool), want)
    assert _only_blocks_changed(shape, memory, targets)


@pytest.mark.parametrize("device", DEVICES)
@examples(100)
@given(shape=shapes(), data=st.data())
def test_scrub_zeroes_the_named_blocks_alone(device: str, shape: Shape, data: st.DataObject) -> None:
    pool, memory = shape.pool(device)
    ids = data.draw(st.lists(st.integers(0, shape.num_blocks - 1), max_size=6))  # an id may occur twice
    want = blocks_of(pool)
    want[ids] = 0
    scrub(pool, ids)
    np.testing.assert_array_equal(blocks_of(pool), want)
    assert _only_blocks_changed(shape, memory, ids)


def _only_blocks_changed(shape: Shape, memory: list[torch.Tensor], block_ids: list[int]) -> bool:
    """Whether the memory of all other blocks is unchanged."""
    _, fresh = shape.pool()
    axis = 1 if shape.layout == "together-0" else 0
    others = [block_id for block_id in range(shape.num_blocks) if block_id not in block_ids]
    return all(
        np.array_equal(now.take(others, axis), then.take(others, axis))
        for now, then in zip(memory_of(memory), memory_of(fresh), strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_lanes_longer_than_a_chunk(device: str, layout: str) -> None:
    # 5 rows of 2 heads of 321 floats: several chunks a lane, a ragged last one, and run lengths that are no power of
    # two.
    shape = Shape(layout, 4, 1, 5, 2, 321, torch.float32)
    pool, _ = shape.pool(device)
    want = blocks_of(pool)
    want[1], want[3, :, :4] = want[0], want[2, :, :4]
    fork_blocks(pool, [0, 2], [1, 3], [5, 4])
    np.testing.assert_array_equal(blocks_of(pool), want)
    staging = torch.empty((2, *pool.block_shape), device=device)
    gather(pool, [1, 3], staging)
    scrub(pool, [1, 3])
    assert not blocks_of(pool)[[1, 3]].any()
    scatter(staging, pool, [1, 3])
    np.testing.assert_array_equal(blocks_of(pool), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["hnd"] if IS_SHORT else ["block-major", "hnd"])
@pytest.mark.parametrize("there", NUMBERS, ids=str)
@pytest.mark.parametrize("here", NUMBERS, ids=str)
def test_conversions_equal_those_of_torch(
    device: str, layout: str, here: torch.dtype, there: torch.dtype
) -> None:
    pool, memory = Shape(layout, 3, 2, 5, 2, 24, here).pool(device)
    for tensor in memory:
        tensor.copy_(torch.randn(tensor.shape))
    staging = torch.empty((2, *pool.block_shape), dtype=there, device=device)
    gather(pool, [2, 0], staging)
    want = torch.empty_like(staging)
    reference.gather(pool, [2, 0], want)
    # Triton's interpreter truncates when it narrows to bfloat16, so the next lower value is allowed there.
    ulps = 1 if IS_INTERPRETING and there == torch.bfloat16 else 0
    assert _most_ulps(staging, want) <= ulps
    twin, _ = Shape(layout, 3, 2, 5, 2, 24, here).pool(device)
    scatter(want, pool, [1, 2])
    reference.scatter(want, twin, [1, 2])
    ulps = 1 if IS_INTERPRETING and here == torch.bfloat16 else 0
    for layer, side in ((0, 0), (1, 1)):
        assert _most_ulps(pool.plane(layer, side)[1:], twin.plane(layer, side)[1:]) <= ulps


def _most_ulps(left: torch.Tensor, right: torch.Tensor) -> int:
    words = torch.int32 if left.dtype.itemsize == 4 else torch.int16
    left, right = left.contiguous(), right.contiguous()
    return int((left.view(words).long() - right.view(words).long()).abs().max())


@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_gather_by_layer_equals_gather_at_once(layout: str) -> None:
    pool, _ = Shape(layout, 4, 2, 3, 2, 8).pool()
    whole = torch.zeros((2, *pool.block_shape), dtype=pool.dtype)
    gather(pool, [3, 1], whole)
    for layer in range(2):
        part = torch.zeros_like(whole[:, layer : layer + 1]).contiguous()
        gather(pool.layers(layer, layer + 1), [3, 1], part)
        assert torch.equal(part.view(torch.uint8), whole[:, layer : layer + 1].contiguous().view(torch.uint8))


@pytest.mark.parametrize("most", [1] if IS_SHORT else [1, 9])
def test_more_programs_than_a_grid_allows_are_several_launches(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_NUM_PROGRAMS", most)
    step = {1: 4, 9: 8}[most]  # in steps of 4: each part of a table on the device is aligned to 16 bytes
    ids = list(range(10))
    assert [ids[part] for part in launch.slices(10, 1)] == [ids[at : at + step] for at in range(0, 10, step)]
    pool, _ = Shape("apart", 21, 1, 1, 1, 4, torch.int8).pool()
    want = blocks_of(pool)
    want[10:20], want[20] = want[0:10], 0
    fork_blocks(pool, ids, range(10, 20), [1] * 10)
    scrub(pool, [20])
    np.testing.assert_array_equal(blocks_of(pool), want)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_hundred_thousand_pairs(device: str) -> None:
    pool, _ = Shape("latent", 100_001, 1, 1, 1, 4, torch.int8).pool(device)
    want = blocks_of(pool)
    targets = np.random.default_rng(1).permutation(np.arange(1, 100_001))[: 40 if IS_INTERPRETING else None]
    want[targets] = want[0]
    fork_blocks(pool, [0] * len(targets), targets, [1] * len(targets))
    np.testing.assert_array_equal(blocks_of(pool), want)


class Launches:
    """Replaces a Triton kernel and records grids and arguments."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names: list[str] = kernel.arg_names
        self.seen: list[tuple[tuple[int, ...], tuple[object, ...]]] = []

    def warmup(self, *_: object, **__: object) -> None:
        """Compile nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **_: self.seen.append((grid, arguments))


@pytest.mark.parametrize(
    ("num_pairs", "room"), [(1, 8), (8, 8), (9, 32), (32, 32), (33, None), (100_000, None)]
)
def test_each_program_has_one_chunk_for_any_number_of_pairs(
    num_pairs: int, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few pairs are arguments of the launch, which holds 8 or 32 of them. More pairs are a table."""
    from radixkv_kernels import copy_triton

    few, many = Launches(copy_triton.copy_few_kernel), Launches(copy_triton.copy_kernel)
    monkeypatch.setattr(copy_triton, "copy_few_kernel", few)
    monkeypatch.setattr(copy_triton, "copy_kernel", many)
    monkeypatch.setattr(
        copy_triton, "_copier", copy_triton._copier.__wrapped__
    )  # a launcher for these kernels alone
    pool = Pool.of(torch.empty(2, 32, 2, 16, 8, 128, dtype=torch.bfloat16))
    pairs = BlockPairs([0] * num_pairs, [1] * num_pairs, [16] * num_pairs)
    copy_triton.copy(pool, pool, pairs)
    [(grid, (_, _, *rest))] = few.seen + many.seen
    words = num_pairs * pool.block_bytes // 4
    assert math.prod(grid) * copy_triton.CHUNK == words and math.prod(grid) >= 512
    if room is not None:
        unused = (0,) * (room - num_pairs)
        assert grid == (8, 64, num_pairs)
        assert rest == [(number,) * num_pairs + unused for number in (0, 1, 16)]
    else:
        table, num_chunks = rest
        assert num_chunks == 8 and torch.equal(
            table, torch.tensor([[0, 1, 16]] * num_pairs, dtype=torch.int32)
        )


class Compiled:
    """Replaces a Triton kernel that can be compiled. It records the arguments of compilations and launches."""

    arg_names = ("here", "SIZE", "there", "KIND")

    def __init__(self) -> None:
        self.shown: list[tuple[object, ...]] = []
        self.seen: list[tuple[object, ...]] = []

    def warmup(self, *arguments: object, **options: object) -> Compiled:
        self.shown.append((arguments, options))
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *arguments: self.seen.append((grid, arguments))


def test_a_kernel_is_compiled_once_and_launched_with_its_constants_in_order() -> None:
    kernel = Compiled()
    run = launch.Launcher(kernel, {"KIND": "int32", "SIZE": 4}, num_warps=2)
    run((7, 1, 1), "a", (1, 16))
    run((8, 2, 1), "c", (0, 3))
    options = {"KIND": "int32", "SIZE": 4, "num_warps": 2, "grid": (7, 1, 1)}
    assert kernel.shown == [(("a", (2, 2)), options)]
    assert kernel.seen == [((7, 1, 1), ("a", (1, 16), 4, "int32")), ((8, 2, 1), ("c", (0, 3), 4, "int32"))]


def test_empty_lists_launch_nothing() -> None:
    pool, memory = Shape("apart", 2, 1, 2, 1, 2).pool()
    before = memory_of(memory)
    empty = torch.empty((0, *pool.block_shape), dtype=pool.dtype)
    fork_blocks(pool, [], [], [])
    gather(pool, [], empty)
    scatter(empty, pool, [])
    scrub(pool, [])
    assert all(np.array_equal(a, b) for a, b in zip(before, memory_of(memory), strict=True))


PLANE = torch.zeros(4, 3, 2, 8)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        pytest.param(lambda: Pool([]), "len(keys)", id="no-layer"),
        pytest.param(lambda: Pool([PLANE], []), "len(values)", id="values-missing"),
        pytest.param(lambda: Pool(None), "keys", id="no-list"),
        pytest.param(lambda: Pool([PLANE], 5), "values", id="no-list-of-values"),
        pytest.param(lambda: Pool.together([5], 0), "caches[0]", id="no-cache"),
        pytest.param(lambda: Pool([PLANE.numpy()]), "keys[0]", id="numpy"),
        pytest.param(lambda: Pool([PLANE[0, 0]]), "keys[0].shape", id="rank"),
        pytest.param(lambda: Pool([PLANE[:0]]), "keys[0].shape", id="no-block"),
        pytest.param(lambda: Pool([PLANE], [PLANE]), "keys, values", id="same-memory"),
        pytest.param(lambda: Pool([PLANE], [PLANE.half()]), "values[0].dtype", id="dtypes"),
        pytest.param(lambda: Pool([PLANE], [torch.zeros(4, 3, 2, 9)]), "values[0].shape", id="shapes"),
        pytest.param(lambda: Pool([PLANE], [PLANE.to("meta")]), "values[0].device", id="devices"),
        pytest.param(
            lambda: Pool([PLANE], [torch.zeros(4, 2, 3, 8).transpose(1, 2)]), "values[0].stride()", id="strides"
        ),
        pytest.param(lambda: Pool([PLANE[..., ::2]]), "keys[0].stride()", id="scattered-heads"),
        pytest.param(lambda: Pool([PLANE[:1].expand(4, 3, 2, 8)]), "keys[0].stride()", id="expanded"),
        pytest.param(
            lambda: Pool([torch.empty(9, 2**27, 2, 8, device="meta").transpose(0, 1)]), "keys[0].stride()",
            id="rows-far-apart",
        ),
        pytest.param(lambda: Pool.together([PLANE], 1), "caches[0].shape", id="no-sides"),
        pytest.param(lambda: Pool([PLANE]).layers(0, 2), "(start, stop)", id="layers"),
        pytest.param(lambda: scrub(PLANE, [0]), "storage.shape", id="no-storage"),
        pytest.param(lambda: scrub(Pool([PLANE]), [0, 4]), "block_ids[1]", id="scrub-range"),
        pytest.param(lambda: gather(Pool([PLANE]), [-1], PLANE), "block_ids[0]", id="gather-range"),
        pytest.param(lambda: gather(Pool([PLANE]), [0], PLANE), "staging.shape", id="staging-shape"),
        pytest.param(lambda: gather(Pool([PLANE]), [0], 3), "staging", id="staging-type"),
        pytest.param(
            lambda: gather(Pool([PLANE]), [0], torch.zeros(1, 1, 1, 3, 8, 2).transpose(4, 5)), "staging.stride()",
            id="staging-strides",
        ),
        pytest.param(
            lambda: gather(Pool([PLANE]), [0], torch.zeros(1, 1, 1, 3, 2, 8, device="meta")), "staging.device",
            id="staging-device",
        ),
        pytest.param(
            lambda: gather(Pool([PLANE]), [0], torch.zeros(1, 1, 1, 3, 2, 8, dtype=torch.int8)), "staging.dtype",
            id="staging-dtype",
        ),
        pytest.param(lambda: scatter(PLANE, Pool([PLANE]), [2, 2]), "block_ids[1]", id="scatter-twice"),
        pytest.param(lambda: fork_blocks(Pool([PLANE]), [0, 1], [1, 2], [1, 1]), "src[1]", id="chain"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(make, argument: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.argument == argument
    assert not PLANE.any()


def test_layers_may_be_stacked_in_one_tensor() -> None:
    keys, values = torch.zeros(2, 4, 3, 2, 8), torch.zeros(2, 4, 3, 2, 8)
    pool = Pool(keys, values)
    assert (pool.num_layers, pool.planes_per_layer) == (2, 2)
    keys[1, 3] = values[0, 3] = 1
    scrub(pool, [3])
    assert not keys.any() and not values.any()
