"""Real coding-agent sessions through vLLM's scheduler, without a model: how much does a cache find?

    $RADIXKV_VLLM tests/engines/vllm/sessions.py SESSIONS.jsonl.gz [--seeds 0,1,2] [--concurrent 32] [--step-tokens 640]

Prints one line of JSON for each seed and each cache: vLLM's own (LRU), and radixkv (``RADIXKV_POLICY``: learned). All
managers, block pools and schedulers are the real ones. In the model's place, tokens are sampled with which the
session's next prompt goes on.

A line of SESSIONS is a session (corpus ``callanjfox/kv-cache-tester``, packed): ``requests`` has rows of ``[t, agent,
tokens_in, tokens_out, api_time, think_time, keep, runs, stop]``. An id stands for 64 tokens, here for 4, so that 8 of
them are a block of 32. A session ends before its first prompt of more than 4,096 tokens in whole blocks.

``concurrent`` sessions run at a time; a new one begins as one ends. A step takes half a second of virtual time, and
radixkv's maintenance runs once a second of it. The next request of a session comes as long after an answer as in the
corpus, at most 5 minutes. The pool holds what the running sessions' last prompts need together, on average over all
requests, divided by ``oversubscribed``. A step computes at most ``step_tokens`` tokens. With few of them a queue forms:
640 are 20,000 of the corpus's tokens a second.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")

BLOCK = 32
IDS_A_BLOCK = 8
TOKENS_AN_ID = BLOCK // IDS_A_BLOCK
MOST_TOKENS = 4_096
KAPPA = 8
STEP_S = 0.5
LONGEST_PAUSE_S = 300.0
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 8_192,
    "torch_dtype": "float32",
}


class Asked(NamedTuple):
    """A request of a session: when it is asked after the last answer, its ids, and how many tokens are generated."""

    pause_s: float
    ids: list[int]
    num_new: int


Session = list[Asked]


def sessions(path: Path) -> list[Session]:
    """Read sessions of at least 3 requests, cut before the first long prompt."""
    found: list[Session] = []
    with gzip.open(path, "rt") as file:
        lines = list(file)
    for number, line in enumerate(lines):
        rows, last = [], dict[str, list[int]]()
        for t, agent, _, num_out, api_s, _, keep, runs, _ in json.loads(line)["requests"]:
            ids = last.get(agent, [])[:keep] + [
                each for start, size in runs for each in range(start, start + size)
            ]
            last[agent] = ids
            rows.append((t, api_s, ids, num_out))
        rows.sort(key=lambda row: row[0])
        session, free_at = Session(), 0.0
        for t, api_s, ids, num_out in rows if len(rows) >= 3 else ():
            if len(ids) // IDS_A_BLOCK * BLOCK > MOST_TOKENS:
                break
            pause_s = min(max(t - free_at, STEP_S), LONGEST_PAUSE_S)
            num_new = max(num_out * TOKENS_AN_ID // 64, 1)
            session.append(Asked(pause_s, [number << 20 | each for each in ids], num_new))
            free_at = t + api_s
        if session:
            found.append(session)
    return found


def tokens(ids: list[int]) -> list[int]:
    """The tokens of 64-token ids, at least one."""
    return [each * TOKENS_AN_ID + at for each in ids for at in range(TOKENS_AN_ID)] or [0]


def pool_size(pool: list[Session], concurrent: int, oversubscribed: float) -> int:
    """Blocks for the sessions that run at a time, on average over all requests, divided by ``oversubscribed``."""
    sizes = [len(asked.ids) // IDS_A_BLOCK for session in pool for asked in session]
    return int(sum(sizes) / len(sizes) * concurrent / oversubscribed)


class Replay:
    """One scheduler, and the sessions that it serves in virtual time."""

    def __init__(self, kind: str, num_blocks: int, step_tokens: int) -> None:
        self.now = 0.0
        self.scheduler = _scheduler(kind, num_blocks, step_tokens, lambda: self.now)
        self._maintain_at = 0.0
        self._maintain = None if kind == "stock" else self.scheduler.kv_cache_manager.radixkv.cache.maintain
        self.num_cached = self.num_prompt = self.num_steps = 0
        self.cpu_s = self.longest_wait_s = 0.0
        self._waiting: dict[str, tuple[float, int]] = {}  # since when, and how many waited before
        self._passed: Counter[str] = Counter()  # by how many that came later
        self.most_above_bound = -inf
        self._hasher = _hasher() if kind == "stock" else None
        self._running: dict[str, tuple[Any, list[int], int, int]] = {}

    def run(self, pool: list[Session], concurrent: int) -> None:
        """Serve all sessions to their end."""
        begun = min(concurrent, len(pool))
        dice = random.Random(0)
        due = [(dice.random() * 60, at, 0) for at in range(begun)]
        heapq.heapify(due)
        while due or self._running:
            while due and due[0][0] <= self.now:
                _, at, turn = heapq.heappop(due)
                self._ask(pool[at], at, turn)
            if not self._running:
                self.now = max(self.now, due[0][0])
                continue
            self.now += STEP_S
            if self._maintain is not None and self.now >= self._maintain_at:
                self._maintain()
                self._maintain_at = self.now + 1.0
            for at, turn in self._step():
                if turn + 1 < len(pool[at]):
                    heapq.heappush(due, (self.now + pool[at][turn + 1].pause_s, at, turn + 1))
                elif begun < len(pool):
                    heapq.heappush(due, (self.now + 1, begun, 0))
                    begun += 1

    def _ask(self, session: Session, at: int, turn: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        asked = session[turn]
        prompt = tokens(asked.ids)
        following = tokens(session[turn + 1].ids) if turn + 1 < len(session) else []
        new = following[len(prompt) :] if following[: len(prompt)] == prompt else []
        new += [127] * (asked.num_new - len(new))
        sampling = SamplingParams(temperature=0, max_tokens=asked.num_new, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        request = Request(f"{at}-{turn}", prompt, sampling, None, block_hasher=self._hasher)
        self._running[request.request_id] = request, new, at, turn
        self.num_prompt += len(prompt)
        self._waiting[request.request_id] = self.now, len(self._waiting)
        began = time.thread_time()
        self.scheduler.add_request(request)
        self.cpu_s += time.thread_time() - began

    def _began(self, name: str) -> None:
        """Note the start of a request: what it waited, and whom it passed. Names are in order of arrival."""
        before = list(self._waiting).index(name)
        since, earlier = self._waiting.pop(name)
        self.longest_wait_s = max(self.longest_wait_s, self.now - since)
        self._passed.update(list(self._waiting)[:before])
        self.most_above_bound = max(self.most_above_bound, self._passed.pop(name, 0) - KAPPA * (earlier + 1))

    def _step(self) -> Iterator[tuple[int, int]]:
        """Make a step. Returns the sessions and turns that ended."""
        from vllm.v1.outputs import ModelRunnerOutput

        began = time.thread_time()
        output = self.scheduler.schedule()
        self.cpu_s += time.thread_time() - began
        self.num_steps += 1
        for new in output.scheduled_new_reqs:
            self._began(new.req_id)
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            request, new, *_ = self._running[name]
            is_whole = request.num_computed_tokens >= request.num_tokens
            sampled.append([new[request.num_output_tokens]] if is_whole else [])
        found = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        began = time.thread_time()
        told = self.scheduler.update_from_output(output, found)
        self.cpu_s += time.thread_time() - began
        stats = [each.prefill_stats for client in told.values() for each in client.outputs]
        self.num_cached += sum(each.num_cached_tokens for each in stats if each is not None)
        for name in names:
            request, _, at, turn = self._running[name]
            if request.is_finished():
                del self._running[name]
                yield at, turn


def _scheduler(kind: str, num_blocks: int, step_tokens: int, clock: Any) -> Any:
    import torch

    from radixkv.engines.vllm import manager as shell
    from radixkv.index.cache import PrefixCache
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    folder = tempfile.TemporaryDirectory()
    (Path(folder.name) / "config.json").write_text(json.dumps(MODEL))
    length = 2 * MOST_TOKENS
    model = ModelConfig(folder.name, skip_tokenizer_init=True, dtype="float32", max_model_len=length)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=kind == "stock"),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=step_tokens,
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    config.cache_config.num_gpu_blocks = num_blocks + 1
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    shell.PrefixCache = partial(PrefixCache, clock=clock)  # type: ignore[assignment,misc]
    made = shell.Scheduler if kind == "radixkv" else Scheduler
    return made(
        config,
        cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def _hasher() -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    hash_of = get_hash_fn_by_name("sha256")
    init_none_hash(hash_of)
    return get_request_block_hasher(BLOCK, hash_of)


def replayed(
    kind: str, pool: list[Session], concurrent: int, num_blocks: int, step_tokens: int = 2 * MOST_TOKENS
) -> dict[str, Any]:
    """Serve the sessions with one cache. Returns what it found, and what it has left open."""
    replay = Replay(kind, num_blocks, step_tokens)
    replay.run(pool, concurrent)
    found: dict[str, Any] = {"cache": kind, "cached": replay.num_cached, "prompt": replay.num_prompt}
    found |= {"blocks": num_blocks, "steps": replay.num_steps, "requests": sum(map(len, pool))}
    found["cpu_us_a_step"] = round(replay.cpu_s / replay.num_steps * 1e6, 1)
    found["longest_wait_s"] = replay.longest_wait_s
    found["most_above_bound"] = replay.most_above_bound
    found["hours"] = round(replay.now / 3600, 1)
    if kind == "radixkv":
        from radixkv.audit import invariants

        cache = replay.scheduler.kv_cache_manager.radixkv.cache
        stats = cache.stats()
        found["sequences"] = stats.num_sequences
        found["unaccounted"] = (
            stats.num_blocks - stats.free_blocks - stats.resident_blocks - stats.lent_blocks
        )
        found["violations"] = [str(each) for each in invariants.inspect(cache).violations]
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--oversubscribed", type=float, default=1.5)
    parser.add_argument("--step-tokens", type=int, default=2 * MOST_TOKENS)
    given = parser.parse_args(arguments)
    for seed in map(int, given.seeds.split(",")):
        pool = sessions(given.sessions)
        num_blocks = pool_size(pool, given.concurrent, given.oversubscribed)
        random.Random(seed).shuffle(pool)
        for kind in ("stock", "radixkv"):
            found = replayed(kind, pool, given.concurrent, num_blocks, given.step_tokens)
            print(json.dumps({"seed": seed, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
