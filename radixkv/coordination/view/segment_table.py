"""Which replicas hold which segments, in about 20 bytes a segment: a hash table of NumPy columns.

A prefix digest names a whole path from the start of a prompt, so a tree over digests needs no edges. One row a segment
is enough: the holders of a prefix are the holders that all rows of its segments share.

    keys   uint64   64 bits of the digest, times a random odd number, so that a writer to the store can't choose
                    the position of rows
    sets   uint32   id of a holder set; 0 is an empty row

A **holder set** is a namespace with a bitmap of bits ``3 × column + tier``: one column a replica, one of its three bits
set. Segments of one prompt mostly have the same holders, so there are few sets, whatever the number of replicas.
Forgetting a replica or one of its namespaces rewrites bitmaps, not rows: O(holder sets).

Rows are at ``home = high bits of the key × capacity`` or after it, without wrapping. Homes grow with the keys, so one
sort builds the table. When it is four fifths full, it is rebuilt without rows that have no holder, with 1.6 rows a
segment.

Two digests that agree in 63 bits count as one: 1 in 10⁶ for three million segments. Then a hint is wrong.
Not thread-safe: ``view.View`` has the lock.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
SetIds = NDArray[np.uint32]
Indices = NDArray[np.intp]

REMOVE = 0
STORE = 1
"""``STORE + tier``: held there from now on; the tier is 0, 1 or 2."""
MOVE = 4
"""``MOVE + tier``: held there from now on, if it is held at all."""

_WINDOW = np.arange(16)
_SPARE_ROWS = 64
_MIN_ROWS = 64
_SHIFT = np.uint64(32)
_ONE = np.uint64(1)
_MAX_IDLE_SETS = 1024


class HolderSets:
    """Bitmaps by id; equal bitmaps of a namespace share one id. Id 0 means an empty row."""

    def __init__(self, *, of: Iterable[tuple[bytes, int]] = ()) -> None:
        self.bitmaps: list[int] = [0]
        self._namespaces: list[bytes] = [b""]
        self._ids: dict[tuple[bytes, int], int] = {}
        for namespace, bitmap in of:
            self.id_of(namespace, bitmap)

    def __len__(self) -> int:
        return len(self.bitmaps)

    def id_of(self, namespace: bytes, bitmap: int) -> int:
        """Return the id of a set. O(bits)."""
        known = self._ids.get((namespace, bitmap))
        if known is None:
            known = self._ids[namespace, bitmap] = len(self.bitmaps)
            self.bitmaps.append(bitmap)
            self._namespaces.append(namespace)
        return known

    def changed(self, set_id: int, column: int, code: int) -> int:
        """Return the id of the set after ``code`` was applied to one of its segments."""
        bitmap, place = self.bitmaps[set_id], 3 * column
        without = bitmap & ~(7 << place)
        if code == REMOVE or (code >= MOVE and without == bitmap):
            after = without
        else:
            after = without | 1 << place + (code - STORE) % 3
        return set_id if after == bitmap else self.id_of(self._namespaces[set_id], after)

    def drop(self, mask: int, namespace: bytes | None) -> bool:
        """Remove bits from all sets, or from those of one namespace. Return whether any had them. O(sets)."""
        found = False
        for set_id, bitmap in enumerate(self.bitmaps):
            if bitmap & mask and namespace in (None, self._namespaces[set_id]):
                key = self._namespaces[set_id], bitmap
                if self._ids.get(key) == set_id:
                    del self._ids[key]
                self.bitmaps[set_id] = bitmap & ~mask
                self._ids.setdefault((key[0], bitmap & ~mask), set_id)
                found = True
        return found

    def compacted(self, used: SetIds) -> tuple[HolderSets, SetIds]:
        """Return the sets of these ids alone, and the new id of each old one. O(ids + sets)."""
        kept = np.flatnonzero(np.bincount(used, minlength=len(self.bitmaps))).tolist()
        sets = HolderSets(of=((self._namespaces[set_id], self.bitmaps[set_id]) for set_id in kept))
        new_ids = np.zeros(len(self.bitmaps), np.uint32)
        new_ids[kept] = [sets.id_of(self._namespaces[set_id], self.bitmaps[set_id]) for set_id in kept]
        return sets, new_ids

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of the sets: each has an integer, a dict entry and two list entries."""
        return sum(200 + bitmap.bit_length() // 7 for bitmap in self.bitmaps)


class Segments:
    """The hash table. At most ``max_segments`` rows are in use; segments beyond that are left out."""

    def __init__(self, max_segments: int) -> None:
        self.max_segments = max_segments
        self.sets = HolderSets()
        self._multiplier = np.uint64(secrets.randbits(64) | 1)
        self._num_freed = 0
        self._num_compact_sets = 0
        self._build(np.zeros(0, np.uint64), np.zeros(0, np.uint32))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the rows and the sets. O(sets)."""
        return self._keys.nbytes + self._sets.nbytes + self.sets.num_bytes

    def count(self, mask: int = -1) -> tuple[int, int]:
        """Return the segments with a holder in ``mask``, and the placements: each segment once a holder. O(rows)."""
        rows = np.bincount(self._sets, minlength=len(self.sets)).tolist()
        bitmaps = [bitmap & mask for bitmap in self.sets.bitmaps]
        pairs = list(zip(rows, bitmaps, strict=True))
        return sum(num for num, held in pairs if held), sum(num * held.bit_count() for num, held in pairs)

    def keys_of(self, digests: bytes) -> Keys:
        """Return the key of each packed 16-byte digest."""
        return np.frombuffer(digests, "<u8")[::2] * self._multiplier | _ONE

    def apply(self, column: int, keys: Keys, codes: NDArray[np.uint8], namespaces: SetIds) -> int:
        """Apply ``codes`` to segments, in order; return how many were left out because the table is full.

        ``namespaces``: for each, the id of its namespace's empty set. If a key occurs more than once, only the last
        code counts. So a move must not come together with a code that it depends on. O(n log n).
        """
        keys, newest = np.unique(keys[::-1], return_index=True)
        order = len(codes) - 1 - newest
        codes, namespaces = codes[order], namespaces[order]
        rows, found = self._find(keys)
        fresh = ~found & (codes >= STORE) & (codes < MOVE)
        if found.any():
            at = rows[found]
            self._sets[at] = self._changed(self._sets[at], codes[found], column)
            self._num_freed += int(np.count_nonzero(codes[found] == REMOVE))
        left_out = 0
        if fresh.any():
            sets = self._changed(namespaces[fresh], codes[fresh], column)
            left_out = self._add(keys[fresh], sets, order[fresh])
        if len(self.sets) > 2 * self._num_compact_sets + _MAX_IDLE_SETS:
            self._rebuild(keys[:0], namespaces[:0])
        return left_out

    def drop(self, mask: int, namespace: bytes | None = None) -> None:
        """Remove bits everywhere, or in one namespace. O(holder sets)."""
        if self.sets.drop(mask, namespace):
            self._num_freed = self._num_used

    def holders(self, digests: bytes) -> list[int]:
        """Return the set id of each packed digest; 0 if unknown. O(n)."""
        rows, found = self._find(self.keys_of(digests))
        ids: list[int] = (self._sets[rows] * found).tolist()
        return ids

    def _changed(self, sets: SetIds, codes: NDArray[np.uint8], column: int) -> SetIds:
        """Return the changed set of each; computed once for each kind of change that occurs."""
        kinds = sets.astype(np.intp) << 3 | codes
        seen = np.zeros(len(self.sets) << 3, np.bool_)
        seen[kinds] = True
        distinct = np.flatnonzero(seen)
        after = np.empty(len(seen), np.uint32)
        after[distinct] = [self.sets.changed(kind >> 3, column, kind & 7) for kind in distinct.tolist()]
        changed: SetIds = after[kinds]
        return changed

    def _home(self, keys: Keys) -> Indices:
        return ((keys >> _SHIFT) * np.uint64(self._capacity) >> _SHIFT).astype(np.intp)

    def _find(self, keys: Keys) -> tuple[Indices, NDArray[np.bool_]]:
        """Return the row of each key, and whether it is present. The probe ends at its row, or at an empty one."""
        rows, found = self._home(keys), np.zeros(len(keys), np.bool_)
        going: Indices | slice = slice(None)
        while True:
            window = rows[going, None] + _WINDOW
            equal = self._keys[window] == keys[going, None]
            hit = equal.any(axis=1)
            rows[going] += equal.argmax(axis=1)
            found[going] = hit
            if hit.all():
                return rows, found
            lost = ~(hit | (self._sets[window] == 0).any(axis=1))
            going = np.flatnonzero(lost) if isinstance(going, slice) else going[lost]
            rows[going] += len(_WINDOW)

    def _add(self, keys: Keys, sets: SetIds, order: Indices) -> int:
        """Add rows for distinct, sorted keys that have none; if the table is too full, only the first in ``order``."""
        if self._num_used + len(keys) > self.max_segments and self._num_freed > self._num_used >> 4:
            self._rebuild(keys[:0], sets[:0])
        room = self.max_segments - self._num_used
        left_out = max(0, len(keys) - room)
        if left_out:
            kept = np.sort(np.argsort(order)[: max(room, 0)])
            keys, sets = keys[kept], sets[kept]
        if self._num_used + len(keys) > self._capacity * 4 // 5:
            self._rebuild(keys, sets)
        else:
            self._insert(keys, sets)
        return left_out

    def _insert(self, keys: Keys, sets: SetIds) -> None:
        """Insert in rounds: in each, every key tries the first empty row after its home; of several keys one wins."""
        rows, end = self._home(keys), len(self._keys) - len(_WINDOW)
        while len(keys):
            empty = self._sets[rows[:, None] + _WINDOW] == 0
            has_empty = empty.any(axis=1)
            tried = (rows + empty.argmax(axis=1))[has_empty]
            if int(rows.max()) + 2 * len(_WINDOW) > end:
                self._rebuild(keys, sets)
                return
            self._keys[tried] = keys[has_empty]
            won = np.zeros(len(keys), np.bool_)
            won[has_empty] = self._keys[tried] == keys[has_empty]
            self._sets[tried[won[has_empty]]] = sets[won]
            self._num_used += int(np.count_nonzero(won))
            rows = rows + np.where(has_empty, 0, len(_WINDOW))
            keys, sets, rows = keys[~won], sets[~won], rows[~won]

    def _rebuild(self, keys: Keys, sets: SetIds) -> None:
        """Rebuild the table from the rows with a holder, and these keys."""
        held = np.array([bitmap != 0 for bitmap in self.sets.bitmaps])
        kept = held[self._sets]
        keys, sets = np.concatenate([self._keys[kept], keys]), np.concatenate([self._sets[kept], sets])
        self.sets, new_ids = self.sets.compacted(sets)
        self._num_compact_sets = len(self.sets)
        self._build(keys, new_ids[sets])

    def _build(self, keys: Keys, sets: SetIds) -> None:
        order = np.argsort(keys)
        self._capacity = max(_MIN_ROWS, len(keys) * 8 // 5)
        count = np.arange(len(keys))
        rows = np.maximum.accumulate(self._home(keys[order]) - count) + count
        size = max(self._capacity, int(rows[-1]) + 1 if len(rows) else 0) + _SPARE_ROWS
        self._keys, self._sets = np.zeros(size, np.uint64), np.zeros(size, np.uint32)
        self._keys[rows], self._sets[rows] = keys[order], sets[order]
        self._num_used, self._num_freed = len(keys), 0


def bits_of(bitmaps: Sequence[int], num_columns: int) -> NDArray[np.uint8]:
    """Return bitmaps as bits: uint8 ``[bitmaps, 3 × num_columns]``."""
    size = (3 * num_columns + 7) // 8
    packed = np.frombuffer(b"".join([bitmap.to_bytes(size, "little") for bitmap in bitmaps]), np.uint8)
    return np.unpackbits(packed.reshape(-1, size), axis=1, count=3 * num_columns, bitorder="little")
