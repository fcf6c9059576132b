"""The exported Hypothesis state machine: random lives of requests, against the oracle and the laws.

The only door to Hypothesis in the package (extra ``audit``). An integrator hands in a factory that makes a
cache, wrapped in whatever stands around it, and gets it attacked::

    report = properties.run(PrefixCache, max_examples=500)
    assert report.ok, report.failure

One example is one tiny cache (block sizes 1, 2 and 4, pools of a few blocks, every policy asked for, storage
of its own or none) and a few namespaces: two tenants, and one tenant's namespaces that differ in adapter or
salt only. Prompts come from an alphabet of 3, share prefixes on purpose, and have lengths around multiples
of the block size. A step is one call; calls that must be refused are made too. After each step:

- every law of ``radixkv.audit`` holds on the snapshot;
- what was served is no lie: committed before, in that namespace, since it was last cleared;
- every open sequence reads the KV of its own ids, bit for bit, so a sibling's write never shows;
- what a running sequence committed is still matched: leased blocks aren't evicted;
- a refused call changed nothing, and a refusal for lack of room was true;
- copies are as many as the formula says: for each shared partial tail, (writers − 1) if every owner writes,
  otherwise writers.

``TwoRuns`` is the second machine (``run(…, machine=TwoRuns)``): one tenant's calls on a cache of its own and on one
that it shares, compared call by call.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixkv.audit import invariants
from radixkv.audit.oracle import Engine, Oracle, chain
from radixkv.clock import ManualClock
from radixkv.config import CacheConfig
from radixkv.errors import ArgumentError, LeaseError, OutOfBlocks, PendingError, RadixKVError, TokenError
from radixkv.namespaces import Namespace
from radixkv.storage.layout import KVLayout

CacheFactory = Callable[..., Any]
"""Called as ``factory(config, clock=clock)``; returns a PrefixCache or what behaves like one."""

NAMESPACES = (
    Namespace("a", "m"),
    Namespace("b", "m"),
    Namespace("a", "m", None, "s"),
    Namespace("a", "m", "s", ""),
)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float64")
MAX_OPEN = 6
_NOISE = ("state.after_each_step()", "state.nothing_seen_differs()")
MAX_PROMPT_BLOCKS = 4

_small = st.integers(0, 7)
_where = st.sampled_from((0, 0, 0, 0, 1, 1, 2, 3))
_id = st.integers(0, 2)


def _universe() -> list[tuple[int, ...]]:
    """Prompts that coincide on purpose: all zeros, or zeros with one id changed, of up to 17 ids; short first."""
    found: list[tuple[int, ...]] = []
    for length in range(1, 18):
        plain = (0,) * length
        found.append(plain)
        found.extend((*plain[:at], other, *plain[at + 1 :]) for at in range(length) for other in (1, 2))
    return [*found, ()]


_HOT = ((0,) * 4, (0,) * 8, (0,) * 5, (0, 0, 0, 0, 1, 0, 0, 0, 0), (0, 0, 1, 0, 0))

prompts = st.one_of(st.sampled_from(_universe()), st.sampled_from(_HOT))
"""Half of them are few, so that requests meet."""


def expect(truth: object, said: object) -> None:
    """Raise unless ``truth``. Not an ``assert``: an audit under ``python -O`` must find what it finds."""
    if not truth:
        raise AssertionError(said)


@dataclass
class Mirror:
    """What the oracle knows of one open sequence."""

    sequence: Any
    namespace: Namespace
    ids: list[int]
    states: list[int]
    num_committed: int
    num_computed: int
    num_prompt: int = 0
    """Tokens that it was opened with and still has: what others may wait for."""
    forgotten: bool = False
    """Its namespace was cleared while it ran: what it commits isn't served any more."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass
class Held:
    """A match that was kept, and its lease once there is one."""

    match: Any
    namespace: Namespace
    ids: tuple[int, ...]
    lease: Any = None


class CacheMachine(RuleBasedStateMachine):
    """One cache under attack. Subclass it with another ``factory`` or ``policies``, or use ``run``."""

    factory: ClassVar[CacheFactory]
    policies: ClassVar[tuple[str, ...]] = ("lru", "lfu")
    with_storage: ClassVar[tuple[bool, ...]] = (False, True)

    @initialize(
        policy=st.integers(0, 63),
        stored=st.booleans(),
        block_size=st.sampled_from((4, 2, 4, 2, 1)),
        num_blocks=st.sampled_from((16, 32, 12, 24, 8, 4)),
        first=prompts,
    )
    def make(
        self, policy: int, stored: bool, block_size: int, num_blocks: int, first: tuple[int, ...]
    ) -> None:
        """A tiny cache, its oracle and its engine, and a first request."""
        cls = type(self)
        layout = LAYOUT if cls.with_storage[stored % len(cls.with_storage)] else None
        name = cls.policies[policy % len(cls.policies)]
        self.clock = ManualClock()
        config = CacheConfig(num_blocks, block_size, layout, policy=name)
        self.cache = cls.factory(config, clock=self.clock)
        self.block_size = block_size
        self.oracle = Oracle(block_size)
        self.engine = Engine(self.cache)
        self.runs: list[Mirror] = []
        self.held: list[Held] = []
        self.lent: list[int] = []
        self.counts: dict[str, Counter[str]] = {namespace.tenant: Counter() for namespace in NAMESPACES}
        self._open(0, first, "compute")

    # The life of a request.

    @precondition(lambda self: len(self.runs) < MAX_OPEN)
    @rule(
        where=_where,
        prompt=prompts,
        on_pending=st.sampled_from(("compute", "compute", "raise", "wait")),
        done=st.sampled_from((0, 17, 4)),
    )
    def open(self, where: int, prompt: tuple[int, ...], on_pending: str, done: int) -> None:
        """A request arrives, and ``done`` tokens are computed; ``wait`` never waits here: its timeout is 0."""
        run = self._open(where, prompt, on_pending)
        if run is not None:
            self._commit(run, done)

    @rule(where=_where, prompt=prompts)
    def serve(self, where: int, prompt: tuple[int, ...]) -> None:
        """A whole request: it arrives, all is computed, it ends."""
        run = self._open(where, prompt, "compute")
        if run is not None:
            self._commit(run, run.num_tokens)
            self.release(len(self.runs) - 1)

    def _open(self, where: int, prompt: tuple[int, ...], on_pending: str) -> Mirror | None:
        namespace, ids = self._place(where, prompt)
        self.clock.advance(1.0)
        match = self._matched(namespace, ids)
        cached = min(match.num_tokens, max(len(ids) - 1, 0) // self.block_size * self.block_size)
        before = self.cache.snapshot()
        pending = self._is_pending(namespace, ids, cached)
        timeout_s = 0.0 if on_pending == "wait" else None
        try:
            sequence = self.cache.open(namespace, ids, on_pending=on_pending, timeout_s=timeout_s)
        except PendingError:
            self._same(before)
            expect(
                pending and on_pending != "compute", "PendingError, but nobody computes more than is matched"
            )
            return None
        except OutOfBlocks as error:
            path = set(match.block_ids[: cached // self.block_size].tolist())
            self._true_refusal(error, before, self._blocks(len(ids)) - len(path), path)
            return None
        expect(
            on_pending == "compute" or not self._is_pending(namespace, ids, cached, certainly=True),
            f"on_pending={on_pending!r} opened what another one computes",
        )
        states = chain(namespace, ids)
        self.runs.append(Mirror(sequence, namespace, list(ids), states, cached, cached, len(ids)))
        self.counts[namespace.tenant].update(requests=1, hit=cached, missed=len(ids) - cached)
        expect(
            sequence.num_cached_tokens == cached,
            f"{sequence.num_cached_tokens} cached, {cached} were matched",
        )
        expect(sequence.namespace == namespace, "the sequence has another namespace")
        table = sequence.block_table
        expect(
            np.array_equal(table[: cached // self.block_size], match.block_ids[: cached // self.block_size]),
            "the block table does not begin with the matched blocks",
        )
        return self.runs[-1]

    @precondition(lambda self: self.runs)
    @rule(which=_small, by=st.integers(0, 8))
    def compute(self, which: int, by: int) -> None:
        """The engine computes the next tokens' KV, and nobody commits them yet; 0 of them: waiting copies only."""
        run = self._run(which)
        self.engine.settle()
        self._compute(run, min(run.num_tokens, run.num_computed + by))

    @precondition(lambda self: self.runs)
    @rule(which=_small, by=st.integers(0, 17))
    def commit(self, which: int, by: int) -> None:
        """A chunk of prefill, or a decoded token, is done; ``by`` beyond the end means all."""
        self._commit(self._run(which), by)

    @precondition(lambda self: self.runs)
    @rule(mask=st.integers(1, 2**MAX_OPEN - 1), ids=st.tuples(_id, _id))
    def append(self, mask: int, ids: tuple[int, int]) -> None:
        """One id to each of a batch, all or nothing."""
        self._append(self._masked(mask), ids)

    @precondition(lambda self: self.runs)
    @rule(which=_small, ids=prompts)
    def extend(self, which: int, ids: tuple[int, ...]) -> None:
        """Several ids to one: a next turn, or drafts."""
        run = self._run(which)
        ids = ids[: 2 * self.block_size + 1]
        self._extend([run], [ids], lambda runs, _: runs[0].sequence.extend(ids))

    @precondition(lambda self: self.runs)
    @rule(which=_small, by=st.integers(1, 6))
    def truncate(self, which: int, by: int) -> None:
        """Drafts are rejected."""
        run = self._run(which)
        stop = max(run.num_committed, run.num_tokens - by)
        run.sequence.truncate(stop)
        del run.ids[stop:], run.states[stop:]
        run.num_computed = min(run.num_computed, stop)
        run.num_prompt = min(run.num_prompt, stop)

    @precondition(lambda self: 0 < len(self.runs) < MAX_OPEN)
    @rule(which=_small, num_children=st.integers(1, 3), writers=st.integers(0, 4), computed=st.booleans())
    def fork(self, which: int, num_children: int, writers: int, computed: bool) -> None:
        """Children share every block; the parent stays open. Then so many of them write."""
        run = self._run(which)
        if computed:
            self._compute(run, run.num_tokens)
        copied = self._copied()
        num_children = min(num_children, MAX_OPEN - len(self.runs))
        children = run.sequence.fork(num_children)
        expect(len(children) == num_children, "another number of children")
        heirs = [self._heir(run, child) for child in children]
        self.runs.extend(heirs)
        expect(self._copied() == copied, "a fork copied")
        if writers:
            self._append([*heirs, run][: writers % (num_children + 2)], (1, 2))

    @precondition(lambda self: self.runs)
    @rule(mask=st.integers(1, 2**MAX_OPEN - 1), parents=st.lists(_small, max_size=4), writes=st.booleans())
    def reorder(self, mask: int, parents: list[int], writes: bool) -> None:
        """A beam step: inputs are consumed, some continue, perhaps several times, some not at all; then all write."""
        inputs = self._masked(mask)
        heirs = self._reorder(inputs, [parent % len(inputs) for parent in parents])
        if writes:
            self._append(heirs, (0, 1))

    @precondition(lambda self: 0 < len(self.runs) < MAX_OPEN)
    @rule(which=_small, width=st.integers(2, 4), lead=st.integers(0, 3))
    def beam(self, which: int, width: int, lead: int) -> None:
        """One sequence becomes a beam: it grows, is computed, and has several heirs that all write and compute."""
        run = self._run(which)
        if lead:
            self._extend([run], [(0,) * lead], lambda runs, ids: runs[0].sequence.extend(ids[0]))
        self._compute(run, run.num_tokens)
        heirs = self._reorder([run], [0] * width)
        self._append(heirs, (1, 2))
        for heir in heirs:
            self._compute(heir, heir.num_tokens)

    def _reorder(self, inputs: list[Mirror], chosen: list[int]) -> list[Mirror]:
        copied = self._copied()
        results = self.cache.reorder([run.sequence for run in inputs], chosen)
        expect(len(results) == len(chosen), "another number of results")
        heirs = [self._heir(inputs[parent], result) for parent, result in zip(chosen, results, strict=True)]
        for run in inputs:
            self.runs.remove(run)
            self._is_consumed(run.sequence)
        self.runs.extend(heirs)
        expect(self._copied() == copied, "a reorder copied")
        return heirs

    @precondition(lambda self: self.runs)
    @rule(which=_small)
    def release(self, which: int) -> None:
        """A request ends, or is cancelled."""
        run = self._run(which)
        self.runs.remove(run)
        self.clock.advance(1.0)
        run.sequence.release()
        self._is_consumed(run.sequence)

    # Matches and leases.

    @rule(where=_where, prompt=prompts, opens=st.booleans())
    def match(self, where: int, prompt: tuple[int, ...], opens: bool) -> None:
        """A lookup changes nothing; its match is kept for a lease, now or when it is stale; a request may follow."""
        namespace, ids = self._place(where, prompt)
        before = self.cache.snapshot()
        match = self._matched(namespace, ids)
        self._same(before)
        self.held.append(Held(match, namespace, ids))
        unleased = [held for held in self.held if held.lease is None]
        if len(unleased) > 3:
            self.held.remove(unleased[0])
        if opens and len(self.runs) < MAX_OPEN:
            self._open(where, prompt, "compute")

    @precondition(lambda self: self.held)
    @rule(which=_small)
    def lease(self, which: int) -> None:
        """A match that was kept is leased, or its lease is released, once."""
        held = self.held[which % len(self.held)]
        if held.lease is None:
            self._lease(held)
            return
        self.held.remove(held)
        held.lease.release()
        self._refused(held.lease.release, LeaseError)

    def _lease(self, held: Held) -> None:
        """A lease makes a match's block ids valid, or refuses a match that is stale."""
        now = self.cache.match(held.namespace, held.ids[: held.match.num_tokens])
        before = self.cache.snapshot()
        try:
            lease = self.cache.lease(held.match)
        except LeaseError:
            self._same(before)
            expect(
                not np.array_equal(now.block_ids, held.match.block_ids),
                "a match that still holds was refused",
            )
            self.held.remove(held)
            return
        expect(
            np.array_equal(lease.block_ids, held.match.block_ids)
            and lease.num_tokens == held.match.num_tokens,
            "the lease names other blocks than its match",
        )
        held.lease = lease

    # What an operator or an engine does to the pool.

    @rule(kind=st.integers(0, 3), num_blocks=st.integers(0, 6))
    def pool(self, kind: int, num_blocks: int) -> None:
        """Blocks are evicted, lent to the engine, or come back from it."""
        if kind < 2:
            self._evict(num_blocks)
        elif kind == 2 and len(self.lent) < 4:
            self._allocate(num_blocks % 4)
        else:
            self._free(num_blocks)

    def _evict(self, num_blocks: int) -> None:
        """As many blocks as asked for, or all that no lease protects."""
        before = self.cache.snapshot()
        freed = self.cache.evict(num_blocks)
        evictable = invariants.num_evictable(before)
        expect(freed == min(num_blocks, evictable), f"{freed} of {num_blocks} evicted, {evictable} evictable")
        expect(
            len(self.cache.snapshot().free_ids) == len(before.free_ids) + freed, "evicted blocks are not free"
        )

    def _allocate(self, num_blocks: int) -> None:
        """Blocks are lent to the engine."""
        before = self.cache.snapshot()
        try:
            block_ids = self.cache.allocate(num_blocks)
        except OutOfBlocks as error:
            self._true_refusal(error, before, num_blocks, set())
            return
        expect(len(block_ids) == num_blocks, "another number of blocks was lent")
        self.lent.extend(block_ids.tolist())

    def _free(self, count: int) -> None:
        """Lent blocks come back, once."""
        back, self.lent = self.lent[:count], self.lent[count:]
        self.cache.free(back)
        if back:
            self._refused(lambda: self.cache.free(back), ArgumentError)

    @rule(where=_where)
    def clear(self, where: int) -> None:
        """A namespace is forgotten; what runs in it runs on."""
        namespace = NAMESPACES[where % len(NAMESPACES)]
        self.cache.clear(namespace)
        self.oracle.clear(namespace)
        for run in self.runs:
            run.forgotten |= run.namespace == namespace
        for prompt in ((0,) * 8, (1,) * 8):
            expect(self.cache.match(namespace, prompt).num_tokens == 0, "a cleared namespace matches")

    @rule(where=_where, prompt=prompts)
    def insert(self, where: int, prompt: tuple[int, ...]) -> None:
        """An engine hands in blocks that it filled; those of a prefix that is resident already stay its own."""
        namespace, ids = self._place(where, prompt)
        ids = ids[: len(ids) // self.block_size * self.block_size]
        try:
            block_ids = self.cache.allocate(len(ids) // self.block_size)
        except OutOfBlocks:
            return
        self.engine.write(block_ids, 0, chain(namespace, ids))
        resident = self._matched(namespace, ids).num_tokens
        self.oracle.commit(namespace, ids, len(ids))
        expect(
            self.cache.insert(namespace, ids, block_ids) == resident,
            "insert and match disagree about what is resident",
        )
        expect(self._matched(namespace, ids).num_tokens == len(ids), "what was inserted isn't matched")
        left = block_ids[: resident // self.block_size]
        expect(
            set(left.tolist()) <= set(self.cache.snapshot().lent_ids),
            "the duplicates of an insert aren't the engine's",
        )
        self.cache.free(left)

    # What must be refused.

    @rule(kind=st.integers(0, 63), which=_small)
    def refuse(self, kind: int, which: int) -> None:
        """Calls that can't work: each raises what it should and changes nothing."""
        calls = self._wrong_calls(which)
        if self.runs:
            calls += self._wrong_calls_of(self._run(which))
        self._refused(*calls[kind % len(calls)])

    def _wrong_calls(self, which: int) -> list[tuple[Callable[[], object], type[RadixKVError]]]:
        cache, namespace, size = self.cache, NAMESPACES[which % len(NAMESPACES)], self.block_size
        owned = [block for run in self.runs for block in run.sequence.block_table.tolist()]
        taken = owned[which % len(owned)] if owned else cache.config.num_blocks
        return [
            (lambda: cache.open(namespace, [0, -1]), TokenError),
            (lambda: cache.match(namespace, [2**32]), TokenError),
            (lambda: cache.open(namespace, [0], on_pending="later"), ArgumentError),
            (lambda: cache.free([taken]), ArgumentError),
            (lambda: cache.insert(namespace, [0] * size, [taken]), ArgumentError),
            (lambda: cache.insert(namespace, [0] * size, []), ArgumentError),
            (lambda: cache.evict(-1), ArgumentError),
            (lambda: cache.allocate(-1), ArgumentError),
        ]

    def _wrong_calls_of(self, run: Mirror) -> list[tuple[Callable[[], object], type[RadixKVError]]]:
        cache, sequence, size = self.cache, run.sequence, run.num_tokens
        return [
            (lambda: sequence.commit(size + 1), ArgumentError),
            (lambda: sequence.commit(run.num_committed - 1), ArgumentError),
            (lambda: sequence.truncate(size + 1), ArgumentError),
            (lambda: sequence.truncate(run.num_committed - 1), ArgumentError),
            (lambda: sequence.append(2**32), TokenError),
            (lambda: sequence.extend([1, 1.5]), TokenError),
            (lambda: sequence.fork(0), ArgumentError),
            (lambda: cache.append([sequence, sequence], [0, 1]), ArgumentError),
            (lambda: cache.append([sequence], [0, 1]), ArgumentError),
            (lambda: cache.append([sequence], (0, 1)), ArgumentError),
            (lambda: cache.append([sequence], ()), ArgumentError),
            (lambda: cache.append([sequence], (-1,)), TokenError),
            (lambda: cache.reorder([sequence], [1]), ArgumentError),
            (lambda: cache.reorder([sequence, sequence], [0]), ArgumentError),
        ]

    # After each step.

    @invariant()
    def after_each_step(self) -> None:
        """The laws hold, and everything is what the oracle says."""
        if hasattr(self, "cache"):
            self._stepped()
            self.laws()
            self.contents()

    def laws(self) -> None:
        """Every law of the audit holds."""
        invariants.check(self.cache)

    def contents(self) -> None:
        """Sequences are what the oracle says, and read their own KV; leases keep what they leased."""
        self._counts_agree()
        behind = self.engine.is_behind
        for run in self.runs:
            self._agrees(run, behind)
        for held in self.held:
            if held.lease is not None:
                self._reads(held.lease.block_ids, chain(held.namespace, held.ids[: held.lease.num_tokens]))

    def _counts_agree(self) -> None:
        """What the cache counts of itself and of each tenant is what happened, whatever other tenants did."""
        stats = self.cache.stats()
        parts = (stats.resident_blocks, stats.sequence_blocks, stats.quarantined_blocks, stats.lent_blocks)
        expect(stats.free_blocks + sum(parts) == stats.num_blocks and min(parts) >= 0, stats)
        expect(stats.num_sequences == len(self.runs) and stats.lent_blocks == len(self.lent), stats)
        for tenant, counts in self.counts.items():
            seen = self.cache.tenant_stats(tenant)
            counted = (seen.requests, seen.hit_tokens, seen.missed_tokens)
            expect(counted == (counts["requests"], counts["hit"], counts["missed"]), f"{seen}, but {counts}")

    def _agrees(self, run: Mirror, behind: bool) -> None:
        sequence = run.sequence
        seen = (sequence.num_tokens, sequence.num_committed_tokens, sequence.num_blocks, sequence.is_open)
        expect(
            seen == (run.num_tokens, run.num_committed, self._blocks(run.num_tokens), True),
            f"{seen} of {run}",
        )
        expect(sequence.token_ids.tolist() == run.ids, "the sequence has other token ids")
        table = sequence.block_table
        expect(len(table) == sequence.num_blocks, "the block table has another length")
        if not behind:
            self._reads(table, run.states[: run.num_computed])
        if not run.forgotten:
            committed = run.num_committed // self.block_size * self.block_size
            expect(
                self._matched(run.namespace, run.ids).num_tokens >= committed, "what is leased was forgotten"
            )

    def _reads(self, table: Any, states: list[int]) -> None:
        expect(self.engine.holds(table, states), f"wrong KV under blocks {table.tolist()}")

    def teardown(self) -> None:
        """Everything ends: what remains is the trees'."""
        if (
            not hasattr(self, "cache") or sys.exc_info()[0] is not None
        ):  # an example that failed, or was cut off
            return
        for run in self.runs:
            run.sequence.release()
        for held in self.held:
            if held.lease is not None:
                held.lease.release()
        self.cache.free(self.lent)
        self.engine.settle()
        invariants.check(self.cache)
        snapshot = self.cache.snapshot()
        expect(
            not snapshot.sequences and not snapshot.runs and not snapshot.leases, "released, and still held"
        )
        expect(not any(tree.detached for tree in snapshot.trees), "a cleared tree outlives its sequences")
        expect(
            self.cache.evict(snapshot.num_blocks) + len(snapshot.free_ids) == snapshot.num_blocks,
            "not everything could be evicted at the end",
        )
        invariants.check(self.cache)
        self._finished()

    def _finished(self) -> None:
        """Called at the end of an example that found nothing."""

    def _stepped(self) -> None:
        """Called after each step."""

    # Helpers.

    def _place(self, where: int, prompt: tuple[int, ...]) -> tuple[Namespace, tuple[int, ...]]:
        limit = MAX_PROMPT_BLOCKS * self.block_size + 1
        return NAMESPACES[where % len(NAMESPACES)], prompt[:limit]

    def _run(self, which: int) -> Mirror:
        return self.runs[which % len(self.runs)]

    def _masked(self, mask: int) -> list[Mirror]:
        chosen = [run for at, run in enumerate(self.runs) if mask >> at & 1]
        return chosen or self.runs[:1]

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _copied(self) -> int:
        return int(self.cache.stats().copied_blocks)

    def _matched(self, namespace: Namespace, ids: Sequence[int]) -> Any:
        """A match that is no lie, and whose blocks hold what they should."""
        match = self.cache.match(namespace, ids)
        lie = self.oracle.served_lie(namespace, ids, match.num_tokens)
        expect(lie is None, lie)
        expect(
            match.num_blocks * self.block_size == match.num_tokens
            and len(match.block_ids) == match.num_blocks,
            "the match counts other blocks than it names",
        )
        self._reads(match.block_ids, chain(namespace, ids[: match.num_tokens]))
        return match

    def _compute(self, run: Mirror, stop: int) -> None:
        if stop > run.num_computed:
            self.engine.write(run.sequence.block_table, run.num_computed, run.states[run.num_computed : stop])
            run.num_computed = stop

    def _commit(self, run: Mirror, by: int) -> None:
        stop = min(run.num_tokens, run.num_committed + by)
        self._compute(run, stop)
        if not run.forgotten:
            self.oracle.commit(run.namespace, run.ids, stop)
        before = run.sequence.block_table
        run.sequence.commit(stop)
        run.num_committed = stop
        expect(np.array_equal(before, run.sequence.block_table), "commit changed a block table")

    def _is_pending(
        self, namespace: Namespace, ids: Sequence[int], cached: int, *, certainly: bool = False
    ) -> bool:
        """Whether a running sequence will commit a block of ``ids`` beyond those that are cached.

        ``certainly``: as the next block of its own prompt. An heir's is left open, and who is further behind.
        """
        stop = cached + self.block_size
        if stop > (len(ids) - 1) // self.block_size * self.block_size:
            return False
        head = list(ids[:stop])
        return any(
            run.namespace == namespace
            and not run.forgotten
            and run.ids[:stop] == head
            and run.num_committed < stop
            and (not certainly or (cached <= run.num_committed and stop <= run.num_prompt))
            for run in self.runs
        )

    def _append(self, batch: list[Mirror], ids: tuple[int, int]) -> None:
        if batch:
            self._extend(batch, [(ids[at % 2],) for at in range(len(batch))], self._append_batch)

    def _append_batch(self, runs: list[Mirror], ids: list[tuple[int, ...]]) -> None:
        self.cache.append([run.sequence for run in runs], [token_id for (token_id,) in ids])

    def _extend(
        self,
        runs: list[Mirror],
        ids: list[tuple[int, ...]],
        call: Callable[[list[Mirror], list[tuple[int, ...]]], object],
    ) -> None:
        before = self.cache.snapshot()
        copies = self._expected_copies([run for run, more in zip(runs, ids, strict=True) if more], before)
        new = sum(
            self._blocks(run.num_tokens + len(more)) - self._blocks(run.num_tokens)
            for run, more in zip(runs, ids, strict=True)
        )
        copied = self._copied()
        try:
            call(runs, ids)
        except OutOfBlocks as error:
            self._true_refusal(error, before, new + copies, set())
            return
        expect(
            self._copied() - copied == copies, f"{self._copied() - copied} copies, the formula says {copies}"
        )
        for run, more in zip(runs, ids, strict=True):
            state = run.states[-1] if run.states else None
            run.states.extend(chain(run.namespace, more, state))
            run.ids.extend(more)
            if more:
                self._owns_tail(run)

    def _expected_copies(self, runs: list[Mirror], snapshot: Any) -> int:
        """Σ over shared partial tails written in: writers − 1 if every owner writes, otherwise writers."""
        owners: Counter[int] = Counter()
        for run in self.runs:
            owners.update(run.sequence.block_table.tolist())
        for tree in snapshot.trees:
            for node in tree.nodes:
                owners.update(np.frombuffer(node.block_ids, np.int32).tolist())
        writers = Counter(
            int(run.sequence.block_table[-1]) for run in runs if run.num_tokens % self.block_size
        )
        return sum(number - (number == owners[tail]) for tail, number in writers.items())

    def _owns_tail(self, run: Mirror) -> None:
        tail = int(run.sequence.block_table[-1])
        others = [other for other in self.runs if other is not run]
        expect(
            not any(tail in other.sequence.block_table for other in others),
            f"block {tail} was written and is shared",
        )

    def _heir(self, run: Mirror, sequence: Any) -> Mirror:
        return Mirror(
            sequence,
            run.namespace,
            list(run.ids),
            list(run.states),
            run.num_committed,
            run.num_computed,
            0,
            run.forgotten,
        )

    def _is_consumed(self, sequence: Any) -> None:
        expect(not sequence.is_open, "a released sequence says that it is open")
        self._refused(sequence.release, LeaseError)
        with sequence:
            pass

    def _refused(self, call: Callable[[], object], error: type[Exception]) -> None:
        before = self.cache.snapshot()
        try:
            call()
        except error:
            self._same(before)
            return
        raise AssertionError(f"{error.__name__} was expected")

    def _same(self, before: Any) -> None:
        changed = invariants.differences(before, self.cache.snapshot())
        expect(not changed, f"changed by a call that must change nothing: {', '.join(changed)}")

    def _true_refusal(self, error: OutOfBlocks, before: Any, needed: int, path: set[int]) -> None:
        """The call changed nothing, and it told the truth: there was no room.

        While copies wait for the engine, the blocks that they name may count as neither free nor evictable.
        """
        self._same(before)
        told = (error.needed, error.free, error.evictable)
        facts = (needed, len(before.free_ids), invariants.num_evictable(before, path))
        expect(told[0] > told[1] + told[2], f"refused, though there was room: {error}")
        expect(
            told == facts or (self.engine.is_behind and told < facts), f"{error}, but the facts are {facts}"
        )


class Player:
    """One tenant's calls on one cache, and all that the tenant observes of them. Refused calls leave a gap."""

    def __init__(self, tenant: str, cache: Any, engine: Engine) -> None:
        self.cache, self.engine = cache, engine
        self.namespaces = [
            Namespace(tenant, *namespace[1:]) for namespace in NAMESPACES if namespace.tenant == "a"
        ]
        self.mirrors: list[Mirror | None] = []

    def open(self, where: int, prompt: Sequence[int], done: int) -> Observed:
        """What was cached, and its bytes."""
        namespace = self.namespaces[where % len(self.namespaces)]
        try:
            sequence = self.cache.open(namespace, prompt)
        except OutOfBlocks as error:
            self.mirrors.append(None)
            return Observed((str(error),), None)
        cached = sequence.num_cached_tokens
        mirror = Mirror(sequence, namespace, list(prompt), chain(namespace, prompt), cached, cached)
        self.mirrors.append(mirror)
        found = self._seen(sequence.block_table[: cached // self.cache.config.block_size])
        self._commit(mirror, done)
        return Observed((cached, sequence.num_blocks), found)

    def commit(self, which: int, by: int) -> Observed:
        """What is committed after."""
        return self._told(which, lambda mirror: self._commit(mirror, by))

    def append(self, which: int, token_id: int) -> Observed:
        """How long the sequence is after, or that there was no room."""
        return self._told(which, lambda mirror: self._append(mirror, token_id))

    def truncate(self, which: int, by: int) -> Observed:
        """How long the sequence is after."""
        return self._told(which, lambda mirror: self._truncate(mirror, by))

    def fork(self, which: int) -> Observed:
        """How long the child is."""
        mirror = self.mirrors[which % len(self.mirrors)] if self.mirrors else None
        if mirror is not None:
            (child,) = mirror.sequence.fork(1)
            ids, states = list(mirror.ids), list(mirror.states)
            mirror = Mirror(child, mirror.namespace, ids, states, mirror.num_committed, mirror.num_computed)
        self.mirrors.append(mirror)
        return Observed((mirror and mirror.sequence.num_blocks,), None)

    def release(self, which: int) -> Observed:
        """Nothing."""
        if self.mirrors:
            mirror = self.mirrors.pop(which % len(self.mirrors))
            if mirror is not None:
                mirror.sequence.release()
        return Observed((), None)

    def match(self, where: int, prompt: Sequence[int]) -> Observed:
        """How much is matched, and its bytes."""
        match = self.cache.match(self.namespaces[where % len(self.namespaces)], prompt)
        return Observed((match.num_tokens,), self._seen(match.block_ids))

    def clear(self, where: int) -> Observed:
        """How much was forgotten."""
        return Observed((self.cache.clear(self.namespaces[where % len(self.namespaces)]),), None)

    def standing(self) -> tuple[object, ...]:
        """What the tenant sees between calls: its own counts, its namespaces, its sequences' bytes."""
        tenant = self.namespaces[0].tenant
        seen = [self._seen_of(mirror) for mirror in self.mirrors]
        return (self.cache.tenant_stats(tenant), sorted(map(repr, self.cache.namespaces(tenant))), seen)

    def _told(self, which: int, call: Callable[[Mirror], None]) -> Observed:
        mirror = self.mirrors[which % len(self.mirrors)] if self.mirrors else None
        if mirror is None:
            return Observed((), None)
        try:
            call(mirror)
        except OutOfBlocks as error:
            return Observed((str(error),), None)
        return Observed((mirror.sequence.num_tokens, mirror.sequence.num_committed_tokens), None)

    def _commit(self, mirror: Mirror, by: int) -> None:
        stop = min(mirror.num_tokens, mirror.num_committed + by)
        if stop > mirror.num_computed:
            missing = mirror.states[mirror.num_computed : stop]
            self.engine.write(mirror.sequence.block_table, mirror.num_computed, missing)
            mirror.num_computed = stop
        mirror.sequence.commit(stop)
        mirror.num_committed = stop

    @staticmethod
    def _append(mirror: Mirror, token_id: int) -> None:
        mirror.sequence.append(token_id)
        mirror.states.extend(
            chain(mirror.namespace, [token_id], mirror.states[-1] if mirror.states else None)
        )
        mirror.ids.append(token_id)

    @staticmethod
    def _truncate(mirror: Mirror, by: int) -> None:
        stop = max(mirror.num_committed, mirror.num_tokens - by)
        mirror.sequence.truncate(stop)
        del mirror.ids[stop:], mirror.states[stop:]
        mirror.num_computed = min(mirror.num_computed, stop)

    def _seen_of(self, mirror: Mirror | None) -> bytes | None:
        if mirror is None:
            return None
        self.engine.settle()
        whole = mirror.num_computed // self.cache.config.block_size
        return self._seen(mirror.sequence.block_table[:whole])

    def _seen(self, block_ids: Any) -> bytes:
        return self.engine.read(block_ids).tobytes()


@dataclass(frozen=True, slots=True)
class Observed:
    """What a call told its caller, and the bytes of the blocks that it served."""

    answer: tuple[object, ...]
    served: bytes | None


class TwoRuns(RuleBasedStateMachine):
    """Non-interference: tenant A's calls on a cache of its own and on one that it shares with tenant B.

    In a pool that is never full A observes the same in both: answers, counts, bytes. In a tiny one B's calls
    may make the shared cache forget, and may take A's room, never change a byte of what A is served. B's
    prompts are A's.
    """

    factory: ClassVar[CacheFactory]
    policies: ClassVar[tuple[str, ...]] = ("lru", "lfu")
    with_storage: ClassVar[tuple[bool, ...]] = (False, True)

    @initialize(
        policy=st.integers(0, 63),
        stored=st.booleans(),
        block_size=st.sampled_from((2, 4, 1)),
        is_tiny=st.booleans(),
    )
    def make(self, policy: int, stored: bool, block_size: int, is_tiny: bool) -> None:
        """Two caches that are alike, and three players."""
        cls = type(self)
        self.is_tiny, self.limit = is_tiny, MAX_PROMPT_BLOCKS * block_size + 1
        layout = LAYOUT if cls.with_storage[stored % len(cls.with_storage)] else None
        name = cls.policies[policy % len(cls.policies)]
        config = CacheConfig(12 if is_tiny else 512, block_size, layout, policy=name)
        self.caches = [cls.factory(config, clock=ManualClock()) for _ in range(2)]
        engines = [Engine(cache) for cache in self.caches]
        self.alone, self.shared = (Player("a", *both) for both in zip(self.caches, engines, strict=True))
        self.other = Player("b", self.caches[1], engines[1])

    @rule(
        as_a=st.booleans(),
        where=_small,
        prompt=prompts,
        done=st.sampled_from((17, 4, 0)),
        opens=st.booleans(),
    )
    def ask(self, as_a: bool, where: int, prompt: tuple[int, ...], done: int, opens: bool) -> None:
        """A request, or a lookup."""
        prompt = prompt[: self.limit]
        if opens:
            self._both(as_a, lambda player: player.open(where, prompt, done))
        else:
            self._both(as_a, lambda player: player.match(where, prompt))

    @rule(as_a=st.booleans(), kind=st.integers(0, 3), which=_small, by=st.integers(0, 6))
    def go_on(self, as_a: bool, kind: int, which: int, by: int) -> None:
        """A running sequence commits, grows, shrinks or forks."""
        calls: list[Callable[[Player], Observed]] = [
            lambda player: player.commit(which, by),
            lambda player: player.append(which, by % 3),
            lambda player: player.truncate(which, by),
            lambda player: player.fork(which),
        ]
        self._both(as_a, calls[kind])

    @rule(as_a=st.booleans(), which=_small)
    def release(self, as_a: bool, which: int) -> None:
        """A request ends."""
        self._both(as_a, lambda player: player.release(which))

    @rule(as_a=st.booleans(), where=_small)
    def clear(self, as_a: bool, where: int) -> None:
        """A namespace is forgotten."""
        self._both(as_a, lambda player: player.clear(where))

    @invariant()
    def nothing_seen_differs(self) -> None:
        """What A sees between calls is the same; the laws hold."""
        if not hasattr(self, "caches"):
            return
        self._stepped()
        if not self.is_tiny:
            expect(self.alone.standing() == self.shared.standing(), "A's counts or bytes depend on B")
        invariants.check(self.caches[1])

    def teardown(self) -> None:
        """Everything ends."""
        if not hasattr(self, "caches") or sys.exc_info()[0] is not None:
            return
        for player in (self.alone, self.shared, self.other):
            while player.mirrors:
                player.release(0)
        for cache in self.caches:
            invariants.check(cache)
        self._finished()

    def _finished(self) -> None:
        """Called at the end of an example that found nothing."""

    def _stepped(self) -> None:
        """Called after each step."""

    def _both(self, as_a: bool, call: Callable[[Player], Observed]) -> None:
        if not as_a:
            call(self.other)
            return
        alone, shared = call(self.alone), call(self.shared)
        if not self.is_tiny:
            expect(alone == shared, f"A observes {shared.answer} beside B and {alone.answer} without")
        elif alone.served is not None and shared.served is not None:
            size = min(len(alone.served), len(shared.served))
            expect(
                alone.served[:size] == shared.served[:size], "A is served other bytes beside B than without"
            )


@dataclass(frozen=True, slots=True)
class PropertyReport:
    """What ``run`` did and found. ``failure`` is the smallest life that breaks something, as steps and the error."""

    examples: int
    steps: int
    seconds: float
    seed: int
    failure: str | None

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.failure is None


def run(
    factory: CacheFactory,
    max_examples: int = 200,
    steps: int = 50,
    seed: int = 0,
    *,
    policies: Sequence[str] = ("lru", "lfu"),
    with_storage: Sequence[bool] = (False, True),
    machine: type[CacheMachine] | type[TwoRuns] = CacheMachine,
    shrink: bool = True,
    progress: Callable[[int], None] | None = None,
) -> PropertyReport:
    """Attack the caches that ``factory`` makes with ``max_examples`` lives of up to ``steps`` calls.

    ``with_storage``: run without a storage, with one (needs torch), or both. ``progress`` is called after each
    example that found nothing, with their number. The same arguments do the same. Hypothesis is quiet and
    keeps nothing on disk; a failure is shrunk, which takes some hundred further examples, and reported.
    """
    done = Counter[str]()

    def finished(_: object) -> None:
        done["examples"] += 1
        if progress is not None:
            progress(done["examples"])

    def counted(_: object) -> None:
        done["steps"] += 1

    attributes = {
        "factory": staticmethod(factory),
        "policies": tuple(policies),
        "with_storage": tuple(with_storage),
        "_finished": finished,
        "_stepped": counted,
    }
    attacked = type(machine.__name__, (machine,), attributes)
    started = time.perf_counter()
    failure = None
    try:
        run_state_machine_as_test(with_seed(seed)(attacked), settings=_settings(max_examples, steps, shrink))
    except Exception as error:  # noqa: BLE001 - whatever broke is the finding
        failure = _told(error)
    return PropertyReport(done["examples"], done["steps"], time.perf_counter() - started, seed, failure)


def _settings(max_examples: int, steps: int, shrink: bool) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
    )


def _told(error: BaseException) -> str:
    """The error with the notes that Hypothesis left on it: the steps of the smallest example."""
    notes = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    steps = [line for line in notes if not line.startswith(_NOISE)]
    return "\n".join([f"{type(error).__name__}: {error}", *steps])
