"""One stock vLLM in this process, on a CPU, with host memory behind it. Prints what came out as a line of JSON.

Run by ``test_connector.py`` with the Python of an environment that has vLLM. Arguments: a JSON object with

    connector  "none", "radixkv", or "example" or "offloading" beside radixkv's
    extra      further settings of radixkv's connector; policy and role: of vLLM's
    blocks     of 32 tokens of vLLM's own cache; host_blocks: of host memory
    num_workers  tensor parallel, each in a process of its own
    is_async   whether vLLM schedules the next step before the output of the last one has come
    workload   "chats", "long", "faults", "tenants", "owed", "reset", or "turn": the next turn of the chats, kept in
               folder
    seed       of the prompts
    model      folder of the model; folder: a place for files
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import in_process  # sets the environment, too


def main(given: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(
        model=given["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        block_size=32,
        max_num_seqs=8,
        max_num_batched_tokens=given.get("batch", 512),
        num_gpu_blocks_override=given["blocks"],
        async_scheduling=given["is_async"],
        enable_prefix_caching=True,
        disable_log_stats=False,
        tensor_parallel_size=given.get("num_workers", 1),
        **_connector(given),
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    computed, preempted = in_process._counted(scheduler), _preemptions(scheduler)
    found = _WORKLOADS[given["workload"]](llm, random.Random(given["seed"]), scheduler)
    found["num_computed"], found["num_preempted"] = sum(computed), len(preempted)
    if scheduler.connector is not None:
        if _ours(scheduler.connector).radixkv.disk is not None:
            scheduler.connector.shutdown()  # what is being stored is leased until then
        found["left"] = _left(_ours(scheduler.connector).radixkv)
        found["metrics"] = {
            each.name.removeprefix("vllm:radixkv_"): each.value
            for each in llm.get_metrics()
            if each.name.startswith("vllm:radixkv_")
        }
    return found


def _connector(given: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    common = {
        "kv_role": given.get("role", "kv_both"),
        "kv_load_failure_policy": given.get("policy", "recompute"),
    }
    extra = {"host_blocks": given["host_blocks"], "policy": "lru", **given.get("extra", {})}
    ours = {
        **common,
        "kv_connector": "RadixConnector",
        "kv_connector_module_path": "radixkv.engines.vllm.connector",
        "kv_connector_extra_config": extra,
    }
    others = {
        "example": {
            **common,
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": given.get("folder")},
        },
        "offloading": {
            **common,
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
        },
    }
    if given["connector"] == "none":
        return {}
    if given["connector"] == "radixkv":
        return {"kv_transfer_config": KVTransferConfig(**ours)}
    both = {"connectors": [ours, others[given["connector"]]]}
    chosen = KVTransferConfig(**common, kv_connector="MultiConnector", kv_connector_extra_config=both)
    return {"kv_transfer_config": chosen, "disable_hybrid_kv_cache_manager": True}


def _ours(connector: Any) -> Any:
    """Return radixkv's connector, alone or among others."""
    found = [each for each in getattr(connector, "_connectors", [connector]) if hasattr(each, "radixkv")]
    return found[0] if found else None


def _worker() -> Any:
    """Return the host memory of the worker, which is in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    return next(
        each._blocks
        for each in getattr(connector, "_connectors", [connector])
        if getattr(each, "_blocks", None)
    )


def _preemptions(scheduler: Any) -> list[str]:
    names: list[str] = []
    preempt = scheduler._preempt_request

    def counting(request: Any, *args: Any, **named: Any) -> Any:
        names.append(request.request_id)
        return preempt(request, *args, **named)

    scheduler._preempt_request = counting
    return names


def _left(level: Any) -> dict[str, Any]:
    from radixkv.audit import invariants

    stats = level.cache.stats()
    return {
        "violations": [str(each) for each in invariants.inspect(level.cache).violations],
        "running": level.num_running,
        "requests": len(level._requests),
        "sequences": stats.num_sequences,
        "unaccounted": stats.num_blocks - stats.free_blocks - stats.resident_blocks - stats.lent_blocks,
        "leased": stats.resident_blocks - level.cache.evictable_blocks,
        "evicted": stats.evicted_blocks,
        "resident": stats.resident_blocks,
    }


def _counting_loads(scheduler: Any, externals: list[int]) -> None:
    load = _ours(scheduler.connector).radixkv.load

    def counting(request_id: str, blocks: Any, num_tokens: int) -> None:
        externals.append(num_tokens)
        load(request_id, blocks, num_tokens)

    _ours(scheduler.connector).radixkv.load = counting


def _chats(llm: Any, dice: random.Random, scheduler: Any) -> dict[str, Any]:
    """12 chats of 4 turns in 3 salts, as ``in_process``."""
    externals: list[int] = []
    if scheduler.connector is not None:
        _counting_loads(scheduler, externals)
    return {**in_process._chats(llm, dice), "external": sum(externals)}


def _turn(llm: Any, dice: random.Random, scheduler: Any) -> dict[str, Any]:
    """The next turn of the chats of ``in_process``, each turn in a process of its own."""
    path = Path(os.environ["RADIXKV_CHATS"])
    if not path.exists():
        systems = [in_process._ids(dice, 640) for _ in range(2)]
        chats = [[*systems[at % 2], *in_process._ids(dice, 40)] for at in range(12)]
    else:
        kept = json.loads(path.read_text())
        chats, state = kept["chats"], kept["dice"]
        dice.setstate((state[0], tuple(state[1]), state[2]))
    externals: list[int] = []
    if scheduler.connector is not None:
        _counting_loads(scheduler, externals)
    outputs, num_prompt = [], sum(map(len, chats))
    prompts = [{"prompt_token_ids": chat, "cache_salt": f"s{at % 3}"} for at, chat in enumerate(chats)]
    for at, answer in enumerate(in_process._generate(llm, prompts)):
        outputs.append(list(answer.outputs[0].token_ids))
        chats[at] = [*chats[at], *outputs[-1], *in_process._ids(dice, 30)]
    path.write_text(json.dumps({"chats": chats, "dice": dice.getstate()}))
    return {"outputs": outputs, "external": sum(externals), "num_prompt": num_prompt}


def _long(llm: Any, dice: random.Random, scheduler: Any) -> dict[str, Any]:
    """10 short prompts with long answers."""
    prompts = [{"prompt_token_ids": in_process._ids(dice, 100)} for _ in range(10)]
    answers = in_process._generate(llm, prompts, num_new=400)
    return {"outputs": [list(answer.outputs[0].token_ids) for answer in answers]}


def _faults(llm: Any, dice: random.Random, scheduler: Any) -> dict[str, Any]:
    """Chats, while loads fail: slots whose bytes were lost, and errors of the copy itself."""
    worker, faults = _worker(), random.Random(7)
    copy_in, load = worker._copy_in, worker.load

    def failing(slots: Any, blocks: Any) -> None:
        if faults.random() < 0.2:
            raise OSError("planted: a copy fails")
        copy_in(slots, blocks)

    def losing(work: Any) -> None:
        if len(work.load_slots) and faults.random() < 0.3:
            lost = work.load_slots[faults.randrange(len(work.load_slots))]
            worker._zero(work.load_slots[work.load_slots == lost])
        load(work)

    worker._copy_in, worker.load = failing, losing
    return _chats(llm, dice, scheduler)


def _tenants(llm: Any, dice: random.Random, scheduler: Any) -> dict[str, Any]:
    """Two tenants with the same prompt, then the first again, then after its purge, then a forged salt."""
    from radixkv.signing import KeySet
    from radixkv.tenancy.salt import make_salt

    keys = KeySet.load(os.environ["RADIXKV_KEYS"])
    forger = KeySet.derive([b"not the fleet's secret"])
    level, prompt, external = _ours(scheduler.connector).radixkv, in_process._ids(dice, 500), []
    acme = make_salt(keys, "acme")
    purged = 0
    for at, salt in enumerate((acme, make_salt(keys, "globex"), acme, acme, make_salt(forger, "acme"))):
        if at == 3:
            purged = sum(level.cache.purge(each) for each in level.cache.tenants() if each.startswith("t-"))
        llm.reset_prefix_cache()  # of vLLM alone
        (answer,) = in_process._generate(llm, [{"prompt_token_ids": prompt, "cache_salt": salt}], num_new=2)
        external.append(answer.num_cached_tokens or 0)
    return {"outputs": [], "external": external, "purged": purged}


def _owed(llm: Any, dice: random.Random, scheduler: Any) -> dict[str, Any]:
    """A purge that the disk can't do until vLLM is idle, then two prompts of a tenant that is configured as strict."""
    from radixkv.engines.control.client import ControlClient
    from radixkv.signing import KeySet
    from radixkv.tenancy.salt import SaltReader, make_salt

    keys = KeySet.load(os.environ["RADIXKV_KEYS"])
    level, prompt, external = _ours(scheduler.connector).radixkv, in_process._ids(dice, 500), []
    tier, purge, store = level.disk.records, level.disk.records.purge, level.disk.records.store
    stored: set[str] = set()

    def telling(namespace: Any, *args: Any, **named: Any) -> Any:
        stored.add(namespace.tenant)
        return store(namespace, *args, **named)

    def failing(tenant: str) -> int:
        raise OSError(5, "planted")

    def ask(who: str) -> None:
        llm.reset_prefix_cache()  # of vLLM alone
        (answer,) = in_process._generate(
            llm, [{"prompt_token_ids": prompt, "cache_salt": make_salt(keys, who)}], num_new=2
        )
        external.append(answer.num_cached_tokens or 0)

    def num_owed() -> list[float]:
        shown = [each.value for each in llm.get_metrics() if each.name == "vllm:radixkv_disk_owed_purges"]
        return [client.call("stats")["tiers"]["disk"]["owed_purges"], *shown]

    tier.store = telling
    ask("acme")
    with ControlClient(os.environ["RADIXKV_CONTROL"], keys) as client:
        owed = [num_owed()]
        tier.purge = failing
        is_owed = client.call("purge", {"tenant": "acme"})["owed"]
        ask("globex")
        owed.append(num_owed())
        tier.purge, until = purge, time.monotonic() + 120.0
        while num_owed()[0] and time.monotonic() < until:
            time.sleep(0.05)
        ask("initech")
        ask("initech")
        owed.append(num_owed())
    scheduler.connector.shutdown()  # it stores what waits
    (strict,) = SaltReader(keys).tenant_ids("initech")
    are_stored = len(stored), strict in stored
    return {"outputs": [], "external": external, "owed": owed, "is_owed": is_owed, "are_stored": are_stored}


def _reset(llm: Any, dice: random.Random, scheduler: Any) -> dict[str, Any]:
    """The same prompt four times: cold, from host memory, after a reset of it, and after new weights."""
    core, prompt, external = llm.llm_engine.engine_core.engine_core, in_process._ids(dice, 500), []
    for at in range(4):
        assert core.reset_prefix_cache(reset_connector=at == 2)
        if at == 3:
            core.set_weight_version("another")
        (answer,) = in_process._generate(llm, [{"prompt_token_ids": prompt}], num_new=2)
        external.append(answer.num_cached_tokens or 0)
    return {"outputs": [], "external": external}


_WORKLOADS = {
    "chats": _chats,
    "long": _long,
    "faults": _faults,
    "tenants": _tenants,
    "owed": _owed,
    "reset": _reset,
    "turn": _turn,
}

if __name__ == "__main__":
    print("FOUND", json.dumps(main(json.loads(sys.argv[1]))))
