"""Two tenants of one vLLM that ``radixkv serve`` runs: warm, pin, purge and audit. See README.md beside this file.

    RADIXKV_VLLM=/path/to/python python examples/vllm_server/two_tenants.py [FOLDER_OF_A_MODEL]

Without a folder it makes a small model with random weights.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

import radixkv
from radixkv.engines.hf import demo_model
from radixkv.tokenizer import load_tokenizer

PROMPT = "".join(
    f"Rule {number}: answer politely, and name the page of the manual.\n" for number in range(1, 40)
)
ON_A_CPU = {
    "RADIXKV_VLLM_ARGS": "--enforce-eager --max-num-seqs 8",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Settings for a small machine. Leave them out where vLLM has a GPU."""


def made_model(folder: Path) -> Path:
    """A small model with random weights, and the tokenizer that ships with radixkv."""
    demo_model(vocab_size=load_tokenizer().vocab_size, max_model_len=2048).save_pretrained(folder)
    shutil.copy(Path(radixkv.__file__).parent / "tokenizer" / "radixkv-8k.model", folder / "tokenizer.model")
    return folder


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The URL of a service over vLLM. vLLM ends with it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ["--engine", "vllm", "--model", str(model), "--port", str(port)]
    command = [
        sys.executable,
        "-m",
        "radixkv",
        "serve",
        *options,
        "--block-size",
        "32",
        "--num-blocks",
        "400",
    ]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**ON_A_CPU, **os.environ}) as service:
        try:
            while not is_ready(url):
                if service.poll() is not None:
                    raise SystemExit(
                        "the service has ended: is RADIXKV_VLLM the Python of an environment with vLLM?"
                    )
                time.sleep(0.5)
            yield url
        finally:
            service.terminate()


def is_ready(url: str) -> bool:
    """Whether the service takes requests."""
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def completed(tenant: httpx.Client) -> str:
    """Complete the prompt, and say what was cached."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    reply = tenant.post("/v1/completions", json=body).raise_for_status().json()
    usage, first_s = reply["usage"], reply["timings"]["time_to_first_token_s"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return f"{cached} of {usage['prompt_tokens']} tokens cached, first token after {first_s:.3f} s"


def main(folder: str | None = None) -> None:
    """Start the service, and show what each tenant sees."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(served(made_model(place) if folder is None else Path(folder)))

        def client(key: str) -> httpx.Client:
            headers = {"Authorization": f"Bearer {key}"}
            return stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))

        acme, globex, operator = client("demo-acme"), client("demo-globex"), client("demo-operator")
        print(f"acme, cold: {completed(acme)}")
        print(f"acme again: {completed(acme)}")
        print(f"globex, the same prompt: {completed(globex)}")

        def post(who: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
            return dict(who.post(path, json=body).raise_for_status().json())

        warmed = post(globex, "/v1/warm", prompt=PROMPT, salt="v2")
        print(
            f"globex warmed {warmed['tokens']} tokens for the salt v2, {warmed['cached_before']} were cached"
        )
        pinned = post(globex, "/v1/pins", prompt=PROMPT, salt="v2", ttl_s=60)
        print(
            f"globex pinned {pinned['blocks']} blocks; acme sees {len(acme.get('/v1/pins').json()['pins'])} pins"
        )

        purged = post(operator, "/v1/tenants/globex/purge")
        print(
            f"globex was purged, complete: {purged['complete']}; its pins: {globex.get('/v1/pins').json()['pins']}"
        )
        print(f"globex after that: {completed(globex)}")
        print(f"acme after that: {completed(acme)}")

        keys = ["--key", "demo-acme", "--key", "demo-globex", "--operator-key", "demo-operator"]
        command = [
            sys.executable,
            "-m",
            "radixkv",
            "audit",
            "run",
            "--url",
            url,
            *keys,
            "--no-timing",
            "--json",
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        report = json.loads(done.stdout)
        for verdict, number in Counter(each["verdict"] for each in report["checks"]).items():
            print(f"audit, {number} checks: {verdict}")
        print(f"audit: {report['verdict']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
