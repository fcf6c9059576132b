"""Announcements: the cache hears of prompts that wait for their turn.

    announce    hang the prompt where its resident part ends
    withdraw    forget it
    changed     whose residency has changed since the last call

An announcement protects nothing and promises nothing. Matches, refusals, guarantees and limits are the same with and
without it. Only the tenant's own policy hears of it, and may evict in another order. ``residency`` keeps up how much is
resident.

A tenant's announcements whose time is over end when the tenant announces or evicts, when a scheduler asks for changes,
and by maintenance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from radixkv.clock import monotonic
from radixkv.errors import AnnouncementLimitExceeded, ArgumentError
from radixkv.index.recovery import mend
from radixkv.index.residency import Claim, Waiting
from radixkv.index.state import CacheState
from radixkv.index.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from typing import Any

    from radixkv.config import Namespace
    from radixkv.index.below import Below
    from radixkv_policies import RequestHints


class Announcement(Claim):
    """A prompt that waits, and how much of it is resident. Make one with ``PrefixCache.announce``.

    Its counts are read without the lock and without a walk, O(1). After its end they keep their last values. It ends
    by ``PrefixCache.open(announcement=…)``, by ``withdraw``, by its time, by a purge or by the tenant's removal.
    Dropping it doesn't end it.
    """

    __slots__ = ("_num_tokens",)

    def __init__(
        self,
        cache: CacheState,
        namespace: Namespace,
        key: bytes,
        hints: RequestHints | None,
        until: float,
        number: int,
    ) -> None:
        num_bytes = len(key)
        super().__init__(
            cache, namespace, key, num_bytes - num_bytes % cache._block_bytes, hints, until, number
        )
        self._num_tokens = num_bytes // TOKEN_BYTES

    def __repr__(self) -> str:
        state = "open" if self.is_open else "ended"
        return f"<Announcement, {state}: {self.resident_tokens} of {self._num_tokens} tokens resident>"

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._num_tokens

    @property
    def resident_tokens(self) -> int:
        """Tokens of the longest resident prefix, in whole blocks: what ``PrefixCache.match`` would find."""
        return self.end // TOKEN_BYTES

    @property
    def missing(self) -> float:
        """The share of its whole blocks that isn't resident, 0 … 1. It is 0 without a whole block."""
        return self.share_missing

    @property
    def is_open(self) -> bool:
        """False after its end."""
        if self.is_over:
            return False
        return cast(CacheState, self._cache)._clock() < self.until

    def withdraw(self) -> None:
        """Forget the prompt. Does nothing after its end. O(1)."""
        cache = cast(CacheState, self._cache)
        with cache._lock:
            try:
                end(cache, self)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error)
                raise


def announce(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    hints: RequestHints | None,
    ttl_s: float,
    below: Below | None,
) -> Announcement:
    """See PrefixCache.announce."""
    if cache._clock is monotonic:
        cache._maintenance.start()  # ends what has expired
    claim: Announcement | None = None
    with cache._lock:
        try:
            waiting = _waiting(cache, namespace)
            claims = cache._claims
            claims.last_number += 1
            until = cache._clock() + ttl_s
            claim = Announcement(cache, namespace, key, hints, until, claims.last_number)
            _hook(cache, waiting, claim)
            waiting.add(claim)
            if below is not None:
                below.expect(claim)
            return claim
        except BaseException as error:
            if claim is not None:
                claim.is_over = True
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error)
            raise


def _waiting(cache: CacheState, namespace: Namespace) -> Waiting:
    """Return the claims of a tenant that may announce one more. Raises NamespaceError, AnnouncementLimitExceeded."""
    registry, limit = cache._registry, cache._config.max_announcements
    if not registry.admits(namespace.tenant):
        registry.new_tree(namespace)  # raises
    waiting = cache._claims.of(namespace.tenant)
    if len(waiting) >= limit:
        waiting.end_due()
    if len(waiting) >= limit:
        raise AnnouncementLimitExceeded(limit)
    return waiting


def _hook(cache: CacheState, waiting: Waiting, claim: Claim) -> None:
    """Hang a claim in the trees of its namespace. The tenant is known afterwards."""
    namespace = claim.namespace
    tenant = cache._tenants.get(namespace.tenant)
    if tenant is None:
        tenant = cache._registry.new_tree(namespace).tenant
        cache._tenants[namespace.tenant] = tenant
    if tenant.waiting is None:
        cache._claims.tenants[namespace.tenant] = waiting
        tenant.wait(waiting)
        cache._recorder.follow(tenant)
    own = tenant.trees.get(namespace)
    if own is not None:
        tenant.hooks_of(own).add(claim)
    if tenant.bases is not None:
        waiting.set_head(claim, cache._bases.num_head_bytes(tenant, claim))
        for tree in tenant.behind.get(namespace, ()):
            if tree.may_serve(claim):
                tenant.hooks_of(tree).add(claim)


def end(cache: CacheState, claim: Claim) -> None:
    """End a claim, unless it has ended. Call it under the lock."""
    waiting = cache._claims.tenants.get(claim.namespace.tenant)
    if waiting is not None:
        waiting.end(claim)


def changed(cache: CacheState) -> list[Announcement]:
    """See PrefixCache.changed_announcements."""
    with cache._lock:
        try:
            cache._claims.end_due()
            found = cache._claims.take_changed()
            return found
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error)
            raise


def require_own(cache: CacheState, announcement: Any, namespace: Namespace) -> None:
    """Raise ArgumentError unless this is an announcement of this cache and namespace."""
    if not isinstance(announcement, Announcement) or announcement._cache is not cache:
        raise ArgumentError("announcement", announcement, "an Announcement of this cache, or None")
    if announcement.namespace != namespace:
        raise ArgumentError("announcement", announcement, "one of the namespace that is opened")
