"""The trace simulator with tiers: what the device, the host and the disk each save, by policy and capacity."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.config import policy_names
from radixkv.errors import ConfigError
from radixkv.simulator.profiles import ModelProfile, profile_of
from radixkv.simulator.score import Scorer
from radixkv.simulator.simulate import chosen
from radixkv.simulator.tiers import Restart, TieredOutcome, replay_tiers
from radixkv.simulator.trace import Outcome, Trace, read
from radixkv.tables import columns

TIERS = ("device", "host", "disk")
MOST_BLOCKS = 10_000_000
"""The largest tier. Its table takes about 300 bytes a block."""
AFTER_S = 600.0
"""The time after a restart whose hits say what it costs."""


def run(
    traces: Sequence[Path],
    *,
    capacities: Sequence[int],
    host_blocks: int,
    disk_blocks: int,
    disk_writes: float | None = None,
    restart_s: float | None = None,
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
    saves, and the bytes written to it in the whole run. With ``restart_s`` they also have the token hit rate of the ten
    minutes from then on: undisturbed, and with a restart at that time after a drain or a crash. ``progress`` gets the
    number of finished runs and of all.

    Raises ConfigError for invalid settings or traces.
    """
    began = time.perf_counter()
    _require(capacities, host_blocks, disk_blocks, disk_writes, restart_s)
    sizes = host_blocks, disk_blocks, seed
    writes_per_s = None if disk_writes is None else disk_writes / 3_600
    named = chosen(policies, policy_names())
    trace = read(traces, block_tokens=block_tokens, keep_tails=keep_tails, tenants=tenants)
    scorer = Scorer(trace, profile or profile_of("llama-3-8b"), score_from_s)
    after = None if restart_s is None else _After(trace, restart_s)
    tasks = [(policy, capacity) for policy in named for capacity in dict.fromkeys(capacities)]
    rows = []
    for done, (policy, capacity) in enumerate(tasks, 1):
        replayed = partial(replay_tiers, trace, policy, capacity, *sizes, disk_writes=writes_per_s)
        found = replayed()
        row = {"policy": policy, "capacity": capacity, **row_of(trace, scorer, found)}
        rows.append(row if after is None else {**row, "restart": after.rates(found, replayed)})
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
        "restart_s": restart_s,
        **scorer.describe(),
        "results": rows,
        "seconds": time.perf_counter() - began,
    }


def _require(
    capacities: Sequence[int],
    host_blocks: int,
    disk_blocks: int,
    disk_writes: float | None,
    restart_s: float | None,
) -> None:
    for option, size in (("--host", host_blocks), ("--disk", disk_blocks)):
        if not 0 <= size <= MOST_BLOCKS:
            raise ConfigError(option, size, f"0 to {MOST_BLOCKS:,} blocks")
    for capacity in capacities:
        if not 1 <= capacity < 2**31 - 1:
            raise ConfigError("--capacity", capacity, f"from 1 to {2**31 - 2} blocks")
    if disk_writes is not None and not (disk_blocks and 1 <= disk_writes <= 1e12):
        raise ConfigError("--disk-writes", disk_writes, "at least 1 block an hour, with --disk")
    if restart_s is not None and not disk_blocks:
        raise ConfigError("--restart", restart_s, "with --disk")


class _After:
    """Scores the requests in the ``AFTER_S`` from a restart on. Raises ConfigError if there are none."""

    def __init__(self, trace: Trace, restart_s: float) -> None:
        self._trace, self._restart_s = trace, restart_s
        self._scored = (trace.times >= restart_s) & (trace.times < restart_s + AFTER_S)
        if not trace.prompt_tokens[self._scored].any():
            allowed = f"seconds with requests in the {AFTER_S:g} after; the trace has {trace.seconds:g}"
            raise ConfigError("--restart", restart_s, allowed)

    def rates(self, undisturbed: TieredOutcome, replayed: Callable[..., TieredOutcome]) -> dict[str, float]:
        """Return the token hit rates. Replays twice."""
        drained, crashed = (replayed(restart=Restart(self._restart_s, drains)) for drains in (True, False))
        return {
            "undisturbed": self._rate(undisturbed),
            "after_drain": self._rate(drained),
            "after_crash": self._rate(crashed),
        }

    def _rate(self, found: TieredOutcome) -> float:
        hits = found.device_hits + found.host_hits + found.disk_hits
        asked = self._trace.prompt_tokens[self._scored]
        return float(np.minimum(hits[self._scored] * self._trace.block_tokens, asked).sum() / asked.sum())


def row_of(trace: Trace, scorer: Scorer, found: TieredOutcome) -> dict[str, Any]:
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
    text = f"{head}\n\n{columns(rows)}"
    return text if result["restart_s"] is None else f"{text}\n\n{_restart_table(result)}"


def _restart_table(result: dict[str, Any]) -> str:
    head = (
        f"the {AFTER_S / 60:g} minutes from a restart at {result['restart_s'] / 60:g} minutes on: "
        "token hit rates in %, and as a share of the undisturbed"
    )
    rows = [("policy", "device blocks", "undisturbed", "after a drain", "share", "after a crash", "share")]
    for row in result["results"]:
        whole, *others = row["restart"].values()
        cells = [cell for rate in others for cell in (f"{100 * rate:.2f}", _share(rate, whole))]
        rows.append((row["policy"], f"{row['capacity']:,}", f"{100 * whole:.2f}", *cells))
    return f"{head}\n\n{columns(rows)}"


def _share(rate: float, whole: float) -> str:
    return f"{100 * rate / whole:.1f}" if whole else "–"
