"""The protocol of the two-system machine: four calls that any prefix cache has, and optional ones.

An adapter is one system under audit: a cache, or an engine with its cache. The machine makes two of them. It plays
the same requests of one tenant on both, adds requests of other tenants, and compares everything that the tenant
observes. ``CacheAdapter`` is the adapter of a PrefixCache with a deterministic engine. radixkv's own tests run it.

The machine also uses each of these that the adapter has:

    append(request, token_id)          the request grows by one token; copy-on-write is the system's own task
    append_all(requests, token_ids)    one token to each of a batch, all or nothing
    open_ahead(namespace, ids, step) -> (request, num_cached, num_ahead)   begins a request that a step of this number
                                       computes. It may share tokens that earlier steps compute: num_ahead of them
    end_step(step, fails) -> object    the step is done, or has failed; the result is compared
    truncate(request, num_tokens)      uncommitted tokens are rolled back
    fork(request) -> request           a second request that shares everything so far
    reorder(requests, parents) -> requests   a beam step: the i-th result continues requests[parents[i]]; consumes all
    lease(namespace, ids) -> (lease, num_tokens)   what is cached of ids stays cached until end_lease(lease)
    insert(namespace, ids) -> int      whole blocks of KV computed elsewhere become cached; returns how many tokens were
                                       cached before
    evict(num_blocks)                  evicts by hand; only used if contents alone are compared
    clear(namespace) -> object         forgets everything of the namespace; the result is compared
    purge(tenant) -> object            forgets everything of the tenant, and its requests are released. If
                                       purge_ends_requests is true they stay open, and must refuse every later call
    pin(namespace, ids, ttl_s)         the prefix stays resident for ttl_s seconds; the result is compared
    unpin(tenant, which)               ends one of the tenant's pins, if it has any
    pins(tenant) -> object             the tenant's pins; compared by ==
    announce(namespace, ids, ttl_s)    a request waits
    withdraw(tenant, which)            ends one of the tenant's announcements, if it has any
    announced(tenant) -> object        how much of each waiting request is cached; compared by ==
    converse(namespace, ids) -> (request, num_cached)   begins a request, of the tenant's session of the namespace
    end_session(namespace) -> object   ends this session; the result is compared
    restart()                          the process dies and restarts empty; older objects are never used again
    publish(base_id, namespace, ids, readers)   an operator computes and publishes the whole blocks of ids for tenants
    unpublish(base_id)                 ends the base: no tenant reads it any more
    read(request, num_tokens) -> bytes the KV of the first tokens as the request reads it, deterministic in the ids
    stats(tenant) -> object            the tenant's own statistics; compared by ==
    name(request) -> object            the handle that the tenant sees; compared by ==
    check()                            the system's own invariants; raises if one is broken
    refusals: tuple[type[Exception]]   exceptions that a tenant may see (always including RadixKVError); compared by
                                       type and text. Any other exception is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Protocol

from radixkv.audit import invariants
from radixkv.audit.oracle import Engine, cache_with_engine, chain, kv_of
from radixkv.audit.properties.material import LAYOUT, MAX_PINS, CacheFactory, Mirror
from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import ArgumentError, ConfigError, FlushRequired

_FOR_GOOD_S = 86_400.0


class Adapter(Protocol):
    """One system under audit. ``namespace`` has tenant, model, adapter and salt; ids are small integers ≥ 0."""

    block_size: int
    """Tokens in a block: matches are whole blocks."""

    def match(self, namespace: Namespace, ids: Sequence[int]) -> int:
        """How many leading tokens of ``ids`` are cached for this namespace now. Changes nothing."""

    def open(self, namespace: Namespace, ids: Sequence[int]) -> tuple[Any, int]:
        """Begin a request. Returns it, as any object, and how many leading tokens it need not compute."""

    def commit(self, request: Any, num_tokens: int) -> None:
        """Make the request's first ``num_tokens`` tokens matchable. Compute those that aren't computed yet."""

    def release(self, request: Any) -> None:
        """End the request. No call on it follows."""


class CacheAdapter:
    """A PrefixCache with the oracle's deterministic engine. Requests are Mirrors.

    ``make``: makes a new cache and engine, if the system can be restarted. On the real clock no two calls happen at
    the same moment. So pins then don't end by time, and their remaining time isn't compared.
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
        if hasattr(cache, "step_done"):
            self.open_ahead, self.end_step = self._open_ahead, self._end_step
        if hasattr(cache, "pin"):
            self.pin, self.pins, self.unpin = self._pin, self._pins, self._unpin
        if hasattr(cache, "announce"):
            self.announce, self.announced, self.withdraw = self._announce, self._announced, self._withdraw
        self._waits: list[Any] = []
        if hasattr(cache, "session"):
            self.converse, self.end_session = self._converse, self._end_session
        self._sessions: dict[Namespace, Any] = {}
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
        """The expected states of these blocks: the tenant's own, or the base's where the blocks are the base's."""
        states = chain(namespace, ids)
        for owner, base, readers, blocks in self._bases.values():
            if namespace.tenant in readers and kv_of(namespace) == kv_of(owner):
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
        return self._opened(namespace, ids, lambda: self.cache.open(namespace, ids))

    def _opened(
        self, namespace: Namespace, ids: Sequence[int], call: Callable[[], Any]
    ) -> tuple[Mirror, int]:
        sequence = self._with_room(call)
        cached = sequence.num_cached_tokens
        return Mirror(sequence, namespace, list(ids), chain(namespace, ids), cached, cached), int(cached)

    def _converse(self, namespace: Namespace, ids: Sequence[int]) -> tuple[Mirror, int]:
        session = self._sessions.get(namespace)
        if session is None:
            session = self._sessions[namespace] = self.cache.session(namespace)
        session.pause()
        return self._opened(namespace, ids, lambda: session.open(ids))

    def _end_session(self, namespace: Namespace) -> Any:
        session = self._sessions.pop(namespace, None)
        return None if session is None else (session.own_blocks, session.name, session.close())

    def _open_ahead(self, namespace: Namespace, ids: Sequence[int], step: int) -> tuple[Mirror, int, int]:
        sequence = self._with_room(lambda: self.cache.open(namespace, ids, ahead=True))
        cached, num_ahead, states = (
            sequence.num_cached_tokens,
            sequence.num_ahead_tokens,
            chain(namespace, ids),
        )
        self.engine.write(sequence.block_table, cached + num_ahead, states[cached + num_ahead :])
        sequence.computing(len(ids), step=step)
        request = Mirror(sequence, namespace, list(ids), states, cached, len(ids))
        return request, int(cached), int(num_ahead)

    def _end_step(self, step: int, fails: bool) -> int:
        return int(self.cache.step_failed(step) if fails else self.cache.step_done(step))

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
        """The result of the call. If waiting copies block it, they are executed first, as an engine does."""
        try:
            return call()
        except FlushRequired:
            self.engine.settle()
            return call()

    def truncate(self, request: Mirror, num_tokens: int) -> None:
        """Roll back uncommitted tokens."""
        request.sequence.truncate(num_tokens)
        del request.ids[num_tokens:], request.states[num_tokens:]
        request.num_computed = min(request.num_computed, num_tokens)

    def fork(self, request: Mirror) -> Mirror:
        """Fork one child."""
        (child,) = request.sequence.fork(1)
        return _heir(request, child)

    def reorder(self, requests: Sequence[Mirror], parents: Sequence[int]) -> list[Mirror]:
        """A beam step."""
        heirs = self.cache.reorder([request.sequence for request in requests], parents)
        return [_heir(requests[parent], heir) for parent, heir in zip(parents, heirs, strict=True)]

    def lease(self, namespace: Namespace, ids: Sequence[int]) -> tuple[Any, int]:
        """Lease what is matched."""
        lease = self.cache.match_and_lease(namespace, ids)
        return lease, int(lease.num_tokens)

    def end_lease(self, lease: Any) -> None:
        """Release the lease."""
        lease.release()

    def insert(self, namespace: Namespace, ids: Sequence[int]) -> int:
        """Allocate, fill and insert blocks, then free those that the cache didn't take."""
        block_ids = self._with_room(lambda: self.cache.allocate(len(ids) // self.block_size))
        self.engine.write(block_ids, 0, chain(namespace, ids[: len(block_ids) * self.block_size]))
        done = self.cache.insert(namespace, ids, block_ids)
        self.cache.free(done.surplus)
        return int(done.num_resident_tokens)

    def evict(self, num_blocks: int) -> int:
        """Evict blocks of the whole pool, by policy."""
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

    def _announce(self, namespace: Namespace, ids: Sequence[int], ttl_s: float) -> None:
        self._waits.append(
            self.cache.announce(namespace, ids, ttl_s=ttl_s if self._tells_time else _FOR_GOOD_S)
        )

    def _announced(self, tenant: str) -> Any:
        waits = [each for each in self._waits if each.namespace.tenant == tenant and each.is_open]
        changed = [each for each in self.cache.changed_announcements() if each not in self._waits]
        if changed:
            raise AssertionError("a change of an announcement that nobody made")
        return [(each.num_tokens, each.resident_tokens, each.missing) for each in waits]

    def _withdraw(self, tenant: str, which: int) -> None:
        waits = [each for each in self._waits if each.namespace.tenant == tenant]
        if waits:
            waits[which % len(waits)].withdraw()
            self._waits.remove(waits[which % len(waits)])

    def _purge(self, tenant: str) -> int:
        return int(self.cache.purge(tenant))

    def _restart(self) -> None:
        assert self._make is not None
        self._bases, self._waits, self._sessions = {}, [], {}
        self.cache, self.engine = self._make()

    def read(self, request: Mirror, num_tokens: int) -> bytes:
        """The whole blocks among the tokens, as bytes.

        No copy waits for them: their last rows were written after it.
        """
        whole = min(num_tokens, request.num_computed) // self.block_size
        return self.engine.read(request.sequence.block_table[:whole]).tobytes()

    def stats(self, tenant: str) -> object:
        """The tenant's own counts and namespaces."""
        return self.cache.tenant_stats(tenant), sorted(map(repr, self.cache.namespaces(tenant)))

    def name(self, request: Mirror) -> object:
        """The sequence's repr."""
        return repr(request.sequence)

    def check(self) -> None:
        """Every law of the audit."""
        invariants.check(self.cache)


class LoadingAdapter(CacheAdapter):
    """The same for a cache with host memory below: what comes back to a request counts as cached."""

    def _opened(
        self, namespace: Namespace, ids: Sequence[int], call: Callable[[], Any]
    ) -> tuple[Mirror, int]:
        request, _ = super()._opened(namespace, ids, call)
        if request.sequence.loading is not None:
            request.sequence.loading.poll()
        stop = int(request.sequence.num_committed_tokens)
        request.num_committed = request.num_computed = stop
        return request, stop


def _heir(request: Mirror, sequence: Any) -> Mirror:
    ids, states = list(request.ids), list(request.states)
    return Mirror(sequence, request.namespace, ids, states, request.num_committed, request.num_computed)


def has_strict_tenants(factory: Any) -> bool:
    """Whether the caches that ``factory`` makes have tenants with quotas and modes."""
    return hasattr(factory(CacheConfig(num_blocks=2)), "add_tenant")


def has_loading(factory: Any) -> bool:
    """Whether the caches that ``factory`` makes may have host memory below, which needs torch.

    Those that refuse ``host.memory`` may not.
    """
    if find_spec("torch") is None:
        return False
    try:
        cache = factory(CacheConfig(4, 4, LAYOUT, host_blocks=8))
    except (ConfigError, ArgumentError):
        return False
    sequence = cache.open(Namespace("a", "m"), range(4))
    found = hasattr(sequence, "loading")
    sequence.release()
    return found


def has_lossy(factory: Any) -> bool:
    """Whether the caches that ``factory`` makes may have lossy host memory below.

    Those that refuse a lossy ``tier_dtype`` may not.
    """
    if not has_loading(factory):
        return False
    layout = replace(LAYOUT, dtype="float32")
    try:
        factory(CacheConfig(4, 4, layout, host_blocks=8, tier_dtype="int8"))
    except (ConfigError, ArgumentError):
        return False
    return True


def strict_system(
    factory: CacheFactory, config: CacheConfig, clock: Clock, tenants: Sequence[Tenant]
) -> CacheAdapter:
    """A cache with these tenants, also after a restart. Requests take what comes from host memory below."""

    def make() -> tuple[Any, Engine]:
        cache, engine = cache_with_engine(factory, config, clock=clock)
        for tenant in tenants:
            cache.add_tenant(tenant)
        return cache, engine

    adapter = LoadingAdapter if config.host_blocks else CacheAdapter
    return adapter(*make(), make)


OPERATOR = Tenant("op", guaranteed_blocks=6, mode="strict")
"""The tenant that publishes. Its guarantee always suffices for three bases of two blocks."""


def strict_halves(num_blocks: int) -> tuple[Tenant, Tenant]:
    """The strict tenants ``a`` and ``b``, each with half of the pool."""
    each = num_blocks // 2
    return (
        Tenant("a", guaranteed_blocks=each, mode="strict", max_pins=MAX_PINS),
        Tenant("b", guaranteed_blocks=each, mode="strict", max_pins=MAX_PINS),
    )
