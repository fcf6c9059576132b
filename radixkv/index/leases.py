"""Lease: the right to use a match. ``lease_match``, ``take_lease`` and ``take_pin`` lease and make the handle.

``end_due`` ends the pins whose time is over.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from radixkv.errors import IntegrityError, LeaseError, ReentrantCall
from radixkv.index import requests
from radixkv.index.blocks import unpack
from radixkv.index.holders import LeaseState
from radixkv.index.locking import Guard, defer
from radixkv.index.recovery import Mending, mend
from radixkv.index.state import CacheState
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.match import End, Match
    from radixkv.index.pins import Pin
    from radixkv.storage.plan import BlockIds


class Lease:
    """The right to use a match: its blocks are not evicted until ``release``. Use it in a ``with``.

    If a lease is garbage-collected before its release, it gives a ResourceWarning, and the next call of the cache
    releases it.
    """

    __slots__ = ("_cache", "_guard", "_match", "_state", "num_tokens")
    __deletable__ = ("_state",)  # so that compiled code asks whether it is set
    _guard: Guard  # set only by the finaliser

    def __init__(self, cache: CacheState, state: LeaseState, match: Match) -> None:
        if not isinstance(state, LeaseState):
            raise TypeError("Lease is made by PrefixCache.lease")
        self._cache, self._state, self._match = cache, state, match
        self.num_tokens = state.num_tokens

    def __del__(self) -> None:
        try:
            state = self._state
        except AttributeError:  # __init__ didn't come to its end
            return
        if state._is_open:
            self._guard = Guard(self._cache, state)

    def __repr__(self) -> str:
        status = "open" if self._state._is_open else "released"
        return f"<Lease, {status}: {self.num_tokens} tokens in {self._state.num_blocks} blocks>"

    @property
    def block_ids(self) -> BlockIds:
        """Ids of the leased blocks, int32, read-only. Raises LeaseError after the release."""
        if not self._state._is_open or self._cache.is_broken:
            with self._cache._lock:
                _require_open(self._state)
        return unpack(self._state._packed)

    @property
    def end(self) -> End:
        """Where the leased prefix ends."""
        return self._match.end

    @property
    def is_open(self) -> bool:
        """False after the release."""
        return self._state._is_open

    def release(self) -> None:
        """Allow eviction of the blocks again. A second call raises LeaseError.

        If a finaliser calls this in the middle of a call of the same cache, the next call does the release.
        """
        try:
            self._release()
        except ReentrantCall as error:
            defer(self._cache, self._state, error)

    def _release(self) -> None:
        cache, state = self._cache, self._state
        with cache._lock:
            try:
                _require_open(state)
                requests.end_lease(cache, state)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, lease=state)
                raise

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state._is_open and not self._cache.is_dead:
            try:
                self.release()
            except IntegrityError:
                if error is None or not self._cache.is_dead:
                    raise  # otherwise the error that ended the block propagates


refuse_copies(Lease, "it holds blocks, and a copy would release them twice. Pass it on, or lease again")


def lease_match(cache: CacheState, match: Match) -> Lease:
    """See PrefixCache.lease."""
    state: LeaseState | None = None
    with cache._lock:
        try:
            state = requests.lease(cache, match)
            if cache._evictor.on_hand_out is not None:
                cache._evictor.on_hand_out()
            handle = Lease(cache, state, match)
            cache._leases.add(state)
            return handle
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, lease=state)
            raise


def take_lease(cache: CacheState, namespace: Namespace, key: bytes) -> Lease:
    """See PrefixCache.match_and_lease."""
    state: LeaseState | None = None
    with cache._lock:
        try:
            state, match = requests.match_and_lease(cache, namespace, key)
            if cache._evictor.on_hand_out is not None:
                cache._evictor.on_hand_out()
            handle = Lease(cache, state, match)
            cache._leases.add(state)
            return handle
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, lease=state)
            raise


def take_pin(cache: CacheState, namespace: Namespace, key: bytes, ttl_s: float, as_of: int | None) -> Pin:
    """See PrefixCache.pin. ``key`` has whole blocks."""
    lease: LeaseState | None = None
    with cache._lock:
        try:
            if as_of is not None:
                cache._endings.require_current(namespace, as_of)
            cache._pins.end_due(namespace.tenant)
            match = requests.find(cache, namespace, key)
            budget = cache._registry.pin_budget(namespace.tenant)
            limit = cache._registry.pin_limit(namespace.tenant)
            pin = cache._pins.renew(match, len(key) // TOKEN_BYTES, ttl_s, budget, limit)
            if pin is None:
                lease = requests.lease(cache, match)
                cache._leases.add(lease)
                pin = cache._pins.hold(lease, ttl_s)
            return pin
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, lease=lease)
            raise


def end_due(cache: CacheState) -> None:
    """End expired pins, in slices, and expired announcements. For maintenance."""
    is_over = False
    while not is_over:
        with cache._lock, Mending(cache):
            is_over = cache._pins.end_slice()
            cache._claims.end_due()
        if not is_over:
            requests.let_others()


def _require_open(lease: LeaseState) -> None:
    if not lease._is_open:
        raise LeaseError("this lease was already released")
