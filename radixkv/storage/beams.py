"""DeviceBeams: the state of lent beams on a storage's device. The host's side is ``radixkv.index.device_beams``.

Storage moves and counts on the device what the index has lent to it, and reports the result when the index asks. Only
``state`` and ``read`` wait for the device.
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
from radixkv.uncopied import refuse_copies
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
    """The state of the beams, with each beam's first ancestor and the ids that it appended.

    - ``tables``: int32 ``[num_beams, columns]``. Values behind a beam's rows are arbitrary.
    - ``lengths``: each beam's rows.
    - ``free``: int32 ids that no beam holds.
    - ``token_ids``: uint32 ``[num_beams, num_steps]``.
    """

    tables: NDArray[np.int32]
    lengths: list[int]
    free: NDArray[np.int32]
    num_steps: int
    num_copied: int
    origins: list[int]
    token_ids: NDArray[np.uint32]


class DeviceBeams:
    """Beams over the blocks of ``pool``. The arguments are those of ``radixkv_kernels.Beams``."""

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
        with torch.inference_mode(False):  # steps must also work outside the caller's inference_mode
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
        """Enqueue one step. Raises ArgumentError for tensors of another form, KernelError if the launch failed."""
        try:
            with self._working():
                reorder(self._pool, self.books, parents, token_ids)
        except InputError as error:
            raise ArgumentError(error.argument, error.value, error.allowed) from None

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the place of each beam's newest row: block ids and rows in them, int64 ``[num_beams]``. Enqueued."""
        last = (self.books.lengths - 1).long()
        blocks = self.books.tables.gather(1, (last // self.block_size)[:, None])[:, 0]
        return blocks.long(), last % self.block_size

    def lend(self, block_ids: NDArray[np.int32]) -> None:
        """Add free blocks and allow steps again. Enqueued."""
        self.books.lend(block_ids)
        self.books.clear_status()

    def clear(self) -> None:
        """Allow steps again after one that couldn't be made. Enqueued."""
        self.books.clear_status()

    def close(self) -> None:
        """End all steps. Enqueued."""
        self.books.close()

    def state(self) -> BeamsState:
        """Return how far the beams are, and what stopped them. Waits for the device. Raises KernelError if a launch
        failed.
        """
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
        """Return the whole state. Waits for the device. Raises KernelError if a launch failed."""
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


refuse_copies(DeviceBeams, "the device advances these beams. Pass it on")
