"""What a kernel may be given: checked on the host, before anything is launched or changed.

The checks read host arrays and a tensor's metadata only, so they never wait for a device; ids that live on
a device can't be checked without waiting, and are refused. The cost is a few NumPy calls and two sets over
the pairs: some 15 µs for 8 pairs on one core, O(pairs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Ids = NDArray[np.integer] | torch.Tensor | Sequence[int]

STORAGE_SHAPE = "[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]"
MAX_NUM_BLOCKS = 2**31 - 1


class InputError(ValueError):
    """An argument that a kernel can't work on: the ``argument``, its ``value`` and what is ``allowed``."""

    def __init__(self, argument: str, value: object, allowed: str) -> None:
        self.argument, self.value, self.allowed = argument, value, allowed
        super().__init__(f"{argument}={value!r} is not allowed: {allowed}")


def check_storage(storage: torch.Tensor) -> None:
    """Raises InputError unless ``storage`` is block storage: six dimensions, the third 2, contiguous."""
    if not isinstance(storage, torch.Tensor):
        raise InputError("storage", type(storage).__name__, f"a torch.Tensor {STORAGE_SHAPE}")
    shape = tuple(storage.shape)
    if len(shape) != 6 or shape[2] != 2 or 0 in shape:
        raise InputError("storage.shape", shape, f"{STORAGE_SHAPE}, every dimension at least 1")
    if shape[0] > MAX_NUM_BLOCKS:
        raise InputError("storage.shape", shape, f"at most {MAX_NUM_BLOCKS} blocks (block ids are int32)")
    if not storage.is_contiguous():
        raise InputError("storage.stride()", storage.stride(), f"a contiguous tensor {STORAGE_SHAPE}")


def fork_table(src: Ids, dst: Ids, num_rows: Ids, num_blocks: int, block_size: int) -> Int32Array:
    """The pairs as one int32 table ``[num_pairs, 3]`` of (source, target, rows), fit to be copied at once.

    Raises InputError for unequal lengths, ids outside ``[0, num_blocks)``, rows outside
    ``[1, block_size]``, a target that is named twice, and a source that is also a target: with those gone,
    the order in which pairs are copied can't matter. A source may be named any number of times.
    """
    columns = (_host_ids("src", src), _host_ids("dst", dst), _host_ids("num_rows", num_rows))
    lengths = tuple(len(column) for column in columns)
    if len(set(lengths)) != 1:
        raise InputError("(len(src), len(dst), len(num_rows))", lengths, "three equal lengths")
    table = np.empty((lengths[0], 3), dtype=np.int32)
    for column, ids in enumerate(columns):
        table[:, column] = ids
    # One unsigned comparison covers both ends of a range: what lies below it turns huge.
    limits = np.array((num_blocks, num_blocks, block_size), dtype=np.uint32)
    bad = (table - np.array((0, 0, 1), dtype=np.int32)).view(np.uint32) >= limits
    if bad.any():
        _refuse_range(bad, table, num_blocks, block_size)
    _check_disjoint(table)
    return table


def _host_ids(argument: str, ids: Ids) -> NDArray[np.integer]:
    if isinstance(ids, torch.Tensor) and ids.device.type != "cpu":
        raise InputError(f"{argument}.device", str(ids.device), "the host, where checks wait for no device")
    if isinstance(ids, torch.Tensor) and (ids.is_floating_point() or ids.is_complex()):
        raise InputError(f"{argument}.dtype", str(ids.dtype), "integers, int32 at best")
    array = np.asarray(ids)
    if array.ndim != 1:
        raise InputError(f"{argument}.shape", array.shape, "one dimension")
    if array.dtype == np.int32:
        return array
    if len(array) == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise InputError(f"{argument}.dtype", str(array.dtype), "integers, int32 at best")
    limits = np.iinfo(np.int32)
    for value in (int(array.min()), int(array.max())):
        if not limits.min <= value <= limits.max:
            raise InputError(argument, value, "values that fit int32")
    return array


def _refuse_range(bad: NDArray[np.bool_], table: Int32Array, num_blocks: int, block_size: int) -> NoReturn:
    pair, column = (int(position) for position in np.argwhere(bad)[0])
    block_ids = f"0 to num_blocks - 1 = {num_blocks - 1}"
    argument, allowed = (
        ("src", block_ids),
        ("dst", block_ids),
        ("num_rows", f"1 to block_size = {block_size}"),
    )[column]
    raise InputError(f"{argument}[{pair}]", int(table[pair, column]), allowed)


def _check_disjoint(table: Int32Array) -> None:
    sources, targets = table[:, 0].tolist(), table[:, 1].tolist()
    distinct = set(targets)
    if len(distinct) != len(targets):
        seen: set[int] = set()
        for pair, target in enumerate(targets):
            if target in seen:
                raise InputError(f"dst[{pair}]", target, "each target once")
            seen.add(target)
    if not distinct.isdisjoint(sources):
        pair = next(index for index, source in enumerate(sources) if source in distinct)
        raise InputError(f"src[{pair}]", sources[pair], "no source that is also a target")
