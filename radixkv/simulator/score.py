"""Scores of a run's hits: over everything, by tenant and by slice of time.

    token hit rate          Σ min(hit tokens, prompt) ÷ Σ prompt, over the requests that are scored
    share of the gap        (rate − LRU's) ÷ (optimum's − LRU's) at the same capacity; none where the two meet
    capacity for LRU's rate  the capacity at which the policy's curve reaches LRU's rate at this capacity. Curves are
                            straight lines over the logarithm of the capacity between the measured capacities, and
                            straight lines from the origin to the first; none if the curve doesn't reach the rate
    prefill seconds saved   see ``profiles``
    admission gain          the rate, minus that of the same policy when it admits all; none where it always does

A run is immediately reduced to sums by tenant and slice, so many runs over a long trace take little memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import ConfigError
from radixkv.simulator.profiles import ModelProfile
from radixkv.simulator.trace import Outcome, Trace

NUM_SLICES = 6
"""The scored time is divided into so many equal slices."""

LRU, OPTIMUM, OPTIMUM_BYPASS = BASELINES = "lru", "optimum", "optimum_bypass"
_LEAST_GAP = 1e-4

ADMITTING_ALL = ", admitting all"
"""Suffix of a policy's name for the run in which it rejects nothing."""

Cells = NDArray[np.float64]
"""Sums ``[tenants, slices]``."""


@dataclass(frozen=True, slots=True)
class Sums:
    """A run, reduced."""

    hit_tokens: Cells
    saved_s: Cells
    refused: int
    evicted_blocks: int
    declined_blocks: int = 0


class Scorer:
    """Reduces runs over one trace. Raises ConfigError if no request is left to score."""

    def __init__(self, trace: Trace, profile: ModelProfile, score_from_s: float = 0.0) -> None:
        self._trace, self.profile, self.score_from_s = trace, profile, score_from_s
        self._scored = trace.times >= score_from_s
        if not trace.prompt_tokens.any():
            raise ConfigError(
                "TRACE", f"{len(trace)} requests without a prompt", "at least one with a prompt"
            )
        if not trace.prompt_tokens[self._scored].any():
            raise ConfigError(
                "--score-from", score_from_s, f"seconds from 0 to the last request's, {trace.seconds:g}"
            )
        self.edges = np.linspace(score_from_s, max(trace.seconds, score_from_s), NUM_SLICES + 1)
        slices = np.searchsorted(self.edges[1:-1], trace.times[self._scored], side="right")
        self._cells = trace.tenant[self._scored] * NUM_SLICES + slices
        self.requests = self._sum(np.ones(len(self._cells)))
        self.prompt_tokens = self._sum(trace.prompt_tokens[self._scored])

    def describe(self) -> dict[str, Any]:
        """Describe the trace and the model, with the hit rate of an unlimited cache."""
        trace, profile = self._trace, self.profile
        return {
            "requests": len(trace),
            "scored_requests": int(self._scored.sum()),
            "score_from_s": float(self.edges[0]),
            "seconds_of_trace": trace.seconds,
            "prompt_tokens": int(self.prompt_tokens.sum()),
            "block_tokens": trace.block_tokens,
            "different_blocks": trace.num_different_blocks,
            "endless_token_hit_rate": float(self._endless().hit_tokens.sum() / self.prompt_tokens.sum()),
            "tenants": list(trace.tenants),
            "profile": asdict(profile),
            "block_bytes": profile.kv_bytes_per_token * trace.block_tokens,
        }

    def _endless(self) -> Sums:
        """Hits of a cache that never evicts. Ids count up, so a block is new if its id is above all before it."""
        blocks, starts = self._trace.blocks.astype(np.int64), self._trace.starts[:-1]
        highest = np.concatenate([[-1], np.maximum.accumulate(blocks)])
        seen = np.concatenate([[0], np.cumsum(blocks <= highest[:-1])])
        return self.reduce(Outcome(seen[starts + self._trace.num_prompt_blocks] - seen[starts], 0, 0))

    def reduce(self, outcome: Outcome) -> Sums:
        """Sums over the scored requests. ``refused`` and ``evicted_blocks`` cover the whole run. O(requests)."""
        hits = np.minimum(outcome.hit_blocks * self._trace.block_tokens, self._trace.prompt_tokens)[
            self._scored
        ]
        saved = self.profile.prefill_seconds(hits)
        rest = outcome.refused, outcome.evicted_blocks, outcome.declined_blocks
        return Sums(self._sum(hits), self._sum(saved), *rest)

    def _sum(self, values: NDArray[Any]) -> Cells:
        shape = len(self._trace.tenants), NUM_SLICES
        sums = np.bincount(self._cells, values, shape[0] * shape[1])
        return sums.astype(np.float64).reshape(shape)


class Curve:
    """Hit rates of one policy by capacity, for all tenants or for one."""

    def __init__(self, rates: Mapping[int, float]) -> None:
        self.rates = dict(sorted(rates.items()))

    def capacity_for(self, rate: float) -> float | None:
        """The smallest capacity with this rate, interpolated between measured ones. None if none has it."""
        before, low = 0, 0.0
        for capacity, high in self.rates.items():
            if high >= rate:
                share = (rate - low) / (high - low) if high > low else 1.0
                return _between(before, capacity, share)
            before, low = capacity, high
        return None


def _between(low: int, high: int, share: float) -> float:
    if share in (0.0, 1.0):
        return float(high if share else low)
    return high * share if not low else exp(log(low) + share * (log(high) - log(low)))


Runs = Mapping[tuple[str, int], Sums]
"""Runs by policy and capacity. LRU's and the optimum's are there for every capacity."""


class Scores:
    """Rows of the result, from the runs over one trace."""

    def __init__(self, scorer: Scorer, tenants: Sequence[str], runs: Runs) -> None:
        self._scorer, self._tenants, self._runs = scorer, tenants, runs
        self._capacities = sorted({capacity for _, capacity in runs})

    def row(self, policy: str, capacity: int) -> dict[str, Any]:
        """Return all results of one run."""
        sums = self._runs[policy, capacity]
        return {
            "policy": policy,
            "capacity": capacity,
            **self._scores(policy, capacity, None),
            "refused_requests": sums.refused,
            "evicted_blocks": sums.evicted_blocks,
            "declined_blocks": sums.declined_blocks,
            "admission_gain": self._admission_gain(policy, capacity),
            **self._slices(policy, capacity),
            "tenants": {
                name: self._scores(policy, capacity, index) for index, name in enumerate(self._tenants)
            },
        }

    def _admission_gain(self, policy: str, capacity: int) -> float | None:
        if (policy + ADMITTING_ALL, capacity) not in self._runs:
            return None
        return self._rate(policy, capacity, None) - self._rate(policy + ADMITTING_ALL, capacity, None)

    def _scores(self, policy: str, capacity: int, tenant: int | None) -> dict[str, Any]:
        rate, lru, best = (self._rate(name, capacity, tenant) for name in (policy, LRU, OPTIMUM))
        needed = self._curve(policy, tenant).capacity_for(lru)
        sums = self._runs[policy, capacity]
        return {
            "requests": int(_of(self._scorer.requests, tenant)),
            "prompt_tokens": int(_of(self._scorer.prompt_tokens, tenant)),
            "token_hit_rate": rate,
            "share_of_gap": (rate - lru) / (best - lru) if best - lru > _LEAST_GAP else None,
            "capacity_for_lru_rate": None if needed is None else round(needed),
            "memory_saved": None if needed is None else 1.0 - needed / capacity,
            "prefill_seconds_saved": _of(sums.saved_s, tenant),
        }

    def _slices(self, policy: str, capacity: int) -> dict[str, Any]:
        """Results by slice, and the slice that is deepest below LRU."""
        total = self._scorer.prompt_tokens.sum(axis=0)
        ours, lru = (self._runs[name, capacity].hit_tokens.sum(axis=0) for name in (policy, LRU))
        slices = [
            {
                "from_s": float(self._scorer.edges[at]),
                "to_s": float(self._scorer.edges[at + 1]),
                "token_hit_rate": float(ours[at] / total[at]),
                "above_lru": float((ours[at] - lru[at]) / total[at]),
            }
            for at in range(NUM_SLICES)
            if total[at]
        ]
        return {"slices": slices, "worst_slice": min(slices, key=lambda each: each["above_lru"])}

    def _curve(self, policy: str, tenant: int | None) -> Curve:
        return Curve({capacity: self._rate(policy, capacity, tenant) for capacity in self._capacities})

    def _rate(self, policy: str, capacity: int, tenant: int | None) -> float:
        tokens = _of(self._scorer.prompt_tokens, tenant)
        return _of(self._runs[policy, capacity].hit_tokens, tenant) / tokens if tokens else 0.0


def _of(cells: Cells, tenant: int | None) -> float:
    return float(cells.sum() if tenant is None else cells[tenant].sum())
