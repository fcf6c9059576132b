"""Time to the first token of an engine with tiers: computed, resident, from host memory, from disk, beside a bad disk.

A round asks for a new prompt (cold), and for the same one from the cache, from host memory and from disk. What lies
above a tier is evicted before. Then another engine, over a folder that has the prompts, has a disk that is a hundred
times slower, or never answers: its requests are computed. Wall times end with the first token. CPU times are the
process's, with the threads of the disk. Results are medians over rounds without the first, and the worst of all: the
first request to a bad disk waits for it, later ones leave it alone.
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

from radixkv.bench.measure import columns, heading, surroundings
from radixkv.config import CacheConfig
from radixkv.engines.hf import HFEngine, demo_model, layout_of
from radixkv.engines.lower_tiers import LowerTiers
from radixkv.engines.tier_settings import DiskOptions, TierSettings
from radixkv.engines.tiered_cache import TieredCache
from radixkv.errors import ConfigError
from radixkv.tiers.files import Files

BLOCK_SIZE: Final = 16
VOCAB: Final = 2_048
SLOWER: Final = 100
WAYS: Final = ("cold", "cache", "host", "disk")
FAULTS: Final = ("slow", "hung")
_SECRET: Final = b"the secret of a benchmark"


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
    answered alike.
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
        "ways": {way: _figures(found) for way, found in measured.items()},
    }


def _round(
    engine: HFEngine, prompt: Any, measured: dict[str, list[tuple[float, float, int]]], at: int
) -> set[tuple[int, ...]]:
    """Ask cold, then by the other ways, in an order that alternates. Returns the answers."""
    cache, answers = engine.cache, set()
    assert isinstance(cache, TieredCache) and isinstance(cache.lower, LowerTiers)
    disk = cache.lower.disk
    assert disk is not None
    for way in ("cold", *(WAYS[1:] if at % 2 else WAYS[:0:-1])):
        if way in ("host", "disk"):
            while disk.num_running or disk.num_waiting:
                time.sleep(0.005)  # the disk has all of it
            cache.evict(cache.config.num_blocks)
        if way == "disk":
            cache.lower.level.cache.evict(cache.lower.num_slots)
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
        f"{'equal' if result['same_tokens'] else 'DIFFER'}\n{heading(result)}\n\n{columns(rows)}"
    )
