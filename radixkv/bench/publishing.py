"""The cost for one replica of publishing to the other replicas.

    publishing      records of 64 new segments (16,384 tokens) go through the journal, the digests and the mirror
                    into the log of a real Redis: digests per second, from the first record until Redis has the last
    calling thread  the same requests with and without a journal, in turn: CPU of the thread that calls the cache
    process         CPU of the whole process, publisher included, divided by that of the process without one

Each pair of runs is one sample, and the result is the median of ratios and differences. A slow phase of the machine
affects both runs of a pair. Redis is another process, so its CPU time is excluded.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.config import CacheConfig, Namespace
from radixkv.coordination import Coordinator, connect
from radixkv.coordination.keys import SEGMENT_TOKENS
from radixkv.coordination.store.wire import DIGESTS_AN_ENTRY
from radixkv.index.cache import PrefixCache
from radixkv.simulator.workloads import Request, build

_SECRET = b"a secret of this benchmark alone"
_FINGERPRINT = "fp:benchmark"


class Spent(NamedTuple):
    """CPU seconds of the calling thread and of the whole process."""

    thread_s: float
    process_s: float


def run(
    url: str,
    *,
    num_digests: int = 1_000_000,
    workload: str = "chat",
    limit: int | None = 8_000,
    num_blocks: int = 100_000,
    pairs: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure against the Redis at ``url``. Returns ``{"figures": [{"name", "value", "unit", "reach"}], …}``.

    Publishes ``num_digests`` digests. ``limit`` requests of ``workload`` run ``pairs`` times with and without a
    journal.
    """
    rate = publishing_rate(url, num_digests, seed)
    requests = list(build(workload, seed, None, limit).requests())
    samples = [_pair(url, requests, num_blocks, first=index % 2) for index in range(pairs)]
    thread_us = statistics.median((on.thread_s - off.thread_s) * 1e6 / len(requests) for on, off in samples)
    process = statistics.median(on.process_s / off.process_s for on, off in samples)
    return {
        "benchmark": "publishing",
        "workload": workload,
        "requests": len(requests),
        "seed": seed,
        "figures": [
            {"name": "publishing", "value": rate, "unit": "digests/s", "reach": ">= 1000000"},
            {"name": "calling thread", "value": thread_us, "unit": "us/request", "reach": "<= 2"},
            {"name": "process CPU", "value": process, "unit": "x without coordination", "reach": "<= 1.5"},
        ],
    }


def publishing_rate(url: str, num_digests: int, seed: int = 0) -> float:
    """Digests per second from the journal into Redis."""
    entry_tokens = DIGESTS_AN_ENTRY * SEGMENT_TOKENS
    ids = np.random.default_rng(seed).integers(0, 2**31, entry_tokens, dtype=np.uint32)
    namespace = Namespace("bench", _FINGERPRINT)
    num_records, spent_s = num_digests // DIGESTS_AN_ENTRY, 0.0
    coordinator = _coordinator(url, background=False)
    try:
        coordinator.register()
        journal = coordinator.journal
        assert journal is not None
        for first in range(0, num_records, _RECORDS_A_FLUSH):
            keys = list(_keys(ids, first, min(_RECORDS_A_FLUSH, num_records - first)))
            start = time.perf_counter()
            for key in keys:
                journal.stored(namespace, key, 0, entry_tokens)
            coordinator.publish()
            spent_s += time.perf_counter() - start
    finally:
        coordinator.close()
    return num_records * DIGESTS_AN_ENTRY / spent_s


def _keys(ids: NDArray[np.uint32], first: int, count: int) -> Iterator[bytes]:
    """Prompts that differ from their first token on, so they share no segment."""
    for number in range(first, first + count):
        ids[0] = number
        yield ids.tobytes()


_RECORDS_A_FLUSH = 256
"""About 10 ms of records of a replica that stores as fast as it can."""


def _coordinator(url: str, *, background: bool) -> Coordinator:
    return connect(
        url,
        replica_id="publishing-benchmark",
        fleet_secret=_SECRET,
        fingerprint=_FINGERPRINT,
        block_size=16,
        lease_s=60.0,
        background=background,
    )


def _pair(url: str, requests: list[Request], num_blocks: int, first: int) -> tuple[Spent, Spent]:
    """Run with and without coordination. ``first`` = 1 runs with coordination first."""
    spent: dict[bool, Spent] = {}
    for coordinated in (bool(first), not first):
        spent[coordinated] = _drive(url, requests, num_blocks, coordinated=coordinated)
    return spent[True], spent[False]


def _drive(url: str, requests: list[Request], num_blocks: int, *, coordinated: bool) -> Spent:
    config = CacheConfig(num_blocks=num_blocks, block_size=16)
    if not coordinated:
        return _requests(PrefixCache(config), requests)
    coordinator = _coordinator(url, background=True)
    try:
        coordinator.register()
        cache = PrefixCache(config, journal=coordinator.journal)
        coordinator.attach(cache)
        return _requests(cache, requests, coordinator)
    finally:
        coordinator.close()


def _requests(cache: PrefixCache, requests: list[Request], coordinator: Coordinator | None = None) -> Spent:
    """Open, commit, extend by the answer, commit and release each request. Then wait until everything is published."""
    spent, names = 0, dict[str, Namespace]()
    clock = time.thread_time_ns
    process = time.process_time_ns()
    for tenant, prompt_ids, full_ids in requests:
        prompt, answer = array("q", prompt_ids.tobytes()), array("q", full_ids[len(prompt_ids) :].tobytes())
        namespace = names.setdefault(tenant, Namespace(tenant, _FINGERPRINT))
        start = clock()
        sequence = cache.open(namespace, prompt)
        sequence.commit(len(prompt))
        sequence.extend(answer)
        sequence.commit(sequence.num_tokens)
        sequence.release()
        spent += clock() - start
    if coordinator is not None:
        coordinator.publish()
    return Spent(spent / 1e9, (time.process_time_ns() - process) / 1e9)


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    lines = [f"{'figure':<16}{'value':>14}  {'unit':<24}{'reach':>12}"]
    for figure in result["figures"]:
        lines.append(
            f"{figure['name']:<16}{figure['value']:>14,.2f}  {figure['unit']:<24}{figure['reach']:>12}"
        )
    return "\n".join(lines)
