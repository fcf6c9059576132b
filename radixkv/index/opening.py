"""Opening: take the lock, open a sequence and make its handle. A long key first evicts in slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from radixkv.errors import ArgumentError, FlushRequired, OutOfBlocks
from radixkv.index import ahead, requests
from radixkv.index.announcements import Announcement, end
from radixkv.index.bases import Publication
from radixkv.index.holders import LeaseState, SequenceState
from radixkv.index.leases import Lease
from radixkv.index.recovery import mend
from radixkv.index.sequence import Sequence
from radixkv.index.state import CacheState
from radixkv.index.tree import Node, SoleUser

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.arguments import Hints


def open_handle(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    hints: Hints,
    publication: Publication | None,
    lookup: bool,
    may_lean: bool = False,
    announcement: Announcement | None = None,
    user: SoleUser | None = None,
    as_of: int | None = None,
) -> Sequence:
    """See PrefixCache.open, PrefixCache.publish and Session.open."""
    if cache._pool.is_engines:
        raise requests.engine_has_blocks("open" if publication is None else "publish")
    if announcement is not None and hints is None:
        hints = cast("Hints", announcement.hints)
    if cache._below is None:
        return _open_any(
            cache, namespace, key, hints, publication, lookup, may_lean, announcement, user, as_of
        )
    with cache._below.moving():
        return _open_any(
            cache, namespace, key, hints, publication, lookup, may_lean, announcement, user, as_of
        )


def _open_any(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    hints: Hints,
    publication: Publication | None,
    lookup: bool,
    may_lean: bool,
    announcement: Announcement | None,
    user: SoleUser | None,
    as_of: int | None,
) -> Sequence:
    if requests.takes_slices(cache, len(key)):
        return _open_long(
            cache, namespace, key, hints, publication, lookup, may_lean, announcement, user, as_of
        )
    return _open(cache, namespace, key, hints, None, publication, lookup, may_lean, announcement, user, as_of)


def _open(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    hints: Hints,
    already_touched: Node | None,
    publication: Publication | None,
    lookup: bool,
    may_lean: bool,
    announcement: Announcement | None,
    user: SoleUser | None,
    as_of: int | None,
) -> Sequence:
    sequence: SequenceState | None = None
    with cache._lock:
        try:
            if as_of is not None:
                cache._endings.require_current(namespace, as_of)
            if user is not None and not user.num_open:
                user = None  # the session was closed meanwhile
            if may_lean and lookup:
                sequence = ahead.open_sequence(
                    cache, namespace, key, hints, already_touched, publication, user
                )
            else:
                sequence = requests.open_sequence(
                    cache, namespace, key, hints, already_touched, publication, lookup, user
                )
            handle = Sequence(cache, sequence)
            cache._sequences.add(sequence)
            if announcement is not None:
                end(cache, announcement)
            return handle
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, sequence)
            raise


def _open_long(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    hints: Hints,
    publication: Publication | None,
    lookup: bool,
    may_lean: bool,
    announcement: Announcement | None,
    user: SoleUser | None,
    as_of: int | None,
) -> Sequence:
    """Evict in slices before opening, so that other threads don't wait for thousands of evictions.

    A lease protects the matched blocks until then.
    """
    lease: LeaseState | None = None
    sequence: Sequence | None = None
    try:
        with cache._lock:
            try:
                lease, match, needed, tenant = requests.lease_of_long(
                    cache, namespace, key, publication, lookup, user
                )
                cache._leases.add(lease)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, lease=lease)
                raise
        with Lease(cache, lease, match):
            requests.make_room(cache, needed, tenant)
            above = lease._node if lookup else None
            sequence = _open(
                cache,
                namespace,
                key,
                hints,
                above,
                publication,
                lookup,
                may_lean,
                announcement,
                user,
                as_of,
            )
        return sequence
    except BaseException as error:
        opened = None if sequence is None else sequence._state
        with cache._lock:
            mend(cache, error, opened, lease=lease)
        raise


def open_base(
    cache: CacheState, namespace: Namespace, key: bytes, publication: Publication, as_of: int | None
) -> Sequence:
    """See PrefixCache.publish."""
    try:
        return open_handle(cache, namespace, key, None, publication, True, as_of=as_of)
    except FlushRequired:
        raise
    except OutOfBlocks:
        with cache._lock:
            short = requests.shortfall(cache, namespace, key)
        blocks = len(key) // cache._block_bytes
        allowed = f"{short} fewer while the rest of the pool is guaranteed to tenants or held"
        problem = f"has {blocks} blocks; allowed: {allowed}"
        raise ArgumentError("ids", blocks, allowed, problem=problem) from None
