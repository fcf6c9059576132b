"""quantize and dequantize for every layout of a pool: error bounds, the format, and equality with the reference.

On its own this file tests the torch path, and CUDA if there is a GPU. ``test_interpreter.py`` runs the same file in a
process that interprets the Triton kernels.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv_kernels import InputError, Pool, Quantized, dequantize, quantize, reference
from tests.kernels.pools import (
    DEVICES,
    FEW_LAYOUTS,
    IS_INTERPRETING,
    IS_SHORT,
    ON_CUDA,
    Shape,
    blocks_of,
    examples,
    shapes,
)

SCHEMES = ["fp8", "int8", "int4"]
NUMBERS = [torch.float32, torch.float16, torch.bfloat16]
EVEN = (2, 6, 8, 16, 34)


def finite(shape: Shape, memory: list[torch.Tensor]) -> None:
    """Fill the memory with values of many sizes.

    Some channels are large in every token, some groups constant, some zero.
    """
    noise = torch.Generator().manual_seed(shape.seed)
    for tensor in memory:
        values = torch.randn(tensor.shape, generator=noise) * 10.0 ** (shape.seed % 7 - 4)
        values[..., 0] += 50
        values[..., -1] = shape.seed % 3 / 2
        tensor.copy_(values)


def values_of(pool: Pool) -> torch.Tensor:
    """The pool's values, ``[num_blocks, num_layers, planes, block_size, heads, dim]``, in float64."""
    sides = [
        pool.plane(layer, side) for layer in range(pool.num_layers) for side in range(pool.planes_per_layer)
    ]
    whole = torch.stack([side.cpu().double() for side in sides], dim=1)
    return whole.unflatten(1, (pool.num_layers, pool.planes_per_layer))


def bounds(form: Quantized, values: torch.Tensor) -> torch.Tensor:
    """The allowed error for each value: the error of the format, plus the rounding of the result."""
    rounding = values.abs() * torch.finfo(form.pool.dtype).eps + reference.smallest_step(form.pool.dtype)
    if form.scheme == "fp8":
        scale = values.abs().amax((3, 5), keepdim=True).clamp(min=reference.LEAST_LARGEST) / 448
        return torch.maximum(values.abs() / 16, scale / 1024) * 1.0001 + rounding * 2
    steps = []
    for side in range(form.pool.planes_per_layer):
        axis = 2 if form.is_by_channel(side) else 4
        part = values[:, :, side]
        width = part.amax(axis, keepdim=True) - part.amin(axis, keepdim=True)
        step = width / form.levels * (1 + 4 * torch.finfo(form.pool.dtype).eps)
        steps.append((step / 2 + 2 * reference.smallest_step(form.pool.dtype)).expand_as(part))
    # float32 arithmetic adds an error of a few units in the last place of the larger of value and width.
    return torch.stack(steps, dim=2) * 1.0001 + rounding * 2 + values.abs().amax() * 2.0**-21


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
@examples(45)
@given(shape=shapes(dtypes=NUMBERS, dims=EVEN), data=st.data())
def test_errors_stay_within_the_stated_bounds(
    device: str, scheme: str, shape: Shape, data: st.DataObject
) -> None:
    pool, memory = shape.pool(device)
    finite(shape, memory)
    form = Quantized(pool, scheme)
    before, bytes_before = values_of(pool), blocks_of(pool)
    ids = data.draw(st.lists(st.integers(0, shape.num_blocks - 1), min_size=1, max_size=3))
    records = torch.full((len(ids), form.record_bytes), 0xA5, dtype=torch.uint8, device=device)
    quantize(pool, ids, records, scheme)
    truth = torch.full_like(records, 0xA5)
    reference.quantize(form, ids, truth)
    assert torch.equal(records, truth)
    np.testing.assert_array_equal(blocks_of(pool), bytes_before)
    targets = data.draw(st.permutations(range(shape.num_blocks)))[: len(ids)]
    ids = ids[: len(targets)]
    dequantize(records[: len(targets)], pool, targets, scheme)
    after = values_of(pool)
    error = (after[targets] - before[ids]).abs()
    assert (error <= bounds(form, before[ids])).all()
    others = [block_id for block_id in range(shape.num_blocks) if block_id not in targets]
    np.testing.assert_array_equal(blocks_of(pool)[others], bytes_before[others])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_dequantize_equals_the_reference(device: str, layout: str, scheme: str, dtype: torch.dtype) -> None:
    shape = Shape(layout, 3, 2, 5, 2, 24, dtype, 3)
    (pool, memory), (twin, copies) = shape.pool(device), shape.pool(device)
    finite(shape, memory)
    finite(shape, copies)
    form = Quantized(pool, scheme)
    records = torch.zeros((2, form.record_bytes), dtype=torch.uint8, device=device)
    reference.quantize(form, [2, 0], records)
    dequantize(records, pool, [0, 1], scheme)
    reference.dequantize(Quantized(twin, scheme), [0, 1], records)
    # Triton's interpreter truncates when it narrows to bfloat16, so the next lower value is allowed there.
    ulp = torch.finfo(dtype).eps if IS_INTERPRETING and dtype == torch.bfloat16 else 0
    want = values_of(twin)
    assert ((values_of(pool) - want).abs() <= want.abs() * ulp).all()


@pytest.mark.parametrize(
    ("scheme", "block_size", "bits"),
    [("fp8", 16, 8.015625), ("int8", 16, 9.125), ("int4", 16, 5.125), ("int4", 64, 4.375)],
)
def test_the_number_of_bits_for_each_value(scheme: str, block_size: int, bits: float) -> None:
    pool, _ = Shape("block-major", 1, 2, block_size, 2, 128).pool()
    form = Quantized(pool, scheme)
    assert form.bits_per_value == bits
    assert form.record_bytes * 8 == bits * 2 * 2 * block_size * 2 * 128


def test_keys_by_channel_survive_a_channel_that_is_large_everywhere() -> None:
    shape = Shape("apart", 1, 1, 16, 2, 64, torch.float32)
    pool, memory = shape.pool()
    memory[0].copy_(torch.randn(memory[0].shape, generator=torch.Generator().manual_seed(0)))
    memory[0][..., 5] += 100
    memory[1].copy_(memory[0])
    records = torch.zeros((1, Quantized(pool, "int4").record_bytes), dtype=torch.uint8)
    before = values_of(pool)
    quantize(pool, [0], records, "int4")
    dequantize(records, pool, [0], "int4")
    error = (values_of(pool) - before).abs()
    keys, values = error[:, :, 0].mean(), error[:, :, 1].mean()
    assert keys * 5 < values  # the same numbers by token: the large channel makes every step coarse


ALLOWED = [("int4", 0.15), ("int8", 0.01), ("fp8", 0.06)]


@pytest.mark.parametrize(("scheme", "allowed"), ALLOWED[:1] if IS_SHORT else ALLOWED)
def test_attention_over_quantised_keys_and_values(scheme: str, allowed: float) -> None:
    """The relative change of the attention output over 256 tokens, 16 in a block."""
    noise = torch.Generator().manual_seed(0)
    shape = Shape("block-major", 16, 1, 16, 1, 64, torch.float16)
    pool, memory = shape.pool()
    memory[0].copy_(torch.randn(memory[0].shape, generator=noise))
    memory[0][:, :, 0, :, :, 3] += 6  # real keys have such channels
    queries = torch.randn(1, 32, 64, generator=noise)

    def attention() -> torch.Tensor:
        keys, values = (memory[0][:, 0, side].flatten(0, 1).transpose(0, 1).float() for side in (0, 1))
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values)

    want = attention()
    form = Quantized(pool, scheme)
    records = torch.zeros((16, form.record_bytes), dtype=torch.uint8)
    quantize(pool, range(16), records, scheme)
    dequantize(records, pool, range(16), scheme)
    error = float((attention() - want).norm() / want.norm())
    assert math.isfinite(error) and 0 < error < allowed


NUMBER_POOL = Pool([torch.zeros(2, 4, 1, 8)])
RECORDS = torch.zeros(1, 96, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        pytest.param(lambda: quantize(NUMBER_POOL, [0], RECORDS, "int2"), "scheme", id="scheme"),
        pytest.param(lambda: quantize(NUMBER_POOL, [2], RECORDS, "int8"), "block_ids[0]", id="range"),
        pytest.param(lambda: quantize(NUMBER_POOL, [0], RECORDS[:, :80], "int8"), "records.shape", id="shape"),
        pytest.param(lambda: quantize(NUMBER_POOL, [0], RECORDS.char(), "int4"), "records.shape", id="int4-shape"),
        pytest.param(lambda: quantize(NUMBER_POOL, [0], torch.zeros(1, 64).char(), "int8"), "records", id="dtype"),
        pytest.param(lambda: quantize(NUMBER_POOL, [0], 3, "int8"), "records", id="type"),
        pytest.param(
            lambda: quantize(NUMBER_POOL, [0], torch.zeros(1, 64, dtype=torch.uint8, device="meta"), "int8"),
            "records.device", id="device",
        ),
        pytest.param(
            lambda: dequantize(RECORDS[:, :64].expand(2, 64).clone(), NUMBER_POOL, [1, 1], "int8"), "block_ids[1]",
            id="twice",
        ),
        pytest.param(lambda: Quantized(Pool([torch.zeros(2, 4, 1, 8).char()]), "int8"), "pool.dtype", id="pool-dtype"),
        pytest.param(lambda: Quantized(Pool([torch.zeros(2, 4, 1, 7)]), "int4"), "pool.head_dim", id="odd"),
        pytest.param(
            lambda: Quantized(Pool([torch.zeros(2, 129, 1, 256)]), "int8"), "(block_size, head_dim)", id="tile"
        ),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(make, argument: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.argument == argument
    assert not RECORDS.any()


if IS_INTERPRETING or ON_CUDA:
    from tests.kernels import e4m3

    @pytest.mark.parametrize("device", DEVICES)
    def test_integer_e4m3_equals_torch_for_every_half(device: str) -> None:
        assert e4m3.count_wrong_codes(device) == 0

    @pytest.mark.parametrize("device", DEVICES)
    def test_every_e4m3_code_decodes_like_torch(device: str) -> None:
        assert e4m3.wrong_values(device) == [0x7F, 0xFF]  # the two NaNs, which are never written
