"""Where KV bytes live: KVLayout (their shape, pure), DeviceStorage (the block pool's memory, torch) and BlockStorage
(over an engine's own tensors, torch).

Importing this package needs no torch; asking it for a storage does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.config import KVLayout

if TYPE_CHECKING:
    from radixkv.storage.device import BlockStorage, DeviceStorage

__all__ = ["BlockStorage", "DeviceStorage", "KVLayout"]


def __getattr__(name: str) -> object:
    if name not in ("BlockStorage", "DeviceStorage"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from radixkv.storage import device

    return getattr(device, name)
