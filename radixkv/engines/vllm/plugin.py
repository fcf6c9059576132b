"""vLLM's general plug-in: workers zero the blocks that change tenant.

vLLM calls ``load`` in each of its processes: it is the package's entry point ``vllm.general_plugins``. vLLM 0.32 can
zero blocks before a step. By itself it does so only for models whose kernels read what they didn't write. ``load``
switches it on for engines whose scheduler is ``radixkv.engines.vllm``'s. Other engines stay as they are.
"""

from __future__ import annotations

import os
from typing import Any, Final

SCHEDULERS: Final = "radixkv."
"""How the import paths of schedulers begin for which blocks are zeroed."""

_loaded: list[str] = []


def load() -> None:
    """Let workers of radixkv's scheduler zero blocks. A second call changes nothing."""
    if _loaded:
        return
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.kv_cache_interface import KVCacheConfig

    stock = KVCacheConfig.needs_kv_cache_zeroing

    def needs_kv_cache_zeroing(self: Any) -> bool:
        """Whether blocks are zeroed before a step: vLLM needs it, or radixkv's scheduler is in use."""
        return bool(stock.fget(self)) or is_ours(get_current_vllm_config_or_none())

    KVCacheConfig.needs_kv_cache_zeroing = property(needs_kv_cache_zeroing)
    _loaded.append(SCHEDULERS)


def is_loaded() -> bool:
    """Whether vLLM has called ``load`` in this process, as it then has in its workers."""
    return bool(_loaded)


def is_ours(vllm_config: Any) -> bool:
    """Whether the scheduler of this configuration is one of radixkv, and not switched off (``RADIXKV_OFF=1``)."""
    if vllm_config is None or os.environ.get("RADIXKV_OFF") == "1":
        return False
    named = vllm_config.scheduler_config.scheduler_cls
    path = named if isinstance(named, str) else f"{getattr(named, '__module__', '')}."
    return path.startswith(SCHEDULERS)
