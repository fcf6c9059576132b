"""gather and scatter: blocks to and from one contiguous staging buffer, for tiers, transfers and plain attention.

    staging   [n, num_layers, 2 or 1, block_size, num_kv_heads, head_dim]     contiguous, on the pool's device

It is block-major for every layout of the pool. So a staged block is contiguous bytes, ready to be sent or hashed. To
overlap with compute, gather layer by layer: ``gather(pool.layers(i, i + 1), ids, staging_of_layer)``.
"""

from __future__ import annotations

import torch

from radixkv_kernels import reference
from radixkv_kernels.backend import backend
from radixkv_kernels.checks import BlockPairs, Ids, InputError, block_list, check_distinct
from radixkv_kernels.pool import Pool, PoolLike, as_pool

CONVERTIBLE = (torch.float32, torch.float16, torch.bfloat16)


def gather(pool: PoolLike, block_ids: Ids, staging: torch.Tensor) -> None:
    """Copy block ``block_ids[i]`` to ``staging[i]``. A block may occur more than once.

    staging: contiguous ``[n, num_layers, planes_per_layer, block_size, num_kv_heads, head_dim]`` on the pool's
    device. With the pool's dtype, any dtype is allowed and bytes are copied. Otherwise values are converted among
    float32, float16 and bfloat16, rounded to nearest. block_ids: n ids on the host.

    Raises InputError with nothing changed. Enqueues and returns. Cost: bytes read and written, one launch; for more
    than 32 blocks also one upload of 12 bytes each.
    """
    pool = as_pool(pool)
    ids = block_list("block_ids", block_ids, pool.geometry.num_blocks)
    staged = _staged(pool, staging, len(ids))
    if staged is None:
        return
    if backend(pool) == "triton":
        from radixkv_kernels import copy_triton

        copy_triton.copy(pool, staged, _whole_blocks(pool, ids, list(range(len(ids)))))
    else:
        reference.gather(pool, ids, staging)


def scatter(staging: torch.Tensor, pool: PoolLike, block_ids: Ids) -> None:
    """Copy ``staging[i]`` to block ``block_ids[i]``, each block at most once; otherwise like ``gather``."""
    pool = as_pool(pool)
    ids = block_list("block_ids", block_ids, pool.geometry.num_blocks)
    check_distinct("block_ids", ids, "each block once")
    staged = _staged(pool, staging, len(ids))
    if staged is None:
        return
    if backend(pool) == "triton":
        from radixkv_kernels import copy_triton

        copy_triton.copy(staged, pool, _whole_blocks(pool, list(range(len(ids))), ids))
    else:
        reference.scatter(staging, pool, ids)


def _whole_blocks(pool: Pool, sources: list[int], targets: list[int]) -> BlockPairs:
    return BlockPairs(sources, targets, [pool.geometry.block_size] * len(sources))


def _staged(pool: Pool, staging: torch.Tensor, num_blocks: int) -> Pool | None:
    """The checked staging buffer as a pool. None if it has no blocks."""
    if not isinstance(staging, torch.Tensor):
        raise InputError("staging", type(staging).__name__, "a torch.Tensor")
    wanted = (num_blocks, *pool.block_shape)
    if tuple(staging.shape) != wanted:
        raise InputError("staging.shape", tuple(staging.shape), f"{wanted}: block_ids and the pool's blocks")
    if not staging.is_contiguous():
        raise InputError("staging.stride()", staging.stride(), "a contiguous tensor")
    if staging.device != pool.device:
        raise InputError("staging.device", str(staging.device), f"the pool's, {pool.device}")
    if staging.dtype != pool.dtype and not {staging.dtype, pool.dtype} <= set(CONVERTIBLE):
        allowed = f"the pool's {pool.dtype}; float32, float16 and bfloat16 are converted to each other"
        raise InputError("staging.dtype", str(staging.dtype), allowed)
    return Pool.of(staging) if num_blocks else None
