"""Steps that compute ahead, and fences: how sequences share blocks whose KV don't exist yet, and hold blocks after
their end.

The engine writes the KV of a step when it schedules the step, in order with its other work. If the step will fail, it
writes garbage where no other sequence reads and nothing is resident: a fork may compute again what another one has
committed in a block that both share. So whatever is matched, committed or read is wrong at once if it is shown
before its step is done, or after the step has failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from radixkv.audit.oracle import chain
from radixkv.audit.properties.lookups import Lookups
from radixkv.audit.properties.material import Mirror, expect, prompts, small, where_to
from radixkv.config import CacheConfig, Namespace
from radixkv.errors import ArgumentError
from radixkv.index.fences import Fence

MAX_STEPS = 3
"""Steps that run at the same time."""


class StepsAhead(Lookups):
    """A cache under attack by an engine that computes ahead."""

    def start(self, config: CacheConfig) -> None:
        """Begin without steps."""
        super().start(config)
        self.num_steps = 0
        self.steps: dict[int, bool] = {}  # those that run, and whether each will fail

    @property
    def _has_steps(self) -> bool:
        return hasattr(self.cache, "step_done")

    # Steps.

    @precondition(lambda self: self.runs and self._has_steps)
    @rule(
        which=small, by=st.integers(1, 17), joins=st.booleans(), fails=st.sampled_from((False, False, True))
    )
    def schedule(self, which: int, by: int, joins: bool, fails: bool) -> None:
        """A step computes the next tokens of a sequence: the latest step, or a new one. Often the step after it too."""
        run, goes_on = self._run(which), bool(which % 2)
        self._schedule(run, 1 + by % 3 if goes_on else by, self._step(joins, fails))
        if goes_on:
            self._schedule(run, by, self._step(False, False))

    @precondition(lambda self: self._has_steps)
    @rule(where=where_to, prompt=prompts, tails=st.lists(small, min_size=2, max_size=3), fails=st.booleans())
    def burst(self, where: int, prompt: tuple[int, ...], tails: list[int], fails: bool) -> None:
        """Requests with a common prefix arrive together. One step computes all of them."""
        step = self._step(False, fails)
        for tail in tails:
            run = self._arrive(where, (*prompt[: 2 * self.block_size + 1], tail))
            if run is not None:
                self._schedule(run, 17, step)

    def _arrive(self, where: int, prompt: tuple[int, ...]) -> Mirror | None:
        """Open a request that may lean on running steps, if there is room for one."""
        raise NotImplementedError

    def _step(self, joins: bool, fails: bool) -> int:
        """The latest step if it runs, or a new one. With too many, the oldest one ends first."""
        if joins and self.num_steps - 1 in self.steps:
            return self.num_steps - 1
        if len(self.steps) >= MAX_STEPS:
            self._end(min(self.steps))
        self.steps[self.num_steps] = fails
        self.num_steps += 1
        return self.num_steps - 1

    def _schedule(self, run: Mirror, by: int, step: int) -> None:
        start = max([run.num_committed, *[each.end for each in run.ahead]])
        stop = min(start + by, run.num_tokens)
        sequence = run.sequence
        self._refused(lambda: sequence.computing(run.num_tokens + 1, step=step), ArgumentError)
        reads = any(each.is_leaned and each.step == step and not each.is_done for each in run.ahead)
        if reads and not self.cache.config.writes_before_reads:
            self._refused(lambda: sequence.computing(stop, step=step), ArgumentError)
            return
        before, table = self.cache.snapshot(), sequence.block_table
        sequence.computing(stop, step=step)
        self._same(before)
        if stop == start:
            return
        run.compute_ahead(step, stop, self.num_scheduled)
        self.num_scheduled += 1
        at = max(start, run.num_computed)
        if at < stop and not self.steps[step]:
            self.engine.write(table, at, run.states[at:stop])
            run.num_computed = stop if run.num_computed >= start else run.num_computed
        elif at < stop and not self._others_have(run, table[at // self.block_size :]):
            self.engine.write(table, at, chain(run.namespace, [99] * (stop - at)))

    def _others_have(self, run: Mirror, block_ids: Any) -> bool:
        tables = [other.sequence.block_table for other in (*self.runs, *self.away) if other is not run]
        tables += [table for _, _, table in self.fenced]
        for tree in self.cache.snapshot().trees:
            tables += [np.frombuffer(node.block_ids, np.int32) for node in tree.nodes]
        return any(bool(np.isin(block_ids, table).any()) for table in tables)

    @precondition(lambda self: self.steps)
    @rule(which=small)
    def end(self, which: int) -> None:
        """A step is done, or has failed; often before an earlier one."""
        self._end(sorted(self.steps)[-1 - which % len(self.steps)])

    def _end(self, step: int) -> None:
        if self.steps.pop(step):
            self._fail(step)
            return
        num_tokens = 0
        for run in self.runs:
            stop = run.step_done(step)
            if not run.forgotten:
                self.oracle.commit(run.namespace, run.ids, stop)
            num_tokens += stop - run.num_committed
            run.num_committed, run.num_computed = stop, max(run.num_computed, stop)
            run.pass_to(stop)
        told = self.cache.step_done(step)
        expect(told == num_tokens, f"step {step} committed {told} tokens, not {num_tokens}")
        self._refuses_nothing(step)

    def _fail(self, step: int) -> None:
        num_cut = 0
        for run in self.runs:
            if run.step_failed(step):
                self._cut(run, run.num_committed)
                num_cut += 1
        told = self.cache.step_failed(step)
        expect(told == num_cut, f"{told} sequences leaned on step {step}, not {num_cut}")
        self._refuses_nothing(step)

    def _refuses_nothing(self, step: int) -> None:
        """An end that comes again changes nothing."""
        before = self.cache.snapshot()
        expect(self.cache.step_done(step) == self.cache.step_failed(step) == 0, f"step {step} ended twice")
        self._same(before)

    def _cut(self, run: Mirror, stop: int) -> None:
        """A sequence lost its tokens from ``stop`` on."""
        del run.ids[stop:], run.states[stop:]
        run.num_reserved = 0
        run.num_computed = min(run.num_computed, stop)
        run.cut_ahead(stop)

    def _offers(self, namespace: Namespace, ids: Sequence[int], cached: int) -> Iterator[tuple[Mirror, int]]:
        """Sequences that offer what follows the first ``cached`` tokens, in order, and the end of what fits."""
        size, usable = self.block_size, (len(ids) - 1) // self.block_size
        for run in sorted(
            [each for each in self.runs if each.ahead and each.offered_at is not None], key=_order
        ):
            if run.namespace != namespace or run.forgotten or run.num_committed // size != cached // size:
                continue
            last = min(run.ahead[-1].end // size, usable)
            fits = [at for at in range(last + 1) if run.ids[: at * size] == list(ids[: at * size])]
            if max(fits) * size > cached:
                yield run, max(fits) * size

    # Fences.

    @precondition(lambda self: self.runs and self._has_steps)
    @rule(which=small, joins=st.booleans())
    def release_after(self, which: int, joins: bool) -> None:
        """A request ends, and a transfer still reads its blocks."""
        run = self._run(which)
        fence = self.fenced[-1][0] if joins and self.fenced else Fence()
        table = run.sequence.block_table
        self.runs.remove(run)
        self._pass(1.0)
        run.sequence.release(after=fence)
        self.fenced.append((fence, run, table))
        self._is_consumed(run.sequence)

    @precondition(lambda self: self.fenced)
    @rule(which=small)
    def lift(self, which: int) -> None:
        """The transfer is done."""
        fence = self.fenced[which % len(self.fenced)][0]
        fence.lift()
        self.fenced = [each for each in self.fenced if each[0] is not fence]


def _order(run: Mirror) -> int:
    """When a sequence began to offer blocks."""
    return -1 if run.offered_at is None else run.offered_at
