"""Time to the first token of an engine with tiers: computed, resident, from host memory, from disk, beside a bad disk.

A round asks for a new prompt (cold), and for the same one from the cache, from host memory and from disk. What lies
above a tier is evicted before. Then another engine, over a folder that has the prompts, has a disk that is a hundred
times slower, or never answers: its requests are computed. Wall times end with the first token. CPU times are the
process's, with the threads of the disk. Results are medians over rounds without the first, and the worst of all: the
first request to a bad disk waits for it, later ones leave it alone.

A miss is ``Sequence.loading`` of a prompt of which nothing lies in host memory: the median of many, each measured once.
An eviction frees nodes whose blocks lie in host memory too, beside one of a cache without it: the best of some in turn.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from radixkv.bench.measure import heading, surroundings
from radixkv.config import CacheConfig, KVLayout, Namespace
from radixkv.engines.hf.engine import HFEngine, demo_model, layout_of
from radixkv.errors import ConfigError
from radixkv.files.system import Files
from radixkv.index.cache import PrefixCache
from radixkv.tables import columns
from radixkv.tiers.ladder import Ladder
from radixkv.tiers.settings import DiskOptions, TierSettings
from radixkv.tiers.tiered_cache import TieredCache

BLOCK_SIZE: Final = 16
VOCAB: Final = 2_048
SLOWER: Final = 100
WAYS: Final = ("cold", "cache", "host", "disk")
FAULTS: Final = ("slow", "hung")
_SECRET: Final = b"the secret of a benchmark"
_MISSES: Final = 2_000
MISS_REACH_US: Final = 3.0
_NODES: Final = 2_000
_EVICTIONS: Final = 5
EVICT_REACH_US: Final = 0.5


class _BadFiles(Files):
    """Files whose reads take ``seconds`` each; None: for ever, until ``end``."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self.is_armed, self._over = seconds, False, threading.Event()

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        if self.is_armed:
            self._over.wait(self._seconds)
        return super().read(descriptor, into, offset)

    def end(self) -> None:
        """Answer at once from now on."""
        self._over.set()


def run(
    *, tokens: int = 1_529, rounds: int = 5, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Measure ``rounds`` rounds of prompts of ``tokens`` tokens. Returns a dict that JSON can encode.

    By way: ``seconds``, ``worst_seconds``, ``cpu_seconds`` and ``cached_tokens``. ``same_tokens``: whether all ways
    answered alike. ``miss_us``: what a miss costs with host memory below. ``evict_us``,
    ``evict_below_us``: CPU time of an eviction a node, without and with it.
    Writes up to some MiB a round to a temporary folder. Raises ConfigError for counts out of range.
    """
    for name, value, low, high in (("--tokens", tokens, 64, 2_000), ("--rounds", rounds, 1, 1_000)):
        if not low <= value <= high:
            raise ConfigError(name, value, f"from {low} to {high:,}")
    dice = np.random.default_rng(0)
    prompts = [dice.integers(3, VOCAB, tokens, dtype=np.uint32) for _ in range(rounds + 1)]
    measured: dict[str, list[tuple[float, float, int]]] = {way: [] for way in (*WAYS, *FAULTS)}
    answers: list[set[tuple[int, ...]]] = []
    done, total = count(1), 3 * len(prompts)

    def tell() -> None:
        if progress is not None:
            progress(next(done), total)

    with tempfile.TemporaryDirectory(prefix="radixkv-bench-") as folder:
        with _engine(Path(folder), tokens, len(prompts), Files()) as engine:
            for at, prompt in enumerate(prompts):
                answers.append(_round(engine, prompt, measured, at))
                tell()
            seconds_a_read = _seconds_a_read(measured["disk"][1:], tokens)
        for fault, seconds in (("slow", SLOWER * seconds_a_read), ("hung", None)):
            files = _BadFiles(seconds)
            with _engine(Path(folder), tokens, len(prompts), files) as engine:
                _ask(
                    engine, dice.integers(3, VOCAB, tokens, dtype=np.uint32)
                )  # learns how long computing takes
                files.is_armed = True
                for at, prompt in enumerate(prompts):
                    found, answer = _ask(engine, prompt)
                    measured[fault].append(found)
                    answers[at].add(answer)
                    tell()
                files.end()
    return {
        "benchmark": "ttft-tiers",
        **surroundings(),
        "seed": 0,
        "tokens": tokens,
        "rounds": rounds,
        "same_tokens": all(len(each) == 1 for each in answers),
        "miss_us": _miss_us(tokens, dice),
        **_evictions_us(),
        "ways": {way: _figures(found) for way, found in measured.items()},
    }


def _round(
    engine: HFEngine, prompt: Any, measured: dict[str, list[tuple[float, float, int]]], at: int
) -> set[tuple[int, ...]]:
    """Ask cold, then by the other ways, in an order that alternates. Returns the answers."""
    cache, answers = engine.cache, set()
    assert isinstance(cache, TieredCache) and isinstance(cache.lower, Ladder)
    disk = cache.lower.disk
    assert disk is not None
    for way in ("cold", *(WAYS[1:] if at % 2 else WAYS[:0:-1])):
        if way in ("host", "disk"):
            while disk.num_running or disk.demotions.num_waiting:
                time.sleep(0.005)  # the disk has all of it
            cache.evict(cache.config.num_blocks)
        if way == "disk":
            cache.lower.host.cache.evict(cache.lower.num_slots)
        found, answer = _ask(engine, prompt)
        measured[way].append(found)
        answers.add(answer)
    return answers


def _ask(engine: HFEngine, prompt: Any) -> tuple[tuple[float, float, int], tuple[int, ...]]:
    """Return seconds to the first token, CPU seconds and cached tokens; and four tokens of the answer."""
    cpu: list[float] = []
    began = time.process_time()

    def on_step(step: list[list[int]]) -> None:
        if not cpu:
            cpu.append(time.process_time() - began)

    done = engine.generate(engine.namespace("bench"), prompt, 4, eos_token_id=-1, on_step=on_step)
    return (done.time_to_first_token_s, cpu[0], done.num_cached_tokens[0]), tuple(done.token_ids[0])


def _miss_us(tokens: int, dice: np.random.Generator) -> float:
    num_blocks = -(-tokens // BLOCK_SIZE)
    cache = PrefixCache(CacheConfig(num_blocks, BLOCK_SIZE, KVLayout(1, 1, 8), host_blocks=2 * num_blocks))
    namespace, found = Namespace("bench", "toy"), []
    for prompt in dice.integers(3, VOCAB, (_MISSES, tokens), dtype=np.uint32):
        with cache.open(namespace, prompt) as sequence:
            began = time.perf_counter_ns()
            below = sequence.loading
            found.append(time.perf_counter_ns() - began)
            assert below is None
    return median(found) / 1_000


def _evictions_us() -> dict[str, float]:
    best = {"evict_us": float("inf"), "evict_below_us": float("inf")}
    for _ in range(_EVICTIONS):
        for name, host_blocks in (("evict_us", 0), ("evict_below_us", 8 * _NODES)):
            best[name] = min(best[name], _evict_us(host_blocks))
    return best


def _evict_us(host_blocks: int) -> float:
    """Return the CPU time of an eviction of ``_NODES`` prompts of four blocks, a node."""
    cache = PrefixCache(CacheConfig(4 * _NODES, BLOCK_SIZE, KVLayout(1, 1, 8), host_blocks=host_blocks))
    for first in range(_NODES):
        with cache.open(Namespace("bench", "toy"), np.full(4 * BLOCK_SIZE, first, np.uint32)) as sequence:
            sequence.commit(4 * BLOCK_SIZE)
    began = time.process_time_ns()
    cache.evict(4 * _NODES)
    return (time.process_time_ns() - began) / 1_000 / _NODES


@contextmanager
def _engine(folder: Path, tokens: int, num_prompts: int, files: Files) -> Iterator[HFEngine]:
    model = demo_model(vocab_size=VOCAB)
    layout, num_blocks = layout_of(model), -(-tokens // BLOCK_SIZE) + 2
    block_bytes = layout.bytes_per_token * BLOCK_SIZE
    disk_bytes = 2 * (num_prompts + 1) * num_blocks * (block_bytes + 8_192) + (1 << 20)
    below = TierSettings(
        2 * num_blocks * block_bytes, DiskOptions(folder / "kv", disk_bytes, _SECRET, files=files)
    )
    cache = TieredCache(CacheConfig(2 * num_blocks, BLOCK_SIZE, layout))
    engine = HFEngine(model, cache, tiers=below)
    try:
        yield engine
    finally:
        engine.close()


def _seconds_a_read(found: list[tuple[float, float, int]], tokens: int) -> float:
    """Return the time of a read, if all time of a request from disk went there."""
    return median(seconds for seconds, _, _ in found) / (tokens / BLOCK_SIZE)


def _figures(found: list[tuple[float, float, int]]) -> dict[str, float]:
    names = ("seconds", "cpu_seconds", "cached_tokens")
    medians = {
        name: float(median(each)) for name, each in zip(names, zip(*found[1:], strict=True), strict=True)
    }
    return {**medians, "worst_seconds": max(seconds for seconds, _, _ in found)}


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    ways, cold = result["ways"], result["ways"]["cold"]
    rows = [["", "first token", "÷ cold", "worst ÷ cold", "CPU", "cold ÷ it", "cached tokens"]]
    for way, each in ways.items():
        name = {"slow": f"a disk {SLOWER} × slower", "hung": "a disk that never answers"}.get(way, way)
        seconds, cpu = each["seconds"], each["cpu_seconds"]
        rows.append([
            name, f"{1e3 * seconds:.1f} ms", f"{seconds / cold['seconds']:.2f}",
            f"{each['worst_seconds'] / cold['seconds']:.2f}", f"{1e3 * cpu:.1f} ms", f"{cold['cpu_seconds'] / cpu:.1f}",
            f"{each['cached_tokens']:.0f}",
        ])  # fmt: skip
    return (
        f"prompts of {result['tokens']:,} tokens, {result['rounds']} rounds; answers "
        f"{'equal' if result['same_tokens'] else 'DIFFER'}\n{heading(result)}\n\n{columns(rows)}\n\n"
        f"a miss with host memory below: {result['miss_us']:.1f} µs (at most {MISS_REACH_US:.0f})\n"
        f"an eviction, a node: {result['evict_us']:.2f} µs, with host memory below {result['evict_below_us']:.2f} µs "
        f"(at most {EVICT_REACH_US} more)"
    )
