"""fork_blocks: the copies of a step's copy-on-write, all pairs, layers, keys and values in one call."""

from __future__ import annotations

from radixkv_kernels import reference
from radixkv_kernels.backend import backend
from radixkv_kernels.checks import Ids, fork_pairs
from radixkv_kernels.pool import PoolLike, as_pool


def fork_blocks(pool: PoolLike, src: Ids, dst: Ids, num_rows: Ids) -> None:
    """Copy the first ``num_rows[i]`` rows of block ``src[i]`` to block ``dst[i]``, in every layer, keys and values.

    pool: a Pool, or block-major storage. src, dst, num_rows: host arrays of integers of equal length (NumPy, torch
    CPU, lists). Rows from ``num_rows[i]`` on and blocks that are no target keep their bytes. Without pairs nothing is
    launched.

    Raises InputError (a ValueError), with nothing changed, for an invalid pool and for pairs that can't be copied in
    any order, such as a target that is also a source (see ``checks.fork_pairs``). Enqueues on the current stream and
    returns without waiting. Cost: bytes of the valid rows, read and written, and one launch. More than 32 pairs also
    need one upload of 12 bytes a pair.
    """
    pool = as_pool(pool)
    shape = pool.geometry
    pairs = fork_pairs(src, dst, num_rows, shape.num_blocks, shape.block_size)
    if not pairs.sources:
        return
    if backend(pool) == "triton":
        from radixkv_kernels import copy_triton

        copy_triton.copy(pool, pool, pairs)
    else:
        reference.fork_blocks(pool, *pairs)
