"""Two tenants of one SGLang behind a gateway: warm, pin, purge and audit. See README.md beside this file.

    RADIXKV_SGLANG=/path/to/python python examples/sglang_server/two_tenants.py [FOLDER_OF_A_MODEL]

Without a folder it makes a small model with random weights. Run it in a checkout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv.engines.hf import demo_model
from radixkv.signing import KeySet

HERE = Path(__file__).parent
PROMPT = "".join(f"Rule {number}: answer politely.\n" for number in range(1, 40))
SPECIAL = ("<unk>", "<s>", "</s>")
ARGUMENTS = os.environ.get(
    "RADIXKV_SGLANG_ARGS",
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 --page-size 16 "
    "--max-total-tokens 16384 --max-running-requests 8 --context-length 2048 --chunked-prefill-size 512 "
    "--disable-cuda-graph --disable-overlap-schedule --grammar-backend none --log-level error",
)
"""Settings for a small machine without a GPU."""
ON_A_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def made_model(folder: Path) -> Path:
    """A small model with random weights, and a tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: at for at, text in enumerate([*SPECIAL, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    unknown, begin, end = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end
    ).save_pretrained(folder)
    demo_model(vocab_size=len(SPECIAL) + len(letters), max_model_len=4096).save_pretrained(folder)
    return folder


def environment(folder: Path, api_key: str) -> dict[str, str]:
    """The environment of SGLang's processes: this radixkv, also where it isn't installed, and its settings."""
    installed, plugin = importlib.metadata.distribution("radixkv"), folder / "plugin" / "radixkv.dist-info"
    plugin.mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        (plugin / name).write_text(installed.read_text(name) or "")
    found = map(importlib.util.find_spec, ("radixkv", "radixkv_kernels", "radixkv_policies"))
    roots = [Path(each.origin).parents[1] for each in found if each is not None and each.origin]
    stubs = HERE.parents[1] / "tests" / "engines" / "sglang_stubs"  # kernels that exist only for GPUs
    return {
        **ON_A_CPU,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*roots, plugin.parent, stubs])),
        "RADIXKV_KEYS": str(folder / "engine.keys"),
        "RADIXKV_SOCKET": str(folder / "control" / "control.sock"),
        "RADIXKV_ANONYMOUS": "0",  # only the gateway makes salts
        "SGLANG_API_KEY": api_key,
    }


@contextmanager
def running(command: list[str], variables: Mapping[str, str], log: Path, url: str) -> Iterator[None]:
    """Run a server, from when the URL answers."""
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(variables)) as process,
    ):
        try:
            while not answers(url):
                if process.poll() is not None:
                    raise SystemExit(f"{command[0]} has ended:\n{log.read_text()[-4000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()


def answers(url: str) -> bool:
    """Whether a server answers, if only to refuse."""
    try:
        return httpx.get(url, timeout=30).status_code in (200, 401)
    except httpx.TransportError:
        return False


def free_url() -> tuple[str, str]:
    """A URL where nothing listens, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}", str(port)


@contextmanager
def served(model: Path, folder: Path) -> Iterator[str]:
    """The URL of the gateway, in front of an SGLang."""
    KeySet.derive([secrets.token_bytes(32)]).write(folder / "engine.keys")
    api_key = secrets.token_hex(16)
    variables = environment(folder, api_key)
    (inside, its_port), (url, port) = free_url(), free_url()
    sglang = [os.environ.get("RADIXKV_SGLANG", sys.executable), "-m", "sglang.launch_server"]
    sglang += ["--model-path", str(model), "--host", "127.0.0.1", "--port", its_port, "--api-key", api_key]
    sglang += ["--radix-cache-backend", "radixkv", "--enable-cache-report", *shlex.split(ARGUMENTS)]
    gateway = [sys.executable, str(HERE / "tenant_gateway.py"), inside, str(folder), port]
    with (
        running(sglang, variables, folder / "sglang.log", f"{inside}/health"),
        running(
            gateway, {**os.environ, "SGLANG_API_KEY": api_key}, folder / "gateway.log", f"{url}/v1/models"
        ),
    ):
        yield url


def completed(tenant: httpx.Client) -> str:
    """Complete the prompt, and say what was cached."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    begin = time.perf_counter()
    usage = tenant.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    took_s, cached = time.perf_counter() - begin, usage["prompt_tokens_details"]["cached_tokens"]
    return f"{cached} of {usage['prompt_tokens']} tokens cached, answered after {took_s:.3f} s"


def audited(url: str) -> None:
    """Run the audit with the keys of both tenants, and print its verdicts."""
    command = [
        sys.executable,
        "-m",
        "radixkv",
        "audit",
        "run",
        "--url",
        url,
        "--no-timing",
        "--probes",
        "10",
        "--json",
    ]
    command += ["--key", "demo-acme", "--key", "demo-globex", "--operator-key", "demo-operator"]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    for verdict, number in Counter(each["verdict"] for each in report["checks"]).items():
        print(f"audit, {number} checks: {verdict}")
    print(f"audit: {report['verdict']}")


def main(folder: str | None = None) -> None:
    """Start SGLang and the gateway, and show what each tenant sees."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = made_model(place / "model") if folder is None else Path(folder)
        url = stack.enter_context(served(model, place))

        def client(key: str) -> httpx.Client:
            headers = {"Authorization": f"Bearer {key}"}
            return stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=300))

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
            f"globex pinned {pinned['tokens']} tokens; acme sees {len(acme.get('/v1/pins').json()['pins'])} pins"
        )
        purged = post(operator, "/v1/tenants/globex/purge")
        left = globex.get("/v1/pins").json()["pins"]
        print(f"globex was purged, generation {purged['generation']}; its pins: {left}")
        print(f"globex after that: {completed(globex)}")
        print(f"acme after that: {completed(acme)}")
        print(f"the gateway, asked for /server_info: {acme.get('/server_info').status_code}")
        audited(url)


if __name__ == "__main__":
    main(*sys.argv[1:])
