"""Hard workloads for an index: very wide, deep or split trees, and prompts of any length.

A ``Shape`` is a workload, and an unmeasured one that runs before it:

    diverging    one long path, and a request that diverges after each of its blocks, the nearest to the root first
    wide         one node with as many children
    deep         a path of as many nodes, which every request walks to its end
    equal        the same prompt again and again
    tiny, large  chats over blocks of one token, and of 256

``measure`` runs one, audits the cache, and evicts everything. ``long_prompt`` runs one prompt through all operations,
in steps of ``CHUNK_TOKENS``, as engines do. The cost of a token must not depend on the length of the prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from radixkv import audit
from radixkv.bench.drive import OPERATIONS, by_power_of_two, drive, worst_spread
from radixkv.bench.measure import cpu_ns, frozen_heap, summary
from radixkv.config import CacheConfig, Namespace
from radixkv.index.cache import PrefixCache
from radixkv.index.sequence import Sequence
from radixkv.index.tokens import encode
from radixkv.simulator.workloads import Ids, Request, Workload, chat, draw

CHUNK_TOKENS = 512
NUM_FORKS = 8


class Shape(NamedTuple):
    """A cache size, requests that ``build`` the tree, and the measured requests."""

    name: str
    num_blocks: int
    block_size: int
    build: Workload
    requests: Workload


def shapes(seed: int = 0, scale: float = 1.0) -> list[Shape]:
    """Return all shapes. With ``scale`` 1 they have up to 100,000 children and a path of 10,000 nodes."""

    def sized(full: int) -> int:
        return max(int(full * scale), 4)

    path, children, nodes, turns = sized(2_000), sized(100_000), sized(10_000), sized(1_000)
    nothing = Workload("nothing", lambda: iter(()), 0)
    chats = 4 * 16 * 8
    return [
        Shape("diverging", 3 * path + 4, 16, nothing,
              Workload("diverging", lambda: diverging(seed, path, 16), path)),
        Shape("wide", children + 4, 16, nothing, Workload("wide", lambda: wide(children), children)),
        Shape("deep", 2 * nodes + 2 * turns, 1,
              Workload("splits", lambda: splits(seed, nodes), nodes),
              Workload("deep", lambda: walks(seed, nodes, sized(250)), sized(250))),
        Shape("equal", 300, 16, nothing, Workload("equal", lambda: equal(seed, turns), turns)),
        Shape("tiny", 130_000, 1, nothing, Workload("tiny", lambda: chat(seed, 4, 16, 8), chats)),
        Shape("large", 600, 256, nothing, Workload("large", lambda: chat(seed, 4, 16, 8), chats)),
    ]  # fmt: skip


def diverging(seed: int, num_blocks: int, block_size: int) -> Iterator[Request]:
    """A path of ``num_blocks`` blocks, then prompts that diverge after 1, 2, … of them."""
    path = draw(seed, 8, size=num_blocks * block_size)
    yield Request("tenant-0", path[:-1], path)
    for blocks in range(1, num_blocks):
        yield _leaving(seed, path[: blocks * block_size], blocks, block_size)


def _leaving(seed: int, prefix: Ids, number: int, block_size: int) -> Request:
    full = np.concatenate([prefix, draw(seed, 9, number, size=2 * block_size)])
    return Request("tenant-0", full[:-1], full)


def wide(children: int) -> Iterator[Request]:
    """Prompts with one shared block, followed by a block that differs."""
    full = np.zeros(32, dtype=np.int64)
    for child in range(children):
        full[16:] = child
        yield Request("tenant-0", full[:-1], full)


def splits(seed: int, nodes: int) -> Iterator[Request]:
    """A path of ``nodes`` tokens, then prompts that diverge before each token: the last first, for short walks."""
    path = draw(seed, 8, size=nodes)
    yield Request("tenant-0", path[:-1], path)
    for length in range(nodes - 1, 0, -1):
        full = np.append(path[:length], path[length] + 1)
        yield Request("tenant-0", full[:-1], full)


def walks(seed: int, nodes: int, requests: int) -> Iterator[Request]:
    """Prompts that follow the path of ``splits`` to its end and continue it."""
    path = draw(seed, 8, size=nodes)
    for number in range(requests):
        full = np.append(path, (number, number))
        yield Request("tenant-0", full[:-1], full)


def equal(seed: int, requests: int) -> Iterator[Request]:
    """One prompt of 4,000 tokens, with the same answer."""
    full = draw(seed, 8, size=4_096)
    for _ in range(requests):
        yield Request("tenant-0", full[:-96], full)


def measure(shape: Shape) -> dict[str, Any]:
    """Run a shape. Returns a dict that JSON can encode. Raises IntegrityError for a violated invariant."""
    cache = PrefixCache(CacheConfig(shape.num_blocks, shape.block_size))
    drive(cache, shape.build)
    with frozen_heap():
        samples = drive(cache, shape.requests)
        stats = cache.stats()
        audit.check(cache)
        evicted = stats.resident_blocks
        evict_ns = cpu_ns(lambda: cache.evict(evicted))
    audit.check(cache)
    powers = by_power_of_two(samples)
    return {
        "shape": shape.name,
        "block_size": shape.block_size,
        "requests": len(samples.prompt_tokens),
        "resident_blocks": stats.resident_blocks,
        "nodes": stats.num_nodes,
        "cpu_us_per_request": 1e6 * samples.cpu_s / len(samples.prompt_tokens),
        "evict_us_per_block": evict_ns / evicted / 1e3,
        "operations": {
            name: summary(column) for name, column in zip(OPERATIONS, samples.nanoseconds.T, strict=True)
        },
        "p99_over_p50": worst_spread(powers),
        "by_prompt_tokens": powers,
    }


# --- long prompts


def long_prompt(num_tokens: int, seed: int = 0) -> dict[str, float]:
    """CPU nanoseconds per token of each operation on a prompt of about ``num_tokens``, median of 1 to 300 runs.

    The prompt gets 5 more tokens. So its last block is usually partial, and a write after a fork copies it.
    """
    rounds = max(1, min(300, 300_000 // num_tokens))
    ids = draw(seed, 10, size=num_tokens + 5)
    with frozen_heap():
        lives = [_life(ids) for _ in range(rounds)]
    return {name: float(np.median([life[name] for life in lives])) / len(ids) for name in lives[0]}


def _life(ids: Ids) -> dict[str, int]:
    """CPU nanoseconds of each operation on one prompt."""
    size = len(ids)
    cache, namespace = (
        PrefixCache(CacheConfig(2 * size // 16 + 4 * NUM_FORKS)),
        Namespace("tenant-0", "bench"),
    )
    buffer, key = array("q", ids.tobytes()), encode(ids)
    found: dict[str, int] = {}
    opened: list[Sequence] = []

    def spend(name: str, call: Callable[[], object]) -> None:
        found[name] = cpu_ns(call)

    spend("open", lambda: opened.append(cache.open(namespace, buffer)))
    spend("trim the prompt", lambda: trim(opened[0], 1))
    opened.pop().release()
    opened.append(cache.open(namespace, buffer[:1]))
    spend("extend", lambda: extend(opened[0], buffer, 1))
    spend("trim", lambda: trim(opened[0], 1))
    extend(opened[0], buffer, 1)
    spend("fork", lambda: opened.extend(opened[0].fork(NUM_FORKS)))
    spend("append to forks", lambda: cache.append(opened[1:], range(NUM_FORKS)))
    cache.flush()
    spend("release forks", lambda: release(opened[1:]))
    spend("trim after a fork", lambda: trim(opened[0], 1))
    opened.pop(0).release()
    opened[:] = [cache.open(namespace, buffer)]
    spend("commit", lambda: commit(opened[0]))
    spend("release", opened.pop().release)
    spend("match", lambda: cache.match(namespace, key))
    spend("open again", lambda: opened.append(cache.open(namespace, buffer)))
    opened.pop().release()
    spend("evict", lambda: cache.evict(size // 16))
    audit.check(cache)
    return found


def release(sequences: list[Sequence]) -> None:
    """Release all sequences."""
    for sequence in sequences:
        sequence.release()


def commit(sequence: Sequence) -> None:
    """Commit a whole sequence in chunks."""
    size = sequence.num_tokens
    for stop in range(sequence.num_committed_tokens, size, CHUNK_TOKENS):
        sequence.commit(stop)
    sequence.commit(size)


def extend(sequence: Sequence, ids: array[int], start: int) -> None:
    """Extend a sequence by ``ids[start:]`` in chunks."""
    for at in range(start, len(ids), CHUNK_TOKENS):
        sequence.extend(ids[at : at + CHUNK_TOKENS])


def trim(sequence: Sequence, num_tokens: int) -> None:
    """Truncate a sequence to ``num_tokens`` in chunks."""
    for size in range(sequence.num_tokens - CHUNK_TOKENS, num_tokens, -CHUNK_TOKENS):
        sequence.truncate(size)
    sequence.truncate(num_tokens)
