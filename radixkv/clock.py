"""Clocks: functions without arguments that return seconds and never run backwards. They are passed in as arguments."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

monotonic: Clock = time.monotonic
"""The clock of a deployment. Its zero is arbitrary: only differences have a meaning."""


class ManualClock:
    """A clock that moves only when ``advance`` is called, for tests and simulations."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` ≥ 0. Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"seconds={seconds!r}: a clock never runs backwards")
        self.now += seconds
