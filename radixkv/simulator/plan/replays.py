"""Replays of a trace through caches of the planned sizes. Needs the extra ``tiers``.

Each dtype of the KV that the layers can have is one replay (``radixkv.simulator.tiers``): of smaller blocks more fit.
Models with states keep one state for each request in addition, so fewer fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from radixkv.errors import ConfigError
from radixkv.simulator.plan.kv import Kept
from radixkv.simulator.plan.planner import Options, Planner
from radixkv.simulator.score import Scorer
from radixkv.simulator.simulate_tiers import MOST_BLOCKS, TIERS, row_of
from radixkv.simulator.tiers import replay_tiers
from radixkv.simulator.trace import Trace

Progress = Callable[[int, int], None]


class Replays:
    """The replays of one plan."""

    def __init__(self, planner: Planner, trace: Trace, options: Options) -> None:
        self._planner, self._trace, self._options = planner, trace, options
        profile = planner.described.profile(planner.kept, options.tflops)
        self._scorer = Scorer(trace, profile)
        self._mean = max(float((trace.prompt_tokens + trace.output_tokens).mean()), 1.0)

    def run(self, progress: Progress | None) -> dict[str, Any]:
        """Replay the trace once for each dtype. Returns what each tier adds, and the hit rates of the dtypes."""
        planner, trace = self._planner, self._trace
        dtypes = planner.dtypes()
        rows: dict[str, dict[str, Any]] = {}
        for done, dtype in enumerate(dtypes, 1):
            try:
                rows[dtype] = self._replay(replace(planner.kept, dtype=dtype))
            except ConfigError:
                if dtype == planner.kept.dtype:
                    raise  # the tiers can't keep the others' KV in their dtype
            if progress is not None:
                progress(done, len(dtypes))
        planned = rows[planner.kept.dtype]
        lengths = trace.prompt_tokens + trace.output_tokens
        facts = self._scorer.describe()
        return {
            "policy": self._options.policy,
            "requests": len(trace),
            "seconds": trace.seconds,
            "prompt_tokens": int(trace.prompt_tokens.sum()),
            "block_tokens": trace.block_tokens,
            "mean_tokens": float(lengths.mean()),
            "p95_tokens": int(np.percentile(lengths, 95)),
            "expected_tokens": planner.expected_tokens(trace),
            "endless_token_hit_rate": facts["endless_token_hit_rate"],
            "prefill_seconds": float(self._scorer.profile.prefill_seconds(trace.prompt_tokens).sum()),
            **planned,
            "kv_dtypes": {dtype: row["token_hit_rate"] for dtype, row in rows.items()},
        }

    def _replay(self, kept: Kept) -> dict[str, Any]:
        """Return what each tier adds."""
        planner, options = self._planner, self._options
        states = kept.state_bytes * planner.gpus
        blocks = {"gpu": 0, "host": 0, "disk": 0}
        for tier in planner.tiers(kept, options.tier_dtype):
            token_bytes = tier["block_bytes"] / kept.block_size + states / self._mean
            tokens = tier["tokens"] if not states else int(tier["bytes"] / token_bytes)
            most = min(max(self._trace.num_different_blocks, 1), MOST_BLOCKS)
            blocks[tier["tier"]] = min(tokens // self._trace.block_tokens, most)
        if not blocks["gpu"]:
            allowed = f"room for a block of the trace, {self._trace.block_tokens} tokens"
            raise ConfigError("--gpu", planner.machine.gpu_bytes, allowed)
        sizes = blocks["gpu"], blocks["host"], blocks["disk"]
        found = row_of(
            self._trace, self._scorer, replay_tiers(self._trace, options.policy, *sizes, options.seed)
        )
        names = dict(zip(("gpu", "host", "disk"), TIERS, strict=True))
        tiers = [
            {
                "tier": tier,
                "blocks_of_trace": blocks[tier],
                "token_hit_rate": found[names[tier]]["token_hit_rate"],
                "prefill_seconds_saved": found[names[tier]]["prefill_seconds_saved"],
            }
            for tier in blocks
            if blocks[tier]
        ]
        return {
            "tiers": tiers,
            "token_hit_rate": found["token_hit_rate"],
            "prefill_seconds_saved": found["prefill_seconds_saved"],
        }
