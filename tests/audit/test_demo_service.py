"""The audit of radixkv's own service: as it is, and with the tenant left out of the lookup.

The service runs in this process. Times are the process's CPU times, because wall-clock times on a busy machine are too
noisy for so few samples.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv import PrefixCache
from radixkv.audit import remote, statistics
from radixkv.audit import target as target_module
from radixkv.audit.probe_prompts import Prompts
from radixkv.audit.scrapes import Scrapes
from radixkv.audit.target import Target
from radixkv.audit.timing import STOP_CONFIDENCE, TimingAudit, TimingPlan
from radixkv.audit.verdict import Verdict
from radixkv.service.endpoints import prefixes
from tests.forked import small_demo_model
from tests.service.running import KEYS, Running, service_in_thread

# Several hundred requests, one after another.
pytestmark = [pytest.mark.slow]
PLAN = TimingPlan(samples=48, control=40, prompt_words=40)
PAIR = (KEYS["acme"], KEYS["globex"])


@pytest.fixture(autouse=True)
def _by_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=time.process_time, sleep=time.sleep)
    monkeypatch.setattr(target_module, "time", clock)


@contextmanager
def service(hidden_size: int) -> Iterator[Running]:
    with small_demo_model(num_layers=1, hidden_size=hidden_size), service_in_thread() as running:
        for name in ("acme", "globex"):
            running.operator.put(f"/v1/tenants/{name}", json={"max_pinned_blocks": 100})
        yield running


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    """One layer shows a hit in the time as plainly as two. A layer of a quarter of the size doesn't."""
    with service(hidden_size=256) as running:
        yield running


def test_no_content_shows_another_tenants_prompts() -> None:
    options = remote.Options(operator_key=KEYS["operator"], tenant_names=("acme", "globex"))
    with service(hidden_size=64) as live:
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
    with Target(live.url, PAIR[0]) as a, Target(live.url, PAIR[1]) as b:
        timed = TimingAudit(a, b, PLAN, lambda done: None)
        control, arms, _ = timed.run()
    assert control.verdict is None, "own hits are faster than own misses"
    assert arms.figures["num_cross"] == PLAN.samples and not arms.figures["stopped_early"]
    # With so few samples, one audit in 16 of a sound service would report a leak at the audit's own confidence.
    interval = statistics.auc(timed.samples.cross, timed.samples.miss, STOP_CONFIDENCE)
    assert statistics.judged(interval, PLAN.margin) is not Verdict.LEAKS


@pytest.mark.parametrize(("mode", "verdict"), [("burst", Verdict.ISOLATED), ("strict", Verdict.LEAKS)])
def test_a_strict_tenants_counts_must_not_change_at_all(
    mode: str, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst tenant's own counts may show evictions by others. A strict tenant's counts may show nothing of others."""
    entries = {
        name: {"keys": [KEYS[name]], "mode": mode, "guaranteed_blocks": 256} for name in ("acme", "globex")
    }
    (tmp_path / "keys.json").write_text(json.dumps({"operator": KEYS["operator"], "tenants": entries}))
    told = prefixes._tenant_stats

    def moved(keyring: Any, cache: Any, tenant: str) -> Any:
        others = sum(cache.tenant_stats(name).requests for name in entries if name != tenant)
        own = told(keyring, cache, tenant)
        return own.model_copy(update={"evicted_blocks": own.evicted_blocks + others})

    monkeypatch.setattr(prefixes, "_tenant_stats", moved)
    with (
        small_demo_model(),
        service_in_thread(keys=str(tmp_path / "keys.json")) as live,
        Target(live.url, PAIR[0]) as a,
        Target(live.url, PAIR[1]) as b,
    ):
        check = Scrapes(a, b, Prompts(8), "text", []).check()
    assert check.verdict is verdict, check


def test_evictions_of_a_burst_tenants_blocks_are_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tenant's requests fill the pool: what the first one had is gone, which burst mode allows."""
    act, num_evicted = Scrapes._act, list[int]()
    with (
        small_demo_model(),
        service_in_thread() as live,
        Target(live.url, PAIR[0]) as a,
        Target(live.url, PAIR[1]) as b,
    ):

        def act_and_fill(scrapes: Scrapes, target: Target) -> None:
            act(scrapes, target)
            if target is b:
                num_evicted.append(live.service.cache.evict(live.service.cache.stats().evictable_blocks))

        monkeypatch.setattr(Scrapes, "_act", act_and_fill)
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
