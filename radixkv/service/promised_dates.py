"""The dates of promised prefixes, where a chat template shows the date.

A promise keeps the date that it was made with: while it holds, a conversation that begins with it is rendered with that
date, and not with today's. A new promise with an earlier date never makes that date last longer: see
``Promises.keep``.

Cost: some 300 bytes a promised prefix, at most MAX_PREFIXES of a tenant and a date. What covers a prompt costs one hash
of it, and a microsecond for each of these prefixes. Nothing here waits for the cache, so the event loop may ask.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from radixkv.errors import LeaseError

if TYPE_CHECKING:
    from radixkv.clock import Clock
    from radixkv.config import Namespace
    from radixkv.index.endings import Endings

MAX_DATES: Final = 2
"""Dates before today with which a conversation is rendered: the newest ones of its tenant's promises."""
MAX_PREFIXES: Final = 1_024
"""Promised prefixes of a tenant and a date that are known. Beyond that the oldest of them are forgotten."""
_KEPT_DATES: Final = 8

_Prefix = tuple["Namespace", bytes]
"""A namespace and a digest."""


@dataclass(frozen=True, slots=True)
class Cover:
    """How much of a prompt is promised, in bytes of its key, and until when the date is kept that it was made with."""

    num_bytes: int = 0
    until: float = float("-inf")


NO_COVER: Final = Cover()


@dataclass(slots=True)
class _Kept:
    num_bytes: int
    until: float
    as_of: int


class PromisedDates:
    """See the module's docstring. Thread-safe."""

    def __init__(self, clock: Clock, endings: Endings) -> None:
        self._clock, self._endings, self._lock = clock, endings, threading.Lock()
        self._tenants: dict[str, dict[str, dict[_Prefix, _Kept]]] = {}
        """By tenant and date."""

    def keep(self, namespace: Namespace, date: str, prompt_key: bytes, ttl_s: float) -> None:
        """Keep the date of a prefix that is promised for this time. O(1), amortised."""
        prefix, now, as_of = (namespace, digest_of(prompt_key)), self._clock(), self._endings.num
        with self._lock:
            dates = self._tenants.setdefault(namespace.tenant, {})
            kept = dates.setdefault(date, {})
            before = kept.pop(prefix, None)
            until = now + ttl_s
            if before is not None and self._holds(prefix, before, now):
                until = max(until, before.until)
            kept[prefix] = _Kept(len(prompt_key), until, as_of)
            if len(kept) > MAX_PREFIXES:
                alive = {each: one for each, one in kept.items() if self._holds(each, one, now)}
                while len(alive) > MAX_PREFIXES // 2:
                    del alive[next(iter(alive))]
                dates[date] = alive
            if len(dates) > _KEPT_DATES:
                del dates[min(dates)]

    def end(self, namespace: Namespace, prompt_key: bytes, left_s: float = 0.0) -> None:
        """Let the dates of a prefix end in ``left_s``, because its pin ends before its time."""
        self.end_digest(namespace, digest_of(prompt_key), left_s)

    def end_digest(self, namespace: Namespace, digest: bytes, left_s: float = 0.0) -> None:
        """Do the same for a prefix that is known by its digest."""
        prefix, until = (namespace, digest), self._clock() + left_s
        with self._lock:
            for kept in self._tenants.get(namespace.tenant, {}).values():
                if prefix in kept:
                    kept[prefix].until = min(kept[prefix].until, until)

    def before(self, tenant: str, today: str) -> tuple[str, ...]:
        """Return the newest dates before today of a tenant's promises that hold, MAX_DATES at most.

        O(1), amortised: a date is forgotten once none of its promises holds.
        """
        now, found = self._clock(), list[str]()
        with self._lock:
            dates = self._tenants.get(tenant, {})
            for date in sorted(dates, reverse=True):
                kept = dates[date]
                if date >= today:
                    continue
                while kept and not self._holds(first := next(iter(kept)), kept[first], now):
                    del kept[first]
                if not kept:
                    del dates[date]
                    continue
                found.append(date)
            if not dates:
                self._tenants.pop(tenant, None)
        return tuple(found[:MAX_DATES])

    def cover(
        self, namespace: Namespace, dates: Iterable[str], prompt_key: bytes, num_shared: int = 0
    ) -> Cover:
        """Return how much of a prompt is promised, by promises of these dates.

        ``num_shared``: bytes with which the prompt begins whatever the date is. A promise of no more says nothing about
        the date, so it doesn't count.
        """
        now, held = self._clock(), dict[tuple[int, bytes], float]()
        with self._lock:
            by_date = self._tenants.get(namespace.tenant, {})
            for prefix, kept in chain.from_iterable(by_date.get(date, {}).items() for date in dates):
                is_meant = prefix[0] == namespace and num_shared < kept.num_bytes <= len(prompt_key)
                if is_meant and self._holds(prefix, kept, now):
                    held[kept.num_bytes, prefix[1]] = kept.until
        found, hashed, done = NO_COVER, hashlib.blake2b(digest_size=16), 0
        for size in sorted({size for size, _ in held}):
            hashed.update(prompt_key[done:size])
            done = size
            until = held.get((size, hashed.digest()))
            if until is not None:
                found = Cover(size, max(found.until, until))
        return found

    def _holds(self, prefix: _Prefix, kept: _Kept, now: float) -> bool:
        if kept.until <= now:
            return False
        try:
            self._endings.require_current(prefix[0], kept.as_of)
        except LeaseError:  # it was purged or cleared
            return False
        return True


def digest_of(prompt_key: bytes) -> bytes:
    """Return the digest under which a prefix is kept."""
    return hashlib.blake2b(prompt_key, digest_size=16).digest()
