"""What ``/metrics`` and the timings of an answer say of the batch: preemptions, and the wait for room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from radixkv.engines import Generation
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
    engine = live.service.engine
    generate = engine.generate

    def late(*args: Any, **more: Any) -> Generation:
        made = generate(*args, **more)
        waited = {"queued_s": made.queued_s + 7.0, "time_to_first_token_s": made.time_to_first_token_s + 7.0}
        return replace(made, **waited)

    monkeypatch.setattr(engine, "generate", late)
    answer = live.acme.post("/v1/completions", json={"prompt": "Which page?", "max_tokens": 2})
    timings = answer.json()["timings"]
    assert 7.0 <= timings["queued_s"] <= timings["time_to_first_token_s"] < 7.0 + timings["total_s"]
