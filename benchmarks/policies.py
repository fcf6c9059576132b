"""The cost of each eviction policy per request, measured in one run as a multiple of LRU's.

Every round runs every policy over the same workload, each in a new cache. Times are CPU time of the calling thread,
from ``open`` to ``release``, including key conversion and all policy hooks. The minimum over the rounds counts,
because other load on the machine only adds time. The threads of a policy are reported as a share of a core. They
start a second after the first request, so a short workload shows nothing of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import click

from radixkv import audit
from radixkv.bench.drive import Progress, drive, warm_up
from radixkv.bench.measure import frozen_heap, heading, surroundings
from radixkv.cli.bench import workload_options
from radixkv.cli.output import counter, finish, int_option, json_option, listed, print_result
from radixkv.config import CacheConfig, policy_names
from radixkv.index.cache import PrefixCache
from radixkv.simulator.simulate import chosen
from radixkv.simulator.workloads import Workload, build
from radixkv.tables import columns

BASELINE: Final = "lru"


class Round(NamedTuple):
    """One run of a policy over the workload. ``others``: CPU time of other threads, as a share of a core."""

    cpu_us: float
    others: float
    hit_rate: float


def run(
    workload: str = "chat",
    *,
    policies: Sequence[str] = ("all",),
    rounds: int = 3,
    trace: Path | None = None,
    limit: int | None = None,
    num_blocks: int = 200_000,
    block_size: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run LRU and each policy ``rounds`` times. Returns a dict that JSON can encode.

    The dict's ``results`` has a row for each policy:

    - ``cpu_us``: CPU time of the calling thread per request, the minimum over rounds.
    - ``ratio``, ``added_us``: relative to LRU's.
    - ``other_threads``: share of a core, median.

    ``progress`` gets the number of finished requests.

    Raises ConfigError for an unknown policy, and IntegrityError if an audit at the end finds a
    violated invariant.
    """
    names = list(dict.fromkeys([BASELINE, *chosen(policies, policy_names())]))
    requests = build(workload, seed, trace, limit)
    configs = {
        name: CacheConfig(num_blocks=num_blocks, block_size=block_size, policy=name, seed=seed)
        for name in names
    }
    for config in configs.values():
        warm_up(requests, config)
    found: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds):
        for place, (name, config) in enumerate(configs.items()):
            done = (number * len(names) + place) * requests.most
            found[name].append(_round(requests, config, _from(done, progress)))
    return {
        "benchmark": "policies",
        "workload": workload,
        "trace": str(trace) if trace else None,
        "limit": limit,
        "seed": seed,
        **surroundings(),
        "num_blocks": num_blocks,
        "block_size": block_size,
        "rounds": rounds,
        "results": [_row(name, found[name], found[BASELINE]) for name in names],
    }


def _from(start: int, progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda done: progress(start + done)


def _round(workload: Workload, config: CacheConfig, progress: Progress | None) -> Round:
    cache = PrefixCache(config)
    with frozen_heap():
        began = time.perf_counter_ns()
        samples = drive(cache, workload, progress, clock=time.thread_time_ns)
        took = time.perf_counter_ns() - began
    audit.check(cache)
    stats = cache.stats()
    return Round(
        int(samples.nanoseconds.sum()) / stats.requests / 1e3,
        samples.other_threads_ns / took,
        stats.hit_tokens / max(stats.hit_tokens + stats.missed_tokens, 1),
    )


def _row(name: str, rounds: list[Round], baseline: list[Round]) -> dict[str, Any]:
    cpu_us, base_us = (min(each.cpu_us for each in found) for found in (rounds, baseline))
    return {
        "policy": name,
        "cpu_us": cpu_us,
        "ratio": cpu_us / base_us,
        "added_us": cpu_us - base_us,
        "other_threads": median(each.others for each in rounds),
        "hit_rate": median(each.hit_rate for each in rounds),
    }


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    head = (
        f"{result['workload']}: {result['num_blocks']:,} blocks of {result['block_size']}, "
        f"least of {result['rounds']} rounds\n{heading(result)}"
    )
    rows = [("policy", "CPU µs a request", "× lru", "added µs", "other threads, % of a core", "hit rate, %")]
    for row in result["results"]:
        times = (f"{row['cpu_us']:.1f}", f"{row['ratio']:.2f}", f"{row['added_us']:+.1f}")
        rows.append(
            (row["policy"], *times, f"{row['other_threads']:.1%}"[:-1], f"{row['hit_rate']:.1%}"[:-1])
        )
    return f"{head}\n\n{columns(rows)}"


# --- the command


@click.command()
@click.option("--policy", "policies", default="all", show_default=True, help="all, or names: lru,lfu.")
@int_option("--rounds", 3, "Rounds; the fastest counts.")
@workload_options
@json_option
def main(policies: str, as_json: bool, **options: Any) -> None:
    """Measure the time of each eviction policy for each request, as a multiple of LRU."""
    with counter("requests") as count:
        result = run(policies=listed(policies) or ("all",), progress=count, **options)
    print_result(result, table, as_json)


if __name__ == "__main__":
    finish(main, "python -m benchmarks.policies")
