"""Check, repair and forget the folder of a disk tier that no process uses.

``inspect`` decrypts every record. It needs the fleet's secret, and no prompt: a record's header has the keyed digest of
its identity. So it finds torn and changed records; whether a record is the KV of a prompt only a reader decides.

Opening a folder finishes what a crash interrupted: keys of purged generations are destroyed.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from radixkv.config import LOSSY_DTYPES, is_tenant_id
from radixkv.errors import ConfigError, shown
from radixkv.files.private_folder import (
    GENERATIONS,
    KEYS,
    LOCK,
    MASTER,
    NEW,
    OLD_DISKS,
    OURS,
    SLAB,
    STORE,
    PrivateFolder,
)
from radixkv.files.system import Files
from radixkv.tiers.disk.folder import InvalidTag, TenantKeys, TierFolder, master_in
from radixkv.tiers.disk.slab import TAG_BYTES, Slab, is_sealed, slot_buffer, slots_in

Progress = Callable[[int, int], None]
_EVERY: Final = 64


class Inspection(NamedTuple):
    """What a folder holds, in slots if nothing else is said.

    - ``num_slots``, ``record_bytes``: of the slab.
    - ``num_good``: records that open. ``num_free``: slots without one.
    - ``num_damaged``: records whose bytes changed, or were never all written. ``num_torn``: damaged headers.
    - ``num_orphaned``: records whose key was destroyed, as at a purge.
    - ``num_unreadable``: slots that the disk doesn't read.
    - ``num_tenants``: tenants with a key. ``num_damaged_tenants``: generations and keys that can't be read.
    - ``records_of``: records that open of each tenant that has any, by its tag in the folder, the most first.
    - ``written_s``: seconds since the slab was last written. After a crash, records sealed in the last ``sync_s``
      seconds before that may be damaged.
    """

    num_slots: int
    record_bytes: int
    num_good: int
    num_free: int
    num_damaged: int
    num_torn: int
    num_orphaned: int
    num_unreadable: int
    num_tenants: int
    num_damaged_tenants: int
    records_of: dict[str, int]
    written_s: float

    @property
    def is_good(self) -> bool:
        """Whether nothing is damaged. Orphaned records are not damage."""
        return not (self.num_damaged or self.num_torn or self.num_unreadable or self.num_damaged_tenants)


def inspect(
    path: Path | str,
    secrets: Sequence[bytes],
    *,
    repair: bool = False,
    progress: Progress | None = None,
    files: Files | None = None,
) -> Inspection:
    """Read and decrypt every record of a folder. With ``repair``, free the slots of those that don't open.

    A repair also forgets tenants whose generation is damaged, and destroys damaged keys. The result says what was found
    before it. ``progress`` gets the number of records that are done, and of all. Reads the whole slab.

    Raises ConfigError for a folder that isn't a disk tier's, is in use, or is sealed under other secrets, and OSError.
    """
    with closing(TierFolder(path, secrets, files=files)) as folder:
        num_damaged_tenants = folder.num_damaged()
        slab = Slab(folder)
        written_at = os.stat(SLAB, dir_fd=folder.folder, follow_symlinks=False).st_mtime
        whole = is_sealed(slab.headers, slab.record_bytes)
        found = _States(slab, {keys.key_id: keys for keys in folder.all_keys()})
        owners = folder.owners()
        sealed = np.flatnonzero(whole).tolist()
        for done, slot in enumerate(sealed, 1):
            found.look_at(slot)
            if progress is not None and done % _EVERY == 0:
                progress(done, len(sealed))
        torn = np.flatnonzero((slab.headers["magic"] != 0) & ~whole)
        result = Inspection(
            slab.num_slots,
            slab.record_bytes,
            found.good_under.total(),
            int((slab.headers["magic"] == 0).sum()),
            len(found.damaged),
            len(torn),
            len(found.orphaned),
            len(found.unreadable),
            len(found.keys),
            num_damaged_tenants,
            {owners[key_id].hex(): count for key_id, count in found.good_under.most_common()},
            max(time.time() - written_at, 0.0),
        )
        if repair:
            _clear(slab, [*found.damaged, *found.orphaned, *found.unreadable, *torn.tolist()])
            folder.repair()
        return result


def num_dropped(path: Path | str, secrets: Sequence[bytes], disk_bytes: int, scheme: str) -> int:
    """Return how many slots for records a start with a disk of this size and scheme drops, all of them or none.

    Looks at the folder's key file alone, also while a process uses the folder. 0 without one that the secrets open.
    Raises OSError.
    """
    master = master_in(path, secrets)
    if master is None:
        return 0
    is_same = slots_in(disk_bytes, master.record_bytes) == master.num_slots
    return 0 if is_same and master.scheme in ("", scheme) else master.num_slots


def forget_tenant(
    path: Path | str, secrets: Sequence[bytes], tenant: str, *, files: Files | None = None
) -> int:
    """Forget everything of a tenant, as a purge of the running tier does. Returns the number of its records.

    Raises as ``inspect``, and ConfigError for a name that no tenant can have.
    """
    if not is_tenant_id(tenant):
        raise ConfigError("tenant", shown(tenant), "a name that a tenant can have")
    with closing(TierFolder(path, secrets, files=files)) as folder:
        slab = Slab(folder)
        keys = folder.keys(tenant)
        folder.raise_generation(tenant)
        if keys is None:
            return 0
        is_theirs = is_sealed(slab.headers, slab.record_bytes)
        is_theirs &= slab.headers["key_id"] == np.void(keys.key_id)
        _clear(slab, np.flatnonzero(is_theirs).tolist())
        return int(is_theirs.sum())


def contents(path: Path | str, *, files: Files | None = None) -> dict[str, tuple[int, int]]:
    """Return what ``forget`` would delete in a folder: by name, the number of files and their bytes. Needs no secret.

    Names of folders end with a slash. Raises as ``forget``. Changes nothing.
    """
    found: dict[str, tuple[int, int]] = {}
    if old := _old_disks(path):
        with closing(PrivateFolder(path, files, OLD_DISKS, signs=False)):
            for part in old:
                found[f"{part.name}/{LOCK}"] = 1, 0
                found |= {f"{part.name}/{name}": sizes for name, sizes in contents(part, files=files).items()}
        return found
    with closing(_opened_to_forget(path, files)) as folder:
        for name in sorted(folder.names()):
            if name == LOCK:
                continue
            status = os.stat(name, dir_fd=folder.folder, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                found[name] = 1, status.st_size
                continue
            inner = folder.open_file(name, os.O_RDONLY | os.O_DIRECTORY)
            sizes = [
                os.stat(each, dir_fd=inner, follow_symlinks=False).st_size
                for each in folder.files.names(inner)
            ]
            if sizes:
                found[f"{name}/"] = len(sizes), sum(sizes)
    return found


def _opened_to_forget(path: Path | str, files: Files | None) -> PrivateFolder:
    """Return an opened folder that may be damaged, but has our files alone. Raises ConfigError, OSError."""
    if not Path(path).is_dir():
        raise ConfigError("folder", str(path), "the folder of a disk tier; there is none")
    folder = PrivateFolder(path, files, signs=False)
    try:
        for name in (KEYS, GENERATIONS):
            folder.require_tags(name)
    except BaseException:
        folder.close()
        raise
    return folder


def forget(path: Path | str, *, files: Files | None = None) -> int:
    """Forget everything: destroy the keys, then remove all files but the folder and its lock. Needs no secret.

    The folders of disk tiers that earlier versions had in one, for lossy KV, are removed. Returns the bytes that the
    slab had. Raises ConfigError for a missing folder, one that isn't ours or is in use. Raises OSError if a file can't
    be destroyed, after all others were: then repeat it.
    """
    if old := _old_disks(path):
        return _forget_old(path, old, files)
    with closing(_opened_to_forget(path, files)) as folder:
        folder.sign()
        failed = folder.destroy_all(folder.folder, [MASTER])
        for name in (KEYS, GENERATIONS):
            inner = folder.subfolder(name)
            failed += folder.destroy_all(inner, folder.files.names(inner))
        size = 0
        for name in (SLAB, STORE, *(each + NEW for each in sorted(OURS))):
            with suppress(FileNotFoundError):
                size += os.stat(name, dir_fd=folder.folder, follow_symlinks=False).st_size
                folder.files.remove(name, folder.folder)
        folder.files.sync_folder(folder.folder)
        if failed:
            raise failed[0]
        return size


def _old_disks(path: Path | str) -> list[Path]:
    """Return the folders of disk tiers that an earlier version made in this one, for lossy KV."""
    return [each for each in (Path(path) / dtype for dtype in LOSSY_DTYPES) if each.is_dir()]


def _forget_old(path: Path | str, parts: list[Path], files: Files | None) -> int:
    """Forget everything in these folders within another one, and remove them. Returns and raises as ``forget``."""
    size, failed = 0, list[OSError]()
    with closing(PrivateFolder(path, files, OLD_DISKS)) as folder:
        for part in parts:
            try:
                size += _removed(folder, part)
            except OSError as error:
                failed.append(error)
    if failed:
        raise failed[0]
    return size


def _removed(folder: PrivateFolder, part: Path) -> int:
    size = forget(part, files=folder.files)
    with closing(PrivateFolder(part, folder.files)) as inner:
        for name in (KEYS, GENERATIONS):
            inner.files.remove_folder(name, inner.folder)
        inner.files.remove(LOCK, inner.folder)
        folder.files.remove_folder(part.name, folder.folder)
    folder.files.sync_folder(folder.folder)
    return size


class _States:
    """Sorts the sealed slots of a slab by what becomes of their records."""

    def __init__(self, slab: Slab, keys: dict[bytes, TenantKeys]) -> None:
        self.keys = keys
        self.good_under: Counter[bytes] = Counter()
        """Records that open, by the id of their key."""
        self.damaged: list[int] = []
        self.orphaned: list[int] = []
        self.unreadable: list[int] = []
        self._slab = slab
        self._memory = slot_buffer(slab.record_bytes)
        self._plain = memoryview(bytearray(slab.record_bytes))

    def look_at(self, slot: int) -> None:
        """Read and decrypt a record."""
        header = self._slab.header(slot)
        keys = self.keys.get(header.key_id)
        if keys is None:
            self.orphaned.append(slot)
            return
        size, memory = header.payload_bytes, self._memory
        try:
            self._slab.read_slot(slot, memory, size)
        except OSError:
            self.unreadable.append(slot)
            return
        memory[size : size + TAG_BYTES] = header.tag
        try:
            keys.data_key(header.part).decrypt_into(
                header.nonce,
                memory[: size + TAG_BYTES],
                header.associated(header.identity),
                self._plain[:size],
            )
        except InvalidTag:
            self.damaged.append(slot)
            return
        self.good_under[header.key_id] += 1


def _clear(slab: Slab, slots: list[int]) -> None:
    if slots:
        slab.headers[slots] = np.zeros((), slab.headers.dtype)
        slab.write_headers(slots)
        slab.sync()
