"""The Triton kernel of scrub: a copy kernel without a source.

A program zeroes one chunk of one lane of one plane of one block (see ``copy_triton`` for lanes and units). Importing
this module imports triton, which fixes whether this process interprets or compiles kernels.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from radixkv_kernels import launch
from radixkv_kernels.copy_triton import CopyShape, copy_shape
from radixkv_kernels.pool import Pool


@triton.jit  # type: ignore[untyped-decorator]
def scrub_kernel(
    planes: tl.tensor,  # pointer to int64 [NUM_PLANES]: addresses
    block_ids: tl.tensor,  # pointer to int32 [num_blocks]
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    LANE: tl.constexpr,
    RUN: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    num_chunks: tl.constexpr = (NUM_ROWS * RUN + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    chunk = program % num_chunks
    lane = (program // num_chunks) % NUM_LANES
    plane = (program // (num_chunks * NUM_LANES)) % NUM_PLANES
    block = tl.load(block_ids + program // (num_chunks * NUM_LANES * NUM_PLANES)).to(tl.int64)
    write = tl.load(planes + plane).to(tl.pointer_type(UNIT))
    write = tl.multiple_of(write, ALIGNMENT) + block * BLOCK + lane * LANE
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    is_valid = offsets < NUM_ROWS * RUN
    if ROW != RUN:
        offsets = offsets // RUN * ROW + offsets % RUN
    tl.store(write + offsets, tl.zeros((CHUNK,), UNIT), mask=is_valid)


def constants(pool: Pool) -> tuple[object, ...]:
    """The compile-time constants of ``scrub_kernel`` for this pool, in the order of its parameters."""
    shape = copy_shape(pool, pool)
    strides = (shape.WRITE_BLOCK, shape.WRITE_ROW, shape.WRITE_LANE)
    sizes = (shape.RUN, pool.geometry.block_size, shape.NUM_LANES, shape.NUM_PLANES)
    return (shape.WRITE, *strides, *sizes, shape.WRITE_ALIGNMENT, shape.CHUNK)


def scrub(pool: Pool, block_ids: list[int]) -> None:
    """Enqueue the zeroing of checked ids, one or more: one upload, one launch."""
    shape: CopyShape = copy_shape(pool, pool)
    num_chunks = -(-pool.geometry.block_size * shape.RUN // shape.CHUNK)
    per_block = num_chunks * shape.NUM_LANES * shape.NUM_PLANES
    table = launch.upload([block_ids], pool.device)
    with launch.on_device(pool.device):
        planes = launch.addresses(pool.addresses, pool.device)
        for part in launch.slices(len(block_ids), per_block):
            ids = table[part]
            grid = (len(ids) * per_block,)
            scrub_kernel[grid](planes, ids, *constants(pool), num_warps=shape.num_warps())
