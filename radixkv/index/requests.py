"""The life of a request: what each of its calls does to a cache's state.

    open_sequence   find the prefix, admit the request, lease the matched node, take blocks (evicting leaves if short)
    commit          give whole blocks whose KV exist to the tree, move the lease down
    append, extend  take a block, or copy-on-write a shared tail
    fork            count one more owner of the last run; copy nothing
    truncate        give up tokens that were never committed
    reserve         make room for tokens whose ids come later; fill gives the ids, drop gives the room up
    release         release the lease, free private blocks

Each function runs under the cache's lock, unless its docstring says otherwise. It raises before it changes anything, or
it completes. If an error interrupts it, its caller repairs the cache (``recovery.mend``). The caller registers the
result (``_sequences``, ``_leases``). So an interrupted call leaves no sequence that its user doesn't have.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, SupportsIndex

from radixkv.config import Namespace
from radixkv.errors import (
    ArgumentError,
    ConfigError,
    LeaseError,
    NotResident,
    SequenceLent,
    StaleGeneration,
    wrong_count,
)
from radixkv.index.bases import Publication
from radixkv.index.below import moved
from radixkv.index.blocks import unpack
from radixkv.index.ghost_keys import SegmentKeys
from radixkv.index.holders import INTERRUPTION, PURGE, Ahead, LeaseState, SequenceState
from radixkv.index.match import Match
from radixkv.index.recovery import Mending
from radixkv.index.state import CacheState
from radixkv.index.tenants import Base, NamespaceTree, TenantState
from radixkv.index.tokens import ID_BYTES, TAIL_FILL, TOKEN_BYTES
from radixkv.index.tree import MAX_GROWN_LABEL_BYTES, Node, SoleUser, give_to, note_use, path_between
from radixkv.index.validation import require_between
from radixkv.storage.plan import BlockIds, StepPlan

if TYPE_CHECKING:
    from radixkv.index.arguments import Hints
    from radixkv.index.fences import Fence

SLICE_BLOCKS = 512
"""Blocks to evict before other threads may take the lock."""

MAX_BLOCKS_AT_ONCE = 2_048
"""If a call needs more blocks than this and many victims, it first evicts in slices."""

MAX_VICTIMS_AT_ONCE = 512
"""Approximate number of leaves that one call may evict at once. An eviction costs per victim, not per block."""


# --- where a request belongs, and whether it is admitted


class Place:
    """The place where a key ends in a tree. Nothing has changed yet, and the tree may not be registered.

    - ``node``: the deepest node that the key passes.
    - ``child``: the child that it shares ``common`` bytes with, or None.
    - ``end``: how many bytes of the key are resident.
    - ``table``: packed ids of their blocks.
    - ``num_blocks``: the number of these blocks.
    """

    __slots__ = ("child", "common", "end", "node", "num_blocks", "table", "tree")

    def __init__(
        self,
        tree: NamespaceTree,
        node: Node,
        child: Node | None,
        common: int,
        end: int,
        num_blocks: int,
        table: bytearray,
    ) -> None:
        self.tree, self.node, self.child, self.common = tree, node, child, common
        self.end, self.num_blocks, self.table = end, num_blocks, table


def _walk(cache: CacheState, tree: NamespaceTree, key: bytes, stop: int) -> Place:
    """Find where ``key[:stop]`` ends in a tree. O(nodes on the path)."""
    table = bytearray()
    node, at, child, common = tree.walk(key, stop if stop > 0 else 0, table)
    end = at + common
    return Place(tree, node, child, common, end, end // cache._block_bytes, table)


def _locate(cache: CacheState, namespace: Namespace, key: bytes, stop: int) -> Place:
    """Find where ``key[:stop]`` of a namespace ends, in its own tree or behind a base. Raises NamespaceError."""
    tree = cache._registry.tree(namespace)
    if tree is None or tree.tenant.bases is not None:
        tree = cache._registry.tree_for(namespace, tree, key, stop)
    return _walk(cache, tree, key, stop)


def _root(cache: CacheState, namespace: Namespace) -> Place:
    """Return the place of an empty key in a namespace's own tree. Raises NamespaceError."""
    tree = cache._registry.tree(namespace) or cache._registry.new_tree(namespace)
    return Place(tree, tree.root, None, 0, 0, 0, bytearray())


def _newly_protected(cache: CacheState, place: Place) -> int:
    """Return how many evictable blocks a lease of this place would protect."""
    above = cache._evictor.unprotected_above(place.node)
    if place.child is not None and not place.child.uses:
        above += place.common // cache._block_bytes
    return above


def _require_room(cache: CacheState, place: Place, total: int, taken: int, lent: int = 0) -> None:
    """Raise QuotaExceeded, OutOfBlocks or FlushRequired unless a request can have ``total`` blocks, including its
    match.

    ``taken``: blocks that it takes from the pool. ``lent``: how many of the others are lent to the engine.
    """
    evictor, tenant = cache._evictor, place.tree.tenant
    evictor.end_due_pins(tenant, total)
    if not evictor.surely_has(total, tenant):
        protected = _newly_protected(cache, place)
        evictor.require(total - place.num_blocks, tenant, protected, lent)
        evictor.require_fetched(taken, tenant, protected)


def _admit(
    cache: CacheState,
    place: Place,
    total: int,
    taken: int,
    lent: int = 0,
    already_touched: Node | None = None,
    user: SoleUser | None = None,
) -> Node:
    """Check that a request can have its blocks, register its tree, and lease its place. See ``_require_room``."""
    _require_room(cache, place, total, taken, lent)
    if place.tree.root.children is None:
        cache._registry.register(place.tree)
    return _lease_place(cache, place, already_touched, user)


def _lease_place(
    cache: CacheState, place: Place, already_touched: Node | None, user: SoleUser | None
) -> Node:
    """Lease a place and tell the policy that it was used. If the place lies inside a child, split the child.

    ``already_touched``: the same request has already told the policy of the nodes down to this one. ``user``: its
    session, if it has one.
    """
    tree, node = place.tree, place.node
    if place.child is not None:
        node = cache._evictor.split(place.child, place.common, tree)
    cache._evictor.lease(node, tree)
    if node.sole_user is not user and node.sole_user is not None:
        cache._recorder.note(tree.tenant, note_use(node, user))
    touched = tree.tenant.on_touched
    if touched is not None:
        above = already_touched
        if above is None or above.tree is not tree:
            above = tree.root
        if above is not node:
            touched(path_between(above, node))
    return node


# --- match and lease


def find(cache: CacheState, namespace: Namespace, key: bytes) -> Match:
    """See PrefixCache.match."""
    tree = cache._registry.resident_tree(namespace, key, len(key))
    if tree is None:
        can_read = bool(cache._bases.published) and cache._registry.admits(namespace.tenant)
        return Match(namespace, *(cache._bases.head(namespace, key) if can_read else (b"", b"")))
    table = bytearray()
    _, at, _, common = tree.walk(key, len(key), table)
    return Match(namespace, key[: at + common], bytes(table))


def lease(cache: CacheState, match: Match) -> LeaseState:
    """See PrefixCache.lease. The lease isn't registered."""
    if not match.num_tokens:
        return LeaseState(cache, None, match)
    key, registry = match._key, cache._registry
    tree = registry.resident_tree(match.namespace, key, len(key))
    if tree is None and registry.admits(match.namespace.tenant):
        tree = registry.tree_for(match.namespace, None, key, len(key))
    place = None if tree is None else _walk(cache, tree, key, len(key))
    if place is None or place.table != match._packed:
        raise LeaseError(
            f"the match of {match.num_tokens} tokens is stale: its blocks were evicted; match again"
        )
    return LeaseState(cache, _admit(cache, place, match.num_blocks, 0), match)


def match_and_lease(cache: CacheState, namespace: Namespace, key: bytes) -> tuple[LeaseState, Match]:
    """See PrefixCache.match_and_lease. The lease isn't registered. One walk."""
    registry = cache._registry
    tree = registry.resident_tree(namespace, key, len(key))
    if tree is None and cache._bases.published and registry.admits(namespace.tenant):
        tree = registry.tree_for(namespace, None, key, len(key))
    if tree is not None:
        place = _walk(cache, tree, key, len(key))
        if place.num_blocks:
            match = Match(namespace, key[: place.end], bytes(place.table))
            return LeaseState(cache, _admit(cache, place, place.num_blocks, 0), match), match
    match = Match(namespace, b"", b"")
    return LeaseState(cache, None, match), match


def touch(cache: CacheState, namespace: Namespace, key: bytes) -> int:
    """See PrefixCache.touch."""
    lease, match = match_and_lease(cache, namespace, key)
    end_lease(cache, lease)
    return match.num_tokens


def end_lease(cache: CacheState, lease: LeaseState) -> None:
    """Release a lease."""
    lease._is_open = False
    cache._leases.discard(lease)
    if lease._node is not None:
        cache._evictor.release(lease._node, lease.tree)


# --- open


def open_sequence(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    hints: Hints,
    already_touched: Node | None,
    publication: Publication | None,
    lookup: bool = True,
    user: SoleUser | None = None,
) -> SequenceState:
    """See PrefixCache.open. The sequence isn't registered."""
    num_bytes, size = len(key), cache._block_bytes
    place = _locate(cache, namespace, key, num_bytes - 1) if lookup else _root(cache, namespace)
    if publication is not None:
        cache._bases.require_new(publication)
    tree, tenant, table, cached = place.tree, place.tree.tenant, place.table, place.num_blocks
    total = -(-num_bytes // size)
    needed = total - cached
    node = _admit(cache, place, total, needed, 0, already_touched, user)
    cache._evictor.take_granted(needed, tenant, table)
    cache._evictor.charge(tenant, needed)
    num_cached = cached * cache._block_size
    sequence = SequenceState(tree, node, key, table, num_cached, cached)
    sequence._user = user
    sequence._counted = tenant.count(num_bytes // TOKEN_BYTES if lookup else 0, num_cached)
    if tenant.on_opened is not None:
        path = path_between(tree.root, node)
        sequence._hints = tenant.on_opened(path, max(num_bytes - TOKEN_BYTES, 0) // size, hints)
    if publication is not None:
        publication.sequence = sequence
        cache._publishing[sequence] = publication
    return sequence


def lease_of_long(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    publication: Publication | None,
    lookup: bool,
    user: SoleUser | None = None,
) -> tuple[LeaseState, Match, int, TenantState]:
    """Lease the resident part of a long key. Returns lease, match, how many more blocks the key needs, and its tenant.

    Raises the errors of ``open_sequence`` before anything is evicted. The lease isn't registered.
    """
    if publication is not None:
        cache._bases.require_new(publication)
    place = _locate(cache, namespace, key, len(key) - 1) if lookup else _root(cache, namespace)
    total = -(-len(key) // cache._block_bytes)
    needed = total - place.num_blocks
    matched = Match(namespace, key[: place.end], bytes(place.table))
    node: Node | None = None
    if place.num_blocks:
        node = _admit(cache, place, total, needed, 0, None, user)
    else:
        _require_room(cache, place, total, needed)
    return LeaseState(cache, node, matched), matched, needed, place.tree.tenant


def takes_slices(cache: CacheState, num_bytes: int) -> bool:
    """Whether a key of this many bytes probably needs more evictions than one call should make at once.

    The estimate uses the mean size of leaves. Takes the lock for a long key.
    """
    below = cache._below
    most = MAX_BLOCKS_AT_ONCE if below is None else below.slice_blocks
    if num_bytes <= most * cache._block_bytes:
        return False
    with cache._lock:
        short = num_bytes // cache._block_bytes - cache._pool.num_free
        if below is not None:
            return short > most
        num_leaves = sum([tenant.num_ranked for tenant in cache._tenants.values()])
        return short * num_leaves > MAX_VICTIMS_AT_ONCE * cache._evictor.evictable_blocks


def make_room(cache: CacheState, num_blocks: int, tenant: TenantState) -> None:
    """Evict in slices until this many blocks are free for the tenant. Raises like ``Evictor.require``.

    Takes the lock.
    """
    short, most = num_blocks, slice_blocks(cache)
    while short > 0:
        short = moved(cache._below, partial(_make_room, cache, num_blocks, tenant, most))
        let_others()


def _make_room(cache: CacheState, num_blocks: int, tenant: TenantState, most: int) -> int:
    """Evict at most ``most`` blocks. Returns how many were missing before."""
    with cache._lock, Mending(cache):
        cache._evictor.end_due_pins(tenant, num_blocks)
        cache._evictor.require(num_blocks, tenant)
        cache._evictor.require_fetched(num_blocks, tenant)
        short = num_blocks - cache._pool.num_free
        if short > 0:
            cache._evictor.evict(min(short, most), tenant)
        return short


def slice_blocks(cache: CacheState) -> int:
    """Return how many blocks may be evicted under one hold of the lock."""
    return SLICE_BLOCKS if cache._below is None else min(cache._below.slice_blocks, SLICE_BLOCKS)


def let_others() -> None:
    """Let a waiting thread take the lock. Without this, the thread that released the lock would take it again first."""
    time.sleep(0)


# --- commit


def commit(cache: CacheState, sequence: SequenceState, num_tokens: SupportsIndex) -> None:
    """See Sequence.commit."""
    if not sequence._is_open:
        require_open(sequence)
    high = sequence._size // TOKEN_BYTES
    if type(num_tokens) is not int or not sequence._num_committed <= num_tokens <= high:
        num_tokens = require_between("num_tokens", num_tokens, sequence._num_committed, high)
    if sequence._ahead is not None:
        _pass_ahead(cache, sequence, num_tokens)
    sequence._num_committed = num_tokens
    new = num_tokens // cache._block_size
    if new > (old := sequence._node.depth):
        _store(cache, sequence, sequence._node, new)
        if cache._pool.is_deferred and len(cache._pool.copies):
            cache._pool.expose(sequence._table[old * ID_BYTES : new * ID_BYTES])
        if cache._publishing:
            _complete(cache, sequence)


def _pass_ahead(cache: CacheState, sequence: SequenceState, num_tokens: int) -> None:
    """Forget the steps that a commit passes. Raises ArgumentError if another sequence's step isn't done."""
    left, start = list[Ahead](), sequence._num_committed
    for each in sequence._ahead or ():
        if each.is_leaned and not each.is_done and num_tokens > start:
            raise ArgumentError("num_tokens", num_tokens, f"at most {start} before step {each.step} is done")
        start = each.end
        if start > num_tokens:
            left.append(each)
    keep_ahead(cache, sequence, left)


def keep_ahead(cache: CacheState, sequence: SequenceState, left: list[Ahead]) -> None:
    """Let a sequence wait for these steps only, which are among its own."""
    steps = {each.step for each in left}
    for each in sequence._ahead or ():
        if each.step not in steps and (concerned := cache._steps.get(each.step)) is not None:
            concerned.pop(sequence, None)
            if not concerned:
                del cache._steps[each.step]
    sequence._ahead = left or None
    if not left:
        cache._computing.pop(sequence, None)


def _store(cache: CacheState, sequence: SequenceState, node: Node, new: int) -> None:
    """Make the blocks from the end of ``node`` to ``new`` resident; the sequence's lease moves from ``node`` there.

    ``[node.depth, resident)`` is in the tree already, from another sequence. ``[resident, new)`` is given to the tree.
    """
    tree, size, resident = sequence._tree, cache._block_bytes, node.depth
    key, at, stop = sequence._prompt_key, resident * size, new * size
    if stop > sequence._prompt_size:
        key, at, stop = sequence.key_between(at, stop), 0, stop - at
    if node.children is not None:
        node, at, taken_from = _follow(cache, sequence, node, key, at, stop)
        resident = node.depth
        if resident > taken_from:
            cache._runs.adopt(sequence, taken_from, resident)
        if resident == new:
            return
    block_ids = bytes(sequence._table[resident * ID_BYTES : new * ID_BYTES])
    keys = None
    if tree.tenant.uses_ghost_keys and resident // cache._segment_blocks < new // cache._segment_blocks:
        keys = _ghost_keys(cache, sequence, resident, new)
    if (
        node.uses > 1
        or node.children is not None
        or node.parent is None
        or len(node.label) + stop - at > MAX_GROWN_LABEL_BYTES
        or node.sole_user is not sequence._user
    ):
        sequence._node = cache._evictor.add_leased(
            node, key, at, stop, block_ids, tree, sequence._hints, keys
        )
        if sequence._user is not None:
            for new_node in path_between(node, sequence._node):
                give_to(new_node, sequence._user)
    else:
        cache._evictor.grow(node, key[at:stop], block_ids, tree, sequence._hints, keys)
    if sequence._own == resident:
        sequence._own = new
    else:
        cache._runs.adopt(sequence, resident, new)
    if cache._journal is not None and cache._evictor.reports(tree, resident, new):
        end = new * size
        if not (cache._evictor.has_tails and sequence.key_between(end - TOKEN_BYTES, end) == TAIL_FILL):
            cache._evictor.report_stored(tree, sequence.key_to(end), resident, new)


def _ghost_keys(cache: CacheState, sequence: SequenceState, start: int, stop: int) -> tuple[int, ...]:
    """Return keys of the segments that end within blocks ``[start, stop)`` of a sequence."""
    size, keys = cache._block_bytes, sequence._segment_keys
    if keys is None:
        keys = sequence._segment_keys = SegmentKeys(sequence._tree.namespace, cache._segment_blocks * size)
    base, base_size, tail = sequence._prompt_key, sequence._prompt_size, sequence._tail
    return keys.between(start * size, stop * size, base, base_size, tail)


def _follow(
    cache: CacheState, sequence: SequenceState, node: Node, key: bytes, start: int, stop: int
) -> tuple[Node, int, int]:
    """Move the sequence's lease down along the resident part of ``key[start:stop]``.

    Returns the node, the position there, and the first block that was replaced. A node without uses gets the sequence's
    blocks in place of its own, and its own are freed. Leasing its own blocks would protect more blocks than were
    granted.
    """
    tree, evictor = sequence._tree, cache._evictor
    end, at, child, common = tree.walk(key, stop, bytearray(), node, start)
    if child is not None:
        end, at = evictor.split(child, common, tree), at + common
    begin = end.depth
    if end is not node:
        unused = [each for each in path_between(node, end) if not each.uses]
        freed = bytearray()
        for each in unused:
            freed += each.block_ids
            each.block_ids = bytes(
                sequence._table[(each.depth - each.num_blocks) * ID_BYTES : each.depth * ID_BYTES]
            )
        begin -= len(freed) // ID_BYTES
        evictor.lease(end, tree)
        if end.sole_user is not sequence._user and end.sole_user is not None:
            cache._recorder.note(tree.tenant, note_use(end, sequence._user))
        evictor.release(node, tree)
        sequence._node = end
        if freed:
            evictor.give(freed, tree.tenant)
    return end, at, begin


# --- bases


def _complete(cache: CacheState, sequence: SequenceState) -> None:
    """Make a base readable if the sequence has committed all of it."""
    publication = cache._publishing.get(sequence)
    if publication is None or sequence._num_committed * TOKEN_BYTES < len(publication.key):
        return
    tree, table = sequence._tree, bytearray()
    node, _, child, common = tree.walk(publication.key, len(publication.key), table)
    if child is not None:
        node = cache._evictor.split(child, common, tree)
    base = Base(publication.base_id, publication.readers, publication.key, bytes(table), node, tree)
    cache._evictor.lease(node, tree)
    cache._bases.add(base, cache._tenants)
    del cache._publishing[sequence]


def shortfall(cache: CacheState, namespace: Namespace, key: bytes) -> int:
    """Return how many blocks the pool lacks for a base, in addition to those that are guaranteed to tenants."""
    tree = cache._registry.tree(namespace) or cache._registry.new_tree(namespace)
    place = _walk(cache, tree, key, len(key) - 1)
    needed = len(key) // cache._block_bytes - place.num_blocks + _newly_protected(cache, place)
    unused = max(tree.tenant.guaranteed_blocks - tree.tenant.protected_blocks, 0)
    return max(needed - unused - cache._evictor.spare_blocks, 1)


# --- append and extend: blocks for more tokens, copy-on-write


def append(cache: CacheState, sequences: list[SequenceState], keys: list[bytes]) -> list[SequenceState]:
    """Append one id to each. Returns the sequences that need a copy of their shared tail. See PrefixCache.append."""
    require_batch(sequences)
    return cache._runs.grow(sequences, keys)


def execute_copies(cache: CacheState) -> None:
    """Let the storage, if there is one, make the waiting copies."""
    if cache._storage is not None:
        cache._storage.execute(take_plan(cache))


def take_plan(cache: CacheState) -> StepPlan:
    """Return the waiting copies as a plan. None wait afterwards."""
    plan = StepPlan.of(cache._pool.copies.triples())
    cache._pool.settle()
    return plan


def extend(cache: CacheState, sequence: SequenceState, key: bytes) -> None:
    """See Sequence.extend."""
    if not sequence._is_open:
        require_open(sequence)
    size = cache._block_bytes
    if sequence._run is not None and sequence._size % size and sequence.shared_tail is not None:
        if key and cache._runs.grow([sequence], [key]):
            execute_copies(cache)
        return
    needed = missing_blocks(cache, sequence, len(key))
    if needed > 0:
        tenant = sequence._tree.tenant
        cache._evictor.take(needed, tenant, sequence._table)
        cache._evictor.charge(tenant, needed)
    sequence._tail += key
    sequence._size += len(key)
    if sequence._reserved:
        sequence._reserved = max(sequence._reserved - len(key) // TOKEN_BYTES, 0)


def missing_blocks(cache: CacheState, sequence: SequenceState, num_bytes: int) -> int:
    """Return how many more blocks a sequence needs for this many more bytes of key; at most 0 if it has room."""
    return -(-(sequence._size + num_bytes) // cache._block_bytes) - len(sequence._table) // ID_BYTES


# --- reserve, fill, drop: room for tokens whose ids come later


def reserve(cache: CacheState, sequence: SequenceState, num_tokens: int) -> None:
    """See Sequence.reserve. The room is made like that of real tokens, whose ids are then cut off again."""
    require_open(sequence)
    size, reserved = sequence._size, sequence._reserved + num_tokens
    needed, tenant = missing_blocks(cache, sequence, reserved * TOKEN_BYTES), sequence._tree.tenant
    if needed > MAX_BLOCKS_AT_ONCE:  # refused before a long key is made
        cache._evictor.end_due_pins(tenant, needed)
        cache._evictor.require(needed, tenant)
    extend(cache, sequence, bytes(reserved * TOKEN_BYTES))
    sequence.cut_key(size)
    sequence._reserved = reserved


def fill(sequence: SequenceState, key: bytes) -> None:
    """See Sequence.fill."""
    require_open(sequence)
    num_tokens = len(key) // TOKEN_BYTES
    if num_tokens > sequence._reserved:
        raise wrong_count("ids", num_tokens, f"at most {sequence._reserved}, the tokens that are reserved")
    sequence._tail += key
    sequence._size += len(key)
    sequence._reserved -= num_tokens


def drop(cache: CacheState, sequence: SequenceState, num_tokens: SupportsIndex | None) -> None:
    """See Sequence.drop."""
    require_open(sequence)
    reserved = sequence._reserved
    dropped = reserved if num_tokens is None else require_between("num_tokens", num_tokens, 0, reserved)
    _cut(cache, sequence, sequence.num_tokens + reserved - dropped)
    sequence._reserved = reserved - dropped


def require_filled(sequence: SequenceState) -> None:
    """Raise LeaseError if a sequence has reserved room. Two sequences can't both write into it."""
    if sequence._reserved:
        raise LeaseError(
            f"this sequence has room reserved for {sequence._reserved} tokens: fill it or drop it first"
        )


# --- truncate, fork, release


def truncate(cache: CacheState, sequence: SequenceState, num_tokens: SupportsIndex) -> None:
    """See Sequence.truncate."""
    require_open(sequence)
    low, high = sequence._num_committed, sequence.num_tokens
    num_tokens = require_between("num_tokens", num_tokens, low, high)
    if sequence._ahead is not None:
        _cut_ahead(cache, sequence, num_tokens)
    sequence._loading = None
    _cut(cache, sequence, num_tokens)
    sequence._reserved = 0
    sequence.cut_key(num_tokens * TOKEN_BYTES)


def _cut_ahead(cache: CacheState, sequence: SequenceState, num_tokens: int) -> None:
    """Cut what steps compute. Raises ArgumentError inside a block that another sequence computes.

    The next write would have to copy a part of it that may not exist yet.
    """
    size, leaned = cache._block_size, sequence.leaned_end
    if num_tokens % size and sequence._num_committed < num_tokens < leaned:
        allowed = (
            f"at least {leaned}, or a multiple of {size}: a step of another sequence computes this block"
        )
        raise ArgumentError("num_tokens", num_tokens, allowed)
    left, start = list[Ahead](), sequence._num_committed
    for each in sequence._ahead or ():
        if start < num_tokens:
            left.append(each)
        start = each.end
    if left:
        left[-1].end = min(left[-1].end, num_tokens)
    keep_ahead(cache, sequence, left)


def _cut(cache: CacheState, sequence: SequenceState, num_tokens: int) -> None:
    """Give up the private blocks behind this many tokens."""
    keep = -(-num_tokens // cache._block_size)
    cache._runs.cut(sequence, keep)
    del sequence._table[keep * ID_BYTES :]


def fork(cache: CacheState, sequence: SequenceState) -> SequenceState:
    """Return another sequence in the same state that shares all blocks. It isn't registered."""
    child = sequence.child()
    cache._evictor.lease(child._node, child._tree)
    if child._ahead is not None:
        follow_steps(cache, child)
    return child


def follow_steps(cache: CacheState, sequence: SequenceState) -> None:
    """Note that the ends of these steps concern the sequence."""
    for each in sequence._ahead or ():
        cache._steps.setdefault(each.step, {})[sequence] = None


def release(cache: CacheState, sequence: SequenceState) -> None:
    """Release everything that a sequence holds."""
    sequence._is_open = False
    cache._sequences.discard(sequence)
    if sequence._ahead is not None:
        keep_ahead(cache, sequence, [])
    cache._runs.let_go(sequence)
    cache._evictor.release(sequence._node, sequence._tree)


def release_after(cache: CacheState, sequence: SequenceState, fence: Fence) -> None:
    """Close a sequence. It holds everything until the fence is lifted."""
    sequence._is_open, sequence._is_fenced = False, True
    if fence.is_lifted:
        release(cache, sequence)
        return
    fence.hold(cache, sequence)


def require_open(sequence: SequenceState) -> None:
    """Raise LeaseError, StaleGeneration or SequenceLent unless a sequence is open. The message says why."""
    if sequence._is_open:
        return
    if sequence._closed_by == INTERRUPTION:
        raise LeaseError("this sequence was closed when a call that worked on it was interrupted")
    if sequence._closed_by == PURGE:
        raise StaleGeneration("this sequence's tenant was purged: release it")
    if sequence.is_lent:
        raise SequenceLent("this sequence is lent to the device: reconcile its beams, or release it")
    raise LeaseError("this sequence is released or was consumed by reorder")


def require_batch(sequences: list[SequenceState], *, may_have_room: bool = True) -> None:
    """Raise unless all sequences are open and no sequence is given twice. See also ``require_filled``."""
    for sequence in sequences:
        require_open(sequence)
    if len(set(sequences)) != len(sequences):
        problem = "has one of them twice; allowed: each sequence once"
        raise ArgumentError("sequences", sequences, "each sequence once", problem=problem)
    if not may_have_room:
        for sequence in sequences:
            require_filled(sequence)


# --- blocks of the engine


class Insertion:
    """What an insert did. Packed block ids: ``table`` is the whole path's, ``surplus`` and ``evicted`` the engine's.

    ``noted``: what the policy knows of the request. Given before, the insert goes on with it.
    """

    __slots__ = ("evicted", "lease", "noted", "num_resident", "surplus", "table")

    def __init__(self) -> None:
        self.table, self.surplus, self.evicted = b"", b"", bytearray()
        self.num_resident = 0
        self.lease: LeaseState | None = None
        self.noted: object = None


def insert(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    packed: bytes,
    start: int,
    hints: Hints,
    leases: bool,
    done: Insertion,
) -> None:
    """See PrefixCache.insert. ``key`` and ``start`` are whole blocks. Fills ``done``; its lease isn't registered."""
    pool, place, total = cache._pool, _locate(cache, namespace, key, len(key)), len(key) // cache._block_bytes
    resident = place.num_blocks
    if resident < start:
        raise NotResident(start * cache._block_size, resident * cache._block_size)
    known = (resident - start) * ID_BYTES
    new, given, theirs = packed[known:], packed[:known], place.table[start * ID_BYTES :]
    surplus = b"" if given == theirs else _differing(given, theirs)
    ids: list[int] = unpack(new).tolist()
    free = pool.num_free_bytes
    num_lent = pool.check_claim(ids if not surplus else ids + unpack(surplus).tolist())
    node: Node | None = None
    if new:
        if surplus:
            num_lent = len(ids) - len(pool.lent.missing(ids))
        above = _admit(cache, place, total, 0, 0 if pool.is_engines else num_lent)
        node = _insert(cache, place.tree, above, key, new, ids, hints, done)
        if not leases:
            cache._evictor.release(node, place.tree)  # evicts the blocks if the policy declines them
    elif resident and (leases or hints is not None):
        node = _admit(cache, place, total, 0)
        if hints is not None and place.tree.tenant.on_opened is not None:
            done.noted = place.tree.tenant.on_opened(path_between(place.tree.root, node), total, hints)
        if not leases:
            cache._evictor.release(node, place.tree)
    if pool.is_engines:
        pool.lend_freed(free, done.evicted)
    done.table, done.surplus, done.num_resident = bytes(place.table) + new, surplus, resident
    if leases:
        done.lease = LeaseState(cache, node, Match(namespace, key, done.table))


def _differing(given: bytes, theirs: bytes | bytearray) -> bytes:
    """Return those of the packed ids that aren't the tree's at their position."""
    ids = unpack(given)
    left: BlockIds = ids[ids != unpack(theirs)]
    return left.tobytes()


def _insert(
    cache: CacheState,
    tree: NamespaceTree,
    above: Node,
    key: bytes,
    packed: bytes,
    ids: list[int],
    hints: Hints,
    done: Insertion,
) -> Node:
    """Give blocks to the tree, after the end of ``above``, which is leased. Returns the last node, leased instead."""
    evictor, tenant, resident, size = cache._evictor, tree.tenant, above.depth, cache._block_bytes
    evictor.keep_limit(tenant, len(ids))
    evictor.charge(tenant, len(ids))
    keys = None
    if tenant.uses_ghost_keys:
        named = SegmentKeys(tree.namespace, cache._segment_blocks * size)
        keys = named.between(resident * size, len(key), key, len(key), bytearray())
    if hints is not None and tenant.on_opened is not None:
        done.noted = tenant.on_opened(path_between(tree.root, above), len(key) // size, hints)
    node = evictor.add_leased(above, key, resident * size, len(key), packed, tree, done.noted, keys)
    cache._pool.claim(ids, tenant.owner_tag)  # last: until the tree has the blocks, they keep their state
    if cache._journal is not None:
        evictor.report_stored(tree, key, resident, len(key) // size)
    return node


def reclaim(cache: CacheState, num_blocks: int, tenant: str | None, taken: bytearray) -> bool:
    """Add packed ids to ``taken`` until it has ``num_blocks``: blocks that calls freed, then a slice of victims.

    Returns whether it must be called again.
    """
    pool, evictor = cache._pool, cache._evictor
    requester = None if tenant is None else cache._registry.state_of(tenant)
    pool.lend_freed(0, taken)
    short = num_blocks - len(taken) // ID_BYTES
    if short <= 0:
        return False
    evictor.end_due_pins(requester, short)
    wanted = min(short, SLICE_BLOCKS)
    freed = evictor.evict(min(wanted, evictor.available_to(requester)), requester)
    pool.lend_freed(0, taken)
    return freed == wanted < short


def engine_has_blocks(call: str) -> ConfigError:
    """Return the error of a call that needs blocks of the cache's own."""
    return ConfigError(
        "blocks", "engine", f"'cache' for {call}: with 'engine' the engine has all free blocks"
    )


def cache_has_blocks(call: str) -> ConfigError:
    """Return the error of a call that needs blocks of the engine's own."""
    return ConfigError("blocks", "cache", f"'engine' for {call}: with 'cache' use allocate")
