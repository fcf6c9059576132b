"""The cache's half of what lies below: which blocks a load may write, and what a commit or an eviction gives it.

A load writes into blocks of an open sequence that aren't committed. Whether it may is decided under the cache's lock,
and the copy is launched under it, a few blocks at a time, like the copies of a plan. So a block that the engine has
computed, released or given to others is never written. On a CPU the lock is held for the copy of these blocks.

A load is *current* as long as the sequence has the blocks that it had. ``truncate``, ``forget`` and ``reconcile`` end
it: a block that comes back afterwards may hold something else. After a fork no block is the sequence's own, so nothing
more is written; what was written before stays right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from radixkv.index import requests
from radixkv.index.ahead import end_step, step_done
from radixkv.index.below import Below, Loading, Part, Scope, forgetting, moved
from radixkv.index.blocks import unpack
from radixkv.index.cachelock import CacheLock
from radixkv.index.holders import LeaseState, SequenceState
from radixkv.index.leases import Lease
from radixkv.index.match import Match
from radixkv.index.purge import clear
from radixkv.index.recovery import Mending, mend
from radixkv.index.tenants import NamespaceTree
from radixkv.index.tokens import ID_BYTES
from radixkv.index.tree import Node
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from radixkv.config import Namespace, Tenant
    from radixkv.index.state import CacheState
    from radixkv.storage.plan import BlockIds


Leave: TypeAlias = "Callable[[Namespace, bytes, int, BlockIds], None]"
"""Hears of blocks that are being evicted: namespace, key up to the last of them, position of the first, ids."""
LetGo: TypeAlias = "Callable[[BlockIds], NDArray[np.bool_]]"
"""Hears of all blocks that are being evicted, first. Returns of which ``Leave`` is to hear."""


class LoadTarget:
    """See ``below.Target``. A sequence has one at a time."""

    __slots__ = ("_cache", "_state", "key", "namespace")

    def __init__(self, cache: CacheState, state: SequenceState, key: bytes) -> None:
        self._cache, self._state, self.key = cache, state, key
        self.namespace: Namespace = state._tree.namespace

    @property
    def num_committed(self) -> int:
        """See ``Target``."""
        return self._state._num_committed

    @property
    def num_tokens(self) -> int:
        """See ``Target``."""
        return self._state.num_tokens

    @property
    def is_current(self) -> bool:
        """See ``Target``."""
        return self._state._is_open and self._state._loading is self

    def put(self, start: int, stop: int, copy: Callable[[BlockIds], None]) -> bool:
        """See ``Target``. Raises what ``copy`` raises; the blocks then hold anything, and nothing is committed."""
        state = self._state
        with self._cache._lock:
            if not self.is_current or start < _first_own(self._cache, state):
                return False
            copy(unpack(state._table[start * ID_BYTES : stop * ID_BYTES]))
            return True

    def commit(self, num_tokens: int) -> bool:
        """See ``Target``."""
        cache, state = self._cache, self._state
        with cache._lock:
            before = state._num_committed
            if not self.is_current or before >= num_tokens:
                return before >= num_tokens
            try:
                requests.commit(cache, state, num_tokens)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, state)
                raise
            count_loaded(state, before)
        return True

    def keep(self) -> None:
        """See ``Target``. Call it without the lock."""
        keep(self._cache, [self._state])


refuse_copies(LoadTarget, "it writes into the blocks of one sequence. Pass it on")


def count_loaded(state: SequenceState, before: int) -> None:
    """Count what a load has committed behind ``before`` as found. Its opening counted it as missed.

    Only tokens of the prompt, and once. A later ``recount`` replaces it, as it does the rest of the opening's counts.
    """
    _, num_requests, hit, missed = state._counted
    found = min(max(min(state._num_committed, hit + missed) - before, 0), missed)
    state._counted = state._tree.tenant.recount(state._counted, num_requests, hit + found, missed - found)


def _first_own(cache: CacheState, state: SequenceState) -> int:
    """Return the first block that only this sequence has, and that neither was nor is being computed."""
    computed = state._num_committed
    for each in state._ahead or ():
        computed = max(computed, each.end)
    return max(-(-computed // cache._block_size), state._own)


def loading_of(cache: CacheState, state: SequenceState) -> Loading | None:
    """See ``Sequence.loading``. Takes the lock."""
    below = cache._below
    if below is None:
        return None
    with cache._lock:
        head = state.key_between(0, _first_missing(cache, state))
    if not head or not below.may_have(state._tree.namespace, head):
        return None
    with cache._lock:
        if not _first_missing(cache, state):
            return None
        stop = (state._size - 1) // cache._block_bytes * cache._block_bytes
        state._loading = target = LoadTarget(cache, state, state.key_between(0, stop))
    return below.begin(target)


def _first_missing(cache: CacheState, state: SequenceState) -> int:
    """Return where the first block ends that a load could bring, in bytes of the key; 0 if there is none."""
    start, stop = _first_own(cache, state), max(state._size - 1, 0) // cache._block_bytes
    return (start + 1) * cache._block_bytes if state._is_open and start < stop else 0


def attach(cache: CacheState, below: Below | None) -> None:
    """Let something lie below a cache from now on. Before its first request."""
    cache._below = below
    if below is not None:
        watch_evictions(cache, below.leave, below.let_go)
        below.attached(partial(_give_all, cache, below), partial(_free_ahead, cache, below))


def _give_all(cache: CacheState, below: Below, is_over: Callable[[], bool]) -> None:
    """Let what lies below copy all that is resident, until ``is_over``. After all calls of the cache."""
    for namespace, key, block_ids in paths_of(cache):
        if is_over():
            return
        with below.moving():
            below.leave(namespace, key, 0, block_ids)


def _free_ahead(cache: CacheState, below: Below, num_blocks: int) -> None:
    """Evict until so many blocks are free, in slices, and nothing that a tenant is guaranteed. Takes the lock."""
    while moved(below, partial(_free_slice, cache, num_blocks)):
        requests.let_others()


def _free_slice(cache: CacheState, num_blocks: int) -> bool:
    """Evict at most a slice. Returns whether more is to be evicted."""
    with cache._lock, Mending(cache):
        short = num_blocks - cache._pool.num_free
        if short <= 0:
            return False
        over = [
            min(each.evictable_blocks, max(each.used_blocks - each.guaranteed_blocks, 0))
            for each in cache._tenants.values()
        ]
        wanted = min(short, sum(over), requests.slice_blocks(cache))
        return wanted > 0 and cache._evictor.evict(wanted) == wanted < short


def paths_of(cache: CacheState) -> list[tuple[Namespace, bytes, BlockIds]]:
    """Return namespace, key and blocks of each longest prefix that is resident: no tails, nothing behind bases.

    Takes the lock. O(tokens of all of them).
    """
    found = []
    with cache._lock:
        trees = [tree for tenant in cache._tenants.values() for tree in tenant.trees.values()]
        for tree in trees:
            if tree.detached or tree.head_key:
                continue
            for node in tree.nodes():
                if node.children is None:
                    size, table = cache._evictor.reported_depth(node) * cache._block_bytes, bytearray()
                    key = tree.key_of(node)[:size]
                    tree.walk(key, size, table)
                    found.append((tree.namespace, key, unpack(table)))
    return found


def undisturbed(cache: CacheState) -> CacheLock:
    """Return a context in which no other thread changes a cache: its lock."""
    return cache._lock


def watch_evictions(cache: CacheState, leave: Leave, let_go: LetGo) -> None:
    """Let these hear of what a cache evicts, under its lock and before anybody else gets the blocks."""
    cache._evictor.on_evict = partial(_leave, cache, leave, let_go)


def _leave(cache: CacheState, leave: Leave, let_go: LetGo, evicted: list[Node], ids: bytes) -> None:
    """Tell of blocks that are being evicted. One call for all; O(tokens of the path) for a node of which more is asked.

    ``leave`` doesn't hear of what was cleared, what lies behind a base, and tails.
    """
    is_asked = let_go(unpack(ids))
    if not is_asked.any():
        return
    if cache._evictor.on_hand_out is not None:
        cache._evictor.on_hand_out()
    at = 0
    for node in evicted:
        stop = min(at + node.num_blocks, len(is_asked))
        if is_asked[at:stop].any():
            _leave_node(cache, leave, node, ids[at * ID_BYTES : stop * ID_BYTES])
        at = stop


def _leave_node(cache: CacheState, leave: Leave, node: Node, ids: bytes) -> None:
    tree = cast(NamespaceTree, node.tree)
    start, stop = node.depth - len(ids) // ID_BYTES, cache._evictor.reported_depth(node)
    if tree.detached or tree.head_key or start >= stop:
        return
    key = b"".join(tree.labels_to(node))[: stop * cache._block_bytes]
    leave(tree.namespace, key, start, unpack(ids[: (stop - start) * ID_BYTES]))


def keep(cache: CacheState, states: Iterable[SequenceState]) -> None:
    """Copy below what was committed of these sequences. Call it without the lock."""
    below = cache._below
    if below is not None:
        for state in states:
            below.keep(state._tree.tenant.tenant_id, partial(_part, cache, state))


def end_computed_step(cache: CacheState, step: int) -> int:
    """See PrefixCache.step_done."""
    if cache._below is None:
        return end_step(cache, step, step_done)
    with cache._lock:
        depths = [(state, state._node, state._node.depth) for state in cache._steps.get(step, ())]
    num_tokens = end_step(cache, step, step_done)
    keep(cache, [state for state, node, depth in depths if state._node is not node or node.depth > depth])
    return num_tokens


def _part(cache: CacheState, state: SequenceState) -> Part | None:
    """Lease the committed blocks of a sequence; None if nothing of it may be kept. No policy hears of it.

    What was cleared, what is read of a base or computed behind one, and what was released isn't kept.
    """
    with cache._lock, Mending(cache):
        tree, node = state._tree, state._node
        if not state._is_open or not node.depth or tree.detached or tree.head_key:
            return None
        key, table = state.key_between(0, node.depth * cache._block_bytes), bytearray()
        tree.walk(key, len(key), table)
        cache._evictor.lease(node, tree)
        match = Match(tree.namespace, key, bytes(table))
        held = LeaseState(cache, node, match)
        cache._leases.add(held)
        lease = Lease(cache, held, match)
    return Part(tree.namespace, key, lease.block_ids, lease.release)


def forgotten_too(below: Below | None, state: SequenceState, forget: Callable[[], int]) -> int:
    """Call ``forget``, which forgets KV of a sequence, and forget its namespace below too."""
    if below is None:  # the usual case: nothing happens after the lock is released
        return forget()
    namespace = state._tree.namespace
    with below.forgetting(Scope(namespace.tenant, namespace)):
        return forget()


def follow(cache: CacheState, tenant: str, *, forgets: bool = False) -> None:
    """Let what lies below follow a tenant's settings. Call it without the lock.

    ``forgets``: all that the tenant has is forgotten, here and below: it is another tenant's. Meanwhile nothing of it
    is kept or loaded, so nothing of one is kept as the other's.
    """
    below = cache._below
    with forgetting(below, Scope(tenant)) if forgets else nullcontext():
        if below is not None:
            below.follow(partial(_settings, cache, tenant))
        if forgets:
            with cache._lock:
                namespaces = cache._tenants[tenant].namespaces if tenant in cache._tenants else []
            for namespace in namespaces:
                clear(cache, namespace)


def _settings(cache: CacheState, tenant: str) -> Tenant:
    with cache._lock:
        return cache._tenants[tenant].settings


def namespaces_of(cache: CacheState, tenant: str | None) -> list[Namespace]:
    """See PrefixCache.namespaces. Takes the lock."""
    with cache._lock:
        states = [each for each in cache._tenants.values() if tenant is None or each.tenant_id == tenant]
        found = [namespace for state in states for namespace in state.namespaces]
    lower = [] if cache._below is None else cache._below.namespaces(tenant)
    return found + [each for each in lower if each not in set(found)]
