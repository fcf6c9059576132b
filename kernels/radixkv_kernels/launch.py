"""Parts that the launches of all kernels share: tables on the device, words, and the division of work into programs.

Host code only: importing it does not import triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import torch

from radixkv_kernels.pool import Geometry

MAX_NUM_PROGRAMS = 2**31 - 1
WIDEST = 16
"""Bytes of the widest access of a thread."""
MAX_STAGED_BYTES = 32 << 10
"""The driver sends up to this many bytes with its commands, from any host memory. The GPU waits less for them."""
PLAIN = 2
"""An integer that Triton doesn't specialise on, unlike 1 and multiples of 16."""
_HERE = nullcontext()


class Launcher:
    """A kernel with its compile-time constants. Once it is compiled, a launch skips Triton's dispatch.

    Triton compiles at the first launch and inspects each argument. Inspecting them at every launch would be half of
    the host's time for a small step. So arguments must always be alike: tensors of one dtype at addresses that are
    multiples of 16 bytes, integers that the kernel isn't specialised on, and tuples of integers, for which Triton
    sees PLAIN. A launcher is for one device. Triton's interpreter compiles nothing.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, object], **options: object) -> None:
        self._kernel, self._options = kernel, {**constants, **options}
        self._values = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *arguments: object) -> None:
        """Enqueue a grid of programs on the current stream of the current device."""
        if self._compiled is None:
            shown = [(PLAIN,) * len(each) if isinstance(each, tuple) else each for each in arguments]
            self._compiled = self._kernel.warmup(*shown, grid=grid, **self._options)
        if self._compiled is None:
            self._kernel[grid](*arguments, **self._options)
        else:
            self._compiled[grid](*arguments, *self._values)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make the pool's GPU the current one, because Triton launches there."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def upload(columns: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Upload columns of equal length as an int32 table ``[n, len(columns)]``. Enqueues without waiting."""
    host = torch.from_numpy(np.array(columns, dtype=np.int32).T.copy())
    if device.type == "cpu":
        return host
    if host.nbytes > MAX_STAGED_BYTES:
        host = host.pin_memory()  # torch keeps it until the stream has read it
    return host.to(device, non_blocking=True)


@lru_cache(maxsize=256)
def addresses(planes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The planes' addresses as int64 ``[num_planes]`` on the device, uploaded once for a pool."""
    # Waits for the upload, the first time only: later launches may be on other streams.
    return torch.tensor(planes, dtype=torch.int64, device=device)


def plane_stride(planes: tuple[int, ...], geometry: Geometry) -> int:
    """Bytes of a plane of a block if planes are contiguous, as in block-major storage; else 0."""
    stride = geometry.block_size * geometry.row_stride
    return stride if all(after - before == stride for before, after in pairwise(planes)) else 0


@lru_cache(maxsize=256)
def alignment(planes: tuple[int, ...], geometry: Geometry) -> int:
    """The largest number of bytes, at most 16, that divides every plane's address, every stride and a run."""
    # A run is a whole row if its heads are contiguous, otherwise one head of a row.
    run_bytes = geometry.head_bytes * (geometry.num_heads if geometry.has_whole_rows else 1)
    lane_stride = 0 if geometry.has_whole_rows else geometry.head_stride
    return gcd(WIDEST, *planes, geometry.block_stride, geometry.row_stride, lane_stride, run_bytes)


def slices(num_items: int, programs_per_item: int) -> list[slice]:
    """Divide items so that no launch exceeds the limit of a grid: one slice, except for millions of items.

    Slices begin at multiples of 4, so slices of an int32 table on the device are aligned to 16 bytes.
    """
    step = max(4, MAX_NUM_PROGRAMS // programs_per_item // 4 * 4)
    return [slice(start, start + step) for start in range(0, num_items, step)]
