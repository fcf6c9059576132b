"""Published bases: the prefixes that readers match, the facts that they cannot see, and the end of a base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from radixkv import (
    ArgumentError,
    CacheConfig,
    LeaseError,
    Namespace,
    NamespaceError,
    PrefixCache,
    QuotaExceeded,
    Tenant,
    audit,
)
from radixkv.index import requests
from tests.index.support import compute, make_cache, same

OP, A, B = Namespace("op", "m"), Namespace("a", "m"), Namespace("b", "m")
SALTED = Namespace("a", "m", None, "salt")
IDS = [*range(16)]
"""Four blocks."""


def publish(
    cache: PrefixCache,
    base_id: str = "base",
    ids: Sequence[int] = IDS,
    readers: Sequence[str] = ("a", "b"),
    namespace: Namespace = OP,
) -> None:
    """Publish a base and commit all of it."""
    with cache.publish(base_id, namespace, ids, readers) as sequence:
        sequence.commit(sequence.num_tokens)
    audit.check(cache)


def published(num_blocks: int = 64, **settings: Any) -> PrefixCache:
    """A cache with the base."""
    cache = make_cache(num_blocks, **settings)
    publish(cache)
    return cache


def matched(cache: PrefixCache, namespace: Namespace, ids: Sequence[int] = IDS) -> int:
    """The number of matched tokens. Check that the match changes nothing."""
    before = cache.snapshot()
    found = cache.match(namespace, ids).num_tokens
    assert same(before, cache)
    return found


# --- matches with a base, and the tenants that may read it


def test_a_base_is_readable_once_all_of_it_is_committed() -> None:
    """A base is readable only once all of it is committed, for any sizes of chunks.

    Only whole blocks count. The base stays when its sequence grows and ends.
    """
    cache = make_cache(64)
    sequence = cache.publish("base", OP, [*IDS, 16, 17], ["a", "b"])
    assert sequence.num_tokens == 16 and not cache.bases()[0].is_readable
    sequence.commit(12)
    assert matched(cache, A) == 0 and matched(cache, OP) == 12
    sequence.extend([5, 5, 5, 5, 5])
    sequence.commit(21)
    audit.check(cache)
    assert matched(cache, A, [*IDS, 5, 5, 5, 5]) == 16
    sequence.release()
    (info,) = cache.bases()
    assert info.is_readable and (info.num_blocks, info.num_tokens) == (4, 16)
    assert (info.base_id, info.namespace, info.readers) == ("base", OP, ("a", "b"))
    assert cache.evict(64) == 1 and matched(cache, A) == 16
    audit.check(cache)


def test_an_unfinished_base_is_not_published() -> None:
    """A publication ends if its sequence is released, purged or cleared before the last commit.

    The id is free again.
    """
    cache = make_cache(64)
    for give_up in (
        lambda sequence: sequence.release(),
        lambda _: cache.clear(OP),
        lambda _: cache.purge("op"),
        lambda _: cache.unpublish("base"),
    ):
        sequence = cache.publish("base", OP, IDS, ["a"])
        sequence.commit(8)
        give_up(sequence)
        assert cache.bases() == [] and cache.stats().num_bases == 0
        if sequence.is_open:
            sequence.commit(16)
        assert matched(cache, A) == 0
        with sequence:
            pass
        audit.check(cache)
    publish(cache)
    assert matched(cache, A) == 16


def test_only_its_readers_read_a_base() -> None:
    """Readers read the base in namespaces of its model and adapter, with any salt, whether or not the cache knew them
    before.
    """
    cache = published()
    others = [
        Namespace("c", "m"),
        Namespace("a", "m2"),
        Namespace("a", "m", "adapter"),
        Namespace("op", "m", None, "s"),
    ]
    assert [matched(cache, namespace) for namespace in (A, B, SALTED, OP)] == [16] * 4
    assert [matched(cache, namespace) for namespace in others] == [0] * 4
    tuned = Namespace("op", "m", "adapter")
    publish(cache, "tuned", [7] * 8, ["a"], tuned)
    assert matched(cache, Namespace("a", "m", "adapter"), [7] * 9) == 8
    assert matched(cache, A, [7] * 9) == 0


def test_a_reader_must_be_added_before_it_reads() -> None:
    """A reader that is not added yet matches nothing. Once it is added, it reads the base."""
    cache = PrefixCache(CacheConfig(64, 4, default_tenant=None))
    cache.add_tenant(Tenant("op"))
    publish(cache)
    assert matched(cache, A) == 0
    with pytest.raises(NamespaceError):
        cache.open(A, IDS)
    cache.add_tenant(Tenant("a"))
    assert matched(cache, A) == 16
    with cache.open(A, [*IDS, 1]) as sequence:
        assert sequence.num_cached_tokens == 16
    audit.check(cache)


def test_a_request_continues_behind_a_base() -> None:
    """The request's table starts with the base's blocks.

    The blocks that it commits belong to its tenant, in this namespace alone.
    """
    cache = published()
    base = cache.match(OP, IDS).block_ids.tolist()
    turn = [*IDS, 50, 51, 52, 53, 54]
    with cache.open(A, turn) as sequence:
        assert sequence.num_cached_tokens == 16 and sequence.block_table[:4].tolist() == base
        sequence.commit(21)
        children = sequence.fork(2)
        cache.append(children, [1, 2])
        audit.check(cache)
        for child in cache.reorder(children, [1, 1]):
            child.commit(child.num_tokens)
            child.release()
    cache.flush()
    audit.check(cache)
    assert [matched(cache, each, turn) for each in (A, SALTED, B, OP)] == [20, 16, 16, 16]
    assert cache.match(OP, [*IDS, 50, 51, 52, 53]).num_tokens == 16
    assert cache.tenant_stats("a").used_blocks == 1 and cache.tenant_stats("op").used_blocks == 4
    with cache.open(A, [*turn, 9]) as sequence:
        assert sequence.num_cached_tokens == 20


def test_a_request_that_diverges_inside_a_base() -> None:
    """The request shares the blocks up to the divergence. The blocks that it commits are stored behind them."""
    cache = published()
    ids = [*IDS[:9], 70, 71, 72, 73]
    assert matched(cache, A, ids) == 8
    for cached in (8, 12):
        with cache.open(A, ids) as sequence:
            assert sequence.num_cached_tokens == cached
            sequence.commit(13)
        audit.check(cache)
    assert matched(cache, A, ids) == 12 and matched(cache, A) == 16 and matched(cache, B, ids) == 8


def test_a_prompt_equal_to_the_base() -> None:
    """One token is left to compute logits from. The next turn finds the answer."""
    cache = published()
    with cache.open(A, IDS) as sequence:
        assert sequence.num_cached_tokens == 12
        sequence.commit(16)
        assert matched(cache, A) == 16
        sequence.extend([8, 8, 8, 8, 8])
        sequence.commit(21)
    audit.check(cache)
    assert matched(cache, A, [*IDS, 8, 8, 8, 8, 9]) == 20
    with cache.open(A, IDS[:4]) as sequence:
        assert sequence.num_cached_tokens == 0
    assert matched(cache, A, IDS[:3]) == 0


def test_a_tenant_that_had_the_prefix_keeps_its_own_blocks() -> None:
    """A tenant keeps using its own blocks while they last. New blocks go behind the base. Nothing is moved."""
    cache = make_cache(64)
    old = [*IDS, 60, 61, 62, 63]
    compute(cache, old, A)
    running = cache.open(A, [*old, 1])
    own = running.block_table.tolist()
    publish(cache)
    audit.check(cache)
    assert running.block_table.tolist() == own and matched(cache, A, old) == 20
    new = cache.match(A, [*IDS, 70]).block_ids.tolist()
    assert new == cache.match(OP, IDS).block_ids.tolist() != own[:4]
    running.release()
    cache.evict(5)
    assert matched(cache, A, old) == 16
    audit.check(cache)


def test_bases_that_continue_each_other() -> None:
    """The longest match wins, and among equal matches the longest base. The bases share blocks and end one by one."""
    cache = make_cache(64)
    publish(cache, "short", IDS[:8], ["a"])
    ids = [*IDS, 9, 9, 9, 9]
    compute(cache, [*ids, 1], A)
    publish(cache, "long", IDS, ["a", "b"])
    assert cache.stats().base_blocks == 4 and cache.tenant_stats("op").used_blocks == 4
    assert matched(cache, A, ids) == 20 and matched(cache, A) == 16 and matched(cache, B, ids) == 16
    assert compute(cache, [*IDS, 5, 5, 5, 5, 5], A) == 16
    cache.unpublish("short")
    audit.check(cache)
    assert matched(cache, A, ids) == 16 and matched(cache, A, [*IDS, 5, 5, 5, 5]) == 20
    cache.unpublish("long")
    assert matched(cache, A) == 0 and cache.evict(64) == 4
    audit.check(cache)


def test_leases_inserts_and_requests_ahead_behind_a_base() -> None:
    """The rest of the API treats a base as resident blocks."""
    cache = published()
    with cache.lease(cache.match(A, IDS)) as lease:
        assert lease.block_ids.tolist() == cache.match(OP, IDS).block_ids.tolist()
        audit.check(cache)
    blocks = cache.allocate(5)
    assert cache.insert(A, [*IDS, 1, 1, 1, 1], blocks).num_resident_tokens == 16
    cache.free(blocks[:4])
    assert matched(cache, A, [*IDS, 1, 1, 1, 1]) == 20 and matched(cache, OP, [*IDS, 1, 1, 1, 1]) == 16
    computing = cache.open(A, [*IDS, 2, 2, 2, 2, 2])
    computing.computing(20, step=0)
    for tenant, num_ahead in ((A, 4), (B, 0)):
        with cache.open(tenant, [*IDS, 2, 2, 2, 2, 2], ahead=True) as sequence:
            assert (sequence.num_cached_tokens, sequence.num_ahead_tokens) == (16, num_ahead)
    computing.release()
    audit.check(cache)


@pytest.mark.pure
def test_long_prompts_behind_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction for long prompts and long bases works in slices, and meanwhile holds a lease on the match."""
    monkeypatch.setattr(requests, "MAX_VICTIMS_AT_ONCE", 0)
    monkeypatch.setattr(requests, "MAX_BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(requests, "SLICE_BLOCKS", 2)
    cache = published(24)
    compute(cache, range(100, 180), B)
    with cache.open(A, [*IDS, *range(200, 240)]) as sequence:
        assert sequence.num_cached_tokens == 16
        sequence.commit(56)
    audit.check(cache)
    publish(cache, "long", [*IDS, *range(300, 340)])
    assert matched(cache, A, [*IDS, *range(300, 340)]) == 56
    with pytest.raises(ArgumentError, match="base_id='long'"):
        cache.publish("long", OP, range(400, 432), ["a"])
    audit.check(cache)


def test_a_base_is_never_evicted() -> None:
    """Neither a flood of its readers, nor one of its account, nor an operator's ``evict`` evicts it.

    It counts against no reader's quota.
    """
    cache = make_cache(24)
    cache.add_tenant(Tenant("a", guaranteed_blocks=8, mode="strict"))
    publish(cache)
    for at in range(40):
        for namespace in (A, B, OP):
            compute(cache, [*IDS, *[100 + at] * 17], namespace)
            compute(cache, [200 + at] * 17, namespace)
    cache.evict(24)
    assert matched(cache, A) == matched(cache, B) == 16 and cache.tenant_stats("op").used_blocks == 4
    audit.check(cache)


# --- what readers see of each other


def test_reading_a_base_changes_nothing_that_others_see() -> None:
    """The operator's tree, its account's counts and policy, and everything of the other reader stay equal."""

    def seen(cache: PrefixCache) -> Any:
        snapshot = cache.snapshot()
        trees = [tree for tree in snapshot.trees if tree.namespace.tenant != "a"]
        order = [cache._tenants[tenant].policy.victim() for tenant in ("b", "op")]
        stats = [cache.tenant_stats(tenant) for tenant in ("b", "op")]
        return (
            trees,
            order,
            stats,
            cache.namespaces("b"),
            cache.bases(),
            matched(cache, B, [*IDS, 3, 3, 3, 3]),
        )

    cache = published(256)
    compute(cache, [*IDS, 3, 3, 3, 3], B)
    compute(cache, [*IDS, 4, 4, 4, 4], OP)
    before = seen(cache)
    running = [cache.open(A, [*IDS[:size], *[40 + size] * 9]) for size in range(17)]
    assert seen(cache) == before
    for sequence in running:
        sequence.commit(sequence.num_tokens)
    assert seen(cache) == before
    for sequence in running:
        sequence.release()
    with cache.lease(cache.match(A, IDS[:12])):
        assert seen(cache) == before
    cache.purge("a")
    assert seen(cache) == before


# --- the end of a base


def test_a_base_is_unpublished_while_it_is_read() -> None:
    """It stops matching at once.

    Running requests continue and keep its blocks until their release. Then the blocks are ordinary ones.
    """
    cache = published()
    base = cache.match(OP, IDS).block_ids.tolist()
    running = cache.open(A, [*IDS, 1, 1, 1, 1, 1])
    running.commit(21)
    lease = cache.lease(cache.match(B, IDS))
    compute(cache, [*IDS, 2, 2, 2, 2, 2], B)
    cache.unpublish("base")
    audit.check(cache)
    assert [matched(cache, each, [*IDS, 1, 1, 1, 1]) for each in (A, B, OP)] == [0, 0, 16]
    assert cache.bases() == [] and cache.stats().base_blocks == 4 and cache.stats().num_bases == 0
    assert cache.tenant_stats("b").used_blocks == 0 and cache.evict(64) == 0
    (child,) = running.fork(1)
    child.append(7)
    child.commit(22)
    cache.flush()
    audit.check(cache)
    for each in (running, child):
        assert each.block_table[:4].tolist() == base
        each.release()
    assert cache.stats().base_blocks == 4
    lease.release()
    audit.check(cache)
    assert cache.stats().base_blocks == 0 and cache.tenant_stats("op").evictable_blocks == 4
    assert cache.evict(64) == 4 and cache.stats().free_blocks == 64
    publish(cache)
    assert matched(cache, A) == 16


def test_pins_of_a_base_in_two_namespaces() -> None:
    """Each namespace has its own pin. The shared blocks count once against the budget."""
    cache = published()
    cache.add_tenant(Tenant("a", max_pinned_blocks=4))
    one, other = A, A._replace(salt="another")
    pins = [cache.pin(namespace, IDS, 60) for namespace in (one, other)]
    assert [pin.namespace for pin in cache.pins("a")] == [one, other] and pins[0].id != pins[1].id
    assert cache.tenant_stats("a").pinned_blocks == 4
    audit.check(cache)
    assert cache.pin(other, IDS, 90).id == pins[1].id, "the pin was renewed"
    cache.unpin(pins[0])
    assert [pin.namespace for pin in cache.pins("a")] == [other]
    assert cache.tenant_stats("a").pinned_blocks == 4
    cache.unpin(pins[1])
    assert not cache.pins("a") and cache.tenant_stats("a").pinned_blocks == 0
    audit.check(cache)


def test_readers_are_removed_and_added() -> None:
    """A removed reader loses its blocks behind the base. Other readers notice nothing. An added reader can read."""
    cache = published()
    turn = [*IDS, 1, 1, 1, 1]
    compute(cache, [*turn, 1], A)
    compute(cache, [*turn, 1], B)
    running = cache.open(A, [*turn, 1])
    cache.set_readers("base", ["b", "c"])
    audit.check(cache)
    assert [matched(cache, Namespace(each, "m"), turn) for each in "abc"] == [0, 20, 16]
    assert cache.bases()[0].readers == ("b", "c")
    running.commit(21)
    running.release()
    assert cache.tenant_stats("a").used_blocks == 0
    cache.set_readers("base", ["a", "b"])
    assert matched(cache, A, turn) == 16
    cache.set_readers("base", [])
    assert matched(cache, B, turn) == 0
    audit.check(cache)
    sequence = cache.publish("next", OP, [5] * 8, ["a"])
    cache.set_readers("next", ["b"])
    sequence.commit(8)
    sequence.release()
    assert matched(cache, A, [5] * 8) == 0 and matched(cache, B, [5] * 8) == 8


@pytest.mark.parametrize("forget", ["purge", "clear", "remove"])
def test_forgetting_a_reader(forget: str) -> None:
    """The reader's own blocks behind the base are gone. The base is not the reader's, so it stays readable."""
    cache = published()
    cache.add_tenant(Tenant("a"))
    turn = [*IDS, 1, 1, 1, 1]
    compute(cache, [*turn, 1], A)
    compute(cache, [*IDS[:8], 7, 7, 7, 7], A)
    compute(cache, [9] * 8, A)
    compute(cache, [*turn, 1], SALTED)
    assert cache.namespaces("a") == [A, SALTED] and cache.tenant_stats("a").num_namespaces == 2
    if forget == "purge":
        assert cache.purge("a") == 5
    elif forget == "clear":
        assert cache.clear(A) == 4
    else:
        cache.remove_tenant("a")
    audit.check(cache)
    assert matched(cache, A, turn) == 16 and matched(cache, A, [9] * 8) == 0
    assert matched(cache, SALTED, turn) == (20 if forget == "clear" else 16)


@pytest.mark.parametrize("forget", ["purge", "clear", "remove"])
def test_forgetting_the_account(forget: str) -> None:
    """The account's bases end with it, even if requests run behind them."""
    cache = make_cache(64)
    cache.add_tenant(Tenant("op"))
    publish(cache)
    publish(cache, "another", [5] * 4, ["a"], Namespace("op", "m", None, "salt"))
    running = cache.open(A, [*IDS, 1])
    if forget == "purge":
        cache.purge("op")
    elif forget == "clear":
        cache.clear(OP)
    else:
        cache.remove_tenant("op")
    audit.check(cache)
    left = [info.base_id for info in cache.bases()]
    assert left == (["another"] if forget == "clear" else [])
    assert [matched(cache, each) for each in (A, B, OP)] == [0, 0, 0]
    assert cache.stats().base_blocks == 4 + len(left) and cache.stats().quarantined_blocks == 4
    running.extend([1, 2, 3, 4])
    running.commit(21)
    running.release()
    audit.check(cache)
    assert cache.stats().free_blocks == 64 - len(left)


# --- capacity


def test_a_base_must_fit_beside_guarantees() -> None:
    """A base that does not fit beside the guarantees is refused, with the number of missing blocks.

    A guarantee that does not fit beside it is refused too.
    """
    cache = make_cache(16)
    cache.add_tenant(Tenant("a", guaranteed_blocks=14, mode="strict"))
    before = cache.snapshot()
    with pytest.raises(ArgumentError, match="ids has 4 blocks; allowed: 2 fewer while the rest"):
        cache.publish("base", OP, IDS, ["a"])
    assert cache.bases() == [] and same(before, cache)
    cache.add_tenant(Tenant("a", guaranteed_blocks=12, mode="strict"))
    publish(cache, readers=["a"])
    with pytest.raises(ArgumentError, match="1 fewer while running sequences, pins and bases hold the rest"):
        cache.add_tenant(Tenant("a", guaranteed_blocks=13, mode="strict"))
    with pytest.raises(ArgumentError, match="1 fewer"):
        cache.publish("more", OP, [5] * 4, ["a"])
    running = [cache.open(A, [*IDS, *[at] * 16]) for at in range(3)]  # all of its guarantee, beside the base
    assert [sequence.num_cached_tokens for sequence in running] == [16] * 3
    audit.check(cache)
    cache.add_tenant(Tenant("op", max_blocks=5))
    for sequence in running:
        sequence.release()
    with pytest.raises(QuotaExceeded):
        cache.publish("more", OP, [5] * 8, ["a"])


def test_a_guaranteed_account_can_always_publish() -> None:
    """An account can always publish as many blocks as it is guaranteed, whichever tenant borrows them."""
    cache = make_cache(16)
    cache.add_tenant(Tenant("op", guaranteed_blocks=4, mode="strict"))
    with cache.open(B, range(100, 148)):
        publish(cache)
    assert matched(cache, A) == 16


# --- refusals


def _sequences(cache: PrefixCache) -> dict[str, tuple[Callable[[], object], type[Exception], str]]:
    return {
        "an id twice": (lambda: cache.publish("base", OP, IDS, ["a"]), ArgumentError, "base_id='base'"),
        "no id": (lambda: cache.publish("", OP, IDS, ["a"]), ArgumentError, "base_id=''"),
        "a long id": (lambda: cache.publish("ä" * 129, OP, IDS, ["a"]), ArgumentError, "256 bytes"),
        "an id that is no string": (lambda: cache.publish(7, OP, IDS, ["a"]), ArgumentError, "base_id=7"),  # type: ignore[arg-type]
        "no namespace": (lambda: cache.publish("x", "op", IDS, ["a"]), ArgumentError, "namespace"),  # type: ignore[arg-type]
        "no block": (
            lambda: cache.publish("x", OP, [1, 2, 3], ["a"]),
            ArgumentError,
            "ids has 3 items; allowed: at least 4",
        ),
        "one reader's name": (lambda: cache.publish("x", OP, IDS, "ab"), ArgumentError, "readers='ab'"),
        "readers that are none": (lambda: cache.publish("x", OP, IDS, 7), ArgumentError, "readers=7"),  # type: ignore[arg-type]
        "a reader without a name": (
            lambda: cache.publish("x", OP, IDS, [""]),
            NamespaceError,
            "tenant is empty",
        ),
        "itself": (lambda: cache.publish("x", OP, IDS, ["op"]), ArgumentError, "readers='op'"),
        "a reader publishes": (lambda: cache.publish("x", A, IDS, ["b"]), ArgumentError, "reads no base"),
        "a publisher reads": (
            lambda: cache.publish("x", Namespace("op2", "m"), IDS, ["op"]),
            ArgumentError,
            "publish no base",
        ),
        "a publisher is to read": (
            lambda: cache.set_readers("base", ["other"]),
            ArgumentError,
            "readers='other'.*publish no base",
        ),
        "readers of nothing": (lambda: cache.set_readers("x", ["a"]), ArgumentError, "base_id='x'"),
        "an end of nothing": (lambda: cache.unpublish("x"), ArgumentError, "base_id='x'"),
    }


@pytest.mark.parametrize("name", _sequences(make_cache()))
def test_a_refusal_changes_nothing(name: str) -> None:
    """The error also names the allowed values."""
    cache = published()
    publish(cache, "another", [5] * 4, [], Namespace("other", "m"))
    before, bases = cache.snapshot(), cache.bases()
    call, error, text = _sequences(cache)[name]
    with pytest.raises(error, match=text):
        call()
    assert same(before, cache) and cache.bases() == bases


def test_a_stale_match_of_a_base() -> None:
    """The base was unpublished before the match was leased."""
    cache = published()
    match = cache.match(A, IDS)
    cache.unpublish("base")
    with pytest.raises(LeaseError):
        cache.lease(match)
    assert matched(cache, OP) == 16


def test_a_reader_without_requests_leases_and_touches_a_base() -> None:
    """A lease finds what a match finds, also for a tenant that the cache doesn't know yet."""
    cache = make_cache()
    publish(cache)
    assert cache.touch(A, IDS) == cache.match(A, IDS).num_tokens == 16
    with cache.match_and_lease(A, [*IDS, 1]) as lease:
        assert lease.block_ids.tolist() == cache.match(OP, IDS).block_ids.tolist()
        audit.check(cache)
    assert cache.touch(Namespace("c", "m"), IDS) == 0
    audit.check(cache)
