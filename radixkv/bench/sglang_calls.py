"""CPU of the calls that SGLang's scheduler makes to its prefix cache, under eviction: radixkv's and SGLang's own.

    python -m radixkv.bench.sglang_calls          with the Python of an environment that has SGLang

Both caches serve the same requests over SGLang's own pools, in turns: chats of several turns behind shared prompts, in
a pool that holds a third of them. Prints a line of JSON: medians of all pairs, in µs of CPU a call, and ratios.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from radixkv.engines.sglang import RadixCache

PAGE: Final = 16
NUM_TOKENS: Final = 65_536
NUM_CHATS: Final = 96
NUM_TURNS: Final = 6
PAIRS: Final = 7
CACHES: Final[dict[str, Callable[[CacheInitParams], Any]]] = {
    "stock": UnifiedRadixCache,
    "radixkv": RadixCache,
}


class Bench:
    """One cache, its pools, and the nanoseconds of CPU of its calls."""

    def __init__(self, kind: str) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(
            NUM_TOKENS, PAGE, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
        )
        self.rows = ReqToTokenPool(4, 8_192, "cpu", enable_memory_saver=False)
        self.cache = CACHES[kind](
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.spent: dict[str, list[int]] = {}
        self.num_cached = self.num_evicted = 0

    def timed(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Make a call, and note its CPU time: other processes do not count."""
        begin = time.thread_time_ns()
        found = call(*given, **named)
        self.spent.setdefault(name, []).append(time.thread_time_ns() - begin)
        return found

    def serve(self, ids: array[int]) -> None:
        """Serve one request, as SGLang's scheduler does: two chunks, then its end."""
        cache, allocator = self.cache, self.allocator
        params = MatchPrefixParams(key=RadixKey(ids[:-1]))
        match = self.timed("match", cache.match_prefix, params)
        node, num = match.last_device_node, match.device_prefix_len
        lock = self.timed("lock", cache.lock, node)
        self.timed("sizes", cache.evictable_size)
        self.num_cached += num
        needed = -(-(len(ids) - num) // PAGE) * PAGE
        short = needed - allocator.available_size()
        if short > 0:
            done = self.timed("evict", cache.evict_for_alloc, EvictParams(num_tokens=short))
            self.num_evicted += done.num_tokens_evicted
        fresh = allocator.alloc(needed)
        row = self.rows.req_to_token[1]
        row[:num] = cache.path_device_indices(node).to(torch.int32)
        row[num : num + needed] = fresh.to(torch.int32)
        req = _request(ids, num, node, lock)
        half = (num + len(ids)) // 2
        for stop in (half, len(ids)):
            self.timed("checkpoint", cache.checkpoint, req, up_to=stop)
        start = req.kv.cache_protected_len
        if (rest := row[start : num + needed].to(torch.int64)).numel():
            allocator.free_segment(rest, start_pos=start)
        self.timed("unlock", cache.unlock, req.lock)


def _request(ids: array[int], num: int, node: Any, lock: Any) -> Any:
    return SimpleNamespace(
        kv=ReqKvInfo(req_pool_idx=1, cache_protected_len=num, kv_allocated_len=len(ids)),
        lock=lock,
        last_node=node,
        full_untruncated_fill_ids=ids,
        origin_input_ids=ids,
        output_ids=array("q"),
        priority=None,
        extra_key=None,
        cache_salt=None,
        kv_rotation_base=None,
        is_prefill_only=False,
        session_id=None,
        session=None,
        rid="r",
        finished=lambda: False,
    )


def _requests(seed: int) -> list[array[int]]:
    dice = random.Random(seed)

    def some(size: int) -> list[int]:
        return [dice.randrange(32_000) for _ in range(size)]

    shared = [some(640) for _ in range(4)]
    chats = [[*dice.choice(shared), *some(200)] for _ in range(NUM_CHATS)]
    found = []
    for _ in range(NUM_TURNS):
        for chat in dice.sample(chats, NUM_CHATS):
            chat += some(dice.randrange(40, 200))
            found.append(array("q", chat))
    return found


def main() -> dict[str, Any]:
    """Measure all pairs. Returns µs of CPU a call, and radixkv's share of SGLang's own."""
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in CACHES}
    counts = {}
    for pair in range(PAIRS):
        requests, benches = _requests(pair), {kind: Bench(kind) for kind in CACHES}
        for ids in requests:
            for bench in benches.values():
                bench.serve(ids)
        for kind, bench in benches.items():
            counts[kind] = {"cached": bench.num_cached, "evicted": bench.num_evicted}
            for name, spent in bench.spent.items():
                found[kind].setdefault(name, []).append(statistics.fmean(spent) / 1_000)
    for told in found.values():
        told["lock + unlock"] = [a + b for a, b in zip(told.pop("lock"), told.pop("unlock"), strict=True)]
    shares = {
        name: round(
            statistics.median(ours / stock for ours, stock in zip(found["radixkv"][name], each, strict=True)),
            3,
        )
        for name, each in found["stock"].items()
    }
    us = {
        kind: {name: round(statistics.median(each), 1) for name, each in told.items()}
        for kind, told in found.items()
    }
    return {"pairs": PAIRS, "us": us, "share": shares, "last": counts}


if __name__ == "__main__":
    print(json.dumps(main()))
