"""LangChain, litellm, guidellm and vLLM's bench client, unchanged and pinned, against the service of this process.

``make engines`` sets them up, in environments that ``RADIXKV_CLIENTS``, ``RADIXKV_GUIDELLM`` and ``RADIXKV_VLLM`` name
(their Pythons). A random model never calls a tool, so in the part ``calls`` the text of its answers is the test's.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from radixkv.service.auth import DEMO_KEYS
from radixkv.service.core import Service
from radixkv.service.local import running
from radixkv.service.options import ServeSettings
from tests.engines.clients.contract import CLIENTS
from tests.service.running import Running
from tests.service.test_shapes import CALL, saying

pytestmark = [pytest.mark.engines]

HERE = Path(__file__).parent
KEY, MODEL = DEMO_KEYS["acme"], "radixkv-demo"
NUM_REQUESTS = 20


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Service, str]]:
    settings = {"port": "0", "num-blocks": "4096", "max-concurrent": "64"}
    with running(ServeSettings.parse(settings)) as found:
        yield found


def ran(python: str, *arguments: str) -> str:
    """Run with an environment's Python; return what it printed."""
    done = subprocess.run([os.environ[python], *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("part", ["answers", "calls"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_sees_what_it_knows(served: tuple[Service, str], client: str, part: str) -> None:
    service, url = served
    live = Running(service, url)
    try:
        with saying(live, f"I look. {CALL}") if part == "calls" else nullcontext():
            ran(
                "RADIXKV_CLIENTS",
                "-W",
                "ignore",
                str(HERE / "contract.py"),
                client,
                part,
                url,
                KEY,
                MODEL,
            )
    finally:
        live.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_no_request_of_guidellm_fails(served: tuple[Service, str], tmp_path: Path, path: str) -> None:
    asked = [{"prompt": "Rule 7: be polite. " * 30 + f"Question {n}?"} for n in range(NUM_REQUESTS)]
    lines = [json.dumps({**each, "output_tokens_count": 8}) for each in asked]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    backend = f"kind=openai_http,target={served[1]},model={MODEL},api_key={KEY},request_format={path}"
    report = tmp_path / "report.json"
    ran(
        "RADIXKV_GUIDELLM",
        *("-m", "guidellm", "run", "--backend", backend, "--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--disable-console"),
        *(
            "--data",
            f"kind=json_file,path={tmp_path / 'asked.jsonl'}",
            "--output",
            f"kind=json,path={report}",
        ),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    counted = benchmark["metrics"]["request_totals"]
    assert (counted["successful"], counted["errored"]) == (NUM_REQUESTS, 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_request_of_vllms_bench_client_fails(
    served: tuple[Service, str], tmp_path: Path, path: str
) -> None:
    script = str(HERE / "vllm_bench_client.py")
    printed = ran("RADIXKV_VLLM", "-W", "ignore", script, served[1], KEY, MODEL, path, str(tmp_path))
    counts = next(line for line in printed.splitlines() if line.startswith('{"completed"'))
    assert json.loads(counts) == {"completed": NUM_REQUESTS, "failed": 0}
