"""quantize and dequantize: blocks to and from records of fewer bits, in one pass over their bytes.

    records   uint8 [n, record_bytes]     contiguous, on the pool's device; see ``Quantized`` for the layout

Errors of finite values, before the rounding to the pool's dtype (half a unit in its last place):

    fp8          at most 1/16 of the value, and scale / 1024 near zero; scale is the head's largest / 448
    int8, int4   at most scale / 2; scale is the group's (largest − least) / 255 or / 15, rounded up

The result is undefined in groups with values that are not finite. Such values don't affect other groups.
"""

from __future__ import annotations

import torch

from radixkv_kernels import reference
from radixkv_kernels.backend import backend
from radixkv_kernels.checks import Ids, InputError, block_list, check_distinct
from radixkv_kernels.pool import Pool, PoolLike, as_pool
from radixkv_kernels.quantized import Quantized, Scheme


def quantize(pool: PoolLike, block_ids: Ids, records: torch.Tensor, scheme: Scheme) -> None:
    """Quantise block ``block_ids[i]`` to ``records[i]``. A block may occur more than once.

    pool: float32, float16 or bfloat16, any layout. records: uint8 ``[n, record_bytes]``. Raises InputError with
    nothing changed. Enqueues and returns. Cost: the blocks' bytes read, the records' bytes written, one upload of 4
    bytes a block, one launch.
    """
    pool = as_pool(pool)
    form = Quantized(pool, scheme)
    ids = _checked(form, block_ids, records)
    if not ids:
        return
    if backend(pool) == "triton":
        from radixkv_kernels import quantize_triton

        quantize_triton.quantize(form, ids, records)
    else:
        reference.quantize(form, ids, records)


def dequantize(records: torch.Tensor, pool: PoolLike, block_ids: Ids, scheme: Scheme) -> None:
    """Restore block ``block_ids[i]`` from ``records[i]``, each block at most once; otherwise like ``quantize``."""
    pool = as_pool(pool)
    form = Quantized(pool, scheme)
    ids = _checked(form, block_ids, records)
    check_distinct("block_ids", ids, "each block once")
    if not ids:
        return
    if backend(pool) == "triton":
        from radixkv_kernels import quantize_triton

        quantize_triton.dequantize(form, ids, records)
    else:
        reference.dequantize(form, ids, records)


def _checked(form: Quantized, block_ids: Ids, records: torch.Tensor) -> list[int]:
    pool: Pool = form.pool
    ids = block_list("block_ids", block_ids, pool.geometry.num_blocks)
    if not isinstance(records, torch.Tensor):
        raise InputError("records", type(records).__name__, "a torch.Tensor")
    wanted = (len(ids), form.record_bytes)
    if tuple(records.shape) != wanted:
        raise InputError("records.shape", tuple(records.shape), f"{wanted}: block_ids and record_bytes")
    if records.dtype != torch.uint8 or not records.is_contiguous() or records.data_ptr() % 16:
        raise InputError(
            "records", (records.dtype, records.stride()), "contiguous uint8, aligned to 16 bytes"
        )
    if records.device != pool.device:
        raise InputError("records.device", str(records.device), f"the pool's, {pool.device}")
    return ids
