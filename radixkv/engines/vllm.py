"""radixkv as the KV cache of vLLM 0.32: ``--scheduler-cls radixkv.engines.vllm.Scheduler``.

    python -m vllm.entrypoints.openai.api_server --model … --scheduler-cls radixkv.engines.vllm.Scheduler \\
        --no-async-scheduling

With async scheduling name ``AsyncScheduler``. The two classes put a ``KVCacheManager`` over ``VllmCache`` in the place
of vLLM's own, and tell it when the output of a step has come. Everything else is vLLM's. ``RADIXKV_OFF=1`` leaves vLLM
as it is.

    RADIXKV_POLICY      eviction policy; default: learned
    RADIXKV_KEYS        file of the engine's keys (``radixkv keys derive``): tenants come from salts (``engines.salt``)
    RADIXKV_ANONYMOUS   0 refuses requests without such a salt
    RADIXKV_MODEL       identity of model and tokenizer in namespaces; default: vllm

A request whose salt is refused is served without the cache. Refused at the start, by name: another version of
vLLM, several groups of KV blocks, encoder-decoder models, KV connectors, context parallelism.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import vllm
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.request import RequestStatus

from radixkv.engines.salt import SaltReader
from radixkv.engines.vllm_cache import RequestFacts, VllmCache
from radixkv.errors import ConfigError
from radixkv.index.fences import Fence
from radixkv.signing import KeySet

VERSIONS: Final = ("0.32.",)
"""Versions of vLLM whose manager this one can stand in for."""

_KNOWN: Final = RequestFacts()
"""For requests of which the cache knows the facts already."""


class RadixManager(KVCacheManager):
    """vLLM's KVCacheManager over a VllmCache. Its arguments are vLLM's."""

    block_pool: Any

    def __init__(self, kv_cache_config: Any, max_model_len: int, **settings: Any) -> None:
        _require_one_group(kv_cache_config, settings)
        super().__init__(kv_cache_config=kv_cache_config, max_model_len=max_model_len, **settings)
        self.enable_caching = True
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.radixkv = VllmCache(
            kv_cache_config.num_blocks,
            spec.block_size,
            max_model_len,
            model=os.environ.get("RADIXKV_MODEL", "vllm"),
            salts=_salts(),
            policy=os.environ.get("RADIXKV_POLICY", "learned"),
        )
        self._vllm_blocks = self.block_pool.blocks
        self.block_pool = _FencedPool(self.block_pool)

    # --- requests

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
        waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        watermark = self.watermark_blocks if has_scheduled_reqs and waits else 0
        ids = self.radixkv.allocate(
            request.request_id,
            self._facts(request),
            request._all_token_ids,
            request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens,
            num_new_tokens,
            num_lookahead=num_lookahead_tokens,
            must_fit=full_sequence_must_fit,
            spare_blocks=reserved_blocks + watermark,
        )
        return None if ids is None else self._blocks(ids)

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

    def take_events(self) -> list[Any]:
        """Return no events: vLLM's publisher says nothing of this cache."""
        return []

    def take_new_block_ids(self) -> list[int]:
        """Return the blocks that must be zeroed before the step."""
        return self.radixkv.take_blocks_to_zero()

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Never called without a KV connector."""
        raise ConfigError("kv_connector", "…", "no KV connector beside radixkv.engines.vllm")

    def _facts(self, request: Any) -> RequestFacts:
        return _KNOWN if self.radixkv.knows(request.request_id) else _facts(request)

    def _blocks(self, ids: list[int]) -> KVCacheBlocks:
        blocks = self._vllm_blocks
        return KVCacheBlocks(([blocks[each] for each in ids],)) if ids else self.empty_kv_cache_blocks


class _FencedPool:
    """The block pool that vLLM's scheduler sees. What it gives back are fences."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def free_blocks(self, fences: Iterable[Fence]) -> None:
        """Lift the fences."""
        for fence in fences:
            fence.lift()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class _Steps:
    """Both schedulers' part: a number for each step, and its end when its output has come."""

    kv_cache_manager: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        stock = vllm_scheduler.KVCacheManager
        self._running_steps: deque[tuple[int, Any]] = deque()
        self._is_off = os.environ.get("RADIXKV_OFF") == "1"
        if not self._is_off:
            _require_known(*args, **named)
            vllm_scheduler.KVCacheManager = RadixManager
        try:
            super().__init__(*args, **named)
        finally:
            vllm_scheduler.KVCacheManager = stock

    def schedule(self, *args: Any, **named: Any) -> Any:
        """Schedule a step."""
        if self._is_off:
            return super().schedule(*args, **named)  # type: ignore[misc]
        step = self.kv_cache_manager.radixkv.begin_step()
        output = super().schedule(*args, **named)  # type: ignore[misc]
        self._running_steps.append((step, output))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Commit what the step computed, then let vLLM take its output: that may end requests."""
        is_known = any(output is scheduler_output for _, output in self._running_steps)
        while is_known:
            step, output = self._running_steps.popleft()
            self.kv_cache_manager.radixkv.end_step(step)
            is_known = output is not scheduler_output
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


class Scheduler(_Steps, VllmScheduler):
    """vLLM's scheduler with radixkv as its cache."""


class AsyncScheduler(_Steps, VllmAsyncScheduler):
    """vLLM's asynchronous scheduler with radixkv as its cache."""


def _facts(request: Any) -> RequestFacts:
    lora = request.lora_request
    material = tuple(
        (each.mm_position.offset, each.mm_position.length, str(each.identifier))
        for each in request.mm_features
    )
    return RequestFacts(
        request.cache_salt,
        None if lora is None else f"{lora.lora_name}:{lora.lora_int_id}",
        material,
        not request.skip_reading_prefix_cache,
        request.prompt_embeds is not None,
    )


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
    refused = {
        "an encoder-decoder model": vllm_config.model_config.is_encoder_decoder,
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "context parallelism": vllm_config.parallel_config.decode_context_parallel_size > 1,
    }
    for name, is_there in refused.items():
        if is_there:
            raise ConfigError("scheduler_cls", name, "without it; RADIXKV_OFF=1 uses vLLM's own cache")


def _require_one_group(kv_cache_config: Any, settings: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, (FullAttentionSpec, MLAAttentionSpec)):
        raise ConfigError("kv_cache_groups", kinds, "one group of full attention or MLA")
