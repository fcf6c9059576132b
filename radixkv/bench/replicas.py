"""The cost of replicas and routing: figures with their targets.

``FIGURES`` maps the name of a group to a function from ``Options`` to figures. One more entry adds a group. Decisions
and events are timed by the process's CPU clock, which excludes other load on the machine. Times that involve a store
or another process use the wall clock. The parts of a ratio come from one run.

    decision   ``Router.rank`` for a prompt of 8,192 tokens in an int64 buffer, 16 replicas in the view
    apply      entries of 64 digests, offered and flushed, 16 replicas with half of their segments in common
    memory     bytes of the view after that, including its arrays and holder sets; and growth of the resident set
    start      a new router over a real Redis that holds the snapshots of 16 replicas, until its view is complete
    death      a replica in a process of its own is killed; from then to the last ranking that names it
    publish    digests into Redis, and the cost for a replica's own requests: ``bench.publishing``
    paused     requests to a cache and ``POST /v1/warm``, with Redis and while it is stopped: ``bench.outages``
    failover   the master of a Sentinel group is killed: ``bench.outages``
    cluster    the simulator of ``bench.fleet``: ``linear`` against ``round_robin``, then more and more replicas
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from radixkv.bench import outages, publishing, servers
from radixkv.bench.fleet import Outcome, Simulation, trace_like
from radixkv.bench.measure import machine, resident_bytes, timed
from radixkv.config import Namespace
from radixkv.coordination import Load, Router, connect
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.proofs import Proofs
from radixkv.coordination.routing.replica_sources import Observer
from radixkv.coordination.store.holdings import Holdings
from radixkv.coordination.store.memory import MemoryStore
from radixkv.coordination.store.protocol import Store
from radixkv.coordination.store.wire import DIGESTS_AN_ENTRY, Entry, Registration
from radixkv.coordination.values import WIRE_VERSION, Writer
from radixkv.coordination.view.view import RemoteLog, View
from radixkv.errors import ConfigError, RadixKVError
from radixkv.simulator.workloads import TraceLine, trace_lines
from radixkv.tables import columns

SECRET = b"the secret of a fleet that is measured"
NUM_REPLICAS = 16
_NAMESPACE = Namespace("tenant", "model")
_BYTES = 16


class Figure(NamedTuple):
    """One figure. ``reach`` is its target, None if the figure only shows how cost grows."""

    name: str
    value: float
    unit: str
    reach: float | None = None
    at_most: bool = True
    """True if ``reach`` is a maximum, False if it is a minimum."""

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can encode. ``met`` is None without a target."""
        met = (
            None
            if self.reach is None
            else (self.value <= self.reach) == self.at_most or self.value == self.reach
        )
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "reach": self.reach,
            "at_most": self.at_most,
            "met": met,
        }


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure: ``segments`` per replica, ``requests`` of the trace, sizes of ``fleets`` to simulate."""

    segments: int = 100_000
    requests: int = 4_000
    num_blocks: int = 5_000
    fleets: tuple[int, ...] = (8, 64, 1_000)
    trace: Path | None = None
    redis: str | None = None
    seed: int = 0
    lease_s: float = 1.0
    progress: Callable[[str], object] = str

    def trace_requests(self, limit: int) -> Iterator[TraceLine]:
        """The requests of the trace file, or generated ones of the same shape."""
        return trace_like(self.seed, limit) if self.trace is None else trace_lines(self.trace, limit)


def decision(options: Options) -> list[Figure]:
    """Median time of a ranking."""
    store = MemoryStore()
    ids = np.random.default_rng(options.seed).integers(0, 128_000, 8_192, dtype=np.int64)
    digests = FleetKeys(SECRET).digests(_NAMESPACE, ids.astype(np.uint32).tobytes())
    for number in range(NUM_REPLICAS):
        held = digests[: len(digests) * number // NUM_REPLICAS]
        other = _packed(_random_digests(options.seed, number, 5_000))
        _publish(store, f"r{number}", [*held, *other], 3600.0)
    router = Router(Observer(store, SECRET, background=False), seed=options.seed)
    found = router.rank(_NAMESPACE, ids)
    assert len(found) == NUM_REPLICAS and found[0].matched_tokens["device"] == 7_680
    times = timed(lambda: router.rank(_NAMESPACE, ids), 3_000) / 1e6
    return [
        Figure("route decision, 8,192 tokens, 16 replicas, p50", float(np.median(times)), "ms", 0.15),
        Figure("route decision, 8,192 tokens, 16 replicas, p99", float(np.percentile(times, 99)), "ms"),
    ]


def apply_and_memory(options: Options) -> list[Figure]:
    """Placements per second into an empty view, and their memory there."""
    logs = [_entries(_half_shared(options.seed, number, options.segments)) for number in range(NUM_REPLICAS)]
    num_placements = NUM_REPLICAS * (options.segments // 2 * 2)
    best, grown, view = float("inf"), 0, View(1)
    for _ in range(3):
        view = View(NUM_REPLICAS * options.segments)
        before, start = resident_bytes(), time.process_time()
        for entries in logs:
            log = RemoteLog(1, "", view)
            for seq, entry in enumerate(entries, 1):
                log.offer(seq, entry)
            log.flush()
            del log
        best = min(best, time.process_time() - start)
        grown = resident_bytes() - before
    assert view.num_digests == num_placements
    return [
        Figure("applying events to the view", num_placements / best, "placements/s", 1e6, at_most=False),
        Figure("bytes a placement in the view", view.num_bytes / num_placements, "bytes", 24.0),
        Figure("bytes a placement, growth of the resident set", grown / num_placements, "bytes", 24.0),
    ]


def start(options: Options) -> list[Figure]:
    """Seconds until a new router has a full view, over Redis."""
    from radixkv.coordination.store.redis import RedisStore

    with _redis(options.redis) as url:
        store = RedisStore(url)
        writers = [
            _publish(
                store, f"bench-{number}", _packed(_half_shared(options.seed, number, options.segments)), 60.0
            )
            for number in range(NUM_REPLICAS)
        ]
        began = time.perf_counter()
        router = Router.connect(
            url, fleet_secret=SECRET, max_segments=NUM_REPLICAS * options.segments, background=False
        )
        seconds = time.perf_counter() - began
        found = router.source.view.num_digests
        router.close()
        for writer in writers:
            store.leave(writer, "")
        store.close()
    assert found == NUM_REPLICAS * (options.segments // 2 * 2), found
    name = f"a new router's full view, 16 × {options.segments:,} segments"
    return [Figure(name, seconds, "s", 3.0)]


def death(options: Options) -> list[Figure]:
    """Seconds from SIGKILL to the last ranking that names the killed replica. The limit is its lease + 0.2 s."""
    with _redis(options.redis) as url:
        process = multiprocessing.get_context("spawn")
        victim = process.Process(target=_live, args=(url, options.lease_s), daemon=True)
        victim.start()
        router = Router.connect(url, fleet_secret=SECRET)
        ids = np.arange(512, dtype=np.uint32)
        try:
            while not router.rank(_NAMESPACE, ids):
                if victim.exitcode is not None:
                    raise RadixKVError(
                        f"the replica ended by itself, with status {victim.exitcode}, before it was killed"
                    )
                time.sleep(0.01)
            time.sleep(options.lease_s)
            victim.kill()
            began = time.perf_counter()
            while router.rank(_NAMESPACE, ids):
                time.sleep(0.002)
            seconds = time.perf_counter() - began
        finally:
            victim.kill()
            victim.join()
            router.close()
    name = f"a killed replica is out of every ranking, lease {options.lease_s:g} s"
    return [Figure(name, seconds, "s", options.lease_s + 0.2)]


def publish(options: Options) -> list[Figure]:
    """The cost of publishing for the replica; see ``bench.publishing``."""
    reaches = {"publishing": (1e6, False), "calling thread": (2.0, True), "process CPU": (1.5, True)}
    with _redis(options.redis) as url:
        result = publishing.run(
            url, num_digests=10 * options.segments, limit=2 * options.requests, seed=options.seed
        )
    return [
        Figure(each["name"], each["value"], each["unit"], *reaches[each["name"]])
        for each in result["figures"]
    ]


def paused(options: Options) -> list[Figure]:
    """p99 of requests and of warming, with Redis and while it is stopped."""
    figures = []
    for name, found in (
        ("match", outages.match(options.requests, options.seed)),
        ("warm", outages.warm(max(6, options.requests // 20))),
    ):
        figures += [
            Figure(f"p99 of {name}, Redis there", found.there_ms, "ms"),
            Figure(f"p99 of {name}, Redis paused", found.away_ms, "ms"),
            Figure(f"p99 of {name}, paused ÷ there", found.away_ms / found.there_ms, "×"),
        ]
    return figures


def failover(options: Options) -> list[Figure]:
    """Seconds until the view is right after a failover, from the first write that the new master accepts."""
    seconds = outages.failover()
    return [Figure("views right after a failover, Sentinel, down-after 1 s", seconds, "s", 5.0)]


def cluster(options: Options) -> list[Figure]:
    """Hit rate and balance of a simulated fleet, and the cost as it grows."""
    linear = _simulate(options, 8, "linear", options.requests)
    turns = _simulate(options, 8, "round_robin", options.requests)
    if not turns.hit_rate:
        given = "generated" if options.trace is None else str(options.trace)
        raise ConfigError("--trace", given, "requests that hit something under round robin too")
    figures = [
        Figure("cluster hit rate, linear ÷ round robin", linear.hit_rate / turns.hit_rate, "×", 1.8, False),
        Figure("cluster hit rate, linear", linear.hit_rate, "share of tokens"),
        Figure("cluster hit rate, round robin", turns.hit_rate, "share of tokens"),
        Figure("load imbalance of linear, most ÷ mean", linear.imbalance, "×", 1.2),
        Figure("requests imbalance of linear, most ÷ mean", linear.request_imbalance, "×"),
    ]
    for size in options.fleets:
        grown = _simulate(options, size, "linear", min(options.requests, 2_000))
        figures += [
            Figure(f"{size:,} simulated replicas: route decision, p50", grown.rank_p50_ms, "ms"),
            Figure(f"{size:,} simulated replicas: a request", grown.seconds / grown.num_requests * 1e3, "ms"),
            Figure(f"{size:,} simulated replicas: hit rate", grown.hit_rate, "share of tokens"),
            Figure(f"{size:,} simulated replicas: a placement", grown.bytes_a_placement, "bytes"),
        ]
    return figures


FIGURES: dict[str, Callable[[Options], Sequence[Figure]]] = {
    "decision": decision,
    "apply": apply_and_memory,
    "start": start,
    "death": death,
    "publish": publish,
    "paused": paused,
    "failover": failover,
    "cluster": cluster,
}


def run(options: Options, groups: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of some groups, by default of all, as a dict that JSON can encode. Raises ConfigError."""
    unknown = next((name for name in groups if name not in FIGURES), None)
    if unknown is not None:
        raise ConfigError("--figure", unknown, f"one of {', '.join(FIGURES)}")
    figures: list[Figure] = []
    for name in groups or FIGURES:
        options.progress(name)
        figures += FIGURES[name](options)
    told = {name: value for name, value in asdict(options).items() if name not in ("progress", "redis")}
    return {
        "benchmark": "replicas",
        "machine": machine(),
        **told,
        "trace": None if options.trace is None else str(options.trace),
        "figures": [figure.as_dict() for figure in figures],
    }


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    rows = [("figure", "value", "unit", "reach", "")]
    for each in result["figures"]:
        bound = "" if each["reach"] is None else f"{'≤' if each['at_most'] else '≥'} {each['reach']:,.6g}"
        verdict = {None: "", True: "met", False: "missed"}[each["met"]]
        rows.append((each["name"], f"{each['value']:,.4g}", each["unit"], bound, verdict))
    return f"{result['machine']}; seed {result['seed']}\n\n{columns(rows, num_left=5)}"


def _simulate(options: Options, num_replicas: int, cost: str, num_requests: int) -> Outcome:
    options.progress(f"{cost} over {num_replicas} replicas")
    simulation = Simulation(num_replicas, options.num_blocks, cost=cost, seed=options.seed)
    return simulation.run(_faster(options.trace_requests(num_requests), num_replicas / 8))


def _faster(requests: Iterator[TraceLine], times: float) -> Iterator[TraceLine]:
    """The same requests at a rate ``times`` as high."""
    return (request._replace(at_s=request.at_s / times) for request in requests)


def _random_digests(seed: int, number: int, count: int) -> bytes:
    return np.random.default_rng([seed, number]).bytes(_BYTES * count)


def _half_shared(seed: int, number: int, count: int) -> bytes:
    """Packed digests of a replica. All replicas share the first half."""
    return _random_digests(seed, 1_000_000, count // 2) + _random_digests(seed, number, count // 2)


def _packed(digests: bytes) -> Iterator[bytes]:
    return (digests[at : at + _BYTES] for at in range(0, len(digests), _BYTES))


def _entries(digests: bytes) -> list[Entry]:
    namespace, step = FleetKeys(SECRET).namespace(_NAMESPACE), _BYTES * DIGESTS_AN_ENTRY
    return [Entry("store", namespace, b"", digests[at : at + step]) for at in range(0, len(digests), step)]


def _publish(store: Store, name: str, digests: Iterable[bytes], lease_s: float) -> Writer:
    """Register a simulated replica, publish a snapshot of its digests, and send one heartbeat."""
    keys, nonce, address = FleetKeys(SECRET), secrets.token_hex(16), f"http://{name}"
    registration = Registration(name, 0, nonce, address, _NAMESPACE.model, 16, WIRE_VERSION, keys.canary)
    registration = replace(registration, epoch=store.boot(registration).value)
    writer = registration.writer
    mirror = Holdings()
    mirror.store(keys.namespace(_NAMESPACE), digests)
    store.snapshot(writer, 1, 2, mirror, anew=True)
    now_ms, lease_ms = int(time.time() * 1000), int(lease_s * 1000)
    stated = replace(registration, beats=1, lease_ms=lease_ms, stated_ms=now_ms)
    store.beat(replace(stated, proof=Proofs(keys).of_beat(stated)), Load())
    return writer


def _live(url: str, lease_s: float) -> None:
    """Run a replica that sends heartbeats until it is killed. The target of a process."""
    replica = connect(
        url,
        replica_id="victim",
        fleet_secret=SECRET,
        fingerprint=_NAMESPACE.model,
        block_size=16,
        address="http://127.0.0.1:1",
        lease_s=lease_s,
    )
    replica.register()
    time.sleep(3600)


@contextmanager
def _redis(url: str | None) -> Iterator[str]:
    """The URL of the given Redis, or of a new one on a socket. Raises ConfigError."""
    if url is not None:
        yield url
        return
    with servers.single() as (place, _):
        yield place
