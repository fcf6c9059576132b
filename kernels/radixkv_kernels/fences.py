"""Fences: work on several streams of a device, ordered by the blocks that it reads and writes.

A copy to a tier, a scrub or a transfer runs on a side stream beside compute. It may not read a block before what
writes it is done, nor overwrite one that somebody still reads. Fences remembers, for each block, an event after the
last work that wrote it and one after the last work of each stream that read it since. Before work is enqueued its
stream is made to wait, on the device, for just those events that conflict:

    it reads a block      for who wrote it last
    it writes a block     for that, and for everybody who has read it since

Work on one stream is in order anyway and waits for nothing. The host never waits and the device is never drained;
work that shares no block, or only reads it, runs side by side.

    with fences.work(side, writes=block_ids):
        scrub(pool, block_ids)
    ...
    if fences.is_idle(block_ids): ...        nothing in flight touches them: they may be freed by the host

Not locked: the owner of the pool calls it under its own lock, which also makes the order of calls the order of work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in the order of a stream's work."""

    def query(self) -> bool:
        """Whether the device has come past it; never waits."""


class Streams(Protocol):
    """What Fences needs of a device. A stream is anything that can be a key of a dict."""

    def record(self, stream: Any) -> Event:
        """An event after all work that ``stream`` was given so far."""

    def wait(self, stream: Any, event: Event) -> None:
        """Makes the work that ``stream`` is given from now on start after the event, on the device."""

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        """A context whose work goes to ``stream``."""


class CudaStreams:
    """Streams of CUDA or ROCm: ``torch.cuda.Stream``, one object for one stream."""

    def record(self, stream: torch.cuda.Stream) -> Event:
        """An event without timing, which is the cheap kind."""
        event: Event = stream.record_event()
        return event

    def wait(self, stream: torch.cuda.Stream, event: Any) -> None:
        """``stream.wait_event``."""
        stream.wait_event(event)

    def current(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """``torch.cuda.stream``."""
        return torch.cuda.stream(stream)


class Past:
    """An event that has happened."""

    def query(self) -> bool:
        """Yes."""
        return True


class HostStreams:
    """Streams of the CPU, where work is done when the call returns."""

    def record(self, stream: Any) -> Event:
        """An event that has happened."""
        return Past()

    def wait(self, stream: Any, event: Event) -> None:
        """There is nothing to wait for."""

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        """Work goes where it went."""
        return nullcontext()


class _Use:
    """Of one block: the last work that wrote it, and by stream the last that read it since."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer: tuple[Any, Event] | None = None
        self.readers: dict[Any, Event] = {}

    def is_over(self) -> bool:
        events = [*self.readers.values(), *([self.writer[1]] if self.writer else [])]
        return all(event.query() for event in events)


class Fences:
    """The order of work on the blocks of one pool. ``Fences.of(pool.device)`` takes the device's own streams.

    Holds an entry for each block that work in flight touched, until ``forget`` or ``is_idle`` finds it done.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._uses: dict[int, _Use] = {}

    @classmethod
    def of(cls, device: torch.device) -> Fences:
        """Fences over CUDA's streams, or on other devices over none."""
        return cls(CudaStreams() if device.type == "cuda" else HostStreams())

    @contextmanager
    def work(self, stream: Any, *, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> Iterator[None]:
        """Work enqueued inside goes to ``stream``, after whatever conflicts with it; O(blocks named).

        If the body raises, what it had enqueued until then counts as work all the same.
        """
        reads, writes = set(reads), set(writes)
        for event in self._conflicts(stream, reads, writes):
            self._streams.wait(stream, event)
        try:
            with self._streams.current(stream):
                yield
        finally:
            self._note(stream, reads, writes)

    def is_idle(self, block_ids: Iterable[int]) -> bool:
        """Whether nothing in flight reads or writes these blocks, so that the host may do so; never waits."""
        idle = True
        for block_id in block_ids:
            use = self._uses.get(block_id)
            if use is None:
                continue
            if use.is_over():
                del self._uses[block_id]
            else:
                idle = False
        return idle

    def forget(self) -> int:
        """Drops what is done; returns how many blocks work in flight still touches. O(blocks remembered)."""
        self.is_idle(list(self._uses))
        return len(self._uses)

    def _conflicts(self, stream: Any, reads: set[int], writes: set[int]) -> list[Event]:
        """Events of other streams, each once."""
        found: dict[int, Event] = {}
        for block_id in reads | writes:
            use = self._uses.get(block_id)
            if use is None:
                continue
            others = [use.writer] if use.writer is not None else []
            if block_id in writes:
                others += use.readers.items()
            found |= {id(event): event for other, event in others if other != stream}
        return list(found.values())

    def _note(self, stream: Any, reads: set[int], writes: set[int]) -> None:
        event = self._streams.record(stream)
        for block_id in reads - writes:
            self._uses.setdefault(block_id, _Use()).readers[stream] = event
        for block_id in writes:
            use = self._uses[block_id] = _Use()
            use.writer = (stream, event)
