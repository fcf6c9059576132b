"""One folder for the lossy disks of a server: a private folder, with a disk tier's folder for each lossy dtype.

    FOLDER/lock    FOLDER is this user's, of mode 0700, and belongs to one process
    FOLDER/fp8     a disk tier, with half of the bytes, and half of those that may be written
    FOLDER/int8    the same

So the records of one dtype never lie among those of another, and a folder that was put in the other's place opens
nothing: the dtype is a part of each record's identity. In a process the caller chooses the folders: see
``TieredCache(lossy_disks=…)``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from radixkv.config import LOSSY_DTYPES
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.files.private_folder import PrivateFolder
    from radixkv.tiers.settings import DiskOptions, Disks

_SIZES: Final = ("disk_bytes", "disk_size")
"""Settings of a disk's size in errors: of the tier, and of a disk below an engine."""


def disks_in(whole: DiskOptions) -> Disks:
    """Return a disk for each lossy dtype, with equal parts of the bytes and of the rate."""
    parts, rate = len(LOSSY_DTYPES), whole.bytes_per_s
    return {
        dtype: replace(
            whole,
            folder=whole.folder / dtype,
            num_bytes=whole.num_bytes // parts,
            bytes_per_s=None if rate is None else rate / parts,
        )
        for dtype in LOSSY_DTYPES
    }


def open_folder(whole: DiskOptions) -> PrivateFolder:
    """Open and lock the folder of the folders, made if it is missing. ``close`` gives it back.

    Raises ConfigError for one that isn't this user's alone, has other files, or is in use. Raises OSError if the disk
    fails.
    """
    from radixkv.files.private_folder import LOSSY_DISKS, PrivateFolder

    with errors_named(whole):
        return PrivateFolder(whole.folder, whole.files, LOSSY_DISKS)


@contextmanager
def errors_named(whole: DiskOptions) -> Iterator[None]:
    """Let errors of a part name the settings of the whole, and its size."""
    dtypes = " and ".join(LOSSY_DTYPES)
    try:
        yield
    except ConfigError as error:
        if error.setting in _SIZES:
            allowed = f"two halves, for {dtypes}; for each of them {error.allowed}"
            raise ConfigError("lossy_disk_size", whole.num_bytes, allowed) from None
        if error.setting in ("folder", "disk"):
            raise ConfigError("lossy_disk", error.value, error.allowed) from None
        raise
