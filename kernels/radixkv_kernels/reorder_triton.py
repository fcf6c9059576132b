"""The three Triton kernels of reorder. ``reorder`` describes the step, ``beams`` the state.

No launch changes data that a later program of the same launch still reads. plan is one program, which decides before
it writes. A program of permute owns its columns: it reads them all, waits for its own threads, then writes. finish
reads the results of plan and permute, and writes to other places. Reference counts need no atomics, because a block
is in one column only, and so in one program.

permute compares every beam with every other. It first writes each beam's current and next blocks to ``cells``. So a
comparison is two loads from the cache, without arithmetic on lengths and prefixes.

Importing this module imports triton, which fixes whether this process interprets or compiles kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from radixkv_kernels import beams as books
from radixkv_kernels import launch
from radixkv_kernels.beams import Beams, tile_columns
from radixkv_kernels.copy_triton import Planes, copy_chunk, copy_shape, planes_of
from radixkv_kernels.pool import Pool

NUM_FREE, STATUS = tl.constexpr(books.NUM_FREE), tl.constexpr(books.STATUS)
NUM_COPIES, LEFT = tl.constexpr(books.NUM_COPIES), tl.constexpr(books.LEFT)
OUT_OF_BLOCKS, TABLE_FULL = tl.constexpr(books.OUT_OF_BLOCKS), tl.constexpr(books.TABLE_FULL)
BAD_PARENT, BAD_TOKEN = tl.constexpr(books.BAD_PARENT), tl.constexpr(books.BAD_TOKEN)
HISTORY_FULL, MAX_TOKEN_ID = tl.constexpr(books.HISTORY_FULL), tl.constexpr(books.MAX_TOKEN_ID)
NUM_STEPS, NUM_COPIED = tl.constexpr(books.NUM_STEPS), tl.constexpr(books.NUM_COPIED)
MAX_STEPS = tl.constexpr(books.MAX_STEPS)
PROGRAMS_PER_SM = 8
INTERPRETED_PROGRAMS = 3
"""Few, so that the loop over copies runs more than once in tests."""


@triton.jit  # type: ignore[untyped-decorator]
def plan_kernel(
    parents: tl.tensor,  # all are pointers to int32, except token_ids: int32 or int64
    tables: tl.tensor,
    lengths: tl.tensor,
    token_ids: tl.tensor,
    groups: tl.tensor,
    refs: tl.tensor,
    free: tl.tensor,
    counters: tl.tensor,
    taken: tl.tensor,
    copies: tl.tensor,
    NUM_BEAMS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BEAMS: tl.constexpr,  # NUM_BEAMS rounded up to a power of two
    REMEMBERS: tl.constexpr,
) -> None:
    beam = tl.arange(0, BEAMS)
    is_beam = beam < NUM_BEAMS
    parent = tl.load(parents + beam, mask=is_beam, other=0)
    is_bad = is_beam & ((parent < 0) | (parent >= NUM_BEAMS))
    parent = tl.where(is_bad, 0, parent)
    group = tl.load(groups + beam, mask=is_beam, other=0)
    is_bad = is_bad | (is_beam & (tl.load(groups + parent, mask=is_beam, other=0) != group))
    length = tl.load(lengths + parent, mask=is_beam, other=0)
    is_partial = is_beam & (length % BLOCK_SIZE != 0)
    tail = tl.load(tables + parent * NUM_COLUMNS + length // BLOCK_SIZE, mask=is_partial, other=-1)
    num_holders, is_first = _holders(
        parents, tables, lengths, beam, tail, is_partial, NUM_BEAMS, NUM_COLUMNS, BLOCK_SIZE, BEAMS
    )
    keeps = is_first & (tl.load(refs + tail, mask=is_partial, other=0) == num_holders)
    needs = is_beam & ~keeps
    rank = tl.cumsum(needs.to(tl.int32), axis=0) - 1
    num_needed = tl.sum(needs.to(tl.int32), axis=0)
    num_free = tl.load(counters + NUM_FREE)
    any_bad = tl.max(is_bad.to(tl.int32), axis=0)
    any_full = tl.max((needs & (length // BLOCK_SIZE >= NUM_COLUMNS)).to(tl.int32), axis=0)
    status = any_full * TABLE_FULL + (num_needed > num_free).to(tl.int32) * OUT_OF_BLOCKS
    if REMEMBERS:
        token_id = tl.load(token_ids + beam, mask=is_beam, other=0).to(tl.int64)
        any_bad_id = tl.max(((token_id < 0) | (token_id > MAX_TOKEN_ID)).to(tl.int32), axis=0)
        is_forgotten = tl.load(counters + NUM_STEPS) >= tl.load(counters + MAX_STEPS)
        status += any_bad_id * BAD_TOKEN + is_forgotten.to(tl.int32) * HISTORY_FULL
    status = tl.where(any_bad > 0, BAD_PARENT, status)
    earlier = tl.load(counters + STATUS)
    if earlier == 0:
        if status != 0:
            tl.store(counters + STATUS, status)
        else:
            block = tl.load(free + num_free - 1 - rank, mask=needs, other=-1)
            tl.store(taken + beam, block, mask=is_beam)
            tl.store(refs + block, 1, mask=needs)
            is_copy = needs & is_partial
            at = copies + (tl.cumsum(is_copy.to(tl.int32), axis=0) - 1) * 3
            tl.store(at, tail, mask=is_copy)
            tl.store(at + 1, block, mask=is_copy)
            tl.store(at + 2, length % BLOCK_SIZE, mask=is_copy)
            tl.store(counters + NUM_COPIES, tl.sum(is_copy.to(tl.int32), axis=0))
            tl.store(counters + LEFT, num_free - num_needed)


@triton.jit  # type: ignore[untyped-decorator]
def _holders(
    parents: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    beam: tl.tensor,
    tail: tl.tensor,
    is_partial: tl.tensor,
    NUM_BEAMS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BEAMS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The number of beams that hold each beam's tail now, and whether no earlier beam continues that tail."""
    num_holders = tl.zeros((BEAMS,), tl.int32)
    is_first = is_partial
    for other in range(NUM_BEAMS):
        other_length = tl.load(lengths + other)
        is_other_partial = other_length % BLOCK_SIZE != 0
        other_tail = tl.load(
            tables + other * NUM_COLUMNS + other_length // BLOCK_SIZE, mask=is_other_partial, other=-2
        )
        num_holders += (other_tail == tail).to(tl.int32)
        other_parent = tl.load(parents + other)
        is_other_bad = (other_parent < 0) | (other_parent >= NUM_BEAMS)
        other_parent = tl.where(is_other_bad, 0, other_parent)
        next_length = tl.load(lengths + other_parent)
        next_tail = tl.load(
            tables + other_parent * NUM_COLUMNS + next_length // BLOCK_SIZE,
            mask=next_length % BLOCK_SIZE != 0,
            other=-2,
        )
        is_first = is_first & ~((next_tail == tail) & (other < beam))
    return num_holders, is_first


@triton.jit  # type: ignore[untyped-decorator]
def permute_kernel(
    parents: tl.tensor,  # all are pointers to int32
    tables: tl.tensor,
    lengths: tl.tensor,
    prefixes: tl.tensor,
    refs: tl.tensor,
    counters: tl.tensor,
    taken: tl.tensor,
    cells: tl.tensor,
    dead: tl.tensor,
    num_dead: tl.tensor,
    NUM_BEAMS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BEAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    if tl.load(counters + STATUS) != 0:
        return
    # A tile [BEAMS, COLUMNS] of the tables, flattened.
    cell = tl.arange(0, BEAMS * COLUMNS)
    beam = cell // COLUMNS
    column = tl.program_id(0) * COLUMNS + cell % COLUMNS
    is_cell = (beam < NUM_BEAMS) & (column < NUM_COLUMNS)
    is_cell = is_cell & (column >= tl.load(prefixes + beam, mask=is_cell, other=0))
    length = tl.load(lengths + beam, mask=is_cell, other=0)
    was = is_cell & (column * BLOCK_SIZE < length)
    old = tl.load(tables + beam * NUM_COLUMNS + column, mask=was, other=-1)
    parent = tl.load(parents + beam, mask=is_cell, other=0)
    length = tl.load(lengths + parent, mask=is_cell, other=0)
    was = is_cell & (column * BLOCK_SIZE < length)
    new = tl.load(tables + parent * NUM_COLUMNS + column, mask=was, other=-1)
    mine = tl.load(taken + beam, mask=is_cell, other=-1)
    new = tl.where(is_cell & (column == length // BLOCK_SIZE) & (mine >= 0), mine, new)
    new = tl.where(is_cell, new, -1)
    is_changed = tl.max((new != old).to(tl.int32), axis=0)
    if is_changed == 0:  # all beams share these columns, or none has them: only the count is written
        tl.store(num_dead + tl.program_id(0), 0)
        return
    now = cells + tl.program_id(0) * (2 * BEAMS * COLUMNS)
    then = now + BEAMS * COLUMNS
    tl.store(now + cell, old)
    tl.store(then + cell, new)
    tl.debug_barrier()  # all threads have read the tables, and can see each other's cells
    # How many beams hold the old block now and next. The first holder updates its reference count.
    change = tl.zeros((BEAMS * COLUMNS,), tl.int32)
    is_first = old >= 0
    for other in range(NUM_BEAMS):
        at = other * COLUMNS + cell % COLUMNS
        is_held = tl.load(now + at) == old
        change += (tl.load(then + at) == old).to(tl.int32) - is_held.to(tl.int32)
        is_first = is_first & ~(is_held & (other < beam))
    count = tl.load(refs + old, mask=is_first, other=0) + change
    is_dead = is_first & (count == 0)
    tl.store(refs + old, count, mask=is_first)
    tl.store(tables + beam * NUM_COLUMNS + column, new, mask=new >= 0)
    rank = tl.cumsum(is_dead.to(tl.int32), axis=0) - 1
    tl.store(dead + tl.program_id(0) * (NUM_BEAMS * COLUMNS) + rank, old, mask=is_dead)
    tl.store(num_dead + tl.program_id(0), tl.sum(is_dead.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["planes"])  # type: ignore[untyped-decorator]
def finish_kernel(
    parents: tl.tensor,  # pointers to int32, except planes and token_ids
    lengths: tl.tensor,
    token_ids: tl.tensor,
    history: tl.tensor,
    free: tl.tensor,
    counters: tl.tensor,
    copies: tl.tensor,
    dead: tl.tensor,
    num_dead: tl.tensor,
    planes: tl.tensor,  # see copy_kernel
    NUM_BEAMS: tl.constexpr,
    BEAMS: tl.constexpr,
    REMEMBERS: tl.constexpr,
    TILE: tl.constexpr,  # cells of a tile of permute, rounded up to a power of two
    TILE_CELLS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    READ_BLOCK: tl.constexpr,
    READ_ROW: tl.constexpr,
    READ_LANE: tl.constexpr,
    WRITE_BLOCK: tl.constexpr,
    WRITE_ROW: tl.constexpr,
    WRITE_LANE: tl.constexpr,
    RUN: tl.constexpr,
    NUM_LANES: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    READ_PLANE: tl.constexpr,
    WRITE_PLANE: tl.constexpr,
    READ_ALIGNMENT: tl.constexpr,
    WRITE_ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    if tl.load(counters + STATUS) == 0:
        program = tl.program_id(0)
        left = tl.load(counters + LEFT)
        if program < NUM_TILES:
            tile = tl.arange(0, TILES)
            counts = tl.load(num_dead + tile, mask=tile < NUM_TILES, other=0)
            before = tl.sum(tl.where(tile < program, counts, 0), axis=0)
            mine = tl.load(num_dead + program)
            cell = tl.arange(0, TILE)
            blocks = tl.load(dead + program * TILE_CELLS + cell, mask=cell < mine, other=0)
            tl.store(free + left + before + cell, blocks, mask=cell < mine)
            if program == 0:
                tl.store(counters + NUM_FREE, left + tl.sum(counts, axis=0))
                _advance(parents, lengths, token_ids, history, counters, NUM_BEAMS, BEAMS, REMEMBERS)
        num_chunks: tl.constexpr = (NUM_ROWS * RUN + CHUNK - 1) // CHUNK
        num_items = tl.load(counters + NUM_COPIES) * (NUM_PLANES * NUM_LANES * num_chunks)
        for item in range(program, num_items, NUM_PROGRAMS):
            chunk = item % num_chunks
            lane = (item // num_chunks) % NUM_LANES
            plane = (item // (num_chunks * NUM_LANES)) % NUM_PLANES
            pair = item // (num_chunks * NUM_LANES * NUM_PLANES)
            source = tl.load(copies + pair * 3)
            target = tl.load(copies + pair * 3 + 1)
            num_rows = tl.load(copies + pair * 3 + 2)
            copy_chunk(
                planes, planes, source, target, num_rows, plane, lane, chunk,
                READ, WRITE, READ_BLOCK, READ_ROW, READ_LANE, WRITE_BLOCK, WRITE_ROW, WRITE_LANE,
                RUN, READ_PLANE, WRITE_PLANE, READ_ALIGNMENT, WRITE_ALIGNMENT, CHUNK,
            )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _advance(
    parents: tl.tensor,
    lengths: tl.tensor,
    token_ids: tl.tensor,
    history: tl.tensor,
    counters: tl.tensor,
    NUM_BEAMS: tl.constexpr,
    BEAMS: tl.constexpr,
    REMEMBERS: tl.constexpr,
) -> None:
    """Set each length to the parent's + 1, and count and record the step. Runs in one program."""
    beam = tl.arange(0, BEAMS)
    is_beam = beam < NUM_BEAMS
    parent = tl.load(parents + beam, mask=is_beam, other=0)
    length = tl.load(lengths + parent, mask=is_beam, other=0)
    num_steps = tl.load(counters + NUM_STEPS)
    num_copied = tl.load(counters + NUM_COPIED) + tl.load(counters + NUM_COPIES)
    tl.debug_barrier()  # all threads have read; writes start here
    tl.store(lengths + beam, length + 1, mask=is_beam)
    tl.store(counters + NUM_STEPS, num_steps + 1)
    tl.store(counters + NUM_COPIED, num_copied)
    if REMEMBERS:
        token_id = tl.load(token_ids + beam, mask=is_beam, other=0)
        at = history + num_steps * (2 * NUM_BEAMS) + beam
        tl.store(at, parent, mask=is_beam)
        tl.store(at + NUM_BEAMS, token_id.to(tl.int32), mask=is_beam)


def plan_constants(beams: Beams) -> dict[str, Any]:
    """Compile-time constants of ``plan_kernel``."""
    return {
        "NUM_BEAMS": beams.num_beams,
        "NUM_COLUMNS": beams.max_columns,
        "BLOCK_SIZE": beams.block_size,
        "BEAMS": triton.next_power_of_2(beams.num_beams),
        "REMEMBERS": beams.max_steps > 0,
    }


def permute_constants(beams: Beams) -> dict[str, Any]:
    """Compile-time constants of ``permute_kernel``."""
    return {
        "NUM_BEAMS": beams.num_beams,
        "NUM_COLUMNS": beams.max_columns,
        "BLOCK_SIZE": beams.block_size,
        "BEAMS": triton.next_power_of_2(beams.num_beams),
        "COLUMNS": tile_columns(beams.num_beams),
    }


def permute_warps(beams: Beams) -> int:
    """Warps for one cell of the tile per thread, at most 8."""
    return max(1, min(8, (tile_columns(beams.num_beams) << (beams.num_beams - 1).bit_length()) // 32))


def finish_constants(beams: Beams, pool: Pool, num_programs: int) -> dict[str, Any]:
    """Compile-time constants of ``finish_kernel``."""
    cells = beams.num_beams * tile_columns(beams.num_beams)
    num_tiles = _num_tiles(beams)
    return {
        "NUM_BEAMS": beams.num_beams,
        "BEAMS": triton.next_power_of_2(beams.num_beams),
        "REMEMBERS": beams.max_steps > 0,
        "TILE": triton.next_power_of_2(cells),
        "TILE_CELLS": cells,
        "NUM_TILES": num_tiles,
        "TILES": triton.next_power_of_2(num_tiles),
        "NUM_PROGRAMS": num_programs,
        "NUM_ROWS": beams.block_size,
        **copy_shape(pool, pool)._asdict(),
    }


class Launchers(NamedTuple):
    """The three kernels of a step, with their grids."""

    plan: launch.Launcher
    permute: launch.Launcher
    finish: launch.Launcher
    num_tiles: int
    num_programs: int
    planes: Planes


def reorder(pool: Pool, beams: Beams, parents: torch.Tensor, token_ids: torch.Tensor | None) -> None:
    """Enqueue one step: three launches, whose grids depend only on shapes."""
    token_ids = parents if token_ids is None else token_ids  # not read in this case
    common = (parents, beams.tables, beams.lengths)
    with launch.on_device(pool.device):
        is_aligned = tuple(given.data_ptr() % launch.WIDEST == 0 for given in (parents, token_ids))
        key = (pool.addresses, token_ids.dtype, is_aligned)
        ready = beams.launchers.get(key)
        if ready is None:
            ready = beams.launchers[key] = launchers(pool, beams)
        ready.plan(
            (1, 1, 1), *common, token_ids, beams.groups, beams.refs, beams.free, beams.counters, beams.taken,
            beams.copies,
        )  # fmt: skip
        ready.permute(
            (ready.num_tiles, 1, 1), *common, beams.num_prefix_blocks, beams.refs, beams.counters, beams.taken,
            beams.cells, beams.dead, beams.num_dead,
        )  # fmt: skip
        ready.finish(
            (ready.num_programs, 1, 1), parents, beams.lengths, token_ids, beams.history, beams.free, beams.counters,
            beams.copies, beams.dead, beams.num_dead, ready.planes,
        )  # fmt: skip


def launchers(pool: Pool, beams: Beams) -> Launchers:
    """The kernels of a step. They are compiled at the first step."""
    num_tiles = _num_tiles(beams)
    num_programs = max(num_tiles, _num_copying_programs(pool))
    return Launchers(
        launch.Launcher(plan_kernel, plan_constants(beams), num_warps=1 if beams.num_beams <= 32 else 4),
        launch.Launcher(permute_kernel, permute_constants(beams), num_warps=permute_warps(beams)),
        launch.Launcher(finish_kernel, finish_constants(beams, pool, num_programs), num_warps=4),
        num_tiles,
        num_programs,
        planes_of(pool.geometry, pool.addresses, pool.device),
    )


def _num_tiles(beams: Beams) -> int:
    return -(-beams.max_columns // tile_columns(beams.num_beams))


def _num_copying_programs(pool: Pool) -> int:
    if pool.device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_SM * int(torch.cuda.get_device_properties(pool.device).multi_processor_count)
