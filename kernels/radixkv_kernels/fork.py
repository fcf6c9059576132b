"""fork_blocks: the copies that a step's copy-on-write needs, all pairs, layers, keys and values at once."""

from __future__ import annotations

from radixkv_kernels import reference
from radixkv_kernels.backend import backend
from radixkv_kernels.checks import Ids, fork_pairs
from radixkv_kernels.pool import PoolLike, as_pool


def fork_blocks(pool: PoolLike, src: Ids, dst: Ids, num_rows: Ids) -> None:
    """Copies the first ``num_rows[i]`` rows of block ``src[i]`` into block ``dst[i]``, every layer, K and V.

    ``pool``: a Pool, or block-major storage. ``src``, ``dst``, ``num_rows``: equally long host arrays of
    integers (NumPy, torch CPU, lists). Rows from ``num_rows[i]`` on and blocks that are no target keep their
    bytes. Nothing to copy, nothing launched.

    Raises InputError (a ValueError), with nothing changed, for storage of another form and for pairs that
    can't be copied in any order, such as a target that is also a source (see ``checks.fork_pairs``). Enqueues
    on the current stream and returns without waiting for it. Cost: bytes of the valid rows, read and
    written, and one launch; of more than 32 pairs one upload of 12 bytes a pair before it.
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
