"""Promises: prefixes that stay resident for a TTL, because a request's breakpoints asked for it.

    breakpoints ─▶ keep: a pin for each, the longest prefix first ─┬─ granted: its tokens count as written
                                                                   └─ refused: nothing is written, the answer says why

A promise is a pin within its tenant's budget. So it ends early only by deletion, clear, purge, removal of the tenant, a
new version of the weights, or loss of the replica. A request is served all the same if the budget has no room.

Pins leave an eighth of what their tenant can have to its requests, at least a block. Otherwise a tenant could pin all
of it, and none of its requests would be served until the pins end.

The cache has one pin for a prefix, with one end. Several *holders* may want it: promises, a pin of the tenant, a pin of
the fleet. ``hold`` keeps the pin until the last of their ends, and ``release`` leaves it to the others. The ends of
others count only while the cache has the same pin as before: a pin that was deleted or cleared ended for all.

A prefix whose template shows the date is promised with its date (``promised_dates``). A request that was rendered with
an earlier date, because a promise of that date covers it, is only promised what ends before that date's promises do.
Otherwise each request would prolong the date, and a busy prompt would never show the present one.

Cost: one pin of the cache a breakpoint, and some 300 bytes a held prefix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from radixkv.errors import CapacityError, ControlError, LeaseError, PinBudgetExceeded
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.service.problems import of_library
from radixkv.service.promised_dates import PromisedDates, digest_of
from radixkv.service.usage import Promise

if TYPE_CHECKING:
    from radixkv.clock import Clock
    from radixkv.config import Namespace
    from radixkv.engines import Engine
    from radixkv.index.pins import Pin

REFUSAL_HEADER: Final = "x-cache-write-refused"
"""The header with the type of the error for which a promise was refused. The request is served all the same."""

DATE_ENDS: Final = "date_ends"
"""The reason why a request with an earlier date isn't promised more: its date ends sooner."""
_FEWEST_TO_SWEEP: Final = 64
_REST: Final = 8
"""A tenant's pins leave one part of so many to its requests."""
_Place = tuple["Namespace", bytes]


@dataclass(frozen=True, slots=True)
class Kept:
    """What was promised, in whole blocks, and the type of the error for which a promise was refused."""

    granted: tuple[Promise, ...] = ()
    refusal: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The header that says why something wasn't promised."""
        return {} if self.refusal is None else {REFUSAL_HEADER: self.refusal}


@dataclass(slots=True)
class _Share:
    """A pin and its holders' ends, on the clock of the promises."""

    pin_id: int
    ends: dict[str, float]


@dataclass(slots=True)
class _Tenant:
    """What a tenant's promises and pins share. ``lock``: held while the cache is asked, which may be far away.

    ``last_id``: of its newest pin.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    shares: dict[_Place, _Share] = field(default_factory=dict)
    sweep_at: int = _FEWEST_TO_SWEEP
    last_id: int = 0

    def sweep(self, now: float) -> None:
        """Forget prefixes that nothing holds any more. O(1), amortised."""
        if len(self.shares) > self.sweep_at:
            self.shares = {
                place: share for place, share in self.shares.items() if max(share.ends.values()) > now
            }
            self.sweep_at = 2 * len(self.shares) + _FEWEST_TO_SWEEP


class Promises:
    """The pins of one engine's cache and their holders. Thread-safe. No tenant waits for another's pin."""

    def __init__(self, engine: Engine, clock: Clock, most_blocks: Callable[[str], int] | None = None) -> None:
        """``most_blocks``: returns how many blocks a tenant can have; None: its pins may hold all of them."""
        self._engine, self._clock, self._most_blocks = engine, clock, most_blocks
        self._tenants: dict[str, _Tenant] = {}
        self.dates = PromisedDates(clock, engine.cache.endings)

    def keep(
        self,
        namespace: Namespace,
        prompt_key: bytes,
        asked: Iterable[Promise],
        as_of: int | None = None,
        date: str = "",
        *,
        num_shared: int | None = None,
    ) -> Kept:
        """Promise what the budget allows. The prefixes must be resident. Raises nothing for a refusal.

        Each TTL is a holder of its own, so that a short one never ends a long one.

        - ``date``: that its template shows; empty: none.
        - ``num_shared``: if the date is over, and only kept for a promise: the tokens that are the same on all dates.
        """
        size = self._engine.limits.block_size
        whole = [Promise(each.num_tokens // size * size, each.ttl_s) for each in asked]
        wanted = sorted((each for each in whole if each.num_tokens), key=lambda each: -each.num_tokens)
        if wanted and "pins" not in self._engine.abilities:
            return Kept(refusal="not_supported")
        granted: list[Promise] = []
        refusal = None
        ends_in_s = float("inf")
        if num_shared is not None and wanted:
            cover = self.dates.cover(namespace, [date], prompt_key, num_shared * TOKEN_BYTES)
            ends_in_s = cover.until - self._clock()
        for each in wanted:
            if any(longer.ttl_s >= each.ttl_s for longer in granted):
                continue
            if each.ttl_s > ends_in_s and each.num_tokens > (num_shared or 0):
                refusal = refusal or DATE_ENDS
                continue
            try:
                prefix = prompt_key[: each.num_tokens * TOKEN_BYTES]
                self.hold(f"promise-{each.ttl_s}", namespace, prefix, each.ttl_s, as_of, date)
            except (CapacityError, LeaseError, ControlError) as error:
                refusal = refusal or of_library(error).type
            else:
                granted.append(each)
        return Kept(tuple(granted), refusal)

    def hold(
        self,
        holder: str,
        namespace: Namespace,
        prompt_key: bytes,
        ttl_s: float,
        as_of: int | None = None,
        date: str = "",
    ) -> Pin:
        """Pin a resident prefix for a holder, or renew the holder's time. Raises as ``EngineCache.pin``.

        ``as_of``: of the request: see ``Owner``. ``date``: that its template shows, which is kept as long; empty: none.
        """
        place, cache = _place(namespace, prompt_key), self._engine.cache
        tenant = self._tenant(namespace)
        with tenant.lock:
            now = self._clock()
            share = tenant.shares.get(place)
            others = {} if share is None else _standing(share.ends, holder, now)
            until = max(now + ttl_s, *others.values(), 0.0)
            pin = cache.pin(namespace, prompt_key, until - now, as_of=as_of)
            if pin.id > tenant.last_id:
                tenant.last_id = pin.id
                self._require_rest(pin)
            if share is not None and others and pin.id != share.pin_id:
                others, pin = {}, cache.pin(namespace, prompt_key, ttl_s, as_of=as_of)
            tenant.shares[place] = _Share(pin.id, {**others, holder: now + ttl_s})
            tenant.sweep(now)
            if date:
                self.dates.keep(namespace, date, prompt_key, ttl_s)
            return pin

    def _require_rest(self, pin: Pin) -> None:
        """End a new pin and raise PinBudgetExceeded if the pins leave too little to the tenant's requests."""
        tenant, cache = pin.namespace.tenant, self._engine.cache
        if self._most_blocks is None:
            return
        budget, pinned = budget_of(self._most_blocks(tenant)), cache.tenant_stats(tenant).pinned_blocks
        if pinned > budget:
            cache.unpin(pin)
            before = cache.tenant_stats(tenant).pinned_blocks
            raise PinBudgetExceeded(pinned - before, budget, before)

    def release(self, holder: str, namespace: Namespace, prompt_key: bytes, pin: Pin) -> None:
        """End a holder's time. The pin ends, unless others hold it. Raises LeaseError if it has ended before."""
        place, cache = _place(namespace, prompt_key), self._engine.cache
        tenant = self._tenant(namespace)
        with tenant.lock:
            now = self._clock()
            share = tenant.shares.pop(place, None)
            others = {}
            if share is not None and share.pin_id == pin.id:
                others = _standing(share.ends, holder, now)
            if not others:
                self.dates.end(namespace, prompt_key)
                cache.unpin(pin)
                return
            left_s = max(others.values()) - now
            self.dates.end(namespace, prompt_key, left_s)
            left = cache.pin(namespace, prompt_key, left_s)
            tenant.shares[place] = _Share(left.id, others)

    def unpin(self, pin: Pin) -> None:
        """End a pin of the cache for all its holders. Raises as ``EngineCache.unpin``."""
        self._engine.cache.unpin(pin)
        tenant = self._tenant(pin.namespace)
        with tenant.lock:
            for place in [each for each, share in tenant.shares.items() if share.pin_id == pin.id]:
                self.dates.end_digest(*place)
                del tenant.shares[place]

    def _tenant(self, namespace: Namespace) -> _Tenant:
        return self._tenants.setdefault(namespace.tenant, _Tenant())


def budget_of(most_blocks: int) -> int:
    """Return how many blocks a tenant may pin, whatever its settings say, of those that it can have."""
    return most_blocks - max(most_blocks // _REST, 1)


def _place(namespace: Namespace, prompt_key: bytes) -> _Place:
    return namespace, digest_of(prompt_key)


def _standing(ends: dict[str, float], holder: str, now: float) -> dict[str, float]:
    """Return the ends of the other holders that aren't over."""
    return {name: end for name, end in ends.items() if name != holder and end > now}
