"""The audit of radixkv's own service: as it is, and with the tenant left out of the lookup.

The service runs in this process. Its time is what the model computes, in tokens, with some noise: real times on a busy
machine would be too noisy for a test.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv import PrefixCache
from radixkv.audit import remote, scrapes, statistics
from radixkv.audit import target as target_module
from radixkv.audit.probe_prompts import Prompts
from radixkv.audit.scrapes import Scrapes
from radixkv.audit.target import Target
from radixkv.audit.timing import STOP_CONFIDENCE, TimingAudit, TimingPlan
from radixkv.audit.verdict import Verdict
from radixkv.clock import ManualClock
from radixkv.service.endpoints import prefixes
from tests.forked import small_demo_model
from tests.service.running import KEYS, Running, service_in_thread

# Several hundred requests, one after another.
pytestmark = [pytest.mark.slow]
PLAN = TimingPlan(samples=24, control=24, prompt_words=40)
PAIR = (KEYS["acme"], KEYS["globex"])
READ = ("/v1/stats", "/v1/usage", *scrapes.OPERATORS)
"""What a check of counts has to read."""
TOKEN_S, NOISE_S = 1e-3, 0.02


@contextmanager
def service(hidden_size: int) -> Iterator[Running]:
    """A service whose model has one layer: it shows a hit in the time as plainly as two."""
    with small_demo_model(num_layers=1, hidden_size=hidden_size), service_in_thread() as running:
        _set(running)
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with service(hidden_size=64) as running:
        yield running


@pytest.fixture
def live(shared: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """The service, with nothing cached. The audit takes its times from what the model computes."""
    for client in (shared.acme, shared.globex):
        assert client.delete("/v1/cache").is_success
    clock, noise = ManualClock(), random.Random(0)
    model: Any = shared.service.engine.model

    def computes(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else args[0]
        clock.advance(TOKEN_S * ids.numel() + noise.expovariate(1 / NOISE_S))

    hook = model.register_forward_pre_hook(computes, with_kwargs=True)
    monkeypatch.setattr(target_module, "time", SimpleNamespace(perf_counter=clock, sleep=clock.advance))
    yield shared
    hook.remove()


def test_no_content_shows_another_tenants_prompts(live: Running) -> None:
    options = remote.Options(operator_key=KEYS["operator"], tenant_names=("acme", "globex"))
    report = remote.run(live.url, PAIR, PLAN, probes=2, timing=False, options=options)
    assert not any(live.service.cache.namespaces(name) for name in ("acme", "globex")), (
        "the audit clears what it cached"
    )
    for check in report.checks:
        is_sound = check.verdict is Verdict.ISOLATED or check.number in (9, 10, 12)
        assert is_sound, f"{check.detail}: {check.figures}"
    assert len([check for check in report.checks if check.number == 3]) > 6
    assert report.verdict is Verdict.PARTIAL, "the times were left out"


def test_no_time_shows_another_tenants_prompts(live: Running) -> None:
    _shows_nothing(live, PLAN)


@pytest.mark.timing
def test_no_real_time_shows_another_tenants_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU times of the process: wall-clock times are too noisy for so few samples."""
    clock = SimpleNamespace(perf_counter=time.process_time, sleep=time.sleep)
    monkeypatch.setattr(target_module, "time", clock)
    with service(hidden_size=256) as running:  # a smaller one doesn't show a hit in the time
        _shows_nothing(running, TimingPlan(samples=48, control=40, prompt_words=40))


def _shows_nothing(running: Running, plan: TimingPlan) -> None:
    with Target(running.url, PAIR[0]) as a, Target(running.url, PAIR[1]) as b:
        timed = TimingAudit(a, b, plan, lambda done: None)
        control, arms, _ = timed.run()
    assert control.verdict is None, "own hits are faster than own misses"
    assert arms.figures["num_cross"] == plan.samples and not arms.figures["stopped_early"]
    # With so few samples, one audit in 16 of a sound service would report a leak at the audit's own confidence.
    interval = statistics.auc(timed.samples.cross, timed.samples.miss, STOP_CONFIDENCE)
    assert statistics.judged(interval, plan.margin) is not Verdict.LEAKS


@pytest.mark.parametrize(("mode", "verdict"), [("burst", Verdict.ISOLATED), ("strict", Verdict.LEAKS)])
def test_a_strict_tenants_counts_must_not_change_at_all(
    live: Running, mode: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst tenant's own counts may show evictions by others. A strict tenant's counts may show nothing of others."""
    monkeypatch.setattr(scrapes, "READ", READ)
    names, told = ("acme", "globex"), prefixes._tenant_stats

    def moved(keyring: Any, cache: Any, tenant: str) -> Any:
        others = sum(cache.tenant_stats(name).requests for name in names if name != tenant)
        own = told(keyring, cache, tenant)
        return own.model_copy(update={"evicted_blocks": own.evicted_blocks + others})

    monkeypatch.setattr(prefixes, "_tenant_stats", moved)
    _set(live, mode=mode, guaranteed_blocks=256)
    try:
        with Target(live.url, PAIR[0]) as a, Target(live.url, PAIR[1]) as b:
            check = Scrapes(a, b, Prompts(8), "text", []).check()
    finally:
        _set(live)
    assert check.verdict is verdict, check


def _set(running: Running, **settings: Any) -> None:
    """Set both tenants. They may pin more than they are guaranteed."""
    for name in ("acme", "globex"):
        answer = running.operator.put(f"/v1/tenants/{name}", json={"max_pinned_blocks": 100, **settings})
        assert answer.is_success, answer.text


def test_evictions_of_a_burst_tenants_blocks_are_no_leak(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tenant's requests fill the pool: what the first one had is gone, which burst mode allows."""
    monkeypatch.setattr(scrapes, "READ", READ)
    act, num_evicted = Scrapes._act, list[int]()

    def act_and_fill(audit: Scrapes, target: Target) -> None:
        act(audit, target)
        if target is b:
            num_evicted.append(live.service.cache.evict(live.service.cache.stats().evictable_blocks))

    monkeypatch.setattr(Scrapes, "_act", act_and_fill)
    with Target(live.url, PAIR[0]) as a, Target(live.url, PAIR[1]) as b:
        check = Scrapes(a, b, Prompts(40), "text", []).check()
    assert check.verdict is Verdict.ISOLATED, check.figures["changed"]
    assert min(num_evicted) > 10


def test_a_build_without_the_tenant_in_the_lookup_leaks(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tenants share one tree. Timing alone shows the leak, and so do the counts."""
    for name in ("open", "match"):
        original = getattr(PrefixCache, name)

        def blended(self: Any, namespace: Any, *args: Any, original: Any = original, **named: Any) -> Any:
            return original(self, namespace._replace(tenant="acme"), *args, **named)

        monkeypatch.setattr(PrefixCache, name, blended)
    monkeypatch.setattr(remote, "_each", lambda *_: [])  # of the checks by counts, the first is enough
    report = remote.run(live.url, PAIR, PLAN, probes=1)
    timing = report.check(10)
    assert timing.verdict is Verdict.LEAKS and timing.figures["auc"]["low"] > 0.52
    assert report.check(9).verdict is None and report.check(9).figures["p_value"] < 1e-8
    assert report.check(3).verdict is Verdict.LEAKS
    assert report.verdict is Verdict.LEAKS
