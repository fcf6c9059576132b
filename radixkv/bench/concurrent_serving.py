"""Completions side by side against one at a time, over HTTP, with the demo model in a process of its own.

    together   n completions at once over two shared prefixes, against the same ones in sequence
    lookup     p99 of a lookup beside these n completions, against an idle service
    crowd      more completions at once than the memory holds, against the same ones in sequence

Each round measures both arms of a ratio, and which comes first alternates. The prefixes are resident. Results are
medians over rounds. The greedy texts of both arms are compared, and a completion that fails is counted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from radixkv.bench.measure import number, surroundings
from radixkv.errors import ArgumentError
from radixkv.service.api_client import Client, ServiceError
from radixkv.tables import columns

BLOCK_SIZE: Final = 16
_START_S = 300.0
_LOOKUPS_A_S = 100
_ROOMY_BLOCKS = 4_096
_NUM_PREFIXES = 2
_OWN_TOKENS: Final = 32
"""Most tokens of a question."""
_KEY = "demo-acme"


def run(
    *,
    together: int = 8,
    crowd: int = 32,
    fits: int = 8,
    max_tokens: int = 64,
    prefix_tokens: int = 400,
    rounds: int = 3,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Measure ``rounds`` rounds of each ratio. Returns a dict that JSON can encode.

    ``fits``: completions of the crowd that the memory holds, beside the prefixes. ``progress`` is called with the
    number of rounds that are done, of ``num_rounds``. Raises ArgumentError for counts outside 1 to 1,024.
    """
    counts = {"together": together, "crowd": crowd, "fits": fits, "max_tokens": max_tokens, "rounds": rounds}
    for name, value in (counts | {"prefix_tokens": prefix_tokens}).items():
        if not 1 <= value <= 1_024:
            raise ArgumentError(name, value, "an integer from 1 to 1,024")
    steps = _Steps(progress)
    with _service(_ROOMY_BLOCKS) as url, _Load(url, together, max_tokens, prefix_tokens) as roomy:
        found = [_round(roomy, number % 2 == 0, steps, with_lookups=True) for number in range(rounds)]
    own = -(-(_OWN_TOKENS + max_tokens) // BLOCK_SIZE) + 1
    small = _NUM_PREFIXES * (roomy.prefix_blocks + 1) + fits * own
    with _service(small) as url, _Load(url, crowd, max_tokens, prefix_tokens) as narrow:
        crowded = [_round(narrow, number % 2 == 0, steps) for number in range(rounds)]
    return {
        "benchmark": "serving",
        **surroundings(),
        **counts,
        "prefix_tokens": roomy.prefix_blocks * BLOCK_SIZE,
        "crowd_blocks": small,
        "together_ratio": median(each["ratio"] for each in found),
        "lookup_ratio": median(each["lookup_ratio"] for each in found),
        "crowd_ratio": median(each["ratio"] for each in crowded),
        "same_text": all(each["same_text"] for each in found + crowded),
        "failed": sum(each["failed"] for each in found + crowded),
        "together_rounds": found,
        "crowd_rounds": crowded,
    }


def num_rounds(rounds: int) -> int:
    """Return how often ``progress`` of ``run`` is called."""
    return 2 * rounds


class _Steps:
    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress, self._done = progress, 0

    def next(self) -> None:
        self._done += 1
        self._progress(self._done)


class _Load:
    """The completions of a service, whose prefixes it warms first."""

    def __init__(self, url: str, count: int, max_tokens: int, prefix_tokens: int) -> None:
        self.url = url
        self._prefixes = [_text(f"Set {place}", prefix_tokens) for place in range(_NUM_PREFIXES)]
        with Client(url, _KEY) as client:
            warmed = [client.call("POST", "/v1/warm", {"prompt": each}) for each in self._prefixes]
        self.prefix_blocks = max(each["blocks"] for each in warmed)
        self._bodies = [
            {
                "prompt": f"{self._prefixes[place % _NUM_PREFIXES]}Question {place}: which page is it?",
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            for place in range(count)
        ]
        self._clients = [Client(url, _KEY) for _ in range(count)]

    def __enter__(self) -> _Load:
        self.complete(at_once=True)  # one-time costs
        return self

    def __exit__(self, *error: object) -> None:
        for client in self._clients:
            client.__exit__(None, None, None)

    def complete(self, at_once: bool) -> tuple[float, list[str | None]]:
        """Return the seconds of all completions, and their texts; None for one that failed."""
        places = range(len(self._bodies))
        began = time.perf_counter()
        if at_once:
            with ThreadPoolExecutor(len(self._bodies)) as pool:
                texts = list(pool.map(self._text, places))
        else:
            texts = [self._text(place) for place in places]
        return time.perf_counter() - began, texts

    def _text(self, place: int) -> str | None:
        try:
            answer = self._clients[place].call("POST", "/v1/completions", self._bodies[place])
        except ServiceError:
            return None
        return str(answer["choices"][0]["text"])

    @contextmanager
    def lookups(self, seconds: list[float]) -> Iterator[None]:
        """Look a prefix up again and again, and add the seconds of each call."""
        over = threading.Event()

        def look() -> None:
            with Client(self.url, _KEY) as client:
                client.call("POST", "/v1/lookup", {"prompt": self._prefixes[0]})
                while not over.wait(1 / _LOOKUPS_A_S):
                    began = time.perf_counter()
                    client.call("POST", "/v1/lookup", {"prompt": self._prefixes[0]})
                    seconds.append(time.perf_counter() - began)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _round(load: _Load, sequence_first: bool, steps: _Steps, *, with_lookups: bool = False) -> dict[str, Any]:
    found = {at_once: load.complete(at_once) for at_once in (not sequence_first, sequence_first)}
    (together_s, texts), (sequence_s, expected) = found[True], found[False]
    result: dict[str, Any] = {
        "together_s": together_s,
        "sequence_s": sequence_s,
        "ratio": sequence_s / together_s,
        "same_text": texts == expected,
        "failed": texts.count(None) + expected.count(None),
    }
    if with_lookups:
        idle, beside = list[float](), list[float]()
        with load.lookups(beside):
            load.complete(at_once=True)
        with load.lookups(idle):
            time.sleep(together_s)
        result |= {"idle_p99_ms": _p99_ms(idle), "beside_p99_ms": _p99_ms(beside)}
        result["lookup_ratio"] = result["beside_p99_ms"] / result["idle_p99_ms"]
    steps.next()
    return result


def _p99_ms(seconds: Sequence[float]) -> float:
    return 1e3 * float(np.percentile(seconds, 99)) if seconds else float("nan")


def _text(name: str, num_tokens: int) -> str:
    """A text of about this many tokens: a sentence has about 12."""
    count = -(-num_tokens // 12)
    return "".join(f"{name}, rule {rule}: answer politely, name the page. " for rule in range(count))


@contextmanager
def _service(num_blocks: int) -> Iterator[str]:
    """The URL of a service in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "radixkv", "serve", "--port", "0"]
        command += ["--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE)]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield _url(process, log)
        finally:
            process.terminate()
            process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + _START_S
    while "Ctrl-C" not in (said := log.read_text()):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the service did not start: {said}")
        time.sleep(0.05)
    return said.split(" at ", 1)[1].split("\n", 1)[0]


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    rows = [["", "in sequence s", "at once s", "times faster", "lookup p99 ms, idle", "beside"]]
    for name, num in (("together", result["together"]), ("crowd", result["crowd"])):
        for each in result[f"{name}_rounds"]:
            lookups = (each.get("idle_p99_ms"), each.get("beside_p99_ms"))
            figures = (each["sequence_s"], each["together_s"], each["ratio"], *lookups)
            rows.append([f"{num} completions", *map(number, figures)])
    told = (
        f"{result['together']} at once: {result['together_ratio']:.2f} times as many a second, "
        f"a lookup's p99 {result['lookup_ratio']:.2f} times idle; {result['crowd']} with memory for "
        f"{result['fits']}: {result['crowd_ratio']:.2f} times; {result['failed']} failed, "
        f"texts {'equal' if result['same_text'] else 'DIFFER'} (medians of the rounds)"
    )
    return "\n".join([result["machine"], columns(rows), told])
