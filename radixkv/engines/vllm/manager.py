"""radixkv as the KV cache of vLLM 0.32: ``--scheduler-cls radixkv.engines.vllm.Scheduler``.

    python -m vllm.entrypoints.openai.api_server --model … --scheduler-cls radixkv.engines.vllm.Scheduler

With async scheduling, vLLM's default but on CPUs, it becomes an ``AsyncScheduler``. The two classes put a
``KVCacheManager`` over ``VllmCache`` in the place of vLLM's own, and tell it when the output of a step has come.
Everything else is vLLM's. ``RADIXKV_OFF=1`` leaves vLLM as it is.

    RADIXKV_POLICY      eviction policy; default: learned
    RADIXKV_KEYS        file of the engine's keys (``radixkv keys derive``): tenants come from salts (``engines.salt``)
    RADIXKV_ANONYMOUS   0 refuses requests without such a salt
    RADIXKV_MODEL       identity of model and tokenizer in namespaces; default: vllm
    RADIXKV_TAILS       0: requests find whole blocks only, as in vLLM; default: also tokens inside a block
    RADIXKV_KAPPA       order of the waiting requests: ``queue``
    RADIXKV_SOCKET, RADIXKV_EVENTS…    control channel and KV events: ``engines.control.outlets``

A request whose salt is refused is served without the cache; with ``RADIXKV_ANONYMOUS=0`` it ends with an error, before
anything is computed. KV connectors work beside the cache, except below ``radixkv serve``. When weights change in
place, what the old ones computed is found no more, paused or not (``weights``).

Models: full attention, MLA and sliding windows, in one group of KV blocks (``--disable-hybrid-kv-cache-manager`` makes
one of full attention and windows). Refused at the start, by name: another version of vLLM, several groups, other kinds
of layers (Mamba, sinks, cross attention), encoder-decoder models, context parallelism.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, Final

import vllm
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import RequestStatus

from radixkv.config import Namespace
from radixkv.engines.control.outlets import Outlets
from radixkv.engines.vllm import plugin, queue, weights
from radixkv.engines.vllm.cache import VllmCache
from radixkv.engines.vllm.hashes import vllm_hashes
from radixkv.engines.vllm.views import FreeBlocks, ManagerView, ResidentBlocks
from radixkv.errors import ConfigError
from radixkv.index.announcements import Announcement
from radixkv.index.cache import PrefixCache
from radixkv.index.fences import Fence
from radixkv.signing import KeySet
from radixkv.tenancy.request_keys import RequestFacts, facts_of
from radixkv.tenancy.salt import SaltReader

VERSIONS: Final = ("0.32.",)
"""Versions of vLLM whose manager this one can stand in for.

In the sources of 0.33.0, of all that is called or overridden here, these differ: ``get_computed_blocks`` gets
``max_cache_hit_length``, ``grammar_compile_error_reqs`` maps to errors, and hashes may cover tokens behind their block.
It was not run, so it is refused.
"""

_SPECS: Final = {FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec}
"""Kinds of layers whose KV one block table holds."""

_KNOWN: Final = RequestFacts()
"""For requests of which the cache knows the facts already."""


class RadixManager(KVCacheManager):
    """vLLM's KVCacheManager over a VllmCache. Its arguments are vLLM's."""

    block_pool: Any

    def __init__(
        self, kv_cache_config: Any, max_model_len: int, vllm_config: Any = None, **settings: Any
    ) -> None:
        """``vllm_config``: of the engine; without it there is neither a control channel nor an event."""
        spec = _layers_spec(kv_cache_config, max_model_len)
        super().__init__(kv_cache_config=kv_cache_config, max_model_len=max_model_len, **settings)
        self.enable_caching = True
        self._salts, self._adapters = _salts(), dict[str, tuple[str, str]]()
        self.outlets = self._outlets(vllm_config, spec.block_size)
        self.radixkv = VllmCache(
            kv_cache_config.num_blocks,
            spec.block_size,
            max_model_len,
            model=os.environ.get("RADIXKV_MODEL", "vllm"),
            salts=self._salts,
            policy=os.environ.get("RADIXKV_POLICY", "learned"),
            scrub=plugin.is_loaded(),
            make=partial(PrefixCache, journal=self.outlets.journal),
            copies=_keeps_tails() and not self.use_eagle and spec.kv_quant_mode <= KVQuantMode.FP8_PER_TENSOR,
        )
        weights.watch(self.weights_change)
        self._vllm_blocks = self.block_pool.blocks
        self.block_pool = _FencedPool(self.block_pool, self.radixkv)
        self.coordinator: Any = _Coordinator(self.coordinator, self.radixkv, spec.block_size)

    # --- steps

    def take_stale(self) -> list[str]:
        """Run what operators asked for since the last step. Returns the requests whose tenant was purged."""
        self.outlets.run_pending()
        return self.radixkv.take_stale()

    def begin_step(self) -> int:
        """Begin the next step. Returns its number."""
        return self.radixkv.begin_step()

    def end_step(self, step: int) -> None:
        """Commit what a step computed, after its output has come."""
        self.radixkv.end_step(step)

    def weights_change(self) -> None:
        """Begin the next version of the weights."""
        self.radixkv.weights_change()

    # --- requests

    def announce(self, request: Any, ttl_s: float) -> tuple[str, Announcement | None, float]:
        """Announce a request that waits. Returns its tenant, its announcement, and its share that isn't resident."""
        return self.radixkv.announce(
            request.request_id, self._facts(request), request._all_token_ids, ttl_s=ttl_s
        )

    def get_computed_blocks(self, request: Any) -> tuple[KVCacheBlocks, int, int]:
        """Return the resident blocks of a request, and how many tokens it finds."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        ids, num_tokens = self.radixkv.lookup(
            request.request_id, self._facts(request), request._all_token_ids
        )
        return self._blocks(ids), num_tokens, 0

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: Sequence[int] = (),
    ) -> KVCacheBlocks | None:
        """Return the new blocks of a step; None if there are too few."""
        ids = request._all_token_ids
        if not (reserved_blocks or num_external_computed_tokens) and self.radixkv.goes_on(
            request.request_id, ids, request.num_computed_tokens + num_new_tokens, num_lookahead_tokens
        ):
            return self.empty_kv_cache_blocks
        waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        watermark = self.watermark_blocks if has_scheduled_reqs and waits else 0
        new = self.radixkv.allocate(
            request.request_id,
            self._facts(request),
            ids,
            request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens,
            num_new_tokens,
            num_lookahead=num_lookahead_tokens,
            num_rows=num_new_computed_tokens % self.radixkv.block_size,
            must_fit=full_sequence_must_fit,
            spare_blocks=watermark,
            reserved_blocks=reserved_blocks,
            num_loaded=num_external_computed_tokens,
            is_beside=delay_cache_blocks,
        )
        if new and skip_zeroing_group_ids:
            self.radixkv.leave_unzeroed(new)
        return None if new is None else self._blocks(new)

    def fits_its_tenant(self, request: Any, num_lookahead_tokens: int) -> bool | None:
        """Return whether a request can begin within its tenant's limit; None if it never can."""
        return self.radixkv.fits_its_tenant(
            request.request_id, self._facts(request), request._all_token_ids, num_lookahead_tokens
        )

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Commit tokens of finished steps."""
        self.radixkv.commit(request.request_id, request._all_token_ids, num_computed_tokens)

    def free(self, request: Any) -> None:
        """Release the blocks of a request."""
        self.radixkv.release(request.request_id)

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """Release the blocks of a request once ``block_pool.free_blocks`` gets what this returns."""
        fence = Fence()
        self.radixkv.release(request.request_id, fence)
        return [fence]

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return all blocks of a request."""
        return self._blocks(self.radixkv.blocks(request_id))

    def estimate_cached_tokens(self, request: Any) -> int:
        """Return how many tokens of a request others may find."""
        return self.radixkv.num_committed(request.request_id)

    def remove_skipped_blocks(self, *_: Any, **__: Any) -> None:
        """Do nothing: full attention skips no block."""

    # --- the whole cache

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold."""
        return self.radixkv.usage

    def reset_prefix_cache(self) -> bool:
        """Forget everything, unless a request holds blocks."""
        done = self.radixkv.reset()
        if done and self.log_stats:
            self.prefix_cache_stats.reset = True
        return done

    def new_step_starts(self) -> None:
        """Do nothing: full attention keeps nothing of a step."""

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return none: only Mamba has them."""
        return {}

    def take_events(self) -> list[Any]:
        """Return no events: vLLM's publisher says nothing of this cache."""
        return []

    def take_new_block_ids(self) -> list[int]:
        """Return the blocks that must be zeroed before the step."""
        return self.radixkv.take_blocks_to_zero()

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[Any]]:
        """Return the copies that run before the step, and their sources' holds, for ``block_pool.free_blocks``."""
        taken = self.radixkv.take_copies()
        if not taken:
            return [], []
        return [KVCacheBlockCopy(source, target) for source, target, _ in taken], [hold for *_, hold in taken]

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Let the blocks of a request be zeroed from a token on: a load left them unwritten."""
        self.radixkv.zero_from(request_id, start_token)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forget blocks of running requests, whose load failed, and what was computed behind them."""
        self.radixkv.lose(block_ids)

    def _facts(self, request: Any) -> RequestFacts:
        if self.radixkv.knows(request.request_id):
            return _KNOWN
        facts, lora = facts_of(request), request.lora_request
        if facts.adapter is not None:
            self._adapters[facts.adapter] = lora.lora_name, lora.lora_path
        return facts

    def _outlets(self, vllm_config: Any, block_size: int) -> Outlets:
        if vllm_config is None:
            return Outlets({}, block_size)
        events = vllm_config.kv_events_config
        is_wanted = events is not None and events.enable_kv_cache_events and events.publisher == "zmq"
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        return Outlets(
            os.environ,
            block_size,
            rank=vllm_config.parallel_config.data_parallel_index,
            events=events if is_wanted else None,
            hashes=lambda: vllm_hashes(algorithm, block_size, self._salt_of, self._adapters),
        )

    def _salt_of(self, namespace: Namespace) -> str | None:
        if self._salts is None:
            return namespace.salt or None
        return self._salts.cache_salt(namespace.tenant, namespace.salt)

    def _blocks(self, ids: list[int]) -> KVCacheBlocks:
        blocks = self._vllm_blocks
        return KVCacheBlocks(([blocks[each] for each in ids],)) if ids else self.empty_kv_cache_blocks


class _FencedPool:
    """The block pool that vLLM's scheduler sees. What it gives back are fences."""

    def __init__(self, pool: Any, cache: VllmCache) -> None:
        self._pool, self._cache = pool, cache
        self.free_block_queue = FreeBlocks(cache)
        self.cached_block_hash_to_block = ResidentBlocks(cache)

    def get_num_free_blocks(self) -> int:
        """Return how many blocks requests can get."""
        return self._cache.num_available

    def get_usage(self) -> float:
        """Return the share of blocks that requests hold."""
        return self._cache.usage

    def free_blocks(self, fences: Iterable[Fence]) -> None:
        """Lift the fences."""
        for fence in fences:
            fence.lift()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class _Coordinator:
    """The coordinator that vLLM's scheduler sees: it asks which blocks running requests will need."""

    def __init__(self, stock: Any, cache: VllmCache, block_size: int) -> None:
        self._stock, self._cache, self._size = stock, cache, block_size
        (manager,) = stock.single_type_managers
        self.single_type_managers = (ManagerView(manager, cache),)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *_: Any, **__: Any) -> int:
        """Return how many blocks a request lacks for ``num_tokens`` tokens."""
        return max(-(-num_tokens // self._size) - len(self._cache.blocks(request_id)), 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class _Steps:
    """Both schedulers' part: a number for each step, and its end when its output has come."""

    kv_cache_manager: Any
    requests: dict[str, Any]
    running: list[Any]
    num_lookahead_tokens: int
    prev_step_scheduled_req_ids: set[str]
    grammar_compile_error_reqs: set[str]
    failed_recving_kv_req_ids: set[str]
    recompute_kv_load_failures: bool
    has_requests: Callable[[], bool]
    _running_steps: deque[tuple[int, Any]]
    _is_off = True  # until __init__
    _preempt_request: Callable[..., None]

    def __init__(self, *args: Any, **named: Any) -> None:
        stock = vllm_scheduler.KVCacheManager
        self._running_steps = deque()
        self._is_off = os.environ.get("RADIXKV_OFF") == "1"
        config: Any = named["vllm_config"] if "vllm_config" in named else args[0]
        events = config.kv_events_config
        if not self._is_off:
            _require_known(*args, **named)
            vllm_scheduler.KVCacheManager = partial(RadixManager, vllm_config=copy(config))
            config.kv_events_config = None  # the outlets publish them
        try:
            super().__init__(*args, **named)
        finally:
            vllm_scheduler.KVCacheManager = stock
            config.kv_events_config = events
        if self._is_off:
            return
        if plugin.is_loaded():
            self.needs_kv_cache_zeroing = True
        manager = self.kv_cache_manager
        queue.take_place(self, os.environ)
        cache = manager.radixkv
        manager.outlets.start(
            cache, manager._salts, lambda: not self.has_requests(), weights=lambda: cache.weights
        )

    def add_request(self, request: Any) -> None:
        """Let a request wait. One without a valid salt, where that is required, ends with an error at the next step."""
        is_new = not self._is_off and request.request_id not in self.requests
        if is_new and self.kv_cache_manager.radixkv.refuses(request.cache_salt):
            # vLLM's own way to end a request that is never scheduled, as for a grammar that can't be compiled
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            request.structured_output_request = None
            self.grammar_compile_error_reqs.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Return whether a waiting request can begin. One whose tenant is at its limit waits, and others pass it."""
        is_ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        if not is_ready or self._is_off:
            return is_ready
        fits = self.kv_cache_manager.fits_its_tenant(request, self.num_lookahead_tokens)
        if fits is None:  # it ends with an error, as above
            self.grammar_compile_error_reqs.add(request.request_id)
        return bool(fits)

    def schedule(self, *args: Any, **named: Any) -> Any:
        """Schedule a step."""
        if self._is_off:
            return super().schedule(*args, **named)  # type: ignore[misc]
        manager = self.kv_cache_manager
        for request_id in manager.take_stale():
            self._begin_again(request_id)
        queue.refresh(self)
        step = manager.begin_step()
        output = super().schedule(*args, **named)  # type: ignore[misc]
        self._running_steps.append((step, output))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Commit what the step computed, then let vLLM take its output: that may end requests."""
        if self._is_off:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        loads = model_runner_output.kv_connector_output
        lost = self.kv_cache_manager.radixkv.lose(loads.invalid_block_ids) if self._has_failed(loads) else []
        is_known = any(output is scheduler_output for _, output in self._running_steps)
        while is_known:
            step, output = self._running_steps.popleft()
            self.kv_cache_manager.end_step(step)
            is_known = output is not scheduler_output
        if lost and self.recompute_kv_load_failures:
            for request_id in lost:
                self._begin_again(request_id)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _has_failed(self, loads: Any) -> bool:
        return loads is not None and bool(loads.invalid_block_ids)

    def shutdown(self) -> None:
        """End the control channel and the events too."""
        if not self._is_off:
            self.kv_cache_manager.outlets.close()
        super().shutdown()  # type: ignore[misc]

    def _begin_again(self, request_id: str) -> None:
        """Compute a request anew, as vLLM does at a reset of the cache: its tenant was purged, or its KV are wrong."""
        request = self.requests.get(request_id)
        if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            # A load still writes its blocks: vLLM frees them when it has ended.
            request.num_computed_tokens = 0
            self.failed_recving_kv_req_ids.add(request_id)
            return
        if request is None or request.status != RequestStatus.RUNNING:
            self.kv_cache_manager.radixkv.release(request_id)
            if request is not None and not request.is_finished():
                request.num_computed_tokens = 0
            return
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.prev_step_scheduled_req_ids.discard(request_id)


class Scheduler(_Steps, VllmScheduler):
    """vLLM's scheduler with radixkv as its cache: the asynchronous one where ``async_scheduling`` says so."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """Choose the class, as vLLM does between its own."""
        config: Any = named["vllm_config"] if "vllm_config" in named else args[0]
        is_async = cls is Scheduler and config.scheduler_config.async_scheduling
        return super().__new__(AsyncScheduler if is_async else cls)


class AsyncScheduler(Scheduler, VllmAsyncScheduler):
    """vLLM's asynchronous scheduler with radixkv as its cache."""


def _keeps_tails() -> bool:
    value = os.environ.get("RADIXKV_TAILS", "1")
    if value not in ("0", "1"):
        raise ConfigError("RADIXKV_TAILS", value, "0 or 1")
    return value == "1"


def _salts() -> SaltReader | None:
    path = os.environ.get("RADIXKV_KEYS")
    if path is None:
        return None
    return SaltReader(KeySet.load(path), allows_anonymous=os.environ.get("RADIXKV_ANONYMOUS") != "0")


def _require_known(vllm_config: Any, *_: Any, **__: Any) -> None:
    """Raise ConfigError for what radixkv can't serve."""
    if not vllm.__version__.startswith(VERSIONS):
        allowed = f"{' or '.join(f'{each}x' for each in VERSIONS)}; RADIXKV_OFF=1 uses vLLM's own cache"
        raise ConfigError("vllm", vllm.__version__, allowed)
    if "RADIXKV_SERVED" in os.environ and vllm_config.kv_transfer_config is not None:
        allowed = "none below `radixkv serve`, whose purges would not reach what a connector keeps"
        raise ConfigError("kv_connector", vllm_config.kv_transfer_config.kv_connector, allowed)
    refused = {
        "an encoder-decoder model": vllm_config.model_config.is_encoder_decoder,
        "context parallelism": vllm_config.parallel_config.decode_context_parallel_size > 1,
    }
    for name, is_there in refused.items():
        if is_there:
            raise ConfigError("scheduler_cls", name, "without it; RADIXKV_OFF=1 uses vLLM's own cache")


def _layers_spec(kv_cache_config: Any, max_model_len: int) -> Any:
    """Return the spec of the first layer. Raises ConfigError unless one block table holds the KV of all layers.

    Classes derived from the known ones are refused: they keep sinks, hot pages or hidden states too.
    """
    groups = [each.kv_cache_spec for each in kv_cache_config.kv_cache_groups]
    specs = [
        spec
        for each in groups
        for spec in (each.kv_cache_specs.values() if isinstance(each, UniformTypeKVCacheSpecs) else [each])
    ]
    if len(groups) != 1 or not {type(each) for each in specs} <= _SPECS:
        found = ", ".join(sorted({type(each).__name__ for each in specs})) or "none"
        allowed = "one group of full attention, MLA or sliding windows; RADIXKV_OFF=1 uses vLLM's own cache"
        raise ConfigError("kv_cache_groups", f"{len(groups)} ({found})", allowed)
    # vLLM frees the blocks that a window has passed, so it only checks that a window fits. Here they stay, for others.
    room = (kv_cache_config.num_blocks - 1) * specs[0].block_size
    if room < max_model_len and isinstance(specs[0], SlidingWindowSpec):
        raise ConfigError("max_model_len", max_model_len, f"at most the tokens of all blocks: {room}")
    return specs[0]
