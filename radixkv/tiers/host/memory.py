"""A worker's half of host memory: the bytes of blocks in host memory, copied from and to the engine's KV caches.

    StepWork      what all workers do in one step, decided by the scheduler's half (``steps``)
    HostBlocks    does it, on this worker's shard of every block
    StepReport    what became of it; the reports of all workers are added up

A block's bytes of all layers are one row of host memory, its *slot*. A slot is *stamped* with the step that saved it,
after its last byte has come. A load names the stamp that it expects. So a load of a slot that was never saved, whose
save failed, or that holds something else by now fails, and is reported.

**On a GPU** copies pass through pinned memory, on the engine's own stream. So they are in order with everything that
computes, and no save reads a block that the next step overwrites. A save ends in the first later step that finds it
complete; it never waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.errors import ArgumentError, ConfigError
from radixkv.tiers.host.row_copies import put_rows, rows_of, zero_rows
from radixkv.uncopied import refuse_copies

Slots: TypeAlias = NDArray[np.int64]
"""Ids of slots, of the engine's blocks, or stamps."""

NEVER: Final = -1
"""A stamp that no slot has: its load fails."""
_EMPTY: Final = 0
_ALIGNMENT: Final = 64
_MOST_BYTES: Final = 64 << 20
"""Bytes that are copied at once, at least one block."""
_CACHED_BYTES: Final = 2 << 20
"""The same on a CPU: a part is still in its cache when it is copied on."""
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_log = logging.getLogger(__name__)


def _no_ids() -> Slots:
    return np.empty(0, np.int64)


@dataclass(slots=True)
class StepWork:
    """What every worker does in step ``step``, the number of which is above 0.

    - ``zero``: slots to zero first. ``fill_rows``, ``fill_slots``: rows of staging memory to copy into slots then.
    - ``loads``: ``(request id, number of blocks)`` of each load, in the order of the three arrays that follow.
    - ``load_slots``, ``load_stamps``, ``load_blocks``: from where, what it must be, to which of the engine's blocks.
    - ``save_blocks``, ``save_slots``: from which of the engine's blocks, and to where, after the step has computed.
    """

    step: int
    zero: Slots = field(default_factory=_no_ids)
    fill_rows: Slots = field(default_factory=_no_ids)
    fill_slots: Slots = field(default_factory=_no_ids)
    loads: tuple[tuple[str, int], ...] = ()
    load_slots: Slots = field(default_factory=_no_ids)
    load_stamps: Slots = field(default_factory=_no_ids)
    load_blocks: Slots = field(default_factory=_no_ids)
    save_blocks: Slots = field(default_factory=_no_ids)
    save_slots: Slots = field(default_factory=_no_ids)


@dataclass(slots=True)
class StepReport:
    """What became of steps' work.

    - ``ended``: by step, how many workers have ended its saves, well or not.
    - ``unsaved``: steps of which a save failed.
    - ``failed``: by request, the position of the first block of its load that failed.
    - ``filled``: steps whose rows of staging memory were copied.
    """

    ended: dict[int, int] = field(default_factory=dict)
    unsaved: set[int] = field(default_factory=set)
    failed: dict[str, int] = field(default_factory=dict)
    filled: set[int] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.ended or self.unsaved or self.failed or self.filled)

    def add(self, other: StepReport) -> None:
        """Add another worker's report."""
        for step, num_workers in other.ended.items():
            self.ended[step] = self.ended.get(step, 0) + num_workers
        self.unsaved |= other.unsaved
        self.filled |= other.filled
        for request_id, position in other.failed.items():
            self.failed[request_id] = min(position, self.failed.get(request_id, position))


class Save(NamedTuple):
    """Saves of a step that are on their way: pinned copies of each layer."""

    step: int
    slots: Slots
    copies: list[torch.Tensor]
    event: Any


class HostBlocks:
    """``num_slots`` slots of host memory for the blocks of ``kv_caches``, the engine's tensors by layer.

    ``num_blocks``: of the engine. ``num_staging``: further rows, which only a ``DiskTier`` writes. The axis of the
    blocks is the first of each tensor, or the second behind keys and values; the kernels' blocks may be smaller. Raises
    ConfigError for other tensors. Used by one thread.
    """

    def __init__(
        self, num_slots: int, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, *, num_staging: int = 0
    ) -> None:
        engine = _distinct(kv_caches, num_blocks)
        if not engine:
            raise ConfigError("kv_caches", "{}", "at least one layer")
        sizes = [bytes_of_row(each[0]) for each in engine]
        self._begin(num_slots, num_staging, sum(sizes), engine, num_blocks)
        self._host = _by_tensor(self._rows, engine, sizes)
        self._staged_host = _by_tensor(self._staging, engine, sizes)

    def _begin(
        self, num_slots: int, num_staging: int, block_bytes: int, engine: list[torch.Tensor], num_blocks: int
    ) -> None:
        """Allocate empty rows of ``block_bytes`` for blocks of the engine's tensors."""
        self.num_slots, self.num_staging, self.block_bytes = num_slots, num_staging, block_bytes
        self._rows = torch.zeros((num_slots, block_bytes), dtype=torch.uint8)
        self._staging = torch.zeros((num_staging, block_bytes), dtype=torch.uint8)
        self._host, self._staged_host = [self._rows], [self._staging]
        self._engine = engine
        self._device = engine[0].device
        self._num_engine_blocks = num_blocks
        self._stamps = np.full(num_slots, _EMPTY, np.int64)
        self._saving: deque[Save] = deque()
        self._report = StepReport()
        self._loaded: set[str] = set()
        self._invalid: set[int] = set()
        self.counts = dict.fromkeys(("loaded_blocks", "failed_blocks", "saved_blocks", "unsaved_blocks"), 0)

    @property
    def engine_bytes(self) -> int:
        """Bytes of a block in the engine's memory, or while it is copied."""
        return self.block_bytes

    def load(self, work: StepWork) -> None:
        """Zero slots, fill slots, then load. What can't be loaded is reported, whatever the reason."""
        self._zero(work.zero)
        self._fill_slots(work)
        if not work.loads:
            return
        is_good = self._is_good(work)
        good = np.flatnonzero(is_good)
        for part in self._parts(good):
            try:
                self._copy_in(work.load_slots[part], work.load_blocks[part])
            except Exception:  # noqa: BLE001 - whatever it is, it is reported, and the step goes on
                _log.exception("a load from host memory failed; its tokens are computed again")
                is_good[part] = False
        start = 0
        for request_id, num_blocks in work.loads:
            bad = np.flatnonzero(~is_good[start : start + num_blocks])
            if len(bad):
                self._report.failed[request_id] = int(bad[0])
            self._loaded.add(request_id)
            start += num_blocks
        self._invalid.update(work.load_blocks[~is_good].tolist())
        self.counts["loaded_blocks"] += int(is_good.sum())
        self.counts["failed_blocks"] += int((~is_good).sum())

    def save(self, work: StepWork) -> None:
        """Save what the step computed, after it was computed, and end earlier saves that are complete."""
        self._end_saves()
        if not len(work.save_slots):
            return
        for part in self._parts(np.arange(len(work.save_slots))):
            self._save(work.step, work.save_blocks[part], work.save_slots[part])
            self._end_saves()
        self._end_if_all(work.step)

    def take_loaded(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, well or not."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_invalid(self) -> set[int]:
        """Return the engine's blocks that weren't loaded since the last call, though they were to be."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport:
        """Return what became of steps since the last call."""
        report, self._report = self._report, StepReport()
        return report

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, with ``loaded_bytes`` and ``saved_bytes``."""
        taken = self.counts
        self.counts = dict.fromkeys(taken, 0)
        for name in ("loaded", "saved"):
            taken[f"{name}_bytes"] = taken[f"{name}_blocks"] * self.block_bytes
        return taken

    def undo(self) -> None:
        """Drop saves that aren't complete, and all reports."""
        self._saving.clear()
        self._report, self._loaded, self._invalid = StepReport(), set(), set()

    # --- checks

    def _is_good(self, work: StepWork) -> NDArray[np.bool_]:
        """Return which loads name a slot with the stamp that they expect, and a block of the engine."""
        slots, blocks = work.load_slots, work.load_blocks
        is_there = (slots >= 0) & (slots < self.num_slots)
        is_there &= (blocks >= 0) & (blocks < self._num_engine_blocks) & (work.load_stamps > _EMPTY)
        is_there[is_there] = self._stamps[slots[is_there]] == work.load_stamps[is_there]
        return is_there

    def _require_places(self, slots: Slots, blocks: Slots) -> None:
        for name, ids, end in (("slots", slots, self.num_slots), ("blocks", blocks, self._num_engine_blocks)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < end:
                raise ArgumentError(name, (int(ids.min()), int(ids.max())), f"0 to {end - 1}")

    def _parts(self, at: Slots) -> Iterator[Slots]:
        """Cut into parts of at most _MOST_BYTES, or _CACHED_BYTES."""
        most = _CACHED_BYTES if self._device.type == "cpu" else _MOST_BYTES
        size = max(most // self.engine_bytes, 1)
        for start in range(0, len(at), size):
            yield at[start : start + size]

    # --- for a cache in the same process

    def stage(self, slots: Slots) -> list[torch.Tensor]:
        """Return copies of slots on the engine's device, a tensor a layer, without waiting for it."""
        self._require_places(slots, _no_ids())
        return self._copied_back(self._host, slots)

    def stage_row(self, row: int) -> list[torch.Tensor]:
        """Return copies of a row of staging memory on the engine's device, a tensor a layer of one block."""
        return self._copied_back(self._staged_host, np.array([row], np.int64))

    def put(self, staged: list[torch.Tensor], blocks: NDArray[np.int32] | Slots) -> None:
        """Write what ``stage`` returned into as many of the engine's blocks, without waiting for its device."""
        where = blocks.astype(np.int64)
        if self._device.type == "cpu":
            for tensor, rows in zip(self._engine, staged, strict=True):
                put_rows(tensor, where, rows)
            return
        target = torch.from_numpy(where).to(self._device)
        for tensor, rows in zip(self._engine, staged, strict=True):
            tensor.index_copy_(0, target, rows)

    # --- for a disk below, in the same process

    def slot_bytes(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        return self._rows[slot].numpy().data

    def staging_bytes(self, row: int) -> memoryview:
        """Return the bytes of a row of staging memory."""
        return self._staging[row].numpy().data

    # --- copies

    def _fill_slots(self, work: StepWork) -> None:
        """Copy rows of staging memory into slots. They hold what was read for one tenant, so they are zeroed."""
        if len(work.fill_slots):
            self._require_places(work.fill_slots, _no_ids())
            put_rows(self._rows, work.fill_slots, rows_of(self._staging, work.fill_rows))
            zero_rows(self._staging, work.fill_rows)
            self._stamps[work.fill_slots] = work.step
            self._report.filled.add(work.step)

    def _zero(self, slots: Slots) -> None:
        if len(slots):
            self._require_places(slots, _no_ids())
            self._stamps[slots] = _EMPTY
            zero_rows(self._rows, slots)

    def _copy_in(self, slots: Slots, blocks: Slots) -> None:
        self.put(self._copied_back(self._host, slots), blocks)

    def _copied_back(self, host: list[torch.Tensor], slots: Slots) -> list[torch.Tensor]:
        """Return what rows of the host hold on the engine's device, a tensor a layer."""
        return [self._on_device(each, slots) for each in host]

    def _on_device(self, host: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Return rows of the host on the engine's device, without waiting for it."""
        if self._device.type == "cpu":
            return rows_of(host, slots)
        pinned = torch.empty((len(slots), *host.shape[1:]), dtype=host.dtype, pin_memory=True)
        pinned.copy_(rows_of(host, slots))
        return pinned.to(self._device, non_blocking=True)

    def _save(self, step: int, blocks: Slots, slots: Slots) -> None:
        """Begin to save: the slots are empty until it is complete."""
        try:
            self._require_places(slots, blocks)
            self._stamps[slots] = _EMPTY
            self._saving.append(Save(step, slots, self._copied_out(blocks), self._event()))
        except Exception:  # noqa: BLE001 - whatever it is, it is reported, and the step goes on
            self._fail(step, len(slots))

    def _copied_out(self, blocks: Slots) -> list[torch.Tensor]:
        """Return copies of the engine's blocks in host memory; on a CPU maybe views, which are written at once."""
        copies = self._read(blocks)
        if self._device.type == "cpu":
            return copies
        pinned = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in copies]
        for to, each in zip(pinned, copies, strict=True):
            to.copy_(each, non_blocking=True)
        return pinned

    def _read(self, blocks: Slots) -> list[torch.Tensor]:
        """Return what is kept of the engine's blocks, on its device: for each tensor of the host its rows."""
        if self._device.type == "cpu":
            return [rows_of(each, blocks) for each in self._engine]
        where = torch.from_numpy(blocks).to(self._device)
        return [each.index_select(0, where) for each in self._engine]

    def _event(self) -> Any:
        """Return something whose ``query`` tells whether the copies are complete; None if they are."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _end_saves(self) -> None:
        """Write complete copies to their slots, the oldest first. The report of a step follows its last copy."""
        while self._saving and (self._saving[0].event is None or self._saving[0].event.query()):
            save = self._saving.popleft()
            try:
                self._write(save)
            except Exception:  # noqa: BLE001 - whatever it is, it is reported, and the step goes on
                self._fail(save.step, len(save.slots))
            self._end_if_all(save.step)

    def _end_if_all(self, step: int) -> None:
        if not any(each.step == step for each in self._saving):
            self._report.ended[step] = 1

    def _write(self, save: Save) -> None:
        for host, copied in zip(self._host, save.copies, strict=True):
            put_rows(host, save.slots, copied)
        self._stamps[save.slots] = save.step
        self.counts["saved_blocks"] += len(save.slots)

    def _fail(self, step: int, num_blocks: int) -> None:
        _log.exception("a save to host memory failed; nothing of it will be found")
        self._leave_out(step, num_blocks)

    def _leave_out(self, step: int, num_blocks: int) -> None:
        """Report that nothing of a step is to be found."""
        self._report.unsaved.add(step)
        self.counts["unsaved_blocks"] += num_blocks


refuse_copies(HostBlocks, "it holds memory, threads and files. Make another")


def _distinct(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """Return each tensor once, by blocks: layers may share one."""
    found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"kv_caches[{name!r}]", type(tensor).__name__, "one tensor")
        found.setdefault(
            (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()), _by_block(name, tensor, num_blocks)
        )
    return list(found.values())


def _by_block(name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a view whose first axis has the engine's blocks, of integers as wide as the elements."""
    bits = tensor.view(_BITS[tensor.element_size()])
    for axis in (0, 1):
        if axis < bits.dim() and bits.shape[axis] >= num_blocks and bits.shape[axis] % num_blocks == 0:
            shape = (*bits.shape[:axis], num_blocks, bits.shape[axis] // num_blocks, *bits.shape[axis + 1 :])
            return bits.view(shape).movedim(axis, 0)
    allowed = f"a tensor with {num_blocks} blocks on its first axis, or on its second"
    raise ConfigError(f"kv_caches[{name!r}]", tuple(tensor.shape), allowed)


def _by_tensor(rows: torch.Tensor, engine: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    """Return views of rows, one for each tensor of the engine, of the same elements."""
    views, start = list[torch.Tensor](), 0
    for each, size in zip(engine, sizes, strict=True):
        used = rows[:, start : start + each[0].numel() * each.element_size()]
        views.append(used.view(each.dtype).view(len(rows), *each.shape[1:]))
        start += size
    return views


def bytes_of_row(block: torch.Tensor) -> int:
    """Return the bytes of a block of one tensor, rounded up so that the next layer is aligned."""
    return -(-block.numel() * block.element_size() // _ALIGNMENT) * _ALIGNMENT
