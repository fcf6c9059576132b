"""Versions of the weights: KV of one version are never matched, leased or reported in another."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, NamespaceError, NotResident, PrefixCache, audit
from radixkv.config import MAX_WEIGHTS
from radixkv.index.ghost_keys import SegmentKeys
from tests.index.support import compute, make_cache
from tests.index.test_changes import Recorder

OLD = Namespace("a", "m", None, "s")
NEW = OLD._replace(weights=1)
IDS = [*range(16)]
"""Four blocks."""


# --- the field


def test_the_version_is_part_of_the_identity() -> None:
    assert OLD.weights == 0 and Namespace("a", "m", None, "s", 1) == NEW != OLD
    assert OLD == Namespace("a", "m", None, "s", weights=0)
    assert len({OLD, NEW, OLD._replace(weights=1)}) == 2
    assert repr(NEW) == "Namespace(tenant='a', model='m', adapter=None, salt='s', weights=1)"
    assert OLD.framed().endswith(b"salt:str:1:sweights:int:1:0") and OLD.framed() != NEW.framed()
    assert sorted([NEW, OLD]) == [OLD, NEW]
    assert Namespace("a", "m", weights=MAX_WEIGHTS).weights == 2**53 - 1


@pytest.mark.parametrize(
    "wrong", [True, False, None, "1", 1.0, b"1", [1], float("nan"), -1, 2**53, 10**5000], ids=range(11)
)
def test_anything_else_is_no_version(wrong: Any) -> None:
    for make in (lambda: Namespace("a", "m", weights=wrong), lambda: OLD._replace(weights=wrong)):
        with pytest.raises(
            NamespaceError, match=r"namespace field weights is .*; allowed: an integer from 0"
        ) as error:
            make()
        assert len(str(error.value)) < 200


# --- in a process


def matched(cache: PrefixCache, namespace: Namespace) -> int:
    return cache.match(namespace, IDS).num_tokens


def test_what_one_version_computed_is_not_matched_in_another() -> None:
    cache = make_cache()
    compute(cache, IDS, OLD)
    assert (matched(cache, OLD), matched(cache, NEW)) == (16, 0)
    with cache.open(NEW, IDS) as sequence:
        assert sequence.num_cached_tokens == 0
        sequence.commit(8)
    assert (matched(cache, OLD), matched(cache, NEW)) == (16, 8)
    with cache.open(OLD, [*IDS, 99]) as sequence:
        assert sequence.num_cached_tokens == 16
    assert cache.namespaces("a") == [OLD, NEW]
    audit.check(cache)


def test_a_lease_of_one_version_holds_nothing_of_another() -> None:
    cache = make_cache(8)
    compute(cache, IDS, OLD)
    compute(cache, IDS, NEW)
    with cache.lease(cache.match(OLD, IDS)) as held:
        assert cache.evict(8) == 4
        assert (matched(cache, OLD), matched(cache, NEW)) == (16, 0)
        assert len(held.block_ids) == 4
    audit.check(cache)


def test_inserted_blocks_belong_to_their_version() -> None:
    cache = make_cache()
    cache.insert(OLD, IDS, cache.allocate(4))
    assert (matched(cache, OLD), matched(cache, NEW)) == (16, 0)
    own = cache.allocate(4)
    assert cache.insert(NEW, IDS, own).num_resident_tokens == 0, "nothing of it was resident"
    assert (
        cache.match(NEW, IDS).block_ids.tolist() == own.tolist() != cache.match(OLD, IDS).block_ids.tolist()
    )
    audit.check(cache)


def test_a_match_with_a_lease_or_a_touch_finds_one_version() -> None:
    cache = make_cache()
    compute(cache, IDS, OLD)
    assert (cache.touch(OLD, IDS), cache.touch(NEW, IDS)) == (16, 0)
    with cache.match_and_lease(NEW, IDS) as missed, cache.match_and_lease(OLD, IDS) as held:
        assert (len(missed.block_ids), len(held.block_ids)) == (0, 4)
    with pytest.raises(NotResident):
        cache.insert(NEW, IDS, cache.allocate(2), start=8)
    audit.check(cache)


def test_a_pin_keeps_one_version() -> None:
    cache = make_cache(8)
    compute(cache, IDS, OLD)
    with pytest.raises(NotResident):
        cache.pin(NEW, IDS, 60)
    pin = cache.pin(OLD, IDS, 60)
    assert pin.namespace == OLD
    compute(cache, IDS, NEW)
    cache.evict(8)
    assert (matched(cache, OLD), matched(cache, NEW)) == (16, 0)
    audit.check(cache)


def test_clear_forgets_one_version() -> None:
    cache = make_cache()
    for namespace in (OLD, NEW):
        compute(cache, IDS, namespace)
        cache.pin(namespace, IDS, 60)
    assert cache.clear(OLD) == 4
    assert (matched(cache, OLD), matched(cache, NEW)) == (0, 16)
    assert [pin.namespace for pin in cache.pins("a")] == [NEW]
    assert cache.purge("a") == 4 and matched(cache, NEW) == 0, "a purge covers all versions"
    audit.check(cache)


def test_no_sequence_leans_on_what_another_version_computes() -> None:
    cache = make_cache()
    with cache.open(OLD, IDS) as computing:
        computing.computing(16, step=0)
        with cache.open(NEW, [*IDS, 1], ahead=True) as other, cache.open(OLD, [*IDS, 1], ahead=True) as same:
            assert (other.num_ahead_tokens, same.num_ahead_tokens) == (0, 16)


def test_a_base_serves_its_own_version() -> None:
    cache = make_cache()
    account = Namespace("op", "m", weights=1)
    with cache.publish("base", account, IDS, ["a"]) as sequence:
        sequence.commit(16)
    assert cache.bases()[0].namespace.weights == 1
    assert (matched(cache, OLD), matched(cache, NEW), matched(cache, NEW._replace(weights=2))) == (0, 16, 0)
    compute(cache, IDS, OLD)
    with cache.open(NEW, [*IDS, *range(90, 98)]) as sequence:
        assert sequence.num_cached_tokens == 16
        sequence.commit(24)
    assert cache.match(OLD, [*IDS, *range(90, 98)]).num_tokens == 16
    assert cache.match(NEW, [*IDS, *range(90, 98)]).num_tokens == 24
    audit.check(cache)
    with cache.publish("newer", account._replace(weights=2), IDS, ["a"]) as sequence:
        sequence.commit(16)
    cache.unpublish("base")
    assert (matched(cache, NEW), matched(cache, NEW._replace(weights=2))) == (0, 16)
    audit.check(cache)


def test_the_journal_reports_each_version() -> None:
    journal = Recorder(4)
    cache = PrefixCache(CacheConfig(num_blocks=16, block_size=4), journal=journal)
    compute(cache, IDS, OLD)
    compute(cache, IDS[:8], NEW)
    assert {namespace: sum(each == namespace for each, _ in journal.held) for namespace in (OLD, NEW)} == {
        OLD: 4,
        NEW: 2,
    }
    cache.clear(OLD)
    assert {namespace for namespace, _ in journal.held} == {NEW}


def test_ghost_keys_differ_by_version() -> None:
    """A policy that remembers evicted prefixes doesn't take a prefix of new weights for one of old weights."""
    key = bytes(range(64))
    old, new, again = (SegmentKeys(each, 32).between(0, 64, key, 64, bytearray()) for each in (OLD, NEW, OLD))
    assert old == again and len(old) == 2 and not set(old) & set(new)
