"""One vLLM in this process, on a CPU: what it shows outside. Prints it as one line of JSON.

Run by ``test_outlets.py`` with the Python of an environment that has vLLM. Arguments: a JSON object with

    cache      "stock" or "radixkv"
    model      folder of the model
    folder     for sockets and events
    salts      three salts of requests
    algorithm  of vLLM's hashes
    purges     whether a tenant is purged over the control channel while its requests run
    by_vllm    whether vLLM's own settings switch events on, in place of variables
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
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


_METRICS = (
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions",
)


def main(given: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.config import KVEventsConfig

    is_stock, folder = given["cache"] == "stock", Path(given["folder"])
    settings: dict[str, Any] = {} if is_stock else {"scheduler_cls": "radixkv.engines.vllm.Scheduler"}
    endpoint, replay = f"ipc://{folder}/events", f"ipc://{folder}/events.replay"
    if given.get("by_vllm"):
        settings["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=endpoint,
            replay_endpoint=replay,
            topic="kv@a@m",
        )
    llm = LLM(
        model=given["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        block_size=32,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=400,
        async_scheduling=False,
        enable_prefix_caching=is_stock,
        prefix_caching_hash_algo=given["algorithm"],
        disable_log_stats=False,
        **settings,
    )
    found = _chats(llm, given)
    found["metrics"] = {each.name: each.value for each in llm.get_metrics() if each.name in _METRICS}
    found["stored"], found["topic"] = _replayed(replay)
    if not is_stock:
        found["num_tails"] = _num_tails(llm.llm_engine.engine_core.engine_core.scheduler)
        found["control"] = _controlled(folder) if "RADIXKV_SOCKET" in os.environ else {}
    llm.llm_engine.engine_core.shutdown()
    return found


def _num_tails(scheduler: Any) -> int:
    """Resident blocks that are filled in part. No event names them."""
    from radixkv.index.tokens import TAIL_FILL

    trees = scheduler.kv_cache_manager.radixkv.cache.snapshot().trees
    return sum(node.label.endswith(TAIL_FILL) for tree in trees for node in tree.nodes)


def _chats(llm: Any, given: dict[str, Any]) -> dict[str, Any]:
    """6 chats of 2 turns, in 3 salts."""
    from vllm import SamplingParams

    dice = random.Random(0)
    system = [dice.randrange(3, 2048) for _ in range(320)]
    chats = [[*system, *[dice.randrange(3, 2048) for _ in range(40)]] for _ in range(6)]
    sampling = SamplingParams(temperature=0, max_tokens=40, detokenize=False, ignore_eos=True)
    outputs, cached, queried = [], 0, 0
    for _ in range(2):
        stopping = threading.Event()
        purging = threading.Thread(target=_purge, args=(given["folder"], stopping))
        if given.get("purges"):
            purging.start()
        prompts = [
            {"prompt_token_ids": chat, "cache_salt": given["salts"][at % 3]} for at, chat in enumerate(chats)
        ]
        for at, answer in enumerate(llm.generate(prompts, sampling, use_tqdm=False)):
            outputs.append(list(answer.outputs[0].token_ids))
            cached += answer.num_cached_tokens or 0
            queried += len(chats[at])
            chats[at] = [*chats[at], *outputs[-1], *[dice.randrange(3, 2048) for _ in range(30)]]
        stopping.set()
        if given.get("purges"):
            purging.join()
    return {"outputs": outputs, "cached": cached, "queried": queried}


def _purge(folder: str, stopping: threading.Event) -> None:
    """Purge a tenant again and again."""
    from radixkv.engines.control.client import ControlClient
    from radixkv.signing import KeySet

    with ControlClient(f"{folder}/control/control.sock", KeySet.load(os.environ["RADIXKV_KEYS"])) as client:
        while not stopping.wait(0.02):
            client.call("purge", {"tenant": "acme"})


def _controlled(folder: Path) -> dict[str, Any]:
    from radixkv.engines.control.client import ControlClient
    from radixkv.signing import KeySet

    keys = KeySet.load(os.environ["RADIXKV_KEYS"])
    with ControlClient(folder / "control" / "control.sock", keys) as client:
        found = {"stats": client.call("stats")["cache"], "tenants": list(client.tenants())}
        found["audit"] = client.call("audit")["violations"]
        found["purge"] = client.call("purge", {"tenant": "acme", "generation": 1})
        found["left"] = client.call("tenants", {"tenant": "acme"})["tenants"]
    return found


def _replayed(endpoint: str) -> tuple[list[Any], str]:
    """The hashes that are resident by all events, as vLLM's own consumers read them; and the topic."""
    import msgspec
    import zmq

    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    time.sleep(1.0)  # batches are made beside the engine
    resident: dict[Any, Any] = {}
    topic = ""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5_000)
        socket.connect(endpoint)
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        while True:
            frames = socket.recv_multipart()
            number, payload = frames[-2], frames[-1]
            if number == b"\xff" * 8:
                break
            topic = frames[1].decode() if len(frames) == 4 else topic
            for event in decoder.decode(payload).events:
                if isinstance(event, AllBlocksCleared):
                    resident = {}
                elif isinstance(event, BlockRemoved):
                    for each in event.block_hashes:
                        del resident[each]
                else:
                    assert isinstance(event, BlockStored)
                    keys = event.extra_keys or [None] * len(event.block_hashes)
                    for at, each in enumerate(event.block_hashes):
                        ids = event.token_ids[at * 32 : (at + 1) * 32]
                        resident[each] = [ids, list(keys[at]) if keys[at] else None]
    return sorted((str(name), *value) for name, value in resident.items()), topic


if __name__ == "__main__":
    print("FOUND", json.dumps(main(json.loads(sys.argv[1]))))
