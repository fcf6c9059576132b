"""reorder: one step of a beam search, all on the device.

Beam i goes on from beam ``parents[i]``. Afterwards

    lengths[i]   is its parent's, and one row more: the one that the engine writes next
    tables[i]    is its parent's, and the block of that row is held by nobody else
    refs, free   are those of the new tables: blocks that no beam holds any more are free again

A tail block that is not full and has several children stays with the first of them; the others get copies of its
rows. Blocks are taken from the end of the free stack in the order of the beams that need one, and come back in the
order of columns and beams: prefix sums of integers, so every rank and every run has the same ids.

On a GPU, three launches and no word from the host: capturable in a CUDA graph, and replayable with other parents in
the same tensor. Grids depend on shapes alone.

    plan     one program: who needs a block, which one, which rows are copied; or the bit of ``status``
    permute  a program for some columns: tables in place, reference counts, what is dead
    finish   copies, spread over the GPU; dead blocks to the stack, each program those of its columns; lengths
"""

from __future__ import annotations

import torch

from radixkv_kernels import reference
from radixkv_kernels.backend import backend
from radixkv_kernels.beams import Beams
from radixkv_kernels.checks import InputError
from radixkv_kernels.pool import PoolLike, as_pool


def reorder(pool: PoolLike, beams: Beams, parents: torch.Tensor) -> None:
    """One step of ``beams``, whose blocks are in ``pool``; ``parents``: int32 ``[num_beams]`` on their device.

    Whether parents make sense is seen on the device (``Beams.counters``). Raises InputError, with nothing
    changed, for tensors of other forms. Enqueues and returns. Cost: columns behind the prefix read and
    written once, times beams compared with each other; the copied rows; three launches.
    """
    pool = as_pool(pool)
    if not isinstance(parents, torch.Tensor) or parents.dtype != torch.int32 or not parents.is_contiguous():
        raise InputError("parents", getattr(parents, "dtype", type(parents).__name__), "contiguous int32")
    if tuple(parents.shape) != (beams.num_beams,):
        raise InputError("parents.shape", tuple(parents.shape), f"({beams.num_beams},)")
    if not parents.device == beams.device == pool.device:
        devices = (str(parents.device), str(beams.device), str(pool.device))
        raise InputError("devices of parents, beams, pool", devices, "one and the same")
    shape = pool.geometry
    if (shape.num_blocks, shape.block_size) != (len(beams.refs), beams.block_size):
        wanted = (len(beams.refs), beams.block_size)
        raise InputError(
            "(num_blocks, block_size)", (shape.num_blocks, shape.block_size), f"the beams' {wanted}"
        )
    if backend(pool) == "triton":
        from radixkv_kernels import reorder_triton

        reorder_triton.reorder(pool, beams, parents)
    else:
        reference.reorder(pool, beams, parents)
