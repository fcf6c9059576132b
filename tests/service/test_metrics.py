"""What ``/metrics`` and the timings of an answer say of the batch: preemptions, and the wait for room."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, Tenant
from radixkv.engines import Generation
from radixkv.engines.steps import Steps
from radixkv.service.metrics import MOST_NAMED, OTHER, TenantLabels, _CacheCollector
from tests.service.running import Running


def test_preemptions_are_counted_by_tenant_and_reason(live: Running) -> None:
    engine: Any = live.service.engine
    assert (
        'radixkv_preemptions_total{reason="unread",tenant="acme"}' not in live.operator.get("/metrics").text
    )
    engine._batch.preemptions["acme", "unread"] += 2
    engine._batch.preemptions["globex", "pool"] += 1
    found = live.operator.get("/metrics").text
    assert 'radixkv_preemptions_total{reason="unread",tenant="acme"} 2.0' in found
    assert 'radixkv_preemptions_total{reason="pool",tenant="globex"} 1.0' in found


def test_the_wait_inside_the_batch_counts_as_queued(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = live.service.engine
    generate = engine.generating

    def late(*args: Any, **more: Any) -> Steps[Generation]:
        made = yield from generate(*args, **more)
        waited = {"queued_s": made.queued_s + 7.0, "time_to_first_token_s": made.time_to_first_token_s + 7.0}
        return replace(made, **waited)

    monkeypatch.setattr(engine, "generating", late)
    answer = live.acme.post("/v1/completions", json={"prompt": "Which page?", "max_tokens": 2})
    timings = answer.json()["timings"]
    assert 7.0 <= timings["queued_s"] <= timings["time_to_first_token_s"] < 7.0 + timings["total_s"]


def test_missed_tokens_never_fall() -> None:
    """What comes back from a tier is a hit then. A scrape in between must not see the counter fall."""
    counts = {"hit_tokens": 10, "missed_tokens": 0}
    cache: Any = SimpleNamespace(
        stats=lambda: replace(PrefixCache(CacheConfig(8)).stats(), **counts),
        tenant_stats=lambda tenant: replace(PrefixCache(CacheConfig(8)).tenant_stats(tenant), **counts),
    )
    collector = _CacheCollector(cache, lambda: ["a"], TenantLabels())

    def missed() -> list[float]:
        collector.read()
        return [
            sample.value
            for metric in collector.collect()
            for sample in metric.samples
            if sample.name.endswith("missed_tokens_total")
        ]

    for counts["hit_tokens"], counts["missed_tokens"], shown in (
        (10, 0, 0), (10, 40, 40), (50, 0, 40), (50, 30, 40), (50, 41, 41), (0, 3, 3)  # the last: a new tenant
    ):  # fmt: skip
        assert missed() == [shown, shown]


def test_the_fifty_first_tenants_are_named_and_the_sums_of_all_others_never_fall() -> None:
    """Also while tenants are removed and made again, and one is called as the others together are."""
    cache = PrefixCache(CacheConfig(4096, block_size=4))
    tenants = [OTHER, *(f"t{number}" for number in range(MOST_NAMED + 20))]
    for tenant in tenants:
        cache.add_tenant(Tenant(tenant))
    collector = _CacheCollector(cache, lambda: tenants, TenantLabels())

    def asked(tenant: str, num_tokens: int) -> None:
        with cache.open(Namespace(tenant, "m"), range(num_tokens)) as sequence:
            sequence.commit(num_tokens)

    def counted() -> dict[str, float]:
        collector.read()
        return {
            sample.labels["tenant"]: sample.value
            for metric in collector.collect()
            for sample in metric.samples
            if sample.name == "radixkv_tenant_missed_tokens_total"
        }

    for number, tenant in enumerate(tenants):
        asked(tenant, number + 1)
    found = counted()
    assert found.keys() == {OTHER, *(f"t{number}" for number in range(MOST_NAMED))}
    assert found["t0"] == 2 and found["t49"] == 51
    assert found[OTHER] == 1 + sum(range(52, 72))
    cache.remove_tenant("t60")
    tenants.remove("t60")
    assert counted()[OTHER] == found[OTHER]
    tenants.append("t60")
    cache.add_tenant(Tenant("t60"))
    asked("t60", 5)
    assert counted()[OTHER] == found[OTHER] + 5 and sum(found.values()) == sum(range(1, 72))


def test_the_process_and_its_build_are_shown(live: Running) -> None:
    shown = live.operator.get("/metrics").text
    assert re.search(
        r'^radixkv_build_info\{build="(compiled|pure)",version="[0-9.a-z]+"\} 1\.0$', shown, re.MULTILINE
    )
    assert "process_cpu_seconds_total " in shown and "python_gc_collections_total{" in shown


def test_the_time_between_tokens_is_seen_by_tenant_and_by_context(live: Running) -> None:
    def counts() -> Counter[str]:
        found = re.findall(
            r"^radixkv_(inter_token_seconds|inter_token_by_context_seconds|queue_seconds|time_to_first_token_seconds)_count"
            r"\{(.*)\} (.*)$",
            live.operator.get("/metrics").text,
            re.MULTILINE,
        )
        return Counter({f"{name} {labels}": int(float(value)) for name, labels, value in found})

    before = counts()
    ids = [number % 251 + 5 for number in range(1_020)]
    body = {"prompt": ids, "max_tokens": 9, "ignore_eos": True, "salt": "between tokens"}
    for stream in (False, True):
        assert live.acme.post("/v1/completions", json={**body, "stream": stream}).status_code == 200
    assert counts() - before == {
        'inter_token_seconds tenant="acme"': 16,
        'inter_token_by_context_seconds context="1k"': 8,
        'inter_token_by_context_seconds context="4k"': 8,
        'queue_seconds tenant="acme"': 2,
        'time_to_first_token_seconds cached="no",tenant="acme"': 1,
        'time_to_first_token_seconds cached="yes",tenant="acme"': 1,
    }
