"""scrub: zeroes blocks in bulk, before another tenant gets them."""

from __future__ import annotations

from radixkv_kernels import reference
from radixkv_kernels.backend import backend
from radixkv_kernels.checks import Ids, block_list
from radixkv_kernels.pool import PoolLike, as_pool


def scrub(pool: PoolLike, block_ids: Ids) -> None:
    """Zero every byte of the given blocks, in all layers, keys and values. No other byte changes.

    pool: a Pool, or block-major storage ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]``, of any
    dtype. block_ids: integers on the host, in any order, repeated or not. Raises InputError with nothing changed.

    Enqueues on the current stream and returns without waiting. On a side stream, ordered by ``Fences``, it overlaps
    with compute. Cost: bytes written, one upload of 4 bytes a block, one launch.
    """
    pool = as_pool(pool)
    ids = block_list("block_ids", block_ids, pool.geometry.num_blocks)
    if not ids:
        return
    if backend(pool) == "triton":
        from radixkv_kernels import scrub_triton

        scrub_triton.scrub(pool, ids)
    else:
        reference.scrub(pool, ids)
