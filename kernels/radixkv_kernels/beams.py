"""Beams: the books of a batch of beams on the device, which ``reorder`` moves one step on without the host.

    tables    int32 [num_beams, max_columns]   block ids; column c holds rows [c × block_size, (c + 1) × block_size)
    lengths   int32 [num_beams]                rows that a beam has, its prefix included
    refs      int32 [num_blocks]               beams that hold a block, in columns from the prefix on
    free      int32 [max_free]                 a stack of block ids: free[:num_free]
    counters  int32 [4]                        num_free, status, and what one launch tells the next

A beam belongs to a group (one request); the beams of a group begin with the same ``num_prefix_blocks`` blocks,
which somebody else owns: they are never counted, moved, written or freed. All other blocks are *lent*: until the
host takes the books back, each is free, or held by as many beams as ``refs`` says. ``read`` brings the books to
the host, ``check`` proves this law.

A step that can't be made sets a bit of ``status`` and changes nothing else; so do all steps after it, until
``clear_status``. The host may look whenever it likes, since nothing is lost in the meantime:

    OUT_OF_BLOCKS   more blocks needed than free ones; blocks that the step itself frees don't count yet
    TABLE_FULL      a beam's next row has no column
    BAD_PARENT      a parent that is no beam, or one of another group
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from radixkv_kernels.checks import Ids, InputError, block_list, check_distinct

OUT_OF_BLOCKS, TABLE_FULL, BAD_PARENT = 1, 2, 4
NUM_FREE, STATUS, NUM_COPIES, LEFT = range(4)
"""Places in ``counters``; LEFT is what is free once a step has taken its blocks."""
MAX_NUM_BEAMS = 1024


class BooksOnHost(NamedTuple):
    """The books at one moment: each beam's block ids, its rows, the free ids in order, and the status."""

    tables: list[list[int]]
    lengths: list[int]
    free: list[int]
    status: int


class Beams:
    """``len(tables)`` beams on ``device``, of a pool of ``num_blocks`` blocks of ``block_size`` rows.

    tables: block ids of each beam, ``ceil(length / block_size)`` of them. lengths: rows of each beam.
    num_prefix_blocks: how many blocks at the front of each table are the group's shared prefix; whole ones.
    free: ids lent besides. groups: a number for each beam, one group if left out. max_columns: most blocks of
    a beam. Raises InputError, naming what is wrong. Cost: tensors of the sizes above, and two of the size of
    ``tables`` for the step's own use.
    """

    def __init__(
        self,
        tables: Sequence[Ids],
        lengths: Sequence[int],
        num_prefix_blocks: Sequence[int],
        free: Ids,
        *,
        num_blocks: int,
        block_size: int,
        max_columns: int,
        groups: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        num_beams = len(tables)
        groups = [0] * num_beams if groups is None else list(groups)
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
        counts = _held(rows, num_prefix_blocks)
        _check_tables(rows, lengths, num_prefix_blocks, block_size, max_columns)
        _check_groups(rows, num_prefix_blocks, groups)
        _check_free(free_ids, rows)
        self.num_beams, self.max_columns, self.block_size = num_beams, max_columns, block_size
        self.num_lent = len(free_ids) + len(counts)

        def on_device(values: Sequence[object]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.tables = on_device([row + [-1] * (max_columns - len(row)) for row in rows])
        self.lengths, self.groups = on_device(lengths), on_device(groups)
        self.num_prefix_blocks = on_device(num_prefix_blocks)
        self.refs = on_device([counts[block_id] for block_id in range(num_blocks)])
        self.free = on_device(free_ids + [-1] * (self.num_lent - len(free_ids)) or [-1])
        self.counters = on_device([len(free_ids), 0, 0, 0])
        self.taken = on_device([-1] * num_beams)
        self.copies = on_device([[0, 0, 0]] * num_beams)
        width = tile_columns(num_beams)
        num_tiles = -(-max_columns // width)
        self.dead = torch.empty(num_tiles * width * num_beams, dtype=torch.int32, device=device)
        self.num_dead = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    @property
    def device(self) -> torch.device:
        """Where the books are."""
        return self.tables.device

    def read(self) -> BooksOnHost:
        """The books now. Waits for the device: not for use in a step."""
        counters, lengths = self.counters.tolist(), self.lengths.tolist()
        tables = [
            table[: -(-length // self.block_size)]
            for table, length in zip(self.tables.tolist(), lengths, strict=True)
        ]
        return BooksOnHost(tables, lengths, self.free[: counters[NUM_FREE]].tolist(), counters[STATUS])

    def clear_status(self) -> None:
        """Lets steps go on after one that couldn't be made; enqueued."""
        self.counters[STATUS].zero_()

    def check(self) -> None:
        """Raises AssertionError unless every lent block is free once, or held by as many beams as counted."""
        books = self.read()
        counts = _held(books.tables, self.num_prefix_blocks.tolist())
        assert len(set(books.free)) == len(books.free), f"free twice: {books.free}"
        assert not set(books.free) & set(counts), f"free and held: {set(books.free) & set(counts)}"
        assert len(books.free) + len(counts) == self.num_lent, (books, self.num_lent)
        refs = self.refs.tolist()
        wrong = {
            block_id: (count, counts[block_id])
            for block_id, count in enumerate(refs)
            if count != counts[block_id]
        }
        assert not wrong, f"(counted, held) of blocks: {wrong}"


def tile_columns(num_beams: int) -> int:
    """Columns that one program of ``reorder`` moves, a power of two: freed blocks are ordered by them first."""
    return max(1, min(32, 512 // (1 << (num_beams - 1).bit_length())))


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


def _check_groups(tables: list[list[int]], num_prefix_blocks: Sequence[int], groups: Sequence[int]) -> None:
    prefixes: dict[int, list[int]] = {}
    columns: dict[int, tuple[int, int]] = {}
    shared = {
        block_id for table, count in zip(tables, num_prefix_blocks, strict=True) for block_id in table[:count]
    }
    for beam, (table, count, group) in enumerate(zip(tables, num_prefix_blocks, groups, strict=True)):
        if prefixes.setdefault(group, table[:count]) != table[:count]:
            raise InputError(
                f"tables[{beam}]", table[:count], f"the prefix of group {group}: {prefixes[group]}"
            )
        for column, block_id in enumerate(table[count:], start=count):
            if block_id in shared or columns.setdefault(block_id, (group, column)) != (group, column):
                raise InputError(f"tables[{beam}][{column}]", block_id, "a block of one group and one column")


def _check_free(free: list[int], tables: list[list[int]]) -> None:
    check_distinct("free", free, "each block once")
    in_use = {block_id for table in tables for block_id in table}
    for index, block_id in enumerate(free):
        if block_id in in_use:
            raise InputError(f"free[{index}]", block_id, "no block of a table")
