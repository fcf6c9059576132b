"""How the benchmarks measure and report: clocks, figures, memory, the machine.

Times are the process's CPU time. It excludes other processes and includes our other threads. Reading that clock costs
0.2 µs, which are subtracted. Absolute times differ between machines. So a figure names, where possible, a floor that
was timed in the same run, and its ratio to the floor.

The heap is frozen after the setup, as engines do. The garbage collector stays on.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv import COMPILED
from radixkv.tables import columns

Nanoseconds = NDArray[np.int64]


class Figure(NamedTuple):
    """One figure: its ``value`` (the median of percentiles), its targets, and a floor in the same unit."""

    name: str
    value: float
    unit: str
    p99: float | None = None
    reach: float | None = None
    stretch: float | None = None
    floor: str | None = None
    floor_value: float | None = None

    @property
    def ratio(self) -> float | None:
        """``value`` as a multiple of the floor."""
        return self.value / self.floor_value if self.floor_value else None

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can encode."""
        return {**self._asdict(), "ratio": self.ratio}


def timed(call: Callable[[], Any], repeats: int, undo: Callable[[Any], object] | None = None) -> Nanoseconds:
    """CPU nanoseconds of each of ``repeats`` calls. ``undo`` gets the result of each call and is not timed."""
    clock, found = time.process_time_ns, np.zeros(repeats, dtype=np.int64)
    for number in range(repeats):
        start = clock()
        result = call()
        found[number] = clock() - start
        if undo is not None:
            undo(result)
    return without_clock(found)


@cache
def clock_ns(clock: Callable[[], int] = time.process_time_ns) -> int:
    """The time that reading the clock adds, in ns: the median of 10,000 empty measurements."""
    return int(np.median([-clock() + clock() for _ in range(10_000)]))


def without_clock(nanoseconds: Nanoseconds, clock: Callable[[], int] = time.process_time_ns) -> Nanoseconds:
    """Subtract in place the time that reading the clock added, down to 1 ns. Returns the same array."""
    nanoseconds -= clock_ns(clock)
    return np.maximum(nanoseconds, 1, out=nanoseconds)


def cpu_ns(call: Callable[[], object]) -> int:
    """CPU nanoseconds that the process spends during a call."""
    return int(timed(call, 1)[0])


def percentile_us(nanoseconds: Nanoseconds, percent: float) -> float:
    """A percentile, in microseconds."""
    return float(np.percentile(nanoseconds, percent)) / 1e3


def summary(nanoseconds: Nanoseconds) -> dict[str, float]:
    """Percentiles and mean, in microseconds."""
    return {
        "p50_us": percentile_us(nanoseconds, 50),
        "p99_us": percentile_us(nanoseconds, 99),
        "mean_us": float(nanoseconds.mean()) / 1e3,
    }


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude existing objects from garbage collection until the block ends."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def resident_bytes() -> int:
    """The resident set, after a garbage collection and a trim of the allocator."""
    gc.collect()
    if platform.system() == "Linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def processor() -> str:
    """The model of the processor, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def machine() -> str:
    """Processor, number of CPUs, Python, and the build of the index."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    index = "compiled" if COMPILED else "pure Python"
    return f"{processor()}, {os.cpu_count()} CPUs, {python}, {index} index"


def versions(*others: str) -> dict[str, str | None]:
    """Versions of Python and of the packages that affect the figures."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("radixkv", "numpy", *others):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def surroundings() -> dict[str, Any]:
    """The part of a result that describes where it was measured."""
    return {"machine": machine(), "compiled": COMPILED, "versions": versions("xxhash")}


def heading(result: Mapping[str, Any]) -> str:
    """Machine, versions and seed of a result, in one line."""
    named = ", ".join(f"{package} {number}" for package, number in result["versions"].items() if number)
    return f"{result['machine']}; {named}; seed {result['seed']}"


def number(value: float | None) -> str:
    """Format a number for a table: at least three digits, "–" for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def figures_table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Format figures as text."""
    rows = [("figure", "value", "unit", "p99", "reach", "stretch", "× floor", "floor")]
    for each in figures:
        figures_of = (each["p99"], each["reach"], each["stretch"], each["ratio"])
        cells = (number(each["value"]), each["unit"], *map(number, figures_of), each["floor"] or "–")
        rows.append((each["name"], *cells))
    return columns(rows)
