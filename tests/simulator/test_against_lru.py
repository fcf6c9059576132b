"""``learned`` and ``auto`` over whole runs: never far below LRU. The workloads are small and seeded."""

from __future__ import annotations

import pytest

from radixkv.simulator.generator import generate, parse_mix
from radixkv.simulator.profiles import profile_of
from radixkv.simulator.replay import replay
from radixkv.simulator.score import Scorer
from radixkv.simulator.trace import Request, Trace, build

_MINUTE_S = 60.0
_BELOW = 0.003
"""As a share of all prompt tokens."""

WORKLOADS = {
    "a flood of scans": ["chat=1.5", "scan=4@6m-9m"],
    "a loop larger than the cache": ["chat=1", "loop=1"],
    "another mix all at once": ["chat=2@0m-7m", "agent=2@7m-14m"],
    "jobs and documents": ["rag=1.5,batch=1"],
}


def workload(mix: list[str], seed: int) -> Trace:
    """A quarter of an hour. Odd seeds have the labels that a service knows."""
    parts = parse_mix(mix, 14 * _MINUTE_S, lambda text: _MINUTE_S * float(text.rstrip("m")))
    return build(
        (
            Request(
                call.time_s,
                call.tenant,
                call.blocks,
                call.prompt_tokens // 512,
                call.prompt_tokens,
                call.output_tokens,
                0.0,
                call.labels if seed % 2 else None,
            )
            for call in generate(parts, seed=seed)
        ),
        512,
    )


def rate(trace: Trace, policy: str, capacity: int) -> float:
    """Token hit rate over the whole run."""
    scorer = Scorer(trace, profile_of("llama-3-8b"))
    hits = scorer.reduce(replay(trace, policy, capacity)).hit_tokens
    return float(hits.sum() / scorer.prompt_tokens.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    "mix, seed",
    [
        ("a flood of scans", 3),
        ("a loop larger than the cache", 4),
        ("another mix all at once", 3),
        ("another mix all at once", 4),
        ("jobs and documents", 4),
    ],
)
def test_no_more_than_a_little_below_lru(mix: str, seed: int) -> None:
    """Over the whole run, with the time before the policy has learned anything."""
    trace = workload(WORKLOADS[mix], seed)
    least = rate(trace, "lru", 1_500) - _BELOW
    assert rate(trace, "learned", 1_500) >= least
    assert rate(trace, "auto", 1_500) >= least
