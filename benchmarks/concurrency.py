"""How long a match takes while another thread evicts and commits at full speed.

One thread matches a leased prompt of 4,096 tokens again and again. At the same time one of these runs:

    nothing      no other thread
    computing    a thread of pure Python that never touches the cache: the cost of sharing the interpreter
    evicting     a thread that evicts thousands of blocks in one call, publishes as many again, and repeats

Under CPython's global lock a computing thread is interrupted after ``sys.getswitchinterval()``, 5 ms by default. Each
case is measured with that interval and with a short one. The short interval shows the effect of the cache's own lock.
The last rows count only the matches that overlapped an ``evict`` call.

``holds`` reports how long each call holds the cache's lock without a break. One thread makes the same calls alone, on
a cache whose lock records times. A match may have to wait for one hold, not for a whole call.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import click
import numpy as np
from numpy.typing import NDArray

from radixkv import audit
from radixkv.bench.figures import NAMESPACE, THIN_BLOCKS, five_node_keys, publish
from radixkv.bench.measure import (
    Figure,
    Nanoseconds,
    figures_table,
    frozen_heap,
    heading,
    number,
    percentile_us,
    surroundings,
)
from radixkv.cli.output import finish, int_option, json_option, print_result, progress_bar, seed_option
from radixkv.config import CacheConfig
from radixkv.errors import ArgumentError
from radixkv.index.cache import PrefixCache
from radixkv.index.lock_timing import time_holds
from radixkv.index.tokens import encode
from radixkv.simulator.workloads import VOCABULARY
from radixkv.tables import columns

SHORT_SWITCH_S = 5e-5
DURING = "evicting, while evict ran"
PROMPT_BLOCKS = 1_024
"""Space for the matched prompt and for the prompts that split it."""


def run(
    *,
    num_blocks: int = 200_000,
    evict_blocks: int = 40_000,
    matches: int = 200_000,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Measure ``matches`` matches in each case. Returns a dict that JSON can encode.

    ``progress`` gets the number of finished measurements, of ``len(BESIDE) × 2``. Raises ArgumentError for
    ``evict_blocks`` that the cache can't have, and IntegrityError if the audit at the end finds a violated invariant.
    """
    if not THIN_BLOCKS <= evict_blocks <= num_blocks - PROMPT_BLOCKS:
        allowed = f"an integer from {THIN_BLOCKS} to num_blocks − {PROMPT_BLOCKS}"
        raise ArgumentError("evict_blocks", evict_blocks, allowed)
    load = _Load(num_blocks, evict_blocks, seed)
    latency = _latency(load, matches, progress)
    holds = _holds(load)
    return {
        "benchmark": "concurrency",
        **surroundings(),
        "seed": seed,
        "global_lock": bool(getattr(sys, "_is_gil_enabled", lambda: True)()),
        "num_blocks": num_blocks,
        "evict_blocks": evict_blocks,
        "latency": latency,
        "holds": holds,
        "figures": [figure.as_dict() for figure in _figures(latency, holds)],
        "audit": "clean",
    }


# --- the load


class _Load:
    """A prompt to match, a cache full of thin leaves, and twice as many thin prompts as the cache holds."""

    def __init__(self, num_blocks: int, evict_blocks: int, seed: int) -> None:
        self.num_blocks, self.evict_blocks = num_blocks, evict_blocks
        self._prompts = five_node_keys(seed)
        self.prompt = self._prompts[0]
        shape = (2 * num_blocks // THIN_BLOCKS, 16 * THIN_BLOCKS)
        self._thin = itertools.cycle(
            [encode(row) for row in np.random.default_rng(seed).integers(0, VOCABULARY, shape)]
        )

    def cache(self) -> PrefixCache:
        """Return a full cache."""
        cache = PrefixCache(CacheConfig(self.num_blocks))
        for key in self._prompts:
            publish(cache, key)
        self.publish(cache, self.num_blocks - len(self._prompts) * len(self.prompt) // 64)
        return cache

    def publish(self, cache: PrefixCache, num_blocks: int) -> None:
        """Publish thin prompts of ``num_blocks`` blocks in all."""
        for key in itertools.islice(self._thin, num_blocks // THIN_BLOCKS):
            publish(cache, key)


class _Spans(NamedTuple):
    """Start and end of consecutive calls, in nanoseconds: int64 ``[n]``."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def during(self, others: _Spans) -> _Spans:
        """Return the calls that overlap a call of ``others``."""
        before = np.searchsorted(others.ends, self.starts)  # other calls that ended before this one started
        begun = np.searchsorted(others.starts, self.ends)  # other calls that started before this one ended
        chosen = begun > before
        return _Spans(self.starts[chosen], self.ends[chosen])


def _spans(call: Callable[[], object], go_on: Callable[[int], bool]) -> _Spans:
    """Repeat a call as long as ``go_on(number of calls so far)`` is true."""
    clock, starts, ends = time.perf_counter_ns, array("q"), array("q")
    while go_on(len(starts)):
        starts.append(clock())
        call()
        ends.append(clock())
    return _Spans(np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64))


# --- latency: matches beside another thread

Over: TypeAlias = threading.Event


def _nothing(load: _Load, cache: PrefixCache, over: Over) -> _Spans:
    return _spans(lambda: None, lambda _: False)


def _computing(load: _Load, cache: PrefixCache, over: Over) -> _Spans:
    turns = 0
    while not over.is_set():
        turns += 1
    return _nothing(load, cache, over)


def _evicting(load: _Load, cache: PrefixCache, over: Over) -> _Spans:
    """Evict in a loop and return the spans of the ``evict`` calls. Publish as many blocks between them."""

    def go_on(done: int) -> bool:
        if done:
            load.publish(cache, load.evict_blocks)
        return not (done and over.is_set())

    return _spans(lambda: cache.evict(load.evict_blocks), go_on)


BESIDE: dict[str, Callable[[_Load, PrefixCache, Over], _Spans]] = {
    "nothing": _nothing,
    "computing": _computing,
    "evicting": _evicting,
}


def _latency(load: _Load, matches: int, progress: Callable[[int], None] | None) -> list[dict[str, Any]]:
    cache = load.cache()
    found: list[dict[str, Any]] = []
    done = itertools.count(1)
    with cache.lease(cache.match(NAMESPACE, load.prompt)), frozen_heap():
        for switch_s in (sys.getswitchinterval(), SHORT_SWITCH_S):
            for beside in BESIDE:
                found += _beside(beside, switch_s, load, cache, matches)
                if progress is not None:
                    progress(next(done))
    audit.check(cache)
    return found


def _beside(
    beside: str, switch_s: float, load: _Load, cache: PrefixCache, matches: int
) -> list[dict[str, Any]]:
    over = threading.Event()
    with _switching(switch_s), ThreadPoolExecutor(1) as threads:
        other = threads.submit(BESIDE[beside], load, cache, over)
        try:
            found = _spans(lambda: cache.match(NAMESPACE, load.prompt), lambda done: done < matches)
        finally:
            over.set()
        calls = other.result()
    rows = [_row(beside, switch_s, found)]
    if len(calls.starts):
        longest = float((calls.ends - calls.starts).max()) / 1e3
        rows.append(_row(DURING, switch_s, found.during(calls)))
        rows = [{**row, "evict_calls": len(calls.starts), "longest_evict_us": longest} for row in rows]
    return rows


@contextmanager
def _switching(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _row(beside: str, switch_s: float, found: _Spans) -> dict[str, Any]:
    row = {"beside": beside, "switch_interval_us": switch_s * 1e6, **_percentiles(found.ends - found.starts)}
    return {**row, "evict_calls": None, "longest_evict_us": None}


_PERCENTS = {"p50_us": 50, "p99_us": 99, "p999_us": 99.9, "max_us": 100}


def _percentiles(nanoseconds: Nanoseconds) -> dict[str, Any]:
    values = {
        name: percentile_us(nanoseconds, percent) if len(nanoseconds) else None
        for name, percent in _PERCENTS.items()
    }
    return {"calls": len(nanoseconds), **values}


# --- holds: how long the lock is held


def _holds(load: _Load) -> list[dict[str, Any]]:
    """Measure each kind of call by one thread alone: the time of a call, and of each hold of the lock."""
    cache, once, often = load.cache(), 1, 1_000
    spans = time_holds(cache)
    kinds: dict[str, tuple[Callable[[], object], int]] = {
        "match": (lambda: cache.match(NAMESPACE, load.prompt), often),
        "open, commit, release": (lambda: load.publish(cache, THIN_BLOCKS), often),
        f"evict({load.evict_blocks})": (lambda: cache.evict(load.evict_blocks), once),
        "audit.check": (lambda: audit.check(cache), once),
        "audit.check, at once": (lambda: audit.check(cache, at_once=True), once),
        "clear": (lambda: cache.clear(NAMESPACE), once),
    }
    found = []
    with frozen_heap():
        for name, (call, repeats) in kinds.items():
            del spans[:]
            calls = _spans(call, lambda done: done < repeats)  # noqa: B023
            held = _percentiles(np.array(spans, dtype=np.int64))
            held["holds"] = held.pop("calls")
            found.append(
                {
                    "calls_of": name,
                    "calls": repeats,
                    "call_max_us": percentile_us(calls.ends - calls.starts, 100),
                    **held,
                }
            )
    audit.check(cache)
    return found


# --- figures and text


def _figures(latency: list[dict[str, Any]], holds: list[dict[str, Any]]) -> list[Figure]:
    """For each switch interval, p99 and maximum of matches beside evictions; and the longest hold of an eviction."""
    rows = {(row["beside"], row["switch_interval_us"]): row for row in latency}
    found = []
    for switch_us in dict.fromkeys(switch_us for _, switch_us in rows):
        beside, during = rows["evicting", switch_us], rows.get((DURING, switch_us))
        computing = rows["computing", switch_us]["p99_us"]
        name, floor = f"match beside evictions, switching every {switch_us:,.0f} µs", "p99 beside computing"
        found.append(Figure(f"p99 of {name}", beside["p99_us"], "µs", None, None, None, floor, computing))
        if during is not None and during["calls"]:
            longest, call = during["max_us"], during["longest_evict_us"]
            found.append(
                Figure(f"longest {name}", longest, "µs", None, None, None, "the longest evict", call)
            )
    evict = next(row for row in holds if row["calls_of"].startswith("evict"))
    name, floor = f"longest hold of {evict['calls_of']}", "the whole call"
    return [*found, Figure(name, evict["max_us"], "µs", None, None, None, floor, evict["call_max_us"])]


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    head = (
        f"matches of 4,096 tokens in {result['num_blocks']:,} blocks, beside evict({result['evict_blocks']:,}) and "
        f"as many blocks committed; {'with' if result['global_lock'] else 'without'} a global interpreter lock"
    )
    latency = _rows(
        result["latency"],
        ("beside", "switch_interval_us", "calls", *_PERCENTS, "evict_calls", "longest_evict_us"),
    )
    holds = _rows(result["holds"], ("calls_of", "calls", "call_max_us", "holds", *_PERCENTS))
    return "\n\n".join(
        [
            f"{head}\n{heading(result)}",
            f"latency of match\n{latency}",
            f"how long the lock is held, by one thread alone\n{holds}",
            figures_table(result["figures"]),
            "audit clean",
        ]
    )


def _rows(rows: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    heads = tuple(name.replace("_us", " µs").replace("_", " ").replace("p999", "p99.9") for name in names)
    body = [(row[names[0]], *(number(row[name]) for name in names[1:])) for row in rows]
    return columns([heads, *body])


# --- the command


@click.command()
@int_option("--num-blocks", 200_000, "Blocks in the cache.", least=2)
@int_option("--evict-blocks", 40_000, "Blocks in each eviction.")
@int_option("--matches", 200_000, "Matches to time.")
@seed_option
@json_option
def main(as_json: bool, **options: Any) -> None:
    """Measure the time of a match while another thread evicts and commits."""
    with progress_bar(2 * len(BESIDE), "measuring") as advance:
        result = run(progress=advance, **options)
    print_result(result, table, as_json)


if __name__ == "__main__":
    finish(main, "python -m benchmarks.concurrency")
