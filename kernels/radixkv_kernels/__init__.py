"""radixkv_kernels: moving KV blocks at the speed of memory, in Triton with a plain torch reference each.

    fork_blocks(pool, src, dst, num_rows)    the valid rows of block src[i] become those of block dst[i]
    gather(pool, block_ids, staging)         blocks to one contiguous buffer, converted if its dtype differs
    scatter(staging, pool, block_ids)        and back
    scrub(pool, block_ids)                   blocks become zeros
    quantize(pool, block_ids, records, …)    blocks to records of 8 or 4 bits a value, scales beside the codes
    dequantize(records, pool, block_ids, …)  and back
    reorder(pool, beams, parents)            a beam step on the device: tables, counts, free blocks, copies
    Beams                                    the books that it moves on
    Fences                                   the order of copies, scrubs and compute on several streams
    Quantized                                how such a record is made up, and its true bits a value
    Pool                                     where the blocks are: block-major storage or an engine's own tensors
    backend(pool)                            which path a call on this pool takes: "triton" or "torch"
    reference                                the same functions in plain torch: the truth

Wherever a pool is wanted, block-major storage will do: one contiguous tensor ``[num_blocks, num_layers, 2,
block_size, num_kv_heads, head_dim]`` of any dtype, index 0 of the third dimension being keys and 1 values.
Copies move bytes and never interpret them, so one kernel serves every dtype and results are bit for bit those
of the reference.

A call checks its arguments on the host, raises InputError (a ValueError) before anything has changed, then
enqueues and returns: it never waits for a device. The package imports nothing of radixkv, and Triton only
when a Triton kernel is launched. ``RADIXKV_KERNELS=reference`` forces the torch path.
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
