"""Slow, obvious models of a cache.

``Oracle`` knows the prefixes that may be served. A cache may forget them, but may not serve anything else. The class is
part of the audit package, because the state machine needs it wherever it runs.

``Blocks`` knows exactly the resident blocks, if requests come one after the other. It evicts the least recently used
blocks.
"""

from __future__ import annotations

from radixkv import PrefixCache
from radixkv.audit.oracle import Engine, Oracle, chain, rows_of

__all__ = ["Blocks", "Engine", "Oracle", "chain", "resident_prefixes", "rows_of"]

Prefix = tuple[int, ...]


class Blocks:
    """Blocks by their prefix, each with the end of its last use: the content of an LRU cache of single blocks."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ended: dict[Prefix, int] = {}
        self.now = 0

    def use(self, prefixes: list[Prefix]) -> None:
        """Record that a use of a path has ended."""
        self.now += 1
        for prefix in prefixes:
            self.ended[prefix] = self.now

    def evict(self, num_blocks: int) -> None:
        """Evict the oldest blocks that are no other block's parent, so the deepest of a path first."""
        for _ in range(min(num_blocks, len(self.ended))):
            parents = {prefix[: -self.block_size] for prefix in self.ended}
            leaves = [prefix for prefix in self.ended if prefix not in parents]
            del self.ended[min(leaves, key=lambda prefix: self.ended[prefix])]


def resident_prefixes(cache: PrefixCache) -> set[Prefix]:
    """Return the prefix that each resident block ends, read from the trees. O(blocks × depth)."""
    found = set()
    for tree in cache.snapshot().trees:
        keys: list[bytes] = []
        for node in tree.nodes:
            above = keys[node.parent] if node.parent is not None else b""
            keys.append(above + node.label)
            size = len(node.label) // (len(node.block_ids) // 4)
            for stop in range(len(above) + size, len(keys[-1]) + 1, size):
                key = keys[-1][:stop]
                found.add(tuple(int.from_bytes(key[at : at + 4], "little") for at in range(0, stop, 4)))
    return found
