"""The audit of a vLLM that ``radixkv serve`` runs: isolated; and leaking, once a planted bug leaves the salt out."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median

import pytest

from radixkv.audit import remote
from radixkv.audit.remote import Options
from radixkv.audit.timing import TimingPlan
from radixkv.audit.verdict import Verdict
from tests.engines.vllm.test_serve import cached, completed, serving, write_model
from tests.service.running import KEYS, Process, client

pytestmark = [pytest.mark.engines]

TENANTS = (KEYS["acme"], KEYS["globex"])
OPTIONS = Options(operator_key=KEYS["operator"], tenant_names=("acme", "globex"))
SAVED_S = 0.05
"""What a hit saves at least, so that it is seen on a busy machine too."""
PLAN = TimingPlan(samples=120, control=30, prompt_words=100, margin=0.2)
"""A leak would give an AUC near 1. With 120 samples the interval of 90 % is 0.12 wide."""


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Process]]:
    folder = write_model(tmp_path_factory.mktemp("audited-model"), num_layers=4, hidden_size=384)
    return lambda *arguments: serving(folder, tmp_path_factory.mktemp("auditing"), *arguments)


def test_tenants_of_vllm_are_isolated(serve: Callable[..., AbstractContextManager[Process]]) -> None:
    with serve() as process:
        nothing_is_shared(process.url)
        report = remote.run(process.url, TENANTS, PLAN, probes=20, options=OPTIONS)
    assert {each.name: each.detail for each in report.checks if each.verdict is Verdict.LEAKS} == {}
    assert report.verdict in (Verdict.ISOLATED, Verdict.PARTIAL), report.verdict
    timed = {each.number: each for each in report.checks if each.number in (9, 10)}
    assert timed[9].verdict is not Verdict.BLIND and timed[10].verdict is Verdict.ISOLATED, timed[10].detail
    samples = report.samples
    saved_s = median(samples["own_miss"]) - median(samples["hit"])
    print(f"a hit saves {saved_s * 1e3:.0f} ms; {timed[10].detail}")
    assert saved_s >= SAVED_S


def nothing_is_shared(url: str) -> None:
    """The same prompts of two tenants, in turn: each finds its own, and no token of the other."""
    dice = random.Random(0)
    system = [dice.randrange(3, 8_000) for _ in range(640)]
    prompts = [[*system, *(dice.randrange(3, 8_000) for _ in range(40 * at))] for at in range(6)]
    with client(url, KEYS["acme"]) as acme, client(url, KEYS["globex"]) as globex:
        for prompt in prompts:
            completed(acme, prompt=prompt, max_tokens=2)
        found = [
            cached(completed(globex, prompt=prompt, max_tokens=2, salt=str(at)))
            for at, prompt in enumerate(prompts)
        ]
        assert found == [0] * len(prompts)
        for who in (acme, globex):
            found = [cached(completed(who, prompt=prompt, max_tokens=2)) for prompt in prompts]
            assert found[0] == (len(prompts[0]) - 1 if who is acme else 0) and min(found[1:]) >= 640


def test_a_vllm_that_leaves_the_salt_out_leaks(serve: Callable[..., AbstractContextManager[Process]]) -> None:
    with serve("--scheduler-cls", "tests.engines.vllm.saltless.Scheduler") as process:
        report = remote.run(process.url, TENANTS, PLAN, probes=20, options=OPTIONS)
    assert report.verdict is Verdict.LEAKS
    leaks = {each.number for each in report.checks if each.verdict is Verdict.LEAKS}
    assert {3, 10} <= leaks, [(each.number, each.name, each.detail) for each in report.checks]
