"""``radixkv serve --engine vllm`` with the real vLLM: the HTTP API over it, its restart, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import radixkv
from radixkv.tokenizer import load_tokenizer
from tests.engines.vllm.test_same_tokens import ROOT
from tests.service.running import KEYS, Process, client
from tests.waiting import eventually

pytestmark = [pytest.mark.engines]

PROMPT = [17 + at * 7 % 900 for at in range(400)]


def write_model(folder: Path, *, num_layers: int = 2, hidden_size: int = 256) -> Path:
    """Write a small model with the tokenizer that ships with radixkv. Returns the folder."""
    from radixkv.engines.hf import demo_model

    size = load_tokenizer().vocab_size
    model = demo_model(vocab_size=size, num_layers=num_layers, hidden_size=hidden_size, max_model_len=2048)
    model.save_pretrained(folder)
    shipped = Path(radixkv.__file__).parent / "tokenizer" / "radixkv-8k.model"
    (folder / "tokenizer.model").write_bytes(shipped.read_bytes())
    return folder


@contextmanager
def serving(folder: Path, place: Path, *arguments: str) -> Iterator[Process]:
    """Serve a model by a vLLM with 400 blocks of 32 tokens, with further arguments of vLLM. Logs go to ``place``."""
    always = ["--enforce-eager", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"]
    environment = {
        "RADIXKV_VLLM": os.environ["RADIXKV_VLLM"],
        "RADIXKV_VLLM_LOG": str(place / "vllm.log"),
        "RADIXKV_VLLM_ARGS": " ".join([*always, *arguments]),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "policies"))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = ["--engine", "vllm", "--model", str(folder), "--port", "0", "--block-size", "32"]
    process = Process([*options, "--num-blocks", "400"], place / "service.log", environment, forked=False)
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served-model"))


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with serving(folder, tmp_path_factory.mktemp("serving")) as process:
        yield process


@pytest.fixture
def of(served: Process) -> Iterator[dict[str, httpx.Client]]:
    """Clients by their names."""
    with ExitStack() as stack:
        yield {who: stack.enter_context(client(served.url, KEYS[who])) for who in KEYS}


def completed(who: httpx.Client, **given: Any) -> dict[str, Any]:
    answer = who.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **given})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_the_api_over_vllm(of: dict[str, httpx.Client]) -> None:
    acme, globex, operator = (of[who] for who in ("acme", "globex", "operator"))
    cold = completed(acme)
    warm = completed(acme)
    assert (cached(cold), cached(warm)) == (0, 399), "all but the last token, the last block by a copy"
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    other = completed(globex)
    assert cached(other) == 0 and other["choices"][0]["text"] == cold["choices"][0]["text"]
    assert cached(completed(acme, salt="s")) == 0
    pinned = acme.post("/v1/pins", json={"token_ids": PROMPT, "ttl_s": 60})
    assert pinned.status_code == 201 and pinned.json()["blocks"] == 12, pinned.text
    assert len(acme.get("/v1/pins").json()["pins"]) == 1 and not globex.get("/v1/pins").json()["pins"]
    assert acme.delete(f"/v1/pins/{pinned.json()['id']}").status_code == 204
    warmed = globex.post("/v1/warm", json={"token_ids": PROMPT[::-1]}).json()
    assert (warmed["cached_before"], warmed["blocks"]) == (0, 12)
    looked = globex.post("/v1/lookup", json={"token_ids": PROMPT[::-1]}).json()
    assert looked == {"matched_tokens": 384, "matched_blocks": 12}
    assert globex.get("/v1/stats").json()["resident_blocks"] >= 24
    assert operator.get("/v1/stats").json()["cache"]["num_sequences"] == 0
    assert acme.delete("/v1/cache").json()["namespaces"] == 2
    assert cached(completed(acme)) == 0
    assert operator.post("/v1/tenants/globex/purge").json()["complete"]
    assert cached(completed(globex)) == 0 and cached(completed(acme)) == 399
    assert operator.post("/v1/bases", json={"id": "b", "token_ids": PROMPT, "readers": []}).status_code == 501
    beams = acme.post("/v1/completions", json={"prompt": PROMPT, "use_beam_search": True, "best_of": 2})
    assert beams.status_code == 400


def test_streams_samples_and_several_prompts(of: dict[str, httpx.Client]) -> None:
    acme = of["acme"]
    whole = completed(acme, max_tokens=200)
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}
    with acme.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    text = "".join(httpx.Response(200, text=line[6:]).json()["choices"][0]["text"] for line in lines)
    assert text == whole["choices"][0]["text"] and len(lines) > 5
    samples = completed(acme, n=3, temperature=1.0, seed=1)
    assert len({each["text"] for each in samples["choices"]}) == 3
    both = completed(acme, prompt=[PROMPT, PROMPT[::-1]])
    assert both["choices"][0]["text"] == completed(acme)["choices"][0]["text"]
    assert both["usage"]["prompt_tokens"] == 800


def test_a_connector_that_a_file_of_vllm_names_ends_the_start(folder: Path, tmp_path: Path) -> None:
    """No purge would reach what it keeps."""
    given = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kept")},
    }
    (tmp_path / "vllm.yaml").write_text(f"kv-transfer-config: '{json.dumps(given)}'\n")
    refusal = r"kv_connector='ExampleConnector' is not allowed; allowed: none below `radixkv serve`"
    arguments = "--config", str(tmp_path / "vllm.yaml")
    with pytest.raises(AssertionError, match=refusal), serving(folder, tmp_path, *arguments):
        pytest.fail("it serves")


def _processes(folder: Path) -> list[int]:
    """The processes of the vLLM that serves this model, and their children."""
    found = set()
    parents: dict[int, int] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                command = (each / "cmdline").read_bytes()
                parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if (
                str(folder).encode() in command
                and b"api_server" in command
                and b"process_guard" not in command
            ):
                found.add(int(each.name))
    return sorted(found | {pid for pid, parent in parents.items() if parent in found})


def test_a_killed_vllm_is_started_again_and_a_killed_service_leaves_no_process(
    served: Process, of: dict[str, httpx.Client], folder: Path
) -> None:
    acme = of["acme"]
    before = completed(acme)
    server = _processes(folder)[0]
    os.kill(server, signal.SIGKILL)
    eventually(lambda: acme.get("/healthz").status_code == 503, "the end of vLLM is noticed")
    assert "vLLM ended" in acme.get("/healthz").json()["reasons"][0]
    refused = acme.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    eventually(lambda: acme.get("/healthz").status_code == 200, "vLLM is back")
    after = completed(acme)
    assert cached(after) == 0 and after["choices"] == before["choices"]
    assert len(_processes(folder)) >= 2
    keys = Path(f"/proc/{_processes(folder)[0]}/cwd").resolve() / "engine.keys"
    assert keys.exists()
    served.kill()
    eventually(lambda: not _processes(folder), "no process is left")
    eventually(lambda: not keys.parent.exists(), "the keys are gone")
