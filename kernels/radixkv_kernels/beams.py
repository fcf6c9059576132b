"""Beams: the state of a batch of beams on the device. ``reorder`` advances it by one step without the host.

    tables    int32 [num_beams, max_columns]   block ids; column c holds rows [c × block_size, (c + 1) × block_size)
    lengths   int32 [num_beams]                rows of a beam, including its prefix
    refs      int32 [num_blocks]               beams that hold a block, in columns after the prefix
    free      int32 [num_blocks]               a stack of block ids: free[:num_free]
    history   int32 [max_steps, 2, num_beams]  for each step the parents, and the ids of the appended tokens
    counters  int32 [7]                        num_free, status, values between launches, steps, copies, limit

A beam belongs to a group (one request). The beams of a group begin with the same ``num_prefix_blocks`` blocks. These
have another owner, so they are never counted, moved, written or freed. Blocks after the prefix that another owner
holds too (``held``) count one more holder, so they are never written or freed either. All other blocks are *lent*.
Until the host takes the state back, each is free, or held by as many beams as ``refs`` says. ``read`` copies the
state to the host, and ``check`` verifies this invariant.

With ``max_steps`` the state records the parents and token ids of each step. The host can later find the token ids of
a beam's rows: ``lineage``.

A step that can't be done sets a bit of ``status`` and changes nothing else. The same holds for all steps after it,
until ``clear_status``. No state is lost, so the host may read the status at any time:

    OUT_OF_BLOCKS   more blocks needed than free ones; blocks that the step itself frees don't count yet
    TABLE_FULL      a beam's next row has no column
    BAD_PARENT      not the index of a beam, or a beam of another group
    BAD_TOKEN       an invalid token id: below 0, or 2³² and above
    HISTORY_FULL    more steps than ``max_steps``
    CLOSED          the host has taken the state back for good: ``close``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv_kernels.checks import Ids, InputError, block_list, check_distinct, int32_list
from radixkv_kernels.launch import upload

OUT_OF_BLOCKS = 1 << 0
"""A step needs more blocks than are free."""
TABLE_FULL = 1 << 1
"""The next row of a beam has no column."""
BAD_PARENT = 1 << 2
"""A parent is no beam, or a beam of another group."""
BAD_TOKEN = 1 << 3
"""A token id is below 0, or 2³² or above."""
HISTORY_FULL = 1 << 4
"""More steps than ``max_steps``."""
CLOSED = 1 << 5
"""The host has closed these beams."""
NUM_FREE, STATUS, NUM_COPIES, LEFT, NUM_STEPS, NUM_COPIED, MAX_STEPS = range(7)
"""Indices of ``counters``. LEFT: free blocks after a step has taken its blocks. NUM_COPIED: copies of all steps."""
MAX_NUM_BEAMS = 1024
MAX_TOKEN_ID = 2**32 - 1


class BooksOnHost(NamedTuple):
    """A copy of the state: block ids and rows of each beam, the free ids in order, status, steps and copies."""

    tables: list[list[int]]
    lengths: list[int]
    free: list[int]
    status: int
    num_steps: int
    num_copied: int


class Lineage(NamedTuple):
    """The original index of each beam, and the ids that it appended since: uint32 ``[num_beams, steps]``."""

    origins: list[int]
    token_ids: NDArray[np.uint32]


class Beams:
    """``len(tables)`` beams on ``device``, in a pool of ``num_blocks`` blocks of ``block_size`` rows.

    - tables: block ids of each beam, ``ceil(length / block_size)`` of them. lengths: rows of each beam.
    - num_prefix_blocks: the number of whole blocks at the start of each table that are the group's shared prefix.
    - free: ids of free blocks, which are lent too. held: ids of the tables that another owner holds too.
    - groups: a number for each beam, one group by default. max_columns: maximum of blocks of a beam.
    - max_steps: the number of steps that are recorded. With 0 none are, and their number is unlimited.

    Raises InputError, which names the invalid argument. Memory: tensors of the sizes above, and three of the size of
    ``tables`` as workspace of a step.
    """

    def __init__(
        self,
        tables: Sequence[Ids],
        lengths: Ids,
        num_prefix_blocks: Ids,
        free: Ids,
        *,
        num_blocks: int,
        block_size: int,
        max_columns: int,
        groups: Ids | None = None,
        held: Ids = (),
        max_steps: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, count, least in (
            ("num_blocks", num_blocks, 1),
            ("block_size", block_size, 1),
            ("max_columns", max_columns, 0),
            ("max_steps", max_steps, 0),
        ):
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise InputError(name, count, f"an integer ≥ {least}")
        num_beams = len(tables)
        lengths = int32_list("lengths", lengths)
        num_prefix_blocks = int32_list("num_prefix_blocks", num_prefix_blocks)
        groups = [0] * num_beams if groups is None else int32_list("groups", groups)
        if not 1 <= num_beams <= MAX_NUM_BEAMS:
            raise InputError("len(tables)", num_beams, f"1 to {MAX_NUM_BEAMS}")
        for name, column in (
            ("lengths", lengths),
            ("num_prefix_blocks", num_prefix_blocks),
            ("groups", groups),
        ):
            if len(column) != num_beams:
                raise InputError(f"len({name})", len(column), f"one for each beam: {num_beams}")
        rows = [block_list(f"tables[{beam}]", table, num_blocks) for beam, table in enumerate(tables)]
        free_ids = block_list("free", free, num_blocks)
        self.held = frozenset(block_list("held", held, num_blocks))
        counts = _held(rows, num_prefix_blocks)
        _check_tables(rows, lengths, num_prefix_blocks, block_size, max_columns)
        _check_groups(rows, num_prefix_blocks, groups, self.held)
        _check_free(free_ids, rows)
        self.num_beams, self.max_columns, self.block_size = num_beams, max_columns, block_size
        self.max_steps = max_steps
        self.num_lent = len(free_ids) + len(counts.keys() - self.held)

        def on_device(values: Sequence[object] | NDArray[np.int32]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.tables = on_device([row + [-1] * (max_columns - len(row)) for row in rows])
        self.lengths, self.groups = on_device(lengths), on_device(groups)
        self.num_prefix_blocks = on_device(num_prefix_blocks)
        refs = np.zeros(num_blocks, np.int32)
        refs[list(counts)] = list(counts.values())
        refs[list(self.held)] += 1
        self.refs = on_device(refs)
        self.free = on_device(free_ids + [-1] * (num_blocks - len(free_ids)))
        self.history = torch.zeros((max_steps, 2, num_beams), dtype=torch.int32, device=device)
        self.counters = on_device([len(free_ids), 0, 0, 0, 0, 0, max_steps])
        self.taken = on_device([-1] * num_beams)
        self.copies = on_device([[0, 0, 0]] * num_beams)
        width = tile_columns(num_beams)
        num_tiles = -(-max_columns // width)
        tile = width << (num_beams - 1).bit_length()
        self.cells = torch.empty(num_tiles * 2 * tile, dtype=torch.int32, device=device)
        self.dead = torch.empty(num_tiles * width * num_beams, dtype=torch.int32, device=device)
        self.num_dead = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        self.launchers: dict[object, Any] = {}  # the kernels for this state, see ``reorder_triton``

    @property
    def device(self) -> torch.device:
        """The device of the state."""
        return self.tables.device

    def read(self) -> BooksOnHost:
        """Copy the state to the host. Waits for the device, so don't use it in a step."""
        counters, lengths = self.counters.tolist(), self.lengths.tolist()
        tables = [
            table[: -(-length // self.block_size)]
            for table, length in zip(self.tables.tolist(), lengths, strict=True)
        ]
        free = self.free[: counters[NUM_FREE]].tolist()
        return BooksOnHost(tables, lengths, free, counters[STATUS], counters[NUM_STEPS], counters[NUM_COPIED])

    def lineage(self) -> Lineage:
        """Where the beams come from, if steps are recorded. Waits for the device. O(beams × steps)."""
        num_steps = min(int(self.counters[NUM_STEPS]), self.max_steps)
        history = self.history[:num_steps].cpu().numpy()
        origins = np.arange(self.num_beams)
        token_ids = np.empty((self.num_beams, num_steps), np.uint32)
        for step in range(num_steps - 1, -1, -1):
            parents, ids = history[step]
            token_ids[:, step] = ids.view(np.uint32)[origins]
            origins = parents[origins]
        return Lineage(origins.tolist(), token_ids)

    def clear_status(self) -> None:
        """Allow steps again after a step that couldn't be done, unless the beams are closed. Enqueues the change."""
        self.counters[STATUS] &= CLOSED

    def close(self) -> None:
        """Disable all further steps, including those of CUDA graphs that were captured before. Enqueues the change."""
        self.counters[STATUS].fill_(CLOSED)

    def lend(self, block_ids: Ids) -> None:
        """Add free blocks for later steps. None may be in the state already. Enqueues the change. Raises InputError."""
        new = block_list("block_ids", block_ids, len(self.refs))
        check_distinct("block_ids", new, "each block once")
        places = self.counters[NUM_FREE] + torch.arange(len(new), device=self.device)
        self.free.index_copy_(0, places, upload([new], self.device)[:, 0])
        self.counters[NUM_FREE] += len(new)
        self.num_lent += len(new)

    def check(self) -> None:
        """Raise AssertionError unless each lent block is free once, or held by as many beams as counted."""
        books = self.read()
        counts = _held(books.tables, self.num_prefix_blocks.tolist())
        assert len(set(books.free)) == len(books.free), f"free twice: {books.free}"
        assert not set(books.free) & set(counts), f"free and held: {set(books.free) & set(counts)}"
        assert len(books.free) + len(counts.keys() - self.held) == self.num_lent, (books, self.num_lent)
        counts.update(self.held)
        wrong = {
            block_id: (count, counts[block_id])
            for block_id, count in enumerate(self.refs.tolist())
            if count != counts[block_id]
        }
        assert not wrong, f"(counted, held) of blocks: {wrong}"


def tile_columns(num_beams: int) -> int:
    """Columns that one program of ``reorder`` moves, a power of two. Freed blocks are ordered by program first."""
    return max(2, min(32, 256 // (1 << (num_beams - 1).bit_length())))


def _held(tables: Sequence[Sequence[int]], num_prefix_blocks: Sequence[int]) -> Counter[int]:
    return Counter(
        block_id
        for table, skipped in zip(tables, num_prefix_blocks, strict=True)
        for block_id in table[skipped:]
    )


def _check_tables(
    tables: list[list[int]],
    lengths: Sequence[int],
    num_prefix_blocks: Sequence[int],
    block_size: int,
    columns: int,
) -> None:
    for beam, (table, length, shared) in enumerate(zip(tables, lengths, num_prefix_blocks, strict=True)):
        if len(table) != -(-length // block_size) or len(table) > columns:
            allowed = f"ceil({length} / {block_size}) blocks, at most {columns}"
            raise InputError(f"len(tables[{beam}])", len(table), allowed)
        if not 0 <= shared * block_size <= length:
            raise InputError(f"num_prefix_blocks[{beam}]", shared, f"whole blocks within {length} rows")
        check_distinct(f"tables[{beam}]", table, "each block once")


def _check_groups(
    tables: list[list[int]], num_prefix_blocks: Sequence[int], groups: Sequence[int], held: frozenset[int]
) -> None:
    prefixes: dict[int, list[int]] = {}
    columns: dict[int, tuple[int | None, int]] = {}
    shared = {
        block_id for table, count in zip(tables, num_prefix_blocks, strict=True) for block_id in table[:count]
    } - held
    for beam, (table, count, group) in enumerate(zip(tables, num_prefix_blocks, groups, strict=True)):
        if prefixes.setdefault(group, table[:count]) != table[:count]:
            raise InputError(
                f"tables[{beam}]", table[:count], f"the prefix of group {group}: {prefixes[group]}"
            )
        for column, block_id in enumerate(table[count:], start=count):
            place = (None if block_id in held else group, column)
            if block_id in shared or columns.setdefault(block_id, place) != place:
                raise InputError(f"tables[{beam}][{column}]", block_id, "a block of one group and one column")


def _check_free(free: list[int], tables: list[list[int]]) -> None:
    check_distinct("free", free, "each block once")
    in_use = {block_id for table in tables for block_id in table}
    for index, block_id in enumerate(free):
        if block_id in in_use:
            raise InputError(f"free[{index}]", block_id, "no block of a table")
