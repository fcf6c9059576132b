"""What the launches of all kernels share: tables on the device, words, and how work is cut into programs.

Host code only: importing it does not import triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import gcd

import torch

from radixkv_kernels.pool import Geometry, Pool

MAX_NUM_PROGRAMS = 2**31 - 1
WIDEST = 16
"""Bytes of the widest access of a thread."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes the pool's GPU the current one, which is where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def upload(columns: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Equally long columns as the int32 table ``[n, len(columns)]`` on ``device``; enqueued, never waited for."""
    host = torch.tensor(columns, dtype=torch.int32).T.contiguous()
    if device.type == "cpu":
        return host
    # From pinned memory the copy is asynchronous, and torch keeps the buffer until the stream has read it.
    return host.pin_memory().to(device, non_blocking=True)


def addresses(pool: Pool) -> torch.Tensor:
    """Where the planes begin: int64 ``[num_planes]`` on the pool's device, uploaded once for a pool."""
    return _addresses(pool.addresses, pool.device)


@lru_cache(maxsize=256)
def _addresses(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Waits for the upload, the first time only: later launches may be on other streams.
    return torch.tensor(values, dtype=torch.int64, device=device)


def alignment(pool: Pool) -> int:
    """The bytes, at most 16, that every plane's address, every stride and a run are multiples of."""
    return _alignment(pool.addresses, pool.geometry)


@lru_cache(maxsize=256)
def _alignment(values: tuple[int, ...], geometry: Geometry) -> int:
    # A run is a whole row where heads are one behind the other, otherwise one head of it.
    run_bytes = geometry.head_bytes * (geometry.num_heads if geometry.has_whole_rows else 1)
    lane_stride = 0 if geometry.has_whole_rows else geometry.head_stride
    return gcd(WIDEST, *values, geometry.block_stride, geometry.row_stride, lane_stride, run_bytes)


def slices(num_items: int, programs_per_item: int) -> list[slice]:
    """Cuts items so that no launch has more programs than a grid may; one slice, but for millions of items."""
    step = max(1, MAX_NUM_PROGRAMS // programs_per_item)
    return [slice(start, start + step) for start in range(0, num_items, step)]
