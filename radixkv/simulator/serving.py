"""A simulation of serving: sessions ask replicas, each with a real cache and a real queue of waiting requests.

    session ──asks──▶ router ──▶ queue ──starts──▶ [reload from the host] ──▶ prefill ──▶ decode ──▶ pause ──▶ asks …

- **Sessions.** Closed loop: ``sessions`` run at a time, and a new one begins as one ends. Open loop: sessions begin at
  random, ``rate`` an hour. Either way a session's next request comes one pause after its last answer. When all sessions
  of the file were used, they are used again, with other blocks.
- **Router.** It sends a request to the replica of the lowest cost: a function of ``radixkv.coordination.routing.costs``
  over what each replica holds, has queued, and decodes.
- **Queue.** ``radixkv.scheduling`` orders the waiting requests. ``fcfs`` is its order without credits, ``lpm`` the
  longest cached share first. When the prefill unit is free, the next request starts, if the cache can hold it.
- **Eviction.** A policy named with "+queue" hears of the waiting requests (``PrefixCache.announce``).
- **Cache.** ``PrefixCache`` without storage: a token stands for a block of 512. A request holds its prompt's blocks
  until its answer is complete. Answers are not kept.
- **Prefill.** One request at a time, at ``prefill`` tokens a second, or as long as a model profile says.
- **Decode.** Each of at most 64 started requests gets ``decode`` tokens a second. With ``chunk_tokens``, a step during
  a prefill takes as long as that many tokens of prefill, if that is longer.
- **Host tier.** Blocks that the device evicts go to the host at no cost, the least recently evicted leave it. A
  request's blocks on the host come back through one serial channel, before its prefill.

Times, shares and counts are of requests whose answer completes after the warm-up.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, cycle
from typing import Any, Final, NamedTuple

import numpy as np

from radixkv.clock import ManualClock
from radixkv.config import CacheConfig, Namespace, Tenant, resolve
from radixkv.coordination.routing.costs import COSTS, CostName, Facts
from radixkv.errors import CapacityError, ConfigError
from radixkv.index.announcements import Announcement
from radixkv.index.cache import PrefixCache, RequestHints
from radixkv.index.sequence import Sequence as CacheSequence
from radixkv.index.tokens import Key
from radixkv.scheduling import KAPPA, RequestQueue, WaitingRequest
from radixkv.simulator.clairvoyant import Clairvoyant, Future
from radixkv.simulator.packed_sessions import BLOCK_TOKENS, Blocks, Session, Turn
from radixkv.simulator.profiles import ModelProfile
from radixkv.simulator.replay import sized
from radixkv_policies.policy import SEGMENT_TOKENS

CLAIRVOYANT: Final = "clairvoyant"
WITH_QUEUE: Final = "+queue"
"""Suffix of a policy's name if the cache hears of the waiting requests (``PrefixCache.announce``)."""
SCHEDULERS: Final = ("fcfs", "lpm", "cache-first")
MAX_RUNNING: Final = 64
_EXTRA: Final = np.array([2**32 - 1], "<u4").tobytes()
_MAX_LOADS: Final = 2
"""Requests that may reload from the host at a time, before the next one starts."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a simulation is of. Times in seconds, speeds in tokens a second. Raises ConfigError."""

    sessions: int = 32
    rate: float | None = None
    """Sessions that begin in an hour; None for a closed loop of ``sessions``."""
    prefill: float = 20_000.0
    decode: float = 50.0
    profile: ModelProfile | None = None
    """Of the model that prefills, instead of a speed."""
    chunk_tokens: int = 0
    host_blocks: int = 0
    host_gb_per_s: float = 25.0
    block_bytes: int = 131_072 * BLOCK_TOKENS
    replicas: int = 1
    route: CostName = "linear"
    pauses: float = 1.0
    """Factor of all pauses."""
    labels: bool = True
    kappa: int = KAPPA
    warm_up_s: float = 3_600.0
    measure_s: float = 7_200.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require("--sessions", self.sessions, 1, 100_000)
        _require("--rate", 1.0 if self.rate is None else self.rate, 1e-3, 1e6)
        _require("--prefill", self.prefill, 1e-3, 1e12)
        _require("--decode", self.decode, 1e-3, 1e12)
        _require("--chunk-tokens", self.chunk_tokens, 0, 2**30)
        _require("--host", self.host_blocks, 0, 2**31 - 2)
        _require("--host-speed", self.host_gb_per_s, 1e-6, 1e6)
        _require("--replicas", self.replicas, 1, 1_000)
        _require("--pauses", self.pauses, 0, 1e6)
        _require("--kappa", self.kappa, 0, 1_000_000)
        _require("--warm-up", self.warm_up_s, 0, 1e9)
        _require("--measure", self.measure_s, 1.0, 1e9)
        if self.route not in COSTS:
            raise ConfigError("--route", self.route, f"one of {', '.join(COSTS)}")

    def prefill_seconds(self, num_cached: int, num_tokens: int) -> float:
        """Seconds to compute the tokens ``[num_cached, num_tokens)`` of a prompt."""
        if self.profile is None:
            return (num_tokens - num_cached) / self.prefill
        cached, all_ = self.profile.prefill_seconds(np.array([num_cached, num_tokens])).tolist()
        return float(all_ - cached)


def _require(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(name, value, f"a number from {least:g} to {most:g}")


class Served(NamedTuple):
    """A request that was served after the warm-up. Times in seconds; ``ideal_s``: without waiting, all of it cached
    that its session had before. ``recomputed``: tokens computed that some request had computed already.
    """

    session: int
    arrived: float
    started: float
    first_token: float
    ended: float
    ideal_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    recomputed: int


class Asked:
    """A request on its way."""

    def __init__(self, live: Live, turn: Turn, at: int, now: float, known_blocks: int) -> None:
        self.live, self.turn, self.at, self.arrived = live, turn, at, now
        self.ids = (turn.blocks + np.uint32(live.base)).astype("<u4")
        self.key = self.ids.tobytes() + _EXTRA
        self.num_blocks = len(self.ids)
        self.known_blocks = known_blocks
        self.waiting: WaitingRequest | None = None
        self.announcement: Announcement | None = None
        self.sequence: CacheSequence | None = None
        self.cached_blocks = self.recomputed = 0
        self.started = self.first_token = self.decoded_at = 0.0

    @property
    def hints(self) -> RequestHints:
        """What a service would know, with what clairvoyant eviction needs."""
        labels: dict[str, Any] = {"live": self.live.number, "at": self.at}
        if self.live.is_labelled:
            labels |= {"session": self.live.name, "turn": self.at + 1}
            labels |= {
                "type": "agent" if self.turn.is_main else "subagent",
                "tool_pending": self.turn.tool_pending,
            }
        return RequestHints(labels)

    def ideal_s(self, settings: Settings) -> float:
        """Seconds from arrival to answer, with nothing in the way."""
        known = min(self.known_blocks * BLOCK_TOKENS, self.turn.prompt_tokens)
        prefill = settings.prefill_seconds(known, self.turn.prompt_tokens)
        return prefill + self.turn.output_tokens / settings.decode


class Live:
    """A session that runs. Its blocks are ``base`` and above."""

    def __init__(self, number: int, session: Session, base: int, is_labelled: bool) -> None:
        self.number, self.session, self.base, self.is_labelled = number, session, base, is_labelled
        self.name = f"{session.tenant}/{session.id}/{number}"
        self.namespace = Namespace(session.tenant, "simulated")
        self.turn = 0
        self.seen = np.zeros(session.num_blocks, np.bool_)


class _LongestFirst(RequestQueue):
    """SGLang's lpm: the longest cached share first, on ties in order of arrival."""

    def __init__(self) -> None:
        super().__init__(kappa=0)

    def peek(self, now: float, *, tenant: str | None = None) -> WaitingRequest | None:
        """Return the request that starts next."""
        return min(self, key=lambda each: (each.missing, each.arrival), default=None)


def order_of(scheduler: str, kappa: int) -> RequestQueue:
    """Return a new queue of a scheduler. Raises ConfigError."""
    if scheduler == "lpm":
        return _LongestFirst()
    if scheduler not in SCHEDULERS:
        raise ConfigError("--scheduler", scheduler, f"some of {', '.join(SCHEDULERS)}")
    return RequestQueue(kappa=0 if scheduler == "fcfs" else kappa)


class _Host:
    """The host tier: the blocks that left the device, the longest absent first. It is the cache's journal too."""

    grain_tokens = 1

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._is_here = np.zeros(1_024, np.bool_)
        """By block: whether ``_blocks`` has it."""

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Note that blocks are on the device."""

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Take in the blocks that the device evicted."""
        key = key if isinstance(key, bytes) else b"".join(key)
        ids = np.frombuffer(key, "<u4", stop - start, 4 * start)
        most = int(ids.max(initial=0))
        if most >= len(self._is_here):
            self._is_here = np.concatenate((self._is_here, np.zeros(most + 1, np.bool_)))
        self._is_here[ids] = True
        for each in ids[::-1].tolist():  # so that the tail of a prompt leaves first
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        while len(self._blocks) > self._capacity:
            self._is_here[self._blocks.popitem(last=False)[0]] = False

    def cleared(self, namespace: Namespace) -> None:
        """Forget all."""
        self._blocks.clear()
        self._is_here[:] = False

    def match(self, ids: Blocks, start: int) -> int:
        """Return how many blocks from ``start`` on are here."""
        rest = ids[start:]
        found = self._is_here[np.minimum(rest, len(self._is_here) - 1)] & (rest < len(self._is_here))
        return len(rest) if found.all() else int(found.argmin())

    def take(self, ids: Blocks) -> None:
        """Give blocks back to the device. Some may have left since they were found."""
        for each in ids.tolist():
            self._blocks.pop(each, None)
        self._is_here[ids] = False


class _Replica:
    """A cache, its queue, a prefill unit, a channel to the host, and the requests that decode."""

    def __init__(
        self, settings: Settings, scheduler: str, policy: Any, capacity: int, clock: ManualClock
    ) -> None:
        self.settings = settings
        self.queue = order_of(scheduler, settings.kappa)
        self.host = _Host(settings.host_blocks)
        segment = max(SEGMENT_TOKENS // BLOCK_TOKENS, 1)
        made = resolve("policy", policy) if isinstance(policy, str) else policy
        config = CacheConfig(
            num_blocks=capacity + 1,  # one more for the token that a cache always leaves to compute
            block_size=1,
            seed=settings.seed,
            segment_tokens=segment,
            default_tenant=Tenant("default", policy=sized(made, capacity)),
        )
        self.cache = PrefixCache(config, clock=clock, journal=self.host if settings.host_blocks else None)
        self.capacity = capacity
        self.running: set[Asked] = set()
        self.loads: list[Asked] = []
        self.loaded: list[Asked] = []
        self.prefilling: Asked | None = None
        self.channel_free_at = 0.0
        self.decoding: list[tuple[float, int, Asked]] = []
        self.decode_clock = 0.0
        """Seconds of undisturbed decoding so far."""
        self.decode_read_at = 0.0
        self.decode_event = 0

    @property
    def decode_rate(self) -> float:
        """Speed of the decode clock."""
        settings = self.settings
        if self.prefilling is None or not settings.chunk_tokens:
            return 1.0
        step_s = settings.prefill_seconds(0, settings.chunk_tokens)
        return min(1.0, 1.0 / (settings.decode * step_s))

    def advance(self, now: float) -> None:
        """Move the decode clock."""
        self.decode_clock += (now - self.decode_read_at) * self.decode_rate
        self.decode_read_at = now


@dataclass(slots=True)
class Result:
    """What a simulation gives."""

    served: list[Served]
    refused: int
    still_waiting: list[float] = field(default_factory=list)
    """How long the requests that wait at the end have waited."""
    sessions_ended: int = 0


class Serving:
    """A simulation of one scheduler, one policy and one capacity."""

    def __init__(
        self, pool: Sequence[Session], settings: Settings, scheduler: str, policy: str, capacity: int
    ) -> None:
        """``policy``: of the cache, with "+queue" if it hears of waiting requests, or "clairvoyant".

        ``capacity``: blocks of each replica.
        """
        self._settings = settings
        self._dice = random.Random(settings.seed)
        order = list(pool)
        self._dice.shuffle(order)
        self._pool = cycle(order)
        self._clock = ManualClock()
        self._announces = policy.endswith(WITH_QUEUE)
        self._futures: dict[int, Future] | None = {} if policy == CLAIRVOYANT else None
        made: Any = policy.removesuffix(WITH_QUEUE)
        if self._futures is not None:
            made = type("Clairvoyant", (Clairvoyant,), {"futures": self._futures})
        self._replicas = [
            _Replica(settings, scheduler, made, capacity, self._clock) for _ in range(settings.replicas)
        ]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers, self._order = count(), count()
        self._base = 0
        self._computed = bytearray()
        self._turn = 0
        self._maintain_at = 0.0
        self.result = Result([], 0)

    def run(self) -> Result:
        """Run the warm-up and the measured time."""
        settings = self._settings
        if settings.rate is None:
            for _ in range(settings.sessions):
                self._at(self._dice.random() * 60.0, self._begin)
        else:
            self._at(0.0, self._arrive)
        end = settings.warm_up_s + settings.measure_s
        while self._events and self._events[0][0] <= end:
            self._clock.now, _, act, given = heappop(self._events)
            if self._clock.now >= self._maintain_at:
                for replica in self._replicas:
                    replica.cache.maintain()
                self._maintain_at = self._clock.now + 1.0
            act(*given)
        self._clock.now = end
        self.result.still_waiting = [
            end - each.item.arrived for replica in self._replicas for each in replica.queue
        ]
        for replica in self._replicas:
            for asked in replica.running:
                assert asked.sequence is not None
                asked.sequence.release()
        return self.result

    def _at(self, when: float, act: Callable[..., None], *given: Any) -> None:
        heappush(self._events, (when, next(self._order), act, given))

    # --- sessions

    def _arrive(self) -> None:
        assert self._settings.rate is not None
        self._begin()
        self._at(self._clock.now + self._dice.expovariate(self._settings.rate / 3_600.0), self._arrive)

    def _begin(self) -> None:
        session = next(self._pool)
        if self._base + session.num_blocks >= 2**32 - 1:
            raise ConfigError("--measure", self._settings.measure_s, "a time with fewer different blocks")
        live = Live(next(self._numbers), session, self._base, self._settings.labels)
        self._base += session.num_blocks
        self._computed.extend(bytes(session.num_blocks))
        if self._futures is not None:
            self._futures[live.number] = Future(session, self._clock.now)
        self._ask(live)

    def _ask(self, live: Live) -> None:
        turn = live.session.turns[live.turn]
        known = live.seen[turn.blocks]
        asked = Asked(
            live, turn, live.turn, self._clock.now, int(known.argmin()) if not known.all() else len(known)
        )
        live.seen[turn.blocks] = True
        replica = self._route(asked)
        if asked.num_blocks > replica.capacity:
            self.result.refused += 1
            self._answered(live)
            return
        tenant = live.session.tenant
        found = _missing(replica, asked)
        if self._announces:
            asked.announcement = replica.cache.announce(live.namespace, asked.key, asked.hints, ttl_s=1e6)
        asked.waiting = replica.queue.add(tenant, tokens=turn.prompt_tokens, missing=found, item=asked)
        self._start_next(replica)

    def _answered(self, live: Live) -> None:
        live.turn += 1
        over = live.turn == len(live.session.turns)
        if over:
            self.result.sessions_ended += 1
            if self._futures is not None:
                del self._futures[live.number]
            if self._settings.rate is None:
                self._at(self._clock.now + 1.0, self._begin)
            return
        when = self._clock.now + live.session.turns[live.turn].pause_s * self._settings.pauses
        if self._futures is not None:
            future = self._futures[live.number]
            future.turn, future.at = live.turn, when
        self._at(when, self._ask, live)

    # --- routing

    def _route(self, asked: Asked) -> _Replica:
        replicas = self._replicas
        if len(replicas) == 1:
            return replicas[0]
        size, shares = asked.turn.prompt_tokens, [_missing(each, asked) for each in replicas]
        facts = Facts(
            size,
            np.array([size * (1.0 - missing) for missing in shares]),
            np.array([_tokens_ahead(*each) for each in zip(replicas, shares, strict=True)], np.float64),
            np.array([float(sum(run.num_blocks for run in each.running)) for each in replicas]),
            self._turn,
        )
        self._turn += 1
        costs = COSTS[self._settings.route](facts)
        return replicas[self._dice.choice(np.flatnonzero(costs == costs.min()).tolist())]

    # --- a replica

    def _start_next(self, replica: _Replica) -> None:
        """Start requests while the prefill unit has nothing to do."""
        while (
            len(replica.queue)
            and replica.prefilling is None
            and not replica.loaded
            and len(replica.loads) < _MAX_LOADS
            and len(replica.running) < MAX_RUNNING
        ):
            for waiting in replica.queue:
                missing = _missing(replica, waiting.item)
                if missing != waiting.missing:
                    replica.queue.update(waiting, missing)
            chosen = replica.queue.peek(self._clock.now)
            assert chosen is not None
            if not self._opened(replica, chosen.item):
                return
            replica.queue.start(chosen)

    def _opened(self, replica: _Replica, asked: Asked) -> bool:
        """Give a request its blocks, and let it load or prefill. False if they don't fit now."""
        ids, namespace = asked.ids, asked.live.namespace
        held = replica.cache.match(namespace, asked.key).num_tokens
        on_host = replica.host.match(ids, held)
        try:
            sequence = replica.cache.open(
                namespace, asked.key, hints=asked.hints, announcement=asked.announcement
            )
        except CapacityError:
            return False
        sequence.truncate(asked.num_blocks)
        replica.host.take(ids[held : held + on_host])
        asked.sequence, asked.started = sequence, self._clock.now
        asked.cached_blocks = sequence.num_cached_tokens + on_host
        new = ids[asked.cached_blocks :].tolist()
        asked.recomputed = sum(self._computed[each] for each in new) * BLOCK_TOKENS
        for each in new:
            self._computed[each] = 1
        replica.running.add(asked)
        if on_host:
            replica.loads.append(asked)
            speed = self._settings.host_gb_per_s * 1e9
            begins = max(replica.channel_free_at, self._clock.now)
            replica.channel_free_at = begins + on_host * self._settings.block_bytes / speed
            self._at(replica.channel_free_at, self._loaded, replica, asked)
        else:
            self._prefill(replica, asked)
        return True

    def _loaded(self, replica: _Replica, asked: Asked) -> None:
        replica.loads.remove(asked)
        replica.loaded.append(asked)
        if replica.prefilling is None:
            self._prefill(replica, replica.loaded.pop(0))
        self._start_next(replica)

    def _prefill(self, replica: _Replica, asked: Asked) -> None:
        replica.advance(self._clock.now)
        replica.prefilling = asked
        self._plan_decode(replica)
        cached = min(asked.cached_blocks * BLOCK_TOKENS, asked.turn.prompt_tokens - 1)
        took = self._settings.prefill_seconds(cached, asked.turn.prompt_tokens)
        self._at(self._clock.now + took, self._prefilled, replica, asked)

    def _prefilled(self, replica: _Replica, asked: Asked) -> None:
        assert asked.sequence is not None
        asked.sequence.commit(asked.num_blocks)
        replica.advance(self._clock.now)
        replica.prefilling = None
        asked.first_token = self._clock.now
        asked.decoded_at = replica.decode_clock + asked.turn.output_tokens / self._settings.decode
        heappush(replica.decoding, (asked.decoded_at, next(self._order), asked))
        if replica.loaded:
            self._prefill(replica, replica.loaded.pop(0))
        else:
            self._plan_decode(replica)
        self._start_next(replica)

    def _plan_decode(self, replica: _Replica) -> None:
        """Plan the end of the request that decodes out first. Plans made before are void."""
        replica.decode_event += 1
        if replica.decoding:
            left = max(replica.decoding[0][0] - replica.decode_clock, 0.0)
            when = self._clock.now + left / replica.decode_rate
            self._at(when, self._decoded, replica, replica.decode_event)

    def _decoded(self, replica: _Replica, event: int) -> None:
        if event != replica.decode_event:
            return
        replica.advance(self._clock.now)
        _, _, asked = heappop(replica.decoding)
        assert asked.sequence is not None
        asked.sequence.release()
        replica.running.discard(asked)
        if self._clock.now >= self._settings.warm_up_s:
            self.result.served.append(self._served(asked))
        self._answered(asked.live)
        self._plan_decode(replica)
        self._start_next(replica)

    def _served(self, asked: Asked) -> Served:
        turn = asked.turn
        return Served(
            asked.live.number,
            asked.arrived,
            asked.started,
            asked.first_token,
            self._clock.now,
            asked.ideal_s(self._settings),
            turn.output_tokens,
            turn.prompt_tokens,
            min(asked.cached_blocks * BLOCK_TOKENS, turn.prompt_tokens),
            asked.recomputed,
        )


def _missing(replica: _Replica, asked: Asked) -> float:
    """The share of a request's blocks that is in no tier."""
    if not asked.num_blocks:
        return 1.0
    held = replica.cache.match(asked.live.namespace, asked.key).num_tokens
    if replica.settings.host_blocks and held < asked.num_blocks:
        held += replica.host.match(asked.ids, held)
    return 1.0 - held / asked.num_blocks


def _tokens_ahead(replica: _Replica, missing: float) -> int:
    """Tokens of prefill before those of a new request with this missing share."""
    begun = [*replica.loads, *replica.loaded, *([replica.prefilling] if replica.prefilling else [])]
    tokens = sum(asked.turn.prompt_tokens - asked.cached_blocks * BLOCK_TOKENS for asked in begun)
    return tokens + replica.queue.tokens_ahead(missing)
