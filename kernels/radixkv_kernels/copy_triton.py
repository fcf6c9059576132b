"""The Triton kernel that copies blocks: fork_blocks, gather and scatter are launches of it.

It copies between two pools (which may be one). A plane of a block is *runs*: rows of all heads where both
pools keep those together, one head of one row otherwise. A *lane* is the runs of all rows for one head, or for
all heads at once:

    lane   [ run 0 | run 1 | … | run num_rows-1 | … run block_size-1 ]      run i is row i
           └────────── copied ─────────────────┘ └─── untouched ───┘

A program copies one chunk (at most CHUNK units) of one lane of one plane of one pair; units beyond the
valid rows are masked, which costs no memory traffic. Up to 32 pairs, a step's usual copies, are arguments of the
launch; more are a table on the device, uploaded before it. A unit is an int32 word where every run, stride and
address is a multiple of 4 bytes, otherwise a byte; when dtypes differ it is an element, converted on its way.
Sizes and strides are compile-time constants and addresses are known to be multiples of ALIGNMENT bytes, so
Triton makes 16-byte loads and stores wherever runs have a multiple of 16 bytes. A pair of layouts is compiled at
its first launch (or comes from Triton's disk cache), once for few pairs and once for a table.

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

CHUNK = 1024
"""4 KiB: one pair is spread over a whole GPU. Larger chunks were no faster for many pairs either."""
MAX_NUM_WARPS = 2
"""64 bytes a thread. With 4 warps, half of which have nothing to do for a single row, 512 such rows take 5 % longer."""
FEW = {8: MAX_NUM_WARPS, 32: 4}
"""Up to so many pairs are arguments of a launch, a beam step's or a batch's: a kernel each, of so many warps at most.
96 numbers are more than an MI300's scalar registers hold beside what 2 warps need there."""
MAX_NUM_LANES = 65535
"""Of the second dimension of a grid."""
TYPES = {
    torch.int32: tl.int32,
    torch.int8: tl.int8,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class CopyShape(NamedTuple):
    """Compile-time constants of a copy between two pools. Strides and sizes are in units of READ or WRITE.

    READ_PLANE, WRITE_PLANE: bytes from plane to plane, where these lie one behind the other, else 0.
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
        """As many as have 16 bytes a thread: more would narrow the loads of a short lane."""
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
    """One chunk of one lane of one plane: block ``source`` to block ``target``."""
    read = _address(read_planes, plane, READ_PLANE).to(tl.pointer_type(READ))
    write = _address(write_planes, plane, WRITE_PLANE).to(tl.pointer_type(WRITE))
    # 64 bits: a pool of 2**31 words is 8 GiB, and pools are larger.
    read = tl.multiple_of(read, READ_ALIGNMENT) + source.to(tl.int64) * READ_BLOCK + lane * READ_LANE
    write = tl.multiple_of(write, WRITE_ALIGNMENT) + target.to(tl.int64) * WRITE_BLOCK + lane * WRITE_LANE
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    is_valid = offsets < num_rows * RUN
    read_offsets = offsets if READ_ROW == RUN else offsets // RUN * READ_ROW + offsets % RUN
    write_offsets = offsets if WRITE_ROW == RUN else offsets // RUN * WRITE_ROW + offsets % RUN
    tl.store(write + write_offsets, tl.load(read + read_offsets, mask=is_valid).to(WRITE), mask=is_valid)


@triton.jit  # type: ignore[untyped-decorator]
def _address(planes: tl.tensor, plane: tl.tensor, STRIDE: tl.constexpr) -> tl.tensor:
    """Where a plane begins: ``planes`` is the first one's address, or a table of all where STRIDE is 0."""
    return planes.to(tl.int64) + plane.to(tl.int64) * STRIDE if STRIDE != 0 else tl.load(planes + plane)


@triton.jit(do_not_specialize=["read_planes", "write_planes", "num_chunks"])  # type: ignore[untyped-decorator]
def copy_kernel(
    read_planes: tl.tensor,  # address of the first plane, or pointer to int64 [NUM_PLANES]: addresses
    write_planes: tl.tensor,
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
    read_planes: tl.tensor,  # as of copy_kernel
    write_planes: tl.tensor,
    sources: tl.tuple,  # as many int32 each as pairs at most, a power of two
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
    """``numbers[index]``, of those in ``[FIRST, FIRST + NUM)``: selects, since arguments can't be indexed."""
    if NUM == 1:
        number = numbers[FIRST]
    else:
        half: tl.constexpr = NUM // 2
        low = _pick(numbers, index, FIRST, half)
        high = _pick(numbers, index, FIRST + half, half)
        number = tl.where(index < FIRST + half, low, high)
    return number


def copy_shape(source: Pool, target: Pool, chunk: int = CHUNK) -> CopyShape:
    """The constants that a copy between these pools is compiled with; chunks have at most ``chunk`` units."""
    sides = ((source.geometry, source.addresses), (target.geometry, target.addresses))
    return _copy_shape(*sides, (source.dtype, target.dtype), chunk)


Side = tuple[Geometry, tuple[int, ...]]
"""Of a pool: its geometry and its addresses."""


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
"""What a kernel is given of the addresses of planes: the first, if the others follow from it, or a table."""


class Copier:
    """Copies between two pools, ready to be launched on their device."""

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
        """Whether so many are few, and their lanes not too many for a dimension of the grid."""
        return num_pairs <= max(FEW) and self._lanes_per_pair <= MAX_NUM_LANES

    def copy_few(self, pairs: BlockPairs) -> None:
        """Enqueues the copies of pairs of which it ``may_copy_few``: one launch, of which they are arguments."""
        num_pairs = len(pairs.sources)
        room = next(num for num in FEW if num_pairs <= num)
        grid = (self._num_chunks(max(pairs.num_rows)), self._lanes_per_pair, num_pairs)
        columns = [(*column, *(0,) * (room - num_pairs)) for column in pairs]
        self._few[room](grid, *self._planes, *columns)

    def copy_many(self, table: torch.Tensor, most_rows: int) -> None:
        """Enqueues the copies of an int32 ``[num_pairs, 3]`` table on the device, none of more than ``most_rows``."""
        num_chunks = self._num_chunks(most_rows)
        per_pair = self._lanes_per_pair * num_chunks
        for part in launch.slices(len(table), per_pair):
            pairs = table[part]
            self._many((len(pairs) * per_pair, 1, 1), *self._planes, pairs, num_chunks)

    def _num_chunks(self, num_rows: int) -> int:
        return -(-num_rows * self._run // self._chunk)


def copier(source: Pool, target: Pool) -> Copier:
    """The copier of these pools, kept for the next call."""
    sides = ((source.geometry, source.addresses), (target.geometry, target.addresses))
    return _copier(*sides, (source.dtype, target.dtype), source.device)


@lru_cache(maxsize=256)
def _copier(
    source: Side, target: Side, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> Copier:
    shape = _copy_shape(source, target, dtypes, CHUNK)
    return Copier(shape, planes_of(*source, device), planes_of(*target, device))


def planes_of(geometry: Geometry, addresses: tuple[int, ...], device: torch.device) -> Planes:
    """The same for a pool's addresses."""
    return addresses[0] if launch.plane_stride(addresses, geometry) else launch.addresses(addresses, device)


def copy(source: Pool, target: Pool, pairs: BlockPairs) -> None:
    """Enqueues the copies of non-empty, checked pairs from one pool to another: one launch, and one upload for many."""
    with launch.on_device(source.device):
        ready = copier(source, target)
        if ready.may_copy_few(len(pairs.sources)):
            ready.copy_few(pairs)
        else:
            ready.copy_many(launch.upload(pairs, source.device), max(pairs.num_rows))
