"""Replay of a trace through a real PrefixCache. One token represents one block of the trace.

The replay uses the production index and policies. It opens, commits and releases requests with ``block_size=1``, the
trace's block ids as token ids, and the trace's clock. So a policy gets the same calls in the same order as in
production. There is one difference: a production cache starts a new node every 30,720 tokens, and here a node may be
as long as a prompt. Policies that rank whole nodes may behave differently.

A request opens with its prompt's blocks and one extra token, because a cache always leaves one token to compute. The
extra token is released at once; for it the pool has one block more than the capacity, and of which the policy doesn't
know. The prompt is committed at the
request's start and the answer at its end, and the request holds its lease in between. A request that doesn't fit
counts as refused and computes everything. An answer that doesn't fit isn't kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from radixkv.clock import ManualClock
from radixkv.config import CacheConfig, Namespace, Tenant, resolve
from radixkv.errors import CapacityError
from radixkv.index.cache import PrefixCache
from radixkv.index.changes import Journal
from radixkv.index.sequence import Sequence
from radixkv.simulator.profiles import ModelProfile
from radixkv.simulator.trace import Outcome, Trace, events, hints_of
from radixkv_policies import Policy
from radixkv_policies.gdsf import GDSF
from radixkv_policies.policy import SEGMENT_TOKENS

_EXTRA: Final = np.array([2**32 - 1], "<u4").tobytes()


def replay(
    trace: Trace,
    policy: str,
    capacity: int,
    seed: int = 0,
    *,
    profile: ModelProfile | None = None,
    admits_all: bool = False,
) -> Outcome:
    """Return the hits of a cache of ``capacity`` blocks under this policy. O(nodes on the paths + evictions).

    profile: of the model, for policies that weigh the cost of prefill. admits_all: skip the policy's ``admit``, so
    that everything is admitted.
    """
    made = resolve("policy", policy)
    if profile is not None and issubclass(made, GDSF):
        made = type(made.__name__, (made,), {"profile": profile.for_policies})
    if admits_all:
        made = type(made.__name__, (made,), {"admit": Policy.admit})
    return Replay(trace, made, capacity, seed).run()


def sized(policy: Callable[..., Policy], capacity: int) -> Callable[..., Policy]:
    """Return what makes the policy for ``capacity`` blocks, though the pool has one more for the extra token."""

    def made(num_blocks: int, *args: Any, **named: Any) -> Policy:
        return policy(capacity, *args, **named)

    return made


def declines(policy: str) -> bool:
    """Whether the policy of this name may reject blocks."""
    return resolve("policy", policy).admit is not Policy.admit


class Replay:
    """The cache of a replay, and the requests that run. ``journal``: of the cache."""

    def __init__(
        self,
        trace: Trace,
        policy: type[Policy],
        capacity: int,
        seed: int,
        journal: Journal | None = None,
    ) -> None:
        self._clock = ManualClock()
        segment_tokens = max(SEGMENT_TOKENS // trace.block_tokens, 1)  # a token represents a block
        self._config = CacheConfig(
            num_blocks=capacity + 1,
            block_size=1,
            seed=seed,
            segment_tokens=segment_tokens,
            default_tenant=Tenant("default", policy=sized(policy, capacity)),
        )
        self._journal = journal
        self.begin_empty()
        self._namespaces = [Namespace(tenant=name, model="trace") for name in trace.tenants]
        self._trace = trace
        self._blocks = trace.blocks.astype("<u4")
        self._starts = trace.starts.tolist()
        self._prompts = trace.num_prompt_blocks.tolist()
        self._tenants = trace.tenant.tolist()
        self._times = trace.times.tolist()
        self._ends_at = (trace.times + trace.durations).tolist()
        self._running: dict[int, Sequence] = {}
        self._hits = np.zeros(len(trace), np.int64)
        self._refused = 0

    def begin_empty(self) -> None:
        """Make a new cache with a new policy."""
        self.cache = PrefixCache(self._config, clock=self._clock, journal=self._journal)

    def run(self) -> Outcome:
        """Run the whole trace."""
        ends_at = self._ends_at
        maintain_at = 0.0
        for number, ends in events(self._trace):
            self._clock.now = max(self._clock.now, ends_at[number] if ends else self._times[number])
            self.advanced()
            if self._clock.now >= maintain_at:
                self.maintain()
                maintain_at = self._clock.now + 1.0
            if ends:
                self._end(number)
            else:
                self._start(number)
        stats = self.cache.stats()
        return Outcome(self._hits, self._refused, stats.evicted_blocks, stats.declined_blocks)

    def advanced(self) -> None:
        """The clock has advanced to a request's start or end. Does nothing here."""

    def maintain(self) -> None:
        """Let policies learn, once a second of the trace."""
        self.cache.maintain()

    def about_to_open(self, number: int, namespace: Namespace, key: bytes) -> None:
        """A request is about to open with its prompt's blocks. Does nothing here."""

    def committed(self, namespace: Namespace, key: bytes) -> None:
        """Blocks were committed. Does nothing here."""

    def _start(self, number: int) -> None:
        start, size = self._starts[number], self._prompts[number]
        key = self._blocks[start : start + size].tobytes()
        self.about_to_open(number, self._namespaces[self._tenants[number]], key)
        try:
            sequence = self.cache.open(
                self._namespaces[self._tenants[number]],
                key + _EXTRA,
                hints=hints_of(self._trace.labels[number]),
            )
        except CapacityError:
            self._refused += 1
            return
        self._hits[number] = sequence.num_cached_tokens
        sequence.commit(size)
        sequence.truncate(size)
        self.committed(self._namespaces[self._tenants[number]], key)
        self._running[number] = sequence

    def _end(self, number: int) -> None:
        sequence = self._running.pop(number, None)
        if sequence is None:
            return
        start = self._starts[number] + self._prompts[number]
        answer = self._blocks[start : self._starts[number + 1]]
        with sequence:
            if len(answer) and self._keep(sequence, answer.tobytes()):
                whole = self._blocks[self._starts[number] : self._starts[number + 1]].tobytes()
                self.committed(sequence.namespace, whole)

    def _keep(self, sequence: Sequence, answer: bytes) -> bool:
        """Commit an answer, if there is room. Returns whether there was."""
        try:
            sequence.extend(answer + _EXTRA)
        except CapacityError:
            return False
        sequence.commit(sequence.num_tokens - 1)
        return True
