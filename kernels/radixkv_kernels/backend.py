"""The path of a call: Triton's kernel, or the torch reference with the same result.

"triton": CUDA and ROCm tensors, and CPU tensors in a process with ``TRITON_INTERPRET=1``. "torch": all other tensors,
and all tensors under ``RADIXKV_KERNELS=reference``. A GPU without Triton uses the reference and warns once. Both
variables are read at the first call only, so the mode of a process never changes.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from radixkv_kernels.checks import InputError
from radixkv_kernels.pool import Pool

VARIABLE = "RADIXKV_KERNELS"


def backend(where: torch.Tensor | Pool) -> Literal["triton", "torch"]:
    """The path of a call on this storage or pool."""
    device = where.device
    if _reference_is_forced():
        return "torch"
    if device.type == "cpu":
        return "triton" if _is_interpreting() and _has_triton() else "torch"
    if device.type == "cuda" and _has_triton():
        return "triton"
    _warn_of_slow_path(device.type)
    return "torch"


@cache
def _reference_is_forced() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "reference"):
        raise InputError(VARIABLE, value, "unset, or 'reference'")
    return value == "reference"


@cache
def _is_interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "on", "yes", "true")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _warn_of_slow_path(device: str) -> None:
    warnings.warn(
        f"no Triton kernels for {device} tensors here: radixkv_kernels uses the slower torch path",
        RuntimeWarning,
        stacklevel=4,
    )
