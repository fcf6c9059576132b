"""radixkv_kernels: moving KV blocks at the speed of memory, in Triton with a plain torch reference each.

    fork_blocks(storage, src, dst, num_rows)    the valid rows of block src[i] become those of block dst[i]
    backend(storage)                            which path a call on this storage takes: "triton" or "torch"
    reference                                   the same functions in plain torch: the truth

Block storage is one contiguous tensor ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]``
of any dtype, index 0 of the third dimension being keys and 1 values. Kernels move bytes and never interpret
them, so one kernel serves every dtype and results are bit for bit those of the reference.

A call checks its arguments on the host, raises InputError (a ValueError) before anything has changed, then
enqueues and returns: it never waits for a device. The package imports nothing of radixkv, and Triton only
when a Triton kernel is launched.
"""

from __future__ import annotations

from radixkv_kernels import reference
from radixkv_kernels.checks import InputError
from radixkv_kernels.fork import backend, fork_blocks

__all__ = ["InputError", "backend", "fork_blocks", "reference"]
