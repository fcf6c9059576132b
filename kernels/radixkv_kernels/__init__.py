"""radixkv_kernels: kernels that move KV blocks at memory speed, in Triton, each with a plain torch reference.

    fork_blocks(pool, src, dst, num_rows)    copy the valid rows of block src[i] to block dst[i]
    gather(pool, block_ids, staging)         blocks to one contiguous buffer, converted if its dtype differs
    scatter(staging, pool, block_ids)        and back
    scrub(pool, block_ids)                   zero blocks
    quantize(pool, block_ids, records, …)    blocks to records of 8 or 4 bits a value, with scales
    dequantize(records, pool, block_ids, …)  and back
    reorder(pool, beams, parents)            a beam step on the device: tables, counts, free blocks, copies
    Beams                                    the state of the beams that reorder changes
    Fences                                   the order of copies, scrubs and compute on several streams
    Quantized                                the layout of such a record, and its real bits per value
    Pool                                     the memory of the blocks: block-major storage or an engine's own tensors
    backend(pool)                            the path of a call on this pool: "triton" or "torch"
    reference                                the same functions in plain torch, which define the correct result

Functions take a Pool or block-major storage. That is one contiguous tensor ``[num_blocks, num_layers, 2, block_size,
num_kv_heads, head_dim]`` of any dtype, where index 0 of the third dimension is keys and 1 is values. Copies move
bytes and never interpret them. So one kernel serves every dtype, and results equal the reference bit for bit.

A call checks its arguments on the host, and raises InputError (a ValueError) before anything has changed. Then it
enqueues its work and returns without waiting for the device. The package doesn't import radixkv. It imports Triton
only when it launches a Triton kernel. ``RADIXKV_KERNELS=reference`` forces the torch path.
"""

from __future__ import annotations

from radixkv_kernels import reference
from radixkv_kernels.backend import backend
from radixkv_kernels.beams import (
    BAD_PARENT,
    BAD_TOKEN,
    CLOSED,
    HISTORY_FULL,
    OUT_OF_BLOCKS,
    TABLE_FULL,
    Beams,
)
from radixkv_kernels.checks import InputError
from radixkv_kernels.fences import Fences
from radixkv_kernels.fork import fork_blocks
from radixkv_kernels.gather import gather, scatter
from radixkv_kernels.pool import Pool
from radixkv_kernels.quantize import dequantize, quantize
from radixkv_kernels.quantized import Quantized
from radixkv_kernels.reorder import reorder
from radixkv_kernels.scrub import scrub

__all__ = [
    "BAD_PARENT",
    "BAD_TOKEN",
    "Beams",
    "CLOSED",
    "Fences",
    "HISTORY_FULL",
    "InputError",
    "OUT_OF_BLOCKS",
    "Pool",
    "Quantized",
    "TABLE_FULL",
    "backend",
    "dequantize",
    "fork_blocks",
    "gather",
    "quantize",
    "reference",
    "reorder",
    "scatter",
    "scrub",
]
