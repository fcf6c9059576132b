"""Refusals change nothing: no block, no count, no place in the eviction order, and no entry of the journal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixkv import (
    ArgumentError,
    CacheConfig,
    ConfigError,
    LeaseError,
    Namespace,
    NotResident,
    OutOfBlocks,
    PrefixCache,
    QuotaExceeded,
    RadixKVError,
    Tenant,
    TokenError,
    audit,
)
from radixkv.index import recovery
from radixkv.index.tenant_settings import require_removable
from tests.index.support import NS, compute, make_cache, same
from tests.index.test_changes import Recorder
from tests.model import resident_prefixes

OTHER, NEW = Namespace("b", "m"), Namespace("c", "m")
NUM_BLOCKS = 16


class Full:
    """A pool without a free block: some blocks are evictable, some leased, some shared by forks, some lent."""

    def __init__(self, policy: str) -> None:
        self.journal = Recorder(4)
        self.cache = cache = PrefixCache(CacheConfig(NUM_BLOCKS, 4, policy=policy), journal=self.journal)
        compute(cache, range(12))
        compute(cache, [*range(4), 9, 9, 9, 9])
        compute(cache, range(50, 58), OTHER)
        self.released = cache.open(NS, range(70, 73))
        self.released.release()
        self.stale = cache.match(NS, range(12))
        cache.evict(1)
        self.roomy = cache.open(NEW, [1])
        self.roomy.reserve(6)
        self.running = cache.open(NS, [*range(8), 3])
        self.children = self.running.fork(2)
        self.lease = cache.lease(cache.match(OTHER, range(50, 54)))
        self.ended = cache.lease(cache.match(NS, range(4)))
        self.ended.release()
        self.lent = cache.allocate(cache.stats().free_blocks)
        assert cache.stats().free_blocks == 0 < cache.stats().evictable_blocks


Refused = Callable[[Full], Any]

NO_ROOM: dict[str, Refused] = {
    "open more than can be had": lambda full: full.cache.open(NEW, range(100, 140)),
    "open what would evict its own path": lambda full: full.cache.open(NS, [*range(12), *range(20)]),
    "a prompt longer than the pool": lambda full: full.cache.open(NS, np.arange(1_000_000)),
    "extend beyond the pool": lambda full: full.running.extend(np.arange(1_000_000)),
    "extend, with a copy": lambda full: full.children[0].extend(range(40)),
    "append a batch": lambda full: _batch(full),
    "open without a lookup": lambda full: full.cache.open(NS, range(56), lookup=False),
    "reserve": lambda full: full.running.reserve(60),
    "reserve, with a copy": lambda full: full.children[0].reserve(40),
    "extend beyond the room": lambda full: full.roomy.extend(range(60)),
    "allocate": lambda full: full.cache.allocate(NUM_BLOCKS + 1),
}

RELEASED: dict[str, Refused] = {
    "commit": lambda full: full.released.commit(1),
    "extend": lambda full: full.released.extend([1]),
    "append": lambda full: full.released.append(1),
    "append in a batch": lambda full: full.cache.append([full.running, full.released], [1, 1]),
    "truncate": lambda full: full.released.truncate(1),
    "fork": lambda full: full.released.fork(1),
    "reorder": lambda full: full.cache.reorder([full.running, full.released], [0, 0]),
    "release": lambda full: full.released.release(),
    "reserve": lambda full: full.released.reserve(1),
    "fill": lambda full: full.released.fill([]),
    "drop": lambda full: full.released.drop(),
    "fork with room": lambda full: full.roomy.fork(1),
    "reorder with room": lambda full: full.cache.reorder([full.running, full.roomy], [0, 1]),
    "insert after what isn't there": lambda full: full.cache.insert(NEW, range(8), full.lent[:1], start=4),
    "release a lease": lambda full: full.ended.release(),
    "lease a stale match": lambda full: full.cache.lease(full.stale),
}

NO_IDS: dict[str, Refused] = {
    f"{name} {wrong!r}": lambda full, call=call, wrong=wrong: call(full, wrong)  # type: ignore[misc]
    for wrong in ([1, -1], [2**32], [1.5], np.array([True]), np.array([1.0]), np.array([-1]), "1", [None])
    for name, call in {
        "open": lambda full, ids: full.cache.open(NEW, ids),
        "match": lambda full, ids: full.cache.match(NS, ids),
        "extend": lambda full, ids: full.running.extend(ids),
        "append": lambda full, ids: full.cache.append([full.running] * len(ids), ids),
        "insert": lambda full, ids: full.cache.insert(NEW, ids, []),
        "fill": lambda full, ids: full.roomy.fill(ids),
        "match and lease": lambda full, ids: full.cache.match_and_lease(NS, ids),
        "touch": lambda full, ids: full.cache.touch(NS, ids),
    }.items()
}

OUT_OF_RANGE: dict[str, Refused] = {
    "commit more than there is": lambda full: full.running.commit(10),
    "commit less than before": lambda full: full.running.commit(7),
    "truncate to more": lambda full: full.running.truncate(10),
    "truncate what is committed": lambda full: full.running.truncate(7),
    "no children": lambda full: full.running.fork(0),
    "a parent that isn't there": lambda full: full.cache.reorder([full.running], [1]),
    "a parent before the first": lambda full: full.cache.reorder([full.running], [-1]),
    "free a block that isn't lent": lambda full: full.cache.free([int(full.running.block_table[0])]),
    "free a block that isn't there": lambda full: full.cache.free([NUM_BLOCKS]),
    "insert a block that isn't there": lambda full: full.cache.insert(NEW, range(4), [-1]),
    "insert another's block": lambda full: full.cache.insert(NEW, range(4), full.running.block_table[:1]),
    "insert a block twice": lambda full: full.cache.insert(NEW, range(8), [full.lent[0]] * 2),
    "insert too few blocks": lambda full: full.cache.insert(NEW, range(8), full.lent[:1]),
    "insert too many after a position": lambda full: full.cache.insert(NS, range(8), full.lent[:2], start=4),
    "insert within a block": lambda full: full.cache.insert(NS, range(8), full.lent[:1], start=3),
    "insert before the beginning": lambda full: full.cache.insert(NS, range(8), full.lent[:1], start=-4),
    "insert after the end": lambda full: full.cache.insert(NS, range(8), [], start=12),
    "insert another's surplus": lambda full: full.cache.insert(NS, range(4), full.roomy.block_table[:1]),
    "reserve less than nothing": lambda full: full.running.reserve(-1),
    "reserve more than any pool has": lambda full: full.running.reserve(4 * NUM_BLOCKS + 1),
    "fill more than there is room": lambda full: full.roomy.fill([1] * 7),
    "fill without room": lambda full: full.running.fill([1]),
    "drop more than there is": lambda full: full.roomy.drop(7),
    "drop less than nothing": lambda full: full.roomy.drop(-1),
    "commit reserved room": lambda full: full.roomy.commit(2),
    "truncate into reserved room": lambda full: full.roomy.truncate(2),
    "evict less than nothing": lambda full: full.cache.evict(-1),
    "allocate less than nothing": lambda full: full.cache.allocate(-1),
}

WRONG_TYPES: dict[str, Refused] = {
    f"{name} {wrong!r}": lambda full, call=call, wrong=wrong: call(full, wrong)  # type: ignore[misc]
    for wrong in ("3", 3.0, True, None, object, ("a", "m"))
    for name, call in {
        "commit": lambda full, wrong: full.running.commit(wrong),
        "truncate": lambda full, wrong: full.running.truncate(wrong),
        "fork": lambda full, wrong: full.running.fork(wrong),
        "evict": lambda full, wrong: full.cache.evict(wrong),
        "allocate": lambda full, wrong: full.cache.allocate(wrong),
        "reorder, a parent": lambda full, wrong: full.cache.reorder([full.running], [wrong]),
        "reorder, a sequence": lambda full, wrong: full.cache.reorder([wrong], [0]),
        "append to": lambda full, wrong: full.cache.append([wrong], [1]),
        "match in": lambda full, wrong: full.cache.match(wrong, range(4)),
        "open in": lambda full, wrong: full.cache.open(wrong, range(4)),
        "insert into": lambda full, wrong: full.cache.insert(wrong, range(4), [0]),
        "clear": lambda full, wrong: full.cache.clear(wrong),
        "lease": lambda full, wrong: full.cache.lease(wrong),
        "match and lease in": lambda full, wrong: full.cache.match_and_lease(wrong, range(4)),
        "touch in": lambda full, wrong: full.cache.touch(wrong, range(4)),
        "reserve": lambda full, wrong: full.running.reserve(wrong),
        "insert after": lambda full, wrong: full.cache.insert(NS, range(4), [0], start=wrong),
        "blocks of": lambda full, wrong: full.cache.blocks_of(5 if isinstance(wrong, str) else wrong),
    }.items()
}

WRONG_HINTS: dict[str, Refused] = (
    {
        f"{flag} {wrong!r}": lambda full, flag=flag, wrong=wrong: full.cache.open(  # type: ignore[misc]
            NEW, range(4), **{flag: wrong}
        )
        for wrong in ("yes", 1, None, np.True_, object)
        for flag in ("lookup", "ahead")
    }
    | {
        f"hints {wrong!r}": lambda full, wrong=wrong: full.cache.open(NEW, range(4), hints=wrong)  # type: ignore[misc]
        for wrong in ("chat", {"type": "chat"}, 50, object)
    }
    | {
        f"insert, hints {wrong!r}": lambda full, wrong=wrong: full.cache.insert(  # type: ignore[misc]
            NEW, range(4), full.lent[:1], hints=wrong
        )
        for wrong in ("chat", {"type": "chat"}, 50, object)
    }
    | {
        f"drop {wrong!r}": lambda full, wrong=wrong: full.roomy.drop(wrong)  # type: ignore[misc]
        for wrong in ("3", 3.0, True, object, ("a", "m"))
    }
)


def _batch(full: Full) -> None:
    full.cache.evict(NUM_BLOCKS)
    full.lent = np.concatenate([full.lent, full.cache.allocate(full.cache.stats().free_blocks)])
    full.before = _all_of(full)  # type: ignore[attr-defined]
    full.cache.append([full.running, *full.children], [1, 2, 3])


def _all_of(full: Full) -> tuple[Any, ...]:
    return (full.cache.snapshot(), dataclasses.asdict(full.cache.stats()), list(full.journal.calls))


CASES = [
    (kind, name, call)
    for kind, calls in {
        OutOfBlocks: NO_ROOM,
        LeaseError: RELEASED,
        TokenError: NO_IDS,
        ArgumentError: OUT_OF_RANGE | WRONG_TYPES | WRONG_HINTS,
    }.items()
    for name, call in calls.items()
]


@pytest.mark.parametrize(
    "kind, name, call, policy",
    [
        pytest.param(kind, name, call, policy, id=f"{kind.__name__}: {name}-{policy}")
        for kind, name, call in CASES
        for policy in (("lru", "lfu") if kind is OutOfBlocks else ("lru",))  # others ask no policy
    ],
)
def test_a_refusal_changes_nothing(
    kind: type[RadixKVError], name: str, call: Refused, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three refusals the snapshot, counts and journal are equal, no repair ran, and later evictions are equal."""

    def never(*_: Any) -> None:
        raise AssertionError("a refusal was mended")

    monkeypatch.setattr(recovery, "_mend", never)
    full, twin = Full(policy), Full(policy)
    before = _all_of(full)
    for _ in range(3):
        with pytest.raises(kind):
            call(full)
        before = getattr(full, "before", before)
        assert same(before[0], full.cache) and _all_of(full)[1:] == before[1:]
    audit.check(full.cache)
    if name != "append a batch":
        for _ in range(full.cache.stats().evictable_blocks):
            assert full.cache.evict(1) == twin.cache.evict(1) == 1
            assert resident_prefixes(full.cache) == resident_prefixes(twin.cache)


class Owned:
    """A cache whose blocks the engine owns: some are resident, some leased, some to be reclaimed."""

    def __init__(self) -> None:
        self.journal = Recorder(4)
        self.cache = cache = PrefixCache(CacheConfig(NUM_BLOCKS, 4, blocks="engine"), journal=self.journal)
        cache.add_tenant(Tenant("c", max_blocks=2))
        cache.insert(NS, range(12), [0, 1, 2])
        cache.insert(OTHER, range(8), [3, 4])
        cache.insert(NEW, range(8), [5, 6])
        self.lease = cache.match_and_lease(NEW, range(8))
        cache.clear(OTHER)


OWNED: dict[str, tuple[type[RadixKVError], Callable[[PrefixCache], Any], str]] = {
    "open": (ConfigError, lambda cache: cache.open(NS, range(4)), "blocks='engine'.*'cache' for open"),
    "open without a lookup": (
        ConfigError,
        lambda cache: cache.open(NS, range(4), lookup=False),
        "blocks='engine'.*'cache' for open",
    ),
    "publish": (
        ConfigError,
        lambda cache: cache.publish("base", OTHER, range(4), ["d"]),
        "blocks='engine'.*'cache' for publish",
    ),
    "allocate": (ConfigError, lambda cache: cache.allocate(1), "blocks='engine'.*for allocate"),
    "free": (ConfigError, lambda cache: cache.free([9]), "blocks='engine'.*for free"),
    "evict": (ConfigError, lambda cache: cache.evict(1), "blocks='engine'.*for evict"),
    "reclaim less than nothing": (ArgumentError, lambda cache: cache.reclaim(-1), "num_blocks=-1"),
    "reclaim a half": (ArgumentError, lambda cache: cache.reclaim(0.5), r"num_blocks=0\.5"),
    "reclaim for nobody": (ArgumentError, lambda cache: cache.reclaim(1, 5), "tenant=5"),
    "insert what is resident": (
        ArgumentError,
        lambda cache: cache.insert(NS, [9] * 4, [1]),
        "block_ids=1 .*owned already",
    ),
    "insert what is to be reclaimed": (
        ArgumentError,
        lambda cache: cache.insert(NS, [9] * 4, [3]),
        "block_ids=3 .*owned already",
    ),
    "insert a block twice": (
        ArgumentError,
        lambda cache: cache.insert(NS, [9] * 8, [9, 9]),
        "block_ids=9 .*each block once",
    ),
    "insert another block of the tree": (
        ArgumentError,
        lambda cache: cache.insert(NS, range(12), [0, 2, 1]),
        "block_ids=2 .*owned already",
    ),
    "insert after what isn't there": (
        NotResident,
        lambda cache: cache.insert(NS, [9] * 8, [9], start=4),
        "0 of 4",
    ),
    "insert beyond the limit": (
        QuotaExceeded,
        lambda cache: cache.insert(NEW, range(12), [5, 6, 9]),
        "1 blocks needed, 2 of",
    ),
}


@pytest.mark.parametrize("name", OWNED)
def test_a_refusal_changes_nothing_when_the_engine_owns_the_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No repair runs, and the message names the argument and its value."""

    def never(*_: Any) -> None:
        raise AssertionError("a refusal was mended")

    monkeypatch.setattr(recovery, "_mend", never)
    owned, (kind, call, said) = Owned(), OWNED[name]
    before, calls = owned.cache.snapshot(), list(owned.journal.calls)
    for _ in range(2):
        with pytest.raises(kind, match=said):
            call(owned.cache)
        assert same(before, owned.cache) and owned.journal.calls == calls
    audit.check(owned.cache)
    assert sorted(owned.cache.reclaim(NUM_BLOCKS).tolist()) == [0, 1, 2, 3, 4]


def test_reclaim_is_refused_when_the_cache_has_the_blocks() -> None:
    """The message says what to call instead."""
    full = Full("lru")
    with pytest.raises(ConfigError, match=r"blocks='cache'.*'engine' for reclaim: .*allocate"):
        full.cache.reclaim(1)


NOT_A_TENANT = (None, 5, b"a", ["a"], NS)

BY_TENANT: dict[str, Callable[[PrefixCache, Any], Any]] = {
    "purge": PrefixCache.purge,
    "generation": PrefixCache.generation,
    "tenant": PrefixCache.tenant,
    "tenant_stats": PrefixCache.tenant_stats,
    "remove_tenant": PrefixCache.remove_tenant,
    "require_removable": require_removable,
    "blocks_of": PrefixCache.blocks_of,
    "pins": PrefixCache.pins,
    "namespaces": PrefixCache.namespaces,
}


@pytest.mark.parametrize("name", BY_TENANT)
def test_an_invalid_tenant_id_is_named(name: str) -> None:
    """Otherwise a purge of a namespace, for example, would silently forget nothing."""
    full = Full("lru")
    before = _all_of(full)
    for wrong in NOT_A_TENANT[name in ("pins", "namespaces") :]:  # for these two, None means all tenants
        with pytest.raises(
            ArgumentError, match=r"tenant=.* is not allowed; allowed: the id of a tenant, a string"
        ) as told:
            BY_TENANT[name](full.cache, wrong)
        assert (told.value.argument, told.value.value) == ("tenant", wrong)
        assert same(before[0], full.cache) and _all_of(full)[1:] == before[1:]


NOT_A_LIST: dict[str, Refused] = {
    "append, sequences": lambda full: full.cache.append(5, [1]),  # type: ignore[arg-type]
    "reorder, sequences": lambda full: full.cache.reorder(None, [0]),  # type: ignore[arg-type]
    "reorder, parents": lambda full: full.cache.reorder([full.running], np.int64(0)),  # type: ignore[arg-type]
    "publish, readers": lambda full: full.cache.publish("b", NEW, range(4), np.array(3)),
    "free, block_ids": lambda full: full.cache.free([[1], [1, 2]]),
    "insert, block_ids": lambda full: full.cache.insert(NEW, range(4), [1, [2]]),
    "insert, start": lambda full: full.cache.insert(NS, range(8), [0], start=[4]),  # type: ignore[arg-type]
    "insert, hints": lambda full: full.cache.insert(NS, range(4), [0], hints=5),  # type: ignore[arg-type]
    "reserve, num_tokens": lambda full: full.running.reserve(2**40),
    "drop, num_tokens": lambda full: full.roomy.drop(7),
    "fill, ids": lambda full: full.roomy.fill([1] * 7),
    "open, hints": lambda full: full.cache.open(NEW, range(4), hints="soon"),  # type: ignore[arg-type]
    "open, lookup": lambda full: full.cache.open(NEW, range(4), lookup=1),  # type: ignore[arg-type]
    "open, ahead": lambda full: full.cache.open(NEW, range(4), ahead="yes"),  # type: ignore[arg-type]
    "fork, num_children": lambda full: full.running.fork(2**40),
    "unpublish, base_id": lambda full: full.cache.unpublish(np.int64(3)),  # type: ignore[arg-type]
    "publish, base_id": lambda full: full.cache.publish("\ud800", NEW, range(4), ["d"]),
    "snapshot_in_slices, pause": lambda full: full.cache.snapshot_in_slices(3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", NOT_A_LIST)
def test_arguments_of_a_wrong_form_are_named(name: str) -> None:
    full = Full("lru")
    before = _all_of(full)
    with pytest.raises(ArgumentError) as told:
        NOT_A_LIST[name](full)
    assert told.value.argument == name.partition(", ")[2]
    assert same(before[0], full.cache) and _all_of(full)[1:] == before[1:]


def test_invalid_arguments_of_a_cache_are_named() -> None:
    config = CacheConfig(8, 4)
    with pytest.raises(ConfigError, match=r"config=8 is not allowed; allowed: a CacheConfig"):
        PrefixCache(8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"policy=.* is not allowed; allowed: one of lru, "):
        CacheConfig(8, 4, policy=np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"mode=.* is not allowed; allowed: 'burst' or 'strict'"):
        Tenant("a", mode=np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"clock=0.0 is not allowed"):
        PrefixCache(config, clock=0.0)  # type: ignore[arg-type]
    for grain, shown in ((None, "None"), (0, "0"), (6, "6"), (4.0, "4.0")):
        with pytest.raises(
            ArgumentError, match=rf"journal\.grain_tokens={shown} is not allowed; allowed: a multiple"
        ):
            PrefixCache(config, journal=Recorder(grain))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"journal\.grain_tokens=None"):
        PrefixCache(config, journal=object())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cache=8 is not allowed; allowed: a PrefixCache"):
        audit.check(8)  # type: ignore[arg-type]


def test_messages_shorten_long_values() -> None:
    cache = PrefixCache(CacheConfig(8, 4))
    with pytest.raises(ArgumentError, match=r"num_blocks=a negative integer of 16610 bits is not allowed"):
        cache.evict(-(10**5000))
    with pytest.raises(ArgumentError) as told:
        cache.free(["x"] * 10_000)
    assert len(str(told.value)) < 300 and told.value.value == ["x"] * 10_000


def _crowded() -> PrefixCache:
    """A pool full of leaves of one block, so that eviction for a long prompt works in slices.

    It has one base, ``b``.
    """
    cache = PrefixCache(CacheConfig(3_500, 1))
    cache.publish("b", NEW, [1, 2], ["reader"]).commit(2)
    for number in range(3_495):
        compute(cache, [1_000_000 + number])
    return cache


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (lambda cache: cache.open(NS, range(3_000), ahead=1), ArgumentError),
        (lambda cache: cache.open(NS, range(3_000), hints={}), ArgumentError),
        (lambda cache: cache.publish("b", NEW, range(3_000), ["other"]), ArgumentError),
        (lambda cache: cache.publish("c", Namespace("reader", "m"), range(3_000), ["x"]), ArgumentError),
    ],
)
def test_a_long_prompt_that_is_refused_evicts_nothing(
    refused: Callable[[PrefixCache], Any], error: type[Exception]
) -> None:
    cache = _crowded()
    before = cache.stats()
    with pytest.raises(error):
        refused(cache)
    assert cache.stats() == before
    audit.check(cache)


@pytest.mark.parametrize(
    "given", [{"on_pending": "wait"}, {"timeout_s": 0}, {"on_pending": "wait", "timeout_s": 1}]
)
def test_removed_arguments_are_named_with_their_replacement(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="on_pending and timeout_s were removed: use ahead=True"):
        make_cache().open(NS, range(4), **given)


def test_a_removed_error_is_named_with_its_replacement() -> None:
    with pytest.raises(ImportError, match=r"PendingError was removed: use .*ahead=True"):
        from radixkv import PendingError  # type: ignore[attr-defined]  # noqa: F401


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises((ArgumentError, ConfigError)) as error:
        call()
    return str(error.value)


def test_messages_name_the_argument_its_value_and_the_allowed_values() -> None:
    """A message names the item and not its list, a count and not a text, and only arguments that exist."""
    cache = PrefixCache(CacheConfig(num_blocks=16, block_size=2))
    a, b = (cache.open(NEW, [1, 2, number]) for number in (3, 4))
    assert message_of(lambda: cache.reorder([a, b], [0, 9])) == (
        "parents[1]=9 is not allowed; allowed: an integer from 0 to 1"
    )
    assert (
        message_of(lambda: cache.append([a, b], [1]))
        == "ids has 1 item; allowed: one for each of 2 sequences"
    )
    assert (
        message_of(lambda: cache.pin(NEW, [1], 5.0))
        == "ids has 1 item; allowed: at least 2 token ids, one block"
    )
    assert message_of(lambda: cache.publish("b", NEW, [1], ["d"])) == (
        "ids has 1 item; allowed: at least 2 token ids, one block"
    )
    assert message_of(lambda: cache.insert(NEW, range(4), [1])) == (
        "block_ids has 1 item; allowed: 2, one a whole block of ids"
    )
    assert message_of(lambda: cache.append([a, a], [1, 2])) == (
        "sequences has one of them twice; allowed: each sequence once"
    )
    said = message_of(lambda: cache.lend([a], 4))
    assert (
        said.startswith("cache has no storage, where lend ") and "storage=" not in said and "layout" in said
    )
    assert message_of(lambda: CacheConfig(num_blocks=0)) == (
        "num_blocks=0 is not allowed; allowed: an integer from 1 to 2147483647"
    )
