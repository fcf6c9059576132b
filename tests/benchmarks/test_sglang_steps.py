"""The clock of a scheduler's steps: it counts steps that compute, without the model, and begins anew at a flush."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import sglang_steps
from benchmarks.sglang_steps import StepClock


class Thread:
    """A thread's time, which only ``work`` moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def thread_time_ns(self) -> int:
        return self.now_ns

    def work(self) -> SimpleNamespace:
        """Use the CPU for 10 ns. A batch was chosen."""
        self.now_ns += 10
        return SimpleNamespace(batch_to_run=[1])


def test_only_steps_that_compute_count_and_a_flush_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = Thread()
    monkeypatch.setattr(sglang_steps, "time", thread)
    work = thread.work
    figures = tmp_path / "figures"
    clock = StepClock(figures)
    clock.ingest(work)
    clock.choose(lambda: SimpleNamespace(batch_to_run=None))  # idle
    assert clock.num_steps == clock.spent == 0
    clock.ingest(work)
    clock.choose(work)
    work()  # the model
    clock.end(work)
    assert (clock.spent, clock.num_steps) == (30, 1)
    assert not clock.flush(lambda: False) and not figures.exists()
    assert clock.flush(lambda: True)
    assert json.loads(figures.read_text()) == {"spent": 30, "steps": 1} and clock.num_steps == 0
