"""What the two-system machine drives: four calls that any prefix cache has, and more if the system has more.

An adapter is one system under audit: a cache, or an engine with its cache. The machine makes two of them, plays the
same requests of one tenant on both and other tenants' requests beside them, and compares all that the tenant
observes. ``CacheAdapter`` is the one over a PrefixCache and a deterministic engine, which radixkv's own tests run.

Beyond the four calls of ``Adapter`` the machine uses whatever of these the adapter has:

    append(request, token_id)          the request grows by one token; its copy-on-write is the system's business
    append_all(requests, token_ids)    one token to each of a batch, all or nothing
    truncate(request, num_tokens)      uncommitted tokens are rolled back
    fork(request) -> request           a second request that shares everything so far
    reorder(requests, parents) -> requests   a beam step: the i-th result continues requests[parents[i]]; consumes all
    lease(namespace, ids) -> (lease, num_tokens)   what is cached of ids stays cached until end_lease(lease)
    insert(namespace, ids) -> int      KV computed elsewhere become cached, whole blocks; how many tokens were before
    evict(num_blocks)                  room is made by hand; only where contents alone are compared
    clear(namespace) -> object         everything of the namespace is forgotten; what it returns is compared
    purge(tenant) -> object            everything of the tenant is forgotten, and its requests are released; if
                                       purge_ends_requests is true they stay, and must refuse whatever is called next
    pin(namespace, ids, ttl_s)         the prefix stays resident for so long; what it returns is compared
    unpin(tenant, which)               one of the tenant's pins ends, if it has any
    pins(tenant) -> object             the tenant's pins; compared by ==
    restart()                          the process dies and comes back empty; nothing of before is called on any more
    publish(base_id, namespace, ids, readers)   an operator publishes the whole blocks of ids, computed, for tenants
    unpublish(base_id)                 nobody reads them any more
    read(request, num_tokens) -> bytes the KV of the first tokens as the request reads it, deterministic in the ids
    stats(tenant) -> object            what the tenant is told of itself; compared by ==
    name(request) -> object            the handle that the tenant sees; compared by ==
    check()                            the system's own invariants; raises if one is broken
    refusals: tuple[type[Exception]]   exceptions that a tenant may see (RadixKVError is one always); compared by type
                                       and text. Any other exception is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from radixkv.audit import invariants
from radixkv.audit.oracle import Engine, cache_with_engine, chain
from radixkv.audit.properties.material import MAX_PINS, CacheFactory, Mirror
from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import FlushRequired

_FOR_GOOD_S = 86_400.0


class Adapter(Protocol):
    """One system under audit. ``namespace`` has tenant, model, adapter and salt; ids are small integers ≥ 0."""

    block_size: int
    """Tokens a block: matches are whole blocks of it."""

    def match(self, namespace: Namespace, ids: Sequence[int]) -> int:
        """How many leading tokens of ``ids`` are cached for this namespace now. Changes nothing."""

    def open(self, namespace: Namespace, ids: Sequence[int]) -> tuple[Any, int]:
        """Begin a request; the request, any object, and how many leading tokens it need not compute."""

    def commit(self, request: Any, num_tokens: int) -> None:
        """Compute the request's first ``num_tokens`` tokens, as far as they aren't yet, and make them matchable."""

    def release(self, request: Any) -> None:
        """The request ends; nothing is called on it any more."""


class CacheAdapter:
    """A PrefixCache with the deterministic engine of the oracle; requests are Mirrors.

    ``make``: makes such a cache and engine anew, if the system can be restarted. Pins of a cache on the real clock
    don't end by time here, and what is left of it isn't compared: no two calls are made at one moment.
    """

    purge_ends_requests = True

    def __init__(
        self, cache: Any, engine: Engine | None = None, make: Callable[[], tuple[Any, Engine]] | None = None
    ) -> None:
        self.cache, self.engine, self._make = cache, engine or Engine(cache), make
        self.block_size: int = cache.config.block_size
        self._bases: dict[str, tuple[Namespace, list[int], Sequence[str], list[int]]] = {}
        self._tells_time = getattr(cache, "_clock", monotonic) is not monotonic
        if hasattr(cache, "purge"):
            self.purge = self._purge
        if hasattr(cache, "pin"):
            self.pin, self.pins, self.unpin = self._pin, self._pins, self._unpin
        if hasattr(cache, "publish"):
            self.publish, self.unpublish = self._publish, self._unpublish
        if make is not None:
            self.restart = self._restart

    def match(self, namespace: Namespace, ids: Sequence[int]) -> int:
        """Matched tokens; raises AssertionError if their blocks hold another prefix's KV."""
        match = self.cache.match(namespace, ids)
        states = self._states(namespace, ids[: match.num_tokens], match.block_ids.tolist())
        if not self.engine.is_behind and not self.engine.holds(match.block_ids, states):
            raise AssertionError("a match whose blocks hold other KV")
        return int(match.num_tokens)

    def _states(self, namespace: Namespace, ids: Sequence[int], block_ids: list[int]) -> list[int]:
        """The states that these blocks ought to hold: the tenant's own, or its base's where they are the base's."""
        states = chain(namespace, ids)
        for owner, base, readers, blocks in self._bases.values():
            if namespace.tenant in readers and (namespace.model, namespace.adapter) == owner[1:3]:
                same = [mine == its for mine, its in zip(block_ids, blocks, strict=False)]
                size = (same.index(False) if False in same else len(same)) * self.block_size
                states[:size] = chain(owner, base[:size])
        return states

    def _publish(
        self, base_id: str, namespace: Namespace, ids: Sequence[int], readers: Sequence[str]
    ) -> None:
        with self._with_room(lambda: self.cache.publish(base_id, namespace, ids, readers)) as sequence:
            num_cached, size = sequence.num_cached_tokens, sequence.num_tokens
            self.engine.write(sequence.block_table, num_cached, chain(namespace, ids[:size])[num_cached:])
            sequence.commit(size)
        blocks = self.cache.match(namespace, ids[:size]).block_ids.tolist()
        self._bases[base_id] = (namespace, list(ids[:size]), readers, blocks)

    def _unpublish(self, base_id: str) -> None:
        del self._bases[base_id]
        self.cache.unpublish(base_id)

    def open(self, namespace: Namespace, ids: Sequence[int]) -> tuple[Mirror, int]:
        """A sequence, and its cached tokens."""
        sequence = self._with_room(lambda: self.cache.open(namespace, ids))
        cached = sequence.num_cached_tokens
        return Mirror(sequence, namespace, list(ids), chain(namespace, ids), cached, cached), int(cached)

    def commit(self, request: Mirror, num_tokens: int) -> None:
        """Compute and commit."""
        if num_tokens > request.num_computed:
            missing = request.states[request.num_computed : num_tokens]
            self.engine.write(request.sequence.block_table, request.num_computed, missing)
            request.num_computed = num_tokens
        request.sequence.commit(num_tokens)
        request.num_committed = num_tokens

    def release(self, request: Mirror) -> None:
        """Release the sequence."""
        request.sequence.release()

    def append(self, request: Mirror, token_id: int) -> None:
        """Grow by one id."""
        self._with_room(lambda: request.sequence.append(token_id))
        before = request.states[-1] if request.states else None
        request.states.extend(chain(request.namespace, [token_id], before))
        request.ids.append(token_id)

    def append_all(self, requests: Sequence[Mirror], token_ids: Sequence[int]) -> None:
        """Grow by one id each."""
        self._with_room(lambda: self.cache.append([each.sequence for each in requests], list(token_ids)))
        for request, token_id in zip(requests, token_ids, strict=True):
            before = request.states[-1] if request.states else None
            request.states.extend(chain(request.namespace, [token_id], before))
            request.ids.append(token_id)

    def _with_room(self, call: Callable[[], Any]) -> Any:
        """What the call returns; copies that are in its way are executed first, as an engine does."""
        try:
            return call()
        except FlushRequired:
            self.engine.settle()
            return call()

    def truncate(self, request: Mirror, num_tokens: int) -> None:
        """Roll back."""
        request.sequence.truncate(num_tokens)
        del request.ids[num_tokens:], request.states[num_tokens:]
        request.num_computed = min(request.num_computed, num_tokens)

    def fork(self, request: Mirror) -> Mirror:
        """One child."""
        (child,) = request.sequence.fork(1)
        return _heir(request, child)

    def reorder(self, requests: Sequence[Mirror], parents: Sequence[int]) -> list[Mirror]:
        """A beam step."""
        heirs = self.cache.reorder([request.sequence for request in requests], parents)
        return [_heir(requests[parent], heir) for parent, heir in zip(parents, heirs, strict=True)]

    def lease(self, namespace: Namespace, ids: Sequence[int]) -> tuple[Any, int]:
        """A lease on what is matched."""
        lease = self.cache.lease(self.cache.match(namespace, ids))
        return lease, int(lease.num_tokens)

    def end_lease(self, lease: Any) -> None:
        """Release it."""
        lease.release()

    def insert(self, namespace: Namespace, ids: Sequence[int]) -> int:
        """Lent blocks, filled and handed in; those of what was resident before go back."""
        block_ids = self._with_room(lambda: self.cache.allocate(len(ids) // self.block_size))
        self.engine.write(block_ids, 0, chain(namespace, ids[: len(block_ids) * self.block_size]))
        resident = int(self.cache.insert(namespace, ids, block_ids))
        self.cache.free(block_ids[: resident // self.block_size])
        return resident

    def evict(self, num_blocks: int) -> int:
        """By policy, of the whole pool."""
        return int(self.cache.evict(num_blocks))

    def clear(self, namespace: Namespace) -> int:
        """How many blocks were forgotten."""
        return int(self.cache.clear(namespace))

    def _pin(self, namespace: Namespace, ids: Sequence[int], ttl_s: float) -> Any:
        if self._tells_time:
            return self.cache.pin(namespace, ids, ttl_s)
        return replace(self.cache.pin(namespace, ids, _FOR_GOOD_S), ttl_s=_FOR_GOOD_S)

    def _pins(self, tenant: str) -> Any:
        pins = self.cache.pins(tenant)
        return pins if self._tells_time else [replace(pin, ttl_s=_FOR_GOOD_S) for pin in pins]

    def _unpin(self, tenant: str, which: int) -> None:
        pins = self.cache.pins(tenant)
        if pins:
            self.cache.unpin(pins[which % len(pins)])

    def _purge(self, tenant: str) -> int:
        return int(self.cache.purge(tenant))

    def _restart(self) -> None:
        assert self._make is not None
        self._bases = {}
        self.cache, self.engine = self._make()

    def read(self, request: Mirror, num_tokens: int) -> bytes:
        """The whole blocks among them, as bytes. No copy waits for those: their last rows were written after it."""
        whole = min(num_tokens, request.num_computed) // self.block_size
        return self.engine.read(request.sequence.block_table[:whole]).tobytes()

    def stats(self, tenant: str) -> object:
        """The tenant's own counts and namespaces."""
        return self.cache.tenant_stats(tenant), sorted(map(repr, self.cache.namespaces(tenant)))

    def name(self, request: Mirror) -> object:
        """How the sequence calls itself."""
        return repr(request.sequence)

    def check(self) -> None:
        """Every law of the audit."""
        invariants.check(self.cache)


def _heir(request: Mirror, sequence: Any) -> Mirror:
    ids, states = list(request.ids), list(request.states)
    return Mirror(sequence, request.namespace, ids, states, request.num_committed, request.num_computed)


def has_strict_tenants(factory: Any) -> bool:
    """Whether what ``factory`` makes has tenants with quotas and modes."""
    return hasattr(factory(CacheConfig(num_blocks=2)), "add_tenant")


def strict_system(
    factory: CacheFactory, config: CacheConfig, clock: Clock, tenants: Sequence[Tenant]
) -> CacheAdapter:
    """A cache that has these tenants, also after a restart."""

    def make() -> tuple[Any, Engine]:
        cache, engine = cache_with_engine(factory, config, clock=clock)
        for tenant in tenants:
            cache.add_tenant(tenant)
        return cache, engine

    return CacheAdapter(*make(), make)


OPERATOR = Tenant("op", guaranteed_blocks=6, mode="strict")
"""Who publishes: three bases of two blocks have room, whatever others do."""


def strict_halves(num_blocks: int) -> tuple[Tenant, Tenant]:
    """Tenants ``a`` and ``b``, strict, each of whom has half of the pool."""
    each = num_blocks // 2
    return (
        Tenant("a", guaranteed_blocks=each, mode="strict", max_pins=MAX_PINS),
        Tenant("b", guaranteed_blocks=each, mode="strict", max_pins=MAX_PINS),
    )
