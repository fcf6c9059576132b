"""Blocks by hand: how blocks of the engine come into the tree, and how they come back.

    evict      resident blocks become free
    own_room   blocks become free for a tenant; others lose none
    allocate   free blocks become the engine's
    insert     blocks that the engine filled become resident
    reclaim    with ``CacheConfig(blocks="engine")``: evicted blocks become the engine's again

``Inserted`` is the record of an insert.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from radixkv.errors import ArgumentError
from radixkv.index import requests
from radixkv.index.below import moved
from radixkv.index.blocks import unpack
from radixkv.index.leases import Lease
from radixkv.index.match import Match
from radixkv.index.recovery import Mending, mend
from radixkv.index.tokens import ID_BYTES
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.arguments import Hints
    from radixkv.index.match import End
    from radixkv.index.state import CacheState
    from radixkv.storage.plan import BlockIds


class Inserted:
    """What ``PrefixCache.insert`` did.

    - ``num_tokens``: tokens from position 0 to the end of the insert, in whole blocks.
    - ``num_resident_tokens``: leading tokens that were resident before.
    - ``match``: what a match of these tokens finds now.
    - ``lease``: the lease on all of them, if it was asked for; otherwise None.
    """

    __slots__ = ("_evicted", "_noted", "_surplus", "lease", "match", "num_resident_tokens", "num_tokens")

    def __init__(self, match: Match, done: requests.Insertion, block_size: int, lease: Lease | None) -> None:
        self.match, self._surplus, self._evicted = match, done.surplus, bytes(done.evicted)
        self.num_tokens, self.num_resident_tokens = match.num_tokens, done.num_resident * block_size
        self.lease, self._noted = lease, done.noted

    @property
    def block_ids(self) -> BlockIds:
        """The tree's blocks of these tokens, int32, from position 0 on. Valid while a lease holds them."""
        return self.match.block_ids

    @property
    def surplus(self) -> BlockIds:
        """Given blocks that the tree didn't take, as it has others for their tokens; int32. They stay lent, or free."""
        return unpack(self._surplus)

    @property
    def evicted(self) -> BlockIds:
        """Blocks that the call evicted and hands to the engine, int32. Empty if the cache owns the free blocks."""
        return unpack(self._evicted)

    @property
    def end(self) -> End:
        """Where the inserted prefix ends."""
        return self.match.end

    def __repr__(self) -> str:
        kept, back = self.num_tokens - self.num_resident_tokens, len(self._surplus) // ID_BYTES
        evicted = len(self._evicted) // ID_BYTES
        return f"<Inserted: {kept} of {self.num_tokens} tokens are new, {back} blocks left over, {evicted} evicted>"


refuse_copies(Inserted, "its lease holds blocks, and a copy would release them twice. Pass it on")


def insert(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    packed: bytes,
    start: int,
    hints: Hints,
    leases: bool,
    request: object,
) -> Inserted:
    """See PrefixCache.insert. ``key`` has whole blocks; ``start`` counts blocks."""
    done = requests.Insertion()
    if request is not None:
        if not isinstance(request, Inserted) or request.match.namespace != namespace:
            raise ArgumentError("request", request, "an earlier insert into the same namespace, or None")
        hints, done.noted = None, request._noted
    if cache._below is None:
        return _insert(cache, namespace, key, packed, start, hints, leases, done)
    with cache._below.moving():
        return _insert(cache, namespace, key, packed, start, hints, leases, done)


def _insert(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    packed: bytes,
    start: int,
    hints: Hints,
    leases: bool,
    done: requests.Insertion,
) -> Inserted:
    with cache._lock:
        try:
            requests.insert(cache, namespace, key, packed, start, hints, leases, done)
            match = Match(namespace, key, done.table)
            lease = None if done.lease is None else Lease(cache, done.lease, match)
            record = Inserted(match, done, cache._block_size, lease)
            if done.lease is not None:
                cache._leases.add(done.lease)
            return record
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, lease=done.lease, lent=done.evicted)
            raise


def evict(cache: CacheState, num_blocks: int, tenant: str | None) -> int:
    """See PrefixCache.evict."""
    left = num_blocks
    while left:
        wanted = min(left, requests.slice_blocks(cache))
        freed = moved(cache._below, partial(_evict, cache, wanted, tenant))
        left -= freed
        if freed < wanted or not left:
            break
        requests.let_others()
    return num_blocks - left


def _evict(cache: CacheState, num_blocks: int, tenant: str | None) -> int:
    with cache._lock, Mending(cache):
        cache._evictor.end_due_pins(None, num_blocks)
        if tenant is None:
            return cache._evictor.evict(num_blocks)
        return cache._evictor.evict_for(cache._registry.state_of(tenant), num_blocks)


def own_room(cache: CacheState, tenant: str, num_blocks: int, num_free: int | None = None) -> int:
    """Return how many of ``num_blocks`` blocks a tenant can take now, and take none from others beyond its guarantee.

    These are the free blocks, or ``num_free``, and those that its guarantee lacks. If they are too few, its policy
    evicts its own. One hold of the lock: O(blocks evicted).
    """
    with cache._lock, Mending(cache):
        free = cache._pool.num_free if num_free is None else num_free
        state, short = cache._tenants.get(tenant), num_blocks - free
        if state is not None and short > 0:
            short -= max(state.guaranteed_blocks - state.used_blocks, 0)
            if short > 0:
                short -= cache._evictor.evict_own(short, state)
        return num_blocks - max(short, 0)


def allocate(cache: CacheState, num_blocks: int) -> BlockIds:
    """See PrefixCache.allocate."""
    return moved(cache._below, partial(_allocate, cache, num_blocks))


def _allocate(cache: CacheState, num_blocks: int) -> BlockIds:
    taken = bytearray()
    with cache._lock:
        try:
            taken = cache._evictor.take_for_engine(num_blocks)
            return cache._pool.lend(taken)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, lent=taken)
            raise


def reclaim(cache: CacheState, num_blocks: int, tenant: str | None) -> BlockIds:
    """See PrefixCache.reclaim. If it is interrupted, what it has taken goes back, to be reclaimed again."""
    if not cache._pool.is_engines:
        raise requests.cache_has_blocks("reclaim")
    taken, goes_on = bytearray(), True
    try:
        while goes_on:
            with cache._lock:
                try:
                    goes_on = requests.reclaim(cache, num_blocks, tenant, taken)
                except BaseException as error:
                    cache._damage.error, cache._lock.broken = error, cache
                    mend(cache, error, lent=taken)
                    taken = bytearray()
                    raise
            if goes_on:
                requests.let_others()
        return unpack(taken)
    except BaseException as error:
        if taken:
            with cache._lock:
                mend(cache, error, lent=taken)
        raise
