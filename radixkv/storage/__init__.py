"""The memory of KV blocks. KVLayout is the shape of the KV (pure Python). DeviceStorage is the block pool's memory
(torch). BlockStorage works on an engine's own tensors (torch).

Importing this package needs no torch. Accessing a storage class does.
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
