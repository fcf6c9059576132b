"""Beams that are lent to the device behave like the same steps on the host, and refuse other calls meanwhile.

All tests run on a CPU, where the kernels' reference makes the steps. ``tests/kernels/test_reorder.py`` compares the
kernels with that reference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import (
    ArgumentError,
    CacheConfig,
    ConfigError,
    IntegrityError,
    KVLayout,
    LeaseError,
    LentBeams,
    Namespace,
    OutOfBlocks,
    PrefixCache,
    QuotaExceeded,
    Sequence,
    SequenceLent,
    StaleGeneration,
    Tenant,
    audit,
)
from radixkv.audit.oracle import Engine, chain
from radixkv.audit.properties import LAYOUT
from radixkv.index.ghost_keys import SegmentKeys
from radixkv.index.tree import path_between
from tests.index.support import NS, make_cache, same
from tests.waiting import ended

OTHER = Namespace("b", "m")


def stored(num_blocks: int = 64, block_size: int = 4, **given: Any) -> tuple[PrefixCache, Engine]:
    """A cache with storage on the CPU, and its engine."""
    cache = PrefixCache(CacheConfig(num_blocks, block_size, LAYOUT, **given))
    return cache, Engine(cache)


def computed(cache: PrefixCache, engine: Engine, ids: Any, commit: int = 0, ns: Namespace = NS) -> Sequence:
    """An open sequence with its KV written."""
    sequence = cache.open(ns, ids)
    states = chain(ns, sequence.token_ids.tolist())
    start = sequence.num_cached_tokens
    engine.write(sequence.block_table, start, states[start:])
    sequence.commit(max(commit, start))
    return sequence


def step(beams: LentBeams, engine: Engine, ids: list[list[int]], parents: list[int], new: list[int]) -> None:
    """Make one step on the device and write the KV of its rows. Update ``ids``, the token ids of each beam."""
    beams.step(torch.tensor(parents, dtype=torch.int32), torch.tensor(new))
    ids[:] = [[*ids[parent], token_id] for parent, token_id in zip(parents, new, strict=True)]
    assert not any(beams.state()[2:])
    blocks, rows = beams.slots()
    for beam, sequence in enumerate(beams.sequences):
        states = chain(sequence.namespace, ids[beam])
        engine.write(
            np.full(len(states) + engine._rows.shape[2], int(blocks[beam]), np.int32),
            int(rows[beam]),
            states[-1:],
        )


def beams_read(beams: LentBeams, engine: Engine, ids: list[list[int]]) -> bool:
    """Whether each beam finds the KV of its ids through the device's tables."""
    return all(
        engine.holds(table.numpy(), chain(sequence.namespace, its))
        for table, sequence, its in zip(beams.tables, beams.sequences, ids, strict=True)
    )


def reads(engine: Engine, sequence: Sequence) -> bool:
    return engine.holds(sequence.block_table, chain(sequence.namespace, sequence.token_ids.tolist()))


# --- the same as on the host


@dataclass
class Side:
    """One of two caches with the same life. Only one of them makes its beam steps on the device."""

    cache: PrefixCache
    engine: Engine
    beams: list[Sequence]
    others: list[Sequence]


def make_side(family: dict[str, Any], block_size: int) -> Side:
    """Prompts with beams that share all, part or none of it. Other sequences may commit parts or keep sharing them."""
    cache, engine = stored(256, block_size)
    side = Side(cache, engine, [], [])
    for prompt in family["prompts"]:
        parent = computed(cache, engine, prompt["ids"], prompt["commit"] % (len(prompt["ids"]) + 1))
        children = parent.fork(prompt["width"])
        for child, own in zip(children, prompt["own"], strict=False):
            start = child.num_tokens
            child.extend(own)
            engine.write(child.block_table, start, chain(NS, child.token_ids.tolist())[start:])
        side.beams += children
        if prompt["stays"]:
            side.others.append(parent)
            if prompt["late"]:
                parent.commit(parent.num_tokens)
        else:
            parent.release()
        if prompt["child"] and children[0].num_tokens > children[0].num_committed_tokens:
            children[0].commit(children[0].num_tokens)
    return side


def _prompts(token_id: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "ids": st.lists(token_id, min_size=1, max_size=11),
            "commit": st.integers(0, 12),
            "width": st.integers(1, 4),
            "own": st.lists(st.lists(token_id, max_size=6), max_size=3),
            "stays": st.booleans(),
            "late": st.booleans(),
            "child": st.booleans(),
        }
    )


families = st.fixed_dictionaries({"prompts": st.lists(_prompts(st.integers(0, 1)), min_size=1, max_size=3)})


@pytest.mark.slow
@settings(max_examples=150)
@given(family=families, block_size=st.sampled_from([1, 2, 3, 4]), num_steps=st.integers(0, 9), data=st.data())
def test_device_steps_equal_reorder_and_append(
    family: dict[str, Any], block_size: int, num_steps: int, data: st.DataObject
) -> None:
    """Ids, tables up to renamed blocks, bytes and counts are equal, and stay equal in later calls."""
    host, device = make_side(family, block_size), make_side(family, block_size)
    ids = [beam.token_ids.tolist() for beam in device.beams]
    of_prompts = [at for at, prompt in enumerate(family["prompts"]) for _ in range(prompt["width"])]
    groups = data.draw(st.sampled_from((None, of_prompts))) or [0] * len(ids)
    if cross := data.draw(st.integers(0, 3)) == 0:  # groups whose beams share blocks with other groups
        groups = data.draw(st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids)))
    members = [[beam for beam, other in enumerate(groups) if other == group] for group in groups]
    lent = device.cache.lend(device.beams, max(num_steps, 1), groups=groups)
    may_copy_more = cross
    audit.check(device.cache)
    for at in range(num_steps):
        parents = [data.draw(st.sampled_from(allowed)) for allowed in members]
        new = data.draw(st.lists(st.integers(0, 3), min_size=len(groups), max_size=len(groups)))
        step(lent, device.engine, ids, parents, new)
        assert not any(lent.state()[2:]), "the lent blocks suffice for any choice of parents"
        host.beams = host.cache.reorder(host.beams, parents)
        host.cache.append(host.beams, new)
        for beam in host.beams:
            states = chain(NS, beam.token_ids.tolist())
            host.engine.write(beam.block_table, len(states) - 1, states[-1:])
        if at == num_steps // 2 and device.others and data.draw(st.booleans()):
            may_copy_more = True  # the device also copies blocks that it no longer shares
            for side in (host, device):
                side.others.pop().release()
        assert beams_read(lent, device.engine, ids)
        assert all(reads(device.engine, other) for other in device.others)
        lent._device.books.check()
        audit.check(device.cache)
    state = lent.reconcile()
    assert (state.num_steps, any(state[2:])) == (num_steps, False)
    _assert_alike(host, device)
    copied = [side.cache.stats().copied_blocks for side in (device, host)]
    assert copied[0] == copied[1] or (may_copy_more and copied[0] > copied[1])
    assert [beam.token_ids.tolist() for beam in device.beams] == ids
    _live_on(host, device, data.draw(st.lists(st.integers(0, 5), max_size=8)))


def _assert_alike(host: Side, device: Side) -> None:
    for side in (host, device):
        audit.check(side.cache)
        assert all(reads(side.engine, beam) for beam in (*side.beams, *side.others))
    for mine, theirs in zip(device.beams, host.beams, strict=True):
        assert mine.is_open == theirs.is_open
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.num_committed_tokens == theirs.num_committed_tokens
        assert mine.num_cached_tokens == theirs.num_cached_tokens
    tables = [
        [block for each in (*side.beams, *side.others) for block in each.block_table.tolist()]
        for side in (device, host)
    ]
    named = set(zip(*tables, strict=True))
    assert len(named) == len({mine for mine, _ in named}) == len({theirs for _, theirs in named})
    counts = [
        (stats.free_blocks, stats.resident_blocks, stats.sequence_blocks, stats.evictable_blocks)
        for stats in (device.cache.stats(), host.cache.stats())
    ]
    assert counts[0] == counts[1] and device.cache.stats().device_blocks == 0
    used = [side.cache.tenant_stats("a") for side in (device, host)]
    assert used[0] == used[1]


def _live_on(host: Side, device: Side, acts: list[int]) -> None:
    """A sequence that was lent behaves like any other."""
    for at, act in enumerate(acts):
        for side in (host, device):
            if not side.beams:
                return
            beam = side.beams[at % len(side.beams)]
            if act == 0:
                beam.commit(beam.num_tokens)
            elif act == 1:
                beam.truncate(max(beam.num_committed_tokens, beam.num_tokens - 3))
            elif act == 2:
                side.beams.remove(beam)
                beam.release()
            elif act == 3:
                side.beams += beam.fork(1)
            else:
                growing = side.beams[: act - 2]
                starts = [each.num_tokens for each in growing]
                side.cache.append(growing, [7] * len(growing))
                for each, start in zip(growing, starts, strict=True):
                    side.engine.write(each.block_table, start, chain(NS, each.token_ids.tolist())[start:])
        _assert_alike(host, device)
    for side in (host, device):
        for sequence in (*side.beams, *side.others):
            sequence.release()
        side.cache.evict(256)
        assert side.cache.stats().free_blocks == 256


# --- errors on the device


def lent_pair(lent: int = 3) -> tuple[PrefixCache, Engine, LentBeams, list[list[int]]]:
    """Two beams of six tokens in blocks of four that share everything, and ``lent`` extra blocks."""
    cache, engine = stored(16)
    parent = computed(cache, engine, range(6), 6)
    beams = cache.reorder([parent], [0, 0])
    return cache, engine, cache.lend(beams, 8, num_blocks=lent), [list(range(6)), list(range(6))]


def test_running_out_of_blocks_is_flagged_and_writes_nothing() -> None:
    """A flag tells the host, and later steps do nothing. After more blocks are lent, the steps continue."""
    cache, engine, beams, ids = lent_pair(lent=1)
    step(beams, engine, ids, [0, 0], [10, 11])
    before = cache.storage.data.clone()
    books = beams._device.books.read()
    for parents in ([0, 0], [1, 1]):  # a further copy, for which there is no block
        beams.step(torch.tensor(parents, dtype=torch.int32), torch.tensor([1, 2]))
    state = beams.state()
    assert (state.num_steps, state.num_free_blocks, state.out_of_blocks) == (1, 0, True)
    assert not (state.table_full or state.bad_parent or state.bad_token)
    assert beams._device.books.read()._replace(status=0) == books and torch.equal(cache.storage.data, before)
    used = cache.tenant_stats("a").used_blocks
    beams.lend_more(2)
    assert cache.tenant_stats("a").used_blocks == used + 2 and cache.stats().device_blocks == 3
    audit.check(cache)
    step(beams, engine, ids, [1, 1], [1, 2])
    assert beams_read(beams, engine, ids)
    assert beams.reconcile()[:3] == (2, 2, False)
    assert [beam.token_ids.tolist() for beam in beams.sequences] == ids
    audit.check(cache)


@pytest.mark.parametrize(
    ("parents", "new", "field"),
    [
        ([0, 2], [1, 1], "bad_parent"),
        ([-1, 0], [1, 1], "bad_parent"),
        ([0, 1], [-1, 1], "bad_token"),
        ([0, 1], [1, 2**32], "bad_token"),
    ],
)
def test_an_invalid_step_is_flagged_and_does_nothing(parents: list[int], new: list[int], field: str) -> None:
    cache, engine, beams, ids = lent_pair()
    before = beams._device.books.read()
    beams.step(torch.tensor(parents, dtype=torch.int32), torch.tensor(new))
    state = beams.state()
    assert getattr(state, field) and sum(state[2:]) == 1 and state.num_steps == 0
    assert beams._device.books.read()._replace(status=0) == before
    beams.clear()
    step(beams, engine, ids, [1, 0], [2**32 - 1, 2**31])
    assert beams.reconcile().num_steps == 1
    assert [beam.token_ids.tolist() for beam in beams.sequences] == ids
    audit.check(cache)


def test_the_number_of_steps_is_limited() -> None:
    """At least ``max_steps`` steps are possible. Then a flag is set, even if blocks are left."""
    cache, engine = stored(block_size=1)
    beams = cache.lend([computed(cache, engine, [1])], 4, num_blocks=30)
    while not beams.state().table_full:
        beams.step(torch.zeros(1, dtype=torch.int32), torch.tensor([7]))
    assert 4 <= beams.reconcile().num_steps <= 8
    audit.check(cache)


def test_a_beam_of_another_group_cannot_be_a_parent() -> None:
    cache, engine = stored()
    one, two = (computed(cache, engine, [first, 1, 2, 3, 4]) for first in range(2))
    beams = cache.lend([*one.fork(1), one, two], 4, groups=[7, 7, 5])
    beams.step(torch.tensor([2, 1, 2], dtype=torch.int32), torch.tensor([1, 1, 1]))
    assert beams.state().bad_parent
    beams.clear()
    ids = [sequence.token_ids.tolist() for sequence in beams.sequences]
    step(beams, engine, ids, [1, 1, 2], [1, 1, 1])
    beams.reconcile()
    assert [sequence.token_ids.tolist() for sequence in beams.sequences] == ids
    audit.check(cache)


# --- refused and allowed calls of the host


def test_lent_sequences_refuse_everything_but_release() -> None:
    """Other calls raise SequenceLent and change nothing. The host's view of the sequences stays as it was."""
    cache, _, beams, _ = lent_pair()
    one, two = beams.sequences
    before = cache.snapshot()
    calls: list[Callable[[], object]] = [
        lambda: one.commit(6),
        lambda: one.append(1),
        lambda: one.extend([1, 2]),
        lambda: one.truncate(6),
        lambda: one.fork(1),
        lambda: cache.append([one, two], [1, 2]),
        lambda: cache.reorder([one, two], [0, 0]),
        lambda: cache.lend([one], 1),
    ]
    for call in calls:
        with pytest.raises(SequenceLent, match="reconcile"):
            call()
    assert same(before, cache)
    assert one.is_lent and one.is_open and "lent" in repr(one) and one.token_ids.tolist() == list(range(6))
    beams.reconcile()
    assert not one.is_lent and one.is_open and "open" in repr(one)
    for gone in (beams.reconcile, beams.state, beams.slots, beams.clear, lambda: beams.lend_more(1)):
        with pytest.raises(LeaseError, match="taken back"):
            gone()
    one.append(1)
    audit.check(cache)


def test_lending_refuses_invalid_arguments() -> None:
    """Each refusal names its reason and changes nothing."""
    cache, engine = stored(12)
    cache.add_tenant(Tenant("b", max_blocks=4))
    one, gone = computed(cache, engine, range(5)), cache.open(NS, [9])
    gone.release()
    other = computed(cache, engine, range(5), ns=OTHER)
    publisher = cache.publish("base", Namespace("op", "m"), range(4), ["a"])
    foreign = stored()[0].open(NS, [1])
    before = cache.snapshot()
    for call, error, named in (
        (lambda: cache.lend([], 1), ArgumentError, "sequences"),
        (lambda: cache.lend([one, one], 1), ArgumentError, "twice"),
        (lambda: cache.lend([one, foreign], 1), ArgumentError, "of this cache"),
        (lambda: cache.lend([one, other], 1), ArgumentError, "one tenant"),
        (lambda: cache.lend([publisher], 1), ArgumentError, "base"),
        (lambda: cache.lend([gone], 1), LeaseError, "released"),
        (lambda: cache.lend([one], 0), ArgumentError, "max_steps"),
        (lambda: cache.lend([one], True), ArgumentError, "max_steps"),
        (lambda: cache.lend([one], 1.0), ArgumentError, "max_steps"),
        (lambda: cache.lend([one], 2**31, num_blocks=0), ArgumentError, "max_steps=2147483648 .* to 1048576"),
        (lambda: cache.lend(one, 1), ArgumentError, "sequences=.* an iterable"),  # type: ignore[arg-type]
        (lambda: cache.lend([one], 1, num_blocks=-1), ArgumentError, "num_blocks"),
        (lambda: cache.lend([one], 1, groups=[0, 1]), ArgumentError, "groups"),
        (lambda: cache.lend([one], 1, groups=["x"]), ArgumentError, "groups"),
        (lambda: cache.lend([one], 1, num_blocks=10), OutOfBlocks, "10 blocks needed"),
        (lambda: cache.lend([other], 1, num_blocks=3), QuotaExceeded, "4 used|of the tenant's 4"),
        (lambda: make_cache().lend([], 1), ConfigError, "layout"),
    ):
        with pytest.raises(error, match=named):
            call()
        assert same(before, cache), named
    with cache.lend([other], 1, num_blocks=2) as beams:
        with pytest.raises(QuotaExceeded):
            beams.lend_more(1)
        with pytest.raises(ArgumentError):
            beams.lend_more(0)
        assert cache.tenant_stats("b").used_blocks == 4
    assert cache.tenant_stats("b").used_blocks == 2
    audit.check(cache)


def test_invalid_tensors_are_named() -> None:
    _, _, beams, _ = lent_pair()
    good, ids = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    for parents, new, named in (
        (ids, ids, "parents"),
        (good[:1], ids, "parents.shape"),
        (good, ids[:1], "token_ids.shape"),
        (good, ids.float(), "token_ids"),
        (good, None, "token_ids"),
        (good, ids.to("meta"), "token_ids.device"),
    ):
        with pytest.raises(ArgumentError) as caught:
            beams.step(parents, new)
        assert caught.value.argument == named
    assert beams.state().num_steps == 0
    beams.step(good, ids.int())
    assert beams.reconcile().num_steps == 1


def test_a_release_first_takes_all_beams_back() -> None:
    """The other beams become sequences again, with their tokens. Steps that are still queued do nothing."""
    cache, engine, beams, ids = lent_pair()
    step(beams, engine, ids, [1, 1], [10, 11])
    books = beams._device.books
    one, two = beams.sequences
    one.release()
    assert beams.is_over and not one.is_open and two.is_open and two.token_ids.tolist() == ids[1]
    assert reads(engine, two)
    audit.check(cache)
    before = cache.storage.data.clone()
    beams._device.step(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    books.clear_status()
    beams._device.step(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(cache.storage.data, before)
    with pytest.raises(LeaseError):
        one.release()
    two.release()
    assert cache.stats().sequence_blocks == 0
    audit.check(cache)


def test_leaving_with_takes_the_beams_back_after_an_error() -> None:
    cache, engine, beams, ids = lent_pair()
    with pytest.raises(ZeroDivisionError), beams:
        step(beams, engine, ids, [0, 0], [10, 11])
        raise ZeroDivisionError
    assert beams.is_over and [beam.token_ids.tolist() for beam in beams.sequences] == ids
    with beams.sequences[0], beams.sequences[1], cache.lend(beams.sequences, 2) as again:
        step(again, engine, ids, [1, 1], [12, 13])
    assert not beams.sequences[0].is_open and cache.stats().sequence_blocks == 0
    audit.check(cache)


def test_a_lent_sequence_may_leave_its_with_block() -> None:
    cache, engine = stored()
    with computed(cache, engine, range(6)) as sequence:
        beams = cache.lend([sequence], 2)
    assert beams.is_over and cache.stats().sequence_blocks == 0
    audit.check(cache)


@pytest.mark.parametrize("mode", ["burst", "strict"])
def test_a_purge_while_beams_are_lent(mode: str) -> None:
    """The blocks are quarantined until the first release, which takes all beams back. Other calls report the purge."""
    cache, engine = stored()
    cache.add_tenant(Tenant("a", guaranteed_blocks=20, mode=mode))
    parent = computed(cache, engine, range(10), 10)
    beams = cache.lend(cache.reorder([parent], [0, 0]), 8)
    ids = [list(range(10)), list(range(10))]
    step(beams, engine, ids, [0, 0], [1, 2])
    used = cache.tenant_stats("a").used_blocks
    cache.purge("a")
    audit.check(cache)
    assert cache.tenant_stats("a").used_blocks == used
    one, two = beams.sequences
    for call in (
        lambda: one.commit(6),
        lambda: beams.lend_more(1),
        beams.state,
        lambda: cache.lend([one], 1),
    ):
        with pytest.raises(StaleGeneration):
            call()
    assert not one.is_open
    one.release()
    audit.check(cache)
    assert beams.is_over and not two.is_open
    with pytest.raises(StaleGeneration):
        two.append(1)
    with two:
        pass
    assert cache.stats().free_blocks == 64
    audit.check(cache)


def test_a_purge_and_then_reconcile() -> None:
    cache, _, beams, _ = lent_pair()
    cache.purge("a")
    beams.reconcile()
    audit.check(cache)
    for sequence in beams.sequences:
        with pytest.raises(StaleGeneration):
            sequence.fork(1)
        sequence.release()
    assert cache.stats().free_blocks == 16
    audit.check(cache)


def test_lent_blocks_are_scrubbed_before_and_after() -> None:
    """Blocks are lent without another tenant's bytes.

    Blocks that come back are zeroed before the next tenant gets them.
    """
    cache, engine = stored(8, policy="lru")
    for tenant in "ab":
        cache.add_tenant(Tenant(tenant, mode="strict", guaranteed_blocks=4))
    with computed(cache, engine, range(16), 16, ns=OTHER):
        pass
    cache.clear(OTHER)
    beams = cache.lend([computed(cache, engine, range(4))], 12, num_blocks=3)
    free = beams._device.books.read().free
    assert len(free) == 3 and not cache.storage.data[free].any()
    ids = [list(range(4))]
    for at in range(9):
        step(beams, engine, ids, [0], [at])
    assert cache.storage.data[beams.tables[0].tolist()].any()
    beams.sequences[0].release()
    assert not cache.storage.data.any()
    audit.check(cache)


def test_other_sequences_continue_while_beams_are_lent() -> None:
    """Sequences that share blocks with beams append, commit, fork and end. Neither side notices the other."""
    cache, engine = stored(48)
    parent = computed(cache, engine, range(10))
    beams = cache.lend(parent.fork(3), 16)
    ids = [list(range(10))] * 3
    step(beams, engine, ids, [0, 1, 1], [20, 21, 22])
    start = parent.num_tokens
    parent.extend([5, 6, 7])
    engine.write(parent.block_table, start, chain(NS, parent.token_ids.tolist())[start:])
    parent.commit(13)
    audit.check(cache)
    step(beams, engine, ids, [2, 1, 0], [30, 31, 32])
    assert beams_read(beams, engine, ids) and reads(engine, parent)
    parent.release()
    cache.clear(NS)
    cache.evict(48)
    audit.check(cache)
    step(beams, engine, ids, [0, 0, 0], [40, 41, 42])
    assert beams_read(beams, engine, ids)
    beams.reconcile()
    assert [beam.token_ids.tolist() for beam in beams.sequences] == ids
    assert all(reads(engine, beam) for beam in beams.sequences)
    audit.check(cache)
    for beam in beams.sequences:
        beam.commit(13)
        beam.release()
    assert cache.stats().free_blocks == 48


@pytest.mark.parametrize("groups", [[0, 1, 1], [0, 1, 0], [0, 1, 2]])
def test_groups_may_share_blocks_with_each_other(groups: list[int]) -> None:
    """One group counts a block as part of its prefix, and another group could free it. Then neither group frees it."""
    cache, engine = stored()
    parent = computed(cache, engine, range(5))
    beams = parent.fork(2)
    beams[1].extend(range(9))
    engine.write(beams[1].block_table, 5, chain(NS, beams[1].token_ids.tolist())[5:])
    lent = cache.lend([parent, *beams], 12, groups=groups)
    ids = [sequence.token_ids.tolist() for sequence in lent.sequences]
    for at in range(12):
        parents = [max(other for other in range(3) if groups[other] == group) for group in groups]
        step(lent, engine, ids, parents if at % 3 == 0 else [0, 1, 2], [at, 20 + at, 40 + at])
        assert beams_read(lent, engine, ids)
        audit.check(cache)
    lent.reconcile()
    assert [sequence.token_ids.tolist() for sequence in lent.sequences] == ids
    assert all(reads(engine, sequence) for sequence in lent.sequences)
    audit.check(cache)
    for sequence in lent.sequences:
        sequence.release()
    assert cache.stats().free_blocks == 64


def test_ghost_keys_of_committed_beams_match_their_ids() -> None:
    """Ghost keys name a block by the tokens before it. Beams that changed places rename theirs."""
    cache, engine = stored(policy="lrfu", segment_tokens=4)
    pair = [computed(cache, engine, range(first, first + 8), commit=8) for first in (0, 100)]
    ids = [[*range(8)], [*range(100, 108)]]
    with cache.lend(pair, max_steps=4, groups=[0, 0]) as beams:
        for at, parents in enumerate([[1, 0], [0, 1], [0, 1], [0, 1]]):
            step(beams, engine, ids, parents, [at, 50 + at])
    policy = cache._tenants[NS.tenant].policy
    for sequence, its in zip(pair, ids, strict=True):
        assert sequence.token_ids.tolist() == its
        sequence.commit(12)
        key = sequence.token_ids.tobytes()
        wanted = SegmentKeys(NS, 16).between(0, 48, key, 48, bytearray())
        named = [key for node in path_to(sequence) for piece in policy.pieces(node) for key in piece.keys]
        assert tuple(named) == wanted
        sequence.release()
    audit.check(cache)


def path_to(sequence: Sequence) -> list[Any]:
    """The nodes that the sequence's lease protects, from the top."""
    return path_between(sequence._state._tree.root, sequence._state._node)


def test_beams_without_tokens() -> None:
    cache, engine = stored(block_size=2)
    ids: list[list[int]] = [[], []]
    with cache.lend([cache.open(NS, []), cache.open(NS, [])], 4) as beams:
        for at in range(4):
            step(beams, engine, ids, [1, 1], [at, 9])
    assert [sequence.token_ids.tolist() for sequence in beams.sequences] == ids
    assert all(reads(engine, sequence) for sequence in beams.sequences)
    audit.check(cache)


def test_beams_of_two_namespaces() -> None:
    """A beam that continues a beam of another namespace of its tenant moves to that namespace."""
    cache, engine = stored()
    there = Namespace("a", "m", None, "salt")
    one, two = computed(cache, engine, range(6), 6), computed(cache, engine, range(7), 7, there)
    beams = cache.lend([one, two], 4)
    beams.step(torch.tensor([1, 1], dtype=torch.int32), torch.tensor([8, 9]))
    beams.reconcile()
    assert one.namespace == two.namespace == there
    assert one.token_ids.tolist() == [*range(7), 8] and two.token_ids.tolist() == [*range(7), 9]
    audit.check(cache)
    for sequence in (one, two):
        sequence.release()
    assert cache.stats().sequence_blocks == 0
    audit.check(cache)


def test_beams_behind_a_base() -> None:
    """The base's blocks are a prefix outside all counts, and stay with the operator."""
    cache, engine = stored()
    base = Namespace("op", "m")
    with cache.publish("base", base, range(8), ["a"]) as sequence:
        shared = sequence.block_table.tolist()
        engine.write(sequence.block_table, 0, chain(base, range(8)))
        sequence.commit(8)
    parent = cache.open(NS, range(14))
    assert parent.num_cached_tokens == 8
    parent.commit(12)
    used = cache.tenant_stats("op").used_blocks
    with cache.lend([parent, *parent.fork(2)], 8) as beams:
        for at in range(6):
            beams.step(torch.tensor([at % 3, 0, 1], dtype=torch.int32), torch.tensor([at, 1, 2]))
            audit.check(cache)
        cache.unpublish("base")
        audit.check(cache)
    for beam in beams.sequences:
        assert beam.num_tokens == 20 and beam.block_table[:2].tolist() == shared
        beam.commit(20)
        beam.release()
    audit.check(cache)
    assert cache.tenant_stats("op").used_blocks == used and cache.tenant_stats("a").used_blocks == 0


def test_searches_and_requests_in_several_threads() -> None:
    """Each thread lends and takes back its own beams, and several threads release beams of one search.

    Audits run meanwhile.
    """
    cache, _ = stored(400)
    failures: list[BaseException] = []

    def search(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(12):
                parent = cache.open(Namespace("a" if seed % 2 else "b", "m"), rng.integers(0, 2, 9))
                parent.commit(9)
                sequences = [parent, *parent.fork(2)]
                beams = cache.lend(sequences, 6)
                for _ in range(5):
                    parents = torch.from_numpy(rng.integers(0, 3, 3, dtype=np.int32))
                    beams.step(parents, torch.from_numpy(rng.integers(0, 3, 3)))
                enders = [threading.Thread(target=sequence.release) for sequence in sequences]
                for ender in enders:
                    ender.start()
                for ender in enders:
                    ended(ender)
                assert beams.is_over and not any(sequence.is_open for sequence in sequences)
        except BaseException as error:  # noqa: BLE001 - reported in the main thread
            failures.append(error)

    threads = [threading.Thread(target=search, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        audit.check(cache)
    assert failures == []
    audit.check(cache)
    assert cache.stats().sequence_blocks == 0 and cache.stats().num_sequences == 0


def test_a_device_error_while_lending_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised to the caller, and the sequences are unchanged."""
    from radixkv.storage import beams as device

    cache, engine = stored()
    one = computed(cache, engine, range(6))
    before = cache.snapshot()

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(device, "Beams", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        cache.lend([one], 4)
    assert same(before, cache) and one.is_open
    one.append(1)


@pytest.mark.parametrize("wrong", ["a block that wasn't lent", "free twice", "shared end", "another length"])
def test_corrupted_device_tables_close_the_beams(wrong: str) -> None:
    """A stray write changed the device's tables and counters.

    IntegrityError is raised and the beams are closed. The laws hold.
    """
    cache, engine, beams, ids = lent_pair(lent=4)
    bystander = computed(cache, engine, range(20, 27))
    step(beams, engine, ids, [0, 1], [10, 11])
    books = beams._device.books
    if wrong == "a block that wasn't lent":
        books.tables[0, 1] = bystander.block_table[0].item()
    elif wrong == "free twice":
        books.free[0] = books.free[1]
    elif wrong == "shared end":
        books.tables[0] = books.tables[1]
    else:
        books.lengths[0] += 1
    with pytest.raises(IntegrityError):
        beams.reconcile()
    assert beams.is_over and not any(beam.is_open for beam in beams.sequences)
    with pytest.raises(LeaseError, match="interrupted"):
        beams.sequences[0].release()
    assert reads(engine, bystander)
    audit.check(cache)
    bystander.release()
    assert cache.stats().sequence_blocks == 0


def test_many_beams_in_a_pool_of_half_precision() -> None:
    """A large case: another layout, 63 beams, and blocks that come and go. No block is lost."""
    cache = PrefixCache(CacheConfig(2_000, 8, KVLayout(2, 2, 4, "bfloat16")))
    parent = cache.open(NS, range(100))
    sequences = parent.fork(63)
    rng = np.random.default_rng(0)
    with cache.lend(sequences, 40) as beams:
        for _ in range(40):
            parents = torch.from_numpy(rng.integers(0, 63, 63, dtype=np.int32))
            beams.step(parents, torch.from_numpy(rng.integers(0, 1_000, 63)))
        assert beams.state().num_steps == 40 and not any(beams.state()[2:])
    audit.check(cache)
    for sequence in sequences:
        sequence.release()
    audit.check(cache)
    assert cache.stats().sequence_blocks == parent.num_blocks == 13
