"""Fences on a device with a clock of its own: what conflicts is in order, what does not is not held up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv_kernels import Fences, Pool, fork_blocks, scrub

BLOCKS = st.frozensets(st.integers(0, 4), max_size=3)


class Work(NamedTuple):
    stream: int
    reads: frozenset[int]
    writes: frozenset[int]
    start: float
    end: float

    def conflicts(self, later: Work) -> bool:
        return bool(self.writes & (later.reads | later.writes) or self.reads & later.writes)


@dataclass
class Device:
    """Streams as GPUs have them: each in order, side by side, at speeds that nobody knows beforehand.

    Work takes its time on the device's clock from when its stream is ready, and waits name events that were
    recorded before, so when it runs is known as soon as it is enqueued. ``now`` is the host's time.
    """

    now: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)
    done: list[Work] = field(default_factory=list)
    num_waits: int = 0
    stream: int | None = None

    def record(self, stream: int) -> Moment:
        return Moment(self, self.ready.get(stream, self.now))

    def wait(self, stream: int, event: Moment) -> None:
        self.num_waits += 1
        self.ready[stream] = max(self.ready.get(stream, self.now), event.time)

    @contextmanager
    def current(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def run(self, reads: frozenset[int], writes: frozenset[int], seconds: float) -> None:
        assert self.stream is not None
        start = max(self.now, self.ready.get(self.stream, 0.0))
        self.ready[self.stream] = start + seconds
        self.done.append(Work(self.stream, reads, writes, start, start + seconds))


class Moment(NamedTuple):
    device: Device
    time: float

    def query(self) -> bool:
        return self.time <= self.device.now


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, frozenset[int], frozenset[int], float, float]]:
    step = st.tuples(
        st.integers(0, 2), BLOCKS, BLOCKS, st.floats(0.1, 9), st.floats(0, 3)  # stream, reads, writes, seconds, pause
    )  # fmt: skip
    return draw(st.lists(step, max_size=12))


@given(program=programs())
def test_what_conflicts_is_in_order(program: list) -> None:
    device = Device()
    fences = Fences(device)
    for stream, reads, writes, seconds, pause in program:
        with fences.work(stream, reads=reads, writes=writes):
            device.run(reads, writes, seconds)
        device.now += pause
        if pause > 2:
            fences.forget()
    for earlier, later in combinations(device.done, 2):
        if earlier.conflicts(later):
            assert earlier.end <= later.start, (earlier, later)


@given(program=programs())
def test_nothing_waits_without_a_reason(program: list) -> None:
    device = Device()
    fences = Fences(device)
    issued = []
    for stream, reads, writes, seconds, pause in program:
        issued.append(device.now)
        with fences.work(stream, reads=reads, writes=writes):
            device.run(reads, writes, seconds)
        device.now += pause
    for index, (work, now) in enumerate(zip(device.done, issued, strict=True)):
        before = device.done[:index]
        reasons = [other.end for other in before if other.stream == work.stream or other.conflicts(work)]
        assert work.start == max([now, *reasons])


@given(program=programs(), asked=BLOCKS)
def test_a_block_is_idle_when_the_last_work_on_it_is_done(program: list, asked: frozenset[int]) -> None:
    device = Device()
    fences = Fences(device)
    for stream, reads, writes, seconds, pause in program:
        with fences.work(stream, reads=reads, writes=writes):
            device.run(reads, writes, seconds)
        device.now += pause
        busy = {block for work in device.done if work.end > device.now for block in work.reads | work.writes}
        assert fences.is_idle(asked) == (not asked & busy)
    device.now += 1000
    assert fences.is_idle(asked)
    assert fences.forget() == 0


def test_a_scrub_waits_for_the_copy_that_reads_and_for_nobody_else() -> None:
    device = Device()
    fences = Fences(device)
    with fences.work(0, reads=[1], writes=[2]):
        device.run(frozenset({1}), frozenset({2}), 10)
    with fences.work(1, writes=[3]):
        device.run(frozenset(), frozenset({3}), 1)
    assert device.num_waits == 0
    with fences.work(1, writes=[1]):
        device.run(frozenset(), frozenset({1}), 1)
    assert device.num_waits == 1
    assert [(work.start, work.end) for work in device.done] == [(0, 10), (0, 1), (10, 11)]
    device.now = 10.5
    assert fences.is_idle([2, 3]) and not fences.is_idle([1])


def test_work_that_fails_halfway_is_waited_for() -> None:
    device = Device()
    fences = Fences(device)
    with pytest.raises(RuntimeError), fences.work(0, reads=[1]):
        device.run(frozenset({1}), frozenset(), 5)
        raise RuntimeError
    assert not fences.is_idle([1])


def test_on_the_cpu_work_is_done_at_once() -> None:
    storage = torch.ones(3, 1, 2, 2, 1, 1)
    pool = Pool.of(storage)
    fences = Fences.of(pool.device)
    with fences.work("compute", reads=[0], writes=[1]):
        fork_blocks(pool, [0], [1], [1])
    with fences.work("side", writes=[0]):
        scrub(pool, [0])
    assert fences.is_idle([0, 1])
    assert fences.forget() == 0
    assert not storage[0].any() and storage[1].all()
