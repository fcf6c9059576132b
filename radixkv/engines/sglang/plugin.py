"""radixkv as the KV cache of SGLang 0.5.23: ``--radix-cache-backend radixkv``.

    python -m sglang.launch_server --model-path … --radix-cache-backend radixkv

SGLang finds it by its entry point ``sglang.srt.plugins`` if radixkv is installed beside it. ``RadixCache`` is SGLang's
prefix cache over a ``SglangCache``. ``RADIXKV_OFF=1`` leaves SGLang its own.

    RADIXKV_POLICY      eviction policy; default: SGLang's ``--radix-eviction-policy``, and learned in place of lru
    RADIXKV_KEYS        file of the engine's keys (``radixkv keys derive``): tenants come from salts (``engines.salt``)
    RADIXKV_ANONYMOUS   0 refuses requests without such a salt
    RADIXKV_MODEL       identity of model and tokenizer in namespaces; default: sglang
    RADIXKV_SOCKET, RADIXKV_EVENTS…    control channel and keyed KV events: ``engines.control.outlets``

SGLang publishes KV events itself (``--kv-events-config``), with its own hashes: ``events``. A request whose salt
is refused is served without the cache. Refused at the start, by name: another version of SGLang, EAGLE's bigram keys,
models with a sliding window or a state, pipeline and context parallel ranks, attention in data parallel ranks, the
configuration of an eviction policy.

**Tensor parallel ranks** have a tree each. Rank 0's clock and commands travel with the requests
(``engines.control.steps``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import sglang
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    default_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from radixkv.clock import monotonic
from radixkv.engines.control.outlets import Outlets
from radixkv.engines.control.steps import EngineSteps, Step, StepClock, SteppedCache, SteppedSalts
from radixkv.engines.sglang.cache import ROOT, Node, SglangCache, framed_extra_key
from radixkv.engines.sglang.events import Recorder
from radixkv.errors import ConfigError
from radixkv.index.changes import Journal
from radixkv.index.leases import Lease
from radixkv.signing import KeySet
from radixkv.storage.plan import BlockIds
from radixkv.tenancy.request_keys import labels_of
from radixkv.tenancy.salt import SaltReader

VERSIONS: Final = ("0.5.23",)
"""Versions of SGLang whose prefix cache this one can stand in for."""

_made: Final[list[RadixCache]] = []
"""The cache of this process, once it was made: with SGLang's own cache nothing of SGLang changes."""

_RECEIVER: Final = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"

_OUTLETS: Final = {"RADIXKV_SOCKET", "RADIXKV_EVENTS"}

_FREE_PAGES: Final = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)
"""Allocators that take pages. Those that extend them may keep books of slots."""

_INSTEAD: Final = "without it; RADIXKV_OFF=1 uses SGLang's own cache"


class RadixCache(BasePrefixCache):
    """SGLang's prefix cache over a SglangCache. ``params``: SGLang's own. Raises ConfigError."""

    kv_events: Recorder

    def __init__(
        self,
        params: CacheInitParams,
        policy: str | None = None,
        *,
        num_ranks: int = 1,
        outlets: Outlets | None = None,
    ) -> None:
        """Make the cache of one rank.

        - ``policy``: in place of SGLang's own setting.
        - ``num_ranks``: tensor parallel ranks, which decide alike.
        - ``outlets``: the control channel and the keyed events, on rank 0.
        """
        self.disable = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.sliding_window_size = params.sliding_window_size
        device = self.token_to_kv_pool_allocator.device
        self.device = torch.device(device if isinstance(device, (str, torch.device)) else "cpu")
        self._frees_pages = type(self.token_to_kv_pool_allocator) in _FREE_PAGES
        self._offsets = torch.arange(self.page_size, dtype=torch.int64, device=self.device)
        self._locks: dict[Node, list[Lease]] = {}
        self.kv_events = Recorder(
            self.page_size,
            lambda namespace: self.radixkv.origin(namespace),
            enabled=params.enable_kv_cache_events and not self.disable,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        clock = StepClock() if num_ranks > 1 else None
        self.steps, self._outlets = EngineSteps(clock), outlets
        salts, journal = _salts(self.steps), _journal(self.kv_events, outlets)
        self.radixkv = SglangCache(
            self.token_to_kv_pool_allocator.size // self.page_size + 1,
            self.page_size,
            model=os.environ.get("RADIXKV_MODEL", "sglang"),
            salts=salts,
            policy=policy or params.eviction_policy.lower(),
            make=partial(SteppedCache, steps=self.steps, clock=clock or monotonic, journal=journal),
        )
        self.steps.decisions = lambda: self.radixkv.decisions
        if outlets is not None:
            outlets.start(self.radixkv, salts, lambda: True)
        if params.enable_metrics:
            self.init_metrics_collector()

    # --- prefixes

    @property
    def root_node(self) -> Node:
        """Where a miss ends."""
        return ROOT

    def is_root(self, node: Node) -> bool:
        """Whether a match found nothing."""
        return node.match is None

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest resident prefix."""
        node = ROOT
        if not self.disable:
            key, cache = params.key, self.radixkv
            node = cache.match(cache.namespace(key.cache_salt, key.extra_key), key.raw_token_ids())
        return MatchResult(node.num_tokens, node, node, node)

    def touch_prefix(self, key: Any) -> None:
        """Note that a prefix waits to be used."""
        if not self.disable:
            self.radixkv.touch(self._namespace(key), key.raw_token_ids())

    def path_device_indices(self, node: Node) -> torch.Tensor:
        """Return the slots of a prefix, int64."""
        if node.block_ids is None:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return self._slots(node.block_ids)

    def insert(self, params: InsertParams) -> InsertResult:
        """Take the slots of a prefix. Those that the tree has others for stay the caller's."""
        if self.disable or params.key is None:
            return InsertResult(prefix_len=0, last_device_node=ROOT)
        key = params.key.page_aligned(self.page_size)
        ids = key.raw_token_ids()
        slots = torch.tensor(ids) if params.value is None else params.value  # as SGLang's own, for its tests
        pages = self._pages(slots[: len(key)])
        taken = self.radixkv.insert(
            self._namespace(key), ids, pages, lease=True, priority=params.priority or 0
        )
        if taken is None or taken.lease is None:
            return InsertResult(prefix_len=0, last_device_node=ROOT)
        taken.lease.release()  # a prompt that comes again is a use
        self._free(taken.evicted)
        return InsertResult(prefix_len=taken.num_resident_tokens, last_device_node=taken.node)

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        """Take the whole pages that a request computed, and have its row use the tree's. O(new tokens)."""
        kv, lock = req.kv, req.lock
        start, stop = kv.cache_protected_len, up_to // self.page_size * self.page_size
        if self.disable or stop <= start:
            return
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx, start:stop]
        after: Node = ROOT if lock is None else lock.node
        namespace = after.namespace
        if namespace is None:
            namespace = self.radixkv.namespace(req.cache_salt, req.extra_key)
        taken = self.radixkv.insert(
            namespace,
            req.full_untruncated_fill_ids[after.num_tokens : stop],
            self._pages(row),
            start,
            after=after,
            lease=True,
            priority=req.priority or 0,
            labels=labels_of(req.session_id, req.sampling_params.custom_params),
        )
        if taken is None:
            return
        self._free(taken.evicted)
        if len(taken.surplus):  # the tree has others: otherwise the row stays as it is
            self._free(taken.surplus)
            used = taken.node.block_ids
            assert used is not None
            self.req_to_token_pool.write(
                (kv.req_pool_idx, slice(start, stop)), self._slots(used[start // self.page_size :])
            )
        kv.cache_protected_len, kv.cache_inserted_len = stop, max(kv.cache_inserted_len, stop)
        self.unlock(lock)
        req.lock, req.last_node = TreeLock(taken.node, taken.lease), taken.node

    def dfs_weight_order(self, node_handles: Sequence[Node]) -> list[int]:
        """Return the positions of requests so that those of one prefix follow each other."""
        paths = [b"" if node.block_ids is None else node.block_ids.tobytes() for node in node_handles]
        return sorted(range(len(paths)), key=paths.__getitem__)

    # --- locks

    def inc_lock_ref(self, node: Node) -> IncLockRefResult:
        """Hold a prefix once more."""
        before = self.radixkv.evictable_tokens
        if not self.disable and (lease := self.radixkv.lock(node)) is not None:
            self._locks.setdefault(node, []).append(lease)
        return IncLockRefResult(delta=self.radixkv.evictable_tokens - before)

    def dec_lock_ref(self, node: Node, params: Any = None) -> DecLockRefResult:
        """Hold a prefix once less. ``params``: what ``lock`` gave, if that began it."""
        before = self.radixkv.evictable_tokens
        if isinstance(params, Lease):
            params.release()
        elif (leases := self._locks.get(node)) is not None:
            leases.pop().release()
            if not leases:
                del self._locks[node]
        self.take_back()
        return DecLockRefResult(delta=self.radixkv.evictable_tokens - before)

    def lock(self, node: Node) -> TreeLock:
        """Hold a prefix for one holder."""
        return TreeLock(node, None if self.disable else self.radixkv.lock(node))

    def unlock(self, lock: TreeLock | None) -> None:
        """End what ``lock`` began."""
        if lock is not None and lock.receipt is not None:
            lock.receipt.release()
            if self.radixkv.has_freed:
                self.take_back()

    # --- pages

    def evict(self, params: EvictParams) -> EvictResult:
        """Give back pages of prefixes that nobody holds."""
        if self.disable:
            return EvictResult()
        begin = time.perf_counter()
        pages = self.radixkv.reclaim(-(-params.num_tokens // self.page_size))
        self._free(pages)
        num_tokens = len(pages) * self.page_size
        self.update_eviction_metrics(num_tokens, begin)
        return EvictResult(num_tokens_evicted=num_tokens)

    def reset(self) -> None:
        """Forget everything. SGLang calls this while it is idle, and then takes all pages back by itself."""
        for leases in self._locks.values():
            for lease in leases:
                lease.release()
        self._locks.clear()
        self.radixkv.reset()
        self.kv_events.record_all_cleared()

    def evictable_size(self) -> int:
        """Tokens that can be evicted."""
        return self.radixkv.evictable_tokens

    def protected_size(self) -> int:
        """Tokens that are held."""
        return self.radixkv.protected_tokens

    def total_size(self) -> int:
        """Tokens of all resident pages."""
        return self.radixkv.resident_tokens

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def release_host_resources(self) -> None:
        """End the control channel and the keyed events. SGLang calls this at its end."""
        if self._outlets is not None:
            self._outlets.close()

    def supports_prefix_sharing(self) -> bool:
        """Whether requests find prefixes of each other."""
        return not self.disable

    def all_values_flatten(self) -> torch.Tensor:
        """Return the slots of all resident pages."""
        snapshot = self.radixkv.cache.snapshot()
        packed = b"".join(node.block_ids for tree in snapshot.trees for node in tree.nodes)
        return self._slots(np.frombuffer(packed, np.int32))

    def pretty_print(self) -> None:
        """Print the counts of the cache."""
        print(self.radixkv.cache.stats())

    # --- slots

    def _namespace(self, key: Any) -> Any:
        return self.radixkv.namespace(key.cache_salt, key.extra_key)

    def _slots(self, pages: BlockIds) -> torch.Tensor:
        found = torch.from_numpy(pages.astype("int64")).to(self.device)
        return found if self.page_size == 1 else (found[:, None] * self.page_size + self._offsets).reshape(-1)

    def _pages(self, slots: torch.Tensor) -> BlockIds:
        found = slots[:: self.page_size].cpu().numpy()
        return (found if self.page_size == 1 else found // self.page_size).astype(np.int32, copy=False)

    def _free(self, pages: BlockIds) -> None:
        if not len(pages):
            return
        if self._frees_pages:
            page_ids = torch.from_numpy(pages.astype("int64")).to(self.device)
            self.token_to_kv_pool_allocator.free_page_ids(page_ids)
        else:
            self.token_to_kv_pool_allocator.free_segment(self._slots(pages), start_pos=0)

    def take_back(self) -> None:
        """Give the allocator the pages that a purge, a limit, or the end of a purged request freed."""
        if self.radixkv.has_freed:
            self._free(self.radixkv.reclaim(0))


def register() -> None:
    """Register the back end ``radixkv``. SGLang calls this in each of its processes."""
    register_radix_cache_backend("radixkv", make)
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req.__init__", _frame_extra_key, HookType.AROUND
    )
    HookRegistry.register(f"{_RECEIVER}._broadcast_reqs_across_ranks", _send_step, HookType.AROUND)


def make(context: TreeCacheBuildContext) -> BasePrefixCache:
    """Make the cache for a server. Raises ConfigError for what radixkv can't serve."""
    if os.environ.get("RADIXKV_OFF") == "1":
        return default_radix_cache_factory(context)
    if sglang.__version__ not in VERSIONS:
        raise ConfigError(
            "sglang", sglang.__version__, f"{' or '.join(VERSIONS)}; RADIXKV_OFF=1 uses SGLang's own cache"
        )
    refused = {
        "EAGLE's bigram keys": context.params.is_eagle,
        "a sliding window": context.is_hybrid_swa or context.params.sliding_window_size is not None,
        "a model with a state": context.is_hybrid_ssm,
        "a hierarchical cache": context.enable_hierarchical_cache,
        "pipeline parallel ranks": context.params.pp_size > 1,
        "context parallel ranks": context.params.attn_cp_size > 1,
        "attention in data parallel ranks": context.tp_size > 1 and context.server_args.enable_dp_attention,
        "an eviction policy's configuration": bool(context.params.eviction_policy_config),
    }
    for name, is_there in refused.items():
        if is_there:
            raise ConfigError("radix_cache_backend", name, _INSTEAD)
    policy = os.environ.get("RADIXKV_POLICY")
    if policy is None and context.params.eviction_policy == "lru":  # SGLang's default
        policy = "learned"
    outlets = None
    if context.tp_rank == 0 and not _OUTLETS.isdisjoint(os.environ):
        outlets = Outlets(os.environ, context.params.page_size, rank=get_parallel().dp_rank or 0)
    _made[:] = [RadixCache(context.params, policy, num_ranks=context.tp_size, outlets=outlets)]
    return _made[0]


def _frame_extra_key(original: Any, request: Any, *args: Any, **named: Any) -> None:
    """Have a request's extra key say where the client's part ends and the adapter's id begins."""
    given = named.get("extra_key")
    original(request, *args, **named)
    if _made:
        request.extra_key = framed_extra_key(given, request.lora_id)


def _send_step(
    original: Any, receiver: Any, requests: list[Any] | None, local_requests: list[Any] | None = None
) -> list[Any]:
    """Have a step travel with the requests from rank 0 to all ranks, and apply it there before them."""
    found: list[Any]
    if not _made:
        found = original(receiver, requests, local_requests)
        return found
    steps = _made[0].steps
    if requests is not None:
        requests = [steps.begin(), *requests]
    found = original(receiver, requests, local_requests)
    for each in found:
        if isinstance(each, Step):
            steps.apply(each)
            _made[0].take_back()
    return [each for each in found if not isinstance(each, Step)]


def _journal(events: Recorder, outlets: Outlets | None) -> Journal | None:
    keyed = None if outlets is None else outlets.journal
    if events.enabled and keyed is not None:
        raise ConfigError("RADIXKV_EVENTS", os.environ["RADIXKV_EVENTS"], "none beside --kv-events-config")
    return events if events.enabled else keyed


def _salts(steps: EngineSteps) -> SaltReader | None:
    path = os.environ.get("RADIXKV_KEYS")
    if path is None:
        return None
    allows_anonymous = os.environ.get("RADIXKV_ANONYMOUS") != "0"
    return SteppedSalts(KeySet.load(path), steps, allows_anonymous=allows_anonymous)
