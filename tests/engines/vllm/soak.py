"""A soak of one vLLM in this process, on a CPU. Prints what it found as one line of JSON.

64 sessions of several tenants talk behind few system prompts, in turns. Some requests are cancelled, at any moment; a
small pool preempts; a thread purges tenants while steps run. Afterwards a vLLM without a cache computes every finished
request again, from its ids alone. Finished requests go to a file, so that the memory shown is the engine's.

Run by ``test_soak.py`` with the Python of an environment that has vLLM. Arguments: a JSON object with

    cache      "radixkv": ``radixkv.engines.vllm``; "connector": vLLM's own with host memory behind it;
               "stock": vLLM's own alone, to compare the memory: nothing is purged
    blocks     of 32 tokens; host_blocks: of host memory
    is_async   whether vLLM schedules the next step before the output of the last one has come
    seconds    of the soak, without the cold run
    seed       of everything
    answers    file for the finished requests; it must not exist
    model      folder of the model; keys: file of the engine's keys
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import in_process  # sets the environment, too

NUM_SESSIONS = 64
TENANTS = ("acme", "globex", "initech")
MAX_TOKENS = 600


@dataclass
class Session:
    """A conversation. ``ids``: of its next prompt."""

    tenant: str
    ids: list[int]
    asked: str | None = None


@dataclass
class Soak:
    """What the soak did: finished requests, cancelled ones, the purges, and pairs of seconds and memory in KiB."""

    llm: Any
    dice: random.Random
    cache: Any
    seconds: float
    model: str
    answers: Any
    sessions: list[Session] = field(default_factory=list)
    running: dict[str, tuple[Session, list[int], int]] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TENANTS, 0))
    memory: list[tuple[int, int]] = field(default_factory=list)
    num_asked: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_purges: int = 0
    num_reloads: int = 0
    num_steps: int = 0

    def run(self) -> None:
        """Talk for ``seconds``, then let all requests end."""
        systems = [in_process._ids(self.dice, 200) for _ in range(3)]
        for at in range(NUM_SESSIONS):
            self.sessions.append(Session(TENANTS[at % len(TENANTS)], list(systems[at % 3])))
        stopping = threading.Event()
        purger = threading.Thread(target=self._purge, args=(stopping,))
        purger.start()
        began = next_look = time.monotonic()
        end = began + self.seconds
        next_reload = next_look + self.seconds / 20
        while self.running or time.monotonic() < end:
            if time.monotonic() < end:
                self._ask(systems)
                if self.dice.random() < 0.1:
                    self._cancel()
            self._step()
            if time.monotonic() > next_reload:
                self._reload()
                next_reload = time.monotonic() + self.seconds / 10
            if time.monotonic() > next_look:
                next_look += self.seconds / 40
                self.memory.append((round(time.monotonic() - began), _resident_kib()))
        stopping.set()
        purger.join()

    def _ask(self, systems: list[list[int]]) -> None:
        for session in self.sessions:
            if session.asked is not None or self.dice.random() > 0.3:
                continue
            if len(session.ids) > MAX_TOKENS:
                session.ids = list(self.dice.choice(systems))
            session.ids += in_process._ids(self.dice, self.dice.randrange(1, 40))
            self.num_asked += 1
            session.asked, num_new = f"r{self.num_asked}", self.dice.randrange(1, 48)
            prompt = {"prompt_token_ids": list(session.ids), "cache_salt": self._salt(session)}
            self.llm.llm_engine.add_request(session.asked, prompt, _sampling(num_new))
            self.running[session.asked] = session, list(session.ids), num_new

    def _salt(self, session: Session) -> str:
        from radixkv.tenancy.salt import make_salt

        return make_salt(in_process_keys(), session.tenant, self.generations[session.tenant])

    def _cancel(self) -> None:
        if self.running:
            chosen = self.dice.choice(list(self.running))
            self.llm.llm_engine.abort_request([chosen])
            self._end(chosen)
            self.num_cancelled += 1

    def _end(self, request_id: str) -> Session:
        session, _, _ = self.running.pop(request_id)
        session.asked = None
        return session

    def _step(self) -> None:
        self.num_steps += 1
        for output in self.llm.llm_engine.step():
            if output.finished and output.request_id in self.running:
                _, ids, num_new = self.running[output.request_id]
                answer = list(output.outputs[0].token_ids)
                assert len(answer) == num_new, (len(answer), num_new)
                self.answers.write(f"{json.dumps([ids, answer])}\n")
                self.num_finished += 1
                self._end(output.request_id).ids = [*ids, *answer]

    def _reload(self) -> None:
        """Begin a new version of the weights, which are the same, so that no token may change."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": self.model})
        self.num_reloads += 1

    def _purge(self, stopping: threading.Event) -> None:
        """Purge a tenant at times, as the control channel does. Half of the purges end the tenant's salts too."""
        dice = random.Random(self.dice.random())
        while self.cache.salts is not None and not stopping.wait(dice.uniform(0.1, 1.0)):
            tenant = dice.choice(TENANTS)
            (engine_tenant,) = self.cache.salts.tenant_ids(tenant)
            if dice.random() < 0.5:
                generation = self.generations[tenant] + 1
                self.cache.salts.raise_generation(engine_tenant, generation)
                self.generations[tenant] = generation
            self.cache.purge(engine_tenant)
            self.num_purges += 1


class Managed:
    """The cache of radixkv.engines.vllm."""

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        self._adapter, self.salts = manager.radixkv, manager._salts
        self.index = self._adapter.cache

    def purge(self, tenant: str) -> None:
        """Purge, as the control channel does."""
        self._adapter.purged()
        self.index.purge(tenant)
        self._adapter.purged()

    def left(self) -> int:
        """Return how many requests are left."""
        return len(self._adapter._requests)


class Connected:
    """The tiers of radixkv.engines.vllm.connector."""

    def __init__(self, scheduler: Any) -> None:
        self._level = scheduler.connector.radixkv
        self.salts, self.index = self._level._keys._salts, self._level.cache

    def purge(self, tenant: str) -> None:
        """Purge, as the control channel does."""
        self.index.purge(tenant)

    def left(self) -> int:
        """Return how many requests, loads and saves are left."""
        return len(self._level._requests) + self._level.num_running


def in_process_keys() -> Any:
    """Return the fleet's keys."""
    from radixkv.signing import KeySet

    return KeySet.load(os.environ["RADIXKV_KEYS"])


class Stock:
    """vLLM's own cache, which nobody purges."""

    salts = index = None

    def left(self) -> int:
        """Return 0."""
        return 0


def main(given: dict[str, Any]) -> dict[str, Any]:
    found = _soaked(given)
    gc.collect()
    return {**found, "wrong": _wrong(given)}


def _soaked(given: dict[str, Any]) -> dict[str, Any]:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    llm = _vllm(given, **_settings(given))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = in_process_preemptions(scheduler)
    cache = {"radixkv": Managed, "connector": Connected, "stock": lambda _: Stock()}[given["cache"]](
        scheduler
    )
    with Path(given["answers"]).open("x") as answers:
        soak = Soak(llm, random.Random(given["seed"]), cache, given["seconds"], given["model"], answers)
        soak.run()
    found = {"left": _left(cache, scheduler), "num_preempted": preempted[0]}
    for name in ("num_asked", "num_finished", "num_cancelled", "num_purges", "num_reloads", "num_steps"):
        found[name] = getattr(soak, name)
    found["memory"] = soak.memory
    llm.llm_engine.engine_core.shutdown()
    ensure_kv_transfer_shutdown()  # the connector is global in a process
    return found


def in_process_preemptions(scheduler: Any) -> list[int]:
    """Return a list whose only element counts the preemptions."""
    count = [0]
    preempt = scheduler._preempt_request

    def counting(*args: Any, **named: Any) -> Any:
        count[0] += 1
        return preempt(*args, **named)

    scheduler._preempt_request = counting
    return count


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    if given["cache"] == "stock":
        return {"enable_prefix_caching": True}
    if given["cache"] == "radixkv":
        named = "AsyncScheduler" if given["is_async"] else "Scheduler"
        return {"scheduler_cls": f"radixkv.engines.vllm.{named}", "enable_prefix_caching": False}
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="RadixConnector",
        kv_connector_module_path="radixkv.engines.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"host_blocks": given["host_blocks"], "keys": os.environ["RADIXKV_KEYS"]},
    )
    return {"kv_transfer_config": transfer, "enable_prefix_caching": True}


def _vllm(given: dict[str, Any], **settings: Any) -> Any:
    from vllm import LLM

    defaults = {"num_gpu_blocks_override": given["blocks"], "async_scheduling": given["is_async"]}
    return LLM(
        model=given["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        disable_log_stats=False,
        **{**defaults, **settings},
    )


def _sampling(num_new: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=num_new, detokenize=False, ignore_eos=True)


def _left(cache: Any, scheduler: Any) -> dict[str, Any]:
    from radixkv.audit import invariants

    if cache.index is None:
        return {"requests": len(scheduler.requests)}
    stats = cache.index.stats()
    return {
        "violations": [str(each) for each in invariants.inspect(cache.index).violations],
        "requests": cache.left() + len(scheduler.requests),
        "sequences": stats.num_sequences,
        "leased": stats.resident_blocks - cache.index.evictable_blocks,
        "unaccounted": stats.num_blocks - stats.free_blocks - stats.resident_blocks - stats.lent_blocks,
    }


def _wrong(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Compute every finished request without a cache. Returns those that got other tokens."""
    cold = _vllm(given, num_gpu_blocks_override=1024, enable_prefix_caching=False, async_scheduling=False)
    wrong = []
    with Path(given["answers"]).open() as lines:
        while some := [json.loads(line) for line in islice(lines, 1000)]:
            prompts = [{"prompt_token_ids": ids} for ids, _ in some]
            answers = cold.generate(prompts, [_sampling(len(answer)) for _, answer in some], use_tqdm=False)
            for (ids, answer), again in zip(some, answers, strict=True):
                expected = list(again.outputs[0].token_ids)
                if answer != expected:
                    at = next(at for at in range(len(answer)) if answer[at] != expected[at])
                    wrong.append({"prompt": len(ids), "answer": len(answer), "from": at})
    return wrong


def _resident_kib() -> int:
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
    ]
    return int(line.split()[1])


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    os.environ.update(RADIXKV_KEYS=arguments["keys"], RADIXKV_POLICY="learned")
    print("FOUND", json.dumps(main(arguments)))
