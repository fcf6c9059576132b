"""Argument checks on the host, before a kernel is launched or anything changes.

The checks read only host arrays and a tensor's metadata, so they never wait for a device. Ids on a device can't be
checked without waiting, so they are refused. O(pairs). The checks use Python lists, because a step has few pairs: 5
µs for 8 pairs on one core. The same checks as array operations took 9 µs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.integer] | torch.Tensor | Sequence[int]

STORAGE_SHAPE = (
    "[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] (MLA's latent: 1 in place of 2)"
)
MAX_NUM_BLOCKS = 2**31 - 1
BLOCK_IDS = "0 to num_blocks - 1 = {}"


class InputError(ValueError):
    """An invalid argument of a kernel: the ``argument``, its ``value`` and what is ``allowed``."""

    def __init__(self, argument: str, value: object, allowed: str) -> None:
        self.argument, self.value, self.allowed = argument, value, allowed
        super().__init__(f"{argument}={value!r} is not allowed; allowed: {allowed}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str], dict[str, object]]:
        return type(self), (self.argument, self.value, self.allowed), self.__dict__


def check_storage(storage: torch.Tensor) -> None:
    """Raise InputError unless ``storage`` is block storage: six dimensions, the third 2 or 1, contiguous."""
    if not isinstance(storage, torch.Tensor):
        raise InputError("storage", type(storage).__name__, f"a torch.Tensor {STORAGE_SHAPE}")
    shape = tuple(storage.shape)
    if len(shape) != 6 or shape[2] not in (1, 2) or 0 in shape:
        raise InputError("storage.shape", shape, f"{STORAGE_SHAPE}, every dimension at least 1")
    if shape[0] > MAX_NUM_BLOCKS:
        raise InputError("storage.shape", shape, f"at most {MAX_NUM_BLOCKS} blocks (block ids are int32)")
    if not storage.is_contiguous():
        raise InputError("storage.stride()", storage.stride(), f"a contiguous tensor {STORAGE_SHAPE}")


class BlockPairs(NamedTuple):
    """Pairs that can be copied in any order: three lists of the same length."""

    sources: list[int]
    targets: list[int]
    num_rows: list[int]


def fork_pairs(src: Ids, dst: Ids, num_rows: Ids, num_blocks: int, block_size: int) -> BlockPairs:
    """Return the checked pairs as lists.

    Raises InputError for unequal lengths, ids outside ``[0, num_blocks)``, rows outside ``[1, block_size]``, a
    repeated target, and a source that is also a target. So the order of the copies doesn't matter. A source may occur
    any number of times.
    """
    pairs = BlockPairs(_host_list("src", src), _host_list("dst", dst), _host_list("num_rows", num_rows))
    sources, targets, rows = pairs
    if not len(sources) == len(targets) == len(rows):
        lengths = tuple(len(column) for column in pairs)
        raise InputError("(len(src), len(dst), len(num_rows))", lengths, "three equal lengths")
    if sources:
        _check_range("src", sources, 0, num_blocks, BLOCK_IDS)
        _check_range("dst", targets, 0, num_blocks, BLOCK_IDS)
        _check_range("num_rows", rows, 1, block_size + 1, "1 to block_size = {}")
        _check_disjoint(pairs)
    return pairs


def block_list(argument: str, block_ids: Ids, num_blocks: int) -> list[int]:
    """Block ids as a list, each in ``[0, num_blocks)``. Raises InputError."""
    values = _host_list(argument, block_ids)
    if values:
        _check_range(argument, values, 0, num_blocks, BLOCK_IDS)
    return values


def int32_list(argument: str, numbers: Ids) -> list[int]:
    """Integers as a list, each of 32 bits. Raises InputError."""
    values = _host_list(argument, numbers)
    if values:
        _check_range(argument, values, -(2**31), 2**31, "integers of 32 bits")
    return values


def _host_list(argument: str, ids: Ids) -> list[int]:
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu":
        return cast(list[int], ids.tolist())  # the type of a cache's plans; no other check needed
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu":
            raise InputError(
                f"{argument}.device", str(ids.device), "the host (cpu), where checks wait for no device"
            )
        is_integer = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    else:
        ids = np.asarray(ids)
        is_integer = ids.dtype.kind in "iu" or ids.size == 0  # an empty list has a float dtype
    if ids.ndim != 1:
        raise InputError(f"{argument}.shape", tuple(ids.shape), "one dimension")
    if not is_integer:
        raise InputError(f"{argument}.dtype", str(ids.dtype), "integers")
    values: list[int] = ids.tolist()
    return values


def _check_range(argument: str, values: list[int], start: int, stop: int, allowed: str) -> None:
    if start <= min(values) and max(values) < stop:
        return
    index = next(index for index, value in enumerate(values) if not start <= value < stop)
    raise InputError(f"{argument}[{index}]", values[index], allowed.format(stop - 1))


def _check_disjoint(pairs: BlockPairs) -> None:
    sources, targets, _ = pairs
    distinct = set(targets)
    if len(distinct) < len(targets):
        check_distinct("dst", targets, "each target once")
    if not distinct.isdisjoint(sources):
        index = next(index for index, source in enumerate(sources) if source in distinct)
        raise InputError(f"src[{index}]", sources[index], "no source that is also a target")


def check_distinct(argument: str, values: list[int], allowed: str) -> None:
    """Raise InputError for the first value that occurs a second time."""
    if len(set(values)) == len(values):
        return
    seen: set[int] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise InputError(f"{argument}[{index}]", value, allowed)
        seen.add(value)
