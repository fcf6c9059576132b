"""Checks after each step of a life: the laws, the contents, and whether a refusal was true.

``CheckedCache`` is one cache under attack, with its oracle, its engine and a mirror of each open sequence. The
machine in ``machine.py`` adds the steps.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant

from radixkv.audit import invariants
from radixkv.audit.oracle import Oracle, cache_with_engine, chain
from radixkv.audit.properties.material import (
    MAX_PROMPT_BLOCKS,
    NAMESPACES,
    WITH_MATERIAL,
    CacheFactory,
    Held,
    Mirror,
    expect,
)
from radixkv.clock import ManualClock
from radixkv.config import CacheConfig, Namespace
from radixkv.errors import ArgumentError, FlushRequired, LeaseError, OutOfBlocks
from radixkv.index.key_material import Material, key_of


class CheckedCache(RuleBasedStateMachine):
    """A cache, and the checks after each step."""

    factory: ClassVar[CacheFactory]
    policies: ClassVar[tuple[str, ...]] = ("lru", "lfu")
    with_storage: ClassVar[tuple[bool, ...]] = (False, True)
    error: ClassVar[float] = 0.0
    """The relative error that KV may have; 0: none, bit for bit."""

    def start(self, config: CacheConfig) -> None:
        """Make an empty cache with ``config``."""
        self.clock = ManualClock()
        self.cache, self.engine = cache_with_engine(type(self).factory, config, clock=self.clock)
        self.block_size = config.block_size
        self.oracle = Oracle(config.block_size)
        self.runs: list[Mirror] = []
        self.away: list[Mirror] = []  # running, but lent to the device
        self.fenced: list[tuple[Any, Mirror, Any]] = []  # the fence that each waits for, and its block table
        self.num_scheduled = 0  # how often a step computed something of a sequence
        self.held: list[Held] = []
        self.lent: list[int] = []  # what the engine has
        self.ends: list[tuple[Any, tuple[Namespace, tuple[int, ...]]]] = []
        self.guaranteed: dict[str, int] = {}  # blocks, by tenant
        self.declines = False  # the policy may give blocks up as soon as they are unused
        self.pinned: dict[tuple[Namespace, tuple[int, ...]], tuple[Any, float]] = {}  # the pin, and its end
        self.waits: list[tuple[Any, tuple[int, ...], float]] = []  # announcements, their ids and ends
        self.num_waited = 0
        self.sessions: list[tuple[Any, int]] = []  # each with the number of its family
        self.num_opened = 0
        self.counts: dict[str, Counter[str]] = {namespace.tenant: Counter() for namespace in NAMESPACES}

    # After each step.

    @invariant()
    def after_each_step(self) -> None:
        """The laws hold, and everything agrees with the oracle."""
        if hasattr(self, "cache"):
            self._stepped()
            self.laws()
            self.contents()

    def laws(self) -> None:
        """Every law of the audit holds."""
        invariants.check(self.cache)

    def contents(self) -> None:
        """Sequences agree with the oracle and read their own KV. Leases and pins keep what they hold."""
        self._counts_agree()
        behind = self.engine.is_behind
        for run in self.runs:
            self._agrees(run, behind)
        for run in self.away:
            self._agrees(run, True)
        for _, run, table in self.fenced if not behind else ():
            self._reads(table, run.states[: run.num_computed])
        for held in self.held:
            if held.lease is not None:
                states = chain(held.namespace, held.ids[: held.lease.num_tokens])
                self._reads(held.lease.block_ids, states)
        for namespace, ids in self.pinned:
            expect(self._matched(namespace, ids).num_tokens == len(ids), "what is pinned was forgotten")
        self._waiting_agree()
        for tenant in self.counts if self.pinned else ():
            pinned = self._pinned_prefixes(tenant)
            counted = self.cache.tenant_stats(tenant).pinned_blocks
            expect(counted == len(pinned), f"{counted} pinned blocks, and {len(pinned)} are")

    def _waiting_agree(self) -> None:
        """Each announcement shows what is resident, and only open ones are told."""
        self.waits = [each for each in self.waits if each[0].is_open]
        for waits, ids, until in self.waits:
            expect(self.clock() < until, "an announcement outlived its time")
            found = self._matched(waits.namespace, ids).num_tokens
            expect(waits.resident_tokens == found, f"{waits}, and {found} tokens match")

    def _counts_agree(self) -> None:
        """The counts of the cache and of each tenant match the calls that were made, whatever other tenants did."""
        stats = self.cache.stats()
        parts = (stats.resident_blocks, stats.sequence_blocks, stats.quarantined_blocks, stats.lent_blocks)
        expect(stats.free_blocks + sum(parts) == stats.num_blocks and min(parts) >= 0, stats)
        num_running = len(self.runs) + len(self.away) + len(self.fenced)
        expect(stats.num_sequences == num_running, f"{num_running} sequences run: {stats}")
        expect(stats.lent_blocks == len(self.lent), f"the engine has {len(self.lent)} blocks: {stats}")
        cache = self.cache
        quickly = (cache.free_blocks, cache.resident_blocks, cache.evictable_blocks)
        expect(
            quickly == (stats.free_blocks, stats.resident_blocks, stats.evictable_blocks),
            f"{quickly} in O(1), but {stats}",
        )
        for tenant, counts in self.counts.items():
            seen = self.cache.tenant_stats(tenant)
            counted = (seen.requests, seen.hit_tokens, seen.missed_tokens)
            expect(counted == (counts["requests"], counts["hit"], counts["missed"]), f"{seen}, but {counts}")
            quick = self.cache.blocks_of(tenant)
            told = (quick.resident_blocks, quick.evictable_blocks)
            expect(told == (seen.resident_blocks, seen.evictable_blocks), f"{told} in O(1), but {seen}")
            expect(quick.free_blocks <= stats.free_blocks, f"{quick.free_blocks} free of {stats.free_blocks}")

    def _agrees(self, run: Mirror, behind: bool) -> None:
        sequence = run.sequence
        seen = (sequence.num_tokens, sequence.num_committed_tokens, sequence.num_blocks, sequence.is_open)
        num_blocks = self._blocks(run.num_tokens + run.num_reserved)
        expect(seen == (run.num_tokens, run.num_committed, num_blocks, True), f"{seen} of {run}")
        reserved = sequence.num_reserved_tokens
        expect(reserved == run.num_reserved, f"{reserved} tokens are reserved, not {run.num_reserved}")
        if run.ahead:
            told = sequence.num_ahead_tokens
            expect(told == run.num_ahead, f"{told} tokens are ahead, not {run.num_ahead}")
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
        """Blocks hold the KV of ``states``."""
        holds = self.engine.holds(table, states, self.error)
        expect(holds, f"wrong KV under blocks {table.tolist()}")

    def teardown(self) -> None:
        """Release everything: only the trees remain, and can be evicted."""
        if not hasattr(self, "cache"):
            return
        if sys.exc_info()[0] is not None:  # the example failed, or was cut off
            leases = (each.lease for each in self.held if each.lease is not None)
            sequences = (run.sequence for run in (*self.runs, *self.away))
            lifts = (fence.lift for fence, _, _ in self.fenced)
            for end in (*(each.release for each in (*sequences, *leases)), *lifts):
                with suppress(Exception):  # the failure that is known matters more
                    end()
            return
        for run in (*self.runs, *self.away):
            run.sequence.release()
        for fence, _, _ in self.fenced:
            fence.lift()
        for held in self.held:
            if held.lease is not None:
                held.lease.release()
        for pin, _ in self.pinned.values():
            self.cache.unpin(pin)
        self.engine.settle()
        invariants.check(self.cache)
        snapshot = self.cache.snapshot()
        expect(
            not snapshot.sequences and not snapshot.runs and not snapshot.leases, "released, and still held"
        )
        expect(not any(tree.detached for tree in snapshot.trees), "a cleared tree outlives its sequences")
        expect(self._give_back() == snapshot.num_blocks, "not everything could be evicted at the end")
        invariants.check(self.cache)
        self._finished()

    def _give_back(self) -> int:
        """Evict everything, at the end of a life. Returns how many blocks are free then."""
        self.cache.free(self.lent)
        free = len(self.cache.snapshot().free_ids)
        return free + int(self.cache.evict(self.cache.config.num_blocks))

    def _finished(self) -> None:
        """Called at the end of an example that found nothing."""

    def _stepped(self) -> None:
        """Called after each step."""

    # Helpers.

    def _pass(self, seconds: float) -> None:
        """Advance the clock, and end the pins that have expired."""
        self.clock.advance(seconds)
        if self.pinned:
            now = self.clock()
            self.pinned = {key: pinned for key, pinned in self.pinned.items() if pinned[1] > now}
            self.cache.maintain()
            told = sorted(pin.id for pin in self.cache.pins())
            held = sorted(pin.id for pin, _ in self.pinned.values())
            expect(told == held, f"pins {told} are listed, and {held} hold")

    def _pinned_prefixes(self, tenant: str) -> set[tuple[Namespace, tuple[int, ...]]]:
        """The blocks that a tenant's pins hold, each as the prefix that ends with it."""
        return {
            prefix
            for namespace, ids in self.pinned
            if namespace.tenant == tenant
            for prefix in self._prefixes(namespace, ids)
        }

    def _prefixes(self, namespace: Namespace, ids: tuple[int, ...]) -> set[tuple[Namespace, tuple[int, ...]]]:
        size = self.block_size
        return {(namespace, ids[:stop]) for stop in range(size, len(ids) + 1, size)}

    def _place(self, where: int, prompt: tuple[int, ...]) -> tuple[Namespace, tuple[int, ...]]:
        limit = MAX_PROMPT_BLOCKS * self.block_size + 1
        ids = prompt[:limit]
        if where == WITH_MATERIAL and len(ids) > 1:
            key = key_of(ids, [Material(1, 2, b"pixels of an image")], block_size=self.block_size)
            ids = tuple(np.frombuffer(key, np.uint32).tolist())
        return NAMESPACES[where % len(NAMESPACES)], ids

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
        """A match that the oracle allows, with the right KV in its blocks."""
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
        if stop > run.num_computed >= run.leaned_end:  # otherwise it leans on a step that will fail
            self.engine.write(run.sequence.block_table, run.num_computed, run.states[run.num_computed : stop])
            run.num_computed = stop

    def _commit(self, run: Mirror, by: int) -> None:
        stop = min(run.num_tokens, run.num_committed + by)
        if stop > run.committable:
            sequence, wrong = run.sequence, stop
            self._refused(lambda: sequence.commit(wrong), ArgumentError)
            stop = run.committable
        self._compute(run, stop)
        if not run.forgotten:
            self.oracle.commit(run.namespace, run.ids, stop)
        before = run.sequence.block_table
        run.sequence.commit(stop)
        run.num_committed = stop
        run.pass_to(stop)
        expect(np.array_equal(before, run.sequence.block_table), "commit changed a block table")

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
            max(self._blocks(run.num_tokens + len(more)) - self._blocks(run.num_tokens + run.num_reserved), 0)
            for run, more in zip(runs, ids, strict=True)
        )
        copied, tables = self._copied(), [run.sequence.block_table for run in runs]
        try:
            call(runs, ids)
        except FlushRequired as error:
            self._fetch(error, before)
            return self._extend(runs, ids, call)
        except OutOfBlocks as error:
            self._true_refusal(error, before, new + copies, set(), {run.namespace.tenant for run in runs})
            return
        expect(
            self._copied() - copied == copies, f"{self._copied() - copied} copies, the formula says {copies}"
        )
        for run, more, table in zip(runs, ids, tables, strict=True):
            self._keeps(run, table, copies and not run.num_reserved)
            self._give_ids(run, more)
            run.num_reserved = max(run.num_reserved - len(more), 0)
            if more:
                self._owns_tail(run)

    def _give_ids(self, run: Mirror, ids: Sequence[int]) -> None:
        run.states.extend(chain(run.namespace, ids, run.states[-1] if run.states else None))
        run.ids.extend(ids)

    def _keeps(self, run: Mirror, table: Any, copied: object = False) -> None:
        """A sequence's table begins with what it was before, up to a tail that was copied."""
        kept = run.num_tokens // self.block_size if copied else len(table)
        now = run.sequence.block_table
        expect(np.array_equal(now[:kept], table[:kept]), f"{table.tolist()} became {now.tolist()}")

    def _expected_copies(self, runs: list[Mirror], snapshot: Any) -> int:
        """Σ over shared partial tails written in: writers − 1 if every owner writes, otherwise writers."""
        owners: Counter[int] = Counter()
        for run in (*self.runs, *self.away):
            owners.update(run.sequence.block_table.tolist())
        for _, _, table in self.fenced:
            owners.update(table.tolist())
        for tree in snapshot.trees:
            for node in tree.nodes:
                owners.update(np.frombuffer(node.block_ids, np.int32).tolist())
        size = self.block_size
        writers = Counter(
            int(run.sequence.block_table[run.num_tokens // size]) for run in runs if run.num_tokens % size
        )
        return sum(number - (number == owners[tail]) for tail, number in writers.items())

    def _owns_tail(self, run: Mirror) -> None:
        tail = int(run.sequence.block_table[(run.num_tokens - 1) // self.block_size])
        others = [other.sequence.block_table for other in (*self.runs, *self.away) if other is not run]
        expect(
            not any(tail in table for table in (*others, *[table for _, _, table in self.fenced])),
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
            run.forgotten,
            ahead=run.leaned_to(run.num_tokens),
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

    def _fetch(self, error: FlushRequired, before: Any) -> None:
        """The call changed nothing, and waiting copies may be in its way: execute them."""
        self._same(before)
        expect(error.needed > error.free >= len(before.free_ids), f"{len(before.free_ids)} are free: {error}")
        expect(self.engine.is_behind, f"no copy waits: {error}")
        self.engine.settle()

    def _true_refusal(
        self, error: OutOfBlocks, before: Any, needed: int, path: set[int], tenants: set[str]
    ) -> None:
        """The call changed nothing, and too few blocks were free or evictable.

        Blocks held for waiting copies count as free.

        The error has the tenant's own numbers; for the engine, it has the pool's.
        """
        self._same(before)
        room = len(before.free_ids) + len(before.held_ids) + invariants.num_evictable(before, path)
        expect(needed > room, f"refused, though {room} blocks were available: {error}")
        expect(error.needed <= needed, f"{error}, but {needed} are needed")
        if not tenants:
            facts = (needed, len(before.free_ids), room - len(before.free_ids))
            told = (error.needed, error.free, error.evictable)
            expect(told == facts, f"{error}, but the facts are {facts}")
            return
        own = {_own_numbers(before, tenant, path) for tenant in tenants}
        expect((error.free, error.evictable) in own, f"{error}, but free and evictable are {own}")


def _own_numbers(before: Any, tenant: str, path: set[int]) -> tuple[int, int]:
    """What a tenant's limit leaves it, and what it could evict of its own outside a path."""
    used = sum(each.used_blocks for each in before.tenants if each.tenant == tenant)
    own = tuple(tree for tree in before.trees if tree.namespace.tenant == tenant)
    return before.num_blocks - used, invariants.num_evictable(replace(before, trees=own), path)
