"""The cost of a scheduling decision over a long queue, and of an announcement beside a match of the same prompt.

A decision is what an engine does for each request that it starts. It reports the waiting requests whose residency
changed since the last decision, and asks which one is next. It starts that one, and lets the next arrival wait. The
queue's length stays the same. Times are CPU time of the calling thread. The yardstick beside it is a bare heap of as
many entries, which takes a new one for its least as often as a decision changes the queue.

Announcements and matches alternate. The prompt is resident but for its end, in as many nodes as turns.
"""

from __future__ import annotations

import heapq
import random
import time
from typing import Any

import click
import numpy as np

from radixkv.bench.measure import frozen_heap, heading, surroundings
from radixkv.cli.output import finish, int_option, json_option, print_result, seed_option
from radixkv.config import CacheConfig, Namespace
from radixkv.errors import ConfigError
from radixkv.index.announcements import Announcement
from radixkv.index.cache import PrefixCache
from radixkv.scheduling import RequestQueue, WaitingRequest
from radixkv.tables import columns

ANNOUNCED_TOKENS = 100_000
TURNS = 40
PAIRS = 101


def run(
    *, requests: int = 10_000, tenants: int = 16, changes: int = 4, decisions: int = 20_000, seed: int = 0
) -> dict[str, Any]:
    """Measure ``decisions`` decisions over a queue of ``requests``. Returns a dict that JSON can encode.

    ``changes``: residency changes before each decision. The result has:

    - ``median_us``, ``p99_us``, ``mean_us``: of a decision with its changes and its arrival.
    - ``peek_us``: the mean of the choice alone. ``heap_us``: the mean of as many changes of a bare heap.
    - ``announce_us``, ``match_us``: medians for a prompt of ANNOUNCED_TOKENS, of which the last turn isn't resident.

    Raises ConfigError for more changes than requests.
    """
    if changes > requests:
        raise ConfigError("--changes", changes, f"from 0 to {requests:,}, the requests")
    dice = random.Random(seed)
    queue = RequestQueue()
    for number in range(tenants):
        queue.set_weight(str(number), 1.0 + number % 4)
    waiting = [_arrival(queue, tenants, dice) for _ in range(requests)]
    place = {request.arrival: at for at, request in enumerate(waiting)}
    found = np.zeros(decisions, np.int64)
    with frozen_heap():
        for at in range(decisions):
            found[at] = _decision(queue, waiting, place, tenants, changes, dice)
    took = found / 1e3
    return {
        "benchmark": "scheduling",
        "requests": requests,
        "tenants": tenants,
        "changes": changes,
        "decisions": decisions,
        "seed": seed,
        **surroundings(),
        "median_us": float(np.median(took)),
        "p99_us": float(np.percentile(took, 99)),
        "mean_us": float(took.mean()),
        "peek_us": _peek_us(queue),
        "heap_us": _heap_us(requests, changes + 2, decisions, dice),
        **_announcing(),
    }


def _arrival(queue: RequestQueue, tenants: int, dice: random.Random) -> WaitingRequest:
    tenant, tokens = str(dice.randrange(tenants)), dice.randrange(1_000, 200_000)
    return queue.add(tenant, tokens=tokens, missing=dice.random(), priority=dice.randrange(2))


def _decision(
    queue: RequestQueue,
    waiting: list[WaitingRequest],
    place: dict[int, int],
    tenants: int,
    changes: int,
    dice: random.Random,
) -> int:
    """Make a decision. Returns its CPU time in ns."""
    changed = [(waiting[dice.randrange(len(waiting))], dice.random()) for _ in range(changes)]
    tenant, tokens, missing = str(dice.randrange(tenants)), dice.randrange(1_000, 200_000), dice.random()
    priority = dice.randrange(2)
    began = time.thread_time_ns()
    for request, share in changed:
        queue.update(request, share)
    chosen = queue.peek(0.0)
    assert chosen is not None
    queue.start(chosen)
    added = queue.add(tenant, tokens=tokens, missing=missing, priority=priority)
    took = time.thread_time_ns() - began
    place[added.arrival] = place.pop(chosen.arrival)
    waiting[place[added.arrival]] = added
    return took


def _peek_us(queue: RequestQueue, calls: int = 10_000) -> float:
    began = time.thread_time_ns()
    for _ in range(calls):
        queue.peek(0.0)
    return (time.thread_time_ns() - began) / calls / 1e3


def _heap_us(size: int, changes: int, repeats: int, dice: random.Random) -> float:
    """Return the mean CPU time of so many changes of a heap of ``size`` entries."""
    heap = sorted((dice.random(), number) for number in range(size))
    steps = [dice.random() for _ in range(repeats * changes)]
    with frozen_heap():
        began = time.thread_time_ns()
        for number, step in enumerate(steps):
            heapq.heapreplace(heap, (heap[0][0] + step, number))
        return (time.thread_time_ns() - began) / repeats / 1e3


def _announcing() -> dict[str, float]:
    """Time announcements and matches of the same prompt, one after the other."""
    cache, namespace = PrefixCache(CacheConfig(ANNOUNCED_TOKENS // 16 + 1, 16)), Namespace("a", "m")
    ids = np.random.default_rng(0).integers(0, 2**17, ANNOUNCED_TOKENS, dtype=np.uint32)
    for turn in range(1, TURNS):
        with cache.open(namespace, ids[: turn * ANNOUNCED_TOKENS // TURNS]) as sequence:
            sequence.commit(sequence.num_tokens)
    took = np.zeros((PAIRS, 2), np.int64)
    with frozen_heap():
        for pair in range(PAIRS):
            for call in (0, 1) if pair % 2 else (1, 0):
                began = time.thread_time_ns()
                found = cache.match(namespace, ids) if call else cache.announce(namespace, ids)
                took[pair, call] = time.thread_time_ns() - began
                if isinstance(found, Announcement):
                    found.withdraw()
    announced, matched = np.median(took, axis=0) / 1e3
    return {"announce_us": float(announced), "match_us": float(matched)}


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    head = (
        f"{result['requests']:,} waiting requests of {result['tenants']:,} tenants, {result['changes']} residency "
        f"changes before each of {result['decisions']:,} decisions\n{heading(result)}"
    )
    names = ("median_us", "p99_us", "mean_us", "peek_us", "heap_us")
    heads = ["decision, median", "99th percentile", "mean", "choice alone, mean", "a bare heap"]
    figures = [f"{result[name]:.2f} µs" for name in names]
    announced, matched = result["announce_us"], result["match_us"]
    told = (
        f"announcing {ANNOUNCED_TOKENS:,} tokens: {announced:.1f} µs, {announced / matched:.2f} × a match of the same "
        f"({matched:.1f} µs)"
    )
    return f"{head}\n\n{columns([heads, figures])}\n\n{told}"


# --- the command


@click.command()
@int_option("--requests", 10_000, "Waiting requests.", most=10**6)
@int_option("--tenants", 16, "Tenants of the requests.", most=10**6)
@int_option("--changes", 4, "Residency changes before a decision.", least=0)
@int_option("--decisions", 20_000, "Decisions to time.", most=10**6)
@seed_option
@json_option
def main(as_json: bool, **options: Any) -> None:
    """Measure the time of a decision over a long queue: residency changes, choice, start and a new arrival."""
    print_result(run(**options), table, as_json)


if __name__ == "__main__":
    finish(main, "python -m benchmarks.scheduling")
