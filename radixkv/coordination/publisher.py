"""The journal of one cache, its digests, and the mirror of what the replica holds.

    cache, under its lock ──append──▶ queue (bounded) ──drain(), another thread──▶ digests ──▶ mirror
                                                                                         └──▶ entries to write

Under the cache's lock a record costs an append. Everything else happens in ``drain``, on the publisher's
thread. A queue that is full drops all it holds and all that follows until the next ``drain``, which says so:
then nothing that was published can be relied on, the mirror is emptied, and ``rebuild`` fills it from the
cache itself. A lost ``stored`` would only be forgetful, but a lost ``removed`` would lie for ever.

Why ``rebuild`` is right while the cache goes on: records are taken again from a moment before the cache is
read. Those older than the reading are applied to it once more; the last record of a segment decides, and it
decided in the reading too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from radixkv.coordination.holdings import Holdings
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.protocol import SEGMENT_TOKENS, Resident
from radixkv.coordination.wire import DIGESTS_AN_ENTRY, Entry

if TYPE_CHECKING:
    from radixkv.namespaces import Namespace
    from radixkv.types import NodeSnapshot, TreeSnapshot

_RECORD_BYTES = 200
"""What a queued record takes beside its key, roughly."""
DRAIN_RECORDS = 512
"""How many records one ``drain`` takes."""


class Record(NamedTuple):
    """What the cache said: tokens ``[start, stop)`` of the prefix came, left, or all was cleared."""

    op: Literal["store", "remove", "clear"]
    namespace: Namespace
    key: bytes
    start: int
    stop: int


class Drained(NamedTuple):
    """``entries`` in order; ``lost``: the queue had overflowed, there are none, and the mirror is empty."""

    entries: list[Entry]
    lost: bool


class Publisher:
    """A Journal. ``stored``, ``removed`` and ``cleared`` from any thread; the rest from one at a time."""

    def __init__(
        self, keys: FleetKeys, *, max_records: int, max_bytes: int, wake: Callable[[], None]
    ) -> None:
        self.grain_tokens = SEGMENT_TOKENS
        self.mirror = Holdings()
        self.num_overflows = 0
        self._keys = keys
        self._max_records, self._max_bytes = max_records, max_bytes
        self._wake = wake
        self._lock = threading.Lock()
        self._queue: deque[Record] = deque()
        self._queued_bytes = 0
        self._dropping = False
        self._dropped: deque[Record] = deque()
        self._taken: deque[Record] = deque()

    @property
    def num_queued(self) -> int:
        """Records that wait."""
        return len(self._queue) + len(self._taken)

    @property
    def is_lost(self) -> bool:
        """Records were dropped, and the next ``drain`` will say so."""
        return self._dropping

    def stored(self, namespace: Namespace, key: bytes, start: int, stop: int) -> None:
        """O(1): only appends."""
        self._append(Record("store", namespace, key, start, stop))

    def removed(self, namespace: Namespace, key: bytes, start: int, stop: int) -> None:
        """O(1): only appends."""
        self._append(Record("remove", namespace, key, start, stop))

    def cleared(self, namespace: Namespace) -> None:
        """O(1): only appends."""
        self._append(Record("clear", namespace, b"", 0, 0))

    def suspend(self) -> None:
        """Drop what is queued and all that comes, until the next ``drain``."""
        with self._lock:
            self._drop()

    def drain(self) -> Drained:
        """Digest some of what is queued, in order, and keep the mirror. Call again while ``num_queued``.

        O(tokens of the prefixes in the records), at most 512 records.
        """
        if self._take():
            self.mirror.clear()
            return Drained([], True)
        entries: list[Entry] = []
        for _ in range(min(len(self._taken), DRAIN_RECORDS)):
            entries.extend(self._entries(self._taken.popleft()))
        for entry in entries:
            self.mirror.apply(entry)
        return Drained(entries, False)

    def rebuild(self, resident: Resident, between: Callable[[], None]) -> None:
        """Fill the mirror with what is resident; ``between`` is called now and then. O(nodes × depth)."""
        snapshot = resident.snapshot()
        for tree in snapshot.trees:
            if not tree.detached:
                namespace = self._keys.namespace(tree.namespace)
                for key in _leaf_keys(tree):
                    self.mirror.store(namespace, self._keys.digests(tree.namespace, key))
                    between()

    def _append(self, record: Record) -> None:
        with self._lock:
            if self._dropping:
                return
            self._queued_bytes += len(record.key) + _RECORD_BYTES
            self._queue.append(record)
            if len(self._queue) > self._max_records or self._queued_bytes > self._max_bytes:
                self._drop()
                self.num_overflows += 1
        self._wake()

    def _drop(self) -> None:
        """Emptying a long deque takes milliseconds, so it is left to the thread that drains."""
        self._dropping = True
        self._dropped, self._queue = self._queue, deque()
        self._queued_bytes = 0

    def _take(self) -> bool:
        """Fill ``_taken`` if it is empty. True if records were lost: then it is empty, and a new time begins."""
        with self._lock:
            lost, self._dropping = self._dropping, False
            dropped, self._dropped = self._dropped, deque()
            if not (lost or self._taken):
                self._taken, self._queue = self._queue, deque()
                self._queued_bytes = 0
        if lost:
            dropped.clear()
            self._taken.clear()
        return lost

    def _entries(self, record: Record) -> Iterator[Entry]:
        namespace = self._keys.namespace(record.namespace)
        if record.op == "clear":
            yield Entry("clear", namespace)
            return
        first, stop = record.start // SEGMENT_TOKENS, record.stop // SEGMENT_TOKENS
        digests = list(self._keys.digests(record.namespace, record.key, max(first - 1, 0), stop))
        parent = digests.pop(0) if first > 0 and digests else b""
        for at in range(0, len(digests), DIGESTS_AN_ENTRY):
            run = digests[at : at + DIGESTS_AN_ENTRY]
            yield Entry(record.op, namespace, parent, b"".join(run))
            parent = run[-1]


def _leaf_keys(tree: TreeSnapshot) -> Iterator[bytes]:
    """The key of every node that has no children: together they have every resident prefix."""
    nodes = tree.nodes
    inner = {node.parent for node in nodes}
    for index, node in enumerate(nodes):
        if index not in inner:
            yield _key(nodes, node)


def _key(nodes: tuple[NodeSnapshot, ...], node: NodeSnapshot) -> bytes:
    labels = [node.label]
    while node.parent is not None:
        node = nodes[node.parent]
        labels.append(node.label)
    return b"".join(reversed(labels))
