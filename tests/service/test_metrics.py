"""What ``/metrics`` and the timings of an answer say of the batch: preemptions, and the wait for room."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv import CacheConfig, PrefixCache
from radixkv.engines import Generation
from radixkv.engines.steps import Steps
from radixkv.service.metrics import _CacheCollector
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
    collector = _CacheCollector(cache, lambda: ["a"])

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
