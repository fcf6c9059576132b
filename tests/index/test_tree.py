"""Difficult shapes: wide, deep and split trees, equal prompts, tiny and large blocks, a million tokens.

The cost of a call is counted, not timed, and compared with that of a smaller case. ``lines`` is the number of Python
lines that the library runs. It grows with the nodes on the call's path and never with tokens. ``peak`` is the most
extra memory that the call allocates, in bytes.
"""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

import radixkv
from radixkv import Namespace, PrefixCache, Sequence, audit
from radixkv.bench import shapes
from radixkv.index.tokens import encode
from radixkv.index.tree import MAX_GROWN_LABEL_BYTES, MAX_LABEL_BYTES
from radixkv.simulator import workloads
from radixkv.simulator.workloads import Request
from tests.index.support import NS, make_cache, num_events

MILLION = 1_000_003
LINEAR = 2.2
"""How many times as much twice the size may cost, if the cost grows in proportion to it."""


def lines(call: Callable[[], object]) -> int:
    """The number of Python lines that the library runs during a call."""
    return num_events(call, "line")


def peak(call: Callable[[], object]) -> int:
    """The most bytes that a call has allocated at once."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def serve(cache: PrefixCache, requests: Iterable[Request]) -> list[int]:
    """Open, commit, extend, commit and release each request. Return the cached tokens of each."""
    return [_serve(cache, request) for request in requests]


def _serve(cache: PrefixCache, request: Request) -> int:
    prompt, answer = request.prompt, request.full[len(request.prompt) :]
    with cache.open(Namespace(request.tenant, "m"), prompt) as sequence:
        sequence.commit(len(prompt))
        sequence.extend(answer)
        sequence.commit(len(request.full))
        return sequence.num_cached_tokens


def evict_all(cache: PrefixCache) -> None:
    """Evict every block, in two parts. Nothing must be left."""
    resident = cache.stats().resident_blocks
    assert cache.evict(resident // 3) == resident // 3
    audit.check(cache)
    assert cache.evict(resident) == resident - resident // 3
    stats = cache.stats()
    assert (stats.free_blocks, stats.num_nodes, stats.num_namespaces) == (stats.num_blocks, 0, 0)
    audit.check(cache)


def longest_label(cache: PrefixCache) -> int:
    """The length of the longest label in any tree, in bytes."""
    return max(len(node.label) for tree in cache.snapshot().trees for node in tree.nodes)


# --- adversarial shapes


@pytest.mark.pure
def test_a_tenant_that_diverges_at_every_block_of_one_path() -> None:
    """Each request finds all that it shares. It adds a node for a split and one for its own tokens."""

    def cost(size: int) -> int:
        cache = make_cache(3 * size + 4, 16)
        hits = serve(cache, shapes.diverging(0, size, 16))
        assert hits == [0, *(16 * blocks for blocks in range(1, size))]
        assert cache.stats().num_nodes == 2 * size - 1
        audit.check(cache)
        path = workloads.draw(0, 8, size=size * 16)
        found = lines(lambda: cache.match(Namespace("tenant-0", "m"), path))
        evict_all(cache)
        return found

    assert cost(300) < LINEAR * cost(150)


@pytest.mark.pure
def test_twenty_thousand_children_under_one_node() -> None:
    """More children cost nothing: match, open and release run the same lines as with ten children."""
    cache, small, children = make_cache(20_004, 16), make_cache(20, 16), 20_000
    for each, count in ((cache, children), (small, 10)):
        hits = serve(each, shapes.wide(count))
        assert hits == [0] + [16] * (count - 1)
        assert each.stats().num_nodes == count + 1
    ids = array("q", [0] * 16 + [7] * 16)
    namespace = Namespace("tenant-0", "m")

    def request(each: PrefixCache) -> None:
        with each.open(namespace, ids):
            assert each.match(namespace, ids).num_tokens == 32

    assert lines(lambda: request(cache)) == lines(lambda: request(small)) > 0
    assert lines(lambda: cache.evict(3)) == lines(lambda: small.evict(3))
    audit.check(cache)
    evict_all(cache)


@pytest.mark.pure
def test_a_path_of_many_nodes() -> None:
    """Nothing recurses.

    A walk and a lease cost a constant for each node. A beam step and an eviction do not visit the path.
    """
    halves, wholes = _costs_of_a_path(2_200), _costs_of_a_path(4_400)
    assert all(whole < LINEAR * half for half, whole in zip(halves[:2], wholes[:2], strict=True))
    assert halves[2:] == wholes[2:]


def _costs_of_a_path(size: int) -> tuple[int, int, int, int]:
    """The lines of a match, an open, a beam step and an eviction, for a path of nodes of one token."""
    cache, namespace = make_cache(2 * size + 100, 1), Namespace("tenant-0", "m")
    serve(cache, shapes.splits(0, size))
    assert cache.stats().num_nodes == 2 * size - 1
    path = workloads.draw(0, 8, size=size)
    assert cache.match(namespace, path).num_tokens == size
    match = lines(lambda: cache.match(namespace, path))
    assert serve(cache, shapes.walks(0, size, 2)) == [size, size]
    opened: list[Sequence] = []
    begin = lines(lambda: opened.append(cache.open(namespace, path)))
    (sequence,) = opened
    beams = sequence.fork(4)
    reordered: list[list[Sequence]] = []
    step = lines(lambda: reordered.append(cache.reorder(beams, [0] * 4)))
    audit.check(cache)
    sequence.release()
    evict = lines(lambda: cache.evict(1))
    with pytest.raises(radixkv.OutOfBlocks):  # the beams protect the path, and only the path
        cache.allocate(size + 200)
    assert cache.clear(namespace) > size
    audit.check(cache)
    return match, begin, step, evict


def test_all_prompts_are_equal_one_after_the_other() -> None:
    cache = make_cache(300, 16)
    assert serve(cache, shapes.equal(0, 100)) == [0] + [3_984] * 99
    assert cache.stats().resident_blocks == 256 and cache.stats().num_nodes <= 3
    audit.check(cache)
    evict_all(cache)


def test_all_prompts_are_equal_at_once() -> None:
    """Each sequence has computed its own copy. One copy stays, and the others are freed at release."""
    (request,) = shapes.equal(0, 1)
    cache = make_cache(50 * 256, 16)
    running = [cache.open(NS, request.full) for _ in range(50)]
    for sequence in running:
        sequence.commit(sequence.num_tokens)
    stats = cache.stats()
    assert (stats.resident_blocks, stats.sequence_blocks) == (256, 49 * 256)
    audit.check(cache)
    for sequence in running:
        sequence.release()
    assert (cache.stats().resident_blocks, cache.stats().free_blocks) == (256, 49 * 256)
    assert cache.stats().num_nodes == 1
    audit.check(cache)
    evict_all(cache)


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 40_000), (256, 300)])
def test_blocks_of_one_token_and_of_256(block_size: int, num_blocks: int) -> None:
    """Hits equal those of a dict of tokens, in whole blocks."""
    cache = make_cache(num_blocks, block_size)
    requests = list(workloads.chat(0, tenants=2, conversations=4, turns=3))
    seen: set[tuple[str, bytes]] = set()
    for (tenant, prompt, full), hit in zip(requests, serve(cache, requests), strict=True):
        sizes = range(block_size, len(prompt), block_size)
        known = [size for size in sizes if (tenant, full[:size].tobytes()) in seen]
        assert hit == max(known, default=0)
        ends = range(block_size, len(full) + 1, block_size)
        seen.update((tenant, full[:size].tobytes()) for size in ends)
    assert longest_label(cache) <= max(MAX_LABEL_BYTES, 4 * block_size)
    audit.check(cache)
    evict_all(cache)


# --- a million tokens


@pytest.fixture(scope="module")
def ids() -> array[int]:
    return array("q", workloads.draw(0, 10, size=MILLION).tobytes())


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    """A pool for the prompt twice. After the test it must have no running sequence and pass the audit."""
    made = make_cache(2 * MILLION // 16 + 64, 16)
    yield made
    assert made.stats().num_sequences == made.stats().sequence_blocks == 0
    audit.check(made)


@pytest.mark.pure
def test_a_million_tokens_at_once(cache: PrefixCache, ids: array[int]) -> None:
    """The prompt is opened, committed, found again and evicted. The number of lines grows only with the nodes.

    These grow with the tokens; a loop over tokens would run more lines than there are.
    """
    halves, wholes = _costs_at_once(cache, ids[: MILLION // 2]), _costs_at_once(cache, ids)
    assert all(half < whole < LINEAR * half for half, whole in zip(halves, wholes, strict=True))
    assert max(wholes) < MILLION / 16


def _costs_at_once(cache: PrefixCache, ids: array[int]) -> tuple[int, int, int]:
    """The lines of a commit, a match and an eviction of a whole prompt."""
    size, whole = len(ids), len(ids) // 16 * 16
    with cache.open(NS, ids) as sequence:
        assert sequence.num_blocks == -(-size // 16)
        commit = lines(lambda: sequence.commit(size))
        audit.check(cache)
    assert cache.stats().num_nodes <= -(-4 * size // MAX_LABEL_BYTES) + 1
    assert longest_label(cache) <= MAX_LABEL_BYTES
    key = encode(ids)
    assert cache.match(NS, key).num_tokens == whole
    match = lines(lambda: cache.match(NS, key))
    assert peak(lambda: cache.match(NS, key)) < 1.5 * len(key)
    with cache.open(NS, ids) as sequence:
        assert sequence.num_cached_tokens == whole
    evict = lines(lambda: cache.evict(whole // 16))
    assert cache.stats().num_nodes == 0
    return commit, match, evict


@pytest.mark.pure
def test_a_million_tokens_chunk_by_chunk(cache: PrefixCache, ids: array[int]) -> None:
    """A chunk costs as many lines and bytes at the end as at the start. Labels stay short."""
    with cache.open(NS, ids[:1]) as sequence:
        early = _step(sequence, ids, 1, 100)
        for start in range(sequence.num_tokens, MILLION - 60_000, 5_000):
            sequence.extend(ids[start : start + 5_000])
            sequence.commit(sequence.num_tokens)
        late = _step(sequence, ids, sequence.num_tokens, 100)
        assert late[0] < 1.2 * early[0]
        assert late[1] < 2 * early[1] + 100_000
        audit.check(cache)
    assert longest_label(cache) <= MAX_LABEL_BYTES
    assert cache.stats().num_nodes <= 4 * MILLION // (MAX_GROWN_LABEL_BYTES // 2)


def _step(sequence: Sequence, ids: array[int], start: int, chunks: int) -> tuple[int, int]:
    """The lines, and the median of peak bytes, of chunks of 512 tokens that are extended and committed."""

    def chunk(at: int) -> None:
        sequence.extend(ids[at : at + 512])
        sequence.commit(sequence.num_tokens)

    half = start + chunks // 2 * 512
    count = lines(lambda: [chunk(at) for at in range(start, half, 512)])
    peaks = [peak(lambda at=at: chunk(at)) for at in range(half, half + chunks // 2 * 512, 512)]  # type: ignore[misc]
    return count, int(np.median(peaks))


@pytest.mark.pure
def test_a_million_tokens_forked(cache: PrefixCache, ids: array[int]) -> None:
    """Children share every block. A beam step runs as many lines as for a short prompt, and copies one block each."""
    counts = []
    for size in (1_003, MILLION):
        with cache.open(NS, ids[:size]) as sequence:
            sequence.commit(size)
            before = cache.stats().free_blocks
            made: list[Sequence] = []
            count = lines(lambda: made.extend(sequence.fork(8)))  # noqa: B023
            assert cache.stats().free_blocks == before
            beams = cache.reorder(made, [0, 0, 1, 2, 3, 4, 5, 6])
            cache.append(beams, range(8))
            assert cache.stats().free_blocks == before - 8
            assert cache.flush().num_copies == 8
            count += lines(lambda: made.__setitem__(slice(None), cache.reorder(beams, [1] * 8)))  # noqa: B023
            assert made[0].token_ids[-1] == 1
            counts.append(count)
            audit.check(cache)
            for beam in made:
                beam.release()
    assert counts[0] == counts[1]


@pytest.mark.pure
@pytest.mark.parametrize(
    "what",
    [
        "an answer",
        "a prompt",
        "a fork",
    ],
)
def test_a_million_tokens_trimmed(cache: PrefixCache, ids: array[int], what: str) -> None:
    """Tokens are rolled back chunk by chunk. Each step costs as few lines and bytes as near the start."""
    with _long(cache, ids, what) as sequence:
        lates = [_trim(sequence) for _ in range(20)]
        sequence.truncate(30_000)
        earlies = [_trim(sequence) for _ in range(20)]
        audit.check(cache)
        sequence.truncate(1)
        assert sequence.num_blocks == 1
    assert max(count for count, _ in lates) <= max(count for count, _ in earlies)
    assert np.median([size for _, size in lates]) < 100_000


def _long(cache: PrefixCache, ids: array[int], what: str) -> Sequence:
    """A million uncommitted tokens: of a prompt, appended to one, or of a child after its parent's release."""
    if what == "a prompt":
        return cache.open(NS, ids)
    sequence = cache.open(NS, ids[:1])
    sequence.extend(ids[1:])
    if what == "an answer":
        return sequence
    (child,) = sequence.fork(1)
    sequence.release()
    return child


def _trim(sequence: Sequence) -> tuple[int, int]:
    sizes = sequence.num_tokens - 512, sequence.num_tokens - 1_024
    return lines(lambda: sequence.truncate(sizes[0])), peak(lambda: sequence.truncate(sizes[1]))
