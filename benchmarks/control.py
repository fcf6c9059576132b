"""The price of a control client: HFEngine's decode steps while a client polls the engine ten times a second.

A pair is two generations of the demo model on one core: one with a client that is connected and polls, one without.
Which of them comes first alternates. The client is a process of its own. Times are those of the clock on the wall, from
one step's end to the next, and the process's CPU time in between, which other processes don't change: it includes the
control channel's threads. Results are medians over pairs of the ratio of percentiles.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any

import click
import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.bench.measure import frozen_heap, number, surroundings
from radixkv.cli.output import Number, finish, int_option, json_option, print_result, progress_bar
from radixkv.config import CacheConfig
from radixkv.engines.control.server import ControlServer
from radixkv.engines.hf import HFEngine, demo_model, layout_of
from radixkv.index.cache import PrefixCache
from radixkv.signing import KeySet
from radixkv.tables import columns

ARMS = ("silent", "polled")
Steps = NDArray[np.float64]
_PROMPT_TOKENS = 64
MAX_STEPS = 8_192 - _PROMPT_TOKENS
_POLLS_A_S = 10
_POLLER = """
import select, sys
from radixkv.engines.control.client import ControlClient
from radixkv.signing import KeySet
path, keys, every_s = sys.argv[1], KeySet.load(sys.argv[2]), float(sys.argv[3])
client, num_polls = None, 0
print("ready", flush=True)
while True:
    if select.select([sys.stdin], [], [], every_s)[0]:
        line = sys.stdin.readline()
        if client is not None:
            client.close()
        if not line:
            break
        client = ControlClient(path, keys) if line == "poll\\n" else None
        print(num_polls, flush=True)
    if client is not None:
        client.call("stats")
        num_polls += 1
"""


def run(
    *,
    pairs: int = 7,
    steps: int = 1_000,
    polls_per_s: float = _POLLS_A_S,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Measure ``pairs`` pairs of ``steps`` decode steps. Returns a dict that JSON can encode.

    ``progress`` is called with the number of pairs that are done.
    """
    model = demo_model()
    with tempfile.TemporaryDirectory() as folder, _one_thread():
        keys = Path(folder, "engine.keys")
        KeySet.derive([b"the secret of a benchmark"]).write(keys)
        cache = PrefixCache(CacheConfig(1_024, 16, layout_of(model)))
        with ControlServer(cache, Path(folder, "control"), keys) as control:
            engine = HFEngine(model, cache, control=control)
            _steps_s(engine, min(steps, 100))  # one-time costs
            with _poller(control.path, keys, 1 / polls_per_s) as poll, frozen_heap():
                measured = []
                for done in range(pairs):
                    measured.append(_pair(engine, steps, poll, polls_first=done % 2 == 0))
                    progress(done + 1)
    return _result(measured, steps, polls_per_s)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _poller(socket: Path, keys: Path, every_s: float) -> Iterator[Callable[[bool], int]]:
    """Yield a function that starts or stops the polls, and returns how many there were until then."""
    command = [sys.executable, "-c", _POLLER, str(socket), str(keys), str(every_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        _line(process.stdout)

        def poll(is_polling: bool) -> int:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("poll\n" if is_polling else "rest\n")
            process.stdin.flush()
            return int(_line(process.stdout))

        yield poll
        process.stdin.close()


def _line(stream: IO[str]) -> str:
    line = stream.readline()
    if not line:
        raise RuntimeError("the polling process has ended")
    return line


def _pair(engine: HFEngine, steps: int, poll: Callable[[bool], int], *, polls_first: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for is_polling in (polls_first, not polls_first):
        before = poll(is_polling)
        taken = _steps_s(engine, steps)
        found["polled" if is_polling else "silent"] = taken
        num_polls = poll(False) - before
        if is_polling:
            found["polls"] = num_polls
    return found


def _steps_s(engine: HFEngine, steps: int) -> Steps:
    """Return wall and CPU seconds of each step: float64 ``[steps, 2]``."""
    ends: list[tuple[float, float]] = []
    engine.generate(
        engine.namespace("bench"),
        range(3, 3 + _PROMPT_TOKENS),
        steps + 1,
        eos_token_id=-1,
        on_step=lambda step: ends.append((time.perf_counter(), time.process_time())),
    )
    return np.diff(np.array(ends), axis=0)


def _result(measured: list[dict[str, Any]], steps: int, polls_per_s: float) -> dict[str, Any]:
    pairs = []
    for pair in measured:
        row: dict[str, Any] = {"polls": pair["polls"]}
        for clock, place in (("wall", 0), ("cpu", 1)):
            silent, polled = (1e3 * float(np.percentile(pair[arm][:, place], 99)) for arm in ARMS)
            row |= {
                f"silent_{clock}_ms": silent,
                f"polled_{clock}_ms": polled,
                f"{clock}_ratio": polled / silent,
            }
        pairs.append(row)
    return {
        "benchmark": "control",
        **surroundings(),
        "steps": steps,
        "polls_per_s": polls_per_s,
        "wall_ratio": median(row["wall_ratio"] for row in pairs),
        "cpu_ratio": median(row["cpu_ratio"] for row in pairs),
        "pairs": pairs,
    }


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    names = (
        "silent_wall_ms",
        "polled_wall_ms",
        "wall_ratio",
        "silent_cpu_ms",
        "polled_cpu_ms",
        "cpu_ratio",
        "polls",
    )
    rows = [[number(row[name]) for name in names] for row in result["pairs"]]
    ratios = f"{result['wall_ratio']:.3f} times as long, with {result['cpu_ratio']:.3f} times the CPU time"
    told = f"p99 of a step; with polls {ratios} (medians of the pairs)"
    return "\n".join([result["machine"], columns([names, *rows]), told])


# --- the command


@click.command()
@int_option("--pairs", 7, "Pairs of generations.")
@int_option("--steps", 1_000, "Steps of each.", most=MAX_STEPS)
@click.option(
    "--polls-per-s", type=Number(0.1, 1_000), default=10.0, show_default=True, help="Polls of the client."
)
@json_option
def main(as_json: bool, **options: Any) -> None:
    """Compare an engine's decode steps with and without a client that polls its control channel."""
    with progress_bar(options["pairs"], "measuring") as advance:
        result = run(progress=advance, **options)
    print_result(result, table, as_json)


if __name__ == "__main__":
    finish(main, "python -m benchmarks.control")
