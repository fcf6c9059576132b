"""The truth: every kernel in plain torch, written to be believed rather than to be fast.

Nothing is checked here; callers have done that. Each function works on any torch device and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def fork_blocks(
    storage: torch.Tensor, src: Iterable[int], dst: Iterable[int], num_rows: Iterable[int]
) -> None:
    """Copies the first ``num_rows[i]`` rows of block ``src[i]`` into block ``dst[i]``, every layer, K and V.

    ``storage``: ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]``. One ``copy_`` a pair.
    """
    for source, target, rows in zip(src, dst, num_rows, strict=True):
        storage[target, :, :, :rows].copy_(storage[source, :, :, :rows])
