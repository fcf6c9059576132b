"""The journal of one cache, its digests, and the mirror of what the replica holds.

    cache, under its lock ──append──▶ queue (bounded) ──drain(), another thread──▶ digests ──▶ mirror
                                                                                         └──▶ entries to write

Under the cache's lock a record costs an append: no lock, no digest, no thread woken unless the publisher
sleeps. Everything else happens in ``drain``, on the publisher's thread. A queue that is full drops all it
holds and all that follows until the next ``drain``, which says so: then nothing that was published can be
relied on, the mirror is emptied, and ``rebuild`` fills it from the cache itself. A lost ``stored`` would only
be forgetful, but a lost ``removed`` would lie for ever.

Why ``rebuild`` is right while the cache goes on: records are taken again from a moment before the cache is
read. Those older than the reading are applied to it once more; the last record of a segment decides, and it
decided in the reading too.

A raised generation goes through the queue too: what the tenant had until then is published as cleared, under
the digests of the old generation, and what follows is published under the new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from radixkv.coordination.holdings import Holdings
from radixkv.coordination.keys import SEGMENT_BYTES, FleetKeys, Scope
from radixkv.coordination.protocol import SEGMENT_TOKENS, Resident
from radixkv.coordination.wire import DIGESTS_AN_ENTRY, Entry
from radixkv.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.namespaces import Namespace
    from radixkv.types import Key, NodeSnapshot, TreeSnapshot

_RECORD_BYTES = 200
"""What a queued record takes beside its key, roughly."""
_MAX_NAMESPACES = 65_536
DRAIN_RECORDS = 512
"""How many records one ``drain`` takes."""

Record = tuple[Literal["store", "remove", "clear"], "Namespace", "Key", int, int]
"""What the cache said: tokens ``[start, stop)`` of the prefix ``key`` came, left, or all was cleared."""
Raised = tuple[Literal["raise"], str, int]
"""A tenant and its new generation."""


class Drained(NamedTuple):
    """``entries`` in order; ``lost``: the queue had overflowed, there are none, and the mirror is empty."""

    entries: list[Entry]
    lost: bool


class Publisher:
    """A Journal. ``stored``, ``removed``, ``cleared`` and ``raised`` from any thread; the rest from one at a time.

    ``wake`` is called for a record that comes while ``is_asleep``, which the thread that drains sets;
    ``generation_of`` tells the generation of a tenant that is met for the first time.
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
        self.num_overflows = 0
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
        self._raised: dict[str, int] = {}
        self._scopes: dict[Namespace, Scope] = {}
        self._max_namespaces = _MAX_NAMESPACES

    @property
    def num_queued(self) -> int:
        """Records that wait."""
        return 0 if self._dropping else len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """What those take, roughly."""
        return max(0, self.appended_bytes - self._drained_bytes)

    @property
    def is_lost(self) -> bool:
        """Records were dropped, and the next ``drain`` will say so."""
        return self._dropping

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """O(1): only appends."""
        self._append(("store", namespace, key, start, stop), stop * TOKEN_BYTES)

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """O(1): only appends."""
        self._append(("remove", namespace, key, start, stop), stop * TOKEN_BYTES)

    def cleared(self, namespace: Namespace) -> None:
        """O(1): only appends."""
        self._append(("clear", namespace, b"", 0, 0), 0)

    def raised(self, tenant: str, generation: int) -> None:
        """From here on the tenant is in ``generation``, and has nothing of before. O(1)."""
        self._raised[tenant] = generation
        self._append(("raise", tenant, generation), 0)

    def suspend(self) -> None:
        """Drop what is queued and all that comes, until the next ``drain``."""
        self._dropping = True
        self._queue.clear()

    def drain(self) -> Drained:
        """Digest some of what is queued, in order, and keep the mirror. Call again while ``num_queued``.

        O(segments in the records, and one pass over their keys), at most 512 records.
        """
        if self._dropping:
            self._begin_anew()
            self.mirror.clear()
            self._scopes = {}
            self._generations.update(self._raised)
            return Drained([], True)
        entries: list[Entry] = []
        queue, num_bytes = self._queue, 0
        for _ in range(DRAIN_RECORDS):
            if not queue:
                break
            record = queue.popleft()
            if record[0] == "raise":
                entries += self._raise(*record[1:])
            else:
                num_bytes += record[4] * TOKEN_BYTES
                self._digest(entries, record)
            num_bytes += _RECORD_BYTES
        self._drained_bytes += num_bytes
        return Drained(entries, False)

    def rebuild(self, resident: Resident, between: Callable[[], None]) -> None:
        """Fill the mirror with what is resident; ``between`` is called now and then. O(nodes × depth)."""
        snapshot = getattr(resident, "snapshot_in_slices", resident.snapshot)()  # nobody waits for all of it
        for tree in snapshot.trees:
            if not tree.detached and tree.base is None:
                scope = self._meet(tree.namespace)
                for key in _leaf_keys(tree):
                    self.mirror.store(scope.digest, scope.digests(key, 0, len(key) // SEGMENT_BYTES))
                    between()
        self._max_namespaces = max(_MAX_NAMESPACES, 2 * len(self._scopes))

    def _append(self, record: Record | Raised, size: int) -> None:
        if self._dropping:
            return
        self.appended_bytes += size + _RECORD_BYTES
        self._queue.append(record)
        if (
            len(self._queue) > self._max_records
            or self.appended_bytes - self._drained_bytes > self._max_bytes
        ):
            self._dropping = True  # the thread that drains gives the memory back: that takes milliseconds
            self.num_overflows += 1
        if self.is_asleep:
            self._wake()

    def _begin_anew(self) -> None:
        """Empty the queue, and only then let records in again: those dropped before are in the cache by then."""
        self._queue.clear()
        self._drained_bytes = self.appended_bytes
        self._dropping = False

    def _meet(self, namespace: Namespace) -> Scope:
        """What a namespace is published under from now on. Too many of them: all is rebuilt with what is resident."""
        tenant = namespace.tenant
        if tenant not in self._generations:
            self._generations[tenant] = self._generation_of(tenant)
        scope = self._scopes[namespace] = self._keys.scope(namespace, self._generations[tenant])
        if len(self._scopes) > self._max_namespaces:
            self.suspend()
        return scope

    def _digest(self, entries: list[Entry], record: Record) -> None:
        """Append what one record comes to, and let the mirror follow."""
        op, namespace, key, start, stop = record
        scope = self._scopes.get(namespace) or self._meet(namespace)
        if op == "clear":
            self.mirror.clear(scope.digest)
            entries.append(Entry("clear", scope.digest))
            del self._scopes[namespace]
            return
        first = start // SEGMENT_TOKENS
        whole = key if isinstance(key, bytes) else b"".join(key)
        digests = scope.digests(whole, first and first - 1, stop // SEGMENT_TOKENS)
        parent = digests.pop(0) if first and digests else b""
        if op == "store":
            self.mirror.store(scope.digest, digests)
        else:
            self.mirror.remove(scope.digest, digests)
        for at in range(0, len(digests), DIGESTS_AN_ENTRY):
            run = digests[at : at + DIGESTS_AN_ENTRY]
            entries.append(Entry(op, scope.digest, parent, b"".join(run)))
            parent = run[-1]

    def _raise(self, tenant: str, generation: int) -> Iterator[Entry]:
        """Clear what is published of a tenant, if that was under an older generation."""
        if generation <= self._generations.get(tenant, 0):
            return
        self._generations[tenant] = generation
        for namespace in [namespace for namespace in self._scopes if namespace.tenant == tenant]:
            digest = self._scopes.pop(namespace).digest
            self.mirror.clear(digest)
            yield Entry("clear", digest)


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
