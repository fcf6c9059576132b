"""reorder: one step of a beam search, all on the device.

Beam i goes on from beam ``parents[i]``. Afterwards

    lengths[i]   is its parent's, and one row more: the one that the engine writes next, for ``token_ids[i]``
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


def reorder(
    pool: PoolLike, beams: Beams, parents: torch.Tensor, token_ids: torch.Tensor | None = None
) -> None:
    """One step of ``beams``, whose blocks are in ``pool``; ``parents``: int32 ``[num_beams]`` on their device.

    ``token_ids``: int32 or int64 ``[num_beams]``, what the new rows stand for; wanted by beams that remember their
    steps, and by no others. Whether parents and ids make sense is seen on the device (``Beams.counters``). Raises
    InputError, with nothing changed, for tensors of other forms. Enqueues and returns. Cost: columns behind the
    prefix read and written once, times beams compared with each other; the copied rows; three launches.
    """
    pool = as_pool(pool)
    _check("parents", parents, (torch.int32,), beams)
    if (token_ids is not None) != (beams.max_steps > 0):
        allowed = "ids of tokens, since these beams remember" if beams.max_steps else "none without max_steps"
        raise InputError("token_ids", "None" if token_ids is None else "ids", allowed)
    if token_ids is not None:
        _check("token_ids", token_ids, (torch.int32, torch.int64), beams)
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

        reorder_triton.reorder(pool, beams, parents, token_ids)
    else:
        reference.reorder(pool, beams, parents, token_ids)


def _check(name: str, tensor: object, dtypes: tuple[torch.dtype, ...], beams: Beams) -> None:
    """Raises InputError unless it is a contiguous tensor ``[num_beams]`` on the beams' device."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(name, getattr(tensor, "dtype", type(tensor).__name__), f"contiguous {allowed}")
    if not tensor.is_contiguous():
        raise InputError(f"{name}.stride()", tensor.stride(), "a contiguous tensor")
    if tuple(tensor.shape) != (beams.num_beams,):
        raise InputError(f"{name}.shape", tuple(tensor.shape), f"({beams.num_beams},)")
    if name != "parents" and tensor.device != beams.device:
        raise InputError(f"{name}.device", str(tensor.device), f"the beams', {beams.device}")
