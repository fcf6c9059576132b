"""The latency of other callers while a tenant, or a client without a key, attacks the service (``bench.attacks``).

The benchmark starts a service and a Redis as separate processes. It runs one attack after the other. During each, one
client makes five calls in turn: a *strict* tenant's lookup of 500 and of 6,000 characters, its ``DELETE /v1/cache``,
``/healthz``, and an operator's ``PUT`` of a tenant's settings. Each round measures all calls idle and under each
attack.

A figure is the median over rounds of the p99 within a round. ``limit_ms`` is the larger of three times the idle p99
and 15 ms, or 30 ms during a flood of 250 connections.
Any answer but 200 counts as refused; an attack must not cause one. A round ends after ROUND_S seconds at
the latest.

On a machine with several cores the service runs alone on the first one. The client and the attack share the others,
and the attack has a lower priority.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from radixkv.bench import attacks, servers
from radixkv.bench.measure import heading, number, surroundings
from radixkv.bench.service_process import serving
from radixkv.errors import ArgumentError
from radixkv.tables import columns

IDLE = "idle"
ATTACKS: Mapping[str, tuple[str, ...]] = {
    "bodies": ("bodies",),
    "tokenising": ("tokenising",),
    "internal": ("internal",),
    "stops": ("stops",),
    "streams": ("streams", "completions"),
    "routes": ("routes",),
    "lookups": ("lookups",),
    "keyless": ("keyless",),
    "downloads": ("downloads",),
}
"""Each measured state, and the attacks of ``bench.attacks`` that run together in it."""

LEAST_LIMIT_MS = 15.0
FLOOD_LIMIT_MS = 30.0
WIDE_FLOODS = frozenset({"lookups", "keyless"})
"""The attacks of 250 connections, during which the limit is FLOOD_LIMIT_MS."""
KEYLESS = frozenset({"keyless", "downloads"})
"""The attacks without a key. ``/healthz`` has no key either, so it waits with them, and has no limit."""
IDLE_REACH_MS = 5.0
_KEYS = {name: f"hostile-bench-{name}" for name in ("strict", "attacker", "operator", "changed")}
ROUND_S = 120.0
_SETTLE_S = 1.0
_ATTACK_S = 600.0
_NICE = 10


class Probe(NamedTuple):
    """A timed call."""

    name: str
    method: str
    path: str
    key: str | None
    body: Callable[[int], dict[str, Any]] | None = None


def _prompt(num_chars: int) -> Callable[[int], dict[str, Any]]:
    text = "Rule 7: answer politely, name the page of the manual, and ask if in doubt. " * (
        num_chars // 70 + 1
    )
    return lambda at: {"prompt": f"{at}: {text}"[:num_chars]}


_HEALTH = "/healthz"
PROBES = (
    Probe("lookup", "POST", "/v1/lookup", _KEYS["strict"], _prompt(500)),
    Probe("lookup of 6,000 characters", "POST", "/v1/lookup", _KEYS["strict"], _prompt(6_000)),
    Probe("DELETE /v1/cache", "DELETE", "/v1/cache", _KEYS["strict"]),
    Probe(_HEALTH, "GET", "/healthz", None),
    Probe(
        "operator's PUT", "PUT", "/v1/tenants/changed", _KEYS["operator"], lambda at: {"weight": 1 + at % 9}
    ),
)


class Round(NamedTuple):
    """p99 in milliseconds and number of calls of each probe, refused calls, and answers to the attack by status."""

    p99_ms: dict[str, float]
    calls: dict[str, int]
    refused: int
    answers: dict[int, int]
    p50_ms: Mapping[str, float] = {}


def run(
    *,
    calls: int = 200,
    rounds: int = 5,
    names: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Measure ``calls`` calls of each probe, idle and under each attack, ``rounds`` times.

    names: attacks, by default all. Returns a dict that JSON can encode. Takes about a
    quarter of an hour with the defaults.
    Raises ArgumentError.
    """
    chosen = tuple(names) or tuple(ATTACKS)
    unknown = [name for name in chosen if name not in ATTACKS]
    if unknown:
        raise ArgumentError("names", unknown[0], f"one of {', '.join(ATTACKS)}")
    states = (IDLE, *chosen)
    measured: dict[str, list[Round]] = {state: [] for state in states}
    with _service() as url:
        _round(url, IDLE, max(calls // 10, 10))
        for at in range(rounds):
            for place, state in enumerate(states):
                measured[state].append(_round(url, state, calls))
                if progress is not None:
                    progress(at * len(states) + place + 1)
    figures = [figure(measured, state, probe.name) for probe in PROBES for state in states]
    answers = {state: _added([each.answers for each in measured[state]]) for state in chosen}
    return {
        "figures": figures,
        "answers": answers,
        "calls": calls,
        "rounds": rounds,
        "seed": 0,
        **surroundings(),
    }


def num_steps(rounds: int, names: Sequence[str]) -> int:
    """The number of steps that ``progress`` counts."""
    return rounds * (1 + len(names or ATTACKS))


def table(result: Mapping[str, Any]) -> str:
    """Format the figures as text."""
    rows = [("call", "while", "p50 ms", "p99 ms", "lowest", "highest", "limit ms", "calls", "refused", "met")]
    for each in result["figures"]:
        names = ("p50_ms", "p99_ms", "lowest_ms", "highest_ms", "limit_ms")
        cells = ["none" if each[name] is None else number(each[name]) for name in names]
        met = "yes" if each["met"] else "NO"
        rows.append((each["call"], each["state"], *cells, str(each["calls"]), str(each["refused"]), met))
    said = [f"{name}: {counts}" for name, counts in result["answers"].items()]
    return "\n".join([heading(result), columns(rows), "answers to the attacks, by status (0: none)", *said])


def figure(measured: Mapping[str, Sequence[Round]], state: str, probe: str) -> dict[str, Any]:
    """A figure of a probe: the median p99 over rounds, its range, its limit, and whether it is within the limit."""
    found = [each.p99_ms[probe] for each in measured[state]]
    idle = median(each.p99_ms[probe] for each in measured[IDLE])
    least = FLOOD_LIMIT_MS if state in WIDE_FLOODS else LEAST_LIMIT_MS
    limit: float | None = IDLE_REACH_MS if state == IDLE else max(3 * idle, least)
    if state in KEYLESS and probe == _HEALTH:
        limit = None
    refused = sum(each.refused for each in measured[state])
    return {
        "call": probe,
        "state": state,
        "p50_ms": median(each.p50_ms.get(probe, each.p99_ms[probe]) for each in measured[state]),
        "p99_ms": median(found),
        "lowest_ms": min(found),
        "highest_ms": max(found),
        "limit_ms": limit,
        "calls": sum(each.calls[probe] for each in measured[state]),
        "refused": refused,
        "met": (limit is None or median(found) <= limit) and not refused,
    }


def _added(counts: Sequence[Mapping[int, int]]) -> dict[str, int]:
    statuses = sorted({status for each in counts for status in each})
    return {str(status): sum(each.get(status, 0) for each in counts) for status in statuses}


def _round(url: str, state: str, calls: int) -> Round:
    with ExitStack() as stack:
        answers = {} if state == IDLE else stack.enter_context(_attacked(url, ATTACKS[state]))
        times, refused = _timed(url, calls)
        stack.close()
        p50_ms, p99_ms = (
            {name: float(np.percentile(each, share)) for name, each in times.items()} for share in (50, 99)
        )
        return Round(p99_ms, {name: len(each) for name, each in times.items()}, refused, answers, p50_ms)


def _timed(url: str, calls: int) -> tuple[dict[str, list[float]], int]:
    """Time calls of all probes in turn over one connection, in ms. Also count the answers other than 200."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120.0)
    times: dict[str, list[float]] = {probe.name: [] for probe in PROBES}
    refused = 0
    until = time.monotonic() + ROUND_S
    for at in range(calls):
        for probe in PROBES:
            if time.monotonic() > until and at:
                break
            body = None if probe.body is None else json.dumps(probe.body(at))
            headers = {} if probe.key is None else {"Authorization": f"Bearer {probe.key}"}
            if body is not None:
                headers["Content-Type"] = "application/json"
            began = time.perf_counter()
            connection.request(probe.method, probe.path, body, headers)
            answer = connection.getresponse()
            answer.read()
            times[probe.name].append((time.perf_counter() - began) * 1e3)
            refused += answer.status != 200
    connection.close()
    return times, refused


@contextmanager
def _attacked(url: str, names: Sequence[str]) -> Iterator[dict[int, int]]:
    """Attack until the ``with`` block ends. Then the dict has the number of answers to the attack by status."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=attacks.run, args=(url, _KEYS["attacker"], tuple(names), _ATTACK_S, _NICE, theirs), daemon=True
    )
    answers: dict[int, int] = {}
    process.start()
    theirs.close()
    try:
        ours.recv()
        time.sleep(_SETTLE_S)
        yield answers
        ours.send(None)
        answers.update(ours.recv())
    finally:
        process.kill()
        process.join()


@contextmanager
def _service() -> Iterator[str]:
    """The URL of a service in a separate process. It runs on the first core if there are several."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis, _ = stack.enter_context(servers.single())
        keys, secret = folder / "keys.json", folder / "secret"
        keys.write_text(json.dumps(_keys_file()))
        secret.write_text("the secret of a fleet that is attacked")
        for path in (keys, secret):
            path.chmod(0o600)
        given = {"threads": "1", "keys": str(keys), "redis": redis, "fleet-secret": str(secret)}
        cores = sorted(os.sched_getaffinity(0))
        stack.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, cores[:1])  # the service inherits it
        options = (word for name, value in given.items() for word in (f"--{name}", value))
        url = stack.enter_context(serving(*options))
        os.sched_setaffinity(0, cores[1:] or cores)
        yield url


def _keys_file() -> dict[str, Any]:
    return {
        "operator": _KEYS["operator"],
        "tenants": {
            "strict": {"keys": [_KEYS["strict"]], "mode": "strict", "guaranteed_blocks": 512},
            "attacker": {"keys": [_KEYS["attacker"]]},
            "changed": {"keys": [_KEYS["changed"]]},
        },
    }
