"""One SGLang on a CPU: chats of several turns, samples and beams, or two tenants. Prints what came out as JSON.

Run by ``test_sglang.py`` with the Python of an environment that has SGLang. Arguments: a JSON object with

    cache      "stock" or "radixkv"
    page       tokens of a page
    tokens     of the pool
    workload   "chats", "forks", "tenants" or "control"
    is_overlapping  whether SGLang schedules the next step while the last one computes
    seed       of the prompts
    model      folder of the model
    settings   further ones of SGLang
    events     where its KV events are published, to be told
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from typing import Any

os.environ.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def main(given: dict[str, Any]) -> dict[str, Any]:
    import sglang

    settings = {} if given["cache"] == "stock" else {"radix_cache_backend": "radixkv"}
    settings |= {"disable_overlap_schedule": not given["is_overlapping"], **given.get("settings", {})}
    heard = Heard(given["events"]) if "events" in given else None
    engine = sglang.Engine(
        model_path=given["model"],
        skip_tokenizer_init=True,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        dtype="float32",
        page_size=given["page"],
        max_total_tokens=given["tokens"],
        max_running_requests=8,
        context_length=2048,
        chunked_prefill_size=512,
        disable_cuda_graph=True,
        grammar_backend="none",
        random_seed=1,
        log_level="error",
        **settings,
    )
    try:
        found = WORKLOADS[given["workload"]](engine, random.Random(given["seed"]))
        found["flushed"] = is_flushed(engine)
        if heard is not None:
            found["events"] = heard.told()
        return found
    finally:
        engine.shutdown()


class Heard:
    """What an SGLang publishes of its cache."""

    def __init__(self, endpoint: str) -> None:
        import zmq

        self._socket = zmq.Context().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")

    def told(self) -> dict[str, Any]:
        """The hashes of all stored blocks, and how often everything was cleared, once nothing comes for 2 s."""
        import msgspec

        stored: set[int] = set()
        cleared, sizes = 0, set()
        while self._socket.poll(2_000):
            *_, payload = self._socket.recv_multipart()
            _, events, _ = msgspec.msgpack.decode(payload)
            for event in events:
                cleared += event["type"] == "AllBlocksCleared"
                if event["type"] == "BlockStored":
                    stored.update(event["block_hashes"])
                    sizes.add(event["block_size"])
        return {"stored": sorted(stored), "cleared": cleared, "block_size": sizes.pop()}


def is_flushed(engine: Any) -> bool:
    """Whether SGLang could forget everything. It counts its pages whenever it is idle, and ends if one is missing."""
    for _ in range(100):
        if engine.flush_cache().success:
            return True
        time.sleep(0.1)  # the last step is not over yet
    return False


def draw(dice: random.Random, size: int) -> list[int]:
    return [dice.randrange(3, 2048) for _ in range(size)]


def generate(
    engine: Any,
    prompts: list[list[int]],
    num_new: int = 24,
    sampling: dict[str, Any] | None = None,
    **named: Any,
) -> list[Any]:
    from sglang.srt.managers.io_struct import GenerateReqInput

    settings = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True, **(sampling or {})}
    request = GenerateReqInput(input_ids=prompts, sampling_params=settings, **named)
    answering = engine.tokenizer_manager.generate_request(request, None)
    answers: list[Any] = engine.loop.run_until_complete(anext(answering))
    return answers


def _chats(engine: Any, dice: random.Random) -> dict[str, Any]:
    """12 chats of 4 turns, behind two system prompts; then the last turn again, after a flush."""
    systems = [draw(dice, 640) for _ in range(2)]
    chats = [[*systems[at % 2], *draw(dice, 40)] for at in range(12)]
    outputs, cached = [], 0
    for _ in range(4):
        for at, answer in enumerate(generate(engine, [list(chat) for chat in chats])):
            outputs.append(answer["output_ids"])
            cached += answer["meta_info"]["cached_tokens"]
            chats[at] = [*chats[at], *answer["output_ids"], *draw(dice, 30)]
    last = [list(chat) for chat in chats[:4]]
    warm = [answer["output_ids"] for answer in generate(engine, last)]
    is_flushed(engine)
    cold = generate(engine, [last[0]])
    return {
        "outputs": outputs,
        "cached": cached,
        "warm": warm[0],
        "cold": cold[0]["output_ids"],
        "cached_after_flush": cold[0]["meta_info"]["cached_tokens"],
    }


def _forks(engine: Any, dice: random.Random) -> dict[str, Any]:
    """8 greedy samples of a prompt of 1,000 tokens; then, with pages of one token, twice 4 beams over 32 tokens."""
    samples = generate(engine, [draw(dice, 1000)], 16, {"n": 8})
    cached = [answer["meta_info"]["cached_tokens"] for answer in samples]
    prompt, beams = draw(dice, 300), []
    for _ in range(2 if engine.server_args.page_size == 1 else 0):
        (answer,) = generate(engine, [prompt], 32, {"beam_width": 4, "n": 4})
        cached.append(answer["meta_info"]["cached_tokens"])
        beams += [
            (beam["output_ids"], beam["meta_info"]["sequence_score"])
            for beam in answer["meta_info"]["beam_results"]
        ]
    return {"outputs": [answer["output_ids"] for answer in samples], "cached": cached, "beams": beams}


def _tenants(engine: Any, dice: random.Random) -> dict[str, Any]:
    """Two tenants with the same prompt, the first again, a forger, the first with an extra key, hostile texts."""
    from radixkv.signing import KeySet
    from radixkv.tenancy.salt import make_salt

    keys, forger = KeySet.load(os.environ["RADIXKV_KEYS"]), KeySet.derive([b"not the fleet's secret"])
    requests: list[dict[str, str]] = [
        {"cache_salt": make_salt(keys, "acme")},
        {"cache_salt": make_salt(keys, "globex")},
        {"cache_salt": make_salt(keys, "acme")},
        {"cache_salt": make_salt(forger, "acme")},
        {"cache_salt": make_salt(keys, "acme"), "extra_key": "another"},
        {"cache_salt": make_salt(keys, "acme"), "extra_key": "another"},
        {"cache_salt": "\ud800" * 3, "extra_key": "\x00" * 5000},
    ]
    prompt, cached = draw(dice, 500), []
    for each in requests:
        (answer,) = generate(engine, [prompt], 2, **each)
        cached.append(answer["meta_info"]["cached_tokens"])
    return {"cached": cached}


def _control(engine: Any, dice: random.Random) -> dict[str, Any]:
    """What an operator sees and does; and a tenant that is purged again and again while its requests run."""
    from radixkv.engines.control.client import ControlClient
    from radixkv.signing import KeySet
    from radixkv.tenancy.salt import make_salt

    keys = KeySet.load(os.environ["RADIXKV_KEYS"])
    salt, other, prompt = make_salt(keys, "acme"), make_salt(keys, "globex"), draw(dice, 480)
    prompts = [[*prompt, *draw(dice, 20)] for _ in range(6)]
    calm = [answer["output_ids"] for answer in generate(engine, prompts, cache_salt=[salt] * 6)]
    generate(engine, [prompt], 2, cache_salt=[other])
    found: dict[str, Any] = {}
    with ControlClient(os.environ["RADIXKV_SOCKET"], keys) as client:
        where = {"model": "sglang", "cache_salt": salt}
        found["lookup"] = client.call("lookup", where, prompt)["matched_tokens"]
        found["pin"] = client.call("pin", {**where, "ttl_s": 60}, prompt[:64])["num_tokens"]
        found["pins"] = len(client.call("pins", {"tenant": client_tenant(keys, "acme")})["pins"])
        found["tenants"] = len(list(client.tenants()))
        found["audit"] = client.call("audit")["violations"]
        stopping = threading.Event()
        purging = threading.Thread(target=_purge, args=(client, stopping))
        purging.start()
        hurt = [answer["output_ids"] for answer in generate(engine, prompts, cache_salt=[salt] * 6)]
        stopping.set()
        purging.join()
        found["same"] = hurt == calm
        found["purge"] = client.call("purge", {"tenant": "acme", "generation": 1})["generation"]
        (left,) = client.call("tenants", {"tenant": "acme"})["tenants"]
        (kept,) = client.call("tenants", {"tenant": "globex"})["tenants"]
        found |= {"left": left["resident_blocks"], "kept": kept["resident_blocks"]}
        found["audit_after"] = client.call("audit")["violations"]
    (answer,) = generate(engine, [prompt], 2, cache_salt=[salt])
    return {**found, "cached_by_the_old_salt": answer["meta_info"]["cached_tokens"]}


def client_tenant(keys: Any, name: str) -> str:
    """The cache's name of a tenant."""
    from radixkv.tenancy.salt import SaltReader

    return str(SaltReader(keys).tenant_ids(name)[0])


def _purge(client: Any, stopping: threading.Event) -> None:
    """Purge a tenant again and again."""
    while not stopping.wait(0.02):
        client.call("purge", {"tenant": "acme"})


WORKLOADS = {"control": _control, "chats": _chats, "forks": _forks, "tenants": _tenants}

if __name__ == "__main__":
    print("FOUND", json.dumps(main(json.loads(sys.argv[1]))))
