"""fork_blocks: the copies that a step's copy-on-write needs, all pairs, layers, keys and values at once.

Two paths with the same bytes as a result. "triton": CUDA and ROCm tensors, and CPU tensors in a process
with ``TRITON_INTERPRET=1``; one small upload of the pairs and one launch, whatever their number. "torch":
everything else; one ``copy_`` a pair.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from radixkv_kernels import reference
from radixkv_kernels.checks import Ids, check_storage, fork_pairs


def fork_blocks(storage: torch.Tensor, src: Ids, dst: Ids, num_rows: Ids) -> None:
    """Copies the first ``num_rows[i]`` rows of block ``src[i]`` into block ``dst[i]``, every layer, K and V.

    ``storage``: contiguous ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]``, any dtype
    and device. ``src``, ``dst``, ``num_rows``: equally long host arrays of integers (NumPy, torch CPU,
    lists). Rows from ``num_rows[i]`` on and blocks that are no target keep their bytes. Nothing to
    copy, nothing launched.

    Raises InputError (a ValueError), with nothing changed, for storage of another form and for pairs that
    can't be copied in any order (see ``checks.fork_pairs``). Enqueues on the current stream and returns
    without waiting for it. Cost: bytes of the valid rows, read and written, and one launch.
    """
    check_storage(storage)
    pairs = fork_pairs(src, dst, num_rows, storage.shape[0], storage.shape[3])
    if not pairs.sources:
        return
    if backend(storage) == "triton":
        from radixkv_kernels import fork_triton

        fork_triton.launch(storage, fork_triton.upload(pairs, storage.device))
    else:
        reference.fork_blocks(storage, *pairs)


def backend(storage: torch.Tensor) -> Literal["triton", "torch"]:
    """The path of a call on this storage. Where Triton isn't installed, CUDA tensors take torch's."""
    on_gpu = storage.is_cuda
    return "triton" if (on_gpu or (_is_interpreting() and storage.is_cpu)) and _has_triton() else "torch"


@cache
def _is_interpreting() -> bool:
    # Triton reads the variable when kernels are defined, so a process has one mode; the first call settles ours.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "on", "yes", "true")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
