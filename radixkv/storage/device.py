"""The memory of a block pool, and the execution of step plans on it.

    BlockStorage     blocks in the tensors of a Pool of radixkv_kernels: an engine's own tensors
    DeviceStorage    blocks in one contiguous tensor of its own:

    data    [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]    2: keys, values

The layout is block-major: block ``b`` is the contiguous run ``data[b]``. So a fork, a demotion or a scrub of a block is
one straight copy. Storage moves bytes and decides nothing. The index decides which blocks are copied and when, and
which sequences own them. The memory is allocated at the start and never grows. An index without free blocks evicts.

``execute`` turns a whole StepPlan into one call of fork_blocks: one launch on a GPU, a batch of torch copies elsewhere.
It enqueues on the current stream. ``scrub`` zeroes on a side stream. ``join`` makes the current stream wait for the
side stream and for the engine's other streams. The cache calls ``join`` whenever it hands out blocks (``fences``). So
an engine orders its streams itself only if one stream reads what another writes of the same sequence. The host never
waits for the device. There is no lock here: the cache calls storage under its own lock.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.storage.device", "storage")

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.config import KVLayout
from radixkv.errors import ArgumentError, ConfigError, KernelError
from radixkv.sizes import physical_bytes
from radixkv.storage.plan import StepPlan
from radixkv.uncopied import refuse_copies
from radixkv_kernels import Fences, InputError, Pool, fork_blocks, scrub

MAX_NUM_BLOCKS = 2**31 - 1


class BlockStorage:
    """The blocks of ``pool``, allocated by the cache or by an engine.

    For an engine that keeps its KV in its own tensors. There may be one tensor or one per layer, with keys and values
    apart or together, NHD or HND, or MLA's latent. ``PrefixCache(config, storage=BlockStorage(Pool(keys, values)))``
    copies and zeroes blocks there. Each block is zeroed before it is handed out first. Raises ConfigError for anything
    but a Pool.

    ``num_launches`` counts executed plans that had copies, ``num_copied_blocks`` their copies. ``fences`` orders work
    on several streams; None on a CPU.
    """

    def __init__(self, pool: Pool) -> None:
        if not isinstance(pool, Pool):
            raise ConfigError("pool", type(pool).__name__, "a radixkv_kernels.Pool")
        self.pool = pool
        self.num_blocks, self.block_size = pool.geometry.num_blocks, pool.geometry.block_size
        self.num_launches = 0
        self.num_copied_blocks = 0
        self.fences = Fences.of(pool.device)

    @property
    def device(self) -> torch.device:
        """The device of the blocks."""
        return self.pool.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks together."""
        return self.num_blocks * self.pool.block_bytes

    def execute(self, plan: StepPlan) -> None:
        """Enqueue all copies of the plan in one fork_blocks call. An empty plan does nothing.

        Raises KernelError for a plan that can't be executed, with nothing changed, and for a launch that failed. Cost:
        the bytes of the copied rows, read and written, and one launch.
        """
        if not plan:
            return
        try:
            fork_blocks(self.pool, plan.sources, plan.targets, plan.num_rows)
        except InputError as error:
            raise KernelError(f"a plan of {plan.num_copies} copies can't be executed: {error}") from error
        except RuntimeError as error:
            raise KernelError(
                f"launching {plan.num_copies} copies on {self.device} failed: {error}"
            ) from error
        self.num_launches += 1
        self.num_copied_blocks += plan.num_copies

    def scrub(self, block_ids: NDArray[np.int32]) -> None:
        """Enqueue the zeroing of blocks, distinct ids, in one launch. On a GPU it runs on a side stream: see ``join``.

        It starts after all work enqueued on the engine's streams so far. Raises KernelError for a launch that failed.
        Cost: the blocks' bytes, written, and an event for each stream.
        """
        try:
            with self.fences.aside() if self.fences is not None else nullcontext():
                scrub(self.pool, block_ids)
        except (RuntimeError, InputError) as error:
            raise KernelError(f"zeroing {len(block_ids)} blocks on {self.device} failed: {error}") from error

    def join(self) -> None:
        """Allow work that is enqueued on the current stream from now on to use any block that is handed out.

        See ``Fences.join``. The cache calls this when it hands out blocks or leases a match. Raises KernelError if the
        device fails.
        """
        if self.fences is None:
            return
        try:
            self.fences.join()
        except RuntimeError as error:
            raise KernelError(f"ordering the streams of {self.device} failed: {error}") from error

    def add_stream(self, stream: Any) -> None:
        """Register a ``torch.cuda.Stream`` on which the engine computes too, but that isn't current when it calls the
        cache.

        Streams that are current at such calls needn't be registered. Does nothing on a CPU.
        """
        if self.fences is not None:
            self.fences.add(stream)

    def __repr__(self) -> str:
        return f"BlockStorage({self.pool})"


refuse_copies(BlockStorage, "it is the memory of the blocks. Make another")


class DeviceStorage(BlockStorage):
    """KV of ``num_blocks`` blocks of ``block_size`` tokens on one torch device, zeros at first.

    Raises ConfigError for counts below 1, for a device that this machine doesn't have, and if the memory is too small.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: str = "cpu") -> None:
        _check_count("num_blocks", num_blocks)
        _check_count("block_size", block_size)
        self.layout = layout
        self.data = _allocate(layout, num_blocks, block_size, _usable_device(device))
        super().__init__(Pool.of(self.data))

    def layer(self, index: int) -> torch.Tensor:
        """Return a view of one layer: ``[num_blocks, 2, block_size, num_kv_heads, head_dim]``. Writes change the
        storage.

        Raises ArgumentError for an index outside ``[0, num_layers)``.
        """
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < self.layout.num_layers:
            raise ArgumentError("index", index, f"0 to num_layers - 1 = {self.layout.num_layers - 1}")
        return self.data[:, index]

    def __repr__(self) -> str:
        return (
            f"DeviceStorage({self.layout}, num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"device={str(self.device)!r})"
        )


def _check_count(setting: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_NUM_BLOCKS:
        raise ConfigError(setting, value, f"an integer from 1 to {MAX_NUM_BLOCKS}")


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # torch raises AssertionError if it was built without CUDA
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError("device", name, f"a torch device of this machine ({reason})") from error
    return device


def _allocate(layout: KVLayout, num_blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    block_bytes = layout.bytes_per_token * block_size
    wanted = num_blocks * block_bytes
    allowed = f"blocks that {device} has memory for: these want {wanted:,} bytes ({block_bytes:,} a block)"
    if device.type == "cpu" and wanted > (physical := physical_bytes()):
        # The system may promise too much memory, and kill the process at the first access.
        raise ConfigError("num_blocks", num_blocks, f"{allowed}, the machine has {physical:,}")
    shape = (num_blocks, *layout.block_shape(block_size))
    try:
        # The pool must also be writable outside the caller's inference_mode.
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=getattr(torch, layout.dtype), device=device)
    except (RuntimeError, TypeError) as error:  # TypeError: a size beyond 64 bits
        raise ConfigError("num_blocks", num_blocks, allowed) from error
