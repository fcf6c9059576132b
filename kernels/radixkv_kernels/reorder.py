"""reorder: one step of a beam search, all on the device.

Beam i continues beam ``parents[i]``. After the step

    lengths[i]   is its parent's length + 1. The engine writes the new row next, for ``token_ids[i]``.
    tables[i]    is its parent's table. No other beam holds the block of the new row.
    refs, free   match the new tables. Blocks that no beam holds any more are free again.

If a tail block is not full and has several children, the first child keeps it. The others get copies of its rows.
Blocks are taken from the end of the free stack, in the order of the beams that need one. Freed blocks return in the
order of columns and beams. Both use prefix sums of integers, so every rank and every run has the same ids.

On a GPU this is three launches without any synchronisation with the host. They can be captured in a CUDA graph, and
replayed with other parents in the same tensor. Grids depend only on shapes.

    plan     one program: decides which beams need a block, which one, and which rows are copied; or sets ``status``
    permute  a program per range of columns: updates tables in place, counts references, finds dead blocks
    finish   copies rows with the whole GPU, pushes dead blocks to the stack, updates lengths
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
    """Advance ``beams`` by one step. Their blocks are in ``pool``.

    parents: int32 ``[num_beams]`` on the beams' device. token_ids: int32 or int64 ``[num_beams]``, the tokens of the
    new rows. Required if the beams record their steps, and forbidden otherwise. The device checks the values of
    parents and ids (``Beams.counters``).

    Raises InputError, with nothing changed, for tensors of other forms. Enqueues and returns. Cost: each column after
    the prefix is read and written once, and all beams are compared with each other; the copied rows; three launches.
    """
    pool = as_pool(pool)
    _check("parents", parents, (torch.int32,), beams)
    if (token_ids is not None) != (beams.max_steps > 0):
        allowed = (
            "token ids, because these beams remember them" if beams.max_steps else "none without max_steps"
        )
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
    """Raise InputError unless it is a contiguous tensor ``[num_beams]`` on the beams' device."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(name, getattr(tensor, "dtype", type(tensor).__name__), f"contiguous {allowed}")
    if not tensor.is_contiguous():
        raise InputError(f"{name}.stride()", tensor.stride(), "a contiguous tensor")
    if tuple(tensor.shape) != (beams.num_beams,):
        raise InputError(f"{name}.shape", tuple(tensor.shape), f"({beams.num_beams},)")
    if name != "parents" and tensor.device != beams.device:
        raise InputError(f"{name}.device", str(tensor.device), f"the beams', {beams.device}")
