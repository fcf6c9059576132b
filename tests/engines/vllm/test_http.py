"""Chats over vLLM's own HTTP server: radixkv's scheduler beside vLLM's own cache, with salts that tenants need."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.engines.control.client import ControlClient
from radixkv.engines.vllm import process_guard
from radixkv.engines.vllm.completion_stream import fetched
from radixkv.errors import ControlError
from radixkv.signing import KeySet
from radixkv.tenancy.salt import make_salt
from tests.engines.vllm.test_same_tokens import ROOT, model
from tests.waiting import eventually

pytestmark = [pytest.mark.engines]

__all__ = ["model"]  # the fixture

SEEDS = (0, 1, 2)
KEYS = KeySet.derive([b"the fleet's own secret"])
RADIXKV = (
    *("--scheduler-cls", "radixkv.engines.vllm.Scheduler", "--no-enable-prefix-caching"),
    *("--middleware", "radixkv.engines.vllm.middleware.RequireSalt"),
)


@contextmanager
def listening(folder: Path, model: str, blocks: int, *options: str) -> Iterator[httpx.Client]:
    """Yield a client of a vLLM whose salts are required, and whose control socket is in the folder."""
    folder.mkdir()
    path, log = folder / "http.sock", folder / "vllm.log"
    KEYS.write(folder / "engine.keys")
    command = [
        *(sys.executable, "-P", process_guard.__file__, "10", str(folder / "none"), str(log)),
        *(os.environ["RADIXKV_VLLM"], "-m", "vllm.entrypoints.openai.api_server", "--uds", str(path)),
        *("--model", model, "--served-model-name", "tiny", "--skip-tokenizer-init", "--dtype", "float32"),
        *("--enforce-eager", "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "512", "--num-gpu-blocks-override", str(blocks)),
        *("--enable-prompt-tokens-details", *options),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "policies"))),
        "RADIXKV_POLICY": "lru",
        "RADIXKV_KEYS": str(folder / "engine.keys"),
        "RADIXKV_SOCKET": str(folder / "control" / "control.sock"),
        "RADIXKV_ANONYMOUS": "0",
        "VLLM_SERVER_DEV_MODE": "1",  # has /reset_prefix_cache
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=folder) as guard:

        def is_ready() -> bool:
            assert guard.poll() is None, log.read_text()[-4000:]
            try:
                fetched(path, "/health")
            except ControlError:
                return False
            return True

        assert guard.stdin is not None
        try:
            eventually(is_ready, "vLLM is ready")
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://vllm", timeout=300) as client:
                yield client
        finally:
            guard.stdin.close()


def body(prompt: list[int], salt: str | None, num_new: int = 24) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, **({} if salt is None else {"cache_salt": salt})}


class Chats:
    """12 chats of 4 turns in 3 salts of one tenant, behind two system prompts."""

    def __init__(self, client: httpx.Client, seed: int) -> None:
        self._client, dice = client, random.Random(seed)

        def ids(size: int) -> list[int]:
            return [dice.randrange(3, 2048) for _ in range(size)]

        systems = [ids(640) for _ in range(2)]
        self.chats = [[*systems[at % 2], *ids(40)] for at in range(12)]
        self._asked = [[ids(30) for _ in range(4)] for _ in self.chats]
        self.outputs: list[list[list[int]]] = [[] for _ in self.chats]
        self.cached: list[list[int]] = [[] for _ in self.chats]
        self.num_queried = 0

    def turn(self, at: int) -> None:
        """Ask for the next answer of a chat."""
        chat, salt = self.chats[at], make_salt(KEYS, "acme", client_salt=f"s{at % 3}")
        answer = self._client.post("/v1/completions", json=body(chat, salt))
        assert answer.status_code == 200, answer.text
        document = answer.json()
        new = document["choices"][0]["token_ids"]
        details = document["usage"].get("prompt_tokens_details") or {}
        self.num_queried += len(chat)
        self.cached[at].append(details.get("cached_tokens") or 0)
        self.chats[at] = [*chat, *new, *self._asked[at][len(self.outputs[at])]]
        self.outputs[at].append(new)

    def one_after_another(self) -> Chats:
        for _ in range(4):
            for at in range(len(self.chats)):
                self.turn(at)
        return self

    def at_once(self) -> Chats:
        """A client for each chat."""
        with ThreadPoolExecutor(len(self.chats)) as pool:
            list(pool.map(lambda at: [self.turn(at) for _ in range(4)], range(len(self.chats))))
        return self

    @property
    def num_cached(self) -> int:
        return sum(map(sum, self.cached))


def counted(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    (line,) = [each for each in lines if each.startswith(f"vllm:{name}_total{{")]
    return float(line.rpartition(" ")[2])


def chatted(client: httpx.Client) -> dict[str, Any]:
    """The chats of seed 0 one after another, then those of each seed at once, each time in an empty cache."""
    alone = Chats(client, 0).one_after_another()
    found: dict[str, Any] = {
        "alone": alone,
        "queries": counted(client, "prefix_cache_queries"),
        "hits": counted(client, "prefix_cache_hits"),
        "together": [],
    }
    for seed in SEEDS:
        assert client.post("/reset_prefix_cache").status_code == 200
        found["together"].append(Chats(client, seed).at_once())
    found["preempted"] = counted(client, "num_preemptions")
    return found


def nothing_is_left(folder: Path) -> None:
    """No sequence is open, each block is accounted for, and all laws hold."""
    with ControlClient(folder / "control" / "control.sock", KEYS) as control:

        def stats() -> dict[str, int]:
            found: dict[str, int] = control.call("stats")["cache"]
            return found

        eventually(lambda: not stats()["num_sequences"], "the last sequence is released")
        left = stats()
        assert left["sequence_blocks"] == left["quarantined_blocks"] == 0
        assert left["free_blocks"] + left["resident_blocks"] + left["lent_blocks"] == left["num_blocks"]
        report = control.call("audit")
        assert report["ok"] and not report["violations"], report


def refused_with_a_reason(client: httpx.Client) -> None:
    forged = make_salt(KeySet.derive([b"another fleet's secret"]), "acme")
    for salt in (None, "s0", forged):
        answer = client.post("/v1/completions", json=body([5, 6, 7], salt, 2))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "cache_salt"), answer.text
        assert "through the gateway that makes the salts" in error["message"]


@pytest.mark.parametrize("blocks", [400, 150])
def test_chats_over_http(model: str, tmp_path: Path, blocks: int) -> None:
    """Greedy tokens are vLLM's own. Found tokens are at least as many: where requests come at once, over all seeds."""
    with listening(tmp_path / "stock", model, blocks, "--enable-prefix-caching") as client:
        stock = chatted(client)
    with listening(tmp_path / "ours", model, blocks, *RADIXKV) as client:
        refused_with_a_reason(client)
        ours = chatted(client)
        nothing_is_left(tmp_path / "ours")
    for found in (stock, ours):
        assert (found["queries"], found["hits"]) == (found["alone"].num_queried, found["alone"].num_cached)
    assert ours["alone"].outputs == stock["alone"].outputs
    assert ours["alone"].num_cached >= stock["alone"].num_cached > 0
    # six pairs of a system prompt and a salt: none finds another's
    assert [found[0] for found in ours["alone"].cached[:6]] == [0] * 6
    for mine, own in zip(ours["together"], stock["together"], strict=True):
        assert mine.outputs == own.outputs
    cached = [[each.num_cached for each in found["together"]] for found in (stock, ours)]
    print(blocks, "blocks; cached tokens at once: stock", cached[0], "radixkv", cached[1])
    print("preempted: stock", stock["preempted"], "radixkv", ours["preempted"])
    assert sum(cached[1]) >= sum(cached[0])
    # In the order of vLLM's own queue seven are preempted; in radixkv's, prompts that share blocks run together.
    assert (stock["preempted"] > 0) == (blocks == 150) and ours["preempted"] <= stock["preempted"]
