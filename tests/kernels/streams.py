"""A simulated device with its own clock. Its streams behave like those of a GPU, and their speeds vary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple


class Work(NamedTuple):
    """Work that a stream did: the blocks that it used, and its times."""

    stream: str
    reads: frozenset[int]
    writes: frozenset[int]
    start: float
    end: float

    def conflicts(self, later: Work) -> bool:
        return bool(self.writes & (later.reads | later.writes) or self.reads & later.writes)


@dataclass
class Device:
    """Each stream runs its work in order, and all streams run in parallel.

    Work starts when its stream is ready and takes its time on the device's clock. Waits use only events that were
    recorded before, so the times of work are known when it is enqueued. ``now`` is the host's time. ``stream`` is the
    current stream.
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
        """The first pair of conflicting works in which the later one did not wait for the earlier one's end."""
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
