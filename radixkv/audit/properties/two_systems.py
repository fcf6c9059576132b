"""Non-interference: tenant A's calls on two systems that other tenants use differently, compared call by call.

    low    A's call on both systems; what A observes must be equal
    high   another tenant's call on one of them: only on the second (NI-1: A alone against A among others), or on
           either one (NI-2: two runs with different others)

The calls:

- requests, whole or cancelled, waiting ones, lookups, chunks of prefill, rollbacks, forks, beam steps and leases
- appends, one by one and in batches
- bursts of equal requests that share what running steps compute
- blocks that an engine inserts, evictions by hand, clears, purges with open requests
- tenants added and removed, time that passes, a crash of both systems

With host memory below (``TwoLoadingRuns``), what comes back from there counts as cached.

A observes matched and cached lengths, refusals (type and text), names, statistics, and the bytes that it is served.
The prompts of all tenants come from one small set. So another tenant's prompt may be equal to A's or differ in one
id. It may end at or near a block boundary, or spell the same text with other ids (2 may mean 0, 0). Each answer is
also checked with the oracle: only what the tenant committed in that namespace may be served.

An operator publishes and ends bases, on both systems alike. What A observes may depend on the bases, but not on how
other tenants read them.

If one tenant may evict another's blocks (a full pool in burst mode), answers may differ. The served bytes and the
oracle's verdict may not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.audit.oracle import Oracle
from radixkv.audit.properties.adapter import OPERATOR, Adapter, CacheAdapter, strict_halves, strict_system
from radixkv.audit.properties.material import (
    LAYOUT,
    MAX_PINS,
    MAX_PROMPT_BLOCKS,
    NAMESPACES,
    CacheFactory,
    expect,
    prompts,
    small,
)
from radixkv.clock import ManualClock
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import ArgumentError, IntegrityError, RadixKVError

who = st.integers(0, 3)
"""0 and 1: A. 2: another tenant on the first system. 3: on the second. If A is alone on the first, 2 means 3."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a call returned to its caller, and the bytes that were served."""

    answer: tuple[object, ...]
    served: bytes = b""


_PLACES = (0, 1, 2, 3, 0, 1, 2, 0)
"""The namespace that a drawn number stands for: most often the first."""


@dataclass(slots=True)
class Request:
    """An open request as its player sees it."""

    handle: Any
    namespace: Namespace
    ids: list[int]
    num_committed: int
    num_cached: int
    is_stale: bool = False
    """Its tenant was purged: what it commits is never served."""


@dataclass(slots=True)
class Player:
    """One tenant's calls on one system, and everything that the tenant observes.

    A refused ``open`` leaves None in ``requests``. Each method returns what the tenant observed.
    """

    tenant: str
    system: Any
    oracle: Oracle
    requests: list[Request | None] = field(default_factory=list)
    leases: list[Any] = field(default_factory=list)
    ahead: list[tuple[int, Request]] = field(default_factory=list)
    """Running steps, each with the request that it computes."""
    num_steps: int = 0
    num_waited: int = 0
    num_opened: int = 0

    @property
    def namespaces(self) -> list[Namespace]:
        """The tenant's namespaces. They differ only in adapter, salt or version of the weights."""
        return [Namespace(self.tenant, *each[1:]) for each in NAMESPACES if each.tenant == "a"]

    def open(self, where: int, prompt: Sequence[int], done: int) -> Observed:
        """What was cached, the request's name and the cached bytes; then ``done`` tokens are committed.

        Two of three requests are of a session. It ends before some of them, and frees what only it used.
        """
        namespace = self.namespaces[_PLACES[where % 8]]

        self.num_opened += 1
        converses = self.num_opened % 3 and hasattr(self.system, "converse")
        opens = self.system.converse if converses else self.system.open

        def begin() -> Observed:
            ended = self.system.end_session(namespace) if converses and self.num_opened % 4 == 0 else None
            handle, cached = _pair(opens(namespace, prompt))
            self._is_no_lie(namespace, prompt, cached)
            self.requests[-1] = request = Request(handle, namespace, list(prompt), cached, cached)
            served = self._read(request, cached)
            self._commit(request, done)
            return Observed((cached, self._name(request), ended), served)

        self.requests.append(None)
        return self._told(begin)

    def serve(self, where: int, prompt: Sequence[int]) -> Observed:
        """The same as ``open``; the request is computed and ends."""
        observed = self.open(where, prompt, len(prompt))
        self.release(len(self.requests) - 1)
        return observed

    def burst(self, where: int, prompt: Sequence[int], count: int, fails: bool) -> Observed:
        """How much of each of ``count`` equal requests is cached, and computed by running steps of the tenant.

        If a burst runs, its steps end instead.
        """
        if not hasattr(self.system, "open_ahead"):
            return Observed(())
        if self.ahead:
            return self._end_burst(fails)
        namespace, told = self.namespaces[_PLACES[where % 8]], list[object]()
        for _ in range(count):
            self.num_steps += 1
            step = 2 * self.num_steps + (self.tenant == "b")
            told += self._told(lambda step=step: self._ahead(namespace, prompt, step)).answer  # type: ignore[misc]
        return Observed(tuple(told))

    def _ahead(self, namespace: Namespace, prompt: Sequence[int], step: int) -> Observed:
        handle, cached, num_ahead = self.system.open_ahead(namespace, prompt, step)
        self._is_no_lie(namespace, prompt, cached)
        self.ahead.append((step, Request(handle, namespace, list(prompt), cached, cached)))
        return Observed((cached, num_ahead))

    def _end_burst(self, fails: bool) -> Observed:
        """What the end of each step answers, and the bytes that are committed then. The requests end."""
        told, served = list[object](), b""
        for step, request in self.ahead:
            is_done = not fails and not request.is_stale
            if is_done:
                self.oracle.commit(request.namespace, request.ids, len(request.ids))
            told.append(self.system.end_step(step, fails))
            served += self._read(request, len(request.ids)) if is_done else b""
        for _, request in self.ahead:
            self.system.release(request.handle)
        self.ahead = []
        return Observed(tuple(told), served)

    def match(self, where: int, prompt: Sequence[int]) -> Observed:
        """How much is matched. The request waits afterwards, or an older one waits no longer."""
        namespace = self.namespaces[_PLACES[where % 8]]
        matched = self.system.match(namespace, prompt)
        self._is_no_lie(namespace, prompt, matched)
        waits = self._wait(namespace, prompt).answer if hasattr(self.system, "announce") else ()
        return Observed((matched, *waits))

    def go_on(self, kind: int, which: int, amount: int) -> Observed:
        """A request commits, grows, shrinks or forks; or several grow in one call or make a beam step."""
        if kind == 6:
            return self.diverge(which, amount)
        if kind == 4:
            return self.append_all(which + 2, amount)
        if kind == 5:
            return self.reorder(which + 2, [0, amount][: 1 + amount % 2])
        if kind == 3:
            return self.fork(which)
        if kind == 2:
            return self.truncate(which, amount)
        return self.append(which, amount % 3) if kind else self.commit(which, amount)

    def commit(self, which: int, by: int) -> Observed:
        """How much is committed afterwards."""
        return self._on(which, lambda request: self._commit(request, by))

    def append(self, which: int, token_id: int) -> Observed:
        """How long the request is afterwards, or that the pool was full."""

        def call(request: Request) -> None:
            self.system.append(request.handle, token_id)
            request.ids.append(token_id)

        return self._on(which, call, needs="append")

    def append_all(self, mask: int, token_id: int) -> Observed:
        """How long the requests of a batch are afterwards, or that there were too few blocks for all."""
        batch = self._masked(mask)
        if not batch or not hasattr(self.system, "append_all"):
            return Observed(())
        ids = [(token_id + at) % 3 for at in range(len(batch))]

        def call() -> Observed:
            self.system.append_all([each.handle for each in batch], ids)
            for request, added in zip(batch, ids, strict=True):
                request.ids.append(added)
            return Observed(tuple(len(each.ids) for each in batch))

        return self._told(call)

    def reorder(self, mask: int, parents: Sequence[int]) -> Observed:
        """The lengths and names of the heirs. The requests that they continue are consumed."""
        batch = self._masked(mask)
        if not batch or not hasattr(self.system, "reorder"):
            return Observed(())
        chosen = [parent % len(batch) for parent in parents]

        def call() -> Observed:
            handles = self.system.reorder([each.handle for each in batch], chosen)
            expect(len(handles) == len(chosen), f"{len(handles)} heirs of {len(chosen)} parents")
            heirs = [
                replace(batch[parent], handle=handle, ids=list(batch[parent].ids))
                for parent, handle in zip(chosen, handles, strict=True)
            ]
            self.requests = [*(each for each in self.requests if each not in batch), *heirs]
            return Observed(tuple((len(heir.ids), self._name(heir)) for heir in heirs))

        return self._told(call)

    def lease(self, where: int, prompt: Sequence[int]) -> Observed:
        """How much of a prompt is leased.

        If two leases are open, the older one ends instead, and nothing is observed.
        """
        if not hasattr(self.system, "lease"):
            return Observed(())
        if len(self.leases) > 1:
            self.system.end_lease(self.leases.pop(0))
            return Observed(())
        namespace = self.namespaces[_PLACES[where % 8]]

        def call() -> Observed:
            lease, leased = _pair(self.system.lease(namespace, prompt))
            self._is_no_lie(namespace, prompt, leased)
            self.leases.append(lease)
            return Observed((leased,))

        return self._told(call)

    def insert(self, where: int, prompt: Sequence[int]) -> Observed:
        """How much was cached before."""
        if not hasattr(self.system, "insert"):
            return Observed(())
        namespace = self.namespaces[_PLACES[where % 8]]
        ids = prompt[: len(prompt) // self.oracle.block_size * self.oracle.block_size]

        def call() -> Observed:
            resident = self.system.insert(namespace, ids)
            self._is_no_lie(namespace, ids, resident)
            self.oracle.commit(namespace, ids, len(ids))
            return Observed((resident,))

        return self._told(call)

    def evict(self, num_blocks: int) -> Observed:
        """Nothing is observed: an operator does this, not the tenant."""
        if hasattr(self.system, "evict"):
            self.system.evict(num_blocks)
        return Observed(())

    def truncate(self, which: int, by: int) -> Observed:
        """How long the request is afterwards."""

        def call(request: Request) -> None:
            stop = max(request.num_committed, len(request.ids) - by)
            self.system.truncate(request.handle, stop)
            del request.ids[stop:]

        return self._on(which, call, needs="truncate")

    def fork(self, which: int) -> Observed:
        """The parent's length and name. The child becomes a request."""

        def call(request: Request) -> None:
            handle = self.system.fork(request.handle)
            self.requests.append(replace(request, handle=handle, ids=list(request.ids)))

        return self._on(which, call, needs="fork")

    def diverge(self, which: int, amount: int) -> Observed:
        """What a fork and the child's first append return. Then the parent or the child ends."""
        parent = which % max(len(self.requests), 1)
        forked = self.fork(parent)
        grown = self.append(-1, amount % 3)
        self.release(parent if amount % 2 else -1)
        return Observed((*forked.answer, *grown.answer))

    def release(self, which: int) -> Observed:
        """End a request. Nothing is observed."""
        if self.requests:
            request = self.requests.pop(which % len(self.requests))
            if request is not None:
                self.system.release(request.handle)
        return Observed(())

    def clear(self, where: int) -> Observed:
        """How much was forgotten."""
        if not hasattr(self.system, "clear"):
            return Observed(())
        namespace = self.namespaces[_PLACES[where % 8]]
        self.oracle.clear(namespace)
        return Observed((self.system.clear(namespace),))

    def purge(self) -> Observed:
        """Everything of the tenant is forgotten.

        Its requests end; or they stay open, and nothing of theirs is served.
        """
        if not hasattr(self.system, "purge"):
            return Observed(())
        for namespace in self.namespaces:
            self.oracle.clear(namespace)
        answer = self.system.purge(self.tenant)
        if getattr(self.system, "purge_ends_requests", False):
            for request in [*self.open_requests, *[request for _, request in self.ahead]]:
                request.is_stale = True
        else:
            for _, request in self.ahead:
                self.system.release(request.handle)
            self.ahead = []
            while self.requests:
                self.release(0)
        return Observed((answer,))

    def restarted(self, oracle: Oracle) -> None:
        """The system has lost everything."""
        self.oracle = oracle
        self.requests, self.leases, self.ahead = [], [], []

    def end(self) -> None:
        """Release all requests and leases, and end all steps."""
        if self.ahead:
            self._end_burst(True)
        while self.requests:
            self.release(0)
        while self.leases:
            self.system.end_lease(self.leases.pop())

    def pin(self, where: int, prompt: Sequence[int], seconds: int) -> Observed:
        """The pin, or why it was refused."""
        if not hasattr(self.system, "pin"):
            return Observed(())
        namespace = self.namespaces[_PLACES[where % 8]]
        return self._told(lambda: Observed((self.system.pin(namespace, prompt, seconds),)))

    def unpin(self, which: int) -> Observed:
        """End one of the tenant's pins."""
        if not hasattr(self.system, "unpin"):
            return Observed(())
        return self._told(lambda: Observed((self.system.unpin(self.tenant, which),)))

    def _wait(self, namespace: Namespace, prompt: Sequence[int]) -> Observed:
        """A request waits, or an older one waits no longer. A refusal is observed."""
        self.num_waited += 1
        if self.num_waited % 3 == 0:
            return self._told(lambda: Observed((self.system.withdraw(self.tenant, self.num_waited),)))
        seconds = 1 + 7 * self.num_waited % 40
        return self._told(lambda: Observed((self.system.announce(namespace, prompt, seconds),)))

    def standing(self) -> tuple[object, ...]:
        """What the tenant sees between calls: its own counts, pins, waiting requests, names and bytes."""
        counts = self.system.stats(self.tenant) if hasattr(self.system, "stats") else None
        pins = self.system.pins(self.tenant) if hasattr(self.system, "pins") else None
        waits = self.system.announced(self.tenant) if hasattr(self.system, "announced") else None
        return (counts, pins, waits), [
            (self._name(each), self._read(each, each.num_committed)) for each in self.open_requests
        ]

    @property
    def open_requests(self) -> list[Request]:
        """The requests without the gaps."""
        return [request for request in self.requests if request is not None]

    def _masked(self, mask: int) -> list[Request]:
        return [request for at, request in enumerate(self.open_requests) if mask >> at % 4 & 1]

    def _on(self, which: int, call: Callable[[Request], None], needs: str = "commit") -> Observed:
        request = self.requests[which % len(self.requests)] if self.requests else None
        if request is None or not hasattr(self.system, needs):
            return Observed(())

        def told() -> Observed:
            call(request)
            return Observed((len(request.ids), request.num_committed, self._name(request)))

        return self._told(told)

    def _told(self, call: Callable[[], Observed]) -> Observed:
        try:
            return call()
        except IntegrityError:
            raise  # a bug of the system, never an answer
        except (RadixKVError, *getattr(self.system, "refusals", ())) as error:
            return Observed((type(error).__name__, str(error)))

    def _commit(self, request: Request, by: int) -> None:
        stop = min(len(request.ids), request.num_committed + by)
        if not request.is_stale:
            self.oracle.commit(request.namespace, request.ids, stop)
        self.system.commit(request.handle, stop)
        request.num_committed = stop

    def _is_no_lie(self, namespace: Namespace, ids: Sequence[int], num_tokens: int) -> None:
        expect(type(num_tokens) is int and num_tokens >= 0, f"{num_tokens!r} is not a number of tokens")
        lie = self.oracle.served_lie(namespace, ids, num_tokens)
        expect(lie is None, lie)

    def _name(self, request: Request) -> object:
        return self.system.name(request.handle) if hasattr(self.system, "name") else None

    def _read(self, request: Request, num_tokens: int) -> bytes:
        if not hasattr(self.system, "read") or not num_tokens:
            return b""
        found = self.system.read(request.handle, num_tokens)
        expect(isinstance(found, bytes), f"read answered a {type(found).__name__}, not bytes")
        return bytes(found)


def _pair(opened: Any) -> tuple[Any, Any]:
    expect(
        isinstance(opened, tuple) and len(opened) == 2, f"open answered {opened!r}, not (request, num_cached)"
    )
    return opened[0], opened[1]


def _refusal(call: Callable[..., object], *args: object) -> str | None:
    try:
        call(*args)
    except RadixKVError as error:
        return str(error)
    return None


class TwoSystems(RuleBasedStateMachine):
    """The steps of the machine. A subclass makes the two systems in an ``initialize`` rule that calls ``start``."""

    def start(self, systems: Sequence[Adapter], *, is_alone: bool, compares_all: bool) -> None:
        """Begin with two equal systems.

        ``compares_all``: compare answers too, not only bytes and the oracle's verdict.
        """
        self.systems, self.is_alone, self.compares_all = list(systems), is_alone, compares_all
        self.may_insert = True
        self.published: dict[str, tuple[int, list[int]]] = {}
        self.num_published = 0
        self.block_size = systems[0].block_size
        self.oracles = [Oracle(self.block_size) for _ in systems]
        pairs = list(zip(systems, self.oracles, strict=True))
        self.low = [Player("a", *pair) for pair in pairs]
        self.high = [Player("b", *pair) for pair in pairs]

    def _prompt(self, prompt: tuple[int, ...]) -> list[int]:
        """The prompt scaled to the block size: at most four blocks and one token."""
        times = max(self.block_size // 4, 1)
        return [token for token in prompt for _ in range(times)][: MAX_PROMPT_BLOCKS * self.block_size + 1]

    @rule(
        by=who,
        where=small,
        prompt=prompts,
        done=st.sampled_from((17, 4, 0)),
        kind=st.sampled_from(("open", "match", "open", "match", "open", "lease", "open", "insert")),
        then=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=3),
    )
    def ask(
        self,
        by: int,
        where: int,
        prompt: tuple[int, ...],
        done: int,
        kind: str,
        then: list[tuple[int, int]],
    ) -> None:
        """A request, which continues at once; or a lookup, a lease, or blocks that an engine inserts."""
        ids = self._prompt(prompt)
        done *= max(self.block_size // 4, 1)
        calls: dict[str, Callable[[Player], Observed]] = {
            "open": lambda player: player.open(where, ids, done),
            "match": lambda player: player.match(where, ids),
            "lease": lambda player: player.lease(where, ids),
            "insert": lambda player: player.insert(where, ids),
        }
        if kind != "insert" or self.may_insert:
            self._play(by, calls[kind])
        for more, amount in then if kind == "open" else ():
            self._play(by, lambda player, more=more, amount=amount: player.go_on(more, -1, amount))  # type: ignore[misc]

    @rule(
        by=who,
        where=small,
        first=st.integers(0, 9),
        count=st.integers(1, 6),
        blocks=st.integers(1, 4),
        times=st.sampled_from((1, 2, 1, 4)),
    )
    def serve(self, by: int, where: int, first: int, count: int, blocks: int, times: int) -> None:
        """Whole requests, one after another, that differ in their first id. They fill or flood a cache.

        Each is made ``times`` times, so that some prompts are asked more often than others.
        """
        for at in [at for at in range(first, first + count) for _ in range(times)]:
            ids = [at % 10] + [0] * (blocks * self.block_size - 1)
            self._play(by, lambda player, ids=ids: player.serve(where, ids))  # type: ignore[misc]

    @rule(by=who, where=small, prompt=prompts, count=st.integers(2, 3), fails=st.booleans())
    def burst(self, by: int, where: int, prompt: tuple[int, ...], count: int, fails: bool) -> None:
        """Equal requests, each computed by a step of its own that runs until the tenant's next burst."""
        ids = self._prompt(prompt)
        self._play(by, lambda player: player.burst(where, ids, count, fails))

    @rule(by=who, kind=st.integers(0, 6), which=small, amount=st.integers(0, 6))
    def go_on(self, by: int, kind: int, which: int, amount: int) -> None:
        """A running request continues."""
        self._play(by, lambda player: player.go_on(kind, which, amount))

    @rule(
        by=who,
        where=small,
        prompt=prompts,
        amounts=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        ends=st.booleans(),
    )
    def branch(self, by: int, where: int, prompt: tuple[int, ...], amounts: list[int], ends: bool) -> None:
        """A request with a partial last block branches repeatedly, without an engine's step in between."""
        ids = self._prompt(prompt)
        ids += [1] * (len(ids) % self.block_size == 0)
        self._play(by, lambda player: player.open(where, ids, len(ids)))
        for amount in amounts:
            self._play(by, lambda player, amount=amount: player.diverge(-1, amount))  # type: ignore[misc]
        if ends:
            self._play(by, lambda player: player.release(-1))

    @rule(by=who, which=small)
    def release(self, by: int, which: int) -> None:
        """A request ends, or is cancelled."""
        self._play(by, lambda player: player.release(which))

    @rule(by=who, where=small, kind=st.integers(0, 7))
    def forget(self, by: int, where: int, kind: int) -> None:
        """A namespace is cleared, or a tenant purged. Seldom, both systems crash and restart empty.

        If only contents are compared, an operator also evicts blocks of any tenant.
        """
        if kind == 7:
            self._restart()
        elif kind == 6 and not self.compares_all:
            self._play(by, lambda player: player.evict(where))
        else:
            self._play(
                by, (lambda player: player.purge()) if kind % 2 else lambda player: player.clear(where)
            )

    def _restart(self) -> None:
        if all(hasattr(system, "restart") for system in self.systems):
            for system in self.systems:
                system.restart()  # type: ignore[attr-defined]
            self.published, self.num_published = {}, 0
            self.oracles = [Oracle(self.block_size) for _ in self.systems]
            for players in (self.low, self.high):
                for player, oracle in zip(players, self.oracles, strict=True):
                    player.restarted(oracle)

    @rule(
        by=who, where=small, prompt=prompts, seconds=st.sampled_from((60, 5, 20, 1)), unpins=st.integers(0, 3)
    )
    def pin(self, by: int, where: int, prompt: tuple[int, ...], seconds: int, unpins: int) -> None:
        """A prefix is computed and pinned, or a pin ends early."""
        if not unpins:
            self._play(by, lambda player: player.unpin(where))
            return
        ids = self._prompt(prompt)
        self._play(by, lambda player: player.serve(where, ids))
        self._play(by, lambda player: player.pin(where, ids, seconds))

    @precondition(lambda self: getattr(self, "compares_all", False) and hasattr(self.systems[0], "publish"))
    @rule(
        where=st.sampled_from((0, 0, 2, 3)),
        prompt=prompts,
        readers=st.sampled_from((("a", "b"), ("a",), ("b",))),
        which=st.integers(0, 1),
    )
    def publish(self, where: int, prompt: tuple[int, ...], readers: tuple[str, ...], which: int) -> None:
        """The operator publishes a base of one or two blocks on both systems, or ends it; at most three in a life."""
        base_id, namespace = f"base {which}", self.low[0].namespaces[where]._replace(tenant=OPERATOR.id)
        ids = self._prompt(prompt)[: 2 * self.block_size]
        pairs: list[tuple[Any, Oracle]] = list(zip(self.systems, self.oracles, strict=True))
        if base_id in self.published:
            del self.published[base_id]
            for system, oracle in pairs:
                oracle.unpublish(base_id)
                system.unpublish(base_id)
        elif len(ids) >= self.block_size and self.num_published < 3:
            told = [_refusal(system.publish, base_id, namespace, ids, readers) for system, _ in pairs]
            expect(told[0] == told[1], f"that a base is published depends on B: {told}")
            if told[0] is None:
                self.published[base_id] = where, ids
                self.num_published += 1
                for _, oracle in pairs:
                    oracle.publish(base_id, namespace, ids, readers)

    @precondition(lambda self: bool(getattr(self, "published", None)))
    @rule(by=who, which=small, more=st.lists(st.integers(0, 1), max_size=2), ends=st.booleans())
    def read(self, by: int, which: int, more: list[int], ends: bool) -> None:
        """A request that begins with a base and continues with up to two blocks, computed; it ends or stays open."""
        where, base = list(self.published.values())[which % len(self.published)]
        ids = [*base, *(token for token in more for _ in range(self.block_size))]
        if ends:
            self._play(by, lambda player: player.serve(where, ids))
        else:
            self._play(by, lambda player: player.open(where, ids, len(ids)))

    @invariant()
    def nothing_seen_differs(self) -> None:
        """What A sees between calls is the same on both systems; the systems' own laws hold."""
        if not hasattr(self, "systems"):
            return
        self._stepped()
        first, second = (player.standing() for player in self.low)
        if self.compares_all:
            expect(first == second, f"A's counts, names or bytes depend on B: {first} and {second}")
        self._check()

    def teardown(self) -> None:
        """Release everything."""
        if not hasattr(self, "systems") or sys.exc_info()[0] is not None:
            return
        for player in (*self.low, *self.high):
            player.end()
        self._check()
        self._finished()

    def _check(self) -> None:
        for system in self.systems:
            if hasattr(system, "check"):
                system.check()

    def _finished(self) -> None:
        """Called at the end of an example that found nothing."""

    def _stepped(self) -> None:
        """Called after each step."""

    def _play(self, by: int, call: Callable[[Player], Observed]) -> None:
        if by >= 2:
            call(self.high[1 if self.is_alone else by - 2])
            return
        first, second = (call(player) for player in self.low)
        if self.compares_all:
            said = f"A observes {second.answer} beside B and {first.answer} otherwise"
            expect(first.answer == second.answer, said)
            expect(first.served == second.served, "A is served other bytes beside B than otherwise")
        size = min(len(first.served), len(second.served))
        expect(first.served[:size] == second.served[:size], "A is served other bytes beside B than otherwise")


class TwoRuns(TwoSystems):
    """The machine over two caches of ``factory``: a pool that is never full, a tiny pool, or a pool with A strict.

    In the first and the last, A must observe the same. In a tiny pool of burst tenants, only contents are compared.
    If A is strict, the other tenant may be strict, may borrow with or without a guarantee, or may be unknown to the
    cache. Operators add, change and remove tenants other than A on one of the systems. Both caches share one clock.
    Segments are single blocks, so that policies have ghosts.
    """

    factory: ClassVar[CacheFactory]
    policies: ClassVar[tuple[str, ...]] = ("lru", "lfu")
    with_storage: ClassVar[tuple[bool, ...]] = (False, True)
    modes: ClassVar[tuple[str, ...]] = ("burst",)

    @initialize(
        policy=st.integers(0, 63),
        stored=st.booleans(),
        block_size=st.sampled_from((2, 4, 1)),
        is_tiny=st.booleans(),
        is_alone=st.booleans(),
        mode=st.integers(0, 1),
        room=st.sampled_from((16, 8, 24)),
        beside=st.integers(0, 3),
    )
    def make(
        self,
        policy: int,
        stored: bool,
        block_size: int,
        is_tiny: bool,
        is_alone: bool,
        mode: int,
        room: int,
        beside: int,
    ) -> None:
        """Make two equal caches."""
        cls = type(self)
        layout = LAYOUT if cls.with_storage[stored % len(cls.with_storage)] else None
        name = cls.policies[policy % len(cls.policies)]
        self.is_strict = cls.modes[mode % len(cls.modes)] == "strict"
        num_blocks = room + OPERATOR.guaranteed_blocks if self.is_strict else 12 if is_tiny else 512
        everybody = Tenant("default", max_pinned_blocks=5, max_pins=MAX_PINS)
        config = CacheConfig(
            num_blocks, block_size, layout, policy=name, segment_tokens=block_size, default_tenant=everybody
        )
        self.clock = ManualClock()
        self.start(
            [self._system(config, beside) for _ in range(2)],
            is_alone=is_alone,
            compares_all=self.is_strict or not is_tiny,
        )
        self.may_insert = not self.is_strict  # engines may take only blocks that no tenant is guaranteed

    def _system(self, config: CacheConfig, beside: int) -> CacheAdapter:
        factory = type(self).factory
        if not self.is_strict:
            return strict_system(factory, config, self.clock, ())
        a, b = strict_halves(config.num_blocks - OPERATOR.guaranteed_blocks)
        other = [(b,), (_changed("b", 2, 3),), (_changed("b", 0, 1),), ()][beside]
        return strict_system(factory, config, self.clock, (a, OPERATOR, *other))

    @rule(seconds=st.sampled_from((1, 0, 60)), learns=st.booleans())
    def wait(self, seconds: int, learns: bool) -> None:
        """Time passes on both systems, and policies may learn."""
        self.clock.advance(seconds)
        for system in self.systems if learns else ():
            system.cache.maintain()  # type: ignore[attr-defined]

    @precondition(lambda self: getattr(self, "is_strict", False))
    @rule(
        by=st.integers(2, 3),
        tenant=st.sampled_from("bc"),
        guarantee=st.integers(-1, 8),
        kind=st.integers(0, 7),
    )
    def promise(self, by: int, tenant: str, guarantee: int, kind: int) -> None:
        """Add, change or remove (-1) another tenant on one system, if the cache accepts it."""
        cache = self.systems[1 if self.is_alone else by - 2].cache  # type: ignore[attr-defined]
        try:
            if guarantee < 0:
                cache.remove_tenant(tenant)
            else:
                cache.add_tenant(_changed(tenant, guarantee, kind))
        except ArgumentError:
            return

    def _play(self, by: int, call: Callable[[Player], Observed]) -> None:
        self.clock.advance(1.0)
        super()._play(by, call)


def _changed(tenant: str, guarantee: int, kind: int) -> Tenant:
    """A tenant: strict, or borrowing, with or without a limit, at one of three weights."""
    if kind >= 6 and guarantee:
        return Tenant(tenant, guaranteed_blocks=guarantee, mode="strict")
    most = guarantee + 3 if kind % 2 else None
    return Tenant(tenant, (1.0, 3.0, 0.5)[kind % 3], guarantee, most, max_pinned_blocks=most, max_pins=kind)


class TwoLoadingRuns(TwoRuns):
    """The same with host memory below: what was evicted comes back, as much of it in both runs."""

    with_storage: ClassVar[tuple[bool, ...]] = (True,)

    def _system(self, config: CacheConfig, beside: int) -> CacheAdapter:
        num_blocks = config.num_blocks
        num_below = 3 * num_blocks if config.block_size > 1 else num_blocks // 3
        return super()._system(replace(config, host_blocks=num_below), beside)

    @rule(by=who, where=small, count=st.integers(2, 6), blocks=st.integers(2, 4))
    def come_back(self, by: int, where: int, count: int, blocks: int) -> None:
        """Requests that are more than most tenants may have in the pool come again, in the same order."""
        for _ in range(2):
            self.serve(by, where, 0, count, blocks, 1)


class TwoAdapters(TwoSystems):
    """The machine over two of the systems that ``factory()`` makes."""

    factory: ClassVar[Callable[[], Adapter]]
    contents_only: ClassVar[bool] = False

    @initialize(is_alone=st.booleans())
    def make(self, is_alone: bool) -> None:
        """Make two equal systems."""
        cls = type(self)
        systems = [cls.factory() for _ in range(2)]
        self.start(systems, is_alone=is_alone, compares_all=not cls.contents_only)
