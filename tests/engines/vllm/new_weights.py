"""One vLLM in this process, on a CPU, whose weights change while it runs. Prints what came out as one line of JSON.

Run by ``test_weights.py`` with the Python of an environment that has vLLM. Arguments: a JSON object with

    cache      "stock" or "radixkv"
    is_async   whether vLLM schedules the next step before the output of the last one has come
    models     two folders of models that differ in their weights alone
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import in_process


def main(given: dict[str, Any]) -> dict[str, Any]:
    dice = random.Random(0)
    start = in_process._ids(dice, 150)
    prompts = [{"prompt_token_ids": [*start, *in_process._ids(dice, 50 + 7 * at)]} for at in range(4)]
    old, new = given["models"]
    named = "AsyncScheduler" if given["is_async"] else "Scheduler"
    ours = {"scheduler_cls": f"radixkv.engines.vllm.{named}"} if given["cache"] == "radixkv" else {}
    llm = _vllm(old, async_scheduling=given["is_async"], enable_prefix_caching=not ours, **ours)
    found: dict[str, Any] = {
        name: _changed(llm, prompts, change) for name, change in _changes(llm, old, new).items()
    }
    found["running"] = _running(llm, prompts, lambda: _reload(llm, new))
    if ours:
        cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.radixkv
        found |= {"left": in_process._left(cache), "weights": cache.weights}
    return found


def _vllm(model: str, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=200,
        disable_log_stats=False,
        **settings,
    )


def _changes(llm: Any, old: str, new: str) -> dict[str, Callable[[], object]]:
    """What is done to a vLLM with the old weights, in this order, by name."""
    core = llm.llm_engine.engine_core.engine_core

    def paused(clear_cache: bool) -> None:
        core.pause_scheduler("keep", clear_cache)
        core.resume_scheduler()

    return {
        "nothing": lambda: None,
        "checksums": lambda: llm.collective_rpc("compute_weight_checksums"),
        "pause, cache kept": lambda: paused(False),
        "pause, cache cleared": lambda: paused(True),
        "reload_weights, new": lambda: _reload(llm, new),
        "reload_weights, old": lambda: _reload(llm, old),
        "apply_model": lambda: llm.apply_model(_mirror),
        "a function in the workers": lambda: llm.collective_rpc(_mirror_in_worker),
        "weight_version": lambda: core.set_weight_version("step 2"),
        "weight_version again": lambda: core.set_weight_version("step 2"),
        "sleep 1": lambda: (llm.sleep(1), llm.wake_up()),
        "sleep 2": lambda: (llm.sleep(2), llm.wake_up(["weights"]), _reload(llm, old), llm.wake_up()),
        "sleep 0": lambda: (llm.sleep(0), llm.wake_up(["scheduling"])),
    }


def _reload(llm: Any, model: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": model})


def _mirror(model: Any) -> None:
    """Change the weights in place; a second time changes them back."""
    model.model.embed_tokens.weight.data.mul_(-1)


def _mirror_in_worker(worker: Any) -> None:
    _mirror(worker.get_model())


def _asked(llm: Any, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    answers = in_process._generate(llm, prompts, num_new=8)
    return {
        "outputs": [list(each.outputs[0].token_ids) for each in answers],
        "cached": [each.num_cached_tokens or 0 for each in answers],
    }


def _changed(llm: Any, prompts: list[dict[str, Any]], change: Callable[[], object]) -> dict[str, Any]:
    """Ask after a change: one prompt, then all; then all again with an empty cache."""
    change()
    found = {"first": _asked(llm, prompts[:1]), "all": _asked(llm, prompts)}
    llm.reset_prefix_cache()
    return found | {"cold": _asked(llm, prompts)}


def _running(llm: Any, prompts: list[dict[str, Any]], change: Callable[[], object]) -> dict[str, Any]:
    """Change the weights while requests run. Ask again, also for what was answered; then with an empty cache."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=48, detokenize=False, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for at, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(at), prompt, sampling)
    for step in range(200):
        if step == 12:
            change()
        if not llm.llm_engine.has_unfinished_requests():
            break
        for answer in llm.llm_engine.step():
            answers[answer.request_id] = list(answer.outputs[0].token_ids)
    first = _asked(llm, prompts[:1])
    longer = [
        {"prompt_token_ids": [*prompt["prompt_token_ids"], *answers[str(at)]]}
        for at, prompt in enumerate(prompts)
    ]
    found = {"answered": sum(map(len, answers.values())), "first": first, "all": _asked(llm, longer)}
    llm.reset_prefix_cache()
    return found | {"cold": _asked(llm, longer)}


if __name__ == "__main__":
    print("FOUND", json.dumps(main(json.loads(sys.argv[1]))))
