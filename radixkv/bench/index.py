"""What the index costs a request, beside floors that do less.

Each request is opened, committed, extended by its answer, committed and released, one in flight, ids given as an int64
buffer; only these calls are timed, by the process's CPU clock, and generating ids is not. The floors run over
the same requests in the same process:

    memcmp    compares the prompt's bytes with an equal copy, after the same conversation from int64: the least
              that a cache which compares ids can do
    xxh3, sha256   one chained digest a block and a dict lookup each: how a hashed block table finds a prefix

Checks, in every run: the hit tokens never exceed those of a plain set of prefixes that forgets nothing, and equal
them if nothing was evicted; the audit holds at the end. Memory is the growth of the resident set, the empty
pool included, after a collection and a trim of the allocator.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from radixkv import audit
from radixkv.bench.workloads import Request, build
from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig
from radixkv.errors import IntegrityError
from radixkv.namespaces import Namespace
from radixkv.tokens import encode

Progress = Callable[[int], None]
Workload = Callable[[], Iterator[Request]]


def run(
    workload: str = "chat",
    *,
    trace: Path | None = None,
    limit: int | None = None,
    num_blocks: int = 200_000,
    block_size: int = 16,
    policy: str = "lru",
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run radixkv and the floors over one workload; a dict that is JSON. Raises IntegrityError if a check fails."""
    requests = build(workload, seed, trace, limit)
    config = CacheConfig(num_blocks=num_blocks, block_size=block_size, policy=policy)
    ours = _run_index(requests, config, progress)
    floors = {name: _run_floor(requests, floor, block_size) for name, floor in _floors().items()}
    expected = _expected_hits(requests, block_size)
    if ours["hit_tokens"] > expected or (not ours["evicted_blocks"] and ours["hit_tokens"] != expected):
        raise IntegrityError(
            f"{ours['hit_tokens']} hit tokens, a set of prefixes that forgets nothing has {expected}"
        )
    return {
        "benchmark": "index",
        "workload": workload,
        "trace": str(trace) if trace else None,
        "seed": seed,
        "machine": _machine(),
        "num_blocks": num_blocks,
        "block_size": block_size,
        "policy": policy,
        "radixkv": ours,
        "floors": floors,
        "hit_tokens_if_nothing_were_forgotten": expected,
    }


def _machine() -> str:
    python, cpus = platform.python_version(), os.cpu_count()
    return f"{platform.machine()}, {cpus} CPUs, Python {python}, NumPy {np.__version__}"


def _run_index(requests: Workload, config: CacheConfig, progress: Progress | None) -> dict[str, Any]:
    _drive(PrefixCache(CacheConfig(num_blocks=64)), iter(()), None)
    before = _resident_bytes()
    cache = PrefixCache(config)
    timings, tokens = _drive(cache, requests(), progress)
    grown = _resident_bytes() - before
    audit.check(cache)
    stats = cache.stats()
    total_s = sum(sum(values) for values in timings.values()) / 1e9
    return {
        "requests": stats.requests,
        "requests_per_s": stats.requests / total_s,
        "tokens_per_s": tokens / total_s,
        "hit_rate": stats.hit_tokens / max(stats.hit_tokens + stats.missed_tokens, 1),
        "hit_tokens": stats.hit_tokens,
        "evicted_blocks": stats.evicted_blocks,
        "resident_blocks": stats.resident_blocks,
        "nodes": stats.num_nodes,
        "bytes_per_block": grown / max(stats.resident_blocks, 1),
        "operations": {name: _summary(values) for name, values in timings.items()},
    }


def _drive(
    cache: PrefixCache, requests: Iterator[Request], progress: Progress | None
) -> tuple[dict[str, list[int]], int]:
    """Run requests one after the other; nanoseconds of each operation, and the prompts' tokens."""
    clock = time.process_time_ns
    timings: dict[str, list[int]] = {"open": [], "commit": [], "release": []}
    namespaces: dict[str, Namespace] = {}
    tokens = 0
    for number, (tenant, prompt_ids, full_ids) in enumerate(requests):
        prompt, answer = array("q", prompt_ids.tobytes()), array("q", full_ids[len(prompt_ids) :].tobytes())
        namespace = namespaces.setdefault(tenant, Namespace(tenant, "bench"))
        start = clock()
        sequence = cache.open(namespace, prompt)
        opened = clock()
        sequence.commit(len(prompt))
        sequence.extend(answer)
        sequence.commit(sequence.num_tokens)
        committed = clock()
        sequence.release()
        released = clock()
        timings["open"].append(opened - start)
        timings["commit"].append(committed - opened)
        timings["release"].append(released - committed)
        tokens += len(prompt)
        if progress is not None and number % 64 == 0:
            progress(number)
    return timings, tokens


def _floors() -> dict[str, Callable[[array[int], bytes, set[bytes], int], None]]:
    def memcmp(prompt: array[int], copy: bytes, seen: set[bytes], step: int) -> None:
        encode(prompt).startswith(copy)

    def chained(digest: Callable[[bytes], bytes]) -> Callable[[array[int], bytes, set[bytes], int], None]:
        def floor(prompt: array[int], copy: bytes, seen: set[bytes], step: int) -> None:
            key, chain = encode(prompt), b""
            for at in range(0, len(key) - step + 1, step):
                chain = digest(chain + key[at : at + step])
                if chain not in seen:
                    seen.add(chain)

        return floor

    return {
        "memcmp": memcmp,
        "xxh3": chained(xxhash.xxh3_128_digest),
        "sha256": chained(lambda data: hashlib.sha256(data).digest()),
    }


def _run_floor(
    requests: Workload, floor: Callable[[array[int], bytes, set[bytes], int], None], block_size: int
) -> dict[str, Any]:
    seen: set[bytes] = set()
    timings: list[int] = []
    for request in requests():
        prompt, copy = array("q", request.prompt.tobytes()), encode(request.prompt)
        start = time.process_time_ns()
        floor(prompt, copy, seen, block_size * 4)
        timings.append(time.process_time_ns() - start)
    return {"requests_per_s": len(timings) / (sum(timings) / 1e9), **_summary(timings)}


def _expected_hits(requests: Workload, block_size: int) -> int:
    """Hit tokens of a set of (tenant, prefix) that forgets nothing."""
    step, seen, hits = block_size * 4, set[tuple[str, bytes]](), 0
    for tenant, prompt, full in requests():
        chains = list(_chains(encode(full), step))
        usable = max(len(prompt) - 1, 0) // block_size
        for chain in chains[:usable]:
            if (tenant, chain) not in seen:
                break
            hits += block_size
        seen.update((tenant, chain) for chain in chains)
    return hits


def _chains(key: bytes, step: int) -> Iterator[bytes]:
    chain = b""
    for at in range(0, len(key) - step + 1, step):
        chain = hashlib.blake2b(chain + key[at : at + step], digest_size=16).digest()
        yield chain


def _summary(nanoseconds: list[int]) -> dict[str, float]:
    microseconds = np.asarray(nanoseconds, dtype=np.float64) / 1e3
    return {
        "p50_us": float(np.percentile(microseconds, 50)),
        "p99_us": float(np.percentile(microseconds, 99)),
        "mean_us": float(microseconds.mean()),
    }


def _resident_bytes() -> int:
    gc.collect()
    if platform.system() == "Linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def table(result: dict[str, Any]) -> str:
    """A result as text."""
    ours, rows = result["radixkv"], []
    for name, operation in ours["operations"].items():
        rows.append((name, f"{operation['p50_us']:,.1f}", f"{operation['p99_us']:,.1f}"))
    lines = [
        f"{result['workload']}: {ours['requests']:,} requests, {result['num_blocks']:,} blocks of "
        f"{result['block_size']}, {result['policy']}, seed {result['seed']}",
        result["machine"],
        "",
        f"{'operation':<12}{'p50 µs':>10}{'p99 µs':>10}",
        *(f"{name:<12}{p50:>10}{p99:>10}" for name, p50, p99 in rows),
        "",
        f"{'':<12}{'requests/s':>12}{'radixkv is':>14}",
        f"{'radixkv':<12}{ours['requests_per_s']:>12,.0f}",
    ]
    for name, floor in result["floors"].items():
        ratio = ours["requests_per_s"] / floor["requests_per_s"]
        lines.append(f"{name:<12}{floor['requests_per_s']:>12,.0f}{ratio:>13.2f}×")
    lines += [
        "",
        f"hit rate {ours['hit_rate']:.2%}, {ours['tokens_per_s']:,.0f} prompt tokens/s, "
        f"{ours['bytes_per_block']:.0f} bytes a block, {ours['nodes']:,} nodes, audit clean",
    ]
    return "\n".join(lines)
