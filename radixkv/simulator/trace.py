"""Traces of requests: content, time, tenant. Read from three formats of JSON lines, recognised by their fields.

**Mooncake's** (FAST'25): ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens), ``hash_ids``. There is one
chained id for each ``block_tokens`` = 512 tokens of the prompt, the last one partial.

**Bailian's** (ATC'25): ``chat_id``, ``timestamp`` (s), ``input_length``, ``output_length``, ``hash_ids`` (an id for
each ``block_tokens`` = 16 tokens of the prompt). ``parent_chat_id`` (-1: none), ``type`` and ``turn`` become labels.
The label ``session`` is the first chat of a conversation.

**Plain**, one object a line, written by ``radixkv serve --record`` and ``radixkv workload``:

    time            seconds from any zero point; required
    hashes          strings or integers that identify content, one for each whole block of prompt, then answer; or
    token_ids       instead of them, the prompt's token ids, with ``output_ids`` for the answer's
    tokens          prompt tokens; required with ``hashes``
    output_tokens   answer tokens, 0 by default
    block_tokens    tokens a block; required with ``hashes``, and the same on every line; ignored with ``token_ids``
    duration_s      seconds from the request's start to its end, while it holds its blocks; 0 by default
    tenant          a name; by default the file's, if there are several files, otherwise "default"
    labels          an object of facts that the service knew: session, turn, type, tool_pending, session_over, priority
                    (0 to 100), priority_duration_s (seconds that it lasts) …; strings, numbers and booleans, null
                    for unknown

Mooncake's and Bailian's lines may also have ``tenant``, ``duration_s`` and ``labels``. A null field counts as
missing. Several files make one trace, merged by time.

In memory a trace is a set of columns. A block's id identifies its *path*: the block, all blocks before it, and the
tenant. So equal ids mean equal prefixes, even if the file's hashes were chained differently. Partial blocks at the
end of a prompt are dropped, because a cache never keeps them. ``keep_tails`` keeps them as separate blocks, as
published studies of Mooncake's traces do.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.config import TENANT_ID_ALLOWED, is_tenant_id
from radixkv.errors import ConfigError, TokenError
from radixkv.index.tokens import TOKEN_BYTES, encode
from radixkv_policies import RequestHints

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per hash id of Mooncake."""

BAILIAN_BLOCK_TOKENS = 16
"""Tokens per hash id of Bailian."""

MAX_BLOCKS = 2**32 - 1
"""The maximum of different blocks in a trace. Ids are uint32, and the largest value is reserved."""

MAX_NUMBER = 1e15
"""The maximum of seconds and milliseconds. Up to here floats still distinguish milliseconds."""

Labels = Mapping[str, Any]


class Request(NamedTuple):
    """One line of a trace. ``blocks``: a hashable value each; the first ``num_prompt_blocks`` are the prompt's."""

    time_s: float
    tenant: str
    blocks: Sequence[int | str | bytes]
    num_prompt_blocks: int
    prompt_tokens: int
    output_tokens: int = 0
    duration_s: float = 0.0
    labels: Labels | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """n requests in the order of their times, as columns.

    - blocks: uint32, the paths one after the other. Request i's path is ``blocks[starts[i]:starts[i + 1]]``, and its
      first ``num_prompt_blocks[i]`` blocks are the prompt's.
    - times: float64 seconds since the first request. durations: float64 seconds.
    - prompt_tokens, output_tokens: int64.
    - tenant: int32, an index of ``tenants``.
    """

    block_tokens: int
    tenants: tuple[str, ...]
    blocks: NDArray[np.uint32]
    starts: NDArray[np.int64]
    num_prompt_blocks: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    times: NDArray[np.float64]
    durations: NDArray[np.float64]
    tenant: NDArray[np.int32]
    labels: tuple[Labels | None, ...]

    def __len__(self) -> int:
        return len(self.times)

    @property
    def num_different_blocks(self) -> int:
        """The number of blocks in an unlimited cache at the end."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.times[-1]) if len(self) else 0.0

    def save(self, file: Path) -> None:
        """Write the trace to a file for ``load``: a NumPy archive of the columns, with the rest as JSON. O(size)."""
        columns = {each.name: getattr(self, each.name) for each in fields(self)}
        rest = {name: columns.pop(name) for name in ("block_tokens", "tenants", "labels")}
        np.savez(file, rest=np.frombuffer(json.dumps(rest).encode(), np.uint8), **columns)

    @classmethod
    def load(cls, file: Path) -> Trace:
        """Read a file of ``save``. O(size)."""
        with np.load(file, allow_pickle=False) as archive:
            columns = dict(archive)
        rest = json.loads(columns.pop("rest").tobytes())
        return cls(rest["block_tokens"], tuple(rest["tenants"]), labels=tuple(rest["labels"]), **columns)


class Outcome(NamedTuple):
    """The result of a run. ``hit_blocks``: int64 ``[requests]``. ``refused``: number of requests that didn't fit."""

    hit_blocks: NDArray[np.int64]
    refused: int
    evicted_blocks: int
    declined_blocks: int = 0


def events(trace: Trace) -> Iterator[tuple[int, bool]]:
    """Yield (request, whether it ends) in the order of time. On ties, ends come before starts."""
    running: list[tuple[float, int]] = []
    for number, (time_s, duration_s) in enumerate(
        zip(trace.times.tolist(), trace.durations.tolist(), strict=True)
    ):
        while running and running[0][0] <= time_s:
            yield heappop(running)[1], True
        yield number, False
        if duration_s:
            heappush(running, (time_s + duration_s, number))
        else:
            yield number, True
    while running:
        yield heappop(running)[1], True


def hints_of(labels: Labels | None) -> RequestHints | None:
    """The hints that a service would have given its cache. Raises ValueError for invalid labels."""
    if not labels:
        return None
    given: Any = labels.get("priority"), labels.get("priority_duration_s")
    return RequestHints(labels, *given)


def read(
    paths: Sequence[Path],
    *,
    block_tokens: int = 16,
    keep_tails: bool = False,
    tenants: Sequence[str] | None = None,
) -> Trace:
    """Read the trace of these files.

    block_tokens: the block size for lines of ``token_ids``. tenants: all others are left out. O(blocks).

    Raises ConfigError for an unreadable line (with file, line and field), for files with different block sizes, for
    an unknown tenant, and if no request is left.
    """
    if not paths:
        raise ConfigError("TRACE", None, "at least one file")
    reader = _Reader(block_tokens, keep_tails)
    requests: list[Request] = []
    for path in paths:
        requests += reader.read(path, path.stem if len(paths) > 1 else "default")
    if tenants is not None:
        requests = _only(requests, tenants)
    if not requests:
        raise ConfigError("TRACE", ", ".join(map(str, paths)), "files with at least one request")
    return build(requests, reader.block_tokens or block_tokens)


def block_tokens_of(paths: Sequence[Path], block_tokens: int = 16) -> int:
    """Return the block size of these files, from the first request. Raises ConfigError as ``read``."""
    reader = _Reader(block_tokens, keep_tails=False)
    for path in paths:
        if next(reader.read(path, "default"), None) is not None:
            break
    return reader.block_tokens or block_tokens


def stream(path: Path, block_tokens: int) -> Iterator[Request]:
    """Yield the requests of one file with blocks of that size, in the file's order, including partial last blocks.

    Raises ConfigError at an unreadable line.
    """
    reader = _Reader(block_tokens, keep_tails=True)
    reader.block_tokens = block_tokens
    return reader.read(path, "default")


def _only(requests: list[Request], tenants: Sequence[str]) -> list[Request]:
    known = sorted({request.tenant for request in requests})
    for tenant in tenants:
        if tenant not in known:
            raise ConfigError("--tenants", tenant, f"tenants of the trace: {', '.join(known)}")
    return [request for request in requests if request.tenant in tenants]


def build(requests: Iterable[Request], block_tokens: int) -> Trace:
    """Make the columns of some requests, in the order of their times."""
    ordered = sorted(requests, key=lambda request: request.time_s)
    names = tuple(dict.fromkeys(request.tenant for request in ordered))
    index = {name: number for number, name in enumerate(names)}
    ids: dict[tuple[int, int | str | bytes], int] = {}
    blocks: list[int] = []
    starts = [0]
    for request in ordered:
        parent = -1 - index[request.tenant]
        for block in request.blocks:
            parent = ids.setdefault((parent, block), len(ids))
            blocks.append(parent)
        starts.append(len(blocks))
    if len(ids) > MAX_BLOCKS:
        raise ConfigError("TRACE", f"{len(ids)} different blocks", f"at most {MAX_BLOCKS}")
    first = ordered[0].time_s if ordered else 0.0
    return Trace(
        block_tokens=block_tokens,
        tenants=names,
        blocks=np.array(blocks, np.uint32),
        starts=np.array(starts, np.int64),
        num_prompt_blocks=np.array([request.num_prompt_blocks for request in ordered], np.int64),
        prompt_tokens=np.array([request.prompt_tokens for request in ordered], np.int64),
        output_tokens=np.array([request.output_tokens for request in ordered], np.int64),
        times=np.array([request.time_s - first for request in ordered], np.float64),
        durations=np.array([request.duration_s for request in ordered], np.float64),
        tenant=np.array([index[request.tenant] for request in ordered], np.int32),
        labels=tuple(request.labels for request in ordered),
    )


class _Line:
    """The fields of a line. Each is checked when it is read."""

    def __init__(self, place: str, fields: dict[str, Any]) -> None:
        self._place, self._fields = place, fields

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def bad(self, name: str, allowed: str) -> ConfigError:
        value = self._fields.get(name)
        return ConfigError(
            f"{self._place}: {name}", reprlib.repr(value) if isinstance(value, list) else value, allowed
        )

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; ≥ 0 if there is a default."""
        value = self._fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MAX_NUMBER:
            raise self.bad(name, f"a number within ±{MAX_NUMBER:g}")
        if default is not None and value < 0:
            raise self.bad(name, "a number ≥ 0")
        return float(value)

    def count(self, name: str, default: int | None = None, low: int = 0) -> int:
        value = self._fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**40:
            raise self.bad(name, f"an integer ≥ {low}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._fields.get(name, default)
        if not isinstance(value, str) or not value:
            raise self.bad(name, "a string of at least one character")
        return value

    def tenant(self, default: str) -> str:
        value = self.text("tenant", default)
        if not is_tenant_id(value):
            raise self.bad("tenant", TENANT_ID_ALLOWED)
        return value

    def labels(self, others: Labels) -> Labels | None:
        """The line's labels, with ``others`` for missing ones."""
        value = self._fields.get("labels")
        if value is not None and not isinstance(value, dict):
            raise self.bad("labels", "an object")
        known = {**others, **{name: label for name, label in (value or {}).items() if label is not None}}
        try:
            hints_of(known)
        except ValueError as error:
            raise self.bad("labels", str(error)) from error
        return known or None

    def hashes(self, name: str, at_least: int) -> list[int | str]:
        value = self._fields.get(name)
        if not isinstance(value, list) or not all(type(each) in (int, str) for each in value):
            raise self.bad(name, "a list of integers or strings")
        if len(value) < at_least:
            raise self.bad(name, f"a hash for each of at least {at_least} blocks; there are {len(value)}")
        return value

    def key(self, name: str) -> bytes:
        try:
            return encode(self._fields.get(name, []))
        except TokenError as error:
            raise self.bad(name, str(error)) from error


class _Reader:
    """Reads files into requests. All files must have the same block size."""

    def __init__(self, block_tokens: int, keep_tails: bool) -> None:
        self.block_tokens: int | None = None
        self._cut_tokens, self._keep_tails = block_tokens, keep_tails
        self._sessions: dict[int, int] = {}  # for Bailian's files: the first chat of each chat's conversation

    def read(self, path: Path, tenant: str) -> Iterator[Request]:
        self._sessions = {}
        try:
            with path.open(encoding="utf-8-sig") as lines:
                for number, text in enumerate(lines, 1):
                    if text.strip():
                        yield self._request(_parse(f"{path} line {number}", text), tenant)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("TRACE", str(path), f"a readable file of JSON lines ({error})") from error

    def _request(self, line: _Line, tenant: str) -> Request:
        parse: Callable[[_Line], tuple[float, Sequence[int | str | bytes], int, int]]
        labels: Labels = {}
        if "hash_ids" in line and "chat_id" in line:
            parse, labels = self._bailian, self._labels_of_chat(line)
        elif "hash_ids" in line:
            parse = self._mooncake
        elif "hashes" in line:
            parse = self._hashed
        elif "token_ids" in line:
            parse = self._tokens
        else:
            raise line.bad("hashes", "hash_ids (Mooncake, Bailian), hashes or token_ids")
        time_s, blocks, prompt, output = parse(line)
        assert self.block_tokens is not None
        num_prompt_blocks = self._num_blocks(prompt)
        return Request(
            time_s,
            line.tenant(tenant),
            blocks,
            min(num_prompt_blocks, len(blocks)),
            prompt,
            output,
            line.number("duration_s", 0.0),
            line.labels(labels),
        )

    def _num_blocks(self, tokens: int) -> int:
        """The number of blocks kept of ``tokens`` tokens."""
        assert self.block_tokens is not None
        return -(-tokens // self.block_tokens) if self._keep_tails else tokens // self.block_tokens

    def _mooncake(self, line: _Line) -> tuple[float, Sequence[int | str | bytes], int, int]:
        return line.number("timestamp") / 1e3, *self._hash_ids(line, MOONCAKE_BLOCK_TOKENS)

    def _bailian(self, line: _Line) -> tuple[float, Sequence[int | str | bytes], int, int]:
        return line.number("timestamp"), *self._hash_ids(line, BAILIAN_BLOCK_TOKENS)

    def _labels_of_chat(self, line: _Line) -> Labels:
        chat, parent = line.count("chat_id"), line.count("parent_chat_id", -1, low=-1)
        session = chat if parent < 0 else self._sessions.get(parent, parent)
        self._sessions[chat] = session
        labels: dict[str, str | int] = {"session": session}
        if "type" in line:
            labels["type"] = line.text("type", "")
        if "turn" in line:
            labels["turn"] = line.count("turn")
        return labels

    def _hash_ids(self, line: _Line, block_tokens: int) -> tuple[Sequence[int | str | bytes], int, int]:
        self._agree(line, "hash_ids", block_tokens)
        prompt = line.count("input_length")
        kept = self._num_blocks(prompt)
        hashes, output = line.hashes("hash_ids", kept), line.count("output_length", 0)
        most = (prompt + output) // block_tokens + 2
        if len(hashes) > most:  # smaller blocks than expected: the first few would count as the whole prompt
            allowed = f"an id for each {block_tokens} tokens, at most {most} here; there are {len(hashes)}"
            raise line.bad("hash_ids", allowed)
        return hashes[:kept], prompt, output

    def _hashed(self, line: _Line) -> tuple[float, Sequence[int | str | bytes], int, int]:
        self._agree(line, "block_tokens", line.count("block_tokens", low=1))
        prompt, output = line.count("tokens"), line.count("output_tokens", 0)
        assert self.block_tokens is not None
        kept = (prompt + output) // self.block_tokens
        return line.number("time"), line.hashes("hashes", prompt // self.block_tokens)[:kept], prompt, output

    def _tokens(self, line: _Line) -> tuple[float, Sequence[int | str | bytes], int, int]:
        self._agree(line, "token_ids", self._cut_tokens)
        prompt, output = line.key("token_ids"), line.key("output_ids")
        key, size = prompt + output, self._cut_tokens * TOKEN_BYTES
        blocks = [key[at : at + size] for at in range(0, len(key) - size + 1, size)]
        return line.number("time"), blocks, len(prompt) // TOKEN_BYTES, len(output) // TOKEN_BYTES

    def _agree(self, line: _Line, name: str, block_tokens: int) -> None:
        if self.block_tokens is None:
            self.block_tokens = block_tokens
        if block_tokens != self.block_tokens:
            raise line.bad(
                name, f"blocks of {self.block_tokens} tokens, as on other lines; these have {block_tokens}"
            )


def _parse(place: str, text: str) -> _Line:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(place, text.strip()[:80], f"JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ConfigError(place, text.strip()[:80], "a JSON object")
    return _Line(place, {name: value for name, value in fields.items() if value is not None})
