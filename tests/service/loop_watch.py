"""Measure how long the event loop of a service under test works without a pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixkv.service.core import Service
from tests.waiting import eventually

_TICK_S = 0.002


class LoopWatch:
    """The most CPU time of the event loop's own thread between two ticks of a task on it, in seconds."""

    def __init__(self) -> None:
        self.longest_work_s, self.num_ticks = 0.0, 0
        self.task: asyncio.Task[None] | None = None

    async def tick(self) -> None:
        worked = time.thread_time()
        while True:
            await asyncio.sleep(_TICK_S)
            work = time.thread_time()
            self.longest_work_s = max(self.longest_work_s, work - worked)
            self.num_ticks += 1
            worked = work


@contextmanager
def loop_watched(service: Service) -> Iterator[LoopWatch]:
    """Measure the event loop of a running service while the ``with`` block runs."""
    watch, tick, found = LoopWatch(), service.fleet_pins.tick, []

    def begin(*_: Any) -> None:
        service.fleet_pins.tick = tick  # type: ignore[method-assign]
        found.append(asyncio.get_running_loop())
        watch.task = asyncio.create_task(watch.tick())
        tick()

    service.fleet_pins.tick = begin  # type: ignore[method-assign]
    eventually(lambda: watch.task, "the watch")
    try:
        yield watch
    finally:
        assert watch.task is not None
        seen = watch.num_ticks
        eventually(lambda: watch.num_ticks > seen + 1)  # a stall may be ending right now
        found[0].call_soon_threadsafe(watch.task.cancel)
