"""The simulator of serving, ``radixkv simulate --serve``: schedulers and policies over sessions of agents.

Every (scheduler, policy, capacity) is one run of ``serving``, about a second for three hours of 32 sessions.
FCFS with LRU always runs: rows name their requests an hour as a multiple of its.
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from radixkv.config import policy_names
from radixkv.errors import ConfigError
from radixkv.simulator.packed_sessions import BLOCK_TOKENS, Session, read_sessions
from radixkv.simulator.serving import (
    CLAIRVOYANT,
    SCHEDULERS,
    WITH_QUEUE,
    Result,
    Served,
    Serving,
    Settings,
)
from radixkv.simulator.simulate import chosen
from radixkv.tables import columns

BASELINE: Final = "fcfs", "lru"
POLICIES: Final = "lru", "lru+queue", "learned+queue", CLAIRVOYANT
"""The policies that run if none is named."""
MAX_RUNS: Final = 1_000
MAX_CAPACITY: Final = 2**31 - 2


def known_policies() -> tuple[str, ...]:
    """The names that ``policies`` accepts, besides ``all``."""
    names = policy_names()
    return (*names, *(name + WITH_QUEUE for name in names), CLAIRVOYANT)


def run(
    paths: Sequence[Path],
    *,
    capacities: Sequence[int],
    settings: Settings | None = None,
    schedulers: Sequence[str] = SCHEDULERS,
    policies: Sequence[str] = POLICIES,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Simulate serving the sessions of these files. Returns a dict that JSON can encode.

    ``capacities``: blocks of 512 tokens of each replica. ``results`` has a row for each scheduler, policy and capacity,
    over the requests whose answer completed after the warm-up:

    - ``requests_per_hour``, ``against_baseline``: as a multiple of FCFS with LRU; ``token_hit_rate``, of all tiers.
    - ``ttft_p50_s``, ``ttft_p95_s``: from a request's arrival to its first token. ``itl_p50_s``, ``itl_p95_s``: mean
      seconds between the tokens of an answer. ``latency_p50_s``, ``latency_p95_s``: from arrival to the end.
    - ``slowdown_p50``, ``slowdown_p95``: over sessions, their requests' latencies ÷ those without waiting and with all
      cached that the session had before. ``longest_wait_s``: from arrival to start, of any request, also one that
      still waits at the end.
    - ``recomputed_tokens``: of a request on average: computed once and lost. ``refused_requests``: larger than a cache.

    Raises ConfigError for invalid settings and files.
    """
    began = time.perf_counter()
    given = settings or Settings()
    names = chosen(policies, known_policies())
    cells = _cells(schedulers, names, capacities)
    pool = read_sessions(paths)
    found = {}
    for done, cell in enumerate(cells, 1):
        found[cell] = _row(cell, Serving(pool, given, *cell).run(), given)
        if progress is not None:
            progress(done, len(cells))
    rows = []
    for cell, row in found.items():
        least = found[*BASELINE, cell[2]]["requests_per_hour"]
        rows.append(row | {"against_baseline": row["requests_per_hour"] / least if least else None})
    result = {
        "benchmark": "simulate --serve",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "sessions_of": [str(path) for path in paths],
        **asdict(given),
        **_describe(pool),
        "results": rows,
    }
    return result | {"seconds": time.perf_counter() - began}


def _cells(
    schedulers: Sequence[str], policies: Sequence[str], capacities: Sequence[int]
) -> list[tuple[str, str, int]]:
    for scheduler in schedulers:
        if scheduler not in SCHEDULERS:
            raise ConfigError("--scheduler", scheduler, f"some of {', '.join(SCHEDULERS)}")
    for capacity in capacities:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ConfigError("--capacity", capacity, f"from 1 to {MAX_CAPACITY} blocks")
    if not capacities:
        raise ConfigError("--capacity", None, "at least one number of blocks")
    pairs = dict.fromkeys([BASELINE, *((each, policy) for each in schedulers for policy in policies)])
    cells = [(*pair, capacity) for capacity in sorted(set(capacities)) for pair in pairs]
    if len(cells) > MAX_RUNS:
        raise ConfigError("--capacity", f"{len(cells)} runs", f"at most {MAX_RUNS} runs")
    return cells


def _describe(pool: Sequence[Session]) -> dict[str, Any]:
    turns = [turn for session in pool for turn in session.turns]
    return {
        "file_sessions": len(pool),
        "file_requests": len(turns),
        "block_tokens": BLOCK_TOKENS,
        "mean_prompt_blocks": float(np.mean([len(turn.blocks) for turn in turns])),
        "tenants": sorted({session.tenant for session in pool}),
    }


def _row(cell: tuple[str, str, int], result: Result, settings: Settings) -> dict[str, Any]:
    scheduler, policy, capacity = cell
    served = result.served
    firsts = [each.first_token - each.arrived for each in served]
    latencies = [each.ended - each.arrived for each in served]
    gaps = [(each.ended - each.first_token) / each.output_tokens for each in served]
    prompt = sum(each.prompt_tokens for each in served)
    waits = [each.started - each.arrived for each in served] + result.still_waiting
    return {
        "scheduler": scheduler,
        "policy": policy,
        "capacity": capacity,
        "requests": len(served),
        "requests_per_hour": len(served) * 3_600.0 / settings.measure_s,
        "token_hit_rate": sum(each.cached_tokens for each in served) / prompt if prompt else 0.0,
        **_percentiles("ttft", "_s", firsts),
        **_percentiles("itl", "_s", gaps),
        **_percentiles("latency", "_s", latencies),
        **_percentiles("slowdown", "", _slowdowns(served)),
        "longest_wait_s": max(waits, default=0.0),
        "recomputed_tokens": sum(each.recomputed for each in served) / len(served) if served else 0.0,
        "refused_requests": result.refused,
        "sessions_ended": result.sessions_ended,
    }


def _slowdowns(served: Sequence[Served]) -> list[float]:
    """Of each session: seconds of its requests, divided by those without waiting."""
    took, ideal = defaultdict[int, float](float), defaultdict[int, float](float)
    for each in served:
        took[each.session] += each.ended - each.arrived
        ideal[each.session] += each.ideal_s
    return [took[session] / ideal[session] for session in took]


def _percentiles(name: str, unit: str, values: Sequence[float]) -> dict[str, float | None]:
    found = np.percentile(values, [50, 95]).tolist() if values else [None, None]
    return {f"{name}_p50{unit}": found[0], f"{name}_p95{unit}": found[1]}


# text -----------------------------------------------------------------------------------------------------------------

HEAD: Final = (
    "blocks", "scheduler", "policy", "requests/h", "× FCFS, LRU", "hit rate, %", "TTFT p50, s", "p95", "ITL p50, ms",
    "p95", "slowdown p50", "p95", "longest wait, s", "recomputed a request",
)  # fmt: skip


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Format a row for a table with this head."""
    return (
        f"{row['capacity']:,}",
        row["scheduler"],
        row["policy"],
        f"{row['requests_per_hour']:,.0f}",
        _number(row["against_baseline"], 2),
        f"{100 * row['token_hit_rate']:.1f}",
        _number(row["ttft_p50_s"], 1),
        _number(row["ttft_p95_s"], 1),
        _number(row["itl_p50_s"], 1, 1e3),
        _number(row["itl_p95_s"], 1, 1e3),
        _number(row["slowdown_p50"], 2),
        _number(row["slowdown_p95"], 2),
        f"{row['longest_wait_s']:,.0f}",
        f"{row['recomputed_tokens']:,.0f}",
    )


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "–" if value is None else f"{factor * value:,.{digits}f}"


def heading(result: dict[str, Any]) -> str:
    """Return what was simulated, as a sentence or two."""
    load = (
        f"{result['sessions']} sessions at a time"
        if result["rate"] is None
        else f"{result['rate']:g} sessions begin an hour"
    )
    speed = (
        f"{result['prefill']:,.0f} tokens/s"
        if result["profile"] is None
        else f"{result['profile']['name']} at {result['profile']['tflops']:g} TFLOP/s"
    )
    host = f", {result['host_blocks']:,} on the host" if result["host_blocks"] else ""
    fleet = f", {result['replicas']} replicas routed by {result['route']}" if result["replicas"] > 1 else ""
    return (
        f"{load} of {result['file_sessions']}, {result['mean_prompt_blocks']:.0f} blocks of {BLOCK_TOKENS} tokens a "
        f"prompt{host}{fleet}. Prefill {speed}, decode {result['decode']:g} tokens/s. "
        f"{result['measure_s'] / 3600:g} h after {result['warm_up_s'] / 3600:g} h of warm-up, seed {result['seed']}."
    )


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    rows = [HEAD, *map(cells, result["results"])]
    return f"{heading(result)}\n\n{columns(rows, num_left=3)}"
