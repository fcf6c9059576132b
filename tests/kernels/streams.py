"""A device with a clock of its own: streams as GPUs have them, at speeds that nobody knows beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple


class Work(NamedTuple):
    """What a stream did, on which blocks, and when."""

    stream: str
    reads: frozenset[int]
    writes: frozenset[int]
    start: float
    end: float

    def conflicts(self, later: Work) -> bool:
        return bool(self.writes & (later.reads | later.writes) or self.reads & later.writes)


@dataclass
class Device:
    """Each stream in order, all side by side.

    Work takes its time on the device's clock from when its stream is ready, and waits name events that were recorded
    before, so when it runs is known as soon as it is enqueued. ``now`` is the host's time, ``stream`` is current.
    """

    now: float = 0.0
    stream: str = "engine"
    side: str = "side"
    ready: dict[str, float] = field(default_factory=dict)
    done: list[Work] = field(default_factory=list)
    num_events: int = 0
    num_waits: int = 0

    def current(self) -> str:
        return self.stream

    def record(self, stream: str) -> Moment:
        self.num_events += 1
        return Moment(self, self.ready.get(stream, self.now))

    def wait(self, stream: str, event: Moment) -> None:
        self.num_waits += 1
        self.ready[stream] = max(self.ready.get(stream, self.now), event.time)

    @contextmanager
    def use(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def run(self, reads: frozenset[int], writes: frozenset[int], seconds: float) -> None:
        start = max(self.now, self.ready.get(self.stream, 0.0))
        self.ready[self.stream] = start + seconds
        self.done.append(Work(self.stream, reads, writes, start, start + seconds))

    def first_race(self) -> tuple[Work, Work] | None:
        """Work that conflicts with earlier work and didn't wait for its end, with that."""
        races = (
            pair
            for pair in combinations(self.done, 2)
            if pair[0].conflicts(pair[1]) and pair[0].end > pair[1].start
        )
        return next(races, None)


class Moment(NamedTuple):
    device: Device
    time: float

    def query(self) -> bool:
        return self.time <= self.device.now
