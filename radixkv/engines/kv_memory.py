"""The blocks of a cache, from an amount of memory: bytes, a share of what the model leaves, or blocks.

    left      what the device has free once the model is loaded; on the CPU, what the machine, or its container, has
    60%       of that
    auto      80 % of it on a GPU, for activations and the working copy of a batch need some too; half on the CPU

Whatever the amount, the pool is allocated at the start and never grows.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from radixkv.config import MAX_BLOCKS, KVLayout
from radixkv.errors import ConfigError
from radixkv.sizes import Amount

AUTO_SHARES: Final = {"cpu": 0.5, "mps": 0.5}
"""What ``auto`` takes of what is left, by the kind of device."""
AUTO_SHARE: Final = 0.8
"""The same for GPUs."""
TYPICAL_TOKENS: Final = 4_096
"""Tokens of an expected request: nobody knows the traffic at a start."""
_CGROUP: Final = Path("/sys/fs/cgroup")


def num_blocks_of(
    amount: Amount, layout: KVLayout, block_size: int, device: str, left: int | None = None
) -> int:
    """Return the blocks that an amount makes, at least two. ``left``: what the model leaves; None: asks the device.

    Raises ConfigError, for ``--kv-memory``, for less than two blocks, and for more than there is.
    """
    block_bytes = layout.bytes_per_token * block_size
    found = left_bytes(device) if left is None else left
    kind = device.partition(":")[0]
    available = int(found * AUTO_SHARES.get(kind, AUTO_SHARE)) if amount.unit == "auto" else found
    num_blocks = amount.blocks("--kv-memory", block_bytes, available, least=2)
    if num_blocks > MAX_BLOCKS or (amount.unit == "bytes" and num_blocks * block_bytes > found):
        allowed = f"at most what the model leaves on {device}, {found:,} bytes"
        raise ConfigError("--kv-memory", amount.text, allowed)
    return num_blocks


def left_bytes(device: str) -> int:
    """Return the bytes that a torch device has free now."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return _machine_bytes()
    import torch

    of_kind: Any = torch.xpu if kind == "xpu" else torch.cuda
    if kind == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free, unused = of_kind.mem_get_info(device)[0], of_kind.memory_reserved(device)
    return int(free + unused - of_kind.memory_allocated(device))


def _machine_bytes() -> int:
    """Return what the machine has free, or its container, if that has less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        found = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1_024
    with suppress(OSError, ValueError):  # ValueError: "max", no bound
        most, used = (int((_CGROUP / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
        found = min(found, max(most - used, 0))
    return found


class AtOnce(NamedTuple):
    """How many requests a cache holds at once: of the longest kind, and of an expected length."""

    pessimistic_tokens: int
    pessimistic: int
    expected_tokens: int
    expected: int


def at_once(num_blocks: int, block_size: int, max_model_len: int) -> AtOnce:
    """Return how many requests of ``max_model_len`` and of ``TYPICAL_TOKENS`` tokens blocks hold, in whole blocks."""
    expected_tokens = min(TYPICAL_TOKENS, max_model_len)
    longest, usual = (num_blocks // -(-tokens // block_size) for tokens in (max_model_len, expected_tokens))
    return AtOnce(max_model_len, longest, expected_tokens, usual)
