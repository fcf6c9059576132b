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
MAX_OPEN = 8
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


prompts = st.sampled_from(_universe())


@dataclass
class Mirror:
    """What the oracle knows of one open sequence."""

    sequence: Any
    namespace: Namespace
    ids: list[int]
    states: list[int]
    num_committed: int
    num_computed: int
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
        block_size=st.sampled_from((2, 4, 1)),
        num_blocks=st.sampled_from((12, 24, 8, 16, 5, 3)),
    )
    def make(self, policy: int, stored: bool, block_size: int, num_blocks: int) -> None:
        """A tiny cache, its oracle and its engine."""
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

    # The life of a request.

    @precondition(lambda self: len(self.runs) < MAX_OPEN)
    @rule(where=_where, prompt=prompts, on_pending=st.sampled_from(("compute", "compute", "raise", "wait")))
    def open(self, where: int, prompt: tuple[int, ...], on_pending: str) -> None:
        """A request arrives; ``wait`` never waits here: its timeout is 0."""
        namespace, ids = self._place(where, prompt)
        self.clock.advance(1.0)
        match = self._matched(namespace, ids)
        cached = min(match.num_tokens, (len(ids) - 1) // self.block_size * self.block_size)
        before = self.cache.snapshot()
        pending = self._is_pending(namespace, ids, cached)
        timeout_s = 0.0 if on_pending == "wait" else None
        try:
            sequence = self.cache.open(namespace, ids, on_pending=on_pending, timeout_s=timeout_s)
        except PendingError:
            self._same(before)
            assert pending and on_pending != "compute", (
                "PendingError, but nobody computes more than is matched"
            )
            return
        except OutOfBlocks as error:
            path = set(match.block_ids[: cached // self.block_size].tolist())
            self._true_refusal(error, before, self._blocks(len(ids)) - len(path), path)
            return
        states = chain(namespace, ids)
        self.runs.append(Mirror(sequence, namespace, list(ids), states, cached, cached))
        self.counts[namespace.tenant].update(requests=1, hit=cached, missed=len(ids) - cached)
        assert sequence.num_cached_tokens == cached, (
            f"{sequence.num_cached_tokens} cached, {cached} were matched"
        )
        assert sequence.namespace == namespace
        table = sequence.block_table
        assert np.array_equal(
            table[: cached // self.block_size], match.block_ids[: cached // self.block_size]
        )

    @precondition(lambda self: self.runs)
    @rule(which=_small, by=st.integers(1, 8))
    def compute(self, which: int, by: int) -> None:
        """The engine computes the next tokens' KV, and nobody commits them yet."""
        run = self._run(which)
        self._compute(run, min(run.num_tokens, run.num_computed + by))

    @precondition(lambda self: self.engine.is_behind)
    @rule()
    def settle(self) -> None:
        """An engine that owns its KV executes the copies that wait, as it does before each write."""
        self.engine.settle()

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

    @precondition(lambda self: 0 < len(self.runs) < MAX_OPEN)
    @rule(which=_small, num_children=st.integers(1, 3), writers=st.integers(0, 4))
    def fork(self, which: int, num_children: int, writers: int) -> None:
        """Children share every block; the parent stays open. Then so many of them write."""
        run = self._run(which)
        copied = self._copied()
        num_children = min(num_children, MAX_OPEN - len(self.runs))
        children = run.sequence.fork(num_children)
        assert len(children) == num_children
        heirs = [self._heir(run, child) for child in children]
        self.runs.extend(heirs)
        assert self._copied() == copied, "a fork copied"
        if writers:
            self._append([*heirs, run][: writers % (num_children + 2)], (1, 2))

    @precondition(lambda self: self.runs)
    @rule(mask=st.integers(1, 2**MAX_OPEN - 1), parents=st.lists(_small, max_size=4), writes=st.booleans())
    def reorder(self, mask: int, parents: list[int], writes: bool) -> None:
        """A beam step: inputs are consumed, some continue, perhaps several times, some not at all; then all write."""
        inputs = self._masked(mask)
        chosen = [parent % len(inputs) for parent in parents]
        copied = self._copied()
        results = self.cache.reorder([run.sequence for run in inputs], chosen)
        assert len(results) == len(chosen)
        heirs = [self._heir(inputs[parent], result) for parent, result in zip(chosen, results, strict=True)]
        for run in inputs:
            self.runs.remove(run)
            self._is_consumed(run.sequence)
        self.runs.extend(heirs)
        assert self._copied() == copied, "a reorder copied"
        if writes:
            self._append(heirs, (0, 1))

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

    @rule(where=_where, prompt=prompts)
    def match(self, where: int, prompt: tuple[int, ...]) -> None:
        """A lookup changes nothing; its match is kept for a lease, now or when it is stale."""
        namespace, ids = self._place(where, prompt)
        before = self.cache.snapshot()
        match = self._matched(namespace, ids)
        self._same(before)
        self.held.append(Held(match, namespace, ids))
        unleased = [held for held in self.held if held.lease is None]
        if len(unleased) > 3:
            self.held.remove(unleased[0])

    @precondition(lambda self: any(held.lease is None for held in self.held))
    @rule(which=_small)
    def lease(self, which: int) -> None:
        """A lease makes a match's block ids valid, or refuses a match that is stale."""
        unleased = [held for held in self.held if held.lease is None]
        held = unleased[which % len(unleased)]
        now = self.cache.match(held.namespace, held.ids[: held.match.num_tokens])
        before = self.cache.snapshot()
        try:
            lease = self.cache.lease(held.match)
        except LeaseError:
            self._same(before)
            assert not np.array_equal(now.block_ids, held.match.block_ids), (
                "a match that still holds was refused"
            )
            self.held.remove(held)
            return
        assert (
            np.array_equal(lease.block_ids, held.match.block_ids)
            and lease.num_tokens == held.match.num_tokens
        )
        held.lease = lease

    @precondition(lambda self: any(held.lease is not None for held in self.held))
    @rule(which=_small)
    def end_lease(self, which: int) -> None:
        """A lease is released once."""
        leased = [held for held in self.held if held.lease is not None]
        held = leased[which % len(leased)]
        self.held.remove(held)
        held.lease.release()
        self._refused(held.lease.release, LeaseError)

    # What an operator or an engine does to the pool.

    @rule(num_blocks=st.integers(0, 6))
    def evict(self, num_blocks: int) -> None:
        """As many blocks as asked for, or all that no lease protects."""
        before = self.cache.snapshot()
        freed = self.cache.evict(num_blocks)
        evictable = invariants.num_evictable(before)
        assert freed == min(num_blocks, evictable), f"{freed} of {num_blocks} evicted, {evictable} evictable"
        assert len(self.cache.snapshot().free_ids) == len(before.free_ids) + freed

    @rule(where=_where)
    def clear(self, where: int) -> None:
        """A namespace is forgotten; what runs in it runs on."""
        namespace = NAMESPACES[where % len(NAMESPACES)]
        self.cache.clear(namespace)
        self.oracle.clear(namespace)
        for run in self.runs:
            run.forgotten |= run.namespace == namespace
        for prompt in ((0,) * 8, (1,) * 8):
            assert self.cache.match(namespace, prompt).num_tokens == 0

    @precondition(lambda self: len(self.lent) < 4)
    @rule(num_blocks=st.integers(0, 3))
    def allocate(self, num_blocks: int) -> None:
        """Blocks are lent to the engine."""
        before = self.cache.snapshot()
        try:
            block_ids = self.cache.allocate(num_blocks)
        except OutOfBlocks as error:
            self._true_refusal(error, before, num_blocks, set())
            return
        assert len(block_ids) == num_blocks
        self.lent.extend(block_ids.tolist())

    @precondition(lambda self: self.lent)
    @rule(count=st.integers(1, 4))
    def free(self, count: int) -> None:
        """Lent blocks come back, once."""
        back, self.lent = self.lent[:count], self.lent[count:]
        self.cache.free(back)
        self._refused(lambda: self.cache.free(back), ArgumentError)

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
        assert self.cache.insert(namespace, ids, block_ids) == resident
        assert self._matched(namespace, ids).num_tokens == len(ids), "what was inserted isn't matched"
        left = block_ids[: resident // self.block_size]
        assert set(left.tolist()) <= set(self.cache.snapshot().lent_ids), (
            "the duplicates of an insert aren't the engine's"
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
    def laws(self) -> None:
        """Every law holds."""
        if hasattr(self, "cache"):
            self._stepped()
            invariants.check(self.cache)

    @invariant()
    def contents(self) -> None:
        """Sequences are what the oracle says, and read their own KV; leases keep what they leased."""
        if not hasattr(self, "cache"):
            return
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
        assert stats.free_blocks + sum(parts) == stats.num_blocks and min(parts) >= 0, stats
        assert stats.num_sequences == len(self.runs) and stats.lent_blocks == len(self.lent), stats
        for tenant, counts in self.counts.items():
            seen = self.cache.tenant_stats(tenant)
            counted = (seen.requests, seen.hit_tokens, seen.missed_tokens)
            assert counted == (counts["requests"], counts["hit"], counts["missed"]), f"{seen}, but {counts}"

    def _agrees(self, run: Mirror, behind: bool) -> None:
        sequence = run.sequence
        seen = (sequence.num_tokens, sequence.num_committed_tokens, sequence.num_blocks, sequence.is_open)
        assert seen == (run.num_tokens, run.num_committed, self._blocks(run.num_tokens), True), (
            f"{seen} of {run}"
        )
        assert sequence.token_ids.tolist() == run.ids
        table = sequence.block_table
        assert len(table) == sequence.num_blocks
        if not behind:
            self._reads(table, run.states[: run.num_computed])
        if not run.forgotten:
            committed = run.num_committed // self.block_size * self.block_size
            assert self._matched(run.namespace, run.ids).num_tokens >= committed, (
                "what is leased was forgotten"
            )

    def _reads(self, table: Any, states: list[int]) -> None:
        assert self.engine.holds(table, states), f"wrong KV under blocks {table.tolist()}"

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
        invariants.check(self.cache)
        snapshot = self.cache.snapshot()
        assert not snapshot.sequences and not snapshot.runs and not snapshot.leases, (
            "released, and still held"
        )
        assert not any(tree.detached for tree in snapshot.trees), "a cleared tree outlives its sequences"
        assert self.cache.evict(snapshot.num_blocks) + len(snapshot.free_ids) == snapshot.num_blocks
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
        assert lie is None, lie
        assert (
            match.num_blocks * self.block_size == match.num_tokens
            and len(match.block_ids) == match.num_blocks
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
        assert np.array_equal(before, run.sequence.block_table), "commit changed a block table"

    def _is_pending(self, namespace: Namespace, ids: Sequence[int], cached: int) -> bool:
        """Whether a running sequence will commit a block of ``ids`` beyond those that are cached."""
        stop = cached + self.block_size
        if stop > (len(ids) - 1) // self.block_size * self.block_size:
            return False
        head = list(ids[:stop])
        return any(
            run.namespace == namespace
            and not run.forgotten
            and run.ids[:stop] == head
            and run.num_committed < stop
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
        copies = self._expected_copies(runs, before)
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
        assert self._copied() - copied == copies, (
            f"{self._copied() - copied} copies, the formula says {copies}"
        )
        for run, more in zip(runs, ids, strict=True):
            state = run.states[-1] if run.states else None
            run.states.extend(chain(run.namespace, more, state))
            run.ids.extend(more)
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
        assert not any(tail in other.sequence.block_table for other in others), (
            f"block {tail} was written and is shared"
        )

    def _heir(self, run: Mirror, sequence: Any) -> Mirror:
        return Mirror(
            sequence,
            run.namespace,
            list(run.ids),
            list(run.states),
            run.num_committed,
            run.num_computed,
            run.forgotten,
        )

    def _is_consumed(self, sequence: Any) -> None:
        assert not sequence.is_open
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
        assert not changed, f"changed by a call that must change nothing: {', '.join(changed)}"

    def _true_refusal(self, error: OutOfBlocks, before: Any, needed: int, path: set[int]) -> None:
        """The call changed nothing, and it told the truth: there was no room."""
        self._same(before)
        facts = (needed, len(before.free_ids), invariants.num_evictable(before, path))
        assert (error.needed, error.free, error.evictable) == facts, (
            f"{error}, but (needed, free, evictable) are {facts}"
        )
        assert facts[0] > facts[1] + facts[2], f"refused, though there was room: {error}"


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
    machine: type[CacheMachine] = CacheMachine,
    progress: Callable[[int], None] | None = None,
) -> PropertyReport:
    """Attack the caches that ``factory`` makes with ``max_examples`` lives of up to ``steps`` calls.

    ``with_storage``: run without a storage, with one (needs torch), or both. ``progress`` is called after each
    example that found nothing, with their number. The same arguments do the same. Hypothesis is quiet and
    keeps nothing on disk; a failure is shrunk, which takes some hundred further examples, and reported.
    """
    done = Counter[str]()

    def finished(self: CacheMachine) -> None:
        done["examples"] += 1
        if progress is not None:
            progress(done["examples"])

    def counted(self: CacheMachine) -> None:
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
        run_state_machine_as_test(with_seed(seed)(attacked), settings=_settings(max_examples, steps))
    except Exception as error:  # noqa: BLE001 - whatever broke is the finding
        failure = _told(error)
    return PropertyReport(done["examples"], done["steps"], time.perf_counter() - started, seed, failure)


def _settings(max_examples: int, steps: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=False,
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )


def _told(error: BaseException) -> str:
    """The error with the notes that Hypothesis left on it: the steps of the smallest example."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
