"""Fences on a simulated device: work runs in the required order, and no other work is delayed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv_kernels import Fences
from tests.kernels.streams import Device

NOTHING: frozenset[int] = frozenset()
STREAMS = ("decode", "prefill", "admin")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("work", "join", "aside")),
        st.sampled_from(STREAMS),
        st.floats(0.1, 9),  # seconds on the device
        st.floats(0, 3),  # seconds of the host until the next step
    ),
    max_size=14,
)


@given(steps=STEPS)
def test_each_work_starts_exactly_when_the_rules_allow(
    steps: list[tuple[str, str, float, float]],
) -> None:
    device = Device()
    fences = Fences(device)
    ready = dict.fromkeys((*STREAMS, "side"), 0.0)  # when each stream may start its next work
    engine: set[str] = set()
    for kind, stream, seconds, pause in steps:
        device.stream = stream
        if kind == "join":
            fences.join()
            engine.add(stream)
            ready[stream] = max(ready[other] for other in engine | {"side"})
        else:
            on = stream
            if kind == "aside":
                on = "side"
                ready["side"] = max(ready[other] for other in engine | {stream, "side"})
                with fences.aside():
                    device.run(NOTHING, NOTHING, seconds)
            else:
                device.run(NOTHING, NOTHING, seconds)
            start = max(ready[on], device.now)
            assert (device.done[-1].stream, device.done[-1].start) == (on, start)
            ready[on] = start + seconds
        assert device.current() == stream
        device.now += pause


def test_one_stream_without_side_work_needs_no_event() -> None:
    device = Device()
    fences = Fences(device)
    device.num_events = device.num_waits = 0
    for _ in range(3):
        fences.join()
        device.run(NOTHING, NOTHING, 1)
    assert device.num_events == device.num_waits == 0
    with fences.aside():
        device.run(NOTHING, NOTHING, 1)
    assert (device.num_events, device.num_waits) == (2, 1)
    fences.join()
    assert (device.num_events, device.num_waits) == (2, 2), "the side work is still running"
    device.now = 99
    fences.join()
    assert (device.num_events, device.num_waits) == (2, 2), "the side work is done"


def test_earlier_work_on_the_pool_runs_first() -> None:
    device = Device(stream="where it was allocated")
    device.run(NOTHING, NOTHING, 5)
    fences = Fences(device)
    device.stream = "engine"
    fences.join()
    device.run(NOTHING, NOTHING, 1)
    assert device.done[-1].start == 5


def test_work_on_an_added_stream_is_waited_for() -> None:
    device = Device()
    fences = Fences(device)
    fences.add("forward")
    with device.use("forward"):
        device.run(NOTHING, NOTHING, 5)
    with fences.aside():
        device.run(NOTHING, NOTHING, 2)
    fences.join()
    device.run(NOTHING, NOTHING, 1)
    assert [(work.stream, work.start) for work in device.done] == [("forward", 0), ("side", 5), ("engine", 7)]


def test_failed_side_work_is_waited_for() -> None:
    device = Device()
    fences = Fences(device)
    with pytest.raises(RuntimeError), fences.aside():
        device.run(NOTHING, NOTHING, 5)
        raise RuntimeError
    fences.join()
    device.run(NOTHING, NOTHING, 1)
    assert device.done[-1].start == 5


def test_a_cpu_needs_no_fences() -> None:
    assert Fences.of(torch.device("cpu")) is None
