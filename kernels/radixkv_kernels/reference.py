"""The truth: every kernel in plain torch, written to be believed rather than to be fast.

Nothing is checked here; callers have done that. Each function works on any torch device, pool and dtype.
``reference_quantize`` and ``reference_reorder`` are the rest of it, in files of their own for their length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv_kernels.pool import PoolLike, as_pool


def fork_blocks(pool: PoolLike, src: Sequence[int], dst: Sequence[int], num_rows: Sequence[int]) -> None:
    """Copies the first ``num_rows[i]`` rows of block ``src[i]`` into block ``dst[i]``, every plane.

    One ``copy_`` a pair in block-major storage, one a pair and plane in others.
    """
    for view in as_pool(pool).views:
        for source, target, rows in zip(src, dst, num_rows, strict=True):
            view[target, :rows].copy_(view[source, :rows])


def gather(pool: PoolLike, block_ids: Sequence[int], staging: torch.Tensor) -> None:
    """Block ``block_ids[i]`` becomes ``staging[i]``, converted if dtypes differ: one ``copy_`` a block and view."""
    for view, staged in as_pool(pool).beside(staging):
        for index, block_id in enumerate(block_ids):
            staged[index].copy_(view[block_id])


def scatter(staging: torch.Tensor, pool: PoolLike, block_ids: Sequence[int]) -> None:
    """``staging[i]`` becomes block ``block_ids[i]``, converted if dtypes differ: one ``copy_`` a block and view."""
    for view, staged in as_pool(pool).beside(staging):
        for index, block_id in enumerate(block_ids):
            view[block_id].copy_(staged[index])


def scrub(pool: PoolLike, block_ids: Sequence[int]) -> None:
    """Zeroes the bytes of whole blocks: one ``zero_`` a block and view."""
    for view in as_pool(pool).views:
        for block_id in block_ids:
            view[block_id].zero_()  # every dtype's zero is zero bytes
