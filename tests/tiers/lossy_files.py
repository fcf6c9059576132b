"""Files that remember what was not synced, and lose a random part of it when the power fails.

Of each write since the file's last sync any sectors may be lost, in any order. Each name that was made, replaced or
removed since its folder's last sync may be as it was then.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NamedTuple

from tests.tiers.support import FaultyFiles

SECTOR = 512


class _Write(NamedTuple):
    """Bytes of a file before and after a write."""

    path: str
    offset: int
    old: bytes
    new: bytes


class LossyFiles(FaultyFiles):
    """Files in one folder, all written through the page cache."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._unsynced: dict[int, list[_Write]] = {}
        self._names: dict[str, dict[str, bytes | None]] = {}

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        path, number = self._path(descriptor), os.fstat(descriptor).st_ino
        with Path(path).open("rb") as file:
            file.seek(offset)
            old = file.read(len(content))
        count = super().write(descriptor, content, offset)
        self._unsynced.setdefault(number, []).append(_Write(path, offset, old, bytes(content[:count])))
        return count

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._unsynced.pop(os.fstat(descriptor).st_ino, None)

    def sync_folder(self, folder: int) -> None:
        super().sync_folder(folder)
        self._names.pop(self._path(folder), None)

    def rename(self, old: str, new: str, folder: int) -> None:
        self._remember(folder, new)
        super().rename(old, new, folder)

    def remove(self, name: str, folder: int) -> None:
        self._remember(folder, name)
        super().remove(name, folder)

    def lose_power(self, chance: random.Random) -> None:
        """Lose a part of what was not synced. Nothing may use the files any more."""
        for number, writes in self._unsynced.items():
            self._lose_writes(number, writes, chance)
        for folder, names in self._names.items():
            for name, content in names.items():
                if chance.random() < 0.5:
                    path = Path(folder, name)
                    if content is None:
                        path.unlink(missing_ok=True)
                    else:
                        path.write_bytes(content)
        self._unsynced, self._names = {}, {}

    def _lose_writes(self, number: int, writes: list[_Write], chance: random.Random) -> None:
        path = next((each for each in self._root.rglob("*") if each.stat().st_ino == number), None)
        if path is None:  # it was removed
            return
        with path.open("r+b") as file:
            for write in reversed(writes):
                file.seek(write.offset)
                file.write(write.old)
            kept = [
                (write.offset + at, write.new[at : at + SECTOR])
                for write in writes
                for at in range(0, len(write.new), SECTOR)
                if chance.random() < 0.6
            ]
            chance.shuffle(kept)
            for offset, sector in kept:
                file.seek(offset)
                file.write(sector)

    def _remember(self, folder: int, name: str) -> None:
        place = self._path(folder)
        path = Path(place, name)
        if path.name == "slab" or path.name.endswith(".new"):
            return
        self._names.setdefault(place, {}).setdefault(name, path.read_bytes() if path.exists() else None)

    def _path(self, descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
