"""The grid of serving, ``radixkv simulate --serve --grid``: an order and a policy beside FCFS and lpm, over many loads.

``table`` has a cell for each number of sessions, oversubscription and prefill speed, without and with a host tier.
``drawn`` has cells drawn at random from a wider grid. A cell is run with each seed, and each run is served three times:
FCFS with LRU, lpm with LRU, and the candidate. One run takes seconds.

Oversubscription is ``240 · sessions ÷ blocks``: 240 blocks are the mean prompt of the measured sessions. With a host
tier of four times the device, it is that of both together.

``Runs`` writes each run to a file as a line of JSON, and does not repeat a run that the file has.
"""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

import numpy as np

from radixkv.errors import ConfigError, shown
from radixkv.simulator.packed_sessions import Session, read_sessions
from radixkv.simulator.serving import SCHEDULERS, Result, Serving, Settings
from radixkv.simulator.simulate import chosen
from radixkv.simulator.simulate_serving import BASELINE, known_policies
from radixkv.tables import columns

TABLE: Final = "table"
DRAWN: Final = "drawn"
LPM: Final = "lpm", "lru"
CANDIDATE: Final = "cache-first", "learned+queue"
PROMPT_BLOCKS: Final = 240
HOST_TIMES: Final = 4
MAX_DRAWN: Final = 1_000
MAX_SEEDS: Final = 100
MAX_BYTES: Final = 2**24
"""Most bytes of a file of runs."""
_MAX_LINE: Final = 4_096
_FIGURES: Final = ("requests_per_hour", "latency_p95_s", "longest_wait_s", "refused_requests")


class Cell(NamedTuple):
    """A load: sessions at a time, blocks of the device and the host, prefill tokens a second, factor of pauses."""

    sessions: int
    capacity: int
    host_blocks: int
    prefill: float
    pauses: float

    @property
    def oversubscription(self) -> float:
        """Blocks of a mean prompt of each session ÷ blocks of both tiers."""
        return PROMPT_BLOCKS * self.sessions / (self.capacity + self.host_blocks)

    def settings(self, given: Settings, seed: int) -> Settings:
        """Return the settings of a run."""
        return replace(
            given,
            sessions=self.sessions,
            host_blocks=self.host_blocks,
            prefill=self.prefill,
            pauses=self.pauses,
            seed=seed,
        )


def cells_of(grid: str, num_drawn: int, seed: int = 0) -> list[Cell]:
    """Return the cells of a grid. ``num_drawn``, ``seed``: of the drawn one. Raises ConfigError."""
    if grid == TABLE:
        return list(_table())
    if grid != DRAWN:
        raise ConfigError("--grid", grid, f"{TABLE} or {DRAWN}")
    wide = [
        Cell(sessions, capacity, times * capacity, prefill, pauses)
        for sessions, capacity, prefill, pauses, times in product(
            (8, 16, 32, 64, 128),
            (2_000, 3_000, 4_000, 6_000, 8_000),
            (5_000.0, 20_000.0, 60_000.0),
            (0.3, 1.0, 3.0),
            (0, HOST_TIMES),
        )
    ]
    dice = random.Random(seed)
    dice.shuffle(wide)
    return wide[:num_drawn]


def _table() -> Iterator[Cell]:
    for times, prefill, sessions, over in product(
        (0, HOST_TIMES), (20_000.0, 60_000.0), (32, 64), (1.5, 2.0, 4.0)
    ):
        capacity = round(PROMPT_BLOCKS * sessions / over / (1 + times))
        yield Cell(sessions, capacity, times * capacity, prefill, 1.0)


class Runs:
    """The figures of runs, in a file if there is one: a line of JSON for what all runs share, then one for each run."""

    def __init__(self, path: Path | None, shared: dict[str, Any]) -> None:
        """Read the runs of a file, or make it. Raises ConfigError for a file of other runs, and one too large."""
        self._path = path
        self._found: dict[str, dict[str, float]] = {}
        if path is None:
            return
        head = json.dumps(shared, sort_keys=True)
        try:
            if not path.exists() or not path.stat().st_size:
                path.write_text(head + "\n", encoding="utf-8")
            self._read(path, head)
        except OSError as error:
            raise ConfigError(
                "--resume", str(path), f"a file that can be read and written ({error})"
            ) from error

    def get(self, name: str) -> dict[str, float] | None:
        """Return the figures of a run, or None."""
        return self._found.get(name)

    def put(self, name: str, figures: dict[str, float]) -> None:
        """Keep the figures of a run."""
        self._found[name] = figures
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": name, "figures": figures}) + "\n")

    def _read(self, path: Path, head: str) -> None:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        first, *lines = text.split(b"\n")
        if len(text) > MAX_BYTES or first != head.encode():
            allowed = (
                f"at most {MAX_BYTES:,} bytes of runs with the same sessions and settings, or a new file"
            )
            raise ConfigError("--resume", str(path), allowed)
        if lines and lines[-1]:  # an interrupted write: the run is done again
            with path.open("r+b") as file:
                file.truncate(len(text) - len(lines[-1]))
        for number, line in enumerate(lines[:-1], 2):
            name, figures = _parsed(f"{path} line {number}", line)
            self._found[name] = figures


def _parsed(place: str, line: bytes) -> tuple[str, dict[str, float]]:
    """Return the name and the figures of a line."""
    try:
        fields: Any = json.loads(line) if len(line) <= _MAX_LINE else None
        name, figures = fields["run"], {each: float(fields["figures"][each]) for each in _FIGURES}
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ConfigError(place, shown(line[:80]), "a run as JSON, as the simulator writes it") from error
    if not isinstance(name, str) or not all(0 <= each < 1e15 for each in figures.values()):
        raise ConfigError(place, shown(line[:80]), "the name of a run and figures from 0 on")
    return name, figures


def run(
    paths: Sequence[Path],
    *,
    grid: str = TABLE,
    seeds: int = 3,
    num_cells: int | None = None,
    settings: Settings | None = None,
    scheduler: str = CANDIDATE[0],
    policy: str = CANDIDATE[1],
    resume: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Serve the sessions of these files in each cell. Returns a dict that JSON can encode.

    - ``num_cells``: only the first ones; of the drawn grid, how many are drawn, by default 60.
    - ``settings``: for all runs. Its seed is the first one, and draws the cells.
    - ``resume``: a file to which each run is written, and whose runs are not repeated.

    ``results`` has a row for each cell. Ratios are means over the seeds:

    - ``against_fcfs``, ``against_lpm``: requests an hour of the candidate ÷ those of FCFS and lpm, both with LRU.
      ``least_against_fcfs``, ``least_against_lpm``: of the worst seed.
    - ``p95_against_fcfs``: 95th percentile of a request's latency. ``wait_against_lpm``: the longest wait.

    Raises ConfigError for invalid settings and files. A run takes seconds; the table's grid has 72 a seed.
    """
    began = time.perf_counter()
    given = settings or Settings()
    _check(scheduler, policy, seeds, num_cells)
    cells = cells_of(grid, num_cells or 60, given.seed)[:num_cells]
    pool = read_sessions(paths)
    runs = Runs(resume, _shared(paths, pool, given))
    all_seeds = range(given.seed, given.seed + seeds)
    rows = []
    for done, cell in enumerate(cells):
        found = []
        for at, seed in enumerate(all_seeds):
            found.append(
                [
                    _figures(pool, cell.settings(given, seed), each, cell.capacity, runs)
                    for each in (BASELINE, LPM, (scheduler, policy))
                ]
            )
            if progress is not None:
                progress(done * seeds + at + 1, len(cells) * seeds)
        rows.append(_row(cell, found))
    return {
        "benchmark": "simulate --serve --grid",
        "grid": grid,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "scheduler": scheduler,
        "policy": policy,
        "seeds": list(all_seeds),
        **_shared(paths, pool, given),
        "results": rows,
        "seconds": time.perf_counter() - began,
    }


def _check(scheduler: str, policy: str, seeds: int, num_cells: int | None) -> None:
    if chosen([policy], known_policies()) != (policy,):
        raise ConfigError("--policy", policy, "one policy")
    if scheduler not in SCHEDULERS:
        raise ConfigError("--scheduler", scheduler, f"one of {', '.join(SCHEDULERS)}")
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError("--seeds", seeds, f"from 1 to {MAX_SEEDS}")
    if num_cells is not None and not 1 <= num_cells <= MAX_DRAWN:
        raise ConfigError("--cells", num_cells, f"from 1 to {MAX_DRAWN}")


def _shared(paths: Sequence[Path], pool: Sequence[Session], given: Settings) -> dict[str, Any]:
    """What all runs of a file have in common."""
    own = {*Cell._fields, "seed", "rate", "replicas", "route"}
    return {
        "sessions_of": [path.name for path in paths],
        "file_sessions": len(pool),
        "file_requests": sum(len(session.turns) for session in pool),
        "settings": {name: value for name, value in asdict(given).items() if name not in own},
    }


def _figures(
    pool: Sequence[Session], settings: Settings, served_by: tuple[str, str], capacity: int, runs: Runs
) -> dict[str, float]:
    """Return the figures of a run: those of an earlier one if there are any."""
    load = f"{settings.sessions}x{capacity}+{settings.host_blocks}"
    name = f"{load} {settings.prefill:g}/s x{settings.pauses:g} seed {settings.seed} {' '.join(served_by)}"
    known = runs.get(name)
    if known is None:
        known = _measured(Serving(pool, settings, *served_by, capacity).run(), settings)
        runs.put(name, known)
    return known


def _measured(result: Result, settings: Settings) -> dict[str, float]:
    latencies = [each.ended - each.arrived for each in result.served]
    waits = [each.started - each.arrived for each in result.served] + result.still_waiting
    return {
        "requests_per_hour": len(result.served) * 3_600.0 / settings.measure_s,
        "latency_p95_s": float(np.percentile(latencies, 95)) if latencies else 0.0,
        "longest_wait_s": max(waits, default=0.0),
        "refused_requests": float(result.refused),
    }


def _row(cell: Cell, found: Sequence[Sequence[dict[str, float]]]) -> dict[str, Any]:
    fcfs, lpm, ours = zip(*found, strict=True)
    rates, lpm_rates = _ratios(ours, fcfs, "requests_per_hour"), _ratios(ours, lpm, "requests_per_hour")
    return {
        **cell._asdict(),
        "oversubscription": cell.oversubscription,
        "requests_per_hour": mean(each["requests_per_hour"] for each in ours),
        "against_fcfs": _mean(rates),
        "least_against_fcfs": min(rates, default=None),
        "against_lpm": _mean(lpm_rates),
        "least_against_lpm": min(lpm_rates, default=None),
        "p95_against_fcfs": _mean(_ratios(ours, fcfs, "latency_p95_s")),
        "longest_wait_s": mean(each["longest_wait_s"] for each in ours),
        "wait_against_lpm": _mean(_ratios(ours, lpm, "longest_wait_s")),
        "refused_requests": mean(each["refused_requests"] for each in ours),
    }


def _ratios(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]], name: str) -> list[float]:
    return [one[name] / other[name] for one, other in zip(ours, theirs, strict=True) if other[name]]


def _mean(ratios: Sequence[float]) -> float | None:
    return mean(ratios) if ratios else None


# text -----------------------------------------------------------------------------------------------------------------

HEAD: Final = (
    "sessions", "blocks", "host", "over", "prefill/s", "pauses", "requests/h", "× FCFS", "least", "× lpm", "least",
    "p95 × FCFS", "longest wait, s", "× lpm",
)  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    rows = result["results"]
    head = (
        f"{result['scheduler']} with {result['policy']}, beside FCFS and lpm with lru: {len(rows)} cells, "
        f"seeds {', '.join(map(str, result['seeds']))}"
    )
    return "\n\n".join([head, columns([HEAD, *map(_cells, rows)]), _summary(rows)])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratios = ("against_fcfs", "least_against_fcfs", "against_lpm", "least_against_lpm", "p95_against_fcfs")
    return (
        str(row["sessions"]),
        f"{row['capacity']:,}",
        f"{row['host_blocks']:,}",
        f"{row['oversubscription']:.2g}",
        f"{row['prefill']:,.0f}",
        f"{row['pauses']:g}",
        f"{row['requests_per_hour']:,.0f}",
        *(_ratio(row[name]) for name in ratios),
        f"{row['longest_wait_s']:,.0f}",
        _ratio(row["wait_against_lpm"]),
    )


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    """Say the worst and the mean of all cells."""
    told = []
    for name, over in (("against_fcfs", "FCFS"), ("against_lpm", "lpm")):
        found = [row[name] for row in rows if row[name] is not None]
        if found:
            told.append(f"requests an hour × {over}: least {min(found):.3f}, mean {mean(found):.3f}")
    slow = [row["p95_against_fcfs"] for row in rows if row["p95_against_fcfs"] is not None]
    if slow:
        told.append(
            f"p95 latency at most 1.1 × FCFS: {sum(each <= 1.1 for each in slow)} of {len(slow)} cells"
        )
    return "\n".join(told)
