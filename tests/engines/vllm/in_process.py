"""One vLLM in this process, on a CPU: chats of several turns, or a burst. Prints what came out as one line of JSON.

Run by ``test_vllm.py`` with the Python of an environment that has vLLM. Arguments: a JSON object with

    cache      "stock" or "radixkv"
    blocks     of 32 tokens
    is_async   whether vLLM schedules the next step before the output of the last one has come
    workload   "chats", "burst", "tenants", "strict", "limits" or "adapters"
    seed       of the prompts
    trace      a file for the calls of the scheduler (``scheduler_trace.py``); default: none are written
    model      folder of the model
    settings   further arguments of ``vllm.LLM``, if any
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def main(given: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler

    if "trace" in given:
        from tests.engines.vllm.scheduler_trace import register

        os.environ["RADIXKV_TRACE"] = given["trace"]
        register()
    if given["workload"] == "strict":
        os.environ["RADIXKV_ANONYMOUS"] = "0"
    is_stock = given["cache"] == "stock"
    named = "AsyncScheduler" if given["is_async"] else "Scheduler"
    settings: dict[str, Any] = {
        "model": given["model"],
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "block_size": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": given.get("batch", 512),
        "num_gpu_blocks_override": given["blocks"],
        "async_scheduling": given["is_async"],
        "enable_prefix_caching": is_stock,
        "disable_log_stats": False,
        **given.get("settings", {}),
    }
    if not is_stock:
        settings["scheduler_cls"] = f"radixkv.engines.vllm.{named}"
    llm = LLM(**settings)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    computed = _counted(scheduler)
    found = _WORKLOADS[given["workload"]](llm, random.Random(given["seed"]))
    found["num_computed"], found["num_steps"] = sum(computed), len(computed)
    found["scheduler"] = "AsyncScheduler" if isinstance(scheduler, VllmAsyncScheduler) else "Scheduler"
    if not is_stock:
        found["left"] = _left(scheduler.kv_cache_manager.radixkv)
    return found


def _counted(scheduler: Any) -> list[int]:
    """Count the tokens that each step computes."""
    counts: list[int] = []
    schedule = scheduler.schedule

    def counting(*args: Any, **named: Any) -> Any:
        output = schedule(*args, **named)
        if output.total_num_scheduled_tokens:
            counts.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counting
    return counts


def _left(cache: Any) -> dict[str, Any]:
    from radixkv.audit import invariants

    stats = cache.cache.stats()
    return {
        "violations": [str(each) for each in invariants.inspect(cache.cache).violations],
        "has_requests": cache.has_requests,
        "sequences": stats.num_sequences,
        "unaccounted": stats.num_blocks - stats.free_blocks - stats.resident_blocks - stats.lent_blocks,
        "evicted": stats.evicted_blocks,
        "tenants": stats.num_namespaces,
    }


def _ids(dice: random.Random, size: int) -> list[int]:
    return [dice.randrange(3, 2048) for _ in range(size)]


def _generate(llm: Any, prompts: list[dict[str, Any]], num_new: int = 24, n: int = 1) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0 if n == 1 else 1, seed=1, n=n, max_tokens=num_new, detokenize=False, ignore_eos=True
    )
    answers: list[Any] = llm.generate(prompts, sampling, use_tqdm=False)
    return answers


def _chats(llm: Any, dice: random.Random) -> dict[str, Any]:
    """12 chats of 4 turns in 3 salts, behind two system prompts."""
    systems = [_ids(dice, 640) for _ in range(2)]
    chats = [[*systems[at % 2], *_ids(dice, 40)] for at in range(12)]
    outputs, cached = [], 0
    for _ in range(4):
        prompts = [{"prompt_token_ids": chat, "cache_salt": f"s{at % 3}"} for at, chat in enumerate(chats)]
        for at, answer in enumerate(_generate(llm, prompts)):
            outputs.append(list(answer.outputs[0].token_ids))
            cached += answer.num_cached_tokens or 0
            chats[at] = [*chats[at], *outputs[-1], *_ids(dice, 30)]
    return {"outputs": outputs, "cached": cached}


def _burst(llm: Any, dice: random.Random) -> dict[str, Any]:
    """8 samples of one prompt of 1,000 tokens."""
    (answer,) = _generate(llm, [{"prompt_token_ids": _ids(dice, 1000)}], num_new=4, n=8)
    return {"outputs": [list(each.token_ids) for each in answer.outputs], "cached": answer.num_cached_tokens}


def _tenants(llm: Any, dice: random.Random) -> dict[str, Any]:
    """Two tenants with the same prompts, then the first again. Salts of the fleet, if there are keys."""
    from radixkv.signing import KeySet
    from radixkv.tenancy.salt import make_salt

    keys, forger = KeySet.load(os.environ["RADIXKV_KEYS"]), KeySet.derive([b"not the fleet's secret"])
    salts = [
        make_salt(keys, "acme"),
        make_salt(keys, "globex"),
        make_salt(keys, "acme"),
        make_salt(forger, "acme"),
    ]
    prompt, cached = _ids(dice, 500), []
    for salt in salts:
        (answer,) = _generate(llm, [{"prompt_token_ids": prompt, "cache_salt": salt}], num_new=2)
        cached.append(answer.num_cached_tokens or 0)
    return {"outputs": [], "cached": cached}


def _strict(llm: Any, dice: random.Random) -> dict[str, Any]:
    """Valid, forged and missing salts in one batch, where salts are required."""
    from radixkv.signing import KeySet
    from radixkv.tenancy.salt import make_salt

    keys, forger = KeySet.load(os.environ["RADIXKV_KEYS"]), KeySet.derive([b"not the fleet's secret"])
    salts = [make_salt(keys, "acme"), make_salt(forger, "acme"), None, "any text", make_salt(keys, "globex")]
    prompts = []
    for salt in salts:
        prompt: dict[str, Any] = {"prompt_token_ids": _ids(dice, 300)}
        prompts.append(prompt if salt is None else prompt | {"cache_salt": salt})
    answers = [_generate(llm, prompts, num_new=4), _generate(llm, [prompts[1]], num_new=4)]
    ended = [[answer.outputs[0].finish_reason for answer in each] for each in answers]
    return {"outputs": ended, "cached": 0}


def _limits(llm: Any, dice: random.Random) -> dict[str, Any]:
    """A tenant at its limit sends a flood before another tenant's requests; one request can never fit."""
    from radixkv.config import Tenant
    from radixkv.signing import KeySet
    from radixkv.tenancy.salt import SaltReader, make_salt
    from vllm import SamplingParams

    keys = KeySet.load(os.environ["RADIXKV_KEYS"])
    flood, calm = make_salt(keys, "flood"), make_salt(keys, "calm")
    core = llm.llm_engine.engine_core.engine_core
    cache = core.scheduler.kv_cache_manager.radixkv.cache
    cache.add_tenant(Tenant(SaltReader(keys).read(flood).tenant, max_blocks=24))
    preempted: list[str] = []
    preempt = core.scheduler._preempt_request

    def preempting(request: Any, *args: Any, **named: Any) -> Any:
        preempted.append(request.cache_salt)
        return preempt(request, *args, **named)

    core.scheduler._preempt_request = preempting
    prompts = [{"prompt_token_ids": _ids(dice, 300), "cache_salt": flood} for _ in range(6)]
    prompts.append({"prompt_token_ids": _ids(dice, 900), "cache_salt": flood})
    prompts += [{"prompt_token_ids": _ids(dice, 300), "cache_salt": calm} for _ in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=48, detokenize=False, ignore_eos=True)
    first_at: dict[int, int] = {}
    for prompt in prompts:
        llm.llm_engine.add_request(str(len(first_at)), prompt, sampling)
        first_at[len(first_at)] = -1
    outputs: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    for step in range(5000):
        if not llm.llm_engine.has_unfinished_requests():
            break
        for answer in llm.llm_engine.step():
            at = int(answer.request_id)
            if first_at[at] < 0 and answer.outputs[0].token_ids:
                first_at[at] = step
            if answer.finished:
                outputs[at], reasons[at] = list(answer.outputs[0].token_ids), answer.outputs[0].finish_reason
    cold = _generate(llm, [{**each, "cache_salt": calm} for each in prompts], num_new=48)
    return {
        "outputs": [outputs[at] for at in sorted(outputs)],
        "cold": [list(each.outputs[0].token_ids) for each in cold],
        "reasons": [reasons[at] for at in sorted(reasons)],
        "first_at": [first_at[at] for at in sorted(first_at)],
        "preempted": preempted,
    }


def _adapters(llm: Any, dice: random.Random) -> dict[str, Any]:
    """The same prompt without an adapter, with two, then with each again, and with the second's name for the first."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    folders = os.environ["ADAPTERS"].split(os.pathsep)
    first, second = (LoRARequest(f"adapter{at}", at + 1, folder) for at, folder in enumerate(folders))
    renamed = LoRARequest("adapter1", 7, folders[0])
    reloaded = LoRARequest("adapter0", 1, folders[1], load_inplace=True)
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    prompt, outputs, cached = {"prompt_token_ids": _ids(dice, 500)}, [], []
    for lora in (None, first, second, None, first, second, renamed, reloaded):
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False, lora_request=lora)
        outputs.append(list(answer.outputs[0].token_ids))
        cached.append(answer.num_cached_tokens or 0)
    return {"outputs": outputs, "cached": cached}


_WORKLOADS = {
    "adapters": _adapters,
    "limits": _limits,
    "strict": _strict,
    "chats": _chats,
    "burst": _burst,
    "tenants": _tenants,
}

if __name__ == "__main__":
    print("FOUND", json.dumps(main(json.loads(sys.argv[1]))))
