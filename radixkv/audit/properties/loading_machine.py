"""The machine of a cache with host memory below it, in addition to all that ``CacheMachine`` does.

What was evicted comes back by ``Sequence.loading``: requests poll it, claim from it, cancel it or ignore it, while
others fork, commit, evict, clear and purge. What comes must have been committed before, in that namespace, since it was
last cleared or purged. It counts as found, if it is of the prompt. Every block is read bit for bit after each step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from radixkv.audit.properties.machine import CacheMachine
from radixkv.audit.properties.material import MAX_OPEN, Mirror, expect, prompts, small, where_to
from radixkv.config import CacheConfig


class LoadingMachine(CacheMachine):
    """A cache under attack, with a storage of its own and host memory below it."""

    with_storage: ClassVar[tuple[bool, ...]] = (True,)

    def start(self, config: CacheConfig) -> None:
        """Make an empty cache, with three times or a third as many blocks below it."""
        if config.layout is not None:
            num_blocks = config.num_blocks
            config = replace(config, host_blocks=3 * num_blocks if num_blocks % 3 else num_blocks // 3)
        super().start(config)

    @rule(where=where_to, prompt=prompts)
    def serve(self, where: int, prompt: tuple[int, ...]) -> None:
        """A whole request is evicted, and comes again."""
        self._serve_and_evict(where, prompt)
        super().serve(where, prompt)

    def _serve_and_evict(self, where: int, prompt: tuple[int, ...]) -> None:
        super().serve(where, prompt)
        self.cache.evict(self.cache.evictable_blocks)

    def _open(
        self, where: int, prompt: tuple[int, ...], looks: bool = True, leans: bool = False
    ) -> Mirror | None:
        """Open a request, which takes what comes at once."""
        run = super()._open(where, prompt, looks, leans)
        if run is not None:
            self.load(len(self.runs) - 1, "poll", 1)
        return run

    @precondition(lambda self: len(self.runs) < MAX_OPEN and not self.away)
    @rule(
        where=where_to,
        prompt=prompts,
        between=st.sampled_from(("", "", "cut", "clear", "purge")),
        how=st.sampled_from(("claim", "poll")),
        by=st.integers(1, 12),
        ids=prompts,
    )
    def come_back(
        self, where: int, prompt: tuple[int, ...], between: str, how: str, by: int, ids: tuple[int, ...]
    ) -> None:
        """A long prompt is served and evicted, and comes again. Before it takes what comes, something happens."""
        prompt = (prompt * 4)[: self.block_size * self.cache.config.num_blocks // 2]
        self._serve_and_evict(where, prompt)
        run = super()._open(where, prompt)
        if run is None:
            return
        at, began = len(self.runs) - 1, run.sequence.loading
        if between == "cut":
            self.truncate(at, run.num_tokens)
            self.extend(at, ids)
        elif between == "clear":
            self.clear(where)
            self.release(at)
        elif between == "purge":
            self.purge(run.namespace.tenant)
        if began is not None:
            began.poll()
        if run in self.runs:
            self._came(run)
        elif self._open(where, prompt) is None:
            return
        self.load(len(self.runs) - 1, how, by)

    @precondition(lambda self: self.runs)
    @rule(which=small, how=st.sampled_from(("claim", "poll", "claim", "cancel")), by=st.integers(1, 12))
    def load(self, which: int, how: str, by: int) -> None:
        """Go on with what comes back to a request, and compute what it claimed."""
        run = self._run(which)
        loading = run.sequence.loading
        if loading is None:
            return
        if how == "cancel":
            loading.cancel()
        elif how == "poll" or run.ahead:
            loading.poll()
            self._came(run)
        else:
            stop = loading.claim(by)
            self._came(run)
            expect(min(run.num_committed + 1, run.num_tokens) <= stop <= run.num_tokens, f"{stop} of {run}")
            self._commit(run, stop - run.num_committed)
        expect(loading.is_done, "host memory has more to come")

    def _came(self, run: Mirror) -> None:
        """Take what was loaded and committed."""
        stop = run.sequence.num_committed_tokens
        if stop > run.num_committed:
            lie = self.oracle.served_lie(run.namespace, run.ids, stop)
            expect(lie is None, f"loaded: {lie}")
            found = min(len(range(run.num_committed, min(stop, run.num_asked))), run.num_missed)
            run.num_missed -= found
            self.counts[run.namespace.tenant].update(hit=found, missed=-found)
            run.num_committed, run.num_computed = stop, max(run.num_computed, stop)
            run.pass_to(stop)
