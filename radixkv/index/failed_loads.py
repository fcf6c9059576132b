"""Failed loads: blocks whose KV turn out to be wrong are forgotten, with everything that was computed behind them.

    before    root ─▶ good blocks ─▶ wrong blocks ─▶ what was computed behind them
    after     root ─▶ good blocks
                           ┊ head of a detached tree ─▶ wrong blocks ─▶ …       until nobody holds them

The wrong blocks move to a detached tree, as if their namespace had been cleared. So no match reaches them, and other
sequences that hold them continue. The detached tree continues the good blocks like a tree behind a base: an ended base
without an id leases them (``bases``).

The sequence itself returns to the good blocks, and its next commit makes right blocks resident. It must not write into
blocks that others hold. So it takes its blocks out of the detached tree if it alone holds them, or gets new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex, cast

from radixkv.errors import LeaseError
from radixkv.index import purge, requests
from radixkv.index.recovery import mend
from radixkv.index.tenants import Base, NamespaceTree
from radixkv.index.tokens import ID_BYTES
from radixkv.index.tree import Node, nodes_below, path_between
from radixkv.index.validation import require_between

if TYPE_CHECKING:
    from radixkv.index.holders import SequenceState
    from radixkv.index.state import CacheState

MAX_EMPTIED_NODES = 256
"""A sequence takes its blocks only out of a smaller tree, which is emptied under one hold of the lock."""


def forget(cache: CacheState, sequence: SequenceState, from_token: SupportsIndex) -> int:
    """See PrefixCache.forget."""
    detached: list[NamespaceTree] = []
    try:
        with cache._lock:
            try:
                num_blocks = _forget(cache, sequence, from_token, detached)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, sequence)
                raise
        purge.free_unused(cache, detached)
        return num_blocks
    except BaseException as error:  # between two slices: the rest is freed at once
        with cache._lock:
            mend(cache, error, sequence)
        raise


def _forget(
    cache: CacheState, sequence: SequenceState, from_token: SupportsIndex, detached: list[NamespaceTree]
) -> int:
    """Forget, and add the trees that must be freed to ``detached``. Returns how many blocks matched before."""
    requests.require_open(sequence)
    size, evictor = cache._block_size, cache._evictor
    tree, end = _home(sequence)
    low = len(tree.head_ids) // ID_BYTES * size
    from_token = require_between("from_token", from_token, low, sequence.num_tokens)
    if sequence._ahead is not None:
        raise LeaseError("steps compute tokens of this sequence: end them first (step_done, step_failed)")
    good = min(from_token // size, end.depth)
    if good == sequence._node.depth:
        _go_back(sequence, from_token)
        return 0
    top, above, num_blocks = None, end, 0
    if good < end.depth:
        top = _node_with(end, good)
        _require_committed(cache, top)
    keeps = sequence._run is None and sequence._node is end
    is_private = keeps and sequence._own <= good
    keeps = is_private or (keeps and _is_alone(cache, sequence, top))
    fresh = bytearray()
    if not keeps:
        needed = sequence.num_blocks - good
        evictor.take(needed, tree.tenant, fresh)
        evictor.charge(tree.tenant, needed)
    if top is not None:
        above, num_blocks = _detach(cache, sequence, tree, top, good, detached)
    evictor.lease(above, tree)
    old, wrong = sequence._node, cast(NamespaceTree, sequence._node.tree)
    if not keeps:
        sequence._tree = wrong
        cache._runs.cut(sequence, 0)
        sequence._table[:] = _path_ids(above, tree) + fresh
        sequence._own = good
    sequence._tree, sequence._node = tree, above
    if keeps and not is_private:
        sequence._own = good
        _free_beside(cache, old, wrong)
        evictor.take_back(old, wrong)
    else:
        evictor.release(old, wrong)
    _go_back(sequence, good * size)
    return num_blocks


def _home(sequence: SequenceState) -> tuple[NamespaceTree, Node]:
    """Return the tree to which a sequence returns, and where its path ends there.

    It isn't the sequence's own tree if another sequence forgot blocks that this one holds.
    """
    tree, end = sequence._tree, sequence._node
    while (base := tree.base) is not None and base.is_nameless:
        tree, end = base.tree, base.node
    return tree, end


def _go_back(sequence: SequenceState, num_tokens: int) -> None:
    """Uncommit all tokens but these."""
    sequence._num_committed = min(sequence._num_committed, num_tokens)
    sequence._num_cached = min(sequence._num_cached, num_tokens)
    sequence._segment_keys = None  # they were read further
    sequence._loading = None  # it may have other blocks now


def _node_with(end: Node, position: int) -> Node:
    """Return the node of the path to ``end`` that has the block at a position."""
    node = end
    while node.depth - node.num_blocks > position:
        assert node.parent is not None
        node = node.parent
    return node


def _path_ids(end: Node, tree: NamespaceTree) -> bytes:
    """Return the packed ids of the blocks down to the end of a node."""
    return tree.head_ids + b"".join([node.block_ids for node in path_between(tree.root, end)])


def _require_committed(cache: CacheState, top: Node) -> None:
    """Raise LeaseError if a sequence of the reachable tree shares blocks from ``top`` on that it hasn't committed.

    It could still give them to that tree.
    """
    wrong = {top, *nodes_below(top)}
    for sequence in cache._sequences:
        run = None if sequence._node in wrong else sequence._run
        while run is not None:
            if run.node in wrong:
                raise LeaseError(
                    "a fork shares blocks that it hasn't committed itself: commit them there, or release it"
                )
            run = run.parent


def _is_alone(cache: CacheState, sequence: SequenceState, top: Node | None) -> bool:
    """Whether the sequence alone holds blocks from ``top`` on, all of its path, and no waiting copy names one."""
    if top is None or cache._pool.exposed or sequence._own != sequence._node.depth:
        return False
    assert top.parent is not None
    for node in path_between(top.parent, sequence._node):
        if node.uses != 1:
            return False
    return len(nodes_below(top)) < MAX_EMPTIED_NODES


def _detach(
    cache: CacheState,
    sequence: SequenceState,
    tree: NamespaceTree,
    top: Node,
    good: int,
    detached: list[NamespaceTree],
) -> tuple[Node, int]:
    """Move the blocks of ``top`` from position ``good`` on, and all below, to a tree of their own. O(nodes).

    Returns the node where the good blocks end, and how many blocks could be matched.
    """
    evictor = cache._evictor
    start = top.depth - top.num_blocks
    if start < good:
        evictor.split(top, (good - start) * cache._block_bytes, tree)
    above, nodes = top.parent, [top, *nodes_below(top)]
    assert above is not None
    inside = set(nodes)
    for base in list(cache._bases.published.values()):
        if base.node in inside:
            behind = purge.end_base(cache, base)
            purge.detach_all(cache, behind)
            detached += behind
    cache._pins.end_on(tree, inside)
    cache._recorder.lose()
    num_blocks = 0
    if not tree.detached:
        num_blocks = sum([node.num_blocks for node in nodes])
        if cache._journal is not None:
            for node in reversed(nodes):
                evictor.report_removed(node, node.num_blocks)
    wrong = _continued(cache, sequence, tree, above)
    tree.tenant.detached.add(wrong)
    detached.append(wrong)
    if tree.hooks is not None:
        tree.hooks.leave(nodes, above)
    tree.move(top, nodes, wrong)
    evictor.count_resident(tree.tenant, -num_blocks)
    for each in cache._sequences:
        if each._node in inside and each is not sequence:
            each._tree = wrong
            cache._publishing.pop(each, None)
    for base in cache._bases.held():
        if base.node in inside:
            base.tree = wrong
    return above, num_blocks


def _continued(cache: CacheState, sequence: SequenceState, tree: NamespaceTree, above: Node) -> NamespaceTree:
    """Make an empty detached tree that continues the path to ``above``, which it leases."""
    base, size = tree.base, len(tree.head_key)
    if above is not tree.root:
        size = above.depth * cache._block_bytes
        key, ids = sequence.key_between(0, size), _path_ids(above, tree)
        base = Base("", frozenset(), key, ids, above, tree)
        base.is_over = True
        cache._evictor.lease(above, tree)
        cache._bases.ended.add(base)
    wrong = NamespaceTree(tree.namespace, tree.tenant, cache._block_bytes, base, size)
    wrong.detached = True
    if base is not None:
        base.trees.add(wrong)
    return wrong


def _free_beside(cache: CacheState, end: Node, tree: NamespaceTree) -> None:
    """Free all nodes of a detached tree that aren't on the path to ``end``. None of them is in use."""
    freed, path = bytearray(), set(path_between(tree.root, end))
    for node in reversed(tree.nodes()):
        if node not in path:
            cache._evictor.reclaim(node, freed)
    cache._pool.give(freed)
