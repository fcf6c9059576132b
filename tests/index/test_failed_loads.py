"""Blocks whose load failed: ``PrefixCache.forget``."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from radixkv import ArgumentError, Fence, LeaseError, Namespace, OutOfBlocks, PrefixCache, audit
from radixkv.audit.invariants import BrokenLaws
from radixkv.errors import IntegrityError, StaleGeneration
from radixkv.index import failed_loads
from tests.index.support import NS, compute, make_cache, same, scrubbed
from tests.index.test_changes import Recorder, resident_segments

IDS = [*range(16)]
"""Four blocks of four tokens."""


def loaded(cache: PrefixCache, ids: list[int] = IDS, namespace: Namespace = NS) -> Any:
    """A sequence whose KV were loaded, as the engine believed."""
    sequence = cache.open(namespace, ids)
    sequence.commit(len(ids))
    return sequence


def whole(cache: PrefixCache) -> None:
    audit.check(cache)


# --- a sequence alone


def test_wrong_blocks_match_no_more_and_the_sequence_computes_them_again_in_place() -> None:
    cache = make_cache()
    with loaded(cache) as sequence:
        table = sequence.block_table.tolist()
        assert cache.forget(sequence, 9) == 2
        whole(cache)
        assert cache.match(NS, IDS).num_tokens == 8
        assert (sequence.num_committed_tokens, sequence.num_cached_tokens) == (8, 0)
        assert sequence.block_table.tolist() == table
        sequence.commit(16)
        assert cache.match(NS, IDS).block_ids.tolist() == table
        whole(cache)
    assert cache.free_blocks + cache.evictable_blocks == 16


def test_what_others_computed_behind_is_forgotten_too() -> None:
    cache = make_cache()
    compute(cache, [*IDS, *range(100, 108)])
    compute(cache, [*IDS, *range(200, 204)])
    compute(cache, [*IDS[:8], *range(300, 304)])
    with cache.open(NS, [*IDS, 1]) as sequence:
        assert sequence.num_cached_tokens == 16
        assert cache.forget(sequence, 8) == 5
        assert cache.match(NS, [*IDS, *range(100, 108)]).num_tokens == 8
        assert cache.match(NS, [*IDS[:8], *range(300, 304)]).num_tokens == 12
        assert cache.resident_blocks == 3 and cache.blocks_of("a").resident_blocks == 3
        assert sequence.num_cached_tokens == 8
        whole(cache)
        sequence.commit(17)
    assert cache.match(NS, IDS).num_tokens == 16
    assert cache.free_blocks + cache.evictable_blocks == 16
    whole(cache)


def test_everything_can_be_forgotten() -> None:
    cache = make_cache()
    with loaded(cache) as sequence:
        assert cache.forget(sequence, 0) == 4
        assert cache.match(NS, IDS).num_tokens == 0 and sequence.num_committed_tokens == 0
        whole(cache)
    assert cache.free_blocks == 16 and cache.namespaces() == []


def test_a_sequence_with_nothing_wrong_in_the_tree_only_goes_back() -> None:
    cache = make_cache()
    with cache.open(NS, IDS) as sequence:
        sequence.commit(11)
        assert cache.forget(sequence, 10) == 0
        assert sequence.num_committed_tokens == 10
        assert cache.match(NS, IDS).num_tokens == 8
        assert cache.forget(sequence, 16) == 0 and sequence.num_committed_tokens == 10
        whole(cache)


def test_a_large_subtree_is_forgotten_in_slices_and_the_sequence_gets_new_blocks() -> None:
    cache = make_cache(1_024)
    for at in range(400):
        compute(cache, [*IDS, at, 1, 2, 3])
    with cache.open(NS, [*IDS, 9]) as sequence:
        table = sequence.block_table.tolist()
        assert cache.forget(sequence, 4) == 403
        assert set(table[1:]).isdisjoint(sequence.block_table.tolist())
        whole(cache)
    assert cache.resident_blocks == 1 and cache.free_blocks == 1_023


# --- blocks that others hold too


def test_a_sequence_whose_blocks_others_hold_gets_new_ones_and_the_others_continue_unfound() -> None:
    cache = make_cache()
    first = loaded(cache)
    other = cache.open(NS, [*IDS, 50])
    table = other.block_table.tolist()
    assert cache.forget(first, 6) == 3
    whole(cache)
    assert first.block_table.tolist()[:1] == table[:1]
    assert set(first.block_table.tolist()[1:]).isdisjoint(table)
    assert other.block_table.tolist() == table and other.num_committed_tokens == 16
    other.extend(range(51, 60))
    other.commit(26)
    assert cache.match(NS, [*IDS, 50]).num_tokens == 4
    first.commit(16)
    right = cache.match(NS, IDS).block_ids.tolist()
    assert right == first.block_table.tolist()
    whole(cache)
    first.release()
    other.release()
    whole(cache)
    assert cache.match(NS, IDS).block_ids.tolist() == right
    assert cache.free_blocks + cache.evictable_blocks == 16


@pytest.mark.parametrize("from_token", [4, 5, 0, 12])
def test_each_sequence_that_is_to_go_on_forgets(from_token: int) -> None:
    cache = make_cache(32)
    first, second = loaded(cache), cache.open(NS, [*IDS, 50])
    cache.forget(first, 5)
    cache.forget(second, from_token)
    whole(cache)
    good = min(from_token // 4, 1) * 4
    assert (first.num_committed_tokens, second.num_committed_tokens) == (4, good)
    assert cache.match(NS, IDS).num_tokens == good
    second.commit(17)
    first.commit(16)
    assert cache.match(NS, IDS).num_tokens == 16
    whole(cache)
    first.release()
    second.release()
    assert cache.free_blocks + cache.evictable_blocks == 32
    whole(cache)


def test_nested_trees_of_forgotten_blocks() -> None:
    cache = make_cache(64)
    sequences = [loaded(cache), *(cache.open(NS, [*IDS, at]) for at in range(4))]
    for sequence, at in zip(sequences, (13, 9, 6, 1, 13), strict=True):
        cache.forget(sequence, at)
        whole(cache)
    for sequence in sequences:
        sequence.commit(16)
        sequence.release()
        whole(cache)
    assert cache.free_blocks + cache.evictable_blocks == 64


def test_forks_that_committed_are_left_with_what_they_hold() -> None:
    cache = make_cache()
    parent = cache.open(NS, IDS)
    (child,) = parent.fork(1)
    parent.commit(16)
    with pytest.raises(LeaseError, match="commit them there, or release it"):
        cache.forget(parent, 4)
    whole(cache)
    assert cache.match(NS, IDS).num_tokens == 16
    child.commit(16)
    assert cache.forget(parent, 4) == 3
    whole(cache)
    assert cache.forget(child, 4) == 0
    whole(cache)
    for sequence in (parent, child):
        sequence.commit(16)
        sequence.release()
        whole(cache)
    assert cache.free_blocks + cache.evictable_blocks == 16


def test_leases_keep_their_blocks_and_pins_end() -> None:
    cache = make_cache(32)
    first = loaded(cache)
    lease = cache.lease(cache.match(NS, IDS))
    cache.pin(NS, IDS[:4], 60.0)
    cache.pin(NS, IDS[:12], 60.0)
    leased = set(lease.block_ids.tolist())
    cache.forget(first, 7)
    assert [pin.num_tokens for pin in cache.pins()] == [4]
    assert not leased.intersection(first.block_table.tolist()[1:])
    whole(cache)
    lease.release()
    first.release()
    whole(cache)
    assert cache.free_blocks + cache.evictable_blocks + cache.tenant_stats("a").pinned_blocks == 32


def test_a_fenced_sequence_keeps_its_blocks() -> None:
    cache, fence = make_cache(32), Fence()
    first, other = loaded(cache), cache.open(NS, [*IDS, 50])
    other.release(after=fence)
    cache.forget(first, 0)
    whole(cache)
    fence.lift()
    cache.stats()
    whole(cache)
    first.release()
    assert cache.free_blocks == 32


def test_a_base_with_wrong_blocks_ends() -> None:
    cache = make_cache(32)
    account = Namespace("operator", "m")
    published = cache.publish("base", account, IDS, ["a"])
    published.commit(16)
    with cache.open(NS, [*IDS, *range(50, 60)]) as reader:
        reader.commit(26)
        with pytest.raises(ArgumentError, match="from 16 to 26"):
            cache.forget(reader, 8)
        assert cache.forget(published, 8) == 2
        assert cache.bases() == []
        whole(cache)
        assert cache.match(NS, IDS).num_tokens == 0
        reader.append(1)
        with pytest.raises(ArgumentError, match="from 16 to 27"):
            cache.forget(reader, 8)
    published.release()
    whole(cache)
    assert cache.free_blocks + cache.evictable_blocks == 32


def test_a_reader_forgets_its_own_blocks_behind_a_base() -> None:
    cache = make_cache(32)
    cache.publish("base", Namespace("operator", "m"), IDS, ["a"]).commit(16)
    ids = [*IDS, *range(50, 60)]
    with cache.open(NS, ids) as reader:
        reader.commit(26)
        assert cache.forget(reader, 16) == 2
        assert cache.match(NS, ids).num_tokens == 16 and reader.num_committed_tokens == 16
        whole(cache)
        reader.commit(26)
        assert cache.match(NS, ids).num_tokens == 24
    whole(cache)


# --- steps, purges, refusals


def test_a_step_must_end_first_and_what_leaned_is_forgotten_with_it() -> None:
    cache = make_cache(32)
    first = cache.open(NS, IDS)
    first.computing(16, step=1)
    second = cache.open(NS, [*IDS, 50], ahead=True)
    assert second.num_ahead_tokens == 16
    for sequence in (first, second):
        with pytest.raises(LeaseError, match="step_done, step_failed"):
            cache.forget(sequence, 0)
    cache.step_done(1)
    assert cache.forget(first, 4) == 3 and cache.forget(second, 4) == 0
    whole(cache)
    first.commit(16)
    second.commit(17)
    whole(cache)
    assert cache.match(NS, IDS).num_tokens == 16


def test_refused_calls_change_nothing() -> None:
    cache, elsewhere = make_cache(5), make_cache()
    first, other = loaded(cache), cache.open(NS, [*IDS[:12], 99])
    foreign, before = loaded(elsewhere), cache.snapshot()
    for wrong in (-1, 17, 1.5, "4", None, True):
        with pytest.raises(ArgumentError, match="from_token"):
            cache.forget(first, wrong)
    for wrong in (foreign, None, 3, first.block_table):
        with pytest.raises(ArgumentError, match="a sequence of this cache"):
            cache.forget(wrong, 0)
    with pytest.raises(OutOfBlocks):
        cache.forget(first, 0)
    assert same(before, cache)
    first.release()
    with pytest.raises(LeaseError, match="released"):
        cache.forget(first, 0)
    cache.purge("a")
    with pytest.raises(StaleGeneration):
        cache.forget(other, 0)
    other.release()
    whole(cache)


def test_a_purge_or_a_clear_afterwards_finds_everything() -> None:
    for clear in (lambda cache: cache.clear(NS), lambda cache: cache.purge("a")):
        cache = make_cache(32)
        sequences = [loaded(cache), cache.open(NS, [*IDS, 50]), cache.open(NS, [*IDS, 60])]
        cache.forget(sequences[0], 4)
        cache.forget(sequences[1], 8)
        clear(cache)
        whole(cache)
        for sequence in sequences:
            sequence.release()
        whole(cache)
        assert cache.free_blocks == 32


def test_room_that_is_reserved_stays() -> None:
    cache = make_cache(32)
    first, other = loaded(cache), cache.open(NS, [*IDS, 50])
    first.reserve(6)
    cache.forget(first, 4)
    assert (first.num_reserved_tokens, first.num_blocks) == (6, 6)
    first.fill(range(6))
    first.commit(22)
    whole(cache)
    other.release()
    first.release()
    assert cache.free_blocks + cache.evictable_blocks == 32


def test_the_journal_hears_of_each_block_once() -> None:
    journal = Recorder(4)
    cache = PrefixCache(make_cache(32).config, journal=journal, scrub_blocks=scrubbed)
    compute(cache, [*IDS, *range(50, 58)])
    with loaded(cache) as sequence:
        cache.forget(sequence, 8)
        assert journal.held == resident_segments(cache.snapshot(), 4) and len(journal.held) == 2
        sequence.commit(16)
        assert journal.held == resident_segments(cache.snapshot(), 4) and len(journal.held) == 4


class Engine:
    """Loads KV that may be wrong, computes further KV from them, and learns of it later.

    The KV of a token is a hash of the KV before it, so whatever is computed behind a wrong block is wrong too.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        policy = self.dice.choice(("lru", "slru", "learned"))
        self.cache = make_cache(self.dice.choice((16, 40, 80)), 2, policy=policy)
        self.kv: dict[tuple[int, int], int] = {}
        self.running: list[Any] = []
        self.leases: list[Any] = []
        self.fences: list[Fence] = []
        self.num_forgotten = self.num_kept = 0

    def ids(self) -> list[int]:
        return [self.dice.randrange(2) for _ in range(self.dice.randrange(1, 14))]

    def right(self, ids: Any) -> list[int]:
        found, state = [], 0
        for token in ids:
            state = hash((state, int(token)))
            found.append(state)
        return found

    def read(self, table: Any, num_tokens: int) -> list[int | None]:
        return [self.kv.get((int(table[at // 2]), at % 2)) for at in range(num_tokens)]

    def compute(self, sequence: Any, stop: int, fails: bool) -> None:
        """Compute tokens up to ``stop`` from what stands before them; a load that fails leaves something wrong."""
        table, ids = sequence.block_table.tolist(), sequence.token_ids.tolist()
        for source, target, rows in self.cache.flush():
            for row in range(rows):
                self.kv[target, row] = self.kv.get((source, row), -1)
        start = sequence.num_committed_tokens
        state = self.kv.get((table[(start - 1) // 2], (start - 1) % 2), -1) if start else 0
        for at in range(start, stop):
            state = hash((state, ids[at])) if not fails or at != start else -self.dice.randrange(1, 1_000)
            self.kv[table[at // 2], at % 2] = state
        sequence.commit(stop)

    def step(self) -> None:
        """Do something."""
        kind = self.dice.randrange(10)
        if kind < 3 or not self.running:
            self.running.append(self.cache.open(NS, self.ids()))
            return
        sequence = self.dice.choice(self.running)
        if kind < 6:
            stop = self.dice.randrange(sequence.num_committed_tokens, sequence.num_tokens + 1)
            self.compute(sequence, stop, self.dice.random() < 0.5)
        elif kind == 6:
            if self.dice.random() < 0.5:
                self.compute(sequence, sequence.num_tokens, False)
            self.running += sequence.fork(1)
        elif kind == 7:
            self.compute(sequence, sequence.num_tokens, False)
            sequence.append(self.dice.randrange(2))
            self.compute(sequence, sequence.num_tokens, False)
        elif kind == 8:
            self.running.remove(sequence)
            if self.dice.random() < 0.3:
                self.fences.append(Fence())
                sequence.release(after=self.fences[-1])
            else:
                sequence.release()
        elif self.leases and self.dice.random() < 0.5:
            self.leases.pop().release()
        else:
            self.leases.append(self.cache.match_and_lease(NS, sequence.token_ids))

    def learn(self) -> None:
        """Learn which loads failed: forget in each sequence with wrong KV. What nobody holds any more goes too."""
        for sequence in list(self.running):
            wrong = self.first_wrong(sequence.block_table, sequence.token_ids, sequence.num_committed_tokens)
            if wrong is None:
                continue
            try:
                self.num_forgotten += self.cache.forget(sequence, wrong) > 0
                self.num_kept += 1
            except (LeaseError, OutOfBlocks):
                self.running.remove(sequence)
                sequence.release()
        for ids in self.prompts():
            match = self.cache.match(NS, ids)
            wrong = self.first_wrong(match.block_ids, ids, match.num_tokens)
            if wrong is not None:  # its sequence ended before the engine knew
                with self.cache.open(NS, [*ids[: match.num_tokens], 1]) as sequence:
                    self.forget(sequence, wrong)

    def forget(self, sequence: Any, wrong: int) -> None:
        """Forget, and first release forks that share the blocks, if they didn't commit them."""
        try:
            self.cache.forget(sequence, wrong)
        except LeaseError:
            blocks = set(sequence.block_table.tolist())
            for each in [each for each in self.running if blocks.intersection(each.block_table.tolist())]:
                self.running.remove(each)
                each.release()
            self.cache.forget(sequence, wrong)

    def first_wrong(self, table: Any, ids: Any, num_tokens: int) -> int | None:
        pairs = zip(self.read(table, num_tokens), self.right(ids), strict=False)
        return next((at for at, (found, right) in enumerate(pairs) if found != right), None)

    def prompts(self) -> list[list[int]]:
        """Prompts that may be resident: some of 12 tokens, and those of running sequences."""
        some = [[number >> at & 1 for at in range(12)] for number in range(0, 4096, 37)]
        return [*some, *(each.token_ids.tolist() for each in self.running)]

    def all_is_right(self) -> None:
        for ids in self.prompts():
            match = self.cache.match(NS, ids)
            assert self.first_wrong(match.block_ids, ids, match.num_tokens) is None, ids
        for sequence in self.running:
            held = sequence.num_committed_tokens
            assert self.first_wrong(sequence.block_table, sequence.token_ids, held) is None

    def end(self) -> None:
        for each in (*self.leases, *self.running):
            each.release()
        for fence in self.fences:
            fence.lift()
        self.cache.flush()
        whole(self.cache)
        assert self.cache.free_blocks + self.cache.evictable_blocks == self.cache.config.num_blocks


def random_lives() -> tuple[int, int, int]:
    """Lives in which the engine learns of failed loads, and after which nothing wrong may be found."""
    forgotten = kept = checked = 0
    for seed in range(30):
        engine = Engine(seed)
        for _ in range(8):
            for _ in range(8):
                with suppress(OutOfBlocks):
                    engine.step()
                whole(engine.cache)
            with suppress(OutOfBlocks):
                engine.learn()
                engine.all_is_right()
                checked += 1
            whole(engine.cache)
        engine.end()
        forgotten += engine.num_forgotten
        kept += engine.num_kept
    return forgotten, kept, checked


@pytest.mark.slow
def test_after_the_engine_learned_of_failed_loads_nothing_wrong_is_found() -> None:
    forgotten, kept, checked = random_lives()
    assert forgotten > 50 and kept > 75 and checked > 175, (forgotten, kept, checked)


@pytest.mark.pure
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("_node_with", lambda sound: lambda end, at: sound(end, min(at + 1, end.depth - 1))),
        ("_is_alone", lambda _: lambda *_: True),
        ("_require_committed", lambda _: lambda *_: None),
        ("_go_back", lambda _: lambda *_: None),
        ("_free_beside", lambda _: lambda *_: None),
    ],
    ids=[
        "a block too late",
        "writes into others' blocks",
        "forks keep wrong blocks",
        "not taken back",
        "leaks",
    ],
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, planted: Callable[[Any], Callable[..., Any]]
) -> None:
    monkeypatch.setattr(failed_loads, name, planted(getattr(failed_loads, name)))
    with pytest.raises((AssertionError, BrokenLaws, LeaseError, IntegrityError)):
        random_lives()
    gc.collect()  # the engine that failed, with its fences
