"""A reader of one publisher of KV events: the numbers of its batches, and the sockets.

    subscriber = EventSubscriber("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", view.follow("engine-a"))
    subscriber.start()

Batches are applied in the order of their numbers. A base (AllBlocksCleared first) replaces everything known. After a
gap, the missing batches are replayed; if they are gone, everything is forgotten until the next base. A lower number
than the last one means a new process: everything is forgotten too. A batch that can't be read is a gap.

A publisher that is silent is asked for batches after the last known one, every POLL_S. So a loss at the end is found
too. If neither a batch nor an answer came for LOST_S, everything known of the publisher is forgotten.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.events.event_subscriber", "events")

import threading
from typing import Final, Protocol

import zmq

from radixkv.clock import Clock, monotonic
from radixkv.events.event_messages import END_OF_REPLAY, MAX_BATCH_BYTES, NUMBER_BYTES, Change, decoded
from radixkv.events.event_settings import check_endpoint
from radixkv.uncopied import refuse_copies

__all__ = ["EventSubscriber", "Follower", "Sink"]

POLL_S: Final = 5.0
LOST_S: Final = 20.0
_ANSWER_S = 2.0
"""Time for each batch of a replay to arrive."""
_TURN_MS: Final = 100
_HIGH_WATER: Final = 1_024


class Sink(Protocol):
    """Keeps what one publisher holds."""

    def apply(self, changes: list[Change]) -> None:
        """Apply the changes of a batch, in order."""

    def forget(self) -> None:
        """Forget everything."""


class Follower:
    """Puts the batches of one publisher in order. One thread at a time."""

    def __init__(self, sink: Sink) -> None:
        self.num_gaps = self.num_malformed = 0
        self._sink = sink
        self._number: int | None = None
        self._last_live: int | None = None
        self._base = 0

    @property
    def wanted(self) -> int:
        """The next number; 0 if nothing is known."""
        return 0 if self._number is None else self._number + 1

    @property
    def is_current(self) -> bool:
        """Whether it knows everything up to ``wanted``."""
        return self._number is not None

    def live(self, number: int, payload: bytes) -> bool:
        """Take a batch as it is published. False: take a replay from ``wanted`` on, then this batch again."""
        if number < (self._base if self._last_live is None else self._last_live):
            self.forget()  # another process
        self._last_live = number
        return self.take(number, payload)

    def take(self, number: int, payload: bytes) -> bool:
        """Take a batch, live or replayed. False if there is a gap before it, or nothing is known."""
        if self._number is not None and number <= self._number:
            return True
        changes = decoded(payload)
        if changes is None:
            self.num_malformed += 1
            return False
        is_base = bool(changes) and changes[0].op == "clear"
        if is_base:
            self._base = number
        elif number != self.wanted or self._number is None:
            return False
        self._sink.apply(changes)
        self._number = number
        return True

    def miss(self) -> None:
        """Give up a gap: a lost removal must not stay."""
        self.num_gaps += 1
        self.forget()

    def forget(self) -> None:
        """Forget everything, until the next base."""
        self._number = self._last_live = None
        self._base = 0
        self._sink.forget()


class EventSubscriber:
    """The sockets and the thread of a Follower. Raises ConfigError for an endpoint that is none.

    - ``endpoint``, ``replay_endpoint``: those of the publisher. Without the second, the next base is awaited after each
      gap.
    - ``topic``: the beginning of the topics to read.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        sink: Sink,
        *,
        topic: str = "",
        clock: Clock = monotonic,
    ) -> None:
        check_endpoint("endpoint", endpoint)
        if replay_endpoint is not None:
            check_endpoint("replay_endpoint", replay_endpoint)
        self.follower = Follower(sink)
        self._endpoint, self._replay_endpoint, self._topic = endpoint, replay_endpoint, topic.encode()
        self._clock = clock
        self._heard_at = self._asked_at = clock()
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read. Once."""
        self._context = zmq.Context(io_threads=1)
        self._thread = threading.Thread(target=self._run, name="radixkv-event-reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and forget everything. Idempotent."""
        self._stopping = True
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            self.follower.forget()
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)

    def _run(self) -> None:
        with self._connected(zmq.SUB, self._endpoint) as sub:
            sub.setsockopt(zmq.SUBSCRIBE, self._topic)
            self._replay()
            while not self._stopping:
                if sub.poll(_TURN_MS):
                    self._take(sub.recv_multipart(zmq.NOBLOCK))
                elif self._clock() >= self._asked_at + POLL_S:
                    self._replay()
                if self._is_lost():
                    self.follower.miss()

    def _is_lost(self) -> bool:
        is_asked = self._replay_endpoint is not None and self.follower.is_current
        return is_asked and self._clock() >= self._heard_at + LOST_S

    def _connected(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.RCVHWM: _HIGH_WATER,
            zmq.MAXMSGSIZE: MAX_BATCH_BYTES,
            zmq.IPV6: int("[" in endpoint),
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        socket.connect(endpoint)
        return socket

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            self.follower.num_malformed += 1
            return
        number = int.from_bytes(frames[1], "big")
        self._heard_at = self._clock()
        if self.follower.live(number, frames[2]):
            return
        if self.follower.is_current or self._clock() >= self._asked_at + POLL_S:
            self._replay()
            if not self.follower.take(number, frames[2]):
                self.follower.miss()

    def _replay(self) -> None:
        """Take what the publisher still has after the last known batch."""
        self._asked_at = self._clock()
        if self._replay_endpoint is None:
            return
        with self._connected(zmq.DEALER, self._replay_endpoint) as dealer:
            dealer.send_multipart([b"", self.follower.wanted.to_bytes(NUMBER_BYTES, "big")], zmq.NOBLOCK)
            while self._is_answered(dealer):
                frames = dealer.recv_multipart(zmq.NOBLOCK)
                if len(frames) != 4 or len(frames[2]) != NUMBER_BYTES:
                    self.follower.num_malformed += 1
                    return
                self._heard_at = self._clock()
                if frames[2] == END_OF_REPLAY:
                    return
                self.follower.take(int.from_bytes(frames[2], "big"), frames[3])

    def _is_answered(self, dealer: zmq.Socket[bytes]) -> bool:
        """Wait for the next batch of a replay."""
        until = self._clock() + _ANSWER_S
        while not self._stopping and self._clock() < until:
            if dealer.poll(_TURN_MS):
                return True
        return False


refuse_copies(EventSubscriber, "it holds a socket. Make another")
