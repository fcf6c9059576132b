"""The Triton kernels of quantize and dequantize. A program processes one head of one plane of one block.

A program holds its tile ``[block_size, head_dim]`` in registers. So a block is read once and a record is written
once. int4 has two half tiles, channels ``[0, head_dim / 2)`` and the rest, whose codes share bytes. All arithmetic is
float32 without fused operations, and divisions round to nearest, so results have the same bits as the reference.
Hardware without e4m3 (before sm_89, and gfx942, whose fp8 differs) uses integer arithmetic for FP8 codes, with the
same result.

Importing this module imports triton, which fixes whether this process interprets or compiles kernels.
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
CHANNELS_PER_THREAD = 2
"""For keys, whose groups are channels. So few that a thread has registers for all their tokens."""


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
    """The float32 values of e4m3 codes, except NaN."""
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
    """Round positive float32 to nearest. bfloat16 is rounded by hand, because Triton's interpreter truncates it."""
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
    """Minimum and maximum of each group; zeros where there is no group."""
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
    """Codes as int32 from 0 to LEVELS (15 or 255): steps of ``scale`` above ``least``, rounded to nearest even."""
    steps = tl.where(mask, values - least, 0.0) * tl.div_rn(1.0, scale.to(tl.float32))
    # No finite value is more than LEVELS steps away. The constant rounds, and leaves the integer in the lowest bits.
    return (steps + 12582912.0).to(tl.int32, bitcast=True) & LEVELS


@triton.jit  # type: ignore[untyped-decorator]
def tile(
    begin: tl.tensor,
    ROW: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Pointers of a tile ``[ROWS, WIDTH]``, and a mask of those that belong to the block."""
    rows = tl.arange(0, ROWS)[:, None]
    channels = tl.arange(0, WIDTH)[None, :]
    return begin + rows * ROW + channels, (rows < NUM_ROWS) & (channels < HALF)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of_channels(
    begin: tl.tensor,
    ROW: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The same, transposed, with at most CHANNELS contiguous elements.

    So Triton gives each thread whole channels. Their scales need no exchange between threads and no repeated work.
    """
    channels = tl.arange(0, WIDTH)[:, None]
    rows = tl.arange(0, ROWS)[None, :]
    pointers = tl.max_contiguous(begin + rows * ROW + channels, (CHANNELS, 1))
    return pointers, (rows < NUM_ROWS) & (channels < HALF)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_channels(
    read: tl.tensor,  # pointers to the first value of a head of a plane
    write: tl.tensor,
    scales: tl.tensor,
    MINIMA: tl.constexpr,  # offset of the minima from the scales
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    CODE_ROW: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    SCHEME: tl.constexpr,
    SHARE: tl.constexpr,
    SURPLUS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Write codes and parameters of a tile whose groups are channels."""
    pointers, mask = tile_of_channels(read, ROW, NUM_ROWS, HALF, ROWS, WIDTH, CHANNELS)
    channels = tl.arange(0, WIDTH)
    is_channel = channels < HALF
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    least, largest = extremes(values, mask, is_channel, 1)
    scale = scale_of(largest - least, VALUE, SHARE, SURPLUS, STEP)
    tl.store(scales + channels, scale, mask=is_channel)
    tl.store(scales + MINIMA + channels, least.to(VALUE), mask=is_channel)
    if SCHEME == "int4":
        codes = codes_of(values, mask, least[:, None], scale[:, None], 15)
        others = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
        least, largest = extremes(others, mask, is_channel, 1)
        scale = scale_of(largest - least, VALUE, SHARE, SURPLUS, STEP)
        tl.store(scales + HALF + channels, scale, mask=is_channel)
        tl.store(scales + HALF + MINIMA + channels, least.to(VALUE), mask=is_channel)
        codes = codes | (codes_of(others, mask, least[:, None], scale[:, None], 15) << 4)
    else:
        codes = codes_of(values, mask, least[:, None], scale[:, None], 255)
    pointers, mask = tile_of_channels(write, CODE_ROW, NUM_ROWS, HALF, ROWS, WIDTH, CHANNELS)
    tl.store(pointers, codes.to(tl.uint8), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_tokens(
    read: tl.tensor,  # see quantize_channels
    write: tl.tensor,
    scales: tl.tensor,
    MINIMA: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    CODE_ROW: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCHEME: tl.constexpr,
    SHARE: tl.constexpr,
    SURPLUS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Write codes and parameters of a tile whose groups are its rows."""
    pointers, mask = tile(read, ROW, NUM_ROWS, HALF, ROWS, WIDTH)
    rows = tl.arange(0, ROWS)
    is_row = rows < NUM_ROWS
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    least, largest = extremes(values, mask, is_row, 1)
    if SCHEME == "int4":
        others = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
        other_least, other_largest = extremes(others, mask, is_row, 1)
        least, largest = tl.minimum(least, other_least), tl.maximum(largest, other_largest)
    scale = scale_of(largest - least, VALUE, SHARE, SURPLUS, STEP)
    tl.store(scales + rows * NUM_HEADS, scale, mask=is_row)
    tl.store(scales + MINIMA + rows * NUM_HEADS, least.to(VALUE), mask=is_row)
    if SCHEME == "int4":
        codes = codes_of(values, mask, least[:, None], scale[:, None], 15)
        codes = codes | (codes_of(others, mask, least[:, None], scale[:, None], 15) << 4)
    else:
        codes = codes_of(values, mask, least[:, None], scale[:, None], 255)
    pointers, mask = tile(write, CODE_ROW, NUM_ROWS, HALF, ROWS, WIDTH)
    tl.store(pointers, codes.to(tl.uint8), mask=mask)


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
    CHANNELS: tl.constexpr,
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
    code_row: tl.constexpr = NUM_HEADS * half
    read = tl.multiple_of(tl.load(planes + plane).to(tl.pointer_type(VALUE)), ALIGNMENT)
    read = read + block * BLOCK + head * HEAD
    record = records + index.to(tl.int64) * RECORD
    write = record + (plane * NUM_ROWS * NUM_HEADS + head) * half
    parameters = record + PARAMETERS + (plane // SIDES) * LAYER + (plane % SIDES) * KEYS
    if SCHEME == "fp8":
        pointers, mask = tile(read, ROW, NUM_ROWS, DIM, ROWS, WIDTH)
        values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.max(tl.abs(values), axis=1), axis=0), LEAST)
        scaled = values * tl.div_rn(LARGEST, largest)
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        pointers, mask = tile(write, code_row, NUM_ROWS, DIM, ROWS, WIDTH)
        tl.store(pointers, encode_e4m3(scaled, IS_NATIVE), mask=mask)
        scales = parameters.to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scales + head, tl.div_rn(largest, LARGEST))
    else:
        scales = parameters.to(tl.pointer_type(VALUE), bitcast=True)
        if (SIDES == 2) & (plane % SIDES == 0):  # keys
            quantize_channels(
                read, write, scales + head * DIM, NUM_HEADS * DIM, VALUE, ROW, code_row,
                NUM_ROWS, half, ROWS, WIDTH, CHANNELS, SCHEME, SHARE, SURPLUS, STEP,
            )  # fmt: skip
        else:
            quantize_tokens(
                read, write, scales + head, NUM_ROWS * NUM_HEADS, VALUE, ROW, code_row,
                NUM_ROWS, NUM_HEADS, half, ROWS, WIDTH, SCHEME, SHARE, SURPLUS, STEP,
            )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def restored(
    steps: tl.tensor,
    scales: tl.tensor,
    MINIMA: tl.constexpr,
    is_group: tl.tensor,
    AXIS: tl.constexpr,
    VALUE: tl.constexpr,
) -> tl.tensor:
    """Values of codes, from the scales of their groups and the minima at offset MINIMA."""
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
    codes = codes + rows[:, None] * (NUM_HEADS * half) + channels[None, :]
    # A thread reads as many adjacent codes as it stores values at once, so threads exchange nothing.
    codes = tl.max_contiguous(codes, (1, 128 // VALUE.primitive_bitwidth))
    steps = tl.load(codes, mask=mask, other=0)
    parameters = record + PARAMETERS + (plane // SIDES) * LAYER + (plane % SIDES) * KEYS
    if SCHEME == "fp8":
        scale = tl.load(parameters.to(tl.pointer_type(tl.float32), bitcast=True) + head)
        tl.store(write, (decode_e4m3(steps, IS_NATIVE) * scale).to(VALUE), mask=mask)
    else:
        scales = parameters.to(tl.pointer_type(VALUE), bitcast=True)
        low = steps.to(tl.int32) & 15 if SCHEME == "int4" else steps.to(tl.int32)
        high = steps.to(tl.int32) >> 4  # int4 only
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
    """Compile-time constants of both kernels. Strides are in elements."""
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
    """Compile-time constants of ``quantize_kernel``."""
    dtype = form.parameter_dtype
    return constants(form, is_native=is_native) | {
        "SHARE": 1 / form.levels,
        "SURPLUS": 1 + 2 * torch.finfo(dtype).eps,
        "STEP": smallest_step(dtype),
        "LARGEST": LARGEST_E4M3,
        "LEAST": LEAST_LARGEST,
        "CHANNELS": CHANNELS_PER_THREAD,
    }


def quantizing_warps(form: Quantized) -> int:
    """Enough warps to give each thread whole channels of keys in blocks of 16; otherwise 32 values a thread."""
    width = form.code_dim if form.is_by_channel(0) else form.pool.geometry.head_dim
    return _warps(form, width, values_per_thread=32)


def dequantizing_warps(form: Quantized) -> int:
    """Warps for 16 values a thread."""
    return _warps(form, form.pool.geometry.head_dim, values_per_thread=16)


def _warps(form: Quantized, width: int, values_per_thread: int) -> int:
    tile = int(triton.next_power_of_2(form.pool.geometry.block_size) * triton.next_power_of_2(width))
    return min(MAX_NUM_WARPS, max(1, tile // (32 * values_per_thread)))


def quantize(form: Quantized, block_ids: list[int], records: torch.Tensor) -> None:
    """Enqueue one upload of the ids and one launch."""
    fixed = quantizing_constants(form, is_native=_is_native(form))
    _launch(quantize_kernel, form, block_ids, records, fixed, quantizing_warps(form))


def dequantize(form: Quantized, block_ids: list[int], records: torch.Tensor) -> None:
    """Enqueue one upload of the ids and one launch."""
    fixed = constants(form, is_native=_is_native(form))
    _launch(dequantize_kernel, form, block_ids, records, fixed, dequantizing_warps(form))


def _launch(
    kernel: Any,
    form: Quantized,
    block_ids: list[int],
    records: torch.Tensor,
    fixed: dict[str, Any],
    num_warps: int,
) -> None:
    pool = form.pool
    per_block = len(pool.addresses) * pool.geometry.num_heads
    table = launch.upload([block_ids], pool.device)
    with launch.on_device(pool.device):
        planes = launch.addresses(pool.addresses, pool.device)
        for part in launch.slices(len(block_ids), per_block):
            ids = table[part]
            grid = (len(ids) * per_block,)
            kernel[grid](planes, ids, records[part], **fixed, num_warps=num_warps, enable_fp_fusion=False)


def _is_native(form: Quantized) -> bool:
    device = form.pool.device
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
