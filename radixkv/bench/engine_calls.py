"""Figures of the calls that engines with an allocator of their own make, and of bursts of one prompt.

Calls that are compared take turns, so both meet the same state of the machine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from radixkv import audit
from radixkv.bench.measure import Figure, Nanoseconds, frozen_heap, percentile_us, timed, without_clock
from radixkv.config import CacheConfig, Namespace
from radixkv.index.cache import PrefixCache
from radixkv.simulator.workloads import draw

_NAMESPACE = Namespace("tenant-0", "bench")
_PROMPT = 2_900
_BURST = 8
_COUNTS = ("free_blocks", "evictable_blocks", "resident_blocks")
_READS = 100
"""Reads of a count in one measurement: a single one is shorter than a reading of the clock."""


def measure(repeats: int, seed: int, policy: str) -> list[Figure]:
    """Measure all. Raises IntegrityError if an audit finds a violated invariant afterwards."""
    return [
        _counts(repeats),
        _match_and_lease(repeats, seed, policy),
        _insert(repeats, seed, policy),
        _burst(seed),
    ]


def _counts(repeats: int) -> Figure:
    """The slowest of the six counts: three of the cache, three of a tenant."""
    cache = PrefixCache(CacheConfig(num_blocks=1_000))
    places = cache, cache.blocks_of(_NAMESPACE.tenant)
    with frozen_heap():
        found = [timed(_reads(place, name), repeats) for place in places for name in _COUNTS]
    slowest = max(percentile_us(each, 50) for each in found)
    return Figure("a count of blocks, of the cache or a tenant", slowest / _READS, "µs", reach=0.2)


def _reads(place: object, name: str) -> Callable[[], object]:
    """Return a function that reads an attribute many times, in C."""
    read = attrgetter(name)
    return lambda: deque(map(read, repeat(place, _READS)), maxlen=0)


def _match_and_lease(repeats: int, seed: int, policy: str) -> Figure:
    cache, prompt = PrefixCache(CacheConfig(num_blocks=2_000, policy=policy)), _ids(seed, 1, _PROMPT)
    with cache.open(_NAMESPACE, prompt) as sequence:
        sequence.commit(_PROMPT)
    leased, matched = _in_turn(
        (
            (lambda: cache.match_and_lease(_NAMESPACE, prompt), lambda: cache.match(_NAMESPACE, prompt))
            for _ in range(repeats)
        ),
        lambda lease: lease.release(),
    )
    audit.check(cache)
    return _beside_a_match(f"match_and_lease of {_PROMPT:,} uint32 ids", leased, matched, 1.25)


def _insert(repeats: int, seed: int, policy: str) -> Figure:
    """Insert 64 blocks of which the tree has 60, from position 60 on."""
    cache = PrefixCache(CacheConfig(num_blocks=64 + 4 * repeats, policy=policy, blocks="engine"))
    known, ids = 60 * 16, np.arange(64 + 4 * repeats, dtype=np.int32)
    first = _ids(seed, 2, known)
    cache.insert(_NAMESPACE, first, ids[:60])
    prompts = [np.concatenate([first, _ids(seed, 3 + number, 64)]) for number in range(repeats)]

    def pair(number: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        prompt, new = prompts[number], ids[60 + 4 * number : 64 + 4 * number]
        before = prompts[max(number - 1, 0)]
        return (
            lambda: cache.insert(_NAMESPACE, prompt, new, start=known),
            lambda: cache.match(_NAMESPACE, before),
        )

    inserted, matched = _in_turn(map(pair, range(repeats)), lambda _: None)
    audit.check(cache)
    return _beside_a_match("insert of 64 blocks, 60 of them resident", inserted, matched, 1.5)


def _burst(seed: int) -> Figure:
    """How often a token of a prompt is computed if it comes eight times in one step."""
    cache = PrefixCache(CacheConfig(num_blocks=2_000, writes_before_reads=True))
    prompt, computed, burst = _ids(seed, 4, _PROMPT), 0, []
    for _ in range(_BURST):
        sequence = cache.open(_NAMESPACE, prompt, ahead=True)
        computed += sequence.num_tokens - sequence.num_cached_tokens - sequence.num_ahead_tokens
        sequence.computing(_PROMPT, step=1)
        burst.append(sequence)
    cache.step_done(1)
    for sequence in burst:
        sequence.release()
    audit.check(cache)
    last = _PROMPT - (_PROMPT - 1) // 16 * 16
    reach = float(_PROMPT + (_BURST - 1) * last)
    return Figure(f"a burst of {_BURST} equal prompts of {_PROMPT:,} tokens", computed, "tokens", reach=reach)


def _ids(seed: int, *numbers: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    *key, size = numbers
    return np.asarray(draw(seed, *key, size=size), np.uint32)


def _in_turn(
    pairs: Iterable[tuple[Callable[[], Any], Callable[[], Any]]], undo: Callable[[Any], object]
) -> tuple[Nanoseconds, Nanoseconds]:
    """CPU nanoseconds of the first and the second call of each pair. ``undo`` gets the first one's result."""
    clock, found = time.process_time_ns, list[tuple[int, int]]()
    with frozen_heap():
        for one, other in pairs:
            start = clock()
            result = one()
            middle = clock()
            undo(result)
            again = clock()
            other()
            found.append((middle - start, clock() - again))
    columns = np.array(found, dtype=np.int64)
    return without_clock(columns[:, 0].copy()), without_clock(columns[:, 1].copy())


def _beside_a_match(name: str, found: Nanoseconds, matched: Nanoseconds, most: float) -> Figure:
    floor = percentile_us(matched, 50)
    p50, p99 = percentile_us(found, 50), percentile_us(found, 99)
    return Figure(name, p50, "µs", p99, most * floor, None, "a match of as many ids", floor)
