"""The reference: every kernel in plain torch. It defines the correct result and is simple rather than fast.

Arguments are not checked here, because callers have checked them. Each function works on any torch device, pool and
dtype.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from radixkv_kernels.beams import (
    BAD_PARENT,
    BAD_TOKEN,
    HISTORY_FULL,
    MAX_TOKEN_ID,
    NUM_COPIED,
    NUM_FREE,
    NUM_STEPS,
    OUT_OF_BLOCKS,
    STATUS,
    TABLE_FULL,
    Beams,
    BooksOnHost,
    tile_columns,
)
from radixkv_kernels.pool import PoolLike, as_pool
from radixkv_kernels.quantized import Quantized

LARGEST_E4M3 = 448.0
LEAST_LARGEST = 1e-30
"""A head whose values are all smaller is quantised to zeros."""


def fork_blocks(pool: PoolLike, src: Sequence[int], dst: Sequence[int], num_rows: Sequence[int]) -> None:
    """Copy the first ``num_rows[i]`` rows of block ``src[i]`` to block ``dst[i]``, in every plane.

    One ``copy_`` a pair in block-major storage, otherwise one a pair and plane.
    """
    for view in as_pool(pool).views:
        for source, target, rows in zip(src, dst, num_rows, strict=True):
            view[target, :rows].copy_(view[source, :rows])


def gather(pool: PoolLike, block_ids: Sequence[int], staging: torch.Tensor) -> None:
    """Copy block ``block_ids[i]`` to ``staging[i]``, converted if dtypes differ: one ``copy_`` a block and view."""
    for view, staged in as_pool(pool).beside(staging):
        for index, block_id in enumerate(block_ids):
            staged[index].copy_(view[block_id])


def scatter(staging: torch.Tensor, pool: PoolLike, block_ids: Sequence[int]) -> None:
    """Copy ``staging[i]`` to block ``block_ids[i]``, converted if dtypes differ: one ``copy_`` a block and view."""
    for view, staged in as_pool(pool).beside(staging):
        for index, block_id in enumerate(block_ids):
            view[block_id].copy_(staged[index])


def scrub(pool: PoolLike, block_ids: Sequence[int]) -> None:
    """Zero whole blocks. Zeros are zero bytes in every dtype.

    Block-major storage on a CPU takes one assignment, as fast as a memset. Otherwise: one ``zero_`` a block and
    tensor.
    """
    pool = as_pool(pool)
    if pool.storage is not None and pool.storage.device.type == "cpu":
        _words(pool.storage).numpy()[list(block_ids)] = 0
        return
    for view in pool.views:
        for block_id in block_ids:
            view[block_id].zero_()


def _words(storage: torch.Tensor) -> torch.Tensor:
    """Block-major storage as integers ``[num_blocks, n]``, the widest that block size and offset allow."""
    data = storage.view(len(storage), -1).view(torch.uint8)
    grain = math.gcd(data.shape[1], data.storage_offset())
    widths = (torch.int64, torch.int32, torch.int16)
    return next((data.view(each) for each in widths if grain % each.itemsize == 0), data)


def quantize(form: Quantized, block_ids: Sequence[int], records: torch.Tensor) -> None:
    """Quantise block ``block_ids[i]`` to ``records[i]``, plane by plane, in float32."""
    codes = form.codes(records)
    for layer in range(form.pool.num_layers):
        for side in range(form.pool.planes_per_layer):
            values = form.pool.plane(layer, side)[list(block_ids)].float()
            parameters = form.parameters(records, layer, side)
            if form.scheme == "fp8":
                largest = values.abs().amax((1, 3)).clamp(min=LEAST_LARGEST)
                most = torch.full_like(
                    largest, LARGEST_E4M3
                )  # with a Python number as an operand, torch may round twice
                parameters[:, 0] = largest / most
                inverse = most / largest
                scaled = values * inverse[:, None, :, None]
                scaled = scaled.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
                codes[:, layer, side] = scaled.view(torch.uint8)
                continue
            axis = 1 if form.is_by_channel(side) else 3
            least, largest = values.amin(axis), values.amax(axis)
            parameters[:, 0] = _scale(largest - least, form.levels, form.parameter_dtype)
            parameters[:, 1] = least
            inverse = 1 / parameters[:, 0].float().unsqueeze(axis)
            steps = ((values - least.unsqueeze(axis)) * inverse).round().clamp(0, form.levels)
            codes[:, layer, side] = (
                _packed(steps.to(torch.uint8)) if form.scheme == "int4" else steps.to(torch.uint8)
            )


def dequantize(form: Quantized, block_ids: Sequence[int], records: torch.Tensor) -> None:
    """Restore block ``block_ids[i]`` from ``records[i]``, plane by plane, in float32, rounded to the pool's dtype."""
    codes = form.codes(records)
    for layer in range(form.pool.num_layers):
        for side in range(form.pool.planes_per_layer):
            parameters = form.parameters(records, layer, side).float()
            plane = codes[:, layer, side]
            if form.scheme == "fp8":
                values = (
                    plane.contiguous().view(torch.float8_e4m3fn).float() * parameters[:, 0, None, :, None]
                )
            else:
                steps = _unpacked(plane) if form.scheme == "int4" else plane
                axis = 1 if form.is_by_channel(side) else 3
                scale, least = parameters[:, 0].unsqueeze(axis), parameters[:, 1].unsqueeze(axis)
                values = steps.float() * scale + least
            form.pool.plane(layer, side)[list(block_ids)] = values.to(form.pool.dtype)


def _scale(width: torch.Tensor, levels: int, dtype: torch.dtype) -> torch.Tensor:
    """A step of ``dtype`` so large that ``levels`` steps cover ``width``, even after rounding down."""
    return (width * (1 / levels) * (1 + 2 * torch.finfo(dtype).eps) + smallest_step(dtype)).to(dtype)


def smallest_step(dtype: torch.dtype) -> float:
    """An addend to scales, so that no scale is zero, or too small after rounding."""
    return 2.0**-24 if dtype == torch.float16 else 2.0**-126


def _packed(steps: torch.Tensor) -> torch.Tensor:
    low, high = steps.chunk(2, dim=-1)
    return low | (high << 4)


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def reorder(
    pool: PoolLike, beams: Beams, parents: torch.Tensor, token_ids: torch.Tensor | None = None
) -> None:
    """Advance ``beams`` by one step, as ``reorder.reorder`` describes: the same ids, in the same order."""
    books = beams.read()
    if books.status:
        return
    step = _plan(books, beams, parents.tolist(), [] if token_ids is None else token_ids.tolist())
    if isinstance(step, int):
        beams.counters[STATUS] = step
        return
    tables, lengths, num_taken, copies = step
    skipped = beams.num_prefix_blocks.tolist()
    before, after = _holders(books.tables, skipped), _holders(tables, skipped)
    refs = beams.refs.tolist()
    for block_id in before | after:
        refs[block_id] += after[block_id] - before[block_id]
    beams.refs.copy_(torch.tensor(refs, dtype=torch.int32))
    dead: dict[int, None] = {}  # ordered by tiles of columns, then beams, then columns
    width = tile_columns(beams.num_beams)
    for start in range(0, beams.max_columns, width):
        for table, first in zip(books.tables, skipped, strict=True):
            for block_id in table[max(first, start) : start + width]:
                if refs[block_id] == 0:
                    dead[block_id] = None
    free = books.free[: len(books.free) - num_taken] + list(dead)
    beams.free[: len(free)] = torch.tensor(free, dtype=torch.int32)
    for beam, table in enumerate(tables):
        beams.tables[beam, : len(table)] = torch.tensor(table, dtype=torch.int32)
    beams.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
    beams.counters[NUM_FREE] = len(free)
    if token_ids is not None:
        beams.history[books.num_steps, 0] = parents
        beams.history[books.num_steps, 1] = token_ids.to(torch.int32)
    beams.counters[NUM_STEPS] += 1
    beams.counters[NUM_COPIED] += len(copies)
    if copies:
        fork_blocks(pool, *zip(*copies, strict=True))


Step = tuple[list[list[int]], list[int], int, list[tuple[int, int, int]]]


def _plan(books: BooksOnHost, beams: Beams, parents: list[int], token_ids: list[int]) -> Step | int:
    """New tables and lengths, the number of blocks taken, and copies; or the status bits of an impossible step."""
    groups, size = beams.groups.tolist(), beams.block_size
    is_bad = any(
        not 0 <= parent < beams.num_beams or groups[parent] != group
        for parent, group in zip(parents, groups, strict=True)
    )
    if is_bad:
        return BAD_PARENT
    refs = beams.refs.tolist()
    partial = Counter(
        table[-1] for table, rows in zip(books.tables, books.lengths, strict=True) if rows % size
    )
    tables = [list(books.tables[parent]) for parent in parents]
    lengths = [books.lengths[parent] for parent in parents]
    copies: list[tuple[int, int, int]] = []
    kept: set[int] = set()
    needs = []
    for beam, (table, rows) in enumerate(zip(tables, lengths, strict=True)):
        tail = table[-1] if rows % size else None
        if tail is not None and tail not in kept and refs[tail] == partial[tail]:
            kept.add(tail)
        else:
            needs.append((beam, tail))
    status = OUT_OF_BLOCKS * (len(needs) > len(books.free))
    status |= TABLE_FULL * any(lengths[beam] // size >= beams.max_columns for beam, _ in needs)
    status |= BAD_TOKEN * any(not 0 <= token_id <= MAX_TOKEN_ID for token_id in token_ids)
    status |= HISTORY_FULL * (0 < beams.max_steps <= books.num_steps)
    if status:
        return status
    for rank, (beam, tail) in enumerate(needs):
        block_id = books.free[len(books.free) - 1 - rank]
        if tail is None:
            tables[beam].append(block_id)
        else:
            tables[beam][-1] = block_id
            copies.append((tail, block_id, lengths[beam] % size))
    return tables, [rows + 1 for rows in lengths], len(needs), copies


def _holders(tables: Sequence[Sequence[int]], skipped: Sequence[int]) -> Counter[int]:
    return Counter(
        block_id for table, first in zip(tables, skipped, strict=True) for block_id in table[first:]
    )
