"""Tails: blocks that are filled in part, kept resident so that an engine can copy them.

A match has whole blocks only. What a request computed in its last block is lost at its release, unless its *tail* is
kept: the block stays resident under the tail's ids, filled up with ``tokens.TAIL_FILL``, which no prompt contains. To
the tree it is a block like others. So eviction, limits, a clear, a purge and the audit need nothing of their own. The
journal never hears of tails.

    keep    a sequence's last block, before its release
    find    what a key matches: whole blocks, and the block that holds most of the ids behind them
    drop    a tail that a longer one replaces

``find`` also offers whole blocks that begin like the rest of the key. The engine leases the block that ``find`` names,
copies it into the block of its own sequence, and computes on from the copied rows. It must not read further rows: they
may hold anything that the tenant computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from radixkv.index import ahead, requests
from radixkv.index.blocks import unpack
from radixkv.index.recovery import Mending, mend
from radixkv.index.state import CacheState
from radixkv.index.tokens import ID_BYTES, TAIL_FILL, TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.holders import SequenceState
    from radixkv.index.requests import Place
    from radixkv.index.sequence import Sequence
    from radixkv.storage.plan import BlockIds

MAX_COMPARED: Final = 16
"""``find`` compares at most this many blocks. Among more, it finds only tails that the key continues."""

_HIGH: Final = np.uint32(1 << 31)


class Found:
    """What a key matches.

    - ``num_tokens``: tokens in whole blocks, also of blocks that a step computes.
    - ``num_rows``: further tokens that one more block holds; 0 without such a block.
    - ``tail_key``: the key of that block, one block long.
    """

    __slots__ = ("_packed", "num_rows", "num_tokens", "tail_key")

    def __init__(self, num_tokens: int, packed: bytes, num_rows: int, tail_key: bytes) -> None:
        self.num_tokens, self._packed = num_tokens, packed
        self.num_rows, self.tail_key = num_rows, tail_key

    @property
    def block_ids(self) -> BlockIds:
        """The resident blocks, int32, and at last the one with the further rows."""
        return unpack(self._packed)


def find(cache: CacheState, namespace: Namespace, key: bytes, with_rows: bool) -> Found:
    """Return what ``PrefixCache.open(key, ahead=True)`` would find, and the block that holds most of the next ids.

    All together always less than the key. ``with_rows``: False looks for whole blocks only. Changes nothing. O(nodes on
    the path + sequences that compute), and at most ``MAX_COMPARED`` comparisons of a block.
    """
    with cache._lock:
        tree = cache._registry.resident_tree(namespace, key, len(key) - 1)
        if tree is None:
            return Found(0, b"", 0, b"")
        place = requests._walk(cache, tree, key, len(key) - 1)
        end = max(place.num_blocks, ahead._offer(cache, place, key)[1])
        num_rows, block_id, tail_key = 0, b"", b""
        if with_rows and end == place.num_blocks:
            num_rows, block_id, tail_key = _fullest(cache, place, key)
        return Found(end * cache._block_size, bytes(place.table) + block_id, num_rows, tail_key)


def _fullest(cache: CacheState, place: Place, key: bytes) -> tuple[int, bytes, bytes]:
    """Return how many of the next ids a block behind a place holds, its packed id, and its key."""
    size, at = cache._block_bytes, place.end
    most = min(len(key) - TOKEN_BYTES - at, size)
    if most <= 0:
        return 0, b"", b""
    if place.child is not None:
        label, common = place.child.label, place.common
        first = common // size * ID_BYTES
        rows = _num_common(label, common, key, at, most)
        return rows, place.child.block_ids[first : first + ID_BYTES], label[common : common + size]
    below = place.node.children
    if isinstance(below, dict) and len(below) > MAX_COMPARED:
        for stop in range(most, 0, -TOKEN_BYTES):
            node = below.get(key[at : at + stop] + TAIL_FILL * ((size - stop) // TOKEN_BYTES))
            if node is not None:
                return stop // TOKEN_BYTES, node.block_ids[:ID_BYTES], node.label[:size]
        return 0, b"", b""
    best, block_id, tail_key = 0, b"", b""
    for node in place.node.child_nodes():
        rows = _num_common(node.label, 0, key, at, most)
        if rows > best:
            best, block_id, tail_key = rows, node.block_ids[:ID_BYTES], node.label[:size]
    return best, block_id, tail_key


def _num_common(label: bytes, start: int, key: bytes, at: int, size: int) -> int:
    """Return how many of the ids in ``size`` bytes are the same, up to the first that is no text."""
    if not key.startswith(label[start : start + TOKEN_BYTES], at):
        return 0
    ours = np.frombuffer(label, np.uint32, size // TOKEN_BYTES, start)
    theirs = np.frombuffer(key, np.uint32, size // TOKEN_BYTES, at)
    ends = (ours != theirs) | (ours >= _HIGH)
    first = int(ends.argmax())
    return first if ends[first] else size // TOKEN_BYTES


def keep(cache: CacheState, sequence: Sequence) -> bool:
    """Keep the tail of a sequence that is about to be released: its committed tokens behind the last whole block.

    Returns whether there is one. The sequence loses all tokens that it hasn't committed. Raises LeaseError like other
    calls of a sequence. O(1).
    """
    state = sequence._state
    with cache._lock:
        try:
            is_kept = _keep(cache, state)
            return is_kept
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, state)
            raise


def _keep(cache: CacheState, state: SequenceState) -> bool:
    requests.require_open(state)
    committed, size = state._num_committed, cache._block_size
    rows = committed % size
    if not rows or state.leaned_end > committed:
        return False
    requests.truncate(cache, state, committed)
    if state.shared_tail is not None:
        return False
    cache._evictor.has_tails = True
    requests.extend(cache, state, TAIL_FILL * (size - rows))
    requests.commit(cache, state, committed - rows + size)
    return True


def drop(cache: CacheState, namespace: Namespace, key: bytes) -> bool:
    """Free a tail's block, if nothing uses it. Returns whether it was freed.

    ``key``: from position 0 to the tail's end. O(nodes on the path).
    """
    with cache._lock, Mending(cache):
        tree = cache._registry.resident_tree(namespace, key, len(key))
        if tree is None or not key.endswith(TAIL_FILL):
            return False
        place = requests._walk(cache, tree, key, len(key))
        node, evictor, tenant = place.node, cache._evictor, tree.tenant
        if place.end < len(key) or place.child is not None or node.uses or node.children is not None:
            return False
        if tenant.on_trimmed is not None:
            tenant.on_trimmed(node, 1)
        if len(node.block_ids) > ID_BYTES:
            freed = tree.trim(node, ID_BYTES)
            if tree.hooks is not None:
                tree.hooks.trimmed(node)
        else:
            freed = node.block_ids
            tenant.on_removed(node)
            tree.remove(node)
            if tree.hooks is not None:
                tree.hooks.removed(node)
        tenant.evictable_blocks -= 1
        evictor.evictable_blocks -= 1
        evictor.count_resident(tenant, -1)
        cache._pool.give(bytearray(freed))
        if tree.root.children is None:
            tenant.drop_if_empty(tree)
        return True
