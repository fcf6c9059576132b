"""SGLang's own HTTP server with radixkv: chats, branches and a random tree of prompts; tenants, behind a gateway."""

from __future__ import annotations

import os
import random
import runpy
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.audit import remote
from radixkv.audit.remote import Options
from radixkv.audit.timing import TimingPlan
from radixkv.audit.verdict import AuditReport, Verdict
from radixkv.engines.vllm import process_guard
from radixkv.signing import KeySet
from tests.engines.sglang.runs import ROOT, make_folder, variables_for
from tests.redis_server import free_port
from tests.service.running import KEYS, client
from tests.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.limit(wall_s=1800)]

START_S = 900.0

EXAMPLE = ROOT / "examples" / "sglang_server"
NUM_NEW = 24
API_KEY = "of the gateway alone"
ARGUMENTS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--dtype", "float32", "--max-running-requests", "8", "--context-length", "2048"),
    *("--max-total-tokens", "12288", "--chunked-prefill-size", "512", "--disable-cuda-graph"),
    *("--disable-overlap-schedule", "--grammar-backend", "none", "--log-level", "error"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with keys, radixkv's entry points, and a model whose tokenizer has a token for each byte."""
    found = make_folder(tmp_path_factory.mktemp("sglang-http"))
    runpy.run_path(str(EXAMPLE / "two_tenants.py"))["made_model"](found / "bytes")
    return found


@contextmanager
def started(command: list[str], variables: dict[str, str], log: Path, url: str) -> Iterator[str]:
    """Run a server until the end of the with, from when it answers."""
    guarded = [
        sys.executable,
        "-P",
        process_guard.__file__,
        "10",
        str(log.with_suffix(".none")),
        str(log),
        *command,
    ]
    with subprocess.Popen(guarded, stdin=subprocess.PIPE, env=variables) as guard:

        def is_ready() -> bool:
            assert guard.poll() is None, log.read_text()[-4000:]
            try:
                return httpx.get(f"{url}/health", timeout=60).status_code in (200, 404)
            except httpx.TransportError:
                return False

        assert guard.stdin is not None
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tests.waiting.LIMIT_S", START_S)
                eventually(is_ready, "the server is ready")
            yield url
        finally:
            guard.stdin.close()


@contextmanager
def listening(folder: Path, place: Path, page: int, **variables: str) -> Iterator[str]:
    """Yield the URL of an SGLang with radixkv."""
    port = free_port()
    command = [
        *(os.environ["RADIXKV_SGLANG"], "-m", "sglang.launch_server", "--model-path", str(folder / "bytes")),
        *("--host", "127.0.0.1", "--port", str(port), "--page-size", str(page), "--enable-cache-report"),
        *("--radix-cache-backend", "radixkv", "--api-key", API_KEY, *ARGUMENTS),
    ]
    given = {"RADIXKV_POLICY": "lru", **variables}
    url = f"http://127.0.0.1:{port}"
    with started(command, variables_for(folder, given), place / "sglang.log", url):
        yield url


@contextmanager
def gated(folder: Path, place: Path, **variables: str) -> Iterator[str]:
    """Yield the URL of the example's gateway, in front of an SGLang that serves nobody else."""
    KeySet.load(folder / "engine.keys").write(place / "engine.keys")
    tenants = {
        "RADIXKV_KEYS": str(place / "engine.keys"),
        "RADIXKV_SOCKET": str(place / "control" / "control.sock"),
        "RADIXKV_ANONYMOUS": "0",
    }
    port = free_port()
    command = [sys.executable, str(EXAMPLE / "tenant_gateway.py")]
    with (
        listening(folder, place, 16, **tenants, **variables) as inside,
        started(
            [*command, inside, str(place), str(port)],
            {**os.environ, "SGLANG_API_KEY": API_KEY},
            place / "gateway.log",
            f"http://127.0.0.1:{port}",
        ) as url,
    ):
        yield url


# --- one tenant


class Asking:
    """A client of SGLang's own ``/generate``."""

    def __init__(self, url: str, seed: int) -> None:
        headers = {"authorization": f"Bearer {API_KEY}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=600)
        self._dice = random.Random(seed)

    def close(self) -> None:
        self._client.close()

    def ids(self, size: int) -> list[int]:
        return [self._dice.randrange(3, 259) for _ in range(size)]

    def generate(self, prompt: list[int], num_new: int = NUM_NEW) -> tuple[list[int], int]:
        """The greedy answer to a prompt, and how many of its tokens were cached."""
        sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
        answer = self._client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found["output_ids"], found["meta_info"]["cached_tokens"]

    def at_once(self, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self.generate, prompts))

    def flush(self) -> None:
        """Have SGLang forget everything. It counts its pages first, and ends if one is missing."""
        eventually(lambda: self._client.post("/flush_cache").status_code == 200, "the cache is flushed")

    def tree(self, num_prompts: int) -> list[list[int]]:
        """Prompts that continue each other at random, some of one repeated token."""
        found = [[37] * 117]
        while len(found) < num_prompts:
            more, parent = self._dice.randrange(128), self._dice.choice(found)
            added = [self._dice.randrange(3, 259)] * more if more % 2 else self.ids(more)
            found.append([*parent, *added][:1200])
        self._dice.shuffle(found)
        return found


@pytest.mark.parametrize("page", [1, 16])
def test_prompts_over_http_find_what_was_computed(folder: Path, tmp_path: Path, page: int) -> None:
    with listening(folder, tmp_path, page) as url, closing(Asking(url, page)) as asking:
        chats_find_their_turns(asking, page)
        asking.flush()
        branches_find_their_prefix(asking, page)
        asking.flush()
        a_tree_answers_alike_cold_and_warm(asking)
        asking.flush()


def chats_find_their_turns(asking: Asking, page: int) -> None:
    """Each turn finds all whole pages of the turn before, with its answer but for the last token, which has no KV."""
    chats, known = [asking.ids(200 + 7 * at) for at in range(8)], [0] * 8
    for _ in range(3):
        for at, (answer, cached) in enumerate(asking.at_once(chats)):
            assert cached == known[at] // page * page
            known[at] = len(chats[at]) + len(answer) - 1
            chats[at] = [*chats[at], *answer, *asking.ids(40)]


def branches_find_their_prefix(asking: Asking, page: int) -> None:
    """Groups of prompts with one beginning: all but the first find it."""
    for _ in range(3):
        prefix = asking.ids(320)
        prompts = [[*prefix, *asking.ids(64 + 16 * at)] for at in range(4)]
        assert asking.generate(prompts[0])[1] < 320
        assert all(320 <= cached < 320 + page + 8 for _, cached in asking.at_once(prompts[1:]))
        assert all(
            cached >= 320 for _, cached in asking.at_once([[*each, *asking.ids(9)] for each in prompts])
        )


def a_tree_answers_alike_cold_and_warm(asking: Asking) -> None:
    prompts = asking.tree(60)
    cold = asking.at_once(prompts)
    warm = asking.at_once(prompts)
    asking.flush()
    again = asking.at_once(prompts)
    assert [each for each, _ in cold] == [each for each, _ in warm] == [each for each, _ in again]
    total = sum(map(len, prompts))
    assert sum(cached for _, cached in warm) > 0.8 * total
    assert 0.3 * total < sum(cached for _, cached in again) < 0.9 * total


# --- two tenants


def audited(url: str) -> AuditReport:
    options = Options(operator_key=KEYS["operator"], tenant_names=("acme", "globex"))
    plan = TimingPlan(samples=20, control=20)
    return remote.run(url, (KEYS["acme"], KEYS["globex"]), plan, probes=12, timing=False, options=options)


def completed(who: httpx.Client, prompt: str, **more: Any) -> int:
    """How many of a prompt's tokens were cached."""
    answer = who.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_tenants_behind_a_gateway_are_isolated(folder: Path, tmp_path: Path) -> None:
    prompt = "Rule: answer politely.\n" * 20
    with gated(folder, tmp_path) as url:
        with client(url, KEYS["acme"]) as acme, client(url, KEYS["globex"]) as globex:
            own = len(prompt) // 16 * 16
            assert [completed(who, prompt) for who in (acme, globex, acme, globex)] == [0, 0, own, own]
            assert [completed(globex, prompt, salt=salt) for salt in ("v2", "v2")] == [0, own]
            purges_and_pins(url, acme, globex, prompt)
        report = audited(url)
    leaks = [each.detail for each in report.checks if each.verdict is Verdict.LEAKS]
    assert not leaks and report.verdict in (Verdict.ISOLATED, Verdict.PARTIAL), (report.verdict, leaks)
    crossed = [each for each in report.checks if each.number == 3 and each.verdict is Verdict.ISOLATED]
    assert crossed, [(each.number, each.name, each.verdict, each.detail) for each in report.checks]


def purges_and_pins(url: str, acme: httpx.Client, globex: httpx.Client, prompt: str) -> None:
    own = len(prompt) // 16 * 16
    assert acme.post("/v1/pins", json={"prompt": prompt, "ttl_s": 60}).json()["tokens"] == own
    assert acme.post("/v1/pins", json={"prompt": "never seen " * 9, "ttl_s": 60}).status_code == 409
    (pin,) = acme.get("/v1/pins").json()["pins"]
    assert globex.get("/v1/pins").json() == {"pins": []}
    assert globex.delete(f"/v1/pins/{pin['id']}").status_code == 409 and acme.get("/v1/pins").json()["pins"]
    assert acme.delete(f"/v1/pins/{pin['id']}").status_code == 204 and not acme.get("/v1/pins").json()["pins"]
    assert acme.post("/v1/pins", json={"prompt": prompt, "ttl_s": 60}).json()["tokens"] == own
    with client(url, KEYS["operator"]) as operator:
        assert operator.post("/v1/tenants/acme/purge").json() == {"tenant": "acme", "generation": 1}
    assert acme.get("/v1/pins").json() == {"pins": []}
    assert [completed(who, prompt) for who in (acme, globex)] == [0, own]
    warmed = {"tokens": len(prompt), "cached_before": own}
    assert acme.post("/v1/warm", json={"prompt": prompt}).json() == warmed


def test_an_sglang_that_leaves_the_salt_out_leaks(folder: Path, tmp_path: Path) -> None:
    with gated(folder, tmp_path, RADIXKV_TEST_SALTLESS="1") as url:
        report = audited(url)
    assert report.verdict is Verdict.LEAKS
    leaks = {each.number for each in report.checks if each.verdict is Verdict.LEAKS}
    assert 3 in leaks, [(each.number, each.name, each.detail) for each in report.checks]
