"""From the journal to the mirror: ranges, overflow, and events while the cache is being read."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.publisher import Publisher
from radixkv.coordination.store.holdings import Holdings
from radixkv.coordination.store.wire import Entry
from tests.waiting import ended

KEYS = FleetKeys(b"0123456789abcdef0123456789abcdef")
NAMESPACES = [Namespace("acme", "m"), Namespace("other", "m")]
PROMPTS = [np.random.default_rng(seed).integers(0, 9, 1500).astype("<u4").tobytes() for seed in range(2)]


def publisher(max_records: int = 1000, max_bytes: int = 1 << 24, **options: Any) -> Publisher:
    return Publisher(KEYS, max_records=max_records, max_bytes=max_bytes, wake=lambda: None, **options)


def drained(journal: Publisher, view: Holdings | None = None) -> Holdings:
    """The state of a reader that applies all entries to ``view``, or to an empty state."""
    view = Holdings() if view is None else view
    while journal.num_queued or journal.is_lost:
        entries, lost = journal.drain()
        assert not lost
        for entry in entries:
            view.apply(entry)
    return view


def contents(holdings: Holdings) -> dict[bytes, set[bytes]]:
    return {namespace: set(held) for namespace, _, held in holdings.groups()}


def model_of(held: dict[tuple[int, int], set[int]]) -> dict[bytes, set[bytes]]:
    """The expected digests, from the held segment ends by (namespace, prompt)."""
    expected: dict[bytes, set[bytes]] = {}
    for (namespace, index), ends in held.items():
        digests = list(KEYS.digests(NAMESPACES[namespace], PROMPTS[index]))
        found = {digests[end // 256 - 1] for end in ends}
        if found:
            expected.setdefault(KEYS.namespace(NAMESPACES[namespace]), set()).update(found)
    return expected


step = st.tuples(
    st.sampled_from(["stored", "removed", "cleared"]),
    st.integers(0, 1),
    st.integers(0, 1),
    st.tuples(st.integers(0, 1500), st.integers(0, 1500)).map(sorted),
)


@given(st.lists(step, max_size=30), st.integers(1, 7))
def test_ranges_become_the_segments_that_end_in_them(steps: list[Any], drain_every: int) -> None:
    journal = publisher()
    view = Holdings()
    held: dict[tuple[int, int], set[int]] = {}
    for number, (op, namespace, index, (start, stop)) in enumerate(steps):
        ends = {end for end in range(256, 1501, 256) if start < end <= stop}
        if op == "cleared":
            journal.cleared(NAMESPACES[namespace])
            held = {key: ends for key, ends in held.items() if key[0] != namespace}
        else:
            getattr(journal, op)(NAMESPACES[namespace], PROMPTS[index][: 4 * stop], start, stop)
            known = held.setdefault((namespace, index), set())
            held[namespace, index] = known | ends if op == "stored" else known - ends
        if number % drain_every == 0:
            for entry in journal.drain().entries:
                view.apply(entry)
    while journal.num_queued:
        for entry in journal.drain().entries:
            view.apply(entry)
    assert contents(view) == contents(journal.mirror) == model_of(held)
    assert view.num_digests == journal.mirror.num_digests == sum(map(len, contents(view).values()))


def test_every_end_of_a_range_counts_once() -> None:
    journal = publisher()
    for start, stop in ((0, 255), (255, 256), (256, 511), (511, 513), (513, 1024)):
        journal.stored(NAMESPACES[0], PROMPTS[0][: 4 * stop], start, stop)
    entries = journal.drain().entries
    digests = list(KEYS.digests(NAMESPACES[0], PROMPTS[0]))
    assert [entry.digests for entry in entries] == [digests[0], digests[1], digests[2] + digests[3]]
    assert [entry.parent for entry in entries] == [b"", digests[0], digests[1]]


def test_long_and_short_keys_give_the_same_digests() -> None:
    """A long key is queued whole, a short key as the chain of its segments. Both give the digests of their tokens."""
    ids = np.random.default_rng(7).integers(0, 9, 20_000).astype(np.uint32).tobytes()
    pieces = ids[:50_000], ids[50_000:]
    digests = list(KEYS.digests(NAMESPACES[0], ids))
    journal = publisher()
    journal.stored(NAMESPACES[0], ids, 0, 6_000)
    short = journal.queued_bytes
    journal.stored(NAMESPACES[0], pieces, 6_000, 20_000)
    assert short < 4 * 6_000 and journal.queued_bytes - short > 4 * 20_000
    journal.removed(NAMESPACES[0], pieces, 17_920, 20_000)
    journal.removed(NAMESPACES[0], ids, 0, 256)
    entries = journal.drain().entries
    assert [entry.parent for entry in entries] == [b"", digests[22], digests[69], b""]
    assert b"".join(entry.digests for entry in entries) == b"".join(
        [*digests[:78], *digests[70:78], digests[0]]
    )
    assert contents(journal.mirror) == {KEYS.namespace(NAMESPACES[0]): set(digests[1:70])}
    assert journal.queued_bytes == 0 and journal.num_drained == 4


def test_a_drain_takes_a_bounded_part_of_the_queue() -> None:
    """A thread that needs the interpreter's lock then waits for one drain, not for all entries."""
    journal = publisher(max_bytes=1 << 30)
    prompts = [np.full(16_384, i, np.uint32).tobytes() for i in range(100)]
    for ids in prompts:
        journal.stored(NAMESPACES[0], ids, 0, 16_384)
    sizes = []
    while journal.num_queued:
        before = journal.num_queued
        assert not journal.drain().lost
        sizes.append(before - journal.num_queued)
    assert sum(sizes) == journal.num_drained == 100 and max(sizes) < 100 and journal.queued_bytes == 0
    assert journal.mirror.num_digests == 6_400


@pytest.mark.parametrize("limits", [{"max_records": 3}, {"max_bytes": 4 * 4096}])
def test_a_full_queue_is_dropped_whole_and_reported(limits: dict[str, int]) -> None:
    journal = publisher(**limits)
    for _ in range(3):
        journal.stored(NAMESPACES[0], PROMPTS[0][:1024], 0, 256)
    assert drained(journal).num_digests == 1
    for _ in range(40):
        journal.stored(NAMESPACES[1], PROMPTS[0], 0, 1500)
    assert journal.num_queued == 0 and journal.num_overflows == 1 and journal.is_lost
    assert journal.drain() == ([], True)
    assert journal.mirror.num_digests == 0
    journal.stored(NAMESPACES[1], PROMPTS[0][:1024], 0, 256)
    assert drained(journal).num_digests == 1


def test_a_suspended_journal_drops_everything_until_drained() -> None:
    journal = publisher()
    journal.suspend()
    journal.stored(NAMESPACES[0], PROMPTS[0], 0, 1500)
    assert journal.num_queued == 0 and journal.num_overflows == 0
    assert journal.drain() == ([], True) and journal.drain() == ([], False)


def test_rebuilding_while_the_cache_changes_gives_the_right_mirror() -> None:
    """Threads commit, evict and clear while the queue overflows repeatedly. Once they stop, the mirror is exact."""
    journal = publisher(max_records=20)
    cache = PrefixCache(CacheConfig(num_blocks=256, block_size=16), journal=journal)
    prompts = [np.random.default_rng(seed).integers(0, 9, 1024).astype(np.uint32) for seed in range(8)]
    resting = threading.Event()

    def work(namespace: Namespace, seed: int) -> None:
        chance = np.random.default_rng(seed)
        for _ in range(150):
            ids = prompts[chance.integers(len(prompts))][: int(chance.integers(16, 1024))]
            with cache.open(namespace, ids) as sequence:
                sequence.commit(len(ids))
            if chance.random() < 0.1:
                cache.evict(int(chance.integers(1, 60)))
            if chance.random() < 0.02:
                cache.clear(namespace)

    def digest() -> None:
        while not resting.is_set() or journal.num_queued or journal.is_lost:
            if journal.drain().lost:
                journal.rebuild(cache, lambda: None)

    workers = [
        threading.Thread(target=work, args=(namespace, seed)) for seed, namespace in enumerate(NAMESPACES)
    ]
    digester = threading.Thread(target=digest)
    for thread in (*workers, digester):
        thread.start()
    for thread in workers:
        ended(thread)
    resting.set()
    ended(digester)
    expected = {}
    for namespace in NAMESPACES:
        found = set()
        for ids in prompts:
            matched = cache.match(namespace, ids).num_tokens
            found |= set(KEYS.digests(namespace, ids.tobytes()[: 4 * matched]))
        if found:
            expected[KEYS.namespace(namespace)] = found
    assert contents(journal.mirror) == expected


def test_segments_behind_a_base_are_not_published() -> None:
    """Neither changes nor a rebuild of the mirror publish such segments.

    The prefix of the base's own account is published.
    """
    journal = publisher()
    cache = PrefixCache(CacheConfig(num_blocks=200, block_size=16), journal=journal)
    ids = np.arange(1_024)
    with cache.publish("base", NAMESPACES[1], ids[:512], ["acme"]) as sequence:
        sequence.commit(512)
    with cache.open(NAMESPACES[0], ids) as sequence:
        assert sequence.num_cached_tokens == 512
        sequence.commit(1_024)
    expected = {
        KEYS.namespace(NAMESPACES[1]): set(KEYS.digests(NAMESPACES[1], ids[:512].astype("<u4").tobytes()))
    }
    assert contents(drained(journal)) == expected
    anew = publisher()
    anew.rebuild(cache, lambda: None)
    assert contents(anew.mirror) == expected
    assert cache.evict(200) == 32 and not journal.num_queued


def test_rebuilding_handles_shared_and_branching_prefixes() -> None:
    journal = publisher()
    cache = PrefixCache(CacheConfig(num_blocks=512, block_size=16), journal=journal)
    base = list(range(700))
    for tail in range(4):
        ids = [*base, *([tail + 1000] * 900)]
        with cache.open(NAMESPACES[0], ids) as sequence:
            sequence.commit(len(ids))
    known = contents(drained(journal))
    journal.suspend()
    assert journal.drain().lost
    calls: list[int] = []
    journal.rebuild(cache, lambda: calls.append(1))
    assert contents(journal.mirror) == known and len(calls) == 4
    assert journal.mirror.num_digests == 2 + 4 * 4


# ---- holdings


def test_entries_applied_again_change_nothing() -> None:
    entries = [
        Entry("store", b"n" * 32, b"", b"a" * 16 + b"b" * 16),
        Entry("remove", b"n" * 32, b"", b"a" * 16),
        Entry("store", b"m" * 32, b"", b"c" * 16),
        Entry("clear", b"m" * 32),
        Entry("store", b"m" * 32, b"", b"d" * 16),
        Entry("remove", b"unknown" + b" " * 25, b"", b"d" * 16),
    ]
    for overlap in range(len(entries)):
        holdings = Holdings()
        for entry in [*entries, *entries[overlap:]]:
            holdings.apply(entry)
        assert contents(holdings) == {b"n" * 32: {b"b" * 16}, b"m" * 32: {b"d" * 16}}
        assert holdings.num_digests == 2
    holdings.apply(Entry("clear", b""))
    assert contents(holdings) == {} and holdings.num_digests == 0


def test_a_segment_is_in_one_tier() -> None:
    holdings = Holdings()
    name, a, b, c = b"n" * 32, b"a" * 16, b"b" * 16, b"c" * 16
    holdings.apply(Entry("store", name, b"", a + b))
    holdings.apply(Entry("store", name, b"", c, "disk"))
    assert list(holdings.groups()) == [(name, "device", {a, b}), (name, "disk", {c})]
    holdings.apply(Entry("tier", name, b"", b + b"unheld" + b" " * 10, "host"))
    assert dict(holdings.of(name)) == {a: "device", b: "host", c: "disk"} and holdings.num_digests == 3
    packed = [(namespace, tier, b"".join(found)) for namespace, tier, found in holdings.groups()]
    other = Holdings()
    other.store(b"m" * 32, [a])
    other.load(packed)
    assert dict(other.of(name)) == dict(holdings.of(name)) and other.num_digests == 3
    holdings.apply(Entry("store", name, b"", c))
    assert holdings.of(name)[c] == "device"


def test_too_many_namespaces_cause_a_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.coordination.publisher._MAX_NAMESPACES", 3)
    journal = publisher()
    cache = PrefixCache(CacheConfig(num_blocks=256, block_size=16), journal=journal)
    for index in range(9):
        with cache.open(Namespace("acme", "m", salt=str(index)), list(range(300))) as sequence:
            sequence.commit(300)
    while journal.num_queued or journal.is_lost:
        if journal.drain().lost:
            journal.rebuild(cache, lambda: None)
    expected = {
        KEYS.namespace(namespace): set(KEYS.digests(namespace, np.arange(256, dtype="<u4").tobytes()))
        for namespace in cache.namespaces()
    }
    assert contents(journal.mirror) == expected


def test_a_raised_generation_starts_new_digests() -> None:
    generations = {"acme": 0, "other": 0}
    journal = publisher(generation_of=generations.__getitem__)
    for namespace in NAMESPACES:
        journal.stored(namespace, PROMPTS[0], 0, 1500)
    view = drained(journal)
    generations["acme"] = 2
    journal.raised("acme", 2)
    journal.stored(NAMESPACES[0], PROMPTS[1], 0, 300)
    journal.raised("acme", 1)
    assert (
        contents(drained(journal, view))
        == contents(journal.mirror)
        == {
            KEYS.namespace(NAMESPACES[0], 2): set(KEYS.digests(NAMESPACES[0], PROMPTS[1], 0, 1, 2)),
            KEYS.namespace(NAMESPACES[1]): set(KEYS.digests(NAMESPACES[1], PROMPTS[0])),
        }
    )
    journal.suspend()
    generations["acme"] = 3
    journal.raised("acme", 3)
    assert journal.drain().lost
    journal.stored(NAMESPACES[0], PROMPTS[1], 0, 300)
    assert contents(drained(journal)).keys() == {KEYS.namespace(NAMESPACES[0], 3)}


def test_memory_for_namespaces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.coordination.publisher._MAX_NAMESPACES", 3)
    met: list[str] = []
    journal = publisher(generation_of=lambda tenant: met.append(tenant) or 1)
    most = 0
    for index in range(40):
        namespace = Namespace(f"tenant-{index}", "m")
        journal.stored(namespace, PROMPTS[0], 0, 1500)
        journal.cleared(namespace)
        journal.drain()
        most = max(most, journal.namespace_bytes)
    assert len(met) == 40 and journal.mirror.num_digests == 0
    assert 0 < most <= 3 * 600 + 7 * 150, "six tenants, and one namespace at a time"


def test_the_generation_of_a_new_tenant_is_looked_up() -> None:
    journal = Publisher(
        KEYS, max_records=9, max_bytes=1 << 20, wake=lambda: None, generation_of=lambda tenant: len(tenant)
    )
    journal.stored(NAMESPACES[0], PROMPTS[0], 0, 300)
    assert contents(drained(journal)).keys() == {KEYS.namespace(NAMESPACES[0], 4)}
