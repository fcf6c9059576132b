"""The trace simulator with tiers: what the device, the host and the disk each save, by policy and capacity."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.bench.measure import columns
from radixkv.bench.policies import chosen
from radixkv.bench.simulation.profiles import ModelProfile, profile_of
from radixkv.bench.simulation.score import Scorer
from radixkv.bench.simulation.tiers import TieredOutcome, replay_tiers
from radixkv.bench.simulation.trace import Outcome, Trace, read
from radixkv.config import policy_names
from radixkv.errors import ConfigError

TIERS = ("device", "host", "disk")
MOST_BLOCKS = 10_000_000
"""The largest tier. Its table takes about 300 bytes a block."""


def run(
    traces: Sequence[Path],
    *,
    capacities: Sequence[int],
    host_blocks: int,
    disk_blocks: int,
    disk_writes: float | None = None,
    policies: Sequence[str] = ("lru",),
    tenants: Sequence[str] | None = None,
    score_from_s: float = 0.0,
    profile: ModelProfile | None = None,
    block_tokens: int = 16,
    keep_tails: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Replay the traces with each policy and capacity of the device, over tiers of these sizes.

    ``disk_writes``: blocks an hour that the disk may be written on average; None for no bound.

    Returns a dict that JSON can encode. Its ``results`` have, by tier, the token hit rate, the prefill seconds that it
    saves, and the bytes written to it in the whole run. ``progress`` gets the number of finished runs and of all.

    Raises ConfigError for invalid settings or traces.
    """
    began = time.perf_counter()
    for option, size in (("--host", host_blocks), ("--disk", disk_blocks)):
        if not 0 <= size <= MOST_BLOCKS:
            raise ConfigError(option, size, f"0 to {MOST_BLOCKS:,} blocks")
    for capacity in capacities:
        if not 1 <= capacity < 2**31 - 1:
            raise ConfigError("--capacity", capacity, f"from 1 to {2**31 - 2} blocks")
    if disk_writes is not None and not (disk_blocks and 1 <= disk_writes <= 1e12):
        raise ConfigError("--disk-writes", disk_writes, "at least 1 block an hour, with --disk")
    writes_per_s = None if disk_writes is None else disk_writes / 3_600
    named = chosen(policies, policy_names())
    trace = read(traces, block_tokens=block_tokens, keep_tails=keep_tails, tenants=tenants)
    scorer = Scorer(trace, profile or profile_of("llama-3-8b"), score_from_s)
    tasks = [(policy, capacity) for policy in named for capacity in dict.fromkeys(capacities)]
    rows = []
    for done, (policy, capacity) in enumerate(tasks, 1):
        found = replay_tiers(
            trace, policy, capacity, host_blocks, disk_blocks, seed, disk_writes=writes_per_s
        )
        rows.append({"policy": policy, "capacity": capacity, **_row(trace, scorer, found)})
        if progress is not None:
            progress(done, len(tasks))
    return {
        "benchmark": "simulate tiers",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "traces": [str(path) for path in traces],
        "seed": seed,
        "keep_tails": keep_tails,
        "host_blocks": host_blocks,
        "disk_blocks": disk_blocks,
        "disk_writes": disk_writes,
        **scorer.describe(),
        "results": rows,
        "seconds": time.perf_counter() - began,
    }


def _row(trace: Trace, scorer: Scorer, found: TieredOutcome) -> dict[str, Any]:
    """Return what each tier adds to the tiers above it."""
    block_bytes = scorer.profile.kv_bytes_per_token * trace.block_tokens
    written = {"device": 0, "host": found.host_writes, "disk": found.disk_writes}
    hits = np.zeros(len(trace), np.int64)
    rate = saved = 0.0
    row: dict[str, Any] = {}
    for tier, added in zip(TIERS, found[:3], strict=True):
        hits = hits + added
        rate_above, saved_above = rate, saved
        rate, saved = _scores(scorer, hits)
        row[tier] = {
            "token_hit_rate": rate - rate_above,
            "prefill_seconds_saved": saved - saved_above,
            "written_blocks": written[tier],
            "written_bytes": written[tier] * block_bytes,
        }
    return {**row, "token_hit_rate": rate, "prefill_seconds_saved": saved}


def _scores(scorer: Scorer, hits: NDArray[np.int64]) -> tuple[float, float]:
    sums = scorer.reduce(Outcome(hits, 0, 0))
    return float(sums.hit_tokens.sum() / scorer.prompt_tokens.sum()), float(sums.saved_s.sum())


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    head = (
        f"host {result['host_blocks']:,} blocks, disk {result['disk_blocks']:,}; token hit rates in %, "
        f"of {100 * result['endless_token_hit_rate']:.1f} in an unlimited cache"
    )
    rows = [
        ("policy", "device blocks", "device", "host", "disk", "all", "saved s", "to host GB", "to disk GB")
    ]
    for row in result["results"]:
        rates = (*(row[tier]["token_hit_rate"] for tier in TIERS), row["token_hit_rate"])
        written = (f"{row[tier]['written_bytes'] / 1e9:,.0f}" for tier in ("host", "disk"))
        cells = (f"{100 * rate:.2f}" for rate in rates)
        saved = f"{row['prefill_seconds_saved']:,.0f}"
        rows.append((row["policy"], f"{row['capacity']:,}", *cells, saved, *written))
    return f"{head}\n\n{columns(rows)}"
