"""The sockets of a publisher of KV events, and the thread that serves them.

    publisher = EventPublisher(keys, EventSettings(block_size=16))
    cache = PrefixCache(config, journal=publisher.journal)
    publisher.start(cache)
    ...
    publisher.close()

**PUB.** Every batch goes to all subscribers: topic, number, batch. It never waits. A subscriber that reads too slowly
loses batches when ``_HIGH_WATER`` of them wait for it, and sees a gap in the numbers.

**ROUTER.** A consumer sends an empty frame and the first number that it wants. It gets all kept batches from there on,
each as an empty frame, topic, number, batch; and then an empty frame, an empty topic, END_OF_REPLAY and an empty batch.
If the first number is higher than the wanted one, the batches between are gone, and the consumer must forget what it
knows. If no base follows either, everything is stated again, to all subscribers.

The thread takes turns between changes of the cache and replays, in small parts. One replay of a consumer runs at a
time. It is given up when the consumer stops reading. All copies of a batch share its memory.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.events.event_publisher", "events")

import contextlib
import os
import threading
from collections import OrderedDict
from typing import Final

import zmq

from radixkv.errors import ConfigError
from radixkv.events.engine_hashes import EngineHashes
from radixkv.events.event_messages import END_OF_REPLAY, NUMBER_BYTES
from radixkv.events.event_settings import EventSettings
from radixkv.events.event_stream import EventStream, Snapshots
from radixkv.events.replay_buffer import ReplayBuffer
from radixkv.signing import KeySet
from radixkv.uncopied import refuse_copies

__all__ = ["EventPublisher"]

_HIGH_WATER: Final = 1_024
_MAX_REQUEST_BYTES: Final = 256
"""A longer frame of a consumer ends its connection."""
_MAX_REPLAYS: Final = 1_024
"""Consumers whose replay runs or waits. Further requests are dropped; consumers repeat them."""
_REQUESTS_A_TURN: Final = 16
_BATCHES_A_TURN: Final = 32
_LONGEST_SLEEP_MS: Final = 100
_HEARTBEAT_MS: Final = 10_000


class EventPublisher:
    """Publishes what a cache holds. ``journal`` goes to the cache. See the module's docstring.

    ``keys`` of the purpose ``events``, or ``hashes``: see EventStream. Raises ConfigError.
    """

    def __init__(
        self, keys: KeySet | None, settings: EventSettings, *, hashes: EngineHashes | None = None
    ) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.journal = EventStream(keys, settings, hashes=hashes, wake=self._wake)
        self.num_refused = 0
        self.endpoint, self.replay_endpoint = settings.endpoint, settings.replays
        """Where it listens. After ``start``, with the ports that were chosen."""
        self._settings = settings
        self._kept: ReplayBuffer[zmq.Frame] = ReplayBuffer(settings.replay_batches, settings.replay_bytes)
        self._replays: OrderedDict[bytes, int] = OrderedDict()  # the next number of each consumer
        self._topic = settings.topic.encode()
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None

    def start(self, cache: Snapshots) -> None:
        """Listen, state what the cache holds, and publish its changes from now on. Once.

        Raises ConfigError if an endpoint can't be bound.
        """
        self.journal.attach(cache)
        self._context = zmq.Context(io_threads=1)
        try:
            pub = self._bound(zmq.PUB, "endpoint", self.endpoint)
            router = self._bound(zmq.ROUTER, "replay_endpoint", self.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.endpoint = pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(
            target=self._run, args=(pub, router), name="radixkv-events", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop publishing, and end the thread. Idempotent; the cache may still use the journal."""
        self._stopping = True
        self._wake()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self.journal.close()
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)

    def __del__(self) -> None:
        wake_fd: int | None = getattr(self, "_wake_fd", None)  # None if __init__ failed
        if wake_fd is not None:
            os.close(wake_fd)

    def _bound(self, kind: int, name: str, endpoint: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        settings = self._settings
        most = _HIGH_WATER if kind == zmq.PUB else 2 * (settings.replay_batches + 1)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: most,
            zmq.RCVHWM: _HIGH_WATER,
            zmq.MAXMSGSIZE: _MAX_REQUEST_BYTES,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.IPV6: int("[" in endpoint),
        }
        if kind == zmq.ROUTER:
            options[zmq.ROUTER_MANDATORY] = 1  # tells that a consumer has left or doesn't read
        for option, value in options.items():
            socket.setsockopt(option, value)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(name, endpoint, f"an endpoint that can be bound: {error.strerror}") from None
        return socket

    def _wake(self) -> None:
        self.journal.is_asleep = False
        with contextlib.suppress(BlockingIOError):  # it is full of wake-ups
            os.eventfd_write(self._wake_fd, 1)

    # --- the thread

    def _run(self, pub: zmq.Socket[bytes], router: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        with pub, router:
            while not self._stopping:
                self._publish(pub)
                self._take_requests(router)
                self._answer(router)
                self._sleep(poller)

    def _sleep(self, poller: zmq.Poller) -> None:
        """Wait for work. If there is some, only release the interpreter's lock."""
        self.journal.is_asleep = True  # first: a record that comes from now on wakes it
        is_idle = self.journal.is_idle and not self._replays
        ready = poller.poll(_LONGEST_SLEEP_MS if is_idle else 0)
        self.journal.is_asleep = False
        if any(found == self._wake_fd for found, _ in ready):
            os.eventfd_read(self._wake_fd)

    def _publish(self, pub: zmq.Socket[bytes]) -> None:
        batch = self.journal.step()
        if batch is None:
            return
        frame = zmq.Frame(batch.payload)
        number = batch.number.to_bytes(NUMBER_BYTES, "big")
        pub.send(self._topic, zmq.SNDMORE | zmq.NOBLOCK)
        pub.send(number, zmq.SNDMORE | zmq.NOBLOCK)
        pub.send(frame, zmq.NOBLOCK, copy=False)
        self._kept.add(batch.number, frame, len(batch.payload), batch.is_base)

    def _take_requests(self, router: zmq.Socket[bytes]) -> None:
        """Begin the replays of waiting requests. A consumer's newer request replaces its older one."""
        for _ in range(_REQUESTS_A_TURN):
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            is_formed = len(frames) == 3 and not frames[1] and len(frames[2]) == NUMBER_BYTES
            if not is_formed or (frames[0] not in self._replays and len(self._replays) >= _MAX_REPLAYS):
                self.num_refused += 1
                continue
            wanted = int.from_bytes(frames[2], "big")
            self._replays[frames[0]] = wanted
            if not self._kept.covers(wanted):
                self.journal.restate()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """Send a part of the replay that waits longest."""
        if not self._replays:
            return
        consumer, wanted = self._replays.popitem(last=False)
        batches = self._kept.since(wanted, _BATCHES_A_TURN)
        try:
            for number, frame in batches:
                self._send(router, consumer, self._topic, number.to_bytes(NUMBER_BYTES, "big"), frame)
            if len(batches) < _BATCHES_A_TURN:
                self._send(router, consumer, b"", END_OF_REPLAY, zmq.Frame())
            else:
                self._replays[consumer] = batches[-1][0] + 1
        except zmq.ZMQError:
            self.num_refused += 1  # it doesn't read, or has left: it gets no end, and asks again

    def _send(
        self, router: zmq.Socket[bytes], consumer: bytes, topic: bytes, number: bytes, frame: zmq.Frame
    ) -> None:
        router.send(consumer, zmq.SNDMORE | zmq.NOBLOCK)
        for part in (b"", topic, number):
            router.send(part, zmq.SNDMORE | zmq.NOBLOCK)
        router.send(frame, zmq.NOBLOCK, copy=False)


refuse_copies(EventPublisher, "it holds sockets, and a copy would close them twice. Make another")
