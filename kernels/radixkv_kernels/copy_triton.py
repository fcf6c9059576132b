"""The Triton kernel that copies blocks: fork_blocks, gather and scatter are launches of it.

It copies between two pools (which may be one). A plane of a block is *runs*: rows of all heads where both
pools keep those together, one head of one row otherwise. A *lane* is the runs of all rows for one head, or for
all heads at once:

    lane   [ run 0 | run 1 | … | run num_rows-1 | … run block_size-1 ]      run i is row i
           └────────── copied ─────────────────┘ └─── untouched ───┘

A program copies one chunk (at most MAX_CHUNK units) of one lane of one plane of one pair; units beyond the
valid rows are masked, which costs no memory traffic. A unit is an int32 word where every run, stride and
address is a multiple of 4 bytes, otherwise a byte; when dtypes differ it is an element, converted on its way.
Sizes and strides are compile-time constants and addresses are known to be multiples of ALIGNMENT bytes, so
Triton makes 16-byte loads and stores wherever runs have a multiple of 16 bytes. A pair of layouts is compiled
once for each of two chunk sizes, at its first launch (or from Triton's disk cache).

Importing this module imports triton, and so fixes whether this process interprets or compiles.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from radixkv_kernels import launch
from radixkv_kernels.checks import BlockPairs
from radixkv_kernels.pool import Geometry, Pool

MAX_CHUNK = 4096
SMALL_CHUNK = 1024
ENOUGH_PROGRAMS = 1024
"""Below so many programs, chunks are small ones: a few pairs are then spread over a whole GPU."""
MAX_NUM_WARPS = 4
TYPES = {
    torch.int32: tl.int32,
    torch.int8: tl.int8,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class CopyShape(NamedTuple):
    """Compile-time constants of a copy between two pools. Strides and sizes are in units of READ or WRITE."""

    READ: tl.dtype
    WRITE: tl.dtype
    READ_BLOCK: int
    READ_ROW: int
    READ_LANE: int
    WRITE_BLOCK: int
    WRITE_ROW: int
    WRITE_LANE: int
    RUN: int
    NUM_LANES: int
    NUM_PLANES: int
    READ_ALIGNMENT: int
    WRITE_ALIGNMENT: int
    CHUNK: int

    @property
    def num_warps(self) -> int:
        """As many as have 16 bytes a thread: more would narrow the loads of a short lane."""
        return min(MAX_NUM_WARPS, max(1, self.CHUNK // 128))


@triton.jit  # type: ignore[untyped-decorator]
def copy_chunk(
    read_planes: tl.tensor,
    write_planes: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    plane: tl.tensor,
    lane: tl.tensor,
    chunk: tl.tensor,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    READ_BLOCK: tl.constexpr,
    READ_ROW: tl.constexpr,
    READ_LANE: tl.constexpr,
    WRITE_BLOCK: tl.constexpr,
    WRITE_ROW: tl.constexpr,
    WRITE_LANE: tl.constexpr,
    RUN: tl.constexpr,
    READ_ALIGNMENT: tl.constexpr,
    WRITE_ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One chunk of one lane of one plane: block ``source`` to block ``target``."""
    read = tl.load(read_planes + plane).to(tl.pointer_type(READ))
    write = tl.load(write_planes + plane).to(tl.pointer_type(WRITE))
    # 64 bits: a pool of 2**31 words is 8 GiB, and pools are larger.
    read = tl.multiple_of(read, READ_ALIGNMENT) + source.to(tl.int64) * READ_BLOCK + lane * READ_LANE
    write = tl.multiple_of(write, WRITE_ALIGNMENT) + target.to(tl.int64) * WRITE_BLOCK + lane * WRITE_LANE
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    is_valid = offsets < num_rows * RUN
    read_offsets = offsets if READ_ROW == RUN else offsets // RUN * READ_ROW + offsets % RUN
    write_offsets = offsets if WRITE_ROW == RUN else offsets // RUN * WRITE_ROW + offsets % RUN
    tl.store(write + write_offsets, tl.load(read + read_offsets, mask=is_valid).to(WRITE), mask=is_valid)


@triton.jit(do_not_specialize=["num_chunks"])  # type: ignore[untyped-decorator]
def copy_kernel(
    read_planes: tl.tensor,  # pointer to int64 [NUM_PLANES]: addresses
    write_planes: tl.tensor,  # pointer to int64 [NUM_PLANES]: addresses
    pairs: tl.tensor,  # pointer to int32 [num_pairs, 3]: source, target, rows
    num_chunks: int,  # of a lane
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    READ_BLOCK: tl.constexpr,
    READ_ROW: tl.constexpr,
    READ_LANE: tl.constexpr,
    WRITE_BLOCK: tl.constexpr,
    WRITE_ROW: tl.constexpr,
    WRITE_LANE: tl.constexpr,
    RUN: tl.constexpr,
    NUM_LANES: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    READ_ALIGNMENT: tl.constexpr,
    WRITE_ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    chunk = program % num_chunks
    lane = (program // num_chunks) % NUM_LANES
    plane = (program // (num_chunks * NUM_LANES)) % NUM_PLANES
    pair = program // (num_chunks * NUM_LANES * NUM_PLANES)
    source = tl.load(pairs + pair * 3)
    target = tl.load(pairs + pair * 3 + 1)
    num_rows = tl.load(pairs + pair * 3 + 2)
    copy_chunk(
        read_planes, write_planes, source, target, num_rows, plane, lane, chunk,
        READ, WRITE, READ_BLOCK, READ_ROW, READ_LANE, WRITE_BLOCK, WRITE_ROW, WRITE_LANE,
        RUN, READ_ALIGNMENT, WRITE_ALIGNMENT, CHUNK,
    )  # fmt: skip


def copy_shape(source: Pool, target: Pool, chunk: int = MAX_CHUNK) -> CopyShape:
    """The constants that a copy between these pools is compiled with; chunks have at most ``chunk`` units."""
    alignments = (launch.alignment(source), launch.alignment(target))
    dtypes = (source.dtype, target.dtype)
    return _copy_shape(source.geometry, target.geometry, dtypes, alignments, len(source.addresses), chunk)


@lru_cache(maxsize=256)
def _copy_shape(
    read: Geometry,
    write: Geometry,
    dtypes: tuple[torch.dtype, torch.dtype],
    alignments: tuple[int, int],  # in bytes, as Triton counts for pointers
    num_planes: int,
    chunk: int,
) -> CopyShape:
    has_whole_rows = read.has_whole_rows and write.has_whole_rows
    num_lanes = 1 if has_whole_rows else read.num_heads
    run = read.head_dim * read.num_heads // num_lanes
    units, types = (read.element_bytes, write.element_bytes), dtypes
    if dtypes[0] == dtypes[1]:
        run *= read.element_bytes
        is_in_words = gcd(*alignments, run) % 4 == 0
        units = (4, 4) if is_in_words else (1, 1)
        types = (torch.int32, torch.int32) if is_in_words else (torch.int8, torch.int8)
        run //= units[0]
    strides = [
        (
            side.block_stride // unit,
            side.row_stride // unit,
            0 if num_lanes == 1 else side.head_stride // unit,
        )
        for side, unit in zip((read, write), units, strict=True)
    ]
    chunk = min(triton.next_power_of_2(run * read.block_size), chunk)
    sizes = (run, num_lanes, num_planes)
    return CopyShape._make(
        (*(TYPES[kind] for kind in types), *strides[0], *strides[1], *sizes, *alignments, chunk)
    )


def copy(source: Pool, target: Pool, pairs: BlockPairs) -> None:
    """Enqueues the copies of non-empty, checked pairs from one pool to another: one upload, one launch."""
    copy_uploaded(source, target, launch.upload(pairs, source.device), max(pairs.num_rows))


def copy_uploaded(source: Pool, target: Pool, table: torch.Tensor, most_rows: int) -> None:
    """Enqueues the copies of an int32 ``[num_pairs, 3]`` table on the device, none of more than ``most_rows`` rows."""
    shape = copy_shape(source, target)
    if len(table) * shape.NUM_PLANES * shape.NUM_LANES * _num_chunks(shape, most_rows) < ENOUGH_PROGRAMS:
        shape = copy_shape(source, target, SMALL_CHUNK)
    num_chunks = _num_chunks(shape, most_rows)
    per_pair = shape.NUM_PLANES * shape.NUM_LANES * num_chunks
    tables = (launch.addresses(source), launch.addresses(target))
    with launch.on_device(source.device):
        for part in launch.slices(len(table), per_pair):
            pairs = table[part]
            copy_kernel[(len(pairs) * per_pair,)](
                *tables, pairs, num_chunks, *shape, num_warps=shape.num_warps
            )


def _num_chunks(shape: CopyShape, num_rows: int) -> int:
    return -(-num_rows * shape.RUN // shape.CHUNK)
