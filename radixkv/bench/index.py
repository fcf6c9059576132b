"""The CPU time of the index per request, beside floors that do less.

``drive`` runs the workload through a cache. The floors run over the same requests in the same process:

    memcmp    converts the prompt from int64 too, and compares it with an equal copy: the least work of any cache
              that compares ids
    xxh3, sha256   one chained digest a block and a dict lookup each, as hashed block tables find a prefix

Every run checks each request against a plain dict of prefixes that never evicts. The hit tokens never exceed the
dict's. They equal the dict's as long as everything requested so far fits into the pool. The audit at the end must
find no violated invariant. Memory is the growth of the resident set, including the empty pool, after a garbage
collection and a trim of the allocator.

``figures.run`` measures what a workload doesn't show, if requested.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from radixkv import audit
from radixkv.bench import figures as micro
from radixkv.bench.drive import (
    OPERATIONS,
    Progress,
    Samples,
    blank,
    by_power_of_two,
    drive,
    warm_up,
    worst_spread,
)
from radixkv.bench.measure import (
    Figure,
    cpu_ns,
    figures_table,
    frozen_heap,
    heading,
    resident_bytes,
    summary,
    surroundings,
)
from radixkv.config import CacheConfig
from radixkv.errors import IntegrityError
from radixkv.index.cache import PrefixCache
from radixkv.index.tokens import TOKEN_BYTES, encode
from radixkv.simulator.workloads import Request, Workload, build
from radixkv.tables import columns

Floor: TypeAlias = "Callable[[array[int], bytes, int], None]"

_MEMORY_REACH = {"trace": (90.0, 75.0), "chat": (130.0, 100.0)}
"""Bytes per block, of index and pool together: target and stretch target."""


def run(
    workload: str = "chat",
    *,
    trace: Path | None = None,
    limit: int | None = None,
    num_blocks: int = 200_000,
    block_size: int = 16,
    policy: str = "lru",
    seed: int = 0,
    figures: micro.Sizes | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run radixkv and the floors over one workload.

    Returns a dict that JSON can encode. Raises IntegrityError if a check fails.
    """
    requests = build(workload, seed, trace, limit)
    config = CacheConfig(num_blocks=num_blocks, block_size=block_size, policy=policy)
    ours, samples = _run_index(requests, config, progress)
    floors, expected = _run_floors(requests, config, samples)
    measured = micro.run(figures, seed=seed, policy=policy) if figures else {"figures": []}
    measured["figures"] = [*(figure.as_dict() for figure in _figures(workload, ours)), *measured["figures"]]
    return {
        "benchmark": "index",
        "workload": workload,
        "trace": str(trace) if trace else None,
        "seed": seed,
        **surroundings(),
        "num_blocks": num_blocks,
        "block_size": block_size,
        "policy": policy,
        "radixkv": ours,
        "floors": floors,
        "hit_tokens_if_nothing_were_forgotten": expected,
        **measured,
    }


def _run_index(
    workload: Workload, config: CacheConfig, progress: Progress | None
) -> tuple[dict[str, Any], Samples]:
    warm_up(workload, config)
    rows = blank(workload)
    before = resident_bytes()
    cache = PrefixCache(config)
    with frozen_heap():
        samples = drive(cache, workload, progress, rows)
        grown = resident_bytes() - before
    audit.check(cache)
    return _result(cache, samples, grown), samples


def _result(cache: PrefixCache, samples: Samples, grown: int) -> dict[str, Any]:
    stats = cache.stats()
    total_s = samples.cpu_s
    powers = by_power_of_two(samples)
    return {
        "requests": stats.requests,
        "cpu_s": total_s,
        "other_threads_cpu_s": samples.other_threads_ns / 1e9,
        "requests_per_s": stats.requests / total_s,
        "operations_per_s": stats.requests * len(OPERATIONS) / total_s,
        "tokens_per_s": int(samples.prompt_tokens.sum()) / total_s,
        "tokens_matched_per_s": stats.hit_tokens / total_s,
        "hit_rate": stats.hit_tokens / max(stats.hit_tokens + stats.missed_tokens, 1),
        "hit_tokens": stats.hit_tokens,
        "evicted_blocks": stats.evicted_blocks,
        "resident_blocks": stats.resident_blocks,
        "nodes": stats.num_nodes,
        "bytes_per_block": grown / max(stats.resident_blocks, 1),
        "operations": {
            name: summary(column) for name, column in zip(OPERATIONS, samples.nanoseconds.T, strict=True)
        },
        "by_prompt_tokens": powers,
        "p99_over_p50": worst_spread(powers),
        "audit": "clean",
    }


def _figures(workload: str, ours: dict[str, Any]) -> list[Figure]:
    reach, stretch = _MEMORY_REACH.get(workload, (None, None))
    spread = [
        Figure(f"{workload}: p99 ÷ p50 of {name}, prompts of one power of two", ratio, "×", None, 10, 5)
        for name, ratio in ours["p99_over_p50"].items()
    ]
    memory = Figure(
        f"{workload}: resident memory a block", ours["bytes_per_block"], "bytes", None, reach, stretch
    )
    return [*spread, memory]


# --- floors and the model


def _memcmp(prompt: array[int], copy: bytes, step: int) -> None:
    encode(prompt).startswith(copy)


def _chained(digest: Callable[[bytes], bytes]) -> Floor:
    found: dict[bytes, int] = {}

    def floor(prompt: array[int], copy: bytes, step: int) -> None:
        key, chain = encode(prompt), b""
        for at in range(0, len(key) - step + 1, step):
            chain = digest(chain + key[at : at + step])
            if chain not in found:
                found[chain] = at

    return floor


def _floors() -> dict[str, Floor]:
    return {
        "memcmp": _memcmp,
        "xxh3": _chained(xxhash.xxh3_128_digest),
        "sha256": _chained(lambda data: hashlib.sha256(data).digest()),
    }


def _run_floors(
    workload: Workload, config: CacheConfig, samples: Samples
) -> tuple[dict[str, dict[str, float]], int]:
    """Time the floors and check the hit tokens of ``samples``. Returns the floors, and the hit tokens of the model."""
    floors, model, expected = _floors(), _Model(config), 0
    times = np.zeros((len(floors), len(samples.prompt_tokens)), dtype=np.int64)
    for at, request in enumerate(workload.requests()):
        prompt, copy = array("q", request.prompt.tobytes()), encode(request.prompt)
        for row, floor in enumerate(floors.values()):
            times[row, at] = cpu_ns(partial(floor, prompt, copy, config.block_size * TOKEN_BYTES))
        expected += model.check(at, request, int(samples.hit_tokens[at]))
    return {
        name: {"requests_per_s": len(row) / (int(row.sum()) / 1e9), **summary(row)}
        for name, row in zip(floors, times, strict=True)
    }, expected


class _Model:
    """A plain dict of (tenant, chained digest of a block) that never evicts."""

    def __init__(self, config: CacheConfig) -> None:
        self._block_size, self._num_blocks = config.block_size, config.num_blocks
        self._blocks: dict[tuple[str, bytes], int] = {}
        self._all_fits = True

    def check(self, number: int, request: Request, hit_tokens: int) -> int:
        """Check a request's hit tokens, publish the request in the model, and return the model's hit tokens."""
        step = self._block_size
        chains = [(request.tenant, chain) for chain in _chains(encode(request.full), step * TOKEN_BYTES)]
        usable = max(len(request.prompt) - 1, 0) // step
        expected = step * next(
            (at for at, chain in enumerate(chains[:usable]) if chain not in self._blocks), usable
        )
        needed = -(-len(request.full) // step)
        self._all_fits = self._all_fits and len(self._blocks) + needed <= self._num_blocks
        if hit_tokens > expected or (self._all_fits and hit_tokens != expected):
            raise IntegrityError(
                f"request {number}: {hit_tokens} hit tokens, a dict that forgets nothing has {expected}"
                + (", and everything fits" if self._all_fits else "")
            )
        self._blocks.update(dict.fromkeys(chains, number))
        return expected


def _chains(key: bytes, step: int) -> Iterator[bytes]:
    chain = b""
    for at in range(0, len(key) - step + 1, step):
        chain = hashlib.blake2b(chain + key[at : at + step], digest_size=16).digest()
        yield chain


# --- text


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    ours = result["radixkv"]
    head = (
        f"{result['workload']}: {ours['requests']:,} requests, {result['num_blocks']:,} blocks of "
        f"{result['block_size']}, {result['policy']}"
    )
    return "\n\n".join(
        [
            f"{head}\n{heading(result)}",
            _operations_table(ours),
            _throughput_table(result),
            f"hit rate {ours['hit_rate']:.2%}, {ours['tokens_matched_per_s']:,.0f} tokens matched/s, "
            f"{ours['bytes_per_block']:.0f} bytes a block, {ours['nodes']:,} nodes\n"
            "hit tokens agree with the dict model, audit clean",
            figures_table(result["figures"]),
            *_more_tables(result),
        ]
    )


def _more_tables(result: dict[str, Any]) -> Iterator[str]:
    for _, scaling in groupby(result.get("scaling", ()), itemgetter("size")):
        yield micro.scaling_table(list(scaling))
    if "shapes" in result:
        yield micro.shapes_table(result["shapes"])


def _operations_table(ours: dict[str, Any]) -> str:
    rows = [("operation", "p50 µs", "p99 µs", "p99 ÷ p50 within a power of two")]
    for name, found in ours["operations"].items():
        spread = ours["p99_over_p50"].get(name)
        worst = "–" if spread is None else f"{spread:.1f}"
        rows.append((name, f"{found['p50_us']:,.1f}", f"{found['p99_us']:,.1f}", worst))
    return columns(rows)


def _throughput_table(result: dict[str, Any]) -> str:
    ours = result["radixkv"]
    rows = [("", "requests/s", "operations/s", "p50 µs", "p99 µs", "radixkv is")]
    rows.append(("radixkv", f"{ours['requests_per_s']:,.0f}", f"{ours['operations_per_s']:,.0f}", "", "", ""))
    for name, floor in result["floors"].items():
        ratio = ours["requests_per_s"] / floor["requests_per_s"]
        times = (f"{floor['p50_us']:,.1f}", f"{floor['p99_us']:,.1f}")
        rows.append((name, f"{floor['requests_per_s']:,.0f}", "", *times, f"{ratio:.2f}×"))
    return columns(rows)
