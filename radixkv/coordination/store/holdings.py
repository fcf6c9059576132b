"""Which segments one replica holds, and in which tier: sets of prefix digests.

The mirror of what a replica published, and what its snapshots are made of. Applying an entry twice, or a run
of entries again up to their end, changes nothing, which is what lets a snapshot and the log behind it overlap.

The sets are the keys of dicts, in the order in which they came: that is about how they lie in memory, and packing
them in the order of a set's table takes more than twice as long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet

from radixkv.coordination.keys import DIGEST_BYTES
from radixkv.coordination.store.wire import Entry, Groups


class Holdings:
    """Sets of 16-byte digests by namespace digest and tier; a digest is in one tier. ``num_digests`` counts all."""

    __slots__ = ("_tiers", "num_digests")

    def __init__(self) -> None:
        self._tiers: dict[bytes, dict[str, dict[bytes, None]]] = {}
        self.num_digests = 0

    def apply(self, entry: Entry) -> None:
        """Take in one entry. O(its digests)."""
        if entry.op == "store":
            self.store(entry.namespace, split(entry.digests), entry.tier)
        elif entry.op == "remove":
            self.remove(entry.namespace, split(entry.digests))
        elif entry.op == "tier":
            held = self.of(entry.namespace)
            self.store(entry.namespace, [each for each in split(entry.digests) if each in held], entry.tier)
        else:
            self.clear(entry.namespace)

    def store(self, namespace: bytes, digests: Iterable[bytes], tier: str = "device") -> None:
        """Put digests into a tier, and out of any other."""
        tiers = self._tiers.get(namespace)
        if tiers is None:
            tiers = self._tiers[namespace] = {}
        held = tiers.get(tier)
        if held is None:
            held = tiers[tier] = {}
        if len(tiers) > 1:
            digests = list(digests)
            for other in tiers.values():
                if other is not held:
                    self.num_digests -= _take(other, digests)
        before = len(held)
        held.update(dict.fromkeys(digests))
        self.num_digests += len(held) - before

    def remove(self, namespace: bytes, digests: Collection[bytes]) -> None:
        """Take digests out; those that aren't held are no error."""
        tiers = self._tiers.get(namespace, {})
        for held in tiers.values():
            self.num_digests -= _take(held, digests)
        if not any(tiers.values()):
            self._tiers.pop(namespace, None)

    def clear(self, namespace: bytes = b"") -> None:
        """Forget a namespace; all of them if it is empty."""
        if namespace:
            self.num_digests -= sum(map(len, self._tiers.pop(namespace, {}).values()))
        else:
            self._tiers = {}
            self.num_digests = 0

    def of(self, namespace: bytes) -> dict[bytes, str]:
        """The tier of each digest of a namespace. O(digests)."""
        tiers = self._tiers.get(namespace, {})
        return {digest: tier for tier, held in tiers.items() for digest in held}

    def groups(self) -> Iterator[tuple[bytes, str, AbstractSet[bytes]]]:
        """``(namespace digest, tier, digests)``: what a snapshot is packed from."""
        for namespace, tiers in self._tiers.items():
            for tier, held in tiers.items():
                if held:
                    yield namespace, tier, held.keys()

    def load(self, groups: Groups) -> None:
        """Hold what a snapshot says, and nothing else."""
        self.clear()
        for namespace, tier, packed in groups:
            self.store(namespace, split(packed), tier)


def _take(held: dict[bytes, None], digests: Iterable[bytes]) -> int:
    """Take digests out, be they there or not; how many were."""
    before, take = len(held), held.pop
    for digest in digests:
        take(digest, None)
    return before - len(held)


def split(packed: bytes) -> list[bytes]:
    """The 16-byte digests of a packed run."""
    return [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]
