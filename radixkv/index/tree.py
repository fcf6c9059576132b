"""RadixTree: the prefixes of ONE namespace. A pure data structure: it knows no tenant, pool, clock or I/O.

A node is a run of whole blocks: its ``label`` (the key bytes of their token ids) and their ``block_ids`` (packed
int32). A child is found by the bytes of its first block, and a label is compared in one memcmp. So the Python work of a
walk is per node on the path and never per block or token.

    root ──"[0 … 1024)"──▶ system prompt ──"[1024 … 1312)"──▶ a conversation
                                        └──"[1024 … 1600)"──▶ another one

Invariants
- ``len(block_ids) == 4 × blocks`` and ``len(label) == block_bytes × blocks``, at least one block. Only the root has
  none. ``depth`` is the number of blocks from position 0 to the *end* of the node.
- A tree may continue a prefix that others own (``head_key``, ``head_ids``). Its root is then at the end of that
  prefix, and keys for the tree begin with that prefix.
- The label of the leaf that was trimmed last (``_trimmed``) may be longer, up to four times, until the next walk.
  So evicting a few blocks copies no label.
- Siblings differ in their first block. ``children`` is keyed by it; an only child is stored there directly.
- ``uses`` = leases that end here + children with ``uses`` > 0. So one lease touches one node and protects all its
  ancestors. Only the change 0 ↔ 1 is passed upward.
- A split keeps the *lower* half's identity. So a node that is leased still has the same end.

Labels are at most ``MAX_LABEL_BYTES`` (or one block). A split or a growth slices the label again, so this bounds its
copy however long the prompt is.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from radixkv.index.tokens import ID_BYTES

MAX_LABEL_BYTES: Final = 122_880
"""Longest label of a new node, 30,720 tokens: a million-token prompt is a path of 33 nodes.

A little less than the size from which an allocator maps pages for each allocation (glibc: 128 KiB).
"""

MAX_GROWN_LABEL_BYTES: Final = 8_192
"""Longest label of a leaf that is grown in place. An append then copies at most this much."""


class Node:
    """A run of whole blocks. ``depth`` counts blocks from the root to its end."""

    __slots__ = ("block_ids", "children", "depth", "label", "parent", "sole_user", "tree", "uses")

    def __init__(
        self,
        tree: RadixTree,
        parent: Node | None,
        label: bytes,
        block_ids: bytes,
        depth: int,
        uses: int,
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.label = label
        self.block_ids = block_ids
        self.depth = depth
        self.uses = uses
        self.children: Node | dict[bytes, Node] | None = (
            None  # a dict is made only when needed: most nodes have one child or none
        )
        self.sole_user: SoleUser | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of this node alone."""
        return len(self.block_ids) // ID_BYTES

    def child_nodes(self) -> list[Node]:
        """Its children. O(children)."""
        below = self.children
        if below is None:
            return []
        return [below] if isinstance(below, Node) else list(below.values())

    @property
    def num_children(self) -> int:
        """The number of its children. O(1)."""
        below = self.children
        if below is None:
            return 0
        return 1 if isinstance(below, Node) else len(below)


class SoleUser:
    """The only user of some ``nodes``: a session, or several sessions of one family.

    - ``family``: the user that stands for all sessions of its family; None for that one.
    - ``num_open``: sessions that are not closed.

    What uses a node uses its ancestors. So a node below one with a sole user has the same user, or one of its family.
    """

    __slots__ = ("family", "namespace", "nodes", "num_open")

    def __init__(self, namespace: object, family: SoleUser | None) -> None:
        self.namespace, self.family, self.num_open = namespace, family, 1
        self.nodes: dict[Node, None] = {}

    def shares(self, other: SoleUser) -> bool:
        """Whether ``other`` is this user or stands for it."""
        return other is self or other is self.family


class RadixTree:
    """The tree of one namespace, over blocks of ``block_bytes`` key bytes."""

    __slots__ = (
        "_key_bytes_per_id_byte",
        "_longest_label",
        "_trimmed",
        "block_bytes",
        "head_ids",
        "head_key",
        "num_blocks",
        "num_nodes",
        "root",
    )

    def __init__(self, block_bytes: int, head_key: bytes = b"", head_ids: bytes = b"") -> None:
        self.block_bytes = block_bytes
        self.head_key, self.head_ids = head_key, head_ids
        self._key_bytes_per_id_byte = block_bytes // ID_BYTES
        self._longest_label = max(MAX_LABEL_BYTES // block_bytes, 1) * block_bytes
        self.num_blocks = 0
        self.num_nodes = 0
        self._trimmed: Node | None = None
        self.root = Node(self, None, b"", b"", len(head_ids) // ID_BYTES, 0)

    def walk(
        self, key: bytes, stop: int, table: bytearray, node: Node | None = None, at: int = 0
    ) -> tuple[Node, int, Node | None, int]:
        """Find the longest resident prefix of ``key[at:stop]`` below ``node`` (the root by default). Changes nothing.

        ``at`` is the position in the key, in bytes, of the end of ``node``. A ``stop`` inside a block is rounded down.
        Appends the packed ids of the matched blocks to ``table``.

        Returns ``(node, at, child, common)``: the last whole node of the path and the position of its end. If the match
        continues into a child, also the child and the number of matched bytes of its label; otherwise None and 0. The
        match ends at ``at + common``. O(nodes on the path), each one dict lookup and one memcmp.
        """
        step = self.block_bytes
        stop -= (stop - at) % step
        if node is None:
            node = self.root
            if self.head_ids:
                table += self.head_ids
                at = len(self.head_key)
        while at < stop:
            below = node.children
            if below is None:
                break
            child = below if isinstance(below, Node) else below.get(key[at : at + step])
            if child is None:
                break
            label = child.label
            if not key.startswith(label, at, stop):
                if child is below and not key.startswith(label[:step], at):
                    break
                if child is self._trimmed:
                    self._cut_label(child)
                    continue
                common = num_common_bytes(label, key, at, stop, step)
                table += child.block_ids[: common // self._key_bytes_per_id_byte]
                return node, at, child, common
            table += child.block_ids
            at += len(label)
            node = child
        if node is self._trimmed:
            at -= self._cut_label(node)
        return node, at, None, 0

    def split(self, lower: Node, at: int) -> Node:
        """Cut a node after ``at`` label bytes. Returns the new upper half; the lower half keeps its identity.

        ``0 < at < len(label)``, whole blocks. O(label).
        """
        parent = lower.parent
        assert parent is not None and 0 < at < len(lower.label) and at % self.block_bytes == 0
        cut = at // self.block_bytes * ID_BYTES
        depth = lower.depth - lower.num_blocks + cut // ID_BYTES
        uses = 1 if lower.uses else 0
        upper = Node(self, parent, lower.label[:at], lower.block_ids[:cut], depth, uses)
        upper.children = lower
        beside = parent.children
        if isinstance(beside, dict):
            beside[upper.label[: self.block_bytes]] = upper
        else:
            parent.children = upper
        self.num_nodes += 1
        lower.parent, lower.label, lower.block_ids = upper, lower.label[at:], lower.block_ids[cut:]
        if lower.sole_user is not None:
            give_to(upper, lower.sole_user)
        return upper

    def attach(self, parent: Node, key: bytes, start: int, stop: int, block_ids: bytes) -> Node:
        """Add ``key[start:stop]`` below ``parent``, as a path of as few nodes as ``MAX_LABEL_BYTES`` allows.

        The new nodes have one use each, as if a lease ended at the last. The caller counts this use in ``parent``. No
        child of ``parent`` may begin with the first block. Returns the deepest node. O(bytes).
        """
        longest = self._longest_label
        while stop - start > longest:
            cut = longest // self._key_bytes_per_id_byte
            parent = self.attach(parent, key, start, start + longest, block_ids[:cut])
            start, block_ids = start + longest, block_ids[cut:]
        label, added = key[start:stop], len(block_ids) // ID_BYTES
        node = Node(self, parent, label, block_ids, parent.depth + added, 1)
        beside, size = parent.children, self.block_bytes
        if beside is None:
            parent.children = node
        elif isinstance(beside, dict):
            beside[label[:size]] = node
        else:
            parent.children = {beside.label[:size]: beside, label[:size]: node}
        self.num_blocks += added
        self.num_nodes += 1
        return node

    def trim(self, leaf: Node, size: int) -> bytes:
        """Cut the last ``size`` bytes of packed ids off an unused leaf, fewer than it has, and return them.

        Copies O(blocks of the leaf) bytes. The label is cut when three quarters of it are surplus, or by the next walk.
        """
        ids = leaf.block_ids
        keep = len(ids) - size
        assert keep > 0 and leaf.children is None and not leaf.uses
        leaf.block_ids = ids[:keep]
        leaf.depth -= size // ID_BYTES
        self.num_blocks -= size // ID_BYTES
        if leaf is not self._trimmed:
            if self._trimmed is not None:
                self._cut_label(self._trimmed)
            self._trimmed = leaf
        if len(leaf.label) > 4 * keep * self._key_bytes_per_id_byte:
            self._cut_label(leaf)
        return ids[keep:]

    def _cut_label(self, leaf: Node) -> int:
        """Drop the surplus from the trimmed leaf's label. Returns how many bytes."""
        surplus = len(leaf.label) - len(leaf.block_ids) * self._key_bytes_per_id_byte
        if surplus:
            leaf.label = leaf.label[:-surplus]
        self._trimmed = None  # last, because an interrupted match is not repaired
        return surplus

    def remove(self, leaf: Node) -> None:
        """Remove a leaf from the tree. O(1)."""
        parent = leaf.parent
        assert parent is not None and leaf.children is None
        if leaf.sole_user is not None:
            give_to(leaf, None)  # first: after an interruption, nobody has a node that is gone
        beside = parent.children
        if isinstance(beside, dict) and len(beside) > 1:
            del beside[leaf.label[: self.block_bytes]]
        else:
            parent.children = None
        if leaf is self._trimmed:
            self._trimmed = None
        self.num_nodes -= 1
        self.num_blocks -= len(leaf.block_ids) // ID_BYTES

    def move(self, top: Node, nodes: list[Node], to: RadixTree) -> None:
        """Move a node with all ``nodes`` below it to an empty tree that continues the prefix up to its parent.

        The parent loses the use that it counts for the node. O(nodes). ``recovery`` finishes an interrupted move once
        ``parent`` is set, and undoes it before.
        """
        above = top.parent
        assert above is not None and to.is_empty
        if self._trimmed is not None:
            self._cut_label(self._trimmed)
        to.root.children = top
        top.parent = to.root
        beside = above.children
        if isinstance(beside, dict) and len(beside) > 1:
            del beside[top.label[: self.block_bytes]]
        else:
            above.children = None
        if top.uses:
            above.uses -= 1
            to.root.uses += 1
        num_blocks = 0
        for node in nodes:
            node.tree = to
            num_blocks += node.num_blocks
        self.num_blocks -= num_blocks
        self.num_nodes -= len(nodes)
        to.num_blocks, to.num_nodes = num_blocks, len(nodes)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is resident or leased."""
        return self.root.children is None and not self.root.uses

    def child_of(self, node: Node, first: bytes) -> Node | None:
        """Return the child whose first block has the key bytes ``first``. O(1)."""
        below = node.children
        if isinstance(below, dict):
            return below.get(first)
        return below if below is not None and below.label.startswith(first) else None

    def is_linked(self, node: Node) -> bool:
        """Whether the node is still in the tree."""
        beside = None if node.parent is None else node.parent.children
        if isinstance(beside, dict):
            return beside.get(node.label[: self.block_bytes]) is node
        return beside is node

    def key_of(self, node: Node) -> bytes:
        """Return the whole key from position 0 to the node's end. O(bytes)."""
        size = node.depth * self.block_bytes
        labels: list[bytes] = []
        at: Node | None = node
        while at is not None:
            labels.append(at.label)
            at = at.parent
        labels.append(self.head_key)
        return b"".join(reversed(labels))[:size]

    def labels_to(self, node: Node) -> tuple[bytes, ...]:
        """Return the same key in pieces, one per node. O(nodes), and a copy of the last label if it has a surplus."""
        labels = [node.label[: node.num_blocks * self.block_bytes]]
        at = node.parent
        while at is not None:
            labels.append(at.label)
            at = at.parent
        labels.reverse()
        return tuple(labels)

    def nodes(self) -> list[Node]:
        """Return all nodes except the root, parents before children. O(nodes)."""
        return nodes_below(self.root)


def nodes_below(node: Node) -> list[Node]:
    """Return all nodes below a node, parents before children. O(nodes)."""
    found: list[Node] = []
    pending = node.child_nodes()
    while pending:
        each = pending.pop()
        found.append(each)
        pending += each.child_nodes()
    return found


def num_common_bytes(label: bytes, key: bytes, at: int, stop: int, step: int) -> int:
    """Return how many bytes, in whole blocks of ``step``, a label shares with ``key[at:stop]``. O(label), without a
    copy.
    """
    size = min(len(label), stop - at)
    ours = np.frombuffer(label, np.uint32, size // 4)
    theirs = np.frombuffer(key, np.uint32, size // 4, at)
    differs = ours != theirs
    first = int(differs.argmax())
    if differs[first]:
        size = first * 4
    return size - size % step


def path_between(above: Node, node: Node) -> list[Node]:
    """Return the nodes below ``above`` down to ``node``, in this order. O(nodes)."""
    path: list[Node] = []
    at = node
    while at is not above:
        path.append(at)
        assert at.parent is not None
        at = at.parent
    path.reverse()
    return path


def give_to(node: Node, user: SoleUser | None) -> None:
    """Set the sole user of a node. O(1)."""
    if node.sole_user is not None:
        node.sole_user.nodes.pop(node, None)
    node.sole_user = user
    if user is not None:
        user.nodes[node] = None


def note_use(node: Node, user: SoleUser | None) -> list[Node]:
    """Note that ``user`` uses a node and its ancestors; None is any use without a session.

    Returns the nodes that have another sole user now. O(these nodes).
    """
    changed: list[Node] = []
    at: Node | None = node
    while at is not None and (known := at.sole_user) is not None:
        if user is not None and user.shares(known):
            break
        give_to(at, joined(known, user))
        changed.append(at)
        at = at.parent
    return changed


def joined(user: SoleUser, other: SoleUser | None) -> SoleUser | None:
    """Return the sole user of what both use: one of them, their family, or None."""
    if other is None:
        return None
    if other.shares(user):
        return user
    family = user if user.family is None else user.family
    return family if other is family or other.family is family else None
