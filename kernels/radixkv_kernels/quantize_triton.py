"""The Triton kernels of quantize and dequantize: a program turns one head of one plane of one block.

A program holds its tile ``[block_size, head_dim]`` in registers, so a block is read once and a record written
once. int4 holds two half tiles, channels ``[0, head_dim / 2)`` and the rest, whose codes share bytes. All
arithmetic is float32 with nothing fused, divisions rounded to nearest: the same bits as the reference.
FP8 codes are made and read by integer arithmetic where the hardware has no e4m3 (before sm_89, and on gfx942,
whose own fp8 is another one), with the same result.

Importing this module imports triton, and so fixes whether this process interprets or compiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from radixkv_kernels import launch
from radixkv_kernels.copy_triton import TYPES
from radixkv_kernels.quantized import Quantized
from radixkv_kernels.reference import LARGEST_E4M3, LEAST_LARGEST, smallest_step

MAX_NUM_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def encode_e4m3(values: tl.tensor, IS_NATIVE: tl.constexpr) -> tl.tensor:
    """The nearest e4m3 codes, ties to even, of float32 values within ±448."""
    if IS_NATIVE:
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        normal = rounded - (120 << 3)
        # Below 2**-6 a code counts steps of 2**-9: adding 1.5 * 2**23 rounds to one, ties to even.
        steps = (tl.abs(values) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
        codes = (tl.where(magnitude < 0x3C800000, steps, normal) | sign).to(tl.uint8)
    return codes


@triton.jit  # type: ignore[untyped-decorator]
def decode_e4m3(codes: tl.tensor, IS_NATIVE: tl.constexpr) -> tl.tensor:
    """The float32 values of e4m3 codes, other than NaN."""
    if IS_NATIVE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.int32)
        magnitude = wide & 0x7F
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        values = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        values = tl.where(wide >= 128, -values, values)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def as_parameter(values: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Positive float32 rounded to nearest; by hand for bfloat16, which Triton's interpreter truncates."""
    if TYPE == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = values.to(TYPE)
    return rounded


@triton.jit  # type: ignore[untyped-decorator]
def extremes(
    values: tl.tensor, mask: tl.tensor, is_group: tl.tensor, AXIS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Least and largest of each group; zeros where there is none."""
    least = tl.min(tl.where(mask, values, float("inf")), axis=AXIS)
    largest = tl.max(tl.where(mask, values, float("-inf")), axis=AXIS)
    return tl.where(is_group, least, 0.0), tl.where(is_group, largest, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(
    width: tl.tensor, TYPE: tl.constexpr, SHARE: tl.constexpr, SURPLUS: tl.constexpr, STEP: tl.constexpr
) -> tl.tensor:
    return as_parameter(width * SHARE * SURPLUS + STEP, TYPE)


@triton.jit  # type: ignore[untyped-decorator]
def codes_of(
    values: tl.tensor, mask: tl.tensor, least: tl.tensor, scale: tl.tensor, LEVELS: tl.constexpr
) -> tl.tensor:
    inverse = tl.div_rn(1.0, scale.to(tl.float32))
    steps = tl.floor(tl.where(mask, values - least, 0.0) * inverse + 0.5)
    return tl.minimum(tl.maximum(steps, 0.0), LEVELS * 1.0).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_channels(
    values: tl.tensor,
    others: tl.tensor,  # the channels that share bytes with those of values: int4 alone
    mask: tl.tensor,
    is_channel: tl.tensor,
    scales: tl.tensor,  # pointers, one for a channel
    minima: tl.tensor,
    HALF: tl.constexpr,
    SCHEME: tl.constexpr,
    VALUE: tl.constexpr,
    SHARE: tl.constexpr,
    SURPLUS: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Codes of a tile whose groups are its columns; stores their parameters."""
    least, largest = extremes(values, mask, is_channel, 0)
    scale = scale_of(largest - least, VALUE, SHARE, SURPLUS, STEP)
    tl.store(scales, scale, mask=is_channel)
    tl.store(minima, least.to(VALUE), mask=is_channel)
    if SCHEME == "int4":
        codes = codes_of(values, mask, least[None, :], scale[None, :], 15)
        least, largest = extremes(others, mask, is_channel, 0)
        scale = scale_of(largest - least, VALUE, SHARE, SURPLUS, STEP)
        tl.store(scales + HALF, scale, mask=is_channel)
        tl.store(minima + HALF, least.to(VALUE), mask=is_channel)
        codes = codes | (codes_of(others, mask, least[None, :], scale[None, :], 15) << 4)
    else:
        codes = codes_of(values, mask, least[None, :], scale[None, :], 255)
    return codes


@triton.jit  # type: ignore[untyped-decorator]
def quantize_tokens(
    values: tl.tensor,
    others: tl.tensor,
    mask: tl.tensor,
    is_row: tl.tensor,
    scales: tl.tensor,  # pointers, one for a row
    minima: tl.tensor,
    SCHEME: tl.constexpr,
    VALUE: tl.constexpr,
    SHARE: tl.constexpr,
    SURPLUS: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Codes of a tile whose groups are its rows; stores their parameters."""
    least, largest = extremes(values, mask, is_row, 1)
    if SCHEME == "int4":
        other_least, other_largest = extremes(others, mask, is_row, 1)
        least, largest = tl.minimum(least, other_least), tl.maximum(largest, other_largest)
    scale = scale_of(largest - least, VALUE, SHARE, SURPLUS, STEP)
    tl.store(scales, scale, mask=is_row)
    tl.store(minima, least.to(VALUE), mask=is_row)
    if SCHEME == "int4":
        codes = codes_of(values, mask, least[:, None], scale[:, None], 15)
        codes = codes | (codes_of(others, mask, least[:, None], scale[:, None], 15) << 4)
    else:
        codes = codes_of(values, mask, least[:, None], scale[:, None], 255)
    return codes


@triton.jit  # type: ignore[untyped-decorator]
def quantize_kernel(
    planes: tl.tensor,  # pointer to int64 [NUM_PLANES]: addresses
    block_ids: tl.tensor,  # pointer to int32 [n]
    records: tl.tensor,  # pointer to uint8 [n, RECORD]
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    SIDES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SCHEME: tl.constexpr,
    RECORD: tl.constexpr,
    PARAMETERS: tl.constexpr,
    LAYER: tl.constexpr,
    KEYS: tl.constexpr,
    SHARE: tl.constexpr,
    SURPLUS: tl.constexpr,
    STEP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_NATIVE: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    head = program % NUM_HEADS
    plane = (program // NUM_HEADS) % NUM_PLANES
    index = program // (NUM_HEADS * NUM_PLANES)
    block = tl.load(block_ids + index).to(tl.int64)
    half: tl.constexpr = DIM // 2 if SCHEME == "int4" else DIM
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, WIDTH)
    is_row = rows < NUM_ROWS
    is_channel = channels < half
    mask = is_row[:, None] & is_channel[None, :]
    read = tl.multiple_of(tl.load(planes + plane).to(tl.pointer_type(VALUE)), ALIGNMENT)
    read = read + block * BLOCK + head * HEAD + rows[:, None] * ROW + channels[None, :]
    record = records + index.to(tl.int64) * RECORD
    codes = record + (plane * NUM_ROWS * NUM_HEADS + head) * half
    codes = codes + rows[:, None] * (NUM_HEADS * half) + channels[None, :]
    parameters = record + PARAMETERS + (plane // SIDES) * LAYER + (plane % SIDES) * KEYS
    values = tl.load(read, mask=mask, other=0.0).to(tl.float32)
    if SCHEME == "fp8":
        largest = tl.maximum(tl.max(tl.max(tl.abs(values), axis=1), axis=0), LEAST)
        scaled = values * tl.div_rn(LARGEST, largest)
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        tl.store(codes, encode_e4m3(scaled, IS_NATIVE), mask=mask)
        scales = parameters.to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scales + head, tl.div_rn(largest, LARGEST))
    else:
        scales = parameters.to(tl.pointer_type(VALUE), bitcast=True)
        others = values
        if SCHEME == "int4":
            others = tl.load(read + half, mask=mask, other=0.0).to(tl.float32)
        if (SIDES == 2) & (plane % SIDES == 0):  # keys
            key_at = scales + head * DIM + channels
            steps = quantize_channels(
                values, others, mask, is_channel, key_at, key_at + NUM_HEADS * DIM,
                half, SCHEME, VALUE, SHARE, SURPLUS, STEP,
            )  # fmt: skip
        else:
            value_at = scales + rows * NUM_HEADS + head
            steps = quantize_tokens(
                values, others, mask, is_row, value_at, value_at + NUM_ROWS * NUM_HEADS,
                SCHEME, VALUE, SHARE, SURPLUS, STEP,
            )  # fmt: skip
        tl.store(codes, steps, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def restored(
    steps: tl.tensor,
    scales: tl.tensor,
    MINIMA: tl.constexpr,
    is_group: tl.tensor,
    AXIS: tl.constexpr,
    VALUE: tl.constexpr,
) -> tl.tensor:
    """Values of codes, by the scales of their groups and the minima MINIMA further on."""
    scale = tl.expand_dims(tl.load(scales, mask=is_group, other=0.0).to(tl.float32), AXIS)
    least = tl.expand_dims(tl.load(scales + MINIMA, mask=is_group, other=0.0).to(tl.float32), AXIS)
    return (steps.to(tl.float32) * scale + least).to(VALUE)


@triton.jit  # type: ignore[untyped-decorator]
def dequantize_kernel(
    planes: tl.tensor,  # pointer to int64 [NUM_PLANES]: addresses
    block_ids: tl.tensor,  # pointer to int32 [n]
    records: tl.tensor,  # pointer to uint8 [n, RECORD]
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    SIDES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SCHEME: tl.constexpr,
    RECORD: tl.constexpr,
    PARAMETERS: tl.constexpr,
    LAYER: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_NATIVE: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    head = program % NUM_HEADS
    plane = (program // NUM_HEADS) % NUM_PLANES
    index = program // (NUM_HEADS * NUM_PLANES)
    block = tl.load(block_ids + index).to(tl.int64)
    half: tl.constexpr = DIM // 2 if SCHEME == "int4" else DIM
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, WIDTH)
    is_row = rows < NUM_ROWS
    is_channel = channels < half
    mask = is_row[:, None] & is_channel[None, :]
    write = tl.multiple_of(tl.load(planes + plane).to(tl.pointer_type(VALUE)), ALIGNMENT)
    write = write + block * BLOCK + head * HEAD + rows[:, None] * ROW + channels[None, :]
    record = records + index.to(tl.int64) * RECORD
    codes = record + (plane * NUM_ROWS * NUM_HEADS + head) * half
    steps = tl.load(codes + rows[:, None] * (NUM_HEADS * half) + channels[None, :], mask=mask, other=0)
    parameters = record + PARAMETERS + (plane // SIDES) * LAYER + (plane % SIDES) * KEYS
    if SCHEME == "fp8":
        scale = tl.load(parameters.to(tl.pointer_type(tl.float32), bitcast=True) + head)
        tl.store(write, (decode_e4m3(steps, IS_NATIVE) * scale).to(VALUE), mask=mask)
    else:
        scales = parameters.to(tl.pointer_type(VALUE), bitcast=True)
        low = steps & 15 if SCHEME == "int4" else steps
        high = steps >> 4  # int4 alone
        if (SIDES == 2) & (plane % SIDES == 0):  # keys
            key_at = scales + head * DIM + channels
            tl.store(write, restored(low, key_at, NUM_HEADS * DIM, is_channel, 0, VALUE), mask=mask)
            if SCHEME == "int4":
                others = restored(high, key_at + half, NUM_HEADS * DIM, is_channel, 0, VALUE)
                tl.store(write + half, others, mask=mask)
        else:
            value_at = scales + rows * NUM_HEADS + head
            tl.store(write, restored(low, value_at, NUM_ROWS * NUM_HEADS, is_row, 1, VALUE), mask=mask)
            if SCHEME == "int4":
                others = restored(high, value_at, NUM_ROWS * NUM_HEADS, is_row, 1, VALUE)
                tl.store(write + half, others, mask=mask)


def constants(form: Quantized, *, is_native: bool) -> dict[str, Any]:
    """What both kernels are compiled with; strides are in elements."""
    pool, shape = form.pool, form.pool.geometry
    half = form.code_dim
    return {
        "VALUE": TYPES[pool.dtype],
        "BLOCK": shape.block_stride // shape.element_bytes,
        "ROW": shape.row_stride // shape.element_bytes,
        "HEAD": shape.head_stride // shape.element_bytes,
        "NUM_ROWS": shape.block_size,
        "NUM_HEADS": shape.num_heads,
        "DIM": shape.head_dim,
        "NUM_PLANES": len(pool.addresses),
        "SIDES": pool.planes_per_layer,
        "ALIGNMENT": launch.alignment(pool.addresses, shape),
        "SCHEME": form.scheme,
        "RECORD": form.record_bytes,
        "PARAMETERS": form.codes_bytes,
        "LAYER": form.layer_bytes,
        "KEYS": form.plane_bytes(0),
        "ROWS": triton.next_power_of_2(shape.block_size),
        "WIDTH": triton.next_power_of_2(half),
        "IS_NATIVE": is_native,
    }


def quantizing_constants(form: Quantized, *, is_native: bool) -> dict[str, Any]:
    """What ``quantize_kernel`` is compiled with besides."""
    dtype = form.parameter_dtype
    return constants(form, is_native=is_native) | {
        "SHARE": 1 / form.levels,
        "SURPLUS": 1 + 2 * torch.finfo(dtype).eps,
        "STEP": smallest_step(dtype),
        "LARGEST": LARGEST_E4M3,
        "LEAST": LEAST_LARGEST,
    }


def num_warps(form: Quantized) -> int:
    """As many as have 32 values of a head a thread, at most MAX_NUM_WARPS: fewer warps have less to tell each other."""
    shape = form.pool.geometry
    tile = int(triton.next_power_of_2(shape.block_size) * triton.next_power_of_2(shape.head_dim))
    return min(MAX_NUM_WARPS, max(1, tile // 1024))


def quantize(form: Quantized, block_ids: list[int], records: torch.Tensor) -> None:
    """Enqueues one upload of the ids and one launch."""
    _launch(quantize_kernel, form, block_ids, records, quantizing_constants(form, is_native=_is_native(form)))


def dequantize(form: Quantized, block_ids: list[int], records: torch.Tensor) -> None:
    """Enqueues one upload of the ids and one launch."""
    _launch(dequantize_kernel, form, block_ids, records, constants(form, is_native=_is_native(form)))


def _launch(
    kernel: Any, form: Quantized, block_ids: list[int], records: torch.Tensor, fixed: dict[str, Any]
) -> None:
    pool = form.pool
    per_block = len(pool.addresses) * pool.geometry.num_heads
    table = launch.upload([block_ids], pool.device)
    with launch.on_device(pool.device):
        planes = launch.addresses(pool.addresses, pool.device)
        for part in launch.slices(len(block_ids), per_block):
            ids = table[part]
            grid = (len(ids) * per_block,)
            options = {"num_warps": num_warps(form), "enable_fp_fusion": False}
            kernel[grid](planes, ids, records[part], **fixed, **options)


def _is_native(form: Quantized) -> bool:
    device = form.pool.device
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
