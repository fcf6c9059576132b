"""Ask for what radixkv refuses inside vLLM, and print the error. Run with the Python of vLLM.

vllm_refusals.py WHAT: a model's layers (mamba, sinks, hybrid, none, narrow), or encoder, context, version, tails,
connector.
"classes" prints which scheduler there is without and with async scheduling.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

import vllm
from radixkv.engines.vllm.manager import RadixManager, Scheduler
from radixkv.errors import ConfigError
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
LAYERS: dict[str, list[Any]] = {
    "mamba": [MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))],
    "sinks": [SinkFullAttentionSpec(**SHAPE, sink_len=32)],
    "hybrid": [FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=64)],
    "none": [],
    "narrow": [SlidingWindowSpec(**SHAPE, sliding_window=64)],
    "tails": [FullAttentionSpec(**SHAPE)],
}


def ask(what: str) -> None:
    if what == "tails":
        os.environ["RADIXKV_TAILS"] = "2"
    if what in LAYERS:
        groups = [KVCacheGroupSpec([f"layer{at}"], each) for at, each in enumerate(LAYERS[what])]
        config = KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=groups)
        RadixManager(config, 2048, scheduler_block_size=32, hash_block_size=32)
        return
    if what == "connector":
        os.environ["RADIXKV_SERVED"] = "1"
    if what == "version":
        vllm.__version__ = "0.99.0"
    given: Any = SimpleNamespace(
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector="OffloadingConnector"),
        model_config=SimpleNamespace(is_encoder_decoder=what == "encoder"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1 + (what == "context")),
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )
    Scheduler(vllm_config=given)


def classes() -> list[str]:
    found = []
    for is_async in (False, True):
        config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
        found.append(type(Scheduler.__new__(Scheduler, vllm_config=config)).__name__)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "classes":
        print(*classes())
        raise SystemExit
    try:
        ask(sys.argv[1])
    except ConfigError as error:
        print(type(error).__name__, error)
