"""Which segments one replica holds: a set of prefix digests for each namespace digest.

Three things are one: a replica's mirror of what it published, the view of another replica, and the facts in
the memory store. Applying an entry twice, or a run of entries again up to their end, changes nothing, which
is what lets a snapshot and the log behind it overlap.

One thread writes. Others may ask ``of`` and test membership meanwhile: they see some state of a set that
is being changed, and need no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

from radixkv.coordination.keys import DIGEST_BYTES
from radixkv.coordination.wire import Entry

_NONE: frozenset[bytes] = frozenset()


class Holdings:
    """Sets of 16-byte digests by namespace digest; ``num_digests`` counts them all."""

    __slots__ = ("_sets", "num_digests")

    def __init__(self) -> None:
        self._sets: dict[bytes, set[bytes]] = {}
        self.num_digests = 0

    def of(self, namespace: bytes) -> AbstractSet[bytes]:
        """The digests of a namespace. O(1), the set itself: not to be changed or kept."""
        return self._sets.get(namespace, _NONE)

    def apply(self, entry: Entry, room: int | None = None) -> int:
        """Take in one entry; at most ``room`` digests are added. How many were left out. O(digests)."""
        if entry.op == "store":
            return self.store(entry.namespace, split(entry.digests), room)
        if entry.op == "remove":
            self.remove(entry.namespace, split(entry.digests))
        else:
            self.clear(entry.namespace)
        return 0

    def store(self, namespace: bytes, digests: Iterable[bytes], room: int | None = None) -> int:
        """Add digests, at most ``room`` new ones; how many were left out."""
        held = self._sets.get(namespace, set())
        left_out = 0
        for digest in digests:
            if digest in held:
                continue
            if room is not None:
                if room <= 0:
                    left_out += 1
                    continue
                room -= 1
            held.add(digest)
            self.num_digests += 1
        if held:
            self._sets[namespace] = held
        return left_out

    def remove(self, namespace: bytes, digests: Iterable[bytes]) -> None:
        """Take digests out; those that aren't held are no error."""
        held = self._sets.get(namespace)
        if held is None:
            return
        before = len(held)
        held.difference_update(digests)
        self.num_digests -= before - len(held)
        if not held:
            del self._sets[namespace]

    def clear(self, namespace: bytes = b"") -> None:
        """Forget a namespace; all of them if it is empty."""
        if namespace:
            self.num_digests -= len(self._sets.pop(namespace, _NONE))
        else:
            self._sets = {}
            self.num_digests = 0

    def items(self) -> Iterator[tuple[bytes, AbstractSet[bytes]]]:
        """Namespace digests with their digests."""
        return iter(self._sets.items())

    def copy(self) -> Holdings:
        """An equal one that shares nothing. O(digests)."""
        other = Holdings()
        other._sets = {namespace: set(held) for namespace, held in self._sets.items()}
        other.num_digests = self.num_digests
        return other


def split(packed: bytes) -> Iterator[bytes]:
    """The 16-byte digests of a packed run."""
    return (packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES))


def leading(sets: list[AbstractSet[bytes]], digests: Iterable[bytes]) -> list[int]:
    """For each set, how many of the first ``digests`` it holds without a hole. Ends at the longest."""
    counts = [0] * len(sets)
    running = list(range(len(sets)))
    for digest in digests:
        running = [index for index in running if digest in sets[index]]
        if not running:
            break
        for index in running:
            counts[index] += 1
    return counts
