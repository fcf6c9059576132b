"""The cache of SGLang's scheduler, driven by a small scheduler that behaves like SGLang's, without SGLang.

The KV in a page's slots are hashes of everything before them, so a wrong page shows. The allocator knows each page that
is SGLang's; what it doesn't know must be resident.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest

from radixkv import Namespace, Tenant, audit
from radixkv.engines.sglang.cache import MAX_NAMED, ROOT, SglangCache, framed_extra_key, unframed_extra_key
from radixkv.errors import ArgumentError
from radixkv.signing import KeySet
from radixkv.tenancy.request_keys import Label
from radixkv.tenancy.salt import SaltReader, make_salt

PAGE = 4
KEYS = KeySet.derive([b"a secret of the fleet"])


class Pool:
    """The allocator, and the KV of all slots: one hash for each token."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(1, num_pages))
        self.kv: dict[int, list[int]] = {}

    def take(self, num: int) -> list[int]:
        taken, self.free = self.free[:num], self.free[num:]
        return taken

    def give(self, pages: Any) -> None:
        assert not set(self.free) & set(pages.tolist())
        self.free += pages.tolist()


def kv_of(owner: object, ids: Any) -> list[int]:
    found, state = [], hash(owner)
    for token in ids:
        state = hash((state, token))
        found.append(state)
    return found


class Scheduler:
    """Requests that match, compute their prompt in chunks, decode, and end; pages are evicted when they run out."""

    def __init__(self, num_pages: int, seed: int) -> None:
        self.cache = SglangCache(num_pages, PAGE, model="m", policy="lru")
        self.pool, self.dice = Pool(num_pages), random.Random(seed)
        self.seen: Counter[str] = Counter()

    def room(self, num: int) -> list[int] | None:
        if (short := num - len(self.pool.free)) > 0:
            self.pool.give(self.cache.reclaim(short))
            self.seen["evictions"] += 1
        return self.pool.take(num) if len(self.pool.free) >= num else None

    def live(self, cache_salt: str, extra_key: str | None, ids: Any, num_out: int) -> bool:
        """Serve one request. False if there was no room."""
        cache, kv = self.cache, kv_of((cache_salt, extra_key), ids)
        namespace = cache.namespace(cache_salt, extra_key)
        node = cache.match(namespace, ids[: len(ids) - num_out - 1])
        lease, table = cache.lock(node), [] if node.block_ids is None else node.block_ids.tolist()
        self.seen["hits"] += node.num_tokens > 0
        protected, done = node.num_tokens, node.num_tokens
        while done < len(ids):
            stop = min(done + self.dice.choice((1, 5, 16)), len(ids))
            fresh = self.room(-(-stop // PAGE) - len(table))
            if fresh is None:
                break
            table += fresh
            for at in range(done, stop):
                self.pool.kv.setdefault(table[at // PAGE], [0] * PAGE)[at % PAGE] = kv[at]
            done = stop
            if self.dice.random() < 0.5 or done == len(ids):
                whole = done // PAGE * PAGE
                pages = np.array(table[protected // PAGE : whole // PAGE], np.int32)
                if whole > protected:
                    new = ids[node.num_tokens : whole]
                    taken = cache.insert(namespace, new, pages, protected, after=node, lease=True)
                    assert taken is not None and taken.lease is not None and taken.node.block_ids is not None
                    node = taken.node
                    self.seen["duplicates"] += len(taken.surplus)
                    self.pool.give(taken.surplus)
                    self.pool.give(taken.evicted)
                    table[: whole // PAGE] = taken.node.block_ids.tolist()
                    if lease is not None:
                        lease.release()
                    lease, protected = taken.lease, whole
            read = [self.pool.kv[table[at // PAGE]][at % PAGE] for at in range(done)]
            assert read == kv[:done]
        self.pool.give(np.array(table[protected // PAGE :], np.int32))
        if lease is not None:
            lease.release()
        return done == len(ids)

    def accounted(self) -> None:
        cache = self.cache
        assert audit.inspect(cache.cache).violations == ()
        assert cache.resident_tokens == cache.evictable_tokens
        assert len(self.pool.free) + cache.cache.resident_blocks == cache.cache.config.num_blocks - 1
        assert cache.protected_tokens == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_read_their_own_kv_and_lose_no_page(seed: int) -> None:
    scheduler = Scheduler(48, seed)
    dice, prompts = scheduler.dice, [[7] * 9, list(range(30)), [*range(12), *range(50, 80)]]
    served = 0
    for _ in range(150):
        ids = [*dice.choice(prompts)[: dice.randrange(1, 43)], *(dice.randrange(5) for _ in range(6))]
        served += scheduler.live(
            dice.choice(("", "s")), dice.choice((None, "x")), array("q", ids), dice.randrange(5)
        )
        scheduler.accounted()
    assert served > 140 and min(scheduler.seen[each] for each in ("hits", "evictions")) > 10
    scheduler.cache.reset()
    assert scheduler.cache.resident_tokens == 0


def test_two_requests_that_compute_the_same_pages_keep_one_of_each() -> None:
    cache = SglangCache(16, PAGE, model="m")
    namespace = cache.namespace("", None)
    first = cache.insert(namespace, [1] * 8, np.array([3, 4], np.int32))
    second = cache.insert(namespace, [1] * 8 + [2] * 4, np.array([5, 6, 7], np.int32))
    assert first is not None and second is not None
    assert second.num_resident_tokens == 8 and second.surplus.tolist() == [5, 6]
    assert second.node.block_ids is not None and second.node.block_ids.tolist() == [3, 4, 7]
    assert cache.match(namespace, [1] * 8) == first.node != second.node


def test_an_insert_takes_only_the_ids_behind_a_node() -> None:
    cache = SglangCache(16, PAGE, model="m")
    namespace = cache.namespace("", None)
    first = cache.insert(namespace, [1] * 8, np.array([3, 4], np.int32))
    assert first is not None
    match = cache.match(namespace, [*[1] * 8, *range(90)])  # its node ends where the match does
    for after, pages in ((match, [7]), (first.node, [8])):
        done = cache.insert(namespace, array("q", range(20, 24)), np.array(pages, np.int32), 8, after=after)
        assert done is not None and done.node.num_tokens == 12 and done.node.block_ids is not None
        assert done.node.block_ids.tolist() == [3, 4, 7] and done.node.namespace == namespace
    assert cache.match(namespace, [*[1] * 8, *range(20, 24)]) == done.node
    assert cache.insert(namespace, [2**32] * 4, np.array([9], np.int32), 8, after=match) is None


def test_a_purge_gives_its_pages_back_and_a_running_request_goes_on() -> None:
    cache = SglangCache(16, PAGE, model="m", salts=SaltReader(KEYS))
    salt = make_salt(KEYS, "acme")
    namespace = cache.namespace(salt, None)
    assert namespace is not None
    taken = cache.insert(namespace, [1] * 8, np.array([3, 4], np.int32), lease=True)
    assert taken is not None and taken.lease is not None
    cache.cache.purge(namespace.tenant)
    assert cache.match(cache.namespace(salt, None), [1] * 8) is ROOT
    assert cache.insert(cache.namespace(salt, None), [1] * 12, np.array([5], np.int32), 8) is None
    assert not cache.has_freed
    taken.lease.release()
    assert cache.has_freed and sorted(cache.reclaim(0).tolist()) == [3, 4]


def test_the_chunks_of_a_prompt_are_one_request_of_its_session() -> None:
    """The policy hears of a request once, and knows the pages of all its chunks as those of its session."""
    cache = SglangCache(64, PAGE, model="m", policy="learned")
    namespace = cache.namespace(None, None)
    labels: tuple[tuple[str, Label], ...] = (("session", "s-17"), ("tool_pending", 1))
    for turn in range(3):
        node = cache.match(namespace, list(range(40)))
        done = node.num_tokens
        assert done == 16 * turn
        for stop in (done + 8, done + 16):
            pages = np.arange(1 + done // PAGE, 1 + stop // PAGE, dtype=np.int32)
            new = list(range(node.num_tokens, stop))
            taken = cache.insert(namespace, new, pages, done, after=node, lease=True, labels=labels)
            assert taken is not None and taken.lease is not None
            node, done = taken.node, stop
            taken.lease.release()
    policy: Any = cache.cache._tenants["default"].policy
    facts = {id(piece.facts): piece.facts for state in policy._states.values() for piece in state.pieces}
    (last,) = facts.values()
    assert last.turn == 3 and last.labels["tool_pending"] == 1 and last.labels["session"] != "s-17"
    assert len(policy._sessions) == 1


def test_an_insert_goes_on_only_with_a_request_of_its_namespace() -> None:
    cache = SglangCache(64, PAGE, model="m", policy="learned").cache
    mine, other = Namespace("default", "m"), Namespace("default", "n")
    first = cache.insert(mine, range(4), [1])
    for wrong in (object(), cache.insert(other, range(4), [2])):
        with pytest.raises(ArgumentError, match="an earlier insert into the same namespace"):
            cache.insert(mine, range(8), [3], start=4, request=wrong)
    assert cache.insert(mine, range(8), [3], start=4, request=first).num_tokens == 8


def test_pages_that_an_insert_evicts_come_back() -> None:
    cache = SglangCache(16, PAGE, model="m")
    cache.cache.add_tenant(Tenant("default", max_blocks=2))
    namespace = cache.namespace("", None)
    assert cache.insert(namespace, [1] * 8, np.array([3, 4], np.int32)) is not None
    taken = cache.insert(namespace, [2] * 4, np.array([5], np.int32))
    assert taken is not None and taken.surplus.tolist() == [] and taken.evicted.tolist() == [4]
    assert not cache.has_freed and cache.resident_tokens == 2 * PAGE


def test_a_tenant_without_room_leaves_nothing_and_loses_nothing() -> None:
    cache = SglangCache(16, PAGE, model="m")
    cache.cache.add_tenant(Tenant("default", max_blocks=1))
    namespace = cache.namespace("", None)
    assert cache.insert(namespace, [1] * 8, np.array([3, 4], np.int32), lease=True) is None
    assert cache.resident_tokens == 0 and not cache.has_freed


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "cd"), ("abcd", None)),
        (("abcd", None), (None, "abcd")),
        (("", "cd"), (None, None)),
        (("3:abc", "d"), ("3", "abcd")),
    ],
)
def test_an_extra_key_cannot_name_another_adapter(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> None:
    """SGLang joins both. An adapter's id is known to whoever lists the models."""
    first, second = framed_extra_key(*one), framed_extra_key(*other)
    assert first != second
    assert unframed_extra_key(first) == (one[0] or "", one[1])
    cache = SglangCache(16, PAGE, model="m")
    assert cache.namespace("s", first) != cache.namespace("s", second)


@pytest.mark.parametrize("text", ["radixkv:9:ab", "radixkv:-1:ab", "radixkv:²:ab", "ab", "radixkv:", ""])
def test_a_text_without_a_frame_is_no_adapter(text: str) -> None:
    assert unframed_extra_key(text) == (f"unframed:{text}", None)
    assert unframed_extra_key(framed_extra_key(text, None)) == (text, None)


def test_salts_and_extra_keys_have_namespaces_of_their_own() -> None:
    cache = SglangCache(16, PAGE, model="m")
    keys = [
        (None, None),
        ("a", None),
        (None, framed_extra_key("a", None)),
        ("a", framed_extra_key("a", None)),
    ]
    named: list[Namespace | None] = [cache.namespace(*each) for each in keys]
    assert None not in named and len(set(named)) == len(keys)


@pytest.mark.parametrize(
    ("cache_salt", "extra_key"),
    [("\ud800", None), (None, "\ud800"), (None, "x" * 5000), ("s", "radixkv:0:" + "l" * 5000)],
)
def test_what_no_namespace_can_hold_gets_no_cache(cache_salt: str | None, extra_key: str | None) -> None:
    cache = SglangCache(16, PAGE, model="m")
    namespace = cache.namespace(cache_salt, extra_key)
    assert namespace is None
    assert (
        cache.match(namespace, [1] * 8) is ROOT
        and cache.insert(namespace, [1] * 4, np.array([1], np.int32)) is None
    )
    cache.touch(namespace, [1] * 8)


@pytest.mark.parametrize("ids", [[1, 2, 3, 2**32], [-1, 2, 3, 4]])
def test_ids_that_no_key_can_hold_get_no_cache(ids: list[int]) -> None:
    cache = SglangCache(16, PAGE, model="m")
    namespace = cache.namespace(None, None)
    assert cache.match(namespace, array("q", ids)) is ROOT
    assert cache.insert(namespace, array("q", ids), np.array([1], np.int32)) is None
    cache.touch(namespace, array("q", ids))


def test_a_forged_salt_and_one_of_an_old_generation_get_no_cache() -> None:
    cache = SglangCache(16, PAGE, model="m", salts=SaltReader(KEYS, allows_anonymous=False))
    assert cache.namespace(make_salt(KeySet.derive([b"another fleet, other secret"]), "acme"), None) is None
    assert cache.namespace(None, None) is None
    assert cache.num_refused_salts == 2


def test_namespaces_remembered_are_bounded() -> None:
    cache = SglangCache(16, PAGE, model="m")
    for at in range(MAX_NAMED + 50):
        assert cache.namespace(f"s{at}", None) == cache.namespace(f"s{at}", None)
    assert len(cache._named) == MAX_NAMED
