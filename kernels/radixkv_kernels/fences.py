"""Fences: order work on a side stream and on the engine's streams by events.

Blocks are zeroed on a side stream while compute continues. Two rules order that work, and the engine's streams when a
block moves from one to another:

    aside    work on the side stream starts after all earlier work of the engine's streams, so no stream still
             reads, writes or copies the freed blocks
    join     later work of the current stream starts after the work aside and after all earlier work of the
             engine's other streams, so a block that is handed out is no longer in use

The engine's streams are the streams that were current at a ``join``, and those that it registers (``add``). With one
stream and no unfinished work aside, ``join`` does nothing. The host never waits, and the device is never drained.

Not thread-safe, except ``add``. The owner of the pool calls the other methods under its own lock, so the order of
calls is the order of work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in the order of a stream's work."""

    def query(self) -> bool:
        """Whether the device has passed it. Never waits."""


class Streams(Protocol):
    """The device functions that Fences needs. Streams must be hashable."""

    side: Any
    """The stream for work beside the engine's."""

    def current(self) -> Any:
        """The current stream."""

    def record(self, stream: Any) -> Event:
        """Record an event after all work of ``stream`` so far."""

    def wait(self, stream: Any, event: Event) -> None:
        """Make later work of ``stream`` start after the event, on the device."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which ``stream`` is the current stream."""


class CudaStreams:
    """Streams of CUDA or ROCm: ``torch.cuda.Stream``. Two are equal if they are the same stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """The calling thread's current stream of the device."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Any) -> Event:
        """Record an event without timing, which is cheaper."""
        event: Event = stream.record_event()
        return event

    def wait(self, stream: Any, event: Event) -> None:
        """Call ``stream.wait_event``."""
        stream.wait_event(event)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Return ``torch.cuda.stream(stream)``."""
        return torch.cuda.stream(stream)


class Fences:
    """The order of one pool's work on several streams. Cost of a call: an event for each stream but the current one.

    Create it right after the pool was allocated. Earlier work of the current stream, such as zeroing, counts as
    aside.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._engine: set[Any] = set()
        self._aside: Event | None = None
        with self.aside():
            pass

    @classmethod
    def of(cls, device: torch.device) -> Fences | None:
        """Fences over the streams of a GPU. None for other devices, whose work is done when a call returns."""
        return cls(CudaStreams(device)) if device.type == "cuda" else None

    def add(self, stream: Any) -> None:
        """Register ``stream`` as one of the engine's. It need not be current at any call."""
        self._engine.add(stream)

    def join(self) -> None:
        """Make the current stream wait for the work aside and for the engine's other streams."""
        streams = self._streams
        stream = streams.current()
        self._engine.add(stream)
        for other in tuple(self._engine):  # another thread may add one meanwhile
            if other != stream:
                streams.wait(stream, streams.record(other))
        if self._aside is not None:
            if self._aside.query():
                self._aside = None
            else:
                streams.wait(stream, self._aside)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Enqueue the body's work on the side stream, after all earlier work of the engine's and the current stream.

        If the body raises, a later ``join`` still waits for the work that it enqueued.
        """
        streams = self._streams
        for stream in self._engine | {streams.current()}:
            streams.wait(streams.side, streams.record(stream))
        try:
            with streams.use(streams.side):
                yield
        finally:
            self._aside = streams.record(streams.side)
