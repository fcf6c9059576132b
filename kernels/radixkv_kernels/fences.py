"""Fences: a side stream beside the streams that an engine computes on, ordered by events.

Blocks are zeroed on a side stream while compute goes on. Two rules order that work, and the engine's streams among
each other wherever a block goes from one to another:

    aside    starts after all that the engine's streams were given until then: nobody still reads, writes or copies
             what was freed
    join     what the current stream is given from now on starts after the work aside, and after what the engine's
             other streams were given until then: a block that is handed out is nobody else's any more

The engine's streams are those that were current at a ``join``, and those that it names (``add``). With one stream, and
nothing aside in flight, a ``join`` does nothing. The host never waits and the device is never drained.

Not locked, but for ``add``: the owner of the pool calls it under its own lock, which also makes the order of calls the
order of work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in the order of a stream's work."""

    def query(self) -> bool:
        """Whether the device has come past it; never waits."""


class Streams(Protocol):
    """What Fences needs of a device. A stream is anything that can be an element of a set."""

    side: Any
    """The stream for work beside the engine's."""

    def current(self) -> Any:
        """The stream that work goes to now."""

    def record(self, stream: Any) -> Event:
        """An event after all work that ``stream`` was given so far."""

    def wait(self, stream: Any, event: Event) -> None:
        """Makes the work that ``stream`` is given from now on start after the event, on the device."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """A context whose work goes to ``stream``."""


class CudaStreams:
    """Streams of CUDA or ROCm: ``torch.cuda.Stream``, of which two are equal if they are the same stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """That of the calling thread, for the device."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Any) -> Event:
        """An event without timing, which is the cheap kind."""
        event: Event = stream.record_event()
        return event

    def wait(self, stream: Any, event: Event) -> None:
        """``stream.wait_event``."""
        stream.wait_event(event)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """``torch.cuda.stream``."""
        return torch.cuda.stream(stream)


class Fences:
    """The order of one pool's work on several streams. Cost of a call: an event for each stream but the current one.

    Make it where the pool was allocated: what the current stream was given until then, zeros perhaps, counts as aside.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._engine: set[Any] = set()
        self._aside: Event | None = None
        with self.aside():
            pass

    @classmethod
    def of(cls, device: torch.device) -> Fences | None:
        """Over the streams of a GPU; None for devices that have done their work when a call returns."""
        return cls(CudaStreams(device)) if device.type == "cuda" else None

    def add(self, stream: Any) -> None:
        """The engine computes on ``stream`` too, which need not be current at any call."""
        self._engine.add(stream)

    def join(self) -> None:
        """The current stream goes on after the work aside and after the engine's other streams, as they are now."""
        streams = self._streams
        stream = streams.current()
        self._engine.add(stream)
        for other in tuple(self._engine):  # another may be added meanwhile
            if other != stream:
                streams.wait(stream, streams.record(other))
        if self._aside is not None:
            if self._aside.query():
                self._aside = None
            else:
                streams.wait(stream, self._aside)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work enqueued inside goes to the side stream, after what the engine's streams and the current one were given.

        If the body raises, what it had enqueued until then is waited for all the same.
        """
        streams = self._streams
        for stream in self._engine | {streams.current()}:
            streams.wait(streams.side, streams.record(stream))
        try:
            with streams.use(streams.side):
                yield
        finally:
            self._aside = streams.record(streams.side)
