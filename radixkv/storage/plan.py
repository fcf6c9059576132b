"""StepPlan: copies that the index decided and that storage must execute, in order.

The index hands out block ids and never touches bytes. Storage moves bytes and never decides. A plan connects the two.
Its copies come from copy-on-write: the first write into a shared tail block copies that block's valid rows into a fresh
block.

    sources[i] ──num_rows[i] rows──▶ targets[i]        for every layer, keys and values

Invariants: every target is a fresh block that appears once. No source is a target of the same plan. So the copies of a
plan don't depend on each other and go in one launch. Plans are executed in the order in which the index made them, each
before the engine writes into any of its blocks.

A plan that waits for its engine keeps these invariants over several steps. A copy of a copy reads the first source. If
the target of a copy is given up, the copy is not made. A source is not handed out again before the plan is fetched
(``blocks.WaitingCopies``, ``blocks.BlockPool``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

BlockIds: TypeAlias = NDArray[np.int32]


class BeamsState(NamedTuple):
    """How far lent beams are, and what prevents further steps, if anything does.

    - ``out_of_blocks``: a step needed more free blocks than there were (``lend_more``).
    - ``table_full``: a step needed one more column of the table or more memory for steps.
    - ``bad_parent``: a parent is no beam of the group.
    - ``bad_token``: a token id is invalid.
    """

    num_steps: int
    num_free_blocks: int
    out_of_blocks: bool
    table_full: bool
    bad_parent: bool
    bad_token: bool


Int32Array: TypeAlias = NDArray[np.int32]


class StepPlan:
    """The copies of one step: three int32 arrays of equal length ``[num_copies]``.

    ``for source, target, num_rows in plan`` gives each copy as integers.

    ``sources`` and ``targets`` are block ids. ``num_rows`` is the number of valid leading tokens of the source block,
    ``1 ≤ num_rows < block_size``.
    """

    __slots__ = ("num_rows", "sources", "targets")

    def __init__(self, sources: Int32Array, targets: Int32Array, num_rows: Int32Array) -> None:
        if not len(sources) == len(targets) == len(num_rows):
            raise ValueError(f"lengths differ: {len(sources)}, {len(targets)}, {len(num_rows)}")
        self.sources, self.targets, self.num_rows = sources, targets, num_rows

    @classmethod
    def of(cls, copies: list[tuple[int, int, int]]) -> StepPlan:
        """Make a plan of ``(source, target, num_rows)`` triples. O(copies)."""
        table = np.array(copies, dtype=np.int32).reshape(len(copies), 3)
        return cls(*(np.ascontiguousarray(table[:, column]) for column in range(3)))

    @property
    def num_copies(self) -> int:
        """The number of blocks that the plan copies."""
        return len(self.sources)

    def __bool__(self) -> bool:
        return len(self.sources) > 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return iter(zip(self.sources.tolist(), self.targets.tolist(), self.num_rows.tolist(), strict=True))

    def __repr__(self) -> str:
        return f"StepPlan({list(self)})"
