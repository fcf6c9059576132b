"""Completions side by side against one at a time, over HTTP, with the demo model in a process of its own.

    together   n completions at once over two shared prefixes, against the same ones in sequence
    lookup     p99 of a lookup beside these n completions, against an idle service
    crowd      more completions at once than the memory holds, against the same ones in sequence

Each round measures both arms of a ratio, and which comes first alternates. The prefixes are resident. Results are
medians over rounds. The greedy texts of both arms are compared, and a completion that fails is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, Final

import click
import numpy as np

from radixkv.bench.measure import number, surroundings
from radixkv.bench.service_process import serving
from radixkv.cli.output import finish, int_option, json_option, print_result, progress_bar
from radixkv.service.api_client import Client, ServiceError
from radixkv.tables import columns

BLOCK_SIZE: Final = 16
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
    number of rounds that are done, of ``2 * rounds``.
    """
    counts = {"together": together, "crowd": crowd, "fits": fits, "max_tokens": max_tokens, "rounds": rounds}
    with _service(_ROOMY_BLOCKS) as url, _Load(url, together, max_tokens, prefix_tokens) as roomy:
        found = []
        for number in range(rounds):
            found.append(_round(roomy, number % 2 == 0, with_lookups=True))
            progress(number + 1)
    own = -(-(_OWN_TOKENS + max_tokens) // BLOCK_SIZE) + 1
    small = _NUM_PREFIXES * (roomy.prefix_blocks + 1) + fits * own
    with _service(small) as url, _Load(url, crowd, max_tokens, prefix_tokens) as narrow:
        crowded = []
        for number in range(rounds):
            crowded.append(_round(narrow, number % 2 == 0))
            progress(rounds + number + 1)
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


def _round(load: _Load, sequence_first: bool, *, with_lookups: bool = False) -> dict[str, Any]:
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
    return result


def _p99_ms(seconds: Sequence[float]) -> float:
    return 1e3 * float(np.percentile(seconds, 99)) if seconds else float("nan")


def _service(num_blocks: int) -> AbstractContextManager[str]:
    return serving("--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE))


def _text(name: str, num_tokens: int) -> str:
    """A text of about this many tokens: a sentence has about 12."""
    count = -(-num_tokens // 12)
    return "".join(f"{name}, rule {rule}: answer politely, name the page. " for rule in range(count))


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


# --- the command


@click.command()
@int_option("--together", 8, "Completions at once, with memory for all.", most=1024)
@int_option("--crowd", 32, "Completions at once, with too little memory.", most=1024)
@int_option("--fits", 8, "Completions of the crowd that fit in memory.", most=1024)
@int_option("--max-tokens", 64, "Tokens of a completion.", most=1024)
@int_option("--prefix-tokens", 400, "Tokens of each of the two shared prefixes.", most=1024)
@int_option("--rounds", 3, "Rounds of each ratio.", most=1024)
@json_option
def main(as_json: bool, **options: Any) -> None:
    """Compare requests per second, side by side and one at a time, with memory for all and for a part."""
    with progress_bar(2 * options["rounds"], "measuring") as advance:
        result = run(progress=advance, **options)
    print_result(result, table, as_json)


if __name__ == "__main__":
    finish(main, "python -m benchmarks.serving")
