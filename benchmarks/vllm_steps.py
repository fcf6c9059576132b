"""CPU of the cache a step of vLLM's scheduler: radixkv's manager and vLLM's own, events off and on.

    python -m benchmarks.vllm_steps [--pairs 11] [--only short-150] [--profile]

Run it with the Python of an environment that has vLLM.

Both caches serve the same requests in the real scheduler, in turns. Each turn begins with an empty cache; the first of
each is to warm up, and isn't counted. In the model's place, tokens are drawn from the request's name. Prints a line of
JSON for each workload, with events off and on: medians over the pairs of

    us        CPU of the scheduler's thread in calls of the manager, µs a step: with what radixkv does at a step's begin
              and end and when a request arrives; with events also vLLM's collecting and publishing of them
    share     radixkv's share of vLLM's own, in each pair
    request   µs to make a request, in vLLM with the hashes of its blocks; ``request_share``

``short``: 12 chats of 4 turns behind two system prompts. ``long``: 96 chats of 6 turns, of 840 to 2,100 tokens, 32 at a
time, in a pool that holds a third of them.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import radixkv
from benchmarks.small_llama import CONFIG
from radixkv.engines.vllm.manager import Scheduler

BLOCK: Final = 32
KINDS: Final = ("stock", "radixkv")


class Workload(NamedTuple):
    """Chats of several turns, all chats' next turns at a time. ``num_new``: tokens of an answer."""

    blocks: int
    num_running: int
    num_chats: int
    num_turns: int
    num_shared: int
    num_own: int
    num_more: int
    num_new: int


WORKLOADS: Final = {
    "short-400": Workload(400, 8, 12, 4, 640, 40, 30, 24),
    "short-150": Workload(150, 8, 12, 4, 640, 40, 30, 24),
    "long": Workload(1_900, 32, 96, 6, 640, 200, 160, 48),
}


class Clock:
    """Nanoseconds of the scheduler's thread in the cache. A call inside another counts once."""

    def __init__(self) -> None:
        self.spent = self.num_calls = 0
        self._is_inside = False

    def timing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, timed."""

        def timed(*given: Any, **named: Any) -> Any:
            if self._is_inside:
                return call(*given, **named)
            self._is_inside = True
            begin = time.thread_time_ns()
            try:
                return call(*given, **named)
            finally:
                self.spent += time.thread_time_ns() - begin
                self.num_calls += 1
                self._is_inside = False

        return timed

    def watch(self, manager: Any) -> None:
        """Time all public calls of an object, and its counts."""
        kind = type(manager)
        timed: dict[str, Any] = {}
        for name in dir(kind):
            found = getattr(kind, name)
            if name.startswith("_"):
                continue
            if isinstance(found, property):
                assert found.fget is not None
                timed[name] = property(self.timing(found.fget))
            elif callable(found):
                timed[name] = self.timing(found)
        manager.__class__ = type(kind.__name__, (kind,), timed)


class Bench:
    """One scheduler with its cache, and the requests that it serves."""

    def __init__(self, kind: str, load: Workload, has_events: bool, folder: str) -> None:
        self.clock, self.num_steps, self.num_cached = Clock(), 0, 0
        self._spent_on_requests: list[int] = []
        self._hasher = _hasher() if kind == "stock" else None
        self.scheduler = _scheduler(kind, load, has_events, folder)
        manager = self.scheduler.kv_cache_manager
        self.clock.watch(manager)
        publisher = self.scheduler.kv_event_publisher
        publisher.publish = self.clock.timing(publisher.publish)
        self._load, self._reading_ns = load, _reading_ns()
        self._waiting: dict[str, Any] = {}

    def turn(self, seed: int) -> dict[str, float]:
        """Serve all chats, in an empty cache. Returns µs a step and a request, cached tokens, and the steps."""
        assert self.scheduler.reset_prefix_cache()
        self.clock.spent = self.clock.num_calls = self.num_steps = self.num_cached = 0
        self._spent_on_requests.clear()
        gc.collect()
        self._serve(seed)
        spent = self.clock.spent - self.clock.num_calls * self._reading_ns
        return {
            "us": spent / self.num_steps / 1_000,
            "request": statistics.median(self._spent_on_requests) / 1_000,
            "cached": self.num_cached,
            "steps": self.num_steps,
        }

    def _serve(self, seed: int) -> None:
        dice, load = random.Random(seed), self._load
        shared = [_ids(dice, load.num_shared) for _ in range(2)]
        chats = [[*shared[at % 2], *_ids(dice, load.num_own)] for at in range(load.num_chats)]
        for turn in range(load.num_turns):
            for at, chat in enumerate(chats):
                self._ask(f"{at}-{turn}", chat)
            requests = dict(self._waiting)
            while self._waiting:
                self._step()
            for at, chat in enumerate(chats):
                chat += [*requests[f"{at}-{turn}"].output_token_ids, *_ids(dice, load.num_more)]

    def _ask(self, name: str, chat: list[int]) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=self._load.num_new, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        begin = time.perf_counter_ns()
        request = Request(name, list(chat), sampling, None, block_hasher=self._hasher)
        self._spent_on_requests.append(time.perf_counter_ns() - begin)
        self._waiting[name] = request
        self.scheduler.add_request(request)

    def _step(self) -> None:
        output = self.scheduler.schedule()
        self.num_steps += 1
        names, sampled = list(output.num_scheduled_tokens), []
        for name in names:
            request = self._waiting[name]
            is_whole = request.num_computed_tokens >= request.num_tokens
            sampled.append(
                [(request.num_tokens * 7_919 + int(name.split("-")[0])) % 32_000] if is_whole else []
            )
        found = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        told = self.scheduler.update_from_output(output, found)
        stats = [each.prefill_stats for client in told.values() for each in client.outputs]
        self.num_cached += sum(each.num_cached_tokens for each in stats if each is not None)
        for name in names:
            if self._waiting[name].is_finished():
                del self._waiting[name]


def _ids(dice: random.Random, size: int) -> list[int]:
    return [dice.randrange(3, 32_000) for _ in range(size)]


def _reading_ns() -> float:
    """Return what a call costs that does nothing but read the clock."""
    clock = Clock()
    nothing = clock.timing(lambda: None)
    for _ in range(2_000):
        nothing()
    return clock.spent / clock.num_calls


def _hasher() -> Any:
    hash_of = get_hash_fn_by_name("sha256")
    init_none_hash(hash_of)
    return get_request_block_hasher(BLOCK, hash_of)


def _scheduler(kind: str, load: Workload, has_events: bool, folder: str) -> Any:
    model = ModelConfig(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=4_096)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=kind == "stock"),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=load.num_running,
            max_num_batched_tokens=2_048 if load.num_running > 8 else 512,
            max_model_len=4_096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    if has_events:
        endpoints = {name: f"ipc://{folder}/{kind}-{name}" for name in ("endpoint", "replay_endpoint")}
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **endpoints)
    config.cache_config.num_gpu_blocks = load.blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(load.blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    made = Scheduler if kind == "radixkv" else VllmScheduler
    structured = StructuredOutputManager(config)
    return made(config, cache, structured_output_manager=structured, block_size=BLOCK, log_stats=True)


@contextmanager
def _folder() -> Iterator[str]:
    """A folder with a model's configuration, and keys for the events."""
    from radixkv.signing import KeySet

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        KeySet.derive([b"keys of a benchmark"]).write(Path(folder) / "engine.keys")
        os.environ["RADIXKV_KEYS"] = str(Path(folder) / "engine.keys")
        yield folder


def measure(name: str, has_events: bool, pairs: int, folder: str) -> dict[str, Any]:
    """Serve a workload with both caches, turn by turn; which is first alternates. Returns medians over the pairs."""
    benches = {kind: Bench(kind, WORKLOADS[name], has_events, folder) for kind in KINDS}
    found: list[dict[str, dict[str, float]]] = []
    for seed in range(pairs + 1):
        order = KINDS if seed % 2 else KINDS[::-1]
        found.append({kind: benches[kind].turn(seed) for kind in order})
    for bench in benches.values():
        bench.scheduler.shutdown()
    del found[0]  # to warm up
    told: dict[str, Any] = {"workload": name, "events": has_events, "pairs": pairs}
    told["compiled"] = radixkv.COMPILED
    for figure, share in (("us", "share"), ("request", "request_share")):
        told[figure] = {
            kind: round(statistics.median(each[kind][figure] for each in found), 2) for kind in KINDS
        }
        shares = [each["radixkv"][figure] / each["stock"][figure] for each in found]
        told[share] = round(statistics.median(shares), 3)
        told[f"{share}_range"] = [round(min(shares), 3), round(max(shares), 3)]
    told["last"] = {kind: {key: found[-1][kind][key] for key in ("cached", "steps")} for kind in KINDS}
    return told


def profile(name: str, has_events: bool, folder: str) -> None:
    """Print what radixkv's scheduler does."""
    bench = Bench("radixkv", WORKLOADS[name], has_events, folder)
    with cProfile.Profile() as profiler:
        bench.turn(0)
    bench.scheduler.shutdown()
    print("steps", bench.num_steps)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--only", choices=list(WORKLOADS), default=None)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    with _folder() as folder:
        for name in [given.only] if given.only else list(WORKLOADS):
            for has_events in (False, True):
                if given.profile:
                    profile(name, has_events, folder)
                else:
                    print(json.dumps(measure(name, has_events, given.pairs, folder)), flush=True)


if __name__ == "__main__":
    main()
