"""DeviceBeams: the books of lent beams, on the device of a storage (``radixkv.index.device_beams`` is the host's side).

Storage moves and counts on the device what the index has lent to it, and tells the index what became of it when it is
asked. Nothing here waits for the device but ``state`` and ``read``.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.storage.beams", "storage")

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.errors import ArgumentError, KernelError
from radixkv.storage.plan import BeamsState
from radixkv_kernels import (
    BAD_PARENT,
    BAD_TOKEN,
    HISTORY_FULL,
    OUT_OF_BLOCKS,
    TABLE_FULL,
    Beams,
    InputError,
    Pool,
    reorder,
)


class BeamsReading(NamedTuple):
    """What became of the beams: the books, and of each beam the one it was at first and the ids that it appended.

    ``tables``: int32 ``[num_beams, columns]``, anything behind a beam's rows; ``lengths``: its rows; ``free``: int32
    ids that no beam holds; ``token_ids``: uint32 ``[num_beams, num_steps]``.
    """

    tables: NDArray[np.int32]
    lengths: list[int]
    free: NDArray[np.int32]
    num_steps: int
    num_copied: int
    origins: list[int]
    token_ids: NDArray[np.uint32]


class DeviceBeams:
    """Beams over the blocks of ``pool``; arguments as of ``radixkv_kernels.Beams``."""

    def __init__(
        self,
        pool: Pool,
        tables: Sequence[NDArray[np.int32]],
        lengths: list[int],
        num_prefix_blocks: list[int],
        free: NDArray[np.int32],
        *,
        held: NDArray[np.int32],
        groups: list[int],
        max_columns: int,
        max_steps: int,
    ) -> None:
        self._pool, self.block_size = pool, pool.geometry.block_size
        with torch.inference_mode(False):  # even if lent inside somebody's, steps go on outside it too
            self.books = Beams(
                tables,
                lengths,
                num_prefix_blocks,
                free,
                num_blocks=pool.geometry.num_blocks,
                block_size=self.block_size,
                max_columns=max_columns,
                groups=groups,
                held=held,
                max_steps=max_steps,
                device=pool.device,
            )

    def step(self, parents: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Enqueues one step. Raises ArgumentError for tensors of another form, KernelError if the launch failed."""
        try:
            with self._working():
                reorder(self._pool, self.books, parents, token_ids)
        except InputError as error:
            raise ArgumentError(error.argument, error.value, error.allowed) from None

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each beam's newest row goes: block ids and rows in them, int64 ``[num_beams]``; enqueued."""
        last = (self.books.lengths - 1).long()
        blocks = self.books.tables.gather(1, (last // self.block_size)[:, None])[:, 0]
        return blocks.long(), last % self.block_size

    def lend(self, block_ids: NDArray[np.int32]) -> None:
        """More free blocks, and steps go on; enqueued."""
        self.books.lend(block_ids)
        self.books.clear_status()

    def clear(self) -> None:
        """Steps go on after one that couldn't be made; enqueued."""
        self.books.clear_status()

    def close(self) -> None:
        """No step is made any more; enqueued."""
        self.books.close()

    def state(self) -> BeamsState:
        """How far the beams are, and what stopped them. Waits for the device. Raises KernelError if that failed."""
        with self._working():
            num_free, status, _, _, num_steps, *_ = self.books.counters.tolist()
        return BeamsState(
            num_steps,
            num_free,
            bool(status & OUT_OF_BLOCKS),
            bool(status & (TABLE_FULL | HISTORY_FULL)),
            bool(status & BAD_PARENT),
            bool(status & BAD_TOKEN),
        )

    def read(self) -> BeamsReading:
        """All of the books. Waits for the device. Raises KernelError if that failed."""
        with self._working():
            num_free, _, _, _, num_steps, num_copied, _ = self.books.counters.tolist()
            tables, free = self.books.tables.cpu().numpy(), self.books.free[:num_free].cpu().numpy()
            return BeamsReading(
                tables, self.books.lengths.tolist(), free, num_steps, num_copied, *self.books.lineage()
            )

    @contextmanager
    def _working(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise KernelError(f"beams on {self._pool.device}: {error}") from error
