"""The machine that lends beams to the device, in addition to all that ``CacheMachine`` does.

It lends requests to the device, steps them, and lends them more blocks when they run out. They come back by
``reconcile``, or because one of them is released. Other requests share their blocks, commit, evict and clear at the
same time. After each step, every beam reads the KV of its own ids under the device's tables. The host still reports
each beam as it was before the lending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from radixkv.audit.oracle import chain
from radixkv.audit.properties.machine import CacheMachine
from radixkv.audit.properties.material import MAX_OPEN, Mirror, expect, small, token_id
from radixkv.config import Namespace
from radixkv.errors import LeaseError, OutOfBlocks, SequenceLent


@dataclass
class Lent:
    """Beams on the device: the state of each when it was lent, and its state now."""

    beams: Any
    runs: list[Mirror]
    now: list[Mirror]


class BeamMachine(CacheMachine):
    """A cache under attack. If it has a storage of its own, some of its requests are on the device."""

    def start(self, *args: Any) -> None:
        """Begin without lendings."""
        super().start(*args)
        self.lendings: list[Lent] = []

    @property
    def _can_lend(self) -> bool:
        return self.cache.storage is not None and hasattr(self.cache, "lend")

    @precondition(lambda self: self.runs and len(self.lendings) < 2 and self._can_lend)
    @rule(
        mask=st.integers(1, 2**MAX_OPEN - 1),
        width=st.integers(0, 3),
        num_blocks=st.integers(-4, 6),
        steps=st.integers(0, 5),
    )
    def lend(self, mask: int, width: int, num_blocks: int, steps: int) -> None:
        """Lend some requests of a tenant, and children of one, with few blocks or as many as they can need.

        Then step.
        """
        chosen = self._masked(mask)
        chosen = [run for run in chosen if run.namespace.tenant == chosen[0].namespace.tenant]
        self._filled(chosen, lambda: self.cache.lend([run.sequence for run in chosen], 8))
        if any(run.ahead for run in chosen):
            waiting = [run.sequence for run in chosen]
            self._refused(lambda: self.cache.lend(waiting, 8), LeaseError)
            chosen = [run for run in chosen if not run.ahead]
            if not chosen:
                return
        for run in chosen:
            self._compute(run, run.num_tokens)
        if width:
            children = [self._heir(chosen[0], child) for child in chosen[0].sequence.fork(width)]
            self.runs += children
            chosen += children
        before = self.cache.snapshot()
        wanted = None if num_blocks < 0 else num_blocks
        try:
            beams = self.cache.lend([run.sequence for run in chosen], 8, num_blocks=wanted)
        except OutOfBlocks as error:
            needed = error.needed if wanted is None else wanted
            self._true_refusal(error, before, needed, set(), {chosen[0].namespace.tenant})
            return
        for run in chosen:
            self.runs.remove(run)
        self.away += chosen
        self.lendings.append(Lent(beams, chosen, list(chosen)))
        for at in range(steps):
            self.step(len(self.lendings) - 1, [at, 0, 1, at], [1, 2, 0, 1])

    @precondition(lambda self: self.lendings)
    @rule(
        which=small,
        parents=st.lists(small, min_size=MAX_OPEN, max_size=MAX_OPEN),
        ids=st.lists(token_id, min_size=4, max_size=4),
    )
    def step(self, which: int, parents: list[int], ids: list[int]) -> None:
        """Make a beam step, or check the flag that says why there was none.

        Then lend more blocks, if there are any.
        """
        lent = self.lendings[which % len(self.lendings)]
        width = len(lent.runs)
        chosen = [parents[at % len(parents)] % width for at in range(width)]
        appended = [ids[at % len(ids)] for at in range(width)]
        done = lent.beams.state().num_steps
        lent.beams.step(lent.beams.tables.new_tensor(chosen), lent.beams.tables.new_tensor(appended))
        state = lent.beams.state()
        expect(not (state.bad_parent or state.bad_token), f"{state} of parents {chosen} and ids {appended}")
        if state.out_of_blocks or state.table_full:
            expect(state.num_steps == done, "a step that couldn't be made was counted")
            expect(
                not state.out_of_blocks or state.num_free_blocks < width,
                f"{state}, and {width} beams need at most as many blocks",
            )
            self._lend_more(lent)
            return
        expect(state.num_steps == done + 1, "a step wasn't counted")
        lent.now = [
            self._grown(lent.now[parent], token) for parent, token in zip(chosen, appended, strict=True)
        ]
        for table, run in zip(lent.beams.tables.numpy(), lent.now, strict=True):
            self.engine.write(table, run.num_tokens - 1, run.states[-1:])

    def _lend_more(self, lent: Lent) -> None:
        before = self.cache.snapshot()
        try:
            lent.beams.lend_more(len(lent.runs))
        except OutOfBlocks as error:
            self._true_refusal(error, before, len(lent.runs), set(), {lent.runs[0].namespace.tenant})
            lent.beams.clear()

    def _grown(self, parent: Mirror, token: int) -> Mirror:
        heir = self._heir(parent, None)
        heir.ids.append(token)
        heir.states += chain(heir.namespace, [token], heir.states[-1] if heir.states else None)
        heir.num_computed = len(heir.ids)
        return heir

    @precondition(lambda self: self.lendings)
    @rule(which=small, releases=st.booleans())
    def take_back(self, which: int, releases: bool) -> None:
        """The host takes the beams back, by ``reconcile`` or because a request is released."""
        lent = self.lendings.pop(which % len(self.lendings))
        self._refuses(lent, which)
        gone = lent.runs[which % len(lent.runs)].sequence
        if releases:
            gone.release()
        else:
            lent.beams.reconcile()
        self._refused(lent.beams.reconcile, LeaseError)
        for was, run in zip(lent.runs, list(map(self._copy, lent.now)), strict=True):
            self.away.remove(was)
            run.sequence = was.sequence
            if not (releases and run.sequence is gone):
                self.runs.append(run)
        if releases:
            self._is_consumed(gone)

    def _copy(self, run: Mirror) -> Mirror:
        return self._heir(run, None)

    def _forget(self, namespace: Namespace) -> None:
        super()._forget(namespace)
        for lent in self.lendings:
            for run in (*lent.runs, *lent.now):
                run.forgotten |= run.namespace == namespace

    def contents(self) -> None:
        """Beams read what they wrote, under the tables on the device."""
        super().contents()
        for lent in self.lendings:
            lengths = lent.beams.lengths.tolist()
            for table, length, run in zip(lent.beams.tables.numpy(), lengths, lent.now, strict=True):
                expect(length == run.num_tokens, f"a beam of {length} rows, and {run.num_tokens} tokens")
                self._reads(table, run.states)

    def _refuses(self, lent: Lent, which: int) -> None:
        sequence = lent.runs[which % len(lent.runs)].sequence
        calls = (
            lambda: sequence.append(0),
            lambda: sequence.commit(sequence.num_tokens),
            lambda: sequence.fork(1),
            lambda: sequence.truncate(sequence.num_tokens),
            lambda: self.cache.reorder([sequence], [0]),
            lambda: self.cache.lend([sequence], 1),
        )
        self._refused(calls[which % len(calls)], SequenceLent)
