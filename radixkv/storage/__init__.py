"""Where KV bytes live: KVLayout (their shape, pure) and DeviceStorage (the block pool's memory, torch).

Importing this package needs no torch; asking it for DeviceStorage does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.storage.layout import KVLayout

if TYPE_CHECKING:
    from radixkv.storage.device import DeviceStorage

__all__ = ["DeviceStorage", "KVLayout"]


def __getattr__(name: str) -> object:
    if name != "DeviceStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from radixkv.storage.device import DeviceStorage
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "DeviceStorage needs torch: pip install 'radixkv[storage]'", name="torch"
        ) from error
    return DeviceStorage
