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
from radixkv.audit.properties.checked import CheckedCache
from radixkv.audit.properties.material import (
    LAYOUT,
    MAX_OPEN,
    MAX_PINS,
    NAMESPACES,
    Held,
    Mirror,
    expect,
    prompts,
    small,
    token_id,
    where_to,
)
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import (
    ArgumentError,
    FlushRequired,
    LeaseError,
    NotResident,
    OutOfBlocks,
    PendingError,
    PinBudgetExceeded,
    PinLimitExceeded,
    RadixKVError,
    TokenError,
)


class CacheMachine(CheckedCache):
    """One cache under attack. Subclass it with another ``factory`` or ``policies``, or use ``run``."""

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
        """Make a tiny cache, its oracle and its engine, and open a first request."""
        cls = type(self)
        layout = LAYOUT if cls.with_storage[stored % len(cls.with_storage)] else None
        name = cls.policies[policy % len(cls.policies)]
        everybody = Tenant("default", max_pinned_blocks=num_blocks // 3, max_pins=MAX_PINS)
        self.start(CacheConfig(num_blocks, block_size, layout, policy=name, default_tenant=everybody))
        self._open(0, first, "compute")

    # The life of a request.

    @precondition(lambda self: len(self.runs) < MAX_OPEN)
    @rule(
        where=where_to,
        prompt=prompts,
        on_pending=st.sampled_from(("compute", "compute", "raise", "wait")),
        done=st.sampled_from((0, 17, 4)),
    )
    def open(self, where: int, prompt: tuple[int, ...], on_pending: str, done: int) -> None:
        """A request arrives, and ``done`` tokens are computed. ``wait`` never waits here: its timeout is 0."""
        run = self._open(where, prompt, on_pending)
        if run is not None:
            self._commit(run, done)

    @rule(where=where_to, prompt=prompts)
    def serve(self, where: int, prompt: tuple[int, ...]) -> None:
        """A whole request: it arrives, is computed and ends."""
        run = self._open(where, prompt, "compute")
        if run is not None:
            self._commit(run, run.num_tokens)
            self.release(len(self.runs) - 1)

    def _open(self, where: int, prompt: tuple[int, ...], on_pending: str) -> Mirror | None:
        namespace, ids = self._place(where, prompt)
        self._pass(1.0)
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
        except FlushRequired as error:
            self._fetch(error, before)
            return self._open(where, prompt, on_pending)
        except OutOfBlocks as error:
            path = set(match.block_ids[: cached // self.block_size].tolist())
            self._true_refusal(error, before, self._blocks(len(ids)) - len(path), path, {namespace.tenant})
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
        run.sequence.truncate(stop)
        del run.ids[stop:], run.states[stop:]
        run.num_computed = min(run.num_computed, stop)
        run.num_prompt = min(run.num_prompt, stop)

    @precondition(lambda self: 0 < len(self.runs) < MAX_OPEN)
    @rule(which=small, num_children=st.integers(1, 3), writers=st.integers(0, 4), computed=st.booleans())
    def fork(self, which: int, num_children: int, writers: int, computed: bool) -> None:
        """Children share every block; the parent stays open. Then ``writers`` of them append."""
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

    # Matches and leases.

    @rule(where=where_to, prompt=prompts, opens=st.booleans())
    def match(self, where: int, prompt: tuple[int, ...], opens: bool) -> None:
        """A lookup changes nothing. Its match is kept for a lease, now or when it is stale. A request may follow."""
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
    @rule(which=small)
    def lease(self, which: int) -> None:
        """Lease a kept match, or release its lease, once."""
        held = self.held[which % len(self.held)]
        if held.lease is None:
            self._lease(held)
            return
        self.held.remove(held)
        held.lease.release()
        self._refused(held.lease.release, LeaseError)

    def _lease(self, held: Held) -> None:
        """A lease makes the block ids of a match valid, or refuses a stale match."""
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

    # Pins.

    @precondition(lambda self: hasattr(self.cache, "pin"))
    @rule(where=where_to, prompt=prompts, seconds=st.integers(1, 20), which=small, unpins=st.booleans())
    def pin(self, where: int, prompt: tuple[int, ...], seconds: int, which: int, unpins: bool) -> None:
        """Pin up to three prefixes of a prompt, or pin them again; or end a pin early."""
        if unpins and self.pinned:
            pin, _ = self.pinned.pop(list(self.pinned)[which % len(self.pinned)])
            self.cache.unpin(pin)
            self._refused(lambda: self.cache.unpin(pin), LeaseError)
            return
        namespace, ids = self._place(where, prompt)
        num_blocks = len(ids) // self.block_size
        for stop in range(num_blocks, max(num_blocks - 1 - which % 3, 0), -1):
            self._pin(namespace, ids[: stop * self.block_size], float(seconds))

    def _pin(self, namespace: Namespace, ids: tuple[int, ...], seconds: float) -> None:
        before = self.cache.snapshot()
        resident = self._matched(namespace, ids).num_tokens
        held = self._pinned_prefixes(namespace.tenant)
        wanted = held | self._prefixes(namespace, ids)
        budget = self.cache.config.default_tenant.max_pinned_blocks
        num_pins = sum(where.tenant == namespace.tenant for where, _ in self.pinned)
        is_full = num_pins >= MAX_PINS and (namespace, ids) not in self.pinned
        try:
            pin = self.cache.pin(namespace, ids, seconds)
        except NotResident as error:
            self._same(before)
            expect(error.resident_tokens == resident < len(ids), f"{error}, but {resident} are resident")
            return
        except PinLimitExceeded as error:
            self._same(before)
            said = (error.num_pins, error.limit)
            expect(is_full and said == (num_pins, MAX_PINS), f"{error}, but the tenant has {num_pins} pins")
            return
        except PinBudgetExceeded as error:
            self._same(before)
            told, facts = (
                (error.needed, error.budget, error.pinned),
                (len(wanted) - len(held), budget, len(held)),
            )
            expect(told == facts and len(wanted) > budget, f"{error}, but the facts are {facts}")
            return
        expect(resident == len(ids) and len(wanted) <= budget, f"{pin} was granted")
        expect(not is_full, f"{pin} was granted beyond the {MAX_PINS} pins of a tenant")
        expect(pin.num_tokens == len(ids) and pin.ttl_s == seconds, f"{pin} is another one")
        self.pinned[namespace, ids] = pin, self.clock() + seconds

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

    @rule(where=where_to)
    def clear(self, where: int) -> None:
        """Clear a namespace. Its running sequences continue."""
        namespace = NAMESPACES[where % len(NAMESPACES)]
        self.cache.clear(namespace)
        self.oracle.clear(namespace)
        self._forget(namespace)
        self.pinned = {key: pinned for key, pinned in self.pinned.items() if key[0] != namespace}
        for prompt in ((0,) * 8, (1,) * 8):
            expect(self.cache.match(namespace, prompt).num_tokens == 0, "a cleared namespace matches")

    def _forget(self, namespace: Namespace) -> None:
        """From now on, what runs in the namespace is never served."""
        for run in self.runs:
            run.forgotten |= run.namespace == namespace

    @rule(where=where_to, prompt=prompts)
    def insert(self, where: int, prompt: tuple[int, ...]) -> None:
        """An engine inserts blocks that it filled. Blocks for an already resident prefix stay the engine's."""
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
            self.cache.insert(namespace, ids, block_ids).num_resident_tokens == resident,
            "insert and match disagree about what is resident",
        )
        expect(self._matched(namespace, ids).num_tokens == len(ids), "what was inserted isn't matched")
        left = block_ids[: resident // self.block_size]
        expect(
            set(left.tolist()) <= set(self.cache.snapshot().lent_ids),
            "the duplicates of an insert aren't the engine's",
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
            (lambda: cache.open(namespace, [0], on_pending="later"), ArgumentError),
            (lambda: cache.free([taken]), ArgumentError),
            (lambda: cache.insert(namespace, [99] * size, [taken]), ArgumentError),
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
