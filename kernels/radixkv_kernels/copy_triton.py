"""The Triton kernel that copies blocks. fork_blocks, gather and scatter launch it.

It copies between two pools (or within one). A plane of a block consists of *runs*. A run is a row of all heads if
both pools keep those contiguous, otherwise one head of one row. A *lane* is the runs of all rows for one head, or for
all heads together:

    lane   [ run 0 | run 1 | … | run num_rows-1 | … run block_size-1 ]      run i is row i
           └────────── copied ─────────────────┘ └─── untouched ───┘

A program copies one chunk (at most CHUNK units) of one lane of one plane of one pair. Units beyond the valid rows are
masked, which costs no memory traffic. Launches of up to 32 pairs, the usual size of a step, pass them as kernel
arguments. More pairs are uploaded to a table on the device first.

A unit is an int32 word if every run, stride and address is a multiple of 4 bytes, otherwise a byte. If dtypes differ,
a unit is an element, which is converted. Sizes and strides are compile-time constants, and addresses are declared as
multiples of ALIGNMENT bytes. So Triton uses 16-byte loads and stores if runs are multiples of 16 bytes. Each pair of
layouts is compiled at its first launch (or read from Triton's disk cache): once for few pairs, once for a table.

Importing this module imports triton, which fixes whether this process interprets or compiles kernels.
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

CHUNK = 1024
"""4 KiB, so that one pair uses a whole GPU. Larger chunks were no faster for many pairs either."""
MAX_NUM_WARPS = 2
"""64 bytes a thread. 4 warps take 5 % longer for 512 single rows, because half of the threads have no work."""
FEW = {8: MAX_NUM_WARPS, 32: 4}
"""Maximum numbers of pairs as kernel arguments, with the most warps of each kernel: for a beam step, and a batch.

The arguments of 32 pairs are 96 numbers. With 2 warps they don't fit an MI300's scalar registers.
"""
MAX_NUM_LANES = 65535
"""The maximum of a grid's second dimension."""
TYPES = {
    torch.int32: tl.int32,
    torch.int8: tl.int8,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class CopyShape(NamedTuple):
    """Compile-time constants of a copy between two pools. Strides and sizes are in units of READ or WRITE.

    READ_PLANE, WRITE_PLANE: bytes between planes if they are contiguous, else 0.
    """

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
    READ_PLANE: int
    WRITE_PLANE: int
    READ_ALIGNMENT: int
    WRITE_ALIGNMENT: int
    CHUNK: int

    def num_warps(self, most: int = MAX_NUM_WARPS) -> int:
        """Warps for 16 bytes a thread. More would narrow the loads of a short lane."""
        return min(most, max(1, self.CHUNK // 128))


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
    READ_PLANE: tl.constexpr,
    WRITE_PLANE: tl.constexpr,
    READ_ALIGNMENT: tl.constexpr,
    WRITE_ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Copy one chunk of one lane of one plane from block ``source`` to block ``target``."""
    read = _address(read_planes, plane, READ_PLANE).to(tl.pointer_type(READ))
    write = _address(write_planes, plane, WRITE_PLANE).to(tl.pointer_type(WRITE))
    # 64 bits: a pool of 2**31 words has 8 GiB, and pools are larger.
    read = tl.multiple_of(read, READ_ALIGNMENT) + source.to(tl.int64) * READ_BLOCK + lane * READ_LANE
    write = tl.multiple_of(write, WRITE_ALIGNMENT) + target.to(tl.int64) * WRITE_BLOCK + lane * WRITE_LANE
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    is_valid = offsets < num_rows * RUN
    read_offsets = offsets if READ_ROW == RUN else offsets // RUN * READ_ROW + offsets % RUN
    write_offsets = offsets if WRITE_ROW == RUN else offsets // RUN * WRITE_ROW + offsets % RUN
    tl.store(write + write_offsets, tl.load(read + read_offsets, mask=is_valid).to(WRITE), mask=is_valid)


@triton.jit  # type: ignore[untyped-decorator]
def _address(planes: tl.tensor, plane: tl.tensor, STRIDE: tl.constexpr) -> tl.tensor:
    """The address of a plane. ``planes`` is the first plane's address, or a table of all if STRIDE is 0."""
    return planes.to(tl.int64) + plane.to(tl.int64) * STRIDE if STRIDE != 0 else tl.load(planes + plane)


@triton.jit(do_not_specialize=["read_planes", "write_planes", "num_chunks"])  # type: ignore[untyped-decorator]
def copy_kernel(
    read_planes: tl.tensor,  # address of the first plane, or pointer to int64 [NUM_PLANES]: addresses
    write_planes: tl.tensor,
    pairs: tl.tensor,  # pointer to int32 [num_pairs, 3]: source, target, rows
    num_chunks: int,  # per lane
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
    READ_PLANE: tl.constexpr,
    WRITE_PLANE: tl.constexpr,
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
        RUN, READ_PLANE, WRITE_PLANE, READ_ALIGNMENT, WRITE_ALIGNMENT, CHUNK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["read_planes", "write_planes"])  # type: ignore[untyped-decorator]
def copy_few_kernel(
    read_planes: tl.tensor,  # see copy_kernel
    write_planes: tl.tensor,
    sources: tl.tuple,  # int32s, as many as the most pairs of this kernel, a power of two
    targets: tl.tuple,
    num_rows: tl.tuple,
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
    READ_PLANE: tl.constexpr,
    WRITE_PLANE: tl.constexpr,
    READ_ALIGNMENT: tl.constexpr,
    WRITE_ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    lane = tl.program_id(1) % NUM_LANES
    plane = tl.program_id(1) // NUM_LANES
    pair = tl.program_id(2)
    source = _pick(sources, pair, 0, len(sources))
    target = _pick(targets, pair, 0, len(targets))
    rows = _pick(num_rows, pair, 0, len(num_rows))
    copy_chunk(
        read_planes, write_planes, source, target, rows, plane, lane, chunk,
        READ, WRITE, READ_BLOCK, READ_ROW, READ_LANE, WRITE_BLOCK, WRITE_ROW, WRITE_LANE,
        RUN, READ_PLANE, WRITE_PLANE, READ_ALIGNMENT, WRITE_ALIGNMENT, CHUNK,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _pick(numbers: tl.tuple, index: tl.tensor, FIRST: tl.constexpr, NUM: tl.constexpr) -> tl.tensor:
    """Select ``numbers[index]`` from ``[FIRST, FIRST + NUM)``, because arguments can't be indexed."""
    if NUM == 1:
        number = numbers[FIRST]
    else:
        half: tl.constexpr = NUM // 2
        low = _pick(numbers, index, FIRST, half)
        high = _pick(numbers, index, FIRST + half, half)
        number = tl.where(index < FIRST + half, low, high)
    return number


def copy_shape(source: Pool, target: Pool, chunk: int = CHUNK) -> CopyShape:
    """The compile-time constants of a copy between these pools. Chunks have at most ``chunk`` units."""
    sides = ((source.geometry, source.addresses), (target.geometry, target.addresses))
    return _copy_shape(*sides, (source.dtype, target.dtype), chunk)


Side = tuple[Geometry, tuple[int, ...]]
"""Geometry and addresses of a pool."""


@lru_cache(maxsize=256)
def _copy_shape(source: Side, target: Side, dtypes: tuple[torch.dtype, torch.dtype], chunk: int) -> CopyShape:
    (read, read_planes), (write, write_planes) = source, target
    alignments = (launch.alignment(read_planes, read), launch.alignment(write_planes, write))  # in bytes
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
    plane_strides = (launch.plane_stride(read_planes, read), launch.plane_stride(write_planes, write))
    sizes = (run, num_lanes, len(read_planes), *plane_strides)
    return CopyShape._make(
        (*(TYPES[kind] for kind in types), *strides[0], *strides[1], *sizes, *alignments, chunk)
    )


Planes = int | torch.Tensor
"""The addresses of planes as a kernel's argument: the first one if they are contiguous, else a table."""


class Copier:
    """Launches copies between two pools on their device."""

    def __init__(self, shape: CopyShape, read_planes: Planes, write_planes: Planes) -> None:
        self._planes = (read_planes, write_planes)
        self._run, self._chunk = shape.RUN, shape.CHUNK
        self._lanes_per_pair = shape.NUM_PLANES * shape.NUM_LANES
        constants = shape._asdict()
        self._few = {
            num: launch.Launcher(copy_few_kernel, constants, num_warps=shape.num_warps(most))
            for num, most in FEW.items()
        }
        self._many = launch.Launcher(copy_kernel, constants, num_warps=shape.num_warps())

    def may_copy_few(self, num_pairs: int) -> bool:
        """Whether the pairs fit the arguments of a launch, and their lanes fit a dimension of the grid."""
        return num_pairs <= max(FEW) and self._lanes_per_pair <= MAX_NUM_LANES

    def copy_few(self, pairs: BlockPairs) -> None:
        """Enqueue the copies with one launch and the pairs as its arguments. ``may_copy_few`` must be true."""
        num_pairs = len(pairs.sources)
        room = next(num for num in FEW if num_pairs <= num)
        grid = (self._num_chunks(max(pairs.num_rows)), self._lanes_per_pair, num_pairs)
        columns = [(*column, *(0,) * (room - num_pairs)) for column in pairs]
        self._few[room](grid, *self._planes, *columns)

    def copy_many(self, table: torch.Tensor, most_rows: int) -> None:
        """Enqueue the copies of an int32 ``[num_pairs, 3]`` table on the device, each of at most ``most_rows`` rows."""
        num_chunks = self._num_chunks(most_rows)
        per_pair = self._lanes_per_pair * num_chunks
        for part in launch.slices(len(table), per_pair):
            pairs = table[part]
            self._many((len(pairs) * per_pair, 1, 1), *self._planes, pairs, num_chunks)

    def _num_chunks(self, num_rows: int) -> int:
        return -(-num_rows * self._run // self._chunk)


def copier(source: Pool, target: Pool) -> Copier:
    """The copier of these pools, cached."""
    sides = ((source.geometry, source.addresses), (target.geometry, target.addresses))
    return _copier(*sides, (source.dtype, target.dtype), source.device)


@lru_cache(maxsize=256)
def _copier(
    source: Side, target: Side, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> Copier:
    shape = _copy_shape(source, target, dtypes, CHUNK)
    return Copier(shape, planes_of(*source, device), planes_of(*target, device))


def planes_of(geometry: Geometry, addresses: tuple[int, ...], device: torch.device) -> Planes:
    """The kernel argument for a pool's addresses."""
    return addresses[0] if launch.plane_stride(addresses, geometry) else launch.addresses(addresses, device)


def copy(source: Pool, target: Pool, pairs: BlockPairs) -> None:
    """Enqueue the copies of checked pairs, one or more: one launch, and one upload for more than 32 pairs."""
    with launch.on_device(source.device):
        ready = copier(source, target)
        if ready.may_copy_few(len(pairs.sources)):
            ready.copy_few(pairs)
        else:
            ready.copy_many(launch.upload(pairs, source.device), max(pairs.num_rows))
