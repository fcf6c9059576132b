"""A fleet simulated on virtual time, with real caches, publishers, view and router. Only the model is simulated.

    arrival ─▶ router.rank ─▶ a replica's queue ─▶ prefill, one prompt at a time ─▶ decode, all at once ─▶ release
                   ▲                                   │ commit
                   └── view ◀── publisher ◀── journal ◀┘          loads are updated once a second

A replica prefills ``PREFILL_TOKENS_S`` tokens a second, without those in its cache. Then each running sequence
generates a token every ``TOKEN_S`` seconds, and keeps its blocks meanwhile. The router learns of stored and evicted
blocks after ``PUBLISH_S`` seconds. It sees loads up to a second old, as over a store.

Requests come from a trace (``simulator.trace``, blocks of 512 tokens), or from a generator of the same shape. In the
generator, 38 % of the requests continue a conversation, after a median gap of two minutes. Prompts have 12,000 tokens
on average, with a median of 7,000. All start with the same 512 tokens.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.clock import Clock, ManualClock
from radixkv.config import CacheConfig, Namespace
from radixkv.coordination import Load, ReplicaInfo, Router
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.publisher import Publisher
from radixkv.coordination.routing.replica_sources import Member
from radixkv.coordination.values import WIRE_VERSION
from radixkv.coordination.view.view import RemoteLog, View
from radixkv.errors import ConfigError, OutOfBlocks
from radixkv.index.cache import PrefixCache
from radixkv.index.sequence import Sequence as Leased
from radixkv.simulator.workloads import SEGMENT_TOKENS, TraceLine

PREFILL_TOKENS_S = 10_000.0
TOKEN_S = 0.02
PUBLISH_S = 0.02
HEARD_EVERY_S = 1.0
BLOCK_SIZE = 256
_SECRET = b"the secret of a fleet that is simulated"
_NAMESPACE = Namespace("tenant", "model")
_VOCABULARY = 128_000


def trace_like(seed: int, limit: int, requests_s: float = 3.4) -> Iterator[TraceLine]:
    """Generate ``limit`` requests of the trace's shape; see the module's docstring."""
    rng = np.random.default_rng([seed, 5])
    waiting: list[tuple[float, int, list[int]]] = []
    at_s, next_id = 0.0, 1
    for number in range(limit):
        at_s += float(rng.exponential(1 / requests_s))
        if waiting and waiting[0][0] <= at_s:
            _, _, before = heapq.heappop(waiting)
            num_new = 1 + int(rng.exponential(6))
        else:
            before, num_new = [0], 1 + int(rng.lognormal(2.6, 1.15))
        hash_ids = [*before, *range(next_id, next_id + num_new)][:250]
        next_id += num_new
        if rng.random() < 0.4:
            heapq.heappush(waiting, (at_s + float(rng.lognormal(4.8, 0.9)), number, hash_ids))
        size = len(hash_ids) * SEGMENT_TOKENS - int(rng.integers(SEGMENT_TOKENS))
        yield TraceLine(at_s, hash_ids, size, 1 + int(rng.exponential(340)))


class Prompts:
    """Token ids for hash ids, as uint32 key bytes drawn from the seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: dict[int, bytes] = {}

    def key(self, request: TraceLine) -> bytes:
        """Return the prompt's key bytes."""
        parts = [self._drawn.get(hash_id) or self._draw(hash_id) for hash_id in request.hash_ids]
        return b"".join(parts)[: 4 * request.num_tokens]

    def _draw(self, hash_id: int) -> bytes:
        rng = np.random.Generator(np.random.SFC64([self._seed, hash_id]))
        drawn = rng.integers(0, _VOCABULARY, SEGMENT_TOKENS, dtype=np.uint32).tobytes()
        self._drawn[hash_id] = drawn
        return drawn


@dataclass(slots=True)
class Work:
    """A prompt in a replica."""

    key: bytes
    num_generated: int
    num_left: int
    """Tokens left to compute: an estimate until the prefill starts."""
    sequence: Leased | None = None


class Replica:
    """One simulated replica with a real cache."""

    def __init__(self, name: str, num_blocks: int, keys: FleetKeys, view: View, clock: ManualClock) -> None:
        self.name = name
        self.publisher = Publisher(keys, max_records=1 << 20, max_bytes=1 << 30, wake=lambda: None)
        config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.cache = PrefixCache(config, clock=clock, journal=self.publisher)
        self.log = RemoteLog(1, name, view)
        self.waiting: deque[Work] = deque()
        self.running: Work | None = None
        self.num_computed = self.num_requests = 0

    @property
    def load(self) -> Load:
        """The load that a replica reports."""
        queued = sum(work.num_left for work in self.waiting)
        queued += 0 if self.running is None else self.running.num_left
        stats = self.cache.stats()
        return Load(queued, stats.sequence_blocks, stats.resident_blocks)

    def accept(self, key: bytes, num_generated: int) -> None:
        """Queue a prompt."""
        num_left = len(key) // 4 - self.cache.match(_NAMESPACE, key).num_tokens
        self.waiting.append(Work(key, num_generated, num_left))
        self.num_requests += 1

    def begin(self) -> Work | None:
        """Start the next prefill, if a prompt waits and there are blocks for it."""
        if self.running is not None or not self.waiting:
            return None
        work = self.waiting[0]
        try:
            work.sequence = self.cache.open(_NAMESPACE, work.key)
        except OutOfBlocks:
            return None
        self.waiting.popleft()
        work.num_left = len(work.key) // 4 - work.sequence.num_cached_tokens
        self.num_computed += work.num_left
        self.running = work
        return work

    def computed(self) -> Work:
        """Finish the running prefill: commit its prompt."""
        work, self.running = self.running, None
        assert work is not None and work.sequence is not None
        work.sequence.commit(len(work.key) // 4)
        return work

    def publish(self) -> None:
        """Apply the queued journal entries to the view."""
        while self.publisher.num_queued:
            for entry in self.publisher.drain().entries:
                self.log.offer(self.log.seq + 1, entry)


class Simulated:
    """The router's ``Source`` over simulated replicas, with members as of the last update."""

    is_lost = False

    def __init__(self, clock: ManualClock, keys: FleetKeys, view: View) -> None:
        self.keys, self.view = keys, view
        self._clock = clock
        self._members: list[Member] = []

    @property
    def clock(self) -> Clock:
        """See ``Source``."""
        return self._clock

    def hear(self, replicas: Sequence[Replica]) -> None:
        """Update the members with what the replicas report now."""
        now = self._clock()
        self._members = [
            Member(_info(replica), float("inf"), replica.log, None, now, now, now) for replica in replicas
        ]

    def members(self) -> Sequence[Member]:
        """See ``Source``."""
        return self._members

    def generation(self, tenant: str) -> int:
        """See ``Source``."""
        return 0

    def close(self) -> None:
        """See ``Source``."""


def _info(replica: Replica) -> ReplicaInfo:
    return ReplicaInfo(
        replica.name, 1, f"http://{replica.name}", _NAMESPACE.model, BLOCK_SIZE, WIRE_VERSION, True, 0, 10.0, True,
        load=replica.load,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trace. ``imbalance``: the most tokens that a replica computed and generated ÷ the mean."""

    cost: str
    num_replicas: int
    num_requests: int
    hit_rate: float
    imbalance: float
    request_imbalance: float
    rank_p50_ms: float
    bytes_a_placement: float
    seconds: float


class Simulation:
    """Run a trace over a fleet. All results except times are deterministic."""

    def __init__(self, num_replicas: int, num_blocks: int, *, cost: str = "linear", seed: int = 0) -> None:
        self.clock = ManualClock()
        keys = FleetKeys(_SECRET)
        view = View(num_replicas * num_blocks + 1)
        self._replicas = [
            Replica(f"r{number}", num_blocks, keys, view, self.clock) for number in range(num_replicas)
        ]
        self._source = Simulated(self.clock, keys, view)
        self.router = Router(self._source, cost=cost, seed=seed)
        self._by_name = {replica.name: replica for replica in self._replicas}
        self._prompts = Prompts(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._generated = dict.fromkeys(self._by_name, 0)
        self._rank_ns: list[int] = []
        self._cost, self._num_blocks = cost, num_blocks
        self._hear()

    def run(self, requests: Iterable[TraceLine], progress: Callable[[int], None] | None = None) -> Outcome:
        """Run all requests to their end. Raises ConfigError for a prompt that is larger than a replica's cache."""
        started = time.perf_counter()
        for number, request in enumerate(requests):
            self._until(request.at_s)
            self._arrive(request)
            if progress is not None and number % 64 == 0:
                progress(number)
        self._until(float("inf"))
        return self._finish(time.perf_counter() - started)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.clock() + seconds, self._num_events, act))

    def _until(self, at_s: float) -> None:
        while self._events and self._events[0][0] <= at_s:
            due, _, act = heapq.heappop(self._events)
            self.clock.advance(max(0.0, due - self.clock()))
            act()
        if at_s < float("inf"):
            self.clock.advance(max(0.0, at_s - self.clock()))

    def _arrive(self, request: TraceLine) -> None:
        if self.clock() >= self._heard_at + HEARD_EVERY_S:
            self._hear()
        key = self._prompts.key(request)
        num_blocks = -(-len(key) // (4 * BLOCK_SIZE))
        if num_blocks > self._num_blocks:  # it would wait forever
            allowed = f"enough blocks for every prompt; one needs {num_blocks} blocks of {BLOCK_SIZE} tokens"
            raise ConfigError("--num-blocks", self._num_blocks, allowed)
        start = time.process_time_ns()
        chosen = self.router.rank(_NAMESPACE, key, limit=1)[0].replica.id
        self._rank_ns.append(time.process_time_ns() - start)
        self.router.routed(_NAMESPACE, key, chosen)
        replica = self._by_name[chosen]
        replica.accept(key, request.num_generated)
        self._begin(replica)

    def _hear(self) -> None:
        self._heard_at = self.clock()
        self._source.hear(self._replicas)

    def _begin(self, replica: Replica) -> None:
        work = replica.begin()
        if work is not None:
            self._after(work.num_left / PREFILL_TOKENS_S, lambda: self._computed(replica))
            self._after(PUBLISH_S, replica.publish)

    def _computed(self, replica: Replica) -> None:
        work = replica.computed()
        self._after(PUBLISH_S, replica.publish)
        self._generated[replica.name] += work.num_generated
        self._after(work.num_generated * TOKEN_S, lambda: self._released(replica, work))
        self._begin(replica)

    def _released(self, replica: Replica, work: Work) -> None:
        assert work.sequence is not None
        work.sequence.release()
        self._begin(replica)

    def _finish(self, seconds: float) -> Outcome:
        view, stats = self._source.view, [replica.cache.stats() for replica in self._replicas]
        hit, missed = sum(each.hit_tokens for each in stats), sum(each.missed_tokens for each in stats)
        done = np.array([each.num_computed + self._generated[each.name] for each in self._replicas])
        sent = np.array([each.num_requests for each in self._replicas])
        return Outcome(
            cost=self._cost,
            num_replicas=len(self._replicas),
            num_requests=int(sent.sum()),
            hit_rate=hit / max(hit + missed, 1),
            imbalance=float(done.max() / max(done.mean(), 1)),
            request_imbalance=float(sent.max() / max(sent.mean(), 1)),
            rank_p50_ms=float(np.median(self._rank_ns)) / 1e6,
            bytes_a_placement=view.num_bytes / max(view.num_digests, 1),
            seconds=seconds,
        )
