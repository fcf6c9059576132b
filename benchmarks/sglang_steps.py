"""CPU of the scheduler a step in two real SGLangs, with radixkv's cache and with SGLang's own.

    python -m benchmarks.sglang_steps [--pairs 7] [--page 16]

Run it with the Python of an environment that has SGLang. RADIXKV_SGLANG_SETTINGS: SGLang's settings, a JSON object; by
default those for a CPU.

Both SGLangs run at the same time, each in a process of its own, and serve the same chats in turns; which is first
alternates. Each turn begins with an empty cache, and the first of each is to warm up. Prints a line of JSON:

    us       CPU of the scheduler's thread, µs a step that computes: taking requests in, choosing the batch with its
             matches, locks, allocations and evictions, and the batch's results with their inserts; not the model
    share    radixkv's share of SGLang's own, in each pair
    cached   tokens found in the last pair

The load is 12 chats of 4 turns behind two system prompts, in a pool that holds little more than half of
their tokens.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.small_llama import CONFIG

KINDS: Final = ("stock", "radixkv")
NUM_CHATS: Final = 12
NUM_TURNS: Final = 4
NUM_NEW: Final = 24
ON_A_CPU: Final[dict[str, Any]] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
}
ROOT: Final = Path(__file__).parents[1]
_FIGURES: Final = "RADIXKV_BENCH_FIGURES"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"


# --- in SGLang's scheduler


class StepClock:
    """Nanoseconds of the scheduler's thread, outside of the model, in steps that compute."""

    def __init__(self, figures: Path) -> None:
        self._figures = figures
        self.spent = self.num_steps = self._pending = 0

    def ingest(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Time the begin of a step. It counts if the step computes."""
        begin = time.thread_time_ns()
        found = original(*given, **named)
        self._pending = time.thread_time_ns() - begin
        return found

    def choose(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Time the choice of a batch. It counts if there is one."""
        begin = time.thread_time_ns()
        plan = original(*given, **named)
        if plan.batch_to_run:
            self.spent += self._pending + time.thread_time_ns() - begin
            self.num_steps += 1
        return plan

    def end(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Time what is done with a batch's results."""
        begin = time.thread_time_ns()
        found = original(*given, **named)
        self.spent += time.thread_time_ns() - begin
        return found

    def flush(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Write what was counted, and begin anew."""
        found = original(*given, **named)
        if found:
            self._figures.write_text(json.dumps({"spent": self.spent, "steps": self.num_steps}))
            self.spent = self.num_steps = 0
        return found


def register() -> None:
    """Have SGLang's scheduler time its steps. SGLang calls this in each of its processes."""
    if _FIGURES not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    clock = StepClock(Path(os.environ[_FIGURES]))
    for name, hook in {
        "ingest_requests": clock.ingest,
        "get_next_batch_to_run": clock.choose,
        "process_batch_result": clock.end,
        "flush_cache": clock.flush,
    }.items():
        HookRegistry.register(f"{_SCHEDULER}.{name}", hook, HookType.AROUND)


# --- one SGLang


def serve(kind: str, page: int, folder: Path) -> None:
    """Serve a turn for each seed on stdin, and print its figures."""
    import sglang
    from sglang.srt.managers.io_struct import GenerateReqInput

    given: dict[str, Any] = json.loads(os.environ.get("RADIXKV_SGLANG_SETTINGS", "null")) or ON_A_CPU
    chosen = {} if kind == "stock" else {"radix_cache_backend": "radixkv"}
    engine = sglang.Engine(
        model_path=str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        page_size=page,
        max_total_tokens=2_304,
        max_running_requests=8,
        context_length=2_048,
        chunked_prefill_size=512,
        grammar_backend="none",
        log_level="error",
        sleep_on_idle=True,  # the other one has the turn
        **chosen,
        **given,
    )
    sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}

    def generate(prompts: list[list[int]]) -> list[Any]:
        request = GenerateReqInput(input_ids=prompts, sampling_params=sampling)
        found: list[Any] = engine.loop.run_until_complete(
            anext(engine.tokenizer_manager.generate_request(request, None))
        )
        return found

    try:
        print("ready", flush=True)
        for line in sys.stdin:
            cached = _turn(generate, random.Random(int(line)))
            while not engine.flush_cache().success:
                time.sleep(0.1)
            print(json.dumps({"cached": cached, **json.loads((folder / kind).read_text())}), flush=True)
    finally:
        engine.shutdown()


def _turn(generate: Callable[[list[list[int]]], list[Any]], dice: random.Random) -> int:
    """Serve all chats. Returns how many tokens were cached."""

    def ids(size: int) -> list[int]:
        return [dice.randrange(3, 32_000) for _ in range(size)]

    systems, cached = [ids(640) for _ in range(2)], 0
    chats = [[*systems[at % 2], *ids(40)] for at in range(NUM_CHATS)]
    for _ in range(NUM_TURNS):
        for at, answer in enumerate(generate([list(chat) for chat in chats])):
            cached += answer["meta_info"]["cached_tokens"]
            chats[at] += [*answer["output_ids"], *ids(30)]
    return cached


# --- both


class Server:
    """An SGLang in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._line("ready")

    def turn(self, seed: int) -> dict[str, float]:
        """Serve a turn. Returns µs a step, and the counts."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        found = json.loads(self._line("{"))
        return {**found, "us": found["spent"] / found["steps"] / 1_000}

    def _line(self, begin: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begin):
                return line
        raise SystemExit("SGLang has ended")


@contextmanager
def _server(kind: str, page: int, folder: Path) -> Iterator[Server]:
    path = os.pathsep.join([str(folder / "plugin"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "benchmarks.sglang_steps",
            "--serve",
            kind,
            "--page",
            str(page),
            str(folder),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "RADIXKV_POLICY": "lru",
            "SGLANG_PLUGINS": "radixkv_steps" if kind == "stock" else "radixkv_steps,radixkv",
            "PYTHONPATH": path,
            _FIGURES: str(folder / kind),
        },
    ) as process:
        try:
            yield Server(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def _write(folder: Path) -> None:
    """Put a model's configuration there, and the entry points of radixkv and of this benchmark."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    named = {each.name for each in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    points = {"radixkv_steps": "benchmarks.sglang_steps:register"}
    if "radixkv" not in named:
        points["radixkv"] = "radixkv.engines.sglang.plugin:register"
    place = folder / "plugin" / "radixkv_steps-0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: radixkv-steps\nVersion: 0\n")
    lines = "".join(f"{name} = {each}\n" for name, each in points.items())
    (place / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{lines}")


def measure(pairs: int, page: int) -> dict[str, Any]:
    """Serve the load with both caches, turn by turn. Returns medians over the pairs."""
    found: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        _write(folder)
        servers = {kind: stack.enter_context(_server(kind, page, folder)) for kind in KINDS}
        for seed in range(pairs + 1):
            order = KINDS if seed % 2 else KINDS[::-1]
            found.append({kind: servers[kind].turn(seed) for kind in order})
    del found[0]  # to warm up
    shares = [each["radixkv"]["us"] / each["stock"]["us"] for each in found]
    return {
        "pairs": pairs,
        "page": page,
        "us": {kind: round(statistics.median(each[kind]["us"] for each in found), 1) for kind in KINDS},
        "share": round(statistics.median(shares), 3),
        "share_range": [round(min(shares), 3), round(max(shares), 3)],
        "steps": {kind: found[-1][kind]["steps"] for kind in KINDS},
        "cached": {kind: found[-1][kind]["cached"] for kind in KINDS},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is None:
        print(json.dumps(measure(given.pairs, given.page)))
    else:
        serve(given.serve, given.page, given.folder)


if __name__ == "__main__":
    main()
