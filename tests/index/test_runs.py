"""Forks: shared blocks, the number of copies, and the KV that each sequence reads; reorder as a beam step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import ArgumentError, CacheConfig, LeaseError, OutOfBlocks, PrefixCache, Sequence, audit
from radixkv.audit.oracle import Engine, chain
from radixkv.audit.properties import LAYOUT
from tests.index.support import NS, compute, make_cache, same


def _stored(num_blocks: int = 32, block_size: int = 4) -> tuple[PrefixCache, Engine]:
    cache = PrefixCache(CacheConfig(num_blocks, block_size, LAYOUT))
    return cache, Engine(cache)


def _write_all(engine: Engine, sequence: Sequence) -> None:
    engine.write(sequence.block_table, 0, chain(NS, sequence.token_ids.tolist()))


def _reads_its_own(engine: Engine, sequence: Sequence) -> bool:
    return engine.holds(sequence.block_table, chain(NS, sequence.token_ids.tolist()))


def test_a_fork_shares_everything() -> None:
    """Table, ids and committed tokens are equal. A fork takes no block and copies nothing. The parent stays open."""
    cache = make_cache(8)
    parent = cache.open(NS, range(10))
    parent.commit(5)
    before = cache.stats()
    children = parent.fork(4)
    after = cache.stats()
    assert (after.free_blocks, after.copied_blocks) == (before.free_blocks, 0) and len(
        cache.flush().sources
    ) == 0
    for child in children:
        assert np.array_equal(child.block_table, parent.block_table)
        assert (child.num_tokens, child.num_committed_tokens, child.namespace) == (10, 5, NS)
        assert child.num_cached_tokens == parent.num_cached_tokens
    audit.check(cache)
    parent.release()
    for child in children:
        assert cache.stats().sequence_blocks == 2
        child.release()
        audit.check(cache)
    assert cache.stats().sequence_blocks == 0 and cache.stats().resident_blocks == 1


@pytest.mark.parametrize("num_children", range(1, 5))
@pytest.mark.parametrize("num_tokens", [8, 9, 11])
def test_copies_if_every_owner_writes(num_tokens: int, num_children: int) -> None:
    """A shared partial tail costs writers − 1 copies, as the last writes in place. A shared whole block costs none."""
    cache, engine = _stored()
    parent = cache.open(NS, range(num_tokens))
    _write_all(engine, parent)
    family = [parent, *parent.fork(num_children)]
    cache.append(family, list(range(100, 100 + len(family))))
    copies = num_children if num_tokens % 4 else 0
    assert cache.stats().copied_blocks == copies
    assert cache.storage is not None and cache.storage.num_launches == (copies > 0)
    for sequence in family:
        engine.write(sequence.block_table, num_tokens, chain(NS, sequence.token_ids.tolist())[num_tokens:])
    assert all(_reads_its_own(engine, sequence) for sequence in family)
    assert len({int(sequence.block_table[-1]) for sequence in family}) == len(family)
    audit.check(cache)


def test_copies_if_not_every_owner_writes() -> None:
    """Then each writer copies, as the other owners keep the block."""
    cache, engine = _stored()
    parent = cache.open(NS, range(6))
    _write_all(engine, parent)
    children = parent.fork(4)
    cache.append(children[:3], [1, 2, 3])
    assert cache.stats().copied_blocks == 3
    assert _reads_its_own(engine, parent) and _reads_its_own(engine, children[3])
    cache.append([parent], [9])
    assert cache.stats().copied_blocks == 4
    cache.append([children[3]], [8])  # the last owner
    assert cache.stats().copied_blocks == 4
    audit.check(cache)


def test_several_tails_in_one_launch() -> None:
    """The copies of all shared partial tails in a batch run in one launch."""
    cache, engine = _stored(64)
    families = []
    for first in range(3):
        parent = cache.open(NS, [first, 1, 2, 3, 4, 5])
        _write_all(engine, parent)
        families.append([parent, *parent.fork(2)])
    writers = [*families[0], *families[1][:2], families[2][0]]
    cache.append(writers, range(6))
    assert cache.stats().copied_blocks == 2 + 2 + 1
    assert cache.storage is not None and cache.storage.num_launches == 1
    for sequence in writers:
        engine.write(sequence.block_table, 6, chain(NS, sequence.token_ids.tolist())[6:])
    assert all(_reads_its_own(engine, sequence) for family in families for sequence in family)
    audit.check(cache)


def test_a_tail_that_a_sibling_committed() -> None:
    """A shared block goes to the tree. A child that rolls back into it and writes gets its own copy."""
    cache, engine = _stored()
    parent = cache.open(NS, range(8))
    _write_all(engine, parent)
    child = parent.fork(1)[0]
    parent.commit(8)
    parent.release()
    child.truncate(6)
    child.append(77)
    assert cache.stats().copied_blocks == 1
    engine.write(child.block_table, 6, chain(NS, child.token_ids.tolist())[6:])
    match = cache.match(NS, range(8))
    assert match.num_tokens == 8 and engine.holds(match.block_ids, chain(NS, range(8)))
    assert _reads_its_own(engine, child)
    audit.check(cache)
    child.release()
    audit.check(cache)


def test_a_rolled_back_child_writes_into_a_whole_shared_block() -> None:
    """The parent continues beyond the point where the child was cut. Their blocks diverge there."""
    cache, engine = _stored()
    parent = cache.open(NS, range(11))
    _write_all(engine, parent)
    child = parent.fork(1)[0]
    child.truncate(5)
    child.extend([50, 51, 52, 53])
    engine.write(child.block_table, 5, chain(NS, child.token_ids.tolist())[5:])
    assert _reads_its_own(engine, parent) and _reads_its_own(engine, child)
    assert child.block_table[0] == parent.block_table[0] and child.block_table[1] != parent.block_table[1]
    audit.check(cache)
    parent.release()
    audit.check(cache)
    child.release()
    assert cache.stats().free_blocks == 32


def test_a_batch_grows_completely_or_not_at_all() -> None:
    """A batch without enough blocks leaves every sequence, block and copy as it was."""
    cache = make_cache(6, 2)
    parent = cache.open(NS, range(7))  # four blocks used, two free
    children = parent.fork(3)
    before = cache.snapshot()
    with pytest.raises(OutOfBlocks) as error:
        cache.append([parent, *children], [1, 2, 3, 4])  # three copies
    assert (error.value.needed, error.value.free, error.value.evictable) == (3, 2, 0)
    assert same(before, cache) and not cache.flush() and cache.stats().copied_blocks == 0
    cache.append([parent, *children[:1]], [1, 2])
    with pytest.raises(OutOfBlocks):
        parent.extend(range(3))
    assert parent.num_tokens == 8
    audit.check(cache)


def test_a_batch_is_validated_before_anything_changes() -> None:
    """Refused: an invalid id, a sequence twice, a released one, one of another cache, lists of unequal lengths."""
    cache, other = make_cache(), make_cache()
    one, two, gone = (cache.open(NS, range(5)) for _ in range(3))
    gone.release()
    foreign = other.open(NS, range(5))
    before = cache.snapshot()
    with pytest.raises(ValueError, match="index 1"):
        cache.append([one, two], [1, -1])
    for sequences, ids in (
        ([one, one], [1, 2]),
        ([one, two], [1]),
        ([one], [1, 2]),
        ([one, foreign], [1, 2]),
    ):
        with pytest.raises(ArgumentError):
            cache.append(sequences, ids)
    with pytest.raises(LeaseError):
        cache.append([one, gone], [1, 2])
    assert same(before, cache)
    cache.append([], [])
    cache.append((one, two), np.array([1, 2]))
    assert (one.num_tokens, two.num_tokens) == (6, 6)
    audit.check(cache)


def test_reorder_consumes_its_inputs() -> None:
    """Inputs chosen once, twice or not at all are all closed.

    Leaving ``with`` is allowed afterwards, a release is not.
    """
    cache = make_cache(16, 4)
    beams = [cache.open(NS, [beam, *range(9)]) for beam in range(3)]
    ids = [beam.token_ids.tolist() for beam in beams]
    with beams[0] as first, beams[1], beams[2]:
        results = cache.reorder(beams, [2, 0, 2, 2])
        assert [result.token_ids.tolist() for result in results] == [ids[2], ids[0], ids[2], ids[2]]
        assert not any(beam.is_open for beam in beams)
        with pytest.raises(LeaseError):
            first.release()
        assert cache.stats().sequence_blocks == 6  # of the first and the third
        audit.check(cache)
    cache.append(results, range(4))
    assert cache.stats().copied_blocks == 2  # three share a tail, and all of them write
    for result in results:
        result.release()
    cache.flush()
    assert cache.stats().free_blocks == 16
    audit.check(cache)


def test_reorder_refuses_invalid_arguments() -> None:
    """A parent that does not exist, an input twice or a consumed input is refused. Nothing is consumed then."""
    cache = make_cache()
    one, two = cache.open(NS, range(5)), cache.open(NS, range(6))
    before = cache.snapshot()
    for sequences, parents in (
        ([one, two], [0, 2]),
        ([one, two], [-1]),
        ([one, one], [0]),
        ([one], [0.0]),
        ([], [0]),
    ):
        with pytest.raises(ArgumentError):
            cache.reorder(sequences, parents)
    assert same(before, cache) and one.is_open and two.is_open
    assert cache.reorder([], []) == []
    assert cache.reorder([one], []) == [] and not one.is_open
    with pytest.raises(LeaseError):
        cache.reorder([one, two], [1])
    (heir,) = cache.reorder([two], np.array([0]))
    heir.release()
    audit.check(cache)


@pytest.mark.parametrize("num_beams", [2, 4])
def test_a_beam_search(num_beams: int) -> None:
    """Random beam steps are compared with plain lists: ids, bytes, the copy formula at every step, and far fewer
    blocks.
    """
    block_size, rng = 4, np.random.default_rng(num_beams)
    cache, engine = _stored(400, block_size)
    prompt = list(range(300))
    beams = [cache.open(NS, prompt)]
    _write_all(engine, beams[0])
    beams[0].commit(300)
    beams = cache.reorder(beams, [0] * num_beams)
    expected = 0
    for step in range(30):
        tails = Counter(int(beam.block_table[-1]) for beam in beams if beam.num_tokens % block_size)
        expected += sum(owners - 1 for owners in tails.values())
        ids = rng.integers(0, 1_000, num_beams)
        wanted = [
            [*beam.token_ids.tolist(), token_id] for beam, token_id in zip(beams, ids.tolist(), strict=True)
        ]
        cache.append(beams, ids)
        assert [beam.token_ids.tolist() for beam in beams] == wanted
        assert cache.stats().copied_blocks == expected
        for beam in beams:
            engine.write(beam.block_table, 300 + step, chain(NS, beam.token_ids.tolist())[300 + step :])
        assert all(_reads_its_own(engine, beam) for beam in beams)
        parents = rng.integers(0, num_beams, num_beams).tolist()
        beams = cache.reorder(beams, parents)
        audit.check(cache)
    held = {int(block) for beam in beams for block in beam.block_table}
    assert expected > 0 and len(held) < 0.5 * sum(beam.num_blocks for beam in beams) + 1
    for beam in beams:
        beam.commit(beam.num_tokens)
        beam.release()
    assert cache.stats().sequence_blocks == 0
    audit.check(cache)


@given(
    num_tokens=st.integers(1, 9),
    owners=st.integers(1, 6),
    writers=st.integers(1, 6),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_the_number_of_copies_matches_the_formula(
    num_tokens: int, owners: int, writers: int, block_size: int
) -> None:
    """The copies of a step: for a shared partial tail, writers − 1 if every owner writes, otherwise writers."""
    writers = min(writers, owners)
    cache = make_cache(64, block_size)
    family = [cache.open(NS, range(num_tokens))]
    if owners > 1:
        family += family[0].fork(owners - 1)
    cache.append(family[-writers:], [7] * writers)
    copies = 0 if num_tokens % block_size == 0 else writers - (writers == owners)
    plan = cache.flush()
    assert plan.num_copies == cache.stats().copied_blocks == copies
    assert plan.num_rows.tolist() == [num_tokens % block_size] * copies
    audit.check(cache)


def test_a_deep_line_of_forks() -> None:
    """A child of a child, a thousand times. Each one writes, and older ones are released on the way."""
    cache = make_cache(64, 4)
    sequence = cache.open(NS, [0])
    for at in range(1, 1_000):
        (child,) = sequence.fork(1)
        sequence.release()
        sequence = child
        if at % 40:
            sequence.append(at % 7)
        else:
            sequence.truncate(1)
        cache.flush()
    assert cache.stats().num_sequences == 1
    audit.check(cache)
    sequence.commit(sequence.num_tokens)
    sequence.release()
    audit.check(cache)


def test_forks_commit_what_they_share_once() -> None:
    """Parent and children commit the same block. It becomes resident once, and they keep it."""
    cache = make_cache(16, 4)
    parent = cache.open(NS, range(10))
    children = parent.fork(2)
    tables = parent.block_table
    for sequence in (children[0], parent, children[1]):
        sequence.commit(8)
        assert np.array_equal(sequence.block_table, tables)
        assert cache.stats().resident_blocks == 2 and cache.stats().sequence_blocks == 1
        audit.check(cache)
    assert compute(cache, range(10)) == 8
    for sequence in (parent, *children):
        sequence.release()
    audit.check(cache)
