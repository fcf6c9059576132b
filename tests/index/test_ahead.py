"""Computing ahead: blocks that a running step computes are shared before their KV exist, and never seen before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv import (
    ArgumentError,
    LeaseError,
    Namespace,
    PrefixCache,
    Sequence,
    StaleGeneration,
    Tenant,
    audit,
)
from tests.index.support import NS, make_cache, same

PROMPT = list(range(18))
"""4 whole blocks and 2 tokens."""


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    made = make_cache(64, writes_before_reads=True)
    yield made
    audit.check(made)
    for sequence in list(made._sequences):
        assert not sequence._is_open
    assert made._computing == {} and made._steps == {}


def burst(cache: PrefixCache, size: int, step: int, prompt: list[int] = PROMPT) -> list[Sequence]:
    """Open the same prompt several times; each computes what nobody else does, all in one step."""
    found = []
    for _ in range(size):
        sequence = cache.open(NS, prompt, ahead=True)
        sequence.computing(len(prompt), step=step)
        found.append(sequence)
        audit.check(cache)
    return found


def release(*sequences: Sequence) -> None:
    for sequence in sequences:
        sequence.release()


def test_a_burst_computes_each_whole_block_once(cache: PrefixCache) -> None:
    """Eight equal prompts in one step: the first computes all, the others only their last two tokens."""
    sequences = burst(cache, 8, step=1)
    computed = [each.num_tokens - each.num_committed_tokens - each.num_ahead_tokens for each in sequences]
    assert computed == [18] + [2] * 7
    assert [each.num_cached_tokens for each in sequences] == [0] * 8
    tables = [each.block_table.tolist() for each in sequences]
    assert all(table[:4] == tables[0][:4] for table in tables) and len({table[4] for table in tables}) == 8
    assert cache.free_blocks == 64 - 4 - 8
    assert cache.step_done(1) == 8 * 18
    assert [(each.num_committed_tokens, each.num_ahead_tokens) for each in sequences] == [(18, 0)] * 8
    assert [each.block_table.tolist() for each in sequences] == tables
    assert cache.match(NS, PROMPT).block_ids.tolist() == tables[0][:4]
    audit.check(cache)
    release(*sequences)
    assert cache.free_blocks == 60


def test_blocks_ahead_are_seen_by_nobody(cache: PrefixCache) -> None:
    """No match, no lookup of an ordinary request, no statistic has them before the step is done."""
    (first,) = burst(cache, 1, step=1)
    before = cache.stats()
    assert cache.match(NS, PROMPT).num_tokens == 0 and cache.resident_blocks == 0
    with cache.open(NS, PROMPT) as ordinary:
        assert (ordinary.num_cached_tokens, ordinary.num_ahead_tokens) == (0, 0)
        assert not set(ordinary.block_table.tolist()) & set(first.block_table.tolist())
    with cache.open(Namespace("b", "m"), PROMPT, ahead=True) as stranger:
        assert stranger.num_ahead_tokens == 0
    with cache.open(NS._replace(salt="s"), PROMPT, ahead=True) as salted:
        assert salted.num_ahead_tokens == 0
    leaning = cache.open(NS, PROMPT, ahead=True)
    after = cache.stats()
    assert leaning.num_ahead_tokens == 16
    assert (after.hit_tokens, after.resident_blocks) == (before.hit_tokens, 0)
    assert after.missed_tokens == before.missed_tokens + 4 * 18
    release(first, leaning)


def test_a_leaning_sequence_cannot_commit_before_the_step_is_done(cache: PrefixCache) -> None:
    first, second = burst(cache, 2, step=7)
    before = cache.snapshot()
    with pytest.raises(ArgumentError, match="at most 0 before step 7 is done"):
        second.commit(18)
    assert same(before, cache)
    second.commit(0)
    first.commit(18)  # its own tokens: the engine may say so itself
    assert second.num_committed_tokens == 0
    cache.step_done(7)
    assert second.num_committed_tokens == 18
    release(first, second)


def test_a_failed_step_cuts_who_leans_on_it(cache: PrefixCache) -> None:
    """To the committed part. The sequence that was to compute keeps its tokens, and may offer them again."""
    first, second = burst(cache, 2, step=1)
    third = cache.open(NS, PROMPT, ahead=True)
    assert cache.step_failed(1) == 2
    assert (first.num_tokens, second.num_tokens, third.num_tokens) == (18, 0, 0)
    assert cache.match(NS, PROMPT).num_tokens == 0 and cache.free_blocks == 64 - 5
    audit.check(cache)
    with cache.open(NS, PROMPT, ahead=True) as nobody_computes:
        assert nobody_computes.num_ahead_tokens == 0
    first.computing(18, step=2)
    with cache.open(NS, PROMPT, ahead=True) as again:
        assert again.num_ahead_tokens == 16
        cache.step_done(2)
        assert again.num_committed_tokens == 16
    second.extend(PROMPT)
    second.commit(18)
    release(first, second, third)


def test_chunks_of_several_steps(cache: PrefixCache) -> None:
    """A prompt in two chunks. A request that leans on both commits with each; steps may end in another order."""
    first = cache.open(NS, PROMPT)
    first.computing(8, step=1)
    first.computing(16, step=2)
    second = cache.open(NS, PROMPT, ahead=True)
    assert second.num_ahead_tokens == 16
    assert cache.step_done(2) == 0  # what comes before isn't there yet
    assert (first.num_committed_tokens, second.num_committed_tokens) == (0, 0)
    audit.check(cache)
    assert cache.step_done(1) == 32
    assert (first.num_committed_tokens, second.num_committed_tokens) == (16, 16)
    release(first, second)


def test_the_first_of_two_chunks_fails(cache: PrefixCache) -> None:
    """What leans on the second chunk leans on the first one too."""
    first = cache.open(NS, PROMPT)
    first.computing(8, step=1)
    first.computing(16, step=2)
    second = cache.open(NS, PROMPT, ahead=True)
    second.computing(18, step=3)
    assert cache.step_failed(1) == 1 and (first.num_tokens, second.num_tokens) == (18, 0)
    assert cache.step_done(2) == cache.step_done(3) == 0
    assert cache.match(NS, PROMPT).num_tokens == 0
    release(first, second)


def test_the_second_chunk_fails(cache: PrefixCache) -> None:
    first = cache.open(NS, PROMPT)
    first.computing(8, step=1)
    first.computing(16, step=2)
    second = cache.open(NS, PROMPT, ahead=True)
    cache.step_done(1)
    assert cache.step_failed(2) == 1
    assert (second.num_committed_tokens, second.num_tokens) == (8, 8)
    assert cache.match(NS, PROMPT).num_tokens == 8
    release(first, second)


def test_leaning_on_who_leans(cache: PrefixCache) -> None:
    """A longer prompt leans on the first request and offers its own part to a third one."""
    longer, longest = [*PROMPT[:16], *range(50, 62)], [*PROMPT[:16], *range(50, 62), 1, 2]
    first = cache.open(NS, PROMPT)
    first.computing(18, step=1)
    second = cache.open(NS, longer, ahead=True)
    second.computing(28, step=1)
    third = cache.open(NS, longest, ahead=True)
    assert (second.num_ahead_tokens, third.num_ahead_tokens) == (16, 28)
    assert third.block_table[:7].tolist() == second.block_table.tolist()
    audit.check(cache)
    cache.step_done(1)
    assert (second.num_committed_tokens, third.num_committed_tokens) == (28, 28)
    audit.check(cache)
    release(first, second, third)


def test_a_match_goes_on_ahead(cache: PrefixCache) -> None:
    """Resident blocks first, then those that a step computes. Those count as found, these don't."""
    with cache.open(NS, PROMPT[:8]) as early:
        early.commit(8)
    first = cache.open(NS, PROMPT)
    first.computing(18, step=1)
    second = cache.open(NS, [*PROMPT[:12], 9, 9, 9, 9], ahead=True)
    assert (second.num_cached_tokens, second.num_ahead_tokens) == (8, 4)
    assert second.block_table[:3].tolist() == first.block_table[:3].tolist()
    audit.check(cache)
    cache.step_done(1)
    assert second.num_committed_tokens == 12
    release(first, second)


def test_the_last_token_is_always_computed(cache: PrefixCache) -> None:
    """As with ``open`` on resident blocks: logits need it."""
    first = cache.open(NS, PROMPT[:16])
    first.computing(16, step=1)
    second = cache.open(NS, PROMPT[:16], ahead=True)
    assert second.num_ahead_tokens == 12
    release(first, second)
    cache.step_done(1)


@pytest.mark.parametrize("ends", ["release", "append", "truncate", "fork"])
def test_whoever_computes_may_go_on_or_leave(cache: PrefixCache, ends: str) -> None:
    """The step computes the blocks whatever becomes of the sequence. No shared block is written or freed early."""
    first, second = burst(cache, 2, step=1)
    shared, kept = second.block_table[:4].tolist(), [first]
    if ends == "release":
        first.release()
        kept = []
    elif ends == "append":
        first.append(99)
        assert first.block_table[:4].tolist() == shared and list(cache.flush()) == []
    elif ends == "truncate":
        first.truncate(5)
        first.extend([7, 7, 7])
        cache.flush()
        assert first.block_table.tolist()[1] != shared[1]
    else:
        (child,) = first.fork(1)
        assert child.num_ahead_tokens == 18
        child.append(5)
        cache.flush()
        kept.append(child)
    assert second.block_table[:4].tolist() == shared
    audit.check(cache)
    cache.step_done(1)
    assert second.num_committed_tokens == 18 and cache.match(NS, PROMPT).num_tokens == 16
    audit.check(cache)
    release(second, *kept)


def test_a_purge_leaves_nothing_to_commit(cache: PrefixCache) -> None:
    first, second = burst(cache, 2, step=1)
    cache.purge("a")
    assert cache.step_done(1) == 0 and cache.match(NS, PROMPT).num_tokens == 0
    with pytest.raises(StaleGeneration):
        second.commit(16)
    release(first, second)
    assert cache.free_blocks == 64


def test_after_a_clear_nothing_is_matched(cache: PrefixCache) -> None:
    first, second = burst(cache, 2, step=1)
    cache.clear(NS)
    assert cache.step_done(1) > 0 and cache.match(NS, PROMPT).num_tokens == 0
    audit.check(cache)
    release(first, second)
    assert cache.free_blocks == 64


def test_a_leaning_sequence_is_not_cut_inside_a_block(cache: PrefixCache) -> None:
    """The next write would copy KV that don't exist yet."""
    first, second = burst(cache, 2, step=1)
    before = cache.snapshot()
    with pytest.raises(ArgumentError, match="at least 16, or a multiple of 4"):
        second.truncate(6)
    assert same(before, cache)
    second.truncate(8)
    assert second.num_ahead_tokens == 8
    second.extend([5, 5])
    cache.step_done(1)
    assert second.num_committed_tokens == 8
    release(first, second)


def test_reading_in_the_same_step_must_be_declared() -> None:
    """Without ``writes_before_reads`` a sequence computes in a later step than the blocks that it leans on."""
    cache = make_cache(64)
    first = cache.open(NS, PROMPT)
    first.computing(18, step=1)
    second = cache.open(NS, PROMPT, ahead=True)
    with pytest.raises(ArgumentError, match="step=1 is not allowed; allowed: a step after 1"):
        second.computing(18, step=1)
    second.computing(18, step=2)
    cache.step_done(1)
    cache.step_done(2)
    release(first, second)
    audit.check(cache)


def test_room_counts_only_what_is_new() -> None:
    """Shared blocks are charged once. A limit that one request fills is enough for eight."""
    cache = make_cache(64, writes_before_reads=True)
    cache.add_tenant(Tenant("a", max_blocks=5 + 7))
    sequences = burst(cache, 8, step=1)
    assert cache.blocks_of("a").free_blocks == 0
    cache.step_done(1)
    audit.check(cache)
    release(*sequences)
    audit.check(cache)


def test_wrong_calls(cache: PrefixCache) -> None:
    sequence = cache.open(NS, PROMPT)
    sequence.commit(4)
    sequence.computing(12, step=1)
    before = cache.snapshot()
    for num_tokens, step in ((3, 2), (11, 2), (19, 2), (-1, 2), (16, -1), (16, 2**63), (16, True)):
        with pytest.raises(ArgumentError):
            sequence.computing(num_tokens, step=step)
    for call in (cache.step_done, cache.step_failed):
        with pytest.raises(ArgumentError):
            call(-1)
        assert call(99) == 0
    assert same(before, cache)
    cache.step_done(1)
    assert sequence.num_committed_tokens == 12
    sequence.release()
    with pytest.raises(LeaseError):
        sequence.computing(12, step=3)


def test_an_engine_asks_how_much_it_would_find(cache: PrefixCache) -> None:
    """``match_ahead`` says what ``open(ahead=True)`` finds, and opens nothing."""
    assert cache.match_ahead(NS, PROMPT) == 0
    (first,) = burst(cache, 1, step=1)
    before = cache.snapshot()
    assert cache.match_ahead(NS, PROMPT) == 16 and cache.match_ahead(NS, PROMPT[:16]) == 12
    assert cache.match_ahead(NS, [*PROMPT[:6], 99, *PROMPT[7:]]) == 4
    assert cache.match_ahead(Namespace("b", "m"), PROMPT) == cache.match_ahead(NS, []) == 0
    assert same(before, cache)
    cache.step_done(1)
    assert cache.match_ahead(NS, PROMPT) == 16 == cache.match(NS, PROMPT).num_tokens
    release(first)
