"""StepPlan: what the index decided and storage has to execute, in order.

The index hands out block ids and never touches bytes; storage moves bytes and never decides. Between them
stands this plan. Its copies come from copy-on-write: the first write into a shared tail block copies that
block's valid rows into a fresh one.

    sources[i] ──num_rows[i] rows──▶ targets[i]        for every layer, keys and values

Invariants: every target is a fresh block that appears once; no source is a target of the same plan. So the
copies of a plan don't depend on each other and go in one launch. Plans are executed in the order in which
the index made them, each before the engine writes into any of its blocks.

A plan that waits for its engine keeps these invariants over several steps: a copy of a copy reads the first
source, one whose target is given up is not made, and a source is not handed out again before the plan is
fetched (``blocks.WaitingCopies``, ``blocks.BlockPool``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

BlockIds: TypeAlias = NDArray[np.int32]


class BeamsState(NamedTuple):
    """How far lent beams are, and what keeps their steps from being made, if something does.

    ``out_of_blocks``: a step needed more free blocks than there were (``lend_more``); ``table_full``: there is no
    column for a further one, or no memory of it; ``bad_parent``: a parent that is no beam of the group; ``bad_token``:
    an id that is none.
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

    ``sources`` and ``targets`` are block ids; ``num_rows`` says how many leading tokens of the source
    block are valid, ``1 ≤ num_rows < block_size``.
    """

    __slots__ = ("num_rows", "sources", "targets")

    def __init__(self, sources: Int32Array, targets: Int32Array, num_rows: Int32Array) -> None:
        if not len(sources) == len(targets) == len(num_rows):
            raise ValueError(f"lengths differ: {len(sources)}, {len(targets)}, {len(num_rows)}")
        self.sources, self.targets, self.num_rows = sources, targets, num_rows

    @classmethod
    def of(cls, copies: list[tuple[int, int, int]]) -> StepPlan:
        """A plan of ``(source, target, num_rows)`` triples. O(copies)."""
        table = np.array(copies, dtype=np.int32).reshape(len(copies), 3)
        return cls(*(np.ascontiguousarray(table[:, column]) for column in range(3)))

    @property
    def num_copies(self) -> int:
        """How many blocks the plan copies."""
        return len(self.sources)

    def __bool__(self) -> bool:
        return len(self.sources) > 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return iter(zip(self.sources.tolist(), self.targets.tolist(), self.num_rows.tolist(), strict=True))

    def __repr__(self) -> str:
        return f"StepPlan({list(self)})"
