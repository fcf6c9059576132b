"""Following the logs of others: what a reader knows of each registration, within one budget.

A log is followed by sequence number. Number ``seq + 1`` is applied, older numbers are ignored, a later number is a gap.
After a gap the snapshot is loaded, which has some number ``s``, and reading continues after ``s``. If no snapshot
covers the gap, everything known is forgotten: a hint may be missing, but a lost ``remove`` must not stay. The log then
has a hole until a later snapshot is loaded. A new epoch is a new log, and the old one is dropped.

All logs of a reader share one ``View``, with one column each. Entries wait in their log until ``flush``, which applies
them in bulk. Every question flushes first, unless another thread is flushing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.coordination.keys import DIGEST_BYTES
from radixkv.coordination.store.wire import TIERS, Entry, Groups
from radixkv.coordination.view.segment_table import MOVE, REMOVE, STORE, Segments, bits_of

Outcome = Literal["applied", "old", "gap"]
Counts = NDArray[np.int64]

_SLICE_DIGESTS = 16_384
"""Digests that are applied at once, in about a millisecond, while questions wait."""
_MAX_WAITING = 4_096
"""Most entries that may wait in one log."""
_CODES = {("store", tier): STORE + at for at, tier in enumerate(TIERS)}
_CODES |= {("tier", tier): MOVE + at for at, tier in enumerate(TIERS)}
_CODES |= {("remove", tier): REMOVE for tier in TIERS}


class View:
    """Which segments all others hold, and in which tier. Thread-safe.

    At most ``max_segments`` different segments are kept. ``num_forgotten`` counts placements left out for that,
    ``num_gaps`` counts gaps that were met in logs.
    """

    def __init__(self, max_segments: int) -> None:
        self.num_forgotten = 0
        self.num_gaps = 0
        self._segments = Segments(max_segments)
        self._columns: list[int] = []
        self._num_columns = 0
        self._waiting: set[RemoteLog] = set()
        self._table = threading.Lock()
        self.writing = threading.RLock()
        """Held by a thread that changes the view, for the whole change; ``_table`` is held for one step of it."""

    @property
    def num_digests(self) -> int:
        """Placements: segments, each counted once for every replica that holds it. O(rows)."""
        self.flush(wait=False)
        with self._table:
            return self._segments.count()[1]

    @property
    def num_segments(self) -> int:
        """Different segments that have a holder. O(rows)."""
        self.flush(wait=False)
        with self._table:
            return self._segments.count()[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the view. O(holder sets)."""
        with self._table:
            return self._segments.num_bytes

    def open(self) -> int:
        """Return an unused column."""
        with self._table:
            if not self._columns:
                self._columns.append(self._num_columns)
                self._num_columns += 1
            return self._columns.pop()

    def close(self, column: int) -> None:
        """Forget a column, and let others have it. O(holder sets)."""
        self.clear(column)
        with self._table:
            self._columns.append(column)

    def clear(self, column: int, namespace: bytes | None = None) -> None:
        """Forget what a column holds, of one namespace or of all. O(holder sets)."""
        with self._table:
            self._segments.drop(7 << 3 * column, namespace)

    def apply(self, column: int, entries: Iterable[Entry]) -> None:
        """Apply entries of one log, in order. O(digests), in slices."""
        with self.writing:
            for op, batch in groupby(entries, key=lambda entry: _batch(entry.op)):
                if op == "clear":
                    for entry in batch:
                        self.clear(column, entry.namespace or None)
                else:
                    for part in _slices(batch):
                        self._apply(column, part)

    def load(self, column: int, groups: Groups) -> None:
        """Load a snapshot: ``(namespace digest, tier, packed digests)``."""
        size = _SLICE_DIGESTS * DIGEST_BYTES
        self.apply(
            column,
            (
                Entry("store", namespace, b"", packed[at : at + size], tier)
                for namespace, tier, packed in groups
                for at in range(0, len(packed), size)
            ),
        )

    def queue(self, log: RemoteLog) -> None:
        """Record that ``log`` has entries for the next ``flush``."""
        self._waiting.add(log)

    def flush(self, *, wait: bool = True) -> None:
        """Apply all queued entries; without ``wait`` only if no other thread is changing the view."""
        if not self._waiting or not self.writing.acquire(blocking=wait):
            return
        try:
            while self._waiting:
                self._waiting.pop().flush()
        finally:
            self.writing.release()

    def leading(self, digests: bytes) -> Prefix:
        """Return the holders of each leading part of a path; ``digests`` packed, from the start.

        O(digests × sets met).
        """
        self.flush(wait=False)
        with self._table:
            runs, bitmaps = groupby(self._segments.holders(digests)), self._segments.sets.bitmaps
            num_columns, everywhere = self._num_columns, -1
            found: list[tuple[int, int]] = []
            base = int.from_bytes(b"\x49\x92\x24" * (num_columns // 8 + 1), "little")
            for set_id, run in runs:
                held = bitmaps[set_id]
                everywhere &= (held | held >> 1 | held >> 2) & base
                if not everywhere:
                    break
                found.append((sum(1 for _ in run), held & everywhere * 7))
        return Prefix(tuple(found), num_columns)

    def _apply(self, column: int, entries: list[Entry]) -> None:
        sizes = [len(entry.digests) // DIGEST_BYTES for entry in entries]
        codes = np.repeat(np.array([_CODES[entry.op, entry.tier] for entry in entries], np.uint8), sizes)
        packed = b"".join([entry.digests for entry in entries])
        with self._table:
            id_of = self._segments.sets.id_of
            empty = np.array([id_of(entry.namespace, 0) for entry in entries], np.uint32)
            keys = self._segments.keys_of(packed)
            self.num_forgotten += self._segments.apply(column, keys, codes, np.repeat(empty, sizes))


class Prefix(NamedTuple):
    """The holders of a path: stretches of ``(segments, bitmap)``; the bitmap has those that hold everything up to
    there."""

    stretches: tuple[tuple[int, int], ...]
    num_columns: int

    def counts(self) -> Counts:
        """Return leading segments by column and tier: int64 ``[columns + 1, 3]``, the last row 0.

        O(stretches × columns).
        """
        counts = np.zeros((self.num_columns + 1, len(TIERS)), np.int64)
        if self.stretches:
            sizes = np.array([size for size, _ in self.stretches])
            bits = bits_of([bitmap for _, bitmap in self.stretches], self.num_columns)
            counts[:-1] = (sizes @ bits).reshape(-1, len(TIERS))
        return counts


def _batch(op: str) -> str:
    """Return the kind of batch: moves depend on what is held, and clears have no digests, so each kind is applied
    apart."""
    return op if op in ("clear", "tier") else "digests"


def _slices(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    size = 0
    for entry in entries:
        part.append(entry)
        size += len(entry.digests)
        if size >= _SLICE_DIGESTS * DIGEST_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


class RemoteLog:
    """What is known of one registration's holdings, up to number ``seq`` of its log. One thread offers entries.

    ``hole``: the last number that was missed and that no snapshot has covered; 0: none.
    """

    def __init__(self, epoch: int, nonce: str, view: View) -> None:
        self.epoch, self.nonce = epoch, nonce
        self.seq = self.hole = 0
        self.column: int | None = None
        self._view = view
        self._queue: deque[Entry] = deque()

    def offer(self, seq: int, entry: Entry) -> Outcome:
        """Queue the entry at ``seq`` if it is the next one, for the next ``flush``: O(1)."""
        if seq <= self.seq:
            return "old"
        if seq > self.seq + 1:
            return "gap"
        self.seq = seq
        self._queue.append(entry)
        self._view.queue(self)
        if len(self._queue) >= _MAX_WAITING:
            self.flush()
        return "applied"

    def load(self, groups: Groups, seq: int) -> None:
        """Replace everything known by a snapshot."""
        with self._view.writing:
            self.forget(seq)
            self._view.load(self._open(), groups)

    def forget(self, seq: int) -> None:
        """Forget everything, and continue after ``seq``. O(holder sets)."""
        with self._view.writing:
            self.seq, self.hole = seq, 0
            self._queue.clear()
            column, self.column = self.column, None
            if column is not None:
                self._view.close(column)

    def miss(self, seq: int) -> None:
        """Forget everything, and continue after ``seq``, where a hole ends. O(holder sets)."""
        self.forget(seq)
        self.hole = seq

    def flush(self) -> None:
        """Apply the queued entries."""
        with self._view.writing:
            entries = [self._queue.popleft() for _ in range(len(self._queue))]
            if entries:
                self._view.apply(self._open(), entries)

    def _open(self) -> int:
        if self.column is None:
            self.column = self._view.open()
        return self.column
