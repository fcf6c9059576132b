"""The segments that one replica holds, and their tiers: sets of prefix digests.

This is the mirror of what a replica published, and the source of its snapshots. Applying an entry twice, or a run of
entries again up to their end, changes nothing. That is why a snapshot and the log behind it may overlap.

The sets are the keys of dicts, in insertion order, which is about their order in memory. Packing them in the order of a
set's table takes more than twice as long.
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
        """Apply one entry. O(its digests)."""
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
        """Remove digests; digests that aren't held are no error."""
        tiers = self._tiers.get(namespace, {})
        for held in tiers.values():
            self.num_digests -= _take(held, digests)
        if not any(tiers.values()):
            self._tiers.pop(namespace, None)

    def clear(self, namespace: bytes = b"") -> None:
        """Forget a namespace, or all of them if it is empty."""
        if namespace:
            self.num_digests -= sum(map(len, self._tiers.pop(namespace, {}).values()))
        else:
            self._tiers = {}
            self.num_digests = 0

    def of(self, namespace: bytes) -> dict[bytes, str]:
        """Return the tier of each digest of a namespace. O(digests)."""
        tiers = self._tiers.get(namespace, {})
        return {digest: tier for tier, held in tiers.items() for digest in held}

    def groups(self) -> Iterator[tuple[bytes, str, AbstractSet[bytes]]]:
        """Yield ``(namespace digest, tier, digests)``, the input of a snapshot."""
        for namespace, tiers in self._tiers.items():
            for tier, held in tiers.items():
                if held:
                    yield namespace, tier, held.keys()

    def load(self, groups: Groups) -> None:
        """Replace everything held by a snapshot's content."""
        self.clear()
        for namespace, tier, packed in groups:
            self.store(namespace, split(packed), tier)


def _take(held: dict[bytes, None], digests: Iterable[bytes]) -> int:
    """Remove the digests that are held; return how many were."""
    before, take = len(held), held.pop
    for digest in digests:
        take(digest, None)
    return before - len(held)


def split(packed: bytes) -> list[bytes]:
    """Split a packed run into its 16-byte digests."""
    return [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]
