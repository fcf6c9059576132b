"""The example's tier brings back what neither the cache nor host memory has, and forgets a purged tenant."""

from __future__ import annotations

from tests.examples.running import printed


def test_it_runs() -> None:
    assert printed("further_tier.py").splitlines() == [
        "prompt 0: 0 of 1,200 tokens cached",
        "prompt 1: 0 of 1,200 tokens cached",
        "prompt 2: 0 of 1,200 tokens cached",
        "prompt 0: 1,184 of 1,200 tokens cached",
        "the shelf gave 74 blocks",
        "after a purge it has 0",
    ]
