"""The cost of a Redis outage: latency during the outage, and the time of recovery.

paused      the server is stopped (SIGSTOP) and continued in turn. Measures p99, in both states, of requests to a
cache
            that publishes to it, and of ``POST /v1/warm`` to a service that is registered with it.
failover    the master of a Sentinel group is killed. Meanwhile a replica evicts one prompt and computes another.
            Measures seconds from the first write that the new master accepts until a router's view is right.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.bench import servers
from radixkv.bench.servers import Process
from radixkv.config import CacheConfig, Namespace
from radixkv.coordination import Coordinator, Router, connect
from radixkv.index.cache import PrefixCache

_SECRET = b"the secret of a fleet without its Redis"
_NAMESPACE = Namespace("tenant", "model")
_TURNS = 3
_DEADLINE_S = 60.0

Ids = NDArray[np.uint32]


class Paused(NamedTuple):
    """p99 in milliseconds while Redis runs and while it is stopped."""

    there_ms: float
    away_ms: float


def match(num_requests: int, seed: int) -> Paused:
    """Requests of 1,024 tokens: each is matched, opened, committed and released."""
    chance = np.random.default_rng(seed)
    prompts = [chance.integers(0, 128_000, 1_024, dtype=np.int64) for _ in range(64)]
    with servers.single() as (url, process), closing(_replica(url, "paused")) as coordinator:
        cache = PrefixCache(CacheConfig(num_blocks=2_048, block_size=16), journal=coordinator.journal)
        coordinator.attach(cache)
        coordinator.register()

        def request(number: int) -> None:
            ids = prompts[number * 37 % len(prompts)]
            cache.match(_NAMESPACE, ids)
            with cache.open(_NAMESPACE, ids) as sequence:
                sequence.commit(len(ids))

        return _both(request, num_requests, process, coordinator)


def warm(num_requests: int) -> Paused:
    """``POST /v1/warm`` to a service with the demo model, each with a new prompt."""
    from radixkv.service.api_client import Client
    from radixkv.service.auth import DEMO_KEYS
    from radixkv.service.local import running
    from radixkv.service.options import ServeSettings

    with tempfile.TemporaryDirectory() as folder, servers.single() as (url, process):
        secret = Path(folder, "secret")
        secret.write_text(_SECRET.hex())
        secret.chmod(0o600)
        settings = {
            "port": "0",
            "redis": url,
            "replica": "paused",
            "fleet-secret": str(secret),
            "threads": "1",
        }
        with (
            running(ServeSettings.parse({**settings, "lease": "1"})) as (service, base),
            Client(base, next(iter(DEMO_KEYS.values()))) as client,
        ):

            def request(number: int) -> None:
                text = f"Prompt number {number} of a benchmark. " * 8
                client.call("POST", "/v1/warm", {"prompt": text})

            return _both(request, num_requests, process, service.fleet.coordinator)


def failover(down_after_s: float = 1.0) -> float:
    """Seconds from the first write that the new master accepts until the view is right."""
    kept, gone, new = (np.arange(512, dtype=np.uint32) + 1_000 * number for number in range(3))
    with servers.sentinel(down_after_s) as group, closing(_replica(group.url, "holder")) as holder:
        cache = PrefixCache(CacheConfig(num_blocks=128, block_size=16), journal=holder.journal)
        holder.attach(cache)
        holder.register()
        lost = Namespace("tenant", "model", salt="lost")
        for namespace, ids in ((_NAMESPACE, kept), (lost, gone)):
            _compute(cache, namespace, ids)
        with closing(Router.connect(group.url, fleet_secret=_SECRET)) as router:

            def held(namespace: Namespace, ids: Ids) -> int:
                ranked = router.rank(namespace, ids)
                return 0 if router.is_blind or not ranked else ranked[0].matched_tokens["device"]

            _until(lambda: held(_NAMESPACE, kept) == held(lost, gone) == 512)
            group.master.kill()
            cache.clear(lost)
            _compute(cache, _NAMESPACE, new)
            _until(lambda: servers.accepts_writes(group.replica_port))
            began = time.perf_counter()
            _until(lambda: held(_NAMESPACE, kept) == held(_NAMESPACE, new) == 512 and held(lost, gone) == 0)
            return time.perf_counter() - began


def _compute(cache: PrefixCache, namespace: Namespace, ids: Ids) -> None:
    with cache.open(namespace, ids) as sequence:
        sequence.commit(len(ids))


def _replica(url: str, name: str) -> Coordinator:
    return connect(
        url,
        replica_id=name,
        fleet_secret=_SECRET,
        fingerprint=_NAMESPACE.model,
        block_size=16,
        address=f"http://{name}",
        lease_s=1.0,
    )


def _both(
    request: Callable[[int], None], num_requests: int, process: Process, coordinator: Coordinator
) -> Paused:
    """Make requests with and without Redis in turns, so that a slow phase of the machine affects both."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * _TURNS):
        is_away = turn % 2 == 1
        with _stopped(process, coordinator) if is_away else _there(coordinator):
            for number in range(num_requests // _TURNS):
                start = time.perf_counter()
                request(turn * num_requests + number)
                times[is_away].append(time.perf_counter() - start)
    there, away = (float(np.percentile(times[is_away], 99)) * 1e3 for is_away in (False, True))
    return Paused(there, away)


@contextmanager
def _there(coordinator: Coordinator) -> Iterator[None]:
    _until(lambda: coordinator.health().is_ok)
    yield


@contextmanager
def _stopped(process: Process, coordinator: Coordinator) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        _until(lambda: coordinator.health().state == "unavailable")
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def _until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_DEADLINE_S:g} s")
        time.sleep(0.002)
