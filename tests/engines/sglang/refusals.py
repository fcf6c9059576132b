"""What radixkv refuses to serve in SGLang. Prints the error for each case as one line of JSON, or null.

Run by ``test_refusals.py`` with the Python of an environment that has SGLang.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import sglang
from radixkv.engines.sglang.plugin import make
from radixkv.errors import ConfigError
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.registry import TreeCacheBuildContext

CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bigram keys": {"is_eagle": True},
    "sliding window": {"sliding_window_size": 128},
    "hybrid sliding window": {"is_hybrid_swa": True},
    "Mamba": {"is_hybrid_ssm": True},
    "hierarchical cache": {"enable_hierarchical_cache": True},
    "pipeline": {"pp_size": 2},
    "context parallel": {"attn_cp_size": 2},
    "data parallel attention": {"tp_size": 2, "enable_dp_attention": True},
    "policy configuration": {"eviction_policy_config": {"protected_threshold": 3}},
    "unknown policy": {"eviction_policy": "clock"},
    "unknown version": {"version": "0.5.24"},
}


def context_of(given: dict[str, Any]) -> TreeCacheBuildContext:
    """What SGLang gives the maker of a cache."""
    allocator = PagedTokenToKVPoolAllocator(
        256, 16, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
    )
    known = CacheInitParams.__dataclass_fields__
    arguments: Any = SimpleNamespace(enable_dp_attention=given.get("enable_dp_attention", False))
    return TreeCacheBuildContext(
        server_args=arguments,
        params=CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, 256, "cpu", False),
            token_to_kv_pool_allocator=allocator,
            page_size=16,
            **{name: each for name, each in given.items() if name in known},
        ),
        is_hybrid_swa=given.get("is_hybrid_swa", False),
        is_hybrid_ssm=given.get("is_hybrid_ssm", False),
        enable_hierarchical_cache=given.get("enable_hierarchical_cache", False),
        disable_radix_cache=False,
        tp_worker=None,
        model_config=None,
        tp_size=given.get("tp_size", 1),
        tp_rank=0,
        tp_group=None,
    )


def refused(given: dict[str, Any]) -> str | None:
    with patch.object(sglang, "__version__", given.get("version", sglang.__version__)):
        try:
            made = make(context_of(given))
        except ConfigError as error:
            return str(error)
    assert type(made).__module__ == "radixkv.engines.sglang.plugin"
    return None


if __name__ == "__main__":
    for name in ("RADIXKV_OFF", "RADIXKV_POLICY", "RADIXKV_KEYS", "RADIXKV_SOCKET", "RADIXKV_EVENTS"):
        os.environ.pop(name, None)
    print("FOUND", json.dumps({name: refused(given) for name, given in CASES.items()}))
