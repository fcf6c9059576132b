"""Forgetting: detach trees at once, free them in slices.

    clear          a namespace
    purge          a tenant: its sequences become stale
    unpublish      a base, and what its readers cached behind it
    set_readers    the same for readers that are removed

Each function detaches trees in one hold of the lock. Nothing in them matches afterwards. Unused nodes are then freed, a
slice of nodes at a time, so that other threads don't wait long. Blocks that running sequences hold are freed at their
release. If an error comes between two slices, the rest is freed at once (``recovery``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from radixkv.index.bases import detach
from radixkv.index.holders import PURGE, SequenceState
from radixkv.index.recovery import mend
from radixkv.index.tenants import Base
from radixkv.index.validation import readers_of

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.state import CacheState
    from radixkv.index.tenants import NamespaceTree
    from radixkv.index.tree import Node

SLICE_NODES = 256
"""Nodes of detached trees to visit before other threads may take the lock."""

PIN_NODES = 16
"""Ending a pin takes about as long as visiting this many nodes."""

Forgotten: TypeAlias = "tuple[list[NamespaceTree], int]"
"""Detached trees, and the number of blocks in them that a match could reach before."""


def clear(cache: CacheState, namespace: Namespace) -> int:
    """See PrefixCache.clear."""

    def begin() -> Forgotten:
        cache._endings.end_namespace(namespace)
        state = cache._tenants.get(namespace.tenant)
        if state is None:
            return [], 0
        trees = state.trees_of(namespace)
        forgotten = sum([tree.num_blocks for tree in trees])
        trees += _end_bases(cache, trees)
        if trees and cache._journal is not None:
            cache._journal.cleared(namespace)
        return trees, forgotten

    return _forget(cache, begin)


def purge(cache: CacheState, tenant: str) -> int:
    """See PrefixCache.purge."""

    def begin() -> Forgotten:
        cache._endings.end_tenant(tenant)
        state = cache._tenants.get(tenant)
        if state is None:
            return [], 0
        trees = list(state.trees.values())
        forgotten = sum([tree.num_blocks for tree in trees])
        state.generation += 1
        if state.waiting is not None:
            state.waiting.end_all()
        state.owner_tag = cache._registry.new_owner_tag(state.settings)
        if cache._journal is not None:
            for namespace in state.namespaces:
                cache._journal.cleared(namespace)
        trees += _end_bases(cache, trees)
        for sequence in cache._sequences:
            if sequence._tree.tenant is state and not sequence._is_fenced:
                sequence._is_open, sequence._closed_by = False, PURGE
        return trees, forgotten

    return _forget(cache, begin)


def unpublish(cache: CacheState, base_id: Any) -> None:
    """See PrefixCache.unpublish."""

    def begin() -> Forgotten:
        found = cache._bases.find(base_id)
        if isinstance(found, Base):
            return end_base(cache, found), 0
        del cache._publishing[cast(SequenceState, found.sequence)]
        return [], 0

    _forget(cache, begin)


def set_readers(cache: CacheState, base_id: Any, readers: Any) -> None:
    """See PrefixCache.set_readers."""

    def begin() -> Forgotten:
        found = cache._bases.find(base_id)
        wanted = readers_of(readers, found.namespace)
        cache._bases.require_readers(wanted, cache._bases.all())
        touched, found.readers = found.readers | wanted, wanted
        if not isinstance(found, Base):
            return [], 0
        cache._bases.show(found, touched, cache._tenants)
        return [tree for tree in found.trees if not tree.detached and not found.is_for(tree)], 0

    _forget(cache, begin)


def end_base(cache: CacheState, base: Base) -> list[NamespaceTree]:
    """End a base, so that no request finds it. Returns the trees behind it, which must be detached."""
    trees = cache._bases.end(base, cache._tenants)
    if not trees:
        cache._evictor.let_go(base)
    return trees


def _end_bases(cache: CacheState, trees: list[NamespaceTree]) -> list[NamespaceTree]:
    """Unpublish bases that come from cleared trees, also unfinished ones. Returns the trees behind them."""
    behind: list[NamespaceTree] = []
    cleared = set(trees)
    for publication in cache._bases.under_way():
        if cast(SequenceState, publication.sequence)._tree in cleared:
            del cache._publishing[cast(SequenceState, publication.sequence)]
    for base in list(cache._bases.published.values()):
        if base.tree in cleared:
            behind += end_base(cache, base)
    return behind


def _forget(cache: CacheState, begin: Callable[[], Forgotten]) -> int:
    """Detach what ``begin`` names, in the same hold of the lock that calls ``begin``. Then free it in slices."""
    try:
        with cache._lock:
            try:
                trees, forgotten = begin()
                detach_all(cache, trees)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error)
                raise
        free_unused(cache, trees)
        return forgotten
    except BaseException as error:  # between two slices: the rest is freed at once
        with cache._lock:
            mend(cache, error)
        raise


def detach_all(cache: CacheState, trees: list[NamespaceTree]) -> None:
    """Make trees unreachable."""
    for tree in trees:
        if not tree.detached:
            cache._evictor.resident_blocks -= tree.num_blocks
        detach(tree)
        if tree.base is not None:
            cache._evictor.let_go(tree.base)


def free_unused(cache: CacheState, trees: list[NamespaceTree]) -> None:
    """End the pins of detached trees and free their unused nodes, slice by slice. O(pins + nodes)."""
    left, pending = trees[::-1], cast("list[Node]", [])
    while left or pending:
        with cache._lock:
            try:
                _reclaim_slice(cache, left, pending)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error)
                raise
        if left or pending:
            time.sleep(0)  # lets waiting threads take the lock


def _reclaim_slice(cache: CacheState, left: list[NamespaceTree], pending: list[Node]) -> None:
    """Free one slice. ``left``: trees that aren't begun yet. ``pending``: nodes of trees that are.

    Unused leaves are freed, and then their ancestors. The end of a pin counts as PIN_NODES nodes.
    """
    freed, room = bytearray(), SLICE_NODES
    while room > 0 and (left or pending):
        room -= 1
        if pending:
            node = pending.pop()
            if node.children is not None:
                pending += node.child_nodes()
            else:
                cache._evictor.reclaim(node, freed)
        elif cache._pins.end_one_in(left[-1]):
            room -= PIN_NODES
        else:
            pending.append(left.pop().root)
    cache._pool.give(freed)
