"""Figures of the index that a workload doesn't show: one call, of one shape and one size, repeated.

- ``figures``: match, eviction, fork and beam step, each in the state that makes it expensive; see also
  ``engine_calls``.
- ``scaling``: the cost of a call as the cache grows, and the cost of a token as a prompt grows. ``ratio`` is the last
  value divided by the first. A ratio of 1 is flat; reads from main memory instead of the processor's cache may add
  some tens of percent.
- ``shapes``: see ``shapes.Shape``.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from radixkv import audit
from radixkv.bench import engine_calls, shapes
from radixkv.bench.drive import drive
from radixkv.bench.measure import Figure, Nanoseconds, frozen_heap, number, percentile_us, timed
from radixkv.config import CacheConfig, Namespace
from radixkv.index.cache import PrefixCache
from radixkv.index.tokens import encode
from radixkv.simulator.workloads import Workload, draw, thin
from radixkv.tables import columns

NAMESPACE = Namespace("tenant-0", "bench")
THIN_BLOCKS = 4
"""Blocks of a prompt of ``workloads.thin``."""

FLAT = 1.5
"""A call counts as flat if its median grows by less than this factor while the cache or the prompt grows 100-fold or
more.
"""


class Sizes(NamedTuple):
    """Numbers of repeats and sizes to measure. ``shapes`` scales the shapes."""

    repeats: int = 2_000
    leaves: int = 50_000
    beam_tokens: int = 32_768
    caches: tuple[int, ...] = (2_000, 20_000, 200_000)
    prompts: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    shapes: float = 1.0


class Scaling(NamedTuple):
    """The cost of an operation by size: blocks of the cache, or tokens of a prompt."""

    operation: str
    size: str
    unit: str
    values: dict[int, float]
    reach: float | None = None

    @property
    def ratio(self) -> float:
        """The last value divided by the first."""
        values = list(self.values.values())
        return values[-1] / values[0]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can encode."""
        values = {str(size): value for size, value in self.values.items()}
        return {**self._asdict(), "values": values, "ratio": self.ratio}


def run(sizes: Sizes, *, seed: int = 0, policy: str = "lru") -> dict[str, list[dict[str, Any]]]:
    """Measure everything. Returns lists of dicts that JSON can encode: ``figures``, ``scaling`` and ``shapes``.

    Raises IntegrityError if an audit finds a violated invariant after a measurement.
    """
    figures = [_match(sizes, seed, policy), *_evict(sizes, seed, policy), *_beams(sizes, seed, policy)]
    figures += engine_calls.measure(sizes.repeats, seed, policy)
    scaling = [*_by_cache(sizes, seed, policy), *_by_prompt(sizes, seed)]
    measured = [shapes.measure(shape) for shape in shapes.shapes(seed, sizes.shapes)]
    return {
        "figures": [figure.as_dict() for figure in figures],
        "scaling": [each.as_dict() for each in scaling],
        "shapes": measured,
    }


# --- match: five nodes on the path of one prompt


def five_node_keys(seed: int) -> list[bytes]:
    """A prompt of 4,096 tokens, and four prompts that diverge from it. Together they split it into five nodes."""
    prompt = draw(seed, 11, size=4_096)
    forks = ((shared, draw(seed, 12, shared, size=4_096 - shared)) for shared in (3_200, 2_400, 1_600, 800))
    return [encode(prompt), *(encode(np.concatenate([prompt[:shared], rest])) for shared, rest in forks)]


def publish(cache: PrefixCache, key: bytes) -> None:
    """Run one request: open, commit everything, release."""
    with cache.open(NAMESPACE, key) as sequence:
        sequence.commit(sequence.num_tokens)


def _match(sizes: Sizes, seed: int, policy: str) -> Figure:
    cache, keys = PrefixCache(CacheConfig(num_blocks=2_000, policy=policy)), five_node_keys(seed)
    for each in keys:
        publish(cache, each)
    key, copy = keys[0], bytes(bytearray(keys[0]))
    with frozen_heap():
        found = timed(partial(cache.match, NAMESPACE, key), sizes.repeats)
        floor = timed(partial(key.startswith, copy), sizes.repeats)
    audit.check(cache)
    name = "match of a resident prompt of 4,096 tokens, 5 nodes, from bytes"
    return _figure(name, found, 5, 3, "memcmp of as many bytes", floor)


def _figure(
    name: str,
    found: Nanoseconds,
    reach: float | None = None,
    stretch: float | None = None,
    floor: str | None = None,
    floor_ns: Nanoseconds | None = None,
) -> Figure:
    p50, p99 = percentile_us(found, 50), percentile_us(found, 99)
    lowest = None if floor_ns is None else percentile_us(floor_ns, 50)
    return Figure(name, p50, "µs", p99, reach, stretch, floor, lowest)


# --- evict: a cache full of thin leaves


def _thin_cache(leaves: int, seed: int, policy: str) -> PrefixCache:
    cache = PrefixCache(CacheConfig(num_blocks=leaves * THIN_BLOCKS + THIN_BLOCKS, policy=policy))
    drive(cache, Workload("thin", lambda: thin(seed, leaves), leaves))
    return cache


def _evict(sizes: Sizes, seed: int, policy: str) -> list[Figure]:
    cache = _thin_cache(sizes.leaves, seed, policy)
    order = OrderedDict.fromkeys(range(sizes.leaves))
    worths = {1: "a block", THIN_BLOCKS: "a thin prompt's worth", 256: "a prompt of 4,096 tokens' worth"}
    found = []
    with frozen_heap():
        floor = timed(partial(order.popitem, last=False), min(sizes.repeats, sizes.leaves))
        for blocks, worth in worths.items():
            most = sizes.leaves * THIN_BLOCKS // blocks // 5
            calls = timed(partial(cache.evict, blocks), max(min(sizes.repeats, most), 1))
            name = f"evict({blocks}), {worth}, at {sizes.leaves:,} thin leaves"
            reach, stretch = (10, 5) if blocks <= THIN_BLOCKS else (None, None)
            found.append(_figure(name, calls, reach, stretch, "the oldest of an ordered dict as long", floor))
    audit.check(cache)
    return found


# --- fork and reorder: beams over a long prompt


def _beams(sizes: Sizes, seed: int, policy: str) -> list[Figure]:
    """Fork a committed sequence, then run beam steps: a reorder, and one token for each beam."""
    cache = PrefixCache(CacheConfig(num_blocks=sizes.beam_tokens // 16 + 8 * 512, policy=policy))
    width, repeats = 8, min(sizes.repeats, 500)
    source = cache.open(NAMESPACE, encode(draw(seed, 13, size=sizes.beam_tokens)))
    source.commit(source.num_tokens)
    block_tables = [bytearray(4 * source.num_blocks) for _ in range(width)]
    beams = source.fork(width)
    parents = (0, 0, 1, 2, 3, 4, 5, 6)
    kept: dict[str, list[Nanoseconds]] = {"reorder": [], "append": []}
    with frozen_heap():
        floor = timed(lambda: [table[:] for table in block_tables], repeats)
        forks = timed(partial(source.fork, width), repeats, shapes.release)
        for _ in range(repeats):
            kept["reorder"].append(
                timed(lambda: beams.__setitem__(slice(None), cache.reorder(beams, parents)), 1)
            )
            kept["append"].append(timed(partial(cache.append, beams, range(width)), 1))
            cache.flush()
    for sequence in (source, *beams):
        sequence.release()
    audit.check(cache)
    what, least = f"a sequence of {sizes.beam_tokens:,} tokens", "copies of its 8 block tables"
    reorders, appends = (np.concatenate(kept[name]) for name in ("reorder", "append"))
    return [
        _figure(f"fork of {what} into {width}", forks, 20, 10, least, floor),
        _figure(f"reorder of {width} such beams", reorders, 80, 40, least, floor),
        _figure(f"append to {width} such beams, copies decided", appends),
    ]


# --- scaling


def _by_cache(sizes: Sizes, seed: int, policy: str) -> list[Scaling]:
    """Match the same prompts, serve the same requests and evict the same blocks in caches of several sizes."""
    caches = {blocks: _thin_cache(blocks // THIN_BLOCKS - 1, seed, policy) for blocks in sizes.caches}
    hits = [encode(request.full) for request in thin(seed, min(sizes.caches) // THIN_BLOCKS // 2)]
    fresh = [encode(request.full) for request in thin(seed + 1, sizes.repeats)]
    calls: dict[str, Callable[[PrefixCache], Callable[[], object]]] = {
        "match": lambda cache: _cycling(partial(cache.match, NAMESPACE), hits),
        "a request that evicts": lambda cache: _cycling(partial(publish, cache), fresh),
        "evict(1)": lambda cache: partial(cache.evict, 1),
    }
    log = math.log(max(sizes.caches)) / math.log(min(sizes.caches))
    reaches = {"match": FLAT, "a request that evicts": log, "evict(1)": log}
    with frozen_heap():
        found = {name: _in_turn(caches, made, sizes.repeats) for name, made in calls.items()}
    for cache in caches.values():
        audit.check(cache)
    return [Scaling(name, "resident blocks", "µs", values, reaches[name]) for name, values in found.items()]


def _cycling(call: Callable[[bytes], object], keys: Sequence[bytes]) -> Callable[[], object]:
    endless = itertools.cycle(keys)
    return lambda: call(next(endless))


def _in_turn(
    caches: Mapping[int, PrefixCache], made: Callable[[PrefixCache], Callable[[], object]], repeats: int
) -> dict[int, float]:
    """Median microseconds of the call for each cache. Takes the best of five rounds, in which the caches take turns."""
    calls = {blocks: made(cache) for blocks, cache in caches.items()}
    share = max(min(repeats, 1_000) // 5, 1)
    rounds = [{blocks: timed(call, share) for blocks, call in calls.items()} for _ in range(5)]
    return {blocks: min(percentile_us(each[blocks], 50) for each in rounds) for blocks in caches}


def _by_prompt(sizes: Sizes, seed: int) -> list[Scaling]:
    lives = {length: shapes.long_prompt(length, seed) for length in sizes.prompts}
    return [
        Scaling(name, "prompt tokens", "ns a token", {size: life[name] for size, life in lives.items()}, FLAT)
        for name in lives[sizes.prompts[0]]
    ]


# --- text


def scaling_table(scaling: Sequence[Mapping[str, Any]]) -> str:
    """Format scalings of the same sizes as text."""
    head = [
        f"{scaling[0]['unit']}, by {scaling[0]['size']}",
        *(f"{int(size):,}" for size in scaling[0]["values"]),
    ]
    rows = [(*head, "last ÷ first", "reach")]
    for each in scaling:
        values = map(number, each["values"].values())
        rows.append((each["operation"], *values, number(each["ratio"]), number(each["reach"])))
    return columns(rows)


def shapes_table(measured: Sequence[Mapping[str, Any]]) -> str:
    """Format shapes as text. Times of calls are medians."""
    names = list(measured[0]["operations"])
    head = ("shape", "requests", "nodes", *(f"{name} µs" for name in names))
    rows = [(*head, "CPU µs a request", "worst p99 ÷ p50", "evict µs a block")]
    for each in measured:
        medians = [number(each["operations"][name]["p50_us"]) for name in names]
        worst = max(each["p99_over_p50"].values(), default=None)
        figures = (each["cpu_us_per_request"], worst, each["evict_us_per_block"])
        rows.append(
            (each["shape"], number(each["requests"]), number(each["nodes"]), *medians, *map(number, figures))
        )
    return columns(rows)
