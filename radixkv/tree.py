"""RadixTree: the prefixes of ONE namespace. Pure structure: it knows no tenant, pool, clock or I/O.

A node is a run of whole blocks: its ``label`` (the key bytes of their token ids) and their ``block_ids``
(packed int32). A child is found by the bytes of its first block, a label is compared in one memcmp, so the
Python work of a walk is per node on the path and never per block or token.

    root ──"[0 … 1024)"──▶ system prompt ──"[1024 … 1312)"──▶ a conversation
                                        └──"[1024 … 1600)"──▶ another one

Invariants
- ``len(block_ids) == 4 × blocks`` and ``len(label) == block_bytes × blocks``, at least one block, except for
  the root, which has none; ``depth`` is the number of blocks from the root to the *end* of the node.
- A trimmed leaf's label may be longer, up to twice, until a walk comes by: evicting a few blocks then
  copies no label.
- Siblings differ in their first block; ``children`` is keyed by it.
- ``uses`` = leases that end here + children with ``uses`` > 0. So one lease touches one node and protects
  all its ancestors, and only the change 0 ↔ 1 travels upward.
- A split keeps the *lower* half's identity: whoever holds the node still ends where it ended.

Labels are at most ``MAX_LABEL_BYTES`` (or one block): so a split or a growth, which re-slice the label, cost
a bounded copy however long the prompt is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from radixkv.types import ID_BYTES

MAX_LABEL_BYTES: Final = 32_768
"""Longest label that a new node gets, 8,192 tokens: a million-token prompt is a path of 123 nodes."""

MAX_GROWN_LABEL_BYTES: Final = 8_192
"""Longest label that a leaf is grown to in place: an append then copies at most this much."""

_NO_CHILDREN: Final[dict[bytes, Node]] = {}


class Node:
    """A run of whole blocks. ``depth`` counts blocks from the root to its end."""

    __slots__ = ("block_ids", "children", "depth", "label", "parent", "tree", "uses")

    def __init__(
        self, tree: RadixTree, parent: Node | None, label: bytes, block_ids: bytes, depth: int
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.label = label
        self.block_ids = block_ids
        self.depth = depth
        self.uses = 0
        self.children: dict[bytes, Node] = _NO_CHILDREN

    @property
    def num_blocks(self) -> int:
        """Blocks of this node alone."""
        return len(self.block_ids) // ID_BYTES

    def cut_label(self, size: int) -> bytes:
        """Drop what trims left of the label after ``size`` bytes; returns the label."""
        self.label = label = self.label[:size]
        return label


class Walk(NamedTuple):
    """Where a key leads: whole nodes ``path``, then ``common`` bytes (whole blocks) into ``child``.

    ``node`` is the last of the path, or where the walk began; ``at`` is the position in the key where the
    path ends. ``child`` is None and ``common`` 0 if the walk ended at a node's end.
    """

    node: Node
    path: list[Node]
    at: int
    child: Node | None
    common: int

    @property
    def matched(self) -> int:
        """The position in the key where the match ends."""
        return self.at + self.common

    def block_ids(self) -> bytes:
        """Packed ids of the matched blocks from where the walk began; ask before ``child`` is split. O(nodes)."""
        parts = [node.block_ids for node in self.path]
        if self.child is not None:
            whole, label = self.child.block_ids, self.child.label
            parts.append(whole[: len(whole) * self.common // len(label)])
        return b"".join(parts)


_new_walk = tuple.__new__  # a third of the cost of calling the class


class RadixTree:
    """The tree of one namespace, over blocks of ``block_bytes`` key bytes."""

    __slots__ = ("_key_bytes_per_id_byte", "block_bytes", "num_blocks", "num_nodes", "root")

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._key_bytes_per_id_byte = block_bytes // ID_BYTES
        self.num_blocks = 0
        self.num_nodes = 0
        self.root = Node(self, None, b"", b"", 0)

    def walk(self, key: bytes, stop: int, node: Node | None = None, at: int = 0) -> Walk:
        """The longest resident prefix of ``key[at:stop]`` below ``node`` (the root by default). Changes nothing.

        ``at`` is a position in the key, in bytes, that the end of ``node`` stands for; a ``stop`` inside a block
        is rounded down. O(nodes on the path), each one dict lookup and one memcmp.
        """
        step, scale = self.block_bytes, self._key_bytes_per_id_byte
        stop -= (stop - at) % step
        if node is None:
            node = self.root
        path: list[Node] = []
        while at < stop:
            child = node.children.get(key[at : at + step])
            if child is None:
                break
            label, size = child.label, len(child.block_ids) * scale
            if len(label) != size:
                label = child.cut_label(size)
            end = at + size
            if end > stop or not key.startswith(label, at):
                return _new_walk(Walk, (node, path, at, child, self._common(label, key, at, stop)))
            path.append(child)
            node, at = child, end
        return _new_walk(Walk, (node, path, at, None, 0))

    def _common(self, label: bytes, key: bytes, at: int, stop: int) -> int:
        """Bytes, in whole blocks, that the label shares with ``key[at:stop]``; at least one block, never all."""
        size = min(len(label), stop - at)
        ours = np.frombuffer(label, np.uint32, size // 4)
        theirs = np.frombuffer(key, np.uint32, size // 4, at)
        differs = ours != theirs
        first = int(differs.argmax())
        if differs[first]:
            size = first * 4
        return size - size % self.block_bytes

    def split(self, lower: Node, at: int) -> Node:
        """Cut a node after ``at`` label bytes; returns the new upper half, the lower keeps its identity.

        ``0 < at < len(label)``, whole blocks. O(label).
        """
        parent = lower.parent
        assert parent is not None and 0 < at < len(lower.label) and at % self.block_bytes == 0
        cut = at // self.block_bytes * ID_BYTES
        depth = lower.depth - lower.num_blocks + cut // ID_BYTES
        upper = Node(self, parent, lower.label[:at], lower.block_ids[:cut], depth)
        upper.uses = 1 if lower.uses else 0
        upper.children = {lower.label[at : at + self.block_bytes]: lower}
        parent.children[upper.label[: self.block_bytes]] = upper
        self.num_nodes += 1
        lower.parent, lower.label, lower.block_ids = upper, lower.label[at:], lower.block_ids[cut:]
        return upper

    def attach(self, parent: Node, key: bytes, start: int, stop: int, block_ids: bytes) -> list[Node]:
        """Add ``key[start:stop]`` below ``parent``, as a path of as few nodes as ``MAX_LABEL_BYTES`` allows.

        The new nodes have one use each, as if a lease ended at the last; the caller accounts for it in ``parent``,
        and knows that no child of ``parent`` begins with the first block. Returns them, deepest last.
        """
        size = self.block_bytes
        step = max(MAX_LABEL_BYTES // size, 1) * size
        new: list[Node] = []
        at, ids = start, block_ids
        while at < stop:
            end = min(at + step, stop)
            if stop - start > step:
                ids = block_ids[(at - start) // size * ID_BYTES : (end - start) // size * ID_BYTES]
            label = key[at:end]
            node = Node(self, parent, label, ids, parent.depth + len(ids) // ID_BYTES)
            node.uses = 1
            if parent.children is _NO_CHILDREN:
                parent.children = {}
            parent.children[label[:size]] = node
            new.append(node)
            parent, at = node, end
        self.num_blocks += len(block_ids) // ID_BYTES
        self.num_nodes += len(new)
        return new

    def grow(self, leaf: Node, label: bytes, block_ids: bytes) -> None:
        """Add blocks to a leaf that has one use, in place. O(label after), at most MAX_GROWN_LABEL_BYTES."""
        leaf.label += label
        leaf.block_ids += block_ids
        added = len(block_ids) // ID_BYTES
        leaf.depth += added
        self.num_blocks += added

    def trim(self, leaf: Node, num_blocks: int) -> bytes:
        """Cut the last ``num_blocks`` off an unused leaf; a leaf with nothing left leaves the tree.

        Returns the packed ids that were cut off. O(blocks of the leaf) bytes copied, amortised.
        """
        ids = leaf.block_ids
        keep = len(ids) - num_blocks * ID_BYTES
        assert keep >= 0 and num_blocks > 0 and not leaf.children and not leaf.uses
        self.num_blocks -= num_blocks
        if not keep:
            self._unlink(leaf)
            return ids
        leaf.block_ids = ids[:keep]
        leaf.depth -= num_blocks
        size = keep * self._key_bytes_per_id_byte
        if len(leaf.label) > 2 * size:
            leaf.cut_label(size)
        return ids[keep:]

    def _unlink(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.label[: self.block_bytes]]
        self.num_nodes -= 1
        if not parent.children:
            parent.children = _NO_CHILDREN

    @property
    def is_empty(self) -> bool:
        """Whether nothing is resident and nothing leased."""
        return not self.root.children and not self.root.uses

    def is_linked(self, node: Node) -> bool:
        """Whether the node is still in the tree."""
        parent = node.parent
        return parent is not None and parent.children.get(node.label[: self.block_bytes]) is node

    def key_of(self, node: Node) -> bytes:
        """The whole key from the root to the node's end. O(bytes)."""
        size = node.depth * self.block_bytes
        labels: list[bytes] = []
        at: Node | None = node
        while at is not None:
            labels.append(at.label)
            at = at.parent
        return b"".join(reversed(labels))[:size]

    def nodes(self) -> list[Node]:
        """All nodes except the root, parents before children. O(nodes)."""
        found: list[Node] = []
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            found.append(node)
            pending.extend(node.children.values())
        return found
