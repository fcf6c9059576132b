"""Run requests through a cache one after the other, time each call, and summarise.

A request is opened, committed, extended by its answer, committed and released. Ids are int64 buffers, and the time
includes their conversion. It excludes generating them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.bench.measure import Nanoseconds, percentile_us, without_clock
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.index.cache import PrefixCache
from radixkv.simulator.workloads import Workload

OPERATIONS: Final = ("open", "commit", "extend", "commit_answer", "release")
"""The timed calls of a request, in order. ``commit`` commits the prompt."""

GUARANTEED_PART: Final = 128
"""Each tenant is guaranteed 1/128 of the pool: the 64 tenants of ``chat`` reserve half of it."""

MIN_REQUESTS: Final = 200
"""Fewer requests give no meaningful 99th percentile."""

Progress = Callable[[int], None]


class Samples(NamedTuple):
    """The measurements of ``n`` requests.

    ``prompt_tokens`` and ``hit_tokens``: int64 ``[n]``. ``nanoseconds``: CPU time, int64 ``[n, len(OPERATIONS)]``.
    ``other_threads_ns``: CPU time of all threads except the calling one, from the first request to the last.
    """

    prompt_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    nanoseconds: Nanoseconds
    other_threads_ns: int

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all calls and of other threads."""
        return (int(self.nanoseconds.sum()) + self.other_threads_ns) / 1e9


def blank(workload: Workload) -> NDArray[np.int64]:
    """Return an array for the measurements of a run. It is written once, so its pages are resident before the run."""
    return np.full((workload.most, len(OPERATIONS) + 2), -1, dtype=np.int64)


def drive(
    cache: PrefixCache,
    workload: Workload,
    progress: Progress | None = None,
    rows: NDArray[np.int64] | None = None,
    clock: Callable[[], int] = time.process_time_ns,
) -> Samples:
    """Run a workload.

    clock: returns nanoseconds. ``time.thread_time_ns`` excludes the time of other threads during a call. rows:
    receives the measurements; pass ``blank(workload)`` to exclude the array from a memory measurement.
    """
    rows = blank(workload) if rows is None else rows
    namespaces: dict[str, Namespace] = {}
    done = 0
    process, thread = time.process_time_ns(), time.thread_time_ns()
    for done, (tenant, prompt_ids, full_ids) in enumerate(workload.requests(), 1):
        prompt, answer = array("q", prompt_ids.tobytes()), array("q", full_ids[len(prompt_ids) :].tobytes())
        namespace = namespaces.get(tenant)
        if namespace is None:
            namespace = namespaces[tenant] = Namespace(tenant, "bench")
            cache.add_tenant(Tenant(tenant, guaranteed_blocks=cache.config.num_blocks // GUARANTEED_PART))
        rows[done - 1] = _request(cache, namespace, prompt, answer, clock)
        if progress is not None and done % 64 == 1:
            progress(done)
    others = (time.process_time_ns() - process) - (time.thread_time_ns() - thread)
    return Samples(rows[:done, 0], rows[:done, 1], without_clock(rows[:done, 2:], clock), max(others, 0))


def _request(
    cache: PrefixCache,
    namespace: Namespace,
    prompt: array[int],
    answer: array[int],
    clock: Callable[[], int],
) -> tuple[int, ...]:
    """Run one request. Returns prompt tokens, hit tokens and the nanoseconds of each operation."""
    num_prompt, num_all = len(prompt), len(prompt) + len(answer)
    start = clock()
    sequence = cache.open(namespace, prompt)
    opened = clock()
    sequence.commit(num_prompt)
    committed = clock()
    sequence.extend(answer)
    extended = clock()
    sequence.commit(num_all)
    answered = clock()
    sequence.release()
    released = clock()
    times = (
        opened - start,
        committed - opened,
        extended - committed,
        answered - extended,
        released - answered,
    )
    return num_prompt, sequence.num_cached_tokens, *times


def warm_up(workload: Workload, config: CacheConfig) -> None:
    """Run the first 8 requests on a separate cache, to exclude one-time costs of the process."""
    first = [request for request, _ in zip(workload.requests(), range(8), strict=False)]
    most = max((len(request.full) for request in first), default=0)
    blocks = 2 * (most // config.block_size) + 2 * len(
        first
    )  # 2 blocks more a request, for the guarantees of the first tenants
    small = CacheConfig(num_blocks=max(blocks, 2), block_size=config.block_size, policy=config.policy)
    drive(PrefixCache(small), Workload(workload.name, lambda: iter(first), len(first)))


def by_power_of_two(samples: Samples) -> list[dict[str, Any]]:
    """Percentiles of each operation, for prompts grouped by powers of two in length.

    Groups with fewer than ``MIN_REQUESTS`` requests are left out. The shortest prompts come first.
    """
    exponents = np.frexp(samples.prompt_tokens.astype(np.float64))[1]
    return [
        _within(samples, exponents == exponent, 1 << int(exponent))
        for exponent in np.unique(exponents)
        if np.count_nonzero(exponents == exponent) >= MIN_REQUESTS
    ]


def _within(samples: Samples, chosen: NDArray[np.bool_], below: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens_from": below // 2,
        "tokens_below": below,
        "requests": int(np.count_nonzero(chosen)),
        "operations": {},
    }
    for name, column in zip(OPERATIONS, samples.nanoseconds[chosen].T, strict=True):
        p50, p99 = percentile_us(column, 50), percentile_us(column, 99)
        found["operations"][name] = {"p50_us": p50, "p99_us": p99, "p99_over_p50": p99 / p50}
    return found


def worst_spread(powers: list[dict[str, Any]]) -> dict[str, float]:
    """For each operation the largest p99 ÷ p50 of any group. Empty if no group has enough requests."""
    return {
        name: max(power["operations"][name]["p99_over_p50"] for power in powers)
        for name in (OPERATIONS if powers else ())
    }
