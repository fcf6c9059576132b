"""Packed sessions of agents: a line of JSON for each session, in a file that may be compressed with gzip.

    {"id": …, "tool_tokens": …, "system_tokens": …, "requests": [[t, agent, tokens_in, tokens_out, api_time, think_time,
     keep, runs, stop], …]}

That is the corpus ``callanjfox/kv-cache-tester`` (Apache-2.0), packed. ``t``: seconds since the session began.
``agent``: "0" is the main agent, others are its subagents. A prompt is a list of ids, one for each 64 tokens: the first
``keep`` ids of the agent's last prompt, then ``runs``, each ``[first id, how many]``. Ids are local to a session.
``stop`` is "tool_use" if the client runs a tool and comes back. ``radixkv workload --sessions`` writes such files.

A file is read once, a bounded number of bytes and of blocks, and each field is checked.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import ConfigError, shown

TOKENS_AN_ID: Final = 64
IDS_A_BLOCK: Final = 8
BLOCK_TOKENS: Final = TOKENS_AN_ID * IDS_A_BLOCK
LEAST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 300.0

MAX_BYTES: Final = 2**30
"""Most bytes of a file, unpacked."""
MAX_LINE_BYTES: Final = 2**26
MAX_IDS: Final = 2**20
"""Most ids of a prompt: 64 million tokens."""
MAX_TOTAL_BLOCKS: Final = 50_000_000
"""Most blocks of all prompts of a file together: 200 MB."""
_MAX_RUNS: Final = 100_000
_MAX_ID: Final = 2**31
_MAX_SECONDS: Final = 1e9
_GZIP: Final = b"\x1f\x8b"

Blocks = NDArray[np.uint32]


class Turn(NamedTuple):
    """A request of a session.

    - ``pause_s``: seconds from the last answer to it, or 0 for the first.
    - ``blocks``: uint32, its whole blocks of 512 tokens; equal numbers are equal blocks after equal blocks.
    - ``tool_pending``: the client runs a tool after it. ``is_main``: the main agent asks it.
    """

    pause_s: float
    blocks: Blocks
    prompt_tokens: int
    output_tokens: int
    tool_pending: bool
    is_main: bool


class Session(NamedTuple):
    """A session. Its blocks are numbered from 0 to ``num_blocks − 1``."""

    id: str
    tenant: str
    turns: list[Turn]
    num_blocks: int


def read_sessions(paths: Sequence[Path], *, longest_pause_s: float = LONGEST_PAUSE_S) -> list[Session]:
    """Read the sessions of these files, without those of fewer than 3 requests. Each of several files is a tenant.

    ``longest_pause_s``: longer pauses are cut. Raises ConfigError for a file that can't be read, with its line and what
    is allowed there, and if no session is left. O(blocks).
    """
    found: list[Session] = []
    left = MAX_TOTAL_BLOCKS
    for path in paths:
        for session in _of_file(
            path, path.name.split(".")[0] if len(paths) > 1 else "default", longest_pause_s
        ):
            left -= sum(len(turn.blocks) for turn in session.turns)
            if left < 0:
                raise ConfigError(
                    "SESSIONS", str(path), f"at most {MAX_TOTAL_BLOCKS:,} blocks in all prompts"
                )
            if len(session.turns) >= 3:
                found.append(session)
    if not found:
        raise ConfigError("SESSIONS", ", ".join(map(str, paths)), "a session of at least 3 requests")
    return found


def _of_file(path: Path, tenant: str, longest_pause_s: float) -> Iterator[Session]:
    try:
        with path.open("rb") as plain:
            is_packed = plain.read(2) == _GZIP
            plain.seek(0)
            file: IO[bytes] = gzip.GzipFile(fileobj=plain) if is_packed else plain  # type: ignore[assignment]
            for number, line in enumerate(_lines(path, file), 1):
                if line.strip():
                    yield _Line(f"{path} line {number}", line, longest_pause_s).session(tenant)
    except (OSError, EOFError) as error:
        raise ConfigError("SESSIONS", str(path), f"a readable file of packed sessions ({error})") from error


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    total = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        total += len(line)
        if len(line) > MAX_LINE_BYTES or total > MAX_BYTES:
            allowed = f"lines of at most {MAX_LINE_BYTES:,} bytes, at most {MAX_BYTES:,} in all, unpacked"
            raise ConfigError("SESSIONS", str(path), allowed)
        yield line


class _Line:
    """A line of a file. Each field is checked when it is read."""

    def __init__(self, place: str, text: bytes, longest_pause_s: float) -> None:
        self._place, self._longest = place, longest_pause_s
        try:
            self._fields: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(place, shown(text[:80]), f"JSON ({error})") from error

    def session(self, tenant: str) -> Session:
        """Return the session."""
        fields = self._fields
        if not isinstance(fields, dict) or not isinstance(fields.get("requests"), list):
            raise self._bad("requests", None, "an object with a list of requests")
        name = fields.get("id")
        if not isinstance(name, str) or not 0 < len(name) <= 1_024:
            raise self._bad("id", name, "a string of 1 to 1,024 characters")
        chain, last = _Chain(), dict[str, list[int]]()
        rows = [self._row(at, row, last, chain) for at, row in enumerate(fields["requests"])]
        rows.sort(key=lambda row: row[0])
        return Session(name, tenant, list(self._turns(rows)), len(chain.numbers))

    def _row(
        self, at: int, row: object, last: dict[str, list[int]], chain: _Chain
    ) -> tuple[float, float, str, int, int, Blocks, bool]:
        if not isinstance(row, list) or len(row) != 9:
            raise self._bad(f"requests[{at}]", row, "a list of 9 fields")
        time_s, agent, num_in, num_out, api_s, _, keep, runs, stop = row
        if not isinstance(agent, str) or not isinstance(stop, str):
            raise self._bad(f"requests[{at}]", [agent, stop], "agent and stop as strings")
        before = last.get(agent, [])
        kept = self._count(at, "keep", keep, len(before))
        ids = before[:kept] + self._ids(at, runs, MAX_IDS - kept)
        last[agent] = ids
        size = max(self._count(at, "tokens_in", num_in, 2**40), len(ids) // IDS_A_BLOCK * BLOCK_TOKENS, 1)
        answer = max(self._count(at, "tokens_out", num_out, 2**40), 1)
        began, took = self._seconds(at, "t", time_s), self._seconds(at, "api_time", api_s)
        return began, took, agent, size, answer, chain.blocks(agent, ids, kept), stop == "tool_use"

    def _turns(self, rows: list[tuple[float, float, str, int, int, Blocks, bool]]) -> Iterator[Turn]:
        free_at: float | None = None
        for began, took, agent, size, answer, blocks, is_tool in rows:
            pause_s = 0.0 if free_at is None else min(max(began - free_at, LEAST_PAUSE_S), self._longest)
            free_at = began + took
            yield Turn(pause_s, blocks, size, answer, is_tool, agent == "0")

    def _ids(self, at: int, runs: object, most: int) -> list[int]:
        if not isinstance(runs, list) or len(runs) > _MAX_RUNS:
            raise self._bad(f"requests[{at}].runs", runs, f"a list of at most {_MAX_RUNS:,} runs")
        found: list[int] = []
        for run in runs:
            if not isinstance(run, list) or len(run) != 2:
                raise self._bad(f"requests[{at}].runs", run, "runs of [first id, how many]")
            first = self._count(at, "runs", run[0], _MAX_ID)
            size = self._count(at, "runs", run[1], most - len(found))
            found += range(first, first + size)
        return found

    def _count(self, at: int, name: str, value: object, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise self._bad(f"requests[{at}].{name}", value, f"an integer from 0 to {most:,}")
        return value

    def _seconds(self, at: int, name: str, value: object) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= _MAX_SECONDS:  # type: ignore[operator]
            raise self._bad(f"requests[{at}].{name}", value, f"seconds from 0 to {_MAX_SECONDS:g}")
        return float(value)  # type: ignore[arg-type]

    def _bad(self, name: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self._place}: {name}", shown(value), allowed)


class _Chain:
    """Numbers the blocks of a session: a block's number depends on all blocks before it."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self._last: dict[str, list[int]] = {}

    def blocks(self, agent: str, ids: list[int], kept: int) -> Blocks:
        """Return the numbers of a prompt's whole blocks. ``kept`` ids are as in the agent's last prompt."""
        path = self._last.get(agent, [])[: kept // IDS_A_BLOCK]
        parent = path[-1] if path else -1
        rest = iter(ids[len(path) * IDS_A_BLOCK :])
        while len(block := tuple(islice(rest, IDS_A_BLOCK))) == IDS_A_BLOCK:
            parent = self.numbers.setdefault((parent, block), len(self.numbers))
            path.append(parent)
        self._last[agent] = path
        return np.array(path, np.uint32)
