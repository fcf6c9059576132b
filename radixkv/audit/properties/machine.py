"""The machine that attacks one cache: random lives of requests, one call a step.

Block sizes are 1, 2 and 4, pools have a few blocks. It uses every given policy, with and without a storage. There
are two tenants; the namespaces of one of them differ only in adapter or salt. It also makes calls that must be
refused.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from radixkv.audit import invariants
from radixkv.audit.oracle import chain
from radixkv.audit.properties.material import (
    LAYOUT,
    MAX_OPEN,
    MAX_PINS,
    NAMESPACES,
    Mirror,
    expect,
    prompts,
    small,
    token_id,
    where_to,
)
from radixkv.audit.properties.steps_ahead import StepsAhead
from radixkv.config import CacheConfig, Tenant
from radixkv.errors import (
    ArgumentError,
    ConfigError,
    FlushRequired,
    LeaseError,
    NotResident,
    OutOfBlocks,
    RadixKVError,
    TokenError,
)


class CacheMachine(StepsAhead):
    """One cache under attack. Subclass it with another ``factory`` or ``policies``, or use ``run``."""

    @initialize(
        policy=st.integers(0, 63),
        stored=st.booleans(),
        block_size=st.sampled_from((4, 2, 4, 2, 1)),
        num_blocks=st.sampled_from((16, 32, 12, 24, 8, 4)),
        at_once=st.booleans(),
        first=prompts,
    )
    def make(
        self,
        policy: int,
        stored: bool,
        block_size: int,
        num_blocks: int,
        at_once: bool,
        first: tuple[int, ...],
    ) -> None:
        """Make a tiny cache, its oracle and its engine, and open a first request."""
        cls = type(self)
        layout = LAYOUT if cls.with_storage[stored % len(cls.with_storage)] else None
        name = cls.policies[policy % len(cls.policies)]
        everybody = Tenant("default", max_pinned_blocks=num_blocks // 3, max_pins=MAX_PINS)
        self.start(
            CacheConfig(
                num_blocks,
                block_size,
                layout,
                policy=name,
                default_tenant=everybody,
                writes_before_reads=at_once,
            )
        )
        self._open(0, first)

    # The life of a request.

    @precondition(lambda self: len(self.runs) < MAX_OPEN)
    @rule(
        where=where_to,
        prompt=prompts,
        done=st.sampled_from((0, 17, 4)),
        looks=st.sampled_from((True, True, True, False)),
        leans=st.booleans(),
    )
    def open(self, where: int, prompt: tuple[int, ...], done: int, looks: bool, leans: bool) -> None:
        """A request arrives, and ``done`` tokens are computed."""
        run = self._open(where, prompt, looks, leans)
        if run is not None:
            self._commit(run, done)

    @rule(where=where_to, prompt=prompts)
    def serve(self, where: int, prompt: tuple[int, ...]) -> None:
        """A whole request: it arrives, is computed and ends."""
        run = self._open(where, prompt)
        if run is not None:
            self._commit(run, run.num_tokens)
            self.release(len(self.runs) - 1)

    def _arrive(self, where: int, prompt: tuple[int, ...]) -> Mirror | None:
        return self._open(where, prompt, leans=True) if len(self.runs) < MAX_OPEN else None

    def _open(
        self, where: int, prompt: tuple[int, ...], looks: bool = True, leans: bool = False
    ) -> Mirror | None:
        namespace, ids = self._place(where, prompt)
        self._pass(1.0)
        opens = self._opener(namespace)
        match = self._matched(namespace, ids)
        usable = min(match.num_tokens, max(len(ids) - 1, 0) // self.block_size * self.block_size)
        cached = usable if looks else 0
        before = self.cache.snapshot()
        offers = list(self._offers(namespace, ids, cached)) if looks and leans else []
        owner, stop = max(offers, key=lambda offer: offer[1], default=(None, cached))
        named = ({} if looks else {"lookup": False}) | ({"ahead": True} if leans and self._has_steps else {})
        try:
            sequence = opens(ids, **named)
        except FlushRequired as error:
            self._fetch(error, before)
            return self._open(where, prompt, looks, leans)
        except OutOfBlocks as error:
            path = set(match.block_ids[: cached // self.block_size].tolist())
            needed = self._blocks(len(ids)) - stop // self.block_size
            self._true_refusal(error, before, needed, path, {namespace.tenant})
            return None
        states = chain(namespace, ids)
        run = Mirror(sequence, namespace, list(ids), states, cached, cached)
        self.runs.append(run)
        if owner is not None:
            run.ahead, run.num_computed = owner.leaned_to(stop), min(owner.num_computed, stop)
        if looks:
            run.num_asked, run.num_missed = len(ids), len(ids) - cached
        self.counts[namespace.tenant].update(requests=1, hit=cached, missed=run.num_missed)
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
        if owner is not None:
            shared = owner.sequence.block_table[cached // self.block_size : stop // self.block_size]
            expect(
                sequence.num_ahead_tokens == stop - cached
                and np.array_equal(table[cached // self.block_size : stop // self.block_size], shared),
                f"{sequence.num_ahead_tokens} tokens are shared before they exist, not {stop - cached}",
            )
        elif leans and self._has_steps:
            expect(not sequence.num_ahead_tokens, "tokens are shared that no running step computes")
        return run

    def _follow(self, where: int, prompt: tuple[int, ...]) -> None:
        if len(self.runs) < MAX_OPEN:
            self._open(where, prompt)

    @precondition(lambda self: self.runs)
    @rule(which=small, by=st.integers(0, 8))
    def compute(self, which: int, by: int) -> None:
        """The engine computes KV of the next tokens, without a commit. 0 tokens: it only executes waiting copies."""
        run = self._run(which)
        self.engine.settle()
        self._compute(run, min(run.num_tokens, run.num_computed + by))

    @precondition(lambda self: self.runs)
    @rule(which=small, by=st.integers(0, 17))
    def commit(self, which: int, by: int) -> None:
        """A chunk of prefill, or a decoded token, is done. ``by`` beyond the end means all."""
        self._commit(self._run(which), by)

    @precondition(lambda self: self.runs)
    @rule(mask=st.integers(1, 2**MAX_OPEN - 1), ids=st.tuples(token_id, token_id))
    def append(self, mask: int, ids: tuple[int, int]) -> None:
        """Append one id to each sequence of a batch, all or nothing."""
        self._append(self._masked(mask), ids)

    @precondition(lambda self: self.runs)
    @rule(which=small, ids=prompts)
    def extend(self, which: int, ids: tuple[int, ...]) -> None:
        """Append several ids to one sequence: the next turn, or draft tokens."""
        run = self._run(which)
        ids = ids[: 2 * self.block_size + 1]
        self._extend([run], [ids], lambda runs, _: runs[0].sequence.extend(ids))

    @precondition(lambda self: self.runs)
    @rule(which=small, by=st.integers(1, 6))
    def truncate(self, which: int, by: int) -> None:
        """Reject draft tokens."""
        run = self._run(which)
        stop = max(run.num_committed, run.num_tokens - by)
        if run.num_committed < stop < run.leaned_end and stop % self.block_size:
            self._refused(lambda: run.sequence.truncate(stop), ArgumentError)
            return
        run.sequence.truncate(stop)
        self._cut(run, stop)

    # Room for tokens whose ids come later.

    @precondition(lambda self: self.runs)
    @rule(which=small, by=st.integers(0, 9), then=st.integers(0, 4), ids=prompts)
    def reserve(self, which: int, by: int, then: int, ids: tuple[int, ...]) -> None:
        """Make room, and perhaps use some of it at once: a few ids are filled in, or appended, or it is dropped."""
        run, config = self._run(which), self.cache.config
        before = self.cache.snapshot()
        by = min(by, config.num_blocks * config.block_size)
        total = run.num_reserved + by
        copies = self._expected_copies([run], before) if total else 0
        new = self._blocks(run.num_tokens + total) - self._blocks(run.num_tokens + run.num_reserved)
        copied, table = self._copied(), run.sequence.block_table
        try:
            run.sequence.reserve(by)
        except FlushRequired as error:
            self._fetch(error, before)
            return self.reserve(which, by, then, ids)
        except OutOfBlocks as error:
            self._true_refusal(error, before, new + copies, set(), {run.namespace.tenant})
            return
        expect(self._copied() - copied == copies, "a reserve copied more or less than the formula says")
        self._keeps(run, table, copies)
        run.num_reserved = total
        if total:
            self._refused(lambda: run.sequence.commit(run.num_tokens + 1), ArgumentError)
        if then == 1:
            self.fill(which, ids)
        elif then == 2:
            self._extend([run], [ids[:3]], lambda runs, _: runs[0].sequence.extend(ids[:3]))
        elif then == 3:
            self.drop(which, by)

    @precondition(lambda self: any(run.num_reserved for run in self.runs))
    @rule(which=small, ids=prompts)
    def fill(self, which: int, ids: tuple[int, ...]) -> None:
        """Give the ids of reserved tokens. No block changes. More ids than there is room for are refused."""
        run = self._roomy(which)
        sequence, table = run.sequence, run.sequence.block_table
        self._refused(lambda: sequence.fill([0] * (run.num_reserved + 1)), ArgumentError)
        ids = ids[: run.num_reserved]
        sequence.fill(ids)
        expect(np.array_equal(sequence.block_table, table), "a fill changed the block table")
        self._give_ids(run, ids)
        run.num_reserved -= len(ids)

    @precondition(lambda self: any(run.num_reserved for run in self.runs))
    @rule(which=small, by=st.integers(0, 9))
    def drop(self, which: int, by: int) -> None:
        """Give up the room of the last reserved tokens. 9 means all."""
        run = self._roomy(which)
        self._refused(lambda: run.sequence.drop(run.num_reserved + 1), ArgumentError)
        self._drop(run, None if by == 9 else min(by, run.num_reserved))

    def _drop(self, run: Mirror, by: int | None) -> None:
        free, table = self.cache.snapshot().free_ids, run.sequence.block_table
        run.sequence.drop(by)
        run.num_reserved -= run.num_reserved if by is None else by
        kept = self._blocks(run.num_tokens + run.num_reserved)
        expect(np.array_equal(run.sequence.block_table, table[:kept]), "a drop gave up other blocks")
        freed = set(self.cache.snapshot().free_ids.tolist()) - set(free.tolist())
        expect(freed == set(table[kept:].tolist()), "the blocks of dropped room aren't free")

    def _roomy(self, which: int) -> Mirror:
        """A sequence with reserved room, the chosen one if it has some."""
        order = [*self.runs[which % len(self.runs) :], *self.runs]
        return next((run for run in order if run.num_reserved), self._run(which))

    def _filled(self, runs: list[Mirror], call: Callable[[], object]) -> None:
        """A call that two sequences could both write after is refused while room is reserved. Then it is dropped."""
        roomy = [run for run in runs if run.num_reserved]
        if roomy:
            self._refused(call, LeaseError)
        for run in roomy:
            self._drop(run, None)

    @precondition(lambda self: 0 < len(self.runs) < MAX_OPEN)
    @rule(which=small, num_children=st.integers(1, 3), writers=st.integers(0, 4), computed=st.booleans())
    def fork(self, which: int, num_children: int, writers: int, computed: bool) -> None:
        """Children share every block; the parent stays open. Then ``writers`` of them append."""
        run = self._run(which)
        self._filled([run], lambda: run.sequence.fork(1))
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

    @precondition(lambda self: 0 < len(self.runs) < MAX_OPEN)
    @rule(whose=st.lists(small, min_size=1, max_size=3), leaves=st.integers(0, 2))
    def diverge(self, whose: list[int], leaves: int) -> None:
        """Sequences fork and write one after the other, and the parent or the child ends.

        The engine makes no step.
        """
        for run in self.runs:
            self._compute(run, run.num_tokens)
        for which in whose:
            if 0 < len(self.runs) < MAX_OPEN:
                run = self._run(which)
                self._filled([run], lambda run=run: run.sequence.fork(1))  # type: ignore[misc]
                (child,) = run.sequence.fork(1)
                self.runs.append(heir := self._heir(run, child))
                self._append([heir], (1, 2))
                if leaves:
                    self.release(self.runs.index(run if leaves == 1 else heir))

    @precondition(lambda self: self.runs)
    @rule(mask=st.integers(1, 2**MAX_OPEN - 1), parents=st.lists(small, max_size=4), writes=st.booleans())
    def reorder(self, mask: int, parents: list[int], writes: bool) -> None:
        """A beam step consumes its inputs.

        Each continues once, several times or not at all. Then all results may write.
        """
        inputs = self._masked(mask)
        heirs = self._reorder(inputs, [parent % len(inputs) for parent in parents])
        if writes:
            self._append(heirs, (0, 1))

    @precondition(lambda self: 0 < len(self.runs) < MAX_OPEN)
    @rule(which=small, width=st.integers(2, 4), lead=st.integers(0, 3))
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
        self._filled(inputs, lambda: self.cache.reorder([run.sequence for run in inputs], chosen))
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
    @rule(which=small)
    def release(self, which: int) -> None:
        """A request ends, or is cancelled."""
        run = self._run(which)
        self.runs.remove(run)
        self._pass(1.0)
        run.sequence.release()
        self._is_consumed(run.sequence)

    # Calls of an operator or an engine on the pool.

    @rule(kind=st.integers(0, 3), num_blocks=st.integers(0, 6))
    def pool(self, kind: int, num_blocks: int) -> None:
        """Evict blocks, lend blocks to the engine, or take them back."""
        if kind < 2:
            self._evict(num_blocks)
        elif kind == 2 and len(self.lent) < 4:
            self._allocate(num_blocks % 4)
        else:
            self._free(num_blocks)

    def _evict(self, num_blocks: int) -> None:
        """Evict as many blocks as asked for, or all that no lease protects."""
        before = self.cache.snapshot()
        freed = self.cache.evict(num_blocks)
        evictable = invariants.num_evictable(before)
        expect(freed == min(num_blocks, evictable), f"{freed} of {num_blocks} evicted, {evictable} evictable")
        after = self.cache.snapshot()
        gained = len(after.free_ids) + len(after.held_ids) - len(before.free_ids) - len(before.held_ids)
        expect(gained == freed, "evicted blocks are neither free nor held for a copy")

    def _allocate(self, num_blocks: int) -> None:
        """Lend blocks to the engine."""
        before = self.cache.snapshot()
        try:
            block_ids = self.cache.allocate(num_blocks)
        except FlushRequired as error:
            self._fetch(error, before)
            return self._allocate(num_blocks)
        except OutOfBlocks as error:
            self._true_refusal(error, before, num_blocks, set(), set())
            return
        expect(len(block_ids) == num_blocks, "another number of blocks was lent")
        self.lent.extend(block_ids.tolist())

    def _free(self, count: int) -> None:
        """Take lent blocks back, once."""
        back, self.lent = self.lent[:count], self.lent[count:]
        self.cache.free(back)
        if back:
            self._refused(lambda: self.cache.free(back), ArgumentError)

    @rule(
        where=where_to,
        prompt=prompts,
        start=st.integers(0, 4),
        own=st.integers(0, 15),
        kind=st.sampled_from(("plain", "plain", "lease", "hints", "free")),
    )
    def insert(self, where: int, prompt: tuple[int, ...], start: int, own: int, kind: str) -> None:
        """An engine inserts blocks that it filled, some of them the tree's own. The others stay the engine's.

        With ``free`` the last of them are free instead of lent.
        """
        namespace, ids = self._place(where, prompt)
        ids = ids[: len(ids) // self.block_size * self.block_size]
        try:
            mine = self.cache.allocate(len(ids) // self.block_size).tolist()
        except OutOfBlocks:
            return
        match = self._matched(namespace, ids)
        start = min(start, match.num_blocks)
        theirs = match.block_ids.tolist()
        given = [theirs[at] if at < len(theirs) and own >> at & 1 else mine[at] for at in range(len(mine))]
        freed = mine[-2:] if kind == "free" else []
        self.cache.free(freed)
        self.engine.write(np.array([*theirs[:start], *given[start:]], np.int32), 0, chain(namespace, ids))
        done = self._insert(namespace, ids, given[start:], start, theirs, kind)
        expect(not len(done.evicted), "blocks were handed to an engine that doesn't own the pool")
        expect(self._matched(namespace, ids).num_tokens == len(ids), "what was inserted isn't matched")
        left = sorted(set(mine) - set(freed) - set(done.block_ids.tolist()))
        expect(
            sorted([*self.lent, *left]) == sorted(self.cache.snapshot().lent_ids),
            "what an insert didn't take isn't the engine's",
        )
        self.cache.free(left)

    # Calls that must be refused.

    @rule(kind=st.integers(0, 63), which=small)
    def refuse(self, kind: int, which: int) -> None:
        """Calls that can't work: each raises the expected error and changes nothing."""
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
            (lambda: cache.open(namespace, [0], lookup=1), ArgumentError),
            (lambda: cache.free([taken]), ArgumentError),
            (lambda: cache.insert(namespace, [99] * size, [taken]), ArgumentError),
            (lambda: cache.insert(namespace, [0] * size, []), ArgumentError),
            (lambda: cache.insert(namespace, [99] * size, [0], start=size + 1), ArgumentError),
            (lambda: cache.insert(namespace, [99] * 2 * size, [0], start=-size), ArgumentError),
            (lambda: cache.insert(namespace, [99] * 2 * size, [0], start=size), NotResident),
            (lambda: cache.insert(namespace, [99] * size, [0], hints="soon"), ArgumentError),
            (lambda: cache.match_and_lease(namespace, [2**32]), TokenError),
            (lambda: cache.touch(namespace, [-1]), TokenError),
            (lambda: cache.step_done(-1), ArgumentError),
            (lambda: cache.step_failed(2**63), ArgumentError),
            (lambda: cache.reclaim(1), ConfigError),
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
            (lambda: sequence.computing(size, step=-1), ArgumentError),
            (lambda: sequence.release(after=5), ArgumentError),
            (lambda: sequence.reserve(-1), ArgumentError),
            (lambda: sequence.reserve(2**40), ArgumentError),
            (lambda: sequence.fill([0] * (run.num_reserved + 1)), ArgumentError),
            (lambda: sequence.fill([-1]), TokenError),
            (lambda: sequence.drop(run.num_reserved + 1), ArgumentError),
            (lambda: sequence.drop(-1), ArgumentError),
            (lambda: cache.append([sequence, sequence], [0, 1]), ArgumentError),
            (lambda: cache.append([sequence], [0, 1]), ArgumentError),
            (lambda: cache.append([sequence], (0, 1)), ArgumentError),
            (lambda: cache.append([sequence], ()), ArgumentError),
            (lambda: cache.append([sequence], (-1,)), TokenError),
            (lambda: cache.reorder([sequence], [1]), ArgumentError),
            (lambda: cache.reorder([sequence, sequence], [0]), ArgumentError),
        ]
