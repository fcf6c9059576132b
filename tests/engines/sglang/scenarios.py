"""What a prefix cache of SGLang does, call by call: SGLang's own RadixCache and radixkv's, over SGLang's own pools.

Run by ``test_scenarios.py`` with the Python of an environment that has SGLang. Prints for each cache, case
("scenario/page size") what went wrong, or null, as one line of JSON, and the hashes of its KV events.

A prompt is made of symbols: symbol 3 is one page of ids. So a scenario is the same at each page size.
"""

from __future__ import annotations

import contextlib
import io
import json
import traceback
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from radixkv.engines.sglang.plugin import RadixCache as OwnCache
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache as StockCache
from sglang.srt.mem_cache.radix_cache import RadixKey

NUM_PAGES = 64
PAGES = (1, 2, 4, 16)
CACHES: dict[str, Callable[[CacheInitParams], Any]] = {"stock": StockCache, "radixkv": OwnCache}


class Rig:
    """A cache of one kind and its pools."""

    def __init__(self, kind: str, page: int) -> None:
        self.kind, self.page = kind, page
        self.hashes: list[int] = []
        self.make()

    def make(self, policy: str = "lru", *, events: bool = False, disable: bool = False) -> Any:
        size = NUM_PAGES * self.page
        given: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
        if self.page == 1:
            self.allocator: Any = TokenToKVPoolAllocator(size, **given)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, self.page, **given)
        self.rows = ReqToTokenPool(8, 2048, "cpu", False)
        self.cache = CACHES[self.kind](
            CacheInitParams(
                disable=disable,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.page,
                eviction_policy=policy,
                enable_kv_cache_events=events,
            )
        )
        return self.cache

    def ids(self, *symbols: int, more: int = 0) -> array[int]:
        """The ids of whole pages, and of ``more`` tokens."""
        whole = [symbol * 1000 + at for symbol in symbols for at in range(self.page)]
        return array("q", [*whole, *range(more)])

    def key(self, *symbols: int, more: int = 0, **named: Any) -> RadixKey:
        return RadixKey(self.ids(*symbols, more=more), **named)

    def add(self, *symbols: int, more: int = 0, priority: int = 0, **named: Any) -> tuple[Any, torch.Tensor]:
        """Insert a prompt with new slots; those of pages that were resident go back. Also returns the slots."""
        key = self.key(*symbols, more=more, **named)
        slots = self.allocator.alloc(-(-len(key) // self.page) * self.page)
        assert slots is not None
        done = self.cache.insert(InsertParams(key=key, value=slots[: len(key)], priority=priority))
        kept = len(key) // self.page * self.page
        for start, stop in ((0, done.prefix_len), (kept, len(slots))):
            if stop > start:
                self.allocator.free_segment(slots[start:stop], start_pos=0)
        return done, slots[:kept]

    def match(self, *symbols: int, more: int = 0, **named: Any) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=self.key(*symbols, more=more, **named)))

    def found(self, *symbols: int, more: int = 0, **named: Any) -> list[int]:
        """The slots of the match."""
        match = self.match(*symbols, more=more, **named)
        slots: list[int] = self.cache.path_device_indices(match.last_device_node).tolist()
        assert len(slots) == match.device_prefix_len and match.last_host_node == match.last_device_node
        return slots

    def pages_of(self, *symbols: int) -> int:
        found = len(self.found(*symbols))
        assert found % self.page == 0
        return found // self.page

    def evict(self, num_pages: int) -> int:
        """Pages that were evicted."""
        before = self.allocator.available_size()
        done = self.cache.evict(EvictParams(num_tokens=num_pages * self.page)).num_tokens_evicted
        assert self.allocator.available_size() - before == done
        return int(done // self.page)

    def sizes(self) -> tuple[int, int]:
        """Evictable and held pages. Everything else is the allocator's."""
        cache = self.cache
        evictable, held = cache.evictable_size(), cache.protected_size()
        assert cache.total_size() == evictable + held
        return evictable // self.page, held // self.page

    def accounted(self, num_private: int = 0) -> None:
        left = self.allocator.available_size() + self.cache.total_size()
        assert left + num_private * self.page == NUM_PAGES * self.page

    def request(self, ids: Any, row: int, **named: Any) -> Any:
        """A request that has matched, and got slots for all its ids."""
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(ids[: len(ids) - 1], **named)))
        node, num = match.last_device_node, match.device_prefix_len
        kv = ReqKvInfo(req_pool_idx=row, cache_protected_len=num)
        held = self.cache.path_device_indices(node)
        fresh = self.allocator.alloc(-(-(len(ids) - num) // self.page) * self.page)
        assert fresh is not None
        self.rows.req_to_token[row, :num] = held.to(torch.int32)
        self.rows.req_to_token[row, num : num + len(fresh)] = fresh.to(torch.int32)
        salts = {"extra_key": named.get("extra_key"), "cache_salt": named.get("cache_salt")}
        return SimpleNamespace(
            kv=kv,
            lock=self.cache.lock(node),
            last_node=node,
            full_untruncated_fill_ids=ids,
            origin_input_ids=ids,
            priority=None,
            session_id=None,
            sampling_params=SimpleNamespace(custom_params=None),
            rid=str(row),
            finished=lambda: True,
            num_slots=num + len(fresh),
            **salts,
        )

    def end(self, req: Any) -> None:
        """End a request after its last checkpoint, as ``release_kv_cache`` does."""
        start = req.kv.cache_protected_len
        row = self.rows.req_to_token[req.kv.req_pool_idx, start : req.num_slots]
        if len(row):
            self.allocator.free_segment(row.to(torch.int64), start_pos=start)
        self.cache.unlock(req.lock)


# --- match and insert


def empty_cache_finds_nothing(rig: Rig) -> None:
    match = rig.match(1, 2)
    assert match.device_prefix_len == 0 and match.last_device_node == rig.cache.root_node
    assert rig.found() == [] and rig.sizes() == (0, 0)


def whole_prompt(rig: Rig) -> None:
    done, slots = rig.add(1, 2, 3)
    assert done.prefix_len == 0 and rig.found(1, 2, 3) == slots.tolist()
    assert rig.sizes() == (3, 0)
    rig.accounted()


def shorter_query(rig: Rig) -> None:
    _, slots = rig.add(1, 2, 3)
    assert rig.found(1, 2) == slots[: 2 * rig.page].tolist()
    assert rig.found(1) == slots[: rig.page].tolist() and rig.sizes() == (3, 0)


def longer_query(rig: Rig) -> None:
    _, slots = rig.add(1, 2)
    assert rig.found(1, 2, 3) == slots.tolist()


def query_that_ends_within_a_page(rig: Rig) -> None:
    _, slots = rig.add(1, 2)
    assert rig.found(1, more=rig.page - 1) == slots[: rig.page].tolist()


def query_shorter_than_a_page(rig: Rig) -> None:
    rig.add(1, 2)
    found = rig.cache.match_prefix(MatchPrefixParams(key=RadixKey(rig.ids(1)[: rig.page - 1])))
    assert found.device_prefix_len == 0


def insert_shorter_than_a_page(rig: Rig) -> None:
    rig.add(more=rig.page - 1)
    assert rig.sizes() == (0, 0)
    rig.accounted()


def insert_that_ends_within_a_page(rig: Rig) -> None:
    rig.add(1, 2, more=rig.page - 1)
    assert rig.pages_of(1, 2) == 2 and rig.sizes() == (2, 0)
    rig.accounted()


def same_prompt_again(rig: Rig) -> None:
    _, slots = rig.add(1, 2, 3)
    done, _ = rig.add(1, 2, 3)
    assert done.prefix_len == 3 * rig.page and rig.found(1, 2, 3) == slots.tolist()
    assert done.last_device_node == rig.match(1, 2, 3).last_device_node
    rig.accounted()


def longer_prompt(rig: Rig) -> None:
    _, slots = rig.add(1, 2)
    done, more = rig.add(1, 2, 3, 4)
    assert done.prefix_len == 2 * rig.page
    assert rig.found(1, 2, 3, 4) == [*slots.tolist(), *more[2 * rig.page :].tolist()]
    rig.accounted()


def shorter_prompt(rig: Rig) -> None:
    rig.add(1, 2, 3)
    done, _ = rig.add(1, 2)
    assert done.prefix_len == 2 * rig.page and rig.sizes() == (3, 0)
    rig.accounted()


def branches(rig: Rig) -> None:
    _, slots = rig.add(1, 2, 3, 4)
    done, other = rig.add(1, 2, 5)
    assert done.prefix_len == 2 * rig.page and rig.sizes() == (5, 0)
    assert rig.found(1, 2, 3, 4) == slots.tolist()
    assert rig.found(1, 2, 5) == [*slots[: 2 * rig.page].tolist(), *other[2 * rig.page :].tolist()]
    rig.accounted()


def splits_at_each_depth(rig: Rig) -> None:
    _, slots = rig.add(1, 2, 3, 4, 5, 6)
    for depth in (3, 1, 5, 2, 4):
        assert rig.found(*range(1, depth + 1), 9) == slots[: depth * rig.page].tolist()
    assert rig.found(1, 2, 3, 4, 5, 6) == slots.tolist() and rig.sizes() == (6, 0)


def many_branches(rig: Rig) -> None:
    for each in range(2, 10):
        rig.add(1, each, each + 10)
    assert rig.sizes() == (17, 0) and all(rig.pages_of(1, each, each + 10) == 3 for each in range(2, 10))
    rig.accounted()


def ends_of_equal_prefixes_are_equal(rig: Rig) -> None:
    rig.add(1, 2, 3)
    first, again = rig.match(1, 2).last_device_node, rig.match(1, 2, 9).last_device_node
    other = rig.match(1, 2, 3).last_device_node
    assert first == again and hash(first) == hash(again) and first != other


def all_slots(rig: Rig) -> None:
    _, slots = rig.add(1, 2, 3)
    _, other = rig.add(1, 4)
    found = sorted(rig.cache.all_values_flatten().tolist())
    assert found == sorted([*slots.tolist(), *other[rig.page :].tolist()])


# --- namespaces


def extra_keys_are_apart(rig: Rig) -> None:
    found = {}
    for name in ("one", "two", None):
        _, found[name] = rig.add(1, 2, extra_key=name)
    for name, slots in found.items():
        assert rig.found(1, 2, extra_key=name) == slots.tolist()
    assert rig.found(1, 2, extra_key="none") == []


def salts_are_apart(rig: Rig) -> None:
    _, slots = rig.add(1, 2, cache_salt="a")
    assert rig.found(1, 2) == rig.found(1, 2, cache_salt="b") == []
    assert rig.found(1, 2, cache_salt="a") == slots.tolist()


def salt_and_extra_key_do_not_run_together(rig: Rig) -> None:
    _, slots = rig.add(1, extra_key="bc", cache_salt="a")
    _, other = rig.add(1, extra_key="c", cache_salt="ab")
    assert rig.found(1, extra_key="bc", cache_salt="a") == slots.tolist()
    assert rig.found(1, extra_key="c", cache_salt="ab") == other.tolist()


# --- locks


def lock_moves_sizes(rig: Rig) -> None:
    rig.add(1, 2, 3)
    node = rig.match(1, 2, 3).last_device_node
    taken = rig.cache.inc_lock_ref(node)
    assert taken.delta == -3 * rig.page and rig.sizes() == (0, 3)
    assert rig.cache.dec_lock_ref(node).delta == 3 * rig.page and rig.sizes() == (3, 0)


def locked_is_not_evicted(rig: Rig) -> None:
    _, slots = rig.add(1, 2, 3)
    lock = rig.cache.lock(rig.match(1, 2, 3).last_device_node)
    assert rig.evict(3) == 0 and rig.found(1, 2, 3) == slots.tolist()
    rig.cache.unlock(lock)
    assert rig.evict(3) == 3 and rig.found(1, 2, 3) == []
    rig.accounted()


def locks_add_up(rig: Rig) -> None:
    rig.add(1, 2)
    first, second = (rig.cache.lock(rig.match(1, 2).last_device_node) for _ in range(2))
    rig.cache.unlock(first)
    assert rig.sizes() == (0, 2) and rig.evict(2) == 0
    rig.cache.unlock(second)
    assert rig.sizes() == (2, 0)


def lock_by_one_match_unlock_by_another(rig: Rig) -> None:
    rig.add(1, 2)
    rig.cache.inc_lock_ref(rig.match(1, 2).last_device_node)
    rig.cache.dec_lock_ref(rig.match(1, 2).last_device_node)
    assert rig.sizes() == (2, 0)


def unlock_after_an_insert_split_it(rig: Rig) -> None:
    rig.add(1, 2, 3, 4)
    rig.cache.inc_lock_ref(rig.match(1, 2, 3, 4).last_device_node)
    rig.add(1, 2, 5)
    assert rig.sizes() == (1, 4)
    rig.cache.dec_lock_ref(rig.match(1, 2, 3, 4).last_device_node)
    assert rig.sizes() == (5, 0)


def lock_covers_the_path_only(rig: Rig) -> None:
    rig.add(1, 2, 3, 4)
    lock = rig.cache.lock(rig.match(1, 2).last_device_node)
    assert rig.sizes() == (2, 2) and rig.evict(4) == 2 and rig.pages_of(1, 2, 3, 4) == 2
    rig.cache.unlock(lock)
    assert rig.sizes() == (2, 0)


def root_can_be_locked(rig: Rig) -> None:
    rig.cache.unlock(rig.cache.lock(rig.match(1).last_device_node))
    rig.cache.unlock(None)
    assert rig.sizes() == (0, 0)


# --- eviction


def evicts_what_is_asked(rig: Rig) -> None:
    for each in range(1, 6):
        rig.add(each)
    assert rig.evict(2) == 2 and rig.sizes() == (3, 0)
    rig.accounted()


def evicts_no_more_than_there_is(rig: Rig) -> None:
    rig.add(1, 2)
    assert rig.evict(50) == 2 and rig.sizes() == (0, 0) and rig.evict(1) == 0
    rig.accounted()


def leaves_go_first(rig: Rig) -> None:
    rig.add(1, 2)
    rig.add(1, 3)
    assert rig.evict(2) == 2 and rig.pages_of(1, 2) == 1 and rig.sizes() == (1, 0)


def insert_after_an_eviction(rig: Rig) -> None:
    rig.add(1, 2)
    rig.evict(2)
    done, slots = rig.add(1, 2)
    assert done.prefix_len == 0 and rig.found(1, 2) == slots.tolist()
    rig.accounted()


def order_of(policy: str, first: tuple[int, ...]) -> Callable[[Rig], None]:
    """1, 2, 3 in this order; 1 twice more, then 2 is touched: which goes first under the policy."""

    def order(rig: Rig) -> None:
        rig.make(policy)
        for each in (1, 2, 3, 1, 1):
            rig.add(each, priority=each if policy == "priority" else 0)
        rig.cache.touch_prefix(rig.key(2))
        rig.evict(len(first))
        assert [each for each in (1, 2, 3) if not rig.pages_of(each)] == sorted(first)

    return order


def touched_stays_longer(rig: Rig) -> None:
    for each in (1, 2, 3):
        rig.add(each)
    rig.cache.touch_prefix(rig.key(1))
    rig.evict(1)
    assert rig.pages_of(1) == 1 and rig.pages_of(2) == 0


def lock_is_a_use(rig: Rig) -> None:
    for each in (1, 2):
        rig.add(each)
    rig.cache.unlock(rig.cache.lock(rig.match(1).last_device_node))
    rig.evict(1)
    assert rig.pages_of(1) == 1 and rig.pages_of(2) == 0


# --- requests


def checkpoint_of_a_new_prompt(rig: Rig) -> None:
    req = rig.request(rig.ids(1, 2, 3), 1)
    before = rig.rows.req_to_token[1, : 3 * rig.page].tolist()
    rig.cache.checkpoint(req, up_to=3 * rig.page)
    assert req.kv.cache_protected_len == 3 * rig.page and rig.sizes() == (0, 3)
    assert rig.found(1, 2, 3) == before == rig.rows.req_to_token[1, : 3 * rig.page].tolist()
    rig.end(req)
    assert rig.sizes() == (3, 0)
    rig.accounted()


def checkpoint_within_a_page(rig: Rig) -> None:
    req = rig.request(rig.ids(1, 2, more=rig.page - 1), 1)
    rig.cache.checkpoint(req, up_to=3 * rig.page - 1)
    assert req.kv.cache_protected_len == (2 * rig.page if rig.page > 1 else 2)
    rig.end(req)
    assert rig.sizes() == (2, 0)
    rig.accounted()


def checkpoints_of_chunks(rig: Rig) -> None:
    req = rig.request(rig.ids(1, 2, 3, 4), 1)
    for stop in (1, 3, 4):
        rig.cache.checkpoint(req, up_to=stop * rig.page)
        assert rig.sizes() == (0, stop)
    rig.end(req)
    assert rig.sizes() == (4, 0)
    rig.accounted()


def second_request_with_the_same_prompt(rig: Rig) -> None:
    first, second = rig.request(rig.ids(1, 2), 1), rig.request(rig.ids(1, 2), 2)
    rig.cache.checkpoint(first, up_to=2 * rig.page)
    rig.cache.checkpoint(second, up_to=2 * rig.page)
    same = rig.rows.req_to_token[1, : 2 * rig.page]
    assert rig.rows.req_to_token[2, : 2 * rig.page].tolist() == same.tolist() == rig.found(1, 2)
    rig.accounted()
    rig.end(first)
    assert rig.sizes() == (0, 2)
    rig.end(second)
    assert rig.sizes() == (2, 0)
    rig.accounted()


def request_behind_a_resident_prefix(rig: Rig) -> None:
    _, slots = rig.add(1, 2)
    req = rig.request(rig.ids(1, 2, 3), 1)
    assert req.kv.cache_protected_len == 2 * rig.page and rig.sizes() == (0, 2)
    rig.cache.checkpoint(req, up_to=3 * rig.page)
    assert rig.found(1, 2, 3)[: 2 * rig.page] == slots.tolist() and rig.sizes() == (0, 3)
    rig.end(req)
    rig.accounted()


def request_that_leaves_without_a_checkpoint(rig: Rig) -> None:
    rig.add(1)
    req = rig.request(rig.ids(1, 2), 1)
    rig.end(req)
    assert rig.sizes() == (1, 0)
    rig.accounted()


def requests_with_a_salt(rig: Rig) -> None:
    req = rig.request(rig.ids(1, 2), 1, cache_salt="a", extra_key="b")
    rig.cache.checkpoint(req, up_to=2 * rig.page)
    rig.end(req)
    assert rig.found(1, 2) == [] and len(rig.found(1, 2, cache_salt="a", extra_key="b")) == 2 * rig.page


def requests_of_one_prefix_are_neighbours(rig: Rig) -> None:
    rig.add(1, 2)
    rig.add(3, 4)
    nodes = [rig.match(*each).last_device_node for each in ((1, 2), (3, 4), (1, 2), (3, 4))]
    order = rig.cache.dfs_weight_order(nodes)
    assert sorted(order) == [0, 1, 2, 3] and abs(order.index(0) - order.index(2)) == 1


# --- the whole cache


def reset(rig: Rig) -> None:
    rig.add(1, 2)
    rig.add(1, 3, cache_salt="a")
    rig.cache.reset()
    rig.allocator.clear()
    assert rig.sizes() == (0, 0) and rig.found(1, 2) == []
    _, slots = rig.add(1, 2)
    assert rig.found(1, 2) == slots.tolist()
    rig.accounted()


def disabled(rig: Rig) -> None:
    rig.make(disable=True)
    done = rig.cache.insert(InsertParams(key=rig.key(1), value=torch.arange(rig.page)))
    assert done.prefix_len == 0 and rig.cache.total_size() == 0 and not rig.cache.supports_prefix_sharing()
    assert rig.match(1).device_prefix_len == 0 and rig.evict(1) == 0 and rig.cache.take_events() == []


def printed(rig: Rig) -> None:
    rig.add(1, 2)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        rig.cache.pretty_print()
    assert text.getvalue().strip()
    assert f"evictable_size={2 * rig.page}" in rig.cache.available_and_evictable_str()


# --- KV events


def stored(events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, BlockStored)]


def events_of_an_insert(rig: Rig) -> None:
    rig.make(events=True)
    rig.cache.take_events()
    rig.add(1, 2, more=rig.page - 1)
    (event,) = rig.cache.take_events()
    assert len(event.block_hashes) == 2 and event.parent_block_hash is None
    assert event.block_size == rig.page and event.token_ids == list(rig.ids(1, 2)) and event.medium == "GPU"
    assert rig.cache.take_events() == []
    rig.hashes += event.block_hashes


def events_continue_each_other(rig: Rig) -> None:
    rig.make(events=True)
    rig.add(1, 2)
    rig.add(1, 2, 3)
    rig.add(1, 4)
    hashes = [each for event in stored(rig.cache.take_events()) for each in event.block_hashes]
    rig.make(events=True)
    rig.add(1, 4)
    rig.add(1, 2, 3)
    again = stored(rig.cache.take_events())
    assert {each for event in again for each in event.block_hashes} == set(hashes) and len(set(hashes)) == 4
    parents = {event.parent_block_hash for event in again} - {None}
    assert parents <= set(hashes)
    rig.hashes += sorted(hashes)


def repeated_pages_have_hashes_of_their_own(rig: Rig) -> None:
    rig.make(events=True)
    rig.add(1, 1, 1)
    hashes = [each for event in stored(rig.cache.take_events()) for each in event.block_hashes]
    assert len(set(hashes)) == 3
    rig.hashes += hashes


def events_of_an_eviction(rig: Rig) -> None:
    rig.make(events=True)
    rig.add(1, 2)
    rig.add(3)
    rig.evict(3)
    events = rig.cache.take_events()
    gone = [each for event in events if isinstance(event, BlockRemoved) for each in event.block_hashes]
    assert sorted(gone) == sorted(each for event in stored(events) for each in event.block_hashes)
    rig.add(1, 2)
    assert sum(len(event.block_hashes) for event in stored(rig.cache.take_events())) == 2


def events_of_salts(rig: Rig) -> None:
    rig.make(events=True)
    for salt, extra in ((None, None), ("a", None), ("b", None), ("a", "k")):
        rig.add(1, 2, cache_salt=salt, extra_key=extra)
    found = stored(rig.cache.take_events())
    assert [event.cache_salt for event in found] == [None, "a", "b", "a"]
    assert len({tuple(event.block_hashes) for event in found[:3]}) == 3
    rig.hashes += [each for event in found for each in event.block_hashes]


def events_of_a_reset(rig: Rig) -> None:
    rig.make(events=True)
    rig.add(1)
    rig.cache.take_events()
    rig.cache.reset()
    assert [type(event) for event in rig.cache.take_events()] == [AllBlocksCleared]


def no_events_unless_wanted(rig: Rig) -> None:
    rig.add(1)
    assert rig.cache.take_events() == [] and not rig.cache.kv_events.enabled


# --- what radixkv can't


def ids_above_32_bits(rig: Rig) -> None:
    ids = array("q", [2**33 + at for at in range(rig.page)])
    slots = rig.allocator.alloc(rig.page)
    rig.cache.insert(InsertParams(key=RadixKey(ids), value=slots))
    assert rig.cache.match_prefix(MatchPrefixParams(key=RadixKey(ids))).device_prefix_len == rig.page


def bigram_keys(rig: Rig) -> None:
    ids = array("q", range(rig.page + 1))
    slots = rig.allocator.alloc(rig.page)
    rig.cache.insert(InsertParams(key=RadixKey(ids, is_bigram=True), value=slots))
    found = rig.cache.match_prefix(MatchPrefixParams(key=RadixKey(ids, is_bigram=True)))
    assert found.device_prefix_len == rig.page


def slots_scattered_over_pages(rig: Rig) -> None:
    slots = torch.arange(rig.page, 0, -1) * rig.page
    rig.cache.insert(InsertParams(key=rig.key(1), value=slots))
    assert rig.found(1) == slots.tolist()


SCENARIOS: dict[str, Callable[[Rig], None]] = {
    name: each
    for name, each in list(globals().items())
    if callable(each) and getattr(each, "__annotations__", {}).get("rig") == "Rig"
}
SCENARIOS |= {
    f"order_{policy}": order_of(policy, first)
    for policy, first in {
        "lru": (3,),
        "mru": (2,),
        "fifo": (1,),
        "filo": (3,),
        "lfu": (3,),
        "slru": (3,),
        "priority": (1,),
    }.items()
}


def main() -> dict[str, Any]:
    found: dict[str, dict[str, str | None]] = {}
    hashes: dict[str, dict[str, list[int]]] = {}
    for kind in CACHES:
        found[kind], hashes[kind] = {}, {}
        for name, scenario in SCENARIOS.items():
            for page in PAGES:
                rig, case = Rig(kind, page), f"{name}/{page}"
                try:
                    scenario(rig)
                    found[kind][case] = None
                except Exception:  # noqa: BLE001 any error of a case is its result
                    found[kind][case] = traceback.format_exc(limit=-2)
                hashes[kind][case] = rig.hashes
    return {"found": found, "hashes": hashes}


if __name__ == "__main__":
    print("FOUND", json.dumps(main()))
