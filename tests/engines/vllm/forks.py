"""One vLLM in this process: zeroed blocks and copied tails. Prints what came out as one line of JSON.

Run by ``test_forks.py``, with the arguments of ``in_process.py`` and these workloads:

    canary     a tenant's blocks are filled with a pattern, then other tenants take them
    beams      a beam search of 4 beams over 64 tokens, timed
    siblings   requests that leave a prompt in the middle of a block, one after the other
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

import in_process as process

PATTERN = 1234.5


def _worker_kv(llm: Any) -> list[Any]:
    """The worker's KV, a tensor a layer, block first."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return list(runner.kv_caches)


def _traces(kv: list[Any], block_ids: list[int]) -> int:
    """How many blocks hold the pattern anywhere."""
    return sum(any(bool((layer[each] == PATTERN).any()) for layer in kv) for each in block_ids)


def _canary(llm: Any, dice: random.Random) -> dict[str, Any]:
    """Acme fills the pool. Its blocks get the pattern. Then globex takes them, with requests of all lengths."""
    from radixkv.signing import KeySet
    from radixkv.tenancy.salt import make_salt

    keys, core = KeySet.load(os.environ["RADIXKV_KEYS"]), llm.llm_engine.engine_core.engine_core
    acme, globex, kv = make_salt(keys, "acme"), make_salt(keys, "globex"), _worker_kv(llm)
    cache, found, taken = core.scheduler.kv_cache_manager.radixkv.cache, [0], set[int]()
    theirs = [process._ids(dice, 700) for _ in range(3)]
    process._generate(llm, [{"prompt_token_ids": prompt, "cache_salt": acme} for prompt in theirs], 1)
    (namespace,) = cache.namespaces()
    resident = [each for prompt in theirs for each in cache.match(namespace, prompt).block_ids.tolist()]
    for layer in kv:
        layer[resident] = PATTERN
    execute = core.model_executor.execute_model

    def executing(output: Any, *args: Any, **named: Any) -> Any:
        result = execute(output, *args, **named)
        for request in core.scheduler.running:
            blocks = core.scheduler.kv_cache_manager.radixkv.blocks(request.request_id)
            taken.update(set(blocks) & set(resident))
            found[0] += _traces(kv, blocks)
        return result

    core.model_executor.execute_model = executing
    for size in (5, 33, 100, 250):
        prompts = [{"prompt_token_ids": process._ids(dice, size), "cache_salt": globex} for _ in range(3)]
        process._generate(llm, prompts, 20)
    return {"outputs": [], "traces": found[0], "num_filled": len(resident), "num_taken": len(taken)}


class _Tokenizer:
    """What a beam search asks of a tokenizer. Ids are enough here."""

    eos_token_id = -1

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def _beams(llm: Any, dice: random.Random) -> dict[str, Any]:
    """Three beam searches. The first is to warm up; the time of the others counts."""
    from vllm.sampling_params import BeamSearchParams

    llm.renderer.get_tokenizer = _Tokenizer
    outputs, seconds, prompts = [], [], [process._ids(dice, 500) for _ in range(3)]
    for prompt in prompts:
        started = time.perf_counter()
        (found,) = llm.beam_search(
            [{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=4, max_tokens=64, ignore_eos=True)
        )
        seconds.append(time.perf_counter() - started)
        outputs.append([list(each.tokens) for each in found.sequences])
    return {"outputs": outputs, "seconds": seconds[1:]}


def _siblings(llm: Any, dice: random.Random) -> dict[str, Any]:
    """Requests that leave the same chat at each place of a block, with the same salt or another one."""
    chat, outputs, cached = process._ids(dice, 200), [], []
    (answer,) = process._generate(llm, [{"prompt_token_ids": chat, "cache_salt": "a"}], 30)
    chat = [*chat, *answer.outputs[0].token_ids]
    for leaves in (*range(193, 229, 5), 229, 230):
        for salt in "ab":
            prompt = {"prompt_token_ids": [*chat[:leaves], *process._ids(dice, 3)], "cache_salt": salt}
            (answer,) = process._generate(llm, [prompt], 6)
            outputs.append(list(answer.outputs[0].token_ids))
            cached.append(answer.num_cached_tokens or 0)
    return {"outputs": outputs, "cached": cached}


process._WORKLOADS |= {"canary": _canary, "beams": _beams, "siblings": _siblings}

if __name__ == "__main__":
    print("FOUND", json.dumps(process.main(json.loads(sys.argv[1]))))
