"""The journal of one cache, its digests, and the mirror of what the replica holds.

    cache, under its lock ──append──▶ queue (bounded) ──drain(), another thread──▶ digests ──▶ mirror
                                                                                         └──▶ entries to write

Under the cache's lock, a record of a long key costs one append: no lock, no keyed digest, and no wake-up of a thread
unless the publisher sleeps. The chain of a short key is hashed at once, while the key is still in the processor's
cache, and the key isn't kept. A queue full of keys would make both caller and publisher read and write cold memory,
which costs more. All other work happens in ``drain``, on the publisher's thread.

A full queue drops all its records, and all that follow until the next ``drain``, which reports the loss. Nothing
published so far can then be trusted: the mirror is emptied, and ``rebuild`` fills it from the cache. A lost ``stored``
would only lose a hint, but a lost ``removed`` would leave a wrong hint for ever.

``rebuild`` is correct while the cache continues, because records are accepted again before the cache is read. Records
older than the reading are applied to it a second time. The last record of a segment decides, and the reading already
includes it.

A raised generation goes through the queue too. Everything that the tenant had before is published as cleared, under the
digests of the old generation. Everything after it is published under the new generation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from radixkv.coordination.keys import SCOPE_BYTES, SEGMENT_BYTES, SEGMENT_TOKENS, FleetKeys, Scope, chains
from radixkv.coordination.store.holdings import Holdings
from radixkv.coordination.store.wire import DIGESTS_AN_ENTRY, Entry
from radixkv.coordination.values import Resident
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.snapshot import NodeSnapshot, TreeSnapshot
    from radixkv.index.tokens import Key

_RECORD_BYTES: Final = 200
"""Approximate bytes of a queued record, without its key or chain."""
_CHAIN_BYTES: Final = 60
"""Approximate bytes of one link of a chain."""
_HASHED_BYTES: Final[int] = 1 << 15
"""Keys up to this size are hashed when they are queued: 0.3 to 1 µs."""
_MAX_NAMESPACES = 65_536
_GENERATION_BYTES = 150
_DRAIN_RECORDS: Final = 1_024
_DRAIN_UNITS: Final = 4_096
"""Most records, or units of work of about 0.5 µs, that one ``drain`` takes. Compiled, ``drain`` keeps the interpreter's
lock until it ends, so other threads wait at most 2 ms for it."""
_SEGMENTS_A_UNIT: Final = 8
"""Reading this many segments of a key costs as much as one digest."""

Record = tuple[Literal["store", "remove", "clear"], "Namespace", "Key | list[bytes]", int, int]
"""What the cache reported: tokens ``[start, stop)`` of a prefix were stored or removed, or all was cleared. With the
prefix's key, or the chain of these segments and of the one before them."""
Raised = tuple[Literal["raise"], str, int]
"""A tenant and its new generation."""


class Drained(NamedTuple):
    """``entries`` in order. If ``lost``, the queue had overflowed: there are no entries, and the mirror is empty."""

    entries: list[Entry]
    lost: bool


class Publisher:
    """A Journal that digests its records and mirrors the holdings.

    ``stored``, ``removed``, ``cleared`` and ``raised`` may be called from any thread, the rest by one thread at a time.

    - ``wake``: called for a record that comes while ``is_asleep``; the draining thread sets that flag.
    - ``generation_of``: returns a tenant's generation when the publisher meets the tenant. After ``raised``, it returns
      at least that generation.
    """

    def __init__(
        self,
        keys: FleetKeys,
        *,
        max_records: int,
        max_bytes: int,
        wake: Callable[[], None],
        generation_of: Callable[[str], int] = lambda tenant: 0,
    ) -> None:
        self.grain_tokens = SEGMENT_TOKENS
        self.mirror = Holdings()
        self.num_overflows = self.num_drained = 0
        self.is_asleep = True
        self.appended_bytes = 0
        self._keys = keys
        self._max_records, self._max_bytes = max_records, max_bytes
        self._wake = wake
        self._drained_bytes = 0
        self._queue: deque[Record | Raised] = deque()
        self._dropping = False
        self._generation_of = generation_of
        self._generations: dict[str, int] = {}
        self._scopes: dict[Namespace, Scope] = {}
        self._max_namespaces = _MAX_NAMESPACES

    @property
    def num_queued(self) -> int:
        """Number of queued records."""
        return 0 if self._dropping else len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Approximate bytes of the queued records."""
        return max(0, self.appended_bytes - self._drained_bytes)

    @property
    def namespace_bytes(self) -> int:
        """Approximate bytes for the published namespaces and the generations of their tenants."""
        return len(self._scopes) * SCOPE_BYTES + len(self._generations) * _GENERATION_BYTES

    @property
    def is_lost(self) -> bool:
        """Whether records were dropped; the next ``drain`` will report it."""
        return self._dropping

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Queue a stored prefix. O(1) for a long key, otherwise O(its tokens)."""
        self._append_range("store", namespace, key, start, stop)

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Queue a removed prefix. O(1) for a long key, otherwise O(its tokens)."""
        self._append_range("remove", namespace, key, start, stop)

    def cleared(self, namespace: Namespace) -> None:
        """Queue a cleared namespace. O(1): only appends."""
        self._append(("clear", namespace, b"", 0, 0), 0)

    def raised(self, tenant: str, generation: int) -> None:
        """Start ``generation`` of the tenant, which has nothing from before. O(1)."""
        self._append(("raise", tenant, generation), 0)

    def suspend(self) -> None:
        """Drop all queued records, and all later ones until the next ``drain``."""
        self._dropping = True
        self._queue.clear()

    def drain(self) -> Drained:
        """Digest some queued records, in order, and update the mirror. Call it again while ``num_queued``.

        O(segments in the records, and one pass over their keys): about 2 ms of records, or one record that takes
        longer.
        """
        if self._dropping:
            self._begin_anew()
            self.mirror.clear()
            self._scopes, self._generations = {}, {}
            return Drained([], True)
        records: list[Record | Raised] = []
        queue, left = self._queue, _DRAIN_UNITS
        while queue and left > 0 and len(records) < _DRAIN_RECORDS:
            record = queue.popleft()
            records.append(record)
            if record[0] != "raise":
                _, _, _, start, stop = record
                left -= (stop - start) // SEGMENT_TOKENS + stop // (_SEGMENTS_A_UNIT * SEGMENT_TOKENS)
        self.num_drained += len(records)
        return Drained(self._digest(records), False)

    def rebuild(self, resident: Resident, between: Callable[[], None]) -> None:
        """Fill the mirror with what is resident; ``between`` is called from time to time. O(nodes × depth)."""
        snapshot = getattr(resident, "snapshot_in_slices", resident.snapshot)()  # in slices: short waits
        for tree in snapshot.trees:
            if not tree.detached and tree.base is None:
                scope = self._meet(tree.namespace)
                for key in _leaf_keys(tree):
                    digests = scope.digests(chains(key, 0, len(key) // SEGMENT_BYTES))
                    self.mirror.store(scope.digest, digests)
                    between()
        self._max_namespaces = max(_MAX_NAMESPACES, 2 * len(self._scopes))

    def _append_range(
        self, op: Literal["store", "remove"], namespace: Namespace, key: Key, start: int, stop: int
    ) -> None:
        if self._dropping:
            return
        if stop * TOKEN_BYTES > _HASHED_BYTES:
            self._append((op, namespace, key, start, stop), stop * TOKEN_BYTES)
        else:
            chained = _chained(key, start, stop)
            self._append((op, namespace, chained, start, stop), len(chained) * _CHAIN_BYTES)

    def _append(self, record: Record | Raised, num_bytes: int) -> None:
        if self._dropping:
            return
        queue = self._queue
        self.appended_bytes = appended = self.appended_bytes + num_bytes + _RECORD_BYTES
        queue.append(record)
        if len(queue) > self._max_records or appended - self._drained_bytes > self._max_bytes:
            self._dropping = True  # the draining thread frees the memory, which takes milliseconds
            self.num_overflows += 1
        if self.is_asleep:
            self._wake()

    def _begin_anew(self) -> None:
        """Empty the queue, then accept records again.

        In this order: what dropped records describe is in the cache by then.
        """
        self._queue.clear()
        self._drained_bytes = self.appended_bytes
        self._dropping = False

    def _meet(self, namespace: Namespace) -> Scope:
        """Return the scope that a namespace is published under from now on.

        If there are too many namespaces, drop all and rebuild from what is resident.
        """
        tenant = namespace.tenant
        if tenant not in self._generations:
            if len(self._generations) >= 2 * self._max_namespaces:
                named = {each.tenant for each in self._scopes}
                self._generations = {each: self._generations[each] for each in named}
            self._generations[tenant] = self._generation_of(tenant)
        scope = self._scopes[namespace] = self._keys.scope(namespace, self._generations[tenant])
        if len(self._scopes) > self._max_namespaces:
            self.suspend()
        return scope

    def _digest(self, records: list[Record | Raised]) -> list[Entry]:
        """Turn records into entries, and update the mirror. This loop is the main cost of publishing."""
        entries: list[Entry] = []
        scopes, store, remove = self._scopes, self.mirror.store, self.mirror.remove
        add, new, num_bytes = entries.append, tuple.__new__, 0
        for record in records:
            if record[0] == "raise":
                entries += self._raise(*record[1:])
                continue
            op, namespace, key, start, stop = record
            scope = scopes.get(namespace) or self._meet(namespace)
            name = scope.digest
            if op == "clear":
                self.mirror.clear(name)
                add(Entry(op, name))
                del scopes[namespace]
                continue
            if isinstance(key, list):
                chained, num_bytes = key, num_bytes + len(key) * _CHAIN_BYTES
            else:
                chained, num_bytes = _chained(key, start, stop), num_bytes + stop * TOKEN_BYTES
            digests = scope.digests(chained)
            parent = digests.pop(0) if start >= SEGMENT_TOKENS and digests else b""
            (store if op == "store" else remove)(name, digests)
            if len(digests) == 1:  # the usual case; three times as fast as the NamedTuple's __new__
                add(new(Entry, (op, name, parent, digests[0], "device")))
                continue
            for at in range(0, len(digests), DIGESTS_AN_ENTRY):
                run = digests[at : at + DIGESTS_AN_ENTRY]
                add(Entry(op, name, parent, b"".join(run)))
                parent = run[-1]
        self._drained_bytes += len(records) * _RECORD_BYTES + num_bytes
        return entries

    def _raise(self, tenant: str, generation: int) -> Iterator[Entry]:
        """Clear what is published of a tenant under an older generation."""
        if generation <= self._generations.get(tenant, generation):
            return
        self._generations[tenant] = generation
        for namespace in [namespace for namespace in self._scopes if namespace.tenant == tenant]:
            digest = self._scopes.pop(namespace).digest
            self.mirror.clear(digest)
            yield Entry("clear", digest)


refuse_copies(Publisher, "its changes are numbered once. Pass it on, or make another")


def _chained(key: Key, start: int, stop: int) -> list[bytes]:
    """Return the chain of the segments that end in tokens ``(start, stop]``, after the link before them, if any."""
    first = start // SEGMENT_TOKENS
    return chains(key, first and first - 1, stop // SEGMENT_TOKENS)


def _leaf_keys(tree: TreeSnapshot) -> Iterator[bytes]:
    """Yield the key of every node without children: together they cover every resident prefix."""
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
