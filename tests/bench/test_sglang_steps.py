"""The clock of a scheduler's steps: it counts steps that compute, without the model, and begins anew at a flush."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

from radixkv.bench.sglang_steps import StepClock

WORK_S = 0.02


def work() -> SimpleNamespace:
    """Use the CPU for a while. A batch was chosen."""
    until = time.thread_time() + WORK_S
    while time.thread_time() < until:
        pass
    return SimpleNamespace(batch_to_run=[1])


def test_only_steps_that_compute_count_and_a_flush_writes_them(tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    clock = StepClock(figures)
    clock.ingest(work)
    clock.choose(lambda: SimpleNamespace(batch_to_run=None))  # idle
    assert clock.num_steps == clock.spent == 0
    clock.ingest(work)
    clock.choose(work)
    work()  # the model
    clock.end(work)
    assert 3 * WORK_S <= clock.spent / 1e9 < 3.9 * WORK_S and clock.num_steps == 1
    spent = clock.spent
    assert not clock.flush(lambda: False) and not figures.exists()
    assert clock.flush(lambda: True)
    assert json.loads(figures.read_text()) == {"spent": spent, "steps": 1} and clock.num_steps == 0
