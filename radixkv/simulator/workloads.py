"""Workloads for the index benchmark: requests as (tenant, prompt ids, prompt + answer ids), from a seed.

    trace     the requests of a trace file of 512-token hash ids, or generated ones of the same shape
    chat      64 tenants × 32 conversations × 8 turns over one 2,048-token system prompt of equal ids
    thin      64-token prompts that share nothing: a leaf for each
    unique    4,096-token prompts that share nothing

Ids are drawn below 128,000. Every workload is a generator, so only the ids of one request are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import ConfigError
from radixkv.simulator.trace import MOONCAKE_BLOCK_TOKENS, stream

VOCABULARY = 128_000
SEGMENT_TOKENS = MOONCAKE_BLOCK_TOKENS
"""Tokens per hash id of a trace."""

Ids = NDArray[np.int64]


class Request(NamedTuple):
    """A prompt, and the prompt with its answer: int64 ids."""

    tenant: str
    prompt: Ids
    full: Ids


class TraceLine(NamedTuple):
    """A request of a trace, as chained hash ids of SEGMENT_TOKENS tokens each."""

    at_s: float
    hash_ids: Sequence[int]
    num_tokens: int
    num_generated: int


class Workload(NamedTuple):
    """At most ``most`` requests, which can be generated repeatedly."""

    name: str
    requests: Callable[[], Iterator[Request]]
    most: int


def draw(seed: int, *path: int, size: int) -> Ids:
    """Draw ``size`` ids that depend only on the seed and the path."""
    return np.random.Generator(np.random.SFC64([seed, *path])).integers(0, VOCABULARY, size, dtype=np.int64)


def chat(seed: int, tenants: int = 64, conversations: int = 32, turns: int = 8) -> Iterator[Request]:
    """Generate all conversations turn by turn, 120 user and 80 answer tokens each, after a shared system prompt."""
    system = draw(seed, 1, size=2_048)
    for turn in range(1, turns + 1):
        for conversation in range(conversations):
            for tenant in range(tenants):
                body = draw(seed, 2, tenant, conversation, size=turns * 200)
                full = np.concatenate([system, body[: turn * 200]])
                yield Request(f"tenant-{tenant}", full[:-80], full)


def thin(seed: int, requests: int = 50_500) -> Iterator[Request]:
    """Prompts of 63 tokens and an answer of one."""
    for number in range(requests):
        full = draw(seed, 3, number, size=64)
        yield Request("tenant-0", full[:-1], full)


def unique(seed: int, requests: int = 700) -> Iterator[Request]:
    """Prompts of 4,095 tokens and an answer of one."""
    for number in range(requests):
        full = draw(seed, 4, number, size=4_096)
        yield Request("tenant-0", full[:-1], full)


def trace_lines(path: Path, limit: int) -> Iterator[TraceLine]:
    """The first ``limit`` requests of a trace whose hashes are integers, in a format of ``trace``.

    Raises ConfigError for an unreadable line, with its number, and for a file without a request.
    """
    number = 0
    for number, request in enumerate(islice(stream(path, SEGMENT_TOKENS), limit), 1):
        size = min(request.prompt_tokens, len(request.blocks) * SEGMENT_TOKENS)
        hash_ids = [each for each in request.blocks if isinstance(each, int) and each >= 0]
        if not size or len(hash_ids) < len(request.blocks):
            raise ConfigError(
                f"{path} request {number}", hash_ids[:3], "a prompt, of hashes that are integers ≥ 0"
            )
        yield TraceLine(request.time_s, hash_ids[: request.num_prompt_blocks], size, request.output_tokens)
    if not number:
        raise ConfigError("--trace", str(path), "a file with at least one request")


def trace_file(seed: int, path: Path, limit: int) -> Iterator[Request]:
    """The requests of a trace file, with ids drawn for its hashes. Raises like ``trace_lines``."""
    for number, line in enumerate(trace_lines(path, limit)):
        yield _segments(seed, number, line.hash_ids, line.num_tokens, line.num_generated)


def trace_like(seed: int, limit: int) -> Iterator[Request]:
    """Requests of the same shape without a file: conversations that continue, over one shared system prompt.

    Fitted to the first 3,000 requests of a public trace of conversations. A third continue an earlier conversation.
    The lengths of the others are log-normal around 7,000 tokens, and one in a hundred is above 80,000.
    """
    rng = np.random.Generator(np.random.SFC64([seed, 5]))
    conversations: list[list[int]] = []
    next_id = 1
    for number in range(limit):
        if conversations and rng.random() < 0.33:
            hash_ids = conversations.pop(int(len(conversations) * rng.random() ** 0.8))
            added = 1 + int(rng.exponential(6.0))
        else:
            hash_ids, added = [0], 1 + int(rng.lognormal(2.5, 1.15))
        hash_ids = [*hash_ids, *range(next_id, next_id + added)][:256]
        next_id += added
        conversations = [*conversations[-2_000:], hash_ids]
        size = len(hash_ids) * SEGMENT_TOKENS - int(rng.integers(SEGMENT_TOKENS))
        yield _segments(seed, number, hash_ids, size, 1 + int(rng.exponential(350.0)))


def _segments(seed: int, number: int, hash_ids: Sequence[int], size: int, answer: int) -> Request:
    prompt = np.concatenate([draw(seed, 6, hash_id, size=SEGMENT_TOKENS) for hash_id in hash_ids])[:size]
    return Request("tenant-0", prompt, np.concatenate([prompt, draw(seed, 7, number, size=answer)]))


def build(name: str, seed: int, trace: Path | None = None, limit: int | None = None) -> Workload:
    """Return the workload of that name. Raises ConfigError for an unknown name, and for a trace that it can't use."""
    if trace is not None and name != "trace":
        raise ConfigError("--trace", str(trace), "no file without --workload trace")
    if name == "trace":
        most = limit or 3_000
        return Workload(
            name, lambda: trace_file(seed, trace, most) if trace is not None else trace_like(seed, most), most
        )
    if name == "chat":
        most = min(limit or 16_384, 16_384)
        return Workload(name, lambda: islice(chat(seed), most), most)
    if name == "thin":
        return Workload(name, lambda: thin(seed, limit or 50_500), limit or 50_500)
    if name == "unique":
        return Workload(name, lambda: unique(seed, limit or 700), limit or 700)
    raise ConfigError("--workload", name, "trace, chat, thin or unique")
