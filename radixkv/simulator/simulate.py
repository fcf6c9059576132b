"""The trace simulator: the hit rate of each policy at each capacity, beside the optimum.

Each (policy, capacity) is one task, and the tasks run on all cores of the machine. A policy's task is a replay
through a real cache (``replay``). The optimum's task is Belady's rule on the tree
(``optimum``). LRU and the optimum always run, because results are shares of the gap between them. A policy
that may reject blocks also runs once without rejecting, to show the gain of it.
"""

from __future__ import annotations

import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Any, ClassVar

from radixkv.config import policy_names, resolve
from radixkv.errors import ConfigError, RadixKVError
from radixkv.simulator.advice import advise
from radixkv.simulator.optimum import optimum
from radixkv.simulator.profiles import ModelProfile, profile_of
from radixkv.simulator.replay import declines, replay
from radixkv.simulator.score import (
    ADMITTING_ALL,
    LRU,
    OPTIMUM,
    OPTIMUM_BYPASS,
    Scorer,
    Scores,
    Sums,
)
from radixkv.simulator.trace import Outcome, Trace, read

Task = tuple[str, int]

_STARTED_AGAIN = 70
"""Exit status of a worker whose start ran the calling script again."""


class WorkerDied(RadixKVError):
    """A worker process of a simulation ended before its work was done."""

    hint: ClassVar[str] = "Use fewer processes (--jobs): the system may have killed one for its memory."


def known_policies() -> tuple[str, ...]:
    """The names that ``policies`` accepts, besides ``all``."""
    return (*policy_names(), OPTIMUM, OPTIMUM_BYPASS)


def chosen(names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the names without duplicates, with ``all`` expanded. Imports unknown ones. Raises ConfigError."""
    for name in names:
        if name != "all" and name not in known:
            resolve("--policy", name, known)
    return tuple(dict.fromkeys(each for name in names for each in (known if name == "all" else (name,))))


def run(
    traces: Sequence[Path],
    *,
    policies: Sequence[str] = ("all",),
    capacities: Sequence[int],
    tenants: Sequence[str] | None = None,
    score_from_s: float = 0.0,
    profile: ModelProfile | None = None,
    block_tokens: int = 16,
    keep_tails: bool = False,
    seed: int = 0,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run every policy at every capacity over the traces. Returns a dict that JSON can encode.

    The dict's ``results`` has a row for each policy and capacity.

    - ``capacities``: blocks of the trace, ≥ 1.
    - ``tenants``: all others are left out.
    - ``jobs``: processes, by default one a core.
    - ``progress``: gets the number of finished tasks and of all tasks.

    Each worker process imports the script that calls this. So with more than one job, the script needs
    ``if __name__ == "__main__":`` around the call.

    Raises ConfigError for invalid settings or traces, and WorkerDied if a worker process was killed or could not
    start.
    """
    if getattr(current_process(), "_inheriting", False):  # a worker that imports a script without that guard
        raise SystemExit(_STARTED_AGAIN)
    began = time.perf_counter()
    named, sizes = chosen(policies, known_policies()), _checked_capacities(capacities)
    trace = read(traces, block_tokens=block_tokens, keep_tails=keep_tails, tenants=tenants)
    work = _Work(trace, Scorer(trace, profile or profile_of("llama-3-8b"), score_from_s), seed)
    names = dict.fromkeys((*named, LRU, OPTIMUM))
    online = [name for name in named if name not in (OPTIMUM, OPTIMUM_BYPASS)]
    names |= dict.fromkeys(name + ADMITTING_ALL for name in online if declines(name))
    tasks = [(name, size) for name in names for size in sizes]
    runs: dict[Task, Sums] = {}
    for task, sums in _run_all(work, tasks, jobs):
        runs[task] = sums
        if progress is not None:
            progress(len(runs), len(tasks))
    rows = Scores(work.scorer, trace.tenants, runs)
    result = {
        "benchmark": "simulate",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "traces": [str(path) for path in traces],
        "seed": seed,
        "keep_tails": keep_tails,
        **work.scorer.describe(),
        "results": [rows.row(name, size) for name in named for size in sizes],
        "baselines": [rows.row(name, size) for name in (LRU, OPTIMUM) for size in sizes],
    }
    return result | {"advice": advise(result), "seconds": time.perf_counter() - began}


def _checked_capacities(capacities: Sequence[int]) -> list[int]:
    for capacity in capacities:
        if not 1 <= capacity < 2**31 - 1:
            raise ConfigError("--capacity", capacity, f"from 1 to {2**31 - 2} blocks")
    if not capacities:
        raise ConfigError("--capacity", None, "at least one number of blocks")
    return sorted(set(capacities))


@dataclass(frozen=True, slots=True)
class _Work:
    """The trace, and how to score a run of it. Every process has a copy."""

    trace: Trace
    scorer: Scorer
    seed: int

    def do(self, task: Task) -> Sums:
        """Run a task and reduce its outcome to sums."""
        policy, capacity = task
        return self.scorer.reduce(self._outcome(policy, capacity))

    def _outcome(self, policy: str, capacity: int) -> Outcome:
        if policy in (OPTIMUM, OPTIMUM_BYPASS):
            return optimum(self.trace, capacity, bypass=policy == OPTIMUM_BYPASS)
        name = policy.removesuffix(ADMITTING_ALL)
        return replay(
            self.trace, name, capacity, self.seed, profile=self.scorer.profile, admits_all=name != policy
        )


_work: _Work | None = None
"""Set in the worker processes of the pool only."""


def _begin(file: Path, profile: ModelProfile, score_from_s: float, seed: int) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    trace = Trace.load(file)
    _work = _Work(trace, Scorer(trace, profile, score_from_s), seed)


def _do(task: Task) -> Sums:
    assert _work is not None
    return _work.do(task)


def _run_all(work: _Work, tasks: list[Task], jobs: int | None) -> Iterator[tuple[Task, Sums]]:
    """Yield each task and its result as it finishes."""
    processes = min(jobs or len(os.sched_getaffinity(0)), len(tasks))
    if processes == 1:
        for task in tasks:
            yield task, work.do(task)
        return
    with tempfile.TemporaryDirectory() as folder:
        # Pass the trace in a file: multiprocessing hangs if a worker dies while a pipe sends it much data.
        file = Path(folder, "trace.npz")
        work.trace.save(file)
        yield from _run_in_processes(work, file, tasks, processes)


def _run_in_processes(
    work: _Work, file: Path, tasks: list[Task], processes: int
) -> Iterator[tuple[Task, Sums]]:
    given = (file, work.scorer.profile, work.scorer.score_from_s, work.seed)
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, given) as pool:
        pending = {pool.submit(_do, task): task for task in tasks}
        workers = list(pool._processes.values())  # Python 3.14 has terminate_workers
        try:
            for done in as_completed(pending):
                yield pending[done], done.result()
        except BrokenProcessPool:
            pool.shutdown()  # its thread reaps the processes; each exit status is known only after that
            raise _died([process.exitcode for process in workers], processes) from None
        except BaseException:  # also on Ctrl-C: stop work that is no longer needed
            for process in workers:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def _died(exitcodes: Sequence[int | None], processes: int) -> WorkerDied:
    """Name the cause by the status of the worker that ended first. The pool ends the others by SIGTERM."""
    if _STARTED_AGAIN in exitcodes:
        return WorkerDied(
            "the script that calls run() has no guard: each worker process imports the script, which calls run() "
            'again; put the call under `if __name__ == "__main__":`, or use jobs=1'
        )
    causes = [code for code in exitcodes if code not in (None, 0, -signal.SIGTERM)]
    code = causes[0] if causes else -signal.SIGTERM
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        how += ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    else:
        how = f"ended with status {code}"
    return WorkerDied(f"one of {processes} worker processes {how}; run fewer at a time with --jobs (jobs=)")


# text -----------------------------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """Format a result as text: hit rates and shares of the gap by policy and capacity, tenants, advice."""
    rows = [*result["results"], *result["baselines"]]
    parts = [
        f"{result['scored_requests']} of {result['requests']} requests scored, "
        f"blocks of {result['block_tokens']} tokens; an endless cache: {100 * result['endless_token_hit_rate']:.2f} %",
        _matrix("token hit rate, %", rows, "token_hit_rate"),
        _matrix("share of the gap from LRU to the optimum closed, %", result["results"], "share_of_gap"),
    ]
    stretches = [row | {"worst": row["worst_slice"]["above_lru"]} for row in result["results"]]
    parts.append(_matrix("the worst sixth of the time, points above LRU", stretches, "worst"))
    admission = [row for row in result["results"] if row["admission_gain"] is not None]
    if admission:
        parts.append(
            _matrix("what admission adds to the token hit rate, points", admission, "admission_gain")
        )
    if len(result["tenants"]) > 1:
        parts += [
            _matrix(f"tenant {name}: token hit rate, %", rows, "token_hit_rate", name)
            for name in result["tenants"]
        ]
    return "\n\n".join([*parts, *result["advice"]])


def _matrix(title: str, rows: list[dict[str, Any]], field: str, tenant: str | None = None) -> str:
    cells: dict[str, dict[int, float | None]] = {}
    for row in rows:
        scores = row if tenant is None else row["tenants"][tenant]
        cells.setdefault(row["policy"], {})[row["capacity"]] = scores[field]
    sizes = sorted({row["capacity"] for row in rows})
    width = max(len(name) for name in (*cells, "blocks"))
    head = "blocks".ljust(width) + "".join(f" {size:>9,}" for size in sizes)
    lines = [
        name.ljust(width) + "".join(" " + _percent(values[size]).rjust(len(f"{size:,}")) for size in sizes)
        for name, values in cells.items()
    ]
    return "\n".join([title, head, *lines])


def _percent(value: float | None) -> str:
    return f"{'–' if value is None else f'{100 * value:.2f}':>9}"
